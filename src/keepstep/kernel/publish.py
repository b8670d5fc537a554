"""Records that a run writes without waiting: decisions, patches, published values, tokens, progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..checks import check_name
from ..errors import DefinitionError
from ..model import Kind, Signal
from ..ports import CURRENT, Answer, Send
from ..records.data import Data, DecisionData, PatchData, PublishedData, data_of, new_data
from ..records.record import FORMAT_WITH_WAITS, Record
from ..values import VALUES
from ..workflows.call import Call
from .calls import Branch, DurableCall, current_branch
from .replay import PATCH

if TYPE_CHECKING:
    from .attempt import Attempt
    from .driver import RunDriver

T = TypeVar("T")
U = TypeVar("U")

log = logging.getLogger("keepstep")


def note(
    branch: Branch,
    kind: Kind,
    key: str,
    value: bytes | None,
    data: Data | None = None,
    *,
    signal: Signal | None = None,
) -> None:
    """Record something that the code does not wait for; on replay it is there already.

    The same commit sends the `signal`, unless its run has ended.
    """
    run = branch.run
    if run.stop.detached:
        return
    if run.take_note(key) is not None:
        return
    record = Record(run.id, kind.value, step=key, worker=run.worker, data=data)
    if kind is Kind.PATCH and data is not None:
        record.format = FORMAT_WITH_WAITS  # older versions take any such record for an applied patch
    record.finished_at = run.time()
    record.asked = run.last_delivered
    if value is not None:
        record.value = msgspec.Raw(value)
    if branch.names is not None:
        branch.names.put_on(record)
    write: Callable[[Record], None] = run.append if signal is None else partial(_append_and_send, run, signal)
    if threading.get_ident() == run.thread_id:
        write(record)
    else:  # a plain def workflow writes from its own thread, before its next call
        run.loop.call_soon_threadsafe(write, record)


def _append_and_send(run: RunDriver, signal: Signal, record: Record) -> None:
    def refused(answer: Answer) -> None:  # the other run has no key here, so it cannot be told
        log.error("run %s: %s does not reach run %s: %s", run.id, record.step, signal.run, answer.error)
        run.append(record)

    def then(_: Answer) -> None:
        run.host.signalled(signal.run)

    run.append_special(record, {"sends": [Send(signal, optional=True)]}, then, refused)


def decided(branch: Branch, key: str) -> int | None:
    """Return the recorded decision which of several came first, or None."""
    recorded = branch.run.notes.get(key)
    return None if recorded is None else data_of(recorded, DecisionData).get("choice")


def decide(branch: Branch, key: str, choice: int) -> None:
    """Record the decision which of several came first; on replay it must be the same."""
    before = decided(branch, key)
    if before is not None and before != choice:
        branch.run.mismatch(f"{key} was decided as {before} and now as {choice}")
    note(branch, Kind.DECISION, key, None, new_data(DecisionData, choice=choice))


def patched(name: str) -> bool:
    """Whether this run takes the new path of a change: False if its history is older than the change.

    The answer is decided once per run and name, and recorded.
    """
    branch = current_branch("patched")
    check_name(name, "patch")
    run = branch.run
    taken = run.patches.get(name)
    if taken is None:
        taken = not _is_beyond(run)
        run.patch_decided(name, taken=taken)
        note(branch, Kind.PATCH, f"{PATCH}{name}", None, None if taken else new_data(PatchData, choice=0))
    return taken


def _is_beyond(run: RunDriver) -> bool:
    """Whether the history holds anything that the code has not reached yet, in any branch.

    A run with the patch records everything later than this after its record of the patch. A record without that one
    before it was therefore made by code that had passed this place before the change.
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
    """Whether the workflow's own code made a note, not a step's body."""
    return record.kind != Kind.PUBLISHED or record.step.rpartition("/")[2].startswith("publish:")


def publish(key: str, value: Any) -> None:
    """Show a value of the run to readers: `handle.published()`, the command line, the web."""
    scope = CURRENT.get()
    if scope is None:
        return
    check_name(key, "published")
    data = VALUES.encode_shown(value, f"published {key!r}")
    if scope.in_step:
        scope.publish(key, data)
        return
    scope.run.host.redaction.check(data, key, "published")
    scope.run.was_published(key, data)
    note(scope, Kind.PUBLISHED, scope.key(f"publish:{key}"), data, new_data(PublishedData, key=key))


def emit(value: Any) -> None:
    """Stream a token to everyone who watches the run; a repeated attempt emits its tokens again, with its number."""
    scope = CURRENT.get()
    if scope is None:
        return
    if not scope.in_step:
        key = scope.key("emit")
        data = scope.run.host.redaction.token(value, VALUES, "emitted", key)
        note(scope, Kind.EMITTED, key, b"[" + data + b"]")
        return
    scope.emit(value)


def progress(fraction: float, message: str = "") -> None:
    """Report how far the running step is; readers see the latest report."""
    scope = CURRENT.get()
    if scope is None:
        return
    message = scope.run.host.redaction.redact(message)
    fraction = max(0.0, min(1.0, float(fraction)))
    if scope.in_step:
        scope.report_progress(fraction, message)
    else:
        scope.run.report_progress({"fraction": fraction, "message": message, "step": ""})


def save_progress(value: Any) -> None:
    """Save how far the step has come, for its next attempt: after a failure, a crash, or on another worker.

    The newest value replaces the one before. It is written at most twice a second, so a crash may lose the last half
    second.
    """
    scope = CURRENT.get()
    if scope is not None:
        _step_of(scope, "save_progress").save_progress(value)


def saved_progress(default: Any = None) -> Any:
    """Return the newest value that this step has saved with `ks.save_progress`, in this attempt or an earlier one."""
    scope = CURRENT.get()
    return default if scope is None else _step_of(scope, "saved_progress").saved_progress(default)


def _step_of(scope: Any, verb: str) -> Attempt:
    if not scope.in_step:
        raise DefinitionError(f"ks.{verb} is called in the workflow itself; call it in the step whose progress it is")
    return scope  # type: ignore[no-any-return]


class CheckpointCall(DurableCall[None]):
    """A point at which everything before it is durable."""

    __slots__ = ()

    def begin_live(self) -> None:
        self.run.append_special(self.record(Kind.BARRIER, trigger="manual"), {}, call=self)


def checkpoint() -> Call[None]:
    """Make everything so far durable now, whatever the workflow's durability."""
    return CheckpointCall(current_branch("checkpoint"), "checkpoint", "")
