"""What a run writes down without waiting for it: decisions, patches, published values, tokens, progress."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..model import Kind
from ..model.ids import check_name
from ..ports import CURRENT
from ..stores.records import FORMAT_WITH_WAITS, Record
from ..values import VALUES
from ..workflows.definition import Call
from . import attempt as attempts
from .branch import Branch, DurableCall, in_workflow
from .history import PATCH

if TYPE_CHECKING:
    from .attempt import Attempt
    from .context import RunContext

T = TypeVar("T")
U = TypeVar("U")


def note(branch: Branch, kind: Kind, key: str, value: bytes | None, data: dict[str, Any] | None = None) -> None:
    """Record something that the code does not wait for; on replay it is there already."""
    run = branch.run
    if run.detached:
        return
    recorded = run.notes.pop(key, None)
    if recorded is not None:
        return
    record = Record(run.id, kind.value, step=key, worker=run.worker, data=data)
    if kind is Kind.PATCH and data is not None:
        record.format = FORMAT_WITH_WAITS  # older versions take any such record for a patch that was taken
    record.finished_at = run.time()
    record.asked = run.told
    if value is not None:
        record.value = msgspec.Raw(value)
    if threading.get_ident() == run.thread_id:
        run.append(record)
    else:  # a plain def workflow writes from its own thread; what it asks next comes after this
        run.loop.call_soon_threadsafe(run.append, record)


def decided(branch: Branch, key: str) -> int | None:
    """Which of several came first, if that is recorded."""
    recorded = branch.run.notes.get(key)
    return None if recorded is None else (recorded.data or {}).get("choice")


def decide(branch: Branch, key: str, choice: int) -> None:
    """Record which of several came first; on replay it must be the same."""
    before = decided(branch, key)
    if before is not None and before != choice:
        branch.run.mismatch(f"{key} was decided as {before} and now as {choice}")
    note(branch, Kind.DECISION, key, None, {"choice": choice})


def patched(name: str) -> bool:
    """Whether this run takes the new path of a change: True from the change on, False where its history is older.

    It is decided once per run and name, and recorded.
    """
    branch = in_workflow("patched")
    check_name(name, "patch")
    run = branch.run
    taken = run.patches.get(name)
    if taken is None:
        run.patches[name] = taken = not _is_beyond(run)
        note(branch, Kind.PATCH, f"{PATCH}{name}", None, None if taken else {"choice": 0})
    return taken


def _is_beyond(run: RunContext) -> bool:
    """Whether the history holds anything that the code has not come to yet, in whatever branch.

    Everything that a run with the patch records later than this comes after its record of the patch. So what is there
    without that record was recorded by code that had passed this place before it was changed.
    """
    history = run.history
    if history is None:
        return False
    if any(entry.lies_ahead() for entry in tuple(history.entries.values())):
        return True
    held = {call.key for call in tuple(run.held)}
    if run.wait_starts or any(key not in held for key in (*run.tried, *run.marks)):
        return True
    return any(_is_of_the_code(one) for one in tuple(run.notes.values()))


def _is_of_the_code(record: Record) -> bool:
    """Whether the workflow's own code has noted something, and not a step's body."""
    return record.kind != Kind.PUBLISHED or record.step.rpartition("/")[2].startswith("publish:")


def publish(key: str, value: Any) -> None:
    """Show a value of the run to readers: `handle.published()`, the command line, the web."""
    scope = CURRENT.get()
    if scope is None:
        return
    check_name(key, "published")
    data = VALUES.encode(value, f"published {key!r}")
    scope.run.engine.censor.check(data, key, "published")
    if scope.in_step:
        record = Record(scope.run.id, Kind.PUBLISHED.value, step=scope.key, worker=scope.run.worker, data={"key": key})
        record.value = msgspec.Raw(data)
        _from_step(scope, record)
    else:
        note(scope, Kind.PUBLISHED, scope.key(f"publish:{key}"), data, {"key": key})


def _from_step(scope: Attempt, record: Record) -> None:
    def append() -> None:
        record.finished_at = scope.run.time()
        scope.run.append(record)

    scope.run.loop.call_soon_threadsafe(append)


def emit(value: Any) -> None:
    """Stream a token to whoever watches the run; tokens of an attempt that is repeated come again, with its number."""
    scope = CURRENT.get()
    if scope is None:
        return
    if not scope.in_step:
        key = scope.key("emit")
        censor = scope.run.engine.censor
        data = VALUES.encode([censor.redact(value) if isinstance(value, str) else value], "emitted")
        censor.check(data, key, "token of step")
        note(scope, Kind.EMITTED, key, data)
        return
    attempts.emit(scope, value)


def progress(fraction: float, message: str = "") -> None:
    """Report how far the running step is; readers see the latest report."""
    scope = CURRENT.get()
    if scope is None or scope.run.engine.worker is None:
        return
    step = scope.key if scope.in_step else ""
    message = scope.run.engine.censor.redact(message)
    told = {"fraction": max(0.0, min(1.0, float(fraction))), "message": message, "step": step}
    scope.run.engine.worker.report_progress(scope.run.id, msgspec.json.encode(told))


class CheckpointCall(DurableCall[None]):
    """A point at which everything before it is durable."""

    __slots__ = ()

    def begin_live(self) -> None:
        self.run.append_special(self.record(Kind.BARRIER, trigger="manual"), {}, call=self)


def checkpoint() -> Call[None]:
    """Make everything so far durable now, whatever the workflow's durability."""
    return CheckpointCall(in_workflow("checkpoint"), "checkpoint", "")
