"""The position of a walk over a graph: the fold of its records, live, on replay and for readers of the history."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

import msgspec

from ...errors import CheckpointCorrupt, DefinitionError
from ...model import Kind, Outcome, State
from ...model.checkpoint import PASSES_STEP
from ...model.tree import frozen, patch
from ...model.undo import is_undo
from ...records.data import DecisionData, StepCompletedData, SupersededData, data_of
from ...records.record import Record
from ...values.trees import Trees

#: Names of passed steps that are kept at most, for the path in an error.
TRAIL = 50
#: Changes after which a full state is written, if together they are as large as the state; and records after which it
#: is written in any case.
ENOUGH_DELTAS = 64
MOST_RECORDS = 1000

#: Acts of a person or a migration that change a state; their records are of kind `superseded`.
EDITS = ("edit", "migrate")

_PARTS = ("set", "removed", "items", "appended", "within")
_decode = msgspec.json.Decoder().decode

#: A change as stored, and all levels after it, which equal the result of the fold.
Written = tuple[Mapping[str, Any], dict[str, dict[str, Any]]]


class Position:
    """The states of a walk, the next step, and how often each step was passed.

    `passed` counts all passes of the walk, including those of joined branches; `before` counts those of walks around
    it.

    `levels` holds trees by key: those of the workflow under the empty name, those of stages and agents under theirs.
    `at` is the next step, empty at the end, or None while no edge has been chosen. A walk in a branch also keeps the
    writers of values: `writers` by level and key, the values `given` to a key with a reducer, and their last writer.
    """

    __slots__ = (
        "at",
        "base_seq",
        "before",
        "began_at",
        "counts",
        "deltas",
        "given",
        "givers",
        "last_state",
        "levels",
        "moment",
        "ordinal",
        "passed",
        "path",
        "read_signals",
        "seq",
        "size",
        "step",
        "threshold",
        "tracks",
        "trail",
        "weight",
        "writers",
    )

    def __init__(self, levels: dict[str, dict[str, Any]], at: str | None, path: str = "") -> None:
        self.path = path
        self.levels = levels
        self.at = at
        self.step: str | None = None
        self.moment: datetime | None = None
        self.began_at: datetime | None = None  # the time of a state that no step has changed yet
        self.counts: dict[str, int] = {}
        self.passed = 0
        self.before = 0
        self.ordinal = 0
        self.seq = 0
        self.trail: deque[str] = deque(maxlen=TRAIL)
        self.writers: dict[str, dict[str, str]] = {}
        self.given: dict[str, list[Any]] = {}
        self.givers: dict[str, str] = {}
        self.tracks = False
        self.deltas = 0
        self.weight = 0
        self.size = 0  # upper bound of the size of the state as text
        self.threshold = 0
        self.base_seq = 0
        self.last_state: Record | None = None  # the newest consolidated state
        self.read_signals = 0  # the last of the signals that were all read when it was written

    def fork(self, at: str, path: str) -> Position:
        """Return a walk that begins here, in a branch."""
        branch = Position(dict(self.levels), at, path)
        branch.step, branch.moment, branch.tracks, branch.size = self.step, self.moment, True, self.size
        branch.began_at = self.began_at
        branch.before = self.before + self.passed
        branch.trail.extend(self.trail)
        return branch

    def state(self, trees: Trees, run_id: str | None, level: str = "") -> State:
        """Return the state of a level, as users see it."""
        make = None if level else trees.make
        return State.of(self.levels.get(level, {}), trees.read, (run_id, self.step, self.moment or self.began_at), make)

    def then(self, trees: Trees, run_id: str | None, levels: dict[str, dict[str, Any]]) -> State:
        """Return the state after a step whose record is not yet written."""
        return State.of(levels[""], trees.read, (run_id, self.step, self.moment or self.began_at), trees.make)

    # -- the fold -----------------------------------------------------------------------------------------------------

    def follow(self, record: Record) -> None:
        """Apply a record of the run's history in its order; records of other walks, or of none, change nothing."""
        path, _, name = record.step.rpartition("/")
        if record.kind == Kind.SUPERSEDED and data_of(record, SupersededData).get("act") in EDITS:
            self.edit(record)
        elif path != self.path or record.data is None or is_undo(record.step):
            return
        elif record.kind == Kind.DECISION and record.step == f"{self.step}.next":
            self.at = data_of(record, DecisionData).get("next")
        elif record.kind in PASSES_STEP and record.outcome == Outcome.SUCCESS and "#" in name:
            self.take(record)

    def take(self, record: Record, written: Written | None = None) -> None:
        """Apply the record of a passed step; its writer passes the known change and result."""
        value = record.raw()
        data = data_of(record, StepCompletedData)
        self._apply(record, value, data.get("given", {}), written)
        name, _, count = record.step.rpartition("/")[2].rpartition("#")
        self.counts[name] = int(count)
        self.passed += 1 + data.get("passed", 0)
        self.ordinal = record.ordinal
        self.step = record.step
        self.seq = record.seq
        self.moment = record.finished_at
        self.at = data.get("next")
        self.trail.append(name)

    def edit(self, record: Record) -> None:
        """Fold in what a person changed."""
        data = data_of(record, SupersededData)
        self._apply(record, record.raw(), {})
        if "next" in data:
            self.at = data["next"]

    def folded(self, record: Record) -> Written:
        """Return the effect that `take` would have with the record of a passed step, without changing anything."""
        return self._fold(record.raw())

    def _fold(self, value: bytes) -> Written:
        delta, levels = _decode(value), self.levels
        for level, one in _by_level(delta):
            if any(part in one for part in _PARTS):
                levels = {**levels, level: patch(levels.get(level, {}), one)}
        return delta, levels

    def _apply(self, record: Record, value: bytes, given: Mapping[str, Any], written: Written | None = None) -> None:
        try:
            if written is not None:
                delta, self.levels = written
            else:
                delta, self.levels = self._fold(value)
            if self.tracks:
                self._track(_by_level(delta), given, record.step)
        except (ValueError, AttributeError, TypeError) as error:
            raise CheckpointCorrupt(f"run {record.run!r}: the change at seq {record.seq}: {error}") from None
        self.deltas += 1
        self.weight += len(value)
        self.size += len(value)

    def _track(
        self, deltas: Iterable[tuple[str, Mapping[str, Any]]], given: Mapping[str, list[Any]], step: str
    ) -> None:
        """Note the writers of values; writing a whole value overrides earlier values for its reducer."""
        for level, delta in deltas:
            writers = self.writers.setdefault(level, {})
            written = [key for part in _PARTS for key in delta.get(part, ()) if level or key not in given]
            writers.update(dict.fromkeys(written, step))
            if not level:
                for key in written:
                    self.given.pop(key, None)
        whole = self.writers[""]
        for key, contributions in given.items():
            if key not in whole:
                self.given.setdefault(key, []).extend(map(frozen, contributions))
                self.givers[key] = step

    # -- consolidated -------------------------------------------------------------------------------------------------

    def consolidated(self, seq: int, more: Callable[[], Mapping[str, Any]]) -> bytes | None:
        """Return the whole position as text, if it is due to be recorded."""
        late = seq - self.base_seq >= MOST_RECORDS
        if not late and (self.deltas < ENOUGH_DELTAS or self.weight < self.threshold):
            return None
        text = self.text(more())
        if not late and self.weight < len(text):
            self.threshold = len(text)
            return None
        self.threshold = self.size = len(text)
        self.deltas, self.weight, self.base_seq = 0, 0, seq
        return text

    def text(self, more: Mapping[str, Any]) -> bytes:
        """Return everything that a walk needs to go on from here, as text."""
        whole = {
            "levels": self.levels,
            "at": self.at,
            "step": self.step,
            "moment": self.moment,
            "counts": self.counts,
            "passed": self.passed,
            "ordinal": self.ordinal,
            "trail": list(self.trail),
            **more,
        }
        return msgspec.json.encode(whole)

    @classmethod
    def restored(cls, record: Record) -> tuple[Position, Whole]:
        """Return the position in a consolidated state, and its facts about the run."""
        try:
            whole = msgspec.json.decode(record.raw(), type=Whole)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"run {record.run!r}: the consolidated state at seq {record.seq} is not readable: {error}"
            ) from None
        levels = {level: {key: frozen(tree) for key, tree in keys.items()} for level, keys in whole.levels.items()}
        position = cls(levels, whole.at)
        position.step, position.moment = whole.step, whole.moment
        position.counts, position.ordinal = dict(whole.counts), whole.ordinal
        position.passed = sum(whole.counts.values()) if whole.passed is None else whole.passed
        position.trail.extend(whole.trail)
        position.seq = position.base_seq = record.seq
        position.last_state, position.read_signals = record, whole.all_read()
        position.threshold = position.size = len(record.raw())
        return position, whole


