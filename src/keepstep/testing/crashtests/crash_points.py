"""The moments at which a process of a crash test can die: around every commit, and at every await inside a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...model import Kind, Status
from ...ports import Advance, Change, Create, Store
from ...records.record import unseal
from ..faults.crash import CrashingStore
from ..faults.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment at which the process can die; `id` is the same in every run of the workflow."""

    id: str
    where: str
    step: str = ""
    line: str = ""
    run: str = ""


class Stepwise:
    """A coroutine wrapper that reports every wait and its line, and otherwise changes nothing."""

    def __init__(self, coroutine: Any, report: Callable[[str], None]) -> None:
        self._coroutine, self._report = coroutine, report

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine.__await__()
        go_on, given = coroutine.send, None
        while True:
            try:
                awaited = go_on(given)
            except StopIteration as stop:
                return stop.value
            frame = getattr(self._coroutine, "cr_frame", None)
            self._report("" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}")
            try:
                go_on, given = coroutine.send, (yield awaited)
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - errors thrown in belong to the coroutine
                go_on, given = coroutine.throw, error


class MortalStore(CrashingStore):
    """A store that reports the moments before and after each commit, but not heartbeats and claims."""

    def __init__(self, inner: Store, recorder: Recorder, reach: Callable[..., None]) -> None:
        super().__init__(inner, None, recorder)
        self._reach = reach
        self._writing: list[tuple[str, str]] = []
        self._counts: Counter[tuple[str, tuple[str, str]]] = Counter()

    def _before(self, kind: str, changes: Sequence[Change] = ()) -> None:
        if kind == "commit":
            self._writing = [written for change in changes for written in _written(change)]
            self._report_moment("before")

    def _after(self, kind: str, changes: Sequence[Change] = ()) -> None:
        if kind == "commit":
            self.writes.append(kind)
            self._report_moment("after")

    def _report_moment(self, when: str) -> None:
        """Report a moment. A change has the same name whether it is written alone or with others."""
        if self._writing:
            self._counts.update((when, about) for about in self._writing)
            ids = [f"{when} {run} {what} {self._counts[when, (run, what)]}" for run, what in self._writing]
            self._reach(Moment(ids[0], f"{when} {', '.join(what for _, what in self._writing)}"), *ids)


def _written(change: Change) -> Iterator[tuple[str, str]]:
    """Yield the changes of a commit in words, with their run; nothing for changes from outside."""
    if isinstance(change, Create):
        yield change.run.id, "the run is created"
    if not isinstance(change, Advance):
        return
    for row in change.rows:
        words = _IN_WORDS.get(Kind(row.kind))
        if words is not None:
            record, _ = next(unseal([row], change.run, row.seq - 1))
            yield change.run, words.format(record.step.removesuffix("#1"))
    if change.within is not None:
        yield change.run, "a transaction of a step"
    if change.release and change.status is Status.WAITING:
        yield change.run, "it is put away to wait"


_IN_WORDS = {
    Kind.STEP_STARTED: "the start mark of {}",
    Kind.STEP_COMPLETED: "the checkpoint of {}",
    Kind.STEP_FAILED: "the record that {} failed",
    Kind.STEP_CANCELLED: "the record that {} was cancelled",
    Kind.WAIT_STARTED: "the beginning of {}",
    Kind.TIMER: "the end of {}",
    Kind.SIGNAL: "the receipt of {}",
    Kind.CHILD: "the start of child {}",
    Kind.AGENT_STARTED: "the choice of an agent for {}",
    Kind.AGENT_COMPLETED: "the outcome of {}",
    Kind.DECISION: "the decision of {}",
    Kind.PATCH: "the note of a patch",
    Kind.PUBLISHED: "what it publishes",
    Kind.EMITTED: "what it emits",
    Kind.PROGRESS: "the progress that {} has saved",
    Kind.REPLY: "a reply",
    Kind.ERROR: "it is set aside",
    Kind.RUN_FINISHED: "the end of the run",
}
