"""What a run does to other runs: start them, wait for them, signal them, and continue as a new one."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from ..errors import AlreadyFinished, DefinitionError, RunNotFound, StepFailed, StoreError
from ..model import FINISHED, Kind, Outcome, Run, Signal, Status
from ..model.ids import MAX_ID, check_id, check_name, child_id, new_id, seed_in
from ..model.series import names_in_word
from ..model.signal import CANCEL, CHILD, WAKES_DELAYED
from ..ports import Answer, Send, Verdict, instant
from ..stores.records import Record, StoredError
from ..values import VALUES
from ..workflows.definition import Bound, Call, Workflow
from ..workflows.options import check_options
from ..workflows.schema import as_annotated
from . import attempt as attempts
from .branch import Branch, DurableCall, in_workflow
from .ending import ContinueAs
from .series import newest_run
from .steering import cancel_child
from .waits import HearingCall
from .wakeups import end_wait

if TYPE_CHECKING:
    from .engine import Engine

T = TypeVar("T")
U = TypeVar("U")


class SendCall(DurableCall[None]):
    """A signal that a workflow sends to another run, in its own commit."""

    __slots__ = ("name", "payload", "target")

    def __init__(self, branch: Branch, target: str, name: str, payload: bytes) -> None:
        self.target, self.name, self.payload = target, name, payload
        super().__init__(branch, f"signal:{name}", VALUES.digest((target, name, payload), "signal"))

    def begin_live(self) -> None:
        self._send_to(self.target)

    def _send_to(self, target: str) -> None:
        run = self.run
        signal_id = f"{run.id}:{self.key}:{run.generation}"
        signal = Signal(target, self.name, self.payload, signal_id, f"run {run.id}", run.time())
        record = self.record(Kind.STEP_COMPLETED, attempt=1, data={"to": target, "signal_name": self.name})
        refused = partial(self._refused, target)
        run.append_special(record, {"sends": [Send(signal)]}, partial(self._sent, target), refused, self)

    def _sent(self, target: str, _: Answer) -> None:
        self.run.engine.signalled(target)

    def _refused(self, target: str, answer: Answer) -> None:
        if answer.verdict is Verdict.FINISHED:
            self.run.engine.background(self._send_on(target, answer))
        else:
            self._fail(answer)

    async def _send_on(self, target: str, answer: Answer) -> None:
        """The run has ended: send the signal to the one that continues it, if there is one."""
        run, engine = self.run, self.run.engine
        run.performing += 1  # it must not be put away before this is known
        try:
            ended = await engine.read(engine.store.get_run, target)
            with contextlib.suppress(RunNotFound):
                newest = None if ended is None else await engine.call(newest_run, engine.store, ended)
                if not run.detached and newest is not None and newest.id != target:
                    self._send_to(newest.id)
                    return
            if not run.detached:
                self._fail(answer)
        except StoreError as error:
            run.halt(error)
        finally:
            run.performing -= 1
            run.watch()

    def _fail(self, answer: Answer) -> None:
        if answer.verdict is Verdict.NOT_FOUND:
            kind, text = "RunNotFound", f"no run {self.target!r} is here"
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
        if error is not None and error.type != "keepstep.AlreadyFinished":
            return StepFailed(error.message, self.key, error.info(), record.seq)
        return AlreadyFinished(error.message if error is not None else "", self.target)


def signal(run_id: str, name: str, payload: Any = True) -> Call[None]:
    """Send a signal to another run, exactly once, from a workflow."""
    check_id(run_id)
    check_name(name, "signal")
    branch = in_workflow("signal")
    data = VALUES.encode(payload, f"signal {name!r}")
    branch.run.engine.censor.check(data, name, "signal")
    return SendCall(branch, run_id, name, data)


class ChildRun:
    """A run that a workflow started: await its result, signal it or cancel it."""

    def __init__(self, branch: Branch, run_id: str, key: str, workflow: Workflow[..., Any], name: str = "") -> None:
        self.id = run_id
        self._branch, self._key, self._workflow = branch, key, workflow
        self._name = name or workflow.name

    def result(self) -> Call[Any]:
        """The child's result, once it has one."""
        return ChildResult(in_workflow("start"), self)

    def __await__(self) -> Any:
        return self.result().__await__()

    def signal(self, name: str, payload: Any = True) -> Call[None]:
        """Send the child a signal."""
        return signal(self.id, name, payload)

    def cancel(self) -> Call[None]:
        """Ask the child to stop."""
        return SendCall(in_workflow("cancel"), self.id, CANCEL, b'{"reason":"cancelled by its parent"}')

    def __repr__(self) -> str:
        return f"<child run {self.id}>"


