"""Options of `start`, checked before anything is stored."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from ..checks import check_name, seconds_of
from ..errors import DefinitionError
from ..model.signal import RESERVED
from ..ports import instant

#: Upper limit of the absolute value of a priority, so that it fits the integers of every store.
MAX_PRIORITY = 2**31
#: Longest wait, delay or deadline: 317 years. A date that far ahead can still be written.
LONGEST_SECONDS = 1e10
#: Tags of a run at most, because each is written with the run, and lists of runs show all of them.
MOST_TAGS = 100


def check_options(queue: Any, priority: Any, delay: Any, key: Any = None, dedupe: Any = None) -> None:
    """Refuse options that a store cannot keep or a claim cannot read."""
    check_name(queue, "queue")
    if type(priority) is not int or abs(priority) >= MAX_PRIORITY:
        raise DefinitionError(f"a priority must be an int of at most 31 bits, not {priority!r}")
    delay = seconds_of(delay)
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay < LONGEST_SECONDS:
        raise DefinitionError(
            f"a delay must be a number of seconds from 0 to below {LONGEST_SECONDS:,.0f}, not {delay!r}"
        )
    if key is not None:
        check_name(key, "key")
    if dedupe is not None:
        check_name(dedupe, "dedupe")


def deadline_at(deadline: float | timedelta | datetime | None, now: float) -> datetime | None:
    """Return the instant of a deadline: seconds or a timedelta from now, or an instant with a time zone."""
    if deadline is None:
        return None
    if isinstance(deadline, datetime):
        if deadline.tzinfo is None:
            raise DefinitionError("deadline must have a time zone; use datetime.now(UTC) + ..., or a number of seconds")
        if not abs(deadline.timestamp() - now) < LONGEST_SECONDS:
            raise DefinitionError(
                f"deadline must be within {LONGEST_SECONDS:,.0f} s of now, got {deadline.isoformat()}"
            )
        return deadline.astimezone(UTC)
    if not isinstance(deadline, timedelta | int | float):
        raise DefinitionError(f"deadline must be a number of seconds, a timedelta or a datetime, got {deadline!r}")
    seconds = deadline.total_seconds() if isinstance(deadline, timedelta) else float(deadline)
    if not 0 < seconds < LONGEST_SECONDS:
        raise DefinitionError(f"deadline must be in the future, within {LONGEST_SECONDS:,.0f} s, got {seconds:g} s")
    return instant(now + seconds)


def checked_tags(tags: Any) -> dict[str, str]:
    """Return the tags; refuse invalid ones."""
    if tags is None:
        return {}
    if not isinstance(tags, dict):
        raise DefinitionError(f"tags are a dict of names and texts, not {tags!r}")
    if len(tags) > MOST_TAGS:
        raise DefinitionError(f"a run has at most {MOST_TAGS} tags, not {len(tags):,}; give large data as an argument")
    for name, value in tags.items():
        check_name(name, "tag")
        if name.startswith(RESERVED):
            raise DefinitionError(f"tag {name!r} is refused: names that begin with {RESERVED!r} are Keepstep's own")
        if not isinstance(value, str) or not value.isprintable():
            raise DefinitionError(f"tag {name!r} must be printable text, not {value!r}")
    return dict(tags)
