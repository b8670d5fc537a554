"""Retry policy: whether another attempt follows a failed one, and after how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..checks import check_count, check_number, check_seconds, seconds_of
from ..errors import DefinitionError, Permanent
from .classify import ErrorClass, causes
from .retry_after import asked_wait

Backoff = Literal["exponential", "linear", "immediate", "none"]

#: Longest wait in seconds that a service may ask for. A longer one ends the retries, so that no header parks a run for
#: years.
LONGEST_ASKED_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Again:
    """Make another attempt after this many seconds."""

    after_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Make no further attempt; `reason` is a sentence for a person."""

    reason: str


Decision = Again | GiveUp


@dataclass(frozen=True, slots=True)
class ClassRetry:
    """Attempts and waits for errors of one class. `attempts` includes the first one.

    `breaker` says whether such an error counts for the breaker of a step's service; None is the default of its class.
    """

    error_class: ErrorClass
    attempts: int
    base_seconds: float = 1.0
    factor: float = 2.0
    #: Not shown: the text of a policy is part of the definition of graphs, which this field does not change.
    breaker: bool | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "error_class", _known_class(self.error_class))
        check_count(self.attempts, "attempts")
        object.__setattr__(self, "base_seconds", seconds_of(self.base_seconds))
        check_number(self.base_seconds, "base_seconds", 0)
        check_number(self.factor, "factor", 1)


@dataclass(frozen=True, slots=True)
class Retry:
    """A retry policy. It retries every error except a permanent one, up to `attempts` in total.

    The wait before attempt n + 1 is `base_seconds` × `factor` to the power n − 1, or × n with a linear
    `backoff`; the others are `"immediate"` (no wait) and `"none"` (one attempt).
    `jitter` varies it by up to this share in both directions; `"full"` draws it between 0 and the whole wait.
    `cap_seconds` limits it. `on` limits retries to these
    types of exceptions, including types that would count as permanent; `never` excludes types. A raised `Permanent`
    always ends the retries. A raised `RetryAfter` sets the wait, and a service's Retry-After lengthens it; the cap
    applies to neither. `classes` gives classes of errors their own attempts and waits; `Retry.by_class()` fills it.
    """

    attempts: int = 3
    base_seconds: float = 1.0
    factor: float = 2.0
    cap_seconds: float = 30.0
    jitter: float | Literal["full"] = 0.0
    backoff: Backoff = "exponential"
    on: type[BaseException] | tuple[type[BaseException], ...] = ()
    never: type[BaseException] | tuple[type[BaseException], ...] = ()
    classes: tuple[ClassRetry, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.attempts, "attempts")
        for name in ("base_seconds", "cap_seconds"):
            object.__setattr__(self, name, check_seconds(getattr(self, name), name, 0))
        object.__setattr__(self, "factor", check_number(self.factor, "factor", 1))
        if self.jitter != "full":
            object.__setattr__(self, "jitter", check_number(self.jitter, "jitter (a share, or 'full')", 0, 1))
        if self.backoff not in get_args(Backoff):
            raise DefinitionError(f"backoff must be one of {', '.join(get_args(Backoff))}, not {self.backoff!r}")
        if self.backoff == "none":
            object.__setattr__(self, "attempts", 1)
        for name in ("on", "never"):
            object.__setattr__(self, name, _kinds(getattr(self, name), name))
        object.__setattr__(self, "classes", _distinct(self.classes))

    @classmethod
    def none(cls) -> Retry:
        """One attempt: the policy of a step without one."""
        return cls(attempts=1, backoff="none")

    @classmethod
    def by_class(cls, *changes: ClassRetry, cap_seconds: float = 30.0, jitter: float | Literal["full"] = 0.0) -> Retry:
        """Return a policy with attempts and waits by error class; `changes` replace or add lines of the table."""
        table = {line.error_class: line for line in (*CLASS_RETRIES, *_distinct(changes))}
        lines = tuple(table.values())
        return cls(attempts=max(line.attempts for line in lines), cap_seconds=cap_seconds, jitter=jitter, classes=lines)

    def decide(
        self,
        attempt: int,
        error_class: ErrorClass | str,
        error: BaseException | None = None,
        random: float = 0.5,
        now: float | None = None,
    ) -> Decision:
        """Decide what follows the failure of attempt number `attempt`, counted from 1.

        `random`, from 0 up to 1, places the wait within the jitter; 0.5 is the middle. `now`, in seconds since the
        epoch, is needed only for a date in a Retry-After.
        """
        error_class = ErrorClass.of(error_class)
        refusal = self._refusal(error_class, error)
        if refusal:
            return GiveUp(refusal)
        line = self._line(error_class)
        if line is None:
            return GiveUp(f"errors of class {error_class} are not retried")
        if attempt >= line.attempts:
            return GiveUp(f"attempts made: {attempt}, allowed: {line.attempts}")
        seconds = self._wait(line, attempt, random)
        ask = asked_wait(error, now)
        if ask is None:
            return Again(seconds)
        if ask.exact:
            return Again(ask.seconds)
        if ask.seconds > LONGEST_ASKED_SECONDS:
            return GiveUp(f"the service asks to be left alone for {ask.seconds:.0f} s")
        return Again(max(seconds, ask.seconds))

    def counts_for_breaker(self, error_class: ErrorClass | str) -> bool:
        """Whether an error of this class counts for the breaker of a service, because the service is unwell."""
        error_class = ErrorClass.of(error_class)
        line = next((line for line in self.classes if line.error_class is error_class), None)
        return error_class in BREAKER_CLASSES if line is None or line.breaker is None else line.breaker

    def _refusal(self, error_class: ErrorClass, error: BaseException | None) -> str:
        if error is not None:
            if any(isinstance(one, Permanent) for one in causes(error)):
                return "the step says that another attempt cannot help"
            if not isinstance(error, Exception):
                return f"{type(error).__name__} is not a failure of the step"
            if self.never and isinstance(error, self.never):
                return f"the policy never retries {type(error).__name__}"
            if self.on:
                return "" if isinstance(error, self.on) else f"the policy does not retry {type(error).__name__}"
        return "the error is permanent" if error_class is ErrorClass.PERMANENT and not self.classes else ""

    def _line(self, error_class: ErrorClass) -> ClassRetry | None:
        if not self.classes:
            return ClassRetry(error_class, self.attempts, self.base_seconds, self.factor)
        return next((line for line in self.classes if line.error_class is error_class), None)

    def _wait(self, line: ClassRetry, attempt: int, random: float) -> float:
        if self.backoff in ("immediate", "none"):
            return 0.0
        try:
            growth = float(attempt) if self.backoff == "linear" else line.factor ** (attempt - 1)
            seconds = min(line.base_seconds * growth, self.cap_seconds)
        except OverflowError:
            seconds = self.cap_seconds if line.base_seconds else 0.0
        if self.jitter == "full":
            return seconds * random
        # Cap before the jitter as well; otherwise all attempts that reach the cap would start at the same instant.
        return min(seconds * (1 + self.jitter * (2 * random - 1)), self.cap_seconds)


