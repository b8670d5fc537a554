"""A checkpoint saver for LangGraph on any store; it loses no update of a thread that several callers make."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from ...engine.documents import Documents
from ...errors import DefinitionError
from ...records.keys import Keys
from .serde import strict
from .threads import COLLECTION, Ask, Chains, Get, Plan, Remove, Threads, Write

T = TypeVar("T")

#: Digits of the number in the version of a channel. Versions are compared as text.
_VERSION_DIGITS = 12


class KeepstepSaver(BaseCheckpointSaver[str]):
    """A checkpoint saver on a store: the `url` of one, an engine, or the documents of one.

    `types` are the classes of the state that may be stored, or a schema whose annotations name them; those of LangGraph
    and LangChain need not be listed. `serde` is another serializer. `keys` and `options` are those of the store, for a
    `url`. An update that is based on a checkpoint that is no longer the newest raises `ThreadMoved`.
    """

    def __init__(
        self,
        store: Any,
        *,
        types: Iterable[Any] = (),
        serde: SerializerProtocol | None = None,
        keys: Keys | None = None,
        **options: Any,
    ) -> None:
        super().__init__(serde=strict(serde, types))
        self._documents, self._owned = documents_of(store, keys, options)
        self._chains = Chains()

    @property
    def documents(self) -> Documents:
        """The documents in which the threads are stored."""
        return self._documents

    def close(self) -> None:
        """Close a store that this saver has opened."""
        if self._owned:
            self._documents.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def get_next_version(self, current: str | float | None, channel: None = None) -> str:
        """Return a version after the current one. Its end is drawn, so that two branches of a thread differ."""
        number, _, _ = "0".partition(".") if current is None else str(current).partition(".")
        return f"{int(number) + 1:0{max(_VERSION_DIGITS, len(number))}}.{secrets.token_hex(4)}"

    @property
    def _threads(self) -> Threads:
        return Threads(self.serde, self._chains)  # the serializer differs in copies that LangGraph makes

    # -- blocking ----------------------------------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return run_plan(self._documents, self._threads.get_tuple(config))

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - the name that LangGraph gives it
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        yield from run_plan(self._documents, self._threads.list(config, filter, before, limit))

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return run_plan(self._documents, self._threads.put(config, checkpoint, metadata, new_versions))

    def put_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        run_plan(self._documents, self._threads.put_writes(config, writes, task_id, task_path))

    def delete_thread(self, thread_id: str) -> None:
        run_plan(self._documents, self._threads.delete_thread(str(thread_id)))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        run_plan(self._documents, self._threads.delete_for_runs(run_ids))

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        run_plan(self._documents, self._threads.copy_thread(str(source_thread_id), str(target_thread_id)))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        for plan in self._pruning(thread_ids, strategy):
            run_plan(self._documents, plan)

    def _pruning(self, thread_ids: Sequence[str], strategy: str) -> Iterator[Plan[None]]:
        if strategy not in ("keep_latest", "delete"):
            raise DefinitionError(f"strategy= must be 'keep_latest' or 'delete', got {strategy!r}")
        threads = self._threads
        act = threads.prune if strategy == "keep_latest" else threads.delete_thread
        return (act(str(thread)) for thread in thread_ids)

    # -- async -------------------------------------------------------------------------------------------------------

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return await await_plan(self._documents, self._threads.get_tuple(config))

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,  # noqa: A002 - the name that LangGraph gives it
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        for one in await await_plan(self._documents, self._threads.list(config, filter, before, limit)):
            yield one

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        return await await_plan(self._documents, self._threads.put(config, checkpoint, metadata, new_versions))

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        await await_plan(self._documents, self._threads.put_writes(config, writes, task_id, task_path))

    async def adelete_thread(self, thread_id: str) -> None:
        await await_plan(self._documents, self._threads.delete_thread(str(thread_id)))

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        await await_plan(self._documents, self._threads.delete_for_runs(run_ids))

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        await await_plan(self._documents, self._threads.copy_thread(str(source_thread_id), str(target_thread_id)))

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        for plan in self._pruning(thread_ids, strategy):
            await await_plan(self._documents, plan)


def documents_of(owner: Any, keys: Keys | None, options: dict[str, Any]) -> tuple[Documents, bool]:
    """Return the documents of a URL, an engine or a store, and whether they were opened for the caller."""
    given = getattr(owner, "documents", owner)
    if isinstance(given, Documents):
        if keys is not None or options:
            raise DefinitionError("keys= and options of a store need its URL; an engine has its own")
        return given, False
    return Documents.open(owner, keys=keys, **options), True


def run_plan(documents: Documents, plan: Plan[T], collection: str = COLLECTION) -> T:
    """Carry out a plan in blocking code."""
    blocking = documents.blocking
    answer: Any = None
    try:
        while True:
            request: Any = plan.send(answer)
            if isinstance(request, Get):
                answer = blocking.get(collection, request.key)
            elif isinstance(request, Write):
                answer = blocking.write(*request.puts, patience_seconds=request.patience_seconds)
            elif isinstance(request, Remove):
                answer = blocking.remove(collection, request.prefix)
            elif isinstance(request, Ask):
                answer = request.blocking()
            else:
                answer = blocking.list(collection, **request.options)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def await_plan(documents: Documents, plan: Plan[T], collection: str = COLLECTION) -> T:
    """Carry out a plan in async code."""
    answer: Any = None
    while True:
        try:
            request: Any = plan.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(request, Get):
            answer = await documents.get(collection, request.key)
        elif isinstance(request, Write):
            answer = await documents.write(*request.puts, patience_seconds=request.patience_seconds)
        elif isinstance(request, Remove):
            answer = await documents.remove(collection, request.prefix)
        elif isinstance(request, Ask):
            answer = await request.awaited()
        else:
            answer = await documents.list(collection, **request.options)
