"""Hooks: functions of the user's that are called around a step or a run, and can break neither."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..errors import DefinitionError
from ..policies.check import check_number

Moment = Literal["before", "after", "error", "cancel"]

#: A hook that takes longer is reported and no longer waited for.
HOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Occasion:
    """What a hook is told: the moment, of which run and step (empty for the run itself), and what came of it.

    The arguments are a copy, so that a hook cannot change what the step is given.
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
    """Functions, async or plain, that are called before, after, at an error and at a cancel of a step or a run.

    Whatever they raise is reported and ignored; so is one that takes longer than `seconds`.
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
                object.__setattr__(self, "seconds", check_number(value, "the seconds of a hook", 0.001))
            elif value is not None and not callable(value):
                raise DefinitionError(f"the hook {one.name}= is a function of one ks.Occasion, not {value!r}")


def checked_hooks(value: Any, where: str) -> tuple[Hooks, ...]:
    """The hooks as they may be given: one set of them, or none."""
    if value is None:
        return ()
    if not isinstance(value, Hooks):
        raise DefinitionError(f"{where} takes a ks.Hooks(...), not {value!r}")
    return (value,)
