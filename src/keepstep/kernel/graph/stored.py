"""The position of a stored graph's run, folded from its records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...errors import CheckpointCorrupt, DefinitionError
from ...model import Kind
from ...model.tree import frozen
from ...records.record import Record, origin
from ...workflows.graph import Graph
from ..replay import Superseded, check_end, check_kept, check_not_removed, newest_state, unsealed
from .position import Position

if TYPE_CHECKING:
    from ...model import Run
    from ..host import StoredRuns


async def position_at(host: StoredRuns, run: Run, at: int | None = None) -> Position:
    """Return the position of a run after its record `at`, folded from the state before it."""
    try:
        return await _position_at(host, run, at)
    except CheckpointCorrupt:
        fresh = await host.stored_run(run.id)
        if fresh is None or fresh.kept_from == run.kept_from:
            raise
        return await position_at(host, fresh, at)  # older records were removed meanwhile


async def _position_at(host: StoredRuns, run: Run, at: int | None) -> Position:
    upto = run.seq if at is None else at
    if not 0 <= upto <= run.seq:
        raise DefinitionError(f"run {run.id!r} has the records 1 to {run.seq}, got {upto}")
    check_kept(run, upto)
    base = await newest_state(host, run, upto)
    records = await _records(host, run, 0 if base is None else base - 1, upto)
    if len(records) != upto + 1 - (base or 1):
        raise CheckpointCorrupt(f"run {run.id!r}: chain broken after seq {(base or 1) - 1}: records are missing")
    gone = Superseded()
    for record in records:
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
    if base is None:
        position = _beginning(host, run)
    else:
        position, _ = Position.restored(records.pop(0))
    for record in records:
        if record.seq not in gone:
            position.follow(record)
    return position


async def _records(host: StoredRuns, run: Run, after: int, upto: int) -> list[Record]:
    """Return some records of a run; the last one is verified by the next record or the head."""
    found: list[Record] = []
    previous = origin(run) if not after else ""
    while after < upto or after == upto < run.seq:
        rows = await host.records(run.id, after)
        if not rows:
            await check_not_removed(host, run)
            raise CheckpointCorrupt(f"run {run.id!r}: chain broken at seq {after + 1}: the record is missing")
        async for record, checksum in unsealed(host, rows, run.id, after, previous):
            after, previous = record.seq, checksum
            if after == run.seq:
                check_end(run, after, checksum)
            if record.seq <= upto:
                found.append(record)
    return found


def _beginning(host: StoredRuns, run: Run) -> Position:
    stored = msgspec.json.decode(host.encryption.input(run))
    try:
        (args, kwargs) = stored
        first = {**(args[0] or {} if args else {}), **kwargs}
    except (TypeError, ValueError):
        raise CheckpointCorrupt(f"run {run.id!r}: its input must be a state") from None
    workflow = host.workflows.get(run.workflow)
    entry = workflow.entry_name if isinstance(workflow, Graph) else None
    position = Position({"": {key: frozen(value) for key, value in first.items()}}, entry)
    position.began_at = run.created_at
    return position
