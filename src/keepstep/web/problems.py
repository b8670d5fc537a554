"""Errors as problem details (RFC 9457): a status, a stable type, and the sentence of the error."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..errors import (
    AlreadyFinished,
    DefinitionError,
    EncryptionError,
    KeepstepError,
    NotSerializable,
    QueueFull,
    RecoveryError,
    ReplayMismatch,
    RunConflict,
    RunError,
    RunNotFound,
    SignalsFull,
    StoreError,
    StoreUnavailable,
    TimedOut,
    UnknownToken,
)
from .routes import Moved, NotJson, TooLarge

log = logging.getLogger("keepstep")

#: Status and type of each error, the most specific ones first.
_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (Moved, 409, "moved"),
    (NotJson, 422, "unfit"),
    (TooLarge, 413, "too-large"),
    (RunNotFound, 404, "not-found"),
    (UnknownToken, 404, "not-found"),
    (RunConflict, 409, "conflict"),
    (AlreadyFinished, 409, "finished"),
    (SignalsFull, 429, "full"),
    (QueueFull, 429, "full"),
    (TimedOut, 504, "timed-out"),
    (ReplayMismatch, 409, "mismatch"),
    (RecoveryError, 409, "conflict"),
    (RunError, 409, "conflict"),
    (EncryptionError, 403, "encrypted"),
    (NotSerializable, 422, "unfit"),
    (DefinitionError, 422, "refused"),
    (StoreUnavailable, 503, "store"),
    (StoreError, 503, "store"),
    (KeepstepError, 409, "conflict"),
)


class Problem(msgspec.Struct):
    """Problem details. `type` is stable when `detail` is reworded."""

    type: str
    title: str
    status: int
    detail: str


def problem(status: int, kind: str, detail: str, headers: dict[str, str] | None = None) -> Response:
    """Return a response with problem details."""
    title = kind.replace("-", " ")
    body = msgspec.json.encode(Problem(f"keepstep:{kind}", title, status, detail))
    return Response(body, status, headers=headers, media_type="application/problem+json")


def problem_of(error: Exception, redact: Any) -> Response:
    """Return the response to an error. An unexpected one is logged, and its text does not leave the process."""
    if isinstance(error, HTTPException):
        return problem(error.status_code, "http", str(error.detail), dict(error.headers or {}))
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            return problem(status, name, redact(str(error)))
    log.error("the API failed unexpectedly", exc_info=error)
    return problem(500, "internal", "an unexpected error; the log of the server has details")
