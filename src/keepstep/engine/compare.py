"""What changed between two checkpoints of a run, or between two runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, RunNotFound
from ..model import Kind
from ..model.signal import RESERVED
from ..model.tree import thaw
from .past import Past, past

if TYPE_CHECKING:
    from ..stores.records import Record
    from .engine import Engine

#: Stands for what is not there on one side.
MISSING = None

Pair = tuple[Any, Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """What is other at the right than at the left, each a run and the last of its records that is looked at.

    `added` and `removed` are the keys of calls that have an outcome on one side only; `changed` gives, for those whose
    outcome is another one, both; so do `published` and `state` by their keys, with None where there is nothing.
    `statuses` are those of the two runs if both are looked at as they are now.
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


async def compare(engine: Engine, left: tuple[str, int | None], right: tuple[str, int | None]) -> Difference:
    """What changed from one side to the other; each is a run and a record of it, or None for its newest."""
    one, other = await _side(engine, *left), await _side(engine, *right)
    old, new = _outcomes(one), _outcomes(other)
    ends = (one.seq, other.seq) == (one.run.seq, other.run.seq)
    return Difference(
        left=(one.run.id, one.seq),
        right=(other.run.id, other.seq),
        added=tuple(key for key in new if key not in old),
        removed=tuple(key for key in old if key not in new),
        changed={key: (old[key], new[key]) for key in new if key in old and old[key] != new[key]},
        published=_changed(_published(one), _published(other)),
        state=_changed(await _state(engine, one), await _state(engine, other)),
        statuses=(one.run.status.value, other.run.status.value) if ends else None,
    )


async def _side(engine: Engine, run_id: str, seq: int | None) -> Past:
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    if seq is not None and (isinstance(seq, bool) or not isinstance(seq, int) or not 0 <= seq <= run.seq):
        raise DefinitionError(f"run {run_id!r} has the records 1 to {run.seq}, and none {seq!r}")
    engine.encryption.cipher(run)
    return await past(engine, run, seq)


async def _state(engine: Engine, side: Past) -> dict[str, Any]:
    """The state of a graph's run as JSON has it, those of its stages and agents under their names; else nothing."""
    workflow = engine.workflows.get(side.run.workflow)
    carries = workflow.carries_state if workflow is not None else side.run.fingerprint.startswith("graph:")
    if not carries:
        return {}
    from .states import position_at  # noqa: PLC0415 - needed by few

    levels = (await position_at(engine, side.run, side.seq)).levels
    return {
        f"{level}:{key}" if level else key: thaw(tree) for level, keys in levels.items() for key, tree in keys.items()
    }


def _outcomes(side: Past) -> dict[str, Any]:
    """What every call came to, by its key."""
    counted = {entry.seq for entry in side.history.entries.values() if not entry.key.startswith(RESERVED)}
    return {record.step: _outcome(record) for record in side.records if record.seq in counted}


def _outcome(record: Record) -> Any:
    if record.error is not None:
        return {"error": f"{record.error.type}: {record.error.message}"}
    if record.outcome != "success":
        return {"outcome": record.outcome}
    return _plain(record)


def _plain(record: Record) -> Any:
    """A stored value as JSON has it."""
    try:
        return msgspec.json.decode(record.raw())
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"run {record.run!r}: the value at seq {record.seq} cannot be read: {error}") from None


def _published(side: Past) -> dict[str, Any]:
    shown = [record for record in side.counted() if record.kind == Kind.PUBLISHED.value]
    return {(record.data or {}).get("key", ""): _plain(record) for record in shown}


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Pair]:
    keys = [*old, *(key for key in new if key not in old)]
    return {
        key: (old.get(key, MISSING), new.get(key, MISSING))
        for key in keys
        if (key in old) != (key in new) or old[key] != new[key]
    }
