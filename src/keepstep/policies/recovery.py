"""Recovery of a run whose worker died: whether it is driven on, driven alone or set aside, and by which handler."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any

from ..checks import check_count, check_seconds, check_text, seconds_of
from ..errors import DefinitionError

#: Number of recoveries from which the run is driven alone in its process, so that a crash hits no other run.
ALONE_FROM = 2


@dataclass(frozen=True, slots=True)
class Recover:
    """Drive the run as usual."""


@dataclass(frozen=True, slots=True)
class RecoverAlone:
    """Drive the run while the process drives no other run."""


@dataclass(frozen=True, slots=True)
class SetAside:
    """Leave the run to a person; `reason` is a sentence for that person."""

    reason: str


@dataclass(frozen=True, slots=True)
class RecoveryLimit:
    """The number of crashes in a row, without a new checkpoint between them, that a run may cause."""

    limit: int = 3

    def __post_init__(self) -> None:
        check_count(self.limit, "the limit of recoveries")

    def decide(self, recoveries: int) -> Recover | RecoverAlone | SetAside:
        """Decide about a run whose workers died `recoveries` times without progress."""
        if recoveries >= self.limit:
            times = "once" if recoveries == 1 else f"{recoveries} times"
            reason = f"its worker died {times} while executing it, without progress"
            return SetAside(f"{reason} (recovery_limit={self.limit})")
        return RecoverAlone() if recoveries >= ALONE_FROM else Recover()


#: The built-in handlers of a recovery, by name, in the order in which the documentation explains them.
HANDLERS = ("continue", "retry step", "skip step", "restart", "undo", "set aside")
#: Seconds that a recovery may take up to the call of the code, so that a hanging handler does not hold its run.
RECOVERY_SECONDS = 300.0


def check_handler(function: Callable[..., Any], name: str) -> None:
    """Refuse a recovery handler that cannot be called with a `ks.RecoveryInfo` alone."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of an extension module does not tell its parameters
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise DefinitionError(
            f"recovery handler {name!r} cannot be called: {error}; let it take one argument, a ks.RecoveryInfo"
        ) from None


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a run goes on after its worker has died, or when a person recovers it.

    `handler` is a built-in name, the name of a function under `@ks.recovery_handler`, or a function itself. A function
    takes a `ks.RecoveryInfo` and returns a built-in name, or a `Recovery` with one. "skip step" takes the `step`, by
    default the only one that was under way, and the `value` that becomes its result. "set aside" takes a `reason`.
    `timeout` limits the recovery up to the call of the workflow's code.
    """

    handler: str | Callable[[Any], Any] = HANDLERS[0]
    _: KW_ONLY
    step: str = ""
    value: Any = None
    reason: str = ""
    timeout: float | timedelta = RECOVERY_SECONDS

    def __post_init__(self) -> None:
        if not callable(self.handler) and not (isinstance(self.handler, str) and self.handler.strip()):
            raise DefinitionError(
                f"recovery: the handler must be a name or a function, got {self.handler!r}; built-in names are "
                f"{', '.join(HANDLERS)}"
            )
        if isinstance(self.handler, str):
            check_text(self.handler, "recovery: the handler")
        for name in ("step", "reason"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise DefinitionError(f"recovery: {name} must be text, got {text!r}")
            check_text(text, f"recovery: {name}")
        check_seconds(self.timeout, "recovery: timeout", 0.001)
        for name, given in (("step", self.step), ("value", self.value is not None)):
            if given and self.handler != "skip step":
                raise DefinitionError(f"recovery: {name}= belongs to the handler 'skip step', not to {self.name!r}")
        if callable(self.handler):
            check_handler(self.handler, self.name)

    @property
    def timeout_seconds(self) -> float:
        """The timeout in seconds."""
        return float(seconds_of(self.timeout))

    @property
    def name(self) -> str:
        """The name of the handler, for messages."""
        return self.handler if isinstance(self.handler, str) else getattr(self.handler, "__name__", "a function")

    @classmethod
    def of(cls, given: Any, owner: str) -> Recovery | None:
        """Return the policy that a definition gives as a policy, a name or a function; None if it gives none."""
        if given is None or isinstance(given, Recovery):
            return given
        if isinstance(given, str) or callable(given):
            return cls(given)
        raise DefinitionError(f"{owner}: recovery= takes a ks.Recovery(...), a name or a function, not {given!r}")
