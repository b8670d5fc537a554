"""Hooks: user functions called around a step or a run, whose failures affect neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..checks import check_seconds
from ..errors import DefinitionError

Moment = Literal["before", "after", "error", "cancel"]

#: Default time in seconds before a slow hook is logged and abandoned.
HOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Occasion:
    """The argument of a hook: the moment, its run and step (empty for the run itself), and the outcome.

    The arguments are copies, so that a hook cannot change the arguments of the step.
    """

    moment: Moment
    run: str
    workflow: str
    step: str = ""
    attempt: int = 0
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    result: Any = None
    error: BaseException | None = None


Hook = Callable[[Occasion], Any]


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions, async or plain, called around an attempt of a step, or around a run.

    `before` is called first, then one of `after` (it ended well), `error` (it failed) and `cancel`. An error of a hook
    is logged and ignored, and so is a hook that takes longer than `seconds`.
    """

    before: Hook | None = None
    after: Hook | None = None
    error: Hook | None = None
    cancel: Hook | None = None
    seconds: float = HOOK_SECONDS

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "seconds":
                object.__setattr__(self, "seconds", check_seconds(value, "the seconds of a hook", 0.001))
            elif value is not None and not callable(value):
                raise DefinitionError(f"the hook {one.name}= is a function of one ks.Occasion, not {value!r}")


def checked_hooks(value: Any, where: str) -> tuple[Hooks, ...]:
    """Return the hooks of an option: one `Hooks` or none."""
    if value is None:
        return ()
    if not isinstance(value, Hooks):
        raise DefinitionError(f"{where} takes a ks.Hooks(...), not {value!r}")
    return (value,)
