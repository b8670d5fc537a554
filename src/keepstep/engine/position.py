"""Where a walk over a graph is: the fold of its records, live, on replay and for whoever looks back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError
from ..model import Kind, Outcome, State
from ..model.tree import frozen, patch
from ..stores.records import Record
from ..values.trees import Trees

if TYPE_CHECKING:
    from .context import RunContext
    from .history import History

#: So many names of the steps passed are remembered, for the path in an error.
TRAIL = 50
#: A full state is written when so many changes have gathered and weigh as much as the state, at the latest after
#: so many records.
ENOUGH_DELTAS = 64
MOST_RECORDS = 1000

#: What a person or a migration does to a state; told by a `superseded` record.
EDITS = ("edit", "migrate")

_PASSED = frozenset({Kind.STEP_COMPLETED.value, Kind.BARRIER.value})
_PARTS = ("set", "removed", "items", "appended", "within")
_decode = msgspec.json.Decoder().decode

#: A change as it is stored, and all levels after it, which are what the fold would give.
Written = tuple[Mapping[str, Any], dict[str, dict[str, Any]]]


class Position:
    """The states of a walk, the step that is next, and how often each was passed.

    `passed` counts all passes of the walk, with those of branches that joined it; `before` those of walks around it.

    `levels` holds trees by key: those of the workflow under the empty name, those of stages and agents under theirs.
    `at` is the next step, empty at the end, or None while no edge has been chosen. A walk in a branch also remembers
    who wrote what: `writers` by level and key, what was `given` to a key that has a reducer, and by whom last.
    """

    __slots__ = (
        "at",
        "base_seq",
        "before",
        "counts",
        "deltas",
        "given",
        "givers",
        "levels",
        "moment",
        "ordinal",
        "passed",
        "path",
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
        self.size = 0  # at most: what the state takes as text
        self.threshold = 0
        self.base_seq = 0

    def fork(self, at: str, path: str) -> Position:
        """A walk that begins here, in a branch."""
        branch = Position(dict(self.levels), at, path)
        branch.step, branch.moment, branch.tracks, branch.size = self.step, self.moment, True, self.size
        branch.before = self.before + self.passed
        branch.trail.extend(self.trail)
        return branch

    def state(self, trees: Trees, run_id: str | None, level: str = "") -> State:
        """The state of a level, as users see it."""
        return State.of(self.levels.get(level, {}), trees.read, (run_id, self.step, self.moment))

    def then(self, trees: Trees, run_id: str | None, levels: dict[str, dict[str, Any]]) -> State:
        """The state that a step leads to whose record is not yet written."""
        return State.of(levels[""], trees.read, (run_id, self.step, self.moment))

    # -- the fold -----------------------------------------------------------------------------------------------------

    def follow(self, record: Record) -> None:
        """Take any record of the run's history in its order; one that moves no walk, or another, changes nothing."""
        path, _, name = record.step.rpartition("/")
        if record.kind == Kind.SUPERSEDED and (record.data or {}).get("act") in EDITS:
            self.edit(record)
        elif path != self.path or record.data is None:
            return
        elif record.kind == Kind.DECISION and record.step == f"{self.step}.next":
            self.at = record.data.get("next")
        elif record.kind in _PASSED and record.outcome == Outcome.SUCCESS and "#" in name:
            self.take(record)

    def take(self, record: Record, written: Written | None = None) -> None:
        """Fold the record of a passed step in; who has just written it knows its change, and what comes of it."""
        value = record.raw()
        data = record.data or {}
        self._apply(record, value, data, written)
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
        data = record.data or {}
        self._apply(record, record.raw(), data)
        if "next" in data:
            self.at = data["next"]

    def _apply(self, record: Record, value: bytes, data: Mapping[str, Any], written: Written | None = None) -> None:
        try:
            if written is not None:
                delta, self.levels = written
            else:
                delta = _decode(value)
                for level, one in _by_level(delta):
                    if any(part in one for part in _PARTS):
                        self.levels = {**self.levels, level: patch(self.levels.get(level, {}), one)}
            if self.tracks:
                self._track(_by_level(delta), data.get("given", {}), record.step)
        except (ValueError, AttributeError, TypeError) as error:
            raise CheckpointCorrupt(f"run {record.run!r}: the change at seq {record.seq}: {error}") from None
        self.deltas += 1
        self.weight += len(value)
        self.size += len(value)

    def _track(
        self, deltas: Iterable[tuple[str, Mapping[str, Any]]], given: Mapping[str, list[Any]], step: str
    ) -> None:
        """Remember who wrote what; who writes a whole value where something was given writes over that."""
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
        """The whole position as text, if it is time to write it down."""
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
        """Everything that a walk needs to go on from here."""
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
        """The position that a consolidated state holds, and what it says of the run."""
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
        position.threshold = position.size = len(record.raw())
        return position, whole


def keys_of(record: Record) -> list[str]:
    """The keys of the workflow's own state that a record changes."""
    delta = _decode(record.raw())
    return [key for part in _PARTS for key in delta.get(part, ())]


def _by_level(delta: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [("", delta), *delta.get("levels", {}).items()]


class Whole(msgspec.Struct):
    """What a consolidated state holds."""

    levels: dict[str, dict[str, Any]]
    at: str | None
    step: str | None
    moment: datetime | None
    counts: dict[str, int]
    ordinal: int
    trail: list[str]
    passed: int | None = None  # older states do not say it
    generation: int = 0
    steps: int = 0
    signals: list[tuple[int, int]] = []
    started_at: datetime | None = None
    spent: dict[str, Any] = {}
    exact_time: bool = False
    waits: dict[str, datetime] = {}
    patches: dict[str, bool] = {}


def level_of(stage: str | None, agent: str | None) -> str:
    """The name of the state of a stage or of an agent; of the workflow itself if neither is named."""
    if stage is not None and agent is not None:
        raise DefinitionError("name a stage or an agent, not both: each has a state of its own")
    return f"stage:{stage}" if stage is not None else f"agent:{agent}" if agent is not None else ""


def facts(past: RunContext | History, read: Iterable[int]) -> dict[str, Any]:
    """What a consolidated state says of its run, beside the position; `read` are the signals that the run has read."""
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


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as ranges, both ends included."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
