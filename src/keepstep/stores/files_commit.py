"""How a batch of changes is applied to a files store: each run by itself, runs that have nothing in common at once."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, StoreError, StoreUnavailable
from ..model import Kind, Run, Signal, Status
from ..model.ids import draw
from ..ports import Advance, Answer, Change, Create, Rekey, Send, Verdict
from . import rules
from .files_disk import Steps
from .files_entry import Draft, Head, Outbox, Sending, facts_of, head_of, numbered, run_of
from .files_index import Index, Line
from .files_log import Logs, State
from .files_names import entry_name
from .files_rekey import has_retired_keys, remove_retired_keys

log = logging.getLogger("keepstep")

_change = msgspec.structs.replace

#: Threads whose syncs overlap. More do not help: they wait for the same journal of the disk.
THREADS = 16

_FINAL = frozenset({Kind.RUN_FINISHED.value, Kind.ERROR.value})


class Commits:
    """Applies changes to the logs, does what follows from them elsewhere, and tells the index."""

    def __init__(self, logs: Logs, index: Index, now: Callable[[], datetime]) -> None:
        self._logs = logs
        self._index = index
        self._now = now
        self._pool: ThreadPoolExecutor | None = None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    # -- batches -----------------------------------------------------------------------------------------------------

    def apply(self, changes: Sequence[Change]) -> list[Answer]:
        """One answer per change. Nothing is written if one of them is no change at all, or meets a damaged run."""
        self._check(changes)
        noted = {run for change in changes if not _is_plain(change) for run in _touched(change)}
        batch = self._index.will(noted)
        if any(isinstance(change, Rekey) for change in changes):
            self._logs.empty_trash()
        answers: list[Answer | None] = [None] * len(changes)

        def do(group: list[int]) -> Steps[None]:
            for i in group:
                answers[i] = yield from self._apply(changes[i])

        failures = self.at_once([do(group) for group in _apart(changes)])
        if failures:
            self._index.failed(batch)
            raise _failure(failures, nothing_written=not any(a and a.verdict is Verdict.DONE for a in answers))
        done = [answer for answer in answers if answer is not None]
        self._index.did(batch, {rules.author(change) for change in changes})
        return done

    def at_once(self, works: Iterable[Steps[Any]]) -> list[Exception]:
        """Do several pieces of work, each up to its next sync, then all these syncs at once; what went wrong."""
        failures: list[Exception] = []
        going: list[tuple[Steps[Any], OSError | None]] = [(work, None) for work in works]
        while going:
            waiting: list[tuple[Steps[Any], int]] = []
            for work, failed in going:
                try:
                    waiting.append((work, next(work) if failed is None else work.throw(failed)))
                except StopIteration:
                    pass
                except Exception as error:  # noqa: BLE001 - told when all are done
                    failures.append(error)
            errors = self._sync([fd for _, fd in waiting])
            going = [(work, error) for (work, _), error in zip(waiting, errors, strict=True)]
        return failures

    def _sync(self, fds: list[int]) -> list[OSError | None]:
        """Sync files, several at a time: each thread only waits for the disk, so they need nothing of each other."""
        errors: list[OSError | None] = [None] * len(fds)
        threads = min(THREADS, len(fds))

        def sync(first: int) -> None:
            for i in range(first, len(fds), threads):
                try:
                    self._logs.disk.sync(fds[i])
                except OSError as error:
                    errors[i] = error

        if threads <= 1:
            for i in range(threads):
                sync(i)
            return errors
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="keepstep-files")
        for done in [self._pool.submit(sync, first) for first in range(threads)]:
            done.result()
        return errors

    def _check(self, changes: Sequence[Change]) -> None:
        """Raise, before anything is written, for what can never be written."""
        for change in changes:
            if isinstance(change, Create):
                rules.check_create(change)
            elif isinstance(change, Advance):
                for create in change.creates:
                    rules.check_create(create)
        try:
            for change in changes:
                if not isinstance(change, Create):
                    self._look(change.signal.run if isinstance(change, Send) else change.run)
                for run in _touched(change):
                    run.encode()
        except UnicodeEncodeError as error:
            raise DefinitionError(f"{self._logs.root} cannot be asked for that: {error}") from None

    def _look(self, run: str) -> None:
        self._logs.unless_removed(run, lambda: self._logs.state(run, trusting=True))

    def _apply(self, change: Change) -> Steps[Answer]:
        if isinstance(change, Advance):
            return self._advance(change)
        if isinstance(change, Create):
            return self._create(change)
        if isinstance(change, Rekey):
            return self._rekey(change)
        return self._send(change.signal)

    # A run that another process removes at this moment is not damaged: it is not there any more.

    def _create(self, create: Create) -> Steps[Answer]:
        return self._logs.steps_unless_removed(create.run.id, lambda: self._create_once(create))

    def _send(self, signal: Signal, token: str = "") -> Steps[Answer]:
        return self._logs.steps_unless_removed(signal.run, lambda: self._send_once(signal, token))

    # -- the lease holder's changes ------------------------------------------------------------------------------------

    def _advance(self, change: Advance) -> Steps[Answer]:
        before: list[Head] = []

        def decide(state: State | None) -> Draft | Answer:
            before[:] = [state.head] if state else []
            return self._advanced(change, state)

        draft, state = yield from self._logs.append(change.run, decide, trusting=True)
        if isinstance(draft, Answer) or state is None:
            return draft if isinstance(draft, Answer) else Answer(Verdict.FENCED, about=change.run)
        if draft.signals:
            known = self._logs.known_signals(change.run, state)
            for signal in draft.signals:
                self._logs.learn(known, signal, "")
        yield from self.carry_on(state)
        if _is_news(before[0], draft):
            self.note(change.run, state, change.worker)
        return Answer(Verdict.DONE, seq=draft.head.seq)

    def _advanced(self, change: Advance, state: State | None) -> Draft | Answer:
        if state is None:
            return Answer(Verdict.FENCED, about=change.run)
        head = state.head
        fits = (head.worker, head.epoch, head.seq) == (change.worker, change.epoch, change.after)
        if not fits or not rules.extends(change.rows, change.after):
            return Answer(Verdict.FENCED, about=change.run)
        if change.signals_seen is not None and head.signals > change.signals_seen:
            return Answer(Verdict.MISSED)
        status = rules.next_status(head.status, change)
        if status is None:
            return Answer(Verdict.ILLEGAL)
        if change.within is not None:
            return Answer(Verdict.FAILED, error=DefinitionError("a files store has no transactional steps"))
        refusal = rules.refuse_outbox(
            change,
            self._conflicts,
            lambda signal: self._logs.unless_removed(
                signal.run, lambda: self._refuse_send(signal, self._logs.state(signal.run))
            ),
        )
        if refusal is not None:
            return refusal
        return self._moved(change, state, status)

    def _moved(self, change: Advance, state: State, status: Status) -> Draft:
        head, rows = state.head, change.rows
        now = self._now()
        at = change.at or now
        moves: dict[str, object] = {"status": status, "updated_at": at}
        if rows:
            moves |= {"seq": rows[-1].seq, "checksum": change.checksum}
            if change.progress:
                moves["recoveries"] = 0
            if any(row.kind in _FINAL for row in rows):
                moves["outcome"] = state.number + 1
        if rules.releases(change, status):
            wakes = () if status in rules.ENDED else tuple(change.wakes)
            moves |= {"worker": None, "due_at": rules.due_after(change, status, at), "wakes": wakes}
        head = _change(head, **moves)
        signals: list[Signal] = []
        for signal in self._own_signals(change, state):
            head, sealed = _received(head, signal, now)
            signals.append(sealed)
        return Draft("advanced", head, rows, signals, outbox=self._outbox(change, state))

    def _own_signals(self, change: Advance, state: State) -> list[Signal]:
        """What a run sends to itself; it arrives with the change."""
        mine = {send.signal.id or n: send.signal for n, send in enumerate(change.sends) if _to_self(change, send)}
        if not mine:
            return []
        known = self._logs.known_signals(change.run, state).ids
        return [signal for signal in mine.values() if not signal.id or signal.id not in known]

    def _outbox(self, change: Advance, state: State) -> Outbox:
        """What this entry has to do elsewhere, and what the one before may not have done yet."""
        carried = self.undone(state.outbox)
        if not (change.creates or change.sends):
            return carried
        name = f"{state.head.born}.{state.number + 1}"
        sends = [send for send in change.sends if not _to_self(change, send)]
        tokens = [Sending(send.signal, f"{name}.{place}") for place, send in enumerate(sends, 1)]
        return Outbox((*carried.creates, *change.creates), (*carried.sends, *tokens))

    def _conflicts(self, wanted: Run) -> bool:
        existing = self._logs.unless_removed(wanted.id, lambda: self.run(wanted.id))
        return existing is not None and not rules.same_child(existing, wanted)

    # -- elsewhere -----------------------------------------------------------------------------------------------------

    def carry_on(self, state: State) -> Steps[None]:
        """Do what an entry says is to be done in other runs; done twice it is done once."""
        outbox = state.outbox
        if not outbox:
            return
        try:
            for create in outbox.creates:
                answer = yield from self._create(create)
                if answer.verdict is Verdict.EXISTS and answer.run is None:
                    raise CheckpointCorrupt(f"run {create.run.id!r} is there and cannot be read")
                if answer.run is not None and not rules.same_child(answer.run, create.run):
                    log.error("run %s was to be created, but another of that id was faster", create.run.id)
            for sending in outbox.sends:
                yield from self._send(sending.signal, sending.token)
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), unknown=True) from error
        state.outbox = Outbox()

    def undone(self, outbox: Outbox) -> Outbox:
        """What of an outbox may not have been done yet."""
        if not outbox:
            return outbox
        return Outbox(
            tuple(create for create in outbox.creates if self._is_absent(create.run.id)),
            tuple(sending for sending in outbox.sends if not self._was_sent(sending)),
        )

    def _is_absent(self, run: str) -> bool:
        return self._logs.unless_removed(run, lambda: self._logs.state(run)) is None

    def _was_sent(self, sending: Sending) -> bool:
        return self._logs.unless_removed(sending.signal.run, lambda: self._has_received(sending))

    def _has_received(self, sending: Sending) -> bool:
        target = self._logs.state(sending.signal.run)
        return target is not None and sending.token in self._logs.known_signals(sending.signal.run, target).tokens

    def settle(self, run: str) -> Steps[None]:
        """Carry on what someone may have left undone: the newest entry's outbox, and the run's place in the index."""
        yield from self._logs.steps_unless_removed(run, lambda: self._settle(run))

    def _settle(self, run: str) -> Steps[None]:
        known = self._index.line(run)
        state = self._logs.state(run)
        if state is not None:
            yield from self.carry_on(state)
            self.note(run, state, None)
        elif known is not None and not known.gone:
            self._index.tell(Line(run=run, born=known.born, entry=known.entry, gone=True))

    def note(self, run: str, state: State, author: str | None) -> None:
        """Tell the index how a run stands."""
        self._index.note(run, self._logs.facts(run, state.head), state, author)

    # -- anyone's changes ----------------------------------------------------------------------------------------------

    def run(self, run_id: str, known: Line | None = None) -> Run | None:
        """A run as its log tells it, without its outcome; `known` is what the index says, never more."""
        state = self._logs.state(run_id)
        if state is not None and known is not None and state.number < known.entry:
            lost = self.lost(run_id, known)
            if lost is not None:
                raise lost
        return None if state is None else run_of(run_id, self._logs.facts(run_id, state.head), state.head)

    def lost(self, run_id: str, known: Line | None) -> CheckpointCorrupt | None:
        """That the newest entries of a log are gone: the index tells of a run only what its log has said before.

        `known` is what the index said before this look at the log.
        """
        state = None if known is None or known.gone else self._logs.state(run_id)
        if known is None or state is None or state.head.born != known.born or state.number >= known.entry:
            return None
        return CheckpointCorrupt(
            f"run {run_id!r}: its log is broken: {entry_name(known.entry)} is missing, in which it was {known.status}"
        )

    def remains(self, run_id: str) -> State | None:
        """How a run with a broken log stood when its newest readable entry was written."""
        return self._logs.remains(run_id, self._entries_told(run_id))

    def _entries_told(self, run_id: str) -> int:
        known = self._index.loaded().line(run_id)
        return 0 if known is None or known.gone else known.entry

    def _create_once(self, create: Create) -> Steps[Answer]:
        run = rules.check_create(create)
        logs, index = self._logs, self._index if create.over is None else self._index.loaded()
        known = index.line(run.id)
        try:
            while (there := logs.last_state(run.id, whole=True)) is not None and there.head.deleted:
                yield from logs.remove(run.id, there)
            broken = create.over is not None and self.lost(run.id, known) is not None
        except CheckpointCorrupt:
            if create.over is None:
                return Answer(Verdict.EXISTS, about=run.id)
            broken = True
        if broken:
            draft, state = yield from logs.append_over(
                run.id, self._entries_told(run.id), lambda state: self._created_over(create, run, state)
            )
        else:
            draft, state = yield from logs.append(run.id, lambda state: self._created(create, run, state))
        if isinstance(draft, Answer) or state is None:
            draft = draft if isinstance(draft, Answer) else Answer(Verdict.FENCED, about=run.id)
            draft.run = self._existing(run.id)
            return draft
        yield from logs.sync_folder_of(run.id)
        self.note(run.id, state, run.worker)
        return Answer(Verdict.DONE, run=run, seq=run.seq)

    def _created(self, create: Create, run: Run, state: State | None) -> Draft | Answer:
        if state is not None and create.over is None:
            return Answer(Verdict.EXISTS)
        there = None if state is None else state.head
        if there is not None and not rules.may_replace(create, there.worker, there.epoch, there.signals):
            return Answer(Verdict.FENCED, about=run.id)
        if state is None:
            self._logs.make_folder(run.id)
        base = state.number + 1 if state else 1
        head = head_of(run, draw(6).hex(), base)
        if any(row.kind in _FINAL for row in create.rows):
            head = _change(head, outcome=base)
        facts = facts_of(run, self._index.next_number())
        return Draft("created", head, create.rows, numbered(create.signals, run.id), facts=facts)

    def _created_over(self, create: Create, run: Run, state: State | None) -> Draft | Answer:
        """The same in place of a run whose log is broken: who had the lease there is fenced by what comes after."""
        if state is None:
            return Answer(Verdict.FENCED, about=run.id)
        heard = state.head.signals if create.heard is None else create.heard  # what came after the damage is not known
        state.head = _change(state.head, worker=None, signals=heard)
        return self._created(create, run, state)

    def _existing(self, run_id: str) -> Run | None:
        """The run that is there already; None if it is damaged, which must not stop the rest of the batch."""
        try:
            return self._logs.unless_removed(run_id, lambda: self.run(run_id))
        except CheckpointCorrupt:
            return None

    def _rekey(self, change: Rekey) -> Steps[Answer]:
        """Exchange a run's data key, and leave none of a retired master key in its log; the same key does the rest."""
        try:
            return (yield from self._logs.steps_unless_removed(change.run, lambda: self._rekeyed(change)))
        except CheckpointCorrupt as error:  # the other runs of the batch are rekeyed all the same
            return Answer(Verdict.FAILED, about=change.run, error=error)

    def _rekeyed(self, change: Rekey) -> Steps[Answer]:
        expected = change.old

        def decide(state: State | None) -> Draft | Answer:
            if state is None:
                return Answer(Verdict.NOT_FOUND, about=change.run)
            if state.head.data_key != expected:
                return Answer(Verdict.FENCED, about=change.run)
            newest = self._logs.entry(change.run, state.number)
            if expected == change.new and not has_retired_keys(newest.outbox, change.new):
                return Answer(Verdict.DONE)
            return Draft("rekeyed", _change(state.head, data_key=change.new), outbox=self.undone(state.outbox))

        while True:
            draft, state = yield from self._logs.append(change.run, decide)
            if state is None or (isinstance(draft, Answer) and draft.verdict is not Verdict.DONE):
                return draft if isinstance(draft, Answer) else Answer(Verdict.FENCED, about=change.run)
            yield from self.carry_on(state)
            if isinstance(draft, Answer) or not draft.outbox.creates:
                break
            expected = change.new
        yield from remove_retired_keys(self._logs, change.run, state)
        return Answer(Verdict.DONE)

    def _send_once(self, signal: Signal, token: str = "") -> Steps[Answer]:
        """Append a signal. One with a token was accepted before, so that even a finished run receives it."""

        def decide(state: State | None) -> Draft | Answer:
            refusal = self._refuse_send(signal, state, token)
            if refusal is not None or state is None:
                return refusal or Answer(Verdict.NOT_FOUND, about=signal.run)
            head, sealed = _received(state.head, signal, self._now())
            return Draft("signalled", head, signals=[sealed], tokens=[token], outbox=self.undone(state.outbox))

        draft, state = yield from self._logs.append(signal.run, decide)
        if state is not None:
            if isinstance(draft, Draft):
                self._logs.learn(self._logs.known_signals(signal.run, state), draft.signals[0], token)
                yield from self.carry_on(state)
            # Also when it was there already: whoever sent it may have died before anyone was told.
            self.note(signal.run, state, None)
        return draft if isinstance(draft, Answer) else Answer(Verdict.DONE, seq=draft.head.signals)

    def _refuse_send(self, signal: Signal, state: State | None, token: str = "") -> Answer | None:
        if state is None:
            return Answer(Verdict.NOT_FOUND, about=signal.run)
        if signal.id or token:
            known = self._logs.known_signals(signal.run, state)
            seq = known.ids.get(signal.id) if signal.id else None
            seq = known.tokens.get(token) if seq is None and token else seq
            if seq is not None:
                return Answer(Verdict.EXISTS, seq=seq)
        if state.head.status.finished and not token:
            return Answer(Verdict.FINISHED, about=signal.run)
        return None

    def delete(self, run_id: str, *, finished: bool = False) -> Steps[bool]:
        """Remove a run that nobody has leased; with `finished`, only if it has ended."""

        def decide(state: State | None) -> Draft | Answer:
            if state is None or state.head.worker is not None or (finished and not state.head.status.finished):
                return Answer(Verdict.FENCED)
            return Draft("deleted", _change(state.head, deleted=True))

        draft, state = yield from self._logs.append(run_id, decide)
        if isinstance(draft, Answer) or state is None:
            return False
        yield from self._logs.remove(run_id, state)
        self._index.note(run_id, None, state, None)
        return True

    def finish_removal(self, run_id: str) -> Steps[None]:
        """Do what is left of a removal that broke off."""
        state = self._logs.last_state(run_id)
        if state is not None and state.head.deleted:
            yield from self._logs.remove(run_id, state)
            self._index.note(run_id, None, state, None)
        yield from self.settle(run_id)

    def delete_broken(self, run_id: str) -> Steps[None]:
        """Remove a run whose log cannot take another entry."""
        yield from self._logs.remove(run_id)
        yield from self.settle(run_id)


