"""Turns: callers of one thread of LangGraph, in any process, run its graph one after the other."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any

from langchain_core.runnables import RunnableConfig, ensure_config
from langgraph.pregel import Pregel

from ...engine.documents import Documents
from ...errors import DefinitionError, TimedOut
from ...ports import Put, Verdict
from .saver import KeepstepSaver
from .threads import thread_prefix

#: The collection of turns: a thread has a document while a caller has its turn.
TURNS = "langgraph:turns"
#: Seconds until the turn of a caller that has died ends. A living caller renews it three times meanwhile.
LEASE_SECONDS = 15.0
#: Seconds between two looks at a turn that another caller has, at first and at most.
_SHORTEST_WAIT, _LONGEST_WAIT = 0.002, 0.05

#: Threads whose turn the caller has, so that a node may update its own thread.
_HELD: ContextVar[frozenset[str]] = ContextVar("keepstep_langgraph_turns", default=frozenset())


class Turn:
    """The turn of one caller on a thread."""

    def __init__(self, documents: Documents, thread: str, lease_seconds: float) -> None:
        self._documents, self._key, self._lease = documents, thread_prefix(thread), lease_seconds
        self._caller = secrets.token_hex(8).encode()
        self.version = 0

    def asked(self) -> Put:
        """Return the write that takes the turn, or renews it."""
        until = datetime.now(UTC) + timedelta(seconds=self._lease)
        return Put(TURNS, self._key, self._caller, expect=self.version, expires_at=until)

    def ended(self) -> Put:
        """Return the write that ends the turn."""
        return Put(TURNS, self._key, None, expect=self.version)


@asynccontextmanager
async def _turn(saver: KeepstepSaver, thread: str, options: _TurnOptions) -> AsyncIterator[None]:
    documents, turn = saver.documents, Turn(saver.documents, thread, options.lease_seconds)
    for wait in options.waits(thread):
        written = await documents.write(turn.asked())
        if written.verdict is Verdict.DONE:
            turn.version = written.versions[0]
            break
        await asyncio.sleep(wait)

    async def renew() -> None:
        while True:
            await asyncio.sleep(options.lease_seconds / 4)
            again = await documents.write(turn.asked())
            if again.verdict is not Verdict.DONE:
                return
            turn.version = again.versions[0]

    renewing = asyncio.ensure_future(renew())
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        await documents.write(turn.ended())


@contextmanager
def _blocking_turn(saver: KeepstepSaver, thread: str, options: _TurnOptions) -> Iterator[None]:
    documents, turn = saver.documents.blocking, Turn(saver.documents, thread, options.lease_seconds)
    for wait in options.waits(thread):
        written = documents.write(turn.asked())
        if written.verdict is Verdict.DONE:
            turn.version = written.versions[0]
            break
        time.sleep(wait)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(options.lease_seconds / 4):
            again = documents.write(turn.asked())
            if again.verdict is not Verdict.DONE:
                return
            turn.version = again.versions[0]

    renewing = threading.Thread(target=renew, daemon=True, name="keepstep-langgraph-turn")
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()
        documents.write(turn.ended())


class _TurnOptions:
    def __init__(self, lease_seconds: float, wait_seconds: float | None) -> None:
        self.lease_seconds, self.wait_seconds = lease_seconds, wait_seconds

    def waits(self, thread: str) -> Iterator[float]:
        """Yield the seconds to wait before each further look; raise `TimedOut` after the caller's patience."""
        began, wait = time.monotonic(), _SHORTEST_WAIT
        while self.wait_seconds is None or time.monotonic() - began < self.wait_seconds:
            yield wait * random.uniform(0.5, 1.0)  # noqa: S311 - it keeps callers apart
            wait = min(wait * 1.5, _LONGEST_WAIT)
        raise TimedOut(f"thread {thread!r} had no turn for this caller within {self.wait_seconds} s")


class _InTurn(Pregel):  # type: ignore[type-arg]
    """The methods of a graph that run or update a thread; each waits for its turn. All others call these."""

    _options: _TurnOptions

    def stream(self, input: Any, config: RunnableConfig | None = None, **more: Any) -> Iterator[Any]:  # noqa: A002
        thread = _thread_of(config)
        if thread is None:
            yield from super().stream(input, config, **more)
            return
        stream: Any = super().stream(input, config, **more)
        with _blocking_turn(_saver_of(self), thread, self._options), closing(stream) as chunks:
            while (chunk := _held(thread, lambda: next(chunks, _END))) is not _END:
                yield chunk

    async def astream(
        self,
        input: Any,  # noqa: A002
        config: RunnableConfig | None = None,
        **more: Any,
    ) -> AsyncIterator[Any]:
        thread = _thread_of(config)
        if thread is None:
            async for chunk in super().astream(input, config, **more):
                yield chunk
            return
        stream: Any = super().astream(input, config, **more)
        async with _turn(_saver_of(self), thread, self._options), aclosing(stream) as chunks:
            while True:
                before = _HELD.set(_HELD.get() | {thread})
                try:
                    chunk = await anext(chunks, _END)
                finally:
                    _HELD.reset(before)
                if chunk is _END:
                    return
                yield chunk

    def bulk_update_state(self, config: RunnableConfig, supersteps: Sequence[Any]) -> RunnableConfig:
        thread = _thread_of(config)
        if thread is None:
            return super().bulk_update_state(config, supersteps)
        with _blocking_turn(_saver_of(self), thread, self._options):
            return super().bulk_update_state(config, supersteps)

    async def abulk_update_state(self, config: RunnableConfig, supersteps: Sequence[Any]) -> RunnableConfig:
        thread = _thread_of(config)
        if thread is None:
            return await super().abulk_update_state(config, supersteps)
        async with _turn(_saver_of(self), thread, self._options):
            return await super().abulk_update_state(config, supersteps)


def _thread_of(config: RunnableConfig | None) -> str | None:
    """Return the thread of a call; None if the caller has its turn already."""
    found = ensure_config(config).get("configurable", {}).get("thread_id")
    return None if found is None or str(found) in _HELD.get() else str(found)


def _held(thread: str, act: Callable[[], Any]) -> Any:
    before = _HELD.set(_HELD.get() | {thread})
    try:
        return act()
    finally:
        _HELD.reset(before)


def _saver_of(graph: Any) -> KeepstepSaver:
    return graph.checkpointer  # type: ignore[no-any-return]


#: Marks the end of a stream.
_END = object()


def in_turn(graph: Any, *, lease_seconds: float = LEASE_SECONDS, wait_seconds: float | None = None) -> Any:
    """Return a graph that runs and updates a thread only while no other caller does, in any process.

    Its checkpointer must be a `KeepstepSaver`. A caller waits for its turn, at most `wait_seconds`. The turn of a
    caller that has died ends after `lease_seconds`.
    """
    if not isinstance(graph, Pregel) or not isinstance(graph.checkpointer, KeepstepSaver):
        raise DefinitionError("in_turn needs a compiled graph whose checkpointer is a KeepstepSaver")
    if lease_seconds <= 0:
        raise DefinitionError(f"lease_seconds= must be more than 0, got {lease_seconds!r}")
    made = graph.copy()
    kind = type("InTurn", (_InTurn, type(graph)), {"_options": _TurnOptions(lease_seconds, wait_seconds)})
    made.__class__ = kind
    return made
