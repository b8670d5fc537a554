"""Commands on a stored run: each one claims the run, appends a record that names the actor, and releases the run."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..checks import check_text
from ..errors import AlreadyFinished, CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound, StoreError
from ..kernel.call_states import in_doubt
from ..kernel.replay import read_records
from ..kernel.undo_records import UndoRecords, counting
from ..model import FINISHED, Kind, Outcome, RunQuery, Signal, Status, WorkerInfo
from ..model.agent import agent_of
from ..model.checkpoint import ABOUT_UNDO, ENDS_STEP
from ..model.ids import new_id
from ..model.keepers import is_keeper, notice_of
from ..model.series import names_in_word
from ..model.signal import CANCEL, CHILD, GO, PAUSE, RESUME
from ..ports import Advance, ClaimRequest, Send, Verdict, instant
from ..records.data import RunFinishedData, new_data
from ..records.record import Record, chain_end, claimed, seal

if TYPE_CHECKING:
    from ..model import Claim, Run
    from .host import CommandHost

RETRIABLE = frozenset({Status.FAILED, Status.SET_ASIDE})
#: Verdicts about a signal that make the commit go on without it: its receiver cannot be reached.
_UNREACHABLE = frozenset({Verdict.FINISHED, Verdict.NOT_FOUND, Verdict.FAILED})


def check_not_keeper(run_id: str, act: str) -> None:
    """Refuse a command that goes back in the history of a keeper: its newest state is all that counts."""
    if is_keeper(run_id):
        raise DefinitionError(
            f"run {run_id!r} is a keeper, which has no code to {act}; pause or cancel it, or use keepstep schedules"
        )


async def cancel_now(host: CommandHost, run_id: str, reason: str, actor: str) -> list[str]:
    """Cancel a run that no worker drives without calling its code, for example a run that was set aside.

    Return the steps with an undo that are left as they are; the record names them, too.
    """
    check_text(reason, "reason")
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    if run.status in FINISHED:
        raise AlreadyFinished(f"run {run_id!r} is already {run.status.value}", run_id)
    host.encryption.cipher(run)  # nothing can be written without the run's key
    claim = await claim_by_name(host, run, frozenset(Status) - FINISHED)
    why = host.redaction.redact(reason)
    data = new_data(RunFinishedData, actor=actor, reason=why, before=run.status.value, act="cancel")
    record = Record(run_id, Kind.RUN_FINISHED.value, outcome=Outcome.CANCELLED.value, trigger="manual", data=data)
    record.worker, record.started_at, record.agent = claim.lease.worker, run.created_at, agent_of(run.workflow)
    async with hand_back_on_error(host, claim):
        doubts, not_undone = await _left(host, run)
        record.error = in_doubt(doubts) if doubts else None
        if not_undone:
            data["not_undone"] = not_undone
        family = await _signals_to_family(host, run)
        try:
            await append_and_release(host, claim, record, Status.CANCELLED, family)
        except CheckpointCorrupt:
            if not family:
                raise
            await append_and_release(host, claim, record, Status.CANCELLED)
            await _send_one_by_one(host, family)  # a damaged relative must not prevent the cancel
    return not_undone


async def _signals_to_family(host: CommandHost, run: Run) -> list[Signal]:
    """Return the signals of a cancelled run: its outcome for the parent, a cancel for each child."""
    now, sender = instant(host.clock.now()), f"run {run.id}"
    words: list[Signal] = []
    if run.parent is not None:
        word = msgspec.json.encode({"status": Status.CANCELLED.value, **names_in_word(run), "begun": run.epoch > 0})
        words.append(Signal(run.parent, f"{CHILD}{run.parent_key}", word, f"child:{run.id}:cancelled", sender, now))
    notice = notice_of(run, run.epoch, now)
    words += [] if notice is None else [notice]
    after: str | None = None
    while True:
        page = await host.call(host.store.list_runs, RunQuery(parent=run.id, after=after))
        going_on = [child.id for child in page.runs if child.status not in FINISHED]
        words += [Signal(child, CANCEL, b"true", f"cancel:{run.id}", sender, now) for child in going_on]
        after = page.next
        if after is None:
            return words


async def _send_one_by_one(host: CommandHost, words: list[Signal]) -> None:
    for word in words:
        with contextlib.suppress(CheckpointCorrupt):
            await host.journal.write(Send(word))
            host.signalled(word.run)


async def claim_by_name(host: CommandHost, run: Run, statuses: frozenset[Status]) -> Claim:
    """Take the lease of one run for a person's command. Raise `RunConflict` if another process holds it."""
    worker = host.worker_id or new_id("command")
    claims = await host.call(host.store.claim_runs, ClaimRequest(worker, run=run.id, statuses=statuses))
    if not claims.claims:
        await _leave(host, worker)
        driven = f"is driven by {run.worker}" if run.worker is not None else "is being changed by another process"
        raise RunConflict(f"run {run.id!r} {driven}; try again", run.id)
    return claims.claims[0]


