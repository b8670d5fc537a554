"""Applies a batch of changes to a files store: each run by itself, and independent runs at the same time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import msgspec

from ...errors import CheckpointCorrupt, DefinitionError, StoreError, StoreUnavailable
from ...model import Run
from ...model.checkpoint import ENDS_RUN
from ...model.ids import draw
from ...ports import Advance, Answer, Change, Create, Rekey, Send, Verdict
from .. import rules
from ..transition import Transition, Writes, same_child
from ..write_counts import author
from .disk import Steps
from .entry import Draft, Head, Outbox, Sending, facts_of, head_of, numbered, run_of
from .index import Index, Line
from .log import Logs, State
from .names import entry_name
from .rekey import has_retired_keys, remove_retired_keys

log = logging.getLogger("keepstep")

_change = msgspec.structs.replace

#: Threads whose syncs overlap. More would not help, because they wait for the same journal of the disk.
THREADS = 16


class Commits:
    """Applies changes to the logs, carries out their effects on other runs, and updates the index."""

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
        """Return one answer per change. Nothing is written if a change is malformed or meets a damaged run."""
        self._check(changes)
        noted = {run for change in changes if not _is_plain(change) for run in _touched(change)}
        batch = self._index.will(noted)
        if any(isinstance(change, Rekey) for change in changes):
            self._logs.empty_trash()
        # Groups are written side by side, so the places in the list of runs are assigned beforehand.
        places = [{run: self._index.next_number() for run in _created_by(change)} for change in changes]
        answers: list[Answer | None] = [None] * len(changes)

        def do(group: list[int]) -> Steps[None]:
            for i in group:
                answers[i] = yield from self._apply(changes[i], places[i])

        failures = self.at_once([do(group) for group in _apart(changes)])
        if failures:
            self._index.failed(batch)
            raise _failure(failures, nothing_written=not any(a and a.verdict is Verdict.DONE for a in answers))
        done = [answer for answer in answers if answer is not None]
        self._index.did(batch, {author(change) for change in changes})
        return done

    def at_once(self, works: Iterable[Steps[Any]]) -> list[Exception]:
        """Run several works, each up to its next sync, then all these syncs together. Return the errors."""
        failures: list[Exception] = []
        going: list[tuple[Steps[Any], OSError | None]] = [(work, None) for work in works]
        while going:
            waiting: list[tuple[Steps[Any], int]] = []
            for work, failed in going:
                try:
                    waiting.append((work, next(work) if failed is None else work.throw(failed)))
                except StopIteration:
                    pass
                except Exception as error:  # noqa: BLE001 - returned when all are done
                    failures.append(error)
            errors = self._sync([fd for _, fd in waiting])
            going = [(work, error) for (work, _), error in zip(waiting, errors, strict=True)]
        return failures

    def _sync(self, fds: list[int]) -> list[OSError | None]:
        """Sync files in several threads; each one only waits for the disk."""
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
        """Raise, before anything is written, for changes that can never be written."""
        for change in changes:
            if isinstance(change, Create):
                rules.check_create(change)
            elif isinstance(change, Advance):
                for create in change.creates:
                    rules.check_create(create)
        try:
            for change in changes:
                if not isinstance(change, Create):
                    self._look(_run_of(change))
                for run in _touched(change):
                    run.encode()
        except UnicodeEncodeError as error:
            raise DefinitionError(f"{self._logs.root} cannot store this value: {error}") from None

    def _look(self, run: str) -> None:
        self._logs.unless_removed(run, lambda: self._logs.state(run, trusting=True))

    def _apply(self, change: Change, places: dict[str, int]) -> Steps[Answer]:
        if isinstance(change, Advance):
            return self._advance(change, places)
        if isinstance(change, Create):
            return self._create(change, places[change.run.id])
        if isinstance(change, Rekey):
            return self._rekey(change)
        return self._send(change)

    # A run that another process is removing counts as missing, not as damaged.

    def _create(self, create: Create, place: int | None) -> Steps[Answer]:
        return self._logs.steps_unless_removed(create.run.id, lambda: self._create_once(create, place))

    def _send(self, send: Send, token: str = "") -> Steps[Answer]:
        return self._logs.steps_unless_removed(send.signal.run, lambda: self._send_once(send, token))

    def twin(self, queue: str, dedupe: str) -> str | None:
        """Return a run of a queue with this `dedupe` that has not finished."""
        return self._index.twin(queue, dedupe)

    # -- changes of the lease holder -----------------------------------------------------------------------------------

    def _advance(self, change: Advance, places: dict[str, int]) -> Steps[Answer]:
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
        yield from self.carry_on(state, places)
        if change.trim is not None:
            self._logs.remove_entries(change.run, before[0], state)
        if _is_news(before[0], draft):
            self.note(change.run, state, change.worker)
        return Answer(Verdict.DONE, seq=draft.head.seq)

    def _advanced(self, change: Advance, state: State | None) -> Draft | Answer:
        if change.trim_signals is not None:  # a later delivery of the same signal must find it
            change = _change(change, trim_signals=None)
        left_out: list[Send] = []
        decided = self._decided(change, state, left_out)
        if isinstance(decided, Answer) or state is None:
            return decided if isinstance(decided, Answer) else Answer(Verdict.FENCED, about=change.run)
        head = _head_in(decided, change.run)
        if head.kept_from != state.head.kept_from:
            first, kept = self._logs.kept_entries(change.run, state, head.kept_from)
            head = _change(head, first_entry=first, kept_entry=kept)
        if any(row.kind in ENDS_RUN for row in change.rows):
            head = _change(head, outcome=state.number + 1)
        mine = [signal for signal in decided.signals if signal.run == change.run]
        return Draft("advanced", head, change.rows, mine, outbox=self._outbox(change, state, left_out))

    def _decided(self, change: Change, state: State | None, left_out: list[Send] | None = None) -> Writes | Answer:
        """Return the writes of a change to the run in this state, or its refusal. The outbox writes to other runs.

        Optional signals that are not sent are added to `left_out`.
        """
        transition = Transition(_View(self, self._logs, _run_of(change), state), self._now())
        answer = transition.apply(change)
        if left_out is not None and isinstance(change, Advance) and change.sends:
            left_out += filter(transition.leaves_out, change.sends)
        return transition.writes if answer.verdict is Verdict.DONE else answer

    def _outbox(self, change: Advance, state: State, left_out: Sequence[Send]) -> Outbox:
        """Return the effects of this entry on other runs, and those of the previous entry that may be unfinished."""
        carried = self.undone(state.outbox)
        if not (change.creates or change.sends):
            return carried
        name = f"{state.head.born}.{state.number + 1}"
        sends = [send for send in change.sends if not _to_self(change, send) and send not in left_out]
        tokens = [Sending(send.signal, f"{name}.{place}") for place, send in enumerate(sends, 1)]
        return Outbox((*carried.creates, *change.creates), (*carried.sends, *tokens))

    # -- effects on other runs -----------------------------------------------------------------------------------------

    def carry_on(self, state: State, places: dict[str, int] | None = None) -> Steps[None]:
        """Carry out the effects of an entry on other runs; repeating it has no further effect.

        `places` are the places in the list of runs that were assigned to new runs.
        """
        outbox = state.outbox
        if not outbox:
            return
        try:
            for create in outbox.creates:
                answer = yield from self._create(create, places.get(create.run.id) if places else None)
                if answer.verdict is Verdict.EXISTS and answer.run is None:
                    raise CheckpointCorrupt(f"run {create.run.id!r} exists and cannot be read")
                if answer.run is not None and not same_child(answer.run, create.run):
                    log.error("run %s was not created, because another run took its id first", create.run.id)
            for sending in outbox.sends:
                yield from self._send(Send(sending.signal), sending.token)
        except StoreUnavailable as error:
            raise StoreUnavailable(str(error), unknown=True) from error
        state.outbox = Outbox()

    def undone(self, outbox: Outbox) -> Outbox:
        """Return the part of an outbox that may be unfinished."""
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
        """Finish the work of a dead process: the newest entry's outbox, and the run's line in the index."""
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
        """Record the state of a run in the index."""
        self._index.note(run, self._logs.facts(run, state.head), state, author)

    # -- changes of any process ----------------------------------------------------------------------------------------

    def run(self, run_id: str, known: Line | None = None) -> Run | None:
        """Return a run from its log, without its outcome; `known` is its line in the index, which is never ahead."""
        state = self._logs.state(run_id)
        if state is not None and known is not None and state.number < known.entry:
            lost = self.lost(run_id, known)
            if lost is not None:
                raise lost
        return None if state is None else run_of(run_id, self._logs.facts(run_id, state.head), state.head)

    def lost(self, run_id: str, known: Line | None) -> CheckpointCorrupt | None:
        """Return an error if the newest entries of a log are missing: the index names only entries that existed.

        `known` is the line in the index before the log was read.
        """
        state = None if known is None or known.gone else self._logs.state(run_id)
        if known is None or state is None or state.head.born != known.born or state.number >= known.entry:
            return None
        return CheckpointCorrupt(
            f"run {run_id!r}: its log is broken: {entry_name(known.entry)} is missing, where it was {known.status}"
        )

    def remains(self, run_id: str) -> State | None:
        """Return the state of a run with a broken log at its newest readable entry."""
        return self._logs.remains(run_id, self._entries_told(run_id))

    def _entries_told(self, run_id: str) -> int:
        known = self._index.loaded().line(run_id)
        return 0 if known is None or known.gone else known.entry

    def _create_once(self, create: Create, place: int | None) -> Steps[Answer]:
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
                run.id, self._entries_told(run.id), lambda state: self._created_over(create, run, state, place)
            )
        else:
            draft, state = yield from logs.append(run.id, lambda state: self._created(create, run, state, place))
        if isinstance(draft, Answer) or state is None:
            return draft if isinstance(draft, Answer) else Answer(Verdict.FENCED, about=run.id)
        yield from logs.sync_folder_of(run.id)
        self.note(run.id, state, run.worker)
        return Answer(Verdict.DONE, run=run, seq=run.seq)

    def _created(self, create: Create, run: Run, state: State | None, place: int | None) -> Draft | Answer:
        decided = self._decided(create, state)
        if isinstance(decided, Answer):
            return decided
        if state is None:
            self._logs.make_folder(run.id)
        base = state.number + 1 if state else 1
        head = head_of(run, draw(6).hex(), base)
        if any(row.kind in ENDS_RUN for row in create.rows):
            head = _change(head, outcome=base)
        facts = facts_of(run, self._index.next_number() if place is None else place)
        return Draft("created", head, create.rows, numbered(create.signals, run.id), facts=facts)

    def _created_over(self, create: Create, run: Run, state: State | None, place: int | None) -> Draft | Answer:
        """Create a run in place of one whose log is broken; later entries fence off the old lease holder."""
        if state is None:
            return Answer(Verdict.FENCED, about=run.id)
        # The number of signals after the damage is unknown.
        signals = state.head.signals if create.received is None else create.received
        state.head = _change(state.head, worker=None, signals=signals)
        return self._created(create, run, state, place)

    def _rekey(self, change: Rekey) -> Steps[Answer]:
        """Replace a run's data key, and remove keys of a retired master key from its log. Repeating it is safe."""
        try:
            return (yield from self._logs.steps_unless_removed(change.run, lambda: self._rekeyed(change)))
        except CheckpointCorrupt as error:  # the other runs of the batch are still rekeyed
            return Answer(Verdict.FAILED, about=change.run, error=error)

    def _rekeyed(self, change: Rekey) -> Steps[Answer]:
        expected = change.old

        def decide(state: State | None) -> Draft | Answer:
            decided = self._decided(_change(change, old=expected), state)
            if isinstance(decided, Answer) or state is None:
                return decided if isinstance(decided, Answer) else Answer(Verdict.NOT_FOUND, about=change.run)
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

    def _send_once(self, send: Send, token: str = "") -> Steps[Answer]:
        """Append a signal. One with a token was accepted before, so that even a finished run receives it."""
        signal = send.signal

        def decide(state: State | None) -> Draft | Answer:
            if state is not None and token:
                seq = self._logs.known_signals(signal.run, state).tokens.get(token)
                if seq is not None:
                    return Answer(Verdict.EXISTS, seq=seq)
            transition = Transition(_View(self, self._logs, signal.run, state), self._now())
            answer = transition.send(send, accepted=bool(token))
            if answer.verdict is not Verdict.DONE or state is None:
                return answer
            writes = transition.writes
            head = _head_in(writes, signal.run)
            return Draft("signalled", head, signals=writes.signals, tokens=[token], outbox=self.undone(state.outbox))

        draft, state = yield from self._logs.append(signal.run, decide)
        if state is not None:
            if isinstance(draft, Draft):
                self._logs.learn(self._logs.known_signals(signal.run, state), draft.signals[0], token)
                yield from self.carry_on(state)
            # Also for an existing signal: its sender may have died before the index was updated.
            self.note(signal.run, state, None)
        return draft if isinstance(draft, Answer) else Answer(Verdict.DONE, seq=draft.head.signals)

    def delete(self, run_id: str, *, finished: bool = False) -> Steps[bool]:
        """Remove a run without a lease; with `finished`, only if it has ended."""

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
        """Complete an interrupted removal."""
        state = self._logs.last_state(run_id)
        if state is not None and state.head.deleted:
            yield from self._logs.remove(run_id, state)
            self._index.note(run_id, None, state, None)
        yield from self.settle(run_id)

    def delete_broken(self, run_id: str) -> Steps[None]:
        """Remove a run whose log accepts no more entries."""
        yield from self._logs.remove(run_id)
        yield from self.settle(run_id)


