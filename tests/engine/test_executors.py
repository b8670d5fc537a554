"""An executor from outside the package: the port is all that it needs to know."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest

import keepstep as ks
from keepstep.engine.parts import Parts
from keepstep.ports import BodyTimedOut

pytestmark = pytest.mark.live_only


class _LeaseLost(Exception):
    pass


class OneAtATime:
    """Runs plain bodies one at a time, in the order in which they arrive."""

    def __init__(self):
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="one-at-a-time")

    async def execute(self, work, seconds):
        while True:
            future = self._pool.submit(copy_context().run, self._begin, work)
            body = asyncio.wrap_future(future)
            try:
                done, _ = await asyncio.wait([body], timeout=seconds)
            except asyncio.CancelledError:
                future.cancel()
                raise
            if not done:
                raise BodyTimedOut(seconds, body)
            try:
                return body.result()
            except _LeaseLost:
                if not work.may_begin():
                    raise asyncio.CancelledError from None

    @staticmethod
    def _begin(work):
        if not work.holds_lease():
            raise _LeaseLost
        return work.call_body()

    def close(self):
        self._pool.shutdown()


@pytest.fixture
def parts():
    executor = OneAtATime()
    yield Parts(executors={"thread": executor})
    executor.close()


async def test_plain_bodies_never_overlap_and_async_ones_may(world, parts):
    running, numbers = set(), []
    both = asyncio.Barrier(2)

    @ks.step
    def plain(number):
        running.add(number)
        numbers.append(len(running))
        threading.Event().wait(0.01)
        running.remove(number)
        return threading.current_thread().name

    @ks.step
    async def inline(number):
        await both.wait()
        return number

    @ks.workflow(name="one at a time")
    async def program():
        names = await ks.gather(*(plain(number) for number in range(8)))
        return set(names), await ks.gather(inline(1), inline(2))

    async with world.engine(parts=parts) as engine:
        assert await (await engine.start(program)).result(30) == ({"one-at-a-time_0"}, [1, 2])
    assert numbers == [1] * 8


async def test_body_is_in_its_run_and_raises_what_it_likes(world, parts):
    @ks.step
    def key():
        return ks.idempotency_key()

    @ks.step
    def stops():
        raise StopIteration("no more")

    @ks.workflow(name="within")
    async def program():
        try:
            await stops()
        except ks.StepFailed as error:
            return await key(), str(error)

    async with world.engine(parts=parts) as engine:
        found, message = await (await engine.start(program)).result(30)
    assert len(found) == 40
    assert "StopIteration: no more" in message


async def test_next_attempt_waits_for_a_body_that_is_too_late(world, parts, effects):
    @ks.step(timeout=0.05, retry=ks.Retry(attempts=2, base_seconds=0))
    def late():
        effects.append("begun")
        threading.Event().wait(0.3 if len(effects) == 1 else 0)
        effects.append("ended")
        return "in time"

    @ks.workflow(name="late")
    async def program():
        return await late()

    async with world.engine(parts=parts) as engine:
        assert await (await engine.start(program)).result(30) == "in time"
    assert effects == ["begun", "ended", "begun", "ended"]


async def test_recovered_run_uses_the_executor_at_once(world, parts, effects):
    @ks.step
    def work():
        effects.append(threading.current_thread().name)

    @ks.workflow(name="recovered")
    async def program():
        await ks.wait_for("go")
        await work()

    engine = await world.started(linger_seconds=60, parts=parts)
    await (await engine.start(program, run_id="r")).signal("go")
    engine = await world.crash_and_recover(engine, parts=parts)
    await (await engine.get("r")).result(30)
    await engine.close()
    assert set(effects) == {"one-at-a-time_0"}
