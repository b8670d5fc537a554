"""The port between the kernel and the process that drives a run: everything that a run asks of its surroundings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextvars import Context
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from datetime import datetime

    from ..errors import EncryptionError, SchemaMismatch
    from ..executors.thread import Threads
    from ..model import Claim, Event, Run, Signal, Status
    from ..model.event import EventName
    from ..model.notices import Topic
    from ..policies.assignment import Score
    from ..policies.classify import Rule
    from ..policies.recovery import Recovery, RecoveryLimit
    from ..ports import Answer, Change, Clock, Create, Document, Executor, Row, Send, Tracer
    from ..records.keys import Cipher
    from ..records.record import Record
    from ..values import Values
    from ..workflows.agent import TaskPlan
    from ..workflows.dag import Dag
    from ..workflows.definition import Step, Workflow
    from ..workflows.graph import Graph
    from ..workflows.recovery import RecoveryInfo
    from .log import RecoveryPlan
    from .saved import StepsProgress

T = TypeVar("T")

#: A run that is driven, to its host: the kernel's driver, which stands above this port.
Driven = Any


class Journal(Protocol):
    """Takes what runs have to write, and commits it in batches."""

    refused: bool

    def add(self, run: Driven, *, now: bool = False) -> None: ...

    def write_pending(self, run: Driven) -> None: ...

    def holds(self, run: Driven) -> bool: ...

    async def write(self, change: Change | Callable[[], Change]) -> Answer: ...

    async def drained(self) -> None: ...


class Redaction(Protocol):
    """Checks values before they are stored, and takes secrets out of texts."""

    max_value_bytes: int

    def check(self, data: bytes, name: str, what: str = "step") -> None: ...

    def redact(self, text: str) -> str: ...

    def token(self, value: Any, values: Values, where: str, key: str) -> bytes: ...

    def shown(self, data: bytes, key: str) -> bytes: ...

    def tags(self, tags: dict[str, str] | None) -> dict[str, str]: ...

    def input_of(self, workflow: Workflow[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bytes: ...

    def add_rules_of(self, workflow: Workflow[..., Any]) -> None: ...


class RunKeys(Protocol):
    """Encrypts and decrypts what a run stores."""

    #: Whether nothing is stored in plain text.
    of_everything: bool

    def cipher(self, run: Run) -> Cipher | None: ...

    def input(self, run: Run) -> bytes: ...

    def born(self, run: Run, first: Record | None = None) -> Create: ...

    def cannot_read(self, error: EncryptionError) -> None: ...


class Events(Protocol):
    """Emits events to observers. `logged` says whether one of them logs every event."""

    observed: bool
    logged: bool

    def observe(self, name: EventName, context: Driven, *, step: str = "", attempt: int = 0, **data: Any) -> None: ...

    def emit_record(self, context: Driven, record: Record) -> None: ...

    def ended(self, context: Driven, status: Status, record: Record) -> None: ...

    def repeat(self, context: Driven) -> None:
        """Give tracers the newest records of a run that was taken over from a dead worker."""

    def emit(self, event: Event) -> None: ...


class Conductor(Protocol):
    """Moves a run on where its own parts cannot: it knows all of the kernel, and they do not know each other."""

    def replay_next(self, run: Driven) -> bool:
        """Deliver the next recorded outcome; return whether the code must come to rest before the one after it."""

    def is_being_read(self, run: Driven, call: Any, record: Record) -> bool:
        """Decode a large value off the loop before it is delivered; return whether that is under way."""

    def idle(self, run: Driven) -> None:
        """Pause, hand back or park a run that is at rest and has nothing to deliver, if that is called for."""

    def settle(self, run: Driven) -> None:
        """Cancel the code if that waited for a step which has now ended."""

    def code_ended(self, run: Driven, future: asyncio.Future[Any]) -> None:
        """The code has returned or raised."""

    def started(self, run: str, workflow: Workflow[..., Any], worker: str, at: datetime) -> Record:
        """The first record of a run."""

    def call_workflow(
        self, branch: Any, workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def walk(self, branch: Any, graph: Graph, initial: Mapping[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]: ...

    def walk_dag(self, branch: Any, dag: Dag, inputs: dict[str, Any]) -> Coroutine[Any, Any, dict[str, Any]]: ...

    def perform(self, plan: TaskPlan, task: Any) -> Coroutine[Any, Any, Any]: ...


class Executors(Protocol):
    """The places where bodies of steps run."""

    def of(self, step: Step[..., Any], workflow: Workflow[..., Any]) -> Executor: ...

    def width(self, step: Step[..., Any], workflow: Workflow[..., Any]) -> int | None:
        """How many bodies of one map may usefully be under way; None if the executor does not say."""


class SignalReader(Protocol):
    """Reads the signals of a run that the store has and the run has not seen."""

    def begun(self, run: Driven) -> None: ...

    def fetch(self, run: Driven) -> None: ...

    async def check_missed(self, run: Driven) -> None: ...


class Place(Protocol):
    """A place at a service that one attempt holds."""

    has_begun: bool

    def ended(self, failed: bool | None, spent: float | None) -> None:
        """The body has ended, or no longer concerns its step: whether that counts for the breaker, and its spend."""

    def succeed(self) -> None:
        """Give the place back after an attempt that has succeeded, and has reported no spend."""

    def leave(self) -> None:
        """Give the place back; the body has really ended, or does not begin."""

    def leave_to(self, run: str) -> None:
        """Keep the place for the next attempt of a run."""


class Turn(asyncio.Future["Place | None"]):
    """The wait of an attempt for a place. Its result is None if the breaker is open and attempts fail then."""

    def __init__(self, run: str, since: float, cost: float | None, probe_seconds: float, loop: Any) -> None:
        super().__init__(loop=loop)
        self.run = run
        self.since = since
        self.cost = cost
        self.probe_seconds = probe_seconds


class ServiceShare(Protocol):
    """The places of one service that attempts of this process may use."""

    name: str

    @property
    def waits(self) -> str:
        """The service and why attempts wait for it, as in `openai (rate)`."""

    @property
    def why(self) -> str:
        """Why attempts wait: "concurrency", "rate", "spend", "breaker", or nothing if that is not known yet."""

    def take(self, cost: float | None) -> Place | None:
        """Return a place if there is one for every attempt; None if an attempt must take its turn."""

    def turn(self, run: str, priority: int, since: float | None, cost: float | None, probe_seconds: float) -> Turn:
        """Return the turn of an attempt, which is done if there is a place. It has waited `since` this time, if any."""

    def withdraw(self, turn: Turn) -> None:
        """Drop a turn whose attempt no longer waits; a place that it has got already is given back."""

    def retry_seconds(self, run: str) -> float:
        """Return for how long a retry of a run has to wait, so that few attempts are retries. Count it if 0."""


class Shares(Protocol):
    """The shares of all services that attempts of this process call."""

    def of(self, service: str) -> ServiceShare: ...


class Assignment(NamedTuple):
    """The agent that gets a task, or None, and the scores of all agents that were looked at."""

    agent: str | None
    version: str
    scores: Sequence[Score]


class Registry(Protocol):
    """The agents of a store, as a run sees them that gives them tasks."""

    @property
    def look_seconds(self) -> float:
        """Seconds between two heartbeats of a host."""

    async def assign(
        self, needs: Sequence[str], team: Sequence[str] | None, tried: Collection[str], least: float
    ) -> Assignment:
        """Choose an agent for a task: one of the team, if that is given."""

    async def look_after(self, task: str, agent: str, late: str, *, asked: bool) -> bool:
        """Cancel a task whose agent can no longer perform it, or that is `late`, for that reason.

        Return whether the agent was asked to stop: nobody else may end the task while the agent's host lives.
        """


class Documents(Protocol):
    """Documents of the store, beside the runs."""

    async def get(self, collection: str, key: str) -> Document | None: ...

    async def put(self, collection: str, key: str, value: bytes | None, **options: Any) -> int: ...


class StoredRuns(Protocol):
    """Reads runs of the store, beside the loop where that may take time."""

    @property
    def url(self) -> str: ...

    @property
    def encryption(self) -> RunKeys: ...

    @property
    def workflows(self) -> Mapping[str, Workflow[..., Any]]: ...

    async def stored_run(self, run_id: str) -> Run | None: ...

    async def newest_of_series(self, run_id: str) -> Run | None:
        """A run, or the newest that went on for it; None if it is gone."""

    async def records(
        self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()
    ) -> Sequence[Row]: ...

    async def signals(self, run_id: str, after: int = 0, limit: int = 1000) -> Sequence[Signal]: ...

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Work on a large value in a thread, so that the loop is free for everything else."""