# -- changes and heads -------------------------------------------------------------------------------------------------


class _View:
    """The data for a decision: the state of the run to write, and other runs from their logs."""

    def __init__(self, commits: Commits, logs: Logs, run: str, state: State | None) -> None:
        self._commits = commits
        self._logs = logs
        self._run = run
        self._state = state

    def _of(self, run: str) -> State | None:
        return self._state if run == self._run else self._logs.unless_removed(run, lambda: self._logs.state(run))

    def head(self, run: str) -> Head | None:
        state = self._of(run)
        return state.head if state else None

    def run(self, run: str) -> Run | None:
        if run != self._run:
            return self._logs.unless_removed(run, lambda: self._commits.run(run))
        state = self._state
        return run_of(run, self._logs.facts(run, state.head), state.head) if state else None

    def data_key(self, run: str) -> str | None:
        state = self._of(run)
        return state.head.data_key if state else None

    def signal_seq(self, run: str, signal_id: str) -> int | None:
        state = self._of(run)
        return self._logs.known_signals(run, state).ids.get(signal_id) if state else None

    def twin(self, queue: str, dedupe: str) -> str | None:
        return self._commits.twin(queue, dedupe)

    def call(self, change: Advance) -> Exception:
        return DefinitionError("a files store has no transactional steps")


