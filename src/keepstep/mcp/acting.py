"""Tools that change runs: each names its actor and its reason, and the record that was seen when it was decided."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import quote

from pydantic import Field

from ..errors import DefinitionError
from ..model.signal import callback_of
from ..views.waits import WaitKind, waits_of
from .looking import JSON, RunId, Seq
from .tools import Call, act, hands_out_link

Seen = Annotated[
    Seq, Field(description="`seq` of the run as you have seen it; the act is refused after a newer record")
]
MaybeSeen = Annotated[Seq | None, Field(description="`seq` of the run as you have seen it, to refuse after a newer")]
Reason = Annotated[str, Field(description="Why, for the audit", min_length=1, max_length=2000)]
SignalName = Annotated[str, Field(description="The signal that the run waits for", min_length=1, max_length=200)]


@hands_out_link
async def approval_link(call: Call, run_id: RunId) -> JSON:
    """Return the page on which a person approves, denies or answers. Give the link to the person, and do not answer."""
    run = await call.run(run_id)
    base = call.pages_url.rstrip("/")
    return {"run": run.id, "inbox": f"{base}/inbox", "page": f"{base}/runs/{quote(run.id, safe='')}"}


@act(repeatable=True, answers=True)
async def approve(call: Call, run_id: RunId, seq: Seen, signal: SignalName | None = None) -> JSON:
    """Answer the wait of a run with true, because a person has decided so. Name the signal if it has several."""
    return await _answer(call, run_id, seq, signal, answer=True)


@act(repeatable=True, answers=True)
async def deny(call: Call, run_id: RunId, seq: Seen, signal: SignalName | None = None) -> JSON:
    """Answer the wait of a run with false, because a person has decided so."""
    return await _answer(call, run_id, seq, signal, answer=False)


async def _answer(call: Call, run_id: str, seq: int, signal: str | None, *, answer: bool) -> JSON:
    handle = await call.handle(run_id, seq)
    run = await handle.run()
    waits = [wait.name for wait in waits_of(run, datetime.now(UTC)) if wait.kind is WaitKind.SIGNAL]
    names = [name for name in waits if callback_of(name) is None]
    if (signal is None and len(names) != 1) or (signal is not None and signal not in names):
        instead = f"it waits for {', '.join(names)}" if names else "it waits for no signal"
        raise DefinitionError(f"run {run.id!r} does not wait for {signal or 'exactly one signal'}: {instead}")
    name = signal or names[0]
    await handle.signal(name, answer, id=f"mcp:{seq}:{name}")
    return await _done(call, run_id, "approve" if answer else "deny")


@act(answers=True)
async def signal(  # noqa: PLR0917 - each is a part of the signal
    call: Call,
    run_id: RunId,
    name: SignalName,
    payload: Annotated[Any, Field(description="A JSON value")] = True,
    id: Annotated[str, Field(description="Sending the same id again changes nothing", max_length=200)] = "",  # noqa: A002 - as in the API
    seq: MaybeSeen = None,
) -> JSON:
    """Send a signal to a run. It is kept until the run waits for it."""
    handle = await call.handle(run_id, seq)
    await handle.signal(name, payload, id=id)
    return await _done(call, run_id, "signal")


@act()
async def retry(call: Call, run_id: RunId, seq: Seen, reason: Reason) -> JSON:
    """Let a failed or set-aside run go on from where it failed; `explain_run` tells which steps run again."""
    await (await call.handle(run_id, seq)).retry(reason)
    return await _done(call, run_id, "retry")


@act(repeatable=True)
async def pause(call: Call, run_id: RunId, reason: Reason, seq: MaybeSeen = None) -> JSON:
    """Stop a run at its next step; it keeps its state."""
    await (await call.handle(run_id, seq)).pause(reason)
    return await _done(call, run_id, "pause")


@act(repeatable=True)
async def resume(call: Call, run_id: RunId, seq: Seen, reason: Reason) -> JSON:
    """Let a paused run go on."""
    await (await call.handle(run_id, seq)).resume(reason)
    return await _done(call, run_id, "resume")


@act()
async def fork(  # noqa: PLR0917 - each is a part of the fork
    call: Call,
    run_id: RunId,
    seq: Seen,
    reason: Reason,
    at: Annotated[Seq | None, Field(description="Copy the records up to this one")] = None,
    step: Annotated[str | None, Field(description="Copy the records up to before this step")] = None,
    new_id: Annotated[str | None, Field(description="The id of the new run")] = None,
    results: Annotated[dict[str, Any] | None, Field(description="Other results of recorded steps")] = None,
    state: Annotated[dict[str, Any] | None, Field(description="Other values in the state of a graph")] = None,
) -> JSON:
    """Start a new run with a copy of the records of this one, which is only read."""
    await call.handle(run_id, seq)
    made = await call.engine.fork(
        run_id, at, step=step, run_id=new_id, results=results, state=state, reason=reason, actor=call.actor
    )
    return {"run": made.id, "act": "fork", "origin": run_id}


@act(destroys=True)
async def cancel(call: Call, run_id: RunId, seq: Seen, reason: Reason) -> JSON:
    """Cancel a run with its steps, waits and children. This is final. Pause a run first whose records go on."""
    await (await call.handle(run_id, seq)).cancel(reason)
    return await _done(call, run_id, "cancel")


@act(destroys=True)
async def rewind(  # noqa: PLR0917 - each is a part of the rewind
    call: Call,
    run_id: RunId,
    reason: Reason,
    to: Annotated[Seq | None, Field(description="The last record that counts")] = None,
    step: Annotated[str | None, Field(description="Go back to before this step")] = None,
    dry_run: Annotated[bool, Field(description="Only tell what would happen")] = True,
    seq: Annotated[Seq | None, Field(description="`seq` of the dry run; needed to act")] = None,
) -> JSON:
    """Let a run go on from an earlier record. Without `dry_run` false, only tell which steps would run again."""
    if not dry_run and seq is None:
        raise DefinitionError("a rewind needs `seq`, the last record that the dry run has seen")
    handle = await call.handle(run_id, seq)
    seen = (await handle.run()).seq
    done = await handle.rewind(to, step=step, reason=reason, actor=call.actor, dry_run=dry_run)
    again = {"to": done.to, "again": list(done.again), "children": list(done.children)}
    return {"run": handle.id, "act": "rewind", "dry_run": dry_run, "seq": seen, **again}


@act(destroys=True, repeatable=True)
async def resolve(  # noqa: PLR0917 - each is a part of the verdict
    call: Call,
    run_id: RunId,
    step: str,
    verdict: Literal["result", "failed", "again"],
    seq: Seen,
    reason: Reason,
    value: Annotated[Any, Field(description='The result, for the verdict "result"')] = None,
) -> JSON:
    """Settle a step that may or may not have happened: it has this `result`, it has `failed`, or do it `again`."""
    await (await call.handle(run_id, seq)).resolve(step, verdict, value, reason)
    return await _done(call, run_id, "resolve")


@act(destroys=True)
async def edit(  # noqa: PLR0917 - each is a part of the edit
    call: Call,
    run_id: RunId,
    seq: Seen,
    reason: Reason,
    values: Annotated[dict[str, Any] | None, Field(description="New values in the state")] = None,
    remove: Annotated[list[str] | None, Field(description="Keys to remove from the state")] = None,
    next_step: str | None = None,
) -> JSON:
    """Change the state of a graph's run that no worker drives; a failed one goes on with it."""
    handle = await call.handle(run_id, seq)
    await handle.edit(values or {}, remove=remove or (), next=next_step, reason=reason)
    return await _done(call, run_id, "edit")


async def _done(call: Call, run_id: str, done: str) -> JSON:
    run = await call.run(run_id)
    return {"run": run.id, "act": done, "status": run.status.value, "seq": run.seq, "actor": call.actor}
