"""Phases: a dag of workflows, with dependency groups, policies and a time for each phase (F4, F5)."""

import pytest

import keepstep as ks
from keepstep.errors import InvalidGraph

pytestmark = pytest.mark.on_postgres


@ks.step
async def look_up(word):
    return word.upper()


@ks.workflow(name="phase of planning")
async def planning(topic: str) -> list[str]:
    return [f"{topic} {number}" for number in range(3)]


@ks.workflow(name="phase of research")
async def research(questions: list[str]) -> list[str]:
    return await ks.gather(*(look_up(one) for one in questions))


@ks.workflow(name="phase that never ends")
async def endless() -> None:
    async with ks.timeout(0.2):
        await ks.wait_for("never")


@ks.workflow(name="phase of writing")
async def writing(found: list[str] | None, rumours: None = None) -> int:
    return len(found or [])


def project(name, wait):
    dag = ks.Dag(name)
    dag.add(planning, "plan")
    dag.add(research, "research", needs={"questions": "plan"})
    dag.add(endless, "rumours")
    dag.add(writing, "write", needs={"found": "research", "rumours": "rumours"}, wait=wait)
    return dag


@pytest.mark.parametrize("wait", [ks.Any(), ks.Quorum(1)], ids=["any", "quorum"])
async def test_phase_begins_when_enough_of_its_group_are_over(world, wait):
    dag = project(f"phases with {type(wait).__name__}", wait)
    async with world.engine() as engine:
        assert (await (await engine.start(dag, topic="bees")).result(60))["write"] == 3


async def test_phase_that_takes_too_long_fails_those_that_need_all(world):
    dag = project("phases with all", ks.All())
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="rumours"):
            await (await engine.start(dag, topic="bees")).result(60)


def test_cycle_of_phases_is_refused_and_printed():
    dag = ks.Dag("phases in a circle")
    for name, need in (("plan", "review"), ("write", "plan"), ("review", "write")):
        dag.add(look_up.options(name=name), name, needs={"word": need})
    with pytest.raises(InvalidGraph, match=r"plan.*write.*review|write.*review.*plan|review.*plan.*write"):
        ks.run(dag, url="memory:")
