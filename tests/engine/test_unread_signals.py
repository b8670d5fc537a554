"""Unread signals of a run are bounded: one too many is refused as a whole, and those of Keepstep itself always pass."""

from __future__ import annotations

import pytest

import keepstep as ks
from keepstep.cli import errors
from keepstep.engine import handle
from keepstep.kernel import children
from tests.engine.world import until, until_status


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(handle, "MAX_UNREAD", 3)
    monkeypatch.setattr(children, "MAX_UNREAD", 3)


@ks.workflow
async def listening(words):
    await ks.wait_for("begin")
    return [await ks.wait_for("word") for _ in range(words)]


async def test_signal_to_a_full_run_is_refused_until_it_has_read(world):
    async with world.engine() as engine:
        run = await engine.start(listening, 4, run_id="r")
        await until_status(run, "waiting")
        for word in range(3):
            await run.signal("word", word)
        with pytest.raises(ks.SignalsFull, match="has 3 unread signals; nothing was sent"):
            await run.signal("word", 99)
        assert (await run.run()).signals == 3
        await run.pause()  # of Keepstep itself
        await until_status(run, "paused")
        await run.resume()
        await until_status(run, "waiting")


async def test_signals_that_were_read_make_room(world):
    async with world.engine() as engine:
        run = await engine.start(listening, 9, run_id="r")
        await run.signal("begin")
        for word in range(9):
            await until(lambda word=word: _has_read(run, 1 + word))
            await run.signal("word", word)
        assert await run.result(10) == list(range(9))
        assert (await run.run()).signals == 10


async def _has_read(run, signals):
    return (await run.run()).signals_read == signals


@ks.workflow
async def sender(target):
    for word in range(3):
        await ks.signal(target, "word", word)
    try:
        await ks.signal(target, "word", 4)
    except ks.SignalsFull as full:
        return str(full)


async def test_workflow_is_told_that_another_run_is_full(world):
    async with world.engine() as engine:
        await engine.start(listening, 4, run_id="r")
        assert await (await engine.start(sender, "r")).result(10) == "run 'r' has 3 unread signals"


def test_command_line_says_conflict():
    assert dict(errors._CODES)[ks.SignalsFull] == errors.CONFLICT
