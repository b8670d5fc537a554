"""Group commit: gathers the drafts of all runs during a pass of the loop, and commits them in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, StoreError, StoreUnavailable
from ..kernel.log import Draft
from ..model import Kind, Status
from ..model.checkpoint import NO_PROGRESS
from ..model.ids import new_id
from ..ports import (
    Advance,
    Answer,
    Change,
    Create,
    OptionalStore,
    Rekey,
    Row,
    Send,
    Underway,
    Verdict,
    WouldBlock,
    boot_seconds,
    instant,
    optional,
)
from ..records.counts import SLOW_SECONDS, Counter
from ..records.progress import proves_progress
from ..records.record import Record, seal
from ..values import large

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ..kernel.driver import RunDriver
    from ..kernel.idle_watch import IdleWatch
    from ..ports import Clock, SaveObserver, Store
    from .outage import Outage

log = logging.getLogger("keepstep")

#: Typical time of a commit, in seconds, above which the writer thread makes commits, so that the loop stays responsive.
SLOW_COMMIT_SECONDS = 0.010
#: Number of runs from which on a commit is sent before the end of the pass, if the store works in the background.
ENOUGH = 64
#: Size in bytes of the large values in one commit, above which the other runs wait for the next. Bounds their delay.
ENOUGH_BYTES = 4_000_000
#: Time in seconds after which an unanswered commit is logged as a warning.
UNANSWERED_SECONDS = 10.0
#: Number of tries of a failing commit before its runs are halted.
SAVE_TRIES = 5
#: Pause in seconds before the second try. It doubles with every further try.
SAVE_PAUSE_SECONDS = 0.1
#: Pause in seconds before the next try to write a run that another session has locked in the store.
HELD_SECONDS = 0.5
#: Characters of the error of the last halt that the heartbeat carries.
MAX_ERROR = 200


#: Enumeration members, looked up once because every lookup costs more than a comparison.
_DONE = Verdict.DONE
_HELD = Verdict.HELD
_STEP_COMPLETED = Kind.STEP_COMPLETED.value
_STEP_FAILED = Kind.STEP_FAILED.value
_SLOW = timedelta(seconds=SLOW_SECONDS)


class Readers(Protocol):
    """Those who read runs of this engine while they go on."""

    @property
    def readers(self) -> Collection[str]:
        """The runs that are read."""

    def committed(self, changes: Sequence[Change]) -> None:
        """Wake the readers of runs for which changes are durable now."""


class Journal:
    """The only committer of an engine: it seals records with sequence numbers and checksums, and commits them."""

    def __init__(
        self,
        store: Store,
        worker: str,
        rest: IdleWatch,
        clock: Clock,
        outage: Outage,
        *,
        readers: Readers,
        saves: SaveObserver | None = None,
    ) -> None:
        self._store = store
        self._readers = readers
        self._saves = saves
        self._outage = outage
        self._rest_watch = rest
        self._clock = clock
        self._seconds = boot_seconds(clock)
        self.worker = worker
        self._loop = asyncio.get_running_loop()
        self._context = Context()
        self._dirty: dict[RunDriver, None] = {}
        self._held: dict[RunDriver, None] = {}  # runs that another session has locked in the store
        self._others: list[tuple[Change | Callable[[], Change], asyncio.Future[Answer]]] = []
        self._waiting: dict[asyncio.Future[Answer], None] = {}
        self._closed = False
        self._scheduled = False
        self._in_flight = False
        self._sent_at = 0.0
        self._typical_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-writer")
        self._begin: Callable[[Sequence[Change]], Underway | None] | None = None
        if not store.quick:  # a quick store commits at once on this thread, so an early start gains nothing
            self._begin = optional(store, OptionalStore.begin_commit)
        self._underway: Underway | None = None
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self.commits = 0
        #: Counts what is written and what could not be saved, for the heartbeat of the worker.
        self.counter = Counter()
        #: Whether the store could not save the newest records.
        self.refused = False

    # -- collecting ---------------------------------------------------------------------------------------------------

    def add(self, run: RunDriver, *, now: bool = False) -> None:
        """Schedule the pending drafts of a run for the next commit. `now`: no other run can have more to write."""
        if len(self._dirty) >= ENOUGH and self._begin is not None and not self._in_flight and run not in self._dirty:
            self._flush()  # the store works on these runs while the others continue
        self._dirty[run] = None
        if now and not self._scheduled and not self._in_flight:
            self._flush(at_rest=True)
        elif not self._scheduled:
            self._schedule()

    def write_pending(self, run: RunDriver) -> None:
        """Write drafts that were to ride with the next commit of a run, without waiting for another draft."""
        self._dirty[run] = None
        if not self._scheduled:
            self._schedule()

    def holds(self, run: RunDriver) -> bool:
        """Whether drafts of a run are about to be written."""
        return run in self._dirty or run in self._held

    async def write(self, change: Change | Callable[[], Change]) -> Answer:
        """Write a change that no run's code makes, such as a new run or a signal. A function is called to make it."""
        if isinstance(change, Send) and not change.signal.id:
            # With an id, a signal can be sent again if it is unknown whether it arrived.
            change.signal = replace(change.signal, id=new_id("signal"))
        if self._closed:
            raise DefinitionError("the engine is closed; use it inside `async with ks.open(...)`")
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting[future] = None
        future.add_done_callback(self._waiting.pop)
        self._others.append((change, future))
        if not self._scheduled:
            self._schedule()
        return await future

    async def drained(self) -> None:
        """Wait until every change so far has been answered."""
        while self._dirty or self._others or self._in_flight:
            self._idle.clear()
            if not self._scheduled and not self._in_flight:
                self._schedule()
            await self._idle.wait()

    def log_if_unanswered(self) -> None:
        """Log a warning if a commit has been pending for long. Any thread may call this."""
        seconds = self._seconds() - self._sent_at
        if self._in_flight and seconds > UNANSWERED_SECONDS:
            why = "the store has not answered, and nothing else is written; see what holds it up, such as a lock"
            self._outage.log(f"a commit has been under way for {seconds:.0f} s", StoreUnavailable(why))

    def close(self) -> None:
        """Stop writing. Callers that still wait for an answer get a `StoreUnavailable`."""
        self._closed = True
        underway, self._underway = self._underway, None
        if underway is not None:  # a commit that was sent is waited for
            self._loop.remove_reader(underway.fileno())
            with contextlib.suppress(StoreError, WouldBlock):
                underway.wait()
        self._pool.shutdown(wait=True)
        for future in list(self._waiting):
            if not future.done():
                future.set_exception(StoreUnavailable("the engine was closed before the store answered", unknown=True))

    def _schedule(self) -> None:
        if not self._in_flight:
            self._scheduled = True
            self._loop.call_soon(self._flush, context=self._context)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _flush(self, *, at_rest: bool = False) -> None:
        """Commit the gathered changes. `at_rest`: the loop has no ready callback, so all runs are at rest."""
        self._scheduled = False
        if self._in_flight:
            return
        batch = self._gathered()
        if not batch.changes:
            self._rest()
            return
        if self._store.quick and self._typical_seconds < SLOW_COMMIT_SECONDS and not batch.needs_thread:
            # On the loop's thread, unless another process is writing: a hand-over to a thread costs half a commit.
            started = self._seconds()
            try:
                answers = self._store.commit(batch.changes, wait=False)
            except WouldBlock:
                pass
            except StoreUnavailable as error:
                self._try_again(batch, error)
                return
            except Exception as error:  # noqa: BLE001 - the runs concerned handle every error
                self._give_up(batch, error)
                return
            else:
                seconds = self._seconds() - started
                self._typical_seconds += (seconds - self._typical_seconds) / 16
                self._answered(batch, answers, seconds, at_rest=at_rest)
                return
        if not self._begun(batch):
            self._commit_in_thread(batch)

    def _gathered(self) -> _Batch:
        """Return the changes of the next commit."""
        batch = _Batch()
        dirty, self._dirty = self._dirty, {}
        for run in dirty:
            if batch.large_bytes > ENOUGH_BYTES:
                self._dirty[run] = None
            elif not run.stop.detached:
                try:
                    self._take(run, batch)
                except Exception as error:  # noqa: BLE001 - an error of one run must not delay the others
                    run.engine_failed(error)
        if self._others:
            self._take_others(batch)
        return batch

    def _commit_in_thread(self, batch: _Batch) -> None:
        self._in_flight, self._sent_at = True, self._seconds()
        future = self._loop.run_in_executor(self._pool, self._commit_and_time, batch)
        future.add_done_callback(partial(self._thread_answered, batch), context=self._context)

    def _begun(self, batch: _Batch) -> bool:
        """Send the batch from the loop's thread, and read the answer from its socket. Return False if it cannot be."""
        if self._begin is None or batch.needs_thread:
            return False
        try:
            underway = self._begin(batch.changes)
            if underway is None:
                return False
            self._in_flight, self._sent_at = True, self._seconds()
            if underway.sent:
                try:
                    Context().run(self._loop.add_reader, underway.fileno(), self._read_answers, batch, underway)
                except NotImplementedError:  # the loop cannot watch sockets
                    self._begin = None
                else:
                    self._underway = underway
                    return True
            self._wait_in_thread(batch, underway)
        except StoreUnavailable as error:
            self._try_again(batch, error)
        except Exception as error:  # noqa: BLE001 - the runs concerned handle every error
            self._in_flight = False
            self._give_up(batch, error)
        return True

    def _wait_in_thread(self, batch: _Batch, underway: Underway) -> None:
        def wait() -> tuple[list[Answer], float]:
            try:
                return underway.wait(), self._seconds() - self._sent_at
            except WouldBlock:
                return self._commit_and_time(batch)

        future = self._loop.run_in_executor(self._pool, wait)
        future.add_done_callback(partial(self._thread_answered, batch), context=self._context)

    def _read_answers(self, batch: _Batch, underway: Underway) -> None:
        """Read the answers of a commit under way, whose socket has become readable."""
        socket = underway.fileno()
        try:
            answers = underway.answers()
            if answers is None:
                return
        except WouldBlock:
            self._stop_reading(socket)
            self._commit_in_thread(batch)
        except StoreUnavailable as error:
            self._stop_reading(socket)
            self._try_again(batch, error)
        except Exception as error:  # noqa: BLE001 - the runs concerned handle every error
            self._stop_reading(socket)
            self._give_up(batch, error)
        else:
            self._stop_reading(socket)
            self._answered(batch, answers, self._seconds() - self._sent_at)

    def _stop_reading(self, socket: int) -> None:
        self._loop.remove_reader(socket)
        self._underway = None
        self._in_flight = False

    def _take(self, run: RunDriver, batch: _Batch) -> None:
        """Build one change from the pending drafts of a run, up to the first that needs a change of its own."""
        if not run.pending:
            return
        drafts, run.pending = run.pending, []
        run.in_flight += 1  # the run decrements it when the store has answered
        first = drafts[0]
        record = first.record
        if (  # the common case: one small record and nothing else
            len(drafts) == 1
            and first.change is None
            and record is not None
            and run.claimed is None
            and (record.value is msgspec.UNSET or len(record.value) <= large.LARGE_BYTES)
        ):
            row, checksum = seal(record, run.seq + 1, run.checksum, run.cipher)
            progress = row.kind not in NO_PROGRESS or proves_progress(record)
            batch.changes.append(Advance(run.id, self.worker, run.epoch, run.seq, (row,), checksum, progress=progress))
        else:
            drafts, later = _until_special(drafts)
            if later:
                run.put_back(later)
                self._dirty[run] = None
            batch.changes.append(self._change(run, drafts, batch))
        batch.owners.append((run, drafts))

    def _take_others(self, batch: _Batch) -> None:
        others, self._others = self._others, []
        for other in others:
            if batch.large_bytes > ENOUGH_BYTES:
                self._others.append(other)
                continue
            change, owner = other
            try:
                made = change() if callable(change) else change
            except Exception as error:  # noqa: BLE001 - an error of one change must not delay the others
                owner.set_exception(error)
                continue
            batch.changes.append(made)
            batch.owners.append(owner)
            batch.weigh(_large_bytes(made))

    def _change(self, run: RunDriver, drafts: list[Draft], batch: _Batch) -> Advance:
        change = Advance(run.id, self.worker, run.epoch, run.seq)
        special = drafts[-1].change
        if special is not None:
            for name, value in special.items():
                setattr(change, name, value)
        if change.within is not None and special is not None:
            batch.needs_thread = True
            change.within = _sealed_within(change, run, drafts[-1], special["within"])
            return change
        records = [draft.record for draft in drafts if draft.record is not None]
        shown = [record for record in records if record.kind not in NO_PROGRESS or proves_progress(record)]
        if records and not shown:
            change.progress = False
        elif len(drafts) > 1 and records:  # the records before a move may show progress, although the move does not
            change.progress = True
        size = sum(map(_stored_bytes, drafts))
        if change.creates or change.sends:
            size += _large_bytes(change)
        if size:
            batch.weigh(size)
            batch.unsealed[len(batch.changes)] = partial(_seal_into, change, run, drafts)
        else:
            _seal_into(change, run, drafts)
        return change

    def _commit_and_time(self, batch: _Batch) -> tuple[list[Answer], float]:
        batch.seal()
        started = self._seconds()
        answers = self._store.commit(batch.changes)
        return answers, self._seconds() - started

    def _thread_answered(self, batch: _Batch, done: asyncio.Future[tuple[list[Answer], float]]) -> None:
        self._in_flight = False
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            answers, seconds = done.result()
            if not batch.needs_thread:
                self._typical_seconds += (seconds - self._typical_seconds) / 16
            self._answered(batch, answers, seconds)
        elif isinstance(error, StoreUnavailable):
            self._try_again(batch, error)
        else:
            self._give_up(batch, error)

    def _answered(self, batch: _Batch, answers: Sequence[Answer], seconds: float, *, at_rest: bool = False) -> None:
        self._note(batch, seconds)
        counter = self.counter
        # A thread may have scheduled a callback of a run during the commit.
        busy: Collection[RunDriver] = () if at_rest and self._rest_watch.nothing_ready() else self._rest_watch.busy()
        for owner, change, answer in zip(batch.owners, batch.changes, answers, strict=True):
            if type(owner) is tuple:
                run, drafts = owner
                if answer.verdict is _DONE:
                    if change.rows:
                        self.refused = False
                    _count(counter, drafts, change.status)
                    run.committed(drafts, change, answer, run not in busy)
                elif answer.verdict is _HELD:
                    run.not_written(drafts)
                    self._hold(run, answer)
                else:
                    if len(drafts) > 1 and drafts[-1].takes_along:
                        run.put_back(drafts[:-1])
                        self._dirty[run] = None
                    run.refused(drafts, answer)
            elif not owner.done():
                self._answer(owner, change, answer)
        if self._readers.readers:
            self._readers.committed(batch.changes)
        if self._dirty or self._others or not self._idle.is_set():
            self._rest()

    def _note(self, batch: _Batch, seconds: float) -> None:
        """Count a commit, and tell observers of it."""
        self.commits += 1
        self.counter.counts.commits = self.commits
        if self._saves is not None:
            self._saves.observe_save(seconds, [_size(row) for change in batch.changes for row in _rows(change)])

    def _answer(self, owner: asyncio.Future[Answer], change: Change, answer: Answer) -> None:
        """Answer the caller of `write`."""
        if answer.verdict is _HELD and answer.error is not None:
            owner.set_exception(answer.error)
            return
        if answer.verdict is _DONE and isinstance(change, Advance) and change.rows:
            self.refused = False
            if change.status is Status.SET_ASIDE:
                self.counter.ended(change.status)
        owner.set_result(answer)

    def _rest(self) -> None:
        if (self._dirty or self._others) and not self._scheduled:
            self._schedule()
        elif not self._in_flight and not self._scheduled:
            self._idle.set()

    # -- runs locked by another session -------------------------------------------------------------------------------

    def _hold(self, run: RunDriver, answer: Answer) -> None:
        """Try the drafts of a locked run again later, while the other runs continue."""
        if run.stop.detached:
            return
        self._outage.log(f"run {run.id} waits", StoreUnavailable(f"{answer.error}"))
        if not self._held:
            self._loop.call_later(HELD_SECONDS, self._try_held, context=self._context)
        self._held[run] = None

    def _try_held(self) -> None:
        held, self._held = self._held, {}
        if not self._closed:
            self._dirty |= held
            self._rest()

    # -- failed commits -----------------------------------------------------------------------------------------------

    def _try_again(self, batch: _Batch, error: StoreUnavailable) -> None:
        self.counter.counts.save_failures += 1
        batch.tries += 1
        if batch.tries >= SAVE_TRIES:
            self._give_up(batch, error)
            return
        self._outage.log(f"a commit failed (try {batch.tries} of {SAVE_TRIES})", error)
        self._in_flight = True
        pause = SAVE_PAUSE_SECONDS * 2 ** (batch.tries - 1)
        batch.unknown |= error.unknown  # stays true, however later tries fail
        again = partial(self._second_try, batch)
        self._loop.call_later(pause, again, context=self._context)

    def _second_try(self, batch: _Batch) -> None:
        if self._closed:
            return

        def settle() -> tuple[list[Answer], float]:
            started = self._seconds()
            if not batch.unknown:
                return self._commit_and_time(batch)
            answers: list[Answer | None] = [self._what_became_of(change) for change in batch.changes]
            missing = [i for i, answer in enumerate(answers) if answer is None]
            for i, answer in zip(missing, self._store.commit([batch.changes[i] for i in missing]), strict=True):
                answers[i] = answer
            return [answer for answer in answers if answer is not None], self._seconds() - started

        future = self._loop.run_in_executor(self._pool, settle)
        future.add_done_callback(partial(self._thread_answered, batch), context=self._context)

    def _what_became_of(self, change: Change) -> Answer | None:
        """Find out by reading the head whether a change was committed. Return None if it must be made again."""
        if isinstance(change, Send | Rekey):
            return None  # a repetition is harmless: a signal has an id, and a key replaces only the old key
        run = self._store.get_run(change.run.id if isinstance(change, Create) else change.run)
        if isinstance(change, Create):
            born = run is not None and run.seed == change.run.seed and run.created_at == change.run.created_at
            return Answer(Verdict.DONE) if born else None
        if run is not None and change.rows and (run.seq, run.checksum) == (change.rows[-1].seq, change.checksum):
            return Answer(Verdict.DONE)
        if run is not None and not change.rows and change.release and run.worker is None and run.epoch == change.epoch:
            return Answer(Verdict.DONE)
        return None

    def _one_by_one(self, batch: _Batch) -> None:
        """Commit each change by itself, to find the one that cannot be written."""

        def commit() -> list[Answer | Exception]:
            found: list[Answer | Exception] = []
            for change in batch.changes:
                if found and isinstance(found[-1], StoreUnavailable):  # the following ones would fail the same way
                    found.append(found[-1])
                    continue
                try:
                    batch.seal(len(found))
                    found += self._store.commit([change])
                except Exception as error:  # noqa: BLE001 - the owner of the change handles every error
                    found.append(error)
            return found

        self._in_flight, self._sent_at = True, self._seconds()
        future = self._loop.run_in_executor(self._pool, commit)
        future.add_done_callback(partial(self._each_answered, batch), context=self._context)

    def _each_answered(self, batch: _Batch, done: asyncio.Future[list[Answer | Exception]]) -> None:
        self._in_flight = False
        if done.cancelled():
            return
        seconds = (self._seconds() - self._sent_at) / len(batch.changes)
        for change, owner, found in zip(batch.changes, batch.owners, done.result(), strict=True):
            alone = _Batch()
            alone.changes, alone.owners = [change], [owner]
            if isinstance(found, Answer):
                self._answered(alone, [found], seconds)
            else:
                self._give_up(alone, found)

    def _give_up(self, batch: _Batch, error: BaseException) -> None:
        if not isinstance(error, StoreError):
            log.error("a commit failed in an unexpected way", exc_info=error)
        damaged = not isinstance(error, StoreError) or isinstance(error, CheckpointCorrupt)
        if damaged and len(batch.changes) > 1 and not self._closed:
            self._one_by_one(batch)  # a damaged run must not keep the others from being written
            return
        for owner in batch.owners:
            if isinstance(owner, tuple):
                owner[0].in_flight -= 1
                if isinstance(error, StoreError):
                    self.refused = True
                    self.counter.halted(str(error)[:MAX_ERROR], instant(self._clock.now()))
                    owner[0].halt(error)
                else:  # its records can never be written, so a retry is useless
                    owner[0].engine_failed(error)
            elif not owner.done():
                owner.set_exception(error)
        self._rest()


