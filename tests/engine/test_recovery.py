"""Recovery handlers: asked after a worker died or by a person, recorded, and carried out by the verb of that name."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep import errors
from keepstep.model import Kind

pytestmark = pytest.mark.live_only


class Order:
    """A workflow of three steps whose second one hangs in the first life, and what its bodies did."""

    def __init__(self, recovery=None, **options):
        self.done = []
        self.hangs = asyncio.Event()
        self.hung = 0

        async def refund(result, item):
            self.done.append(f"refund {result}")

        @ks.step(undo=refund)
        async def charge(item):
            self.done.append("charge")
            return f"paid {item}"

        @ks.step
        async def pack(item):
            self.done.append("pack")
            if self.hung < 1:
                self.hung += 1
                self.hangs.set()
                await asyncio.Event().wait()
            return f"packed {item}"

        @ks.step
        async def ship(parcel):
            self.done.append("ship")
            return f"sent {parcel}"

        @ks.workflow(recovery=recovery, **options)
        async def order(item):
            paid = await charge(item)
            parcel = await pack(item)
            return paid, await ship(parcel)

        self.workflow = order


async def interrupted(world, order, **options):
    """An engine that has just found a run whose worker died in its second step, and the run."""
    engine = await world.started(**options)
    await engine.start(order.workflow, "pen", run_id="r")
    await order.hangs.wait()
    engine = await world.crash_and_recover(engine, **options)
    return engine, await engine.get("r")


RESULT = ("paid pen", "sent packed pen")


async def answers(run):
    return [one.data.get("handler") for one in await run.checkpoints() if one.kind is Kind.RECOVERED]


async def test_run_continues_without_a_handler(world):
    order = Order()
    engine, run = await interrupted(world, order)
    assert await run.result(30) == RESULT
    assert order.done == ["charge", "pack", "pack", "ship"]
    assert await answers(run) == [None]
    await engine.close()


@pytest.mark.parametrize(
    "handler, done",
    [
        ("continue", ["charge", "pack", "pack", "ship"]),
        ("retry step", ["charge", "pack", "pack", "ship"]),
        ("restart", ["charge", "pack", "charge", "pack", "ship"]),
    ],
)
async def test_named_handler_decides_how_the_run_goes_on(world, handler, done):
    order = Order(recovery=handler)
    engine, run = await interrupted(world, order)
    assert await run.result(30) == RESULT
    assert order.done == done
    assert await answers(run) == [handler]
    await engine.close()


async def test_skipped_step_gets_the_value_and_its_body_does_not_run(world):
    order = Order(recovery=ks.Recovery("skip step", value="a parcel"))
    engine, run = await interrupted(world, order)
    assert await run.result(30) == ("paid pen", "sent a parcel")
    assert order.done == ["charge", "pack", "ship"]
    await engine.close()


async def test_undo_cancels_the_run_and_undoes_its_steps(world):
    order = Order(recovery="undo")
    engine, run = await interrupted(world, order)
    with pytest.raises(ks.RunCancelled):
        await run.result(30)
    assert order.done == ["charge", "pack", "refund paid pen"]
    await engine.close()


async def test_set_aside_leaves_the_run_to_a_person(world):
    order = Order(recovery=ks.Recovery("set aside", reason="ask the shop"))
    engine, run = await interrupted(world, order)
    with pytest.raises(ks.RunSetAside, match="ask the shop") as refused:
        await run.result(30)
    assert isinstance(refused.value.__cause__, errors.HandlerFailed)
    assert order.done == ["charge", "pack"]
    await run.retry()
    assert await run.result(30) == RESULT
    await engine.close()


async def test_function_is_told_about_the_run_and_answers(world):
    told = []

    async def decide(info):
        told.append(info)
        return ks.Recovery("skip step", step=info.next[0], value="by hand")

    order = Order(recovery=decide)
    engine, run = await interrupted(world, order)
    assert await run.result(30) == ("paid pen", "sent by hand")
    [info] = told
    assert (info.run, info.last_success, info.next, info.handler) == ("r", "charge#1", ("pack#1",), "decide")
    assert info.recoverable
    assert info.recoveries == 1
    assert info.taken_from in info.why
    await engine.close()
