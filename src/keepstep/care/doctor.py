"""The doctor: checks that every unfinished run can go on by itself or waits for someone who is named."""

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
from ..kernel.channel import ChannelKeeper
from ..kernel.children import is_word_of
from ..kernel.inbox import Reads
from ..kernel.keeper import newest_state
from ..kernel.replay import Superseded
from ..kernel.schedule import ScheduleKeeper, overdue
from ..kernel.topic import TopicKeeper
from ..model import FINISHED, Kind, Run, RunQuery, Signal, Status, WorkerInfo
from ..model.agent import agent_of
from ..model.checkpoint import CARRIES_SIGNAL, ENDS_STEP
from ..model.gate import QUEUE, SERVICE
from ..model.ids import module_in
from ..model.keepers import BARRIER_WORKFLOW, TELL, TOPIC_WORKFLOW, channel_name, is_declared, schedule_name, topic_name
from ..model.lease import versions_instead
from ..model.run import handed_over
from ..model.signal import CHILD, GO, RESERVED, RESOLVE, RESUME, stop_at
from ..model.wakes import sorted_wakes
from ..ports import OptionalStore, Send, instant, looking, optional
from ..records.counts import counts_in
from ..records.data import Data, data_of
from ..records.record import unseal
from ..stores.encrypted import below
from .queue_findings import QueueLook
from .service_findings import service_concerns
from .topic_findings import topic_concerns
from .verify import check_named, verify_documents

if TYPE_CHECKING:
    from ..history.host import CommandHost

#: Seconds without a new record after which a driven run is reported, because its step may hang.
STALE_SECONDS = 1800.0
#: Seconds after which a due run is reported as late although a worker knows its workflow.
LATE_SECONDS = 60.0
#: Time for which a store that could not save is reported.
RECENT = timedelta(hours=1)
#: Errors of set-aside runs that a change of the code can fix; the store is intact.
CODE_PROBLEMS = frozenset({"ReplayMismatch", "DefinitionChanged", "MigrationFailed"})
#: Runs that a finding names at most, so that it stays readable; the rest is counted.
NAMED = 5

UNFINISHED = frozenset(Status) - FINISHED


class Severity(StrEnum):
    """The weight of a finding: an error breaks a promise, a warning needs a person, a note is for information."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `code` is for programs, `advice` for people."""

    severity: Severity
    code: str
    message: str
    advice: str = ""
    runs: tuple[str, ...] = ()
    worker: str = ""


@dataclass(slots=True)
class Report:
    """The result of an examination: the numbers of runs and workers, and the findings."""

    findings: list[Finding] = field(default_factory=list)
    runs: dict[Status, int] = field(default_factory=dict)
    workers: list[WorkerInfo] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether no promise is broken; warnings may remain."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)


async def examine(host: CommandHost, *, stale_seconds: float = STALE_SECONDS, deep: bool = False) -> Report:
    """Examine every unfinished run and every worker; `deep` also verifies the records of all runs."""
    with looking(False):  # leases that are compared with workers must not be older than these
        return await _examine(host, stale_seconds, deep=deep)


async def _examine(host: CommandHost, stale_seconds: float, *, deep: bool) -> Report:
    report = Report()
    doctor = _Doctor(host, report, stale_seconds)
    await doctor.look_at_store()
    try:
        await doctor.look_at_workers()
        await doctor.look_at_queues()
        await doctor.look_at_services()
        async for run in doctor.runs(UNFINISHED):
            report.runs[run.status] = report.runs.get(run.status, 0) + 1
            await doctor.look_at_run(run)
        doctor.conclude()
        await doctor.look_at_erasures()
        await doctor.look_at_hindrances()
        if deep:
            await doctor.verify_all()
    except StoreError as error:
        doctor.find(Severity.ERROR, "store", f"the store cannot be read: {error}", _RESTORE)
    order = list(Severity)
    report.findings.sort(key=lambda finding: order.index(finding.severity))
    return report


