"""Every store against the model: whatever is done to both, both answer and hold the same."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keepstep.model import Kind, Run, RunQuery, Signal, Status, WorkerInfo
from keepstep.ports import Advance, ClaimRequest, Create, Row, Send, Verdict
from keepstep.stores.files.store import FilesStore
from keepstep.stores.memory import MemoryStore
from keepstep.stores.postgres.store import PostgresStore
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.store_contract import SteppedClock, at
from tests import nightly
from tests.postgres import empty_store
from tests.stores.model import ModelStore

RUNS = st.sampled_from(["a", "b", "c", "d", "é"])
WORKFLOWS = st.sampled_from(["digest", "review"])
QUEUES = st.sampled_from(["default", "mail", "ä"])
WORKERS = st.sampled_from(["w1", "w2", "w3"])
NAMES = st.sampled_from(["go", "stop", "ks:cancel"])
SECONDS = st.sampled_from([0.0, 0.5, 3.0, 14.0, 16.0, 100.0])
STATUSES = st.sampled_from(list(Status))
PAYLOADS = st.sampled_from([b"true", b'{"n":1}', b'"\xc3\xa9"', b"[]"])
MOMENTS = st.none() | st.integers(-100, 1000).map(lambda tenths: at(tenths / 10))
WAKES = st.lists(NAMES, max_size=2, unique=True).map(tuple)
#: Ids may only be used by the process that first used them, so a worker that comes back has a new one.
GENERATIONS = 50
#: How many histories are tried. Set it higher to find rarer things, and to have what is found made small, which takes
#: minutes.
EXAMPLES = nightly.examples(24, nightly=40)
PHASES = [phase for phase in Phase if phase is not Phase.shrink or "KEEPSTEP_EXAMPLES" in os.environ]


@st.composite
def creates(draw):
    leased = draw(st.booleans())
    rows = (
        [Row(n, Kind.STEP_COMPLETED, draw(PAYLOADS)) for n in range(1, draw(st.integers(1, 2)) + 1)] if leased else []
    )
    run = Run(
        id=draw(RUNS),
        workflow=draw(WORKFLOWS),
        version=draw(st.sampled_from(["1", "2"])),
        status=Status.RUNNING if leased else draw(st.sampled_from([Status.QUEUED, Status.WAITING])),
        created_at=at(draw(st.integers(0, 50))),
        input=draw(PAYLOADS),
        parent=draw(st.none() | RUNS),
        queue=draw(QUEUES),
        key=draw(st.none() | st.just("k")),
        priority=draw(st.integers(-12, 12)),
        tags=draw(st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from(["1", "2"]))),
        worker=draw(WORKERS) if leased else None,
        epoch=1 if leased else 0,
        seq=len(rows),
        checksum="first" if leased else "",
        due_at=None if leased else draw(MOMENTS),
        wakes=() if leased else draw(WAKES),
    )
    return Create(run, rows)


sends = st.builds(
    lambda run, name, payload, identity, optional, room: Send(Signal(run, name, payload, id=identity), optional, room),
    RUNS,
    NAMES,
    PAYLOADS,
    st.sampled_from(["", "", "i", "j"]),
    st.sampled_from([False, False, True]),
    st.sampled_from([None, None, 0, 1, 2]),
)

#: An advance whose head is filled in when it is made: what it gets wrong, and what it asks for.
plans = st.fixed_dictionaries(
    {
        "run": RUNS,
        "wrong": st.sampled_from(["", "", "", "", "", "worker", "epoch", "after", "gap"]),
        "rows": st.integers(0, 3),
        "status": st.none() | STATUSES,
        "release": st.booleans(),
        "due_at": MOMENTS,
        "wakes": WAKES,
        "seen": st.sampled_from([None, None, "all", "fewer"]),
        "progress": st.booleans(),
        "at": st.none() | st.integers(0, 100).map(at),
        "creates": st.lists(creates(), max_size=2),
        "sends": st.lists(sends, max_size=2),
        "outbox": st.booleans(),
        "signals_read": st.none() | st.integers(0, 3),
        "trim": st.none() | st.none() | st.integers(0, 9),
    }
)


class Stores(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="keepstep-"))
        self.clock = SteppedClock()
        self.model = ModelStore(clock=self.clock)
        self.store = self.opened()
        self.generation = 0
        self.serial = 0

    def opened(self):
        return SQLiteStore(self.folder / "runs.db", clock=self.clock, power_loss="may_lose_last")

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.folder)

    def worker(self, name):
        return f"{name}.{self.generation}"

    def both(self, do):
        one, two = do(self.model), do(self.store)
        assert one == two
        return one

    def own(self, create):
        """The create as this generation's workers make it."""
        run = create.run
        return Create(replace(run, worker=self.worker(run.worker)), create.rows) if run.worker else create

    # -- what is done ------------------------------------------------------------------------------------------------

    @initialize()
    def enrol_all(self):
        for name in ("w1", "w2", "w3"):
            assert self.both(lambda store, name=name: store.renew_leases(WorkerInfo(self.worker(name)))) is True

    @rule(changes=st.lists(creates() | sends, min_size=1, max_size=4))
    def create_and_send(self, changes):
        changes = [self.own(change) if isinstance(change, Create) else change for change in changes]
        self.both(lambda store: store.commit(changes))

    @rule(chosen=st.lists(plans, min_size=1, max_size=3))
    def advance(self, chosen):
        changes = [change for plan in chosen if (change := self.planned(plan)) is not None]
        answers = self.both(lambda store: store.commit(changes))
        for change, answer in zip(changes, answers, strict=True):
            if answer.verdict is Verdict.DONE:
                assert answer.seq == change.after + len(change.rows)

    def planned(self, plan):
        run = self.model.get_run(plan["run"])
        if run is None:
            return None
        wrong = plan["wrong"]
        after = run.seq - 1 if wrong == "after" else run.seq
        first = after + (2 if wrong == "gap" else 1)
        self.serial += 1
        return Advance(
            run=run.id,
            worker="nobody" if wrong == "worker" or run.worker is None else run.worker,
            epoch=run.epoch + (wrong == "epoch"),
            after=after,
            rows=[Row(first + n, Kind.STEP_COMPLETED, b"%d" % self.serial, b"body") for n in range(plan["rows"])],
            checksum=f"sum{self.serial}",
            at=plan["at"],
            status=plan["status"],
            release=plan["release"],
            due_at=plan["due_at"],
            wakes=plan["wakes"],
            signals_seen={None: None, "all": run.signals, "fewer": run.signals - 1}[plan["seen"]],
            progress=plan["progress"],
            creates=[self.own(create) for create in plan["creates"]] if plan["outbox"] else (),
            sends=plan["sends"] if plan["outbox"] else (),
            signals_read=plan.get("signals_read"),
            trim=plan.get("trim"),
        )

    @rule(run=RUNS, rows=st.integers(1, 2))
    def extend(self, run, rows):
        """The common change, often enough to matter."""
        plan = {"run": run, "wrong": "", "rows": rows, "status": None, "release": False, "due_at": None, "wakes": ()}
        change = self.planned({**plan, "seen": None, "progress": True, "at": None, "outbox": False})
        if change is not None:
            self.both(lambda store: store.commit([change]))

    @rule(
        worker=WORKERS,
        workflows=st.frozensets(WORKFLOWS, max_size=2),
        limit=st.integers(0, 4),
        versions=st.dictionaries(WORKFLOWS, st.sampled_from(["1", "2"]), max_size=1),
        queues=st.none() | st.frozensets(QUEUES),
    )
    def claim(self, worker, workflows, limit, versions, queues):
        request = ClaimRequest(self.worker(worker), workflows, limit, versions=versions, queues=queues)
        self.both(lambda store: store.claim_runs(request))

    @rule(worker=WORKERS, run=RUNS, statuses=st.frozensets(STATUSES))
    def claim_by_name(self, worker, run, statuses):
        request = ClaimRequest(self.worker(worker), run=run, statuses=statuses)
        self.both(lambda store: store.claim_runs(request))

    @rule(worker=WORKERS, leaving=st.sampled_from([False, False, False, True]))
    def renew(self, worker, leaving):
        info = WorkerInfo(self.worker(worker), "host", 7, workflows=("digest",), progress={"a": b"1"})
        self.both(lambda store: store.renew_leases(info, leaving=leaving))

    @rule(seconds=SECONDS)
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def reboot(self):
        self.clock.boot_id += "+"

    @rule(runs=st.lists(RUNS, max_size=3))
    def delete(self, runs):
        self.both(lambda store: store.delete_runs(runs))

    @precondition(lambda self: self.generation < GENERATIONS)
    @rule()
    def kill_and_open_again(self):
        self.store.close()  # which lets go of the locks, as a death does
        for worker in self.model.list_workers():
            self.model.mark_dead(worker.id)
        self.store = self.opened()
        self.generation += 1
        self.enrol_all()

    # -- what is read ------------------------------------------------------------------------------------------------

    @rule(
        status=st.frozensets(STATUSES, max_size=3),
        workflow=st.none() | WORKFLOWS,
        parent=st.none() | RUNS,
        tags=st.dictionaries(st.sampled_from(["x", "y"]), st.sampled_from(["1", "2"]), max_size=1),
        before=MOMENTS,
        updated=MOMENTS,
        limit=st.integers(1, 4),
    )
    def list_pages(self, *, status, workflow, parent, tags, before, updated, limit):
        query = RunQuery(
            workflow, status, parent, tags=tags, created_before=before, updated_before=updated, limit=limit
        )
        one, two = self.model.list_runs(query), self.store.list_runs(query)
        while True:
            assert one.runs == two.runs
            assert (one.next is None) == (two.next is None)
            if one.next is None:
                return
            one = self.model.list_runs(replace(query, after=one.next))
            two = self.store.list_runs(replace(query, after=two.next))

    @rule(worker=WORKERS, back=st.integers(0, 3))
    def news(self, worker, back):
        cursor = max(self.model.news("", 0).cursor - back, 0)

        def ask(store):
            news = store.news(self.worker(worker), cursor)
            return news.cursor, news.runs

        self.both(ask)

    @invariant()
    def hold_the_same(self):
        for run in ("a", "b", "c", "d", "é"):
            self.both(lambda store, run=run: store.get_run(run))
            self.both(lambda store, run=run: store.list_checkpoints(run))
            self.both(lambda store, run=run: store.list_signals(run))
        self.both(lambda store: store.list_workers())

    @invariant()
    def every_run_has_a_reason_to_be_as_it_is(self):
        for run in self.store.list_runs(RunQuery()).runs:
            assert (run.worker is not None) or not run.status.active
            if run.status is Status.QUEUED:
                assert run.worker is not None or run.due_at is not None
            rows = self.store.list_checkpoints(run.id)
            kept = [seq for seq in range(1, run.seq + 1) if seq == 1 or seq >= run.kept_from]
            assert [row.seq for row in rows] == kept
            assert [signal.seq for signal in self.store.list_signals(run.id)] == list(range(1, run.signals + 1))


