"""Several observers as one, each kept from disturbing the others and the run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import DefinitionError
from ..model import Event
from ..ports import Observer

_log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class FunctionObserver:
    """Tells a plain function of every event."""

    function: Callable[[Event], Any]

    def observe(self, event: Event) -> None:
        self.function(event)


class Observers:
    """Tells every observer of every event, in order. One that raises is reported once, and told of later events too."""

    __slots__ = ("_members", "_reported")

    def __init__(self, members: Iterable[Observer] = ()) -> None:
        self._members = tuple(members)
        self._reported: set[int] = set()
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
            # A cancellation or a sys.exit() of an observer is its own affair; passed on, it would end the worker.
            except BaseException:  # noqa: BLE001 - whatever it raises, the run must not notice
                self._report(position, member, event)

    def _report(self, position: int, member: Observer, event: Event) -> None:
        if position not in self._reported:
            self._reported.add(position)
            _log.warning(
                "the observer %s failed on %s of run %s; later failures of it are not reported",
                type(member).__qualname__,
                event.name,
                event.run,
                exc_info=True,
            )


def _check(member: object) -> None:
    if isinstance(member, type) or not isinstance(member, Observer):
        raise DefinitionError(f"an observer must be an object with an observe(event) method, not {member!r}")
    told = member.function if isinstance(member, FunctionObserver) else member.observe
    if inspect.iscoroutinefunction(told):
        raise DefinitionError(f"the observer {member!r} is async; an observer must return at once")
