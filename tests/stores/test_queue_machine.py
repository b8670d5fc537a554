"""A queue with limits beside a simple model: limits hold, nothing leaks, and whatever could begin does begin.

Workers die and processes end between any two writes. The model counts runs one by one, without an index.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from keepstep.errors import RunConflict
from keepstep.model import FINISHED, GateChange, Status, WorkerInfo
from keepstep.model.gate import QUEUE
from keepstep.ports import ClaimRequest, Create, Verdict
from keepstep.stores.files.store import FilesStore
from keepstep.stores.memory import MemoryStore
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import START, Holder, SteppedClock, at, queued
from tests.nightly import examples
from tests.postgres import empty_store

KEYS = st.sampled_from([None, None, "a", "b", "c"])
RATES = st.builds(lambda n, b: {"count": n, "per": 10.0, "burst": b}, st.integers(1, 5), st.integers(1, 3))
LIMITS = st.one_of(
    st.fixed_dictionaries({"concurrency": st.integers(0, 4)}),
    st.fixed_dictionaries({"per_key": st.integers(1, 2)}),
    st.fixed_dictionaries({"rate": RATES}),
    st.fixed_dictionaries(
        {"concurrency": st.integers(1, 4)},
        optional={"per_worker": st.integers(1, 3), "per_key": st.integers(1, 2), "rate": RATES},
    ),
)
ENDED = {*FINISHED, Status.SET_ASIDE}


class QueueMachine(RuleBasedStateMachine):
    """Several workers on one queue of one store."""

    reopens = True

    def make(self):
        raise NotImplementedError

    @initialize(limits=LIMITS)
    def begin(self, limits):
        self.place = Path(tempfile.mkdtemp())
        self.clock = SteppedClock()
        self.store = self.make()
        self.runs = {}  # id: [key, begun, held by, due, status]
        self.limits, self.begun_at, self.workers, self.named = {}, [], [], 0
        self.dedupes = {}  # by run
        self.change(limits)
        for _ in range(2):
            self.join()

    def teardown(self):
        if hasattr(self, "store"):
            self.drain()
            self.store.close()
            shutil.rmtree(self.place)

    # -- what happens --------------------------------------------------------------------------------------------------

    @rule(limits=LIMITS)
    def change(self, limits):
        self.store.change_gate(QUEUE, "mail", GateChange(START, "ann", "set", limits))
        if limits.get("rate") != self.limits.get("rate"):
            self.begun_at = []
        self.limits = limits

    @rule()
    def join(self):
        if len(self.workers) < 4:
            self.named += 1
            self.workers.append(f"w{self.named}")
            assert self.store.renew_leases(WorkerInfo(self.workers[-1]))

    @rule(keys=st.lists(KEYS, min_size=1, max_size=6), priority=st.integers(0, 1), delay=st.sampled_from([0, 0, 0, 5]))
    def start(self, keys, priority, delay):
        now, due = at(self.clock.seconds), at(self.clock.seconds + delay)
        for key in keys:
            name = f"r{len(self.runs):03}"
            run = queued(name, queue="mail", key=key, priority=priority, created_at=now, due_at=due)
            assert self.store.commit([Create(run)])[0].verdict is Verdict.DONE
            self.runs[name] = [key, False, None, self.clock.seconds + delay, Status.QUEUED, True]

    @rule(key=KEYS, dedupe=st.sampled_from(["d", "e"]))
    def start_unless_there(self, key, dedupe):
        """A start with a `dedupe` answers with the run that has it and has not finished."""
        name, now = f"r{len(self.runs):03}", at(self.clock.seconds)
        run = queued(name, queue="mail", key=key, created_at=now, due_at=now, dedupe=dedupe)
        twin = self.unfinished_with(dedupe)
        answer = self.store.commit([Create(run)])[0]
        if twin is None:
            assert answer.verdict is Verdict.DONE
            self.runs[name] = [key, False, None, self.clock.seconds, Status.QUEUED, True]
            self.dedupes[name] = dedupe
        else:
            assert (answer.verdict, answer.run.id) == (Verdict.EXISTS, twin)

    def unfinished_with(self, dedupe):
        """The run that has a `dedupe` and has not finished; a run that was set aside has not."""
        found = [name for name, its in self.dedupes.items() if its == dedupe and self.runs[name][4] not in FINISHED]
        assert len(found) <= 1, found
        return found[0] if found else None

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)
        for worker in self.workers:
            assert self.store.renew_leases(WorkerInfo(worker))

    @rule(data=st.data(), limit=st.integers(1, 6))
    def claim(self, data, limit):
        if self.workers:
            self.claim_for(data.draw(st.sampled_from(self.workers)), limit)

    @rule()
    def claim_everywhere(self):
        for worker in list(self.workers):
            self.claim_for(worker, 6)

    def claim_for(self, worker, limit):
        claims = self.store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), limit)).claims
        for claim in claims:
            run = self.runs[claim.run.id]
            assert run[2] is None or run[2] not in self.workers, "a living worker lost its run"
            assert run[2] is not None or run[3] is not None
            if run[5]:
                self.begun_at.append(self.clock.seconds)
            begins = not run[1]
            run[1:] = [True, worker, None, Status.RUNNING, False]
            if begins and run[0] is not None and self.limits.get("per_key") is not None:
                assert self.begun_of(run[0]) <= self.limits["per_key"], "a key has more runs than it may"
        if claims:
            self.check_places(worker)
        self.check_rate()
        if len(claims) < limit:
            assert self.could_begin(worker) == [], "a run could begin, and was not claimed"
        return claims

    @rule(data=st.data(), how=st.sampled_from(["end", "end", "fail", "aside", "park", "hand back", "pause"]))
    def release(self, data, how):
        held = sorted(name for name, run in self.runs.items() if run[2] in self.workers)
        if held:
            self.release_one(data.draw(st.sampled_from(held)), how)

    def release_one(self, name, how):
        status = {
            "end": Status.COMPLETED,
            "fail": Status.FAILED,
            "aside": Status.SET_ASIDE,
            "park": Status.WAITING,
            "hand back": Status.QUEUED,
            "pause": Status.PAUSED,
            "cancel": Status.CANCELLED,
        }[how]
        due = {"park": self.clock.seconds + 3, "hand back": self.clock.seconds}.get(how)
        holder = Holder(self.store, self.store.get_run(name))
        change = holder.change(
            rows=[], checksum="", status=status, release=True, due_at=None if due is None else at(due)
        )
        assert self.store.commit([change])[0].verdict is Verdict.DONE
        run = self.runs[name]
        run[2:5] = [None, due, status]
        if status in ENDED:
            run[1] = False

    @rule(data=st.data())
    def retry(self, data):
        """A person lets a run that has ended begin again: it waits for its key like any other."""
        ended = sorted(name for name, run in self.runs.items() if run[4] in (Status.FAILED, Status.SET_ASIDE))
        if ended and self.workers:
            name = data.draw(st.sampled_from(ended))
            request = ClaimRequest(self.workers[0], run=name, statuses=frozenset({Status.FAILED, Status.SET_ASIDE}))
            if self.runs[name][4] is Status.FAILED and self.unfinished_with(self.dedupes.get(name)) is not None:
                with pytest.raises(RunConflict, match="dedupe"):
                    self.store.claim_runs(request)
                return
            assert len(self.store.claim_runs(request).claims) == 1
            self.runs[name][2] = self.workers[0]
            self.release_one(name, "hand back")
            self.runs[name][1] = False

    @rule(data=st.data())
    def cancel(self, data):
        """A person cancels a run that has not begun: it needs no place, no key and no token."""
        waiting = sorted(name for name, run in self.runs.items() if run[5] and run[2] is None and run[4] not in ENDED)
        if waiting and self.workers:
            name = data.draw(st.sampled_from(waiting))
            request = ClaimRequest(self.workers[0], run=name, statuses=frozenset({Status.QUEUED}))
            assert len(self.store.claim_runs(request).claims) == 1
            self.runs[name][2] = self.workers[0]
            self.release_one(name, "cancel")

    @rule(data=st.data())
    def resume(self, data):
        paused = sorted(name for name, run in self.runs.items() if run[4] is Status.PAUSED)
        if paused and self.workers:
            name = data.draw(st.sampled_from(paused))
            request = ClaimRequest(self.workers[0], run=name, statuses=frozenset({Status.PAUSED}))
            assert len(self.store.claim_runs(request).claims) == 1
            begun = self.runs[name][1]
            self.runs[name][2] = self.workers[0]
            self.release_one(name, "hand back")
            self.runs[name][1] = begun

    @rule(data=st.data())
    def kill(self, data):
        """A worker falls silent; the others see its lease run out."""
        if len(self.workers) > 1:
            dead = data.draw(st.sampled_from(self.workers))
            self.workers.remove(dead)
            for _ in range(8):
                self.wait(self.store.lease_seconds / 3)

    @rule()
    def crash(self):
        """Every process ends, and another one opens the store."""
        if self.reopens:
            self.store.close()
            self.workers = []
            self.store = self.make()
            self.join()
            for _ in range(8):
                self.wait(self.store.lease_seconds / 3)

    # -- what holds ----------------------------------------------------------------------------------------------------

    def driven(self, worker=None):
        wanted = self.workers if worker is None else [worker]
        return sum(run[2] in wanted for run in self.runs.values())

    def begun_of(self, key):
        return sum(run[0] == key and run[1] for run in self.runs.values())

    def check_places(self, worker):
        """No claim leads beyond a limit; a limit that was lowered holds as places fall free."""
        concurrency, per_worker = self.limits.get("concurrency"), self.limits.get("per_worker")
        assert concurrency is None or self.driven() <= concurrency
        assert per_worker is None or self.driven(worker) <= per_worker

    def check_rate(self):
        rate, times = self.limits.get("rate"), self.begun_at
        for first in range(len(times) if rate is not None else 0):
            window = times[-1] - times[first]
            assert len(times) - first <= rate["burst"] + window * rate["count"] / rate["per"] + 1e-3, (times, rate)

    def could_begin(self, worker):
        """The runs that the worker could take now, by the rules alone."""
        limits, now = self.limits, self.clock.seconds
        if limits.get("concurrency") is not None and self.driven() >= limits["concurrency"]:
            return []
        if limits.get("per_worker") is not None and self.driven(worker) >= limits["per_worker"]:
            return []
        found = []
        for name, (key, begun, held_by, due, status, fresh) in self.runs.items():
            is_orphan = held_by is not None and held_by not in self.workers
            is_free = held_by is None and due is not None and due <= now and status not in ENDED
            if is_orphan:
                found.append(name)
            elif is_free and status is not Status.PAUSED:
                has_room = (
                    key is None or begun or limits.get("per_key") is None or self.begun_of(key) < limits["per_key"]
                )
                # Without a token a claim does not look behind keys, where a retried run may wait.
                lacks_token = limits.get("rate") is not None and (fresh or (key is not None and not begun))
                if has_room and not lacks_token:
                    found.append(name)
        return found

    def drain(self):
        """Without a limit on beginnings, everything that is open ends: no place, key or token has leaked."""
        self.change({"concurrency": 2, "per_key": 1, "rate": {"count": 5, "per": 1.0, "burst": 5}})
        if not self.workers:
            self.join()
        worker = self.workers[0]
        for name in [name for name, run in self.runs.items() if run[2] in self.workers]:
            self.release_one(name, "end")
        for other in list(self.workers[1:]):
            self.store.renew_leases(WorkerInfo(other), leaving=True)
            self.workers.remove(other)
        for _ in range(6 * len(self.runs) + 20):
            self.wait(1.0)
            for claim in self.store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), 2)).claims:
                self.runs[claim.run.id][1:] = [True, worker, None, Status.RUNNING, False]
                self.release_one(claim.run.id, "end")
        held_by_pause = {run[0] for run in self.runs.values() if run[4] is Status.PAUSED and run[1]}
        open_runs = {
            name
            for name, run in self.runs.items()
            if run[4] not in ENDED and run[4] is not Status.PAUSED and (run[0] is None or run[0] not in held_by_pause)
        }
        assert open_runs == set()


class MemoryQueue(QueueMachine):
    reopens = False

    def make(self):
        return MemoryStore(clock=self.clock)


class SQLiteQueue(QueueMachine):
    def make(self):
        return SQLiteStore(self.place / "runs.db", clock=self.clock, power_loss="may_lose_last")


class FilesQueue(QueueMachine):
    def make(self):
        return FilesStore(self.place / "runs", clock=self.clock, power_loss="may_lose_last")


class PostgresQueue(QueueMachine):
    @initialize(limits=LIMITS)
    def begin(self, limits):
        self.schema = empty_store("queue_machine")
        self.url = self.schema.__enter__()
        super().begin(limits)

    def teardown(self):
        super().teardown()
        if hasattr(self, "schema"):
            self.schema.__exit__(None, None, None)

    def make(self):
        return PostgresStore(self.url, clock=self.clock)


def _tested(machine, count):
    case = machine.TestCase
    case.settings = settings(
        max_examples=count, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    return case


TestMemoryQueue = _tested(MemoryQueue, examples(40, 1000))
TestSQLiteQueue = _tested(SQLiteQueue, examples(25, 500))
TestFilesQueue = _tested(FilesQueue, examples(8, 100))
TestPostgresQueue = _tested(PostgresQueue, examples(2, 50))
