"""The services of an engine: what its code declares, the limits that hold now, and changes by a person."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..checks import check_name, check_text
from ..errors import DefinitionError
from ..model import GateChange, GateInfo
from ..model.gate import SERVICE, Share
from ..policies.breaker import CLOSED
from ..policies.service import DECLARED, ServiceLimits
from ..ports import instant
from ..stores.services import breaker_of
from ..workflows.definition import SERVICES
from .gates import Gates

if TYPE_CHECKING:
    from .process import Process

log = logging.getLogger("keepstep")


@dataclass(frozen=True, slots=True)
class BreakerInfo:
    """Where the breaker of a service stands.

    `status` is `closed`, `open` or `half-open`. `failures` are those that count now, `probes` those under way.
    `by_hand` says that a person holds it.
    """

    status: str = CLOSED
    failures: int = 0
    opened_at: datetime | None = None
    probes: int = 0
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """A service: the limits that hold now, where they come from, its last changes, and who waits for it.

    `shares` are the places of each living worker. `parked` runs wait in the store for a place, the first of them since
    `parked_since`. `breaker` is None for a service without one.
    """

    name: str
    limits: ServiceLimits
    declared: ServiceLimits | None
    is_set: bool
    log: tuple[GateChange, ...]
    shares: tuple[Share, ...]
    parked: int
    parked_since: datetime | None
    breaker: BreakerInfo | None


class Services(Gates[ServiceLimits]):
    """The services of a store.

    `set` takes the options of `ks.Service`; what it does not name stays as it is. It wins over the code until `reset`.
    """

    kind = SERVICE
    limits = ServiceLimits

    def __init__(self, engine: Process) -> None:
        super().__init__(engine)
        self._warned: set[str] = set()

    async def open(self) -> None:
        """Write the services that this process has declared, once."""
        await self.declare_all(DECLARED.values())
        if unknown := SERVICES.difference(DECLARED, self._warned):
            known = {one.name for one in await self._gates() if one.declared is not None or one.changed is not None}
            self._warned |= unknown
            for name in sorted(unknown - known):
                log.warning(
                    "a step calls service %r, which nobody declares, so it has no limits; write ks.Service(%r, ...) "
                    "or mend the name (known: %s)",
                    *(name, name, ", ".join(sorted(known)) or "none"),
                )

    # -- for people ----------------------------------------------------------------------------------------------------

    async def list(self) -> list[ServiceInfo]:
        """Return all services that code has declared or a person has changed, by name."""
        return [self._info(gate) for gate in await self._gates()]

    async def get(self, name: str) -> ServiceInfo:
        """Return the service with the name `name`; one that nobody has declared has no limits."""
        return self._info(await self._gate(name))

    def _info(self, gate: GateInfo) -> ServiceInfo:
        limits, declared = self._limits_of(gate)
        return ServiceInfo(
            gate.name,
            limits,
            declared,
            gate.changed is not None,
            gate.log,
            gate.shares,
            gate.parked,
            gate.parked_since,
            self._breaker(gate, limits),
        )

    def _breaker(self, gate: GateInfo, limits: ServiceLimits) -> BreakerInfo | None:
        if limits.breaker is None:
            return None
        state, now = breaker_of(gate), self._engine.clock.now()
        recent = sum(at > now - limits.breaker.within for at in state.failed_at)
        opened_at = None if state.opened_at is None else instant(state.opened_at)
        return BreakerInfo(
            limits.breaker.status(state, now), recent, opened_at, len(state.probes), by_hand=bool(state.hand)
        )

    async def set(self, /, name: str, *, reason: str = "", **limits: Any) -> ServiceInfo:
        """Change limits of the service `name`, by a person, with a `reason`; the `limits` are those of `ks.Service`."""
        await self._set(name, limits, reason)
        return await self.get(name)

    async def reset(self, name: str, *, reason: str = "") -> ServiceInfo:
        """Let the limits that code declares for the service `name` hold again, and its breaker follow its own rules.

        `reason` is kept with the change.
        """
        await self._act(name, "reset", reason)
        return await self.get(name)

    async def open_breaker(self, name: str, *, reason: str = "") -> ServiceInfo:
        """Hold the breaker of the service `name` open until it is closed or reset, with a `reason`."""
        return await self._hold(name, "open", reason)

    async def close_breaker(self, name: str, *, reason: str = "") -> ServiceInfo:
        """Hold the breaker of the service `name` closed, until it is opened or reset, with a `reason`."""
        return await self._hold(name, "close", reason)

    async def _hold(self, name: str, act: str, reason: str) -> ServiceInfo:
        if (await self.get(name)).limits.breaker is None:
            raise DefinitionError(
                f"service {name!r} has no breaker; declare one with ks.Service({name!r}, breaker=ks.Breaker())"
            )
        await self._act(name, act, reason)
        return await self.get(name)

    async def _act(self, name: str, act: str, reason: str) -> None:
        await self._change(check_name(name, "service"), act, reason=check_text(reason, "reason"))
