"""The jobs as Keepstep does them, through its public API alone. Each runs in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges

#: The run that is killed and taken up again.
VICTIM = "victim"

# -- what the jobs run -------------------------------------------------------------------------------------------------


@ks.step
async def trivial(i: int) -> dict[str, Any]:
    return {"i": i, "ok": True}


@ks.workflow
async def sequence(n: int) -> int:
    for i in range(n):
        await trivial(i)
    return n


@ks.workflow
async def fan(n: int) -> int:
    return len(await ks.gather(*[trivial(i) for i in range(n)]))


@ks.workflow
async def mapped(n: int) -> int:
    return len(await ks.map(trivial, range(n)))


def layered(layers: int, width: int, *, given: bool) -> ks.Dag:
    """A dag of equal layers, in which each step needs two of the layer before, and may be given their results."""
    dag = ks.Dag("layered")

    async def layer(i: int) -> dict[str, Any]:
        return {"i": i, "ok": True}

    async def layer_given(i: int, **needs: Any) -> dict[str, Any]:
        return {"i": i, "ok": True}

    for row in range(layers):
        for column in range(width):
            near = (column, (column + 1) % width)
            needs = [f"step {row - 1} {other}" for other in near] if row else []
            dag.add(layer_given if given else layer, f"step {row} {column}", needs=needs)
    return dag


@ks.step
async def counted(i: int) -> dict[str, Any]:
    LEDGER.enter(i)
    return {"i": i, "ok": True}


# The history of a long run is made quickly: nothing but its making depends on how often it was flushed.
@ks.workflow(name="ledger", durability=os.environ.get("BENCH_DURABILITY"))
async def ledger(n: int) -> int:
    for i in range(n):
        await counted(i)
    return n


@ks.workflow
async def sleeper(seconds: float) -> None:
    await ks.sleep(seconds)


@ks.step
async def large(i: int) -> str:
    LEDGER.enter(i)
    return gauges.text(100_000, i)


@ks.workflow
async def hoard(n: int) -> int:
    total = 0
    for i in range(n):
        total += len(await large(i))
    await ks.wait_for("enough")
    return total


@ks.step
async def arrived(sent: float) -> float:
    delay = time.monotonic() - sent
    DELAYS.append(delay)
    LEDGER.enter(len(DELAYS))
    return delay


@ks.workflow
async def listener(n: int) -> int:
    for _ in range(n):
        await arrived(await ks.wait_for("ping"))
    return n


@ks.workflow
async def arrival(sent: float) -> float:
    return await arrived(sent)


DELAYS: list[float] = []


class Ledger:
    """Counts step bodies outside the store: one line each, held by the kernel, so that it outlives a SIGKILL."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.kill_at = -1
        self.bodies = 0
        self._awaited: dict[int, asyncio.Event] = {}

    async def reached(self, bodies: int) -> None:
        """Wait until so many bodies have begun in this process."""
        if self.bodies < bodies:
            await self._awaited.setdefault(bodies, asyncio.Event()).wait()

    def enter(self, i: int) -> None:
        self.bodies += 1
        if self.bodies in self._awaited:
            self._awaited.pop(self.bodies).set()
        if self.path is None:
            return
        fd = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.write(fd, b"%d %.9f\n" % (i, time.monotonic()))
        os.close(fd)
        if i == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


LEDGER = Ledger()


class Parked:
    """An observer that counts the runs which are put away."""

    def __init__(self) -> None:
        self._count = 0
        self._more = asyncio.Event()

    def observe(self, event: ks.Event) -> None:
        if event.name == "run.waiting":
            self._count += 1
            self._more.set()

    async def reached(self, count: int) -> None:
        """Wait for so many, and begin to count anew."""
        while self._count < count:
            self._more.clear()
            await self._more.wait()
        self._count -= count


def open_store(where: Path, store: str = "sqlite", **options: Any) -> ks.Engine:
    """An engine on the store to be measured: a file or files in this folder, or what BENCH_STORE names."""
    url = f"files:{where}/runs" if store == "files" else os.environ.get("BENCH_STORE")
    if url is None:
        return ks.open(where / "runs.db", **options)
    options.pop("power_loss", None)
    return ks.open(url, **options)


# -- rates -------------------------------------------------------------------------------------------------------------


async def j1(where: Path, n: int = 1000, times: int = 1, store: str = "sqlite") -> dict[str, Any]:
    """One run, one step after the other, each durable before the next."""
    async with open_store(where, store) as engine:
        await (await engine.start(sequence, 20)).result()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await (await engine.start(sequence, n)).result()
    return watch.rate(n * times)


