"""Routes of the API that steer runs: each names its caller and its reason, and may name the record that was seen."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ..errors import AlreadyFinished, DefinitionError, RunConflict
from ..model import FINISHED, RunQuery, Status
from ..model.wakes import sorted_wakes
from ..views import plain
from ..views.explain import prospect_data, retrying
from ..views.waits import WaitKind, doubts_called, waits_of
from .api_runs import JSON, Seq
from .routes import Ask, Role, post

if TYPE_CHECKING:
    from ..engine.handle import RunHandle

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Reason = Annotated[str, msgspec.Meta(max_length=2000)]


class Act(msgspec.Struct, forbid_unknown_fields=True):
    """An act with its reason. `seq` is the last record that the caller has seen; the act is refused after a newer.

    So it is after a newer signal than the last of `signals`: that of another person who has decided.
    """

    reason: Reason = ""
    seq: Seq | None = None
    signals: Seq | None = None


class Done(msgspec.Struct):
    """The act was carried out, or the run was asked to."""

    run: str
    act: str


class Signalled(msgspec.Struct, forbid_unknown_fields=True):
    """A signal. With an `id`, sending it again changes nothing."""

    name: str
    payload: Any = True
    id: str = ""
    seq: Seq | None = None
    signals: Seq | None = None


@post("/runs/{run}/signal", Done, body=Signalled, status=202)
async def send_signal(ask: Ask) -> Done:
    """Send a signal to a run."""
    handle = await ask.handle()
    await handle.signal(ask.body.name, ask.body.payload, id=ask.body.id)
    return Done(handle.id, "signal")


class Verdict(msgspec.Struct, forbid_unknown_fields=True):
    """The signal for which a run waits; without a name, the only one."""

    name: str | None = None
    payload: Any = msgspec.UNSET
    id: str = ""
    seq: Seq | None = None
    signals: Seq | None = None


@post("/runs/{run}/approve", Done, body=Verdict, status=202)
async def approve(ask: Ask) -> Done:
    """Answer the wait of a run with true, or with a payload."""
    return await _answer(ask, "approve", default=True)


@post("/runs/{run}/deny", Done, body=Verdict, status=202)
async def deny(ask: Ask) -> Done:
    """Answer the wait of a run with false, or with a payload."""
    return await _answer(ask, "deny", default=False)


async def _answer(ask: Ask, act: str, *, default: bool) -> Done:
    handle, name = await ask.handle(), ask.body.name
    if name is None:
        run = await handle.run()
        waits = [wait.name for wait in waits_of(run, datetime.now(UTC)) if wait.kind is WaitKind.SIGNAL]
        if len(waits) != 1:
            names = f"it waits for {', '.join(waits)}; name one" if waits else "it waits for none; name the signal"
            raise DefinitionError(f"run {run.id!r} does not wait for exactly one signal: {names}")
        name = waits[0]
    payload = default if ask.body.payload is msgspec.UNSET else ask.body.payload
    await handle.signal(name, payload, id=ask.body.id)
    return Done(handle.id, act)


class Question(msgspec.Struct, forbid_unknown_fields=True):
    """A question to a run, and how long to wait for its reply."""

    name: str
    payload: Any = None
    timeout: Annotated[float, msgspec.Meta(ge=0, le=60)] = 30.0


@post("/runs/{run}/ask", JSON, body=Question)
async def ask_run(ask: Ask) -> JSON:
    """Ask a run, and return its reply."""
    handle = await ask.handle()
    reply = await handle.ask_raw(ask.body.name, ask.body.payload, timeout=ask.body.timeout)
    found: JSON = await ask.shown({"run": handle.id, "reply": plain.value_of(reply)}, "reply")
    return found


@post("/runs/{run}/pause", Done, body=Act, status=202)
async def pause(ask: Ask) -> Done:
    """Stop a run at its next step."""
    handle = await ask.handle()
    await handle.pause(ask.body.reason)
    return Done(handle.id, "pause")


@post("/runs/{run}/resume", Done, body=Act, status=202)
async def resume(ask: Ask) -> Done:
    """Let a paused run, or one at a breakpoint, go on."""
    handle = await ask.handle()
    await handle.resume(ask.body.reason)
    return Done(handle.id, "resume")


class Failed(Signalled, kw_only=True):
    """The error with which the wait for a signal fails, and the name of its class."""

    payload: None = None
    error: Annotated[str, msgspec.Meta(min_length=1, max_length=10_000)]
    type: str = ""


@post("/runs/{run}/fail", Done, body=Failed, status=202)
async def fail_wait(ask: Ask) -> Done:
    """Fail the wait of a run for a signal: its code gets a `WaitFailed`."""
    handle, body = await ask.handle(), ask.body
    await handle.fail(body.name, body.error, type=body.type, id=body.id)
    return Done(handle.id, "fail")


class Cancelled(Act):
    """Whether to end the run in the store at once, without its clean-up; `dry_run` only names its open children."""

    force: bool = False
    dry_run: bool = False


#: Open children that are named before a cancel.
_MOST_CHILDREN = 100


@post("/runs/{run}/cancel", JSON, body=Cancelled, role=Role.ADMIN, status=202)
async def cancel(ask: Ask) -> JSON:
    """Cancel a run, with its steps, waits and children, and name these children. This is final."""
    handle, body = await ask.handle(), ask.body
    newest = await handle.latest()
    open_ = frozenset(Status) - FINISHED
    query = RunQuery(parent=newest.id, status=open_, limit=_MOST_CHILDREN, system=True)
    page = await ask.engine.call(ask.engine.store.list_runs, query)
    answer: JSON = {"run": handle.id, "act": "cancel", "dry_run": body.dry_run, "not_undone": []}
    answer |= {"children": [one.id for one in page.runs], "more": page.next is not None}
    if body.dry_run:
        return answer
    if body.force:
        answer["not_undone"] = await ask.engine.cancel_now(newest.id, body.reason, ask.actor)
    else:
        await handle.cancel(body.reason)
    return answer


@post("/runs/{run}/drop", JSON, body=Act, role=Role.ADMIN)
async def drop(ask: Ask) -> JSON:
    """Give up a run that is set aside: it ends as cancelled, and its code does not run. This is final."""
    handle = await ask.handle()
    await _must_be_aside(handle)
    left = await ask.engine.cancel_now(handle.id, ask.body.reason, ask.actor)
    return {"run": handle.id, "act": "drop", "not_undone": left}


async def _must_be_aside(handle: RunHandle[Any]) -> None:
    run = await handle.run()
    if run.status is not Status.SET_ASIDE:
        raise RunConflict(f"run {run.id!r} is {run.status.value}, not set aside; cancel it instead", run.id)


class Retried(Act):
    """Whether to retry a run that was handed over, too; `dry_run` changes nothing."""

    force: bool = False
    dry_run: bool = False


@post("/runs/{run}/retry", JSON, body=Retried, status=202)
async def retry(ask: Ask) -> JSON:
    """Let a failed or set-aside run go on from where it failed, or tell what that would do."""
    handle, body = await ask.handle(), ask.body
    if body.dry_run:
        newest = await (await handle.latest()).run()
        found = await retrying(ask.engine, newest)
        if found is None:
            raise AlreadyFinished(
                f"run {newest.id!r} is {newest.status.value}; only a failed or set-aside run can be retried", newest.id
            )
        return {"run": newest.id, "act": "retry", "dry_run": True, **prospect_data(found)}
    await handle.retry(body.reason, force=body.force)
    return {"run": handle.id, "act": "retry", "dry_run": False}


@post("/runs/{run}/consolidate", Done, body=Act, role=Role.ADMIN)
async def consolidate(ask: Ask) -> Done:
    """Record the whole state of a graph's run, so that its recovery need not read earlier records."""
    handle = await ask.handle()
    await handle.consolidate(ask.body.reason)
    return Done(handle.id, "consolidate")


