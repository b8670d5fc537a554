"""The store as a whole in the text format of Prometheus, counted when it is scraped, at most once in some seconds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from ..engine.keepers import FOR_ALL
from ..model import FINISHED, RunQuery, Status
from ..observers.metrics import OTHER, Metric, text_of
from ..policies.breaker import CLOSED, HALF_OPEN, OPEN
from .top import sample

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from ..engine.engine import Engine
    from ..ports import Store
    from .top import QueueSample, Sample, WorkerSample

#: Seconds for which a text is given again, so that several servers of Prometheus cost no more than one.
KEPT_SECONDS = 15.0
#: The same, in times of what the counting took, so that it loads a large store little.
KEPT_SHARE = 20.0
#: Workers that are told one by one at most; those with the oldest start come first.
MOST_WORKERS = 100
#: Runs of a workflow and a status that are counted at most.
MOST_COUNTED = 10_000
#: Workflows whose runs are counted one by one at most, those of living workers in alphabetical order.
MOST_WORKFLOWS = 50


class StoreMetrics:
    """The metrics of an engine's store, made in a thread and kept for a while."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._text = ""
        self._until = 0.0
        self._lock = asyncio.Lock()

    async def text(self) -> str:
        """Return the text; callers at the same time wait for one counting."""
        async with self._lock:
            began = time.monotonic()
            if began >= self._until:
                self._text = await self._engine.call(store_metrics, self._engine.store)
                ended = time.monotonic()
                self._until = ended + max(KEPT_SECONDS, KEPT_SHARE * (ended - began))
            return self._text


def store_metrics(store: Store) -> str:
    """Return metrics of runs, queues, services and workers, as the store and their heartbeats tell them."""
    seen = sample(store)
    return text_of([_unfinished(store, seen), *_queues(seen), *_services(seen), *_fleet(seen), *_workers(seen)])


def _gauge(name: str, about: str, *labels: str) -> Metric:
    return Metric(name, about, labels, kind="gauge")


def _unfinished(store: Store, seen: Sample) -> Metric:
    """Return the unfinished runs by workflow and status. A status that no run has costs one look."""
    about = f"Unfinished runs, each workflow counted up to {MOST_COUNTED:,}; those of unknown workflows are other."
    runs = _gauge("keepstep_unfinished_runs", about, "workflow", "status")
    known = sorted({name for one in seen.workers if one.worker.alive for name in one.worker.known} - FOR_ALL)
    for status in sorted(set(Status) - FINISHED):
        left = _count(store, RunQuery(status=frozenset({status})))
        for name in known[:MOST_WORKFLOWS] if left else ():
            found = _count(store, RunQuery(name, frozenset({status})))
            runs.set(name, status.value, value=found)
            left = max(0, left - found)
        runs.set(OTHER, status.value, value=left)
    return runs


def _count(store: Store, query: RunQuery) -> int:
    return store.list_runs(replace(query, limit=0, count_to=MOST_COUNTED)).count or 0


def _queues(seen: Sample) -> Iterator[Metric]:
    driven = _gauge("keepstep_queue_driven", "Runs of a queue that workers drive.", "queue")
    waiting = _gauge("keepstep_queue_waiting", "Runs of a queue that wait to begin.", "queue")
    oldest = _gauge("keepstep_queue_oldest_seconds", "Age of the oldest run that waits; 0 if none does.", "queue")
    for queue in seen.queues:
        waiting.set(queue.name, value=queue.counts.waiting)
        oldest.set(queue.name, value=_age(queue, seen))
        if queue.driven is not None:
            driven.set(queue.name, value=queue.driven)
    yield from (driven, waiting, oldest)


def _age(queue: QueueSample, seen: Sample) -> float:
    since = queue.counts.oldest_at
    return 0.0 if since is None else max(0.0, (seen.at - since).total_seconds())


