"""Starting runs: ids, names, the doors for blocking code (K36, K37, K40), and runs that nobody here can drive (K22)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.model.ids import new_run_id
from tests.engine.world import until, until_status

pytestmark = pytest.mark.on_postgres


@ks.step
async def double(number):
    return 2 * number


@ks.workflow
async def doubling(number, *, twice=False):
    once = await double(number)
    return await double(once) if twice else once


async def test_known_run_id_starts_no_second_run(world, effects):
    @ks.step
    async def work(number):
        effects.append(number)
        return number

    @ks.workflow
    async def program(number):
        return await work(number)

    async with world.engine() as engine:
        handles = await asyncio.gather(*(engine.start(program, 1, run_id="r") for _ in range(5)))
        assert [await handle.result(30) for handle in handles] == [1] * 5
        assert await (await engine.start(program, 1, run_id="r")).result(30) == 1
    async with world.engine() as engine:
        assert await (await engine.start(program, 1, run_id="r")).result(30) == 1
        assert len((await engine.list()).runs) == 1
    assert effects == [1]


async def test_known_run_id_with_another_input_is_a_conflict(world):
    @ks.workflow
    async def other(number):
        return number

    async with world.engine() as engine:
        run = await engine.start(doubling, 1, run_id="r")
        with pytest.raises(ks.RunConflict, match="another input") as conflict:
            await engine.start(doubling, 2, run_id="r")
        assert conflict.value.existing.id == "r"
        with pytest.raises(ks.RunConflict, match="another input"):
            await engine.start(doubling, 1, twice=True, run_id="r")
        with pytest.raises(ks.RunConflict, match="workflow 'doubling', not of 'other'"):
            await engine.start(other, 1, run_id="r")
        assert await run.result(30) == 2


async def test_same_input_in_another_order_is_no_conflict(world):
    @ks.workflow
    async def taking(options, names):
        return len(options)

    async with world.engine() as engine:
        await engine.start(taking, {"a": 1, "b": 2}, {"x", "y", "z"}, run_id="r")
        run = await engine.start(taking, {"b": 2, "a": 1}, {"z", "y", "x"}, run_id="r")
        assert await run.result(30) == 2


@pytest.mark.parametrize("name", ["run_id", "queue", "priority", "delay", "key", "deadline", "tags", "dedupe"])
def test_parameter_named_like_an_option_of_start_is_refused(name):
    namespace = {}
    exec(f"async def program({name}): pass", namespace)
    with pytest.raises(ks.DefinitionError, match=f"{name}.*option of start"):
        ks.workflow(namespace["program"])


async def test_wrong_argument_is_refused_by_start(world):
    async with world.engine() as engine:
        for arguments, options in ((), {}), ((1, 2), {}), ((1,), {"wrong": 1}):
            with pytest.raises(ks.DefinitionError, match="cannot be started with this input"):
                await engine.start(doubling, *arguments, **options)
        assert (await engine.list()).runs == ()
        with pytest.raises(ks.DefinitionError, match="decorate it"):
            await engine.start(lambda: None)
        with pytest.raises(ks.DefinitionError, match="no workflow 'nobody'"):
            await engine.start("nobody")
        assert await (await engine.start(doubling.bind(3, twice=True))).result(30) == 12
        assert await (await engine.start("doubling", 3)).result(30) == 6


@pytest.mark.parametrize("run_id", ["", "a/b", "..", ".hidden", "x" * 201, " space", "new\nline", 7])
async def test_dangerous_id_is_refused(run_id):
    async with ks.Engine("memory:") as engine:
        with pytest.raises(ks.DefinitionError):
            await engine.start(doubling, 1, run_id=run_id)


@pytest.mark.parametrize(
    "option", [{"delay": -1}, {"delay": True}, {"delay": "1"}, {"priority": False}, {"priority": 0.0}]
)
async def test_invalid_delay_or_priority_is_refused(option, monkeypatch):
    """Also where the workflow, as one of a file may, has a default for it."""
    [(name, value)] = option.items()
    for starting in ({}, {"priority": 3}):
        monkeypatch.setattr(doubling, "starting", starting)
        async with ks.Engine("memory:") as engine:
            with pytest.raises(ks.DefinitionError, match=f"a {name} must be .* not {value!r}"):
                await engine.start(doubling, 1, **option)
            assert (await engine.list()).runs == ()


async def test_invalid_delay_of_a_child_is_refused(world):
    @ks.workflow
    async def parent():
        await ks.start(doubling, 1, delay=-1)

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="a delay must be a number of seconds from 0"):
            await (await engine.start(parent)).result(30)


async def test_delayed_run_starts_after_its_delay(world):
    async with world.engine() as engine:
        loop = asyncio.get_running_loop()
        began = loop.time()
        run = await engine.start(doubling, 1, delay=0.15)
        assert await run.status() is ks.Status.QUEUED
        assert await run.result(30) == 2
        assert loop.time() - began >= 0.14


async def test_tags_and_filters_find_the_right_runs(world):
    async with world.engine(worker=False) as engine:
        await engine.start(doubling, 1, run_id="a", tags={"user": "x"})
        await engine.start(doubling, 1, run_id="b", tags={"user": "y"})
        assert [run.id for run in (await engine.list(tags={"user": "x"})).runs] == ["a"]
        assert [run.id for run in (await engine.list(ks.RunQuery(id_prefix="b"))).runs] == ["b"]
        with pytest.raises(ks.DefinitionError, match="tag"):
            await engine.start(doubling, 1, tags={"user": 1})
        with pytest.raises(ks.DefinitionError, match="begin with 'ks:'"):
            await engine.start(doubling, 1, tags={"ks:series": "a"})


async def test_worker_leaves_runs_of_unknown_workflows_queued(world):
    @ks.workflow
    async def foreign():
        return "foreign"

    async with world.engine(workflows=[doubling]) as engine:
        run = await engine.start(foreign, run_id="r")
        mine = await engine.start(doubling, 2)
        assert await mine.result(30) == 4
        assert await run.status() is ks.Status.QUEUED
        async with world.engine(workflows=[foreign]):
            assert await run.result(30) == "foreign"


async def test_worker_drives_runs_of_its_queues_only(world):
    """Neither at their birth nor later does it take others: not even its own children there."""

    @ks.workflow
    async def parent():
        return await (await ks.start(doubling, 3, queue="files"))

    async with world.engine(queues=["mail"]) as engine:
        other = await engine.start(doubling, 1, queue="files")
        parent_run = await engine.start(parent, queue="mail")
        assert await (await engine.start(doubling, 2, queue="mail")).result(30) == 4
        assert await other.status() is ks.Status.QUEUED
        assert {run.queue for run in (await engine.list(ks.RunQuery(workflow=doubling.name))).runs if run.epoch} == {
            "mail"
        }
        async with world.engine(queues=["files", "else"]):
            assert await other.result(30) == 2
            assert await parent_run.result(30) == 6


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("known", [True, False])
async def test_run_is_leased_at_creation_by_a_worker_that_knows_it(world, monkeypatch, known):
    """A worker that knows the workflow has the run from its birth; another one leaves it to be claimed (K23)."""

    @ks.workflow
    async def quick():
        return 1

    born = []
    async with world.engine(**{} if known else {"workflows": []}) as engine:
        commit = engine.journal.write

        async def write(change):
            born.append(change.run)
            return await commit(change)

        monkeypatch.setattr(engine.journal, "write", write)
        run = await engine.start(quick, run_id="r")
        if known:
            assert await run.result(30) == 1
        lease = (engine.worker.id, ks.Status.RUNNING, 1) if known else (None, ks.Status.QUEUED, 0)
    assert [(run.worker, run.status, run.epoch) for run in born] == [lease]


async def test_engine_without_a_worker_drives_no_runs(world):
    async with world.engine(worker=False) as client:
        run = await client.start(doubling, 4, run_id="r")
        with pytest.raises(ks.TimedOut, match="not finished within"):
            await run.result(0.05)
        assert await run.status() is ks.Status.QUEUED
        async with world.engine():
            assert await run.result(30) == 8


async def test_accepted_run_survives_the_death_of_its_process(world, effects):
    @ks.step
    async def work():
        effects.append("worked")

    @ks.workflow
    async def program():
        await work()

    engine = await world.started()
    await engine.start(program, run_id="r")
    await asyncio.sleep(0)
    await world.crash(engine)
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.result(30)
        assert (await run.checkpoints())[0].kind.value == "run started"
    assert "worked" in effects


async def test_closed_engine_refuses_calls(world):
    engine = await world.started()
    run = await engine.start(doubling, 1)
    await run.result(30)
    await engine.close()
    await engine.close()
    for act in (lambda: engine.start(doubling, 1), lambda: engine.get("r"), engine.list):
        with pytest.raises(ks.DefinitionError, match="closed"):
            await act()


async def test_waiters_for_one_result_get_the_same(world):
    async with world.engine() as engine:
        run = await engine.start(doubling, 1, run_id="r")
        again = await engine.get("r")
        assert await asyncio.gather(run.result(30), run.result(30), again.result(30)) == [2, 2, 2]
        with pytest.raises(ks.RunNotFound, match="nobody"):
            await engine.get("nobody")


async def test_failed_run_raises_its_error_from_result(world):
    @ks.workflow
    async def failing():
        raise LookupError("no such thing")

    async with world.engine() as engine:
        run = await engine.start(failing, run_id="r")
        for _ in range(2):
            with pytest.raises(ks.RunFailed, match="LookupError: no such thing") as failed:
                await run.result(30)
            assert failed.value.run_id == "r"
            assert "no such thing" in failed.value.error.traceback
        assert await run.status() is ks.Status.FAILED


# -- blocking code -----------------------------------------------------------------------------------------------------


def test_blocking_code_can_use_an_engine(tmp_path):
    @ks.workflow
    def approving(number):
        ks.publish("state", "waiting")
        answer = ks.wait_for("approved").result()
        return [double(number).result(), answer]

    with ks.open(tmp_path / "runs.db") as engine:
        run = engine.start(approving, 4, run_id="r")
        run.signal("approved", "yes")
        assert run.result(60) == [8, "yes"]
        assert run.status() is ks.Status.COMPLETED
        assert engine.get("r").result() == [8, "yes"]
        assert run.published() == {"state": "waiting"}
        assert [event.name for event in run.watch()][-1] == "run.finished"
        assert [one.id for one in engine.list().runs] == ["r"]
        assert len(run.checkpoints()) >= 4
    with pytest.raises(ks.DefinitionError, match="closed"):
        engine.get("r")


def test_script_does_not_repeat_a_finished_run(tmp_path, effects):
    @ks.step
    def work():
        effects.append("worked")
        return "result"

    @ks.workflow
    def script():
        return work().result()

    for _ in range(2):
        assert ks.run(script, url=tmp_path / "runs.db", run_id="r") == "result"
    assert effects == ["worked"]


async def test_script_runs_inside_a_notebook(tmp_path):
    """A notebook's loop is running; ks.run has one of its own."""
    assert ks.run(doubling, 4, url=tmp_path / "runs.db") == 8


