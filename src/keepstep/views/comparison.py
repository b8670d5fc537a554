"""Two runs side by side: their facts, their calls aligned by key, and the values in which they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..history.diff import Pair, changed
from ..kernel.replay import check_kept, unsealed
from ..model import Checkpoint, Outcome, Run
from ..model.checkpoint import ANSWERS_CALL
from ..model.signal import RESERVED
from ..records.record import checkpoint
from .overview import Locked, readable
from .plain import arguments, value_of
from .travel import notes_of, state_of

if TYPE_CHECKING:
    from ..history.host import CommandHost

#: Records of each run that one comparison reads, and their bytes.
MOST_RECORDS, MOST_BYTES = 2000, 50_000_000
#: A call took another time if it took at least this many times as long, and this many seconds longer.
SLOWER, SLOWER_SECONDS = 2.0, 0.1


class Alike(StrEnum):
    """How a call of one run compares with the same call of the other."""

    SAME = "same"
    TIME = "other time"
    CHANGED = "other value"
    OUTCOME = "other outcome"
    LEFT = "only left"
    RIGHT = "only right"


@dataclass(frozen=True, slots=True)
class Aligned:
    """A call, with the record of its outcome on each side; None if it has none there."""

    key: str
    alike: Alike
    left: Checkpoint | None
    right: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Side:
    """One run up to the record `at`. `last` is the last record that was read for its calls."""

    run: Run
    at: int
    locked: Locked | None
    last: int = 0
    calls: Mapping[str, Checkpoint] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] | None = None

    @property
    def input(self) -> dict[str, Any]:
        """The arguments of the run."""
        return {} if self.locked is not None else arguments(self.run)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sides, their calls in the order of the left one, and the values of both where they differ.

    `next` is the record after which a further comparison goes on; None if all calls are in this one.
    """

    left: Side
    right: Side
    calls: tuple[Aligned, ...]
    state: dict[str, Pair]
    published: dict[str, Pair]
    next: int | None

    @property
    def counts(self) -> dict[Alike, int]:
        """The number of calls of each kind."""
        return {alike: sum(one.alike is alike for one in self.calls) for alike in Alike}


async def compare(host: CommandHost, left: Run, right: Run, at: int | None = None, after: int = 0) -> Comparison:
    """Compare two runs, or both up to record `at`: the calls of their first `MOST_RECORDS` records after `after`."""
    one, other = await _side(host, left, at, after), await _side(host, right, at, after)
    if one.locked is not None or other.locked is not None:
        return Comparison(one, other, (), {}, {}, None)
    calls = [_aligned(key, one.calls.get(key), other.calls.get(key)) for key in {**one.calls, **other.calls}]
    ahead = [side.last for side in (one, other) if side.last < side.at]
    return Comparison(
        one,
        other,
        tuple(calls),
        changed(one.state or {}, other.state or {}),
        changed(one.published, other.published),
        min(ahead, default=None),
    )


async def _side(host: CommandHost, run: Run, at: int | None, after: int) -> Side:
    plain, locked = readable(host.encryption, run)
    end = run.seq if at is None else min(at, run.seq)
    if locked is not None:
        return Side(plain, end, locked)
    if after < 0:
        raise DefinitionError(f"after must be the number of a record, got {after}")
    check_kept(run, end)
    notes = await notes_of(host, run)
    gone = notes.gone(end)
    found = dict[str, Checkpoint]()
    last, size = after, 0
    while last < end and last < after + MOST_RECORDS and size < MOST_BYTES:
        rows = [row for row in await host.call(host.store.list_checkpoints, run.id, last, 500) if row.seq <= end]
        if not rows:
            break
        size += sum(len(row.record) + len(row.body or b"") for row in rows)
        async for record, checksum in unsealed(host, rows, run.id, rows[0].seq - 1):
            if record.seq not in gone and record.kind in ANSWERS_CALL and not record.step.startswith(RESERVED):
                one = checkpoint(record, checksum)
                if one.retry_at is None and not one.data.get("child"):
                    found[one.step] = one
        last = rows[-1].seq
    return Side(plain, end, None, max(last, after), found, notes.published(end), await state_of(host, run, end))


def _aligned(key: str, left: Checkpoint | None, right: Checkpoint | None) -> Aligned:
    if left is None or right is None:
        return Aligned(key, Alike.RIGHT if left is None else Alike.LEFT, left, right)
    if left.outcome != right.outcome or _problem(left) != _problem(right):
        return Aligned(key, Alike.OUTCOME, left, right)
    if left.outcome is Outcome.SUCCESS and left.value != right.value and value_of(left.value) != value_of(right.value):
        return Aligned(key, Alike.CHANGED, left, right)
    short, long = sorted((seconds(left), seconds(right)))
    is_slower = long > short * SLOWER and long - short > SLOWER_SECONDS
    return Aligned(key, Alike.TIME if is_slower else Alike.SAME, left, right)


def _problem(one: Checkpoint) -> tuple[str, str]:
    return ("", "") if one.error is None else (one.error.type, one.error.message)


def seconds(one: Checkpoint) -> float:
    """Return how long the last attempt of a call took; 0 if that was not recorded."""
    return 0.0 if one.started_at is None else (one.finished_at - one.started_at).total_seconds()