class Skipped(Act):
    """Failed undo steps to accept as they are; without names, all of them."""

    steps: list[str] = []


@post("/runs/{run}/skip", JSON, body=Skipped, role=Role.ADMIN)
async def skip(ask: Ask) -> JSON:
    """Accept undo steps that have failed, so that the run ends."""
    handle = await ask.handle()
    return {"run": handle.id, "skipped": await handle.skip(*ask.body.steps, reason=ask.body.reason)}


class Back(Act):
    """The last record that counts, or the step to go back before; `dry_run` changes nothing."""

    to: Seq | None = None
    step: str | None = None
    force: bool = False
    dry_run: bool = False


@post("/runs/{run}/rewind", JSON, body=Back, role=Role.ADMIN)
async def rewind(ask: Ask) -> JSON:
    """Let a run go on from an earlier record, or tell what that would do."""
    handle, body = await ask.handle(), ask.body
    done = await handle.rewind(
        body.to, step=body.step, reason=body.reason, actor=ask.actor, dry_run=body.dry_run, force=body.force
    )
    answer = {"run": handle.id, "to": done.to, "again": list(done.again), "children": list(done.children)}
    return {**answer, "dry_run": body.dry_run}


class Arguments(msgspec.Struct, forbid_unknown_fields=True):
    """The arguments of a workflow."""

    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class Forked(Act):
    """The record that the new run begins from, or the step before it; a new id, and values that differ.

    `input` replaces the arguments: `args` and `kwargs`. `next` is the next step of a graph. Without `copy_signals`, the
    new run does not get the unread signals.
    """

    at: Seq | None = None
    step: str | None = None
    run_id: str | None = None
    input: Arguments | None = None
    results: dict[str, Any] = {}
    state: dict[str, Any] | None = None
    next: str | None = None
    copy_signals: bool = True


