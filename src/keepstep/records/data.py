"""The keys of a record's `data`: their types, the kinds of record that have them, and how each is treated.

`Data` lists every key once. A class per kind of record names the keys that its records may hold. Both are types of
plain dictionaries, so that mypy checks every use and the stored text stays as it is.
"""
# No `from __future__ import annotations` here: the annotations are read when the module is loaded.

from collections.abc import Callable, Mapping
from types import UnionType
from typing import Annotated, Any, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, cast, get_args, get_origin

from ..model import Kind

P = ParamSpec("P")
T = TypeVar("T")


class Key(NamedTuple):
    """How one key of `data` is treated.

    A `hidden` key is encrypted in an encrypted run; the others stay readable for repairs, audits and the doctor, which
    have no key. `checked` keys are checked against their type when a record is read. The engine acts on a key that
    `steers`; a record in plain text must not bring one into an encrypted run.
    """

    about: str
    hidden: bool = False
    checked: bool = False
    steers: bool = False


# -- every key ---------------------------------------------------------------------------------------------------------

_From = TypedDict("_From", {"from": Annotated[str, Key("The worker, or the version, before.")]}, total=False)


class Data(_From, total=False):
    """The `data` of a record of any kind. An unlisted key is encrypted and not checked, so a new one needs a row."""

    # signals
    signal: Annotated[int, Key("The number of the signal that was read.", checked=True, steers=True)]
    sender: Annotated[str, Key("Who sent the signal.", checked=True)]
    to: Annotated[str, Key("The run that a signal was sent to.")]
    signal_name: Annotated[str, Key("The name of the signal that was sent.")]
    ask: Annotated[str, Key("The question that a reply answers.", checked=True, steers=True)]
    # children and series
    child: Annotated[str, Key("The child that was started.", checked=True, steers=True)]
    renew: Annotated[bool, Key("A fork starts its own child in place of its origin's.", checked=True)]
    continued_as: Annotated[str, Key("The run that goes on for this one.", checked=True, steers=True)]
    # what the code decided and published
    choice: Annotated[
        int, Key("The part of a race that won; 0 for the old path of a patch.", checked=True, steers=True)
    ]
    key: Annotated[str, Key("The key that was published.", checked=True, steers=True)]
    # graphs
    next: Annotated[str, Key("The step that a graph takes next.", checked=True, steers=True)]
    given: Annotated[dict[str, Any], Key("Which branch gave which key of the state.", hidden=True, checked=True)]
    passed: Annotated[int, Key("How many steps the branches passed.", hidden=True)]
    # steps
    spent: Annotated[
        dict[str, Any],
        Key(
            "What a step or a child told with `ks.spend`: `cost`, `tokens`, both by the names of `models`; steps also "
            "`input_tokens` and `output_tokens`.",
            hidden=True,
        ),
    ]
    call: Annotated[
        dict[str, str],
        Key(
            "What an agent's framework has called: `operation` (`chat`, `execute_tool`), `tool` and its `id`.",
            hidden=True,
        ),
    ]
    first_at: Annotated[str, Key("When the first attempt of the step began, in a record of a later one.")]
    cached: Annotated[str, Key("The run whose cached result the step has taken, without a call of its body.")]
    input: Annotated[str, Key("The arguments of the step by name, as JSON text.", hidden=True)]
    input_bytes: Annotated[int, Key("The size of arguments that are too large to be stored.", hidden=True)]
    undo: Annotated[bool, Key("The call is undone if its run fails or is cancelled.", checked=True, steers=True)]
    covers: Annotated[bool, Key("A replay needs no record below the key of this one.", checked=True, steers=True)]
    opened: Annotated[int, Key("The newest record that the code knew when it called.", hidden=True)]
    # how a run began, and what it fits
    workflow: Annotated[str, Key("The name of the workflow.")]
    version: Annotated[str, Key("The version that the run fits from here on.")]
    fingerprint: Annotated[str, Key("The fingerprint that the run fits from here on.", checked=True)]
    definition: Annotated[str, Key("The text of a graph's or dag's definition.", hidden=True, checked=True)]
    schema: Annotated[str, Key("The name of a graph's schema.", hidden=True)]
    renames: Annotated[dict[str, str], Key("The new keys of recorded calls.", checked=True)]
    exact_time: Annotated[bool, Key("Waits count from their call.", hidden=True)]
    nests: Annotated[
        bool,
        Key("Called workflows are branches of their own, and groups wait for their parts to clean up.", hidden=True),
    ]
    typed: Annotated[bool, Key("The annotations of workflows hold for their arguments and their results.", hidden=True)]
    origin: Annotated[str, Key("The run that a fork comes from.", checked=True)]
    origin_seq: Annotated[int, Key("How many of its records were copied.", checked=True)]
    origin_checksum: Annotated[str, Key("The checksum of the last of them.", checked=True)]
    other: Annotated[str, Key("A digest of what the fork was given otherwise.", hidden=True)]
    # leases; with `from`
    epoch: Annotated[int, Key("The epoch of the lease.")]
    recoveries: Annotated[int, Key("How often in a row the run was recovered.")]
    unrecorded: Annotated[int, Key("How many leases before it recorded nothing.")]
    # recoveries
    handler: Annotated[
        str, Key("The recovery handler that a person asks for, or the answer of one.", checked=True, steers=True)
    ]
    skips: Annotated[str, Key("The step that gets the record's value as its result.", checked=True, steers=True)]
    skip_validation: Annotated[bool, Key("A person lets the run go on unvalidated.", checked=True, steers=True)]
    problems: Annotated[list[str], Key("Everything that a phase of a recovery found.", hidden=True, checked=True)]
    # commands
    act: Annotated[str, Key("What a person or a migration did.", checked=True)]
    actor: Annotated[str, Key("Who did it.")]
    reason: Annotated[str, Key("Why.", hidden=True)]
    before: Annotated[str, Key("The status that the run had before.", checked=True)]
    seqs: Annotated[list[int], Key("The records that no longer count.", checked=True, steers=True)]
    beyond: Annotated[int, Key("The last record that counts again.", checked=True, steers=True)]
    # the end
    failed_at: Annotated[int, Key("The outcome that failed the run.", hidden=True)]
    at: Annotated[str, Key("The step of a graph or dag that failed.", hidden=True)]
    path: Annotated[list[str], Key("The steps that led to it.", hidden=True)]
    not_undone: Annotated[list[str], Key("Steps with an undo that a forced cancel has left as they are.", hidden=True)]
    repeats: Annotated[list[str], Key("Steps that were done and are done again after a repair.", hidden=True)]
    aside: Annotated[str, Key("Where a repair has put what was there before.", hidden=True)]
    due_at: Annotated[float | None, Key("When a run that was handed over is due.", hidden=True)]
    wakes: Annotated[list[str], Key("The signals that wake a run that was handed over.", hidden=True)]
    target: Annotated[str, Key("The store that a run was handed over to.", hidden=True)]


