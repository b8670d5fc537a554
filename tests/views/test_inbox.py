"""The inbox as data: items with their contexts and deadlines, and the fate of items that were shown."""

import asyncio
from datetime import UTC, datetime, timedelta
from functools import wraps

import keepstep as ks
from keepstep.model import Status
from keepstep.views.inbox import Decisions, InboxQuery, ItemKind, context_of, inbox


@ks.workflow(name="asked in the inbox")
async def asked(seconds: float | None = None) -> str:
    ks.publish("approved", {"tool": "refund"})
    return str(await ks.wait_for("approved", timeout=seconds, default="late"))


def give_back(result: int) -> None:
    raise ks.Permanent("the bank is closed")


@ks.step(undo=give_back)
async def pay() -> int:
    return 5


@ks.workflow(name="undone in the inbox")
async def undone() -> None:
    await pay()
    raise ks.Permanent("no room left")


stopped = ks.Graph("stopped in the inbox", interrupt_before=["charge"])
stopped.add(lambda state: {"price": 100}, name="order")
stopped.add(lambda state: {"charged": state["price"]}, name="charge")
stopped.edge("order", "charge")
stopped.entry("order")
stopped.exit("charge")


def opened():
    """An engine in real time, which does not leap to a deadline while the inbox is read in a thread."""
    return ks.open("memory:", workflows=[asked, undone, stopped])


def in_real_time(test):
    @wraps(test)
    def run():
        asyncio.run(test())

    return run


async def started(engine, workflow, *args, run_id, status=Status.WAITING):
    handle = await engine.start(workflow, *args, run_id=run_id)
    assert await handle.reached(status) is status
    return handle


def clock(engine):
    return datetime.fromtimestamp(engine.clock.now(), UTC)


@in_real_time
async def test_earliest_deadline_stands_first_with_its_question():
    async with opened() as engine:
        times = {"never": None, "later": 7200.0, "soon": 3600.0}
        await asyncio.gather(*(started(engine, asked, seconds, run_id=name) for name, seconds in times.items()))
        found = await inbox(engine, InboxQuery(), clock(engine))
        assert [item.run.id for item in found.items] == ["soon", "later", "never"]
        soon = await context_of(engine, found.items[0])
        began = found.items[0].run.created_at
        assert abs(soon.deadline - began - timedelta(hours=1)) < timedelta(seconds=1)
        assert soon.question == {"tool": "refund"}
        assert soon.input == {"args": [3600.0], "kwargs": {}}
        assert (await context_of(engine, found.items[2])).deadline is None


@in_real_time
async def test_every_kind_of_request_is_an_item():
    async with opened() as engine:
        await started(engine, stopped, run_id="g")
        paused = await started(engine, asked, run_id="p")
        await paused.by("ann").pause("holidays")
        await paused.reached("paused")
        await started(engine, undone, run_id="u", status=Status.SET_ASIDE)
        found = await inbox(engine, InboxQuery(), clock(engine))
        by_run = {item.run.id: item for item in found.items}
        kinds = {run: (item.kind, item.name) for run, item in by_run.items()}
        assert kinds == {
            "g": (ItemKind.BREAKPOINT, "before charge#1"),
            "p": (ItemKind.PAUSED, ""),
            "u": (ItemKind.UNDO, ""),
        }
        assert found.counts[ItemKind.UNDO] == 1
        context = await context_of(engine, by_run["p"])
        assert (context.by, context.reason) == ("ann", "holidays")
        assert (await context_of(engine, by_run["u"])).failed_undo == ("pay#1",)


@in_real_time
async def test_filters_select_by_kind_workflow_and_age():
    async with opened() as engine:
        await started(engine, asked, run_id="a")
        await started(engine, stopped, run_id="g")
        now = clock(engine)

        async def selected(**query):
            return [item.run.id for item in (await inbox(engine, InboxQuery(**query), now)).items]

        assert await selected(kinds=frozenset({ItemKind.BREAKPOINT})) == ["g"]
        assert await selected(workflow=asked.name) == ["a"]
        assert await selected(before=now - timedelta(hours=1)) == []


@in_real_time
async def test_fate_of_each_shown_item_is_told_once():
    async with opened() as engine:
        names = ("yes", "no", "gone")
        found = await asyncio.gather(*(started(engine, asked, run_id=name) for name in names))
        runs = dict(zip(names, found, strict=True))
        await started(engine, undone, run_id="undo", status=Status.SET_ASIDE)
        decisions = Decisions(engine)
        decisions.show((await inbox(engine, InboxQuery(), clock(engine))).items)
        assert await decisions.recent(clock(engine)) == []
        await runs["yes"].by("ann").signal("approved", True)
        await runs["no"].by("ben").signal("approved", False)
        await runs["gone"].by("cid").cancel("no need")
        await (await engine.get("undo")).by("dora").skip(reason="paid by hand")
        for run in runs.values():
            await run.reached("completed")
        found = {one.item.run.id: one for one in await decisions.recent(clock(engine))}
        assert {run: (one.act, one.by, one.reason) for run, one in found.items()} == {
            "yes": ("approved", "ann", ""),
            "no": ("denied", "ben", ""),
            "gone": ("cancelled", "cid", "no need"),
            "undo": ("skipped", "dora", "paid by hand"),
        }
        assert len(await decisions.recent(clock(engine))) == 4
        assert await decisions.recent(clock(engine) + timedelta(hours=2)) == []
