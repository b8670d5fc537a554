"""What a promise is: a small class that hears what happens during a history, and looks at what it left behind."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

from keepstep.errors import CheckpointCorrupt
from keepstep.records.record import Record, unseal

from .counted import counting

if TYPE_CHECKING:
    from keepstep.model import Ask, Claim, Claims, Grant
    from keepstep.ports import Answer, Change, ClaimRequest

    from .process import Process
    from .world import Body, Head, World


class Promise:
    """One promise. Its name is what is said when it is broken."""

    name: ClassVar[str] = ""

    def __init__(self, world: World) -> None:
        self.world = world
        self.prepare()

    def prepare(self) -> None:
        """Make what the promise remembers."""

    def broken(self, how: str) -> None:
        self.world.breaks(self.name, how)

    # what a promise may listen to

    def begins(self, body: Body, idempotency_key: str) -> None:
        """The body of a step begins."""

    def ends(self, body: Body) -> None:
        """The body of a step has ended."""

    def told(self, call: Any) -> None:
        """The code of a workflow is told the outcome of a call."""

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        """The store has answered a change; `records` are those it has taken."""

    def went_back(self, run: str, counted: list[Record]) -> None:
        """A person has gone back in a run: only these of its records count now."""

    def claimed(self, process: Process, claim: Claim) -> None:
        """The store has leased a run."""

    def asked(self, process: Process, request: ClaimRequest, claims: Claims) -> None:
        """A worker has asked for runs, and was given these."""

    def passed(self, process: Process, ask: Ask, grant: Grant) -> None:
        """A service has answered a worker."""

    def renewed(self, process: Process, worker: str, known: bool) -> None:
        """The store has taken a heartbeat, or refused it."""

    def saw(self, run: str, key: str, state: dict[str, Any]) -> None:
        """A step of a graph was given a state."""

    def sent(self, name: str, payload: Any) -> None:
        """A workflow has heard a signal of the client."""

    def ended(self) -> None:
        """The history is over."""

    # what many need

    def entries(self) -> dict[str, Any]:
        return self.world.store._runs

    def records(self, run: str) -> list[Record]:
        """What a run has recorded, as far as it can be read; that it can be is a promise of its own."""
        found: list[Record] = []
        with suppress(CheckpointCorrupt):
            for record, _ in unseal(self.entries()[run].rows, run, 0, ""):
                found.append(record)
        return found

    def counted(self, run: str) -> list[Record]:
        """As much of that as still counts."""
        return counting(self.records(run))