def _head_in(writes: Writes, run: str) -> Head:
    head = writes.heads[run]
    if not isinstance(head, Head):
        raise TypeError(f"run {run!r}: its head is not one of a files store")
    return head


def _is_news(before: Head, draft: Draft) -> bool:
    """Whether an entry changes its run's line in the index."""
    head = draft.head
    was = (before.status, before.worker, before.due_at, before.holds, before.service)
    return bool(draft.signals) or was != (head.status, head.worker, head.due_at, head.holds, head.service)


def _is_plain(change: Change) -> bool:
    """Whether a change only concerns the log of its run: the next rows of a running run."""
    return (
        isinstance(change, Advance)
        and change.status is None
        and not change.release
        and not change.creates
        and not change.sends
    )


def _to_self(change: Advance, send: Send) -> bool:
    return send.signal.run == change.run


def _run_of(change: Change) -> str:
    """Return the run that a change is about."""
    if isinstance(change, Create):
        return change.run.id
    return change.signal.run if isinstance(change, Send) else change.run


def _created_by(change: Change) -> list[str]:
    """Return the runs that a change creates, in order."""
    if isinstance(change, Create):
        return [change.run.id]
    return list(dict.fromkeys(create.run.id for create in change.creates)) if isinstance(change, Advance) else []


def _touched(change: Change) -> set[str]:
    """Return the runs that a change writes to."""
    if not isinstance(change, Advance):
        return {_run_of(change)}
    return {change.run, *(one.run.id for one in change.creates), *(one.signal.run for one in change.sends)}


def _apart(changes: Sequence[Change]) -> list[list[int]]:
    """Return the changes in groups that have no run in common, each in its order."""
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
    """Return the error to raise when part of a batch failed: if another part succeeded, the outcome is unknown."""
    first = next((error for error in failures if not isinstance(error, StoreError)), failures[0])
    if nothing_written or not isinstance(first, StoreError):
        return first
    unavailable = StoreUnavailable(str(first), unknown=True)
    with contextlib.suppress(AttributeError):
        unavailable.__cause__ = first
    return unavailable
