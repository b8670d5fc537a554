"""Outcomes reach the code in the recorded order, so that a program that races its steps replays as it ran (K4)."""

import asyncio

import keepstep as ks

from tests.engine.world import replay_from_every_prefix, told, until_at_last_wait


class Pace:
    """How long each body takes; changed between recoveries, because a second life never has the timings of the first."""

    def __init__(self, **seconds):
        self.seconds = seconds

    async def take(self, name):
        await asyncio.sleep(self.seconds.get(name, 0))


async def live_then_many_lives(world, workflow, pace, effects, *args, lives=6):
    """Run to its last wait, then crash and recover with ever other timings: nothing new may run, nothing may change."""
    options = {"linger_seconds": 60.0, "recovery_limit": 100}
    engine = await world.started(**options)
    run = await engine.start(workflow, *args, run_id="r")
    await until_at_last_wait(engine, "r")
    first, ran = await told(run), list(effects)
    for life in range(lives):
        for name in pace.seconds:
            pace.seconds[name] = 0.03 if (life + len(name)) % 2 else 0.0
        engine = await world.crash_and_recover(engine, **options)
        run = await engine.get("r")
        await until_at_last_wait(engine, "r")
        assert await told(run) == first
        assert list(effects) == ran
    await run.signal("go")
    result = await run.result(5)
    if world.kind == "memory":
        await replay_from_every_prefix(run, _finishes)
    await engine.close()
    return result


async def _finishes(handle, length):
    """From wherever a crash may have fallen, the run comes to an end."""
    await handle.signal("go", id="go again")
    await handle.result(5)


async def test_a_first_completed_wait_picks_another_winner_on_replay(world, effects):
    pace = Pace(a=0.03, bb=0.001)

    @ks.step
    async def ask(name):
        await pace.take(name)
        effects.append(name)
        return name

    @ks.step
    async def use(names):
        effects.append(("use", *names))
        return names

    @ks.workflow
    async def first():
        tasks = [asyncio.create_task(ask("a")), asyncio.create_task(ask("bb"))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        used = await use(sorted(task.result() for task in done))
        await asyncio.gather(*tasks)
        await ks.wait_for("go")
        return used

    assert await live_then_many_lives(world, first, pace, effects) == ["bb"]


async def test_a_cancelled_loser_runs_further_on_replay(world, effects):
    pace = Pace(fast=0.03, slow=0.004)

    @ks.step
    async def work(name, number):
        await pace.take(name)
        effects.append((name, number))

    @ks.step
    async def end(winner):
        effects.append(winner)
        return winner

    @ks.workflow
    async def loser():
        async def fast():
            await work("fast", 0)
            return "fast"

        async def slow():
            for number in range(50):
                await work("slow", number)
            return "slow"

        tasks = [asyncio.create_task(fast()), asyncio.create_task(slow())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        winner = await end(next(iter(done)).result())
        await ks.wait_for("go")
        return winner

    assert await live_then_many_lives(world, loser, pace, effects) == "fast"


async def test_an_asyncio_timeout_round_a_step_ends_differently_on_replay(world, effects):
    pace = Pace(slow=0.2)

    @ks.step
    async def slow():
        await pace.take("slow")
        effects.append("slow")

    @ks.step
    async def note(what):
        effects.append(what)
        return what

    @ks.workflow
    async def limited():
        try:
            async with asyncio.timeout(0.02):
                await slow()
            how = await note("in time")
        except TimeoutError:
            how = await note("fallback")
        await ks.wait_for("go")
        return how

    assert await live_then_many_lives(world, limited, pace, effects, lives=4) == "fallback"
