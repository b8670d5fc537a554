"""The command `rekey`: makes older encryption keys unnecessary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import errors
from .settings import Settings, command

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..stores.encrypted import Rekeyed


@command("rekey")
def rekey(settings: Settings) -> int:
    """Encrypt the data keys of all runs with the current key: the first one in KEEPSTEP_KEYS.

    The values themselves do not change, and workers go on meanwhile. After an interruption, run it again. Exit code 6
    if there are damaged runs, or runs whose key is not in KEEPSTEP_KEYS.
    """
    from ..records.keys import VARIABLE, Keys

    keys = Keys.if_in_env()
    if keys is None:
        raise errors.Refused(f"{VARIABLE} holds no keys", f"{VARIABLE}=new=BASE64,old=BASE64 keepstep rekey")

    async def change(engine: Engine) -> Rekeyed:
        return await engine.rekey()

    done = settings.talk(change)
    counts = ("runs", "changed", "plain", "left", "damaged")
    value = {"current": keys.current} | {name: getattr(done, name) for name in counts}
    settings.answer(value, lambda: _text(done, keys.current))
    return errors.STORE if done.left or done.damaged else errors.OK


def _text(done: Rekeyed, current: str) -> str:
    from . import formatting

    of = f"of {formatting.count(done.runs, 'run')}"
    lines = [f"{formatting.count(done.changed, 'data key')} {of} encrypted again, with {current!r}"]
    if done.plain:
        lines.append(f"{formatting.count(done.plain, 'run')} in plain text, unchanged")
    lines += [
        f"{formatting.count(number, 'run')} encrypted with {name!r}, a key that KEEPSTEP_KEYS lacks "
        "or has with another value: unchanged"
        for name, number in done.left.items()
    ]
    if done.damaged:
        damaged = formatting.count(done.damaged, "run")
        lines.append(f"{damaged} damaged, unchanged: keep the older keys, and see keepstep repair")
    if not (done.left or done.damaged):
        lines.append("older keys are no longer needed, unless a process still starts runs with one")
    return "\n".join(lines)
