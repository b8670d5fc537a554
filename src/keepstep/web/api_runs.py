"""Routes of the API that read runs: lists, facts, records, state, differences and the audit."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec

from ..checks import check_name
from ..errors import EncryptionError, RunNotFound
from ..history.audit import incarnations, transitions
from ..kernel.replay import unsealed
from ..model import Checkpoint, RunQuery, Status
from ..model.tree import thaw
from ..records.record import checkpoint
from ..views import plain
from ..views.aside import asides
from ..views.facts import facts_data, facts_of
from ..views.finding import near_ids
from ..workflows.options import checked_tags
from .routes import Ask, NotJson, get

#: Runs and records of one page at most.
MOST_ROWS = 500
Rows = Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)]
Seq = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
JSON = dict[str, Any]
T = TypeVar("T")


class RunFilter(msgspec.Struct, forbid_unknown_fields=True):
    """Filters of a list of runs. `tag` has the form NAME=VALUE; `after` is the `next` of the page before."""

    workflow: str | None = None
    version: str | None = None
    status: list[Status] = []
    tag: list[str] = []
    parent: str | None = None
    worker: str | None = None
    id_prefix: str | None = None
    created_before: datetime | None = None
    created_after: datetime | None = None
    updated_before: datetime | None = None
    system: bool = False
    limit: Rows = 50
    after: str | None = None

    def query(self) -> RunQuery:
        """Return the query to the store."""
        tags: dict[str, str] = {}
        for one in self.tag:
            name, equals, value = one.partition("=")
            if not equals:
                raise NotJson(f"tag has the form NAME=VALUE, got {one!r}")
            tags[name] = value
        for name in ("created_before", "created_after", "updated_before"):
            instant = getattr(self, name)
            if instant is not None and instant.tzinfo is None:
                raise NotJson(f"{name} needs a time zone, such as 2026-01-31T12:00:00Z")
        if self.workflow is not None:
            check_name(self.workflow, "workflow")
        names = ("workflow", "version", "parent", "worker", "id_prefix", "created_before", "created_after")
        given = {name: getattr(self, name) for name in (*names, "updated_before", "system", "limit", "after")}
        return RunQuery(status=frozenset(self.status), tags=checked_tags(tags), **given)


class RunList(msgspec.Struct):
    """One page of runs; `next` continues the list, and `unreadable` names damaged runs of this page."""

    runs: list[JSON]
    next: str | None
    unreadable: list[str]


@get("/runs", RunList, query=RunFilter)
async def list_runs(ask: Ask) -> RunList:
    """List runs, newest first, page by page."""
    page = await ask.engine.call(ask.engine.store.list_runs, ask.query.query())
    return RunList([plain.run_data(run) for run in page.runs], page.next, list(page.unreadable))


@get("/aside", RunList, query=RunFilter)
async def list_aside(ask: Ask) -> RunList:
    """List runs that are set aside, with the reason of each."""
    page = await asides(ask.engine, replace(ask.query.query(), status=frozenset({Status.SET_ASIDE})))
    return RunList([plain.aside_data(one) for one in page.runs], page.next, list(page.unreadable))


@get("/runs/{run}", JSON)
async def get_run(ask: Ask) -> JSON:
    """Return one run: its status, what it waits for, what can be done, its input, result, error and spending."""
    run_id, engine = ask.path["run"], ask.engine
    run = await engine.call(engine.store.get_run, run_id)
    if run is None:
        near = await engine.call(near_ids, engine.store, run_id)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise RunNotFound(f"no run {run_id!r}{hint}", run_id)
    facts = await facts_of(engine, run)
    data = facts_data(facts)
    data["waits"] = [plain.wait_data(wait) for wait in facts.view.waits]
    data["actions"] = [{"act": one.act.value, "run": one.run, "name": one.name} for one in facts.view.actions]
    return redacted(ask, data)


class RecordPage(msgspec.Struct):
    """One page of records; `next` is the `after` of the following page, None at the end."""

    run: str
    seq: int
    records: list[JSON]
    next: int | None


class RecordFilter(msgspec.Struct, forbid_unknown_fields=True):
    """A page of records after a number; `values` includes values, inputs and tracebacks."""

    after: Seq = 0
    limit: Rows = 200
    values: bool = False


#: Fields of a record that are left out unless values are asked for.
_VALUES = ("value", "input")


@get("/runs/{run}/records", RecordPage, query=RecordFilter)
async def list_records(ask: Ask) -> RecordPage:
    """Return the records of a run in order, page by page, without values unless they are asked for."""
    handle, query = await ask.handle(), ask.query
    run = await handle.run()
    found = await _records(ask, run.id, query.after, query.limit)
    shown = [plain.record_data(one) for one in found]
    for one in shown:
        if not query.values:
            for name in _VALUES:
                del one[name]
            if one["error"] is not None:
                del one["error"]["traceback"]
    last = found[-1].seq if found else run.seq
    return RecordPage(run.id, run.seq, redacted(ask, shown), last if last < run.seq else None)


@get("/runs/{run}/records/{seq}", JSON)
async def get_record(ask: Ask) -> JSON:
    """Return one record of a run, whole."""
    seq = _number(ask.path["seq"])
    run = await (await ask.handle()).run()
    found = await _records(ask, run.id, seq - 1, 1)
    if not found or found[0].seq != seq:
        raise RunNotFound(f"run {run.id!r} has no record {seq}; it has {run.seq}", run.id)
    return redacted(ask, {**plain.record_data(found[0]), "data": found[0].data})


def _number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) < 2**53:
        raise NotJson(f"a record has a number from 1 on, got {text[:50]!r}")
    return int(text)


async def _records(ask: Ask, run: str, after: int, limit: int) -> list[Checkpoint]:
    rows = await ask.engine.call(ask.engine.store.list_checkpoints, run, after, limit)
    return [checkpoint(record, checksum) async for record, checksum in unsealed(ask.engine, rows, run, after)]


class At(msgspec.Struct, forbid_unknown_fields=True):
    """A record, by its number, and a level of the state."""

    at: Seq | None = None
    stage: str | None = None
    agent: str | None = None


@get("/runs/{run}/state", JSON, query=At)
async def get_state(ask: Ask) -> JSON:
    """Return the state of a graph's run, now or after a record."""
    handle, query = await ask.handle(), ask.query
    found = await handle.state(query.at, stage=query.stage, agent=query.agent)
    state = {key: plain.untagged(thaw(tree)) for key, tree in found.kept().items()}
    return redacted(ask, {"run": handle.id, "at": query.at, "state": state})


