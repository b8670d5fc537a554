"""A step whose precondition does not hold is blocked: it uses no attempt, and the run waits durably (C17)."""

import asyncio
import threading

import pytest

import keepstep as ks
from keepstep import testing
from keepstep.care.doctor import examine
from keepstep.kernel import gates
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.test_events_and_durability import Recording
from tests.engine.world import steps_of, until, until_status

HOUR = 3600.0


def door(effects, *, after=3, plain=False, every=0.005, **options):
    """A step that is ready when it has been asked so often."""

    async def opens(name):
        effects.append(f"asked {name}")
        return effects.count(f"asked {name}") > after

    def opens_plainly(name):
        effects.append(f"asked {name}")
        return effects.count(f"asked {name}") > after

    @ks.step(name="enter", ready=opens_plainly if plain else opens, ready_every=every, **options)
    async def enter(name):
        effects.append(f"entered {name}")
        return name

    @ks.workflow(name="door")
    async def program(name):
        return await enter(name)

    return program


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_step_begins_once_ready_and_uses_no_attempt_before(world, effects, plain):
    observer = Recording()
    async with world.engine(observers=[observer]) as engine:
        run = await engine.start(door(effects, plain=plain), "x", run_id="r")
        assert await run.result(30) == "x"
        [record] = [one for one in await run.checkpoints() if one.step == "enter#1"]
        assert record.attempt == 1
    assert effects == ["asked x"] * 4 + ["entered x"]
    blocked = [event for event in observer.events if event.name == "step.blocked"]
    assert [event.step for event in blocked] == ["enter#1"] * 3
    assert blocked[0].data == {"why": "not ready", "again_seconds": 0.005}


async def test_raising_precondition_blocks_the_step_without_failing_it(world, effects, logged):
    def broken(name):
        effects.append(name)
        if len(effects) == 1:
            raise KeyError("no connection")
        if len(effects) < 4:
            raise (SystemExit(3), asyncio.CancelledError("no"))[len(effects) - 2]
        return True

    @ks.step(ready=broken, ready_every=0.005)
    async def enter(name):
        return name

    @ks.workflow
    async def program():
        return await enter("x")

    observer = Recording()
    async with world.engine(observers=[observer]) as engine:
        assert await (await engine.start(program)).result(30) == "x"
    assert [event.data["why"] for event in observer.events if event.name == "step.blocked"] == [
        "KeyError: 'no connection'",
        "RuntimeError: SystemExit: 3",
        "RuntimeError: CancelledError: no",
    ]
    assert any("ready= of step enter#1 failed, so the step waits: KeyError" in line for line in logged())


@pytest.mark.one_store
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "async"])
async def test_hanging_precondition_is_given_up_and_asked_again(world, effects, monkeypatch, plain):
    monkeypatch.setattr(gates, "READY_SECONDS", 0.05)
    release = threading.Event()

    async def hangs():
        effects.append("asked")
        while len(effects) < 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                effects.append("will not hear")
        return True

    def hangs_plainly():
        effects.append("asked")
        return len(effects) > 1 or release.wait(60)

    @ks.step(ready=hangs_plainly if plain else hangs, ready_every=0.005)
    async def enter():
        return "in"

    @ks.workflow
    async def program():
        return await enter()

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == "in"
    release.set()


async def test_step_with_a_checkpoint_is_not_asked_again(world, effects):
    @ks.step(ready=lambda: effects.append("asked") or True)
    async def enter():
        return "in"

    @ks.workflow
    async def program():
        await enter()
        return await ks.wait_for("go")

    async with world.engine(linger_seconds=0.01) as engine:
        await until_status(await engine.start(program, run_id="r"), "waiting")
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        await run.result(30)
    assert effects == ["asked"]


async def test_precondition_is_asked_before_every_attempt(world, effects):
    @ks.step(ready=lambda: effects.append("asked") or True, retry=ks.Retry(attempts=3, base_seconds=0))
    async def enter():
        effects.append("entered")
        if effects.count("entered") < 3:
            raise ConnectionError

    @ks.workflow
    async def program():
        await enter()

    async with world.engine() as engine:
        await (await engine.start(program)).result(30)
    assert effects == ["asked", "entered"] * 3


@pytest.mark.live_only
async def test_blocked_at_most_once_step_leaves_no_start_record(world, effects):
    """An at-most-once step that is not ready has not begun, so a crash leaves no doubt."""
    engine = await world.started()
    run = await engine.start(door(effects, after=10**9, every=HOUR, at_most_once=True), "x", run_id="r")
    await until_status(run, "waiting")
    assert await steps_of(run, "step started") == []
    await world.crash(engine)


# -- waiting durably ---------------------------------------------------------------------------------------------------


