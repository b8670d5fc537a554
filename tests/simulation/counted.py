"""Which records of a run still count after a person went back in it: found anew, and not as the engine finds it."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.model import Kind
from keepstep.ports import Row
from keepstep.records.record import Record


def generation_of(rows: Iterable[Row]) -> int:
    """How often a person has changed what counts."""
    return sum(row.kind == Kind.SUPERSEDED.value for row in rows)


def counting(records: list[Record]) -> list[Record]:
    """The records that count: what counted after each record is remembered, and a rewind goes back to that."""
    if all(record.kind != Kind.SUPERSEDED.value for record in records):
        return records
    counted: tuple[Record, ...] = ()
    after = {0: counted}
    for record in records:
        data = record.data or {}
        if record.kind == Kind.SUPERSEDED.value and data.get("beyond") is not None:
            counted = after[data["beyond"]]
        gone = data.get("seqs", ()) if record.kind == Kind.SUPERSEDED.value else ()
        counted = (*(one for one in counted if one.seq not in gone), record)
        after[record.seq] = counted
    return list(counted)
