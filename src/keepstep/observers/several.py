"""Several observers as one, isolated from each other and from the run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DefinitionError
from ..model import Event
from ..ports import Observer, SaveObserver

_log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class FunctionObserver:
    """Call a plain function with every event."""

    function: Callable[[Event], Any]

    def observe(self, event: Event) -> None:
        self.function(event)


class Observers:
    """Pass every event to every observer, in order. A failing observer is logged once and still receives events."""

    __slots__ = ("_members", "_reported", "_saves")

    def __init__(self, members: Iterable[Observer] = ()) -> None:
        self._members = tuple(members)
        self._reported: set[int] = set()
        self._saves = [(place, one) for place, one in enumerate(self._members) if isinstance(one, SaveObserver)]
        for member in self._members:
            _check(member)

    def __bool__(self) -> bool:
        return bool(self._members)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._members)

    def observe(self, event: Event) -> None:
        for position, member in enumerate(self._members):
            try:
                member.observe(event)
            except KeyboardInterrupt:
                raise
            # A cancellation or sys.exit() raised by an observer must not end the worker.
            except BaseException:  # noqa: BLE001 - no error of an observer may affect the run
                self._report(position, f"{event.name} of run {event.run}")

    @property
    def sees_saves(self) -> bool:
        """Whether an observer learns of commits."""
        return bool(self._saves)

    def observe_save(self, seconds: float, sizes: Sequence[int]) -> None:
        for position, member in self._saves:
            try:
                member.observe_save(seconds, sizes)
            except KeyboardInterrupt:
                raise
            except BaseException:  # noqa: BLE001 - no error of an observer may affect the journal
                self._report(position, "a commit")

    def _report(self, position: int, what: str) -> None:
        if position not in self._reported:
            self._reported.add(position)
            _log.warning(
                "the observer %s failed on %s; later failures of it are not reported",
                type(self._members[position]).__qualname__,
                what,
                exc_info=True,
            )


def _check(member: object) -> None:
    if isinstance(member, type) or not isinstance(member, Observer):
        raise DefinitionError(f"an observer must be an object with an observe(event) method, not {member!r}")
    function = member.function if isinstance(member, FunctionObserver) else member.observe
    if inspect.iscoroutinefunction(function):
        raise DefinitionError(f"the observer {member!r} is async; it must be a plain function that returns at once")
