"""What a running workflow is seen to do: a line for each thing that happens, and on a terminal a line that moves."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Self

import click

from . import words
from .exits import line

if TYPE_CHECKING:
    from ..model import Event, Run

#: Records that are not worth a line of their own: the calls they belong to have one.
_SILENT = frozenset({"published", "emitted", "decision", "patch", "reply", "token", "run.finished", "run.created"})


#: The signals by which a person steers a run, in words.
_CONTROL = {
    "ks:pause": "paused by a person: {}",
    "ks:resume": "resumed by a person",
    "ks:cancel": "cancelled by a person",
}


class Lines:
    """Tells of events as lines on standard error; a terminal also shows what is under way."""

    def __init__(self, run: str = "", *, steps: bool = True, live: bool | None = None) -> None:
        self.run = run
        self._steps = steps
        self._marks = words.marks()
        self._began: dict[tuple[str, str], float] = {}
        self._live: Any = None
        if live if live is not None else sys.stderr.isatty():
            self._live = _Moving()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    # -- events -------------------------------------------------------------------------------------------------------

    def observe(self, event: Event) -> None:
        """Tell of one event."""
        name = event.name
        if name == "step.started":
            self._began[event.run, event.step] = time.monotonic()
        elif name in ("step.completed", "step.failed", "step.cancelled"):
            self._step_ended(event)
        elif name not in _SILENT:
            self._other(event)
        self._move()

    def _step_ended(self, event: Event) -> None:
        began = self._began.pop((event.run, event.step), None)
        if not self._steps:
            return
        took = f"  {words.duration(time.monotonic() - began)}" if began is not None else ""
        tried = f"  attempt {event.attempt}" if event.attempt > 1 or event.name == "step.failed" else ""
        step = words.one_line(words.step_name(event.step))
        if event.name == "step.completed":
            self.say("done", f"{step}{took}{tried}", event.run, "green")
        elif event.name == "step.cancelled":
            self.say("cancelled", f"{step}{took}  cancelled", event.run, "yellow")
        else:
            error = words.one_line(str(event.data.get("error", "")), 300)
            again = "  (is tried again)" if event.data.get("retry_at") else ""
            self.say("failed", f"{step}{took}{tried}  {error}{again}", event.run, "red")

    def _other(self, event: Event) -> None:
        step = words.one_line(words.step_name(event.step))
        reason = words.one_line(str(event.data.get("reason") or event.data.get("error") or ""), 300)
        if event.name == "run.recovering":
            self.say("note", "recovered: the process that drove it is gone", event.run, "cyan")
        elif event.name == "timer" and self._steps:
            self.say("done", f"{step}", event.run, "green")
        elif event.name == "signal.received":
            said = _CONTROL.get(event.step) or f"signal received: {step.removeprefix('wait_for:')}"
            self.say("note", said.format(line("resume", event.run)), event.run, "cyan")
        elif event.name == "child" and self._steps:
            self.say("note", f"child {step}", event.run, "cyan")
        elif event.name == "step.in_doubt":
            settle = line("resolve", event.run, words.step_name(event.step))
            self.say(
                "waiting", f"{step} is in doubt: {settle} --result JSON | --failed | --again", event.run, "magenta"
            )
        elif event.run == self.run or (event.name == "run.started" and "outcome" in event.data):
            return  # how it ends is told by whoever waits for it; its first record says again that it has started
        elif event.name in ("run.failed", "run.set aside", "run.halted", "lease.lost"):
            self.say("failed", f"{_said(event.name)}{': ' + reason if reason else ''}", event.run, "red")
        elif event.name in ("run.completed", "run.cancelled", "run.paused", "run.queued", "run.started", "run.waiting"):
            woken = event.name == "run.started" and event.seq > 1
            self.say("note", "goes on" if woken else _said(event.name), event.run)

    # -- lines --------------------------------------------------------------------------------------------------------

    def waiting(self, run: Run) -> None:
        """The run is parked: say for what, and how it goes on."""
        waits = words.waits_for(run)
        self.say("waiting", f"waits for {waits}" if waits else run.status.value, run.id, "blue")
        for name in words.awaited(run):
            self.plain(f"    {line('approve', run.id, name)}")
        if words.stops(run):
            self.plain(f"    {line('resume', run.id)}")

    def say(self, mark: str, text: str, run: str = "", colour: str | None = None) -> None:
        whose = f"{words.one_line(run)}  " if run and run != self.run else ""
        self.plain(f"  {click.style(self._marks[mark], fg=colour)} {whose}{text}")

    def plain(self, text: str) -> None:
        if self._live is not None:
            self._live.clear()
        click.echo(text, err=True)

    def _move(self) -> None:
        if self._live is not None:
            under_way = [(words.step_name(step), began) for (_, step), began in self._began.items()]
            self._live.show(under_way)


class _Moving:
    """The one line at the bottom of a terminal that says what is under way."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.status import Status

        self._console = Console(stderr=True, highlight=False)
        self._status = Status("", console=self._console)
        self._on = False

    def show(self, under_way: list[tuple[str, float]]) -> None:
        if not under_way:
            self.clear()
            return
        names = [words.one_line(name, 30).replace("[", r"\[") for name, _ in under_way[:3]]
        more = f" and {len(under_way) - 3} more" if len(under_way) > 3 else ""
        self._status.update(", ".join(names) + more)
        if not self._on:
            self._on = True
            self._status.start()

    def clear(self) -> None:
        """Take the line away, so that another can be written."""
        if self._on:
            self._on = False
            self._status.stop()

    def stop(self) -> None:
        self.clear()


def _said(name: str) -> str:
    return (
        name.removeprefix("run.").replace("lease.lost", "taken over by another worker").replace("queued", "handed back")
    )
