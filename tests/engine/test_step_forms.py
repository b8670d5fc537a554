"""Forms of a step: with options for one call, as a method, and as a generator."""

import asyncio
import logging
from dataclasses import dataclass

import pytest

import keepstep as ks
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import steps_of, until


async def test_options_hold_for_one_call(world, effects):
    @ks.step
    async def work(name):
        effects.append(ks.attempt())
        if len(effects) < 3:
            raise ConnectionError("not yet")
        return name

    @ks.workflow
    async def calls():
        eager = work.options(name="eager", retry=ks.Retry(attempts=3, base_seconds=0.0), timeout=30)
        return [await eager("a"), await work("b")]

    async with world.engine() as engine:
        run = await engine.start(calls)
        assert await run.result(30) == ["a", "b"]
        assert await steps_of(run) == ["eager#1", "work#1"]
    assert effects == [1, 2, 3, 1]
    assert (work.name, work.retry.attempts) == ("work", 1)


def test_wrong_option_for_one_call_is_refused():
    @ks.step
    async def work():
        pass

    with pytest.raises(ks.DefinitionError, match="retry= takes a ks"):
        work.options(retry=3)
    with pytest.raises(ks.DefinitionError, match="step name '1st' is refused"):
        work.options(name="1st")


class Service:
    def __init__(self, base, effects):
        self.base, self.effects = base, effects

    @ks.step(ignore=("client",))
    async def fetch(self, path: str, client=None) -> str:
        self.effects.append(path)
        return f"{self.base}{path}"

    @ks.step
    def plain(self, number):
        self.effects.append(number)
        return number * 2


async def test_step_may_be_a_method(world, effects):
    @ks.workflow
    async def using():
        service = Service("http://a/", effects)
        got = [await service.fetch("x", client=object()), await service.plain(2), await service.fetch(path="y")]
        await ks.wait_for("go")
        return got

    result = await live_then_many_lives(world, using, PollInterval(), effects, lives=2)
    assert result == ["http://a/x", 4, "http://a/y"]
    assert effects == ["x", 2, "y"]


def test_unknown_option_of_a_step_is_named_with_the_known_ones():
    with pytest.raises(ks.DefinitionError, match=r"ks\.step has no option .retries.; its options are name, retry, "):
        ks.step(retries=3)


async def test_method_step_outside_a_run_is_a_method(effects):
    assert await Service("b/", effects).fetch("x") == "b/x"
    assert Service("b/", effects).plain(3).result() == 6
    assert isinstance(Service.fetch.name, str)


async def test_each_yielded_item_is_emitted_and_the_list_recorded(world):
    @ks.step
    async def tokens(count):
        for number in range(count):
            yield f"t{number}"
            await asyncio.sleep(0)

    @ks.step(collect="".join)
    def words():
        yield "a"
        yield "b"

    @ks.workflow
    async def writing():
        return [await tokens(3), await words()]

    async with world.engine() as engine:
        run = await engine.start(writing)
        emitted = [event.data["value"] async for event in run.watch() if event.name == "token.emitted"]
        assert await run.result(30) == [["t0", "t1", "t2"], "ab"]
    assert emitted == ["t0", "t1", "t2", "a", "b"]


async def test_replay_of_a_streaming_step_emits_nothing(world, effects):
    @ks.step
    async def tokens():
        effects.append("body")
        yield 1
        yield 2

    @ks.workflow
    async def writing():
        got = await tokens()
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, writing, PollInterval(), effects, lives=2) == [1, 2]
    assert effects == ["body"]


async def test_cancelled_streaming_step_leaves_its_generator(world):
    began, closed = asyncio.Event(), asyncio.Event()

    @ks.step
    async def endless():
        try:
            while True:
                yield "x"
                began.set()
                await asyncio.sleep(0.001)
        finally:
            closed.set()

    @ks.workflow
    async def writing():
        try:
            async with ks.timeout(0.05):
                await endless()
        except ks.TimedOut:
            return closed.is_set()

    async with world.engine() as engine:
        run = await engine.start(writing)
        await run.result(30)
        await asyncio.wait_for(closed.wait(), 10)
    assert began.is_set()


