"""Tools that read: runs with their explanation, records and state, and the store as a whole."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import Field

from ..care.doctor import examine
from ..errors import DefinitionError
from ..history.audit import incarnations, transitions
from ..kernel.replay import unsealed
from ..model import Checkpoint, RunQuery, Status
from ..model.tree import thaw
from ..records.record import checkpoint
from ..views import plain
from ..views.explain import explain, explanation_data
from ..views.facts import facts_data, facts_of
from ..views.inbox import Context, InboxQuery, ItemKind, context_of
from ..views.inbox import inbox as waiting_for_people
from ..views.top import sample
from ..workflows.options import checked_tags
from .stored import Piece
from .tools import Call, look

#: Runs, records and entries of one page at most.
MOST_RUNS = 100
MOST_RECORDS = 200
#: Items of the inbox in one answer at most, because each has its context.
MOST_ITEMS = 50
#: Runs that a finding of the doctor names at most.
MOST_NAMED = 20

RunId = Annotated[str, Field(description="The id of the run", min_length=1, max_length=200)]
Seq = Annotated[int, Field(ge=0, le=2**53)]
JSON = dict[str, Any]


@look
async def list_runs(  # noqa: PLR0917 - each is a filter
    call: Call,
    status: Annotated[list[Status] | None, Field(description="Only these statuses")] = None,
    workflow: str | None = None,
    tags: Annotated[dict[str, str] | None, Field(description="Only runs with all of these tags")] = None,
    id_prefix: str | None = None,
    parent: str | None = None,
    created_after: datetime | None = None,
    created_before: datetime | None = None,
    limit: Annotated[int, Field(ge=1, le=MOST_RUNS)] = 20,
    after: Annotated[str | None, Field(description="`next` of the page before")] = None,
) -> JSON:
    """List runs, newest first. Failed runs have the status "failed", those that wait for a person "set aside"."""
    for name, at in (("created_after", created_after), ("created_before", created_before)):
        if at is not None and at.tzinfo is None:
            raise DefinitionError(f"{name} needs a time zone, such as 2026-01-31T12:00:00Z")
    query = RunQuery(
        status=frozenset(status or ()),
        workflow=workflow,
        tags=checked_tags(tags),
        id_prefix=id_prefix,
        parent=parent,
        created_after=created_after,
        created_before=created_before,
        limit=limit,
        after=after,
    )
    page = await call.engine.call(call.engine.store.list_runs, query)
    return {
        "runs": [plain.run_data(run) for run in page.runs],
        "next": page.next,
        "unreadable": list(page.unreadable),
    }


@look
async def explain_run(
    call: Call,
    run_id: RunId,
    rewind_to: Annotated[Seq | None, Field(description="Also tell what a rewind to this record would do")] = None,
    rewind_step: Annotated[str | None, Field(description="Also tell what a rewind to before this step does")] = None,
) -> JSON:
    """Explain where a run stands: why it failed or waits, what holds it up, what a retry or a rewind would do."""
    if rewind_to is not None and rewind_step is not None:
        raise DefinitionError("give either rewind_to or rewind_step")
    run = await call.run(run_id)
    found = explanation_data(await explain(call.engine, run, to=rewind_to, step=rewind_step))
    for name in ("retry", "rewind", "recovery"):
        if (plan := found[name]) is not None and (name == "recovery" or not plan["possible"]):
            plan["reason"] = plan.pop("text")  # it may repeat the text of an error
    return found


@look
async def show_run(call: Call, run_id: RunId) -> JSON:
    """Show the facts of a run: input, result, error, tags, children, what it published and what it spent."""
    run = await call.run(run_id)
    return facts_data(await facts_of(call.engine, run))


@look
async def history(
    call: Call,
    run_id: RunId,
    after: Annotated[Seq, Field(description="`next` of the page before")] = 0,
    limit: Annotated[int, Field(ge=1, le=MOST_RECORDS)] = 50,
    values: Annotated[bool, Field(description="Include results and inputs of steps")] = False,
) -> JSON:
    """List the records of a run in order, page by page, without values unless they are asked for."""
    run = await call.run(run_id)
    found = await _records(call, run.id, after, limit)
    shown = [plain.record_data(one) for one in found]
    for one in shown:
        if not values:
            del one["value"], one["input"]
        if one["error"] is not None:
            del one["error"]["traceback"]
    last = found[-1].seq if found else run.seq
    return {"run": run.id, "seq": run.seq, "records": shown, "next": last if last < run.seq else None}


@look
async def show_record(
    call: Call,
    run_id: RunId,
    seq: Annotated[int, Field(ge=1, le=2**53)],
    offset: Annotated[int, Field(ge=0, description="Characters of the value to leave out")] = 0,
) -> JSON:
    """Show one record with its error and its value, a large value piece by piece."""
    run = await call.run(run_id)
    found = await _records(call, run.id, seq - 1, 1)
    if not found or found[0].seq != seq:
        raise DefinitionError(f"run {run.id!r} has no record {seq}; it has {run.seq}")
    shown = plain.record_data(found[0])
    return {"run": run.id, **shown, "value": Piece(shown["value"], offset)}


async def _records(call: Call, run: str, after: int, limit: int) -> list[Checkpoint]:
    """Return records without secrets of callbacks: an assistant does not answer for the one who got the token."""
    rows = await call.engine.call(call.engine.store.list_checkpoints, run, after, limit)
    return [
        plain.without_secret(checkpoint(record, checksum))
        async for record, checksum in unsealed(call.engine, rows, run, after)
    ]


@look
async def state_at(
    call: Call,
    run_id: RunId,
    seq: Annotated[Seq | None, Field(description="The record after which; now if it is missing")] = None,
    stage: str | None = None,
    agent: str | None = None,
) -> JSON:
    """Show the state of a graph's run, now or after a record."""
    handle = await call.handle(run_id)
    found = await handle.state(seq, stage=stage, agent=agent)
    return {
        "run": handle.id,
        "seq": seq,
        "state": {key: plain.untagged(thaw(tree)) for key, tree in found.kept().items()},
    }


