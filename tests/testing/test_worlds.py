"""Virtual time for users: months pass in milliseconds, and only when a test lets them."""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from keepstep.testing import Events, in_virtual_time, run, stub, world
from keepstep.testing.fixtures import keepstep_world  # noqa: F401 - a fixture
from keepstep.workflows.definition import Workflow

DAY = 86_400.0
START = datetime(2026, 1, 1, tzinfo=UTC)


@ks.step(retry=ks.Retry(attempts=4, base_seconds=DAY, factor=2, cap_seconds=10 * DAY))
async def charge(amount: int) -> int:
    return amount


@ks.step
def count(amount: int) -> int:
    time.sleep(0.002)
    return amount + 1


@ks.step(timeout=30)
async def slow() -> str:
    await asyncio.sleep(1000)
    return "never"


async def subscription(amount: int) -> list[object]:
    paid = [await charge(amount)]
    await ks.sleep(days=30)
    paid.append(await count(amount))
    cancelled = await ks.wait_for("cancelled", timeout=365 * DAY, default=False)
    return [*paid, cancelled, ks.now()]


async def patient() -> object:
    return await ks.wait_for("answer")


async def late() -> str:
    try:
        return await slow()
    except ks.StepTimedOut:
        return "late"


def blocking(amount: int) -> int:
    ks.sleep(days=7).result()
    return charge(amount).result()


SUBSCRIPTION, PATIENT, LATE, BLOCKING = (Workflow(one) for one in (subscription, patient, late, blocking))


def at(moment: datetime, **span: float) -> bool:
    """Whether so long after the start; work takes a few milliseconds of virtual time, too."""
    wanted = START + timedelta(**span)
    return wanted <= moment < wanted + timedelta(seconds=1)


def ended(handle) -> list[str]:
    """The calls that have an outcome."""
    return [one.step for one in handle.checkpoints() if one.step and one.kind != "wait started"]


def in_world(**options):
    return world(workflows=[SUBSCRIPTION, PATIENT, LATE, BLOCKING], **options)


def test_a_year_passes_in_no_time():
    with in_world() as here:
        paid, counted, cancelled, ended = here.start(SUBSCRIPTION, 5).result()
    assert (paid, counted, cancelled) == (5, 6, False)
    assert at(ended, days=395)


def test_run_is_the_short_way():
    assert run(ks.workflow(name="testing late")(late)) == "late"


def test_time_passes_only_when_the_test_says_so():
    with in_world() as here:
        handle = here.start(SUBSCRIPTION, 5)
        assert here.now == START
        here.advance()
        assert handle.status() == "waiting"
        here.advance(days=29)
        assert ended(handle) == ["charge#1"]
        here.advance(days=1)
        assert ended(handle) == ["charge#1", "sleep#1", "count#1"]
        assert at(here.now, days=30)
        here.advance(hours=1, minutes=1, seconds=1)
        handle.signal("cancelled", "by me")
        assert handle.result()[2] == "by me"
        assert at(here.now, days=30, hours=1, minutes=1, seconds=1)


def test_time_does_not_run_backwards():
    with in_world() as here, pytest.raises(ks.DefinitionError, match="backwards"):
        here.advance(-1)


def test_backoff_and_timeouts_are_jumped_over():
    with in_world() as here, stub(charge, raises=[ConnectionError("one"), ConnectionError("two")], returns=9) as calls:
        assert here.start(BLOCKING, 5).result() == 9
        assert len(calls.calls) == 3
        assert at(here.now, days=7 + 1 + 2)
        assert here.start(LATE).result() == "late"
        assert at(here.now, days=10, seconds=30)


def test_a_run_that_cannot_end_by_itself_says_what_it_waits_for():
    with in_world() as here:
        handle = here.start(PATIENT)
        with pytest.raises(ks.TimedOut, match="waits for the signal answer, which nobody sends"):
            handle.result()
        handle.signal("answer", 42)
        assert handle.result() == 42


def test_a_paused_run_does_not_end():
    with in_world() as here:
        handle = here.start(SUBSCRIPTION, 5)
        handle.pause()
        with pytest.raises(ks.TimedOut, match="paused"):
            handle.result()
        handle.resume()
        assert handle.result()[0] == 5


def test_body_that_never_returns_raises_timed_out():
    async def hang() -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    with in_world() as here, stub(charge, calls=lambda _: hang()):
        handle = here.start(SUBSCRIPTION, 5)
        with pytest.raises(ks.TimedOut, match="does not end"):
            handle.result()
        with pytest.raises(ks.TimedOut, match="was not finished within 60 s"):
            handle.result(timeout=60)


def test_failures_come_out_as_they_do_elsewhere():
    with in_world() as here, stub(charge, raises=ks.Permanent("no")), pytest.raises(ks.RunFailed, match="no"):
        here.start(SUBSCRIPTION, 5).result()


