"""Live messages for browsers: of a run, one for each record and each change of its head; and of the whole store."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from sse_starlette import EventSourceResponse
from sse_starlette.sse import SendTimeoutError

from ..ports import LOOKS
from ..views import plain
from ..views.cut import clean
from .routes import NotJson, is_number
from .watching import PAGE, Changes, Watch, Watching, message, messages_of

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

    from ..engine.engine import Engine

#: Seconds between two comments on a silent stream, so that a vanished reader is noticed.
PING_SECONDS = 15
#: Seconds that a reader may take for what was sent to it, before it is dropped.
SEND_SECONDS = 30


class Stream(EventSourceResponse):
    """A stream of messages. A reader that takes nothing for too long is dropped."""

    def __init__(self, content: AsyncIterator[bytes]) -> None:
        super().__init__(content, ping=PING_SECONDS, send_timeout=SEND_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_over = False

        async def sending(message: Message) -> None:
            nonlocal is_over
            is_over = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        with contextlib.suppress(SendTimeoutError):
            await super().__call__(scope, receive, sending)
            if not is_over:  # the server stops
                await send({"type": "http.response.body", "body": b""})


class Streams:
    """The streams of one application."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watching = Watching(engine)
        self._changes = Changes(engine)

    async def run(self, run_id: str, request: Request) -> Stream:
        """Return the stream of a run's records after `Last-Event-ID` or `?after=`.

        It ends when the run has ended, unless `?follow=true` lets it go on, because a person may retry the run.
        """
        last = request.headers.get("last-event-id") or request.query_params.get("after") or "0"
        if not is_number(last):
            raise NotJson(f"after must be the number of a record, got {last[:50]!r}")
        follow = request.query_params.get("follow", "false")
        if follow not in ("true", "false"):
            raise NotJson(f"follow must be true or false, got {follow[:50]!r}")
        await self._engine.get(run_id)  # so that an unknown run has a status of its own
        return Stream(self._messages(run_id, int(last), follow=follow == "true"))

    async def _messages(self, run_id: str, after: int, *, follow: bool) -> AsyncIterator[bytes]:
        LOOKS.set(True)  # in the task of this request
        async with self._watching.watch(run_id) as watch:
            head = ended = b""
            while watch.over is None:
                changed = watch.changed
                if not head:
                    head = watch.head
                    yield head
                async for chunk, last in self._records(watch, after):
                    after = last
                    yield chunk
                if head != watch.head:
                    head = watch.head
                    yield head
                if watch.has_ended and ended != head and after >= watch.end:
                    ended = head
                    run = await self._engine.call(self._engine.store.get_run, run_id)
                    if run is not None:
                        data = clean(_end_data(run), self._engine.redaction.redact)
                        yield message("end", msgspec.json.encode(data))
                    if not follow:
                        return
                await changed.wait()
            if watch.over:
                yield watch.over

    async def _records(self, watch: Watch, after: int) -> AsyncIterator[tuple[bytes, int]]:
        """Yield the messages after a record up to the newest: old ones from the store, new ones from the watch."""
        while after < watch.end:
            if after >= watch.begin:
                chunk, after = watch.messages_after(after)
            else:
                found = await self._engine.call(messages_of, self._engine, watch.run_id, after, PAGE)
                if not found:
                    return
                chunk, after = b"".join(data for _, data in found), found[-1][0]
            yield chunk, after

    async def changes(self, request: Request) -> Stream:
        """Return the stream of changes of the store."""
        if request.query_params:
            raise NotJson("the stream of changes has no parameters")
        return Stream(self._changed())

    async def _changed(self) -> AsyncIterator[bytes]:
        async with self._changes.reading() as changes:
            sent = -1
            while not changes.closed:
                changed = changes.changed
                if sent != changes.number:
                    sent = changes.number
                    yield message("changed", b'{"number":%d}' % sent)
                await changed.wait()


def _end_data(run: Any) -> dict[str, Any]:
    return {**plain.run_data(run), "continued_as": run.continued_as}
