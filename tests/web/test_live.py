"""Live messages: gapless over reconnects, one watcher for all readers, and a dead worker is seen within a second."""

import asyncio
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack

import pytest

import keepstep as ks
from keepstep.web import stream as live
from keepstep.web import watching
from tests.engine.world import until, until_status
from tests.web.served import messages, served, stream
from tests.web.test_api import approving, waiting

pytestmark = [pytest.mark.live_only]


@ks.step
async def number(value):
    return value


async def test_records_and_heads_come_as_they_happen(world):
    async with world.engine() as engine, served(engine) as client:
        run = await waiting(engine)
        async with stream(client, "/runs/r/events") as one:
            seen = [await one()]
            assert seen[0][:2] == ("head", None)
            assert seen[0][2]["status"] == "waiting"
            while len(seen) <= (await run.run()).seq:
                seen.append(await one())
            await run.signal("approved")
            while seen[-1][0] != "end":
                seen.append(await one())
        numbers = [seq for _, seq, _ in seen if seq is not None]
        assert numbers == [record.seq for record in await run.checkpoints()]
        assert [data["status"] for name, _, data in seen if name == "head"][-1] == "completed"
        assert [name for name, _, _ in seen[-2:]] == ["head", "end"]


async def test_reader_that_comes_back_misses_nothing(world):
    @ks.workflow
    async def counting():
        for value in range(60):
            await number(value)
            if value % 7 == 0:
                await asyncio.sleep(0.01)

    async with world.engine() as engine, served(engine) as client:
        run = await engine.start(counting, run_id="c")
        seen, ended = [], False
        while not ended:  # every few messages, the connection is lost
            last = {"last-event-id": str(seen[-1])} if seen else {}
            async with stream(client, "/runs/c/events", **last) as one:
                for _ in range(9):
                    name, seq, _ = await one()
                    if seq is not None:
                        seen.append(seq)
                    if name == "end":
                        ended = True
                        break
        assert seen == [record.seq for record in await run.checkpoints()]


async def test_reader_far_behind_reads_the_store(world, monkeypatch):
    monkeypatch.setattr(watching, "MOST_KEPT", 5)
    monkeypatch.setattr(watching, "PAGE", 7)

    @ks.workflow
    async def counting():
        await ks.wait_for("go")
        for value in range(40):
            await number(value)

    async with world.engine() as engine, served(engine) as client:
        run = await engine.start(counting, run_id="c")
        await until_status(run, "waiting")
        async with stream(client, "/runs/c/events") as one:
            await one()
            await run.signal("go")
            seen = []
            while (message := await one())[0] != "end":
                seen.append(message[1])
        assert [seq for seq in seen if seq is not None] == [record.seq for record in await run.checkpoints()]


@pytest.mark.one_store
async def test_tokens_are_messages_that_can_be_resumed(world):
    @ks.step
    async def say():
        for word in range(30):
            ks.emit(f"w{word}")
            if word % 10 == 0:
                await asyncio.sleep(0.02)  # so that the tokens make several records

    @ks.workflow
    async def saying():
        await say()

    async with world.engine() as engine, served(engine) as client:
        run = await engine.start(saying, run_id="s")
        await run.result(30)
        everything = [one async for one in messages(client, "/runs/s/events")]
        found = [one for one in everything if one[0] == "tokens"]
        assert len(found) > 1
        assert [token for _, _, data in found for token in data["tokens"]] == [f"w{word}" for word in range(30)]
        assert all(data["step"] == "say#1" and data["life"] == 1 for _, _, data in found)
        last = {"last-event-id": str(found[0][1])}
        rest = [one async for one in messages(client, "/runs/s/events", **last)]
        assert [one for one in rest if one[0] == "tokens"] == found[1:]


@pytest.mark.one_store
async def test_stream_that_follows_goes_on_after_the_end(world):
    fails = [True]

    @ks.step(retry=None)
    async def work():
        if fails:
            raise ValueError("broken")

    @ks.workflow
    async def program():
        await work()

    async with world.engine() as engine, served(engine) as client:
        run = await engine.start(program, run_id="r")
        await until_status(run, "failed")
        async with stream(client, "/runs/r/events?follow=true") as one:
            while (message := await one())[0] != "end":
                pass
            assert message[2]["status"] == "failed"
            fails.clear()
            await run.retry()
            while (message := await one())[0] != "end":
                pass
            assert message[2]["status"] == "completed"


@pytest.mark.one_store
async def test_readers_of_a_run_share_one_watcher(world, monkeypatch):
    looks = []
    read = watching.messages_of
    monkeypatch.setattr(watching, "messages_of", lambda *given: looks.append(given[2]) or read(*given))
    async with world.engine() as engine, served(engine) as client, AsyncExitStack() as stack:
        run = await waiting(engine)
        after = (await run.run()).seq
        path = f"/runs/r/events?after={after}"
        readers = [await stack.enter_async_context(stream(client, path)) for _ in range(20)]
        for one in readers:
            assert (await one())[0] == "head"
        await run.signal("approved")
        ends = []
        for one in readers:
            seen = []
            while (message := await one())[0] != "end":
                seen.append(message[1])
            ends.append([seq for seq in seen if seq is not None])
        assert ends == [[record.seq for record in await run.checkpoints()][after:]] * 20
        assert len(looks) == len(set(looks)) < 10


@pytest.mark.one_store
async def test_nothing_is_read_when_nobody_reads(world):
    async with world.engine() as engine, served(engine) as client:
        await waiting(engine)
        async with stream(client, "/runs/r/events") as one:
            await one()
            assert engine.waiting.readers
        await until(lambda: not engine.waiting.readers, "the end of the watcher")


