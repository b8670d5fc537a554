"""Health of a process for orchestrators: whether it is ready, and a small HTTP port of a worker with its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from ..observers.metrics import text_of
from ..ports import instant
from .process_metrics import process_metrics

if TYPE_CHECKING:
    from .engine import Engine

#: Seconds that a request may take, so that a client that sends nothing cannot hold a connection.
REQUEST_SECONDS = 5.0
#: Seconds that the store may take to answer. Shorter than a request, so that a probe gets an answer.
STORE_SECONDS = 3.0
#: Time after a halted run for which a process is not ready. Its runs wait for others, which may never write here again.
HALTED = timedelta(minutes=1)
#: Type of the text format of Prometheus.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Bytes of the head of a request at most.
MOST_BYTES = 8192


async def why_unready(engine: Engine) -> str:
    """Return why a process should get no work now; "" if it is ready."""
    worker = engine.worker
    if engine.closed or (worker is not None and worker.is_stopping):
        return "the worker claims no more runs"
    if worker is not None and not engine.lease_is_fresh():
        return "the worker could not renew its leases"
    halted_at = engine.counts.halted_at
    if engine.journal.refused and halted_at is not None and instant(engine.clock.now()) - halted_at < HALTED:
        return "the store could not save the newest records"
    try:
        async with asyncio.timeout(STORE_SECONDS):
            await engine.call(engine.store.list_workers)
    except Exception:  # noqa: BLE001 - any error means that the store does not answer
        return "the store does not answer"
    return ""


async def open_port(engine: Engine, host: str, port: int, metrics: Callable[[], str]) -> asyncio.Server:
    """Answer `/healthz`, `/readyz` and `/metrics` until the server is closed."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(Exception):
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                words = head.split(b"\r\n", 1)[0].split()
                status, body = await _answer(engine, words, metrics)
                fields = f"Content-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close"
                shown = b"" if words[:1] == [b"HEAD"] else body
                writer.write(f"HTTP/1.1 {status}\r\n{fields}\r\n\r\n".encode() + shown)
                await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, host, port, limit=MOST_BYTES)


async def _answer(engine: Engine, words: list[bytes], metrics: Callable[[], str]) -> tuple[str, bytes]:
    if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        return "405 Method Not Allowed\r\nAllow: GET, HEAD", b"only GET is answered\n"
    path = words[1].partition(b"?")[0]
    if path == b"/healthz":  # the loop that answers is the one that drives runs
        return "200 OK", b"ok\n"
    if path == b"/readyz":
        why = await why_unready(engine)
        return ("503 Service Unavailable", f"{why}\n".encode()) if why else ("200 OK", b"ok\n")
    if path == b"/metrics":
        gauges = process_metrics(engine)
        return "200 OK", (await engine.off_loop(metrics) + text_of(gauges)).encode()
    return "404 Not Found", b"try /healthz, /readyz or /metrics\n"
