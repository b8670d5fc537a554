"""What a person does to a run after the fact: each act claims it, appends a record that says so, and releases it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import AlreadyFinished, RunConflict, RunNotFound
from ..model import Kind, Status
from ..model.ids import new_id
from ..ports import Advance, ClaimRequest, Verdict, instant
from ..stores.records import Record, seal, unseal

if TYPE_CHECKING:
    from ..model import Claim
    from .engine import Engine

_RETRIABLE = frozenset({Status.FAILED, Status.SET_ASIDE})


async def retry(engine: Engine, run_id: str, reason: str, actor: str) -> None:
    """Supersede the failures that ended a run, and let it go on from there."""
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    if run.status not in _RETRIABLE:
        raise AlreadyFinished(
            f"run {run_id!r} is {run.status.value}; only a failed or set-aside run can be retried", run_id
        )
    claim = await _claim(engine, run_id, _RETRIABLE)
    seqs = await _failures(engine, run_id)
    data = {"seqs": seqs, "actor": actor, "reason": reason, "before": run.status.value, "act": "retry"}
    record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
    await _append_and_release(engine, claim, record)


async def _claim(engine: Engine, run_id: str, statuses: frozenset[Status]) -> Claim:
    worker = engine.worker.id if engine.worker is not None else new_id("command")
    claims = await engine.call(engine.store.claim_runs, ClaimRequest(worker, run=run_id, statuses=statuses))
    if not claims.claims:
        raise RunConflict(f"run {run_id!r} is being changed by someone else; look again", run_id)
    return claims.claims[0]


async def _failures(engine: Engine, run_id: str) -> list[int]:
    """What no longer counts: the failures named in the run's error, their attempts, and the cancels they caused."""
    records = []
    after = 0
    while rows := await engine.read(engine.store.list_checkpoints, run_id, after):
        records += [record for record, _ in unseal(rows, run_id, after, None if after else "")]
        after = records[-1].seq
    ends = [record for record in records if record.kind in (Kind.RUN_FINISHED, Kind.ERROR)]
    causes: set[int] = set(ends[-1].error.caused_by) if ends and ends[-1].error is not None else set()
    keys = {record.step for record in records if record.seq in causes}
    gone = {record.seq for record in records if record.kind == Kind.STEP_FAILED and record.step in keys}
    if causes:
        first = min(causes)
        gone |= {record.seq for record in records if record.kind == Kind.STEP_CANCELLED and record.seq > first}
    if ends:
        deadline = {record.seq for record in records if record.kind == Kind.TIMER and record.step == "ks:deadline"}
        gone |= deadline | {ends[-1].seq}
    return sorted(gone)


async def _append_and_release(engine: Engine, claim: Claim, record: Record) -> None:
    run: Any = claim.run
    now = instant(engine.clock.now())
    record.finished_at = now
    row, checksum = seal(record, run.seq + 1, run.checksum)
    change = Advance(
        run.id,
        claim.lease.worker,
        claim.lease.epoch,
        run.seq,
        rows=[row],
        checksum=checksum,
        status=Status.QUEUED,
        release=True,
        due_at=now,
    )
    answer = await engine.journal.write(change)
    if answer.verdict is not Verdict.DONE:
        raise RunConflict(
            f"run {run.id!r} was changed by someone else meanwhile ({answer.verdict}); look again", run.id
        )