async def j2(where: Path, runs: int = 200, steps: int = 20, times: int = 1, store: str = "sqlite") -> dict[str, Any]:
    """Many runs at once in one process."""
    async with open_store(where, store) as engine:

        async def one() -> None:
            await (await engine.start(sequence, steps)).result()

        await one()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await asyncio.gather(*[one() for _ in range(runs)])
    return watch.rate(runs * steps * times)


async def j3(
    where: Path, runs: int = 2000, at_once: int = 100, times: int = 1, store: str = "sqlite"
) -> dict[str, Any]:
    """Runs of one step, a hundred at a time: what starting and finishing cost."""
    limit = asyncio.Semaphore(at_once)
    async with open_store(where, store) as engine:

        async def one() -> None:
            async with limit:
                await (await engine.start(sequence, 1)).result()

        await (await engine.start(sequence, 20)).result()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await asyncio.gather(*[one() for _ in range(runs)])
    return watch.rate(runs * times)


async def j4(where: Path, n: int = 500, times: int = 1, store: str = "sqlite") -> dict[str, Any]:
    """Parallel steps in one run, from its start to its result."""
    async with open_store(where, store) as engine:
        await (await engine.start(sequence, 20)).result()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await (await engine.start(fan, n)).result()
    return watch.rate(n * times)


async def dag(where: Path, layers: int = 50, width: int = 20, times: int = 1, *, given: bool = False) -> dict[str, Any]:
    """A dag in layers, from its start to its result."""
    made = layered(layers, width, given=given)
    async with open_store(where) as engine:
        await (await engine.start(made, i=0)).result()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await (await engine.start(made, i=1)).result()
    return watch.rate(layers * width * times)


async def dag_mapped(where: Path, layers: int = 50, width: int = 20, times: int = 1) -> dict[str, Any]:
    """As many steps through ks.map, which need nothing of each other."""
    n = layers * width
    async with open_store(where) as engine:
        await (await engine.start(mapped, n)).result()
        with gauges.Stopwatch() as watch:
            for _ in range(times):
                await (await engine.start(mapped, n)).result()
    return watch.rate(n * times)


# -- many workers ------------------------------------------------------------------------------------------------------


async def enqueue(where: Path, runs: int = 500, steps: int = 20) -> dict[str, Any]:
    """Leave so many runs for whoever comes."""
    async with open_store(where, worker=False) as engine:
        await asyncio.gather(*[engine.start(sequence, steps) for _ in range(runs)])
    return {}


async def drain(where: Path, workers: int = 1) -> dict[str, Any]:
    """Work until nothing is left, beginning together with the others; when the first and the last step were."""
    begin_at = float(os.environ["BENCH_BEGIN"])
    async with open_store(where, worker=False) as engine:
        await asyncio.sleep(max(0.0, begin_at - time.time()))
        async with open_store(where, max_runs=200):
            while (await engine.list(status=["queued", "running", "recovering"], limit=1)).runs:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            ended = time.time()
    return {"seconds": ended - begin_at}


async def start_hear(where: Path, n: int = 100) -> dict[str, Any]:
    """The process that takes up what another one starts."""
    async with open_store(where):
        await LEDGER.reached(n)
    return gauges.spread(DELAYS)


async def start_send(where: Path, n: int = 100) -> dict[str, Any]:
    """Starts runs that another process takes up, at moments that have nothing to do with its rhythm."""
    pause = random.Random(7)
    async with open_store(where, worker=False) as engine:
        while not [one for one in await engine.call(engine.store.list_workers) if one.alive]:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        for _ in range(n):
            await asyncio.sleep(pause.uniform(0.03, 0.06))
            await engine.start(arrival, time.monotonic())
        await asyncio.sleep(1.0)
    return {}


# -- being killed ------------------------------------------------------------------------------------------------------


async def j6_kill(where: Path, n: int = 1000, at: int = 500) -> dict[str, Any]:
    """Run until the body of step `at`, which kills its process."""
    LEDGER.path, LEDGER.kill_at = str(where / "bodies"), at
    power_loss = "may_lose_last" if os.environ.get("BENCH_DURABILITY") else "loses_nothing"
    async with open_store(where, power_loss=power_loss) as engine:
        await (await engine.start(ledger, n, run_id=VICTIM)).result()
    return {}


