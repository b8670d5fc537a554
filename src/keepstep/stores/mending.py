"""Flaws between the tables of a SQL store, and their repair, written once for every database.

Rows that cannot be derived are put aside, never destroyed. A database implements the `Tables` protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from ..errors import CheckpointCorrupt
from ..model import Flaw, Kind, Status
from ..model.ids import new_id
from ..ports import Row
from ..records.record import Record, StoredError, seal
from . import rules

log = logging.getLogger("keepstep")

#: Maximum number of flaws of one kind to report one by one.
MOST_FLAWS = 1000
#: Columns that a head copies from its run, so that a claim reads one index.
REPEATED = ("number", "workflow", "version", "queue", "key", "priority", "dedupe")

#: The type of a run's name in a database: bytes where it may be invalid text.
N = TypeVar("N", str, bytes)


class Tables(Protocol[N]):
    """The tables of one store, named without their prefix."""

    now: datetime

    def tolerates(self, error: Exception) -> bool:
        """Whether an error means only that a flaw cannot be mended."""

    def without_run(self, table: str) -> Iterable[N]:
        """Return the missing runs to which rows of a table refer."""

    def without_head(self) -> Iterable[N]:
        """Return the runs that have no head."""

    def differing(self) -> Iterable[N]:
        """Return the runs whose head differs from their row in a copied column."""

    def miscounted(self) -> Iterable[tuple[N, int, int]]:
        """Return the runs that have more signals than their head counts, with both numbers."""

    def attempt(self) -> AbstractContextManager[Any]:
        """Return a context that undoes its writes if it raises."""

    def put_aside(self, table: str, run: N) -> int:
        """Move the rows of a run unchanged into the table for rows put aside. Return their number."""

    def repeat(self, run: N) -> None:
        """Copy the repeated columns of a run into its head."""

    def count(self, run: N, signals: int) -> None:
        """Set the number of signals in the head of a run."""

    def is_held(self, run: N) -> bool:
        """Whether a living worker holds the lease of a run."""

    def newest(self, run: N) -> Row | None:
        """Return the newest checkpoint of a run."""

    def add(self, run: N, row: Row) -> None:
        """Append a checkpoint to a run."""

    def records(self, run: N) -> Iterable[bytes]:
        """Return the text of every checkpoint of a run."""

    def epochs(self, run: N) -> Iterable[int]:
        """Return the epochs in the heads of a run, those put aside included."""

    def put_head(self, run: N, status: Status, seq: int, checksum: str, epoch: int) -> None:
        """Insert the head of a run. Raise `CheckpointCorrupt` if the run cannot be read even then."""


class Finding(NamedTuple):
    """A flaw, and the function of the tables that mends it; None if it cannot be mended."""

    flaw: Flaw
    mend: Callable[[Any], str] | None = None


def shown(name: Any) -> str:
    """Return a stored name for display, even if it is invalid text."""
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name)


def findings(tables: Tables[N]) -> Iterator[Finding]:
    """Yield the flaws between the tables."""
    for table in ("checkpoint", "signal"):
        for run in tables.without_run(table):
            what = f"there are {table}s of run {shown(run)!r}, which does not exist"
            yield Finding(Flaw("orphan", shown(run), what), partial(_aside, table, run))
    for run in tables.without_run("head"):
        what = f"there is a head of run {shown(run)!r}, which does not exist"
        yield Finding(Flaw("dangling", shown(run), what), partial(_aside, "head", run))
    for run in tables.without_head():
        yield Finding(Flaw("dangling", shown(run), f"run {shown(run)!r} has no head"), partial(new_head, run))
    for run in tables.differing():
        what = f"run {shown(run)!r}: its head differs from its row"
        yield Finding(Flaw("index", shown(run), what), partial(_repeat, run))
    for run, counted, there in tables.miscounted():
        what = f"run {shown(run)!r}: its head counts {counted} signals, but {there} exist"
        yield Finding(Flaw("index", shown(run), what), partial(_count, run, there))


def mended(found: Finding, tables: Tables[N]) -> Flaw:
    """Mend a flaw, and return it with a description of the repair."""
    flaw = found.flaw
    if found.mend is None:
        return flaw
    try:
        with tables.attempt():
            done = found.mend(tables)
    except Exception as error:
        if not (isinstance(error, CheckpointCorrupt | msgspec.MsgspecError) or tables.tolerates(error)):
            raise
        log.warning("%s, and cannot be repaired: %s", flaw.what, error)
        done = ""
    return Flaw(flaw.kind, flaw.about, flaw.what, done)


def _aside(table: str, run: N, tables: Tables[N]) -> str:
    return f"{tables.put_aside(table, run)} rows were put aside in keepstep_aside_{table}"


def _repeat(run: N, tables: Tables[N]) -> str:
    tables.repeat(run)
    return "its head was corrected"


def _count(run: N, there: int, tables: Tables[N]) -> str:
    tables.count(run, there)
    return f"its head counts {there} now"


# -- a head from the records -------------------------------------------------------------------------------------------


class _End(msgspec.Struct):
    """The outcome of the run in the record of its end."""

    outcome: str = "success"


class _Claimed(msgspec.Struct):
    epoch: int = 0


class _Lease(msgspec.Struct):
    """The epoch of the lease under which a record was written."""

    claimed: _Claimed = msgspec.field(default_factory=_Claimed)


def new_head(run: N, tables: Tables[N], *, keep: bool = False) -> str:
    """Make a head from the records, unless a living worker holds the run. With `keep`, put the old head aside.

    Later records may be lost together with the old head. An unfinished run is therefore set aside for a person.
    """
    if tables.is_held(run):
        return ""
    epoch = _last_epoch(run, tables) + 1
    old = "; the old one was put aside in keepstep_aside_head" if keep and tables.put_aside("head", run) else ""
    newest = tables.newest(run)
    if newest is None:
        raise CheckpointCorrupt(f"run {shown(run)!r}: it has no records to build a head from")
    seq, checksum = newest.seq, sha256(newest.record + (newest.body or b"")).hexdigest()
    status = None
    if newest.kind == Kind.RUN_FINISHED:
        status = rules.ends_as(newest.kind, msgspec.json.decode(newest.record, type=_End).outcome)
    if status is None:
        status = Status.SET_ASIDE
        row, checksum = seal(_lost(shown(run), tables.now), seq + 1, checksum)
        tables.add(run, row)
        seq = row.seq
    tables.put_head(run, status, seq, checksum, epoch)
    return f"its head was rebuilt from its records, and it is {status.value}{old}"


def _last_epoch(run: N, tables: Tables[N]) -> int:
    """Return the newest epoch in the heads and records of a run."""
    last = max([1, *tables.epochs(run)])
    for text in tables.records(run):
        try:
            last = max(last, msgspec.json.decode(text, type=_Lease).claimed.epoch)
        except (msgspec.MsgspecError, ValueError):
            continue
    return last


def _lost(run: str, now: datetime) -> Record:
    reason = "its head was lost; the stored records are intact, but later ones may be missing"
    error = StoredError("CheckpointCorrupt", reason, error_class="permanent", id=new_id("error"))
    record = Record(run, Kind.ERROR.value, outcome="failure", worker="keepstep repair", error=error)
    record.finished_at = now
    return record