async def test_streaming_step_outside_a_run_returns_its_items():
    @ks.step
    async def tokens():
        yield 1
        yield 2

    assert await tokens() == [1, 2]
    assert [item async for item in tokens.fn()] == [1, 2]


def test_collect_is_for_steps_that_yield():
    with pytest.raises(ks.DefinitionError, match="collect= is a function of the list of yielded items"):
        ks.step(collect=list)(lambda: None)


async def test_code_can_tell_where_it_runs(world):
    seen = {}

    def where():
        return ks.in_workflow(), ks.in_step(), ks.replaying()

    @ks.step
    async def inside():
        seen.setdefault("step", where())

    @ks.workflow
    async def looking():
        seen.setdefault("first", where())
        seen["begin"] = where()
        await inside()
        await ks.wait_for("go")
        seen["end"] = where()

    async with world.engine(linger_seconds=60) as engine:
        await engine.start(looking, run_id="r")
        await until(lambda: "r" in engine.live and engine.live["r"].waits)
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        await run.result(30)
    assert where() == (False, False, False)
    assert seen["first"] == (True, False, False)
    assert seen["step"] == (False, True, False)
    assert seen["begin"] == (True, False, True)
    assert seen["end"] == (True, False, False)


def test_attempt_is_the_first_outside_a_run():
    assert ks.attempt() == 1


async def test_attempt_in_workflow_code_is_refused(world):
    @ks.workflow
    async def misused():
        return ks.attempt()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"ks\.attempt is called in the workflow itself"):
            await (await engine.start(misused)).result(30)


async def test_log_names_run_and_step_and_is_silent_on_replay(world, caplog):
    caplog.set_level(logging.INFO, "keepstep.run")

    @ks.step
    async def inside():
        ks.log.info("at %d %%", 50)

    @ks.workflow
    async def logging_one():
        ks.log.info("begins")
        await inside()
        await ks.wait_for("go")
        ks.log.info("ends")

    async with world.engine(linger_seconds=60) as engine:
        await engine.start(logging_one, run_id="r")
        await until(lambda: "r" in engine.live and engine.live["r"].waits)
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        await run.result(30)
    logged = [record for record in caplog.records if record.name == "keepstep.run"]
    texts = [record.getMessage() for record in logged]
    assert texts == ["run r: begins", "run r, inside#1: at 50 %", "run r: ends"]
    assert [(record.run_id, record.step, record.attempt) for record in logged][1] == ("r", "inside#1", 1)
    assert {record.filename for record in logged} == {"test_step_forms.py"}


def test_log_outside_a_run_is_an_ordinary_logger(caplog):
    caplog.set_level(logging.INFO, "keepstep.run")
    ks.log.warning("plain %s", "text")
    assert caplog.records[-1].getMessage() == "plain text"


@dataclass
class Receipt:
    number: int


@ks.step
async def charge(number: int) -> Receipt:
    return Receipt(number)


@ks.workflow
async def charging(given: dict) -> dict:
    return {"given": given, "paid": await charge(2)}


async def test_class_in_the_annotation_of_a_step_is_known_to_its_workflow(world):
    async with world.engine() as engine:
        run = await engine.start(charging, {"old": Receipt(1)}, run_id="r")
        assert await run.result(30) == {"given": {"old": Receipt(1)}, "paid": Receipt(2)}
        assert (await engine.start(charging, {"old": Receipt(1)}, run_id="r")).id == "r"


async def test_list_given_to_gather_is_refused_with_the_star(world):
    @ks.workflow
    async def wrong():
        return await ks.gather([charge(1), charge(2)])

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"ks\.gather\(\*calls\)"):
            await (await engine.start(wrong)).result(30)


async def test_text_as_the_type_of_a_wait_is_refused(world):
    @ks.workflow
    async def wrong():
        return await ks.wait_for("go", type="Receipt")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="takes a class or another annotation as type="):
            await (await engine.start(wrong)).result(30)
