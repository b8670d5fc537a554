"""The keeper of a schedule: what it holds, and how it answers ticks, the ends of its runs, and people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from ..errors import DefinitionError
from ..model import Status
from ..model.event import EventName
from ..model.ids import MAX_ID, problem_of
from ..model.keepers import SCHEDULED_BY, TELL, TELLS, schedule_id
from ..model.signal import CANCEL, PAUSE, RESUME
from ..policies.schedule import MOST_MISSED, Schedule, restored, tick_of, tick_text
from .keeper import Message, Moment, Reaction, Start

#: Runs that a schedule starts in one commit.
MOST_STARTS = 100
#: Ticks and changes that a schedule remembers for its readers.
MOST_RECENT = 20
#: Seconds after which a schedule looks again whether the runs have ended that its next one waits for. Their ends are
#: told at once, except for a run that was removed.
LOOK_SECONDS = 60.0
#: Longest name of a schedule in bytes, so that a tick fits behind it in the id of a run.
MOST_NAME = MAX_ID - 40


class Tick(msgspec.Struct, omit_defaults=True):
    """A tick whose run is to be started. One that a person has asked for is never left out."""

    at: str
    by_hand: bool = False


class Past(msgspec.Struct, omit_defaults=True):
    """A tick that is over, and why it has started no run; empty if it has started one."""

    tick: str
    why: str = ""


class Changed(msgspec.Struct, omit_defaults=True):
    """A change of a schedule: who made it, when and why."""

    at: datetime
    act: str
    actor: str
    reason: str = ""


class ScheduleState(msgspec.Struct, omit_defaults=True):
    """All that a schedule knows. `last` is the newest tick that is over; the next one lies after it."""

    name: str
    workflow: str
    when: dict[str, Any]
    last: str
    input: str = "[[],{}]"
    paused: bool = False
    waiting: list[Tick] = []
    #: Runs that have not ended, as far as it is known, unless runs may overlap.
    open: list[str] = []
    fired: int = 0
    skipped: int = 0
    recent: list[Past] = []
    changes: list[Changed] = []

    @property
    def schedule(self) -> Schedule:
        """The schedule itself."""
        return restored(self.when)


_decode_state = msgspec.json.Decoder(ScheduleState).decode


def check_schedule_name(name: str) -> str:
    """Return the name of a schedule; refuse one that cannot be part of the ids of its runs."""
    problem = problem_of(name) if isinstance(name, str) else "is not text"
    if not problem and len(name.encode()) > MOST_NAME:
        problem = f"is longer than {MOST_NAME} bytes"
    if problem:
        raise DefinitionError(f"schedule name {name!r} is refused: it {problem}")
    return name


def run_of(name: str, tick: datetime) -> str:
    """Return the id of the run of a tick."""
    return f"{name}@{tick_text(tick)}"


def declaration(name: str, workflow: str, schedule: Schedule, payload: bytes, last: datetime) -> dict[str, Any]:
    """Return the input of the keeper of a new schedule; its first tick lies after `last`."""
    given = {"name": name, "workflow": workflow, "when": schedule.stored()}
    return {**given, "input": payload.decode(), "last": tick_text(last)}


def overdue(state: ScheduleState, now: datetime) -> datetime | None:
    """Return the tick that a schedule has waited with for over two intervals; None if it is on time or paused.

    Its run waits for another, or no worker has noticed it. A last tick far ahead shows that a clock was wrong.
    """
    if state.paused:
        return None
    schedule, last = state.schedule, tick_of(state.last)
    waiting = next((tick_of(one.at) for one in state.waiting if not one.by_hand), None)
    oldest = waiting or schedule.after(last)
    if oldest is None:
        return None
    if _after(schedule, oldest, 2) <= now:
        return oldest
    return last if last > _after(schedule, now, 2) else None


def _after(schedule: Schedule, instant: datetime, count: int) -> datetime:
    """Return the n-th tick after an instant; the end of time if there are fewer."""
    for _ in range(count):
        following = schedule.after(instant)
        if following is None:
            return datetime.max.replace(tzinfo=UTC)
        instant = following
    return instant


class ScheduleKeeper:
    """Answers for one schedule: a tick is one commit, with the tick and the run that it starts."""

    version = 1
    payload = Any
    follows = False

    def begin(self, given: Any, at: datetime) -> ScheduleState:
        """Return the first state, which is the declaration."""
        return msgspec.convert(given, ScheduleState)

    def read(self, version: int, data: bytes) -> ScheduleState:
        """Return a stored state."""
        return _decode_state(data)

    def watched(self, state: ScheduleState) -> list[str]:
        """Return the runs that the next one may have to wait for."""
        return state.open

    def react(self, state: ScheduleState, moment: Moment) -> Reaction:
        """Return the runs to start now, and the time of the next tick."""
        return _Answer(state, moment).reaction()


@dataclass(slots=True)
class _Answer:
    state: ScheduleState
    moment: Moment

    def reaction(self) -> Reaction:
        state, moment = self.state, self.moment
        result = Reaction(state)
        state.open = [run for run in state.open if run not in moment.ended]
        for message in moment.messages:
            self._obey(message, result)
        if result.end is not None:
            return result
        schedule = state.schedule
        if not state.paused:
            due = schedule.due(state.name, tick_of(state.last), moment.now)
            state.last = tick_text(due.last)
            for tick in due.ticks:
                self._tick(tick, schedule, result, missed=len(due.ticks) > 1)
        self._start(schedule, result)
        result.paused = state.paused
        result.more = self._may_start(schedule)
        result.wake_at = self._wake_at(schedule)
        return result

    # -- commands -----------------------------------------------------------------------------------------------------

    def _obey(self, message: Message, result: Reaction) -> None:
        payload = message.payload if isinstance(message.payload, dict) else {}
        act = {CANCEL: "cancel", PAUSE: "pause", RESUME: "resume"}.get(message.name, "")
        if message.name == TELL:
            act = payload.get("act", "")
        acts = {
            "declare": self._declare,
            "pause": self._pause,
            "resume": self._resume,
            "trigger": self._trigger,
            "backfill": self._backfill,
            "cancel": self._cancel,
            "remove": self._remove,
        }
        if act in acts:  # the notice of an ended run only wakes the keeper
            acts[act](payload, result)
            change = Changed(message.at, act, message.sender, payload.get("reason", ""))
            self.state.changes = [*self.state.changes, change][-MOST_RECENT:]

    def _declare(self, payload: dict[str, Any], _: Reaction) -> None:
        """Take another declaration. It makes no ticks before now."""
        state = self.state
        state.workflow, state.when, state.input = payload["workflow"], payload["when"], payload["input"]
        state.last = tick_text(max(tick_of(state.last), self.moment.now))
        if state.schedule.overlap == "allow":
            state.open = []

    def _pause(self, _: dict[str, Any], __: Reaction) -> None:
        self.state.paused = True

    def _resume(self, _: dict[str, Any], __: Reaction) -> None:
        self.state.paused = False

    def _trigger(self, payload: dict[str, Any], _: Reaction) -> None:
        self.state.waiting.append(Tick(payload["tick"], by_hand=True))

    def _backfill(self, payload: dict[str, Any], _: Reaction) -> None:
        """Start the ticks of a time again. Those that have not been yet come by themselves."""
        state = self.state
        first, last = tick_of(payload["first"]), min(tick_of(payload["last"]), tick_of(state.last), self.moment.now)
        ticks = state.schedule.between(first, last, MOST_MISSED)
        state.waiting += [Tick(tick_text(tick), by_hand=True) for tick in ticks]

    def _cancel(self, _: dict[str, Any], result: Reaction) -> None:
        result.end = Status.CANCELLED

    def _remove(self, _: dict[str, Any], result: Reaction) -> None:
        result.end = Status.COMPLETED

    # -- ticks --------------------------------------------------------------------------------------------------------

    def _tick(self, tick: datetime, schedule: Schedule, result: Reaction, *, missed: bool) -> None:
        """Take a tick that is due: it waits for its turn, or is left out. Of missed ones, each waits for the others."""
        state, text = self.state, tick_text(tick)
        if schedule.overlap == "skip" and not missed and (state.open or state.waiting):
            before = state.open[0] if state.open else run_of(state.name, tick_of(state.waiting[0].at))
            self._leave_out(text, f"run {before} has not ended", result)
            return
        if schedule.overlap == "cancel":
            for one in [one for one in state.waiting if not one.by_hand]:
                state.waiting.remove(one)
                self._leave_out(one.at, "a later tick has come", result)
            reason = {"reason": f"the tick {text} of schedule {state.name} has come"}
            result.sends += [(run, CANCEL, reason) for run in state.open]
        state.waiting.append(Tick(text))
        ticks = [one for one in state.waiting if not one.by_hand]
        for one in ticks[:-MOST_MISSED]:
            state.waiting.remove(one)
            self._leave_out(one.at, f"{MOST_MISSED} later ticks wait", result)

    def _leave_out(self, tick: str, why: str, result: Reaction) -> None:
        self.state.skipped += 1
        self._over(Past(tick, why))
        skipped: EventName = "schedule.skipped"
        result.events.append((skipped, {"tick": tick, "why": why}))

    def _over(self, past: Past) -> None:
        self.state.recent = [*self.state.recent, past][-MOST_RECENT:]

    def _next_to_start(self) -> Tick | None:
        """Return the next tick to start, apart from overlaps. A pause holds up all but those by hand."""
        ticks = self.state.waiting
        return next((one for one in ticks if one.by_hand or not self.state.paused), None)

    def _may_start(self, schedule: Schedule) -> bool:
        if self._next_to_start() is None:
            return False
        return schedule.overlap == "allow" or not self.state.open

    def _start(self, schedule: Schedule, result: Reaction) -> None:
        state = self.state
        while len(result.starts) < MOST_STARTS and self._may_start(schedule):
            tick = next(one for one in state.waiting if one.by_hand or not state.paused)
            state.waiting.remove(tick)
            run = f"{state.name}@{tick.at}"
            if run in self.moment.taken:
                self._leave_out(tick.at, f"the id {run} is taken by another run", result)
                continue
            if any(start.run == run for start in result.starts):
                continue
            tags = {SCHEDULED_BY: state.name}
            if schedule.overlap != "allow":
                tags[TELLS] = schedule_id(state.name)
                state.open.append(run)
            result.starts.append(Start(run, state.workflow, state.input.encode(), tags))
            state.fired += 1
            self._over(Past(tick.at))
            result.events.append(("schedule.fired", {"tick": tick.at, "started": run}))

    def _wake_at(self, schedule: Schedule) -> datetime | None:
        """Return the time of the next tick; earlier if a tick waits for a run to end."""
        state, now = self.state, self.moment.now
        times: list[datetime] = []
        if not state.paused:
            following = schedule.after(tick_of(state.last))
            if following is not None:
                times.append(schedule.fires_at(state.name, following))
        if self._next_to_start() is not None and state.open:
            times.append(now + timedelta(seconds=LOOK_SECONDS))
        return min(times, default=None)
