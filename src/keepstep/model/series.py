"""A series: a run and the runs that continue it, one after another, with `ks.continue_as`."""

from __future__ import annotations

import re

from .ids import MAX_ID, digest_of, with_tail
from .run import Run

#: Tag that holds the id of the first run of a series, on every run but the first. Sealed when the run is created.
SERIES = "ks:series"

_NUMBER = re.compile(r"~(\d+)(?:-[0-9a-v]{26})?\Z")


def first_of(run: Run) -> str:
    """Return the id of the first run of a series; the run's own id if it continues no other run."""
    return run.tags.get(SERIES) or _first_by_name(run) or run.id


def _first_by_name(run: Run) -> str:
    """Return the first run of a series of an earlier version, whose runs name their creator but have no tag."""
    base, _, number = run.id.rpartition("~")
    if not base or not number.isdecimal():
        return ""
    before = base if number == "2" else f"{base}~{int(number) - 1}"
    return base if run.created_by == f"run {before}" else ""


def number_of(run: Run) -> int:
    """Return the place of a run in its series, counted from 1."""
    found = _NUMBER.search(run.id) if first_of(run) != run.id else None
    return int(found[1]) if found else 1


def successor_id(run: Run, *, taken: bool = False) -> str:
    """Return the id of the run that continues this one: the first run's id and a number.

    If that is too long, or `taken` by an unrelated run, a digest of the series makes it unique.
    """
    first, number = first_of(run), number_of(run) + 1
    name = f"{first}~{number}"
    if not taken and len(name.encode()) <= MAX_ID:
        return name
    return with_tail(first, f"~{number}-{digest_of(first, str(number), run.seed)}")


def is_successor(run: Run, predecessor: Run) -> bool:
    """Whether a run was created to continue another; its creator decides, not the form of its id."""
    return run.id == predecessor.continued_as and run.created_by == f"run {predecessor.id}"


def names_in_word(run: Run) -> dict[str, str]:
    """Return the ids that a finished child reports to its parent: of the run that started and the one that ended."""
    return {"child": first_of(run), "run": run.id}
