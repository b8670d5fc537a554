"""What an engine without a worker does about the writes of others: it looks now and then whether there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import StoreError

if TYPE_CHECKING:
    from ..model import News
    from .engine import Engine
    from .pace import Pace


class Reader:
    """Polls the store, and wakes whoever waits for a change."""

    def __init__(self, engine: Engine, pace: Pace) -> None:
        self._engine = engine
        self._pace = pace
        self._cursor = 0

    def poll(self) -> None:
        """See whether others wrote, and look again after a while."""
        engine = self._engine
        if engine.closed:
            return
        if not engine.store.quick:
            engine.background(self._poll_slowly())
            return
        try:
            self._heard(engine.store.news("", self._cursor))
        except StoreError as error:
            engine.outage.tell("the store cannot be polled", error)
        self._poll_again()

    async def _poll_slowly(self) -> None:
        engine = self._engine
        try:
            self._heard(await engine.call(engine.store.news, "", self._cursor))
        except StoreError as error:
            engine.outage.tell("the store cannot be polled", error)
        self._poll_again()

    def _heard(self, news: News) -> None:
        self._cursor = news.cursor
        if news.changed:
            self._engine.pulse()

    def _poll_again(self) -> None:
        self._engine.loop.call_later(self._pace.pause(), self.poll, context=self._engine.context)
