"""The command `rekey`: after it, older encryption keys are no longer needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import exits
from .frame import Settings, command

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..stores.sealed import Rekeyed


@command("rekey")
def rekey(settings: Settings) -> int:
    """Encrypt the data keys of all runs with the current key: the first one in KEEPSTEP_KEYS.

    The values themselves stay as they are, and workers go on meanwhile. Stopped half-way, it is begun again. Exit code
    6 if there are runs whose key is not in KEEPSTEP_KEYS, or that are damaged.
    """
    from ..stores.keys import VARIABLE, Keys

    keys = Keys.if_in_env()
    if keys is None:
        raise exits.Refused(f"there are no keys in {VARIABLE}", f"{VARIABLE}=new=BASE64,old=BASE64 keepstep rekey")

    async def change(engine: Engine) -> Rekeyed:
        return await engine.rekey()

    done = settings.talk(change)
    counts = ("runs", "changed", "plain", "left", "damaged")
    value = {"current": keys.current} | {name: getattr(done, name) for name in counts}
    settings.answer(value, lambda: _told(done, keys.current))
    return exits.STORE if done.left or done.damaged else exits.OK


def _told(done: Rekeyed, current: str) -> str:
    from . import words

    of = f"of {words.count(done.runs, 'run')}"
    lines = [f"{words.count(done.changed, 'data key')} {of} encrypted anew, with {current!r}"]
    if done.plain:
        lines.append(f"{words.count(done.plain, 'run')} in plain text, left so")
    lines += [
        f"{words.count(number, 'run')} encrypted with {name!r}, which is not here, or is another there: left so"
        for name, number in done.left.items()
    ]
    if done.damaged:
        damaged = words.count(done.damaged, "run")
        lines.append(f"{damaged} damaged, left so: keep the older keys, and see keepstep repair")
    if not (done.left or done.damaged):
        lines.append("older keys are no longer needed, unless a process still begins runs with one")
    return "\n".join(lines)
