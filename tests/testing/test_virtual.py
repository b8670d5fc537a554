"""Virtual time: what would take a month takes a moment, and what is real is still waited for."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

import keepstep as ks
from keepstep.testing.virtual import EPOCH, VirtualClock, VirtualLoop, at_work

DAY = 86_400.0


def virtually(coroutine):
    """Run to the end on a virtual loop; the result, and how many virtual seconds it took."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(coroutine)
        return result, runner.get_loop().time()


def test_timers_ring_in_order_and_time_stands_still_while_code_runs():
    async def main():
        loop, rung = asyncio.get_running_loop(), []
        for seconds in (3.0, 1.0, 2.0):
            loop.call_later(seconds, lambda seconds=seconds: rung.append((seconds, loop.time())))
        await asyncio.sleep(30 * DAY)
        return rung

    began = time.monotonic()
    rung, seconds = virtually(main())
    assert rung == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)]
    assert seconds == pytest.approx(30 * DAY)
    assert time.monotonic() - began < 30 * DAY


def test_an_executor_is_waited_for_in_real_time():
    async def main():
        release, told = threading.Event(), []
        work = asyncio.get_running_loop().run_in_executor(None, release.wait)
        asyncio.get_running_loop().call_later(30 * DAY, told.append, "too late")
        await asyncio.sleep(0.02)
        release.set()
        await work
        return told

    told, seconds = virtually(main())
    assert told == []
    assert seconds < DAY


def test_a_socket_is_waited_for_in_real_time():
    async def main():
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        thread = threading.Timer(0.02, theirs.sendall, [b"word"])
        thread.start()
        async with asyncio.timeout(DAY):
            word = await reader.readexactly(4)
        writer.close()
        theirs.close()
        thread.join()
        return word

    assert virtually(main())[0] == b"word"


def test_another_thread_wakes_a_loop_that_has_no_timer():
    async def main():
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        thread = threading.Timer(0.01, loop.call_soon_threadsafe, [future.set_result, "word"])
        thread.start()
        return await future

    assert virtually(main())[0] == "word"


@pytest.mark.parametrize("url", ["memory:", "sqlite"])
def test_a_month_of_sleeps_and_signals_takes_a_moment(tmp_path, url):
    woken = []

    @ks.step
    async def remind(day: int) -> int:
        woken.append(day)
        return day

    @ks.workflow(name=f"virtual:month:{url}")
    async def month() -> list[int]:
        days = []
        for day in range(3):
            await ks.sleep(days=10)
            days.append(await remind(day))
        days.append(await ks.wait_for("last", timeout=5 * DAY, default=-1))
        days.append(await ks.wait_for("never", timeout=300 * DAY, default=-2))
        return days

    async def main():
        loop = asyncio.get_running_loop()
        target = url if url == "memory:" else f"sqlite:///{tmp_path / 'runs.db'}"
        async with ks.Engine(target, clock=VirtualClock(), workflows=[month]) as engine:
            loop.wait_while(lambda: at_work(engine))
            run = await engine.start(month, run_id="r")
            await asyncio.sleep(31 * DAY)
            await run.signal("last", 99)
            result = await run.result()
            ends = [one for one in await run.checkpoints() if (one.kind, one.step) == ("timer", "sleep#3")]
            times = [one.finished_at.timestamp() - EPOCH for one in ends]
            return result, times

    (result, times), seconds = virtually(main())
    assert result == [0, 1, 2, 99, -2]
    assert woken == [0, 1, 2]
    assert times[0] == pytest.approx(30 * DAY, abs=1.0)
    assert seconds == pytest.approx(331 * DAY, abs=DAY)


def test_a_plain_def_step_is_not_overtaken_by_its_timeout():
    release = threading.Event()

    @ks.step(timeout=DAY)
    def slow() -> str:
        release.wait()
        return "done"

    @ks.workflow(name="virtual:slow")
    def plain() -> str:
        ks.sleep(days=1).result()
        return slow().result()

    async def main():
        loop = asyncio.get_running_loop()
        async with ks.Engine("memory:", clock=VirtualClock(), workflows=[plain]) as engine:
            loop.wait_while(lambda: at_work(engine))
            run = await engine.start(plain, run_id="r")
            thread = threading.Timer(0.05, release.set)
            thread.start()
            return await run.result()

    assert virtually(main())[0] == "done"