def _count(counter: Counter, drafts: list[Draft], status: Status | None) -> None:
    """Count the steps in drafts that are durable now, and the end of the run if that is its new status."""
    if status is not None:
        counter.ended(status)
    for draft in drafts:
        record = draft.record
        if record is None:
            continue
        if record.kind == _STEP_COMPLETED:
            counter.counts.steps += 1
        elif record.kind == _STEP_FAILED:
            counter.counts.failures += 1
        else:
            continue
        started_at = record.started_at
        if started_at is not None and record.finished_at - started_at >= _SLOW:  # type: ignore[operator]
            counter.slow_step(record.step, (record.finished_at - started_at).total_seconds())  # type: ignore[operator]


def _until_special(pending: list[Draft]) -> tuple[list[Draft], list[Draft]]:
    """Return the drafts that fit into one change, and the remaining ones.

    A draft with further changes stands alone, unless it takes along the drafts before it, as one that parks the run.
    """
    if pending[0].change is not None:
        return pending[:1], pending[1:]
    split = next((i for i, draft in enumerate(pending) if draft.change is not None), len(pending))
    if split < len(pending) and pending[split].takes_along:
        split += 1
    return pending[:split], pending[split:]


def _seal_into(change: Advance, run: RunDriver, drafts: list[Draft]) -> None:
    change.rows, change.checksum = sealed(run, drafts)


