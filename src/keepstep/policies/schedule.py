"""Schedules: the ticks at which a workflow is started, as a pure function of the time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..checks import check_number
from ..errors import DefinitionError
from .cron import Expression, last_match, next_match, parse

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

CatchUp = Literal["one", "all", "skip"]
Overlap = Literal["skip", "queue", "cancel", "allow"]

#: Shortest interval in seconds. A tick is a commit and a run; work that is due more often belongs into one run.
SHORTEST_SECONDS = 1.0
#: Longest interval and jitter, in seconds: ten years, so that every tick can be written.
LONGEST_SECONDS = 10 * 366 * 86_400.0
#: Seconds after which a tick that has not fired counts as missed, for `catch_up="skip"`.
LATE_SECONDS = 60.0
#: Missed ticks that `catch_up="all"` fires at most: the newest.
MOST_MISSED = 1000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Schedule:
    """The ticks of a schedule, and what becomes of ticks that were missed or come too early.

    `jitter` delays each tick by up to this many seconds, chosen by the schedule's name and the tick. `until` is the
    last instant that may be a tick. `catch_up` decides about ticks missed while no worker lived or the schedule was
    paused: the newest `"one"`, `"all"` of the newest 1,000, or none (`"skip"`). `overlap` decides about a tick while
    the run of an earlier one has not ended: `"skip"` it, `"queue"` it, `"cancel"` the earlier run, or `"allow"` both.
    """

    jitter: float = 0.0
    until: datetime | None = None
    catch_up: CatchUp = "one"
    overlap: Overlap = "skip"

    def __post_init__(self) -> None:
        check_number(self.jitter, "jitter", 0, LONGEST_SECONDS)
        if self.until is not None:
            if not isinstance(self.until, datetime) or self.until.tzinfo is None:
                raise DefinitionError(f"until= must be a datetime with a time zone, not {self.until!r}")
            object.__setattr__(self, "until", self.until.astimezone(UTC))
        if self.catch_up not in get_args(CatchUp):
            raise DefinitionError(f"catch_up= is 'one', 'all' or 'skip', not {self.catch_up!r}")
        if self.overlap not in get_args(Overlap):
            raise DefinitionError(f"overlap= is 'skip', 'queue', 'cancel' or 'allow', not {self.overlap!r}")

    def _next(self, after: datetime) -> datetime | None:
        raise NotImplementedError

    def _last(self, at: datetime) -> datetime | None:
        raise NotImplementedError

    def after(self, instant: datetime) -> datetime | None:
        """Return the first tick after an instant, in UTC; None if there is none."""
        tick = self._next(instant)
        return None if tick is None or (self.until is not None and tick > self.until) else tick

    def before(self, instant: datetime) -> datetime | None:
        """Return the last tick not after an instant, in UTC; None if there is none."""
        return self._last(instant if self.until is None else min(instant, self.until))

    def between(self, first: datetime, last: datetime, most: int) -> list[datetime]:
        """Return the newest ticks from `first` to `last`, both included, at most `most`."""
        found: list[datetime] = []
        tick = self.before(last)
        while tick is not None and tick >= first and len(found) < most:
            found.append(tick)
            tick = self.before(tick - _MICROSECOND)
        return found[::-1]

    def fires_at(self, name: str, tick: datetime) -> datetime:
        """Return the instant at which a tick of the schedule `name` fires: the tick, or later by the jitter."""
        if not self.jitter:
            return tick
        digest = sha256(f"{name}@{tick_text(tick)}".encode()).digest()
        return tick + timedelta(seconds=self.jitter * int.from_bytes(digest[:6], "big") / 2**48)

    def due(self, name: str, last: datetime, now: datetime) -> Due:
        """Return the ticks after `last` that fire now, and the newest tick that is over."""
        newest = self.before(now)
        while newest is not None and newest > last and self.fires_at(name, newest) > now:
            newest = self.before(newest - _MICROSECOND)
        if newest is None or newest <= last:
            return Due((), last)
        if self.catch_up == "all":
            return Due(tuple(self.between(last + _MICROSECOND, newest, MOST_MISSED)), newest)
        late = (now - self.fires_at(name, newest)).total_seconds()
        fires = self.catch_up == "one" or late <= LATE_SECONDS
        return Due((newest,) if fires else (), newest)

    def stored(self) -> dict[str, Any]:
        """Return the schedule as plain data, without options that have their defaults."""
        data: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                data[one.name] = value.isoformat() if isinstance(value, datetime) else value
        return data


@dataclass(frozen=True, slots=True)
class Due:
    """The ticks that fire now, oldest first, and the newest tick that is over, whether it fires or not."""

    ticks: tuple[datetime, ...]
    last: datetime


@dataclass(frozen=True)
class Cron(Schedule):
    """Ticks by a cron expression of five fields, in the local time of `tz`.

    `ks.Cron("0 7 * * mon-fri", tz="Europe/Berlin")` ticks on working days at seven in the morning. A local time that
    occurs twice, when clocks are set back, is one tick. One that is skipped, when clocks are set forward, is a tick
    that much later.
    """

    expression: str = ""
    tz: str = "UTC"

    def __init__(
        self,
        expression: str,
        *,
        tz: str = "UTC",
        jitter: float = 0.0,
        until: datetime | None = None,
        catch_up: CatchUp = "one",
        overlap: Overlap = "skip",
    ) -> None:
        values = {"jitter": jitter, "until": until, "catch_up": catch_up, "overlap": overlap}
        for name, value in {**values, "expression": expression, "tz": tz}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()
        if self._next(_EPOCH) is None:
            raise DefinitionError(f"cron {expression!r} never matches; check its day of the month and its month")

    @cached_property
    def zone(self) -> ZoneInfo:
        """The time zone of the expression."""
        from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415 - slow to import and rarely needed

        try:
            return ZoneInfo(self.tz)
        except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
            raise DefinitionError(
                f"tz={self.tz!r} is no time zone that this machine knows; use a name such as 'Europe/Berlin', "
                "and install the package tzdata if the name is right"
            ) from None

    @cached_property
    def fields(self) -> Expression:
        """The expression, parsed."""
        return parse(self.expression)

    def _next(self, after: datetime) -> datetime | None:
        return next_match(self.fields, self.zone, after)

    def _last(self, at: datetime) -> datetime | None:
        return last_match(self.fields, self.zone, at)

    def __str__(self) -> str:
        return f"{self.expression} ({self.tz})"


@dataclass(frozen=True)
class Every(Schedule):
    """Ticks at equal distances, counted from the beginning of 1970 in UTC: `ks.Every(300)` ticks at :00, :05, :10."""

    seconds: float = 0.0

    def __init__(
        self,
        seconds: float | timedelta,
        *,
        jitter: float = 0.0,
        until: datetime | None = None,
        catch_up: CatchUp = "one",
        overlap: Overlap = "skip",
    ) -> None:
        span = seconds.total_seconds() if isinstance(seconds, timedelta) else seconds
        check_number(span, "the interval of a schedule, in seconds,", SHORTEST_SECONDS, LONGEST_SECONDS)
        values = {"jitter": jitter, "until": until, "catch_up": catch_up, "overlap": overlap}
        for name, value in {**values, "seconds": round(span * 1_000_000) / 1_000_000}.items():
            object.__setattr__(self, name, value)
        self.__post_init__()
        if self.jitter > self.seconds:
            raise DefinitionError(f"jitter={self.jitter:g} is longer than the interval of {self.seconds:g} s")

    @cached_property
    def _microseconds(self) -> int:
        return round(self.seconds * 1_000_000)

    def _number(self, at: datetime) -> int:
        return (at - _EPOCH) // _MICROSECOND // self._microseconds

    def _tick(self, number: int) -> datetime | None:
        try:
            return _EPOCH + number * self._microseconds * _MICROSECOND
        except OverflowError:  # beyond the calendar
            return None

    def _next(self, after: datetime) -> datetime | None:
        return self._tick(self._number(after) + 1)

    def _last(self, at: datetime) -> datetime | None:
        return self._tick(self._number(at))

    def __str__(self) -> str:
        return f"every {timedelta(seconds=self.seconds)}" if self.seconds >= 60 else f"every {self.seconds:g} s"


def restored(data: dict[str, Any]) -> Schedule:
    """Return the schedule that `stored` has written."""
    options = dict(data)
    if "until" in options:
        options["until"] = datetime.fromisoformat(options["until"])
    return Cron(options.pop("expression"), **options) if "expression" in options else Every(**options)


def tick_text(tick: datetime) -> str:
    """Return a tick as text, in UTC, as in the id of its run: `2026-03-29T05:00:00Z`."""
    return tick.astimezone(UTC).isoformat().replace("+00:00", "Z")


def tick_of(text: str) -> datetime:
    """Return the tick that `tick_text` has written."""
    return datetime.fromisoformat(text).astimezone(UTC)
