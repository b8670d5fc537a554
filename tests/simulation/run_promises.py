"""What is promised of runs: their histories are whole, none of them stalls, and each comes to its right end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.errors import CheckpointCorrupt
from keepstep.model import Kind, Status, may_move
from keepstep.model.keepers import is_keeper
from keepstep.model.signal import RESUME
from keepstep.model.undo import AT_END, is_undo
from keepstep.ports import Advance, Answer, Change, Create, Verdict
from keepstep.records.record import Record, origin, unseal
from keepstep.stores.rules import ENDED

from .bodies import BROKEN
from .dags import foreseen_dag
from .foreseen import foreseen
from .graphs import BY_HAND
from .programs import Fails, expected
from .promise import Promise

if TYPE_CHECKING:
    from keepstep.model import Claim

    from .process import Process
    from .world import Head


class ChainsAreWhole(Promise):
    """Sequence numbers have no gap, checksums chain, and the head names the last record."""

    name = "the history of a run is whole"

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if isinstance(change, Advance) and answer.verdict is Verdict.DONE and before is not None:
            seqs = [row.seq for row in change.rows]
            if seqs != list(range(before.seq + 1, before.seq + 1 + len(seqs))):
                self.broken(f"{change.run} is given {seqs} after {before.seq}")

    def ended(self) -> None:
        for run, entry in self.entries().items():
            checksum, number = origin(entry.run), 0
            try:
                for record, sealed in unseal(entry.rows, run, 0, checksum):
                    checksum, number = sealed, record.seq
            except CheckpointCorrupt as error:
                self.broken(str(error))
                continue
            if (number, checksum) != (entry.head.seq, entry.head.checksum):
                self.broken(f"{run}: its head does not name its last record")


class LegalMoves(Promise):
    """A status changes only as the table of moves allows; what is cancelled stays so."""

    name = "a status changes only as it may"

    def prepare(self) -> None:
        self._status: dict[str, Status] = {}

    def _see(self, run: str) -> None:
        now = self.entries()[run].head.status
        before = self._status.get(run, now)
        if not may_move(before, now):
            self.broken(f"{run} goes from {before.value} to {now.value}")
        self._status[run] = now

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if isinstance(change, (Advance, Create)) and answer.verdict is Verdict.DONE:
            self._see(change.run if isinstance(change, Advance) else change.run.id)

    def claimed(self, process: Process, claim: Claim) -> None:
        self._see(claim.run.id)


class EndsStand(Promise):
    """After a run has ended or was set aside, the next that is recorded of it is what a person did."""

    name = "what has ended goes on only by a command"

    def prepare(self) -> None:
        self._ended: set[str] = set()

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        for record in records:
            if record.run in self._ended and record.trigger != "manual":
                self.broken(f"{record.run} had ended, and {process} records {record.kind} {record.step}")
            if record.kind in (Kind.RUN_FINISHED.value, Kind.ERROR.value):
                self._ended.add(record.run)
            else:
                self._ended.discard(record.run)


class NoSilentStall(Promise):
    """Every unfinished run is leased, queued, paused, set aside, or holds a wake-up."""

    name = "no run waits for nothing"

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if answer.verdict is Verdict.DONE and isinstance(change, (Advance, Create)):
            problem = self._stalled(self.entries()[change.run if isinstance(change, Advance) else change.run.id])
            if problem:
                self.broken(problem)

    def ended(self) -> None:
        for entry in self.entries().values():
            problem = self._stalled(entry)
            if problem:
                self.broken(problem)

    @staticmethod
    def _stalled(entry: Any) -> str:
        run, status = entry.run.id, entry.head.status
        if status in ENDED:
            return f"{run} is {status.value} and still leased" if entry.head.worker else ""
        if status.active:
            return "" if entry.head.worker else f"{run} is {status.value}, and nobody has it"
        if entry.head.worker:
            return f"{run} is {status.value}, and leased to {entry.head.worker}"
        if status is Status.QUEUED:
            return "" if entry.head.due_at else f"{run} is queued for no time"
        if status is Status.PAUSED:
            return "" if RESUME in entry.head.wakes else f"{run} is paused for ever"
        return "" if entry.head.due_at or entry.head.wakes else f"{run} waits for nothing"


class ParkedMeansStill(Promise):
    """A run is put away only when nothing of it is under way."""

    name = "a run is put away only when nothing of it is under way"

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if isinstance(change, Advance) and answer.verdict is Verdict.DONE and change.status is Status.WAITING:
            busy = [
                body.key for body in self.world.running.values() if (body.run, body.process) == (change.run, process)
            ]
            if busy:
                self.broken(f"{change.run} is parked while {', '.join(busy)} runs")


class AcceptedRunsEnd(Promise):
    """Every accepted run is there, and has ended, or visibly waits, or was set aside for a reason that is allowed."""

    name = "every accepted run ends"

    def ended(self) -> None:
        plan = self.world.plan
        if len(self.world.accepted) < len(plan["runs"]):
            self.broken(f"only {sorted(self.world.accepted)} were accepted")
        for run in self.world.accepted:
            if run not in self.entries():
                self.broken(f"{run} was accepted and is not there")
        for run, entry in self.entries().items():
            head = entry.head
            if head.status not in ENDED and not is_keeper(run) and not self.world.waits_for_a_person(entry):
                self.broken(
                    f"{run} is {head.status.value} (due {head.due_at}, wakes {head.wakes}, worker {head.worker})"
                )
            if head.status is Status.SET_ASIDE:
                errors = [record.error for record in self.records(run) if record.error is not None]
                if not errors or not self._allowed(errors[-1].type):
                    self.broken(f"{run} is set aside: {f'{errors[-1].type}: {errors[-1].message}' if errors else '?'}")

    def _allowed(self, kind: str) -> bool:
        plan = self.world.plan
        if kind == "DefinitionChanged":
            return self.world.befell.get("deploy", 0) > 0
        if kind == "ReplayMismatch":
            # The clock of an asyncio.timeout ("limit") starts anew on recovery, so its history may not fit: documented.
            return self.world.befell.get("deploy", 0) > 0 or "'limit'" in str(plan["runs"])
        counts = self.world.counts
        died = counts["deaths"] > 0 or counts["lives"] > plan["workers"] + 1
        return kind in ("RecoveryLimit", "HandlerLimit") and (died or "pause" in self.world.befell)


def wanted(start: dict[str, Any]) -> Any:
    """What comes of a run that nothing befalls; None if it fails."""
    if start["workflow"] == "graph":
        return foreseen(start).state
    if start["workflow"] == "dag":
        return foreseen_dag(start)
    try:
        return [expected(statement) for part in start["parts"] for statement in part]
    except Fails:
        return None


def _ended_before(told: list[Any], value: Any) -> bool:
    """Whether someone was told how a run had ended before it was rewound, perhaps to before an edit."""
    return bool(told[0] != "completed" or _without_hands(told[1]) == _without_hands(value))


def _without_hands(value: Any) -> Any:
    """A result without what a person wrote into it, or a step that a deployment has added."""
    if not isinstance(value, dict):
        return value
    return {key: one for key, one in value.items() if key != BY_HAND and not key.startswith("new")}


class ResultsAreRight(Promise):
    """A run has the result that it has when nothing befalls it, and that is what those who ask are told."""

    name = "the result is the one of an undisturbed run"

    def ended(self) -> None:
        for run, start in self.world.accepted.items():
            last = self._last_of(run)
            if last is None:
                continue
            found = self.world.store.get_run(last)
            if found is None or found.status in (Status.CANCELLED, Status.SET_ASIDE) or found.status not in ENDED:
                continue
            self._compare(run, start, found)

    def _last_of(self, run: str) -> str | None:
        """The run that ended a series."""
        for _ in range(20):
            found = self.world.store.get_run(run)
            if found is None or not found.continued_as:
                return run
            run = found.continued_as
        return None

    def _compare(self, run: str, start: dict[str, Any], found: Any) -> None:
        right = wanted(start)
        if found.status is Status.FAILED:
            late = found.error is not None and found.error.code == "ks:run-timed-out"
            # A rewind may go back to before a retry, where the failure counts that was mended since.
            error = found.error
            # A parent's traceback shows the line of its child's step, which names the text.
            broke = error is not None and (BROKEN in error.message or "{BROKEN}" in error.traceback)
            again = broke and ("rewind" in self.world.befell or self._is_undone(found))
            allowed = again or (late and start.get("deadline")) or self._a_part_ended(found) or self._is_too_long(start)
            if right is not None and not allowed:
                self.broken(f"{run} failed: {found.error}")
            return
        value = msgspec.json.decode(found.output or b"null")
        if right is None or _without_hands(value) != right:
            self.broken(f"{run} gave {value}, not {right}")
        for told in self.world.results.get(run, ()):
            if {run, found.id} & self.world.went_back and told is not None and _ended_before(told, value):
                continue
            if told not in (None, ["DefinitionError"], ["completed", value]):  # an engine that closes tells nothing
                self.broken(f"{run} gave {value}, and someone was told {told}")

    def _is_undone(self, found: Any) -> bool:
        """Whether a run cannot be retried, though its steps were mended.

        It or a child of it has undone its steps at its end, or another branch has undone some after the failure.
        """
        family = [one for one, entry in self.entries().items() if found.id in (one, entry.run.parent)]
        if any(record.step == AT_END for one in family for record in self.counted(one)):
            return True
        failed_at = min(found.error.caused_by, default=None)
        if failed_at is None:
            return False
        return any(record.seq > failed_at and is_undo(record.step) for record in self.counted(found.id))

    def _is_too_long(self, start: dict[str, Any]) -> bool:
        """Whether a graph may pass too few steps for the one that a deployment adds."""
        is_deployed = start["workflow"] == "graph" and "deploy" in self.world.befell
        return is_deployed and wanted({**start, "most": start["most"] - 1}) is None

    def _a_part_ended(self, found: Any) -> bool:
        """A child that was set aside or cancelled fails its parent."""
        family = {run: entry.run.parent for run, entry in self.entries().items()}

        def belongs(run: str | None) -> bool:
            while run is not None and run != found.id:
                run = family.get(run)
            return bool(run == found.id)

        return any(
            entry.head.status in (Status.SET_ASIDE, Status.CANCELLED) and belongs(run) and run != found.id
            for run, entry in self.entries().items()
        )
