"""One run, many lives: it is crashed and recovered with ever other timings, and must never notice."""

import asyncio

from tests.engine.world import replay_from_every_prefix, told, until_at_last_wait


class Pace:
    """How long each body takes; changed between recoveries: a second life never has the timings of the first."""

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
        del effects[len(ran) :]  # from an earlier beginning, later steps do run again
    await engine.close()
    return result


async def _finishes(handle, length):
    """From wherever a crash may have fallen, the run comes to an end."""
    await handle.signal("go", id="go again")
    await handle.result(5)
