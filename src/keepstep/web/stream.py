"""Live events of a run for browsers: one message for each record, so that a reader goes on where it was."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent

from ..views import plain
from .routes import NotJson

if TYPE_CHECKING:
    from starlette.requests import Request

    from ..engine.engine import Engine

#: Seconds between two comments on a silent stream, so that a vanished reader is noticed.
PING_SECONDS = 15


async def events(engine: Engine, run_id: str, request: Request) -> EventSourceResponse:
    """Return the stream of a run's records after `Last-Event-ID` or `?after=`, until the run has ended."""
    last = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
    if not last.isascii() or not last.isdecimal() or int(last) >= 2**53:
        raise NotJson(f"after must be the number of a record, got {last[:50]!r}")
    handle = await engine.get(run_id)
    return EventSourceResponse(_messages(engine, handle, int(last)), ping=PING_SECONDS)


async def _messages(engine: Engine, handle: Any, after: int) -> AsyncIterator[ServerSentEvent]:
    async for record in handle.watch_records(after):
        shown = [plain.event_data(event) for event in record]
        data = engine.redaction.redact(msgspec.json.encode(shown).decode())
        first = record[0]
        yield ServerSentEvent(data, id=str(first.seq), event="record")
    run = await (await handle.latest()).run()
    yield ServerSentEvent(msgspec.json.encode(plain.run_data(run)).decode(), event="end")
