"""Threads of LangGraph as documents: their keys, their stored form, and the plans by which a saver reads and writes.

A plan is a generator: it yields a request to the documents, and gets the answer. So blocking and async code carry out
the same plan.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from ...errors import CheckpointCorrupt, DefinitionError, DocumentConflict
from ...ports import Document, Put, Verdict

T = TypeVar("T")

#: The collection of all threads. A key is `THREAD/h/NAMESPACE` for the head, `THREAD/c/NAMESPACE/ID/` for a checkpoint,
#: the same with the task's id for its writes, and `THREAD/v/NAMESPACE/CHANNEL/VERSION` for a large value of a channel.
COLLECTION = "langgraph:threads"
#: Bytes from which the value of a channel is a document of its own, which later checkpoints refer to.
LARGE_BYTES = 2_000
#: Seconds for which writes of a task wait for the checkpoint that follows them, to share its commit. LangGraph does not
#: wait for them meanwhile.
PATIENCE_SECONDS = 0.001
#: Characters of a part of a key at most; a longer one is stored as its digest.
_LONGEST_PART = 100
#: Namespaces without a checkpoint that a context remembers: those of a graph and of the subgraphs in it.
_FRESH_PLACES = 16
#: Chains of checkpoints and large values that a saver remembers at most.
_REMEMBERED = 10_000


class ThreadMoved(DocumentConflict):
    """Raised when a thread has a newer checkpoint than the one that an update is based on; nothing is written.

    Read the thread and update it again, or let callers take turns: `in_turn(graph)`.
    """


# -- requests ----------------------------------------------------------------------------------------------------------


class Get(NamedTuple):
    """Read one document."""

    key: str


class Find(NamedTuple):
    """Read documents by the options of `Documents.list`."""

    options: Mapping[str, Any]


class Write(NamedTuple):
    """Write a batch; with patience, together with another one that comes soon."""

    puts: Sequence[Put]
    patience_seconds: float = 0.0


class Remove(NamedTuple):
    """Remove the documents of a prefix."""

    prefix: str


class Ask(NamedTuple):
    """Ask something else than the documents, in blocking or in async code."""

    blocking: Callable[[], Any]
    awaited: Callable[[], Awaitable[Any]]


Plan = Generator[Get | Find | Write | Remove | Ask, Any, T]


def _put(key: str, value: bytes | None, expect: int | None = None) -> Put:
    return Put(COLLECTION, key, value, expect=expect)


# -- keys --------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=_REMEMBERED)
def _part(text: str) -> str:
    """Return a text as a part of a key, without a slash; a long text as its digest."""
    plain = quote(text, safe="!$&'()*+,:;=@|~ ")
    return plain if len(plain) <= _LONGEST_PART else f"%{hashlib.sha256(text.encode()).hexdigest()}"


def thread_prefix(thread: str) -> str:
    """Return the prefix of all documents of a thread."""
    return f"{_part(thread)}/"


class Place(NamedTuple):
    """A namespace of a thread."""

    thread: str
    space: str

    @property
    def head(self) -> str:
        return f"{_part(self.thread)}/h/{_part(self.space)}"

    @property
    def checkpoints(self) -> str:
        return f"{_part(self.thread)}/c/{_part(self.space)}/"

    def checkpoint(self, checkpoint_id: str) -> str:
        return f"{self.checkpoints}{_part(checkpoint_id)}/"

    def value(self, channel: str, version: Any) -> str:
        return f"{_part(self.thread)}/v/{_part(self.space)}/{_part(channel)}/{_part(str(version))}"

    def config(self, checkpoint_id: str, thread: str | None = None) -> RunnableConfig:
        where = {"thread_id": thread or self.thread, "checkpoint_ns": self.space, "checkpoint_id": checkpoint_id}
        return {"configurable": where}


def place_of(config: RunnableConfig) -> Place:
    """Return the namespace that a configuration names."""
    where = config.get("configurable", {})
    if "thread_id" not in where:
        raise DefinitionError("config= has no thread_id; pass {'configurable': {'thread_id': …}}")
    return Place(str(where["thread_id"]), where.get("checkpoint_ns") or "")


# -- stored forms ------------------------------------------------------------------------------------------------------


class Saved(msgspec.Struct, array_like=True):
    """A checkpoint as stored. Values of channels stand in `values`; `large` names those that are documents."""

    thread: str
    space: str
    id: str
    parent: str | None
    metadata: tuple[str, bytes]
    checkpoint: tuple[str, bytes]
    values: dict[str, tuple[str, bytes]]
    large: dict[str, str]


class SavedWrite(msgspec.Struct, array_like=True):
    """A write of a task as stored."""

    index: int
    channel: str
    value: tuple[str, bytes]
    path: str


class SavedWrites(msgspec.Struct, array_like=True):
    """The writes of one task as stored."""

    task: str
    writes: list[SavedWrite]


_encode = msgspec.msgpack.Encoder().encode
_saved = msgspec.msgpack.Decoder(Saved).decode
_saved_writes = msgspec.msgpack.Decoder(SavedWrites).decode
_value = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


# -- who follows the head ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Cursor:
    """A reader of a thread's head that goes on from it: the head it has seen, or last written."""

    place: Place
    id: str | None
    version: int


