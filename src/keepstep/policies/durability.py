"""When finished steps are made durable: at once, or later, by a choice that has a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import DefinitionError
from .check import check_count

Choice = Literal["every_step", "every", "at_exit"]


@dataclass(frozen=True, slots=True)
class Durability:
    """A named choice. A crash repeats at most the finished steps that were not yet flushed.

    `every_step` repeats none, `every` at most `n` - 1 of them, and `at_exit` all since the run was last claimed.
    """

    choice: Choice = "every_step"
    n: int = 1

    def __post_init__(self) -> None:
        if self.choice not in get_args(Choice):
            raise DefinitionError(f"durability must be one of {', '.join(get_args(Choice))}, not {self.choice!r}")
        check_count(self.n, "the number of steps")
        if self.choice != "every" and self.n != 1:
            raise DefinitionError(f"durability {self.choice} takes no number of steps")

    @classmethod
    def every_step(cls) -> Durability:
        """Every finished step is durable before its successor starts: the default."""
        return cls()

    @classmethod
    def every(cls, n: int) -> Durability:
        """Finished steps become durable together, n at a time."""
        return cls("every", n)

    @classmethod
    def at_exit(cls) -> Durability:
        """Finished steps become durable when the run parks, pauses or ends."""
        return cls("at_exit")

    @classmethod
    def named(cls, value: Durability | str | None) -> Durability:
        """A durability as it may be written at a workflow: `every_step`, `every=5` or `at_exit`."""
        if value is None:
            return cls()
        if isinstance(value, Durability):
            return value
        if value == "every_step":
            return cls.every_step()
        if value == "at_exit":
            return cls.at_exit()
        number = value.removeprefix("every=") if isinstance(value, str) else ""
        if number == value or not (number.isascii() and number.isdecimal()):
            raise DefinitionError(f"durability must be every_step, every=n or at_exit, not {value!r}")
        return cls.every(int(number))

    def flushes(self, unflushed: int) -> bool:
        """Whether to flush now that so many finished steps, the newest included, wait for it."""
        return self.choice != "at_exit" and unflushed >= self.n
