"""Effects of a run on other runs: starting, awaiting and signalling them, and continuing as a new run."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import asdict
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from ..checks import check_id, check_name, check_run_id, seconds_of
from ..errors import (
    AlreadyFinished,
    DefinitionError,
    NotSerializable,
    RunNotFound,
    SignalsFull,
    StepFailed,
    StoreError,
)
from ..model import FINISHED, ErrorInfo, Kind, Outcome, Run, Signal, Status
from ..model.frames import add_frames
from ..model.ids import MAX_ID, child_id, new_id, seed_in
from ..model.series import names_in_word
from ..model.signal import CANCEL, CHILD, MAX_UNREAD, WAKES_DELAYED
from ..policies.queue import queue_name
from ..ports import Answer, Send, Verdict, instant
from ..records.data import ChildData, Data, StepCompletedData, data_of, new_data
from ..records.record import Record, StoredError
from ..values import VALUES
from ..workflows.call import Call
from ..workflows.definition import Bound, Workflow
from ..workflows.options import check_options, deadline_at
from ..workflows.schema import as_annotated
from .attempt import idempotency_key
from .call_states import ContinueAs
from .calls import Branch, DurableCall, current_branch
from .recorded_errors import own_error
from .replay import as_ended
from .steering import cancel_child
from .tracing import traceparent_from
from .waits import SignalWait
from .wakeups import end_wait

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
U = TypeVar("U")


class SendCall(DurableCall[T]):
    """A signal that a workflow sends to another run, in its own commit."""

    __slots__ = ("name", "payload", "target")

    def __init__(self, branch: Branch, target: str, name: str, payload: bytes, verb: str = "signal") -> None:
        self.target, self.name, self.payload = target, name, payload
        super().__init__(branch, f"{verb}:{name}", VALUES.digest((target, name, payload), verb))

    def begin_live(self) -> None:
        self._send_to(self.target)

    def message(self, signal_id: str) -> tuple[bytes, bytes | None]:
        """Return the payload of the signal, and the value of the record."""
        return self.payload, None

    def _send_to(self, target: str) -> None:
        run = self.run
        signal_id = f"{run.id}:{self.key}:{run.generation}"
        payload, value = self.message(signal_id)
        signal = Signal(target, self.name, payload, signal_id, f"run {run.id}", run.time())
        data = new_data(StepCompletedData, to=target, signal_name=self.name)
        record = self.record(Kind.STEP_COMPLETED, value, attempt=1, data=data)
        refused = partial(self._refused, target)
        run.append_special(
            record, {"sends": [Send(signal, room=MAX_UNREAD)]}, partial(self._sent, target), refused, self
        )

    def _sent(self, target: str, _: Answer) -> None:
        self.run.host.signalled(target)

    def _refused(self, target: str, answer: Answer) -> None:
        if answer.verdict is Verdict.FINISHED:
            self.run.host.background(self._send_on(target, answer))
        else:
            self._fail(answer)

    async def _send_on(self, target: str, answer: Answer) -> None:
        """Send the signal to the successor of a run that has ended, if there is one."""
        run, host = self.run, self.run.host
        run.work_began()  # the run must not be parked before the answer
        try:
            newest = await host.newest_of_series(target)
            if run.stop.detached:
                return
            if newest is not None and newest.id != target:
                self._send_to(newest.id)
            else:
                self._fail(answer)
        except StoreError as error:
            run.halt(error)
        finally:
            run.work_ended()
            run.watch()

    def _fail(self, answer: Answer) -> None:
        if answer.verdict is Verdict.NOT_FOUND:
            kind, text = "RunNotFound", f"no run {self.target!r} exists"
        elif answer.verdict is Verdict.FULL:
            kind, text = "SignalsFull", f"run {self.target!r} has {MAX_UNREAD:,} unread signals"
        elif answer.error is not None:
            kind, text = type(answer.error).__name__, str(answer.error)
        else:
            kind, text = "AlreadyFinished", f"run {self.target!r} has already finished"
        error = StoredError(f"keepstep.{kind}", text, "permanent", id=new_id("error"))
        self.run.append(self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error), self)

    def failure(self, record: Record) -> BaseException:
        error = record.error
        if error is not None and error.type == "keepstep.RunNotFound":
            return RunNotFound(error.message, self.target)
        if error is not None and error.type == "keepstep.SignalsFull":
            return SignalsFull(error.message, self.target)
        if error is not None and error.type != "keepstep.AlreadyFinished":
            return StepFailed(error.message, self.key, error.info(), record.seq)
        return AlreadyFinished(error.message if error is not None else "", self.target)


def signal(run_id: str, name: str, payload: Any = True) -> Call[None]:
    """Send a signal to another run, exactly once, from a workflow."""
    check_id(run_id)
    check_name(name, "signal")
    branch = current_branch("signal")
    data = VALUES.encode_shown(payload, f"signal {name!r}")
    branch.run.host.redaction.check(data, name, "signal")
    return SendCall[None](branch, run_id, name, data)


class ChildRun(Generic[T_co]):
    """A child run of a workflow: await its result, signal it or cancel it."""

    def __init__(
        self,
        branch: Branch,
        run_id: str,
        key: str,
        workflow: Workflow[..., Any],
        *,
        name: str = "",
        payload: bytes = b"",
    ) -> None:
        self.id = run_id
        self._branch, self._key, self._workflow = branch, key, workflow
        self._name = name or workflow.name
        self._input = payload  # as stored

    def result(self) -> Call[T_co]:
        """Return a call to await in async code, and the child's result in plain def code.

        A type checker is told of the call. In plain code, `ks.start(...).result()` has the right type.
        """
        end = ChildResult(current_branch("start"), self)
        return end if self._branch.run.thread.here() is None else end.result()

    def __await__(self) -> Generator[Any, Any, T_co]:
        return ChildResult(current_branch("start"), self).__await__()

    def signal(self, name: str, payload: Any = True) -> Call[None]:
        """Send the child a signal."""
        return signal(self.id, name, payload)

    def cancel(self) -> Call[None]:
        """Ask the child to stop."""
        return SendCall[None](current_branch("cancel"), self.id, CANCEL, b'{"reason":"cancelled by its parent"}')

    def __repr__(self) -> str:
        return f"<child run {self.id}>"


class StartCall(DurableCall[ChildRun[T_co]]):
    """The start of a child, in its parent's commit: exactly one child per call across crashes."""

    __slots__ = ("begun", "end", "input", "name", "options", "workflow")

    def __init__(
        self,
        branch: Branch,
        workflow: Workflow[..., Any],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        options: dict[str, Any],
        name: str = "",
    ) -> None:
        workflow.check_arguments(*given)
        self.input = branch.run.host.redaction.input_of(workflow, *given)
        self.workflow, self.options = workflow, options
        self.name = name or workflow.name  # a step of a graph or dag may have another name
        self.begun = ""  # the child that is being created, if its id is unique to this call
        self.end: ChildResult | None = None  # the wait of a plain def workflow for the child's end
        asked = _as_given(workflow, *given) or self.input
        super().__init__(branch, self.name, VALUES.digest((asked, options.get("run_id")), "child"))
        self.run.children.called(self.key, self)
        if workflow.undo is not None:
            branch.can_undo(self.key, workflow)

    def child(self) -> ChildRun[T_co]:
        """Start the child in a plain def workflow, and return its handle."""
        return super().result()

    def result(self) -> T_co:  # type: ignore[override]  # not the child that an await gives
        """Start the child in a plain def workflow, unless that was done, and return its result."""
        child = self.child()
        if self.end is None:
            self.end = ChildResult(current_branch("start"), child)
        return self.end.result()  # type: ignore[no-any-return]

    def begin_live(self) -> None:
        run = self.run
        if self.branch.guard is not None and not self.branch.guard.admits(self):
            return
        given = self.options.get("run_id")
        child = given or child_id(run.id, self.key, run.generation)
        record = self.record(Kind.CHILD, attempt=1, data=new_data(ChildData, child=child))
        self.begun = "" if given else child
        made = partial(self._made, child)
        creates = [run.host.encryption.born(self._child(child))]
        run.append_special(record, {"creates": creates}, made, self._refused, self)

    def _child(self, child: str) -> Run:
        run, workflow = self.run, self.workflow
        at = run.time()
        delay = float(seconds_of(self.options.get("delay")) or 0.0)
        queue, key = self.options.get("queue") or "default", self.options.get("key")
        return Run(
            id=child,
            workflow=workflow.name,
            status=Status.QUEUED,
            created_at=at,
            created_by=f"run {run.id}",
            version=workflow.version,
            fingerprint=workflow.fingerprint,
            input=self.input,
            seed=seed_in(idempotency_key(run.seed, self.key, run.generation)[:16], workflow.module),
            parent=run.id,
            parent_key=self.key,
            queue=queue,
            priority=self.options.get("priority") or 0,
            key=key,
            holds=2 if key is not None and (queue, key) == (run.run.queue, run.run.key) else 0,
            tags=self.options.get("tags") or {},
            traceparent=traceparent_from(run.host.tracer, run.run),
            deadline_at=deadline_at(self.options.get("deadline"), at.timestamp()),
            due_at=instant(at.timestamp() + delay),
            wakes=WAKES_DELAYED if delay > 0 else (),
        )

    def _made(self, child: str, _: Answer) -> None:
        if self.branch.guard is not None:
            self.branch.guard.ended(self.key)
        self.run.children.started(self.key, child)
        self.run.host.claim_soon()

    def cancelled_by_code(self) -> None:
        super().cancelled_by_code()
        run = self.run
        if self.entry is not None and self.entry.child:
            run.children.started(self.key, self.entry.child)
        child = run.children.open.get(self.key) or self.begun
        if child and run.children.cancelled:  # it came after the cancel of the run, and nobody else refers to it
            cancel_child(run, child)

    def _refused(self, answer: Answer) -> None:
        text = (
            f"run id {answer.about!r} is taken by a run that {self.key!r} of run {self.run.id!r} did not start; "
            "give each child its own id, or omit run_id="
        )
        error = StoredError("keepstep.RunConflict", text, "permanent", id=new_id("error"))
        self.run.append(self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error), self)

    def decode(self, record: Record) -> ChildRun[T_co]:
        data = data_of(record, ChildData)
        child = data["child"]
        self.run.children.started(self.key, child)
        if data.get("renew"):
            self._renew(child)
        return self.handle(self.branch, child)

    def handle(self, branch: Branch, child: str) -> ChildRun[T_co]:
        """Return the child, for code in this branch."""
        payload = b"" if self.workflow.undo is None else self.input
        return ChildRun(branch, child, self.key, self.workflow, name=self.name, payload=payload)

    def _renew(self, child: str) -> None:
        """Create the fork's own child where its original had one in progress, if that was not done before.

        Only while no outcome of it was delivered: a child that has ended may have been removed since.
        """
        run = self.run
        received = any(is_word_of(one.payload, child) for one in run.inbox.named(f"{CHILD}{self.key}"))
        entries = () if run.history is None else run.history.entries.values()
        known = any(one.digest == child and not one.cancelled for one in entries)  # an abandoned wait does not count
        if not received and not known:
            creates = [run.host.encryption.born(self._child(child))]
            run.append_special(None, {"creates": creates, "progress": False}, partial(self._made, child))


