"""Repairs a damaged run after a person has accepted the loss; the whole run is kept in a file first.

Plain blocking code over a store. Derivable damage needs no such decision: `Store.check(mend=True)` repairs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from ..checks import check_text
from ..errors import CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound, SchemaMismatch
from ..model import Run, Signal, Status, WorkerInfo
from ..model.checkpoint import DID_WORK
from ..model.ids import new_id
from ..model.run import removed_records
from ..ports import Advance, ClaimRequest, OptionalStore, Row, Store, Verdict, commit_all, instant, optional
from ..stores.encrypted import below
from ..stores.reading import glimpsed, head_of, is_newer, rows_of, salvaged
from ..stores.rules import check_signal, seal_signal
from .archive import ArchiveWriter, writing
from .transfer import Reason, set_aside
from .verify import check_run, has_readable_key, signals_of

#: Name of the placeholder for a lost signal, so that the others keep their numbers.
LOST = "ks:lost"
#: Missing signals at most. A larger number means that the count itself is damaged.
MOST_SIGNALS = 100_000


@dataclass(slots=True)
class Loss:
    """The consequences of accepting the loss of a run's damaged part.

    The first `kept` records stay. `repeats` names completed steps that will run again, `unreadable` counts records
    whose step cannot be determined, and `signals` are messages that are lost for good.
    """

    run: str
    problems: list[str]
    kept: int
    repeats: list[str] = field(default_factory=list)
    unreadable: int = 0
    signals: list[int] = field(default_factory=list)
    aside: str = ""


def assess(store: Store, run_id: str) -> Loss:
    """Return what would be lost, without changing anything."""
    store = below(store)
    return _assess(store, _damaged_run(store, run_id))[0]


def accept_loss(store: Store, run_id: str, aside: str, *, actor: str, reason: str = "") -> Loss:
    """Write the whole run into an archive file, then keep its certain part in the store, set aside.

    A person then retries the run, which repeats the steps named in `repeats`.
    """
    check_text(reason, "reason")
    store = below(store)
    run = _damaged_run(store, run_id)
    loss, rows, signals, checksum = _assess(store, run)
    run = _out_of_dead_hands(store, run)
    keep_whole(store, run, loss.problems, aside)
    why = f"{len(loss.repeats)} completed steps were given up because of damage"
    now = instant(store.clock.now())
    received = signals[-1].seq if signals else max(run.signals_from - 1, 0)
    kept = replace(run, seq=loss.kept, checksum=checksum, signals=received, epoch=run.epoch + 1)
    cause = Reason(actor, "repair", f"{why}: {reason}" if reason else why, now)
    create = set_aside(kept, rows, signals, cause, repeats=loss.repeats[:100], aside=aside)
    create.over, create.received = run.epoch, run.signals
    (answer,) = commit_all(store, [create])
    if answer.verdict is not Verdict.DONE:
        raise RunConflict(
            f"run {run_id!r} was changed by another process meanwhile; {aside} holds its old contents", run_id
        )
    loss.aside = aside
    return loss


def keep_whole(store: Store, run: Run, problems: list[str], path: str) -> None:
    """Write everything readable of a run into a file, damaged or not."""
    with writing(path) as file:
        writer = ArchiveWriter(file, instant(store.clock.now()), "keepstep repair")
        writer.begin(run)
        for row in rows_of(store, run.id):
            writer.checkpoint(row)
        for signal in signals_of(store, run.id):
            if isinstance(signal, Signal):
                writer.signal(signal)
        raw = optional(store, OptionalStore.raw_rows)
        for found in raw(run.id) if raw is not None else ():
            writer.raw(found)
        writer.end("; ".join(problems) or "it was put aside by a repair")
        writer.close()


def _damaged_run(store: Store, run_id: str) -> Run:
    try:
        store.get_run(run_id)
    except SchemaMismatch:  # written by a newer Keepstep, not damaged
        raise
    except CheckpointCorrupt:
        pass
    try:
        run = head_of(store, run_id)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(
            f"{error}; keepstep repair rebuilds a damaged head. Otherwise restore the run from a backup, "
            "or erase it and start it again"
        ) from None
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
    return run


def _assess(store: Store, run: Run) -> tuple[Loss, list[Row], list[Signal], str]:
    check = check_run(store, run)
    if check is None or not check.problems:
        raise DefinitionError(f"run {run.id!r} is not damaged, so there is no loss to accept")
    if is_newer(store, run):
        problem = f"run {run.id!r} was written by a newer Keepstepand is intact"
        raise SchemaMismatch(f"{problem}; upgrade Keepstep")
    if not check.sound and (run.seq or check.records.total):
        raise CheckpointCorrupt(
            f"{check.problems[0]}; no record is certain, so nothing can be kept. Restore the run from a "
            "backup, or erase it and start it again"
        )
    if check.sound < run.kept_from:
        raise CheckpointCorrupt(
            f"{check.problems[0]}; {removed_records(run)}, so the run cannot go on without that record. Restore it "
            "from a backup, or erase it and start it again"
        )
    unusable = not run.seq and any("chain broken at its beginning" in one for one in check.problems)
    if unusable or not has_readable_key(run):
        raise CheckpointCorrupt(f"{check.problems[0]}; restore the run from a backup, or erase it and start it again")
    loss = Loss(run.id, check.problems, check.sound)
    rows: list[Row] = []
    loss.unreadable = check.records.total  # minus the records whose step can be determined
    for row in rows_of(store, run.id):
        loss.unreadable -= 1
        if row.seq <= check.sound:
            rows.append(row)
            continue
        seen = glimpsed(row)
        if seen is None:
            loss.unreadable += 1
        elif seen.kind in DID_WORK:
            loss.repeats.append(seen.step)
    loss.repeats = list(dict.fromkeys(loss.repeats))
    return loss, rows, _signals(store, run, loss), check.checksum


def _signals(store: Store, run: Run, loss: Loss) -> list[Signal]:
    """Return every signal in its place, with a placeholder for each lost one."""
    found: dict[int, Signal] = {}
    for signal in signals_of(store, run.id):
        try:
            if isinstance(signal, Signal):
                found[signal.seq] = check_signal(signal)
        except CheckpointCorrupt:
            continue
    last = max([*found, run.signals if run.signals <= MOST_SIGNALS else 0, 0])
    now: datetime = instant(store.clock.now())
    kept = range(run.signals_from or 1, last + 1)
    loss.signals = [seq for seq in kept if seq not in found]
    return [found.get(seq) or seal_signal(Signal(run.id, LOST, b"null"), seq, now) for seq in kept]


def _out_of_dead_hands(store: Store, run: Run) -> Run:
    """Return a run that nobody drives. Take it from a dead worker; leave it if its worker is alive."""
    if run.worker is None:
        return run
    worker = new_id("command")
    try:
        claims = store.claim_runs(ClaimRequest(worker, run=run.id, statuses=frozenset(Status))).claims
        if not claims:
            found = salvaged(store, run.id)  # the run may be too damaged to be claimed
            if found is not None and found.worker is None:
                return replace(run, worker=None, epoch=found.epoch)
            raise RunConflict(f"run {run.id!r} is driven by {run.worker}; try again when it is set aside", run.id)
        held = claims[0].run
        change = Advance(run.id, worker, held.epoch, held.seq, status=Status.SET_ASIDE, release=True, progress=False)
        (answer,) = commit_all(store, [change])
        if answer.verdict is not Verdict.DONE:
            raise RunConflict(f"run {run.id!r} was changed by another process meanwhile; try again", run.id)
    finally:
        store.renew_leases(WorkerInfo(worker), leaving=True)
    return replace(run, worker=None, epoch=held.epoch)
