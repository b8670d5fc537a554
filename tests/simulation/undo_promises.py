"""What is promised of undos: each finished step of a run that fails or is cancelled is undone once, newest first."""

from __future__ import annotations

from keepstep.model import Kind, Status
from keepstep.model.undo import AT_END, undone_key
from keepstep.records.record import Record

from .promise import Promise


class UndoneOnceNewestFirst(Promise):
    """A run that failed or was cancelled has undone each of its finished steps once, in the reverse order."""

    name = "what a failed run has done is undone once, newest first"

    def ended(self) -> None:
        for run, entry in self.entries().items():
            records = self.counted(run)
            undone = [undone_key(one.step) for one in records if one.kind == Kind.STEP_COMPLETED.value]
            undone = [key for key in undone if key]
            twice = sorted({key for key in undone if undone.count(key) > 1})
            if twice:
                self.broken(f"{run} has undone {', '.join(twice)} more than once")
            if entry.head.status in (Status.FAILED, Status.CANCELLED) and not self._is_forced(records):
                self._look_at(run, records, undone)

    def went_back(self, run: str, counted: list[Record]) -> None:
        """What was undone must not count as done because of a command."""
        kept = {one.seq for one in counted}
        undone = {(undone_key(one.step), one.seq) for one in self.records(run) if one.kind == Kind.STEP_COMPLETED.value}
        lost = {key: seq for key, seq in undone if key and seq not in kept}
        torn = [one.step for one in counted if one.seq < lost.get(one.step, 0) and _is_undoable(one.step)]
        if torn:
            self.broken(f"{run} goes on as if {', '.join(torn)} were not undone")

    @staticmethod
    def _is_forced(records: list[Record]) -> bool:
        """Whether a person has ended the run without its code."""
        return not records or (records[-1].data or {}).get("act") == "cancel"

    def _look_at(self, run: str, records: list[Record], undone: list[str]) -> None:
        copied = max((one.data.get("origin_seq", 0) for one in records if one.data), default=0)
        done = {
            one.step: one.seq
            for one in records
            if one.kind == Kind.STEP_COMPLETED.value and one.seq > copied and _is_undoable(one.step)
        }
        left = [key for key in done if key not in undone]
        if left:
            self.broken(f"{run} has not undone {', '.join(left)}")
        begun = next((one.seq for one in records if one.step == AT_END), 0)
        last = [
            done[undone_key(one.step)]
            for one in records
            if begun and one.seq > begun and one.kind == Kind.STEP_COMPLETED.value and undone_key(one.step) in done
        ]
        if last != sorted(last, reverse=True):
            self.broken(f"{run} undoes the steps at {last} in this order")


def _is_undoable(key: str) -> bool:
    return not undone_key(key) and key.rpartition("/")[2].startswith("undoable#")