class ChildResult(SignalWait):
    """The wait for a child's end."""

    __slots__ = ("child", "stale")

    #: The kind of its record.
    kind = Kind.CHILD

    def __init__(self, branch: Branch, child: ChildRun[Any]) -> None:
        self.child = child
        self.stale: float = 0  # signals up to this number are about an end that no longer counts
        name = f"{CHILD}{child._key}"  # noqa: SLF001
        super().__init__(branch, f"{child._name}.result", child.id, name)  # noqa: SLF001
        if child._workflow.undo is not None:  # noqa: SLF001
            undo = self.run.can_undo()
            undo.owners[self.key], undo.starts[self.key] = child._workflow, child._key  # noqa: SLF001

    def begin_live(self) -> None:
        key = self.child._key  # noqa: SLF001
        word = self.run.children.words.get(key)
        if word is not None:
            self._write(word, {})
            return
        if self.run.generation:
            self.stale = math.inf
            self.run.work_began()  # the run must not be parked before the store has answered
            self.run.host.background(self._ask_the_store())
        self._listen()

    def _listen(self) -> None:
        signal = self.run.inbox.take(self.name, self._is_mine)
        if signal is not None:
            self._come(signal)
        else:
            self.wait(None, self.name, self._come, mine=self._is_mine)

    async def _ask_the_store(self) -> None:
        """Read the child's current status after a person has let the parent go on; earlier signals may be outdated.

        A child that ended after its parent has sent its outcome to nobody, and a retried child has reported its earlier
        failure. While it has not ended, only future signals are about its end. A child that a command has claimed sends
        its outcome no second time if the command fails.
        """
        run, host = self.run, self.run.host
        seen = run.inbox.seen
        try:
            await host.journal.drained()  # the commit that creates the child may be pending
            child = await host.newest_of_series(self.child.id)
            child = child and await as_ended(host, child)
            if run.stop.detached or self not in run.waits:
                return
            end_wait(run, self)
            if child is not None and child.status not in FINISHED:
                self.stale = seen
                self._listen()
                return
            self.stale = 0
            self.received = received = run.inbox.take(self.name, self._is_mine)  # consumed, whatever it says
            if child is None and received is not None:
                self._come(received)
            else:
                self._write(_word_of(child, self.child.id), None if received is None else _read(received))
        except StoreError as error:
            run.halt(error)
        finally:
            run.work_ended()
            run.watch()

    def _is_mine(self, signal: Signal) -> bool:
        """Whether a signal is this child's outcome; a child superseded by a rewind uses the same name."""
        return signal.seq > self.stale and is_word_of(signal.payload, self.child.id)

    def _come(self, signal: Signal) -> None:
        self.received = signal
        self._write(signal.payload, _read(signal))

    def _write(self, word: bytes, data: Data | None) -> None:
        child = self.child
        if child._workflow.undo is not None and _says(word, Status.COMPLETED):  # noqa: SLF001
            data = {**(data or {}), "undo": True, "input": child._input.decode()}  # noqa: SLF001
        self.run.append(self.record(self.kind, word, data=data), self)

    def decode(self, record: Record) -> Any:
        return self.take_in(record, self.read(record))

    def read(self, record: Record) -> tuple[_Word, Any]:
        """Return the outcome that the child sent, and its result."""
        word = msgspec.json.decode(bytes(record.value), type=_Word)  # type: ignore[arg-type]
        if word.status != Status.COMPLETED:
            return word, None
        value = b"null" if word.value is msgspec.UNSET else bytes(word.value)
        workflow = self.child._workflow  # noqa: SLF001
        result = workflow.values.decode(value, f"child {self.child.id!r}: result")
        edited = data_of(record, ChildData).get("act") == "edit"
        where = f"the given result of child {self.child.id!r}"
        return word, as_annotated(result, workflow.hints().get("return"), where) if edited else result

    def take_in(self, record: Record, value: tuple[_Word, Any]) -> Any:
        key = self.child._key  # noqa: SLF001
        self.run.children.ended(key, bytes(record.value))  # type: ignore[arg-type]
        word, result = value
        if word.status == Status.COMPLETED:
            return result
        info = word.error.info() if word.error is not None else None
        detail = f": {info.summary}" if info is not None else ""
        self.error = StepFailed(f"child run {self.child.id!r} {word.status}{detail}", self.key, info, record.seq)
        if info is not None:
            add_frames(self.error, info.frames)
        if word.root is not None:
            self.error.root = word.root.info()
        if word.value is not msgspec.UNSET and word.status == Status.FAILED:
            self.error.__cause__ = own_error(bytes(word.value), self.child._workflow.values, self.key)  # noqa: SLF001
        return None


