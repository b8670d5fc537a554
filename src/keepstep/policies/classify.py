"""Classification of errors, without importing any client library.

An error is classified by its type, its errno and its HTTP status, in this order. If these decide nothing, the errors
that caused it are classified in the same way. Messages are read last, the outermost first.
"""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from .. import errors
from ..errors import DefinitionError


class ErrorClass(StrEnum):
    """A class of errors. `retryable` and `trips_breaker` are the defaults of the class."""

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
        """Whether the error counts against the service that was called."""
        return self in _TRIPS_BREAKER

    @classmethod
    def of(cls, name: str) -> ErrorClass:
        """Return the class with this name; `unknown` for a name that this version does not know."""
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

#: A rule looks at one error, not at its causes. It returns the error's class, or None to leave the decision to others.
Rule = Callable[[BaseException], ErrorClass | None]

#: Rules as an option takes them: one, or several. A rule returns an `ErrorClass` or its name.
Classify = Callable[[BaseException], str | None] | Iterable[Callable[[BaseException], str | None]]

#: Maximum number of causes to follow. Only code that wraps errors in a loop makes longer chains.
MAX_CAUSES = 16
#: Maximum characters of a message to read. The start names the problem, and some messages hold whole documents.
MAX_MESSAGE = 2_000


@dataclass(frozen=True, slots=True)
class Classifier:
    """Classify errors by its own rules first, in order, then by the built-in ones."""

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not callable(rule):
                raise DefinitionError(f"a rule of a classifier must be callable, not {rule!r}")

    def __call__(self, error: BaseException) -> ErrorClass:
        """Return the class of an error. Raises only what one of the given rules raises."""
        chain = tuple(causes(error))
        for rules in (self.rules, _FACTS, (_by_message,)):
            for one in chain:
                for rule in rules:
                    found = rule(one)
                    if found is not None:
                        return ErrorClass(found)
        return ErrorClass.UNKNOWN


def classify(error: BaseException) -> ErrorClass:
    """Return the class of an error by the built-in rules."""
    return _BUILT_IN(error)


def checked_rules(given: Any, where: str) -> tuple[Rule, ...]:
    """Return the rules of a `classify=` option: one rule, a `Classifier`, or several of them."""
    if given is None:
        return ()
    if isinstance(given, Classifier):
        return given.rules
    if callable(given):
        return (given,)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DefinitionError(f"{where} takes a function of an error, or a list of such functions, not {given!r}")
    return tuple(rule for one in given for rule in checked_rules(one, where))


