"""Formatting for people and programs: times, durations, values, tables, and descriptions of waiting runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..model import Checkpoint, ErrorInfo, Run, Status
from ..model.signal import callback_of
from ..model.wakes import sorted_wakes
from ..records.progress import report_in
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


def iso(at: datetime | None) -> str | None:
    """Return an instant for a program."""
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


# -- values ------------------------------------------------------------------------------------------------------------


def plain(stored: bytes | None) -> Any:
    """Return a stored value as plain JSON: a tuple or set as a list, an object as its fields."""
    if stored is None:
        return None
    try:
        return untagged(json.loads(bytes(stored).decode()))
    except (ValueError, RecursionError):
        return bytes(stored).decode("utf-8", "replace")


def untagged(value: Any) -> Any:
    """Return a value with tagged types as plain JSON."""
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("$"), str):
        inner = value.get("v")
        if value["$"] == "dict" and isinstance(inner, list) and all(map(_is_pair, inner)):
            return {_key(key): untagged(item) for key, item in inner}
        return untagged(inner)
    return {key: untagged(item) for key, item in value.items()}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _key(key: Any) -> str:
    simple = untagged(key)
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def arguments(run: Run) -> dict[str, Any]:
    """Return the arguments that a run was started with."""
    value = plain(run.input)
    if isinstance(value, list) and [type(part) for part in value] == [list, dict]:
        return {"args": value[0], "kwargs": value[1]}
    return {"args": [], "kwargs": {}}


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


def _wait_in_words(wait: Wait, now: datetime) -> str:
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
        case WaitKind.TIME:
            return f"{ahead} to pass"


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


def run_as_json(run: Run, *, whole: bool = False) -> dict[str, Any]:
    """Return a run for a program; `whole` includes its input, output and error."""
    value: dict[str, Any] = {
        "id": run.id,
        "workflow": run.workflow,
        "version": run.version,
        "status": run.status.value,
        "created_at": iso(run.created_at),
        "created_by": run.created_by,
        "updated_at": iso(run.updated_at),
        "due_at": iso(run.due_at),
        "deadline_at": iso(run.deadline_at),
        "wakes": list(run.wakes),
        "worker": run.worker,
        "epoch": run.epoch,
        "seq": run.seq,
        "signals": run.signals,
        "recoveries": run.recoveries,
        "parent": run.parent,
        "origin": run.origin,
        "queue": run.queue,
        "priority": run.priority,
        "tags": dict(run.tags),
        "encrypted_with": encrypted_with(run),
    }
    if whole:
        value |= {
            "input": arguments(run),
            "result": plain(run.output),
            "error": error_as_json(run.error),
            "continued_as": run.continued_as,
            "blocked": list(sorted_wakes(run.wakes).not_ready),
            "progress": plain(report_in(run.progress)),
        }
    return value


def encrypted_with(run: Run) -> str | None:
    """Return the id of the key that a run is encrypted with, or None."""
    from ..errors import EncryptionError
    from ..records.keys import key_id

    try:
        return key_id(run.data_key) if run.data_key else None
    except EncryptionError:
        return "?"


def error_line(error: ErrorInfo) -> str:
    """Return an error on one line; Keepstep's own classes appear without their module."""
    return error.summary


def frame_lines(error: ErrorInfo | None) -> str:
    """Return the frames of the user's code that led to an error, as in a traceback."""
    return "\n".join(str(frame) for frame in error.frames) if error is not None else ""


def count(number: int, what: str) -> str:
    """Return a number with its noun, in the singular or the plural."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def error_as_json(error: ErrorInfo | None) -> dict[str, Any] | None:
    """Return an error for a program."""
    if error is None:
        return None
    return {
        "type": error.type,
        "message": error.message,
        "class": error.error_class,
        "code": error.code,
        "attempt": error.attempt,
        "id": error.id,
        "caused_by": list(error.caused_by),
        "frames": [frame._asdict() for frame in error.frames],
        "traceback": error.traceback,
    }


def checkpoint_as_json(one: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint for a program."""
    return {
        "seq": one.seq,
        "kind": one.kind.value,
        "step": one.step,
        "outcome": one.outcome.value,
        "attempt": one.attempt,
        "trigger": one.trigger.value,
        "worker": one.worker,
        "agent": one.agent,
        "stage": one.stage,
        "started_at": iso(one.started_at),
        "finished_at": iso(one.finished_at),
        "value": plain(one.value),
        "input": step_input(one),
        "input_bytes": one.data.get("input_bytes"),
        "error": error_as_json(one.error),
        "retry_at": iso(one.retry_at),
    }


def names(agent: str | None, stage: str | None) -> str:
    """Return the stage and the agent that a workflow has named, or ""."""
    return ", ".join(f"{what} {one_line(name)}" for what, name in (("stage", stage), ("agent", agent)) if name)


def step_input(one: Checkpoint) -> Any:
    """Return the recorded arguments of a step by name; None if there are none."""
    stored = one.data.get("input")
    return plain(stored.encode()) if isinstance(stored, str) else None


def worker_name(worker: WorkerInfo) -> str:
    """Return a worker's id and place."""
    where = f"pid {worker.pid}" + (f" on {worker.host}" if worker.host else "")
    return f"{worker.id} ({where})"


def worker_json(worker: WorkerInfo) -> dict[str, Any]:
    """Return a worker as plain data, for a program."""
    return {
        "id": worker.id,
        "host": worker.host,
        "pid": worker.pid,
        "alive": worker.alive,
        "leases": worker.leases,
        "workflows": list(worker.known),
        "queues": None if worker.queues is None else list(worker.queues),
        "started_at": iso(worker.started_at),
        "renewed_at": iso(worker.renewed_at),
        "drain_at": iso(worker.drain_at),
    }


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
