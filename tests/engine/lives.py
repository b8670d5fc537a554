"""One run, many lives: it is crashed and recovered with ever other timings, and must never notice."""

import asyncio
from contextlib import asynccontextmanager

import keepstep as ks
from tests.engine.world import replay_from_every_prefix, told, until, until_at_last_wait, until_status


class PollInterval:
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
    result = await run.result(30)
    if world.kind == "memory":
        await replay_from_every_prefix(run, _finishes)
        del effects[len(ran) :]  # from an earlier beginning, later steps do run again
    await engine.close()
    return result


async def _finishes(handle, length):
    """From wherever a crash may have fallen, the run comes to an end."""
    await handle.signal("go", id="go again")
    await handle.result(30)


@asynccontextmanager
async def set_aside(world):
    """An engine whose run `r` is set aside, because its workflow has another version now."""

    @ks.step
    async def one():
        return 1

    @ks.workflow(name="changing")
    async def old():
        await one()
        await ks.wait_for("go")

    async with world.engine(workflows=[old]) as engine:
        await until_status(await engine.start(old, run_id="r"), "waiting")

    @ks.workflow(name="changing", version="2")
    async def new():
        return None

    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        await until_status(run, "set aside")
        yield engine


async def parked_child(world):
    """Leave a parked run `p` that waits for its parked child: the child's id."""

    @ks.workflow
    async def child():
        await ks.wait_for("never")

    @ks.workflow
    async def parent():
        return await (await ks.start(child)).result()

    async with world.engine() as engine:
        await until_status(await engine.start(parent, run_id="p"), "waiting")

        async def parked():
            return (await engine.list(parent="p", status=frozenset({ks.Status.WAITING}))).runs

        [born] = await until(parked)
        return born.id
