"""Surrounds the code of a run, a step or an attempt with a span of the tracer, whose errors affect none of them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from ..ports import Span, Tracer

if TYPE_CHECKING:
    from .host import Host

log = logging.getLogger("keepstep")


@contextmanager
def _span(tracer: Tracer, span: Span) -> Iterator[None]:
    """Surround code with a span. The tracer's own errors are logged, and errors of the code pass through."""
    try:
        around = tracer.around(span)
        around.__enter__()
    except KeyboardInterrupt:
        raise
    except BaseException:  # its `SystemExit` or `CancelledError` would be taken for one of the code
        log.exception("the tracer failed to begin a span of run %s", span.run)
        yield
        return
    try:
        yield
    finally:
        try:
            around.__exit__(*sys.exc_info())
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("the tracer failed to end a span of run %s", span.run)


def traced(host: Host, span: Span) -> AbstractContextManager[None]:
    """Return a context manager that surrounds code with a span of the host's tracer, if it has one."""
    return nullcontext() if host.tracer is None else _span(host.tracer, span)
