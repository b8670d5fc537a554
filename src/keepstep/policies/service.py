"""Services: limits on the attempts that call one outside system, across all workers of a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..checks import check_limit, check_name
from ..errors import DefinitionError
from .breaker import Breaker
from .rate import UNREADABLE, Rate

_WHEN_OPEN = ("wait", "fail")


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """The limits of a service. None lifts a limit."""

    concurrency: int | None = None
    rate: Rate | None = None
    spend: Rate | None = None
    breaker: Breaker | None = None
    when_open: str = "wait"

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            check_limit(self.concurrency, "concurrency")
        for name in ("rate", "spend"):
            if not isinstance(getattr(self, name), Rate | None):
                raise DefinitionError(f"{name} must be a ks.Rate, got {getattr(self, name)!r}")
        if not isinstance(self.breaker, Breaker | None):
            raise DefinitionError(f"breaker must be a ks.Breaker, got {self.breaker!r}")
        if self.when_open not in _WHEN_OPEN:
            raise DefinitionError(f"when_open must be 'wait' or 'fail', got {self.when_open!r}")

    def plain(self) -> dict[str, Any]:
        """Return the limits that are set, as plain data."""
        found: dict[str, Any] = {} if self.concurrency is None else {"concurrency": self.concurrency}
        found |= {name: value.plain() for name in _PARTS if (value := getattr(self, name)) is not None}
        if self.when_open != "wait":
            found["when_open"] = self.when_open
        return found

    @classmethod
    def of(cls, plain: dict[str, Any]) -> ServiceLimits:
        """Return the limits in stored plain data; unknown names, which a newer version may write, are left out.

        Data that this version cannot read lifts all limits, so that it stops nothing.
        """
        try:
            known = {name: plain[name] for name in ("concurrency", "when_open") if name in plain}
            parts = {name: kind.of(plain[name]) for name, kind in _PARTS.items() if plain.get(name) is not None}
            return cls(**known, **parts)
        except UNREADABLE:
            return cls()

    def changed(self, changes: dict[str, Any]) -> ServiceLimits:
        """Return these limits with some of them changed."""
        return replace(self, **changes)

    def __str__(self) -> str:
        words = [] if self.concurrency is None else [f"concurrency {self.concurrency}"]
        words += [f"{name} {value}" for name in _PARTS if (value := getattr(self, name)) is not None]
        if self.when_open != "wait":
            words.append(f"when open {self.when_open}")
        return ", ".join(words) or "no limit"


_PARTS: dict[str, Any] = {"rate": Rate, "spend": Rate, "breaker": Breaker}


class Service:
    """An outside system that steps call, with limits that hold across all workers of a store.

    | option | means |
    |---|---|
    | `concurrency` | attempts whose bodies run at once |
    | `rate` | how often attempts begin: `ks.Rate(count, per=seconds, burst=n)` |
    | `spend` | how much attempts may spend, in units of `ks.spend` and of the option `cost=` of a step |
    | `breaker` | `ks.Breaker()`: stop calling while the service is unwell |
    | `when_open` | what attempts do then: `"wait"`, or `"fail"` with `BreakerOpen` |

    The limits are written to the store when a process opens it. Every limit may be left out.
    """

    __slots__ = ("limits", "name")

    def __init__(
        self,
        name: str,
        *,
        concurrency: int | None = None,
        rate: Rate | None = None,
        spend: Rate | None = None,
        breaker: Breaker | None = None,
        when_open: str = "wait",
    ) -> None:
        self.name = check_name(name, "service")
        try:
            self.limits = ServiceLimits(concurrency, rate, spend, breaker, when_open)
        except DefinitionError as error:
            raise DefinitionError(f"ks.Service({name!r}): {error}") from None
        DECLARED[name] = self

    def __repr__(self) -> str:
        return f"ks.Service({self.name!r}: {self.limits})"


#: The services that this process has declared, the newest of each name.
DECLARED: dict[str, Service] = {}


def service_name(service: Any) -> Any:
    """Return the name of a service that is given as `ks.Service`; anything else is returned as it is."""
    return service.name if isinstance(service, Service) else service
