"""The body of a step in a crash test: it reports the moments inside it, in whatever process it runs."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Protocol

from .crash_points import Stepwise


class Watcher(Protocol):
    """The process that a body runs in, as the body sees it."""

    def begins(self, step: Any) -> Any:
        """Note that a body begins, and return its scope."""

    def ends(self, scope: Any) -> None:
        """Note that a body has ended."""

    def inside(self, scope: Any, what: str, where: str, line: str = "") -> None:
        """Reach a moment inside a body, numbered among those of its kind: `{n}` in `where`."""


def watched(step: Any, by: Watcher) -> Any:
    """Return the step with a body that reports the moments inside it."""
    made = copy.copy(step)
    inner = step.body

    def awaits(scope: Any, line: str) -> None:
        by.inside(scope, "await", "at its await {n}", line)

    async def body(*args: Any, **kwargs: Any) -> Any:
        scope = by.begins(step)
        try:
            value = await Stepwise(inner(*args, **kwargs), partial(awaits, scope))
        finally:
            by.ends(scope)
        by.inside(scope, "end", _AT_END)
        return value

    def plain_body(*args: Any, **kwargs: Any) -> Any:
        scope = by.begins(step)
        try:
            value = inner(*args, **kwargs)
        finally:
            by.ends(scope)
        by.inside(scope, "end", _AT_END)
        return value

    made.body = body if step.is_async else plain_body
    return made


_AT_END = "after its body, before its result is recorded"


def in_braces(text: str) -> str:
    """Return text that `str.format` leaves as it is."""
    return text.replace("{", "{{").replace("}", "}}")


def about(step: Any) -> dict[str, bool]:
    """Return what the judge has to know of a step whose body begins."""
    return {"once": step.leaves_doubt, "verified": step.verify is not None}