async def j6_resume(where: Path, upto: int = 20, observed: bool = False) -> dict[str, Any]:
    """Open the store again and wait for a few new bodies; the moments on the way, if they are observed."""
    LEDGER.path = str(where / "bodies")
    moments: dict[str, float] = {"ready": time.monotonic()}

    def notice(event: ks.Event) -> None:
        moments.setdefault(event.name, time.monotonic())

    async with open_store(where, observers=notice if observed else None, stop_seconds=0.0):
        moments["opened"] = time.monotonic()
        await LEDGER.reached(upto)
    return {"moments": moments}


# -- room --------------------------------------------------------------------------------------------------------------


async def j7_sleeping(where: Path, runs: int = 1000, held: bool = False) -> dict[str, Any]:
    """Memory before and after so many runs have gone to sleep; with `held` the program keeps a handle on each."""
    parked = Parked()
    handles: list[ks.RunHandle[Any]] = []
    async with open_store(where, observers=parked) as engine:
        await (await engine.start(sequence, 20)).result()
        for count in (50, runs):
            before = gauges.resident()
            with gauges.Stopwatch() as watch:
                for _ in range(count):
                    handle = await engine.start(sleeper, 600)
                    if held:
                        handles.append(handle)
                await parked.reached(count)
        growth = gauges.resident() - before
    return {"growth": growth, "before": before, **watch.rate(runs)}


async def j7_hoard(where: Path, n: int = 10_000) -> dict[str, Any]:
    """Memory while one run records many large results; at the end it waits, and is left so for `j7_replay`."""
    async with open_store(where, power_loss="may_lose_last") as engine:
        await _until_parked([await engine.start(hoard, 20)])
        before = gauges.resident()
        with gauges.Stopwatch() as watch:
            handle = await engine.start(hoard, n, run_id=VICTIM)
            high = await _until_parked([handle])
    return {"growth": high - before, "before": before, **watch.rate(n)}


async def j7_replay(where: Path, n: int = 10_000) -> dict[str, Any]:
    """Memory while those results are replayed in a fresh process."""
    async with open_store(where, power_loss="may_lose_last") as engine:
        await _until_parked([await engine.start(hoard, 20)])
        before, bodies = gauges.resident(), LEDGER.bodies
        with gauges.Stopwatch() as watch:
            handle = await engine.get(VICTIM)
            await handle.signal("enough")
            result = asyncio.ensure_future(handle.result())
            high = await _high_water(result)
    repeated = LEDGER.bodies - bodies
    if repeated or result.result() != n * 100_000:
        raise AssertionError(f"{repeated} bodies ran again")
    return {"growth": high - before, "before": before, **watch.rate(n)}


async def j7_park(where: Path, runs: int = 100_000, at_once: int = 500) -> dict[str, Any]:
    """Put so many runs to sleep in one store."""
    parked = Parked()
    async with open_store(where, power_loss="may_lose_last", observers=parked) as engine:
        with gauges.Stopwatch() as watch:
            for first in range(0, runs, at_once):
                some = min(at_once, runs - first)
                await asyncio.gather(*[engine.start(sleeper, 86_400) for _ in range(some)])
                await parked.reached(some)
    return watch.rate(runs)


async def j7_claims(where: Path, wakes: int = 50) -> dict[str, Any]:
    """How long a store with many sleeping runs takes to open, to find a due run, and to wake one by a signal."""
    opening = time.perf_counter()
    async with open_store(where, linger_seconds=0.0) as engine:
        opened = time.perf_counter() - opening
        found: list[float] = []
        for _ in range(wakes):
            asked = time.perf_counter()
            # Not leased at birth, so the worker has to find it.
            await (await engine.start(sequence, 1, delay=1e-9)).result()
            found.append(time.perf_counter() - asked)
        handle = await engine.start(listener, wakes)
        for i in range(wakes):
            await _until_parked([handle])
            await handle.signal("ping", time.monotonic())
            await LEDGER.reached(i + 1)
        await handle.result()
    return {"opened": opened, "found": gauges.spread(found), "woken": gauges.spread(DELAYS)}


async def _until_parked(handles: list[ks.RunHandle[Any]]) -> int:
    """Wait until the runs are put away; the most memory that was held meanwhile."""
    high = gauges.resident()
    for handle in handles:
        while await handle.status() != ks.Status.WAITING:
            high = max(high, gauges.resident())
            await asyncio.sleep(0.005)
    return high