def _read(signal: Signal) -> Data:
    """Return the record data for the signal that was read; the child's spending counts once."""
    word = msgspec.json.decode(signal.payload, type=_Word)
    if not word.spent:
        return new_data(ChildData, signal=signal.seq)
    spent = {**word.spent, "models": word.models} if word.models else word.spent
    return new_data(ChildData, signal=signal.seq, spent=spent)


class _Word(msgspec.Struct):
    status: str
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: StoredError | None = None
    root: StoredError | None = None
    spent: dict[str, float] | None = None
    models: dict[str, tuple[float, int]] | None = None  # the part of `spent` that models account for
    begun: bool = True  # whether a cancelled child has done anything


def root_in(word: bytes) -> ErrorInfo | None:
    """Return the error behind the failure in a child's outcome; None if it did not fail."""
    outcome = msgspec.json.decode(word, type=_Word)
    error = outcome.root or outcome.error
    return None if error is None else error.info()


def _word_of(child: Run | None, child_id: str) -> bytes:
    """Return the outcome that an ended or removed child would send."""
    word: dict[str, Any] = {"status": Status.FAILED.value, "child": child_id}
    if child is None:
        word["error"] = StoredError("keepstep.RunNotFound", f"child run {child_id!r} was removed", "permanent")
    else:
        word = {"status": child.status.value, **names_in_word(child)}
        if child.output is not None:
            word["value"] = msgspec.Raw(child.output)
        if child.error is not None:
            word["error"] = StoredError(**asdict(child.error))
    return msgspec.json.encode(word)


