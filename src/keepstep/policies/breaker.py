"""Circuit breakers: a state machine over plain values that never reads a clock.

| state | entered by | attempts |
|---|---|---|
| closed | `successes` probes that succeed | begin |
| open | `failures` within `within` seconds, or a probe that fails or exceeds its time | wait or fail |
| half-open | `open_seconds` after it opened | at most `probes` at once begin |

A person may hold it open or closed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..checks import check_limit, shown
from ..errors import DefinitionError
from .rate import LONGEST_SECONDS

OPEN, CLOSED, HALF_OPEN = "open", "closed", "half-open"


@dataclass(frozen=True, slots=True)
class BreakerState:
    """Where a breaker stands, in seconds of one clock.

    `failed_at` are the times of the last failures. `probes` are the probes under way: the time at which each must have
    ended, and how long it may take. `hand` is `"open"` or `"closed"` while a person holds the breaker.
    """

    failed_at: tuple[float, ...] = ()
    opened_at: float | None = None
    probes: tuple[tuple[float, float], ...] = ()
    passed: int = 0
    hand: str = ""


@dataclass(frozen=True, slots=True)
class Breaker:
    """Open after `failures` within `within` seconds; try `probes` after `open_seconds`; close after `successes`.

    Only failures count whose class says that the service is unwell. A probe has the time of its step's timeout, or a
    minute; then it counts as failed, whatever has become of its worker.
    """

    failures: int = 5
    within: float = 300.0
    open_seconds: float = 60.0
    probes: int = 3
    successes: int = 2

    def __post_init__(self) -> None:
        for name in ("failures", "probes", "successes"):
            value = getattr(self, name)
            check_limit(value, f"ks.Breaker: {name}", 1)
        for name in ("within", "open_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LONGEST_SECONDS:
                limit = f"greater than 0 and at most {LONGEST_SECONDS:g}"
                raise DefinitionError(f"ks.Breaker: {name} must be a number {limit}, got {shown(value)}")

    def plain(self) -> dict[str, Any]:
        """Return the settings as plain data."""
        return asdict(self)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Breaker:
        """Return the settings in plain data; unknown names, which a newer version may write, are left out."""
        return cls(**{name: plain[name] for name in cls.__slots__ if name in plain})

    @classmethod
    def written(cls, text: str) -> Breaker:
        """Return the settings that a person has written, as in `5/300/60` (failures, within, open) or `default`."""
        if text == "default":
            return cls()
        try:
            failures, within, open_seconds = text.split("/")
            return cls(int(failures), float(within), float(open_seconds))
        except ValueError:
            raise DefinitionError(
                f"{text!r} is no breaker; write FAILURES/WITHIN/OPEN, as in 5/300/60, or default"
            ) from None

    def __str__(self) -> str:
        return f"opens after {self.failures} failures in {self.within:g} s, for {self.open_seconds:g} s"

    # -- where it stands -----------------------------------------------------------------------------------------------

    def status(self, state: BreakerState, now: float) -> str:
        """Return whether the breaker is closed, open or half-open."""
        if state.hand:
            return state.hand
        if state.opened_at is None:
            return CLOSED
        return OPEN if now < state.opened_at + self.open_seconds else HALF_OPEN

    def probes_left(self, state: BreakerState, now: float) -> int | None:
        """Return how many probes may begin; None if the breaker is closed and no attempt need be one."""
        status = self.status(state, now)
        if status == CLOSED:
            return None
        return max(self.probes - len(state.probes), 0) if status == HALF_OPEN else 0

    # -- its moves -----------------------------------------------------------------------------------------------------

    def after_news(
        self, state: BreakerState, now: float, *, failures: int = 0, passed: int = 0, failed: int = 0, unused: int = 0
    ) -> BreakerState:
        """Return the state after news of attempts and probes, and after probes whose time is over have failed."""
        if state.hand:
            return state
        state = _not_ahead(state, now)
        if state.opened_at is None:
            return self._counted(state, now, failures)
        ended = min(passed, len(state.probes))
        under_way = state.probes[ended:]
        if failed and under_way:
            return BreakerState(opened_at=now)
        state = replace(state, probes=under_way[unused:], passed=state.passed + ended)
        if state.passed >= self.successes:
            return BreakerState()
        late = [until for until, _ in state.probes if until < now]
        return BreakerState(opened_at=min(late)) if late else state

    def _counted(self, state: BreakerState, now: float, failures: int) -> BreakerState:
        recent = [at for at in state.failed_at if at > now - self.within] + [now] * failures
        if len(recent) >= self.failures:
            return BreakerState(opened_at=now)
        return replace(state, failed_at=tuple(recent))

    def begun(self, state: BreakerState, now: float, probes: int, seconds: float) -> BreakerState:
        """Return the state after probes were granted, each for `seconds`."""
        return replace(state, probes=tuple(sorted((*state.probes, *[(now + seconds, seconds)] * probes))))


def held(act: str) -> BreakerState:
    """Return the state after a person's command: `open`, `close` or `reset`."""
    return BreakerState(hand={"open": OPEN, "close": CLOSED}.get(act, ""))


def _not_ahead(state: BreakerState, now: float) -> BreakerState:
    """Return the state without times that lie ahead because the clock was set back."""
    return replace(
        state,
        failed_at=tuple(min(at, now) for at in state.failed_at),
        opened_at=None if state.opened_at is None else min(state.opened_at, now),
        probes=tuple((min(until, now + seconds), seconds) for until, seconds in state.probes),
    )
