"""Classes of errors: which kind of trouble an exception stands for, judged without importing any client library.

An error is judged by its type, its errno and its HTTP status, in this order; if they say nothing, the errors that
caused it are judged in the same way. Only when the whole chain is silent are the messages read, the outermost first.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .. import errors
from ..errors import DefinitionError


class ErrorClass(StrEnum):
    """A kind of trouble. `retryable` and `trips_breaker` are what the class alone says about it."""

    TRANSIENT = "transient"
    RATE_LIMITED = "rate limited"
    RESOURCE_EXHAUSTED = "resource exhausted"
    TIMEOUT = "timeout"
    NETWORK = "network"
    INTERNAL = "internal"
    UNKNOWN = "unknown"
    VALIDATION = "validation"
    AUTHENTICATION = "authentication"
    AUTHORIZATION = "authorization"
    PERMANENT = "permanent"

    @property
    def retryable(self) -> bool:
        """Whether another attempt may help."""
        return self not in _NEVER_RETRIED

    @property
    def trips_breaker(self) -> bool:
        """Whether it counts against the service that was called."""
        return self in _TRIPS_BREAKER

    @classmethod
    def of(cls, name: str) -> ErrorClass:
        """The class with this name; a name that this version does not know is `unknown`."""
        try:
            return cls(name)
        except ValueError:
            return cls.UNKNOWN


_NEVER_RETRIED = frozenset(
    {ErrorClass.VALIDATION, ErrorClass.AUTHENTICATION, ErrorClass.AUTHORIZATION, ErrorClass.PERMANENT}
)
_TRIPS_BREAKER = frozenset(
    {
        ErrorClass.RATE_LIMITED,
        ErrorClass.RESOURCE_EXHAUSTED,
        ErrorClass.TIMEOUT,
        ErrorClass.NETWORK,
        ErrorClass.INTERNAL,
    }
)

#: A rule looks at one error, not at its causes, and returns its class, or None if it has no opinion.
Rule = Callable[[BaseException], ErrorClass | None]

#: How far a chain of causes is followed: longer ones are made by code that wraps in a loop.
MAX_CAUSES = 16
#: How much of a message is read: the start says what happened, and some messages hold whole documents.
MAX_MESSAGE = 2_000


@dataclass(frozen=True, slots=True)
class Classifier:
    """Says the class of an error: by its own rules first, in order, then by the built-in ones."""

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not callable(rule):
                raise DefinitionError(f"a rule of a classifier must be callable, not {rule!r}")

    def __call__(self, error: BaseException) -> ErrorClass:
        """The class of an error; never raises, except what one of the given rules raises."""
        chain = tuple(causes(error))
        for rules in (self.rules, _FACTS, (_by_message,)):
            for one in chain:
                for rule in rules:
                    found = rule(one)
                    if found is not None:
                        return ErrorClass(found)
        return ErrorClass.UNKNOWN


def classify(error: BaseException) -> ErrorClass:
    """The class of an error by the built-in rules."""
    return _BUILT_IN(error)


def by_type(error_class: ErrorClass, *kinds: type[BaseException]) -> Rule:
    """A rule that gives every error of these types the class."""
    return lambda error: error_class if isinstance(error, kinds) else None


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, then what caused it, nearest first; the errors of a group count as its causes."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < MAX_CAUSES:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting.extend(one.exceptions)
        cause = one.__cause__ or _context(one)
        reason = attribute(one, "reason")  # where urllib keeps the error that it wraps
        waiting.extend(found for found in (cause, reason) if isinstance(found, BaseException))


def _context(error: BaseException) -> BaseException | None:
    """What was being handled when the error arose. An answer to `Permanent` or `RetryAfter` has gone beyond them."""
    context = None if error.__suppress_context__ else error.__context__
    return None if isinstance(context, errors.Permanent | errors.RetryAfter) else context


def attribute(thing: object, name: str) -> Any:
    """The attribute, or None."""
    try:
        return getattr(thing, name, None)
    except Exception:  # noqa: BLE001 - a property of a foreign error may raise anything
        return None


# -- by type -------------------------------------------------------------------------------------------------------

_TYPES: tuple[tuple[ErrorClass, tuple[type[BaseException], ...]], ...] = (
    (
        ErrorClass.PERMANENT,
        (
            errors.Permanent,
            errors.DefinitionError,
            errors.ReplayMismatch,
            errors.RecoveryError,
            errors.AgentRefused,
            errors.RunCancelled,
            errors.RunNotFound,
            errors.RunConflict,
            errors.AlreadyFinished,
            NotImplementedError,
        ),
    ),
    (ErrorClass.RATE_LIMITED, (errors.RetryAfter,)),
    (ErrorClass.TIMEOUT, (errors.StepTimedOut, errors.RunTimedOut, errors.TimedOut, TimeoutError)),
    (ErrorClass.RESOURCE_EXHAUSTED, (errors.StoreFull, MemoryError)),
    (
        ErrorClass.TRANSIENT,
        (errors.StoreUnavailable, errors.AgentUnavailable, errors.BreakerOpen, BlockingIOError, InterruptedError),
    ),
    (ErrorClass.NETWORK, (ConnectionError, socket.gaierror, socket.herror)),
    (ErrorClass.AUTHORIZATION, (PermissionError,)),
)

# Client libraries name their errors alike; a name is the only thing that can be known of a type not imported.
_TYPE_NAMES: tuple[tuple[ErrorClass, re.Pattern[str]], ...] = (
    (ErrorClass.RATE_LIMITED, re.compile(r"RateLimit|TooManyRequests|Throttl")),
    (ErrorClass.TIMEOUT, re.compile(r"Time(d)?[oO]ut|DeadlineExceeded")),
    (ErrorClass.AUTHENTICATION, re.compile(r"Authentication|Unauthenticated|Unauthori[sz]ed|CertVerification")),
    (ErrorClass.AUTHORIZATION, re.compile(r"PermissionDenied|Forbidden|AccessDenied|Authori[sz]ation")),
    (ErrorClass.VALIDATION, re.compile(r"Validation|BadRequest|Unprocessable")),
    (ErrorClass.RESOURCE_EXHAUSTED, re.compile(r"ResourceExhausted|OutOfMemory|Quota|DiskFull")),
    (ErrorClass.TRANSIENT, re.compile(r"ServiceUnavailable|Overloaded|SerializationFailure|Deadlock|Transient")),
    (ErrorClass.INTERNAL, re.compile(r"InternalServer|InternalError")),
    (
        ErrorClass.NETWORK,
        re.compile(
            r"Connect(ion)?(Error|Refused|Reset|Closed|Lost)|(Network|Proxy|SSL|Read|Write|RemoteProtocol)Error"
        ),
    ),
)


def _by_record(error: BaseException) -> ErrorClass | None:
    """A failed step or run was judged when it failed."""
    if isinstance(error, errors.StepError | errors.RunFailed | errors.RunSetAside) and error.error is not None:
        found = ErrorClass.of(error.error.error_class)
        return None if found is ErrorClass.UNKNOWN else found
    return None


def _by_exact_type(error: BaseException) -> ErrorClass | None:
    if isinstance(error, BaseExceptionGroup):
        return None  # its parts are judged
    if not isinstance(error, Exception):
        return ErrorClass.PERMANENT  # cancelled, interrupted or told to exit: nothing to try again
    for error_class, kinds in _TYPES:
        if isinstance(error, kinds):
            return error_class
    return None


def _by_type_name(error: BaseException) -> ErrorClass | None:
    for kind in type(error).__mro__:
        if kind.__module__ != "builtins":
            for error_class, pattern in _TYPE_NAMES:
                if pattern.search(kind.__name__):
                    return error_class
    return None


def _by_wide_type(error: BaseException) -> ErrorClass | None:
    """Types that so many errors inherit from that an errno or a status says more."""
    return ErrorClass.VALIDATION if isinstance(error, ValueError | TypeError) else None


# -- by errno ------------------------------------------------------------------------------------------------------

_ERRNO_NAMES: dict[ErrorClass, str] = {
    ErrorClass.NETWORK: "ECONNREFUSED ECONNRESET ECONNABORTED EPIPE ENETUNREACH ENETDOWN ENETRESET EHOSTUNREACH "
    "EHOSTDOWN ENOTCONN EADDRNOTAVAIL",
    ErrorClass.TIMEOUT: "ETIMEDOUT ETIME",
    ErrorClass.TRANSIENT: "EAGAIN EWOULDBLOCK EINTR EBUSY EDEADLK ESTALE ETXTBSY",
    ErrorClass.RESOURCE_EXHAUSTED: "ENOSPC EDQUOT EMFILE ENFILE ENOMEM ENOBUFS",
    ErrorClass.AUTHORIZATION: "EACCES EPERM",
    ErrorClass.VALIDATION: "EINVAL ENAMETOOLONG",
    ErrorClass.INTERNAL: "EIO",
}
_ERRNOS = {
    getattr(errno, name): error_class
    for error_class, names in _ERRNO_NAMES.items()
    for name in names.split()
    if hasattr(errno, name)  # not every system has all of them
}


def _by_errno(error: BaseException) -> ErrorClass | None:
    return _ERRNOS.get(error.errno) if isinstance(error, OSError) and error.errno is not None else None


# -- by HTTP status ------------------------------------------------------------------------------------------------

_STATUSES: dict[int, ErrorClass] = {
    400: ErrorClass.VALIDATION,
    401: ErrorClass.AUTHENTICATION,
    403: ErrorClass.AUTHORIZATION,
    404: ErrorClass.PERMANENT,
    407: ErrorClass.AUTHENTICATION,
    408: ErrorClass.TIMEOUT,
    409: ErrorClass.PERMANENT,
    410: ErrorClass.PERMANENT,
    413: ErrorClass.VALIDATION,
    414: ErrorClass.VALIDATION,
    415: ErrorClass.VALIDATION,
    422: ErrorClass.VALIDATION,
    423: ErrorClass.TRANSIENT,
    425: ErrorClass.TRANSIENT,
    429: ErrorClass.RATE_LIMITED,
    451: ErrorClass.AUTHORIZATION,
    500: ErrorClass.INTERNAL,
    501: ErrorClass.PERMANENT,
    502: ErrorClass.TRANSIENT,
    503: ErrorClass.TRANSIENT,
    504: ErrorClass.TIMEOUT,
    505: ErrorClass.PERMANENT,
    507: ErrorClass.RESOURCE_EXHAUSTED,
    522: ErrorClass.TIMEOUT,
    524: ErrorClass.TIMEOUT,
    529: ErrorClass.TRANSIENT,
}


def class_of_status(status: int) -> ErrorClass | None:
    """The class of an HTTP status; None if the status is no error."""
    if not 400 <= status <= 599:
        return None
    return _STATUSES.get(status, ErrorClass.PERMANENT if status < 500 else ErrorClass.INTERNAL)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error carries, wherever its library keeps it."""
    response = attribute(error, "response")
    for holder, name in (
        (error, "status_code"),
        (error, "status"),
        (response, "status_code"),
        (response, "status"),
        (error, "code"),
    ):
        value = attribute(holder, name)
        if isinstance(value, str) and len(value) == 3 and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 400 <= value <= 599:
            return int(value)
    return None


