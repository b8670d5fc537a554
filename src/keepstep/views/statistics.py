"""Statistics of a run's history: its records by kind, and the calls, failures and seconds of each step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from ..errors import RunNotFound
from ..model import Kind
from ..model.checkpoint import ENDS_STEP
from ..stores.encrypted import below
from .timeline import RETRIED, timeline_of

if TYPE_CHECKING:
    from ..ports import Store

#: Records that are counted at most, so that an answer takes seconds at the longest.
MOST_RECORDS = 200_000


class StepStatistics(msgspec.Struct):
    """The ended attempts of a step, by its name without branches. Times are in milliseconds."""

    step: str
    attempts: int = 0
    completed: int = 0
    failed: int = 0
    retried: int = 0
    cancelled: int = 0
    total: int = 0
    longest: int = 0


class Statistics(msgspec.Struct):
    """The sums of a run's records. `counted` is below `seq` if there are too many, or if some were removed."""

    run: str
    seq: int
    counted: int
    kinds: dict[str, int]
    workers: dict[str, int]
    errors: dict[str, int]
    steps: list[StepStatistics]
    leases: int
    recoveries: int
    superseded: int
    signals: int


def statistics_of(store: Store, run_id: str) -> Statistics:
    """Count the records of a run. It takes long for many, so call it in a thread."""
    run = store.get_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
    kinds, workers, errors = Counter[str](), Counter[str](), Counter[str]()
    steps: dict[str, StepStatistics] = {}
    after: int | None = 0
    counted = leases = recoveries = gone = 0
    while after is not None and counted < MOST_RECORDS:
        page = timeline_of(below(store), run_id, after, MOST_RECORDS)
        names, columns, after = page.names, page.columns, page.next
        counted += len(columns.seq)
        leases += len(page.leases)
        recoveries += sum(one.recovery for one in page.leases)
        gone = sum(last - first + 1 for first, last in page.superseded)
        for place, number in enumerate(columns.kind):
            kind = names.kinds[number]
            kinds[kind] += 1
            workers[names.workers[columns.worker[place]]] += 1
            if columns.error[place]:
                errors[names.errors[columns.error[place]]] += 1
            if kind in ENDS_STEP:
                name = names.steps[columns.step[place]]
                one = steps.setdefault(name, StepStatistics(name))
                one.attempts += 1
                one.completed += kind == Kind.STEP_COMPLETED
                one.failed += kind == Kind.STEP_FAILED
                one.cancelled += kind == Kind.STEP_CANCELLED
                one.retried += bool(columns.flags[place] & RETRIED)
                one.total += columns.took[place]
                one.longest = max(one.longest, columns.took[place])
    workers.pop("", None)
    return Statistics(
        run=run_id,
        seq=run.seq,
        counted=counted,
        kinds=dict(kinds),
        workers=dict(workers),
        errors=dict(errors),
        steps=sorted(steps.values(), key=lambda one: -one.total),
        leases=leases,
        recoveries=recoveries,
        superseded=gone,
        signals=run.signals,
    )
