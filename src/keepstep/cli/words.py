"""How things are shown to a person: times, durations, values, tables, and the words for what a run is doing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ..model import Checkpoint, ErrorInfo, Run, Status
from ..model.signal import BLOCKED, CHILD, GO, RESERVED, RESOLVE, stop_at

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
    """Text that cannot steer a terminal: what a run stored is shown, never obeyed."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else f"\\x{ord(c):02x}" for c in text)


def one_line(text: str, width: int = 0) -> str:
    """Text on one line, cut at `width` if that is given."""
    flat = " ".join(text.split())
    flat = printable(flat[: width + 1] if width else flat, lines=False)
    return flat if not width or len(flat) <= width else flat[: max(width - 1, 0)] + "…"


def marks() -> dict[str, str]:
    """The signs before a line, as far as the terminal's encoding has them."""
    signs = {"done": "✓", "failed": "✗", "waiting": "…", "note": "·", "cancelled": "−"}
    try:
        "".join(signs.values()).encode(getattr(sys.stderr, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return {"done": "+", "failed": "x", "waiting": "~", "note": "-", "cancelled": "-"}
    return signs


def coloured(status: Status) -> str:
    """A status in its colour."""
    return click.style(status.value, fg=COLOURS[status])


def step_name(key: str) -> str:
    """A step's key as a person says it: the number of the call only from the second call on."""
    return key.removesuffix("#1")


# -- time --------------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """A time span as a person says it."""
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
    """How long ago, or how long from now."""
    if at is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    if abs(seconds) < 1:
        return "now"
    return f"{duration(seconds)} ago" if seconds > 0 else f"in {duration(-seconds)}"


def local(at: datetime | None) -> str:
    """An instant on the clock of the person who looks."""
    return "-" if at is None else at.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def iso(at: datetime | None) -> str | None:
    """An instant for a program."""
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")


# -- values ------------------------------------------------------------------------------------------------------------


def plain(stored: bytes | None) -> Any:
    """A stored value as plain JSON: a tuple or set as a list, an object as its fields."""
    if stored is None:
        return None
    try:
        return _untagged(json.loads(bytes(stored).decode()))
    except (ValueError, RecursionError):
        return bytes(stored).decode("utf-8", "replace")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("$"), str):
        inner = value.get("v")
        if value["$"] == "dict" and isinstance(inner, list) and all(map(_is_pair, inner)):
            return {_key(key): _untagged(item) for key, item in inner}
        return _untagged(inner)
    return {key: _untagged(item) for key, item in value.items()}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


def _key(key: Any) -> str:
    simple = _untagged(key)
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def arguments(run: Run) -> dict[str, Any]:
    """What a run was started with."""
    value = plain(run.input)
    if isinstance(value, list) and [type(part) for part in value] == [list, dict]:
        return {"args": value[0], "kwargs": value[1]}
    return {"args": [], "kwargs": {}}


#: A value or an error in a timeline is cut to this, unless the whole of it is asked for.
BRIEF = 200


def brief(value: Any, width: int = 60) -> str:
    """A value on one line."""
    return one_line(json.dumps(value, ensure_ascii=False), width)


# -- runs --------------------------------------------------------------------------------------------------------------


def awaited(run: Run) -> list[str]:
    """The signals of its own that a parked run waits for."""
    return [name for name in run.wakes if not name.startswith(RESERVED)]


def in_doubt(run: Run) -> list[str]:
    """The steps of a parked run that wait for a person to say what became of them."""
    return [name.removeprefix(f"{RESOLVE}:") for name in run.wakes if name.startswith(f"{RESOLVE}:")]


def stops(run: Run) -> list[str]:
    """The breakpoints that a parked run waits at."""
    return [stop_at(name) for name in run.wakes if name.startswith(GO)]


def blocked(run: Run) -> list[str]:
    """The steps of a parked run that are not ready."""
    return [name.removeprefix(BLOCKED) for name in run.wakes if name.startswith(BLOCKED)]


def waits_for(run: Run) -> str:
    """What moves a run on, in words."""
    if run.status is Status.SET_ASIDE:
        return "a person: keepstep retry or cancel"
    if run.status is Status.PAUSED:
        return "a person: keepstep resume"
    if run.status is Status.QUEUED:
        return _time_of(run) or "a worker"
    if run.status is not Status.WAITING:
        return ""
    if run.due_at is not None and not _time_of(run):
        return "a worker"
    waits = [f"signal {name}" for name in awaited(run)]
    waits += [f"child {step_name(name.removeprefix(CHILD))}" for name in run.wakes if name.startswith(CHILD)]
    waits += [f"a decision on {step_name(step)}" for step in in_doubt(run)]
    waits += [f"{step_name(step)} to be ready" for step in blocked(run)]
    waits += [f"a person at the breakpoint {stop}: keepstep resume" for stop in stops(run)]
    if run.due_at is not None:
        waits.append(_time_of(run))
    return " or ".join(waits)


def _time_of(run: Run) -> str:
    """The time that a run waits for, if it lies ahead."""
    ahead = (run.due_at - datetime.now(UTC)).total_seconds() if run.due_at is not None else 0.0
    return f"{duration(ahead)} to pass" if ahead > 0 else ""


def run_as_json(run: Run, *, whole: bool = False) -> dict[str, Any]:
    """A run for a program; `whole` with its input, output and error."""
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
            "blocked": blocked(run),
            "progress": plain(run.progress),
        }
    return value


