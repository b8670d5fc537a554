"""The doctor: proves that every unfinished run can go on by itself or is known to wait for someone."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt, EncryptionError, SchemaMismatch, StoreError, StoreUnavailable
from ..model import FINISHED, Kind, Run, RunQuery, Signal, Status, WorkerInfo
from ..model.signal import BLOCKED, CHILD, GO, RESERVED, RESOLVE, RESUME, stop_at
from ..ports import Send, instant
from ..stores.records import unseal
from ..stores.sealed import below
from .children import is_word_of
from .copying import handed_over
from .history import Superseded
from .verify import check_named

if TYPE_CHECKING:
    from .engine import Engine

#: A run that is driven but has recorded nothing for so long is reported: its step may hang.
STALE_SECONDS = 1800.0
#: A run that is due for longer than this, though a worker knows its workflow, is reported.
LATE_SECONDS = 60.0
#: How many runs are named one by one in a finding; the rest is counted.
NAMED = 5

UNFINISHED = frozenset(Status) - FINISHED


class Severity(StrEnum):
    """How much a finding matters. An error breaks a promise; a warning needs someone; a note is only worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that someone should know. `code` is for programs, `advice` for people."""

    severity: Severity
    code: str
    message: str
    advice: str = ""
    runs: tuple[str, ...] = ()
    worker: str = ""


@dataclass(slots=True)
class Report:
    """What the doctor saw: how many runs and workers, and what is wrong with them."""

    findings: list[Finding] = field(default_factory=list)
    runs: dict[Status, int] = field(default_factory=dict)
    workers: list[WorkerInfo] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """No promise is broken; there may still be someone to call."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)


async def examine(engine: Engine, *, stale_seconds: float = STALE_SECONDS, deep: bool = False) -> Report:
    """Look at every unfinished run and every worker; `deep` also verifies the records of all runs."""
    report = Report()
    doctor = _Doctor(engine, report, stale_seconds)
    await doctor.look_at_store()
    try:
        await doctor.look_at_workers()
        async for run in doctor.runs(UNFINISHED):
            report.runs[run.status] = report.runs.get(run.status, 0) + 1
            await doctor.look_at_run(run)
        doctor.conclude()
        if deep:
            await doctor.verify_all()
    except StoreError as error:
        doctor.find(Severity.ERROR, "store", f"the store cannot be read: {error}", _RESTORE)
    order = list(Severity)
    report.findings.sort(key=lambda finding: order.index(finding.severity))
    return report


