"""A checkpoint: the sealed, append-only record of something that happened in a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Flag, StrEnum, auto
from typing import Any

from .error import ErrorInfo


class Kind(StrEnum):
    """The kind of a checkpoint."""

    RUN_STARTED = "run started"
    STEP_STARTED = "step started"
    STEP_COMPLETED = "step completed"
    STEP_FAILED = "step failed"
    STEP_CANCELLED = "step cancelled"
    BARRIER = "barrier"
    WAIT_STARTED = "wait started"
    TIMER = "timer"
    SIGNAL = "signal received"
    CHILD = "child"
    AGENT_STARTED = "agent started"
    AGENT_COMPLETED = "agent completed"
    DECISION = "decision"
    PATCH = "patch"
    PUBLISHED = "published"
    EMITTED = "emitted"
    PROGRESS = "progress saved"
    REPLY = "reply"
    UNDO = "undo"
    RECOVERED = "recovered"
    SUPERSEDED = "superseded"
    ERROR = "error"
    STATE = "consolidated state"
    KEPT = "kept state"
    RUN_FINISHED = "run finished"


class Trait(Flag):
    """The meaning of a kind of checkpoint to the engine: each trait is a question that some code asks about a record.

    The sets below, one per trait, are the answers. Traits with nearly the same kinds differ on purpose.
    """

    #: The outcome of a call of the workflow's code; a replay delivers it in sequence order.
    ANSWERS_CALL = auto()
    #: The workflow's code requested or wrote it; a retry may leave it behind.
    BY_CODE = auto()
    #: The code wrote it without waiting for an answer; a replay finds it by its key. Tokens of a step are not notes.
    NOTE = auto()
    #: A step's body may write it while it runs; it counts as long as its step does.
    SAID_IN_STEP = auto()
    #: Ends a step's call; no part of the step is under way after it.
    ENDS_STEP = auto()
    #: Leaves a step begun but not done: a start mark, a failed attempt, or what an attempt has saved for the next.
    LEAVES_STEP_OPEN = auto()
    #: Passes a point of a workflow: a step's result, or a barrier, which has no body of its own.
    PASSES_STEP = auto()
    #: Records an effect on the outside world, which is repeated if the record is lost. A barrier has no effect of its
    #: own.
    DID_WORK = auto()
    #: Something was begun, done or learned; after a rewind to an earlier point, the code does it or asks for it again.
    DONE_AGAIN = auto()
    #: Holds a result of a call that a fork may replace.
    EDITABLE = auto()
    #: Holds a graph's state or path, derived from everything before it.
    MOVES_GRAPH = auto()
    #: Read only by a replay; a run that succeeded under durability `off` omits all of these.
    ONLY_FOR_REPLAY = auto()
    #: A step's body may cause it each time before it kills its worker, so it proves no progress.
    NO_PROGRESS = auto()
    #: Does not count as a step in durability modes that count steps.
    NO_STEP = auto()
    #: `data.signal` may name a signal that the run consumed with it.
    CARRIES_SIGNAL = auto()
    #: A wait in workflow code consumed that signal; other signals are a person's decisions about a step.
    CODE_READ_SIGNAL = auto()
    #: Readers in other processes wait for it, so a store that can notify them does.
    FOLLOWED = auto()
    #: Ends a run, or sets it aside.
    ENDS_RUN = auto()
    #: Holds the start or the outcome of a child.
    ABOUT_CHILD = auto()
    #: May tell what can be undone, or what was.
    ABOUT_UNDO = auto()
    #: Describes by itself how its worker claimed the run.
    SAYS_CLAIM = auto()
    #: Emitted to observers as a move of the run, so the record is not emitted a second time.
    IS_MOVE = auto()


_A_STEP_ENDS = Trait.ANSWERS_CALL | Trait.BY_CODE | Trait.ENDS_STEP | Trait.ABOUT_UNDO
_A_WAIT_ENDS = Trait.ANSWERS_CALL | Trait.BY_CODE | Trait.DONE_AGAIN | Trait.ONLY_FOR_REPLAY
_A_CHILD = (
    _A_WAIT_ENDS
    | Trait.ABOUT_CHILD
    | Trait.DID_WORK
    | Trait.EDITABLE
    | Trait.CARRIES_SIGNAL
    | Trait.CODE_READ_SIGNAL
    | Trait.ABOUT_UNDO
)

#: Traits of each kind. A new kind needs a row here, besides the code that writes and reads it.
TRAITS: Mapping[Kind, Trait] = {
    Kind.RUN_STARTED: Trait.SAYS_CLAIM | Trait.IS_MOVE | Trait.ABOUT_UNDO,
    Kind.STEP_STARTED: Trait.BY_CODE
    | Trait.LEAVES_STEP_OPEN
    | Trait.DONE_AGAIN
    | Trait.CARRIES_SIGNAL
    | Trait.ABOUT_UNDO,
    Kind.STEP_COMPLETED: _A_STEP_ENDS
    | Trait.PASSES_STEP
    | Trait.DID_WORK
    | Trait.DONE_AGAIN
    | Trait.EDITABLE
    | Trait.MOVES_GRAPH
    | Trait.ONLY_FOR_REPLAY
    | Trait.CARRIES_SIGNAL,
    Kind.STEP_FAILED: _A_STEP_ENDS | Trait.LEAVES_STEP_OPEN | Trait.DONE_AGAIN | Trait.EDITABLE | Trait.CARRIES_SIGNAL,
    Kind.STEP_CANCELLED: _A_STEP_ENDS | Trait.ONLY_FOR_REPLAY,
    Kind.BARRIER: Trait.ANSWERS_CALL
    | Trait.BY_CODE
    | Trait.PASSES_STEP
    | Trait.DONE_AGAIN
    | Trait.MOVES_GRAPH
    | Trait.ONLY_FOR_REPLAY,
    Kind.WAIT_STARTED: Trait.BY_CODE | Trait.ONLY_FOR_REPLAY | Trait.NO_PROGRESS | Trait.NO_STEP,
    Kind.TIMER: _A_WAIT_ENDS,
    Kind.SIGNAL: _A_WAIT_ENDS | Trait.EDITABLE | Trait.CARRIES_SIGNAL | Trait.CODE_READ_SIGNAL,
    Kind.CHILD: _A_CHILD,
    Kind.AGENT_STARTED: _A_WAIT_ENDS,
    Kind.AGENT_COMPLETED: _A_CHILD,
    Kind.DECISION: Trait.BY_CODE | Trait.NOTE | Trait.MOVES_GRAPH | Trait.ONLY_FOR_REPLAY,
    Kind.PATCH: Trait.BY_CODE | Trait.ONLY_FOR_REPLAY,
    Kind.PUBLISHED: Trait.BY_CODE | Trait.NOTE | Trait.SAID_IN_STEP | Trait.NO_PROGRESS | Trait.FOLLOWED,
    Kind.EMITTED: Trait.BY_CODE | Trait.NOTE | Trait.SAID_IN_STEP | Trait.NO_PROGRESS | Trait.FOLLOWED,
    Kind.PROGRESS: Trait.BY_CODE
    | Trait.SAID_IN_STEP
    | Trait.LEAVES_STEP_OPEN
    | Trait.ONLY_FOR_REPLAY
    | Trait.NO_PROGRESS
    | Trait.NO_STEP,
    Kind.REPLY: Trait.BY_CODE | Trait.NOTE | Trait.FOLLOWED,
    Kind.UNDO: Trait.ANSWERS_CALL | Trait.BY_CODE | Trait.DONE_AGAIN | Trait.NO_STEP | Trait.ABOUT_UNDO,
    Kind.RECOVERED: Trait.NO_PROGRESS | Trait.SAYS_CLAIM,
    Kind.SUPERSEDED: Trait.ABOUT_UNDO,
    Kind.ERROR: Trait.ENDS_RUN | Trait.IS_MOVE,
    Kind.STATE: Trait.MOVES_GRAPH | Trait.ONLY_FOR_REPLAY | Trait.NO_STEP,
    Kind.KEPT: Trait.NO_STEP,
    Kind.RUN_FINISHED: Trait.ENDS_RUN | Trait.IS_MOVE,
}


def _kinds(trait: Trait) -> frozenset[str]:
    """Return the kinds with a trait, as the plain texts of records, which are fastest to compare."""
    return frozenset(kind.value for kind, traits in TRAITS.items() if trait in traits)


ANSWERS_CALL = _kinds(Trait.ANSWERS_CALL)
BY_CODE = _kinds(Trait.BY_CODE)
NOTE = _kinds(Trait.NOTE)
SAID_IN_STEP = _kinds(Trait.SAID_IN_STEP)
ENDS_STEP = _kinds(Trait.ENDS_STEP)
LEAVES_STEP_OPEN = _kinds(Trait.LEAVES_STEP_OPEN)
PASSES_STEP = _kinds(Trait.PASSES_STEP)
DID_WORK = _kinds(Trait.DID_WORK)
DONE_AGAIN = _kinds(Trait.DONE_AGAIN)
EDITABLE = _kinds(Trait.EDITABLE)
MOVES_GRAPH = _kinds(Trait.MOVES_GRAPH)
ONLY_FOR_REPLAY = _kinds(Trait.ONLY_FOR_REPLAY)
NO_PROGRESS = _kinds(Trait.NO_PROGRESS)
NO_STEP = _kinds(Trait.NO_STEP)
CARRIES_SIGNAL = _kinds(Trait.CARRIES_SIGNAL)
CODE_READ_SIGNAL = _kinds(Trait.CODE_READ_SIGNAL)
FOLLOWED = _kinds(Trait.FOLLOWED)
ENDS_RUN = _kinds(Trait.ENDS_RUN)
ABOUT_CHILD = _kinds(Trait.ABOUT_CHILD)
ABOUT_UNDO = _kinds(Trait.ABOUT_UNDO)
SAYS_CLAIM = _kinds(Trait.SAYS_CLAIM)
IS_MOVE = _kinds(Trait.IS_MOVE)


def is_timeout(step: str) -> bool:
    """Whether a timer with this key ends a `ks.timeout` block rather than a sleep."""
    return step.rpartition("/")[2].startswith("timeout#")


class Outcome(StrEnum):
    """The outcome that a checkpoint records."""

    SUCCESS = "success"
    FAILURE = "failure"
    CANCELLED = "cancelled"


class Trigger(StrEnum):
    """The cause of a checkpoint."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"
    RECOVERY = "recovery"


#: Kinds of the records that tell the published values of a run, as a store is asked for them.
TELLS_PUBLISHED = (Kind.PUBLISHED.value, Kind.SUPERSEDED.value)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One record of a run's history, as a reader sees it.

    `value` is JSON text; `data` holds further details, such as `next`, the step that a graph took next.
    """

    run: str
    seq: int
    kind: Kind
    step: str
    outcome: Outcome
    ordinal: int
    attempt: int
    trigger: Trigger
    worker: str
    agent: str | None
    stage: str | None
    started_at: datetime | None
    finished_at: datetime
    digest: str
    value: bytes | None
    error: ErrorInfo | None
    retry_at: datetime | None
    format: int
    previous: str
    checksum: str
    data: Mapping[str, Any] = field(default_factory=dict)


_OF_ITEM = re.compile(r"(.+?)\.(?:\d+|@[^/]*)/")


def map_of(key: str) -> str | None:
    """Return the path of the outermost map whose item made the call with this key; None if none did."""
    if "." not in key:
        return None
    found = _OF_ITEM.match(key)
    return None if found is None else found[1]
