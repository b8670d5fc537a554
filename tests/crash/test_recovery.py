"""A crash before and after every write of a recovery, with every handler, and the recovery from it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

import keepstep as ks
from keepstep.model import Kind, Status
from keepstep.testing.faults.crash import CrashPoint, FilesDisk, MemoryDisk, SQLiteDisk, life, live
from tests.nightly import case

from . import programs
from .test_every_write import PostgresDisk

pytestmark = pytest.mark.crash

HANDLERS = ("continue", "retry step", "skip step", "restart", "undo", "set aside")


def is_first(step):
    """Note that the body of a step has begun, and return whether it never began before, in any life."""
    programs.EFFECTS.body()
    return len(programs.EFFECTS.bodies("main", step)) == 1


async def release(result, number):
    programs.EFFECTS.body()


@ks.step(undo=release)
async def reserve(number):
    programs.EFFECTS.body()
    return number


@ks.step
async def send(number):
    """Hang in the first life, so that the worker dies while the step is under way."""
    if is_first("send"):
        await asyncio.sleep(60)
    return number


@ks.step
async def refuse(number):
    if is_first("refuse"):
        raise ks.Permanent("not the first time")
    return number


def asked(info):
    """Answer with what the name of the workflow asks for."""
    handler = info.workflow.partition(" by ")[2]
    return ks.Recovery(handler, value="skipped" if handler == "skip step" else None)


@ks.step
async def note(number):
    programs.EFFECTS.body()
    return number


def made(name, recovery, step, around=reserve):
    @ks.workflow(name=f"crash: {name}", recovery=recovery)
    async def recovering():
        return [await around(1), await step(2), await around(3)]

    return recovering


def policy(handler):
    return ks.Recovery(handler, value="skipped" if handler == "skip step" else None)


BY_NAME = {one: made(f"named {one.replace(' ', '-')}", policy(one), send) for one in HANDLERS}
BY_FUNCTION = {one: made(f"asked by {one}", asked, send) for one in ("skip step", "restart")}
BY_PERSON = {one: made(f"failed {one.replace(' ', '-')}", None, refuse, note) for one in HANDLERS[:4]}


def disk_of(store, folder):
    clock = programs.FastClock()
    folder.mkdir()
    programs.record_to(folder / "effects")
    if store == "memory":
        return MemoryDisk(clock), clock
    if store == "postgres":
        return PostgresDisk(clock), clock
    if store == "files":
        return FilesDisk(folder / "runs", clock, power_loss="may_lose_last"), clock
    return SQLiteDisk(folder / "runs.db", clock, power_loss="may_lose_last"), clock


async def interrupted(disk, workflow, clock):
    """Leave a run whose worker has died in its second step."""
    async with life(disk, clock=clock) as (engine, _):
        await engine.open()
        await engine.start(workflow, run_id="main")
        while not programs.EFFECTS.bodies("main", "send"):  # noqa: ASYNC110 - written to a file
            await asyncio.sleep(0)


async def has_failed(disk, workflow, clock):
    """Leave a run that has failed at its second step."""

    async def play(engine):
        with contextlib.suppress(ks.RunFailed):
            await (await engine.start(workflow, run_id="main")).result()

    await live(disk, play, clock=clock)


async def to_its_end(engine):
    run = await engine.get("main")
    await programs.until(run, Status.SET_ASIDE)
    return await run.status()


def recovered_with(handler):
    """A client that asks for a recovery until a worker has answered, then waits for the end."""

    async def play(engine):
        run = await engine.get("main")
        value = "skipped" if handler == "skip step" else None
        if not any("handler" in one.data for one in await run.checkpoints() if one.trigger == "recovery"):
            with contextlib.suppress(ks.RunConflict, ks.AlreadyFinished):
                await run.recover(handler, value=value)
        return await to_its_end(engine)

    return play


async def crashed_at_every_write(store, folder, workflow, prepare, *, play, judge):
    """Recover a run with a crash at each write, then without one, and judge what is left. Return the crashes."""
    disk, clock = disk_of(store, folder / "undisturbed")
    await prepare(disk, workflow, clock)
    has_ended, _, writes = await live(disk, play, clock=clock)
    assert has_ended
    points = [CrashPoint(number, when, kind) for number, kind in enumerate(writes, 1) for when in ("before", "after")]
    for point in points:
        disk, clock = disk_of(store, folder / f"{point.number}{point.when}")
        await prepare(disk, workflow, clock)
        await live(disk, play, point, clock=clock)
        await live(disk, play, clock=clock)
        async with life(disk, clock=clock, worker=False) as (engine, _):
            await engine.open()
            await judge(engine, await engine.get("main"), f"crashed {point}")
    return len(points)


def expect(handler):
    """What must be left of a run, whenever its recovery was interrupted."""

    async def judge(engine, run, where):
        status, history = await run.status(), await run.checkpoints()
        counted = [one.step for one in await run.checkpoints(counted=True) if one.kind is Kind.STEP_COMPLETED]
        bodies = {name: len(programs.EFFECTS.bodies("main", name)) for name in ("reserve", "send", "refuse", "release")}
        answers = [one for one in history if one.kind is Kind.RECOVERED and one.trigger == "recovery"]
        answers = [one for one in answers if "handler" in one.data]
        assert len(counted) == len(set(counted)), f"{where}: a step counts twice"
        assert all(one.data["handler"] == handler for one in answers), where
        assert (await engine.care.verify()).sound, where
        if handler == "set aside":
            assert (status, bodies["send"]) == (Status.SET_ASIDE, 1), where
            assert [one.data.get("handler") for one in history][-1] == handler, where
            return
        assert answers, f"{where}: the answer of the handler is not recorded"
        if handler == "undo":
            assert (status, bodies["send"]) == (Status.CANCELLED, 1), where
            assert counted == ["reserve#1", "ks:undo:reserve#1"], where
            return
        assert status is Status.COMPLETED, where
        middle = "skipped" if handler == "skip step" else 2
        assert await run.result() == [1, middle, 3], where
        assert bodies["send"] + bodies["refuse"] >= (1 if handler == "skip step" else 2), where
        if handler == "skip step":
            assert bodies["send"] + bodies["refuse"] == 1, f"{where}: the body of a skipped step ran"
        verbs = [one for one in history if one.kind is Kind.SUPERSEDED]
        if handler == "restart":
            assert all(one.seq + 1 in {verb.seq for verb in verbs} for one in answers), where
            assert [one.data["act"] for one in verbs] == ["rewind"] * len(answers), where

    return judge


CASES = [
    case(handler, store, id=f"{handler}-{store}", nightly=store in ("postgres", "files"))
    for handler in HANDLERS
    for store in ("memory", "sqlite", "files", "postgres")
    if store == "memory" or handler in ("restart", "undo", "skip step")
]


@pytest.mark.parametrize("handler, store", CASES)
def test_crash_at_any_write_of_a_recovery_leads_to_the_same_end(handler, store, tmp_path):
    workflow, judge = BY_NAME[handler], expect(handler)
    crashes = crashed_at_every_write(store, tmp_path, workflow, interrupted, play=to_its_end, judge=judge)
    assert asyncio.run(crashes) >= 6


@pytest.mark.parametrize("handler", list(BY_FUNCTION))
def test_crash_at_any_write_lets_a_function_answer_again(handler, tmp_path):
    workflow, judge = BY_FUNCTION[handler], expect(handler)
    crashes = crashed_at_every_write("memory", tmp_path, workflow, interrupted, play=to_its_end, judge=judge)
    assert asyncio.run(crashes) >= 6


@pytest.mark.parametrize("handler", list(BY_PERSON))
def test_crash_at_any_write_of_a_request_leads_to_the_same_end(handler, tmp_path):
    workflow, play, judge = BY_PERSON[handler], recovered_with(handler), expect(handler)
    crashes = crashed_at_every_write("memory", tmp_path, workflow, has_failed, play=play, judge=judge)
    assert asyncio.run(crashes) >= 8
