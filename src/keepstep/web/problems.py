"""Errors as problem details (RFC 9457): a status, a stable type, and the sentence of the error."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
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
from ..views.seen import Moved
from ..views.start_form import Unfit
from .routes import NotAllowed, NotJson, TooLarge

log = logging.getLogger("keepstep")

#: Status and type of each error, the most specific ones first.
_KINDS: tuple[tuple[type[Exception], int, str], ...] = (
    (Moved, 409, "moved"),
    (NotJson, 422, "unfit"),
    (NotAllowed, 403, "role"),
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
    (Unfit, 422, "unfit"),
    (NotSerializable, 422, "unfit"),
    (DefinitionError, 422, "refused"),
    (StoreUnavailable, 503, "store"),
    (StoreError, 503, "store"),
    (KeepstepError, 409, "conflict"),
)


class Problem(msgspec.Struct, omit_defaults=True):
    """Problem details. `type` is stable when `detail` is reworded; `errors` has those of a form by its fields."""

    type: str
    title: str
    status: int
    detail: str
    errors: dict[str, str] = {}


def problem(
    status: int,
    kind: str,
    detail: str,
    headers: dict[str, str] | None = None,
    errors: dict[str, str] | None = None,
) -> Response:
    """Return a response with problem details."""
    title = kind.replace("-", " ")
    body = msgspec.json.encode(Problem(f"keepstep:{kind}", title, status, detail, errors or {}))
    return Response(body, status, headers=headers, media_type="application/problem+json")


def problem_of(error: Exception, redact: Any) -> Response:
    """Return the response to an error."""
    status, kind, detail = kind_of(error, redact)
    errors = {name: redact(text) for name, text in error.fields.items()} if isinstance(error, Unfit) else None
    return problem(status, kind, detail, dict(getattr(error, "headers", None) or {}), errors)


def kind_of(error: Exception, redact: Any) -> tuple[int, str, str]:
    """Return status, type and text of an error. An unexpected one is logged; its text stays in the process."""
    if isinstance(error, HTTPException):
        return error.status_code, "http", str(error.detail)
    if isinstance(error, ClientDisconnect):
        return 400, "http", "the client left before its request had ended"
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            return status, name, redact(str(error))
    log.error("the request failed unexpectedly", exc_info=error)
    return 500, "internal", "an unexpected error; the log of the server has details"