def _services(seen: Sample) -> Iterator[Metric]:
    running = _gauge("keepstep_service_running", "Attempts that hold a place at a service.", "service")
    waiting = _gauge("keepstep_service_waiting", "Attempts that wait for a place.", "service")
    parked = _gauge("keepstep_service_parked", "Runs parked at a service.", "service")
    breaker = _gauge("keepstep_breaker_state", "1 for the state of a service's breaker, else 0.", "service", "state")
    for service in seen.services:
        running.set(service.name, value=service.running)
        waiting.set(service.name, value=service.waiting)
        parked.set(service.name, value=service.parked)
        for state in (CLOSED, HALF_OPEN, OPEN):
            breaker.set(service.name, state, value=float(service.breaker == state))
    yield from (running, waiting, parked, breaker)


def _fleet(seen: Sample) -> Iterator[Metric]:
    living = [one.worker for one in seen.workers if one.worker.alive]
    workers = _gauge(
        "keepstep_workers", "Workers that are alive: those that claim runs, and those that drain.", "state"
    )
    claiming = sum(one.claims for one in living)
    workers.set("claims", value=claiming)
    workers.set("drains", value=len(living) - claiming)
    driven = _gauge("keepstep_driven_runs", "Runs that living workers drive.")
    driven.set(value=sum(one.leases for one in living))
    rates = _gauge("keepstep_rate", "Runs, steps and failures a second, as workers tell.", "what")
    for what in ("runs", "steps", "failures"):
        rates.set(what, value=getattr(seen.rates, what))
    yield from (workers, driven, rates)


#: Metrics of each living worker: the end of the name, and its meaning.
_OF_WORKERS = {
    "leases": "Runs that the worker holds.",
    "heartbeat_seconds": "Age of the newest heartbeat of the worker.",
    "resident_bytes": "Memory of the worker's process.",
    "threads": "Threads of Python in the worker's process.",
    "open_runs": "Runs in the memory of the worker.",
    "loop_lag_seconds": "Longest time by which the worker's event loop was late between two heartbeats.",
    "cpu_seconds_total": "Processor time of the worker's process.",
    "steps_total": "Steps that completed at the worker.",
    "failures_total": "Attempts that failed at the worker.",
    "commits_total": "Transactions that the worker has committed.",
    "save_failures_total": "Tries to save that failed at the worker.",
    "halted_total": "Runs halted at the worker because the store could not save.",
}


def _measures(one: WorkerSample, at: datetime) -> tuple[float, ...]:
    """Return the values of a worker, in the order above."""
    worker, counts, used = one.worker, one.counts, one.counts.resources
    return (
        worker.leases,
        0.0 if worker.renewed_at is None else max(0.0, (at - worker.renewed_at).total_seconds()),
        used.resident_bytes,
        used.threads,
        used.open_runs,
        max(0.0, used.lag_seconds),
        used.processor_seconds,
        counts.steps,
        counts.failures,
        counts.commits,
        counts.save_failures,
        counts.halted,
    )


def _workers(seen: Sample) -> Iterator[Metric]:
    """Yield what each living worker tells with its heartbeat."""
    place = _gauge("keepstep_worker_info", "1 for each living worker, with its machine and process.", *_PLACE)
    ends = Metric("keepstep_worker_runs_total", "Runs that ended at the worker.", ("worker", "status"))
    found = [
        Metric(f"keepstep_worker_{name}", about, ("worker",), kind="counter" if name.endswith("_total") else "gauge")
        for name, about in _OF_WORKERS.items()
    ]
    for one in [one for one in seen.workers if one.worker.alive][:MOST_WORKERS]:
        worker, counts = one.worker, one.counts
        place.set(worker.id, worker.host, str(worker.pid), value=1)
        for status in ("completed", "failed", "cancelled", "set_aside"):
            ends.set(worker.id, status.replace("_", " "), value=getattr(counts, status))
        for metric, value in zip(found, _measures(one, seen.at), strict=True):
            metric.set(worker.id, value=value)
    yield from (place, ends, *found)


#: Labels that tell where a worker is.
_PLACE = ("worker", "host", "pid")
