"""What is promised of leases: one writer, who holds what it drives; and the dead are counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.model import Kind
from keepstep.ports import Advance, Answer, Change, Create, Verdict
from keepstep.records.record import Record
from keepstep.stores.rules import ENDED

from .promise import Promise

if TYPE_CHECKING:
    from keepstep.model import Claim

    from .process import Process
    from .world import Body, Head

#: Kinds of records that a run may write again each time before it kills its worker.
_NO_PROGRESS = frozenset({Kind.RECOVERED.value, Kind.EMITTED.value, Kind.PUBLISHED.value})


class OneWriter(Promise):
    """Only the holder of the newest lease writes."""

    name = "only the holder of the newest lease writes"

    def prepare(self) -> None:
        self._holder: dict[str, tuple[str, int] | None] = {}
        self._epochs: dict[str, int] = {}

    def claimed(self, process: Process, claim: Claim) -> None:
        run, epoch = claim.run.id, claim.lease.epoch
        if epoch <= self._epochs.get(run, 0):
            self.broken(f"{run} is claimed under epoch {epoch} after {self._epochs[run]}")
        self._epochs[run] = epoch
        self._holder[run] = (claim.lease.worker, epoch)

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if answer.verdict is not Verdict.DONE:
            return
        if isinstance(change, Create):
            self._holder[change.run.id] = (change.run.worker, change.run.epoch) if change.run.worker else None
            self._epochs[change.run.id] = change.run.epoch
        elif isinstance(change, Advance):
            if self._holder.get(change.run) != (change.worker, change.epoch):
                self.broken(
                    f"{process} writes {change.run} under epoch {change.epoch}; {self._holder.get(change.run)} has it"
                )
            if change.release or change.status in ENDED:
                self._holder[change.run] = None


class TheLivingKeepTheirRuns(Promise):
    """A run is taken over only from a worker that is dead, or whose lease has run out."""

    name = "a live worker keeps its runs"

    def prepare(self) -> None:
        self._renewed: dict[str, float] = {}

    def renewed(self, process: Process, worker: str, known: bool) -> None:
        if known:
            self._renewed[worker] = self.world.now

    def claimed(self, process: Process, claim: Claim) -> None:
        owner = claim.taken_from
        if owner is None or owner in self.world.killed:
            return
        # A worker that has signed off may never have heard that its last claim was made.
        if owner not in self.world.store._workers:
            return
        age = self.world.now - self._renewed.get(owner, -1e9)
        if age <= self.world.plan["lease"]:
            self.broken(f"{claim.run.id} is taken from {owner}, whose heartbeat is {age:.2f} s old")


class RunsBelongToTheirHolder(Promise):
    """A body begins only where its run is leased: a worker that may have lost it starts nothing."""

    name = "a body begins only where its run is leased"

    def begins(self, body: Body, idempotency_key: str) -> None:
        holder = self.entries()[body.run].head.worker
        thread = body.key.rpartition("/")[2].startswith("plain")  # begins when its thread does, a moment later
        if holder is not None and holder not in body.process.ids and not thread:
            self.broken(f"{body.run} {body.key} begins in {body.process}, and {holder} has the run")


class CrashesAreCounted(Promise):
    """A run whose workers died too often without progress is set aside, and no other is."""

    name = "a run is set aside after so many crashes without progress, not sooner and not later"

    def prepare(self) -> None:
        self._crashes: dict[str, int] = {}

    def claimed(self, process: Process, claim: Claim) -> None:
        if claim.taken_from is not None:
            self._crashes[claim.run.id] = self._crashes.get(claim.run.id, 0) + 1

    def begins(self, body: Body, idempotency_key: str) -> None:
        if self._crashes.get(body.run, 0) >= self.world.plan["limit"]:
            self.broken(f"{body.run} {body.key} begins after {self._crashes[body.run]} crashes without progress")

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        answers = any(one.trigger == "recovery" and "handler" in (one.data or {}) for one in records)
        for record in records:
            crashes = self._crashes.get(record.run, 0)
            if answers:  # a recovery handler has answered, which is no progress
                continue
            if record.error is not None and record.error.type == "RecoveryLimit":
                if crashes < self.world.plan["limit"]:
                    self.broken(f"{record.run} is set aside after {crashes} crashes without progress")
            elif record.kind not in _NO_PROGRESS:
                self._crashes[record.run] = 0