class StartCall(DurableCall[ChildRun]):
    """The start of a child, in its parent's commit: exactly one child per call across crashes."""

    __slots__ = ("begun", "input", "name", "options", "workflow")

    def __init__(
        self, branch: Branch, workflow: Workflow[..., Any], payload: bytes, options: dict[str, Any], name: str = ""
    ) -> None:
        self.workflow, self.input, self.options = workflow, payload, options
        self.name = name or workflow.name  # as a step of a graph or dag it may have another
        self.begun = ""  # the child that is being made, if its id is nobody else's
        super().__init__(branch, self.name, VALUES.digest((payload, options.get("run_id")), "child"))

    def begin_live(self) -> None:
        run = self.run
        if run.guard is not None and not run.guard.admits(self):
            return
        given = self.options.get("run_id")
        child = given or child_id(run.id, self.key, run.generation)
        record = self.record(Kind.CHILD, attempt=1, data={"child": child})
        self.begun = "" if given else child
        made = partial(self._made, child)
        creates = [run.engine.encryption.born(self._child(child))]
        run.append_special(record, {"creates": creates}, made, self._refused, self)

    def _child(self, child: str) -> Run:
        run, workflow = self.run, self.workflow
        at = run.time()
        delay = float(self.options.get("delay") or 0.0)
        return Run(
            id=child,
            workflow=workflow.name,
            status=Status.QUEUED,
            created_at=at,
            created_by=f"run {run.id}",
            version=workflow.version,
            fingerprint=workflow.fingerprint,
            input=self.input,
            seed=seed_in(attempts.idempotency_key(run.seed, self.key, run.generation)[:16], workflow.module),
            parent=run.id,
            parent_key=self.key,
            queue=self.options.get("queue") or "default",
            priority=self.options.get("priority") or 0,
            tags=self.options.get("tags") or {},
            due_at=instant(at.timestamp() + delay),
            wakes=WAKES_DELAYED if delay > 0 else (),
        )

    def _made(self, child: str, _: Answer) -> None:
        if self.run.guard is not None:
            self.run.guard.ended(self.key)
        self.run.children[self.key] = child  # whether or not the code still waits to be told
        self.run.engine.poke()

    def cancelled_by_code(self) -> None:
        super().cancelled_by_code()
        run = self.run
        if self.entry is not None and self.entry.child:
            run.children[self.key] = self.entry.child
        child = run.children.get(self.key) or self.begun
        if child and run.children_told:  # it came after the cancel of the run, and nobody has a hold of it
            cancel_child(run, child)

    def _refused(self, answer: Answer) -> None:
        text = (
            f"run id {answer.about!r} is taken by a run that {self.key!r} of run {self.run.id!r} has not started; "
            "give each child an id of its own, or leave run_id= out"
        )
        error = StoredError("keepstep.RunConflict", text, "permanent", id=new_id("error"))
        self.run.append(self.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=1, error=error), self)

    def decode(self, record: Record) -> ChildRun:
        data = record.data or {}
        child = data["child"]
        self.run.children[self.key] = child
        if data.get("renew"):
            self._renew(child)
        return ChildRun(self.branch, child, self.key, self.workflow, self.name)

    def _renew(self, child: str) -> None:
        """A fork has its own child where the run that it comes from had one under way: see that it is there.

        As long as nothing was heard of it, that is: one that has ended may be gone since.
        """
        run = self.run
        heard = any(is_word_of(one.payload, child) for one in run.inbox.named(f"{CHILD}{self.key}"))
        entries = () if run.history is None else run.history.entries.values()
        known = any(one.digest == child and not one.cancelled for one in entries)  # not if only a wait was given up
        if not heard and not known:
            creates = [run.engine.encryption.born(self._child(child))]
            run.append_special(None, {"creates": creates, "progress": False}, partial(self._made, child))


