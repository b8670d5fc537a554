"""The annotated type holds wherever a value comes from outside: signals, questions, forks, resolved steps, tokens."""

import asyncio
import logging
from dataclasses import dataclass, field

import pydantic
import pytest

import keepstep as ks
from tests.engine.world import until_status


@dataclass
class Verdict:
    score: float
    notes: list[str] = field(default_factory=list)


class Review(pydantic.BaseModel):
    score: float


TYPES = pytest.mark.parametrize("cls", [Verdict, Review])


def waiting(cls, **options):
    @ks.workflow
    async def judge() -> list[float]:
        first = await ks.wait_for("verdict", type=cls, **options)
        second = await ks.wait_for("verdict", type=cls, **options)
        assert type(first) is type(second) is cls
        return [first.score, second.score]

    return judge


# -- signals -----------------------------------------------------------------------------------------------------------


@TYPES
@pytest.mark.parametrize("options", [{}, {"timeout": 60}], ids=["forever", "timeout"])
async def test_plain_data_and_instances_arrive_as_the_type_of_the_wait(world, cls, options):
    async with world.engine() as engine:
        run = await engine.start(waiting(cls, **options))
        await run.signal("verdict", {"score": 1})
        await run.signal("verdict", cls(score=2))
        assert await run.result(60) == [1.0, 2.0]


@TYPES
async def test_signal_that_does_not_fit_stays_unread_and_the_wait_goes_on(world, cls, caplog):
    judge = waiting(cls)
    async with world.engine(workflows=[]) as stranger:  # knows neither the workflow nor the type
        run = await stranger.start(judge, run_id="r")
        for payload in ({"score": "high"}, "nonsense", {"score": 1}, {"points": 3}, {"score": 2}):
            await run.signal("verdict", payload)
    with caplog.at_level(logging.WARNING, "keepstep"):
        async with world.engine(workflows=[judge]) as engine:
            assert await (await engine.get("r")).result(60) == [1.0, 2.0]
    assert f"does not fit {cls.__name__}" in caplog.text
    assert "stays unread" in caplog.text


async def test_signal_that_one_wait_refuses_is_read_by_another(world):
    @ks.workflow
    async def either() -> list:
        typed = await ks.wait_for("word", type=Verdict)
        return [typed.score, await ks.wait_for("word"), await ks.wait_for("word", timeout=0.01, default=None)]

    async with world.engine(workflows=[]) as stranger:
        run = await stranger.start(either, run_id="r")
        await run.signal("word", "plain")
        await run.signal("word", {"score": 3})
    async with world.engine(workflows=[either]) as engine:
        assert await (await engine.get("r")).result(60) == [3.0, "plain", None]


@pytest.mark.live_only
async def test_sender_is_told_at_once_where_the_type_is_known(world):
    async with world.engine() as engine:
        run = await engine.start(waiting(Verdict), run_id="r")
        while not (engine.live.get("r") and engine.live["r"].waits):
            await engine.changed(0.01)
        with pytest.raises(ks.DefinitionError, match=r"signal .verdict. to run .r. does not fit Verdict: .*score"):
            await run.signal("verdict", {"score": "high"})
        with pytest.raises(ks.DefinitionError, match="does not fit Verdict"):
            await run.ask("verdict", {"points": 1})
        await run.signal("verdict", {"score": 1})
        await run.signal("verdict", {"score": 2})
        assert await run.result(60) == [1.0, 2.0]


async def test_question_is_asked_and_answered_with_types(world):
    @ks.step
    async def judged(verdict: Verdict) -> Review:
        return Review(score=verdict.score + 1)

    @ks.workflow
    async def judge() -> None:
        request = await ks.wait_for("question", type=Verdict)
        request.reply(await judged(request.payload))

    async with world.engine() as engine:
        run = await engine.start(judge)
        assert await run.ask("question", {"score": 1}) == Review(score=2)
        await run.result(60)


async def test_instance_arrives_without_a_type_if_an_annotation_names_its_class(world):
    @ks.step
    async def made() -> Verdict:
        return Verdict(1)

    @ks.workflow
    async def judge() -> list[float]:
        return [(await made()).score, (await ks.wait_for("verdict")).score]

    async with world.engine() as engine:
        run = await engine.start(judge)
        await run.signal("verdict", Verdict(2))
        assert await run.result(60) == [1, 2]


async def test_graph_waits_for_the_type_of_its_key(world):
    class Page(pydantic.BaseModel):
        text: str = ""
        verdict: Verdict | None = None

    graph = ks.Graph("page", schema=Page)
    graph.wait("review", signal="verdict", into="verdict")

    @graph.step
    async def done(state: Page):
        return {"text": f"{state.verdict.score}"}

    graph.edge("review", "done")
    graph.entry("review")
    graph.exit("done")
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        with pytest.raises(ks.DefinitionError, match="signal 'verdict' to run 'r' does not fit"):
            await run.signal("verdict", {"score": "high"})
        await run.signal("verdict", {"score": 2})
        assert (await run.result(60))["text"] == "2.0"


async def test_graph_reads_a_signal_by_the_rules_of_its_schema(world):
    class Counted(pydantic.BaseModel):
        count: int = 0

    graph = ks.Graph("counted", schema=Counted)
    graph.wait("ask", signal="word", into="count")
    graph.wait("again", signal="word")
    graph.edge("ask", "again")
    graph.entry("ask")
    graph.exit("again")
    async with world.engine() as engine:
        run = await engine.start(graph)
        await run.signal("word", "not a number")  # the second wait takes anything
        await run.signal("word", "4")  # a number, for Pydantic
        assert await run.result(60) == {"count": 4}


