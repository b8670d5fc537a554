"""The observer that writes to the standard library's log: one readable line for every event."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ..model import Event

#: Longest text of one value in a line; a whole result does not belong in a log.
MAX_VALUE = 200

#: The last words of an event's name that someone should look at; the rest is the ordinary course.
_LEVELS = {
    "failed": logging.WARNING,
    "retrying": logging.WARNING,
    "timed_out": logging.WARNING,
    "set_aside": logging.ERROR,
    "lost": logging.WARNING,
    "in_doubt": logging.WARNING,
    "halted": logging.ERROR,
    "budget": logging.WARNING,
    "opened": logging.WARNING,
}
_RUN_FAILED = "run.failed"


class LogObserver:
    """Writes events to the logger `keepstep`, or another, at INFO; trouble at WARNING and ERROR."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger("keepstep")

    def observe(self, event: Event) -> None:
        level = _level(event.name)
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", line(event))


class RedactedLog(logging.Filter):
    """Takes secrets out of what passes a logger, tracebacks too."""

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
                record.exc_info = None  # or a handler would tell it all again
        return True


def line(event: Event) -> str:
    """The event as one line: what happened, to which run and step, and the rest as key=value."""
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
    for key, value in event.data.items():
        yield f"{key}={_text(value)}"


def _level(name: str) -> int:
    if name == _RUN_FAILED:
        return logging.ERROR
    return _LEVELS.get(name.rpartition(".")[2].replace(" ", "_"), logging.INFO)


def _text(value: object) -> str:
    """The value on one line: quoted as soon as it would not read as a single word."""
    text = value if isinstance(value, str) else str(value)
    if len(text) > MAX_VALUE:
        text = text[: MAX_VALUE - 1] + "…"
    plain = text.isprintable() and text and not any(mark in text for mark in " =\"'")
    return text if plain else repr(text)