# -- the keys of each kind ---------------------------------------------------------------------------------------------


class CommandData(TypedDict, total=False):
    """The data of every command of a person."""

    act: str
    actor: str
    reason: str
    before: str


class DefinitionData(TypedDict, total=False):
    """The definition that a run fits from here on, as far as it is kept."""

    definition: str
    schema: str


class RunStartedData(DefinitionData, total=False):
    """The start of a run, or of a fork."""

    workflow: str
    version: str
    exact_time: bool
    nests: bool
    typed: bool
    origin: str
    origin_seq: int
    origin_checksum: str
    other: str
    act: str
    actor: str
    reason: str


class StepData(TypedDict, total=False):
    """A start mark or a failure of a step; a person who resolves it is recorded with it."""

    signal: int
    sender: str
    reason: str
    spent: dict[str, Any]
    call: dict[str, str]
    first_at: str
    input: str
    input_bytes: int
    undo: bool


class StepCompletedData(StepData, total=False):
    """The result of a step, of a sent signal, or of a step of a graph."""

    to: str
    signal_name: str
    next: str
    given: dict[str, Any]
    passed: int
    covers: bool
    cached: str
    act: str


class StepCancelledData(TypedDict, total=False):
    """A call that was cancelled."""

    spent: dict[str, Any]
    call: dict[str, str]
    first_at: str
    opened: int
    input: str
    undo: bool


class BarrierData(TypedDict, total=False):
    """A point of a graph that has no body."""

    next: str
    given: dict[str, Any]
    passed: int
    act: str


class SignalData(TypedDict, total=False):
    """A signal that was read."""

    signal: int
    sender: str
    act: str


class ChildData(TypedDict, total=False):
    """The start of a child, or its report."""

    child: str
    renew: bool
    signal: int
    spent: dict[str, Any]
    input: str
    undo: bool
    act: str


class UndoData(CommandData, total=False):
    """The steps that are undone, or a person's decision about those whose undo has failed."""


class DecisionData(TypedDict, total=False):
    """A decision of the workflow's code or of a graph."""

    choice: int
    next: str


class PatchData(TypedDict, total=False):
    """The path that `ks.patched` took."""

    choice: int


class PublishedData(TypedDict, total=False):
    """A published value."""

    key: str


class ProgressData(TypedDict, total=False):
    """The value that a step has saved for its next attempt. With `recoveries`, it counts as progress of the run."""

    epoch: int
    recoveries: int


