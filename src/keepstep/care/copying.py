"""Copies runs from one store to another so that no run is ever driven in both.

Plain blocking code over the two stores. An interrupted copy is completed by copying again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime

from ..errors import CheckpointCorrupt
from ..model import FINISHED, Claim, Kind, Run, RunQuery, Signal, Status, WorkerInfo
from ..model.ids import new_id
from ..model.run import HANDED_OVER
from ..ports import Advance, ClaimRequest, Create, Row, Store, Verdict, commit_all, instant
from ..records.data import ErrorData, data_of
from ..records.record import chain_end, claimed, seal, unseal
from ..stores.artifacts import COLLECTION, copy_files
from ..stores.encrypted import below
from ..stores.reading import rows_of
from .documents import documents_named
from .transfer import (
    CONFLICT,
    Batch,
    Reason,
    Transfer,
    chosen,
    documents_of,
    freed,
    is_of_everything,
    is_there,
    put_documents,
    record_of,
    verified,
)
from .verify import check_named, signals_of

#: Statuses that allow handing a run over. A run that is being driven qualifies if its worker is dead.
_OPEN = frozenset(Status) - FINISHED - {Status.SET_ASIDE}


def copy_runs(
    source: Store,
    target: Store,
    run_ids: Iterable[str] = (),
    query: RunQuery | None = None,
    *,
    actor: str,
    unfinished: bool = False,
    report: Callable[[Transfer], None] | None = None,
) -> Transfer:
    """Copy runs unchanged; verify them before they are written, and again in the target.

    An unfinished run is left, unless `unfinished` hands it over: the run is first set aside in the source, under its
    own lease, and only then queued in the target. An interruption between the two never lets both stores drive it. A
    run that is being driven, or has an unfinished parent or child, is always left.

    With all runs go all documents, with some runs the documents that they own.
    """
    source, target, done = below(source), below(target), Transfer()
    copier = _Copier(source, target, done, actor if unfinished else "")
    run_ids = tuple(run_ids)
    owners: set[str] = set()
    for run in chosen(source, run_ids, query or RunQuery(system=True)):
        name = run if isinstance(run, str) else run.id
        try:
            if isinstance(run, str):
                raise CheckpointCorrupt(f"run {run!r}: its row is unreadable")
            copier.copy(run)
            if name not in done.left:
                owners.add(name)
        except CheckpointCorrupt as error:
            done.damaged[name] = str(error)
        if report is not None:
            report(done)
    copier.finish()
    wanted = None if is_of_everything(run_ids, query) else owners.difference(done.conflicts)
    put_documents(target, documents_of(source, wanted, done), done)
    if documents_named(target, COLLECTION):
        copy_files(source, target)
    return done


class _Copier:
    def __init__(self, source: Store, target: Store, done: Transfer, actor: str) -> None:
        self.source, self.target, self.done, self.actor = source, target, done, actor
        self._batch = Batch(target, done)
        self._written: list[str] = []

    def copy(self, run: Run) -> None:
        handed, went = _handed_over(self.source, run)
        if handed is not None and not is_there(self.target, handed):
            why = self._why_not_again(went)
            if why:
                self.done.left[run.id] = why
                return
        if handed is None and run.status not in FINISHED and run.status is not Status.SET_ASIDE:
            handed = self._hand_over(run)
            if handed is None:
                return
        moved = handed or replace(run, progress=None)
        if is_there(self.target, moved):
            self.done.same += 1
            return
        rows = [row for row in rows_of(self.source, run.id) if row.seq <= moved.seq]
        signals = self._signals(run.id)
        moved = replace(moved, signals=signals[-1].seq if signals else max(moved.signals_from - 1, 0))
        problem = verified(moved, rows, signals)
        if problem:
            raise CheckpointCorrupt(problem)
        self._batch.add(Create(moved, rows, signals), moved)
        self._written.append(run.id)
        if len(self._written) >= 1000:
            self.finish()

    def finish(self) -> None:
        """Write the pending runs and verify them in the target."""
        self._batch.flush()
        for name in self._written:
            check = check_named(self.target, name)
            if check is not None and check.problems and name not in self.done.conflicts:
                self.done.damaged[name] = f"in the target store: {'; '.join(check.problems)}"
        self._written.clear()

    def _signals(self, run_id: str) -> list[Signal]:
        signals: list[Signal] = []
        for signal in signals_of(self.source, run_id):
            if isinstance(signal, CheckpointCorrupt):
                raise signal
            signals.append(signal)
        return signals

    # -- runs that have not ended --------------------------------------------------------------------------------------

    def _hand_over(self, run: Run) -> Run | None:
        """Set a run aside here and return the run to create in the target, or None if it is left."""
        why = self._why_left(run)
        if why:
            self.done.left[run.id] = why
            return None
        if is_there(self.target, run):
            self.done.same += 1
            return None
        if self.target.list_runs(RunQuery(id_prefix=run.id, limit=1, system=True)).runs and self._taken(run.id):
            self.done.conflicts[run.id] = CONFLICT
            return None
        rows: list[Row] = list(rows_of(self.source, run.id))
        problem = verified(run, rows, self._signals(run.id))
        if problem:
            raise CheckpointCorrupt(problem)
        handed = _set_aside_here(self.source, run, self.actor, shown(self.target.url))
        if handed is None:
            self.done.left[run.id] = "another process claimed it meanwhile"
        return handed

    def _why_not_again(self, went: str) -> str:
        """Return why a run that was handed over, and is missing in the target, is not written there now."""
        if went not in ("", shown(self.target.url)):
            return f"it was handed over to {went}, and may go on there"
        return "" if self.actor else "it was handed over, and is missing in the target"

    def _taken(self, run_id: str) -> bool:
        try:
            return self.target.get_run(run_id) is not None
        except CheckpointCorrupt:
            return True

    def _why_left(self, run: Run) -> str:
        if run.worker is not None and any(one.id == run.worker and one.alive for one in self.source.list_workers()):
            return f"it is driven by {run.worker}"
        if not self.actor:
            return f"it is {run.status.value}"
        if run.parent is not None and _is_going_on(self.source, run.parent):
            return f"its parent {run.parent} has not ended"
        for child in self.source.list_runs(RunQuery(parent=run.id, status=frozenset(Status) - FINISHED, limit=1)).runs:
            return f"its child {child.id} has not ended"
        return ""


def _is_going_on(store: Store, run_id: str) -> bool:
    try:
        run = store.get_run(run_id)
    except CheckpointCorrupt:
        return True
    return run is not None and run.status not in FINISHED


def _set_aside_here(store: Store, run: Run, actor: str, target: str) -> Run | None:
    """Claim a run that nobody drives and set it aside, so that no worker drives it here any more."""
    fresh = store.get_run(run.id)
    if fresh is None or (fresh.epoch, fresh.seq, fresh.status) != (run.epoch, run.seq, run.status):
        # The run has changed since it was listed. A claim would undo that change.
        return None
    worker = new_id("command")
    try:
        claims = store.claim_runs(ClaimRequest(worker, run=run.id, statuses=_OPEN)).claims
        if not claims:
            return None
        why = Reason(actor, HANDED_OVER, f"it goes on in {target}", _now(store))
        return _write_aside(store, claims[0], run, why, target)
    finally:
        store.renew_leases(WorkerInfo(worker), leaving=True)


def _write_aside(store: Store, claim: Claim, run: Run, why: Reason, target: str) -> Run | None:
    held = claim.run
    # Another process claimed and released the run first.
    moved = claim.lease.epoch != run.epoch + 1 or held.seq != run.seq
    due = run.due_at.timestamp() if run.due_at is not None and run.status is Status.QUEUED else None
    record = record_of(run, why, due_at=due, wakes=list(run.wakes), target=target)
    record.worker, record.claimed = claim.lease.worker, claimed(claim)
    row, checksum = seal(record, held.seq + 1, chain_end(held))
    change = Advance(run.id, claim.lease.worker, claim.lease.epoch, held.seq, release=True, progress=False)
    if moved:
        paused = claim.before is Status.PAUSED
        change.status, change.due_at = (Status.PAUSED, None) if paused else (Status.QUEUED, why.at)
    else:
        change.rows, change.checksum, change.status = [row], checksum, Status.SET_ASIDE
    (answer,) = commit_all(store, [change])
    if moved or answer.verdict is not Verdict.DONE:
        return None
    return replace(freed(run, why.at), epoch=claim.lease.epoch, checksum=chain_end(held))


def _handed_over(store: Store, run: Run) -> tuple[Run | None, str]:
    """Return the run to create in the target and the target's URL; the run is None if it was not handed over."""
    if run.status is not Status.SET_ASIDE or not run.seq:
        return None, ""
    rows = store.list_checkpoints(run.id, run.seq - 1, 1)
    record, _ = next(unseal(rows, run.id, run.seq - 1)) if rows else (None, "")
    if record is None or record.kind != Kind.ERROR.value:
        return None, ""
    data = data_of(record, ErrorData)
    if data.get("act") != HANDED_OVER:
        return None, ""
    before, due, wakes = Status(data["before"]), data.get("due_at"), data.get("wakes")
    now = _now(store)
    paused = before is Status.PAUSED
    handed = replace(
        freed(replace(run, status=before, due_at=instant(due) if isinstance(due, float) else now), now),
        wakes=tuple(str(one) for one in wakes) if paused and isinstance(wakes, list) else (),
        seq=run.seq - 1,
        checksum=record.previous,
    )
    return handed, str(data.get("target") or "")


def _now(store: Store) -> datetime:
    return instant(store.clock.now())


def shown(url: str) -> str:
    """Return a store's URL without user name and password."""
    return re.sub(r"(?<=:)//[^/]+@", "//", url)
