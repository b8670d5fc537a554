"""Durability: when finished steps are written, at once or later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..checks import check_count
from ..errors import DefinitionError

Choice = Literal["every_step", "every", "steps", "when", "manual", "at_exit", "off"]

#: Text forms of a durability, for messages. A predicate has no text form.
WRITTEN = "every_step, every=n, steps=name,name, manual, at_exit or off"


@dataclass(frozen=True, slots=True)
class Durability:
    """A durability mode. A crash repeats at most the finished steps that were not yet flushed.

    `every_step` repeats none and `every` at most `n` - 1. `steps` and `when` repeat the steps since the last chosen
    one, `manual` those since the last `ks.checkpoint()`, `at_exit` and `off` all steps since the run was last claimed.
    The methods of these names make a mode; they set `choice`, and with it `n`, `names` (of steps) or `predicate`.
    """

    choice: Choice = "every_step"
    n: int = 1
    names: tuple[str, ...] = ()
    predicate: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise DefinitionError(f"durability must be one of {', '.join(get_args(Choice))}, not {self.choice!r}")
        check_count(self.n, "the number of steps")
        if self.choice != "every" and self.n != 1:
            raise DefinitionError(f"durability {self.choice} takes no number of steps")
        if not all(isinstance(name, str) and name for name in self.names):
            raise DefinitionError(f"durability steps takes names of steps, not {self.names!r}")
        if bool(self.names) != (self.choice == "steps"):
            raise DefinitionError("durability steps needs the name of a step, and no other choice takes one")
        if callable(self.predicate) != (self.choice == "when"):
            raise DefinitionError("durability when needs a predicate to ask, and no other choice takes one")

    @classmethod
    def every_step(cls) -> Durability:
        """Write every finished step before its successor starts. This is the default."""
        return cls()

    @classmethod
    def every(cls, n: int) -> Durability:
        """Write finished steps together, n at a time; 0 is `off`."""
        return cls.off() if n == 0 and type(n) is int else cls("every", n)

    @classmethod
    def steps(cls, *names: str) -> Durability:
        """Write a finished step with one of these names at once, with all steps before it."""
        return cls("steps", names=names)

    @classmethod
    def when(cls, predicate: Callable[[Any], Any]) -> Durability:
        """Write a finished step, with all steps before it, when the predicate holds.

        The predicate receives the state after the step in a graph, and the step's name elsewhere.
        """
        return cls("when", predicate=predicate)

    @classmethod
    def manual(cls) -> Durability:
        """Write finished steps at every `ks.checkpoint()` of the code, and at the exit."""
        return cls("manual")

    @classmethod
    def at_exit(cls) -> Durability:
        """Write finished steps when the run parks, pauses or ends."""
        return cls("at_exit")

    @classmethod
    def off(cls) -> Durability:
        """Write only the start and the end of a run that succeeds without a long wait, and none of its steps."""
        return cls("off")

    @classmethod
    def named(cls, value: Durability | str | None) -> Durability:
        """Return the durability for its text in a workflow or a file: a name, `every=5`, `steps=pay,mail`."""
        if value is None:
            return cls()
        if isinstance(value, Durability):
            return value
        name, is_more, rest = value.partition("=") if isinstance(value, str) else ("", "", "")
        if not is_more and name in ("every_step", "manual", "at_exit", "off"):
            return cls(name)  # type: ignore[arg-type]
        if name == "every" and rest.isascii() and rest.isdecimal():
            return cls.every(int(rest))
        names = tuple(one.strip() for one in rest.split(","))
        if name == "steps" and all(names):
            return cls.steps(*names)
        raise DefinitionError(f"durability must be {WRITTEN}, not {value!r}")

    def __str__(self) -> str:
        """Return the text that `named` reads, or the text of the predicate."""
        if self.choice == "every":
            return f"every={self.n}"
        if self.choice == "steps":
            return f"steps={','.join(self.names)}"
        if self.choice != "when":
            return self.choice
        from .when import described  # noqa: PLC0415 - loaded only for a predicate

        return f"when={described(self.predicate)}"

    def flushes(self, unflushed: int, step: str = "", state: Any = None) -> bool:
        """Whether to flush now, with `unflushed` finished steps waiting, including the newest.

        `step` is the name of the newest step. `state` is a graph's state after it, which a predicate receives.
        """
        if self.choice in ("every_step", "every"):
            return unflushed >= self.n
        if self.choice == "steps":
            return step in self.names
        return self.predicate is not None and bool(self.predicate(step if state is None else state))
