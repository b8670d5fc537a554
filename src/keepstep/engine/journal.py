"""Group commit: what runs have to write is gathered during a pass of the loop and committed in one transaction."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, StoreError, StoreUnavailable
from ..model import Kind
from ..model.ids import new_id
from ..ports import Advance, Answer, Change, Create, Rekey, Row, Send, Underway, Verdict, WouldBlock
from ..stores.records import Record, seal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..model import Status
    from ..ports import Clock, Store
    from .branch import DurableCall
    from .context import RunContext
    from .outage import Outage
    from .rest import RestWatch

log = logging.getLogger("keepstep")

#: A commit that usually takes longer than this is made on the writer thread, so that the loop stays responsive.
SLOW_COMMIT_SECONDS = 0.010
#: So many runs are written without waiting for what the others may have, if the store works elsewhere meanwhile.
ENOUGH = 64
#: Large values of so many bytes are enough for one commit: others are to be written and told in between.
ENOUGH_BYTES = 4_000_000
#: A commit that the store has not answered for so long is told of.
UNANSWERED_SECONDS = 10.0
#: How often a failing commit is tried again before its runs are halted, and the first pause, which doubles.
SAVE_TRIES = 5
SAVE_PAUSE_SECONDS = 0.1
#: A run that someone else has locked in the store is tried again after this.
HELD_SECONDS = 0.5


#: Looked up once: reading a member of an enumeration costs more than comparing it.
_DONE = Verdict.DONE
_HELD = Verdict.HELD

#: Records that a step's body may cause again each time before it kills its worker: they prove no progress.
_NO_PROGRESS = frozenset({Kind.RECOVERED.value, Kind.EMITTED.value, Kind.PUBLISHED.value, Kind.WAIT_STARTED.value})


class Draft(msgspec.Struct, gc=False):
    """A record on its way into the journal, and what is to happen once it is durable.

    `call` is settled then, in order; `then` is told at once; `refused` is told when the store refused the change.
    `change` holds fields of the Advance beyond its rows: such a draft is committed by itself, unless it `takes_along`
    the plain ones before it. If the store refuses that, they are written without it. `packed` is the value of the
    record as it is kept, if it was compressed before.
    """

    record: Record | None
    call: DurableCall[Any] | None = None
    then: Callable[[Answer], None] | None = None
    refused: Callable[[Answer], None] | None = None
    change: dict[str, Any] | None = None
    packed: bytes | None = None
    takes_along: bool = False


class Journal:
    """The one committer of an engine: it gives sequence numbers and checksums, and settles what became of them."""

    def __init__(self, store: Store, worker: str, rest: RestWatch, clock: Clock, outage: Outage) -> None:
        self._store = store
        self._outage = outage
        self._rest_watch = rest
        self._boot = clock.boot
        self.worker = worker
        self._loop = asyncio.get_running_loop()
        self._context = Context()
        self._dirty: dict[RunContext, None] = {}
        self._held: dict[RunContext, None] = {}  # each waits for a lock that someone else has on it
        self._others: list[tuple[Change | Callable[[], Change], asyncio.Future[Answer]]] = []
        self._waiting: set[asyncio.Future[Answer]] = set()
        self._closed = False
        self._scheduled = False
        self._in_flight = False
        self._sent_at = 0.0
        self._typical_seconds = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="keepstep-writer")
        self._begin: Callable[[Sequence[Change]], Underway | None] | None = None
        if not store.quick:  # else it is done here and now, and nothing is gained by not waiting for what comes next
            self._begin = getattr(store, "begin_commit", None)
        self._underway: Underway | None = None
        self._idle: asyncio.Event = asyncio.Event()
        self._idle.set()
        self.commits = 0
        self.failures = 0
        #: Whether the store refused the records that it was given last.
        self.refused = False

    # -- taking in ----------------------------------------------------------------------------------------------------

    def add(self, run: RunContext, draft: Draft, *, now: bool = False) -> None:
        """Write a draft of a run, after those it gave before; `now` if nobody else could have more to write."""
        if len(self._dirty) >= ENOUGH and self._begin is not None and not self._in_flight and run not in self._dirty:
            self._flush()  # the store works on these while the others go on
        run.pending.append(draft)
        self._dirty[run] = None
        if now and not self._scheduled and not self._in_flight:
            self._flush()
        elif not self._scheduled:
            self._schedule()

    def write_pending(self, run: RunContext) -> None:
        """Write what rides with the next commit of a run, although nothing else of it is to be written."""
        self._dirty[run] = None
        if not self._scheduled:
            self._schedule()

    def holds(self, run: RunContext) -> bool:
        """Whether drafts of a run are about to be written."""
        return run in self._dirty or run in self._held

    async def write(self, change: Change | Callable[[], Change]) -> Answer:
        """Write a change that no running code makes: a new run, a signal; a function makes it with the batch."""
        if isinstance(change, Send) and not change.signal.id:
            # With an id of its own a signal can be sent again when it is not known whether it arrived.
            change.signal = replace(change.signal, id=new_id("signal"))
        if self._closed:
            raise DefinitionError("the engine is closed; use it inside `async with ks.open(...)`")
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        self._others.append((change, future))
        if not self._scheduled:
            self._schedule()
        return await future

    async def drained(self) -> None:
        """Everything given so far has been answered."""
        while self._dirty or self._others or self._in_flight:
            self._idle.clear()
            if not self._scheduled and not self._in_flight:
                self._schedule()
            await self._idle.wait()

    def tell_if_unanswered(self) -> None:
        """Log that the store has not answered for long, from any thread: nothing is written meanwhile."""
        seconds = self._boot()[1] - self._sent_at
        if self._in_flight and seconds > UNANSWERED_SECONDS:
            why = "the store has not answered, and nothing else is written; see what holds it up, such as a lock"
            self._outage.tell(f"a commit has been under way for {seconds:.0f} s", StoreUnavailable(why))

    def close(self) -> None:
        """Write nothing more; whoever still waits for an answer is told that there will be none."""
        self._closed = True
        underway, self._underway = self._underway, None
        if underway is not None:  # what was sent is waited for, as what a thread writes is
            self._loop.remove_reader(underway.fileno())
            with contextlib.suppress(StoreError, WouldBlock):
                underway.wait()
        self._pool.shutdown(wait=True)
        for future in self._waiting:
            if not future.done():
                future.set_exception(StoreUnavailable("the engine was closed before the store answered", unknown=True))

    def _schedule(self) -> None:
        if not self._in_flight:
            self._scheduled = True
            self._loop.call_soon(self._flush, context=self._context)

    # -- writing ------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        self._scheduled = False
        if self._in_flight:
            return
        batch = _Batch()
        dirty, self._dirty = self._dirty, {}
        for run in dirty:
            if batch.packed_bytes > ENOUGH_BYTES:
                self._dirty[run] = None
            elif not run.detached:
                try:
                    self._take(run, batch)
                except Exception as error:  # noqa: BLE001 - what one run cannot write must not hold up the others
                    run.engine_failed(error)
        others, self._others = self._others, []
        for change, owner in others:
            try:
                batch.changes.append(change() if callable(change) else change)
                batch.owners.append(owner)
            except Exception as error:  # noqa: BLE001 - as above
                owner.set_exception(error)
        if not batch.changes:
            self._rest()
            return
        here = self._store.quick and self._typical_seconds < SLOW_COMMIT_SECONDS and not batch.needs_thread
        if not (here and self._committed_here(batch)) and not self._begun(batch):
            self._commit_in_thread(batch)

    def _commit_in_thread(self, batch: _Batch) -> None:
        self._in_flight, self._sent_at = True, self._boot()[1]
        future = self._loop.run_in_executor(self._pool, self._commit_and_time, batch.changes)
        future.add_done_callback(partial(self._thread_answered, batch), context=self._context)

    def _begun(self, batch: _Batch) -> bool:
        """Send the batch from the loop's own thread, and hear of it by its socket: no hand-over to wait for."""
        if self._begin is None or batch.needs_thread:
            return False
        try:
            underway = self._begin(batch.changes)
            if underway is None:
                return False
            self._in_flight, self._sent_at = True, self._boot()[1]
            if underway.sent:
                try:
                    Context().run(self._loop.add_reader, underway.fileno(), self._look, batch, underway)
                except NotImplementedError:  # a loop that knows no sockets of others
                    self._begin = None
                else:
                    self._underway = underway
                    return True
            self._wait_in_thread(batch, underway)
        except StoreUnavailable as error:
            self._try_again(batch, error)
        except Exception as error:  # noqa: BLE001 - whatever it was, the runs concerned are told
            self._in_flight = False
            self._give_up(batch, error)
        return True

    def _wait_in_thread(self, batch: _Batch, underway: Underway) -> None:
        def wait() -> tuple[list[Answer], float]:
            try:
                return underway.wait(), 0.0
            except WouldBlock:
                return self._commit_and_time(batch.changes)

        future = self._loop.run_in_executor(self._pool, wait)
        future.add_done_callback(partial(self._thread_answered, batch), context=self._context)

    def _look(self, batch: _Batch, underway: Underway) -> None:
        """Something has come on the socket of a commit that is under way."""
        socket = underway.fileno()
        try:
            answers = underway.answers()
            if answers is None:
                return
        except WouldBlock:
            self._heard(socket)
            self._commit_in_thread(batch)
        except StoreUnavailable as error:
            self._heard(socket)
            self._try_again(batch, error)
        except Exception as error:  # noqa: BLE001 - as above
            self._heard(socket)
            self._give_up(batch, error)
        else:
            self._heard(socket)
            self._answered(batch, answers)

    def _heard(self, socket: int) -> None:
        self._loop.remove_reader(socket)
        self._underway = None
        self._in_flight = False

    def _committed_here(self, batch: _Batch) -> bool:
        """Commit on the loop's thread, unless another process is writing: a hand-over costs half a commit."""
        started = self._boot()[1]
        try:
            answers = self._store.commit(batch.changes, wait=False)
        except WouldBlock:
            return False
        except StoreUnavailable as error:
            self._try_again(batch, error)
        except Exception as error:  # noqa: BLE001 - whatever it was, the runs concerned are told
            self._give_up(batch, error)
        else:
            self._learn(self._boot()[1] - started)
            self._answered(batch, answers)
        return True

    def _take(self, run: RunContext, batch: _Batch) -> None:
        """Build one change from the drafts of a run, up to the first that must stand alone."""
        pending = run.pending
        if not pending:
            return
        drafts, run.pending = pending, []
        first = drafts[0]
        if len(drafts) == 1 and first.change is None and first.record is not None and run.claimed is None:  # as a rule
            row, checksum = seal(first.record, run.seq + 1, run.checksum, run.cipher, first.packed)
            batch.changes.append(
                Advance(
                    run.id, self.worker, run.epoch, run.seq, (row,), checksum, progress=row.kind not in _NO_PROGRESS
                )
            )
        else:
            drafts, run.pending = _until_special(drafts)
            if run.pending:
                self._dirty[run] = None
            batch.changes.append(self._change(run, drafts, batch))
        for draft in drafts:
            if draft.packed is not None:
                batch.packed_bytes += len(draft.packed)
        run.in_flight += 1
        batch.owners.append((run, drafts))

    def _change(self, run: RunContext, drafts: list[Draft], batch: _Batch) -> Advance:
        change = Advance(run.id, self.worker, run.epoch, run.seq)
        special = drafts[-1].change
        if special is not None:
            for name, value in special.items():
                setattr(change, name, value)
        if change.within is not None and special is not None:
            batch.needs_thread = True
            change.within = _sealed_within(change, run, drafts[-1], special["within"])
        else:
            change.rows, change.checksum = rows, _ = _sealed(run, drafts)
            if rows and rows[0].kind in _NO_PROGRESS and all(row.kind in _NO_PROGRESS for row in rows):
                change.progress = False
            elif len(drafts) > 1 and rows:  # what a move takes along may prove progress, though the move does not
                change.progress = True
        return change

    def _commit_and_time(self, changes: Sequence[Change]) -> tuple[list[Answer], float]:
        started = self._boot()[1]
        answers = self._store.commit(changes)
        return answers, self._boot()[1] - started

    def _thread_answered(self, batch: _Batch, done: asyncio.Future[tuple[list[Answer], float]]) -> None:
        self._in_flight = False
        if done.cancelled():
            return
        error = done.exception()
        if error is None:
            answers, seconds = done.result()
            if not batch.needs_thread:
                self._learn(seconds)
            self._answered(batch, answers)
        elif isinstance(error, StoreUnavailable):
            self._try_again(batch, error)
        else:
            self._give_up(batch, error)

    def _learn(self, seconds: float) -> None:
        self._typical_seconds += (seconds - self._typical_seconds) / 16

    def _answered(self, batch: _Batch, answers: Sequence[Answer]) -> None:
        self.commits += 1
        busy = self._rest_watch.busy()
        for owner, change, answer in zip(batch.owners, batch.changes, answers, strict=True):
            if type(owner) is tuple:
                run, drafts = owner
                run.in_flight -= 1
                if answer.verdict is _DONE:
                    if change.rows:
                        self.refused = False
                        run.claimed = None
                        run.seq = change.rows[-1].seq
                        run.checksum = change.checksum
                    run.committed(drafts, answer, change.progress, run not in busy)
                elif answer.verdict is _HELD:
                    self._hold(run, drafts, answer)
                else:
                    if len(drafts) > 1 and drafts[-1].takes_along:
                        run.pending[:0] = drafts[:-1]
                        self._dirty[run] = None
                    run.refused(drafts, answer)
            elif not owner.done():
                if answer.verdict is _HELD and answer.error is not None:
                    owner.set_exception(answer.error)
                else:
                    if answer.verdict is _DONE and isinstance(change, Advance) and change.rows:
                        self.refused = False
                    owner.set_result(answer)
        self._rest()

    def _rest(self) -> None:
        if (self._dirty or self._others) and not self._scheduled:
            self._schedule()
        elif not self._in_flight and not self._scheduled:
            self._idle.set()

    # -- when someone else has locked a run ---------------------------------------------------------------------------

    def _hold(self, run: RunContext, drafts: list[Draft], answer: Answer) -> None:
        """Nothing was written: the run keeps what it has to write until the lock is gone, and the others go on."""
        if run.detached:
            return
        self._outage.tell(f"run {run.id} waits", StoreUnavailable(f"{answer.error}"))
        run.pending[:0] = drafts
        if not self._held:
            self._loop.call_later(HELD_SECONDS, self._try_held, context=self._context)
        self._held[run] = None

    def _try_held(self) -> None:
        held, self._held = self._held, {}
        if not self._closed:
            self._dirty |= held
            self._rest()

    # -- when the store does not answer -------------------------------------------------------------------------------

    def _try_again(self, batch: _Batch, error: StoreUnavailable) -> None:
        self.failures += 1
        batch.tries += 1
        if batch.tries >= SAVE_TRIES:
            self._give_up(batch, error)
            return
        self._outage.tell(f"a commit failed (try {batch.tries} of {SAVE_TRIES})", error)
        self._in_flight = True
        pause = SAVE_PAUSE_SECONDS * 2 ** (batch.tries - 1)
        batch.unknown |= error.unknown  # and stays so, however the tries after it fail
        again = partial(self._second_try, batch)
        self._loop.call_later(pause, again, context=self._context)

    def _second_try(self, batch: _Batch) -> None:
        if self._closed:
            return

        def settle() -> tuple[list[Answer], float]:
            started = self._boot()[1]
            if not batch.unknown:
                return self._commit_and_time(batch.changes)
            answers: list[Answer | None] = [self._what_became_of(change) for change in batch.changes]
            missing = [i for i, answer in enumerate(answers) if answer is None]
            for i, answer in zip(missing, self._store.commit([batch.changes[i] for i in missing]), strict=True):
                answers[i] = answer
            return [answer for answer in answers if answer is not None], self._boot()[1] - started

        future = self._loop.run_in_executor(self._pool, settle)
        future.add_done_callback(partial(self._thread_answered, batch), context=self._context)

    def _what_became_of(self, change: Change) -> Answer | None:
        """Settle an unknown commit by reading the head; None means that the change must be made again."""
        if isinstance(change, Send | Rekey):
            return None  # a second time it is harmless: a signal has its id, a key is exchanged only for the old one
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
        """One change of a batch cannot be written: find it, and let the others through."""

        def commit() -> list[Answer | Exception]:
            found: list[Answer | Exception] = []
            for change in batch.changes:
                if found and isinstance(found[-1], StoreUnavailable):  # it would be so for all that follow
                    found.append(found[-1])
                    continue
                try:
                    found += self._store.commit([change])
                except Exception as error:  # noqa: BLE001 - only its owner is told
                    found.append(error)
            return found

        self._in_flight, self._sent_at = True, self._boot()[1]
        future = self._loop.run_in_executor(self._pool, commit)
        future.add_done_callback(partial(self._each_answered, batch), context=self._context)

    def _each_answered(self, batch: _Batch, done: asyncio.Future[list[Answer | Exception]]) -> None:
        self._in_flight = False
        if done.cancelled():
            return
        for change, owner, found in zip(batch.changes, batch.owners, done.result(), strict=True):
            alone = _Batch()
            alone.changes, alone.owners = [change], [owner]
            if isinstance(found, Answer):
                self._answered(alone, [found])
            else:
                self._give_up(alone, found)

    def _give_up(self, batch: _Batch, error: BaseException) -> None:
        if not isinstance(error, StoreError):
            log.error("a commit failed in an unexpected way", exc_info=error)
        damaged = not isinstance(error, StoreError) or isinstance(error, CheckpointCorrupt)
        if damaged and len(batch.changes) > 1 and not self._closed:
            self._one_by_one(batch)  # one damaged run must not keep the others from being written
            return
        for owner in batch.owners:
            if isinstance(owner, tuple):
                owner[0].in_flight -= 1
                if isinstance(error, StoreError):
                    self.refused = True
                    owner[0].halt(error)
                else:  # what it wants to write can never be written
                    owner[0].engine_failed(error)
            elif not owner.done():
                owner.set_exception(error)
        self._rest()


