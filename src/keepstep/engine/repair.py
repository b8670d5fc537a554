"""Repairing a damaged run when a person accepts what is lost: nothing is given up before it is kept in a file.

Plain blocking code over a store. What can be derived needs no such decision: `Store.check(mend=True)` does that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime

from ..errors import CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound, SchemaMismatch
from ..model import Kind, Run, Signal, Status, WorkerInfo
from ..model.ids import check_text, new_id
from ..ports import Advance, ClaimRequest, Row, Store, Verdict, commit_all, instant
from ..stores.rules import check_signal, seal_signal
from ..stores.sealed import below
from .archive import ArchiveWriter, writing
from .transfer import Reason, set_aside
from .verify import check_run, glimpsed, head_of, is_newer, rows_of, salvaged, signals_of

#: Stands in the place of a signal that is lost, so that the others keep their numbers.
LOST = "ks:lost"
#: More missing signals than this are a number that is wrong, not signals that are gone.
MOST_SIGNALS = 100_000

_DONE = frozenset({Kind.STEP_COMPLETED.value, Kind.CHILD.value})


@dataclass(slots=True)
class Loss:
    """What accepting the loss of a run's damaged part means.

    The first `kept` records stay. `repeats` names the steps that were done and will be done again, `unreadable` counts
    records of which not even that can be told, and `signals` are messages that are gone for good.
    """

    run: str
    problems: list[str]
    kept: int
    repeats: list[str] = field(default_factory=list)
    unreadable: int = 0
    signals: list[int] = field(default_factory=list)
    aside: str = ""


def assess(store: Store, run_id: str) -> Loss:
    """What would be lost; nothing is changed."""
    store = below(store)
    return _assess(store, _damaged_run(store, run_id))[0]


def accept_loss(store: Store, run_id: str, aside: str, *, actor: str, reason: str = "") -> Loss:
    """Put the whole run into an archive file first, then leave of it in the store what is certain, set aside.

    A person retries it then, and what is named in `repeats` is done again.
    """
    check_text(reason, "reason")
    store = below(store)
    run = _damaged_run(store, run_id)
    loss, rows, signals, checksum = _assess(store, run)
    run = _out_of_dead_hands(store, run)
    keep_whole(store, run, loss.problems, aside)
    why = f"{len(loss.repeats)} done steps were given up, because of damage"
    now = instant(store.clock.now())
    kept = replace(run, seq=loss.kept, checksum=checksum, signals=len(signals), epoch=run.epoch + 1)
    more = {"repeats": loss.repeats[:100], "aside": aside}
    create = set_aside(kept, rows, signals, Reason(actor, "repair", f"{why}: {reason}" if reason else why, now), **more)
    create.over, create.heard = run.epoch, run.signals
    (answer,) = commit_all(store, [create])
    if answer.verdict is not Verdict.DONE:
        raise RunConflict(f"run {run_id!r} was changed by someone else meanwhile; {aside} holds it as it was", run_id)
    loss.aside = aside
    return loss


def keep_whole(store: Store, run: Run, problems: list[str], path: str) -> None:
    """Write everything that can be read of a run into a file, sound or not."""
    with writing(path) as file:
        writer = ArchiveWriter(file, instant(store.clock.now()), "keepstep repair")
        writer.begin(run)
        for row in rows_of(store, run.id):
            writer.checkpoint(row)
        for signal in signals_of(store, run.id):
            if isinstance(signal, Signal):
                writer.signal(signal)
        raw = getattr(store, "raw_rows", None)  # what only the store itself can read of what is damaged
        for found in raw(run.id) if raw is not None else ():
            writer.raw(found)
        writer.end("; ".join(problems) or "it was put aside by a repair")
        writer.close()


def _damaged_run(store: Store, run_id: str) -> Run:
    try:
        store.get_run(run_id)
    except SchemaMismatch:  # it is not damaged
        raise
    except CheckpointCorrupt:
        pass
    try:
        run = head_of(store, run_id)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(
            f"{error}; keepstep repair makes its head again if that is what is damaged; else restore it from a copy, "
            "or erase it and start it again"
        ) from None
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
    return run


def _assess(store: Store, run: Run) -> tuple[Loss, list[Row], list[Signal], str]:
    check = check_run(store, run)
    if check is None or not check.problems:
        raise DefinitionError(f"run {run.id!r} is not damaged: there is nothing to accept")
    if is_newer(store, run):
        told = f"run {run.id!r} was written by a newer Keepstep, and nothing of it is lost"
        raise SchemaMismatch(f"{told}; upgrade Keepstep")
    if not check.sound and (run.seq or check.records.total):
        raise CheckpointCorrupt(
            f"{check.problems[0]}; not even its beginning is certain, so nothing of it can be kept: restore it from a "
            "copy, or erase it and start it again"
        )
    if not run.seq and any("chain broken at its beginning" in one for one in check.problems):
        raise CheckpointCorrupt(f"{check.problems[0]}; restore it from a copy, or erase it and start it again")
    loss = Loss(run.id, check.problems, check.sound)
    rows: list[Row] = []
    loss.unreadable = check.records.total  # less those of which something can be told
    for row in rows_of(store, run.id):
        loss.unreadable -= 1
        if row.seq <= check.sound:
            rows.append(row)
            continue
        seen = glimpsed(row)
        if seen is None:
            loss.unreadable += 1
        elif seen.kind in _DONE:
            loss.repeats.append(seen.step)
    loss.repeats = list(dict.fromkeys(loss.repeats))
    return loss, rows, _signals(store, run, loss), check.checksum


def _signals(store: Store, run: Run, loss: Loss) -> list[Signal]:
    """Every signal in its place; where one is lost, a word that says so."""
    found: dict[int, Signal] = {}
    for signal in signals_of(store, run.id):
        try:
            if isinstance(signal, Signal):
                found[signal.seq] = check_signal(signal)
        except CheckpointCorrupt:
            continue
    last = max([*found, run.signals if run.signals <= MOST_SIGNALS else 0, 0])
    now: datetime = instant(store.clock.now())
    loss.signals = [seq for seq in range(1, last + 1) if seq not in found]
    return [found.get(seq) or seal_signal(Signal(run.id, LOST, b"null"), seq, now) for seq in range(1, last + 1)]


def _out_of_dead_hands(store: Store, run: Run) -> Run:
    """A run that nobody drives. One whose worker is dead is taken from it; one that is driven is left alone."""
    if run.worker is None:
        return run
    worker = new_id("command")
    try:
        claims = store.claim_runs(ClaimRequest(worker, run=run.id, statuses=frozenset(Status))).claims
        if not claims:
            found = salvaged(store, run.id)  # it may be too damaged to be claimed
            if found is not None and found.worker is None:
                return replace(run, worker=None, epoch=found.epoch)
            raise RunConflict(f"run {run.id!r} is driven by {run.worker}; look again when it is set aside", run.id)
        held = claims[0].run
        change = Advance(run.id, worker, held.epoch, held.seq, status=Status.SET_ASIDE, release=True, progress=False)
        (answer,) = commit_all(store, [change])
        if answer.verdict is not Verdict.DONE:
            raise RunConflict(f"run {run.id!r} was changed by someone else meanwhile; look again", run.id)
    finally:
        store.renew_leases(WorkerInfo(worker), leaving=True)
    return replace(run, worker=None, epoch=held.epoch)