class MemoryStores(Stores):
    def opened(self):
        return MemoryStore(clock=self.clock)

    @precondition(lambda self: self.generation < GENERATIONS)
    @rule()
    def kill_and_open_again(self):
        for worker in self.model.list_workers():
            self.both(lambda store, worker=worker: store.mark_dead(worker.id))
        self.generation += 1
        self.enrol_all()


class FilesStores(Stores):
    def opened(self):
        return FilesStore(self.folder / "runs", clock=self.clock, power_loss="may_lose_last")

    @rule(worker=WORKERS, back=st.just(0))
    def news(self, worker, back):
        """Positions are the store's own; from the beginning both name the same runs."""
        self.both(lambda store: store.news(self.worker(worker), back).runs)

    @rule()
    def lose_the_index(self):
        self.store.close()
        for worker in self.model.list_workers():
            self.model.mark_dead(worker.id)
        shutil.rmtree(self.folder / "runs" / "index", ignore_errors=True)
        self.store = self.opened()
        self.generation += 1
        self.enrol_all()

    @invariant()
    def has_no_flaw(self):
        assert self.store.check() == []


class PostgresStores(Stores):
    def __init__(self):
        with empty_store() as self.url:
            super().__init__()

    def opened(self):
        return PostgresStore(self.url, clock=self.clock)

    @rule(worker=WORKERS, back=st.just(0))
    def news(self, worker, back):
        """Positions are the store's own; from the beginning both name the same runs."""
        self.both(lambda store: store.news(self.worker(worker), back).runs)

    @invariant()
    def has_no_flaw(self):
        assert self.store.check() == []


def run(machine, examples):
    machine.TestCase.settings = settings(
        max_examples=examples,
        stateful_step_count=30,
        deadline=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    machine.TestCase().runTest()


def test_memory_does_what_the_model_does():
    run(MemoryStores, EXAMPLES)


def test_sqlite_does_what_the_model_does():
    run(Stores, EXAMPLES)


def test_files_do_what_the_model_does():
    run(FilesStores, EXAMPLES // 2)


def test_postgres_does_what_the_model_does():
    run(PostgresStores, EXAMPLES // 8)