def _until_special(pending: list[Draft]) -> tuple[list[Draft], list[Draft]]:
    """The drafts that can be one change, and those that must wait for it.

    One that carries more stands alone, but for one that puts the run away: it takes along what is before it.
    """
    if pending[0].change is not None:
        return pending[:1], pending[1:]
    split = next((i for i, draft in enumerate(pending) if draft.change is not None), len(pending))
    if split < len(pending) and pending[split].takes_along:
        split += 1
    return pending[:split], pending[split:]


def _sealed(run: RunContext, drafts: list[Draft]) -> tuple[list[Row], str]:
    """The rows of some drafts, and the checksum after them. The first under a lease says how its writer came by it."""
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
    """The changes of one commit, and who waits for each answer."""

    __slots__ = ("changes", "needs_thread", "owners", "packed_bytes", "tries", "unknown")

    def __init__(self) -> None:
        self.changes: list[Any] = []
        self.owners: list[Any] = []
        self.tries = 0
        self.unknown = False
        self.needs_thread = False
        self.packed_bytes = 0


def _sealed_within(
    change: Advance, run: RunContext, draft: Draft, body: Callable[[Any], Record]
) -> Callable[[Any], None]:
    """Run the body inside the transaction, and seal the record that it gives into the change."""

    def within(tx: Any) -> None:
        draft.record = body(tx)
        draft.record.claimed = run.claimed
        row, checksum = seal(draft.record, run.seq + 1, run.checksum, run.cipher)
        change.rows, change.checksum = [row], checksum

    return within


def head_move(
    status: Status | None, *, release: bool = False, due_at: Any = None, wakes: tuple[str, ...] = (), **more: Any
) -> dict[str, Any]:
    """The fields of an Advance that move the head."""
    return {"status": status, "release": release, "due_at": due_at, "wakes": wakes, **more}