class EmittedData(TypedDict, total=False):
    """Tokens of a step's body: the lease under which the body began."""

    epoch: int


class ReplyData(TypedDict, total=False):
    """The reply to a question."""

    ask: str


class RecoveredData(CommandData, _From, total=False):
    """A recovery: with `act`, a person asks for it; with `handler` alone, its handler has answered."""

    epoch: int
    recoveries: int
    unrecorded: int
    handler: str
    skips: str
    skip_validation: bool


class SupersededData(CommandData, DefinitionData, _From, total=False):
    """A command or a migration after which earlier records no longer count, or count otherwise."""

    version: str
    fingerprint: str
    renames: dict[str, str]
    next: str
    seqs: list[int]
    beyond: int


class ErrorData(CommandData, total=False):
    """A run that was set aside: by the engine, a recovery handler, a repair, or a move to another store."""

    handler: str
    problems: list[str]
    repeats: list[str]
    aside: str
    due_at: float | None
    wakes: list[str]
    target: str


class RunFinishedData(CommandData, total=False):
    """The end of a run."""

    continued_as: str
    failed_at: int
    at: str
    path: list[str]
    not_undone: list[str]


#: The class of each kind's `data`. Records of other kinds have none.
SHAPES: Mapping[Kind, Callable[..., object]] = {
    Kind.RUN_STARTED: RunStartedData,
    Kind.STEP_STARTED: StepData,
    Kind.STEP_COMPLETED: StepCompletedData,
    Kind.STEP_FAILED: StepData,
    Kind.STEP_CANCELLED: StepCancelledData,
    Kind.BARRIER: BarrierData,
    Kind.SIGNAL: SignalData,
    Kind.CHILD: ChildData,
    Kind.AGENT_COMPLETED: ChildData,
    Kind.DECISION: DecisionData,
    Kind.PATCH: PatchData,
    Kind.PUBLISHED: PublishedData,
    Kind.PROGRESS: ProgressData,
    Kind.EMITTED: EmittedData,
    Kind.REPLY: ReplyData,
    Kind.UNDO: UndoData,
    Kind.RECOVERED: RecoveredData,
    Kind.SUPERSEDED: SupersededData,
    Kind.ERROR: ErrorData,
    Kind.STATE: CommandData,
    Kind.RUN_FINISHED: RunFinishedData,
}


class HasData(Protocol):
    """A record."""

    @property
    def data(self) -> Data | None: ...


def new_data(shape: Callable[P, object], *_: P.args, **keys: P.kwargs) -> Data:
    """Return the `data` of a new record of one kind; raise for a key that its class does not have."""
    unknown = keys.keys() - shape.__annotations__.keys()
    if unknown:
        raise TypeError(f"{shape.__name__} has no {sorted(unknown)}")
    return cast("Data", keys)


def data_of(record: HasData, shape: Callable[..., T]) -> T:  # noqa: ARG001 - it only names the type
    """Return the `data` of a record as that of its kind; `Data` itself stands for any kind. Empty if it has none."""
    return cast("T", record.data or {})


# -- the table ---------------------------------------------------------------------------------------------------------

_HINTS = Data.__annotations__

#: How each key is treated.
KEYS: Mapping[str, Key] = {name: get_args(hint)[1] for name, hint in _HINTS.items()}
#: Keys of an encrypted record that stay readable.
OPEN = frozenset(name for name, key in KEYS.items() if not key.hidden)
#: Keys that the engine acts on.
STEERING = frozenset(name for name, key in KEYS.items() if key.steers)


def type_of(name: str) -> type | UnionType:
    """Return the type of a key's value, without the types of its parts."""
    hint = get_args(_HINTS[name])[0]
    return cast("type | UnionType", get_origin(hint) if get_origin(hint) in (dict, list) else hint)


#: Keys that are checked against a type when a record is read.
CHECKED = {name: type_of(name) for name, key in KEYS.items() if key.checked}


def kinds_of(name: str) -> frozenset[str]:
    """Return the kinds of record that may have a key."""
    return frozenset(kind.value for kind, shape in SHAPES.items() if name in shape.__annotations__)


def unlisted(kind: str, data: Mapping[str, object]) -> list[str]:
    """Return the problems of a record's keys: unlisted, not of this kind, or of another type."""
    shape = SHAPES.get(Kind(kind))
    own = shape.__annotations__ if shape is not None else {}
    found = []
    for name, value in data.items():
        if name not in KEYS:
            found.append(f"{name!r} is not listed")
        elif name not in own:
            found.append(f"{name!r} is not a key of {kind!r}")
        elif not isinstance(value, type_of(name)):
            found.append(f"{name!r} is a {type(value).__name__}")
    return found
