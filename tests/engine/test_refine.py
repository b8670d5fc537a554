"""The quality loop: drafts get better, or a person is asked, and no call is repeated (F9)."""

import pytest

import keepstep as ks
from tests.engine.world import until_status


def loop(scores, calls, **options):
    """A workflow whose critic gives these scores one after the other."""

    @ks.step
    async def draft(ask):
        calls.append(("draft", ask["round"], ask["feedback"]))
        return f"draft {ask['round']}"

    @ks.step
    async def judge(ask):
        calls.append(("judge", ask["round"], ask["draft"]))
        return {"score": scores[ask["round"] - 1], "feedback": f"improve {ask['draft']}"}

    @ks.workflow
    async def refining():
        done = await ks.refine("a poem", generator=draft, critic=judge, **options)
        return done.plain()

    return refining


async def ended(world, scores, **options):
    calls = []
    async with world.engine() as engine:
        return await (await engine.start(loop(scores, calls, **options))).result(30), calls


@pytest.mark.one_store
async def test_good_draft_ends_the_loop(world):
    done, calls = await ended(world, [0.5, 0.9])
    assert (done["result"], done["score"], done["rounds"], done["accepted_by"]) == ("draft 2", 0.9, 2, "critic")
    assert [one for one in calls if one[0] == "draft"] == [("draft", 1, None), ("draft", 2, "improve draft 1")]


@pytest.mark.one_store
async def test_draft_that_is_no_better_ends_the_loop(world):
    done, _ = await ended(world, [0.5, 0.5, 0.9])
    assert (done["result"], done["rounds"], done["accepted_by"]) == ("draft 1", 2, "")


@pytest.mark.one_store
async def test_loop_has_at_most_three_rounds(world):
    done, calls = await ended(world, [0.1, 0.2, 0.3, 0.9])
    assert (done["result"], done["rounds"], done["accepted_by"]) == ("draft 3", 3, "")
    assert len(calls) == 6


@pytest.mark.parametrize(
    "answer, result, by", [(True, "draft 2", "person"), (False, "draft 2", ""), ("mine", "mine", "person")]
)
@pytest.mark.one_store
async def test_person_decides_about_a_draft_that_is_not_good_enough(world, answer, result, by):
    calls = []
    engine = await world.started()
    flow = loop([0.1, 0.2, 0.1], calls, escalate="decide")
    run = await engine.start(flow, run_id="r")
    await until_status(run, "waiting")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    assert (await run.published())["decide"]["draft"] == "draft 2"
    await run.signal("decide", answer)
    done = await run.result(30)
    assert (done["result"], done["accepted_by"], len(calls)) == (result, by, 6)
    await engine.close()


@pytest.mark.one_store
async def test_silent_person_has_not_accepted(world):
    done, _ = await ended(world, [0.1, 0.1], escalate="decide", timeout=0.05)
    assert done["accepted_by"] == ""


@pytest.mark.one_store
async def test_agents_generate_and_criticise(world):
    @ks.agent(capabilities=["write"])
    async def writer(ask):
        return f"{ask['task']} {ask['round']}"

    @ks.agent
    async def critic(ask):
        return ask["round"] / 2

    @ks.workflow
    async def refining():
        done = await ks.refine("poem", generator="write", critic=critic, threshold=1)
        return done.result

    async with world.engine(agents=[writer, critic]) as engine:
        run = await engine.start(refining)
        assert await run.result(30) == "poem 2"
        agents = [one.agent for one in await run.checkpoints() if one.kind == "agent started"]
        assert agents == ["writer", "critic", "writer", "critic"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_bad_judgement_is_refused(world):
    with pytest.raises(ks.DefinitionError, match="must return a score"):
        await ks.refine("x", generator=lambda ask: "draft", critic=lambda ask: "good")
    with pytest.raises(ks.DefinitionError, match="generator= takes"):
        await ks.refine("x", generator=3, critic=len)
    with pytest.raises(ks.DefinitionError, match="rounds"):
        await ks.refine("x", generator=len, critic=len, rounds=0)
    done = await ks.refine("x", generator=lambda ask: ask["round"], critic=lambda ask: ask["draft"] / 2)
    assert (done.result, done.accepted) == (2, True)
