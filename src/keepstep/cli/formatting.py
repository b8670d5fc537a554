"""Formatting for people and programs: times, durations, values, tables, and descriptions of waiting runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..model import ErrorInfo, Run, Status
from ..model.signal import callback_of
from ..views.waits import Wait, WaitKind, waits_of

if TYPE_CHECKING:
    from ..model import WorkerInfo

COLOURS = {
    Status.COMPLETED: "green",
    Status.RUNNING: "cyan",
    Status.RECOVERING: "cyan",
    Status.WAITING: "blue",
    Status.QUEUED: "blue",
    Status.PAUSED: "yellow",
    Status.FAILED: "red",
    Status.SET_ASIDE: "magenta",
    Status.CANCELLED: "yellow",
}


# -- text --------------------------------------------------------------------------------------------------------------


def printable(text: str, *, lines: bool = True) -> str:
    """Return text without control characters, so that stored text cannot control a terminal."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else f"\\x{ord(c):02x}" for c in text)


def one_line(text: str, width: int = 0) -> str:
    """Return text on one line, cut at `width` if given."""
    flat = " ".join(text.split())
    flat = printable(flat[: width + 1] if width else flat, lines=False)
    return flat if not width or len(flat) <= width else flat[: max(width - 1, 0)] + "…"


def marks() -> dict[str, str]:
    """Return the marks at the beginning of a line that the terminal's encoding supports."""
    signs = {"done": "✓", "failed": "✗", "waiting": "…", "note": "·", "cancelled": "−"}
    try:
        "".join(signs.values()).encode(getattr(sys.stderr, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return {"done": "+", "failed": "x", "waiting": "~", "note": "-", "cancelled": "-"}
    return signs


def coloured(status: Status) -> str:
    """Return a status in its colour."""
    return click.style(status.value, fg=COLOURS[status])


def step_name(key: str) -> str:
    """Return a step's key for people: the number of the call appears only from the second call on."""
    return key.removesuffix("#1")


# -- time --------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Return a time span for people."""
    if seconds < 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest and minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes and hours < 10 else f"{hours} h"
    return f"{hours // 24} days"


def ago(at: datetime | None, now: datetime | None = None) -> str:
    """Return a time relative to now: "3 min ago", "in 2 h"."""
    if at is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def local(at: datetime | None) -> str:
    """Return an instant in the local time zone."""
    return "-" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


# -- values ------------------------------------------------------------------------------------------------------------


#: Characters of a value or error in a timeline, unless the whole is asked for.
BRIEF = 200
#: Characters of a value in the overview of a run on a terminal.
SHORT = 60


def brief(value: Any, width: int = SHORT) -> str:
    """Return a value on one line, cut at `width`; 0 cuts nothing."""
    return one_line(json.dumps(value, ensure_ascii=False), width)


# -- runs --------------------------------------------------------------------------------------------------------------


def waits_for(run: Run) -> str:
    """Return what a run waits for, in words."""
    now = datetime.now(UTC)
    return waits_in_words(waits_of(run, now), now)


def waits_in_words(waits: Iterable[Wait], now: datetime | None = None) -> str:
    """Return a list of waits in words."""
    now = now or datetime.now(UTC)
    return " or ".join(_wait_in_words(wait, now) for wait in waits)


def _wait_in_words(wait: Wait, now: datetime) -> str:  # noqa: C901 - one case after the other
    ahead = duration((wait.until - now).total_seconds()) if wait.until is not None else ""
    match wait.kind:
        case WaitKind.RETRY | WaitKind.RESUME:
            return f"a person: keepstep {'resume' if wait.kind is WaitKind.RESUME else 'retry or cancel'}"
        case WaitKind.WORKER:
            return _worker_in_words(wait, ahead)
        case WaitKind.SIGNAL:
            callback = callback_of(wait.name)
            return f"signal {wait.name}" if callback is None else f"callback {callback}".rstrip()
        case WaitKind.CHILD:
            return f"child {step_name(wait.name)}"
        case WaitKind.VERDICT:
            return f"a decision on {step_name(wait.name)}"
        case WaitKind.READINESS:
            return f"{step_name(wait.name)} to be ready"
        case WaitKind.SERVICE:
            return f"{wait.name} ({wait.why})" if wait.why else wait.name
        case WaitKind.BREAKPOINT:
            return f"a person at the breakpoint {wait.name}: keepstep resume"
        case WaitKind.REPLY | WaitKind.MESSAGE | WaitKind.ROOM | WaitKind.BARRIER:
            return _message_in_words(wait)
        case WaitKind.TIME:
            return f"{ahead} to pass"


def _message_in_words(wait: Wait) -> str:
    if wait.kind is WaitKind.REPLY:  # the id of a question ends with the call that asks, and a number
        return f"the reply to {step_name(wait.name.rpartition(':')[0].rpartition(':ask:')[2])}"
    if wait.kind is WaitKind.BARRIER:
        return f"the other parties of barrier {wait.name}"
    if wait.kind is WaitKind.MESSAGE:
        return f"a message of topic {wait.name}"
    return f"room in topic {wait.name}: keepstep topics show {wait.name}"


def _worker_in_words(wait: Wait, ahead: str) -> str:
    if wait.why:
        return _QUEUE_WAITS[wait.why].format(wait.queue)
    return f"a worker{_which(wait)}{f' (handed back, due again in {ahead})' if ahead else ''}"


#: Words for a wait in a queue, by its reason.
_QUEUE_WAITS = {
    "unserved": "a worker that serves queue {} (no living one does)",
    "stopped": "queue {}, which is stopped (concurrency 0)",
    "concurrency": "a place in queue {} (concurrency)",
    "per_key": "its key in queue {} (per_key)",
    "rate": "its turn in queue {} (rate)",
}


def _which(wait: Wait) -> str:
    """Return which worker a run waits for, if the living ones have other versions."""
    there = ", ".join(wait.versions)
    return f" with version {wait.version} of {wait.name} (workers here have {there})" if there else ""


def error_line(error: ErrorInfo) -> str:
    """Return an error on one line; Keepstep's own classes appear without their module."""
    return error.summary


def frame_lines(error: ErrorInfo | None) -> str:
    """Return the frames of the user's code that led to an error, as in a traceback."""
    return "\n".join(str(frame) for frame in error.frames) if error is not None else ""


def count(number: int, what: str) -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def names(agent: str | None, stage: str | None) -> str:
    """Return the stage and the agent that a workflow has named, or ""."""
    return ", ".join(f"{what} {one_line(name)}" for what, name in (("stage", stage), ("agent", agent)) if name)


def worker_name(worker: WorkerInfo) -> str:
    """Return a worker's id and place."""
    where = f"pid {worker.pid}" + (f" on {worker.host}" if worker.host else "")
    return f"{worker.id} ({where})"


#: Characters that every column of a table keeps.
_NARROWEST = 12


# -- tables ------------------------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, cut: bool = True) -> str:
    """Return a table. On a terminal, all columns but the first are cut to its width; in a pipe nothing is cut."""
    body = [[*row] for row in rows]
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(heads, *body, strict=True)]
    if cut and sys.stdout.isatty():
        _narrow(widths, _columns() - 2 * (len(widths) - 1))
        body = [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in body]
    return "\n".join([click.style(_joined(heads, widths), bold=True), *(_joined(row, widths) for row in body)])


def on_terminal(line: str) -> str:
    """Return a line cut to the terminal's width; in a pipe it is unchanged."""
    return _cut(line, _columns()) if sys.stdout.isatty() else line


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _narrow(widths: list[int], room: int) -> None:
    """Narrow columns until all fit, the last ones first. The first column, which holds the name, keeps its width."""
    for column in range(len(widths) - 1, 0, -1):
        excess = max(sum(widths) - room, 0)
        widths[column] = max(widths[column] - excess, min(widths[column], _NARROWEST))


def _cut(cell: str, width: int) -> str:
    text = click.unstyle(cell)
    return cell if len(text) <= width else text[: width - 1] + "…"


def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join(padded).rstrip()


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one per line, without empty ones."""
    kept = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    indent = "\n" + " " * (width + 2)
    return "\n".join(
        f"{click.style(name.ljust(width), dim=True)}  {value.replace(chr(10), indent)}" for name, value in kept
    )