class _Teller(msgspec.Struct):
    """The sender of a child's outcome: the run that was started, and the one that ended, which may be its successor."""

    child: str = ""
    run: str = ""
    status: str = ""


_teller = msgspec.json.Decoder(_Teller).decode


def is_word_of(word: bytes, child: str) -> bool:
    """Whether an outcome was sent by this child or a successor of it."""
    try:
        events = _teller(word)
    except (msgspec.MsgspecError, ValueError):
        return True  # damage is reported on delivery
    if not events.child or events.child == child:
        return True
    return not events.run and _older_series(events.child) == _older_series(child)


def says_cancelled(word: bytes) -> bool:
    """Whether an outcome says that the child was cancelled."""
    return _says(word, Status.CANCELLED)


def _says(word: bytes, status: Status) -> bool:
    """Whether an outcome has this status."""
    try:
        return _teller(word).status == status
    except (msgspec.MsgspecError, ValueError):
        return False  # damage is reported on delivery


def _older_series(run_id: str) -> str:
    """Return the common part of a series' ids in outcomes of earlier versions, which name only the run that ended."""
    base, _, number = run_id.rpartition("~")
    return (base if base and number.isdecimal() else run_id)[: MAX_ID - 12]


_CHILD_OPTIONS: tuple[str, ...] = ("run_id", "queue", "key", "priority", "delay", "deadline", "tags")