class _Followed(str):
    """The id of a thread in the configuration of one who has read its head. LangGraph hands it back with each write."""

    cursor: Cursor
    __slots__ = ("cursor",)

    @classmethod
    def of(cls, cursor: Cursor) -> _Followed:
        made = cls(cursor.place.thread)
        made.cursor = cursor
        return made


#: Cursors of threads that had no checkpoint when they were read: there was no configuration to carry them.
_FRESH: ContextVar[Mapping[Place, Cursor]] = ContextVar("keepstep_langgraph_fresh", default={})  # noqa: B039 - never changed


class Chains:
    """Chains of checkpoints that this process writes, by their last id, and large values that it knows to be stored."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cursors: OrderedDict[tuple[Place, str], Cursor] = OrderedDict()
        self._stored: OrderedDict[str, None] = OrderedDict()

    def cursor(self, place: Place, parent: str | None, thread: str) -> Cursor | None:
        """Return the cursor of a writer that goes on from the head; None for one that names a checkpoint by itself."""
        if isinstance(thread, _Followed) and thread.cursor.place == place and thread.cursor.id == parent:
            return thread.cursor
        if parent is None:
            cursor = _FRESH.get().get(place)
            return cursor if cursor is not None and cursor.id is None else None
        with self._lock:
            return self._cursors.get((place, parent))

    def advance(self, cursor: Cursor, checkpoint_id: str, version: int, stored: Iterable[str]) -> None:
        """Note that a chain has a new last checkpoint."""
        with self._lock:
            self._cursors.pop((cursor.place, cursor.id or ""), None)
            cursor.id, cursor.version = checkpoint_id, version
            self._cursors[cursor.place, checkpoint_id] = cursor
            self._stored.update(dict.fromkeys(stored))
            for remembered in (self._cursors, self._stored):
                while len(remembered) > _REMEMBERED:
                    remembered.popitem(last=False)

    def has(self, key: str) -> bool:
        return key in self._stored


# -- plans -------------------------------------------------------------------------------------------------------------


#: Checkpoints, each with its documents: its own is the first, and those of its writes follow.
Groups = Sequence[tuple[Saved, Sequence[Document]]]


class Threads:
    """Plans for the threads of a saver."""

    def __init__(self, serde: SerializerProtocol, chains: Chains) -> None:
        self.serde, self.chains = serde, chains

    # writing

    def put(
        self, config: RunnableConfig, checkpoint: Checkpoint, metadata: CheckpointMetadata, new: ChannelVersions
    ) -> Plan[RunnableConfig]:
        """Write a checkpoint. One that follows the head is written only if the head is still its parent."""
        place, parent = place_of(config), get_checkpoint_id(config)
        thread = config["configurable"]["thread_id"]
        cursor = self.chains.cursor(place, parent, thread)
        saved, puts = self._saved(place, config, checkpoint, metadata, known=None if cursor is None else new)
        puts.append(_put(place.checkpoint(saved.id), _encode(saved)))
        if cursor is None:
            yield from self._put_anywhere(place, saved, puts)
        else:
            yield from self._put_at_head(cursor, saved, puts)
        return place.config(saved.id)

    def _saved(
        self,
        place: Place,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        *,
        known: ChannelVersions | None,
    ) -> tuple[Saved, list[Put]]:
        """Return a checkpoint as stored, and the large values to write; those that are `known` but not new are."""
        dumps = self.serde.dumps_typed
        bare: Any = {key: of for key, of in checkpoint.items() if key != "channel_values"}
        facts = dumps(get_checkpoint_metadata(config, metadata))
        parent = get_checkpoint_id(config)
        saved = Saved(place.thread, place.space, checkpoint["id"], parent, facts, dumps(bare), {}, {})
        puts: list[Put] = []
        versions = checkpoint["channel_versions"]
        for channel, value in (checkpoint.get("channel_values") or {}).items():
            if known is not None and channel not in known and channel in versions:
                key = place.value(channel, versions[channel])
                if self.chains.has(key):
                    saved.large[channel] = key
                    continue
            kind, data = dumps(value)
            if len(data) < LARGE_BYTES or channel not in versions:
                saved.values[channel] = kind, data
            else:
                saved.large[channel] = key = place.value(channel, versions[channel])
                puts.append(_put(key, _encode((kind, data))))
        return saved, puts

    def _put_at_head(self, cursor: Cursor, saved: Saved, puts: list[Put]) -> Plan[None]:
        key = cursor.place.head
        while True:
            head = _put(key, _encode(saved.id), cursor.version)
            written = yield Write((*puts, head))
            if written.verdict is Verdict.DONE:
                self.chains.advance(cursor, saved.id, written.versions[-1], saved.large.values())
                return
            found = yield Get(key)
            if _head_id(found) != cursor.id:
                raise ThreadMoved(
                    f"thread {cursor.place.thread!r} has a newer checkpoint than the one that this update is based on:"
                    " another caller was first; read the thread and update it again, or use in_turn(graph)",
                    0 if found is None else found.version,
                )
            cursor.version = 0 if found is None else found.version

    def _put_anywhere(self, place: Place, saved: Saved, puts: list[Put]) -> Plan[None]:
        """Write a checkpoint that names its parent by itself, as one who goes back in time does."""
        while True:
            found = yield Get(place.head)
            version = 0 if found is None else found.version
            head = _head_id(found)
            newest = saved.id if saved.parent is not None or head is None else max(saved.id, head)
            written = yield Write((*puts, _put(place.head, _encode(newest), version)))
            if written.verdict is Verdict.DONE:
                return

    def put_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task: str, path: str) -> Plan[None]:
        """Add writes of a task to a checkpoint. A write that is there stays, unless all of these replace it."""
        key = f"{place_of(config).checkpoint(config['configurable']['checkpoint_id'])}{_part(task)}"
        dumps = self.serde.dumps_typed
        made = [
            SavedWrite(WRITES_IDX_MAP.get(channel, number), channel, dumps(value), path)
            for number, (channel, value) in enumerate(writes)
        ]
        replaces = all(channel in WRITES_IDX_MAP for channel, _ in writes)
        fresh = {one.index: one for one in made}
        there: dict[int, SavedWrite] = {}
        version = 0
        while (merged := {**there, **fresh} if replaces else {**fresh, **there}) != there:
            put = _put(key, _encode(SavedWrites(task, list(merged.values()))), version)
            written = yield Write([put], PATIENCE_SECONDS)
            if written.verdict is Verdict.DONE:
                return
            found = yield Get(key)
            version = 0 if found is None else found.version
            there = {} if found is None else {one.index: one for one in _saved_writes(found.value).writes}

    # reading

    def get_tuple(self, config: RunnableConfig) -> Plan[CheckpointTuple | None]:
        """Return a checkpoint, or the newest one of the namespace."""
        place, checkpoint_id = place_of(config), get_checkpoint_id(config)
        if checkpoint_id:
            found = yield Find({"prefix": place.checkpoint(checkpoint_id)})
            return (yield from self._tuple(found)) if found else None
        head = yield Get(place.head)
        if head is None:
            _FRESH.set(dict([*_FRESH.get().items(), (place, Cursor(place, None, 0))][-_FRESH_PLACES:]))
            return None
        cursor = Cursor(place, _head_id(head), head.version)
        found = yield Find({"prefix": place.checkpoint(cursor.id or "")})
        return (yield from self._tuple(found, _Followed.of(cursor))) if found else None

    def _tuple(self, documents: Sequence[Document], thread: str | None = None) -> Plan[CheckpointTuple]:
        """Return the checkpoint of a document, which the documents with its writes follow."""
        loads = self.serde.loads_typed
        saved = _saved(documents[0].value)
        place = Place(saved.thread, saved.space)
        checkpoint = loads(saved.checkpoint)
        values = {channel: loads(of) for channel, of in saved.values.items()}
        if saved.large:
            found = yield Find({"keys": tuple(saved.large.values())})
            stored = {one.key: _value(one.value) for one in found}
            for channel, key in saved.large.items():
                if key not in stored:
                    raise CheckpointCorrupt(f"checkpoint {saved.id!r} of thread {saved.thread!r} lacks {channel!r}")
                values[channel] = loads(stored[key])
        tasks = [_saved_writes(one.value) for one in documents[1:]]
        pairs = [(task.task, one) for task in tasks for one in task.writes]
        pairs.sort(key=lambda pair: (pair[1].path, pair[0], pair[1].index))
        return CheckpointTuple(
            place.config(saved.id, thread),
            {**checkpoint, "channel_values": values},  # type: ignore[typeddict-item]
            loads(saved.metadata),
            None if saved.parent is None else place.config(saved.parent),
            [(task, one.channel, loads(one.value)) for task, one in pairs],
        )

    def list(
        self,
        config: RunnableConfig | None,
        matching: Mapping[str, Any] | None,
        before: RunnableConfig | None,
        limit: int | None,
    ) -> Plan[Sequence[CheckpointTuple]]:
        """Return checkpoints, newest first."""
        where = (config or {}).get("configurable", {})
        last = get_checkpoint_id(before) if before else None
        thread, space, wanted = where.get("thread_id"), where.get("checkpoint_ns"), where.get("checkpoint_id")
        prefix = "" if thread is None else f"{thread_prefix(str(thread))}c/"
        options: dict[str, Any] = {"prefix": prefix}
        if prefix and space is not None:
            place = Place(str(thread), space)
            options["prefix"] = place.checkpoint(wanted) if wanted else place.checkpoints
            if last is not None:
                options["before"] = place.checkpoint(last)
        found = yield from self._groups(options, _few(options, space, limit, matching))
        made: list[CheckpointTuple] = []
        for saved, documents in sorted(found, key=lambda one: one[0].id, reverse=True):
            if limit is not None and len(made) >= limit:
                break
            if (last is None or saved.id < last) and (not wanted or saved.id == wanted):
                if space is not None and saved.space != space:
                    continue
                if matching and not _matches(self.serde.loads_typed(saved.metadata), matching):
                    continue
                made.append((yield from self._tuple(documents)))
        return made

    def _groups(self, options: Mapping[str, Any], checkpoints: int | None = None) -> Plan[Groups]:
        """Return checkpoints with their documents; given a number, at least that many of the newest of a namespace."""
        made: dict[str, list[Document]] = {}
        bound = dict(options)
        while True:
            size = None if checkpoints is None else checkpoints * 4
            found = yield Find({**bound, "limit": size, "reverse": True})
            for one in found:
                head, kind, rest = _split(one.key)
                if kind == "c":
                    made.setdefault(f"{head}/{kind}/{rest[: rest.index('/', rest.index('/') + 1) + 1]}", []).append(one)
            whole = [key for key, documents in made.items() if documents[-1].key == key]
            if size is None or len(found) < size or len(whole) >= (checkpoints or 0):
                break
            bound["before"] = found[-1].key
        return [(_saved(made[key][-1].value), made[key][::-1]) for key in whole]

    # looking after threads

    def delete_thread(self, thread: str) -> Plan[None]:
        """Remove all documents of a thread."""
        yield Remove(thread_prefix(thread))

    def copy_thread(self, source: str, target: str) -> Plan[None]:
        """Copy all documents of a thread under the name of another one."""
        old, new = thread_prefix(source), thread_prefix(target)
        found = yield Find({"prefix": old})
        puts = []
        for one in found:
            _, kind, rest = _split(one.key)
            value = one.value
            if kind == "c" and rest.count("/") == 2 and rest.endswith("/"):
                saved = _saved(value)
                saved.thread = target
                saved.large = {channel: new + key.removeprefix(old) for channel, key in saved.large.items()}
                value = _encode(saved)
            puts.append(_put(new + one.key.removeprefix(old), value))
        if puts:
            yield Write(puts)

    def prune(self, thread: str) -> Plan[None]:
        """Keep the newest checkpoint of each namespace, and those before it that its delta channels are rebuilt of."""

        def stay(groups: Groups, heads: Mapping[str, Document]) -> set[str]:
            by_key = {documents[0].key: saved for saved, documents in groups}
            newest = [(Place(saved.thread, saved.space), saved) for saved in by_key.values()]
            chains = [
                self._chain(place, saved, by_key)
                for place, saved in newest
                if place.head in heads and _head_id(heads[place.head]) == saved.id
            ]
            return set().union(*chains)

        yield from self._keep(thread, stay)

    def _chain(self, place: Place, saved: Saved, by_key: Mapping[str, Saved]) -> set[str]:
        """Return the keys of a checkpoint, and of its ancestors until every delta channel has a stored value."""
        counters = self.serde.loads_typed(saved.metadata).get("counters_since_delta_snapshot") or {}
        open_channels = set(counters) - set(saved.values) - set(saved.large)
        kept = {place.checkpoint(saved.id)}
        while open_channels and saved.parent is not None:
            key = place.checkpoint(saved.parent)
            if key not in by_key or key in kept:
                break
            kept.add(key)
            saved = by_key[key]
            open_channels -= {*saved.values, *saved.large}
        return kept

    def delete_for_runs(self, runs: Iterable[str]) -> Plan[None]:
        """Remove the checkpoints of runs, with their writes. The newest of those that stay is the head."""
        wanted = {str(run) for run in runs}

        def stay(groups: Groups, _: Mapping[str, Document]) -> set[str]:
            return {documents[0].key for saved, documents in groups if self._run_of(saved) not in wanted}

        groups = yield from self._groups({"prefix": ""})
        for thread in sorted({saved.thread for saved, _ in groups if self._run_of(saved) in wanted}):
            yield from self._keep(thread, stay)

    def _run_of(self, saved: Saved) -> str | None:
        run = self.serde.loads_typed(saved.metadata).get("run_id")
        return None if run is None else str(run)

    def _keep(self, thread: str, stay: Callable[[Groups, Mapping[str, Document]], set[str]]) -> Plan[None]:
        """Remove the checkpoints of a thread but those that `stay` names by their keys, and values that none refers to.

        The heads are read first and written with their versions: if a writer comes meanwhile, all is decided again.
        """
        prefix = thread_prefix(thread)
        while True:
            found = yield Find({"prefix": f"{prefix}h/"})
            heads = {one.key: one for one in found}
            groups = yield from self._groups({"prefix": f"{prefix}c/"})
            groups = [one for one in groups if Place(one[0].thread, one[0].space).head in heads]
            kept = stay(groups, heads)
            staying = [saved for saved, documents in groups if documents[0].key in kept]
            gone = [one.key for _, documents in groups if documents[0].key not in kept for one in documents]
            values = {key for saved in staying for key in saved.large.values()}
            for head in heads:
                stored = yield Find({"prefix": f"{head.replace('/h/', '/v/', 1)}/", "values": False})
                gone += [one.key for one in stored if one.key not in values]
            puts = [_put(key, None) for key in gone]
            for key, head_document in heads.items():
                ids = [saved.id for saved in staying if Place(saved.thread, saved.space).head == key]
                current = _head_id(head_document)
                newest = current if current in ids else max(ids, default=None)
                puts.append(_put(key, None if newest is None else _encode(newest), head_document.version))
            if not gone:
                return
            written = yield Write(puts)
            if written.verdict is Verdict.DONE:
                return


def _few(options: Mapping[str, Any], space: str | None, limit: int | None, matching: Any) -> int | None:
    """Return how many checkpoints a list needs to read, if only the newest of one namespace do."""
    return limit if options["prefix"] and space is not None and not matching else None


def _split(key: str) -> tuple[str, str, str]:
    thread, kind, rest = key.split("/", 2)
    return thread, kind, rest


def _head_id(head: Document | None) -> str | None:
    return None if head is None else msgspec.msgpack.decode(head.value, type=str)


def _matches(metadata: Mapping[str, Any], matching: Mapping[str, Any]) -> bool:
    return all(found_at(metadata, key) == value for key, value in matching.items())


def found_at(value: Any, key: str) -> Any:
    """Return the value under a key, or under a path of keys with dots between them; None if there is none."""
    if isinstance(value, Mapping) and key in value:
        return value[key]
    first, dot, rest = key.partition(".")
    return found_at(value[first], rest) if dot and isinstance(value, Mapping) and first in value else None
