"""Why a run that is ready to begin or go on has not been claimed: its queue has no worker, no place or no turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from ..model import Run, WorkerInfo
from ..model.gate import QUEUE
from ..policies.queue import Limits
from ..policies.rate import tokens
from .waits import Wait, WaitKind, is_due

if TYPE_CHECKING:
    from ..ports import Store


def with_queue(
    store: Store, run: Run, waits: tuple[Wait, ...], workers: Sequence[WorkerInfo], now: datetime
) -> tuple[Wait, ...]:
    """Return the waits of a run; one for a worker names the queue, and why nobody claims the run from it."""
    if not is_due(waits):
        return waits
    why = _why(store, run, workers, now)
    if not why:
        return waits
    return tuple(replace(one, queue=run.queue, why=why) if one.kind is WaitKind.WORKER else one for one in waits)


def _why(store: Store, run: Run, workers: Sequence[WorkerInfo], now: datetime) -> str:
    knowing = [one for one in workers if one.claims and run.workflow in one.workflows]
    if knowing and not any(one.serves(run.queue) for one in knowing):
        return "unserved"
    gate = next((one for one in store.list_gates(QUEUE) if one.name == run.queue), None)
    if gate is None:
        return ""
    limits, counts = Limits.of(gate.limits), store.count_queue(run.queue)
    if limits.concurrency is not None and counts.driven >= limits.concurrency:
        return "concurrency" if limits.concurrency else "stopped"
    if limits.per_key is not None and not run.holds and dict(counts.keys).get(run.key or "", 0) >= limits.per_key:
        return "per_key"
    if limits.rate is not None and not run.epoch and not tokens(limits.rate, gate.used_until, now.timestamp()).left:
        return "rate"
    return ""
