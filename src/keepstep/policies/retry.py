"""Whether a failed attempt is followed by another, and after how long."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import DefinitionError, Permanent
from .check import check_count, check_number
from .classify import ErrorClass, causes
from .retry_after import asked_wait

Backoff = Literal["exponential", "linear", "immediate", "none"]

#: A service that asks for a longer wait than this is given up on: a run must not sleep for years on a header's word.
LONGEST_ASKED_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Again:
    """Make another attempt after so long."""

    after_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Make no other attempt; the reason is for a person to read."""

    reason: str


Decision = Again | GiveUp


@dataclass(frozen=True, slots=True)
class ClassRetry:
    """How often, and how fast, errors of one class are retried. `attempts` counts the first one too."""

    error_class: ErrorClass
    attempts: int
    base_seconds: float = 1.0
    factor: float = 2.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "error_class", _known_class(self.error_class))
        check_count(self.attempts, "attempts")
        check_number(self.base_seconds, "base_seconds", 0)
        check_number(self.factor, "factor", 1)


@dataclass(frozen=True, slots=True)
class Retry:
    """How a step is retried: every error is, except a permanent one, until `attempts` have been made in total.

    The wait before attempt n + 1 is `base_seconds` × `factor` to the power n − 1, or × n with a linear backoff, spread
    by up to `jitter` (a share of itself) either way, and never longer than `cap_seconds`. `on` limits retries to these
    types of exceptions, even those that would count as permanent; `never` takes types out. A raised `Permanent` is
    always the end. A raised `RetryAfter` sets the wait, and a service's Retry-After lengthens it: neither is capped.
    """

    attempts: int = 3
    base_seconds: float = 1.0
    factor: float = 2.0
    cap_seconds: float = 30.0
    jitter: float = 0.0
    backoff: Backoff = "exponential"
    on: type[BaseException] | tuple[type[BaseException], ...] = ()
    never: type[BaseException] | tuple[type[BaseException], ...] = ()
    classes: tuple[ClassRetry, ...] = ()

    def __post_init__(self) -> None:
        check_count(self.attempts, "attempts")
        for name in ("base_seconds", "cap_seconds"):
            object.__setattr__(self, name, check_number(getattr(self, name), name, 0))
        object.__setattr__(self, "factor", check_number(self.factor, "factor", 1))
        object.__setattr__(self, "jitter", check_number(self.jitter, "jitter", 0, 1))
        if self.backoff not in get_args(Backoff):
            raise DefinitionError(f"backoff must be one of {', '.join(get_args(Backoff))}, not {self.backoff!r}")
        if self.backoff == "none":
            object.__setattr__(self, "attempts", 1)
        for name in ("on", "never"):
            object.__setattr__(self, name, _kinds(getattr(self, name), name))
        object.__setattr__(self, "classes", _distinct(self.classes))

    @classmethod
    def none(cls) -> Retry:
        """One attempt: what a step without a policy gets."""
        return cls(attempts=1, backoff="none")

    @classmethod
    def by_class(cls, *changes: ClassRetry, cap_seconds: float = 30.0, jitter: float = 0.0) -> Retry:
        """Attempts and waits by the class of each error; `changes` replace or add lines of the table."""
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
        """What follows after attempt number `attempt` (from 1) has failed.

        `random`, from 0 up to 1, places the wait within the jitter: 0.5 is its middle. `now`, in seconds since the
        epoch, is needed only to understand a date in a Retry-After.
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
        # Capped before the jitter too, or attempts that reach the cap would all fall on the same instant.
        return min(seconds * (1 + self.jitter * (2 * random - 1)), self.cap_seconds)


def _known_class(name: str) -> ErrorClass:
    try:
        return ErrorClass(name)
    except ValueError:
        raise DefinitionError(f"there is no error class {name!r}; there are {', '.join(ErrorClass)}") from None


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


#: What `Retry.by_class()` does with each class; a class that is not listed is never retried.
CLASS_RETRIES: tuple[ClassRetry, ...] = (
    ClassRetry(ErrorClass.TRANSIENT, attempts=4, base_seconds=1, factor=2),
    ClassRetry(ErrorClass.RATE_LIMITED, attempts=6, base_seconds=5, factor=2),
    ClassRetry(ErrorClass.RESOURCE_EXHAUSTED, attempts=4, base_seconds=10, factor=3),
    ClassRetry(ErrorClass.TIMEOUT, attempts=4, base_seconds=2, factor=2),
    ClassRetry(ErrorClass.NETWORK, attempts=5, base_seconds=1, factor=2),
    ClassRetry(ErrorClass.INTERNAL, attempts=3, base_seconds=2, factor=2),
    ClassRetry(ErrorClass.UNKNOWN, attempts=3, base_seconds=1, factor=2),
)
