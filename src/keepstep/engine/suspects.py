"""When a run is driven that may be the one which kills its workers: by itself at first, and in turn with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..policies import RecoverAlone

if TYPE_CHECKING:
    from ..model import Run
    from .context import RunContext
    from .engine import Engine

#: A suspect begins by itself: nothing else begins beside it for so many seconds, nor has begun in as many before it.
ALONE_SECONDS = 5.0
#: A suspect that has to wait for its turn waits at least this long, so that another worker may take it.
TURN_SECONDS = 0.5


class Suspects:
    """The suspects of one worker. At most one that has made no progress yet is driven at a time.

    A crash counts for every run that its worker executes. A suspect is one crash away from being set aside, so two of
    them never run together. Other runs only have to keep their distance for `ALONE_SECONDS`: one that has lived for
    longer is hardly the cause of a crash, and its own count is low. After a turn the others have as much time as it
    took, so neither side can starve the other.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: The suspect that is driven, as long as it has made no progress.
        self.current: str | None = None
        self._began_at = 0.0
        self._waiting: dict[str, None] = {}  # in the order in which they came
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
        """Whether a suspect may begin now: no other is on board, and nothing else has just begun."""
        return self.current is None and not any(map(self._has_just_begun, self._engine.live.values()))

    def _has_just_begun(self, context: RunContext) -> bool:
        is_cleared = self.is_suspect(context.run) and not context.alone
        return not is_cleared and self._engine.loop.time() - context.entered_at < ALONE_SECONDS

    def next(self) -> str | None:
        """The suspect whose turn has come, if it may begin."""
        is_due = self._turn_at is not None and self._engine.loop.time() >= self._turn_at
        return next(iter(self._waiting), None) if is_due and self.may_begin() else None

    def waits(self, run: str) -> None:
        """Note that a suspect was put back, to have its turn later."""
        self._waiting.setdefault(run)
        if self._turn_at is None:
            self._turn_at = self._engine.loop.time() + TURN_SECONDS

    def gone(self, run: str) -> None:
        """Note that a suspect waits no more: it begins here, or another worker has taken it."""
        self._waiting.pop(run, None)
        if not self._waiting:
            self._turn_at = None

    def begins(self, run: str) -> None:
        """Note that a suspect is driven from now on."""
        self.gone(run)
        self.current, self._began_at = run, self._engine.loop.time()

    def ended(self) -> None:
        """Note that the suspect has made progress, or is no longer driven here: the others have as much time now."""
        self.current = None
        now = self._engine.loop.time()
        if self._waiting:
            self._turn_at = now + min(now - self._began_at, ALONE_SECONDS)
