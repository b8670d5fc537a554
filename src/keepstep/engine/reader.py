"""How an engine notices writes of other processes for its readers, from the first wait on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import StoreError
from ..ports import OptionalStore, optional

if TYPE_CHECKING:
    from ..model import News
    from .poll_interval import PollInterval
    from .process import Process


class Reader:
    """Listens to a store that notifies, and polls it unless a worker does so; wakes everyone who waits for a change."""

    def __init__(self, engine: Process, pace: PollInterval) -> None:
        self._engine = engine
        self._pace = pace
        self._cursor = 0
        self._silence: Callable[[], Any] = lambda: None

    def begin(self) -> None:
        """Begin to listen, and to poll if no worker of this engine polls."""
        on_write = optional(self._engine.store, OptionalStore.on_write)
        if on_write is not None:
            self._silence = on_write(self._alert)
        if self._engine.worker is None:
            self.poll()

    def stop(self) -> None:
        """Stop listening."""
        self._silence()

    def _alert(self) -> None:
        """Wake the readers from the store's own thread. The worker is not alerted: nothing is due for it."""
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._engine.loop.call_soon_threadsafe(self._engine.waiting.changed)

    def poll(self) -> None:
        """Check for writes of others, and schedule the next poll."""
        engine = self._engine
        if engine.closed:
            return
        if not engine.store.quick:
            engine.background(self._poll_slowly())
            return
        try:
            self._received(engine.store.news("", self._cursor))
        except StoreError as error:
            engine.outage.log("cannot poll the store", error)
        self._poll_again()

    async def _poll_slowly(self) -> None:
        engine = self._engine
        try:
            self._received(await engine.call(engine.store.news, "", self._cursor))
        except StoreError as error:
            engine.outage.log("cannot poll the store", error)
        self._poll_again()

    def _received(self, news: News) -> None:
        self._cursor = news.cursor
        if news.changed:
            self._engine.notify_waiters()

    def _poll_again(self) -> None:
        self._engine.loop.call_later(self._pace.pause(), self.poll, context=self._engine.context)
