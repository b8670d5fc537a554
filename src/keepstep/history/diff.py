"""The differences between two checkpoints of a run, or between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, RunNotFound
from ..model import Kind
from ..model.signal import RESERVED
from ..model.tree import thaw
from ..records.data import PublishedData, data_of
from .prefix import Prefix, read_prefix

if TYPE_CHECKING:
    from ..records.record import Record
    from .host import CommandHost

#: Placeholder for a value that one side does not have.
MISSING = None

Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two sides; a side is a run and the last of its records that counts.

    `added` and `removed` are the keys of calls that have an outcome on one side only. `changed` maps the key of a call
    to both outcomes if they differ. `published` and `state` do the same for their keys, with None for a missing value.
    `statuses` are the statuses of the two runs if both are compared at their newest record.
    """

    left: tuple[str, int]
    right: tuple[str, int]
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: dict[str, Pair] = field(default_factory=dict)
    published: dict[str, Pair] = field(default_factory=dict)
    state: dict[str, Pair] = field(default_factory=dict)
    statuses: tuple[str, str] | None = None

    def __bool__(self) -> bool:
        moved = self.statuses is not None and self.statuses[0] != self.statuses[1]
        return bool(self.added or self.removed or self.changed or self.published or self.state or moved)


async def compare(host: CommandHost, left: tuple[str, int | None], right: tuple[str, int | None]) -> Difference:
    """Compare two sides; each is a run and the number of a record, or None for the newest."""
    one, other = await _side(host, *left), await _side(host, *right)
    states = await _state(host, one), await _state(host, other)
    return await host.call(_difference, one, other, *states)


def _difference(one: Prefix, other: Prefix, state: Mapping[str, Any], other_state: Mapping[str, Any]) -> Difference:
    old, new = _outcomes(one), _outcomes(other)
    ends = (one.seq, other.seq) == (one.run.seq, other.run.seq)
    return Difference(
        left=(one.run.id, one.seq),
        right=(other.run.id, other.seq),
        added=tuple(key for key in new if key not in old),
        removed=tuple(key for key in old if key not in new),
        changed={key: (old[key], new[key]) for key in new if key in old and old[key] != new[key]},
        published=changed(_published(one), _published(other)),
        state=changed(state, other_state),
        statuses=(one.run.status.value, other.run.status.value) if ends else None,
    )


async def _side(host: CommandHost, run_id: str, seq: int | None) -> Prefix:
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    if seq is not None and (isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq <= run.seq):
        raise DefinitionError(f"run {run_id!r} has the records 1 to {run.seq}, got {seq!r}")
    host.encryption.cipher(run)
    return await read_prefix(host, run, seq)


async def _state(host: CommandHost, side: Prefix) -> dict[str, Any]:
    """Return the state of a graph's run as JSON, with the states of its stages and agents under their names."""
    workflow = host.workflows.get(side.run.workflow)
    carries = workflow.carries_state if workflow is not None else side.run.fingerprint.startswith("graph:")
    if not carries:
        return {}
    from ..kernel.graph.stored import position_at  # noqa: PLC0415 - rarely needed

    levels = (await position_at(host, side.run, side.seq)).levels
    return {
        f"{level}:{key}" if level else key: thaw(tree) for level, keys in levels.items() for key, tree in keys.items()
    }


def _outcomes(side: Prefix) -> dict[str, Any]:
    """Return the outcome of every call by its key."""
    counted = {entry.seq for entry in side.history.entries.values() if not entry.key.startswith(RESERVED)}
    return {record.step: _outcome(record) for record in side.records if record.seq in counted}


def _outcome(record: Record) -> Any:
    if record.error is not None:
        return {"error": f"{record.error.type}: {record.error.message}"}
    if record.outcome != "success":
        return {"outcome": record.outcome}
    return _plain(record)


def _plain(record: Record) -> Any:
    """Return a stored value as JSON."""
    try:
        return msgspec.json.decode(record.raw())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"run {record.run!r}: the value at seq {record.seq} cannot be read: {error}") from None


def _published(side: Prefix) -> dict[str, Any]:
    shown = [record for record in side.counted() if record.kind == Kind.PUBLISHED.value]
    return {data_of(record, PublishedData).get("key", ""): _plain(record) for record in shown}


def changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the keys whose values differ, each with both values, `MISSING` for one that a side does not have."""
    keys = [*old, *(key for key in new if key not in old)]
    return {
        key: (old.get(key, MISSING), new.get(key, MISSING))
        for key in keys
        if (key in old) != (key in new) or old[key] != new[key]
    }