def generation_in(record: Record) -> int:
    """Return how often a person had changed which records count, from a consolidated state; 0 from other records."""
    return Position.restored(record)[1].generation if record.kind == Kind.STATE else 0


def keys_of(record: Record) -> list[str]:
    """Return the keys of the workflow's own state that a record changes."""
    delta = _decode(record.raw())
    return [key for part in _PARTS for key in delta.get(part, ())]


def _by_level(delta: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [("", delta), *delta.get("levels", {}).items()]


class Whole(msgspec.Struct):
    """The content of a consolidated state."""

    levels: dict[str, dict[str, Any]]
    at: str | None
    step: str | None
    moment: datetime | None
    counts: dict[str, int]
    ordinal: int
    trail: list[str]
    passed: int | None = None  # missing in older states
    generation: int = 0
    steps: int = 0
    signals: list[tuple[int, int]] = []
    started_at: datetime | None = None
    spent: dict[str, Any] = {}
    exact_time: bool = False
    waits: dict[str, datetime] = {}
    patches: dict[str, bool] = {}
    # only in a run that removes its older records
    published: dict[str, msgspec.Raw] = {}
    fits: dict[str, str] = {}

    def all_read(self) -> int:
        """Return the last signal up to which all were read."""
        return all_read(self.signals)


class Remembered(Protocol):
    """Facts that a run and its history both have, and a consolidated state keeps."""

    generation: int
    steps: int
    spent: Any
    exact_time: bool
    patches: dict[str, bool]

    @property
    def started_at(self) -> datetime | None: ...

    def open_waits(self) -> dict[str, datetime]: ...


def level_of(stage: str | None, agent: str | None) -> str:
    """Return the name of the state of a stage or an agent, or of the workflow itself."""
    if stage is not None and agent is not None:
        raise DefinitionError("give either stage= or agent=, not both: each has its own state")
    return f"stage:{stage}" if stage is not None else f"agent:{agent}" if agent is not None else ""


def facts(past: Remembered, read: Iterable[int]) -> dict[str, Any]:
    """Return the facts of a run for a consolidated state; `read` are the signals that the run has read."""
    return {
        "generation": past.generation,
        "steps": past.steps,
        "signals": _ranges(read),
        "started_at": past.started_at,
        "spent": past.spent.as_data(),
        "exact_time": past.exact_time,
        "waits": past.open_waits(),
        "patches": past.patches,
    }


def all_read(ranges: Sequence[Sequence[int]]) -> int:
    """Return the last number of a range that begins with 1; 0 without one."""
    return ranges[0][1] if ranges and ranges[0][0] == 1 else 0


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as ranges, both ends included."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
