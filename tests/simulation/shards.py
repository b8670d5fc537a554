"""A world of several shards: what is one transaction in a store is two here, and a process may die between them.

No store of Keepstep is like this. The world shows which promises need that gates and runs, or two runs, share a
transaction ([ADR 0167](../../docs/adr/0167-what-sharding-asks-of-gates.md)).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from zlib import crc32

import msgspec

from keepstep.model import Claims
from keepstep.ports import Advance, Answer, Change, ClaimRequest, Verdict
from keepstep.stores.memory import MemoryStore

from .plans import Plan
from .process import Process
from .wire import Killed
from .world import Outcome, World

#: Shards among which runs are spread by their id.
SHARDS = 2
#: How often a process dies between two transactions.
DEATHS = 0.1


def shard_of(run: str) -> int:
    """Return the shard of a run."""
    return crc32(run.encode()) % SHARDS


class _World(World):
    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.fate = Random(f"shards {plan['seed']}")
        self.between = 0

    def dies_between(self, process: Process) -> bool:
        """Let the process die now, sometimes."""
        if self.fate.random() >= DEATHS:
            return False
        self.between += 1
        process.die("between two shards")
        return True


class GatesApart(_World):
    """A claim commits its leases first, while it holds the lock of the gate, and then the row of the gate."""

    def claim(self, process: Process, request: ClaimRequest) -> Claims:
        before = dict(self.store._gates)
        claims = super().claim(process, request)
        if claims.claims and self.store._gates != before and self.dies_between(process):
            self.store._gates = before
            raise Killed
        return claims


class RunsApart(_World):
    """A commit that reaches runs of another shard is written there in a second transaction."""

    #: Whether the first transaction also keeps what is to be done on other shards, so that others do it.
    keeps_outbox = False

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.store = _Shards(self)

    def commit(self, process: Process, changes: Sequence[Change]) -> list[Answer]:
        answers = super().commit(process, changes)
        if process.dead:
            raise Killed
        return answers

    def claim(self, process: Process, request: ClaimRequest) -> Claims:
        self.store.deliver()
        return super().claim(process, request)


class _Shards(MemoryStore):
    """A store that writes what concerns runs of another shard after the rest of a change."""

    def __init__(self, world: RunsApart) -> None:
        super().__init__(clock=world.store.clock, lease_seconds=world.plan["lease"])
        self._world = world
        self._outbox: list[Change] = []

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        self.deliver()
        return [self._commit_one(change) for change in changes]

    def deliver(self) -> None:
        """Do what a dead process has left on other shards."""
        rest, self._outbox = self._outbox, []
        if rest:
            super().commit(rest)

    def _commit_one(self, change: Change) -> Answer:
        if not isinstance(change, Advance):
            return super().commit([change])[0]
        here = shard_of(change.run)
        sends = [one for one in change.sends if shard_of(one.signal.run) != here]
        creates = [one for one in change.creates if shard_of(one.run.id) != here]
        near = msgspec.structs.replace(
            change,
            sends=[one for one in change.sends if one not in sends],
            creates=[one for one in change.creates if one not in creates],
        )
        answer = super().commit([near])[0]
        process = self._world.current
        if answer.verdict is Verdict.DONE and (sends or creates):
            rest: list[Change] = [*creates, *sends]
            if process is not None and self._world.dies_between(process):
                self._outbox += rest if self._world.keeps_outbox else []
            else:
                super().commit(rest)
        return answer


class RunsApartWithOutbox(RunsApart):
    """As above, and the first transaction keeps what is to be done on other shards."""

    keeps_outbox = True


def play_apart(plan: Plan, world: Callable[[Plan], _World]) -> tuple[Outcome, int]:
    """Play a plan in such a world. Return the outcome, and how often a process died between two transactions."""
    played = world(plan)
    return played.play(), played.between