class ChildResult(HearingCall):
    """The wait for a child's end."""

    __slots__ = ("child", "stale")

    def __init__(self, branch: Branch, child: ChildRun) -> None:
        self.child = child
        self.stale: float = 0  # words up to this number are of an end that the child has left since
        name = f"{CHILD}{child._key}"  # noqa: SLF001
        super().__init__(branch, f"{child._name}.result", child.id, name)  # noqa: SLF001

    def begin_live(self) -> None:
        key = self.child._key  # noqa: SLF001
        word = self.run.child_results.get(key)
        if word is not None:
            self._write(word, {})
            return
        if self.run.generation:
            self.stale = math.inf
            self.run.performing += 1  # it must not be put away before the store has answered
            self.run.engine.background(self._ask_the_store())
        self._listen()

    def _listen(self) -> None:
        signal = self.run.inbox.take(self.name, self._is_mine)
        if signal is not None:
            self._come(signal)
        else:
            self.wait(None, self.name, self._come, mine=self._is_mine)

    async def _ask_the_store(self) -> None:
        """A person lets the parent go on: what the child is now counts, and not what was once said of it.

        A child that ended while the parent had ended too has told nobody, and one that was retried has said that it
        failed. As long as it has not ended, only words that are yet to come are of its end.
        """
        run, engine = self.run, self.run.engine
        seen = run.signals_seen
        try:
            await engine.journal.drained()  # what makes the child may be on its way
            child = await newest_of_series(engine, self.child.id)
            if run.detached or self not in run.waits:
                return
            end_wait(run, self)
            if child is not None and child.status not in FINISHED:
                self.stale = seen
                self._listen()
                return
            self.stale = 0
            self.heard = heard = run.inbox.take(self.name, self._is_mine)  # read with this, whatever it says
            if child is None and heard is not None:
                self._come(heard)
            else:
                self._write(_word_of(child, self.child.id), {} if heard is None else _read(heard))
        except StoreError as error:
            run.halt(error)
        finally:
            run.performing -= 1
            run.watch()

    def _is_mine(self, signal: Signal) -> bool:
        """Whether it is the word of this child: one that a rewind has left behind is told under the same name."""
        return signal.seq > self.stale and is_word_of(signal.payload, self.child.id)

    def _come(self, signal: Signal) -> None:
        self.heard = signal
        self._write(signal.payload, _read(signal))

    def _write(self, word: bytes, data: dict[str, Any]) -> None:
        self.run.append(self.record(Kind.CHILD, word, data=data or None), self)

    def decode(self, record: Record) -> Any:
        key = self.child._key  # noqa: SLF001
        raw = bytes(record.value)  # type: ignore[arg-type]
        self.run.child_results[key] = raw
        self.run.children.pop(key, None)
        word = msgspec.json.decode(raw, type=_Word)
        if word.status == Status.COMPLETED:
            value = b"null" if word.value is msgspec.UNSET else bytes(word.value)
            workflow = self.child._workflow  # noqa: SLF001
            result = workflow.values.decode(value, f"child {self.child.id!r}: result")
            edited = (record.data or {}).get("act") == "edit"
            return as_annotated(result, workflow.hints().get("return")) if edited else result
        info = word.error.info() if word.error is not None else None
        told = f": {info.type}: {info.message}" if info is not None else ""
        self.error = StepFailed(f"child run {self.child.id!r} {word.status}{told}", self.key, info, record.seq)
        return None