# -- changes and heads -------------------------------------------------------------------------------------------------


def _received(head: Head, signal: Signal, now: datetime) -> tuple[Head, Signal]:
    """How a run stands with one more signal, and the signal as it is stored."""
    sealed = rules.seal_signal(signal, head.signals + 1, now)
    head = _change(head, signals=sealed.seq)
    if head.worker is None and signal.name in head.wakes:
        head = _change(head, due_at=min(head.due_at or now, now))
    return head, sealed


def _is_news(before: Head, draft: Draft) -> bool:
    """Whether an entry changes what the index says of its run."""
    head = draft.head
    return bool(draft.signals) or (before.status, before.worker, before.due_at) != (
        head.status,
        head.worker,
        head.due_at,
    )


def _is_plain(change: Change) -> bool:
    """Whether a change can concern nothing but the log of its run: a running run's next rows."""
    return (
        isinstance(change, Advance)
        and change.status is None
        and not change.release
        and not change.creates
        and not change.sends
    )


def _to_self(change: Advance, send: Send) -> bool:
    return send.signal.run == change.run


def _touched(change: Change) -> set[str]:
    """The runs that a change writes to."""
    if isinstance(change, Create):
        return {change.run.id}
    if isinstance(change, Send):
        return {change.signal.run}
    if isinstance(change, Rekey):
        return {change.run}
    return {change.run, *(one.run.id for one in change.creates), *(one.signal.run for one in change.sends)}


def _apart(changes: Sequence[Change]) -> list[list[int]]:
    """The changes in groups that touch no run in common, each in its order."""
    groups: dict[str, list[int]] = {}
    for i, change in enumerate(changes):
        touched = _touched(change)
        met: dict[int, list[int]] = {id(groups[run]): groups[run] for run in touched if run in groups}
        whole = next(iter(met.values()), [])
        if len(met) > 1:
            whole = sorted(n for group in met.values() for n in group)
            touched |= {run for run, group in groups.items() if id(group) in met}
        whole.append(i)
        groups.update(dict.fromkeys(touched, whole))
    return list({id(group): group for group in groups.values()}.values())


def _failure(failures: list[Exception], *, nothing_written: bool) -> Exception:
    """What to raise when some of a batch went wrong: if some went right, nobody can tell which."""
    first = next((error for error in failures if not isinstance(error, StoreError)), failures[0])
    if nothing_written or not isinstance(first, StoreError):
        return first
    unavailable = StoreUnavailable(str(first), unknown=True)
    with contextlib.suppress(AttributeError):
        unavailable.__cause__ = first
    return unavailable
