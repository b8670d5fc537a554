"""Cron expressions: five fields, read into sets of numbers, and the instants at which they match in a time zone."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ..errors import DefinitionError

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

#: Days after which an expression that has not matched never does. Two leap days lie at most eight years apart.
HORIZON_DAYS = 9 * 366
#: Days by which an instant's own date may differ from the local date that it stands for. Samoa once left out a day.
_STRAY_DAYS = 2
_DAY = timedelta(days=1)

_JANUARY_FIRST = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTHS = {name: number for number, name in enumerate(_JANUARY_FIRST, 1)}
_WEEKDAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
_SUNDAY_AS_END = 7
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class _Field(NamedTuple):
    """A field of an expression: its lowest and highest number, and the words that stand for numbers."""

    name: str
    lowest: int
    highest: int
    words: Mapping[str, int] = MappingProxyType({})


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS),
    _Field("day of the week", 0, 7, _WEEKDAYS),
)
_PART = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?\Z")


@dataclass(frozen=True, slots=True)
class Expression:
    """The numbers at which each field of a cron expression matches. A weekday counts from 0, Sunday."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    #: Whether a day matches by either of its two fields, because both are restricted.
    either_day: bool

    def matches_date(self, day: date) -> bool:
        """Whether the expression matches on a local date."""
        if day.month not in self.months:
            return False
        by_number, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (by_number or by_weekday) if self.either_day else (by_number and by_weekday)


def parse(text: str) -> Expression:
    """Read an expression; refuse an invalid one with the field that is wrong."""
    if not isinstance(text, str):
        raise DefinitionError(f"a cron expression must be a text such as '0 7 * * mon-fri', not {text!r}")
    fields = _NAMED.get(text.strip().lower(), text).lower().split()
    if len(fields) != len(_FIELDS):
        raise DefinitionError(
            f"cron {text!r} has {len(fields)} fields, not 5: minute, hour, day of the month, month, day of the week; "
            f"or use one of {', '.join(_NAMED)}"
        )
    minutes, hours, days, months, weekdays = (
        _numbers(text, field, about) for field, about in zip(fields, _FIELDS, strict=True)
    )
    return Expression(
        tuple(sorted(minutes)),
        tuple(sorted(hours)),
        frozenset(days),
        frozenset(months),
        frozenset(number % 7 for number in weekdays),
        either_day=not fields[2].startswith("*") and not fields[4].startswith("*"),
    )


def _numbers(text: str, field: str, about: _Field) -> set[int]:
    name, lowest, highest, _ = about
    found: set[int] = set()
    for part in field.split(","):
        match = _PART.match(part)
        if match is None:
            raise DefinitionError(
                f"cron {text!r}: the {name} {part!r} is none of *, a number, a range a-b or a step /n"
            )
        first, last, step = match["first"], match["last"], int(match["step"] or 1)
        if first == "*" and last is None:
            low, high = lowest, highest
        else:
            low = _number(text, first, about)
            high = low if last is None else _number(text, last, about)
            if last is None and match["step"] is not None:
                high = highest
        if high < low and high == 0 and highest == _SUNDAY_AS_END:  # fri-sun
            high = _SUNDAY_AS_END
        if high < low:
            raise DefinitionError(f"cron {text!r}: the {name} {part!r} ends before it begins; write two ranges")
        if step < 1:
            raise DefinitionError(f"cron {text!r}: the {name} {part!r} has a step below 1")
        found.update(range(low, high + 1, step))
    return found


def _number(text: str, word: str, about: _Field) -> int:
    name, lowest, highest, words = about
    number = words.get(word, int(word) if word.isascii() and word.isdecimal() else -1)
    if not lowest <= number <= highest:
        known = f", or one of {', '.join(words)}" if words else ""
        raise DefinitionError(f"cron {text!r}: the {name} {word!r} is not a number from {lowest} to {highest}{known}")
    return number


@lru_cache(maxsize=256)
def _instants(expression: Expression, zone: ZoneInfo, day: date) -> tuple[datetime, ...]:
    """Return the UTC instants of the matches on a local date, in order.

    A local time that occurs twice stands for its first occurrence. One that the clocks skip is shifted by what they
    skip. Both are the meaning of `fold=0`.
    """
    if not expression.matches_date(day):
        return ()
    times = (
        datetime.combine(day, time(hour, minute), zone) for hour in expression.hours for minute in expression.minutes
    )
    return tuple(sorted({at.astimezone(UTC) for at in times}))


def next_match(expression: Expression, zone: ZoneInfo, after: datetime) -> datetime | None:
    """Return the first instant after `after` at which the expression matches; None if there is none for years."""
    day = after.astimezone(zone).date() - _STRAY_DAYS * _DAY
    found: datetime | None = None
    found_on = 0
    for number in range(HORIZON_DAYS):
        if found is not None and number > found_on + 2 * _STRAY_DAYS:
            break
        if day >= _LAST_DAY:
            break
        if expression.matches_date(day):
            instants = _instants(expression, zone, day)
            place = bisect_right(instants, after)
            if place < len(instants) and (found is None or instants[place] < found):
                found, found_on = instants[place], number if found is None else found_on
        day += _DAY
    return found


def last_match(expression: Expression, zone: ZoneInfo, at: datetime) -> datetime | None:
    """Return the last instant not after `at` at which the expression matches; None if there is none for years."""
    day = at.astimezone(zone).date() + _STRAY_DAYS * _DAY
    found: datetime | None = None
    found_on = 0
    for number in range(HORIZON_DAYS):
        if found is not None and number > found_on + 2 * _STRAY_DAYS:
            break
        if day <= _FIRST_DAY:
            break
        if expression.matches_date(day):
            instants = _instants(expression, zone, day)
            place = bisect_left(instants, at + timedelta(microseconds=1))
            if place and (found is None or instants[place - 1] > found):
                found, found_on = instants[place - 1], number if found is None else found_on
        day -= _DAY
    return found


#: Dates near the ends of the calendar, whose instants in another zone could not be written.
_FIRST_DAY, _LAST_DAY = date(2, 1, 1), date(9998, 12, 30)
