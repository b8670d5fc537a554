"""A service beside a simple model: limits hold, nothing leaks, and whatever waits begins in the end.

Workers follow the rules of the port, and die between any two writes: before an ask, after it was written and before its
answer came, and while their attempts run. The model counts attempts one by one.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keepstep.model import Ask, GateChange, Signal, Status, WorkerInfo
from keepstep.model.gate import SERVICE
from keepstep.ports import ClaimRequest, Send, Verdict
from keepstep.stores.files.store import FilesStore
from keepstep.stores.memory import MemoryStore
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import START, Holder, SteppedClock, at, started
from tests.nightly import examples

RATES = st.builds(lambda n, b: {"count": n, "per": 1.0, "burst": b}, st.integers(1, 3), st.integers(1, 3))
BREAKERS = st.builds(
    lambda n, p, s: {"failures": n, "within": 20.0, "open_seconds": 10.0, "probes": p, "successes": s},
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
)
LIMITS = st.one_of(
    st.fixed_dictionaries({"concurrency": st.integers(1, 4)}, optional={"breaker": BREAKERS}),
    st.fixed_dictionaries({"rate": RATES}, optional={"breaker": BREAKERS}),
    st.fixed_dictionaries({"breaker": BREAKERS}, optional={"concurrency": st.integers(1, 4), "rate": RATES}),
)
PROBE_SECONDS = 5.0


@dataclass
class Worker:
    """A worker by the rules of the port: what it was granted, and what it has not told yet."""

    name: str
    share: int | None = 0
    tokens: int | None = 0
    tokens_until: float = 0.0
    probes: int | None = None
    waiting: list[float] = field(default_factory=list)  # since when
    running: list[bool] = field(default_factory=list)  # whether each is a probe
    begun: int = 0
    failures: int = 0
    passed: int = 0
    failed: int = 0

    def ask(self, now):
        waited = now - self.waiting[0] if self.waiting else 0.0
        return Ask(
            "bank",
            running=len(self.running),
            waiting=len(self.waiting),
            waited_seconds=waited,
            begun=self.begun,
            failures=self.failures,
            passed=self.passed,
            failed=self.failed,
            unused=self.probes or 0,
            probe_seconds=PROBE_SECONDS,
        )

    def answered(self, grant, now):
        self.share, self.tokens, self.probes = grant.share, grant.tokens, grant.probes
        self.tokens_until = now + grant.tokens_seconds
        self.begun = self.failures = self.passed = self.failed = 0

    def unanswered(self):
        """It may have been written: until the next answer, no more run than it has told."""
        told = len(self.running)
        self.share = told if self.share is None else min(self.share, told)
        self.tokens, self.probes = 0, 0

    def may_begin(self, now):
        has_place = self.share is None or len(self.running) < self.share
        has_token = self.tokens is None or (self.tokens > 0 and now <= self.tokens_until)
        return bool(self.waiting) and has_place and has_token and self.probes != 0


class ServiceMachine(RuleBasedStateMachine):
    """Several workers at one service of one store."""

    reopens = True

    def make(self):
        raise NotImplementedError

    @initialize(limits=LIMITS)
    def begin_all(self, limits):
        self.place = Path(tempfile.mkdtemp())
        self.clock = SteppedClock()
        self.store = self.make()
        self.workers, self.named, self.begun_at, self.parked, self.runs = {}, 0, [], {}, 0
        self.limits = {}
        self.change(limits)
        for _ in range(2):
            self.join()

    def teardown(self):
        if hasattr(self, "store"):
            self.drain()
            self.store.close()
            shutil.rmtree(self.place)

    @property
    def now(self):
        return self.clock.seconds

    def some(self, data):
        return self.workers[data.draw(st.sampled_from(sorted(self.workers)))]

    # -- what happens --------------------------------------------------------------------------------------------------

    @rule(limits=LIMITS)
    def change(self, limits):
        self.store.change_gate(SERVICE, "bank", GateChange(START, "ann", "set", limits))
        if limits.get("rate") != self.limits.get("rate"):
            self.begun_at = []
            for worker in self.workers.values():  # tokens of the former rate lapse
                worker.tokens = 0
        if limits.get("concurrency") != self.limits.get("concurrency"):
            for worker in self.workers.values():  # a change works within a second, so each asks
                self.asks(worker)
        self.limits = limits

    @rule()
    def join(self):
        if len(self.workers) < 4:
            self.named += 1
            worker = self.workers[f"w{self.named}"] = Worker(f"w{self.named}")
            assert self.store.renew_leases(WorkerInfo(worker.name))
            self.asks(worker)

    @rule(data=st.data(), count=st.integers(1, 4))
    def arrive(self, data, count):
        self.some(data).waiting += [self.now] * count

    @rule(data=st.data())
    def ask(self, data):
        self.asks(self.some(data))

    @rule(data=st.data(), is_written=st.booleans())
    def ask_without_an_answer(self, data, is_written):
        worker = self.some(data)
        if is_written:
            self.store.pass_gates(worker.name, [worker.ask(self.now)])
            worker.begun = worker.failures = worker.passed = worker.failed = 0
        worker.unanswered()

    def asks(self, worker):
        (grant,) = self.store.pass_gates(worker.name, [worker.ask(self.now)])
        assert grant.why != "lease", "a living worker is refused"
        worker.answered(grant, self.now)
        return grant

    @rule(data=st.data())
    def begin(self, data):
        self.begins(self.some(data))

    @rule(count=st.integers(1, 6))
    def begin_everywhere(self, count):
        for worker in self.workers.values():
            worker.waiting += [self.now] * count
            self.asks(worker)
            self.begins(worker)

    def begins(self, worker):
        while worker.may_begin(self.now):
            worker.waiting.pop(0)
            worker.running.append(worker.probes is not None)
            worker.begun += 1
            worker.tokens = None if worker.tokens is None else worker.tokens - 1
            worker.probes = None if worker.probes is None else worker.probes - 1
            self.begun_at.append(self.now)
            concurrency = self.limits.get("concurrency")
            assert concurrency is None or self.running() <= concurrency, "more attempts run than may"
            self.check_rate()

    @rule(data=st.data(), fails=st.booleans())
    def end(self, data, fails):
        worker = self.some(data)
        if worker.running:
            self.ends(worker, fails)

    def ends(self, worker, fails):
        is_probe = worker.running.pop()
        worker.passed += is_probe and not fails
        worker.failed += is_probe and fails
        worker.failures += not is_probe and fails

    @rule(data=st.data())
    def fail(self, data):
        """The service is unwell: all attempts of a worker fail, and others that have ended before."""
        worker = self.some(data)
        for _ in list(worker.running):
            self.ends(worker, fails=True)
        worker.failures += 3
        self.asks(worker)

    @rule(data=st.data(), answered=st.booleans())
    def die_with_a_probe(self, data, answered):
        """A worker gets probes and dies before it tells their outcome, or before it learns of them."""
        if "breaker" in self.limits and len(self.workers) > 1:
            self.fail(data)
            self.wait(12.0)
            worker = self.some(data)
            worker.waiting += [self.now] * 3
            (grant,) = self.store.pass_gates(worker.name, [worker.ask(self.now)])
            if answered:
                worker.answered(grant, self.now)
                self.begins(worker)
            del self.workers[worker.name]

    @rule(seconds=st.sampled_from([0.1, 0.4, 2.0, 12.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)
        for worker in self.workers:
            assert self.store.renew_leases(WorkerInfo(worker))

    @rule(data=st.data())
    def kill(self, data):
        """A process ends, with its attempts; the others see its lease run out, or its lock."""
        if len(self.workers) > 1:
            worker = self.some(data)
            del self.workers[worker.name]

    @rule()
    def give_up_the_dead(self):
        for _ in range(8):
            self.wait(self.store.lease_seconds / 3)
        for worker in self.workers:
            self.claims(worker, 0)

    @rule(data=st.data())
    def leave(self, data):
        if len(self.workers) > 1:
            worker = self.some(data)
            if not worker.running:
                del self.workers[worker.name]
                assert self.store.renew_leases(WorkerInfo(worker.name), leaving=True)

    @rule()
    def crash(self):
        """Every process ends, and another one opens the store."""
        if self.reopens:
            self.store.close()
            self.workers = {}
            self.store = self.make()
            self.join()
            self.give_up_the_dead()

    # -- runs that wait at the service ---------------------------------------------------------------------------------

    @rule(data=st.data(), delay=st.sampled_from([None, None, 3.0]), key=st.sampled_from([None, "a", "b"]))
    def park(self, data, delay, key):
        name, worker = f"r{self.runs:03}", self.some(data)
        self.runs += 1
        holder = started(self.store, name, worker.name, key=key, created_at=at(self.now))
        due = None if delay is None else self.now + delay
        fields = {"due_at": None if due is None else at(due), "wakes": ("go",), "service": "bank", "at": at(self.now)}
        assert holder.write(status=Status.WAITING, release=True, **fields).verdict is Verdict.DONE
        self.parked[name] = due

    @rule(data=st.data())
    def signal(self, data):
        if self.parked:
            name = data.draw(st.sampled_from(sorted(self.parked)))
            assert self.store.commit([Send(Signal(name, "go"))])[0].verdict is Verdict.DONE
            self.parked[name] = self.now

    @rule(data=st.data(), room=st.integers(0, 3), limit=st.integers(1, 4))
    def claim(self, data, room, limit):
        self.claims(self.some(data).name, room, limit)

    def claims(self, worker, room, limit=4):
        request = ClaimRequest(worker, frozenset({"digest"}), limit, rooms={"bank": room})
        found = self.store.claim_runs(request)
        due = {name for name, time in self.parked.items() if time is not None and time <= self.now}
        taken = {claim.run.id for claim in found.claims if claim.run.id in self.parked}
        for claim in found.claims:
            if claim.run.id in self.parked:
                assert claim.run.id in due or claim.service == "bank"
                del self.parked[claim.run.id]
            end = Holder(self.store, claim.run).write(status=Status.COMPLETED, release=True)
            assert end.verdict is Verdict.DONE
        by_room = [claim for claim in found.claims if claim.service == "bank"]
        assert len(by_room) <= room, "more runs are claimed than there is room for"
        if len(found.claims) < limit:
            assert due <= taken, "a run that is due is not claimed"
            left = set(self.parked) - due
            assert len(by_room) == room or not left, "a run that there is room for is not claimed"
            assert sum(one.runs for one in found.at_services) == len(left)

    # -- what holds ----------------------------------------------------------------------------------------------------

    def running(self):
        return sum(len(worker.running) for worker in self.workers.values())

    def check_rate(self):
        rate, times = self.limits.get("rate"), self.begun_at
        for first in range(len(times) if rate is not None else 0):
            window = times[-1] - times[first]
            most = rate["burst"] + rate["count"] / rate["per"] * (window + 1)
            assert len(times) - first <= most + 1e-3, (times[first:], rate)

    @invariant()
    def shares_are_within_the_limit(self):
        if hasattr(self, "store") and self.limits.get("concurrency") is not None:
            (gate,) = self.store.list_gates(SERVICE)
            held = {share.worker: share.held for share in gate.shares}
            for worker in self.workers.values():
                assert held[worker.name] >= len(worker.running), "an attempt runs without a place"
                assert worker.share is None or held[worker.name] >= worker.share, "a worker has more than its share"

    @invariant()
    def probes_are_few(self):
        breaker = getattr(self, "limits", {}).get("breaker")
        if breaker is not None:
            (gate,) = self.store.list_gates(SERVICE)
            assert len((gate.breaker or {}).get("probes", ())) <= max(breaker["probes"], 3)

    def drain(self):
        """Whatever waits begins in the end, at every worker: no place, token or probe has leaked."""
        self.change({"concurrency": 1, "rate": {"count": 5, "per": 1.0, "burst": 1}, "breaker": BREAKER})
        self.give_up_the_dead()
        first, *others = self.workers.values()
        rounds = 60 + 12 * sum(len(worker.waiting) for worker in self.workers.values())
        for _ in range(rounds):
            if not any(worker.waiting for worker in self.workers.values()) and not self.parked:
                break
            if any(worker.waiting for worker in others):
                first.waiting.append(self.now)  # the one that asks first never runs out of attempts
            for worker in self.workers.values():
                while worker.running:
                    self.ends(worker, fails=False)
                self.asks(worker)
                self.begins(worker)
                self.claims(worker.name, 1)
            self.wait(1.0)
        assert {name: worker.waiting for name, worker in self.workers.items() if worker.waiting} == {}
        assert self.parked == {}


BREAKER = {"failures": 9, "within": 20.0, "open_seconds": 10.0, "probes": 1, "successes": 1}


class MemoryService(ServiceMachine):
    reopens = False

    def make(self):
        return MemoryStore(clock=self.clock)


class SQLiteService(ServiceMachine):
    def make(self):
        return SQLiteStore(self.place / "runs.db", clock=self.clock, power_loss="may_lose_last")


class FilesService(ServiceMachine):
    def make(self):
        return FilesStore(self.place / "runs", clock=self.clock, power_loss="may_lose_last")


def _tested(machine, count):
    case = machine.TestCase
    case.settings = settings(
        max_examples=count, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestMemoryService = _tested(MemoryService, examples(40, 1000))
TestSQLiteService = _tested(SQLiteService, examples(20, 500))
TestFilesService = _tested(FilesService, examples(6, 100))
