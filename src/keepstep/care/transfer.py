"""Writes runs into an archive and imports them from one; each run is verified and written whole or not at all.

Plain blocking code over a store. Only one run is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import IO, Unpack

from ..errors import CheckpointCorrupt, RunNotFound
from ..model import FINISHED, Kind, Outcome, Run, RunQuery, Signal, Status
from ..model.ids import new_id
from ..ports import Create, Document, OptionalStore, Put, Row, Store, Verdict, commit_all, instant, optional
from ..records.data import Data, ErrorData, new_data
from ..records.record import Record, StoredError, chain_end, seal, unseal
from ..stores.encrypted import KEYS_COLLECTION, below
from ..stores.memory import MemoryStore
from ..stores.reading import head_of, rows_of
from .archive import Archived, ArchivedDocument, ArchiveWriter, Broken, put_of, runs_in
from .documents import all_documents
from .verify import PAGE, check_run, oldest_first, signals_of

#: Runs, and approximate bytes, written in one transaction at most.
BATCH = 100
BATCH_BYTES = 4_000_000


@dataclass(slots=True)
class Transfer:
    """The result of a transfer: the number of runs written, and the others with reasons.

    `conflicts` exist already with different contents. `damaged` names runs, or lines of an archive. `left` are
    unfinished runs that stay where they are. `documents` counts the versions of documents that went along.
    """

    written: int = 0
    same: int = 0
    records: int = 0
    documents: int = 0
    conflicts: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """Whether every requested run is in the target now."""
        return not (self.conflicts or self.damaged or self.left)


def chosen(store: Store, run_ids: Iterable[str], query: RunQuery) -> Iterator[Run | str]:
    """Yield the runs named by id, or the result of a query with the oldest first; a `str` names an unreadable run."""
    wanted = tuple(dict.fromkeys(run_ids))
    if not wanted:
        for one in oldest_first(store, replace(query, limit=PAGE)):
            yield one if isinstance(one, str) else _with_input(store, one)
    for run_id in wanted:
        try:
            run = head_of(store, run_id)
        except CheckpointCorrupt:
            yield run_id
            continue
        if run is None:
            raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
        yield run


def _with_input(store: Store, run: Run) -> Run | str:
    """Return a listed run with its input, or its name if that cannot be read."""
    try:
        whole = head_of(store, run.id)
    except CheckpointCorrupt:
        return run.id
    return run if whole is None else replace(run, input=whole.input)


# -- into an archive ---------------------------------------------------------------------------------------------------


def export_runs(
    store: Store, file: IO[bytes], run_ids: Iterable[str] = (), query: RunQuery | None = None, *, made_by: str = ""
) -> Transfer:
    """Write runs into an archive as they are now; damaged ones are marked there and reported.

    With all runs go all documents, with some runs the documents that they own.
    """
    store, done = below(store), Transfer()
    run_ids = tuple(run_ids)
    owners: set[str] | None = None if is_of_everything(run_ids, query) else set()
    collections = optional(store, OptionalStore.list_collections)
    has_documents = collections is not None and bool(collections())
    writer = ArchiveWriter(file, instant(store.clock.now()), made_by, with_documents=has_documents)
    for run in chosen(store, run_ids, query or RunQuery(system=True)):
        if isinstance(run, str):
            done.damaged[run] = f"run {run!r}: its row is unreadable, so it is not in the archive"
            continue
        problem = write_run(store, run, writer)
        done.written += 1
        done.records += run.seq
        if problem:
            done.damaged[run.id] = problem
        if owners is not None:
            owners.add(run.id)
    for one in documents_of(store, owners, done) if has_documents else ():
        writer.document(one)
        done.documents += 1
    writer.close()
    return done


def write_run(store: Store, run: Run, writer: ArchiveWriter) -> str:
    """Write one run up to its head, or its readable part if it is damaged. Return its damage, or ""."""
    check = check_run(store, run)
    problem = "it was removed meanwhile" if check is None else "; ".join(check.problems)
    writer.begin(run)
    for row in rows_of(store, run.id):
        if row.seq <= run.seq or problem:
            writer.checkpoint(row)
    for signal in signals_of(store, run.id):
        if isinstance(signal, Signal) and (signal.seq <= run.signals or problem):
            writer.signal(signal)
    writer.end(problem)
    return problem


# -- out of an archive -------------------------------------------------------------------------------------------------


def import_runs(
    store: Store, file: IO[bytes], name: str, *, actor: str, queue: bool = False, partial: bool = False
) -> Transfer:
    """Import every run of an archive, each whole and verified or not at all.

    An unfinished run is set aside, because it may go on elsewhere; with `queue` it goes on here. With `partial`, broken
    parts of the archive are skipped and reported; otherwise they raise an error.
    """
    store, done = below(store), Transfer()
    batch = Batch(store, done)
    waiting: list[Document] = []
    for found in runs_in(file, name):
        problem = _problem(found)
        if isinstance(found, ArchivedDocument):
            waiting.append(found.document)
            if len(waiting) >= BATCH or sum(len(one.value) for one in waiting) >= BATCH_BYTES:
                put_documents(store, iter(waiting), done)
                waiting.clear()
            continue
        if not problem and isinstance(found, Archived):
            batch.add(_taken_in(found, name, actor, instant(store.clock.now()), queue=queue), found.run)
        elif partial:
            done.damaged[f"line {found.line}"] = problem
        else:
            batch.flush()
            so_far = f"; {done.written} runs before it were imported" if done.written else ""
            raise CheckpointCorrupt(f"{name}, line {found.line}: {problem}{so_far}")
    batch.flush()
    put_documents(store, iter(waiting), done)
    return done


def check_archive(file: IO[bytes], name: str) -> int:
    """Read an archive to its end and verify it. Return the number of its runs."""
    runs = 0
    for found in runs_in(file, name):
        problem = _problem(found)
        if problem:
            raise CheckpointCorrupt(f"{name}, line {found.line}: {problem}")
        runs += isinstance(found, Archived)
    return runs


def _problem(found: Archived | ArchivedDocument | Broken) -> str:
    if isinstance(found, Broken):
        return found.what
    if isinstance(found, ArchivedDocument):
        return ""
    if found.damaged:
        return f"run {found.run.id!r} was damaged when it was written here: {found.damaged}"
    return verified(found.run, found.rows, found.signals)


def verified(run: Run, rows: Sequence[Row], signals: Sequence[Signal]) -> str:
    """Return the damage of a run that is not in a store yet, or "". The checks are those of `verify`."""
    bench = MemoryStore()
    held = replace(run, worker="nobody" if run.status.active else None)
    try:
        bench.commit([Create(held, rows, signals)])
    except ValueError as error:
        return str(error)
    check = check_run(bench, held)
    return "" if check is None else "; ".join(check.problems)


def _taken_in(found: Archived, source: str, actor: str, now: datetime, *, queue: bool) -> Create:
    """Return the creation of an imported run: as it ended, or such that it does not go on in two places."""
    run = found.run
    if run.status in FINISHED or run.status is Status.SET_ASIDE:
        return Create(run, found.rows, found.signals)
    if queue:
        return Create(freed(run, now), found.rows, found.signals)
    why = Reason(
        actor, "import", f"it was unfinished when it was written to {source}; retry it to let it go on here", now
    )
    return set_aside(run, found.rows, found.signals, why)


class Batch:
    """Verified runs to write into a store, several in one transaction."""

    def __init__(self, store: Store, done: Transfer) -> None:
        self._store, self._done = store, done
        self._waiting: list[tuple[Create, Run]] = []
        self._size = 0

    def add(self, create: Create, original: Run) -> None:
        """Add a verified run; `original` is the form that an existing run of its id must have."""
        self._waiting.append((create, original))
        self._size += len(create.run.input) + sum(len(row.record) + len(row.body or b"") for row in create.rows)
        if len(self._waiting) >= BATCH or self._size >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        waiting, self._waiting, self._size = self._waiting, [], 0
        if not waiting:
            return
        done = self._done
        answers = commit_all(self._store, [create for create, _ in waiting])
        for (create, original), answer in zip(waiting, answers, strict=True):
            if answer.verdict is Verdict.DONE:
                done.written += 1
                done.records += create.run.seq
            elif answer.verdict is Verdict.EXISTS and is_there(self._store, original):
                done.same += 1
            else:
                done.conflicts[original.id] = CONFLICT


CONFLICT = "the target has a different run of this id, or an older copy of this one"


def is_there(store: Store, run: Run) -> bool:
    """Whether a store has this run up to its head or further: its chain holds the record that the head names."""
    try:
        if not run.seq:
            there = head_of(store, run.id)
            rows = store.list_checkpoints(run.id, 0, 1)
            begun = next(unseal(rows, run.id))[0].previous if rows else there.checksum if there is not None else None
            return begun == run.checksum
        rows = store.list_checkpoints(run.id, run.seq - 1, 1)
        return bool(rows) and next(unseal(rows, run.id, run.seq - 1))[1] == run.checksum
    except CheckpointCorrupt:
        return False


# -- documents ---------------------------------------------------------------------------------------------------------


def documents_of(store: Store, owners: Container[str] | None, done: Transfer) -> Iterator[Document]:
    """Yield the documents to transfer: all, or those of some owners, with the data keys that they may need."""

    def damaged(collection: str, key: str, what: str) -> None:
        done.damaged[f"document {collection}/{key}"] = what

    for one in all_documents(store, damaged):
        if owners is None or one.owner in owners or one.collection == KEYS_COLLECTION:
            yield one


def put_documents(target: Store, documents: Iterator[Document], done: Transfer) -> None:
    """Write documents of another store, many in one transaction. One that differs in the target is a conflict."""
    write = optional(below(target), OptionalStore.write_documents)
    if write is None:
        return
    waiting: list[list[Put]] = []
    size = 0

    def flush() -> None:
        for batch, answer in zip(waiting, write(waiting) if waiting else (), strict=True):
            if answer.verdict is Verdict.DONE:
                done.documents += 1
            else:
                put = batch[0]
                done.conflicts[f"document {put.collection}/{put.key}"] = (
                    f"the target has another document of this key, or a newer version than {put.version}"
                )
        waiting.clear()

    for one in documents:
        waiting.append([put_of(one)])
        size += len(one.value)
        if len(waiting) >= PAGE or size >= BATCH_BYTES:
            flush()
            size = 0
    flush()


def is_of_everything(run_ids: Sequence[str], query: RunQuery | None) -> bool:
    """Whether a transfer takes all runs, and therefore all documents."""
    return not run_ids and (query is None or replace(query, limit=RunQuery().limit) == RunQuery(system=True))


# -- runs that have not ended ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reason:
    """The actor, act, reason and time of a command, for the audit."""

    actor: str
    act: str
    reason: str
    at: datetime


def record_of(run: Run, why: Reason, **more: Unpack[ErrorData]) -> Record:
    """The record that a run is left to a person, and why."""
    act_data = new_data(ErrorData, actor=why.actor, reason=why.reason, before=run.status.value, act=why.act)
    data: Data = {**act_data, **more}
    error = StoredError(why.act.capitalize(), why.reason, error_class="permanent", id=new_id("error"))
    record = Record(run.id, Kind.ERROR.value, outcome=Outcome.FAILURE.value, trigger="manual", error=error, data=data)
    record.finished_at = why.at
    return record


def set_aside(
    run: Run, rows: Sequence[Row], signals: Sequence[Signal], why: Reason, **more: Unpack[ErrorData]
) -> Create:
    """The run with one more record, which leaves it to a person."""
    row, checksum = seal(record_of(run, why, **more), run.seq + 1, chain_end(run))
    aside = replace(freed(run, why.at), status=Status.SET_ASIDE, seq=row.seq, checksum=checksum, due_at=None, wakes=())
    return Create(replace(aside, updated_at=why.at), [*rows, row], signals)


def freed(run: Run, now: datetime) -> Run:
    """Return the run so that any worker may claim it; a paused run stays paused, and a delayed one stays delayed."""
    paused = run.status is Status.PAUSED
    later = run.due_at if run.status is Status.QUEUED and run.due_at is not None else now
    return replace(
        run,
        status=Status.PAUSED if paused else Status.QUEUED,
        worker=None,
        due_at=None if paused else later,
        wakes=run.wakes if paused else (),
        recoveries=0,
        service=None,
        output=None,
        error=None,
        progress=None,
    )