def test_moments_are_waited_for_by_name():
    with in_world() as here:
        handle = here.start(SUBSCRIPTION, 5)
        event = here.until("step.completed", step="count")
        assert event.run == handle.id
        assert at(here.now, days=30)
        assert [event.step for event in here.events.named("step.completed")] == ["charge#1", "count#1"]
        here.until("run.completed", run=handle.id)
        with pytest.raises(ks.TimedOut, match=r"step\.completed count does not come"):
            here.until("step.completed", step="count", times=2)


def test_a_world_may_begin_elsewhere_and_be_replayed_always():
    with in_world(at=datetime(2031, 5, 1, tzinfo=UTC), replay_always=True) as here:
        assert here.now.year == 2031
        assert here.start(SUBSCRIPTION, 5).result()[:3] == [5, 6, False]
    with pytest.raises(ks.DefinitionError, match="time zone"):
        world(at=datetime(2031, 5, 1))  # noqa: DTZ001 - what is refused


def test_a_world_on_a_file_goes_on_in_the_next(tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    with in_world(url=url) as here:
        here.start(SUBSCRIPTION, 5, run_id="s-1")
        here.advance(days=31)
    with in_world(url=url, at=START + timedelta(days=32)) as here:
        handle = here.get("s-1")
        assert ended(handle)[-1] == "count#1"
        assert handle.result()[:3] == [5, 6, False]


def test_ended_world_refuses_to_advance():
    with in_world() as here:
        pass
    with pytest.raises(ks.DefinitionError, match="has ended"):
        here.advance(1)


@in_virtual_time
async def test_async_test_runs_in_virtual_time():
    began = asyncio.get_running_loop().time()
    async with in_world() as engine:
        handle = await engine.start(SUBSCRIPTION, 5)
        await asyncio.sleep(31 * DAY)
        await handle.signal("cancelled")
        assert (await handle.result())[:3] == [5, 6, True]
    assert 31 * DAY <= asyncio.get_running_loop().time() - began < 32 * DAY


def test_the_decorator_keeps_the_name_and_passes_arguments_on():
    @in_virtual_time
    async def doubled(number: int) -> int:
        await asyncio.sleep(1e6)
        return 2 * number

    assert doubled.__name__ == "doubled"
    assert doubled(4) == 8


def test_sync_and_async_entry_name_each_other():
    async def inside() -> None:
        with pytest.raises(ks.DefinitionError, match="@in_virtual_time"):
            await world().__aenter__()
        with pytest.raises(ks.DefinitionError, match="async with world"), world():
            pass

    asyncio.run(inside())


def test_the_fixture_is_a_world(keepstep_world):  # noqa: F811 - a fixture
    keepstep_world.advance(days=1)
    assert at(keepstep_world.now, days=1)


# -- events ------------------------------------------------------------------------------------------------------------


def test_a_recorder_of_events_serves_any_engine():
    async def main() -> None:
        events = Events()
        async with ks.open("memory:", workflows=[PATIENT, SUBSCRIPTION], observers=[events]) as engine:
            handle = await engine.start(PATIENT)
            await events.until("run.started", run=handle.id)
            await handle.signal("answer", 1)
            told = await events.until("run.completed")
            assert told.run == handle.id
            assert await handle.result() == 1
        names = [event.name for event in events]
        assert names.index("run.created") < names.index("run.started") < names.index("run.completed")
        assert len(events) == len(names)
        assert "run.completed" in repr(events)
        events.clear()
        assert not len(events)

    asyncio.run(main())


def test_world_emits_to_other_observers_too(caplog):
    told = []
    with caplog.at_level(logging.ERROR), in_world(observers=told.append) as here:
        here.start(LATE).result()
    assert {event.name for event in told} >= {"run.started", "run.completed"}
    assert len(told) == len(here.events)


@ks.step
async def takes(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "slow"


async def nap(seconds: float) -> None:
    await ks.sleep(seconds)


async def limited() -> str:
    try:
        async with ks.timeout(2):
            return await takes(3)
    except ks.TimedOut:
        return "timed out"


async def raced() -> str:
    async def two() -> str:
        await ks.sleep(2)
        return "nap"

    return await ks.race(takes(3), two())


NAP, LIMITED, RACED = (Workflow(one) for one in (nap, limited, raced))


@pytest.mark.parametrize("seconds", [1, 2, 2.5, 5])
def test_wait_takes_its_time_whether_or_not_it_stays_in_memory(seconds):
    with world(workflows=[NAP]) as here:
        handle = here.start(NAP, seconds)
        handle.result()
        row = handle.run()
    assert (row.updated_at - row.created_at).total_seconds() == pytest.approx(seconds, abs=0.01)


@pytest.mark.parametrize("workflow, result", [(LIMITED, "timed out"), (RACED, "nap")])
def test_wait_beside_a_step_ends_as_in_real_time(workflow, result):
    with world(workflows=[workflow]) as here:
        assert here.start(workflow).result() == result


def test_run_that_sleeps_one_second_ends_within_one_and_a_half():
    with world(workflows=[NAP]) as here:
        handle = here.start(NAP, 1)
        here.advance(1.5)
        assert handle.status() == "completed"
