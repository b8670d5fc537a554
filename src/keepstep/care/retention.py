"""Removes runs: finished ones by a filter or by the retention rule, and single runs for good."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointCorrupt, DefinitionError, EraseUnfinished, RunConflict, RunNotFound, StoreError
from ..history.series import newest_run
from ..model import FINISHED, Run, RunQuery, Status
from ..model.series import SERIES
from ..policies import Retain
from ..ports import OptionalStore, Store, instant, optional
from ..stores.encrypted import below
from ..stores.reading import all_runs, head_of
from .verify import PAGE, verify

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..workflows.definition import Workflow

log = logging.getLogger("keepstep")

#: Seconds between two retention sweeps of a worker, and its pause after each page of a sweep.
SWEEP_SECONDS = 600.0
REST_SECONDS = 0.05
#: Seconds that a run whose workflow says `delete_on_success` stays after its end, so that those who await its result
#: read it. It is also the time between two removals of such runs.
READ_SECONDS = 60.0
#: Damaged runs that the error for a refused store names at most.
NAMED = 5


@dataclass(slots=True)
class Purged:
    """The number of runs found and removed, by status and by workflow; after a dry run, those that would be removed.

    `parts` is the number of parts of a divided history that were dropped.
    """

    removed: int = 0
    parts: int = 0
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
    """Remove at most `limit` finished runs that ended before an instant. Unfinished runs are never touched."""
    if not statuses <= FINISHED:
        names = ", ".join(sorted(statuses - FINISHED))
        raise DefinitionError(f"status= must name finished statuses, got {names}")
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
    done.parts = 0 if dry_run else drop_history(store)
    return done


def divide_history(store: Store, days: float) -> bool:
    """Divide the history of a store into parts of `days` days each. Return False if it was divided before."""
    divide = optional(below(store), OptionalStore.divide_history)
    if divide is None:
        raise DefinitionError(f"{store.url} keeps its history as a whole; only a PostgreSQL store divides it")
    return divide(days)


def drop_history(store: Store) -> int:
    """Drop what is left of removed runs in a store whose history is divided. Return the number of parts dropped."""
    drop = optional(below(store), OptionalStore.drop_history)
    try:
        return 0 if drop is None else drop()
    except StoreError as error:
        log.warning("cannot drop old parts of the history: %s", error)
        return 0


def _remove(store: Store, runs: list[Run], done: Purged, *, dry_run: bool) -> None:
    doomed = {run.id for run in runs}
    runs[:] = [run for run in runs if not _begins_kept_series(store, run, doomed)]
    removed = len(runs) if dry_run or not runs else store.delete_runs([run.id for run in runs], finished=True)
    done.count(runs)
    done.removed -= len(runs) - removed  # another process let one of them go on meanwhile
    runs.clear()


def _begins_kept_series(store: Store, run: Run, doomed: set[str]) -> bool:
    """Whether a run is the first of a series whose newest run stays; starts and lookups still need its id.

    The runs between the first and the newest may be removed: the newest is found by its tag.
    """
    if run.status is not Status.COMPLETED or SERIES in run.tags:
        return False
    with contextlib.suppress(CheckpointCorrupt, RunNotFound):
        found = store.get_run(run.id)
        if found is not None and found.continued_as is not None:
            newest = newest_run(store, found)
            return newest.status not in FINISHED or newest.id not in doomed
    return False


# -- how long runs stay ------------------------------------------------------------------------------------------------


class Rules:
    """The rules of a worker, one for each workflow that it drives; it removes no runs of other workflows.

    A rule that the operator gave for a workflow by its name comes first, then the workflow's own, then the general one.
    """

    def __init__(self, general: Retain | None, workflows: Mapping[str, Workflow[..., Any]]) -> None:
        self._general, self._workflows = general, workflows

    def of(self, workflow: str) -> Retain | None:
        """Return the rule for one workflow; None keeps all its runs."""
        if self._general is not None and workflow in self._general.workflows:
            return self._general.workflows[workflow]
        known = self._workflows.get(workflow)
        return None if known is None else known.retain or self._general

    def own(self) -> dict[str, Retain]:
        """Return the rules that differ from the general one, by workflow."""
        found = {name: self.of(name) for name in sorted(self._workflows)}
        return {name: rule for name, rule in found.items() if rule is not None and rule is not self._general}

    @property
    def shortest_seconds(self) -> float:
        """The age below which every run stays, except for completed ones that need not stay at all."""
        rules = [*self.own().values(), *([] if self._general is None else [self._general])]
        return min((rule.shortest_seconds for rule in rules), default=math.inf)


class Sweep:
    """One pass over all finished runs, a page at a time, that removes those the retention rule does not keep.

    The newest runs of a workflow are determined by their creation, not by their arrival in this store.
    """

    def __init__(
        self, store: Store, retain: Retain | Rules, *, dry_run: bool = False, read_seconds: float = 0.0
    ) -> None:
        self.done = Purged()
        self._store, self._retain, self._dry_run, self._read_seconds = store, retain, dry_run, read_seconds
        self._now = store.clock.now()
        self._newest: dict[str, list[tuple[datetime, int, Run | None]]] = {}  # one heap per workflow
        self._seen = 0
        self._after: str | None = None

    def page(self) -> bool:
        """Process one page. Return whether another one follows."""
        page = self._store.list_runs(RunQuery(status=FINISHED, limit=PAGE, after=self._after))
        doomed = [expired for run in page.runs for expired in self._expired(run)]
        _remove(self._store, doomed, self.done, dry_run=self._dry_run)
        self._after = page.next
        return page.next is not None

    def _expired(self, run: Run) -> Iterator[Run]:
        """Yield the runs that may be removed after seeing this one: itself, or an older one that it displaces."""
        rule = self._retain.of(run.workflow)
        if rule is None:
            return
        age = self._now - (run.updated_at or run.created_at).timestamp()
        is_fresh = age < self._read_seconds and not rule.preserve
        stays = run.worker is not None or is_fresh or rule.keeps(run.status, age, rule.count)
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
    one.done.parts = 0 if dry_run else drop_history(store)
    return one.done


async def keep_swept(host: CommandHost, rules: Rules) -> None:
    """Remove runs by the rules of a worker, beside its runs, for as long as it is open."""
    swept_at = -math.inf
    while not host.closed:
        try:
            removed = await _remove_successful(host, rules)
            if (now := asyncio.get_running_loop().time()) - swept_at >= SWEEP_SECONDS:
                swept_at = now
                removed += await _sweep_slowly(host, rules)
            if removed:
                log.info("removed %d finished runs by the retention rule", removed)
        except StoreError as error:
            log.warning("cannot remove finished runs: %s", error)
        await asyncio.sleep(min(SWEEP_SECONDS, READ_SECONDS))


async def _remove_successful(host: CommandHost, rules: Rules) -> int:
    """Remove completed runs of workflows whose runs are deleted on success."""
    removed = 0
    for name, rule in rules.own().items():
        if not rule.preserve:
            before = instant(host.clock.now() - READ_SECONDS)
            done = partial(purge, host.store, workflow=name, statuses=frozenset({Status.COMPLETED}), before=before)
            removed += (await host.call(done)).removed
    return removed


async def _sweep_slowly(host: CommandHost, rules: Rules) -> int:
    """Sweep the store a page at a time, if it holds a run that is old enough to go."""
    await host.call(drop_history, host.store)
    oldest = RunQuery(status=FINISHED, updated_before=_instant_before(host, rules.shortest_seconds), limit=1)
    if not (await host.call(host.store.list_runs, oldest)).runs:
        return 0
    one = Sweep(host.store, rules, read_seconds=READ_SECONDS)
    more = True
    while more and not host.closed:
        more = await host.call(one.page)
        await asyncio.sleep(REST_SECONDS)
    return one.done.removed


def _instant_before(host: CommandHost, seconds: float) -> datetime:
    return instant(max(host.clock.now() - seconds, 0.0))


# -- for good ----------------------------------------------------------------------------------------------------------


async def erase(
    host: CommandHost, run_id: str, *, force: bool = False, rewrite: bool = False, reason: str = "", actor: str = ""
) -> None:
    """Remove one run so that no file of the store holds any part of it.

    An unfinished run is refused. With `force` it is first cancelled without its clean-up, if nobody drives it. An
    interrupted erasure is completed by erasing again: the store remembers removed runs that are not yet scrubbed. For a
    large store this raises `EraseUnfinished`, because a rewrite makes all runs wait; `rewrite` allows it.
    """
    try:
        await _erase_run(host, run_id, force=force, reason=reason, actor=actor)
    except EraseUnfinished:
        if not rewrite:
            raise
        await finish_erasures(host)
    finally:
        if optional(host.store, OptionalStore.write_documents) is not None:
            await host.artifacts.sweep()


async def finish_erasures(host: CommandHost) -> int:
    """Rewrite the store's files, without what was removed; every run waits meanwhile. The number of runs erased."""
    rewrite = optional(below(host.store), OptionalStore.rewrite)
    return 0 if rewrite is None else await host.call(rewrite)


