"""A small HTTP port of a worker for orchestrators: whether it lives, whether it is ready, and its metrics."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..observers.metrics import Metric, text_of

if TYPE_CHECKING:
    from .engine import Engine

#: Seconds that a request may take, so that a client that sends nothing cannot hold a connection.
REQUEST_SECONDS = 5.0
#: Type of the text format of Prometheus.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Bytes of the head of a request at most.
MOST_BYTES = 8192


async def open_port(engine: Engine, host: str, port: int, metrics: Callable[[], str]) -> asyncio.Server:
    """Answer `/healthz`, `/readyz` and `/metrics` until the server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(Exception):
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.split(b"\r\n", 1)[0].split()
                status, body = await _answer(engine, words, metrics)
                fields = f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close"
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, host, port, limit=MOST_BYTES)


async def _answer(engine: Engine, words: list[bytes], metrics: Callable[[], str]) -> tuple[str, bytes]:
    if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed", b"only GET is answered\n"
    path = words[1].partition(b"?")[0]
    if path == b"/healthz":
        return "200 OK", b"ok\n"
    if path == b"/readyz":
        return await _ready(engine)
    if path == b"/metrics":
        return "200 OK", (metrics() + process_metrics(engine)).encode()
    return "404 Not Found", b"try /healthz, /readyz or /metrics\n"


async def _ready(engine: Engine) -> tuple[str, bytes]:
    worker = engine.worker
    if engine.closed or worker is None or worker.is_stopping:
        return "503 Service Unavailable", b"the worker claims no runs\n"
    try:
        await engine.call(engine.store.list_workers)
    except Exception:  # noqa: BLE001 - any error means that the store does not answer
        return "503 Service Unavailable", b"the store does not answer\n"
    return "200 OK", b"ok\n"


def process_metrics(engine: Engine) -> str:
    """Return gauges of this process: memory, processor, open runs, and what its journal has written."""
    memory = Metric("keepstep_process_resident_bytes", "Memory that the process holds.", kind="gauge")
    memory.set(value=_resident_bytes())
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor = Metric("keepstep_process_cpu_seconds_total", "Processor time of the process.")
    processor.add(amount=used.ru_utime + used.ru_stime)
    open_runs = Metric("keepstep_open_runs", "Runs in the memory of the process.", kind="gauge")
    open_runs.set(value=len(engine.live))
    counts = engine.counts
    commits = Metric("keepstep_commits_total", "Transactions that the process has committed.")
    commits.add(amount=counts.commits)
    failures = Metric("keepstep_save_failures_total", "Tries to save that failed.")
    failures.add(amount=counts.save_failures)
    return text_of((memory, processor, open_runs, commits, failures))


def _resident_bytes() -> float:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return float(pages * resource.getpagesize())
    except (OSError, IndexError, ValueError):  # not Linux: the highest value so far
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
