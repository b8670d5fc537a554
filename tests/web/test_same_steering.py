"""A handle and the API steer alike: every verb, with the same effects, the same refusals and the same audit."""

import time
from contextlib import asynccontextmanager

import pytest

import keepstep as ks
from keepstep.model import Status
from tests.web.remote import Local, Remote
from tests.web.test_api import client_of

pytestmark = [pytest.mark.live_only]


@pytest.fixture(params=["handle", "http"])
def steered(request, world):
    """Start a run, and steer it by its handle or over HTTP."""

    @asynccontextmanager
    async def steering(workflow, *args):
        async with world.engine() as engine, client_of(engine) as client:
            if request.param == "http":
                body = {"workflow": workflow.name, "args": list(args), "run_id": "r"}
                assert (await client.post("/runs", json=body)).status_code == 201
                yield Remote(client, "r")
            else:
                await engine.start(workflow, *args, run_id="r")
                yield Local(engine, "r")

    return steering


@ks.step
async def double(number):
    return 2 * number


def waiting():
    @ks.workflow(name="steered")
    async def program(number: int = 1):
        first = await double(number)
        added = await ks.wait_for("add")
        return await double(first + added)

    return program


async def test_signal_lets_the_run_go_on(steered):
    async with steered(waiting(), 5) as run:
        await run.reached(Status.WAITING)
        await run.signal("add", 1)
        assert await run.result() == 22
        with pytest.raises(ks.AlreadyFinished):
            await run.signal("add", 1)


async def test_signal_with_an_id_counts_once(steered):
    @ks.workflow(name="counting")
    async def program():
        seen = [await ks.wait_for("add")]
        await ks.sleep(0.05)
        return [*seen, await ks.wait_for("add", 0.2, default="none")]

    async with steered(program) as run:
        for _ in range(2):
            await run.signal("add", 1, id="one")
        assert await run.result() == [1, "none"]


async def test_question_is_answered(steered):
    @ks.workflow(name="answering")
    async def program():
        request = await ks.wait_for("question")
        request.reply(request.payload + 1)

    async with steered(program) as run:
        assert await run.ask("question", 41) == 42


async def test_pause_and_resume_keep_the_run(steered):
    async with steered(waiting()) as run:
        await run.reached(Status.WAITING)
        await run.pause("lunch")
        await run.reached(Status.PAUSED)
        await run.signal("add", 1)
        await run.resume("back")
        assert await run.result() == 6
        assert {("web", "lunch"), ("web", "back")} <= await run.actors()


async def test_cancel_is_final(steered):
    async with steered(waiting()) as run:
        await run.reached(Status.WAITING)
        await run.cancel("enough")
        await run.reached(Status.CANCELLED)
        assert ("web", "enough") in await run.actors()
        for act in (run.cancel, run.pause, run.retry):
            with pytest.raises(ks.AlreadyFinished):
                await act()


async def test_retry_rewind_and_fork_keep_what_was_done(steered):
    fails = [True]

    @ks.step(retry=None)
    async def work(number):
        if fails:
            raise ValueError("broken")
        return number

    @ks.workflow(name="working")
    async def program():
        return await work(await double(3))

    async with steered(program) as run:
        await run.reached(Status.FAILED)
        fails.clear()
        await run.retry("mended")
        assert await run.result() == 6
        assert await run.steps() == ["double#1", "work#1"]
        assert await run.rewind("work", dry_run=True) == ["work#1"]
        await run.rewind("work", "again")
        await run.reached(Status.COMPLETED)
        assert {("web", "mended"), ("web", "again")} <= await run.actors()
        forked = await run.fork("work", {"double#1": 50}, "what if")
        assert await forked.result() == 50
        assert ("web", "what if") in await forked.actors()


async def test_edited_state_decides_how_the_run_goes_on(steered):
    graph = ks.Graph("edited")

    @graph.step
    async def first(state):
        if state.get("fails", True):
            raise ValueError("broken")
        return {"seen": state["number"]}

    graph.entry("first")
    graph.exit("first")
    async with steered(graph, {"number": 1}) as run:
        await run.reached(Status.FAILED)
        await run.edit({"fails": False, "number": 7}, reason="set right")
        await run.reached(Status.COMPLETED)
        assert (await run.state())["seen"] == 7
        assert ("web", "set right") in await run.actors()


async def test_step_in_doubt_is_resolved(steered):
    @ks.step(at_most_once=True, timeout=0.02)
    def launch():
        time.sleep(0.05)

    @ks.workflow(name="launching")
    async def program():
        return await launch()

    async with steered(program) as run:
        await run.reached(Status.WAITING)
        await run.resolve("launch", "result", "up", "I saw it")
        assert await run.result() == "up"
        assert ("web", "I saw it") in await run.actors()


async def test_failed_undo_is_skipped(steered):
    async def refund(charged):
        raise ks.Permanent("the bank refuses")

    @ks.step(undo=refund)
    async def charge():
        return 1

    @ks.workflow(name="charging")
    async def program():
        await charge()
        raise ks.Permanent("no stock")

    async with steered(program) as run:
        await run.reached(Status.SET_ASIDE)
        assert await run.skip("settled by hand") == ["charge#1"]
        await run.reached(Status.FAILED)
        assert ("web", "settled by hand") in await run.actors()


async def test_callback_is_completed(steered):
    given = []

    @ks.workflow(name="called")
    async def program():
        callback = await ks.callback("paid")
        given.append(callback.token)
        return await callback.wait()

    async with steered(program) as run:
        await run.reached(Status.WAITING)
        await run.complete(given[-1], 5)
        assert await run.result() == 5


async def test_unknown_run_is_not_found(steered):
    async with steered(waiting()) as run:
        run.id = "nobody"
        for act in (run.cancel, run.pause, run.resume, run.retry):
            with pytest.raises(ks.RunNotFound):
                await act()
