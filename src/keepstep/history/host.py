"""The port between commands on stored runs and the process that carries them out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..kernel.host import Journal, Redaction, RunKeys, StoredRuns

if TYPE_CHECKING:
    from ..model import Run, Signal
    from ..ports import Clock, Create, Store, Tracer
    from ..records.record import Record

T = TypeVar("T")


class CommandKeys(RunKeys, Protocol):
    """Encryption of the values that a command writes."""

    @property
    def store(self) -> Store | None: ...

    def check_writing(self) -> None: ...

    def copied(self, run: Run, records: Iterable[Record], signals: Iterable[Signal]) -> Create: ...


class CommandHost(StoredRuns, Protocol):
    """The process as a command sees it: an engine, with or without a worker."""

    clock: Clock
    store: Store
    closed: bool

    @property
    def journal(self) -> Journal: ...

    @property
    def redaction(self) -> Redaction: ...

    @property
    def artifacts(self) -> Any:
        """The artifacts of the store."""

    @property
    def encryption(self) -> CommandKeys: ...

    @property
    def tracer(self) -> Tracer | None:
        """Gives runs and attempts their trace context; None if nobody traces."""

    @property
    def worker_id(self) -> str | None:
        """The id of this process's worker, or None; it may already hold the lease that a command needs."""

    @property
    def actor(self) -> str:
        """The name in the audit for what the current task does."""

    async def ask(self, question: Callable[..., T], *args: Any) -> T:
        """Call a function with the store, and then with `args`."""

    async def read(self, function: Callable[..., T], *args: Any) -> T: ...

    async def call(self, function: Callable[..., T], *args: Any) -> T: ...

    def claim_soon(self) -> None: ...

    def signalled(self, run_id: str) -> None: ...

    def release_later(self, run_id: str, epoch: int) -> None:
        """Release a lease as soon as the store answers again."""

    async def cancel_now(self, run_id: str, reason: str = "", actor: str = "") -> list[str]: ...
