"""Read runs and rows of a store that may be damaged, or written by a newer version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256

import msgspec

from ..errors import CheckpointCorrupt, SchemaMismatch
from ..model import Run, RunQuery
from ..ports import OptionalStore, Row, Store, optional
from ..records.record import NEWEST_FORMAT
from .encrypted import below

#: Page size for runs with their inputs, which may be large.
FEW = 10
#: Maximum number of consecutive reads that fail with the same error. A damaged row that has lost its number fails at
#: every number.
TRIES = 100
BROKEN = (CheckpointCorrupt, SchemaMismatch)


def all_runs(store: Store, query: RunQuery) -> Iterator[Run | str]:
    """Yield every run of a query, page by page; for an unreadable run, its id."""
    while True:
        page = store.list_runs(query)
        yield from page.unreadable
        yield from page.runs
        if page.next is None:
            return
        query = replace(query, after=page.next)


def head_of(store: Store, run_id: str) -> Run | None:
    """Return the run, without its outcome if the record of that is damaged."""
    try:
        return store.get_run(run_id)
    except CheckpointCorrupt:
        for run in all_runs(store, RunQuery(id_prefix=run_id, limit=FEW, with_input=True, system=True)):
            if isinstance(run, Run) and run.id == run_id:
                return run
        found = salvaged(store, run_id)
        if found is None:
            raise
        return found


def salvaged(store: Store, run_id: str) -> Run | None:
    """Return the store's own knowledge of a damaged run, or None."""
    ask = optional(below(store), OptionalStore.salvaged)
    return None if ask is None else ask(run_id)


def rows_of(store: Store, run_id: str, broken: Callable[[str], None] = lambda _: None) -> Iterator[Row]:
    """Yield every readable row, in order. Call `broken` with the first error, at its place."""
    after, limit, problem, lost, again = 0, 1000, "", "", 0
    while again < TRIES:
        try:
            rows = store.list_checkpoints(run_id, after, limit)
        except BROKEN as error:
            problem = problem or str(error)
            if limit > 1:  # one of many: ask for them one by one
                limit = 1
                continue
            if not lost:
                broken(str(error))
            again = again + 1 if str(error) == lost else 0
            lost = str(error)
            after += 1
        else:
            if not rows:
                break
            yield from rows
            after = rows[-1].seq
    if problem and not lost:
        broken(problem)


class _Glimpse(msgspec.Struct):
    """The part of a record that names its step and its predecessor."""

    kind: str
    step: str = ""
    format: int = 0
    previous: str = ""


_glimpse = msgspec.json.Decoder(_Glimpse).decode


def glimpsed(row: Row) -> _Glimpse | None:
    """Return the readable part of a row, however damaged the rest is."""
    try:
        return _glimpse(bytes(row.record))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def is_newer(store: Store, run: Run) -> bool:
    """Whether part of a run was written by a newer Keepstep. That is not damage, but a damaged version number is."""
    store = below(store)
    newer = ""  # checksum of the previous record, if that is in a newer format
    for row in rows_of(store, run.id):
        seen = glimpsed(row)
        if newer and seen is not None and seen.previous == newer:
            return True
        checksum = sha256(bytes(row.record) + bytes(row.body or b"")).hexdigest()
        newer = checksum if seen is not None and seen.format > NEWEST_FORMAT else ""
        if newer and row.seq == run.seq and newer == run.checksum:
            return True
    return False