class _Doctor:
    def __init__(self, host: CommandHost, report: Report, stale_seconds: float) -> None:
        self.host = host
        self.report = report
        self.stale = timedelta(seconds=stale_seconds)
        self.now: datetime = instant(host.clock.now())
        self.workers: dict[str, WorkerInfo] = {}
        self.known: set[str] = set()
        self.unknown: dict[str, list[Run]] = {}
        self.pinned: dict[tuple[str, str, tuple[str, ...]], list[Run]] = {}
        self.late: dict[str, list[Run]] = {}
        self.unserved: dict[str, list[Run]] = {}
        self.orphans: dict[str, list[Run]] = {}
        self.unreadable: set[str] = set()
        self.locked: dict[tuple[str, bool], list[Run]] = {}
        self.queues: dict[str, QueueLook] = {}

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
        """Enter the write queue without writing, to detect a process that was stopped while it held the lock."""
        probe = Send(Signal("ks-doctor-probe", f"{RESERVED}probe", id="probe", sent_at=self.now))
        try:
            await self.host.call(below(self.host.store).commit, [probe])
        except StoreError as error:
            if error.denied:
                self.find(Severity.WARNING, "store", f"the store can only be read from here: {error}", _LOOK_ONLY)
                return
            advice = "a stopped process goes on with kill -CONT, or ends with kill; its runs are then recovered"
            if not isinstance(error, StoreUnavailable):
                advice = _RESTORE
            self.find(Severity.ERROR, "store", f"the store cannot be written: {error}", advice)

    async def look_at_erasures(self) -> None:
        """Find runs that `erase` has removed from a store which was too large to be rewritten unasked."""
        count = optional(below(self.host.store), OptionalStore.unfinished_erasures)
        if count is not None and (removed := await self.host.call(count)):
            self.find(
                Severity.WARNING,
                "not-erased",
                f"{_count(removed, 'removed run')} not yet erased: their data is still in unused parts of the files",
                "keepstep erase --rewrite finishes the erasure; every run waits meanwhile, so choose a quiet time",
            )

    async def look_at_hindrances(self) -> None:
        """Find what keeps the server from removing dead rows."""
        ask = optional(below(self.host.store), OptionalStore.hindrances)
        for one in [] if ask is None else await self.host.call(ask):
            what = f"the server cannot remove dead rows, and tables grow: {one.what}"
            self.find(Severity.WARNING, "vacuum-held", what, one.how)

    async def look_at_workers(self) -> None:
        try:
            self.report.workers = await self.host.call(self.host.store.list_workers)
        except CheckpointCorrupt as error:
            self.find(Severity.ERROR, "store", f"the workers cannot be read: {error}", _RESTORE)
        for worker in self.report.workers:
            self.workers[worker.id] = worker
            if worker.damage:
                self.find(
                    Severity.WARNING,
                    "worker-row",
                    f"worker {worker.id}: {worker.damage}",
                    "a living worker repairs it with its next heartbeat; if it remains, restart that worker",
                    worker=worker.id,
                )
            if not worker.alive:
                continue
            if worker.drain_at is not None:  # it serves no workflow any more
                self._drains(worker)
            else:
                self.known.update(worker.workflows, (TOPIC_WORKFLOW, BARRIER_WORKFLOW))
            self._saves(worker)
            if worker.host == socket.gethostname() and _is_stopped(worker.pid):
                self.find(
                    Severity.WARNING,
                    "worker-stopped",
                    f"{_name(worker)} is stopped and drives {_count(worker.leases, 'run')}",
                    f"kill -CONT {worker.pid} lets it go on; otherwise its runs are taken over when its lease ends",
                    worker=worker.id,
                )

    def _saves(self, worker: WorkerInfo) -> None:
        """Find a worker that has halted runs in the last hour, because the store did not save their records."""
        counts = counts_in(worker.progress)
        if counts.halted_at is None or self.now - counts.halted_at > RECENT:
            return
        self.find(
            Severity.WARNING,
            "not-saved",
            f"{_name(worker)} has halted {_count(counts.halted, 'run')}, last at "
            f"{counts.halted_at:%Y-%m-%d %H:%M:%S} UTC, because the store could not save: {counts.halted_by}",
            "halted runs go on from their last record when the store works again; check its disk, locks and connection",
            worker=worker.id,
        )

    def _drains(self, worker: WorkerInfo) -> None:
        since = "" if worker.drain_at is None else f" since {worker.drain_at:%Y-%m-%d %H:%M:%S} UTC"
        self.find(
            Severity.NOTE,
            "worker-drains",
            f"{_name(worker)} claims no more runs{since}, and drives {_count(worker.leases, 'run')}",
            "keepstep worker ends by itself; restart another program to let it claim runs again",
            worker=worker.id,
        )

    # -- one run ------------------------------------------------------------------------------------------------------

    async def runs(self, statuses: frozenset[Status]) -> AsyncIterator[Run]:
        """Yield the runs in these statuses; report those that cannot be read."""
        after: str | None = None
        while True:
            query = RunQuery(status=statuses, limit=1000, after=after, system=True)
            page = await self.host.call(self.host.store.list_runs, query)
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
        problem = f"run {run_id!r}: one of its two rows is missing"
        try:
            await self.host.stored_run(run_id)
        except SchemaMismatch as error:
            self._newer(run_id, str(error))
            return
        except CheckpointCorrupt as error:
            problem = str(error)
        self._corrupt(run_id, problem)

    def _newer(self, run_id: str, problem: str) -> None:
        advice = (
            "a worker of the newer version goes on with it; start one, or upgrade Keepstep here, and retry the run if "
            "it was set aside for that. If no newer version has ever written "
            f"to this store, the record is damaged: keepstep repair --accept-loss {quote(run_id)}"
        )
        self.find(Severity.ERROR, "newer", problem, advice, runs=[run_id])

    def _corrupt(self, run_id: str, problem: str) -> None:
        advice = (
            "keepstep repair fixes everything that can be derived, and "
            f"keepstep repair --accept-loss {quote(run_id)} shows what would be lost; or "
            "restore the store from a backup. No worker drives a damaged run"
        )
        self.find(Severity.ERROR, "corrupt", problem, advice, runs=[run_id])

    async def look_at_queues(self) -> None:
        """Find the queues with limits; their runs are noted one by one."""
        for gate in await self.host.call(self.host.store.list_gates, QUEUE):
            self.queues[gate.name] = QueueLook(gate, self.known, self._is_alive, self.now)

    async def look_at_services(self) -> None:
        """Find services whose limits do not hold, or that hold runs back."""
        for gate in await self.host.call(self.host.store.list_gates, SERVICE):
            for concern in service_concerns(gate, self.now):
                self.find(Severity.WARNING, concern.code, concern.message, concern.advice)

    def _is_alive(self, worker: str) -> bool:
        known = self.workers.get(worker)
        return known is not None and known.alive

    async def look_at_run(self, run: Run) -> None:
        if run.queue in self.queues and self._is_served(run):
            self.queues[run.queue].add(run)
        try:
            waits = run.worker is None and run.status is not Status.SET_ASIDE
            if waits and schedule_name(run.id) is not None and self._key_wanted(run) is None:
                await self._schedule(run)
                return
            if waits and channel_name(run.id) is not None and (run.due_at is not None or TELL in run.wakes):
                await self._channel(run)
                return
            if waits and topic_name(run.id) is not None and self._key_wanted(run) is None:
                await self._topic(run)
            # Idle topics and barriers need nobody: the next signal wakes them.
            is_idle = waits and (run.due_at is None or run.due_at > self.now)
            if is_idle and run.workflow in (TOPIC_WORKFLOW, BARRIER_WORKFLOW):
                return
            await self._look_at_run(run)
            # The run was handed back, perhaps by a worker that cannot read it.
            if run.status is Status.QUEUED and run.seq > 1:
                for row in await self.host.records(run.id, run.seq - 1, 1):
                    next(unseal([row], run.id, run.seq - 1))
        except SchemaMismatch as error:  # only this run is affected; examine the others
            self._newer(run.id, str(error))
        except CheckpointCorrupt as error:
            self._corrupt(run.id, str(error))

    def _key_wanted(self, run: Run) -> tuple[str, bool] | None:
        """Return the id of the key that the run lacks and whether another key of that name exists, or None."""
        try:
            if self.host.encryption.store is not None:
                self.host.encryption.cipher(run)
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
                self._stalled(run, "it is paused, and a resume would not wake it")
        elif run.due_at is not None and run.due_at <= self.now:
            self._due(run)
        elif run.due_at is None:
            await self._without_time(run)
        else:
            self._blocked(run)
            self._given_back(run)
        if run.status not in (Status.SET_ASIDE, Status.PAUSED) and run.worker is None:
            self._attended(run)

    def _attended(self, run: Run) -> None:
        """Find a run that no living worker claims: its workflow is unknown, or it is pinned to another version."""
        if run.workflow not in self.known:
            self.unknown.setdefault(run.workflow, []).append(run)
        elif instead := self._instead(run):
            self.pinned.setdefault((run.workflow, run.version, instead), []).append(run)
        elif not self._is_served(run):
            self.unserved.setdefault(run.queue, []).append(run)

    def _is_served(self, run: Run) -> bool:
        """Whether a living worker that knows the workflow of a run serves its queue; true if none knows it."""
        knowing = [one for one in self.report.workers if one.claims and run.workflow in one.workflows]
        return run.worker is not None or not knowing or any(one.serves(run.queue) for one in knowing)

    def _instead(self, run: Run) -> tuple[str, ...]:
        return versions_instead(self.report.workers, run.workflow, run.version)

    async def _schedule(self, run: Run) -> None:
        """Examine a schedule that no worker holds: a living one must serve it, and its ticks must come."""
        state, _ = await newest_state(self.host, run, ScheduleKeeper())
        name, remove = quote(state.name), f"keepstep schedules remove {quote(state.name)}"
        is_served = run.workflow in self.known or (not is_declared(run.workflow) and state.workflow in self.known)
        if not is_served:
            serves, code = ("declares", " with its schedule=") if is_declared(run.workflow) else ("serves", "")
            self.find(
                Severity.WARNING,
                "schedule-unattended",
                f"schedule {name} makes no ticks: no living worker {serves} it",
                f"start a worker whose code has workflow {state.workflow!r}{code}, or {remove}",
                runs=[run.id],
            )
            return
        late = overdue(state, self.now)
        if late is not None:
            why = f"run {state.open[0]} has not ended" if state.open else "no worker has answered for it"
            advice = f"keepstep show {quote(state.open[0])}" if state.open else "the log of its worker has the reason"
            self.find(
                Severity.WARNING,
                "schedule-late",
                f"schedule {name} has waited for over two intervals with its tick {late:%Y-%m-%d %H:%M:%S} UTC: {why}",
                advice,
                runs=[run.id],
            )

    async def _channel(self, run: Run) -> None:
        """Examine a channel that no worker holds: its deliveries must not fail, and a living worker must serve it."""
        if run.seq and self._key_wanted(run) is None:
            await self._failed_deliveries(run)
        if run.due_at is not None and run.workflow not in self.known:
            name, end = channel_name(run.id) or "", f"end the channel: keepstep cancel {quote(run.id)} --force"
            self.find(
                Severity.WARNING,
                "channel-unattended",
                f"channel {quote(name)} delivers no notices: no living worker declares it",
                f"start a worker whose code has ks.Channel({name!r}), or {end}",
                runs=[run.id],
            )

    async def _topic(self, run: Run) -> None:
        state, _ = await newest_state(self.host, run, TopicKeeper())
        for one in topic_concerns(state, self.now):
            self.find(Severity.WARNING, one.code, one.message, one.advice, runs=one.runs)

    async def _failed_deliveries(self, run: Run) -> None:
        state, _ = await newest_state(self.host, run, ChannelKeeper(1.0))
        found = [one for name in state.failed if (one := await self.host.stored_run(name)) is not None]
        failed = [one for one in found if one.status is Status.FAILED]
        if failed:
            last = failed[-1]
            why = "no reason is recorded" if last.error is None else f"{last.error.type}: {last.error.message}"
            name = quote(last.id)
            self.find(
                Severity.WARNING,
                "channel-failed",
                f"channel {quote(state.name)} has undelivered notices, because {_named(failed)} failed: {why}",
                f"keepstep show {name} tells why; keepstep retry {name} delivers them, keepstep erase {name} does not",
                runs=[one.id for one in failed],
            )

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
        whole = await self.host.stored_run(run.id)
        error = whole.error if whole is not None else None
        reason = f"{error.type}: {error.message}" if error is not None else "no reason is recorded"
        parent = f"; its parent {run.parent} waits for it" if run.parent is not None else ""
        advice = f"keepstep retry {quote(run.id)}, or keepstep cancel {quote(run.id)}"
        if error is not None and error.type in CODE_PROBLEMS:
            advice = f"keepstep check FILE.py checks whether the code fits the run; fix the code first, then {advice}"
        if whole is not None and handed_over(whole):
            advice = (
                f"keepstep erase {quote(run.id)} --force removes it here; first check that it is in the other store"
            )
        self.find(
            Severity.WARNING,
            "set-aside",
            f"run {run.id} ({run.workflow}) is set aside: {reason}{parent}",
            advice,
            runs=[run.id],
        )

    def _due(self, run: Run) -> None:
        if run.queue in self.queues:  # it may wait for a place or its key
            return
        if run.workflow not in self.known or self._instead(run) or not self._is_served(run):
            return
        if run.due_at is not None and self.now - run.due_at > _LATE:
            self.late.setdefault(run.workflow, []).append(run)

    def _blocked(self, run: Run) -> None:
        steps = sorted_wakes(run.wakes).not_ready
        if steps:
            self.find(
                Severity.NOTE,
                "blocked",
                f"run {run.id} ({run.workflow}) is blocked: {' and '.join(steps)} is not ready",
                "ready= is called again automatically; check the condition that it waits for",
                runs=[run.id],
            )

    def _given_back(self, run: Run) -> None:
        """Report a run that its worker handed back: its records were refused, or it belongs to a namesake."""
        if run.status is not Status.QUEUED or not run.epoch:
            return
        module = module_in(run.seed)
        owner = f"; it belongs to module {module!r}, so check that a worker has that module" if module else ""
        self.find(
            Severity.NOTE,
            "given-back",
            f"run {run.id} ({run.workflow}) was handed back by the worker that claimed it, and is tried again later",
            f"the log of the worker has the reason{owner}",
            runs=[run.id],
        )

    async def _without_time(self, run: Run) -> None:
        """Examine a run that no time wakes: a signal, a child or a place at a service must wake it."""
        waits = [name for name in run.wakes if not name.startswith(RESERVED) or name.startswith((CHILD, RESOLVE, GO))]
        if not waits and run.service is None and not _is_told(run):
            self._stalled(run, f"it is {run.status.value}, and no time, signal or child can wake it")
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
            page = await self.host.call(self.host.store.list_runs, RunQuery(parent=run.id, after=after))
            if any(child.parent_key == key and child.status not in FINISHED for child in page.runs):
                return
            after = page.next
            if after is None:
                break
        self._stalled(
            run, f"it waits for its child of {key}, which has ended or was removed without sending its outcome"
        )

    async def _has_unread(self, run: Run, waits: list[str]) -> bool:
        """Whether a signal that the run waits for lies in the store, unread."""
        reads = Reads()
        children: list[tuple[int, str, str]] = []
        gone = Superseded()
        after = 0
        while rows := await self.host.records(run.id, after, 1000, _READS):
            after = rows[-1].seq
            for row in rows:
                record, _ = next(unseal([row], run.id, row.seq - 1))
                reads.add(record)
                data = data_of(record, Data)
                if record.kind == Kind.SUPERSEDED:
                    gone.add(record)
                elif "child" in data:
                    children.append((record.seq, f"{CHILD}{record.step}", data["child"]))
        read = reads.numbers(gone.__contains__)
        started = {name: child for seq, name, child in children if seq not in gone}

        def concerns(signal: Signal) -> bool:
            if signal.name not in waits or signal.seq in read:
                return False
            child = started.get(signal.name)
            # Signals of children that a rewind has superseded do not count.
            return child is None or is_word_of(signal.payload, child)

        seen = 0
        while signals := await self.host.signals(run.id, seen):
            seen = signals[-1].seq
            if any(map(concerns, signals)):
                fresh = await self.host.stored_run(run.id)
                return fresh is not None and fresh.epoch == run.epoch and fresh.due_at is None and fresh.worker is None
        return False

    def _stalled(self, run: Run, why: str) -> None:
        self.find(
            Severity.ERROR,
            "stalled",
            f"run {run.id} ({run.workflow}) can never go on: {why}",
            f"keepstep cancel {quote(run.id)} --force ends it, without its clean-up; please report this as a bug",
            runs=[run.id],
        )

    # -- many runs with one reason ------------------------------------------------------------------------------------

    def _unknown(self, workflow: str, runs: list[Run]) -> None:
        """Report a workflow that no living worker knows, or an agent that none hosts."""
        agent = agent_of(workflow)
        code, advice = "no-worker", "start one: keepstep worker FILE.py"
        text = f"no living worker knows workflow {workflow!r}; {_count(len(runs), 'run')} of it: {_named(runs)}"
        if agent is not None:
            code, advice = "agent-unhosted", "start a host: keepstep worker --agents FILE.py"
            text = f"no living worker hosts agent {agent!r}; {_count(len(runs), 'task')} of it: {_named(runs)}"
        self.find(Severity.WARNING, code, text, advice, runs=[run.id for run in runs])

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
            self._unknown(workflow, runs)
        for (workflow, version, instead), runs in self.pinned.items():
            there = ", ".join(map(repr, instead))
            self.find(
                Severity.WARNING,
                "no-version",
                f"no living worker has version {version!r} of workflow {workflow!r}, only {there}; "
                f"{_count(len(runs), 'run')} of it: {_named(runs)}",
                "start a worker with the code of that version: keepstep worker FILE.py",
                runs=[run.id for run in runs],
            )
        for name, runs in self.unserved.items():
            self.find(
                Severity.WARNING,
                "queue-unattended",
                f"no living worker serves queue {name!r}; {_count(len(runs), 'run')} in it: {_named(runs)}",
                f"start one that does: keepstep worker FILE.py --queue {quote(name)}",
                runs=[run.id for run in runs],
            )
        for (key, wrong), runs in self.locked.items():
            what = (
                f"encrypted with the key {key!r}, which is missing here"
                if key
                else "in plain text, which the keys do not allow"
            )
            if wrong:
                what = f"encrypted with the key {key!r}, but the local key of that name is different"
            self.find(
                Severity.WARNING,
                "no-key",
                f"{_count(len(runs), 'run')} {what}: {_named(runs)}",
                "a worker needs the right key to drive them"
                if key
                else "add the word plaintext to the keys to allow them",
                runs=[run.id for run in runs],
            )
        for queue in self.queues.values():
            for one in queue.concerns():
                self.find(Severity.WARNING, one.code, one.message, one.advice, runs=one.runs)
        for workflow, runs in self.late.items():
            self.find(
                Severity.WARNING,
                "late",
                f"{_count(len(runs), 'run')} of {workflow!r} due for {LATE_SECONDS:g} s, but unclaimed: {_named(runs)}",
                "its workers are full or stuck: start another, or check their logs",
                runs=[run.id for run in runs],
            )

    async def verify_all(self) -> None:
        """Verify all records, as `keepstep verify` does."""
        for flaw in await self.host.call(self.host.store.check):
            self.find(Severity.ERROR, "store", flaw.what, "keepstep repair fixes everything that can be derived")
        for flaw in (await self.host.call(verify_documents, self.host.store))[1]:
            self.find(Severity.ERROR, flaw.kind, flaw.what, "restore it from a backup, or remove it")
        async for run in self.runs(frozenset(Status)):
            store = self.host.store if self._key_wanted(run) is None else below(self.host.store)
            check = await self.host.call(check_named, store, run.id)
            if check is not None and check.problems:
                (self._newer if check.newer else self._corrupt)(run.id, "; ".join(check.problems))


_RESTORE = "keepstep repair fixes everything that can be derived; otherwise restore the store from a backup"
_LOOK_ONLY = "reading is enough to inspect runs; workers and commands need write access"
_LATE = timedelta(seconds=LATE_SECONDS)
#: The kinds of record that say that a signal was read, that its reader was cancelled, or which of them count.
_READS = (*sorted(CARRIES_SIGNAL | ENDS_STEP), Kind.SUPERSEDED.value)


def _is_told(run: Run) -> bool:
    """Whether a run waits for others to tell it: a reply, a message, room in a topic, or the parties of a barrier."""
    wakes = sorted_wakes(run.wakes)
    return bool(wakes.replies or wakes.messages or wakes.rooms or wakes.barriers)


def _name(worker: WorkerInfo) -> str:
    where = f" on {worker.host}" if worker.host and worker.host != socket.gethostname() else ""
    return f"{worker.id} (pid {worker.pid}{where})"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _named(runs: list[Run]) -> str:
    more = f" and {len(runs) - NAMED} more" if len(runs) > NAMED else ""
    return ", ".join(run.id for run in runs[:NAMED]) + more


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, for example by SIGSTOP."""
    if pid == os.getpid():
        return False
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])
