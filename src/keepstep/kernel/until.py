"""A durable wait until a check holds: a step that is performed again and again, and records only its last result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..errors import DefinitionError, TimedOut
from ..ports import CURRENT
from ..workflows.call import Call
from ..workflows.definition import Step
from .call_states import NotYet
from .calls import StepCall, Task, current_branch
from .hooks import within
from .waits import MISSING, interval_seconds, timeout, timeout_seconds

#: Default time in seconds between two checks.
EVERY = 10.0


class CheckCall(StepCall[Any]):
    """A call of a step whose result counts only if it is true. Until then the step is performed again."""

    __slots__ = ("every",)

    every: float

    def encode(self, value: Any) -> bytes:
        data = super().encode(value)
        if not value:
            raise NotYet(self.every)
        return data


def wait_until(
    check: Callable[..., Any],
    *args: Any,
    every: float | timedelta = EVERY,
    timeout: float | timedelta | None = None,
    default: Any = MISSING,
) -> Call[Any]:
    """Perform a step or function with these arguments until its result is true, and return that result.

    It is performed at once, and again `every` seconds after each result that is not true. A long time between two
    checks parks the run. Only the last result is recorded. After the timeout it raises `TimedOut`, or returns `default`
    if given.
    """
    branch = current_branch("wait_until")
    step = _as_step(check)
    seconds, limit = interval_seconds(every), timeout_seconds(timeout)
    return Task(branch, _until(step, args, seconds, limit, default))


async def _until(step: Step[..., Any], args: tuple[Any, ...], every: float, limit: float | None, default: Any) -> Any:
    def call() -> CheckCall:
        made = CheckCall(current_branch("wait_until"), step, args, {})
        made.every = every
        return made

    if limit is None:
        return await call()
    block = timeout(limit)
    try:
        async with block:
            return await call()
    except TimedOut as late:
        if not block.expired:
            raise
        if default is not MISSING:
            return default
        late.args = (f"{step.name} was not true within {limit:g} s",)
        raise


def _as_step(check: Any) -> Step[..., Any]:
    """Return the check as a step; a plain function runs in a thread, and may return something to await."""
    if isinstance(check, Step):
        if check.at_most_once:
            raise DefinitionError(f"step {check.name!r} is at_most_once, so ks.wait_until cannot perform it repeatedly")
        return check
    if not callable(check):
        raise DefinitionError(f"ks.wait_until takes a step or a function to check, got {check!r}")
    function = check.func if isinstance(check, functools.partial) else check
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    if inspect.iscoroutinefunction(check):
        return Step(check, name=name)

    async def body(*args: Any) -> Any:
        return await within(CURRENT.get().run.host, None, check, *args)

    return Step(functools.wraps(check)(body), name=name)
