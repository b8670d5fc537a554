"""Gives the code of a run and the body of an attempt their trace context; errors of the tracer affect neither."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..model.trace import trace_id
from ..ports import Traced, Tracer

if TYPE_CHECKING:
    from ..model import Run
    from .driver import RunDriver

log = logging.getLogger("keepstep")


def enter(tracer: Tracer, run: RunDriver, step: str = "", attempt: int = 0) -> None:
    """Make the context of the run, or of an attempt, current in this task."""
    try:
        tracer.enter(run.traced, step, attempt)
    except KeyboardInterrupt:
        raise
    except BaseException:  # its `SystemExit` or `CancelledError` would be taken for one of the code
        log.exception("the tracer failed at %s of run %s", f"step {step}" if step else "the code", run.id)


def traceparent_from(tracer: Tracer | None, run: Run) -> str | None:
    """Return the trace context of what a run starts: its own; without a tracer, that of its starter."""
    if tracer is None:
        return run.traceparent
    try:
        return tracer.traceparent(Traced(trace_id(run.id, run.created_at), run.id, run.workflow))
    except KeyboardInterrupt:
        raise
    except BaseException:  # as above
        log.exception("the tracer failed to name the context of run %s", run.id)
        return run.traceparent
