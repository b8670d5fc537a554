"""The messages between a worker and the process in which a body runs: the task, and the reports about it.

Values cross as text of Keepstep's codec, and messages as MessagePack of the fixed forms below. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

#: Bytes of the length before each message.
HEADER = 4
#: Largest message in bytes. A value has its own limit, which is far below.
MOST_BYTES = 1 << 31


class Function(msgspec.Struct, frozen=True, array_like=True):
    """The place of a function: a module, the path of names in it, and the module's file if it has one."""

    module: str
    name: str
    file: str = ""
    #: The function itself, pickled by a cluster whose user has chosen that; empty otherwise. No worker reads it.
    pickled: bytes = b""

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class Task(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of a step, as it crosses. `name` is the same for the same attempt after a recovery."""

    name: str
    function: Function
    #: The arguments: a list of positional ones and a dictionary of named ones.
    input: bytes
    run: str
    workflow: str
    step: str
    attempt: int
    idempotency_key: str
    #: Seconds that the body may take; None if it has no limit.
    seconds: float | None = None
    #: The value that an earlier attempt has saved with `ks.save_progress`.
    saved: bytes | None = None
    agent: str | None = None
    stage: str | None = None
    #: The W3C trace context of the attempt.
    traceparent: str | None = None
    #: Places of positional arguments that are the states of a graph.
    states: tuple[int, ...] = ()
    #: Whether the workflow carries a state, for the advice in messages.
    in_graph: bool = False
    #: Whether the body may begin. If not, the outcome of one that has begun before is all that is asked for.
    may_begin: bool = True


class Given(msgspec.Struct, frozen=True):
    """The argument of a process: its end of a socket, and the settings of its worker."""

    descriptor: int
    memory_bytes: int = 0
    #: Levels of the worker's loggers, by their names; "" is the root.
    levels: dict[str, int] = {}
    #: Settings for the module that it runs, such as those of a cluster.
    settings: dict[str, Any] = {}


class Message(msgspec.Struct, frozen=True, array_like=True):
    """A message about one body. `body` is a number that the worker gave it for this connection."""

    body: int


# -- from the worker ---------------------------------------------------------------------------------------------------


class Run(Message, frozen=True, tag="run"):
    """Perform a body, or continue with one of the same name that has begun before."""

    task: Task
    #: Options of the cluster, such as resources.
    options: dict[str, Any] = {}
    #: Reports of the body that the worker has taken, so that a cluster need not repeat them.
    seen: int = 0


class Stop(Message, frozen=True, tag="stop"):
    """End a body: its outcome is no longer wanted."""


class Release(Message, frozen=True, tag="release"):
    """The outcome of a body is durable, so it need not be kept. One that goes on is left to the next worker."""


# -- to the worker -----------------------------------------------------------------------------------------------------


class Begun(Message, frozen=True, tag="begun"):
    """The body has begun, some seconds ago."""

    seconds_ago: float = 0.0


class Emitted(Message, frozen=True, tag="emitted"):
    """A token for readers of the run."""

    data: bytes
    agent: str | None = None
    stage: str | None = None


class Saved(Message, frozen=True, tag="saved"):
    """A value for the next attempt."""

    data: bytes


class Reported(Message, frozen=True, tag="reported"):
    """The share of its work that the body has done."""

    fraction: float
    text: str = ""


class Spent(Message, frozen=True, tag="spent"):
    """Money and tokens that the body has used."""

    cost: float
    tokens: int
    model: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0


class Published(Message, frozen=True, tag="published"):
    """A value that is shown to readers of the run."""

    key: str
    data: bytes
    agent: str | None = None
    stage: str | None = None


class Called(Message, frozen=True, tag="called"):
    """A model or a tool that an agent's framework calls in the body."""

    operation: str
    about: dict[str, str] = {}


class Logged(Message, frozen=True, tag="logged"):
    """A log record of the body's process."""

    logger: str
    level: int
    text: str
    file: str = ""
    line: int = 0
    function: str = ""


class FarError(msgspec.Struct, frozen=True, array_like=True):
    """An exception as it crosses: enough to classify, record and raise it, without importing its class."""

    module: str
    name: str
    #: The nearest class of Python's own.
    builtin: str
    text: str
    #: The arguments and the attributes of the exception, as far as the codec can write them.
    args: bytes | None = None
    fields: dict[str, bytes] = {}
    traceback: str = ""
    cause: FarError | None = None
    #: Whether `cause` was given with `raise ... from`, rather than being the error that was handled.
    is_given: bool = False
    #: Status codes and the like of an answer, which classify an error: `status_code` and headers.
    answer: bytes | None = None
    #: The exceptions of a group.
    parts: list[FarError] = []


class Done(Message, frozen=True, tag="done"):
    """The body has returned; `data` is its encoded result. `form` says how a result of a graph's step is read."""

    data: bytes
    form: str = ""


class Failed(Message, frozen=True, tag="failed"):
    """The body has raised."""

    error: FarError


class Lost(Message, frozen=True, tag="lost"):
    """The body has ended without an outcome, and nothing of it goes on."""

    why: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The process takes tasks."""


class Unfit(msgspec.Struct, frozen=True, array_like=True, tag="unfit"):
    """The process cannot take tasks, and ends."""

    why: str


Report = Emitted | Saved | Reported | Spent | Published | Called | Logged
Ended = Done | Failed | Lost
FromWorker = Run | Stop | Release
ToWorker = (
    Begun | Emitted | Saved | Reported | Spent | Published | Called | Logged | Done | Failed | Lost | Ready | Unfit
)

_encode = msgspec.msgpack.Encoder().encode
read_order = msgspec.msgpack.Decoder(FromWorker).decode
read_report = msgspec.msgpack.Decoder(ToWorker).decode


def framed(message: FromWorker | ToWorker) -> bytes:
    """Return a message with its length before it."""
    data = _encode(message)
    return len(data).to_bytes(HEADER, "big") + data


class Frames:
    """Cuts a stream of bytes into messages."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """Add bytes, and return the messages that are whole now."""
        held = self._data
        held += data
        found, at = [], 0
        while len(held) - at >= HEADER:
            size = int.from_bytes(held[at : at + HEADER], "big")
            if len(held) - at - HEADER < size:
                break
            found.append(bytes(held[at + HEADER : at + HEADER + size]))
            at += HEADER + size
        del held[:at]
        return found


class FarWork(Protocol):
    """The body of one attempt, for an executor whose bodies run elsewhere."""

    @property
    def is_marked(self) -> bool:
        """Whether the body must not begin again once it may have begun."""
        return False

    @property
    def is_left(self) -> bool:
        """Whether the run has left this worker, so that another one continues it."""
        return False

    def task(self, *, pickled: bool = False) -> Task:
        """Return the attempt as it crosses. Raise `DefinitionError` if its function cannot be found by name."""

    def time_to_begin(self) -> float | None:
        """Return the seconds after which the body need not begin any more; None if it may wait as long as it must."""

    def begun(self, seconds_ago: float = 0.0) -> float | None:
        """Note that the body has begun; return the seconds that it may still take."""

    def take_report(self, message: Report) -> None:
        """Do for the body what it asks of its run: emit a token, save progress, report spend, log."""

    async def read(self, done: Done) -> Any:
        """Return the result of the body."""

    def when_durable(self, then: Callable[[], None]) -> None:
        """Call `then` once the outcome of the attempt is durable."""

    def holds_lease(self) -> bool: ...

    def may_begin(self) -> bool: ...
