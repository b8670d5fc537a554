"""When finished steps are made durable: at once, or later, by a choice that has a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import DefinitionError
from .check import check_count
from .when import described

Choice = Literal["every_step", "every", "steps", "when", "manual", "at_exit", "off"]

#: How a choice may be written as text; what depends on a predicate cannot be.
WRITTEN = "every_step, every=n, steps=name,name, manual, at_exit or off"


@dataclass(frozen=True, slots=True)
class Durability:
    """A named choice. A crash repeats at most the finished steps that were not yet flushed.

    `every_step` repeats none, `every` at most `n` - 1 of them, `steps` and `when` those since the last one that was
    chosen, `manual` those since the last `ks.checkpoint()`, and `at_exit` and `off` all since the run was last claimed.
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
        """Every finished step is durable before its successor starts: the default."""
        return cls()

    @classmethod
    def every(cls, n: int) -> Durability:
        """Finished steps become durable together, n at a time; 0 is `off`."""
        return cls.off() if n == 0 and type(n) is int else cls("every", n)

    @classmethod
    def steps(cls, *names: str) -> Durability:
        """A finished step of one of these names becomes durable at once, with all before it."""
        return cls("steps", names=names)

    @classmethod
    def when(cls, predicate: Callable[[Any], Any]) -> Durability:
        """A finished step becomes durable, with all before it, when the predicate holds.

        It is asked about the state after the step in a graph, and elsewhere about the step's name.
        """
        return cls("when", predicate=predicate)

    @classmethod
    def manual(cls) -> Durability:
        """Finished steps become durable where the code says so with `ks.checkpoint()`, and at the exit."""
        return cls("manual")

    @classmethod
    def at_exit(cls) -> Durability:
        """Finished steps become durable when the run parks, pauses or ends."""
        return cls("at_exit")

    @classmethod
    def off(cls) -> Durability:
        """A run that succeeds without having waited for long leaves its beginning and its end, and no step."""
        return cls("off")

    @classmethod
    def named(cls, value: Durability | str | None) -> Durability:
        """A durability as it may be written at a workflow, or in a file: a name, `every=5`, `steps=pay,mail`."""
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
        """As it is written, so that `named` reads it again; a predicate as its text."""
        if self.choice == "every":
            return f"every={self.n}"
        if self.choice == "steps":
            return f"steps={','.join(self.names)}"
        return f"when={described(self.predicate)}" if self.choice == "when" else self.choice

    def flushes(self, unflushed: int, step: str = "", state: Any = None) -> bool:
        """Whether to flush now that so many finished steps, the newest included, wait for it.

        `step` is the newest one's name; `state` what a graph has after it, which a predicate is asked about then.
        """
        if self.choice in ("every_step", "every"):
            return unflushed >= self.n
        if self.choice == "steps":
            return step in self.names
        return self.predicate is not None and bool(self.predicate(step if state is None else state))