@post("/runs/{run}/fork", JSON, body=Forked, role=Role.ADMIN, status=201)
async def fork(ask: Ask) -> JSON:
    """Make a new run from the beginning of this one, with other results or another state."""
    handle, body = await ask.handle(), ask.body
    given: dict[str, Any] = {"at": body.at, "step": body.step, "run_id": body.run_id, "reason": body.reason}
    given |= {"next": body.next, "signals": body.copy_signals, "actor": ask.actor}
    if body.input is not None:
        given["input"] = await _bound(ask, body.input)
    if body.results:
        given["results"] = body.results
    if body.state is not None:
        given["state"] = body.state
    made = await ask.engine.fork(handle.id, **given)
    return {"run": made.id, "origin": handle.id}


async def _bound(ask: Ask, given: Arguments) -> Any:
    """Return arguments as an input for the run that the path names."""
    name = (await (await ask.handle()).run()).workflow
    workflow = ask.engine.workflows.get(name)
    if workflow is not None:
        return workflow.bind(*given.args, **given.kwargs)
    if given.args and given.kwargs:
        raise DefinitionError(
            f"input has args and kwargs, and this server does not know workflow {name!r}, which binds them; give one"
        )
    return given.kwargs or given.args


class Edited(Act):
    """New values of a graph's state, keys to remove, and the step that comes next."""

    values: dict[str, Any] = {}
    remove: list[str] = []
    stage: str | None = None
    agent: str | None = None
    next: str | None = None


@post("/runs/{run}/edit", Done, body=Edited, role=Role.ADMIN)
async def edit(ask: Ask) -> Done:
    """Change the state of a graph's run that no worker drives."""
    handle, body = await ask.handle(), ask.body
    await handle.edit(
        body.values, remove=body.remove, stage=body.stage, agent=body.agent, next=body.next, reason=body.reason
    )
    return Done(handle.id, "edit")


class Resolved(Act, kw_only=True):
    """The step in doubt, the verdict, and the result if it has one."""

    step: str
    verdict: str
    value: Any = None


@post("/runs/{run}/resolve", Done, body=Resolved, status=202)
async def resolve(ask: Ask) -> Done:
    """Settle an at-most-once step in doubt: `result`, `failed` or `again`."""
    handle, body = await ask.handle(), ask.body
    found = doubts_called(await handle.run(), body.step)  # by its key or its name
    if len(found) != 1:
        names = ", ".join(found or sorted_wakes((await handle.run()).wakes).in_doubt) or "none"
        raise RunConflict(f"run {handle.id!r} has no single step {body.step!r} in doubt; it has {names}", handle.id)
    await handle.resolve(found[0], body.verdict, body.value, body.reason)
    return Done(handle.id, "resolve")


class Recovery(Act):
    """The handler that decides, the step that it skips, and the value of that step."""

    handler: str = ""
    step: str = ""
    value: Any = None
    skip_validation: bool = False
    dry_run: bool = False


@post("/runs/{run}/recover", JSON, body=Recovery, role=Role.ADMIN)
async def recover(ask: Ask) -> JSON:
    """Let the next worker recover a run, or tell what that would do."""
    handle, body = await ask.handle(), ask.body
    info = await handle.recover(
        body.handler,
        step=body.step,
        value=body.value,
        skip_validation=body.skip_validation,
        reason=body.reason,
        dry_run=body.dry_run,
    )
    return plain.recovery_data(info)


class Start(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A new run of a workflow that this server knows, with its arguments and options."""

    workflow: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    run_id: str | None = None
    queue: str = "default"
    priority: int = 0
    delay: Seconds = 0.0
    key: str | None = None
    deadline: float | datetime | None = None
    tags: dict[str, str] = {}
    dedupe: str | None = None


@post("/runs", JSON, body=Start, status=201)
async def start(ask: Ask) -> JSON:
    """Start a run of a workflow by its name; an existing `run_id` answers with that run."""
    body = ask.body
    options = {name: getattr(body, name) for name in ("run_id", "queue", "priority", "delay", "key", "deadline")}
    if taken := sorted(set(body.kwargs) & {*options, "tags", "dedupe"}):
        raise DefinitionError(f"kwargs must not name options of a start, got {', '.join(taken)}")
    handle = await ask.engine.start(
        body.workflow, *body.args, **options, tags=body.tags or None, dedupe=body.dedupe, **body.kwargs
    )
    started: JSON = await ask.shown(plain.run_data(await handle.run()))
    return started


class Completed(msgspec.Struct, forbid_unknown_fields=True):
    """The value of a callback, or the error with which it failed."""

    value: Any = True
    error: str | None = None
    type: str = ""


class Beat(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing but the token."""


@post("/callbacks/{token}", Done, body=Completed, role=Role.NONE, status=202)
async def complete(ask: Ask) -> Done:
    """End one wait with the token that its workflow gave out; the token itself is the permission."""
    body, token = ask.body, ask.path["token"]
    if body.error is not None:
        await ask.engine.fail(token, body.error, type=body.type)
    else:
        await ask.engine.complete(token, body.value)
    return Done("", "complete")


@post("/callbacks/{token}/beat", Done, body=Beat, role=Role.NONE, status=202)
async def beat(ask: Ask) -> Done:
    """Tell the wait of a callback that its answer is still to come."""
    await ask.engine.beat(ask.path["token"])
    return Done("", "beat")
