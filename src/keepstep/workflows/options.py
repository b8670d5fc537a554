"""What may be said when a run is started, checked before anything is stored."""

from __future__ import annotations

from typing import Any

from ..errors import DefinitionError
from ..model.ids import check_id, check_name
from ..model.signal import RESERVED

#: A priority must fit the integers of every store.
MAX_PRIORITY = 2**31
#: No wait, delay or deadline is longer: 317 years, after which every date can still be written.
LONGEST_SECONDS = 1e10


def check_options(queue: Any, priority: Any, delay: Any, key: Any) -> None:
    """Refuse options that a store could not keep or a claim not read."""
    check_name(queue, "queue")
    if type(priority) is not int or abs(priority) >= MAX_PRIORITY:
        raise DefinitionError(f"a priority must be an int of at most 31 bits, not {priority!r}")
    if not isinstance(delay, int | float) or not delay < LONGEST_SECONDS:
        raise DefinitionError(f"a delay must be a number of seconds below {LONGEST_SECONDS:,.0f}, not {delay!r}")
    if key is not None:
        check_id(key, "key")


def checked_tags(tags: Any) -> dict[str, str]:
    """The tags themselves, or a clear error."""
    if tags is None:
        return {}
    if not isinstance(tags, dict):
        raise DefinitionError(f"tags are a dict of names and texts, not {tags!r}")
    for name, value in tags.items():
        check_name(name, "tag")
        if name.startswith(RESERVED):
            raise DefinitionError(f"tag {name!r} is refused: names that begin with {RESERVED!r} are Keepstep's own")
        if not isinstance(value, str) or not value.isprintable():
            raise DefinitionError(f"tag {name!r} must be printable text, not {value!r}")
    return dict(tags)