@look
async def diff(
    call: Call,
    run_id: RunId,
    a: Annotated[Seq | None, Field(description="The earlier record")] = None,
    b: Annotated[Seq | None, Field(description="The later record")] = None,
    other: Annotated[str | None, Field(description="Another run, to which `b` belongs")] = None,
) -> JSON:
    """Show what changed between two records of a run, or between two runs."""
    handle = await call.handle(run_id)
    if other is not None:
        await call.run(other)
    return plain.difference_data(await handle.diff(a, b, other=other))


@look
async def audit(
    call: Call,
    run_id: RunId,
    moves: Annotated[bool, Field(description="Only changes of the status")] = False,
    limit: Annotated[int, Field(ge=1, le=MOST_RECORDS)] = 50,
) -> JSON:
    """Show who did what to a run, when and why: the newest entries, and the workers that have held it."""
    entries = await (await call.handle(run_id)).audit()
    chosen = list(transitions(entries)) if moves else entries
    leases = incarnations(entries)
    return {
        "run": run_id,
        "entries": [plain.audit_data(one) for one in chosen[-limit:]],
        "earlier": max(len(chosen) - limit, 0),
        "leases": [plain.incarnation_data(one) for one in leases[-limit:]],
    }


@look
async def inbox(
    call: Call,
    kinds: Annotated[list[ItemKind] | None, Field(description="Only these kinds")] = None,
    workflow: str | None = None,
    limit: Annotated[int, Field(ge=1, le=MOST_ITEMS)] = 20,
) -> JSON:
    """List what waits for a person, the earliest deadline first, each with its question and what was published."""
    query = InboxQuery(frozenset(kinds or ()), workflow)
    found = await waiting_for_people(call.engine, query, datetime.now(UTC))
    items = [_item(await context_of(call.engine, one)) for one in found.items[:limit]]
    counts = {kind.value: count for kind, count in found.counts.items() if count}
    return {"items": items, "counts": counts, "hidden_items": max(len(found.items) - limit, 0), "more": found.more}


def _item(context: Context) -> JSON:
    item = context.item
    return {
        "run": item.run.id,
        "workflow": item.run.workflow,
        "kind": item.kind.value,
        "name": item.name,
        "seq": item.run.seq,
        "since": plain.iso(item.since),
        "deadline": plain.iso(context.deadline),
        "question": context.question,
        "published": context.published,
        "input": context.input,
        "by": context.by,
        "reason": context.reason if context.aside is None else context.aside.reason,
        "values_hidden": context.locked is not None,
    }


@look
async def doctor(call: Call) -> JSON:
    """Examine the store, its workers and every unfinished run; each finding has its advice."""
    report = plain.report_data(await examine(call.engine))
    for finding in report["findings"]:
        finding["run_count"], finding["runs"] = len(finding["runs"]), finding["runs"][:MOST_NAMED]
    return report


@look
async def overview(call: Call) -> JSON:
    """Show the store at a glance: rates, queues, services, workers and slow steps."""
    return plain.sample_data(await call.engine.call(sample, call.engine.store))