@pytest.mark.one_store
async def test_progress_of_a_step_is_told_while_it_works(world, monkeypatch):
    monkeypatch.setattr(watching, "PROGRESS_SECONDS", 0.05)
    going = asyncio.Event()

    @ks.step
    async def slow():
        ks.progress(0.25, "row 1")
        await going.wait()
        ks.progress(0.5, "row 2")
        await asyncio.Event().wait()

    @ks.workflow
    async def program():
        await slow()

    async with world.engine() as engine, served(engine) as client:
        await engine.start(program, run_id="r")
        async with stream(client, "/runs/r/events") as one:
            for fraction, text in ((0.25, "row 1"), (0.5, "row 2")):
                while (message := await one())[0] != "head" or (message[2]["progress"] or {}).get("message") != text:
                    pass
                assert message[2]["progress"] == {"fraction": fraction, "message": text, "step": "slow#1"}
                page = await client.get("../../runs/r")
                assert text in page.text
                assert f'value="{100 * fraction}"' in page.text
                going.set()


@ks.step
async def talkative(_):
    ks.emit("word " * 3_900)


@pytest.mark.one_store
async def test_reader_that_takes_nothing_is_dropped(world, monkeypatch):
    """It holds neither memory nor the watcher; what it had not read is still in the store."""
    monkeypatch.setattr(live, "SEND_SECONDS", 0.2)

    @ks.workflow
    async def program():
        await ks.map(talkative, range(600))  # more than the buffers of two sockets hold

    async with world.engine() as engine, served(engine) as client:
        await (await engine.start(program, run_id="r")).result()
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect(("127.0.0.1", client.base_url.port))
            silent.sendall(b"GET /api/v1/runs/r/events?follow=true HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: engine.waiting.readers, "the reader")
            await until(lambda: not engine.waiting.readers, "the end of the reader that takes nothing")


@pytest.mark.one_store
async def test_removed_run_ends_its_streams(world):
    async with world.engine() as engine, served(engine) as client:
        run = await waiting(engine)
        async with stream(client, "/runs/r/events?follow=true") as one:
            await one()
            await run.cancel()
            await until_status(run, "cancelled")
            engine.store.delete_runs(["r"])
            while (message := await one())[0] != "gone":
                pass
            assert message[2] == {"run": "r"}
        assert (await client.get("/runs/r/events")).status_code == 404


async def test_changes_of_the_store_are_told_to_lists(world):
    async with world.engine() as engine, served(engine) as client:
        async with stream(client, "/changes") as one, stream(client, "/changes") as other:
            assert (await one())[0] == "changed"
            await other()
            await engine.start(approving(), run_id="r")
            assert (await one())[2]["number"] == (await other())[2]["number"] > 0
        await until(lambda: not engine.waiting.readers, "the end of the watcher")


@pytest.mark.one_store
async def test_changes_go_on_after_the_store_did_not_answer(world, monkeypatch):
    failed, living = [], watching._living

    def failing(store):
        if len(failed) < 2:
            failed.append(True)
            raise ks.StoreUnavailable("the disk is away")
        return living(store)

    monkeypatch.setattr(watching, "_living", failing)
    async with world.engine() as engine, served(engine) as client, stream(client, "/changes") as one:
        assert (await one())[2]["number"] == 0
        await until(lambda: failed, "the failure")
        await engine.start(approving(), run_id="r")
        assert (await one())[2]["number"] > 0


@pytest.mark.one_store
@pytest.mark.parametrize("given", ["after=-1", "after=x", "after=" + "9" * 5000, "follow=maybe"])
async def test_streams_refuse_what_does_not_fit(world, given):
    async with world.engine() as engine, served(engine) as client:
        await waiting(engine)
        assert (await client.get(f"/runs/r/events?{given}")).status_code == 422


PROGRAM = """
import asyncio, sys
import keepstep as ks

@ks.step
async def endless():
    await asyncio.sleep(0.1 if "--short" in sys.argv else 600)

@ks.workflow
async def program():
    await endless()

async def main():
    async with ks.open(sys.argv[1], workflows=[program]) as engine:
        run = await engine.start(program, run_id="r")
        print("started", flush=True)
        await run.result()

asyncio.run(main())
"""


async def test_killed_worker_and_its_recovery_are_told_within_a_second(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    url = f"sqlite:///{tmp_path}/runs.db"

    def start(*more):
        command = [sys.executable, "program.py", url, *more]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    first = await asyncio.to_thread(start)
    try:
        await asyncio.to_thread(first.stdout.readline)
        async with (
            ks.open(url, worker=False) as engine,
            served(engine) as client,
            stream(client, "/runs/r/events") as one,
        ):
            while (head := await one())[2].get("alive") is not True:
                pass
            worker = head[2]["worker"]
            first.send_signal(signal.SIGKILL)
            first.wait()
            killed = time.monotonic()
            while (head := await one())[0] != "head" or head[2]["alive"]:
                pass
            assert (head[2]["worker"], head[2]["alive"]) == (worker, False)
            assert time.monotonic() - killed < 1
            second = await asyncio.to_thread(start, "--short")
            while (head := await one())[0] != "head" or head[2]["worker"] in (worker, None):
                pass
            assert (head[2]["epoch"], head[2]["recoveries"], head[2]["alive"]) == (2, 1, True)
            while (await one())[0] != "end":
                pass
            await asyncio.to_thread(second.communicate)
    finally:
        first.kill()
        first.communicate()
