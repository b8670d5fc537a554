"""Formatting for people and programs: times, durations, values, tables, and descriptions of waiting runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..model import ErrorInfo, Run, Status
from ..views.waits import waits_of

# ruff: noqa: PLC0414 - commands take all wording from here
from ..views.wording import ago as ago
from ..views.wording import duration as duration
from ..views.wording import one_line as one_line
from ..views.wording import printable as printable
from ..views.wording import step_name as step_name
from ..views.wording import waits_in_words as waits_in_words

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


# -- time --------------------------------------------------------------------------------------------------------------


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


def wrapped(text: str) -> list[str]:
    """Return text as lines of the terminal's width; in a pipe it is one line."""
    import textwrap

    flat = one_line(text)
    return textwrap.wrap(flat, max(_columns(), _NARROWEST)) if sys.stdout.isatty() else [flat]


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
