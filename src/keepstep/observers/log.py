"""The observer that writes one readable line per event to the standard library's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from ..model import Event
from ..model.event import EVENTS
from ..ports import CURRENT

#: Maximum number of characters of one value in a line, so that a large result does not fill the log.
MAX_VALUE = 200

#: Data of events for programs, which the log leaves out.
_FOR_PROGRAMS = frozenset(
    ("traceback", "call", "spent", "first_at", "created_by", "version", "parent", "origin", "series", "traceparent")
)

#: Log level by event name; an event that is not listed is logged at INFO.
_LEVELS: Mapping[str, int] = {name: logging.getLevelNamesMapping()[spec.level] for name, spec in EVENTS.items()}


class LogObserver:
    """Log events to the logger `keepstep`, or another: problems at WARNING or ERROR, the rest at INFO."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("keepstep")

    def observe(self, event: Event) -> None:
        level = _LEVELS.get(event.name, logging.INFO)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", line(event))


class RedactedLog(logging.Filter):
    """A log filter that redacts secrets in messages and tracebacks."""

    def __init__(self, redact: Callable[[str], str]) -> None:
        super().__init__()
        self._redact = redact
        self._format = logging.Formatter().formatException

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        shown = self._redact(message)
        if shown != message:
            record.msg, record.args = shown, ()
        if record.exc_info:
            text = record.exc_text or self._format(record.exc_info)
            record.exc_text = self._redact(text)
            if record.exc_text != text:
                record.exc_info = None  # otherwise a handler would format the unredacted traceback
        return True


class RunFilter(logging.Filter):
    """A log filter that gives each record the run, the step and the attempt in which it is logged; empty outside.

    Add it to a handler. It changes nothing else, and lets every record pass.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        scope = CURRENT.get()
        found = (
            ("", "", 0) if scope is None else (scope.run.id, *((scope.key, scope.number) if scope.in_step else ("", 0)))
        )
        for name, value in zip(("run_id", "step", "attempt"), found, strict=True):
            if not hasattr(record, name):  # `ks.log` has set them
                setattr(record, name, value)
        return True


def line(event: Event) -> str:
    """Return the event as one line: its name, run and step, and the rest as key=value."""
    return " ".join(_words(event))


def _words(event: Event) -> Iterator[str]:
    yield event.name
    yield f"run={_text(event.run)}"
    if event.workflow:
        yield f"workflow={_text(event.workflow)}"
    if event.step:
        yield f"step={_text(event.step)}"
    if event.attempt:
        yield f"attempt={event.attempt}"
    if event.seq:
        yield f"seq={event.seq}"
    if event.worker:
        yield f"worker={_text(event.worker)}"
    if event.stage:
        yield f"stage={_text(event.stage)}"
    if event.agent:
        yield f"agent={_text(event.agent)}"
    for key, value in event.data.items():
        if key not in _FOR_PROGRAMS:
            yield f"{key}={_text(value)}"


def _text(value: object) -> str:
    """Return the value on one line, quoted unless it is a single word."""
    text = value if isinstance(value, str) else str(value)
    if len(text) > MAX_VALUE:
        text = text[: MAX_VALUE - 1] + "…"
    plain = text.isprintable() and text and not any(mark in text for mark in " =\"'")
    return text if plain else repr(text)