class _Doctor:
    def __init__(self, engine: Engine, report: Report, stale_seconds: float) -> None:
        self.engine = engine
        self.report = report
        self.stale = timedelta(seconds=stale_seconds)
        self.now: datetime = instant(engine.clock.now())
        self.workers: dict[str, WorkerInfo] = {}
        self.known: set[str] = set()
        self.unknown: dict[str, list[Run]] = {}
        self.late: dict[str, list[Run]] = {}
        self.orphans: dict[str, list[Run]] = {}
        self.unreadable: set[str] = set()
        self.locked: dict[tuple[str, bool], list[Run]] = {}

    def find(
        self,
        severity: Severity,
        code: str,
        message: str,
        advice: str = "",
        *,
        runs: Iterable[str] = (),
        worker: str = "",
    ) -> None:
        self.report.findings.append(Finding(severity, code, message, advice, tuple(runs), worker))

    # -- the store and the workers ------------------------------------------------------------------------------------

    async def look_at_store(self) -> None:
        """Take a turn to write, without writing anything: a process that is stopped inside its turn is found so."""
        probe = Send(Signal("ks-doctor-probe", f"{RESERVED}probe", id="probe", sent_at=self.now))
        try:
            await self.engine.call(below(self.engine.store).commit, [probe])
        except StoreError as error:
            if error.denied:
                self.find(Severity.WARNING, "store", f"the store can only be read from here: {error}", _LOOK_ONLY)
                return
            advice = "a stopped process goes on with kill -CONT, or ends with kill; its runs are then recovered"
            if not isinstance(error, StoreUnavailable):
                advice = _RESTORE
            self.find(Severity.ERROR, "store", f"the store cannot be written: {error}", advice)

    async def look_at_workers(self) -> None:
        try:
            self.report.workers = await self.engine.call(self.engine.store.list_workers)
        except CheckpointCorrupt as error:
            self.find(Severity.ERROR, "store", f"the workers cannot be read: {error}", _RESTORE)
        for worker in self.report.workers:
            self.workers[worker.id] = worker
            if worker.damage:
                self.find(
                    Severity.WARNING,
                    "worker-row",
                    f"worker {worker.id}: {worker.damage}",
                    "a living worker mends it with its next heartbeat; if it stays, restart that worker",
                    worker=worker.id,
                )
            if not worker.alive:
                continue
            self.known.update(worker.workflows)
            if worker.host == socket.gethostname() and _is_stopped(worker.pid):
                self.find(
                    Severity.WARNING,
                    "worker-stopped",
                    f"{_name(worker)} is stopped and drives {_count(worker.leases, 'run')}",
                    f"kill -CONT {worker.pid} lets it go on; otherwise its runs are taken over when its lease ends",
                    worker=worker.id,
                )

    # -- one run ------------------------------------------------------------------------------------------------------

    async def runs(self, statuses: frozenset[Status]) -> AsyncIterator[Run]:
        """Runs in these statuses; those that cannot be read are told of on the way."""
        after: str | None = None
        while True:
            query = RunQuery(status=statuses, limit=1000, after=after)
            page = await self.engine.call(self.engine.store.list_runs, query)
            for name in page.unreadable:
                await self._unreadable(name)
            for run in page.runs:
                yield run
            after = page.next
            if after is None:
                return

    async def _unreadable(self, run_id: str) -> None:
        if run_id in self.unreadable:
            return
        self.unreadable.add(run_id)
        said = f"run {run_id!r}: of its two rows one is gone"
        try:
            await self.engine.read(self.engine.store.get_run, run_id)
        except SchemaMismatch as error:
            self._newer(run_id, str(error))
            return
        except CheckpointCorrupt as error:
            said = str(error)
        self._corrupt(run_id, said)

    def _newer(self, run_id: str, said: str) -> None:
        advice = (
            "a worker of the newer version goes on with it; start one, or upgrade Keepstep here, and retry the run if "
            "it was set aside for that. If no newer one has ever written "
            f"to this store, the record is damaged: keepstep repair --accept-loss {quote(run_id)}"
        )
        self.find(Severity.ERROR, "newer", said, advice, runs=[run_id])

    def _corrupt(self, run_id: str, said: str) -> None:
        advice = (
            "keepstep repair mends what can be mended, and "
            f"keepstep repair --accept-loss {quote(run_id)} shows what of it would be lost; or "
            "restore the store from a copy. No worker will drive the run as it is"
        )
        self.find(Severity.ERROR, "corrupt", said, advice, runs=[run_id])

    async def look_at_run(self, run: Run) -> None:
        try:
            await self._look_at_run(run)
            if run.status is Status.QUEUED and run.seq > 1:  # it was put back, perhaps by one that cannot read it
                for row in await self.engine.read(self.engine.store.list_checkpoints, run.id, run.seq - 1, 1):
                    next(unseal([row], run.id, run.seq - 1))
        except SchemaMismatch as error:  # of this run alone: the others are looked at all the same
            self._newer(run.id, str(error))
        except CheckpointCorrupt as error:
            self._corrupt(run.id, str(error))

    def _key_wanted(self, run: Run) -> tuple[str, bool] | None:
        """With keys at hand: the id of the one that the run needs and that is not here, and whether another is."""
        try:
            if self.engine.encryption.store is not None:
                self.engine.encryption.cipher(run)
        except EncryptionError as error:
            return error.key_id, error.wrong
        return None

    async def _look_at_run(self, run: Run) -> None:
        wanted = self._key_wanted(run)
        if wanted is not None:
            self.locked.setdefault(wanted, []).append(run)
            return
        if run.worker is not None:
            self._leased(run)
        elif run.status in (Status.RUNNING, Status.RECOVERING):
            self.find(
                Severity.ERROR,
                "not-leased",
                f"run {run.id} is {run.status.value}, but nobody holds its lease",
                f"keepstep cancel {quote(run.id)} --force ends it, without its clean-up",
                runs=[run.id],
            )
        elif run.status is Status.SET_ASIDE:
            await self._set_aside(run)
        elif run.status is Status.PAUSED:
            if RESUME not in run.wakes and run.due_at is None:
                self._stalled(run, "it is paused, but not even a resume would wake it")
        elif run.due_at is not None and run.due_at <= self.now:
            self._due(run)
        elif run.due_at is None:
            await self._without_time(run)
        else:
            self._blocked(run)
        if (
            run.status not in (Status.SET_ASIDE, Status.PAUSED)
            and run.worker is None
            and run.workflow not in self.known
        ):
            self.unknown.setdefault(run.workflow, []).append(run)

    def _leased(self, run: Run) -> None:
        owner = self.workers.get(run.worker or "")
        if not run.status.active:
            self.find(
                Severity.ERROR,
                "lease",
                f"run {run.id} is {run.status.value}, yet leased to {run.worker}",
                runs=[run.id],
            )
        elif owner is None or not owner.alive:
            self.orphans.setdefault(run.worker or "", []).append(run)
        elif run.updated_at is not None and self.now - run.updated_at > self.stale:
            minutes = (self.now - run.updated_at).total_seconds() / 60
            self.find(
                Severity.WARNING,
                "stale",
                f"run {run.id} is driven by {_name(owner)}, but has recorded nothing for {minutes:.0f} min",
                f"keepstep history {quote(run.id)} shows its last step; keepstep cancel {quote(run.id)} stops it",
                runs=[run.id],
                worker=owner.id,
            )

    async def _set_aside(self, run: Run) -> None:
        whole = await self.engine.read(self.engine.store.get_run, run.id)
        error = whole.error if whole is not None else None
        reason = f"{error.type}: {error.message}" if error is not None else "no reason is recorded"
        parent = f"; its parent {run.parent} waits for it" if run.parent is not None else ""
        advice = f"keepstep retry {quote(run.id)}, or keepstep cancel {quote(run.id)}"
        if whole is not None and handed_over(whole):
            advice = f"keepstep erase {quote(run.id)} --force removes it here, once you have seen it there"
        self.find(
            Severity.WARNING,
            "set-aside",
            f"run {run.id} ({run.workflow}) is set aside: {reason}{parent}",
            advice,
            runs=[run.id],
        )

    def _due(self, run: Run) -> None:
        if run.workflow in self.known and run.due_at is not None and self.now - run.due_at > _LATE:
            self.late.setdefault(run.workflow, []).append(run)

    def _blocked(self, run: Run) -> None:
        steps = [name.removeprefix(BLOCKED) for name in run.wakes if name.startswith(BLOCKED)]
        if steps:
            self.find(
                Severity.NOTE,
                "blocked",
                f"run {run.id} ({run.workflow}) is blocked: {' and '.join(steps)} is not ready",
                "it is asked again by itself; look at what its ready= function waits for",
                runs=[run.id],
            )

    async def _without_time(self, run: Run) -> None:
        """No time wakes the run, so a signal or a child must."""
        waits = [name for name in run.wakes if not name.startswith(RESERVED) or name.startswith((CHILD, RESOLVE, GO))]
        if not waits:
            self._stalled(run, f"it is {run.status.value}, and no time, signal or child will ever wake it")
            return
        if run.signals and await self._has_unread(run, waits):
            self._stalled(run, f"a signal that it waits for has arrived ({', '.join(waits)}), but it was not woken")
            return
        for name in waits:
            if name.startswith(f"{RESOLVE}:"):
                step = name.removeprefix(f"{RESOLVE}:")
                self.find(
                    Severity.WARNING,
                    "in-doubt",
                    f"step {step} of run {run.id} may or may not have happened, and waits for a person",
                    f"keepstep resolve {quote(run.id)} {quote(step.removesuffix('#1'))} "
                    "--result JSON | --failed | --again",
                    runs=[run.id],
                )
            elif name.startswith(GO):
                self.find(
                    Severity.NOTE,
                    "breakpoint",
                    f"run {run.id} ({run.workflow}) waits at the breakpoint {stop_at(name)}",
                    f"keepstep resume {quote(run.id)}",
                    runs=[run.id],
                )
            elif name.startswith(CHILD):
                await self._child(run, name.removeprefix(CHILD))

    async def _child(self, run: Run, key: str) -> None:
        after: str | None = None
        while True:
            page = await self.engine.call(self.engine.store.list_runs, RunQuery(parent=run.id, after=after))
            if any(child.parent_key == key and child.status not in FINISHED for child in page.runs):
                return
            after = page.next
            if after is None:
                break
        self._stalled(run, f"it waits for its child of {key}, which has ended or is gone without a word")

    async def _has_unread(self, run: Run, waits: list[str]) -> bool:
        """Whether a signal that the run waits for lies in the store, unread."""
        read: set[int] = set()
        children: list[tuple[int, str, str]] = []
        gone = Superseded()
        after = 0
        while rows := await self.engine.read(self.engine.store.list_checkpoints, run.id, after, 1000, _READS):
            after = rows[-1].seq
            for row in rows:
                record, _ = next(unseal([row], run.id, row.seq - 1))
                if record.kind == Kind.SUPERSEDED:
                    gone.add(record)
                elif record.data and "signal" in record.data:
                    read.add(record.data["signal"])
                elif record.data and "child" in record.data:
                    children.append((record.seq, f"{CHILD}{record.step}", record.data["child"]))
        started = {name: child for seq, name, child in children if seq not in gone}

        def concerns(signal: Signal) -> bool:
            if signal.name not in waits or signal.seq in read:
                return False
            child = started.get(signal.name)
            return child is None or is_word_of(signal.payload, child)  # and not of one that a rewind has left behind

        seen = 0
        while signals := await self.engine.read(self.engine.store.list_signals, run.id, seen):
            seen = signals[-1].seq
            if any(map(concerns, signals)):
                fresh = await self.engine.read(self.engine.store.get_run, run.id)
                return fresh is not None and fresh.epoch == run.epoch and fresh.due_at is None and fresh.worker is None
        return False

    def _stalled(self, run: Run, why: str) -> None:
        self.find(
            Severity.ERROR,
            "stalled",
            f"run {run.id} ({run.workflow}) can never go on: {why}",
            f"keepstep cancel {quote(run.id)} --force ends it, without its clean-up; please report how it came to this",
            runs=[run.id],
        )

    # -- many runs with one reason ------------------------------------------------------------------------------------

    def conclude(self) -> None:
        for owner, runs in self.orphans.items():
            worker = self.workers.get(owner)
            who = _name(worker) if worker is not None else owner
            taken = all(run.workflow in self.known for run in runs)
            self.find(
                Severity.NOTE if taken else Severity.WARNING,
                "dead-worker",
                f"{who} is dead and left {_count(len(runs), 'run')}: {_named(runs)}",
                "a living worker recovers them" if taken else "start a worker that knows them: keepstep worker FILE.py",
                runs=[run.id for run in runs],
                worker=owner,
            )
        for workflow, runs in self.unknown.items():
            self.find(
                Severity.WARNING,
                "no-worker",
                f"no living worker knows workflow {workflow!r}; {_count(len(runs), 'run')} of it: {_named(runs)}",
                "start one: keepstep worker FILE.py",
                runs=[run.id for run in runs],
            )
        for (key, wrong), runs in self.locked.items():
            what = f"encrypted with the key {key!r}, which is not here" if key else "in plain text, which keys refuse"
            if wrong:
                what = f"encrypted with the key {key!r}, but the key of that name here is another"
            self.find(
                Severity.WARNING,
                "no-key",
                f"{_count(len(runs), 'run')} {what}: {_named(runs)}",
                "a worker needs the right key to drive them"
                if key
                else "the word plaintext among the keys lets them pass",
                runs=[run.id for run in runs],
            )
        for workflow, runs in self.late.items():
            self.find(
                Severity.WARNING,
                "late",
                f"{_count(len(runs), 'run')} of {workflow!r} due for {LATE_SECONDS:g} s, but not taken: {_named(runs)}",
                "its workers are full or stuck: start another, or look at their logs",
                runs=[run.id for run in runs],
            )

    async def verify_all(self) -> None:
        """Look whether everything is as it was written, as `keepstep verify` does."""
        for flaw in await self.engine.call(self.engine.store.check):
            self.find(Severity.ERROR, "store", flaw.what, "keepstep repair mends what can be mended")
        async for run in self.runs(frozenset(Status)):
            store = self.engine.store if self._key_wanted(run) is None else below(self.engine.store)
            check = await self.engine.call(check_named, store, run.id)
            if check is not None and check.problems:
                (self._newer if check.newer else self._corrupt)(run.id, "; ".join(check.problems))


_RESTORE = "keepstep repair mends what can be mended; otherwise restore the store from a copy"
_LOOK_ONLY = "that is enough to look; a worker, and who steers runs, must be allowed to write"
_LATE = timedelta(seconds=LATE_SECONDS)
#: The kinds of record that say that a signal was read, or which of them count.
_READS = tuple(
    kind.value
    for kind in (Kind.SIGNAL, Kind.CHILD, Kind.STEP_STARTED, Kind.STEP_COMPLETED, Kind.STEP_FAILED, Kind.SUPERSEDED)
)


def _name(worker: WorkerInfo) -> str:
    where = f" on {worker.host}" if worker.host and worker.host != socket.gethostname() else ""
    return f"{worker.id} (pid {worker.pid}{where})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _named(runs: list[Run]) -> str:
    more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
    return ", ".join(run.id for run in runs[:NAMED]) + more


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped, as by SIGSTOP."""
    if pid == os.getpid():
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])
