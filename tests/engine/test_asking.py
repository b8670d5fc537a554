"""Questions between runs, and one signal to many runs (F3)."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.world import until, until_recorded, until_status

pytestmark = pytest.mark.on_postgres


@ks.workflow(name="answering in messages")
async def answering(count):
    seen = []
    for _ in range(count):
        request = await ks.wait_for("question")
        seen.append(request.payload)
        request.reply({"to": request.payload})
    return seen


@ks.workflow(name="asking in messages")
async def asking(other, count=1, seconds=30.0):
    return [await ks.ask(other, "question", number, timeout=seconds) for number in range(count)]


@ks.workflow(name="asking plainly")
def asking_plainly(other):
    return ks.ask(other, "question", "plain").result()


@ks.workflow(name="answering plainly")
def answering_plainly():
    request = ks.wait_for("question").result()
    request.reply(request.payload + "!")


async def test_reply_reaches_the_run_that_asks(world):
    async with world.engine() as engine:
        answers = await engine.start(answering, 2, run_id="answers")
        asks = await engine.start(asking, "answers", 2)
        assert await asks.result(30) == [{"to": 0}, {"to": 1}]
        assert await answers.result(30) == [0, 1]


async def test_plain_code_asks_and_answers(world):
    async with world.engine() as engine:
        await engine.start(answering_plainly, run_id="answers")
        asks = await engine.start(asking_plainly, "answers")
        assert await asks.result(30) == "plain!"


async def test_program_and_run_may_ask_the_same_run(world):
    async with world.engine() as engine:
        answers = await engine.start(answering, 2, run_id="answers")
        assert await answers.ask("question", "from outside") == {"to": "from outside"}
        assert await (await engine.start(asking, "answers")).result(30) == [{"to": 0}]


async def test_child_is_asked_by_its_handle(world):
    @ks.workflow(name="asking a child")
    async def parent():
        child = await ks.start(answering, 1)
        return await ks.ask(child, "question", "child"), await child

    async with world.engine() as engine:
        assert await (await engine.start(parent)).result(30) == ({"to": "child"}, ["child"])


async def test_question_without_a_reply_times_out(world):
    async with world.engine() as engine:
        silent = await engine.start(answering, 0, run_id="ended")
        await silent.result(30)
        run = await engine.start(asking, "ended")
        with pytest.raises(ks.RunFailed, match="AlreadyFinished"):
            await run.result(30)
        with pytest.raises(ks.RunFailed, match="RunNotFound"):
            await (await engine.start(asking, "nobody")).result(30)
        deaf = await engine.start(deaf_ears, run_id="deaf")
        run = await engine.start(asking, "deaf", seconds=0.05)
        with pytest.raises(ks.RunFailed, match=r"no reply to 'question' from run 'deaf' came within 0.05 s"):
            await run.result(30)
        await deaf.cancel()


@ks.workflow(name="deaf ears in messages")
async def deaf_ears():
    await ks.wait_for("something else")


async def test_reply_reaches_a_run_that_was_parked(world):
    async with world.engine(linger_seconds=0.01) as engine:
        late = await engine.start(answering_late, run_id="late")
        asks = await engine.start(asking, "late")
        await until_status(asks, "waiting")
        await late.signal("go")
        assert await asks.result(30) == ["late"]


@ks.workflow(name="answering late")
async def answering_late():
    request = await ks.wait_for("question")
    await ks.wait_for("go")
    request.reply("late")


async def test_fork_asks_for_itself(world):
    async with world.engine() as engine:
        late = await engine.start(answering_each, 2, run_id="each")
        asks = await engine.start(asking, "each")
        await until_recorded(asks, "ask:question#1")
        fork = await engine.fork(asks.id, run_id="forked")
        await until(lambda: _has_signals(engine, "each", 2))
        await late.signal("go")
        assert await asks.result(30) == [0]
        assert await fork.result(30) == [0]


@ks.workflow(name="answering each")
async def answering_each(count):
    requests = [await ks.wait_for("question") for _ in range(count)]
    await ks.wait_for("go")
    for request in requests:
        request.reply(request.payload)


async def _has_signals(engine, run, count):
    return (await (await engine.get(run)).run()).signals >= count


async def test_secret_is_refused_in_a_question_and_in_a_broadcast(world, monkeypatch):
    if world.encrypted:
        pytest.skip("an encrypted store may hold secrets")
    monkeypatch.setenv("API_TOKEN", "s3cret-value-of-the-token")

    @ks.workflow(name="asking with a secret")
    async def telling(how):
        revealed = ks.Secret("API_TOKEN").reveal()
        await (ks.ask("x", "question", revealed) if how == "ask" else ks.broadcast(["x"], "go", revealed))

    async with world.engine() as engine:
        for how in ("ask", "broadcast"):
            with pytest.raises(ks.RunFailed, match="revealed secret"):
                await (await engine.start(telling, how)).result(30)


@ks.workflow(name="hearing in messages")
async def hearing():
    return await ks.wait_for("go")


@ks.workflow(name="hearing later")
async def hearing_later(rounds):
    if rounds:
        ks.continue_as(rounds - 1)
    return await ks.wait_for("go")


@ks.workflow(name="telling all")
async def telling_all(runs):
    return await ks.broadcast(runs, "go", "all")


@ks.workflow(name="telling all plainly")
def telling_all_plainly(runs):
    return ks.broadcast(runs, "go", "all").result()


@pytest.mark.parametrize("form", ["async", "plain", "outside"])
async def test_broadcast_reaches_all_that_go_on(world, form):
    async with world.engine() as engine:
        ended = await engine.start(answering, 0)
        await ended.result(30)
        hears = [await engine.start(hearing) for _ in range(3)]
        series = await engine.start(hearing_later, 1, run_id="series")
        await until(lambda: _continues(engine, "series"))
        runs = [*(one.id for one in hears), "series", "nobody", ended.id]
        if form == "outside":
            reached = await engine.broadcast(runs, "go", "all")
        else:
            tells = await engine.start(telling_all if form == "async" else telling_all_plainly, runs)
            reached = await tells.result(30)
        assert reached == runs[:4]
        assert await asyncio.gather(*(one.result(30) for one in [*hears, series])) == ["all"] * 4


async def _continues(engine, run):
    return (await (await engine.get(run)).run()).continued_as is not None


def test_bad_targets_are_refused():
    @ks.workflow(name="bad targets")
    async def bad(how):
        if how == "text":
            await ks.broadcast("r1", "go")
        elif how == "reserved":
            await ks.ask("r1", "ks:cancel")
        else:
            await ks.broadcast([f"r{number}" for number in range(1001)], "go")

    for how, words in (("text", "list of ids"), ("reserved", "reserves"), ("many", "at most 1,000 runs")):
        with pytest.raises(ks.RunFailed, match=words):
            ks.run(bad, how, url="memory:")
