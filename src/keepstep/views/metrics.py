"""The store as a whole in the text format of Prometheus, counted when it is scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..observers.metrics import Metric, text_of
from .top import sample

if TYPE_CHECKING:
    from ..ports import Store


def store_metrics(store: Store) -> str:
    """Return gauges of queues, services and workers, as their heartbeats tell them."""
    seen = sample(store)
    driven = Metric("keepstep_queue_driven", "Runs of a queue that workers drive.", ("queue",), kind="gauge")
    waiting = Metric("keepstep_queue_waiting", "Runs of a queue that wait to begin.", ("queue",), kind="gauge")
    oldest = Metric("keepstep_queue_oldest_seconds", "Age of the oldest run that waits.", ("queue",), kind="gauge")
    for queue in seen.queues:
        waiting.set(queue.name, value=queue.counts.waiting)
        if queue.driven is not None:
            driven.set(queue.name, value=queue.driven)
        if queue.counts.oldest_at is not None:
            oldest.set(queue.name, value=max(0.0, (seen.at - queue.counts.oldest_at).total_seconds()))
    running = Metric("keepstep_service_running", "Attempts that hold a place at a service.", ("service",), kind="gauge")
    queued = Metric("keepstep_service_waiting", "Attempts that wait for a place.", ("service",), kind="gauge")
    parked = Metric("keepstep_service_parked", "Runs parked at a service.", ("service",), kind="gauge")
    breaker = Metric(
        "keepstep_breaker_open", "1 while the breaker of a service is not closed.", ("service",), kind="gauge"
    )
    for service in seen.services:
        running.set(service.name, value=service.running)
        queued.set(service.name, value=service.waiting)
        parked.set(service.name, value=service.parked)
        breaker.set(service.name, value=float(service.breaker != "closed"))
    alive = Metric("keepstep_workers", "Workers that are alive.", kind="gauge")
    alive.set(value=sum(one.worker.alive for one in seen.workers))
    leases = Metric("keepstep_driven_runs", "Runs that living workers drive.", kind="gauge")
    leases.set(value=sum(one.worker.leases for one in seen.workers if one.worker.alive))
    aside = Metric("keepstep_set_aside_runs", "Runs that are set aside, counted up to 1,000.", kind="gauge")
    aside.set(value=seen.set_aside)
    failures = Metric("keepstep_save_failures", "Commits that living workers could not save.", kind="gauge")
    failures.set(value=seen.save_failures)
    rates = Metric("keepstep_rate", "Runs, steps and failures a second, as workers tell.", ("what",), kind="gauge")
    for what in ("runs", "steps", "failures"):
        rates.set(what, value=getattr(seen.rates, what))
    gauges = (driven, waiting, oldest, running, queued, parked, breaker, alive, leases, aside, failures, rates)
    return text_of(gauges)