async def _high_water(work: asyncio.Future[Any]) -> int:
    """Wait for the work; the most memory that was held meanwhile."""
    high = gauges.resident()
    while not work.done():
        await asyncio.wait([work], timeout=0.005)
        high = max(high, gauges.resident())
    return high


# -- signals -----------------------------------------------------------------------------------------------------------


async def signal_here(where: Path, n: int = 300) -> dict[str, Any]:
    """From the call of `signal` to the body of the step behind `wait_for`, in one process."""
    async with open_store(where) as engine:
        handle = await engine.start(listener, n)
        for i in range(n):
            await asyncio.sleep(0.003)
            await handle.signal("ping", time.monotonic())
            await LEDGER.reached(i + 1)
        await handle.result()
    return gauges.spread(DELAYS)


async def signal_hear(where: Path, n: int = 300) -> dict[str, Any]:
    """The process that holds the run."""
    async with open_store(where, linger_seconds=60.0) as engine:
        await (await engine.start(listener, n, run_id=VICTIM)).result()
    return gauges.spread(DELAYS)


async def signal_send(where: Path, n: int = 300) -> dict[str, Any]:
    """The other process on the same file: it sends at moments that have nothing to do with the listener's rhythm."""
    pause = random.Random(7)
    async with open_store(where, worker=False) as engine:
        while True:
            try:
                handle = await engine.get(VICTIM)
                break
            except ks.RunNotFound:
                await asyncio.sleep(0.01)
        for _ in range(n):
            await asyncio.sleep(pause.uniform(0.03, 0.06))
            await handle.signal("ping", time.monotonic())
    return {}


# -- readers -----------------------------------------------------------------------------------------------------------


@ks.step
async def speak(n: int) -> int:
    """Emit the time now and then, at moments that have nothing to do with the reader's rhythm."""
    pause = random.Random(7)
    for _ in range(n):
        await asyncio.sleep(pause.uniform(0.03, 0.06))
        ks.emit(time.monotonic())
    return n


@ks.workflow
async def speaker(n: int) -> int:
    return await speak(n)


@ks.workflow
async def bench_answering(n: int) -> int:
    for _ in range(n):
        (await ks.wait_for("question")).reply(time.monotonic())
    return n


async def _lags(handle: ks.RunHandle[Any]) -> dict[str, Any]:
    """From `ks.emit` to its event, while a run is watched."""
    lags = [time.monotonic() - event.data["value"] async for event in handle.watch() if event.name == "token.emitted"]
    return gauges.spread(lags)


async def _asked(handle: ks.RunHandle[Any], n: int) -> dict[str, Any]:
    """From the reply in the workflow to the one who asked."""
    pause, lags = random.Random(7), []
    for _ in range(n):
        await asyncio.sleep(pause.uniform(0.03, 0.06))
        replied = await handle.ask("question")
        lags.append(time.monotonic() - replied)
    return gauges.spread(lags)


async def read_here(where: Path, n: int = 300) -> dict[str, Any]:
    """A token and a reply, read in the process that drives the run."""
    async with open_store(where) as engine:
        watched = await _lags(await engine.start(speaker, n))
        asked = await _asked(await engine.start(bench_answering, n), n)
    return {"watch": watched, "ask": asked}


async def read_drive(where: Path, n: int = 300) -> dict[str, Any]:
    """The process that drives the runs which another one reads."""
    async with open_store(where, linger_seconds=60.0) as engine:
        for workflow in (speaker, bench_answering):
            await (await engine.get(f"{VICTIM}-{workflow.name}")).result()
    return {}


async def read_across(where: Path, n: int = 300) -> dict[str, Any]:
    """A token and a reply, read in another process on the same store."""
    async with open_store(where, worker=False) as engine:
        watched = await engine.start(speaker, n, run_id=f"{VICTIM}-{speaker.name}")
        asked = await engine.start(bench_answering, n, run_id=f"{VICTIM}-{bench_answering.name}")
        (where / "started").touch()
        return {"watch": await _lags(watched), "ask": await _asked(asked, n)}


JOBS = {
    job.__name__: job
    for job in (
        j1,
        j2,
        j3,
        j4,
        dag,
        dag_mapped,
        j6_kill,
        j6_resume,
        j7_sleeping,
        j7_hoard,
        j7_replay,
        j7_park,
        j7_claims,
        signal_here,
        signal_hear,
        signal_send,
        read_here,
        read_drive,
        read_across,
        enqueue,
        drain,
        start_hear,
        start_send,
    )
}
