"""Scheduling of suspects, runs that may have killed their workers: each begins alone, and in turn with other runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import RecoverAlone

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from ..model import Run
    from .process import Process

#: Seconds before and after the start of a suspect in which nothing else starts, so that a crash has one cause.
ALONE_SECONDS = 5.0
#: Shortest wait in seconds of a suspect for its turn, so that another worker may claim it.
TURN_SECONDS = 0.5


class Suspects:
    """The suspects of one worker. At most one that has made no progress yet is driven at a time.

    A crash counts for every run that its worker executes. A suspect is one crash away from being set aside, so two of
    them never run together. Other runs only keep a distance of `ALONE_SECONDS`: a run that has lived longer is hardly
    the cause of a crash, and its own count is low. After a turn the others get as much time as it took, so neither side
    can starve the other.
    """

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        #: The suspect that is driven, while it has made no progress.
        self.current: str | None = None
        self._began_at = 0.0
        self._waiting: dict[str, None] = {}  # in order of arrival
        self._turn_at: float | None = None

    def is_suspect(self, run: Run) -> bool:
        """Whether one more crash would set the run aside."""
        return isinstance(self._engine.recovery_limit.decide(run.recoveries), RecoverAlone)

    def may_begin_others(self) -> bool:
        """Whether other runs may begin now: no suspect has just begun, and none is about to."""
        now = self._engine.loop.time()
        if self.current is not None:
            return now - self._began_at >= ALONE_SECONDS
        return self._turn_at is None or now < self._turn_at

    def may_begin(self) -> bool:
        """Whether a suspect may begin now: no other is being driven, and nothing else has just begun."""
        return self.current is None and not any(map(self._has_just_begun, self._engine.live.values()))

    def _has_just_begun(self, context: RunDriver) -> bool:
        is_cleared = self.is_suspect(context.run) and not context.isolated
        return not is_cleared and self._engine.loop.time() - context.entered_at < ALONE_SECONDS

    def next(self) -> str | None:
        """Return the suspect whose turn has come, if it may begin."""
        is_due = self._turn_at is not None and self._engine.loop.time() >= self._turn_at
        return next(iter(self._waiting), None) if is_due and self.may_begin() else None

    def waits(self, run: str) -> None:
        """Note that a suspect was put back, to have its turn later."""
        self._waiting.setdefault(run)
        if self._turn_at is None:
            self._turn_at = self._engine.loop.time() + TURN_SECONDS

    def stops_waiting(self, run: str) -> None:
        """Note that a suspect no longer waits: it begins here, or another worker has claimed it."""
        self._waiting.pop(run, None)
        if not self._waiting:
            self._turn_at = None

    def begins(self, run: str) -> None:
        """Note that a suspect is driven from now on."""
        self.stops_waiting(run)
        self.current, self._began_at = run, self._engine.loop.time()

    def ended(self) -> None:
        """Note that the suspect has made progress, or is no longer driven here; the others now get as much time."""
        self.current = None
        now = self._engine.loop.time()
        if self._waiting:
            self._turn_at = now + min(now - self._began_at, ALONE_SECONDS)