def encrypted_with(run: Run) -> str | None:
    """The id of the key that a run is encrypted with, if it is."""
    from ..errors import EncryptionError
    from ..stores.keys import key_id

    try:
        return key_id(run.data_key) if run.data_key else None
    except EncryptionError:
        return "?"


def error_line(error: ErrorInfo) -> str:
    """An error as one says it: our own classes without the module they are in."""
    return f"{error.type.removeprefix('keepstep.errors.').removeprefix('keepstep.')}: {error.message}"


def count(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def error_as_json(error: ErrorInfo | None) -> dict[str, Any] | None:
    """An error for a program."""
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
        "traceback": error.traceback,
    }


def checkpoint_as_json(one: Checkpoint) -> dict[str, Any]:
    """A checkpoint for a program."""
    return {
        "seq": one.seq,
        "kind": one.kind.value,
        "step": one.step,
        "outcome": one.outcome.value,
        "attempt": one.attempt,
        "trigger": one.trigger.value,
        "worker": one.worker,
        "started_at": iso(one.started_at),
        "finished_at": iso(one.finished_at),
        "value": plain(one.value),
        "error": error_as_json(one.error),
        "retry_at": iso(one.retry_at),
    }


def worker_name(worker: WorkerInfo) -> str:
    """A worker, and where it runs."""
    where = f"pid {worker.pid}" + (f" on {worker.host}" if worker.host else "")
    return f"{worker.id} ({where})"


#: No column of a table is cut to less than this.
_NARROWEST = 12


# -- tables ------------------------------------------------------------------------------------------------------------


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, cut: bool = True) -> str:
    """Columns side by side; on a terminal all but the first are cut to its width, in a pipe nothing is."""
    body = [[*row] for row in rows]
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(heads, *body, strict=True)]
    if cut and sys.stdout.isatty():
        _narrow(widths, _columns() - 2 * (len(widths) - 1))
        body = [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in body]
    return "\n".join([click.style(_joined(heads, widths), bold=True), *(_joined(row, widths) for row in body)])


def on_terminal(line: str) -> str:
    """A line as wide as the terminal allows; in a pipe it is left as it is."""
    return _cut(line, _columns()) if sys.stdout.isatty() else line


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size().columns


def _narrow(widths: list[int], room: int) -> None:
    """Make columns narrower until all fit, the last ones first. The first, which names the thing, keeps its width."""
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
    """Names and values, one per line, those without a value left out."""
    kept = [(name, value) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    indent = "\n" + " " * (width + 2)
    return "\n".join(
        f"{click.style(name.ljust(width), dim=True)}  {value.replace(chr(10), indent)}" for name, value in kept
    )
