"""What Keepstep promises, each promise a small class: what it hears during a history, and what it checks at its end.

To hold a new feature to its promise, write a class and put it into `PROMISES`. A promise is broken with `self.broken`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ...errors import CheckpointCorrupt
from ...model import Kind, Status, may_move
from ...model.ids import child_id
from ...model.signal import CANCEL, RESUME
from ...ports import CURRENT, Advance, Answer, Change, Create, Verdict, instant
from ...stores.records import Record, origin, unseal
from ...stores.rules import ENDED
from .counted import generation_of
from .dags import foreseen_dag
from .graph_promises import GRAPH_PROMISES
from .graphs import BY_HAND, foreseen
from .programs import Fails, expected
from .promise import Promise

if TYPE_CHECKING:
    from ...model import Claim
    from .world import Body, Head, Process

#: Kinds of records that are the last word on a step.
_LAST_WORDS = frozenset({Kind.STEP_COMPLETED.value, Kind.STEP_FAILED.value, Kind.STEP_CANCELLED.value})

#: Kinds of records that a run may write again each time before it kills its worker.
_NO_PROGRESS = frozenset({Kind.RECOVERED.value, Kind.EMITTED.value, Kind.PUBLISHED.value})


def is_last_word(record: Record) -> bool:
    """Whether nothing more is to come of a step."""
    return record.kind in _LAST_WORDS and record.retry_at is None


def swallows(plan: dict[str, Any]) -> bool:
    """Whether a program takes no notice of being cancelled, as it may; a deadline cannot stop it then."""
    return "'swallow'" in str(plan["runs"])


class FinishedStepsStayFinished(Promise):
    """A step with a checkpoint never runs again."""

    name = "a step with a checkpoint never runs again"

    def prepare(self) -> None:
        self._finished: set[tuple[str, str]] = set()

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        self._finished.update((record.run, record.step) for record in records if self._is_final(record))

    @staticmethod
    def _is_final(record: Record) -> bool:
        # A thread may take up a plain function at the very moment at which it is cancelled.
        plain = record.step.rpartition("/")[2].startswith("plain")
        return is_last_word(record) and not (plain and record.kind == Kind.STEP_CANCELLED.value)

    def went_back(self, run: str, counted: list[Record]) -> None:
        self._finished = {one for one in self._finished if one[0] != run}
        self._finished.update((run, record.step) for record in counted if self._is_final(record))

    def begins(self, body: Body, idempotency_key: str) -> None:
        if (body.run, body.key) in self._finished:
            self.broken(f"{body.run} {body.key} begins again in {body.process}")


class ToldWhatIsDurable(Promise):
    """The code is told an outcome only when the store has it, unless it chose otherwise by name."""

    name = "the code is told only what is durable"

    def prepare(self) -> None:
        self._durable: set[tuple[str, str]] = set()

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        self._durable.update((record.run, record.step) for record in records)

    def went_back(self, run: str, counted: list[Record]) -> None:
        self._durable = {one for one in self._durable if one[0] != run}
        self._durable.update((run, record.step) for record in counted)

    def told(self, call: Any) -> None:
        key = getattr(call, "key", None)
        if key is None or call.run.workflow.durability.choice != "every_step":
            return
        if (call.run.id, key) not in self._durable:
            self.broken(f"{call.run.id} is told {key}, which the store does not have")


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
        age = self.world.now - self._renewed.get(owner, -1e9)
        if age <= self.world.plan["lease"]:
            self.broken(f"{claim.run.id} is taken from {owner}, whose heartbeat is {age:.2f} s old")


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
            if (number, checksum) != (len(entry.rows), entry.checksum):
                self.broken(f"{run}: its head does not name its last record")


class LegalMoves(Promise):
    """A status changes only as the table of moves allows; what is cancelled stays so."""

    name = "a status changes only as it may"

    def prepare(self) -> None:
        self._status: dict[str, Status] = {}

    def _see(self, run: str) -> None:
        now = self.entries()[run].status
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
        run, status = entry.run.id, entry.status
        if status in ENDED:
            return f"{run} is {status.value} and still leased" if entry.worker else ""
        if status.active:
            return "" if entry.worker else f"{run} is {status.value}, and nobody has it"
        if entry.worker:
            return f"{run} is {status.value}, and leased to {entry.worker}"
        if status is Status.QUEUED:
            return "" if entry.due_at else f"{run} is queued for no time"
        if status is Status.PAUSED:
            return "" if RESUME in entry.wakes else f"{run} is paused for ever"
        return "" if entry.due_at or entry.wakes else f"{run} waits for nothing"


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
            if entry.status not in ENDED and not self.world.waits_for_a_person(entry):
                self.broken(
                    f"{run} is {entry.status.value} (due {entry.due_at}, wakes {entry.wakes}, worker {entry.worker})"
                )
            if entry.status is Status.SET_ASIDE:
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
        return kind == "RecoveryLimit" and (
            self.world.counts["lives"] > plan["workers"] + 1 or "pause" in self.world.befell
        )


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
            if right is not None and not (late and start.get("deadline")) and not self._a_part_ended(found):
                self.broken(f"{run} failed: {found.error}")
            return
        value = msgspec.json.decode(found.output or b"null")
        if right is None or _without_hands(value) != right:
            self.broken(f"{run} gave {value}, not {right}")
        for told in self.world.results.get(run, ()):
            if run in self.world.went_back and told is not None and _ended_before(told, value):
                continue
            if told not in (None, ["DefinitionError"], ["completed", value]):  # an engine that closes tells nothing
                self.broken(f"{run} gave {value}, and someone was told {told}")

    def _a_part_ended(self, found: Any) -> bool:
        """A child that was set aside or cancelled fails its parent."""
        family = {run: entry.run.parent for run, entry in self.entries().items()}

        def belongs(run: str | None) -> bool:
            while run is not None and run != found.id:
                run = family.get(run)
            return bool(run == found.id)

        return any(
            entry.status in (Status.SET_ASIDE, Status.CANCELLED) and belongs(run) and run != found.id
            for run, entry in self.entries().items()
        )


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
            if entry.run.parent is None or "~" in run:
                continue
            call = (entry.run.parent, entry.run.parent_key, self._generation(entry.run))
            if call in known:
                self.broken(f"{call} started {known[call]} and {run}")
            known[call] = run
        for run in entries:
            for record in self.records(run):
                child = (record.data or {}).get("child") if record.kind == Kind.CHILD.value else None
                if child and child not in entries:
                    self.broken(f"{run} started {child}, which is not there")

    def _generation(self, child: Any) -> int:
        """After how many rewinds of its parent a child was started: each makes the call another one."""
        last = generation_of(self.entries()[child.parent].rows)
        return next((n for n in range(last + 1) if child_id(child.parent, child.parent_key, n) == child.id), -1)


class CancelIsFinal(Promise):
    """A run that accepted a cancel ends cancelled, and does nothing new after that."""

    name = "cancel is final"

    def ended(self) -> None:
        for run, entry in self.entries().items():
            asked = any(signal.name == CANCEL for signal in entry.signals)
            if asked and entry.status in ENDED and entry.status not in (Status.CANCELLED, Status.SET_ASIDE):
                self.broken(f"{run} accepted a cancel and is {entry.status.value}")


class AttemptsAreCounted(Promise):
    """The attempts of a step are numbered without gap or repetition, and are no more than its policy allows."""

    name = "attempts are counted"

    def ended(self) -> None:
        for run in self.entries():
            attempts: dict[str, int] = {}
            for record in self.counted(run):
                if record.kind == Kind.STEP_FAILED.value and record.step.rpartition("/")[2].startswith("flaky"):
                    expected_attempt = attempts.get(record.step, 0) + 1
                    if record.attempt != expected_attempt:
                        self.broken(f"{run} {record.step} records attempt {record.attempt}, not {expected_attempt}")
                    attempts[record.step] = record.attempt


class OneKeyPerStep(Promise):
    """Every attempt of a step has the same idempotency key, and no other step has it.

    What is done again because a person went back is another step to the outside world.
    """

    name = "a step has one idempotency key"

    def prepare(self) -> None:
        self._keys: dict[str, tuple[str, str, int]] = {}
        self._steps: dict[tuple[str, str, int], str] = {}

    def begins(self, body: Body, idempotency_key: str) -> None:
        known = self.entries()[body.run].rows[: CURRENT.get().run.seq]
        step = (body.run, body.key, generation_of(known))
        if (
            self._keys.setdefault(idempotency_key, step) != step
            or self._steps.setdefault(step, idempotency_key) != idempotency_key
        ):
            self.broken(f"{body.run} {body.key} has the key {idempotency_key}")


class AtMostOnce(Promise):
    """The body of an at-most-once step begins once, whatever crashes, unless nobody can have seen it."""

    name = "at most once means at most once"

    def prepare(self) -> None:
        self._marked: set[tuple[str, str]] = set()
        self._begun: set[tuple[str, str]] = set()

    def went_back(self, run: str, counted: list[Record]) -> None:
        known = {(run, record.step) for record in counted}
        self._marked = {one for one in self._marked if one[0] != run or one in known}
        self._begun = {one for one in self._begun if one[0] != run or one in known}

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        marks = [record for record in records if record.kind == Kind.STEP_STARTED.value]
        self._marked.update((record.run, record.step) for record in marks)

    def begins(self, body: Body, idempotency_key: str) -> None:
        if not body.key.rpartition("/")[2].startswith(("once", "risky")):
            return
        if (body.run, body.key) in self._begun:
            self.broken(f"{body.run} {body.key} begins again in {body.process}")
        self._begun.add((body.run, body.key))
        if (body.run, body.key) not in self._marked:
            self.broken(f"{body.run} {body.key} begins before its mark is durable")


class _Beginning(NamedTuple):
    """Under which lease a body began, after which record, and whether the code was ahead of the store."""

    epoch: int
    seq: int
    ahead: bool


class EveryStepHasALastWord(Promise):
    """Of every step that began, the history of a completed run says how it ended, if only that it was cancelled.

    Under weaker durability a step may begin before what led to it is saved. If that is never saved, the run goes on
    from before it and may come another way: such a beginning, and no other, may be left without a word.
    """

    name = "every step that began has a last word"

    def prepare(self) -> None:
        self._begun: dict[tuple[str, str], list[_Beginning]] = {}
        self._saved: dict[tuple[str, int], int] = {}

    def begins(self, body: Body, idempotency_key: str) -> None:
        run = CURRENT.get().run
        ahead = run.gathers and (run.pending or run.in_flight or run.detached)  # a thread may begin when all is lost
        self._begun.setdefault((body.run, body.key), []).append(_Beginning(run.epoch, run.seq, bool(ahead)))

    def went_back(self, run: str, counted: list[Record]) -> None:
        left = counted[-2].seq if len(counted) > 1 else 0  # the last but the record of the rewind itself
        for (of, _), beginnings in self._begun.items():
            if of == run:
                beginnings[:] = [one for one in beginnings if one.seq <= left]

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if records and isinstance(change, Advance):
            self._saved[change.run, change.epoch] = records[-1].seq

    def ended(self) -> None:
        words = {
            (run, record.step)
            for run, entry in self.entries().items()
            if entry.status is Status.COMPLETED
            for record in self.records(run)
            if is_last_word(record)
        }
        for run, key in self.world.bodies:
            if self.entries()[run].status is not Status.COMPLETED or (run, key) in words:
                continue
            if not all(self._is_lost(run, beginning) for beginning in self._begun[run, key]):
                self.broken(f"{run} {key} began, and nothing says how it ended")

    def _is_lost(self, run: str, beginning: _Beginning) -> bool:
        """Whether a body began after something that was then unsaved, and that its worker never saved."""
        return beginning.ahead and self._saved.get((run, beginning.epoch), 0) <= beginning.seq


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

    def claimed(self, process: Process, claim: Claim) -> None:
        if claim.run.seq > 1:
            self._replayed_at[claim.run.id] = instant(process.clock.now())

    def ended(self) -> None:
        if "poison" in self.world.plan or self.excuses & set(self.world.befell) or swallows(self.world.plan):
            return
        held_up = sum(event.get("seconds", 0.0) + event.get("calls", 0) for event in self.world.plan["events"])
        unrecorded = timedelta(seconds=sum(_unrecorded_seconds(run["parts"]) for run in self.world.plan["runs"]))
        for run, entry in self.entries().items():
            deadline = entry.run.deadline_at
            if deadline is None or entry.status not in ENDED or run in self.world.went_back:
                continue
            records = self.records(run)
            begun_at = records[0].finished_at or deadline  # one that was asked to start later than that can only fail
            told_at = max(deadline, begun_at)
            if run in self._replayed_at:
                told_at = max(told_at, self._replayed_at[run] + unrecorded)
            late = (records[-1].finished_at or deadline) - told_at
            if late.total_seconds() > 1.0 + held_up:
                self.broken(f"{run} is {entry.status.value} {late.total_seconds():.2f} s after its deadline")


class RunsBelongToTheirHolder(Promise):
    """A body begins only where its run is leased: a worker that may have lost it starts nothing."""

    name = "a body begins only where its run is leased"

    def begins(self, body: Body, idempotency_key: str) -> None:
        holder = self.entries()[body.run].worker
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
        for record in records:
            crashes = self._crashes.get(record.run, 0)
            if record.error is not None and record.error.type == "RecoveryLimit":
                if crashes < self.world.plan["limit"]:
                    self.broken(f"{record.run} is set aside after {crashes} crashes without progress")
            elif record.kind not in _NO_PROGRESS:
                self._crashes[record.run] = 0


class BackoffsAreKept(Promise):
    """The next attempt of a step begins when its backoff is over, whoever makes it."""

    name = "an attempt waits for its backoff"

    def prepare(self) -> None:
        self._due: dict[tuple[str, str], float] = {}

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        for record in records:
            if record.retry_at is not None:
                self._due[record.run, record.step] = record.retry_at.timestamp()

    def went_back(self, run: str, counted: list[Record]) -> None:
        self._due = {one: due for one, due in self._due.items() if one[0] != run}

    def begins(self, body: Body, idempotency_key: str) -> None:
        early = self._due.get((body.run, body.key), 0.0) - body.process.clock.now()
        if early > 0.001 and "set clock" not in self.world.befell:
            self.broken(f"{body.run} {body.key} attempt {body.attempt} begins {early:.3f} s early")


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
        if self.entries()[change.run].status is not Status.CANCELLED:
            return
        for child, entry in self.entries().items():
            told = any(signal.name == CANCEL for signal in entry.signals)
            if entry.run.parent != change.run or entry.status in ENDED or told:
                continue
            if not self._is_of_the_clean_up(change.run, entry.run.parent_key):
                self.broken(f"{change.run} is cancelled, and {child} is {entry.status.value}")

    def _is_of_the_clean_up(self, run: str, key: str | None) -> bool:
        records = self.records(run)
        cancelled_at = min((record.seq for record in records if record.step == CANCEL), default=0)
        words = [record.kind for record in records if record.step == key and record.seq > cancelled_at > 0]
        return words == [Kind.CHILD.value]


class DeadlinesHold(Promise):
    """No step begins when the deadline of its run is over."""

    name = "nothing begins after the deadline"

    def begins(self, body: Body, idempotency_key: str) -> None:
        run = self.entries()[body.run].run
        if run.deadline_at is None or swallows(self.world.plan) or body.run in self.world.went_back:
            return
        late = body.process.clock.now() - run.deadline_at.timestamp()
        cleans_up = body.key.rpartition("/")[2].startswith("work#")  # which it may, when its time is over
        if late > self._tolerance() and not cleans_up:
            self.broken(f"{body.run} {body.key} begins {late:.2f} s after its deadline")

    def _tolerance(self) -> float:
        """A process that was paused, or could not write, learns of the time when it moves again."""
        return 0.5 if not self.world.befell else 60.0


#: Everything that is held against a history.
PROMISES: list[type[Promise]] = [
    FinishedStepsStayFinished,
    ToldWhatIsDurable,
    OneWriter,
    TheLivingKeepTheirRuns,
    ChainsAreWhole,
    LegalMoves,
    NoSilentStall,
    ParkedMeansStill,
    AcceptedRunsEnd,
    ResultsAreRight,
    SignalsAreReadOnce,
    OneChildPerCall,
    CancelIsFinal,
    AttemptsAreCounted,
    OneKeyPerStep,
    AtMostOnce,
    DeadlinesHold,
    EveryStepHasALastWord,
    RunsEndByTheirDeadline,
    RunsBelongToTheirHolder,
    CrashesAreCounted,
    BackoffsAreKept,
    CancelReachesChildren,
    *GRAPH_PROMISES,
]
