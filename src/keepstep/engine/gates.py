"""The gates of an engine, queues and services alike: what its code declares, and changes of limits by a person."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from ..checks import check_name, check_text
from ..errors import DefinitionError
from ..model import GateChange, GateInfo
from ..ports import instant

if TYPE_CHECKING:
    from .process import Process

log = logging.getLogger("keepstep")


class GateLimits(Protocol):
    """The limits of a queue or a service."""

    def plain(self) -> dict[str, Any]: ...

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Self: ...

    def changed(self, changes: dict[str, Any]) -> Self: ...


class Declared(Protocol):
    """A queue or a service that code declares."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> GateLimits: ...


L = TypeVar("L", bound=GateLimits)


class Gates(Generic[L]):
    """The gates of one kind in a store."""

    #: The kind of the gates, which is also the word for one of them; and the class of their limits.
    kind: ClassVar[str]
    limits: ClassVar[Any]

    def __init__(self, engine: Process) -> None:
        self._engine = engine
        self._declared: set[str] = set()

    async def declare_all(self, gates: Iterable[Declared]) -> None:
        """Write the gates that this process has declared, once."""
        for gate in list(gates):
            await self.declare(gate)

    async def declare(self, gate: Any) -> bool:
        """Write a gate that the code declares; the last process to open a store wins. Return whether limits changed."""
        if gate.name in self._declared:
            return False
        limits = gate.limits.plain()
        before = await self._change(gate.name, "declare", limits)
        self._declared.add(gate.name)  # not before it is written: a store that was away is asked again
        if before.declared is not None and before.declared != limits:
            log.warning(
                "%s %s: this process declares other limits than the one before (%s; before: %s); the last one wins",
                *(self.kind, gate.name, gate.limits, self.limits.of(before.declared)),
            )
        return bool(before.declared != limits)

    async def _gates(self) -> list[GateInfo]:
        return await self._engine.call(self._engine.store.list_gates, self.kind)

    async def _gate(self, name: str) -> GateInfo:
        check_name(name, self.kind)
        return next((gate for gate in await self._gates() if gate.name == name), GateInfo(self.kind, name))

    def _limits_of(self, gate: GateInfo) -> tuple[L, L | None]:
        """Return the limits that hold now, and those that code declares."""
        return self.limits.of(gate.limits), None if gate.declared is None else self.limits.of(gate.declared)

    async def _set(self, name: str, limits: dict[str, Any], reason: str) -> None:
        """Change some limits, by a person."""
        now, _ = self._limits_of(await self._gate(name))
        names = self.limits.__slots__
        unknown = sorted(set(limits) - set(names))
        if unknown:
            raise DefinitionError(f"a {self.kind} has no limit {unknown[0]!r}; it has {', '.join(names)}")
        if not limits:
            raise DefinitionError("name a limit to set, for example concurrency=10")
        await self._change(name, "set", now.changed(limits).plain(), check_text(reason, "reason"))

    async def _change(self, name: str, act: str, limits: dict[str, Any] | None = None, reason: str = "") -> GateInfo:
        engine = self._engine
        change = GateChange(instant(engine.clock.now()), engine.actor, act, limits, engine.redaction.redact(reason))
        return await engine.call(engine.store.change_gate, self.kind, name, change)
