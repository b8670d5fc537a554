"""The wait that an error asks for: by a raised `RetryAfter`, or by the answer of a service."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from ..errors import RetryAfter
from .classify import attribute, causes, response_of


@dataclass(frozen=True, slots=True)
class Ask:
    """A requested wait. A request of the step's own code is `exact`; one of a service is a minimum."""

    seconds: float
    exact: bool


def asked_wait(error: BaseException | None, now: float | None = None) -> Ask | None:
    """Return the wait that the error, or a cause of it, asks for; None if there is no valid request.

    `now`, in seconds since the epoch, is needed for a date.
    """
    if error is None:
        return None
    for one in causes(error):
        if isinstance(one, RetryAfter):
            seconds = _seconds(one.seconds, now)
            return None if seconds is None else Ask(seconds, exact=True)
        seconds = _from_service(one, now)
        if seconds is not None:
            return Ask(seconds, exact=False)
    return None


def _from_service(error: BaseException, now: float | None) -> float | None:
    seconds = _seconds(attribute(error, "retry_after"), now)
    if seconds is not None:
        return seconds
    for holder in (response_of(error), error):
        headers = attribute(holder, "headers")
        milliseconds = _seconds(_header(headers, "retry-after-ms"), None)
        if milliseconds is not None:
            return milliseconds / 1000
        seconds = _seconds(_header(headers, "retry-after"), now)
        if seconds is not None:
            return seconds
    return None


def _header(headers: Any, name: str) -> Any:
    """Return a header's value from any kind of mapping; a plain dict is case-sensitive."""
    try:
        return next((value for key, value in headers.items() if str(key).lower() == name), None)
    except Exception:  # noqa: BLE001 - not a mapping, or one that fails
        return None


def _seconds(value: Any, now: float | None) -> float | None:
    """Return the wait in seconds for a number, its text, an HTTP date, an instant or a duration."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if isinstance(value, str):
        value = _from_text(value.strip())
    if isinstance(value, datetime):
        value = _until(value, now)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = float(value)
    except OverflowError:  # an integer too large for a float
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _from_text(text: str) -> float | datetime | None:
    try:
        return float(text)
    except ValueError:
        pass
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - slow to import, and dates are rare

    try:
        return parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None


def _until(instant: datetime, now: float | None) -> float | None:
    if now is None:
        return None
    aware = instant if instant.tzinfo else instant.replace(tzinfo=UTC)
    return max(0.0, aware.timestamp() - now)
