"""Barriers in the code of workflows: a run waits until all parties have arrived, or none of them goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from ..checks import check_count, check_id, check_name
from ..errors import DefinitionError, StoreError
from ..model import Run, Signal
from ..model.keepers import BARRIER_WORKFLOW, TELL, barrier_id
from ..model.series import first_of
from ..model.signal import BARRIER
from ..ports import Answer, Send
from ..records.record import Record
from ..values import VALUES
from ..workflows.call import Call
from .barrier import arrival
from .call_states import Detached
from .calls import Branch, Task, current_branch
from .messages import KeeperCall
from .waits import MISSING, SignalCall, digest_of, timeout_seconds

#: Seconds for which the parties of a barrier wait for each other by default.
BARRIER_SECONDS = 15.0
#: Parties of a barrier at most, because its state names all of them.
MOST_PARTIES = 1000


class Party(NamedTuple):
    """A run as a party: the barrier that it belongs to, and its identity, which is that of the origin for a fork."""

    keeper: str
    party: str
    life: str


class Place(NamedTuple):
    """A barrier as the code names it."""

    name: str
    group: str | None
    parties: int
    seconds: float | None

    @property
    def label(self) -> str:
        """The barrier in the keys of calls."""
        return self.name if self.group is None else f"{self.group}:{self.name}"

    def party_of(self, run: Run, original: Run) -> Party:
        """Return a run as a party; `original` is the run that it was forked from, or itself."""
        scope = f"group {self.group}" if self.group is not None else f"children of {original.parent}"
        return Party(barrier_id(scope, self.name), first_of(original), original.id)


class PlaceCall(KeeperCall[str]):
    """A call that tells a barrier something about this run."""

    __slots__ = ("number", "place", "waits_as")

    workflow = BARRIER_WORKFLOW
    do = "arrive"

    def __init__(self, branch: Branch, place: Place, verb: str = "barrier") -> None:
        self.place = place
        digest = VALUES.digest((place.parties, digest_of(place.seconds)), "barrier")
        super().__init__(branch, f"{verb}:{place.label}", digest, "")
        self.number = int(self.key.rpartition("#")[2])
        self.waits_as = f"{BARRIER}{place.name}:{self.key}"

    def given(self) -> Any:
        return {"name": self.place.name}

    def begin_live(self) -> None:
        run = self.run
        if run.run.origin is None:
            self._send_as(self.place.party_of(run.run, run.run))
        else:
            run.host.background(self._find_origin())

    def _send_as(self, party: Party) -> None:
        self.keeper = party.keeper
        self.write([self.message(party)], msgspec.json.encode([self.life, *party]))

    @property
    def life(self) -> str:
        """The run and its generation: another one must arrive again to be told the outcome."""
        return f"{self.run.id}:{self.run.generation}"

    def message(self, party: Party) -> bytes:
        """Return the payload of the signal to the barrier."""
        place = self.place
        return arrival(
            self.do,
            party=party.party,
            life=party.life,
            number=self.number,
            run=self.run.id,
            signal=self.waits_as,
            parties=place.parties,
            seconds=place.seconds,
        )

    async def _find_origin(self) -> None:
        """Arrive as the run that this one was forked from; a fork has no parent."""
        run, host = self.run, self.run.host
        run.work_began()  # the run must not be parked before the answer
        try:
            original = run.run
            while original.origin is not None and (found := await host.stored_run(original.origin)) is not None:
                original = found
            if not run.stop.detached:
                self._send_as(self.place.party_of(run.run, original))
        except StoreError as error:
            run.halt(error)
        finally:
            run.work_ended()
            run.watch()


class LeaveCall(PlaceCall):
    """The end of a wait that the code gives up, which breaks the barrier for the others."""

    __slots__ = ()

    do = "leave"
    optional = True

    def __init__(self, arrived: PlaceCall) -> None:
        super().__init__(arrived.branch, arrived.place, "barrier.leave")
        self.number = arrived.number


class BarrierWait(SignalCall):
    """The wait for the outcome of a barrier."""

    __slots__ = ("arrived", "arrived_as")

    def __init__(self, arrived: PlaceCall, arrived_as: Sequence[str]) -> None:
        self.arrived, self.arrived_as = arrived, arrived_as
        place = arrived.place
        super().__init__(arrived.branch, arrived.waits_as, None, MISSING, call=f"barrier.wait:{place.label}")

    @property
    def subject(self) -> str:
        return f"barrier {self.arrived.place.name!r}"

    def begin_live(self) -> None:
        life, *party = self.arrived_as
        if life != self.arrived.life:
            self._arrive_again(Party(*party))
        super().begin_live()

    def _arrive_again(self, party: Party) -> None:
        """Arrive as a fork, or after a retry: the outcome was told to another run, or fails no second time."""
        run, arrived = self.run, self.arrived
        signal_id = f"{run.id}:{arrived.key}:{run.generation}"
        signal = Signal(party.keeper, TELL, arrived.message(party), signal_id, f"run {run.id}", run.time())

        def sent(_: Answer) -> None:
            run.host.signalled(party.keeper)

        run.append_special(None, {"sends": [Send(signal, optional=True)], "progress": False}, sent)

    def decode(self, record: Record) -> list[str]:
        return list(msgspec.json.decode(bytes(record.value))["parties"])  # type: ignore[arg-type]


def barrier(
    name: str, *, parties: int, timeout: float | timedelta | None = BARRIER_SECONDS, group: str | None = None
) -> Call[list[str]]:
    """Wait until this number of runs have called the barrier, and return their ids.

    The barrier belongs to the child runs of one parent, or to a `group`. The n-th call of a run meets the n-th calls of
    the others. When the time is over, all raise `TimedOut`; when one of them is cancelled or ends, the others raise
    `WaitFailed`. A run that comes late gets the outcome of the others.
    """
    branch = current_branch("barrier")
    check_id(barrier_id("", check_name(name, "barrier")), "barrier name")
    if group is not None:
        check_name(group, "group of the barrier")
    check_count(parties, "parties")
    if parties > MOST_PARTIES:
        raise DefinitionError(f"parties must be at most {MOST_PARTIES:,}, got {parties:,}")
    run = branch.run.run
    if group is None and run.parent is None and run.origin is None:
        raise DefinitionError(
            f"barrier {name!r} is called in a run without a parent, so it has no siblings; give the barrier a group="
        )
    return Task(branch, _meet(Place(name, group, parties, timeout_seconds(timeout))))


async def _meet(place: Place) -> list[str]:
    arrived = PlaceCall(current_branch("barrier"), place)
    try:
        return await BarrierWait(arrived, await arrived)  # type: ignore[no-any-return]
    except Detached:
        raise
    except asyncio.CancelledError:
        await LeaveCall(arrived)
        raise
