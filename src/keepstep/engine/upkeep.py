"""Removing runs: finished ones by a filter, by the rule of how long they stay, and one run for good."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt, DefinitionError, RunConflict, RunNotFound, StoreError
from ..model import FINISHED, Run, RunQuery, Status
from ..model.series import SERIES
from ..policies import Retain
from ..ports import Store
from .series import newest_run
from .verify import PAGE, all_runs, head_of, verify

if TYPE_CHECKING:
    from .engine import Engine

log = logging.getLogger("keepstep")

#: How often a worker looks which runs need not stay any longer, and how long it rests after each page of that look.
SWEEP_SECONDS = 600.0
REST_SECONDS = 0.05
#: How many damaged runs are named when a store is refused.
NAMED = 5


@dataclass(slots=True)
class Purged:
    """How many runs were found and removed, by status and by workflow; after a dry run, would be."""

    removed: int = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    workflows: Counter[str] = field(default_factory=Counter)

    def count(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.removed += 1
            self.statuses[run.status] += 1
            self.workflows[run.workflow] += 1


def purge(
    store: Store,
    *,
    workflow: str | None = None,
    statuses: frozenset[Status] = FINISHED,
    before: datetime | None = None,
    limit: int | None = None,
    dry_run: bool = False,
) -> Purged:
    """Remove finished runs: those that ended before an instant, at most so many. Others are never touched."""
    if not statuses <= FINISHED:
        names = ", ".join(sorted(statuses - FINISHED))
        raise DefinitionError(f"only finished runs are purged, and {names} is not finished")
    done = Purged()
    waiting: list[Run] = []
    room = limit
    query = RunQuery(workflow=workflow, status=statuses or FINISHED, updated_before=before, limit=PAGE)
    for run in all_runs(store, query):
        if room is not None and room <= 0:
            break
        if isinstance(run, str) or run.worker is not None or run.status not in FINISHED:
            continue
        waiting.append(run)
        room = None if room is None else room - 1
        if len(waiting) >= PAGE:
            _remove(store, waiting, done, dry_run=dry_run)
    _remove(store, waiting, done, dry_run=dry_run)
    return done


def _remove(store: Store, runs: list[Run], done: Purged, *, dry_run: bool) -> None:
    runs[:] = [run for run in runs if not _begins_living_series(store, run)]
    removed = len(runs) if dry_run or not runs else store.delete_runs([run.id for run in runs], finished=True)
    done.count(runs)
    done.removed -= len(runs) - removed  # someone let one of them go on meanwhile
    runs.clear()


def _begins_living_series(store: Store, run: Run) -> bool:
    """Whether a run is the first of a series that goes on: its id stays known, for starts and for lookups.

    The runs between the first and the newest may go: the newest is found by its tag.
    """
    if run.status is not Status.COMPLETED or SERIES in run.tags:
        return False
    with contextlib.suppress(CheckpointCorrupt, RunNotFound):
        found = store.get_run(run.id)
        if found is not None and found.continued_as is not None:
            return newest_run(store, found).status not in FINISHED
    return False


# -- how long runs stay ------------------------------------------------------------------------------------------------


class Sweep:
    """One look at all finished runs, a page at a time; those that the rule does not keep are removed.

    Which are the newest of a workflow goes by when they were created, not by when this store was given them.
    """

    def __init__(self, store: Store, retain: Retain, *, dry_run: bool = False) -> None:
        self.done = Purged()
        self._store, self._retain, self._dry_run = store, retain, dry_run
        self._now = store.clock.now()
        self._newest: dict[str, list[tuple[datetime, int, Run | None]]] = {}  # of each workflow, as a heap
        self._seen = 0
        self._after: str | None = None

    def page(self) -> bool:
        """Look at one page; whether there is another."""
        page = self._store.list_runs(RunQuery(status=FINISHED, limit=PAGE, after=self._after))
        doomed = [gone for run in page.runs for gone in self._gone(run)]
        _remove(self._store, doomed, self.done, dry_run=self._dry_run)
        self._after = page.next
        return page.next is not None

    def _gone(self, run: Run) -> Iterator[Run]:
        """What need not stay, now that this one has been seen: it, or one that it shows to be too old."""
        rule = self._retain.of(run.workflow)
        age = self._now - (run.updated_at or run.created_at).timestamp()
        stays = run.worker is not None or rule.keeps(run.status, age, rule.count)
        at_once = not stays and rule.count > 0 and not rule.keeps(run.status, age, 0)
        if at_once:
            yield run
        self._seen += 1
        newest = self._newest.setdefault(run.workflow, [])
        place = (run.created_at, -self._seen, None if stays or at_once else replace(run, input=b""))
        if len(newest) < rule.count:
            heapq.heappush(newest, place)
            return
        older = heapq.heappushpop(newest, place)[2]
        if older is not None:
            yield older


def sweep(store: Store, retain: Retain, *, dry_run: bool = False) -> Purged:
    """Remove every finished run that the rule does not keep."""
    one = Sweep(store, retain, dry_run=dry_run)
    while one.page():
        pass
    return one.done


async def keep_swept(engine: Engine, retain: Retain) -> None:
    """What a worker does beside its runs: look now and then which of the finished ones need not stay any longer."""
    while not engine.closed:
        one = Sweep(engine.store, retain)
        more = True
        try:
            while more and not engine.closed:
                more = await engine.call(one.page)
                await asyncio.sleep(REST_SECONDS)
        except StoreError as error:
            log.warning("finished runs could not be removed: %s", error)
        if one.done.removed:
            log.info("%d finished runs were removed: they need not stay any longer", one.done.removed)
        await asyncio.sleep(SWEEP_SECONDS)


# -- for good ----------------------------------------------------------------------------------------------------------


async def erase(engine: Engine, run_id: str, *, force: bool = False, reason: str = "", actor: str = "") -> None:
    """Remove one run so that nothing of it is left in the store's files.

    One that has not ended is refused; with `force` it is cancelled first, without its clean-up, if nobody drives it.
    If it broke off half-way, do it again: the store remembers which runs it has removed and not yet scrubbed. With
    `force` the files are written anew even if nothing is known of the run.
    """
    run: Run | None = None
    damaged = False
    try:
        run = await engine.call(head_of, engine.store, run_id)
        if run is None:
            if await engine.call(_erase, engine.store, run_id, force):  # an erase that broke off has removed it
                return
            raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    except CheckpointCorrupt:
        damaged = True
    if damaged or (run is not None and run.status not in FINISHED):
        if not force:
            what = "is damaged" if run is None else f"is {run.status.value}"
            raise RunConflict(
                f"run {run_id!r} {what}, so it is not erased unless by force (force=True, or --force)", run_id
            )
        if (check := getattr(engine.store, "check_scrub", None)) is not None:  # before it is cancelled for nothing
            await engine.call(check)
        with contextlib.suppress(CheckpointCorrupt):  # no history is so damaged that it could not go
            await engine.cancel_now(run_id, reason or "it is erased", actor)
    removed = await engine.call(_erase, engine.store, run_id, force)
    if not removed:
        raise RunConflict(f"run {run_id!r} is driven by a worker, or was let go on meanwhile: cancel it first", run_id)


def _erase(store: Store, run_id: str, force: bool) -> int:
    return store.delete_runs([run_id], finished=not force, scrub=True)


# -- at the door -------------------------------------------------------------------------------------------------------


def refuse_damaged(store: Store) -> None:
    """Raise if anything in a store is not as it was written."""
    found = verify(store)
    if found.sound:
        return
    told = [*(problems[0] for problems in found.damaged.values()), *(flaw.what for flaw in found.flaws)]
    more = f"; and {len(told) - NAMED} more" if len(told) > NAMED else ""
    raise CheckpointCorrupt(
        f"{store.url} is not opened, because strict=True and it is damaged: {'; '.join(told[:NAMED])}{more}"
    )