async def _erase_run(host: CommandHost, run_id: str, *, force: bool, reason: str, actor: str) -> None:
    run: Run | None = None
    damaged = False
    try:
        run = await host.call(head_of, host.store, run_id)
        if run is None:
            if await host.call(_erase, host.store, run_id, force):  # an interrupted erasure has removed the run already
                return
            raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    except CheckpointCorrupt:
        damaged = True
    if damaged or (run is not None and run.status not in FINISHED):
        if not force:
            what = "is damaged" if run is None else f"is {run.status.value}"
            raise RunConflict(
                f"run {run_id!r} {what}, so it is not erased unless by force (force=True, or --force)", run_id
            )
        check = optional(host.store, OptionalStore.check_scrub)
        if check is not None:  # before it is cancelled for nothing
            await host.call(check)
        with contextlib.suppress(CheckpointCorrupt):  # a damaged history must not prevent the erasure
            await host.cancel_now(run_id, reason or "erased", actor)
    removed = await host.call(_erase, host.store, run_id, force)
    if not removed:
        raise RunConflict(f"run {run_id!r} is driven by a worker, or went on meanwhile; cancel it first", run_id)


def _erase(store: Store, run_id: str, force: bool) -> int:
    return store.delete_runs([run_id], finished=not force, scrub=True)


# -- at the door -------------------------------------------------------------------------------------------------------


def refuse_damaged(store: Store) -> None:
    """Raise `CheckpointCorrupt` if anything in a store is damaged."""
    found = verify(store)
    if found.sound:
        return
    problems = [*(problems[0] for problems in found.damaged.values()), *(flaw.what for flaw in found.flaws)]
    more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
    raise CheckpointCorrupt(
        f"{store.url} is damaged and strict=True, so it is not opened: {'; '.join(problems[:NAMED])}{more}"
    )