# -- results that a person gives ---------------------------------------------------------------------------------------


def doubtful():
    @ks.step(at_most_once=True, timeout=0.01)
    async def doubt() -> Verdict:
        await asyncio.sleep(60)

    @ks.workflow
    async def judge() -> float:
        return (await doubt()).score

    return judge


@pytest.mark.live_only
@pytest.mark.parametrize("given", [Verdict(5), {"score": 5}], ids=["instance", "plain data"])
async def test_resolved_result_is_of_the_annotated_type(world, given):
    async with world.engine() as engine:
        run = await engine.start(doubtful())
        await until_status(run, "waiting")
        with pytest.raises(ks.DefinitionError, match="the result of 'doubt#1' does not fit Verdict"):
            await run.resolve("doubt#1", "result", {"points": 5})
        await run.resolve("doubt#1", "result", given)
        assert await run.result(60) == 5


@pytest.mark.live_only
async def test_resolved_result_that_does_not_fit_leaves_the_step_in_doubt(world, caplog):
    judge = doubtful()
    async with world.engine(workflows=[judge]) as engine:
        await until_status(await engine.start(judge, run_id="r"), "waiting")
    async with world.engine(worker=False, workflows=[]) as stranger:
        run = await stranger.get("r")
        await run.resolve("doubt#1", "result", {"points": 5})
        await run.resolve("doubt#1", "result", {"score": 6})
    with caplog.at_level(logging.WARNING, "keepstep"):
        async with world.engine(workflows=[judge]) as engine:
            assert await (await engine.get("r")).result(60) == 6
    assert "is refused: the given result of 'doubt#1' does not fit Verdict" in caplog.text


def critical():
    @ks.step
    async def critic() -> Verdict:
        return Verdict(1)

    @ks.workflow
    async def judge() -> float:
        return (await critic()).score

    return judge


async def test_result_of_a_fork_that_does_not_fit_is_refused_where_the_code_is(world):
    async with world.engine() as engine:
        await (await engine.start(critical(), run_id="r")).result(60)
        with pytest.raises(ks.DefinitionError, match="edited result of 'critic' does not fit Verdict"):
            await engine.fork("r", results={"critic": {"points": 1}})
        assert await (await engine.fork("r", results={"critic": {"score": 2}})).result(60) == 2


async def test_result_of_a_fork_that_does_not_fit_sets_it_aside_elsewhere(world):
    judge = critical()
    async with world.engine(workflows=[judge]) as engine:
        await (await engine.start(judge, run_id="r")).result(60)
    async with world.engine(worker=False, workflows=[]) as stranger:
        await stranger.fork("r", results={"critic": {"points": 1}}, run_id="f")
    async with world.engine(workflows=[judge]) as engine:
        with pytest.raises(ks.RunSetAside, match="the given result of 'critic#1' does not fit Verdict"):
            await (await engine.get("f")).result(60)


# -- values that are shown ---------------------------------------------------------------------------------------------


async def test_published_values_and_tokens_keep_their_types(world):
    @ks.step
    async def judged() -> Verdict:
        ks.emit(Review(score=3))
        ks.emit({"of": [Verdict(2)]})
        ks.publish("inside", Verdict(3))
        return Verdict(1)

    @ks.step
    async def reviewed(review: Review) -> None:
        """Names the class in its annotation."""

    @ks.workflow
    async def judge() -> Verdict:
        verdict = await judged()
        await reviewed(Review(score=1))
        ks.publish("verdict", verdict)
        ks.emit(verdict)
        return verdict

    async with world.engine() as engine:
        run = await engine.start(judge)
        assert await run.result(60) == Verdict(1)
        assert await run.published() == {"inside": Verdict(3), "verdict": Verdict(1)}
        tokens = [event.data["value"] async for event in run.watch() if event.name == "token.emitted"]
        assert tokens == [Review(score=3), {"of": [Verdict(2)]}, Verdict(1)]


@pytest.mark.parametrize("options", [{}, {"timeout": 60}], ids=["forever", "timeout"])
async def test_waiting_run_in_memory_refuses_a_signal_and_waits_on(world, options):
    judge = waiting(Verdict, **options)
    async with world.engine(workflows=[judge], linger_seconds=60) as engine:
        run = await engine.start(judge, run_id="r")
        while not (engine.live.get("r") and engine.live["r"].waits):
            await engine.changed(0.01)
        async with world.engine(worker=False, workflows=[]) as stranger:
            for payload in ("nonsense", {"score": 1}, {"points": 1}, {"score": 2}):
                await stranger.signal("r", "verdict", payload)
        assert await run.result(60) == [1.0, 2.0]


async def test_parked_run_that_refuses_a_signal_is_parked_again(world):
    judge = waiting(Verdict)
    async with world.engine(workflows=[judge], linger_seconds=0.01) as engine:
        run = await engine.start(judge, run_id="r")
        await until_status(run, "waiting")
        async with world.engine(worker=False, workflows=[]) as stranger:
            other = await stranger.get("r")
            await other.signal("verdict", "nonsense")
            await until_status(run, "waiting")
            await other.signal("verdict", {"score": 1})
            await other.signal("verdict", {"score": 2})
        assert await run.result(60) == [1.0, 2.0]
        assert [one.data["signal"] for one in await run.checkpoints() if one.kind == "signal received"] == [2, 3]
