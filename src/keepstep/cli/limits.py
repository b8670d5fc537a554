"""Options and texts that the commands about queues and services share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..model import GateChange


class _Limit(click.ParamType[Any]):
    """A whole number, or `none` for no limit."""

    name = "limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value != "none" and isinstance(value, str) and not value.isdecimal():
            self.fail(f"{value!r} is neither a whole number nor none", param, ctx)
        return int(value) if isinstance(value, str) and value != "none" else value


class _RateLimit(click.ParamType[Any]):
    """A rate such as `100/60`, `100/60/10` with a burst, or `none`."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from ..errors import DefinitionError
        from ..policies.rate import Rate

        if value == "none" or not isinstance(value, str):
            return value
        try:
            return Rate.written(value)
        except DefinitionError as error:
            self.fail(str(error), param, ctx)


#: Types of options: a whole number or none, and a rate or none.
LIMIT, RATE = _Limit(), _RateLimit()


def unknown_gate(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the note about a queue or a service that may be mistyped."""
    others = sorted(set(known) - {name})
    there = f"known: {', '.join(others)}" if others else f"no {kind} is known"
    return f"note: no code declares {kind} {name!r}, and no run waits for it; {there}"


def log_table(log: Sequence[GateChange], text: Callable[[dict[str, Any] | None], str]) -> list[str]:
    """Return the last changes as the lines of a table, after an empty line; nothing if there are none."""
    from . import formatting

    if not log:
        return []
    rows = [(formatting.local(one.at), one.act, text(one.limits), one.actor, one.reason) for one in log]
    return ["", formatting.table(("WHEN", "ACT", "LIMITS", "WHO", "WHY"), rows)]
