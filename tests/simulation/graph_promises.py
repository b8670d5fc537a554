"""What is promised of graphs and dags: their state, the way they go, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from keepstep.model import Kind, Status
from keepstep.ports import CURRENT
from keepstep.records.record import Record

from .acts import FORK
from .foreseen import Foreseen, foreseen
from .graphs import BY_HAND, PREFIX
from .promise import Promise

if TYPE_CHECKING:
    from .world import Body

_PASSED = frozenset({Kind.STEP_COMPLETED.value, Kind.BARRIER.value})


def folded(state: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """A state after a change as it is stored; written for the judge alone."""
    state = {key: value for key, value in state.items() if key not in delta.get("removed", ())}
    state.update(delta.get("set", {}))
    for key, moved in delta.get("items", {}).items():
        state[key] = [moved.get(str(number), item) for number, item in enumerate(state[key])]
    for key, tail in delta.get("appended", {}).items():
        state[key] = state[key] + tail
    for key, inner in delta.get("within", {}).items():
        state[key] = folded(state[key], inner)
    return state


def steps_passed(records: list[Record]) -> Iterator[Record]:
    """The records by which the walk of a run itself has moved, and what people did to its state."""
    for record in records:
        edited = record.kind == Kind.SUPERSEDED.value and (record.data or {}).get("act") == "edit"
        if edited or (record.kind in _PASSED and "/" not in record.step and "#" in record.step):
            yield record


class OfGraphs(Promise):
    """What concerns the runs of graphs only."""

    def graphs(self) -> Iterator[tuple[str, Any]]:
        for run, entry in self.entries().items():
            if entry.run.workflow.startswith(PREFIX):
                yield run, entry


class StatesAreTheFold(OfGraphs):
    """The fold of the records is the result; a consolidated state is the fold of what is before it."""

    name = "the state is the fold of the records"

    def ended(self) -> None:
        for run, entry in self.graphs():
            (args, more) = msgspec.json.decode(entry.run.input)
            state: dict[str, Any] = {**(args[0] if args else {}), **more}
            counts: dict[str, int] = {}
            for record in self._moving(run):
                if record.kind == Kind.STATE.value:
                    self._compare(run, record, state, counts)
                    continue
                state = folded(state, msgspec.json.decode(record.raw()))
                if record.step:
                    name, _, number = record.step.rpartition("#")
                    counts[name] = int(number)
            if entry.head.status is Status.COMPLETED:
                result = msgspec.json.decode(self.world.store.get_run(run).output or b"null")  # type: ignore[union-attr]
                if result != state:
                    self.broken(f"{run} gave {result}, and its records make {state}")

    def _moving(self, run: str) -> list[Record]:
        counted = self.counted(run)
        moving = {record.seq for record in steps_passed(counted)}
        return [record for record in counted if record.seq in moving or record.kind == Kind.STATE.value]

    def _compare(self, run: str, record: Record, state: dict[str, Any], counts: dict[str, int]) -> None:
        whole = msgspec.json.decode(record.raw())
        if whole["levels"].get("", {}) != state:
            self.broken(f"{run} seq {record.seq} holds {whole['levels']}, and the records before it make {state}")
        if {name: count for name, count in whole["counts"].items() if count} != counts:
            self.broken(f"{run} seq {record.seq} counts {whole['counts']}, and the records before it {counts}")


class StepsSeeTheirState(OfGraphs):
    """A step is given the state that it is given in an undisturbed run, however often the run was recovered."""

    name = "a step of a graph sees the state of an undisturbed run"

    def prepare(self) -> None:
        self._foreseen: dict[str, Foreseen] = {
            run["id"]: foreseen(run) for run in self.world.plan["runs"] if run["workflow"] == "graph"
        }

    def saw(self, run: str, key: str, state: dict[str, Any]) -> None:
        known = self._foreseen.get(run.removesuffix(FORK))
        if known is None or key.rpartition("/")[2].startswith(("one", "two", "between")) or key.startswith("worknew"):
            return
        found = {name: value for name, value in state.items() if name != BY_HAND}
        if key not in known.seen:
            self.broken(f"{run} {key} is performed, to which an undisturbed run does not come")
        elif found != known.seen[key]:
            self.broken(f"{run} {key} sees {found}, not {known.seen[key]}")


class TheRecordedEdgeIsTaken(OfGraphs):
    """A step begins only if the record before it says that it comes next; all records make one way."""

    name = "the edge that was recorded is the edge taken"

    def begins(self, body: Body, idempotency_key: str) -> None:
        entry = self.entries()[body.run]
        run = CURRENT.get().run
        if not entry.run.workflow.startswith(PREFIX) or "/" in body.key or run.buffers or run.stop.detached:
            return
        if entry.head.worker not in body.process.ids:
            return  # what one that has lost the run believes is another promise
        counted = self.counted(body.run)
        last = [record for record in steps_passed(counted) if record.step]
        if last and self._next(last[-1], counted) != body.key.partition("#")[0]:
            self.broken(f"{body.run} {body.key} begins, and {last[-1].step} leads to {self._next(last[-1], counted)}")

    def ended(self) -> None:
        for run, _ in self.graphs():
            counted = self.counted(run)
            way = [record for record in steps_passed(counted) if record.step]
            for one, following in pairwise(way):
                if self._next(one, counted) != following.step.partition("#")[0]:
                    self.broken(f"{run} {following.step} follows {one.step}, which leads to {self._next(one, counted)}")

    @staticmethod
    def _next(record: Record, counted: list[Record]) -> Any:
        data = record.data or {}
        if "next" in data:
            return data["next"]
        key = f"{record.step}.next"
        decided = [one for one in counted if one.kind == Kind.DECISION.value and one.step == key]
        return (decided[-1].data or {}).get("next") if decided else None


class IterationsAreLimited(OfGraphs):
    """No run of a graph passes more steps than its graph allows."""

    name = "no run of a graph passes more steps than it may"

    def prepare(self) -> None:
        self._most = {run["id"]: run["most"] for run in self.world.plan["runs"] if run["workflow"] == "graph"}

    def begins(self, body: Body, idempotency_key: str) -> None:
        most = self._most.get(body.run.removesuffix(FORK))
        if most is None:
            return
        passed = sum(1 for record in steps_passed(self.counted(body.run)) if record.step)
        if passed >= most:
            self.broken(f"{body.run} {body.key} begins after {passed} steps, and {most} may be passed")


class DagDecisionsHold(Promise):
    """What was decided about a step of a dag holds: one that is to be left out never begins."""

    name = "a step of a dag that was left out never begins"

    def begins(self, body: Body, idempotency_key: str) -> None:
        if not self.entries()[body.run].run.workflow.startswith("sim:dag"):
            return
        key = f"when:{body.key}"
        choices = [
            (record.data or {}).get("choice")
            for record in self.counted(body.run)
            if record.kind == Kind.DECISION.value and record.step == key
        ]
        if choices and not choices[-1]:
            self.broken(f"{body.run} {body.key} begins, and it was decided to leave it out")


GRAPH_PROMISES: list[type[Promise]] = [
    StatesAreTheFold,
    StepsSeeTheirState,
    TheRecordedEdgeIsTaken,
    IterationsAreLimited,
    DagDecisionsHold,
]
