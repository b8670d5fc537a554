"""What is kept of an error: enough to read, group and decide, nothing that could run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """A recorded error. `caused_by` holds the sequence numbers of the step failures that led to it."""

    type: str
    message: str
    error_class: str = "unknown"
    code: str | None = None
    traceback: str = ""
    attempt: int = 0
    id: str = ""
    caused_by: tuple[int, ...] = ()