def _by_status(error: BaseException) -> ErrorClass | None:
    status = status_of(error)
    return None if status is None else class_of_status(status)


# -- by message ----------------------------------------------------------------------------------------------------

_MESSAGES: tuple[tuple[ErrorClass, re.Pattern[str]], ...] = tuple(
    (error_class, re.compile(pattern, re.IGNORECASE))
    for error_class, pattern in (
        (ErrorClass.RATE_LIMITED, r"rate.?limit|too many requests|throttl|rate exceeded"),
        (ErrorClass.TIMEOUT, r"timed?[ -]?out|deadline exceeded"),
        (
            ErrorClass.RESOURCE_EXHAUSTED,
            r"out of memory|no space left|disk (is )?full|resource.?exhausted|quota|too many open files",
        ),
        (
            ErrorClass.NETWORK,
            (
                r"connection (was |is )?(refused|reset|aborted|closed|lost|error|failed)|broken pipe|unreachable"
                r"|name resolution|name or service not known|server disconnected"
            ),
        ),
        (
            ErrorClass.AUTHENTICATION,
            (
                r"unauthori[sz]ed|unauthenticated|not authenticated|authentication (failed|required)"
                r"|(invalid|incorrect|expired|missing) (api.?key|token|credentials?|password)"
            ),
        ),
        (ErrorClass.AUTHORIZATION, r"forbidden|permission denied|access denied|not permitted|not authori[sz]ed"),
        (
            ErrorClass.TRANSIENT,
            r"temporar(y|ily)|service unavailable|bad gateway|overloaded|try again|deadlock|(database|table) is locked",
        ),
        (ErrorClass.INTERNAL, r"internal (server )?error"),
        (ErrorClass.VALIDATION, r"validation (error|failed)|invalid (argument|input|request|value)|malformed"),
    )
)


def _by_message(error: BaseException) -> ErrorClass | None:
    try:
        message = str(error)[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - a foreign error may fail even to say its name
        return None
    for error_class, pattern in _MESSAGES:
        if pattern.search(message):
            return error_class
    return None


_FACTS: tuple[Rule, ...] = (_by_record, _by_exact_type, _by_type_name, _by_errno, _by_status, _by_wide_type)
_BUILT_IN = Classifier()
