"""Progress of a running workflow: a line for each event, and on a terminal a moving status line."""

from __future__ import annotations

import math
import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import click

from ..model.checkpoint import is_timeout, map_of
from ..model.signal import RESERVED
from ..records.progress import MapProgress
from ..views.waits import actions_for, is_due, waits_of
from . import formatting
from .errors import line
from .hints import hint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..model import Event, Run

#: Items of a map that get a line each; from then on, one line tells how many there were.
MOST_ITEMS = 20
#: Seconds between two such lines of a map.
MAP_SECONDS = 5.0
#: Texts for the signals by which a person controls a run.
_CONTROL = {
    "ks:pause": "paused by a person: {}",
    "ks:resume": "resumed by a person",
    "ks:cancel": "cancelled by a person",
}


class Maps:
    """Counts the ended items of maps, so that one line now and then tells of all of them."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], list[int]] = {}  # done and failed, by run, path and step
        self._totals: dict[str, MapProgress] = {}
        self._untold: dict[tuple[str, str, str], float] = {}  # when each map gets its next line

    def take(self, event: Event) -> bool:
        """Count an event. Return whether it needs no line of its own."""
        is_done = event.name == "step.completed"
        if not is_done and (event.name != "step.failed" or event.data.get("retry_at")):
            return False
        path = map_of(event.step)
        if path is None:
            return False
        key = event.run, path, event.step.rpartition("/")[2].rpartition("#")[0]
        counts = self._counts.setdefault(key, [0, 0])
        counts[0 if is_done else 1] += 1
        if sum(counts) <= MOST_ITEMS:
            return False
        self._untold.setdefault(key, time.monotonic() + MAP_SECONDS)
        return True

    @property
    def counts(self) -> bool:
        """Whether a map has more items than get lines."""
        return bool(self._untold)

    def is_due(self) -> bool:
        """Whether a map gets its line now."""
        return min(self._untold.values(), default=math.inf) <= time.monotonic()

    def totals(self, maps: Iterable[MapProgress]) -> None:
        """Take the numbers of items of the maps under way, as the worker of the run shows them."""
        self._totals.update((one.path, one) for one in maps)

    def lines(self, *, all_of_them: bool = False) -> list[tuple[str, str]]:
        """Return the run and the text of each map whose line is due, or of each with an untold item."""
        now = time.monotonic()
        due = [key for key, at in self._untold.items() if all_of_them or at <= now]
        for key in due:
            del self._untold[key]
        return [(key[0], self._text(key)) for key in due]

    def now(self) -> str:
        """The newest counts, for a status line."""
        return ", ".join(self._text(key) for key in self._untold)

    def _text(self, key: tuple[str, str, str]) -> str:
        _, path, step = key
        done, failed = self._counts[key]
        known = self._totals.get(path)
        return MapProgress(formatting.one_line(step), path, done, failed, None if known is None else known.total).text


class Lines:
    """Prints events as lines on standard error; a terminal also shows the steps in progress."""

    def __init__(self, run: str = "", *, steps: bool = True, live: bool | None = None) -> None:
        self.run = run
        self._steps = steps
        self._marks = formatting.marks()
        self._began: dict[tuple[str, str], float] = {}
        self.maps = Maps()
        self._live: Any = None
        if live if live is not None else sys.stderr.isatty():
            self._live = _Moving()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._tell_maps(all_of_them=True)
        if self._live is not None:
            self._live.stop()
            self._live = None

    # -- events -------------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Print one event."""
        name = event.name
        if name == "step.started":
            self._began[event.run, event.step] = time.monotonic()
        elif name in ("step.completed", "step.failed", "step.cancelled"):
            self._step_ended(event)
        else:
            self._other(event)
        self._tell_maps()
        self._move()

    def _tell_maps(self, *, all_of_them: bool = False) -> None:
        for run, text in self.maps.lines(all_of_them=all_of_them):
            self.say("note", text, run, "cyan")

    def _step_ended(self, event: Event) -> None:
        began = self._began.pop((event.run, event.step), None)
        if not self._steps or self.maps.take(event):
            return
        self._tell_maps(all_of_them=map_of(event.step) is None)
        took = f"  {formatting.duration(time.monotonic() - began)}" if began is not None else ""
        tried = f"  attempt {event.attempt}" if event.attempt > 1 or event.name == "step.failed" else ""
        step = formatting.one_line(formatting.step_name(event.step))
        if event.name == "step.completed":
            self.say("done", f"{step}{took}{tried}", event.run, "green")
        elif event.name == "step.cancelled":
            self.say("cancelled", f"{step}{took}  cancelled", event.run, "yellow")
        else:
            error = formatting.one_line(str(event.data.get("error", "")), 300)
            retry_at = event.data.get("retry_at")
            wait = (datetime.fromisoformat(retry_at) - event.at).total_seconds() if retry_at else 0.0
            again = f"  (again in {formatting.duration(wait)})" if retry_at else ""
            self.say("failed", f"{step}{took}{tried}  {error}{again}", event.run, "red")

    def _other(self, event: Event) -> None:
        step = formatting.one_line(formatting.step_name(event.step))
        reason = formatting.one_line(str(event.data.get("reason") or event.data.get("error") or ""), 300)
        if event.name == "run.recovering":
            self.say("note", "recovered: the process that drove it has died", event.run, "cyan")
        elif event.name == "timer.fired" and self._steps:
            self._timer_fired(event, step)
        elif event.name == "signal.received":
            text = _CONTROL.get(event.step) or f"signal received: {step.removeprefix('wait_for:')}"
            self.say("note", text.format(line("resume", event.run)), event.run, "cyan")
        elif event.name in ("child.started", "child.ended") and self._steps:
            self.say("note", f"child {step}", event.run, "cyan")
        elif event.name == "step.in_doubt" and event.run != self.run:  # `waiting` says so when the run is parked
            settle = line("resolve", event.run, formatting.step_name(event.step))
            self.say(
                "waiting", f"{step} is in doubt: {settle} --result JSON | --failed | --again", event.run, "magenta"
            )
        elif event.run == self.run or (event.name == "run.started" and "outcome" in event.data):
            # The caller prints the end of the run. Its first record only repeats that it has started.
            return
        elif event.name in ("run.failed", "run.set_aside", "run.halted", "lease.lost"):
            self.say("failed", f"{_event_text(event.name)}{': ' + reason if reason else ''}", event.run, "red")
        elif event.name in ("run.completed", "run.cancelled", "run.paused", "run.queued", "run.started", "run.waiting"):
            woken = event.name == "run.started" and event.seq > 1
            self.say("note", "goes on" if woken else _event_text(event.name), event.run)

    def _timer_fired(self, event: Event, step: str) -> None:
        if event.step.startswith(RESERVED):
            self.say("failed", "the deadline of the run is over", event.run, "red")
        elif event.data.get("outcome") == "failure" or is_timeout(event.step):
            self.say("cancelled", f"{step}  timed out", event.run, "yellow")
        else:
            self.say("done", step, event.run, "green")

    # -- lines --------------------------------------------------------------------------------------------------------

    def waiting(self, run: Run) -> None:
        """Print what a parked run waits for, and how to let it go on; nothing if somebody has answered meanwhile."""
        now = datetime.now(UTC)
        waits = waits_of(run, now)
        if is_due(waits):
            return
        words = formatting.waits_in_words(waits, now)
        self.say("waiting", f"waits for {words}" if words else run.status.value, run.id, "blue")
        for action in actions_for(run, now):
            for text in hint(action).splitlines():
                self.plain(f"    {text}")

    def say(self, mark: str, text: str, run: str = "", colour: str | None = None) -> None:
        whose = f"{formatting.one_line(run)}  " if run and run != self.run else ""
        self.plain(f"  {click.style(self._marks[mark], fg=colour)} {whose}{text}")

    def plain(self, text: str) -> None:
        if self._live is not None:
            self._live.clear()
        click.echo(text, err=True)

    def _move(self) -> None:
        if self._live is not None:
            under_way = [(formatting.step_name(step), began) for (_, step), began in self._began.items()]
            self._live.show(under_way, self.maps.now())


class _Moving:
    """The status line at the bottom of a terminal, with the steps in progress."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.status import Status

        self._console = Console(stderr=True, highlight=False)
        self._status = Status("", console=self._console)
        self._on = False

    def show(self, under_way: list[tuple[str, float]], maps: str = "") -> None:
        if not under_way:
            self.clear()
            return
        names = [formatting.one_line(name, 30).replace("[", r"\[") for name, _ in under_way[:3]]
        more = f" and {len(under_way) - 3} more" if len(under_way) > 3 else ""
        self._status.update(maps or ", ".join(names) + more)
        if not self._on:
            self._on = True
            self._status.start()

    def clear(self) -> None:
        """Remove the line, so that another one can be printed."""
        if self._on:
            self._on = False
            self._status.stop()

    def stop(self) -> None:
        self.clear()


def _event_text(name: str) -> str:
    texts = {"lease.lost": "taken over by another worker", "run.queued": "handed back"}
    return texts.get(name) or name.removeprefix("run.").replace("_", " ")