async def _leave(host: CommandHost, worker: str) -> None:
    """Remove the temporary worker that a command without a worker registered for its claim."""
    if host.worker_id is None:
        await host.call(partial(host.store.renew_leases, WorkerInfo(worker), leaving=True))


async def _left(host: CommandHost, run: Run) -> tuple[list[str], list[str]]:
    """Return the at-most-once steps without an outcome, and the steps that are not undone.

    An unreadable history must not prevent a cancel.
    """
    begun: dict[str, None] = {}
    records: list[Record] = []
    with contextlib.suppress(StoreError):
        async for record, _ in read_records(host, run):
            if record.kind in ABOUT_UNDO:
                record.value = record.value if record.kind == Kind.UNDO else msgspec.UNSET  # frees its memory
                records.append(record)
            if record.kind == Kind.STEP_STARTED:
                begun[record.step] = None
            elif record.kind in ENDS_STEP:
                begun.pop(record.step, None)
    return list(begun), [item.key for item in UndoRecords(counting(records)).left()]


@contextlib.asynccontextmanager
async def hand_back_on_error(host: CommandHost, claim: Claim) -> AsyncIterator[None]:
    """Hand the run back unchanged if the body of the `with` block fails."""
    try:
        yield
    except BaseException:
        before, lease = claim.before or Status.QUEUED, claim.lease
        status = Status.QUEUED if before is Status.WAITING else before
        change = Advance(claim.run.id, lease.worker, lease.epoch, claim.run.seq, status=status, release=True)
        # A paused run may have been resumed meanwhile: a worker looks at it.
        change.due_at = instant(host.clock.now()) if status in (Status.QUEUED, Status.PAUSED) else None
        change.wakes = (RESUME, CANCEL) if status is Status.PAUSED else ()
        change.progress = False
        try:
            await host.journal.write(change)
            await _leave(host, lease.worker)
        # The store is unreachable: the lease is released when it answers again.
        except StoreError:
            host.release_later(claim.run.id, lease.epoch)
        raise


async def _end_of_pause(host: CommandHost, run: Run) -> tuple[datetime | None, int]:
    """Return when a worker must look at a paused run again, and the number of its last signal.

    A signal may have ended the pause that no worker has read yet. The release of the run must not lose it.
    """
    due, seen = None, 0
    while signals := await host.call(host.store.list_signals, run.id, seen):
        for signal in signals:
            seen = signal.seq
            if signal.name == PAUSE:
                due = None
            elif signal.name in (RESUME, CANCEL) or signal.name.startswith(GO):
                due = instant(host.clock.now())
    return due, seen


async def append_and_release(
    host: CommandHost,
    claim: Claim,
    record: Record,
    status: Status,
    words: Sequence[Signal] = (),
    *,
    wakes: tuple[str, ...] = (),
) -> None:
    """Append a command's record and release the run; send `words` in the same commit."""
    run: Any = claim.run
    now = instant(host.clock.now())
    record.finished_at = now
    record.claimed = claimed(claim)
    row, checksum = seal(record, run.seq + 1, chain_end(run), host.encryption.cipher(run))
    left = {word.run: word for word in words}
    due: datetime | None = now if status is Status.QUEUED else None
    seen: int | None = None
    if status is Status.PAUSED:
        due, seen = await _end_of_pause(host, run)
    change = Advance(
        run.id,
        claim.lease.worker,
        claim.lease.epoch,
        run.seq,
        rows=[row],
        checksum=checksum,
        status=status,
        release=True,
        due_at=due,
        wakes=wakes,
        signals_seen=seen,
    )
    while True:
        change.sends = [Send(word) for word in left.values()]
        answer = await host.journal.write(change)
        if answer.verdict is Verdict.MISSED:
            change.due_at, change.signals_seen = await _end_of_pause(host, run)
            continue
        if answer.verdict not in _UNREACHABLE or left.pop(answer.about, None) is None:
            # A receiver that has ended, or whose key is missing, is left out of the next try.
            break
    await _leave(host, claim.lease.worker)
    for receiver in left:
        host.signalled(receiver)
    if answer.verdict is not Verdict.DONE:
        raise RunConflict(
            f"run {run.id!r} was changed by another process meanwhile ({answer.verdict}); try again", run.id
        )