def _known_class(name: str) -> ErrorClass:
    try:
        return ErrorClass(name)
    except ValueError:
        raise DefinitionError(f"unknown error class {name!r}; known classes are {', '.join(ErrorClass)}") from None


def _kinds(value: object, what: str) -> tuple[type[BaseException], ...]:
    kinds = tuple(value) if isinstance(value, tuple | list | set | frozenset) else (value,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise DefinitionError(f"{what} must hold types of exceptions, not {kind!r}")
    return kinds


def _distinct(lines: Iterable[ClassRetry]) -> tuple[ClassRetry, ...]:
    lines = tuple(lines)
    if len({line.error_class for line in lines}) < len(lines):
        raise DefinitionError("an error class is listed twice")
    return lines


#: The table of `Retry.by_class()`. A class that is not listed is never retried.
CLASS_RETRIES: tuple[ClassRetry, ...] = (
    ClassRetry(ErrorClass.TRANSIENT, attempts=4, base_seconds=1, factor=2),
    ClassRetry(ErrorClass.RATE_LIMITED, attempts=6, base_seconds=5, factor=2),
    ClassRetry(ErrorClass.RESOURCE_EXHAUSTED, attempts=4, base_seconds=10, factor=3),
    ClassRetry(ErrorClass.TIMEOUT, attempts=4, base_seconds=2, factor=2),
    ClassRetry(ErrorClass.NETWORK, attempts=5, base_seconds=1, factor=2),
    ClassRetry(ErrorClass.INTERNAL, attempts=3, base_seconds=2, factor=2),
    ClassRetry(ErrorClass.UNKNOWN, attempts=3, base_seconds=1, factor=2),
)

#: Classes of errors that count for the breaker of a service, unless a `ClassRetry` says otherwise.
BREAKER_CLASSES = frozenset(
    {
        ErrorClass.RATE_LIMITED,
        ErrorClass.RESOURCE_EXHAUSTED,
        ErrorClass.TIMEOUT,
        ErrorClass.NETWORK,
        ErrorClass.INTERNAL,
    }
)