class Notices(Protocol):
    """What a run tells its process. No answer is expected: a host that drives a single run may ignore all of it."""

    def entered(self, run: Driven) -> None:
        """The run is in memory; its records are read next."""

    def left(self, run: Driven) -> None:
        """The run is no longer in memory."""

    def progressed(self, run: Driven) -> None:
        """A recovered run has written something new."""

    def interrupted(self, run: Driven) -> None:
        """The program is about to end: the run is given back, and none is taken up again."""

    def give_back_later(self, run: Driven, pause_seconds: float = 0.0) -> None:
        """The run has left without giving up its lease."""

    def report_progress(self, run_id: str, progress: StepsProgress) -> None:
        """A step shows how far it has come, or has saved it: the next heartbeat stores the progress as it is then."""

    def claim_soon(self) -> None:
        """A run may be due."""

    def signalled(self, run_id: str) -> None:
        """A signal was sent to a run, which may be driven here."""

    def notify_waiters(self) -> None:
        """A run has changed in the store."""

    async def put_back(self, claim: Claim, error: EncryptionError | SchemaMismatch) -> None:
        """A claimed run cannot be read here, but perhaps by other workers."""

    async def cancel_successor(self, run_id: str) -> None:
        """A child that has ended was to be cancelled: the run that goes on for it is, if there is one."""


