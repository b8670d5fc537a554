"""What pages cost: the start of a server, a hundred open pages beside a worker, and the timeline of a long run."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keepstep as ks

from . import gauges, measure, ours

#: Pages that are open at once, each with a stream of its own.
PAGES = 100


@ks.workflow(name="bench-web-waiting")
async def waiting(steps: int) -> None:
    await ks.wait_for("go")
    for number in range(steps):
        await ours.trivial(number)


@ks.workflow(name="bench-web-long")
async def long(steps: int) -> None:
    await ks.map(ours.trivial, range(steps), concurrency=200)


async def j2(where: Path, runs: int = 200, steps: int = 20) -> dict[str, Any]:
    """Many runs at once, as in the job `j2`, which begin when pages are open on them."""
    async with ours.open_store(where, linger_seconds=600) as engine:
        handles = [await engine.start(waiting, steps, run_id=f"r{number}") for number in range(runs)]
        (where / "ready").touch()
        while not (where / "go").exists():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0.01)
        with gauges.Stopwatch() as watch:
            await engine.broadcast(handles, "go")
            await asyncio.gather(*(handle.result() for handle in handles))
    return watch.rate(runs * steps)


async def fill(where: Path, records: int = 50_000) -> dict[str, Any]:
    """One run with many records."""
    async with ours.open_store(where) as engine:
        with gauges.Stopwatch() as watch:
            await (await engine.start(long, records, run_id="long")).result()
    return watch.rate(records)


JOBS = {"j2": j2, "fill": fill}


@contextmanager
def server(where: Path) -> Iterator[tuple[int, float]]:
    """A server of the store, with its port and the seconds up to its first answer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "keepstep", "serve", "--store", f"sqlite:///{where}/runs.db", "--port", str(port)]
    environment = measure.compiling(str(where / "compiled"))
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        _get(port, "/api/v1/runs")
        yield port, time.perf_counter() - began
    finally:
        process.terminate()
        process.communicate()


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.read()  # type: ignore[no-any-return]


class Readers(threading.Thread):
    """Streams that are read and dropped, as cheaply as this language can."""

    def __init__(self, port: int, runs: int) -> None:
        super().__init__(daemon=True)
        self.received = 0
        self.stopping = False
        self.sockets = []
        for number in range(PAGES):
            one = socket.create_connection(("127.0.0.1", port))
            path = f"/api/v1/runs/r{number % runs}/events"
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert b"200 OK" in one.recv(1000)
            self.sockets.append(one)

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for one in self.sockets:
                selector.register(one, selectors.EVENT_READ)
            while not self.stopping:
                for key, _ in selector.select(0.2):
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    self.received += len(data)
                    if not data:
                        selector.unregister(key.fileobj)


def _with_pages(runs: int, *, pages: bool) -> tuple[dict[str, Any], int]:
    """Measure a worker, beside a server that nobody asks or one with open pages."""
    with measure.folder() as where:
        worker = measure.begin("web", "j2", where, {"runs": runs})
        while not (where / "ready").exists() and worker.poll() is None:
            time.sleep(0.01)
        with server(where) as (port, _):
            readers = Readers(port, runs) if pages else None
            if readers is not None:
                readers.start()
            (where / "go").touch()
            answer = measure.finish(worker)
            if readers is not None:
                readers.stopping = True
                readers.join()
    return answer, 0 if readers is None else readers.received


def findings(effort: measure.Effort) -> list[measure.Finding]:
    """Return what the pages cost."""
    runs = effort.size(200, 50)
    found = []
    with measure.folder() as where:
        measure.run("web", "fill", where, records=effort.size(50_000, 5000))
        starts, reads = [], []
        with server(where):
            pass  # compiles the modules
        for _ in range(effort.rounds(5)):
            with server(where) as (port, seconds):
                starts.append(seconds)
                began, after, size = time.perf_counter(), 0, 0
                while after is not None:
                    page = _get(port, f"/api/v1/runs/long/timeline?after={after}")
                    size += len(page)
                    after = json.loads(page)["next"]
                reads.append(time.perf_counter() - began)
    detail = {"starts": starts, "timelines": reads, "bytes": size}
    found.append(measure.Finding("web", "serve, up to its first answer", statistics.median(starts), "s", most=0.6))
    what = "timeline of 50,000 records, all pages"
    found.append(measure.Finding("web", what, statistics.median(reads), "s", most=1.5, detail=detail))
    ratios, rates, received = [], [], []
    for _ in range(effort.rounds(5)):
        alone, _ = _with_pages(runs, pages=False)
        beside, data = _with_pages(runs, pages=True)
        ratios.append(beside["per_second"] / alone["per_second"])
        rates.append(beside["per_second"])
        received.append(data)
    detail = {"ratios": ratios, "received": received}
    what = f"{runs} runs of 20 steps beside {PAGES} open pages, and none"
    rate = statistics.median(rates)
    ratio = statistics.median(ratios)
    return [*found, measure.Finding("web", what, rate, "steps/s", ratio=ratio, least_ratio=0.95, detail=detail)]