def test_error_in_a_blocking_engine_is_raised(tmp_path):
    @ks.workflow
    async def failing():
        raise ValueError("told")

    with pytest.raises(ks.RunFailed, match="told"):
        ks.run(failing, url=tmp_path / "runs.db")
    with pytest.raises(ks.KeepstepError):
        ks.run(doubling, 1, url="nosuch:thing")


async def test_result_of_a_paused_run_times_out(world):
    @ks.workflow
    async def waiting():
        await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(waiting)
        await run.pause()
        await until_status(run, "paused")
        with pytest.raises(ks.TimedOut):
            await run.result(0.05)


@pytest.mark.live_only
async def test_start_without_an_answer_is_refused_when_the_engine_closes(world):
    """Else: the caller that waits for the store's answer waits for ever."""

    @ks.workflow
    async def plain():
        return 1

    async with world.engine(worker=False) as engine:
        engine.journal._flush = lambda: None  # the store never answers
        waiting = asyncio.ensure_future(engine.start(plain))
        await until(lambda: engine.journal._others)
        engine.journal.close()
        with pytest.raises(ks.StoreUnavailable, match="was closed"):
            await waiting
        with pytest.raises(ks.DefinitionError, match="closed"):
            await engine.start(plain)
        engine.journal._others.clear()


@pytest.mark.live_only
async def test_start_asked_before_the_engine_closes_is_written(world):
    @ks.workflow
    async def plain():
        return 1

    engine = await world.started(worker=False)
    waiting = asyncio.ensure_future(engine.start(plain, run_id="r"))
    await asyncio.sleep(0)  # it has asked, and the store has not heard yet
    assert engine.journal._others
    await engine.close()
    assert (await waiting).id == "r"


def test_run_ids_sort_by_time_and_are_unique():
    then, now = ([new_run_id(at) for _ in range(500)] for at in (1_000_000.0, 1_000_001.9))
    assert max(then) < min(now)
    assert len({*then, *now}) == 1000
    assert {len(one) for one in then} == {len("run-") + 16}
    assert new_run_id(1e12).startswith("run-")  # a clock that is wrong by ages
