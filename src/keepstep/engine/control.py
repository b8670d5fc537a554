"""What a person does to a run after the fact: each act claims it, appends a record that says so, and releases it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import AlreadyFinished, CheckpointCorrupt, RunConflict, RunNotFound, StoreError
from ..model import FINISHED, Kind, Outcome, RunQuery, Signal, Status, WorkerInfo
from ..model.ids import check_text, new_id
from ..model.series import names_in_word
from ..model.signal import CANCEL, CHILD, RESUME
from ..ports import Advance, ClaimRequest, Send, Verdict, instant
from ..stores.records import Record, chain_end, claimed, seal
from .history import read_records
from .steering import in_doubt

if TYPE_CHECKING:
    from ..model import Claim, Run
    from .engine import Engine

_STEP_ENDS = frozenset({Kind.STEP_COMPLETED, Kind.STEP_FAILED, Kind.STEP_CANCELLED})
RETRIABLE = frozenset({Status.FAILED, Status.SET_ASIDE})
#: Why a run cannot be told something that another's commit would tell it: it is told without that one.
_CANNOT_BE_TOLD = frozenset({Verdict.FINISHED, Verdict.NOT_FOUND, Verdict.FAILED})


async def cancel_now(engine: Engine, run_id: str, reason: str, actor: str) -> None:
    """End a run that no worker drives, without its code: for one that nobody can drive, or that was set aside."""
    check_text(reason, "reason")
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    if run.status in FINISHED:
        raise AlreadyFinished(f"run {run_id!r} is already {run.status.value}", run_id)
    engine.encryption.cipher(run)  # without its key nothing can be written
    claim = await claim_by_name(engine, run, frozenset(Status) - FINISHED)
    data = {"actor": actor, "reason": engine.censor.redact(reason), "before": run.status.value, "act": "cancel"}
    record = Record(run_id, Kind.RUN_FINISHED.value, outcome=Outcome.CANCELLED.value, trigger="manual", data=data)
    record.worker, record.started_at = claim.lease.worker, run.created_at
    async with let_go_unless_done(engine, claim):
        doubts = await _under_way(engine, run)
        record.error = in_doubt(doubts) if doubts else None
        family = await _words_to_family(engine, run)
        try:
            await append_and_release(engine, claim, record, Status.CANCELLED, family)
        except CheckpointCorrupt:
            if not family:
                raise
            await append_and_release(engine, claim, record, Status.CANCELLED)
            await _tell_one_by_one(engine, family)  # a damaged relative hinders no cancel


async def _words_to_family(engine: Engine, run: Run) -> list[Signal]:
    """What the worker of a cancelled run would have sent: a word to its parent, a cancel to its children."""
    now, sender = instant(engine.clock.now()), f"run {run.id}"
    words: list[Signal] = []
    if run.parent is not None:
        word = msgspec.json.encode({"status": Status.CANCELLED.value, **names_in_word(run)})
        words.append(Signal(run.parent, f"{CHILD}{run.parent_key}", word, f"child:{run.id}:cancelled", sender, now))
    after: str | None = None
    while True:
        page = await engine.call(engine.store.list_runs, RunQuery(parent=run.id, after=after))
        going_on = [child.id for child in page.runs if child.status not in FINISHED]
        words += [Signal(child, CANCEL, b"true", f"cancel:{run.id}", sender, now) for child in going_on]
        after = page.next
        if after is None:
            return words


async def _tell_one_by_one(engine: Engine, words: list[Signal]) -> None:
    for word in words:
        with contextlib.suppress(CheckpointCorrupt):
            await engine.journal.write(Send(word))
            engine.signalled(word.run)


async def claim_by_name(engine: Engine, run: Run, statuses: frozenset[Status]) -> Claim:
    """Take the lease of one run for a person's command, if nobody has it."""
    worker = engine.worker.id if engine.worker is not None else new_id("command")
    claims = await engine.call(engine.store.claim_runs, ClaimRequest(worker, run=run.id, statuses=statuses))
    if not claims.claims:
        await _leave(engine, worker)
        driven = f"is driven by {run.worker}" if run.worker is not None else "is being changed by someone else"
        raise RunConflict(f"run {run.id!r} {driven}; look again", run.id)
    return claims.claims[0]


async def _leave(engine: Engine, worker: str) -> None:
    """A command without a worker enrolled for its one claim: take it off the roll again."""
    if engine.worker is None:
        await engine.call(partial(engine.store.renew_leases, WorkerInfo(worker), leaving=True))


async def _under_way(engine: Engine, run: Run) -> list[str]:
    """At-most-once steps that were begun and have no outcome; a history that cannot be read hinders no cancel."""
    begun: dict[str, None] = {}
    with contextlib.suppress(StoreError):
        async for record, _ in read_records(engine, run):
            if record.kind == Kind.STEP_STARTED:
                begun[record.step] = None
            elif record.kind in _STEP_ENDS:
                begun.pop(record.step, None)
    return list(begun)


@contextlib.asynccontextmanager
async def let_go_unless_done(engine: Engine, claim: Claim) -> AsyncIterator[None]:
    """If what is done under a claim fails after all, the run is given back as it was."""
    try:
        yield
    except BaseException:
        before, lease = claim.before or Status.QUEUED, claim.lease
        status = Status.QUEUED if before is Status.WAITING else before
        change = Advance(claim.run.id, lease.worker, lease.epoch, claim.run.seq, status=status, release=True)
        change.due_at = instant(engine.clock.now()) if status is Status.QUEUED else None
        change.wakes = (RESUME, CANCEL) if status is Status.PAUSED else ()
        change.progress = False
        try:
            await engine.journal.write(change)
            await _leave(engine, lease.worker)
        except StoreError:  # it is told when it listens again
            if engine.worker is not None:
                engine.worker.owe(claim.run.id, lease.epoch)
        raise


async def append_and_release(
    engine: Engine,
    claim: Claim,
    record: Record,
    status: Status,
    words: Sequence[Signal] = (),
    *,
    wakes: tuple[str, ...] = (),
) -> None:
    """Write what a person's command says of a run, and let it go; in the same commit others are told of it."""
    run: Any = claim.run
    now = instant(engine.clock.now())
    record.finished_at = now
    record.claimed = claimed(claim)
    row, checksum = seal(record, run.seq + 1, chain_end(run), engine.encryption.cipher(run))
    left = {word.run: word for word in words}
    change = Advance(
        run.id,
        claim.lease.worker,
        claim.lease.epoch,
        run.seq,
        rows=[row],
        checksum=checksum,
        status=status,
        release=True,
        due_at=now if status is Status.QUEUED else None,
        wakes=wakes,
    )
    while True:
        change.sends = [Send(word) for word in left.values()]
        answer = await engine.journal.write(change)
        if answer.verdict not in _CANNOT_BE_TOLD or left.pop(answer.about, None) is None:
            break  # else that one has ended by itself, or its key is not here
    await _leave(engine, claim.lease.worker)
    for told in left:
        engine.signalled(told)
    if answer.verdict is not Verdict.DONE:
        raise RunConflict(
            f"run {run.id!r} was changed by someone else meanwhile ({answer.verdict}); look again", run.id
        )
