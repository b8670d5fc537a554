"""One firing per tick: a schedule under workers that die between any two writes, purges, and clocks that jump."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from zoneinfo import ZoneInfo

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import keepstep as ks
from keepstep.engine.encryption import Encryption
from keepstep.kernel.keeper import birth, keep, newest_state
from keepstep.kernel.schedule import ScheduleKeeper, declaration
from keepstep.model import FINISHED, RunQuery, Signal, Status, WorkerInfo
from keepstep.model.keepers import TELL, TELLS, declared_schedule, notice_of, schedule_id
from keepstep.policies.schedule import tick_of, tick_text
from keepstep.ports import Advance, ClaimRequest, Send, Verdict, instant
from keepstep.stores.memory import MemoryStore
from keepstep.workflows.definition import Workflow
from tests.nightly import examples

NAME, LEASE = "report", 10.0
#: A day before clocks change in Berlin, in spring and in autumn, and an ordinary day.
BEGINNINGS = [
    datetime(2026, 3, 28, 20, tzinfo=UTC),
    datetime(2026, 10, 24, 20, tzinfo=UTC),
    datetime(2026, 7, 1, tzinfo=UTC),
]
SCHEDULES = [
    lambda **options: ks.Every(900, **options),
    lambda **options: ks.Every(3600, jitter=1200, **options),
    lambda **options: ks.Cron("*/20 * * * *", tz="Europe/Berlin", **options),
    lambda **options: ks.Cron("15,45 1-3 * * *", tz="Europe/Berlin", jitter=60, **options),
]


class Died(BaseException):
    """The worker dies in the middle of a write."""


class Clock:
    """A wall clock that can be set, and a monotonic one that cannot."""

    def __init__(self, at):
        self.wall, self.mono = at.timestamp(), 0.0

    def now(self):
        return self.wall

    def boot(self):
        return "machine", self.mono

    def passes(self, seconds):
        self.wall += seconds
        self.mono += seconds


class Worker:
    """A process as a keeper sees it. `fate` says at which of its writes it dies, before or after."""

    def __init__(self, machine, number):
        self.machine, self.store, self.clock = machine, machine.store, machine.store.clock
        self.id = f"worker-{number}"
        self.fate = (0, "")
        self.workflows = {NAME: machine.workflow}
        self.encryption = Encryption(None)
        self.events = SimpleNamespace(observed=False)
        self.redaction = SimpleNamespace(tags=lambda tags: tags or {}, redact=str)
        self.journal = self
        self.renew()

    def renew(self):
        self.store.renew_leases(WorkerInfo(self.id, workflows=(declared_schedule(NAME),)))

    async def write(self, change):
        count, when = self.fate
        self.fate = (count - 1, when)
        if count == 1 and when == "before":
            raise Died
        answer = self.machine.commit(change)
        if count == 1 and when == "after":
            raise Died
        return answer

    async def stored_run(self, run_id):
        return self.store.get_run(run_id)

    newest_of_series = stored_run

    async def records(self, run_id, after=0, limit=1000, kinds=()):
        return self.store.list_checkpoints(run_id, after, limit, kinds)

    async def signals(self, run_id, after=0, limit=1000):
        return self.store.list_signals(run_id, after, limit)

    async def put_back(self, claim, error):
        raise AssertionError(error)

    def release_later(self, run_id, epoch):
        """Its lease runs out."""

    def signalled(self, run_id): ...
    def claim_soon(self): ...
    def notify_waiters(self): ...


class Schedules(RuleBasedStateMachine):
    """The keeper of one schedule, driven by whoever claims it."""

    @initialize(
        begin=st.sampled_from(BEGINNINGS),
        make=st.sampled_from(SCHEDULES),
        overlap=st.sampled_from(["allow", "skip", "queue", "cancel"]),
        catch_up=st.sampled_from(["one", "all", "skip"]),
    )
    def begin(self, begin, make, overlap, catch_up):
        async def report(): ...

        self.schedule = make(overlap=overlap, catch_up=catch_up)
        self.store = MemoryStore(clock=Clock(begin), lease_seconds=LEASE)
        self.workflow = Workflow(report, name=NAME, schedule=self.schedule)
        self.number, self.fired, self.by_hand, self.late = 0, [], set(), []
        self.wrong = []  # raised later: an error inside the keeper would only set it aside
        self.jumped = False
        self.first = begin
        given = declaration(NAME, NAME, self.schedule, b"[[],{}]", begin)
        self.commit(birth(self.worker(), schedule_id(NAME), declared_schedule(NAME), given, actor="x", at=begin))

    @property
    def clock(self):
        return self.store.clock

    def worker(self):
        self.number += 1
        return Worker(self, self.number)

    def commit(self, change):
        (answer,) = self.store.commit([change])
        if answer.verdict is Verdict.DONE and isinstance(change, Advance):
            for create in change.creates:
                self.started(create.run)
        return answer

    def started(self, run):
        text = run.id.rpartition("@")[2]
        if text in self.by_hand:
            return
        tick = tick_of(text)
        local = tick.astimezone(ZoneInfo("Europe/Berlin"))
        if self.schedule.before(tick) != tick or ("1-3" in str(self.schedule) and local.hour not in (1, 2, 3)):
            self.wrong.append(f"{run.id} is no tick")
        if self.schedule.fires_at(NAME, tick) > instant(self.clock.now()):
            self.wrong.append(f"{run.id} fires too early")
        if self.fired and tick <= self.fired[-1]:
            self.wrong.append(f"{run.id} fires after {self.fired[-1]}")
        self.fired.append(tick)

    def unfinished(self):
        found = self.store.list_runs(RunQuery(limit=1000)).runs
        return [run for run in found if run.status not in FINISHED]

    def claim(self, worker):
        worker.renew()
        return self.store.claim_runs(ClaimRequest(worker.id, frozenset({declared_schedule(NAME)}), 1)).claims

    def drive(self, worker, claim):
        try:
            asyncio.run(keep(worker, ScheduleKeeper(), claim))
        except Died:
            self.store.mark_dead(worker.id)

    # -- what happens --------------------------------------------------------------------------------------------------

    @rule(seconds=st.one_of(st.integers(1, 600), st.integers(600, 4000), st.integers(4000, 60_000)))
    def time_passes(self, seconds):
        self.clock.passes(seconds)

    @rule(seconds=st.integers(-30_000, 30_000))
    def the_clock_is_set(self, seconds):
        self.clock.wall += seconds
        self.jumped = True

    @rule(write=st.integers(0, 3), when=st.sampled_from(["before", "after"]))
    def a_worker_answers_or_dies(self, write, when):
        worker = self.worker()
        for claim in self.claim(worker):
            worker.fate = (write, when)
            self.drive(worker, claim)

    @rule()
    def a_worker_is_paused_with_the_keeper(self):
        worker = self.worker()
        self.late += [(worker, claim) for claim in self.claim(worker)]
        self.clock.passes(2 * LEASE)
        self.store.mark_dead(worker.id)

    @precondition(lambda self: self.late)
    @rule()
    def a_paused_worker_goes_on(self):
        worker, claim = self.late.pop()
        self.drive(worker, claim)

    @rule(data=st.data())
    def a_run_ends(self, data):
        runs = self.unfinished()
        if runs:
            run = data.draw(st.sampled_from(runs))
            (claim,) = self.store.claim_runs(ClaimRequest("runner", run=run.id, statuses=frozenset(Status))).claims
            notice = notice_of(run, 0, None)
            change = Advance(run.id, "runner", claim.lease.epoch, run.seq, status=Status.COMPLETED, release=True)
            change.sends = [Send(notice, optional=True)] if notice is not None else []
            assert self.commit(change).verdict is Verdict.DONE

    @rule()
    def finished_runs_are_removed(self):
        found = self.store.list_runs(RunQuery(status=FINISHED, limit=1000)).runs
        self.store.delete_runs([run.id for run in found], finished=True)

    @rule()
    def an_unfinished_run_is_removed(self):
        self.store.delete_runs([run.id for run in self.unfinished()[:1]])

    def tell(self, payload):
        self.commit(Send(Signal(schedule_id(NAME), TELL, payload.encode(), sent_at=instant(self.clock.now()))))

    @rule(act=st.sampled_from(["pause", "resume", "ended", "nonsense"]))
    def a_person_tells_it_something(self, act):
        self.tell(f'{{"act":"{act}"}}')

    @rule()
    def a_person_triggers_it(self):
        tick = tick_text(instant(self.clock.now()).replace(microsecond=777))
        self.by_hand.add(tick)
        self.tell(f'{{"act":"trigger","tick":"{tick}"}}')

    # -- what holds ----------------------------------------------------------------------------------------------------

    @invariant()
    def ticks_fire_once_in_order_and_in_time(self):
        assert getattr(self, "wrong", []) == []

    @invariant()
    def runs_overlap_only_where_they_may(self):
        if hasattr(self, "store") and self.schedule.overlap != "allow":
            runs = self.unfinished()
            assert len(runs) <= 1
            assert all(TELLS in run.tags for run in runs)

    def teardown(self):
        if not hasattr(self, "store"):
            return
        self.tell('{"act":"resume"}')
        self.clock.passes(2 * LEASE)
        worker = self.worker()
        for _ in range(5):
            for claim in self.claim(worker):
                self.drive(worker, claim)
        run = self.store.get_run(schedule_id(NAME))
        assert run.status is Status.WAITING
        state, _ = asyncio.run(newest_state(worker, run, ScheduleKeeper()))
        now = instant(self.clock.now())
        last = tick_of(state.last)
        if self.schedule.catch_up == "all" and self.schedule.overlap == "allow":
            wanted = self.schedule.between(self.first + timedelta(microseconds=1), last, 10**6)
            assert self.fired == wanted
        following = self.schedule.after(last)
        assert self.schedule.fires_at(NAME, following) > now
        if not state.waiting:
            assert run.due_at == self.schedule.fires_at(NAME, following)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=examples(100, 3000), stateful_step_count=30, deadline=None)
