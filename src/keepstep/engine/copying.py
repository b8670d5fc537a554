"""Copying runs from one store to another, so that none is ever driven in both.

Plain blocking code over the two stores. A copy that broke off is taken up again by doing it once more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..errors import CheckpointCorrupt
from ..model import FINISHED, Claim, Kind, Run, RunQuery, Signal, Status, WorkerInfo
from ..model.ids import new_id
from ..ports import Advance, ClaimRequest, Create, Row, Store, Verdict, commit_all, instant
from ..stores.records import chain_end, claimed, seal, unseal
from ..stores.sealed import below
from .transfer import CONFLICT, Batch, Reason, Transfer, chosen, freed, is_there, record_of, verified
from .verify import check_named, rows_of, signals_of

#: The `act` of the record that sets a run aside where it was taken from.
HANDED_OVER = "copy"

#: What may be handed over; one that is said to be driven, if its worker is dead.
_OPEN = frozenset(Status) - FINISHED - {Status.SET_ASIDE}


def copy_runs(
    source: Store,
    target: Store,
    run_ids: Iterable[str] = (),
    query: RunQuery | None = None,
    *,
    actor: str,
    unfinished: bool = False,
    tell: Callable[[Transfer], None] | None = None,
) -> Transfer:
    """Copy runs as they are, verified before they are written and once more where they have come to.

    A run that has not ended is left, unless with `unfinished` it is handed over: it is set aside in the source, under
    a lease of its own, and only then queued in the target. Whatever breaks off between the two, nobody drives it in
    both. One that is driven, or whose parent or children have not ended, is left in any case.
    """
    source, target, done = below(source), below(target), Transfer()
    copier = _Copier(source, target, done, actor if unfinished else "")
    for run in chosen(source, run_ids, query or RunQuery()):
        name = run if isinstance(run, str) else run.id
        try:
            if isinstance(run, str):
                raise CheckpointCorrupt(f"run {run!r}: its row cannot be read")
            copier.copy(run)
        except CheckpointCorrupt as error:
            done.damaged[name] = str(error)
        if tell is not None:
            tell(done)
    copier.finish()
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
        moved = replace(moved, signals=len(signals))
        problem = verified(moved, rows, signals)
        if problem:
            raise CheckpointCorrupt(problem)
        self._batch.add(Create(moved, rows, signals), moved)
        self._written.append(run.id)
        if len(self._written) >= 1000:
            self.finish()

    def finish(self) -> None:
        """Write what waits, and look at it where it has come to."""
        self._batch.flush()
        for name in self._written:
            check = check_named(self.target, name)
            if check is not None and check.problems and name not in self.done.conflicts:
                self.done.damaged[name] = f"in the target: {'; '.join(check.problems)}"
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
        """Set a run aside here, so that it can go on there: the run as it is to go on; None if it is left."""
        why = self._why_left(run)
        if why:
            self.done.left[run.id] = why
            return None
        if is_there(self.target, run):
            self.done.same += 1
            return None
        if self.target.list_runs(RunQuery(id_prefix=run.id, limit=1)).runs and self._taken(run.id):
            self.done.conflicts[run.id] = CONFLICT
            return None
        rows: list[Row] = list(rows_of(self.source, run.id))
        problem = verified(run, rows, self._signals(run.id))
        if problem:
            raise CheckpointCorrupt(problem)
        handed = _set_aside_here(self.source, run, self.actor, shown(self.target.url))
        if handed is None:
            self.done.left[run.id] = "someone else took it up meanwhile"
        return handed

    def _why_not_again(self, went: str) -> str:
        """Why a run that was handed over, and is not in the target, does not come there now."""
        if went not in ("", shown(self.target.url)):
            return f"it was handed over to {went}, and may go on there"
        return "" if self.actor else "it was handed over, and is not there"

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
    """Take the lease of a run that nobody drives, and leave it to a person: from then on nobody drives it here."""
    fresh = store.get_run(run.id)
    if fresh is None or (fresh.epoch, fresh.seq, fresh.status) != (run.epoch, run.seq, run.status):
        return None  # it was taken up since it was listed: to claim it would undo what was done to it
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
    moved = claim.lease.epoch != run.epoch + 1 or held.seq != run.seq  # someone else was first, and has left again
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
    """The run as it is to go on elsewhere, if it was set aside here for that, and where."""
    if run.status is not Status.SET_ASIDE or not run.seq:
        return None, ""
    rows = store.list_checkpoints(run.id, run.seq - 1, 1)
    record, _ = next(unseal(rows, run.id, run.seq - 1)) if rows else (None, "")
    data: dict[str, Any] = (record.data if record is not None else None) or {}
    if record is None or record.kind != Kind.ERROR.value or data.get("act") != HANDED_OVER:
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


def handed_over(run: Run) -> str:
    """Where a run goes on that was set aside because it was handed over, in words; nothing if it was not."""
    if run.status is Status.SET_ASIDE and run.error is not None and run.error.type == HANDED_OVER.capitalize():
        return run.error.message
    return ""


def _now(store: Store) -> datetime:
    return instant(store.clock.now())


def shown(url: str) -> str:
    """A store's address without the name and the password in it."""
    return re.sub(r"(?<=:)//[^/]+@", "//", url)
