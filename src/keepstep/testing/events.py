"""A recorder of events: an observer that keeps what it is told, and lets a test wait for a moment by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from ..model import Event


class Events:
    """Give it to an engine as an observer. It holds every event in the order in which it was told.

    A step may be named without the number of its call: `pay` means `pay#1`, `pay#2` and the like.
    """

    def __init__(self) -> None:
        self._seen: list[Event] = []
        self._waiting: list[asyncio.Future[None]] = []

    def observe(self, event: Event) -> None:
        """Take one event in: what an engine calls."""
        self._seen.append(event)
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def __iter__(self) -> Iterator[Event]:
        return iter(list(self._seen))

    def __len__(self) -> int:
        return len(self._seen)

    def __repr__(self) -> str:
        return f"<events {', '.join(_told(event) for event in self._seen[-10:]) or 'none'}>"

    def named(self, name: str, *, step: str = "", run: str = "") -> list[Event]:
        """The events of one name, like `step.completed`; only those of a step or of a run if one is given."""
        return [
            event
            for event in self._seen
            if event.name == name and run in ("", event.run) and (not step or _is_step(event, step))
        ]

    async def until(self, name: str, *, step: str = "", run: str = "", times: int = 1) -> Event:
        """Wait until such an event has come so often, counted from the beginning; gives the last of them."""
        while len(found := self.named(name, step=step, run=run)) < times:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        return found[times - 1]

    def clear(self) -> None:
        """Forget what was told so far."""
        self._seen.clear()


def _is_step(event: Event, step: str) -> bool:
    return step in (event.step, event.step.rpartition("/")[2].partition("#")[0])


def _told(event: Event) -> str:
    return f"{event.name} {event.step}" if event.step else event.name
