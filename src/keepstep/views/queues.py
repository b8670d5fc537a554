"""The queues of a store, without those of agents: with limits, served by workers, or of unfinished runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..model import FINISHED, RunQuery, Status
from ..model.agent import agent_of

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.queues import QueueInfo

#: Newest unfinished runs whose queues are shown, too.
MOST_LOOKED_AT = 500
_UNFINISHED = frozenset(Status) - FINISHED


async def all_queues(engine: Engine) -> list[QueueInfo]:
    """Return the queues with limits, those that living workers name, and those of unfinished runs, by name."""
    found = {one.name: one for one in await engine.queues.list() if agent_of(one.name) is None}
    names = {"default"}
    for worker in await engine.workers():
        names.update(worker.queues or () if worker.alive else ())
    page = await engine.call(engine.store.list_runs, RunQuery(status=_UNFINISHED, limit=MOST_LOOKED_AT))
    names.update(run.queue for run in page.runs)
    for name in sorted(names - found.keys()):
        if agent_of(name) is None:  # the queues of agents belong to them
            found[name] = await engine.queues.get(name)
    return [found[name] for name in sorted(found)]


async def is_served(engine: Engine, queue: str) -> bool:
    """Whether a living worker claims runs of a queue."""
    workers = await engine.workers()
    return any(one.claims and (one.queues is None or queue in one.queues) for one in workers)