class Between(msgspec.Struct, forbid_unknown_fields=True):
    """Two records of a run, or one of this run and one of another."""

    a: Seq | None = None
    b: Seq | None = None
    other: str | None = None


@get("/runs/{run}/diff", JSON, query=Between)
async def get_diff(ask: Ask) -> JSON:
    """Return what changed between two records of a run, or between two runs."""
    handle, query = await ask.handle(), ask.query
    return redacted(ask, plain.difference_data(await handle.diff(query.a, query.b, other=query.other)))


class Moves(msgspec.Struct, forbid_unknown_fields=True):
    """Whether only changes of the status are wanted."""

    moves: bool = False


@get("/runs/{run}/audit", JSON, query=Moves)
async def get_audit(ask: Ask) -> JSON:
    """Return who did what to a run, when and why, and the workers that have held it."""
    handle = await ask.handle()
    entries = await handle.audit()
    shown = list(transitions(entries)) if ask.query.moves else entries
    leases = [plain.incarnation_data(one) for one in incarnations(entries)]
    return redacted(ask, {"entries": [plain.audit_data(one) for one in shown], "incarnations": leases})


class Signals(msgspec.Struct, forbid_unknown_fields=True):
    """A page of signals after a number."""

    after: Seq = 0
    limit: Rows = 200


@get("/runs/{run}/signals", JSON, query=Signals)
async def list_signals(ask: Ask) -> JSON:
    """Return the signals that a run has received, in order, without their payloads."""
    handle, query = await ask.handle(), ask.query
    found = await ask.engine.call(ask.engine.store.list_signals, handle.id, query.after, query.limit)
    shown = [
        {"seq": one.seq, "name": one.name, "id": one.id, "by": one.sender, "at": plain.iso(one.sent_at)}
        for one in found
    ]
    return {"run": handle.id, "signals": shown, "next": found[-1].seq if len(found) == query.limit else None}


@get("/runs/{run}/recovery", JSON)
async def get_recovery(ask: Ask) -> JSON:
    """Return whether a run can be recovered, its last success, and what a recovery would run again."""
    handle = await ask.handle()
    return redacted(ask, plain.recovery_data(await handle.recover(dry_run=True)))


def redacted(ask: Ask, data: T) -> T:
    """Return data without secrets that a redaction pattern finds now, although they were stored before."""
    text = json.dumps(data, ensure_ascii=False)
    clean = ask.engine.redaction.redact(text)
    if clean == text:
        return data
    try:
        found: T = json.loads(clean)
    except ValueError:
        raise EncryptionError("the data holds a secret that cannot be taken out of it") from None
    return found
