"""Metrics of one process: what it uses, its runs and attempts, and what it has written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..observers.metrics import Metric

if TYPE_CHECKING:
    from .process import Process


def process_metrics(engine: Process) -> list[Metric]:
    """Return gauges and counters of this process: what it uses, its runs and attempts, and what it has written."""
    used, counts = engine.resources(), engine.journal.counter.counts
    attempts = sum(len(run.bodies) for run in engine.live.values())
    gauges = {
        ("keepstep_process_resident_bytes", "Memory that the process holds."): used.resident_bytes,
        ("keepstep_process_threads", "Threads of Python in the process."): used.threads,
        (
            "keepstep_process_loop_lag_seconds",
            "Longest time by which the event loop was late since the last heartbeat.",
        ): max(0.0, used.lag_seconds),
        ("keepstep_open_runs", "Runs in the memory of the process."): used.open_runs,
        ("keepstep_open_attempts", "Attempts of steps that run in the process."): attempts,
    }
    totals = {
        ("keepstep_process_cpu_seconds_total", "Processor time of the process."): used.processor_seconds,
        ("keepstep_commits_total", "Transactions that the process has committed."): counts.commits,
        ("keepstep_save_failures_total", "Tries to save that failed."): counts.save_failures,
    }
    found = []
    for kind, values in (("gauge", gauges), ("counter", totals)):
        for (name, about), value in values.items():
            found.append(Metric(name, about, kind=kind))
            found[-1].set(value=value)
    return found
