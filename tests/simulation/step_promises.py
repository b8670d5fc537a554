"""What is promised of steps: what is done is not done again, and every beginning has an end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from keepstep.kernel.steering import DEADLINE
from keepstep.model import Kind, Status
from keepstep.model.undo import AT_END, undone_key
from keepstep.ports import CURRENT, Advance, Answer, Change
from keepstep.records.record import Record

from .bodies import BROKEN
from .counted import counting, generation_of
from .promise import Promise

if TYPE_CHECKING:
    from .process import Process
    from .world import Body, Head

#: Kinds of records that are the last word on a step.
_LAST_WORDS = frozenset({Kind.STEP_COMPLETED.value, Kind.STEP_FAILED.value, Kind.STEP_CANCELLED.value})


def is_last_word(record: Record) -> bool:
    """Whether nothing more is to come of a step."""
    return record.kind in _LAST_WORDS and record.retry_at is None


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


class RetriesKeepWhatWasDone(Promise):
    """After a retry, every step counts that had finished, and was asked for before the failure was delivered."""

    name = "a retry repeats no finished step that was asked for before the failure"

    def went_back(self, run: str, counted: list[Record]) -> None:
        if not counted or (counted[-1].data or {}).get("act") != "retry":
            return
        records = self.records(run)[: counted[-1].seq - 1]
        if not self._failed_by_what_is_mended(records):
            return
        before = counting(records)
        failed_at = min((one.seq for one in before if self._has_failed(one)), default=0)
        # A child that has undone its steps is started again, so the run goes back to before its start.
        failed_at = min([failed_at, *(one.seq for one in before if self._starts_undone(one))])
        kept = {one.seq for one in counted}
        lost = [one.step for one in before if self._is_to_stay(one, failed_at) and one.seq not in kept]
        if failed_at and lost:
            self.broken(f"{run}, which failed at {failed_at}, is to do {', '.join(lost)} again")

    @staticmethod
    def _failed_by_what_is_mended(records: list[Record]) -> bool:
        """Whether the run ended because of something that was broken, or of its deadline, and not of itself."""
        error = next((one.error for one in reversed(records) if one.kind == Kind.RUN_FINISHED.value), None)
        return error is not None and (error.code == "ks:run-timed-out" or BROKEN in f"{error.message}{error.traceback}")

    @staticmethod
    def _has_failed(record: Record) -> bool:
        """Whether nothing but this has failed the run: programs pass on what only a person can mend."""
        said = record.error.message if record.error is not None else record.raw().decode()
        is_end = record.kind in (Kind.STEP_FAILED.value, Kind.CHILD.value)
        return record.step == DEADLINE or (is_end and BROKEN in said)

    def _starts_undone(self, record: Record) -> bool:
        """Whether a record starts a child that has undone its steps at its end."""
        child = (record.data or {}).get("child", "") if record.kind == Kind.CHILD.value else ""
        return bool(child) and child in self.entries() and any(one.step == AT_END for one in self.counted(child))

    @staticmethod
    def _is_to_stay(record: Record, failed_at: int) -> bool:
        return record.kind == Kind.STEP_COMPLETED.value and (record.asked or record.seq - 1) < failed_at


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
        undone = undone_key(body.key)  # an undo that the code has cancelled is repeated at the end
        key = f"ks:undo:{undone}" if undone else body.key
        step = (body.run, key, generation_of(known))
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
        ahead = run.buffers and (
            run.pending or run.in_flight or run.stop.detached
        )  # a thread may begin when all is lost
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
            if entry.head.status is Status.COMPLETED
            for record in self.records(run)
            if is_last_word(record)
        }
        for run, key in self.world.bodies:
            if self.entries()[run].head.status is not Status.COMPLETED or (run, key) in words:
                continue
            if not all(self._is_lost(run, beginning) for beginning in self._begun[run, key]):
                self.broken(f"{run} {key} began, and nothing says how it ended")

    def _is_lost(self, run: str, beginning: _Beginning) -> bool:
        """Whether a body began after something that was then unsaved, and that its worker never saved."""
        return beginning.ahead and self._saved.get((run, beginning.epoch), 0) <= beginning.seq


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