class Host(StoredRuns, Notices, Protocol):
    """What driving one run needs from its process. An engine provides it; so does a dry replay."""

    clock: Clock
    #: The monotonic clock of leases, and the time on it until which the leases of this process are fresh.
    seconds: Callable[[], float]
    fresh_until: float
    loop: asyncio.AbstractEventLoop
    #: The context variables of the process itself: callbacks run in it, so that they belong to no run.
    context: Context
    recovery_limit: RecoveryLimit
    #: Rules for the classes of errors, tried after those of a step and its workflow.
    rules: tuple[Rule, ...]
    linger_seconds: float
    stall_seconds: float
    idle_watch: Any
    forgetting: Any

    @property
    def perform(self) -> Callable[[Any], Coroutine[Any, Any, None]]: ...

    @property
    def journal(self) -> Journal: ...

    @property
    def shares(self) -> Shares: ...

    @property
    def redaction(self) -> Redaction: ...

    @property
    def agents(self) -> Registry: ...

    @property
    def documents(self) -> Documents: ...

    @property
    def events(self) -> Events: ...

    @property
    def signal_reader(self) -> SignalReader: ...

    @property
    def runner(self) -> Conductor: ...

    @property
    def executors(self) -> Executors:
        """The places where bodies of steps run."""

    @property
    def tracer(self) -> Tracer | None:
        """Gives runs and attempts their trace context; None if nobody traces."""

    @property
    def run_threads(self) -> Threads: ...

    @property
    def hook_threads(self) -> Threads: ...

    @property
    def transactional(self) -> bool:
        """Whether a step can take part in the commits of the store."""

    def lease_is_fresh(self) -> bool: ...

    def is_full(self) -> bool:
        """Whether the process drives as many runs as it may."""

    async def is_newer(self, run: Run) -> bool:
        """Whether a newer Keepstep has written part of a run that cannot be read."""

    def set_aside(
        self,
        run: Driven,
        kind: str,
        reason: str,
        *,
        phase: str = "resume",
        traceback: str = "",
        problems: Sequence[str] = (),
        handler: str = "",
    ) -> None:
        """Leave the run to a person, with the reason; whatever its code does no longer counts.

        `phase` says how far taking it up had come: load, validate, rebuild, handler, resume. `traceback` has the lines
        of the code that do not fit, and `problems` everything that the phase found. `handler` has answered so.
        """

    async def recovery_info(self, run: Driven, handler: str) -> RecoveryInfo:
        """What a recovery handler is told about the run."""

    async def plan_recovery(self, run: Driven, answer: Recovery) -> RecoveryPlan:
        """What the answer of a recovery handler takes: the records of the verb of that name."""

    def notices(
        self, topic: Topic, run: Run, *, text: str = "", key: str = "", at: datetime | None = None
    ) -> Sequence[Send]:
        """Return the signals with which a commit also tells channels about a run; none for Keepstep's own runs."""

    # -- the loop

    def background(self, coroutine: Coroutine[Any, Any, Any]) -> None: ...

    def beside(self, coroutine: Coroutine[Any, Any, T], context: Context) -> asyncio.Task[T]: ...

    def packed(self, data: bytes) -> bytes | None:
        """A large value compressed as it is kept; None if it is small or will be encrypted."""
