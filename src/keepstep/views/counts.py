"""Counts of runs by filter, capped and cached, for pages that show many of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..model import RunQuery, Status

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..ports import Store

#: Number of runs up to which a filter is counted. A page shows more as `1,000+`.
MOST = 1000
#: Seconds for which a count is used again. Many open pages ask for the same counts.
FRESH_SECONDS = 2.0
#: Counts that an engine remembers at most.
_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class Count:
    """The number of runs that match a filter; with `more`, there are more than this number."""

    number: int
    more: bool = False

    def __str__(self) -> str:
        """Return the count as people read it: `1,000+`."""
        return f"{self.number:,}{'+' if self.more else ''}"


async def counts(host: CommandHost, queries: Sequence[RunQuery], most: int = MOST) -> tuple[Count, ...]:
    """Return how many runs match each query, whatever its page is.

    Counts are at most `FRESH_SECONDS` old. Concurrent callers share one computation.
    """
    cache = _CACHES.setdefault(host, _Cache())
    asked = [cache.of(host, replace(query, limit=0, after=None, with_input=False, count_to=most)) for query in queries]
    return tuple([await asyncio.shield(one) for one in asked])


async def count(host: CommandHost, query: RunQuery, most: int = MOST) -> Count:
    """Return how many runs match a query, as `counts` does."""
    return (await counts(host, [query], most))[0]


async def counts_by_status(host: CommandHost, query: RunQuery, most: int = MOST) -> dict[Status, Count]:
    """Return how many runs that match a query are in each status; its own statuses do not matter."""
    found = await counts(host, [replace(query, status=frozenset({status})) for status in Status], most)
    return dict(zip(Status, found, strict=True))


class _Cache:
    """The counts of one engine, by query, each with the time at which it was begun."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[float, asyncio.Task[Count]]] = {}

    def of(self, host: CommandHost, query: RunQuery) -> asyncio.Task[Count]:
        loop = asyncio.get_running_loop()
        now, key = loop.time(), _key(query)
        known = self._known.get(key)
        if known is not None and _is_usable(known[1]) and (not known[1].done() or now - known[0] < FRESH_SECONDS):
            return known[1]
        if len(self._known) >= _REMEMBERED:
            self._known = {name: one for name, one in self._known.items() if now - one[0] < FRESH_SECONDS}
        task = loop.create_task(_counted(host, query))
        self._known[key] = now, task
        return task


def _is_usable(task: asyncio.Task[Count]) -> bool:
    return not task.done() or (not task.cancelled() and task.exception() is None)


#: By engine, so that the counts of a closed engine are forgotten.
_CACHES: WeakKeyDictionary[CommandHost, _Cache] = WeakKeyDictionary()


async def _counted(host: CommandHost, query: RunQuery) -> Count:
    return await host.call(_count_in, host.store, query)


def _count_in(store: Store, query: RunQuery) -> Count:
    found = store.list_runs(replace(query, count_to=query.count_to + 1)).count or 0
    return Count(min(found, query.count_to), found > query.count_to)


def _key(query: RunQuery) -> tuple[object, ...]:
    values = (getattr(query, field.name) for field in fields(query))
    return tuple(tuple(sorted(value.items())) if isinstance(value, dict) else value for value in values)