def start(workflow: Workflow[..., U] | Bound[U], *args: Any, **kwargs: Any) -> StartCall[U]:
    """Start a child run from a workflow: exactly one per call, across crashes. Cancelling the parent cancels it.

    | option | means |
    |---|---|
    | `run_id` | the id of the child; derived from the parent's by default |
    | `queue`, `key` | the queue of the child, and whom it is for; workers may serve some queues only |
    | `priority` | runs of a higher priority are claimed first; 0 by default |
    | `delay` | seconds to wait before the child starts |
    | `deadline` | seconds for the child, or a time at which it fails |
    | `tags` | texts by name, to search runs by |

    All other arguments are those of the `workflow`.
    """
    branch = current_branch("start")
    options = {name: kwargs.pop(name) for name in _CHILD_OPTIONS if name in kwargs}
    if isinstance(workflow, Bound):
        args, kwargs, workflow = workflow.args, workflow.kwargs, workflow.workflow
    if not isinstance(workflow, Workflow):
        raise DefinitionError(f"workflow must be a workflow, got {workflow!r}; decorate it with @ks.workflow")
    if "dedupe" in kwargs:
        raise DefinitionError("dedupe= is for runs started from outside; a child is started once for each call anyway")
    if "queue" in options:
        options["queue"] = queue_name(options["queue"])
    if options.get("run_id") is not None:
        check_run_id(options["run_id"])
    if workflow.starting:
        own = {name: value for name, value in workflow.starting.items() if name in _CHILD_OPTIONS}
        options = {**own, **options, "tags": {**own.get("tags", {}), **(options.get("tags") or {})}}
    plain = (options.get("queue", "default"), options.get("priority", 0), options.get("delay", 0.0))
    check_options(*plain, options.get("key"))
    deadline_at(options.get("deadline"), branch.run.host.clock.now())  # refused here, not when it is started
    options["tags"] = branch.run.host.redaction.tags(options.get("tags"))
    return StartCall(branch, workflow, (args, kwargs), options)


def _as_given(workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the arguments of a child as its parent gave them, if they are converted; empty for a graph.

    A conversion may make other values on each replay, such as a model's default from a factory.
    """
    if workflow.carries_state or not workflow.types.converts:
        return b""
    try:
        return workflow.values.encode([[*args], kwargs])
    except NotSerializable:
        return b""  # only its converted form can be stored


def continue_as(*args: Any, **kwargs: Any) -> NoReturn:
    """End this run and start its successor with these arguments, in one commit; unread signals move to it."""
    branch = current_branch("continue_as")
    run = branch.run
    run.workflow.check_arguments(args, kwargs)
    raise ContinueAs(run.host.redaction.input_of(run.workflow, args, kwargs))
