"""Real processes on one SQLite file: killed, stopped, racing each other, and in the company of poison."""

from __future__ import annotations

import asyncio
import random
import signal
import statistics
import threading
import time
from contextlib import ExitStack, suppress

import apsw
import pytest

import keepstep as ks
from keepstep.engine.engine import Engine
from keepstep.errors import StoreFull, StoreUnavailable
from keepstep.model import Claims, Kind, Run, RunQuery, Status
from keepstep.ports import Create, SystemClock, WouldBlock, instant
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.faults.recorder import Recorder, repeated_in_store
from tests.nightly import cases, examples
from tests.soak import LOAD, soak
from tests.soak_stores import STORES, FewPages, SQLite

from . import programs
from .programs import Died, Process, Refused

pytestmark = pytest.mark.crash

#: So that a lease runs out within a test; a heartbeat comes three times as often.
LEASE = 1.0
#: Kills of the whole process are not the fault of a run, however many there are.
PATIENT = {"recovery_limit": 10_000}


@pytest.fixture
def world(tmp_path):
    with World(tmp_path) as made:
        yield made


class World:
    """A database, an effects file, and the processes that share them."""

    def __init__(self, folder):
        self.path, self.folder = folder / "runs.db", folder
        self.effects = Recorder(folder / "effects")
        programs.record_to(folder / "effects")
        self.stack = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()
        self.effects.close()

    def process(self, **options):
        return self.stack.enter_context(Process(self.path, self.effects.path, **options))

    def processes(self, count, **options):
        made = [self.process(**options) for _ in range(count)]
        return [one.ready() for one in made]

    def touch(self, name):
        (self.folder / name).touch()

    def wait_for_body(self, run, step, count=1):
        return wait_for_body(self.effects, run, step, count)

    def look(self, work):
        """Ask the store something, as a process that drives nothing."""

        async def main():
            async with Engine(self.path, worker=False) as engine:
                return await work(engine)

        return asyncio.run(main())

    def run(self, run_id):
        async def ask(engine):
            return await (await engine.get(run_id)).run()

        return self.look(ask)

    def wait_for_checkpoint(self, run_id, step, seconds=60.0):
        async def ask(engine):
            return [one.step for one in await (await engine.get(run_id)).checkpoints()]

        end = time.monotonic() + seconds
        while step not in self.look(ask):
            assert time.monotonic() < end, f"{run_id} never recorded {step}"

    def judge(self, *, finished=True):
        """Every run has ended, its chain is whole, and no step ran again after its checkpoint."""

        async def ask(engine):
            runs = (await engine.list(RunQuery(limit=1000))).runs
            return runs, {run.id: await (await engine.get(run.id)).checkpoints() for run in runs}

        runs, histories = self.look(ask)
        for run in runs:
            if finished:
                assert run.status.finished, f"{run.id} is {run.status}"
            assert [one.seq for one in histories[run.id]] == list(range(1, run.seq + 1))
            done = [one.step for one in histories[run.id] if one.kind is Kind.STEP_COMPLETED]
            assert len(done) == len(set(done)), f"a step of {run.id} succeeded twice"
        assert not repeated_in_store(self.effects.effects(), histories)
        return runs