def by_type(error_class: ErrorClass, *kinds: type[BaseException]) -> Rule:
    """Return a rule that assigns the class to every error of these types."""
    return lambda error: error_class if isinstance(error, kinds) else None


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes, nearest first. The errors of a group count as its causes."""
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
        reason = attribute(one, "reason")  # urllib stores the wrapped error here
        waiting.extend(found for found in (cause, reason) if isinstance(found, BaseException))


def _context(error: BaseException) -> BaseException | None:
    """Return the error being handled when this one was raised. `Permanent` and `RetryAfter` do not count."""
    context = None if error.__suppress_context__ else error.__context__
    return None if isinstance(context, errors.Permanent | errors.RetryAfter) else context


def attribute(thing: object, name: str) -> Any:
    """Return the attribute, or None."""
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
    (ErrorClass.TRANSIENT, (errors.BodyLost, errors.StoreUnavailable, BlockingIOError, InterruptedError)),
    (ErrorClass.NETWORK, (ConnectionError, socket.gaierror, socket.herror)),
    (ErrorClass.AUTHORIZATION, (PermissionError,)),
)

# Client libraries use similar names for their errors, and a type that is not imported is known only by its name.
# `re` compiles these patterns on first use, because opening a store must be fast.
_TYPE_NAMES: tuple[tuple[ErrorClass, str], ...] = (
    (ErrorClass.RATE_LIMITED, r"RateLimit|TooManyRequests|Throttl|ThroughputExceeded|(Request|Bandwidth)LimitExceeded"),
    (ErrorClass.TIMEOUT, r"Time(d)?[oO]ut|DeadlineExceeded"),
    (ErrorClass.AUTHENTICATION, r"Authentication|Unauthenticated|Unauthori[sz]ed|CertVerification|Credential"),
    (ErrorClass.AUTHORIZATION, r"PermissionDenied|Forbidden|AccessDenied|Authori[sz]ation"),
    (ErrorClass.VALIDATION, r"Validation|BadRequest|Unprocessable|InvalidURL|UnsupportedProtocol"),
    (ErrorClass.RESOURCE_EXHAUSTED, r"ResourceExhausted|OutOfMemory|Quota|DiskFull"),
    (ErrorClass.TRANSIENT, r"ServiceUnavailable|Overloaded|SerializationFailure|Deadlock|Transient"),
    (
        ErrorClass.NETWORK,
        (
            r"Connect(ion)?(Error|Refused|Reset|Closed|Lost)|Disconnected|ChunkedEncoding|IncompleteRead"
            r"|(Network|Proxy|SSL|Read|Write|RemoteProtocol|Payload)Error"
        ),
    ),
)
# Some libraries raise one type for every status from 500 on, so that the status is more precise.
_INTERNAL_NAME = r"InternalServer|InternalError"


def _by_record(error: BaseException) -> ErrorClass | None:
    """Return the recorded class of a failed step or run."""
    if isinstance(error, errors.StepError | errors.RunFailed | errors.RunSetAside) and error.error is not None:
        found = ErrorClass.of(error.error.error_class)
        return None if found is ErrorClass.UNKNOWN else found
    return None


def _by_exact_type(error: BaseException) -> ErrorClass | None:
    if isinstance(error, BaseExceptionGroup):
        return None  # the errors of a group are classified one by one
    if not isinstance(error, Exception):
        return ErrorClass.PERMANENT  # cancellation, interrupt or exit: a retry makes no sense
    for error_class, kinds in _TYPES:
        if isinstance(error, kinds):
            return error_class
    return None


def _by_type_name(error: BaseException) -> ErrorClass | None:
    for kind in type(error).__mro__:
        if kind.__module__ != "builtins":
            found = _class_of_name(kind.__name__)
            if found is not None:
                return found
    return None


def _class_of_name(name: str) -> ErrorClass | None:
    return next((error_class for error_class, pattern in _TYPE_NAMES if re.search(pattern, name)), None)


def _by_wide_type(error: BaseException) -> ErrorClass | None:
    """Classify types that are so common that an errno or a status is more precise."""
    if any(re.search(_INTERNAL_NAME, kind.__name__) for kind in type(error).__mro__):
        return ErrorClass.INTERNAL
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
    if hasattr(errno, name)  # some systems lack some of them
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
    """Return the class of an HTTP status; None if the status is not an error."""
    if not 400 <= status <= 599:
        return None
    return _STATUSES.get(status, ErrorClass.PERMANENT if status < 500 else ErrorClass.INTERNAL)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, from any of the attributes that libraries use."""
    response = response_of(error)
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


class _Answer:
    """An answer that botocore keeps as a dictionary, with the attributes of a response."""

    def __init__(self, response: Mapping[Any, Any]) -> None:
        about, error = (_part(response, name) for name in ("ResponseMetadata", "Error"))
        self.status_code = about.get("HTTPStatusCode")
        self.headers = about.get("HTTPHeaders")
        self.code = str(error.get("Code", ""))


def _part(response: Mapping[Any, Any], name: str) -> Mapping[Any, Any]:
    found = response.get(name)
    return found if isinstance(found, Mapping) else {}


def response_of(error: BaseException) -> Any:
    """Return what an error holds of a service's answer, with the attributes of a response; None if there is none."""
    response = attribute(error, "response")
    return _Answer(response) if isinstance(response, Mapping) else response


def _by_answer_code(error: BaseException) -> ErrorClass | None:
    """Classify by the code in an answer, such as `ThrottlingException` with the status 400."""
    response = response_of(error)
    return _class_of_name(response.code) if isinstance(response, _Answer) else None


def _by_status(error: BaseException) -> ErrorClass | None:
    status = status_of(error)
    return None if status is None else class_of_status(status)


# -- by message ----------------------------------------------------------------------------------------------------

_MESSAGES: tuple[tuple[ErrorClass, str], ...] = (
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


def _by_message(error: BaseException) -> ErrorClass | None:
    try:
        message = str(error)[:MAX_MESSAGE]
    except Exception:  # noqa: BLE001 - str() of a foreign error may fail
        return None
    for error_class, pattern in _MESSAGES:
        if re.search(pattern, message, re.IGNORECASE):
            return error_class
    return None


_FACTS: tuple[Rule, ...] = (
    _by_record,
    _by_exact_type,
    _by_type_name,
    _by_errno,
    _by_answer_code,
    _by_status,
    _by_wide_type,
)
_BUILT_IN = Classifier()
