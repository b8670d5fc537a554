"""What is promised of what reaches a run or leaves it: signals, children, a cancel, a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from keepstep.model import Kind, Status
from keepstep.model.ids import is_child_id
from keepstep.model.series import SERIES
from keepstep.model.signal import CANCEL
from keepstep.model.undo import AT_END, is_undo
from keepstep.ports import Advance, Answer, Change, instant
from keepstep.records.record import Record
from keepstep.stores.rules import ENDED

from .counted import generation_of
from .promise import Promise

if TYPE_CHECKING:
    from keepstep.model import Claim

    from .process import Process
    from .world import Body, Head


def swallows(plan: dict[str, Any]) -> bool:
    """Whether a program takes no notice of being cancelled, as it may; a deadline cannot stop it then."""
    return "'swallow'" in str(plan["runs"])


class SignalsAreReadOnce(Promise):
    """No signal is consumed twice; what a run says that it heard was sent."""

    name = "a signal is read once"

    def ended(self) -> None:
        for run, entry in self.entries().items():
            seqs = [signal.seq for signal in entry.signals]
            if seqs != list(range(1, len(seqs) + 1)):
                self.broken(f"the signals of {run} are numbered {seqs}")
            ids = [signal.id for signal in entry.signals if signal.id]
            if len(ids) != len(set(ids)):
                self.broken(f"{run} holds a signal twice: {ids}")
            taken = list(self._taken(run))
            twice = {seq for seq in taken if taken.count(seq) > 1}
            if twice:
                self.broken(f"{run} read the signals {sorted(twice)} twice")

    def _taken(self, run: str) -> Iterator[int]:
        """Signals that were read, without those whose reader was cancelled before it was told."""
        heard: dict[str, int] = {}
        for record in self.counted(run):
            if record.data and "signal" in record.data and not record.step.startswith("ks:"):
                heard[record.step] = record.data["signal"]
            elif record.kind == Kind.STEP_CANCELLED.value:
                heard.pop(record.step, None)
        yield from heard.values()


class OneChildPerCall(Promise):
    """A call that starts a child starts exactly one, and its parent knows that one."""

    name = "a call starts exactly one child"

    def ended(self) -> None:
        entries = self.entries()
        known: dict[tuple[str, str | None, int], str] = {}
        for run, entry in entries.items():
            if entry.run.parent is None or SERIES in entry.run.tags:
                continue
            call = (entry.run.parent, entry.run.parent_key, self._generation(entry.run))
            if call in known:
                self.broken(f"{call} started {known[call]} and {run}")
            known[call] = run
        for run, entry in entries.items():
            records = list(self.records(run))
            given_up = {record.step for record in records if record.kind == Kind.STEP_CANCELLED.value}
            for record in records:
                data = record.data or {}
                if data.get("renew") and (record.step in given_up or entry.head.status is Status.SET_ASIDE):
                    continue  # a fork starts its own child when the code is given it, and this code never was
                child = data.get("child") if record.kind == Kind.CHILD.value else None
                if child and child not in entries:
                    self.broken(f"{run} started {child}, which is not there")

    def _generation(self, child: Any) -> int:
        """After how many rewinds of its parent a child was started: each makes the call another one."""
        last = generation_of(self.entries()[child.parent].rows)
        return next((n for n in range(last + 1) if is_child_id(child.id, child.parent, child.parent_key, n)), -1)


class CancelIsFinal(Promise):
    """A run that accepted a cancel ends cancelled, and does nothing new after that."""

    name = "cancel is final"

    def ended(self) -> None:
        for run, entry in self.entries().items():
            asked = any(signal.name == CANCEL for signal in entry.signals)
            if asked and entry.head.status in ENDED and entry.head.status not in (Status.CANCELLED, Status.SET_ASIDE):
                self.broken(f"{run} accepted a cancel and is {entry.head.status.value}")


class CancelReachesChildren(Promise):
    """When a run has ended cancelled, its children have ended too, or have been told.

    What its clean-up has started, and been told of, is the clean-up's own.
    """

    name = "a cancelled run leaves no child behind"

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if not any(record.kind == Kind.RUN_FINISHED.value for record in records) or not isinstance(change, Advance):
            return
        if self.entries()[change.run].head.status is not Status.CANCELLED:
            return
        for child, entry in self.entries().items():
            told = any(signal.name == CANCEL for signal in entry.signals)
            if entry.run.parent != change.run or entry.head.status in ENDED or told:
                continue
            if not self._is_of_the_clean_up(change.run, entry.run.parent_key):
                self.broken(f"{change.run} is cancelled, and {child} is {entry.head.status.value}")

    def _is_of_the_clean_up(self, run: str, key: str | None) -> bool:
        records = self.records(run)
        cancelled_at = min((record.seq for record in records if record.step == CANCEL), default=0)
        words = [record.kind for record in records if record.step == key and record.seq > cancelled_at > 0]
        return words == [Kind.CHILD.value]


def _unrecorded_seconds(parts: Any) -> float:
    """How long a program may wait for what nobody records: all that passes again on a replay."""
    if not isinstance(parts, list):
        return 0.0
    own = float(parts[1]) if parts and parts[0] in ("limit", "idle") else 0.0
    return own + sum(map(_unrecorded_seconds, parts))


class RunsEndByTheirDeadline(Promise):
    """A run has ended soon after its deadline, also one that was put away.

    One that is replayed at that time is told when its history has been told. What its code waits for by itself passes
    again meanwhile.
    """

    name = "a run ends by its deadline"

    #: What keeps everyone from acting, or makes their clocks differ; after a crash all that was done is done.
    excuses = frozenset({"kill", "kill at call", "stop", "deploy", "set clock", "fail", "lose claim", "pause run"})

    def prepare(self) -> None:
        self._replayed_at: dict[str, datetime] = {}
        self._woken: set[str] = set()  # runs that were parked, and should have been woken for their deadline

    def claimed(self, process: Process, claim: Claim) -> None:
        if claim.run.seq > 1:
            self._replayed_at[claim.run.id] = instant(process.clock.now())
            (self._woken.add if claim.before is Status.WAITING else self._woken.discard)(claim.run.id)

    def ended(self) -> None:
        if "poison" in self.world.plan or self.excuses & set(self.world.befell) or swallows(self.world.plan):
            return
        held_up = sum(event.get("seconds", 0.0) + event.get("calls", 0) for event in self.world.plan["events"])
        unrecorded = timedelta(seconds=sum(_unrecorded_seconds(run["parts"]) for run in self.world.plan["runs"]))
        for run, entry in self.entries().items():
            deadline = entry.run.deadline_at
            if deadline is None or entry.head.status not in ENDED or run in self.world.went_back:
                continue
            records = self.records(run)
            begun_at = records[0].finished_at or deadline  # one that was asked to start later than that can only fail
            told_at = max(deadline, begun_at)
            if run in self._replayed_at and (unrecorded or run not in self._woken):  # plain waits are waited for again
                told_at = max(told_at, self._replayed_at[run] + unrecorded)
            late = (records[-1].finished_at or deadline) - told_at
            is_undone = any(record.step == AT_END for record in records)  # which may take longer
            if late.total_seconds() > 1.0 + held_up and not is_undone:
                self.broken(f"{run} is {entry.head.status.value} {late.total_seconds():.2f} s after its deadline")


class DeadlinesHold(Promise):
    """No step begins when the deadline of its run is over."""

    name = "nothing begins after the deadline"

    def begins(self, body: Body, idempotency_key: str) -> None:
        run = self.entries()[body.run].run
        if run.deadline_at is None or swallows(self.world.plan) or body.run in self.world.went_back:
            return
        late = body.process.clock.now() - run.deadline_at.timestamp()
        # A run may clean up and undo its steps when its time is over.
        cleans_up = is_undo(body.key) or body.key.rpartition("/")[2].startswith("work#")
        if late > self._tolerance() and not cleans_up:
            self.broken(f"{body.run} {body.key} begins {late:.2f} s after its deadline")

    def _tolerance(self) -> float:
        """A process that was paused, or could not write, learns of the time when it moves again."""
        return 0.5 if not self.world.befell else 60.0