def wait_for_body(effects, run, step, count=1, seconds=60.0):
    """Wait until so many bodies of a step have begun; when the last of them was seen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = effects.bodies(run, step)
        if len(found) >= count:
            return time.monotonic()
        time.sleep(0.002)
    raise AssertionError(f"only {len(found)} of {count} bodies of {step} began in run {run}")


def send_unless_finished(process, run, name, payload):
    """Send what only counts once; it may be too late."""
    try:
        process.ask("signal", run_id=run, name=name, payload=payload, id=name)
    except Refused as refusal:
        if "AlreadyFinished" not in str(refusal):
            raise


# -- killed ------------------------------------------------------------------------------------------------------------


#: Kills at random moments: each costs a start of a process.
KILLS = examples(14, nightly=50)


@pytest.mark.slow
def test_kills_at_random_moments_change_no_result(world):
    """A program that is killed again and again, and started again each time, comes to the same end."""
    draw = random.Random(7)
    runs = {f"mixed-{n}": 3 + 6 + 5 + 3 for n in range(4)} | {f"working-{n}": 55 for n in range(2)}
    kills = 0
    while True:
        process = world.process(**PATIENT)
        try:
            process.ready()
            for run in runs:
                name = run.partition("-")[0]
                process.ask("start", workflow=name, args=[3, 0.02] if name == "mixed" else [10, 0.03], run_id=run)
                if name == "mixed":
                    send_unless_finished(process, run, "bonus", 5)
            if kills < KILLS:
                time.sleep(draw.uniform(0.0, 0.12))
                process.send(signal.SIGKILL)
                kills += 1
            for run, expected in runs.items():
                assert process.ask("result", run_id=run) == expected
        except (Died, BrokenPipeError):
            process.kill()
            continue
        break
    assert kills == KILLS
    assert len(world.judge()) == len(runs) + 4


def test_a_killed_process_is_taken_over_at_once(world):
    """The idle neighbour sees that the owner is dead; it does not wait until the lease has run out."""
    seconds = []
    idle = world.process(lease_seconds=600.0).ready()
    for number in range(3):
        owner = world.process(workflows=None, lease_seconds=600.0).ready()
        owner.ask("start", workflow="holding", args=[str(world.folder / "go")], run_id=f"r{number}")
        world.wait_for_body(f"r{number}", "hold")
        killed_at = time.monotonic()
        owner.send(signal.SIGKILL)
        seconds.append(world.wait_for_body(f"r{number}", "hold", 2) - killed_at)
        owner.kill()
    world.touch("go")
    for number in range(3):
        assert idle.ask("result", run_id=f"r{number}")[0] == 1
    print(f"taken over after {statistics.median(seconds):.3f} s in the median, {max(seconds):.3f} s at worst")
    assert max(seconds) < 60.0, "a tenth of the lease"
    world.judge()


# -- stopped -----------------------------------------------------------------------------------------------------------


def test_a_killed_dag_goes_on_with_what_was_under_way_alone(world):
    """Its finished branch is not performed again, what was skipped stays so, and the join is given the same."""
    owner, other = world.processes(2)
    gate = str(world.folder / "gate")
    owner.ask("start", workflow="assembling", args={"total": 1, "number": 2, "path": gate}, run_id="r")
    world.wait_for_body("r", "two")
    world.wait_for_body("r", "held")
    world.wait_for_checkpoint("r", "two#1")
    owner.send(signal.SIGKILL)
    world.wait_for_body("r", "held", 2)
    world.touch("gate")
    assert other.ask("result", run_id="r") == {"assembled": [5, None]}
    world.judge()
    began = {step: len(world.effects.bodies("r", step)) for step in ("one", "two", "held", "assembled", "left_out")}
    assert began == {"one": 1, "two": 1, "held": 2, "assembled": 1, "left_out": 0}


def test_a_zombie_starts_nothing_and_writes_nothing(world):
    """A process that was stopped past its lease wakes up: its run belongs to another now, and is finished."""
    zombie, heir = world.processes(2, lease_seconds=LEASE)
    zombie.ask("start", workflow="holding", args=[str(world.folder / "go")], run_id="r")
    world.wait_for_body("r", "hold")
    name = zombie.ask("worker")
    zombie.send(signal.SIGSTOP)
    world.wait_for_body("r", "hold", 2)
    world.touch("go")
    assert heir.ask("result", run_id="r")[2:] == [2, 3]
    finished = world.run("r")
    zombie.send(signal.SIGCONT)
    assert zombie.ask("result", run_id="r")[2:] == [2, 3]
    # It is of use again, under a new name.
    zombie.ask("start", workflow="working", args=[3, 0.0], run_id="later")
    assert zombie.ask("result", run_id="later") == 6
    begun = [(effect.step, effect.worker == name) for effect in world.effects.bodies("r")]
    assert begun == [("add#1", True), ("hold#1", True), ("hold#1", False), ("add#2", False), ("add#3", False)]
    assert world.run("r") == finished, "the zombie wrote to a run that was no longer its own"
    world.judge()


def test_a_zombie_does_not_begin_the_attempt_it_was_waiting_to_make(world):
    zombie, heir = world.processes(2, lease_seconds=LEASE)
    zombie.ask("start", workflow="backing_off", args=[], run_id="r")
    world.wait_for_body("r", "fails_once", 5)
    name = zombie.ask("worker")
    zombie.send(signal.SIGSTOP)
    assert heir.ask("result", run_id="r") == [2] * 5
    zombie.send(signal.SIGCONT)
    assert zombie.ask("result", run_id="r") == [2] * 5
    zombie.ask("start", workflow="working", args=[3, 0.0], run_id="later")
    assert zombie.ask("result", run_id="later") == 6
    assert [effect.attempt for effect in world.effects.bodies("r") if effect.worker == name] == [1] * 5
    assert len(world.effects.bodies("r")) == 10


def test_a_short_stop_loses_no_lease(world):
    sleeper, other = world.processes(2, lease_seconds=60.0)
    sleeper.ask("start", workflow="holding", args=[str(world.folder / "go")], run_id="r")
    world.wait_for_body("r", "hold")
    sleeper.send(signal.SIGSTOP)
    other.ask("start", workflow="working", args=[10, 0.03], run_id="neighbour")
    assert other.ask("result", run_id="neighbour") == 55
    sleeper.send(signal.SIGCONT)
    world.touch("go")
    assert other.ask("result", run_id="r")[2:] == [2, 3]
    assert world.run("r").epoch == 1
    assert len(world.effects.bodies("r", "hold")) == 1


def test_process_stopped_in_a_transaction_is_named_to_the_others(world):
    stopped, other = world.processes(2, busy_seconds=0.3)
    stopped.tell("start", workflow="stopping", args=[], run_id="stopped")
    stopped.wait_until_stopped()
    with pytest.raises(Refused, match=rf"StoreUnavailable.*process {stopped.pid}, which is stopped"):
        other.ask("start", workflow="working", args=[3, 0.0], run_id="r")
    stopped.send(signal.SIGCONT)
    assert stopped.answer() is None
    with suppress(Refused):  # the step has failed if the stop lasted longer than a transaction may
        stopped.ask("result", run_id="stopped")
    other.ask("start", workflow="working", args=[3, 0.0], run_id="r")
    assert other.ask("result", run_id="r") == 6
    assert world.run("stopped").status is not Status.SET_ASIDE
    assert len(world.effects.bodies("stopped", "stop_inside")) == 1


# -- in company --------------------------------------------------------------------------------------------------------


def test_a_second_process_never_takes_a_live_run(world):
    lease = 2 * LEASE  # or a busy machine might keep a heartbeat back for so long
    owner = world.process(lease_seconds=lease).ready()
    owner.ask("start", workflow="holding", args=[str(world.folder / "go")], run_id="r")
    world.wait_for_body("r", "hold")
    others = world.processes(2, lease_seconds=lease)
    for number, other in enumerate(others):  # both claim, and claim again, for longer than a lease lasts
        other.ask("start", workflow="working", args=[int(1.2 * lease / 0.05), 0.05], run_id=f"busy-{number}")
    for number, other in enumerate(others):
        other.ask("result", run_id=f"busy-{number}")
    world.touch("go")
    assert owner.ask("result", run_id="r")[2:] == [2, 3]
    run = world.run("r")
    assert (run.epoch, run.recoveries) == (1, 0)
    assert len(world.effects.bodies("r")) == 4
    world.judge()


def test_five_processes_that_start_the_same_runs_execute_each_once(world):
    processes = world.processes(5)
    at = time.time() + 0.3
    ids = [f"r{number}" for number in range(20)]
    for process in processes:
        process.tell("start_many", workflow="working", args=[3, 0.001], ids=ids, at=at)
    for process in processes:
        assert process.answer() == [6] * 20
    assert set(world.effects.counts().values()) == {1}
    assert len(world.judge()) == 20


def test_five_workers_that_race_for_queued_runs_execute_each_once(world):
    async def queue(engine):
        for number in range(40):
            await engine.start(programs.working, 3, 0.05, run_id=f"r{number}")

    processes = world.processes(
        5, max_runs=4
    )  # one alone would need ten rounds, and the others look four times a second
    world.look(queue)
    for process in processes:
        for number in range(40):
            assert process.ask("result", run_id=f"r{number}") == 6
    assert set(world.effects.counts().values()) == {1}
    assert len({effect.worker for effect in world.effects.bodies()}) > 1, "the work was not shared"
    world.judge()


def test_five_processes_that_resume_and_signal_one_run_move_it_once(world):
    processes = world.processes(5)
    processes[0].ask("start", workflow="pausing", args=[], run_id="r")
    processes[0].ask("steer", run_id="r", act="pause")
    world.look(lambda engine: _until(engine, "r", Status.PAUSED))
    at = time.time() + 0.3
    for process in processes:
        process.tell("steer", run_id="r", act="resume", at=at)
    for process in processes:
        process.answer()
    for process in processes:
        send_unless_finished(process, "r", "go", "gone")
    assert processes[3].ask("result", run_id="r") == [2, "gone", 4]
    assert set(world.effects.counts().values()) == {1}
    world.judge()


async def _until(engine, run_id, status):
    assert await programs.until(await engine.get(run_id), status) is status


def test_run_answers_five_processes_at_once(world):
    processes = world.processes(5)
    processes[0].ask("start", workflow="chat", args=[15], run_id="r")
    at = time.time() + 0.3
    for number, process in enumerate(processes):
        process.tell("ask_many", run_id="r", numbers=[10 * number + one for one in range(3)], at=at)
    answers = [answer for process in processes for answer in process.answer()]
    heard = processes[1].ask("result", run_id="r")
    assert sorted(heard) == sorted(10 * number + one for number in range(5) for one in range(3))
    assert sorted(answers) == [[place, message] for place, message in enumerate(heard)]
    assert set(world.effects.counts().values()) == {1}


def test_a_signal_from_another_process_wakes_a_run_soon(world):
    owner, other = world.processes(2)
    owner.ask("start", workflow="listening", args=[20], run_id="r")
    for number in range(20):
        other.ask("ping", run_id="r")
        world.wait_for_body("r", "hear", number + 1)
    seconds = owner.ask("result", run_id="r")
    print(f"a signal was heard after {statistics.median(seconds) * 1000:.1f} ms in the median")
    assert statistics.median(seconds) < 0.5


# -- in bad company ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_only_the_run_that_kills_its_workers_is_set_aside(world):
    """Twenty innocent runs are in the same process each time that the culprit kills it."""
    innocents = [f"innocent-{number}" for number in range(20)]
    deaths = 0
    while True:
        process = world.process()
        try:
            process.ready()
            for run in innocents:
                process.ask("start", workflow="working", args=[1, 0.25], run_id=run)
            process.ask("start", workflow="culprit", args=[0.12], run_id="culprit")
            with pytest.raises(Refused, match=r"RunSetAside.*died 3 times"):
                process.ask("result", run_id="culprit", timeout=60)
            for run in innocents:
                assert process.ask("result", run_id=run) == 1
            process.ask("start", workflow="working", args=[2, 0.0], run_id="next")
            assert process.ask("result", run_id="next") == 3
        except (Died, BrokenPipeError):
            process.kill()
            deaths += 1
            assert deaths < 10
            continue
        break
    assert deaths == 3
    assert len(world.effects.bodies("culprit")) == 3
    world.judge(finished=False)


class Poison(BaseException):
    """What no one should raise."""


def raising(where, error):
    """A workflow that raises an error in some place."""

    async def leave():
        await asyncio.sleep(0)
        raise error("poison")

    async def bad_group():
        async with asyncio.TaskGroup() as group:
            group.create_task(leave())

    @ks.step
    async def bad_task():
        await asyncio.create_task(leave())

    def bad(*_):
        raise error("poison")

    ways = {
        "a step": ks.step(leave),
        "a thread": ks.step(bad),
        "a transaction": ks.step(bad, name="pay", transactional=True),
        "the workflow": leave,
        "a branch": lambda: asyncio.create_task(leave()),
        "a group": bad_group,
        "a task of a step": bad_task,
    }

    @ks.workflow
    async def poisoned():
        await ways[where]()

    return ks.workflow(bad, name="thread") if where == "a def workflow" else poisoned


@pytest.mark.parametrize("error", [Poison, SystemExit, GeneratorExit])
@pytest.mark.parametrize(
    "where",
    [
        "a step",
        "a thread",
        "a transaction",
        "the workflow",
        "a branch",
        "a group",
        "a task of a step",
        "a def workflow",
    ],
)
def test_code_that_raises_a_base_exception_stops_no_worker(error, where, tmp_path):
    poisoned = raising(where, error)

    async def main():
        programs.record_to(tmp_path / "effects")
        async with ks.open(tmp_path / "runs.db") as engine:
            bad = await engine.start(poisoned, run_id="bad")
            with pytest.raises(ks.RunFailed) as caught:
                await bad.result(timeout=60)
            assert error.__name__ in caught.value.error.traceback
            assert where == "a group" or error.__name__ in str(caught.value)
            good = await engine.start(programs.sequence, 3)
            assert await good.result(timeout=60) == 6

    asyncio.run(main())


def _damage(path, *statements):
    db = apsw.Connection(str(path))
    for statement in statements:
        db.execute(statement)
    db.close()


DAMAGES = {
    "an edited record": "UPDATE keepstep_checkpoint SET record = replace(record, '\"value\":1', '\"value\":2')"
    " WHERE run = 'bad' AND seq = 2",
    "an unreadable record": "UPDATE keepstep_checkpoint SET record = '{' WHERE run = 'bad' AND seq = 2",
    "a missing record": "DELETE FROM keepstep_checkpoint WHERE run = 'bad' AND seq = 2",
    "a missing end": "DELETE FROM keepstep_checkpoint WHERE run = 'bad' AND seq = 3",
    "a nonsense head": "UPDATE keepstep_head SET checksum = 'x', seq = 7, due_at = 0 WHERE run = 'bad'",
    "an unreadable input": "UPDATE keepstep_run SET input = '{' WHERE id = 'bad'",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_set_aside_and_stops_no_worker(damage, tmp_path):
    path = tmp_path / "runs.db"

    async def main():
        programs.record_to(tmp_path / "effects")
        async with ks.open(path, linger_seconds=0.01) as engine:
            bad = await engine.start(programs.waits_in_between, run_id="bad")
            await programs.until(bad, Status.WAITING)
        _damage(path, DAMAGES[damage])
        async with ks.open(path) as engine:
            good = await engine.start(programs.sequence, 3)
            await engine.signal("bad", "go")
            with pytest.raises(ks.RunSetAside):
                await (await engine.get("bad")).result(timeout=60)
            assert await good.result(timeout=60) == 6
            assert [effect.step for effect in programs.EFFECTS.bodies("bad")] == ["add#1", "add#2"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE keepstep_run SET tags = '{' WHERE id = 'bad'",
        "UPDATE keepstep_head SET status = 'nonsense' WHERE run = 'bad'",
        "UPDATE keepstep_run SET created_at = 'yesterday' WHERE id = 'bad'",
    ],
    ids=["tags", "status", "time"],
)
def test_a_run_whose_row_cannot_be_read_stops_no_worker(damage, tmp_path):
    path = tmp_path / "runs.db"

    async def main():
        programs.record_to(tmp_path / "effects")
        async with ks.open(path, worker=False) as engine:
            await engine.start(programs.sequence, 2, run_id="bad")
            good = await engine.start(programs.sequence, 3, run_id="good")
            _damage(path, damage)
            async with ks.open(path):
                assert await good.result(timeout=60) == 6

    asyncio.run(main())


class Faulty:
    """A store that can be told to fail one call after it has done what was asked."""

    def __init__(self, inner):
        self.inner = inner
        self.fail = ""
        self.slow = threading.Event()
        self.slow.set()

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*args, **kwargs):
            if name == "commit" and kwargs.get("wait") is False and not self.slow.is_set():
                raise WouldBlock
            answer = found(*args, **kwargs)
            if name in ("commit", "claim_runs"):
                self.slow.wait(60)
            if self.fail == name and answer != Claims():
                self.fail = ""
                raise StoreUnavailable("the answer is lost", unknown=True)
            return answer

        return call


def test_run_whose_start_was_cancelled_in_its_commit_is_driven(tmp_path):
    async def main():
        programs.record_to(tmp_path / "effects")
        store = Faulty(SQLiteStore(tmp_path / "runs.db", lease_seconds=LEASE))
        async with Engine(store) as engine:
            store.slow.clear()
            starting = asyncio.ensure_future(engine.start(programs.sequence, 3, run_id="r"))
            await asyncio.sleep(0.05)
            starting.cancel()
            store.slow.set()
            await asyncio.wait([starting])
            handle = await engine.start(programs.sequence, 3, run_id="r")
            assert await handle.result(timeout=60) == 6
        store.close()

    asyncio.run(main())


def test_run_whose_claim_was_never_answered_is_driven(tmp_path):
    async def main():
        programs.record_to(tmp_path / "effects")
        store = Faulty(SQLiteStore(tmp_path / "runs.db", lease_seconds=LEASE))
        async with Engine(store, worker=False) as engine:
            await engine.start(programs.sequence, 3, run_id="r")
        store.fail = "claim_runs"
        async with Engine(store) as engine:
            handle = await engine.get("r")
            assert await handle.result(timeout=60) == 6
            assert store.fail == ""
        store.close()

    asyncio.run(main())


def test_an_engine_that_closes_while_it_claims_hands_everything_back(tmp_path):
    async def main():
        programs.record_to(tmp_path / "effects")
        store = Faulty(SQLiteStore(tmp_path / "runs.db"))
        engine = Engine(store)
        await engine.open()
        async with Engine(store, worker=False) as client:
            store.slow.clear()
            starting = asyncio.ensure_future(client.start(programs.sequence, 3, run_id="r"))
            await asyncio.sleep(0.05)
            closing = asyncio.ensure_future(engine.close(stop_seconds=0.5))
            await asyncio.sleep(0.05)
            store.slow.set()
            await starting
            await closing
            run = await (await client.get("r")).run()
            assert run.worker is None
            async with Engine(store):
                handle = await client.get("r")
                assert await handle.result(timeout=60) == 6
                assert not any(one.kind is Kind.RECOVERED for one in await handle.checkpoints())
        store.close()

    asyncio.run(main())


def test_a_run_of_an_unknown_workflow_waits_and_stops_no_worker(tmp_path):
    path = tmp_path / "runs.db"

    async def main():
        programs.record_to(tmp_path / "effects")
        store = SQLiteStore(path)
        now = instant(SystemClock().now())
        store.commit([Create(Run("foreign", "no such workflow", Status.QUEUED, now, due_at=now, priority=9))])
        store.close()
        async with ks.open(path) as engine:
            assert await (await engine.start(programs.sequence, 3)).result(timeout=60) == 6
            assert await (await engine.get("foreign")).status() is Status.QUEUED

    asyncio.run(main())


# -- when the disk fails -----------------------------------------------------------------------------------------------


def _fill(engine):
    connection = engine.store._writer.connection
    connection.pragma("max_page_count", connection.pragma("page_count"))


def _empty(engine):
    engine.store._writer.connection.pragma("max_page_count", 1_000_000)


def _protect(engine):
    engine.store._writer.connection.pragma("query_only", True)


def _unprotect(engine):
    engine.store._writer.connection.pragma("query_only", False)


@pytest.mark.parametrize("fail, mend", [(_fill, _empty), (_protect, _unprotect)], ids=["full", "read-only"])
def test_a_disk_that_fails_for_a_while_loses_nothing(fail, mend, tmp_path):
    """The run is put down where it stands, and goes on by itself when the store works again."""
    halted = asyncio.Event()

    async def main():
        programs.record_to(tmp_path / "effects")
        observers = [lambda event: halted.set() if event.name == "run.halted" else None]
        async with ks.open(tmp_path / "runs.db", lease_seconds=LEASE, observers=observers) as engine:
            handle = await engine.start(programs.heavy, str(tmp_path / "go"), run_id="r")
            await asyncio.to_thread(wait_for_body, programs.EFFECTS, "r", "hold")
            fail(engine)
            (tmp_path / "go").touch()
            async with asyncio.timeout(60):
                await halted.wait()
            run = await handle.run()
            assert not run.status.finished
            before = [one.step for one in await handle.checkpoints() if one.kind is Kind.STEP_COMPLETED]
            assert before in (["add#1"], ["add#1", "hold#1"]), "what was acknowledged is still there"
            with pytest.raises(ks.StoreUnavailable):
                await engine.start(programs.heavy, "x" * 100_000, run_id="refused")
            mend(engine)
            assert await handle.result(timeout=60) == [1, 200_000, 2]
            assert [effect.step for effect in programs.EFFECTS.bodies("r")].count("add#1") == 1
            assert (await handle.run()).recoveries == 0
            assert engine.counts.save_failures >= engine.counts.halted > 0
            assert await (await engine.start(programs.sequence, 3, run_id="next")).result(timeout=60) == 6

    asyncio.run(main())


# -- all of it at once -------------------------------------------------------------------------------------------------


#: A soak goes on until one fault of each line has happened.
WANTED = [("kill", "torn log", "cut log", "cut server"), ("full disk", "killed server", "ended sessions")]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", cases(STORES, quick=["sqlite"]))
def test_a_short_soak_loses_repeats_and_forgets_nothing(store):
    report = soak(seconds=5.0, workers=2, store=store, seed=5, wanted=WANTED)
    print(report)
    assert report.good, str(report)
    for kinds in WANTED:
        assert sum(report.faults[kind] for kind in kinds)
    assert report.finished >= LOAD


def test_simulated_full_disk_is_full_for_a_worker(tmp_path):
    """Where nothing can be mounted, a soak tells SQLite that the database may not grow."""

    async def main():
        programs.record_to(tmp_path / "effects")
        disk = FewPages(tmp_path / "disk")
        async with ks.open(disk.folder / "runs.db", stop_seconds=0.0) as engine:
            attending = asyncio.ensure_future(SQLite.attend(engine))
            disk.fill()
            async with asyncio.timeout(60):
                while True:
                    try:
                        await engine.start(programs.heavy, "x" * 100_000)
                    except StoreFull:
                        break
            disk.free()
            async with asyncio.timeout(60):
                while True:
                    with suppress(StoreFull):
                        run = await engine.start(programs.sequence, 3, run_id="next")
                        break
            assert await run.result(timeout=60) == 6
            attending.cancel()

    asyncio.run(main())
