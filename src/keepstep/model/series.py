"""A series: a run, and those that continue it one after the other with `ks.continue_as`."""

from __future__ import annotations

import re

from .ids import MAX_ID, digest_of, with_tail
from .run import Run

#: Tag of every run of a series but the first: the id of the first. It is a sealed fact of the run's creation.
SERIES = "ks:series"

_NUMBER = re.compile(r"~(\d+)(?:-[0-9a-v]{26})?\Z")


def first_of(run: Run) -> str:
    """The id of the first run of a series; the run's own id if it continues no other."""
    return run.tags.get(SERIES) or _first_by_name(run) or run.id


def _first_by_name(run: Run) -> str:
    """As `first_of`, for runs of earlier versions: they have no tag, but name the run that created them."""
    base, _, number = run.id.rpartition("~")
    if not base or not number.isdecimal():
        return ""
    before = base if number == "2" else f"{base}~{int(number) - 1}"
    return base if run.created_by == f"run {before}" else ""


def number_of(run: Run) -> int:
    """The place of a run in its series; the first has number 1."""
    found = _NUMBER.search(run.id) if first_of(run) != run.id else None
    return int(found[1]) if found else 1


def successor_id(run: Run, *, taken: bool = False) -> str:
    """The id of the run that continues another: the first run's id and a number.

    If that is too long, or somebody's own run has `taken` it, a digest of the series makes it unique.
    """
    first, number = first_of(run), number_of(run) + 1
    name = f"{first}~{number}"
    if not taken and len(name.encode()) <= MAX_ID:
        return name
    return with_tail(first, f"~{number}-{digest_of(first, str(number), run.seed)}")


def is_successor(run: Run, predecessor: Run) -> bool:
    """Whether a run was created to continue another: its creation names that one, whatever the ids look like."""
    return run.id == predecessor.continued_as and run.created_by == f"run {predecessor.id}"


def names_in_word(run: Run) -> dict[str, str]:
    """How a child that has ended names itself to its parent: as the run that was started, and as the one that ended."""
    return {"child": first_of(run), "run": run.id}
