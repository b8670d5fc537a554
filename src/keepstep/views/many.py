"""Many runs at once: those that a filter selects, counted first, and what became of each when they are changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import KeepstepError
from ..model import FINISHED, Run, RunQuery
from .finding import is_attended

if TYPE_CHECKING:
    from ..history.host import CommandHost

#: Runs that are changed at once, so that a thousand take seconds and no store is flooded.
AT_ONCE = 16
#: Changed runs that are looked at again, to find out whether a worker is missing.
_LOOKED_AT = 100


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected runs, and the ids of runs that cannot be read and may belong to them; `more` if some are left."""

    runs: tuple[Run, ...]
    unreadable: tuple[str, ...]
    more: bool = False

    @property
    def statuses(self) -> dict[str, int]:
        """The number of selected runs by status."""
        return dict(Counter(run.status.value for run in self.runs))

    @property
    def workflows(self) -> dict[str, int]:
        """The number of selected runs by workflow."""
        return dict(Counter(run.workflow for run in self.runs))


@dataclass(frozen=True, slots=True)
class Changes:
    """The results of a change of selected runs.

    `done` holds for each changed run whether the change is complete, or is asked of a worker. `refused` has the ids and
    the reasons of the others, and `unattended` the workflows that no living worker drives.
    """

    done: tuple[bool, ...]
    refused: tuple[tuple[str, str], ...]
    unattended: tuple[str, ...]


async def select(host: CommandHost, query: RunQuery, limit: int | None = None) -> Selection:
    """Return the runs that match a query, the newest first, and at most `limit` of them."""
    found: list[Run] = []
    unreadable: list[str] = []
    while True:
        page = await host.call(host.store.list_runs, query)
        found += page.runs
        unreadable += page.unreadable
        more = limit is not None and (len(found) > limit or (len(found) == limit and page.next is not None))
        if page.next is None or more:
            return Selection(tuple(found[:limit]), tuple(unreadable), more)
        query = replace(query, after=page.next)


async def change(host: CommandHost, runs: Sequence[Run], act: Callable[[Run], Awaitable[bool]]) -> Changes:
    """Change runs; `act` returns whether its change is complete. A run that refuses does not stop the others."""
    done: list[bool] = []
    refused: list[tuple[str, str]] = []
    for start in range(0, len(runs), AT_ONCE):
        some = runs[start : start + AT_ONCE]
        answers = await asyncio.gather(*(act(run) for run in some), return_exceptions=True)
        for run, answer in zip(some, answers, strict=True):
            if isinstance(answer, KeepstepError):
                refused.append((run.id, str(answer)))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                done.append(answer)
    looked_at = RunQuery(ids=frozenset(run.id for run in runs[:_LOOKED_AT]), limit=_LOOKED_AT, system=True)
    page = await host.call(host.store.list_runs, looked_at)
    open_ = sorted({run.workflow for run in page.runs if run.status not in FINISHED})
    unattended = [name for name in open_ if not await is_attended(host, name)]
    return Changes(tuple(done), tuple(refused), tuple(unattended))