def _stored_bytes(draft: Draft) -> int:
    """Return the size of a large value in the store, in bytes; 0 for a small one."""
    value = msgspec.UNSET if draft.record is None else draft.record.value
    if value is msgspec.UNSET or len(value) <= large.LARGE_BYTES:
        return 0
    return len(value) if draft.packed is None else len(draft.packed)


def _rows(change: Change) -> Sequence[Row]:
    """Return the checkpoints in a change."""
    return change.rows if isinstance(change, Advance | Create) else ()


def _size(row: Row) -> int:
    """Return the size of a checkpoint in the store, in bytes."""
    return len(row.record) + len(row.body or b"")


def _large_bytes(change: Change) -> int:
    """Return the size of the large inputs and payloads in a change, in bytes."""
    if isinstance(change, Create):
        size = len(change.run.input)
    elif isinstance(change, Send):
        size = len(change.signal.payload)
    elif isinstance(change, Advance):
        return sum(_large_bytes(one) for some in (change.creates, change.sends) for one in some)
    else:
        return 0
    return size if size > large.LARGE_BYTES else 0


def sealed(run: RunDriver, drafts: list[Draft]) -> tuple[list[Row], str]:
    """Return the sealed rows of drafts, and the final checksum. The first row under a lease describes the claim."""
    rows: list[Row] = []
    seq, checksum, claimed = run.seq, run.checksum, run.claimed
    for draft in drafts:
        record = draft.record
        if record is not None:
            if claimed is not None:
                record.claimed, claimed = claimed, None
            seq += 1
            row, checksum = seal(record, seq, checksum, run.cipher, draft.packed)
            rows.append(row)
    return rows, checksum


