"""The simulated world: processes that take turns, one store, one time, and everything that happens, in one thread.

A history is played from a plan (see `plans`): its programs, its workers, and what befalls them. All chance comes from
the plan's seed, so the same plan gives the same history, byte for byte.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from random import Random
from typing import Any

from keepstep.errors import CheckpointCorrupt, KeepstepError
from keepstep.model import FINISHED, Ask, Claims, Grant, Kind, Status, WorkerInfo
from keepstep.model.keepers import is_keeper
from keepstep.ports import Advance, Answer, Change, ClaimRequest, Create, Row, Send, Verdict
from keepstep.records.record import Record, unseal
from keepstep.stores.memory import MemoryStore
from keepstep.stores.rules import ENDED
from keepstep.testing.virtual import EPOCH

from . import bodies
from .acts import AWAITED, FORK
from .bodies import CLIENT
from .client import Client
from .counted import counting
from .plans import FAULTS, Plan
from .process import Process, StoreClock
from .promise import Promise
from .promises import PROMISES
from .queues import Jobs, declaring
from .services import Calls, using
from .surroundings import its_own_chance, listening, nothing_collected
from .wire import Killed

#: How long the world goes on after the last thing that befell it: long enough for every lease, backoff and sleep.
PATIENCE_SECONDS = 240.0
#: How often it is looked whether everything has ended.
LOOK_SECONDS = 0.5
#: What promises may listen to.
_HOOKS = (
    "begins",
    "ends",
    "told",
    "wrote",
    "claimed",
    "asked",
    "passed",
    "renewed",
    "saw",
    "sent",
    "went_back",
    "ended",
)
#: A process that died or was stopped comes back after this, unless the plan says otherwise.
BACK_SECONDS = 0.7


@dataclass
class Body:
    """The body of a step, as it really ran."""

    run: str
    key: str
    attempt: int
    number: int
    process: Process
    began_at: float
    ended_at: float | None = None


@dataclass
class Outcome:
    """What a history left behind."""

    plan: Plan
    broken: list[str]
    story: list[str]
    digest: str
    seconds: float
    counts: dict[str, int]
    befell: dict[str, int] = field(default_factory=dict)


class World:
    """Plays one plan. Promises are told what happens through their hooks, and say what was broken."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = Random(plan["seed"])
        self.now = 0.0
        self.over = False
        self.current: Process | None = None
        self.client = Client(self)
        self.store = MemoryStore(clock=StoreClock(self), lease_seconds=plan["lease"])
        slots = [*range(plan["workers"]), CLIENT]
        self.offsets = dict.fromkeys(slots, 0.0)
        self.codes = dict.fromkeys(slots, 0)
        self.callbacks = dict.fromkeys(slots, 0)
        self.calls = dict.fromkeys(slots, 0)
        self.slow = dict.fromkeys(slots, 0.0)
        self.slow_calls = dict.fromkeys(slots, 0)
        self.deaf = dict.fromkeys(slots, ("", 0.0))
        self.begun = dict.fromkeys(slots, 0)
        self.given = dict.fromkeys(slots, 0)
        self.lost_claims: set[int] = set()
        self.next_fate: dict[int, str] = {}
        self.back_after: dict[int, float] = {}
        self.down_until = 0.0
        self.killed: set[str] = set()
        self.processes: dict[int, Process] = {}
        self._past: list[Process] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._pending_events = [*plan["events"]]
        self._by_moment: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
        # what is known from outside the store
        self.bodies: dict[tuple[str, str], list[Body]] = {}
        self.running: dict[int, Body] = {}
        self._unrecorded = 0
        self.accepted: dict[str, dict[str, Any]] = {}
        self.results: dict[str, Any] = {}
        self.cancelled: set[str] = set()
        self.went_back: set[str] = set()
        self._to_mend = {event["run"] for event in plan["events"] if event["what"] == "retry"}
        self.schedule_paused = False
        self.mended: set[str] = set()  # runs of the plan whose broken steps work again
        self.forks: dict[str, int] = {}
        self.specs: dict[str, dict[str, Any]] = {run["id"]: run for run in plan["runs"]}
        self.acts_to_come = sum(event["what"] in AWAITED for event in plan["events"])
        self.jobs, self.calls_of_service = Jobs(self), Calls(self)
        self.had_by_workers: set[str] = set()  # runs that a worker has claimed
        self.befell: dict[str, int] = {}
        self.story: list[str] = []
        self.broken: list[str] = []
        self.counts = {"steps": 0, "commits": 0, "claims": 0, "lives": 0, "deaths": 0}
        self._hash = hashlib.sha256()
        self._promises = [promise(self) for promise in PROMISES]
        self._hooks = {
            name: [
                getattr(one, name) for one in self._promises if getattr(type(one), name) is not getattr(Promise, name)
            ]
            for name in _HOOKS
        }

    # -- playing -------------------------------------------------------------------------------------------------------

    def play(self) -> Outcome:
        """Play the plan to its end, and see whether every promise was kept."""
        with its_own_chance(self), listening(self), nothing_collected(), declaring(self.plan), using(self.plan):
            bodies.HERE.append(self)
            try:
                self._begin()
                self._go_on()
                for check in self._hooks["ended"]:
                    check()
            finally:
                self.over = True
                for process in self._past:
                    self._abandon(process)
                bodies.HERE.pop()
        for run in self.runs():
            for row in run.rows:
                self._hash.update(row.record)
            self._hash.update(repr((run.head.status, run.signals)).encode())
        counts = {**self.counts, "runs": len(self.runs())}
        return Outcome(self.plan, self.broken, self.story, self._hash.hexdigest(), self.now, counts, self.befell)

    def runs(self) -> list[Any]:
        return list(self.store._runs.values())

    def _begin(self) -> None:
        for event in self._pending_events:
            what, moment = event["at"]
            if what == "time":
                self.at(moment, partial(self._befalls_slot, event))
            else:
                self._by_moment.setdefault((what, event["slot"], moment), []).append(event)
        for slot in (*range(self.plan["workers"]), CLIENT):
            self._start_process(slot, 1)
        for run in self.plan["runs"]:
            self.at(run["at"], partial(self.client.starts, run))
        self.jobs.begin()
        self.calls_of_service.begin()
        if "schedule" in self.plan:
            self.at(self.plan["schedule"]["for"], self.client.pauses_the_schedule)

    def _go_on(self) -> None:
        chance, agenda = self.chance, self._agenda
        last = max(
            [run["at"] for run in self.plan["runs"]] + [_until(event) for event in self.plan["events"]], default=0.0
        )
        end = max(last, self.jobs.last_at(), self.calls_of_service.last_at()) + PATIENCE_SECONDS
        look_at = LOOK_SECONDS
        while self.now < end:
            while agenda and agenda[0][0] <= self.now:
                heapq.heappop(agenda)[2]()
            if self.now >= look_at:
                look_at = self.now + LOOK_SECONDS
                if self._all_over():
                    return
                self.client.looks_after_runs()
            ready, soonest = self._who_can_go(agenda[0][0] if agenda else end)
            if not ready:
                self.now = min(soonest, look_at)
                continue
            process = ready[0] if len(ready) == 1 else chance.choice(ready)
            self.current = process
            process.loop.one_pass(process.may_go_on)
            self.current = None
            self.now += 0.0005 * chance.random()

    def _who_can_go(self, soonest: float) -> tuple[list[Process], float]:
        """The processes that have something to do now, and when the next will have."""
        ready = []
        for process in self.processes.values():
            at = None if process.dead else process.loop.next_at()
            if at is None:
                continue
            at = max(at, process.paused_until)
            if at <= self.now:
                ready.append(process)
            elif at < soonest:
                soonest = at
        return ready, soonest

    def _all_over(self) -> bool:
        """Everything that was to be started has been, and has ended."""
        if self.acts_to_come or len(self.accepted) < len(self.plan["runs"]):
            return False
        if "schedule" in self.plan and not self.schedule_paused:
            return False
        if not self.jobs.all_started() or not self.calls_of_service.all_started():
            return False
        runs = [run for run in self.runs() if not is_keeper(run.run.id)]
        return all(run.head.status in ENDED or self.waits_for_a_person(run) for run in runs)

    def waits_for_a_person(self, entry: Any) -> bool:
        """Whether a run waits for a child, and that for another, and the last of them was set aside."""
        if entry.head.status is not Status.WAITING:
            return entry.head.status is Status.SET_ASIDE
        children = [child for child in self.runs() if child.run.parent == entry.run.id]
        children = [child for child in children if child.head.status not in FINISHED]
        return bool(children) and all(self.waits_for_a_person(child) for child in children)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Have something done at a time."""
        self._order += 1
        heapq.heappush(self._agenda, (moment, self._order, action))

    # -- processes -----------------------------------------------------------------------------------------------------

    def _start_process(self, slot: int, life: int) -> None:
        self.counts["lives"] += 1
        process = self.processes[slot] = Process(self, slot, life)
        self._past.append(process)
        self.tell(f"{process} starts")

    def comes_back(self, process: Process) -> None:
        """A process has ended: another takes its place."""
        slot = process.slot
        for number in [number for number, body in self.running.items() if body.process is process]:
            del self.running[number]
        after = self.back_after.pop(slot, BACK_SECONDS)
        self.at(self.now + after, lambda: self._start_process(slot, process.life + 1))

    @staticmethod
    def _abandon(process: Process) -> None:
        process.dead = True
        engine = process.engine
        engine.closed = True
        for context in engine.live.values():
            context.stop.left(context.stop.detached or "the world has ended")
        process.loop.abandon()

    # -- what befalls them ---------------------------------------------------------------------------------------------

    def due_at(self, what: str, slot: int, moment: int) -> Sequence[dict[str, Any]]:
        return self._by_moment.pop((what, slot, moment), ())

    def befalls(self, event: dict[str, Any], process: Process | None) -> None:
        """Something of the plan happens now."""
        if process is None or process.dead:
            return
        self.befell[event["what"]] = self.befell.get(event["what"], 0) + 1
        FAULTS[event["what"]].happen(self, process, event)

    def _befalls_slot(self, event: dict[str, Any]) -> None:
        self.befalls(event, self.processes.get(event["slot"]))

    # -- what the wire does --------------------------------------------------------------------------------------------

    def commit(self, process: Process, changes: Sequence[Change]) -> list[Answer]:
        runs = self.store._runs
        before = [_head(runs.get(_run_of(change))) for change in changes]
        answers = self.store.commit(changes, wait=True)
        self.counts["commits"] += 1
        for change, answer, head in zip(changes, answers, before, strict=True):
            records: list[Record] = []
            if answer.verdict is Verdict.DONE and isinstance(change, (Advance, Create)):
                after = change.after if isinstance(change, Advance) else 0
                records = self._read(change.rows, _run_of(change), after)
            if records or isinstance(change, Advance):
                self.tell(f"{process}: {_told(change, answer, records)}")
            for hook in self._hooks["wrote"]:
                hook(process, change, answer, records, head)
            if any(record.kind == Kind.SUPERSEDED.value for record in records):
                self._goes_back(_run_of(change))
        return answers

    def _goes_back(self, run: str) -> None:
        """A person went back in a run: everyone who remembers it is told what still counts."""
        self.went_back.add(run)
        counted = counting(self._read(self.store._runs[run].rows, run, 0))
        for hook in self._hooks["went_back"]:
            hook(run, counted)

    def _read(self, rows: Sequence[Row], run: str, after: int) -> list[Record]:
        try:
            return [record for record, _ in unseal(rows, run, after)]
        except CheckpointCorrupt as error:
            self.breaks("the history of a run is whole", str(error))
            return []

    def claim(self, process: Process, request: ClaimRequest) -> Claims:
        claims = self.store.claim_runs(request)
        for claim in claims.claims:
            self.counts["claims"] += 1
            how = ", from a dead worker" if claim.taken_from else ""
            self.tell(f"{process} claims {claim.run.id} (epoch {claim.lease.epoch}{how})")
            if process.slot != CLIENT:
                self.had_by_workers.add(claim.run.id)
            for hook in self._hooks["claimed"]:
                hook(process, claim)
        for hook in self._hooks["asked"]:
            hook(process, request, claims)
        return claims

    def pass_gates(self, process: Process, worker: str, asks: Sequence[Ask]) -> list[Grant]:
        grants = self.store.pass_gates(worker, asks)
        for ask, grant in zip(asks, grants, strict=True):
            for hook in self._hooks["passed"]:
                hook(process, ask, grant)
        return grants

    def renew(self, process: Process, worker: WorkerInfo, *, leaving: bool) -> bool:
        if worker.id not in process.ids:
            process.ids.append(worker.id)
        known = self.store.renew_leases(worker, leaving=leaving)
        for hook in self._hooks["renewed"]:
            hook(process, worker.id, known)
        return known

    # -- what the programs tell ----------------------------------------------------------------------------------------

    def body_begins(self, run: str, key: str, attempt: int, idempotency_key: str, number: int) -> int:
        process = self.current
        assert process is not None
        self.counts["steps"] += 1
        mark = self.counts["steps"]
        body = Body(run, key, attempt, number, process, self.now)
        self.tell(f"{process}: {run} {key} begins{f', attempt {attempt}' if attempt > 1 else ''}")
        for hook in self._hooks["begins"]:
            hook(body, idempotency_key)
        self.bodies.setdefault((run, key), []).append(body)
        self.running[mark] = body
        self.begun[process.slot] += 1
        for event in self.due_at("body", process.slot, self.begun[process.slot]):
            self.befalls(event, process)
        if process.dead:
            raise Killed
        poison = self.plan.get("poison", {}).get(str(number % bodies.CODE))
        if poison and len(self.bodies[run, key]) <= poison:
            process.die(f"of {key}")
            raise Killed
        return mark

    def is_broken(self, run: str, number: int) -> bool:
        """Whether a step fails, in a run of the plan or in those that it started, because nobody has mended it yet."""
        return any(
            number % bodies.CODE in one.get("broken", ()) and one["id"] in self._to_mend - self.mended
            for one in self.plan["runs"]
            if run == one["id"] or run.startswith(_beginnings(one["id"]))
        )

    def body_begins_unrecorded(self, run: str) -> int:
        """The code of a workflow waits for something that Keepstep does not know."""
        assert self.current is not None
        self._unrecorded -= 1
        self.running[self._unrecorded] = Body(run, "a wait of its own", 1, 0, self.current, self.now)
        return self._unrecorded

    def body_ends(self, mark: int) -> None:
        body = self.running.pop(mark, None)
        if body is not None and self.current is body.process:
            body.ended_at = self.now

    def saw(self, run: str, key: str, state: dict[str, Any]) -> None:
        for hook in self._hooks["saw"]:
            hook(run, key, state)

    def has_begun(self, run: str, key: str) -> bool:
        return bool(self.bodies.get((run, key)))

    def code_is_told(self, call: Any) -> None:
        for hook in self._hooks["told"]:
            hook(call)

    def child_is_told(self, run: str) -> None:
        if self.store.get_run(run) is None and FORK not in run:  # which makes its own in the commit after this
            self.breaks("a child that its parent knows is there", run)

    def asked(self, name: str, payload: Any) -> None:
        """A workflow was asked something."""

    def heard(self, name: str, payload: Any) -> None:
        for hook in self._hooks["sent"]:
            hook(name, payload)

    def caught(self, error: BaseException) -> None:
        """A program caught an error; only those that Keepstep names may reach it."""
        if bodies.BROKEN in str(error):
            raise error
        if isinstance(error, BaseExceptionGroup):
            for one in error.exceptions:
                self.caught(one)
        elif not isinstance(error, KeepstepError):
            self.note_failure("a workflow was told an error that is no one's", error)

    def code(self) -> int:
        return self.current.code if self.current is not None else 0

    def answered(self, asked: int, answer: int) -> None:
        if asked != answer:
            self.breaks("an answer belongs to its question", f"asked {asked}, told {answer}")

    def slept_until(self, due: datetime, now: datetime) -> None:
        woken = now.timestamp()
        if "set clock" not in self.befell:  # a run's own time is never behind what it slept: the world's tells more
            woken = min(woken, EPOCH + self.now)
        if due.timestamp() - woken > 0.001:
            self.breaks("a sleep lasts as long as it was asked to", f"due {due}, woken {now}")

    # -- saying --------------------------------------------------------------------------------------------------------

    def tell(self, line: str) -> None:
        text = f"{self.now:9.4f}  {line}"
        self.story.append(text)
        self._hash.update(text.encode())

    def breaks(self, promise: str, how: str) -> None:
        """A promise was broken."""
        if self.over:  # what is cleared away afterwards proves nothing
            return
        self.tell(f"BROKEN: {promise}: {how}")
        self.broken.append(f"{promise}: {how}")

    def note_failure(self, what: str, error: BaseException | None) -> None:
        if not isinstance(error, Killed):
            self.breaks("nothing fails inside the engine", f"{what}: {error!r}")


def _beginnings(run: str) -> tuple[str, str]:
    """What the names of children and of successors begin with."""
    return f"{run}.", f"{run}~"


def _until(event: dict[str, Any]) -> float:
    what, moment = event["at"]
    return float((moment if what == "time" else 0.0) + event.get("seconds", 0.0))


def _run_of(change: Change) -> str:
    if isinstance(change, Send):
        return change.signal.run
    return change.run.id if isinstance(change, Create) else change.run


@dataclass(frozen=True, slots=True)
class Head:
    """How a run stood before a change."""

    status: Status
    seq: int
    epoch: int
    worker: str | None
    signals: int


def _head(entry: Any) -> Head | None:
    if entry is None:
        return None
    return Head(entry.head.status, len(entry.rows), entry.head.epoch, entry.head.worker, len(entry.signals))


def _told(change: Change, answer: Answer, records: list[Record]) -> str:
    run = _run_of(change)
    what = ", ".join(f"{record.kind} {record.step}".strip() for record in records) or "head"
    status = getattr(change, "status", None)
    moved = f" → {status.value}" if status else ""
    refused = "" if answer.verdict is Verdict.DONE else f" REFUSED: {answer.verdict.value}"
    return f"{run}: {what}{moved}{refused}"
