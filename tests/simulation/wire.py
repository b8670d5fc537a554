"""The line between one simulated process and the store: here calls fail, are late or lost, and processes die."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from keepstep.errors import StoreUnavailable
from keepstep.model import (
    Ask,
    Claims,
    Flaw,
    GateChange,
    GateInfo,
    Grant,
    News,
    QueueCounts,
    Run,
    RunPage,
    RunQuery,
    Signal,
    WorkerInfo,
)
from keepstep.ports import Answer, Change, ClaimRequest, Row, WouldBlock

if TYPE_CHECKING:
    from .process import Process

T = TypeVar("T")


class Killed(BaseException):
    """The process has died in the middle of a call."""


class Wire:
    """A store as one process has it: the world's own, unless something befalls the call."""

    quick = True
    transactional = False

    def __init__(self, process: Process) -> None:
        self._process = process
        self._inner = process.world.store
        self.url = self._inner.url
        self.clock = self._inner.clock
        self.lease_seconds = self._inner.lease_seconds

    def _call(self, kind: str, do: Callable[[], T], *, wait: bool = True) -> T:
        """Make one call: what the plan has for it happens before it, instead of it, or after it."""
        process = self._process
        if process.dead:
            raise Killed
        fate = process.fate_of_call(kind)
        if fate == "slow" and not wait:
            raise WouldBlock
        if fate == "die before":
            process.die(f"before a {kind}")
            raise Killed
        if fate == "fail":
            raise StoreUnavailable("the store did not answer")
        if fate == "vanish":
            raise StoreUnavailable("the connection was lost", unknown=True)
        answer = do()
        if fate == "die after":
            process.die(f"after a {kind}")
            raise Killed
        if fate == "lose":
            raise StoreUnavailable("the answer of the store was lost", unknown=True)
        return answer

    # -- writes --------------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        return self._call("commit", lambda: self._process.world.commit(self._process, changes), wait=wait)

    def claim_runs(self, request: ClaimRequest) -> Claims:
        claims = self._call("claim", lambda: self._process.world.claim(self._process, request))
        if claims.claims and self._process.loses_claim():
            raise StoreUnavailable("the answer of the store was lost", unknown=True)
        return claims

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        return self._call("heartbeat", lambda: self._process.world.renew(self._process, worker, leaving=leaving))

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        return self._call("delete", lambda: self._inner.delete_runs(run_ids, finished=finished, scrub=scrub))

    def change_gate(self, kind: str, name: str, change: GateChange) -> GateInfo:
        return self._call("gate", lambda: self._inner.change_gate(kind, name, change))

    def pass_gates(self, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        return self._call("gate", lambda: self._process.world.pass_gates(self._process, worker, asks))

    # -- reads ---------------------------------------------------------------------------------------------------------

    def list_gates(self, kind: str) -> list[GateInfo]:
        """Read the limits. This call has no fate of its own, so that kept plans go on naming the same calls."""
        if self._process.dead:
            raise Killed
        return self._inner.list_gates(kind)

    def count_queue(self, name: str) -> QueueCounts:
        return self._call("read", lambda: self._inner.count_queue(name))

    def get_run(self, run_id: str) -> Run | None:
        return self._call("read", lambda: self._inner.get_run(run_id))

    def list_runs(self, query: RunQuery) -> RunPage:
        return self._call("read", lambda: self._inner.list_runs(query))

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        return self._call("read", lambda: self._inner.list_checkpoints(run_id, after, limit, kinds))

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        return self._call("read", lambda: self._inner.list_signals(run_id, after, limit))

    def news(self, worker: str, cursor: int) -> News:
        """The notifications: these may be lost, late, or told again."""
        process = self._process
        if process.dead:
            raise Killed
        fate = process.fate_of_news()
        if fate == "fail":
            raise StoreUnavailable("the store did not answer")
        if fate == "late":
            return News(cursor)
        news = self._inner.news(worker, cursor)
        if fate == "lost":
            return News(news.cursor)
        if fate == "twice":
            return News(cursor, news.runs, changed=True)
        return news

    def list_workers(self, *, gone: bool = False) -> list[WorkerInfo]:
        return self._call("read", lambda: self._inner.list_workers(gone=gone))

    def check(self, *, mend: bool = False) -> list[Flaw]:
        return self._call("read", lambda: self._inner.check(mend=mend))

    def close(self) -> None:
        """The store is the world's."""

    def __repr__(self) -> str:
        return f"<wire of {self._process}>"
