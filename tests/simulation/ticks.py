"""A schedule in the simulated world: how it is drawn, what it starts, and what is promised of its ticks."""

from __future__ import annotations

from datetime import datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

import keepstep as ks
from keepstep.kernel.schedule import ScheduleState
from keepstep.model import FINISHED, Kind
from keepstep.model.keepers import is_keeper, schedule_id
from keepstep.policies.schedule import tick_of
from keepstep.ports import Advance, Answer, Change, Verdict
from keepstep.records.record import Record
from keepstep.workflows.definition import Workflow

from .promise import Promise

if TYPE_CHECKING:
    from .process import Process
    from .world import Head, World

NAME = "sim:tick"
#: How often a history has a schedule.
SHARE = 0.12


def draw_schedule(random: Random) -> dict[str, Any] | None:
    """The schedule of a plan, if it has one."""
    if random.random() >= SHARE:
        return None
    return {
        "every": random.choice((1.0, 1.5, 4.0)),
        "jitter": random.choice((0.0, 0.0, 0.7)),
        "overlap": random.choice(("allow", "allow", "skip", "queue", "cancel")),
        "catch_up": random.choice(("all", "all", "one", "skip")),
        "work": random.choice((0.0, 0.3, 2.5)),
        "for": random.choice((6.0, 15.0, 30.0)),
    }


def scheduled(spec: dict[str, Any], code: int) -> Workflow[..., Any]:
    """The workflow that a schedule starts. A deployment changes its interval."""

    async def tick() -> str:
        if spec["work"]:
            await ks.sleep(spec["work"])
        return ks.run_id()

    options = {name: spec[name] for name in ("jitter", "overlap", "catch_up")}
    return Workflow(tick, name=NAME, schedule=ks.Every(spec["every"] * (1 + code % 2), **options))


def purge(world: World) -> None:
    """A person removes the finished runs of the schedule."""
    done = [one.run.id for one in world.runs() if one.run.workflow == NAME and one.head.status in FINISHED]
    world.store.delete_runs(done, finished=True)
    world.tell(f"{len(done)} finished runs of the schedule are removed")


class _OfTicks(Promise):
    """Hears of the runs that a keeper starts."""

    def wrote(
        self, process: Process, change: Change, answer: Answer, records: list[Record], before: Head | None
    ) -> None:
        if isinstance(change, Advance) and answer.verdict is Verdict.DONE and is_keeper(change.run):
            for create in change.creates:
                self.fired(process, create.run.id, tick_of(create.run.id.rpartition("@")[2]))

    def fired(self, process: Process, run: str, tick: datetime) -> None:
        """A tick has started its run."""


class TicksFireOnce(_OfTicks):
    """A tick starts one run, across workers, crashes, purges and clocks that are set; later ticks come later."""

    name = "a tick fires once, and in order"

    def prepare(self) -> None:
        self._last: datetime | None = None

    def fired(self, process: Process, run: str, tick: datetime) -> None:
        if self._last is not None and tick <= self._last:
            self.broken(f"{process} starts {run} after the tick {self._last}")
        self._last = tick


class TicksComeInTime(_OfTicks):
    """A tick fires when it has come, by the clock of its worker, and lies where its schedule says."""

    name = "a tick fires when it has come"

    def fired(self, process: Process, run: str, tick: datetime) -> None:
        early = tick.timestamp() - process.clock.now()
        if early > 0 and "set clock" not in self.world.befell:
            self.broken(f"{process} starts {run} {early:.3f} s before its tick")
        every = self.world.plan["schedule"]["every"]
        if tick.timestamp() % every:
            self.broken(f"{process} starts {run}, which is no multiple of {every} s")


class NoTickIsLost(_OfTicks):
    """With catch_up="all" and runs that may overlap, every tick up to the last one has its run."""

    name = "no tick is lost"

    def prepare(self) -> None:
        self._fired: list[datetime] = []

    def fired(self, process: Process, run: str, tick: datetime) -> None:
        self._fired.append(tick)

    def ended(self) -> None:
        spec, entry = self.world.plan.get("schedule"), self.entries().get(schedule_id(NAME))
        if spec is None or entry is None or "deploy" in self.world.befell:
            return
        state = _state(entry)
        if state is not None and state.fired != len(self._fired):
            self.broken(f"the keeper counts {state.fired} ticks, and {len(self._fired)} have fired")
        every = timedelta(seconds=spec["every"])
        if spec["catch_up"] == "all" and spec["overlap"] == "allow":
            wrong = [(a, b) for a, b in zip(self._fired, self._fired[1:], strict=False) if b - a != every]
            if wrong:
                self.broken(f"after {wrong[0][0]} comes {wrong[0][1]}")
        if not self.world.befell and spec["overlap"] == "allow":
            wanted = int(spec["for"] / spec["every"]) - 1
            if len(self._fired) < wanted:
                self.broken(f"{len(self._fired)} ticks fired in {spec['for']} s, not {wanted}")


def _state(entry: Any) -> ScheduleState | None:
    for row in reversed(entry.rows):
        if row.kind == Kind.KEPT.value:
            value = msgspec.json.decode(row.record)["value"]
            return msgspec.convert(value["state"], ScheduleState)
    return None


TICK_PROMISES: list[type[Promise]] = [TicksFireOnce, TicksComeInTime, NoTickIsLost]