def _read(signal: Signal) -> dict[str, Any]:
    """What a record says of the word that it was read with; what the child spent counts once, whoever asks."""
    spent = msgspec.json.decode(signal.payload, type=_Word).spent
    return {"signal": signal.seq} | ({"spent": spent} if spent else {})


class _Word(msgspec.Struct):
    status: str
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: StoredError | None = None
    spent: dict[str, float] | None = None


async def newest_of_series(engine: Engine, run_id: str) -> Run | None:
    """A run, or the one that went on for it; None if it is gone."""
    run: Run | None = await engine.read(engine.store.get_run, run_id)
    try:
        return await engine.call(newest_run, engine.store, run) if run is not None and run.continued_as else run
    except RunNotFound:
        return None


def _word_of(child: Run | None, child_id: str) -> bytes:
    """What a child that has ended would say of it, or one that is gone."""
    word: dict[str, Any] = {"status": Status.FAILED.value, "child": child_id}
    if child is None:
        word["error"] = StoredError("keepstep.RunNotFound", f"child run {child_id!r} is gone", "permanent")
    else:
        word = {"status": child.status.value, **names_in_word(child)}
        if child.output is not None:
            word["value"] = msgspec.Raw(child.output)
        if child.error is not None:
            word["error"] = StoredError(**asdict(child.error))
    return msgspec.json.encode(word)


class _Teller(msgspec.Struct):
    """Who tells of the end of a child: the run that was started, and the one that ended, which may continue it."""

    child: str = ""
    run: str = ""


_teller = msgspec.json.Decoder(_Teller).decode


def is_word_of(word: bytes, child: str) -> bool:
    """Whether the word of an end comes from this child, or from the run that went on for it."""
    try:
        teller = _teller(word)
    except (msgspec.MsgspecError, ValueError):
        return True  # it is found when it is told
    if not teller.child or teller.child == child:
        return True
    return not teller.run and _older_series(teller.child) == _older_series(child)


def _older_series(run_id: str) -> str:
    """What the ids of a series have in common in words of earlier versions, which name only the run that ended."""
    base, _, number = run_id.rpartition("~")
    return (base if base and number.isdecimal() else run_id)[: MAX_ID - 12]


_CHILD_OPTIONS: tuple[str, ...] = ("run_id", "queue", "priority", "delay", "tags")


def start(workflow: Any, *args: Any, **kwargs: Any) -> Call[ChildRun]:
    """Start a child run from a workflow: exactly one per call, whatever crashes. Cancelling the parent cancels it."""
    branch = in_workflow("start")
    options = {name: kwargs.pop(name) for name in _CHILD_OPTIONS if name in kwargs}
    if isinstance(workflow, Bound):
        workflow, args, kwargs = workflow.workflow, workflow.args, workflow.kwargs
    if not isinstance(workflow, Workflow):
        raise DefinitionError(f"{workflow!r} is not a workflow; decorate it with @ks.workflow")
    if options.get("run_id") is not None:
        check_id(options["run_id"])
    if workflow.starting:
        own = {name: value for name, value in workflow.starting.items() if name in _CHILD_OPTIONS}
        options = {**own, **options, "tags": {**own.get("tags", {}), **(options.get("tags") or {})}}
    check_options(options.get("queue", "default"), options.get("priority", 0), options.get("delay", 0.0), None)
    options["tags"] = branch.run.engine.censor.tags(options.get("tags"))
    workflow.check_arguments(args, kwargs)
    payload = branch.run.engine.censor.input_of(workflow, args, kwargs)
    return StartCall(branch, workflow, payload, options)


def continue_as(*args: Any, **kwargs: Any) -> NoReturn:
    """End this run and start its successor with these arguments, in one commit; unread signals move over."""
    branch = in_workflow("continue_as")
    run = branch.run
    run.workflow.check_arguments(args, kwargs)
    raise ContinueAs(run.engine.censor.input_of(run.workflow, args, kwargs))