class _Batch:
    """The changes of one commit, and the owner that waits for each answer."""

    __slots__ = ("changes", "large_bytes", "needs_thread", "owners", "tries", "unknown", "unsealed")

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.owners: list[Any] = []
        self.tries = 0
        self.unknown = False
        self.needs_thread = False
        #: Size of its large values. A batch with any is sealed and committed by the writer thread.
        self.large_bytes = 0
        #: Functions that seal the rows of the changes at these indexes.
        self.unsealed: dict[int, Callable[[], None]] = {}

    def weigh(self, size: int) -> None:
        if size:
            self.large_bytes += size
            self.needs_thread = True

    def seal(self, place: int | None = None) -> None:
        """Seal the unsealed rows of all changes, or of the one at `place`."""
        for one in list(self.unsealed) if place is None else [place]:
            make = self.unsealed.get(one)
            if make is not None:
                make()
                del self.unsealed[one]


def _sealed_within(
    change: Advance, run: RunDriver, draft: Draft, body: Callable[[Any], Record]
) -> Callable[[Any], None]:
    """Return a function that runs the body in the transaction, and seals its record into the change."""

    def within(tx: Any) -> None:
        draft.record = body(tx)
        draft.record.claimed = run.claimed
        row, checksum = seal(draft.record, run.seq + 1, run.checksum, run.cipher)
        change.rows, change.checksum = [row], checksum

    return within