@pytest.mark.live_only
async def test_blocked_run_is_parked_and_doctor_names_its_step(world, effects):
    async with world.engine(linger_seconds=60) as engine:  # no signal can come, so nothing is gained by lingering
        run = await engine.start(door(effects, after=10**9, every=HOUR), "x", run_id="r")
        await until_status(run, "waiting")
        assert "r" not in engine.live
        assert "ks:blocked:enter#1" in (await run.run()).wakes
        [finding] = [one for one in (await examine(engine)).findings if one.code == "blocked"]
        assert "enter#1 is not ready" in finding.message
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
    assert effects == ["asked x"]


def test_parked_run_is_asked_again_at_each_interval(effects):
    with testing.world() as here:
        run = here.start(door(effects, after=3, every=HOUR), "x")
        here.advance(hours=2.5)
        assert effects == ["asked x"] * 3
        here.advance(hours=1)
        assert run.result() == "x"
    assert effects == ["asked x"] * 4 + ["entered x"]


def test_blocked_time_does_not_count_for_the_step_timeout(effects):
    with testing.world() as here:
        program = door(effects, after=5, every=HOUR, timeout=ks.Timeout(step_seconds=60))
        assert here.start(program, "x").result() == "x"


def test_budget_of_time_ends_a_blocked_step(effects):
    @ks.step(ready=lambda: effects.append("asked") or False, ready_every=HOUR)
    async def enter():
        effects.append("entered")

    @ks.workflow(budget=ks.Budget(seconds=2.5 * HOUR))
    async def program():
        await enter()

    with testing.world() as here:
        run = here.start(program)
        with pytest.raises(ks.RunFailed, match="'enter#1' was not started"):
            run.result()
    assert effects == ["asked"] * 3


@pytest.mark.live_only
async def test_blocked_step_takes_no_place_in_the_budget(world, effects):
    gate = asyncio.Event()

    async def open_gate(number):
        return number or gate.is_set()

    @ks.step(ready=open_gate, ready_every=0.005)
    async def enter(number):
        effects.append(number)
        if number == 2:
            gate.set()
        return number

    @ks.workflow(budget=ks.Budget(steps=2))
    async def program():
        parts = await ks.gather(enter(0), enter(1), enter(2), return_exceptions=True)
        return [part if isinstance(part, int) else type(part).__name__ for part in parts]

    async with world.engine() as engine:
        assert await (await engine.start(program)).result(30) == ["BudgetExceeded", 1, 2]


@pytest.mark.parametrize("act", ["pause", "close", "crash"])
async def test_blocked_run_survives_pause_close_and_crash(world, effects, act):
    opened = []

    @ks.step(ready=lambda: effects.append("asked") or bool(opened), ready_every=0.05)
    async def enter():
        effects.append("entered")
        return "in"

    @ks.workflow
    async def program():
        return await enter()

    engine = await world.started()
    run = await engine.start(program, run_id="r")
    await until(lambda: effects)
    if act == "pause":
        await run.pause()
        await until_status(run, "paused")
        opened.append(1)
        await run.resume()
    elif act == "close":
        await engine.close()
        opened.append(1)
        engine = await world.started()
    else:
        opened.append(1)
        engine = await world.crash_and_recover(engine)
    assert await (await engine.get("r")).result(30) == "in"
    await engine.close()
    assert effects.count("entered") == 1


async def test_crash_at_any_write_keeps_the_result_of_a_blocked_step(effects):
    async def play(engine):
        return await (await engine.start(door(effects, after=2), "x", run_id="main")).result(30)

    async def judge(disk, lives):
        assert lives.result == "x"
        assert effects.count("entered x") <= 1 + lives.crashes
        effects.clear()

    assert await crash_everywhere(MemoryDisk, play, judge) >= 4


# -- what may be written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"ready": True}, {"ready_every": 0}, {"ready_every": "5"}])
def test_invalid_ready_options_are_refused(options):
    with pytest.raises(ks.DefinitionError, match="ready"):
        ks.step(**options)(lambda: None)


@pytest.mark.one_store
async def test_precondition_of_a_graph_step_is_given_the_state(world, effects):
    graph = ks.Graph("gated", budget=ks.Budget(steps=5))

    @graph.step(ready=lambda state: effects.append(state["topic"]) or len(effects) > 2, ready_every=0.005)
    async def draft(state):
        ks.spend(tokens=7)
        return {"text": state["topic"].upper()}

    graph.entry("draft")
    graph.exit("draft")
    async with world.engine() as engine:
        run = await engine.start(graph, {"topic": "tea"})
        assert await run.result(30) == {"topic": "tea", "text": "TEA"}
        assert (await run.spent()).tokens == 7
    assert effects == ["tea"] * 3


@pytest.mark.one_store
async def test_precondition_of_a_dag_step_is_given_its_needs(world, effects):
    dag = ks.Dag("gated dag")

    @dag.step
    async def fetch(topic):
        return topic.upper()

    @dag.step(needs=["fetch"], ready=lambda fetch: effects.append(fetch) or len(effects) > 1, ready_every=0.005)
    async def sell(fetch):
        return fetch + "!"

    async with world.engine() as engine:
        assert await (await engine.start(dag, topic="tea")).result(30) == {"sell": "TEA!"}
    assert effects == ["TEA", "TEA"]
