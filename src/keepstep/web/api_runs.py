"""Routes of the API that read runs: lists, facts, records, state, differences and the audit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec

from ..checks import check_name
from ..errors import EncryptionError, RunNotFound
from ..history.audit import AuditEntry, incarnations, transitions
from ..kernel.callback import CALL
from ..kernel.replay import unsealed
from ..model import Checkpoint, RunQuery, Status
from ..model.tree import thaw
from ..records.progress import report_in
from ..records.record import ENCRYPTED, checkpoint
from ..views import plain
from ..views.aside import asides
from ..views.cut import clean, cut, cut_fields
from ..views.facts import facts_data, facts_of
from ..views.finding import near_ids
from ..views.overview import readable
from ..views.timeline import MOST_RECORDS, Timeline, timeline_of
from ..workflows.options import checked_tags
from .routes import Ask, Content, NotAllowed, NotJson, Role, get, is_number

#: Runs and records of one page at most.
MOST_ROWS = 500
Rows = Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)]
Seq = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
JSON = dict[str, Any]


class RunFilter(msgspec.Struct, forbid_unknown_fields=True):
    """Filters of a list of runs. `tag` has the form NAME=VALUE; `after` is the `next` of the page before.

    `awaits` is the name of a signal that a run waits for, `needs_person` selects runs that a person can move on, and
    `open_failure` those that failed or are set aside and have no fork that completed.
    """

    workflow: list[str] = []
    not_workflow: list[str] = []
    version: str | None = None
    status: list[Status] = []
    tag: list[str] = []
    queue: str | None = None
    parent: str | None = None
    worker: str | None = None
    id_prefix: str | None = None
    awaits: str | None = None
    needs_person: bool = False
    open_failure: bool = False
    created_before: datetime | None = None
    created_after: datetime | None = None
    updated_before: datetime | None = None
    updated_after: datetime | None = None
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
        for name in _INSTANTS:
            instant = getattr(self, name)
            if instant is not None and instant.tzinfo is None:
                raise NotJson(f"{name} needs a time zone, such as 2026-01-31T12:00:00Z")
        for name in (*self.workflow, *self.not_workflow):
            check_name(name, "workflow")
        return RunQuery(
            workflows=frozenset(self.workflow),
            not_workflows=frozenset(self.not_workflow),
            status=frozenset(self.status),
            tags=checked_tags(tags),
            **{name: getattr(self, name) for name in _SAME},
        )


_INSTANTS = ("created_before", "created_after", "updated_before", "updated_after")
#: Filters that a query has under the same names.
_SAME = (
    *("version", "queue", "parent", "worker", "id_prefix", "awaits", "needs_person", "open_failure"),
    *(*_INSTANTS, "system", "limit", "after"),
)


class RunList(msgspec.Struct):
    """One page of runs; `next` continues the list, and `unreadable` names damaged runs of this page."""

    runs: list[JSON]
    next: str | None
    unreadable: list[str]


@get("/runs", RunList, query=RunFilter)
async def list_runs(ask: Ask) -> RunList:
    """List runs, newest first, page by page."""
    page = await ask.engine.call(ask.engine.store.list_runs, ask.query.query())
    shown = await ask.shown([plain.run_data(run) for run in page.runs])
    return RunList(shown, page.next, list(page.unreadable))


@get("/aside", RunList, query=RunFilter)
async def list_aside(ask: Ask) -> RunList:
    """List runs that are set aside, with the reason of each."""
    page = await asides(ask.engine, replace(ask.query.query(), status=frozenset({Status.SET_ASIDE})))
    shown = await ask.shown([plain.aside_data(one) for one in page.runs])
    return RunList(shown, page.next, list(page.unreadable))


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
    data = await engine.call(facts_data, facts)
    data["waits"] = [plain.wait_data(wait) for wait in facts.view.waits]
    data["actions"] = [{"act": one.act.value, "run": one.run, "name": one.name} for one in facts.view.actions]
    shown: JSON = await ask.shown(data)
    shown["published"], missing = _cut_each(shown["published"])
    cut_fields(shown, ("input", "result", "progress"))
    if missing:
        shown.setdefault("missing", {})["published"] = missing
    return shown


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
    shown = await ask.engine.call(_records_data, found, query.values, ask.engine.redaction.redact)
    last = found[-1][0].seq if found else run.seq
    return RecordPage(run.id, run.seq, shown, last if last < run.seq else None)


def _records_data(found: list[tuple[Checkpoint, bool]], values: bool, redact: Callable[[str], str]) -> list[JSON]:
    return [_record_data(one, hidden, redact, values=values) for one, hidden in found]


def _record_data(one: Checkpoint, hidden: bool, redact: Callable[[str], str], *, values: bool) -> JSON:
    data = {**plain.record_data(one), "hidden": hidden}
    if not values:
        for name in _VALUES:
            del data[name]
        if data["error"] is not None:
            del data["error"]["traceback"]
    return cut_fields(clean(data, redact), _VALUES)


@get("/runs/{run}/records/{seq}", JSON)
async def get_record(ask: Ask) -> JSON:
    """Return one record of a run, whole."""
    seq = _number(ask.path["seq"])
    run = await (await ask.handle()).run()
    found = await _records(ask, run.id, seq - 1, 1)
    if not found or found[0][0].seq != seq:
        raise RunNotFound(f"run {run.id!r} has no record {seq}; it has {run.seq}", run.id)
    one, hidden = found[0]
    redact = ask.engine.redaction.redact
    data = await ask.engine.call(lambda: _record_data(one, hidden, redact, values=True))
    more: JSON = await ask.shown({"data": {name: one.data[name] for name in one.data if name != "input"}}, "data")
    return {**data, "data": more["data"]}


def _number(text: str) -> int:
    if not is_number(text) or int(text) < 1:
        raise NotJson(f"a record has a number from 1 on, got {text[:50]!r}")
    return int(text)


async def _records(ask: Ask, run: str, after: int, limit: int) -> list[tuple[Checkpoint, bool]]:
    """Return records, each with whether its values are hidden: without their key, or without the role to act."""
    rows = await ask.engine.call(ask.engine.store.list_checkpoints, run, after, limit)
    found = []
    async for record, checksum in unsealed(ask.engine, rows, run, after):
        whole = checkpoint(record, checksum)
        shown = whole if ask.role >= Role.ACT else plain.without_secret(whole)
        found.append((shown, shown is not whole or record.packed == ENCRYPTED))
    return found


def _cut_each(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Cut each value of a mapping; return them, and the bytes that some of them lack."""
    found = {key: cut(value) for key, value in values.items()}
    return {key: value for key, (value, _) in found.items()}, {key: lacks for key, (_, lacks) in found.items() if lacks}


#: Values that can be fetched whole, in raw form: of a record, and of a run.
RecordPart = Literal["value", "input"]
RunPart = Literal["input", "result", "progress"]


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """Which value of the record."""

    part: RecordPart = "value"


@get("/runs/{run}/records/{seq}/raw", Content, query=Part)
async def get_record_raw(ask: Ask) -> Content:
    """Return a value of a record whole, as a file of JSON with its types."""
    seq, part = _number(ask.path["seq"]), ask.query.part
    run = await (await ask.handle()).run()
    found = await _records(ask, run.id, seq - 1, 1)
    if not found or found[0][0].seq != seq:
        raise RunNotFound(f"run {run.id!r} has no record {seq}; it has {run.seq}", run.id)
    one, hidden = found[0]
    if hidden and ask.role < Role.ACT and CALL in one.step:
        raise NotAllowed(f"record {seq} of run {run.id!r} holds the secret of a callback; the role act may see it")
    if hidden:
        raise EncryptionError(f"record {seq} of run {run.id!r} is encrypted; this server lacks its key")
    stored = one.value if part == "value" else one.data.get("input", "").encode() or None
    if stored is None:
        raise RunNotFound(f"record {seq} of run {run.id!r} has no {part}", run.id)
    return await _raw(ask, stored, f"{part}-{seq}.json")


class RunPartOf(msgspec.Struct, forbid_unknown_fields=True):
    """Which value of the run."""

    part: RunPart = "result"


@get("/runs/{run}/raw", Content, query=RunPartOf)
async def get_run_raw(ask: Ask) -> Content:
    """Return the input, the result or the progress of a run whole, as a file of JSON with its types."""
    engine, part = ask.engine, ask.query.part
    run, locked = readable(engine.encryption, await (await ask.handle()).run())
    if locked is not None:
        raise EncryptionError(f"run {run.id!r} is encrypted; this server lacks its key")
    stored = {"input": run.input, "result": run.output, "progress": report_in(run.progress)}[part]
    if stored is None:
        raise RunNotFound(f"run {run.id!r} has no {part}", run.id)
    return await _raw(ask, stored, f"{part}.json")


async def _raw(ask: Ask, stored: bytes, name: str) -> Content:
    return Content(await ask.engine.call(_raw_shown, stored, ask.engine.redaction.redact), "application/json", name)


def _raw_shown(stored: bytes, redact: Callable[[str], str]) -> bytes:
    """Return stored JSON without secrets; it stays as it is if it has none."""
    data = json.loads(bytes(stored))
    found = clean(data, redact)
    return stored if found is data else json.dumps(found).encode()


class TimelineFilter(msgspec.Struct, forbid_unknown_fields=True):
    """A page of a timeline after a record."""

    after: Seq = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_RECORDS)] = MOST_RECORDS


@get("/runs/{run}/timeline", Timeline, query=TimelineFilter)
async def get_timeline(ask: Ask) -> Timeline:
    """Return the records of a run as columns without values, with its leases, recoveries and superseded records."""
    engine, query = ask.engine, ask.query
    return await engine.call(
        timeline_of, engine.store, ask.path["run"], query.after, query.limit, engine.redaction.redact
    )


class At(msgspec.Struct, forbid_unknown_fields=True):
    """A record, by its number, and a level of the state."""

    at: Seq | None = None
    stage: str | None = None
    agent: str | None = None


@get("/runs/{run}/state", JSON, query=At)
async def get_state(ask: Ask) -> JSON:
    """Return the state of a graph's run, now or after a record."""
    handle, query = await ask.handle(), ask.query
    answer: JSON = {"run": handle.id, "at": query.at, "state": None, "missing": {}, "hidden": False}
    try:
        found = await handle.state(query.at, stage=query.stage, agent=query.agent)
    except EncryptionError:
        return {**answer, "hidden": True}
    answer["state"] = await ask.shown({key: plain.untagged(thaw(tree)) for key, tree in found.kept().items()})
    answer["state"], answer["missing"] = _cut_each(answer["state"])
    return answer


class Between(msgspec.Struct, forbid_unknown_fields=True):
    """Two records of a run, or one of this run and one of another."""

    a: Seq | None = None
    b: Seq | None = None
    other: str | None = None


@get("/runs/{run}/diff", JSON, query=Between)
async def get_diff(ask: Ask) -> JSON:
    """Return what changed between two records of a run, or between two runs."""
    handle, query = await ask.handle(), ask.query
    try:
        found = await handle.diff(query.a, query.b, other=query.other)
    except EncryptionError:
        return {"hidden": True}
    data: JSON = await ask.shown(plain.difference_data(found))
    if ask.role < Role.ACT:
        data["changed"] = {
            key: [None if plain.is_secret(key, one) else one for one in pair] for key, pair in data["changed"].items()
        }
    missing: JSON = {}
    for name in ("changed", "published", "state"):
        if isinstance(data[name], dict):
            data[name], lacks = _cut_each(data[name])
            missing |= {name: lacks} if lacks else {}
    return {**data, "missing": missing, "hidden": False}


class Entries(msgspec.Struct, forbid_unknown_fields=True):
    """A page of the audit after a number of entries, and whether only changes of the status are wanted."""

    moves: bool = False
    after: Seq = 0
    limit: Rows = MOST_ROWS


@get("/runs/{run}/audit", JSON, query=Entries)
async def get_audit(ask: Ask) -> JSON:
    """Return who did what to a run, when and why, page by page, and the workers that have held it."""
    entries = await (await ask.handle()).audit()
    found: JSON = await ask.shown(await ask.engine.call(_audit_page, entries, ask.query))
    return found


def _audit_page(entries: list[AuditEntry], asked: Entries) -> JSON:
    shown = list(transitions(entries)) if asked.moves else entries
    last = asked.after + asked.limit
    return {
        "entries": [plain.audit_data(one) for one in shown[asked.after : last]],
        "next": last if last < len(shown) else None,
        "incarnations": [plain.incarnation_data(one) for one in incarnations(entries)],
    }


class Signals(msgspec.Struct, forbid_unknown_fields=True):
    """A page of signals after a number; `values` includes their payloads."""

    after: Seq = 0
    limit: Rows = 200
    values: bool = False


@get("/runs/{run}/signals", JSON, query=Signals)
async def list_signals(ask: Ask) -> JSON:
    """Return the signals that a run has received, in order, without their payloads unless they are asked for."""
    handle, query = await ask.handle(), ask.query
    if query.values and ask.role < Role.ACT:
        raise NotAllowed("payloads of signals are shown to callers with the role act; leave values out")
    found = await ask.engine.call(ask.engine.store.list_signals, handle.id, query.after, query.limit)
    shown = [await ask.shown(plain.signal_data(one, values=query.values), "payload") for one in found]
    return {"run": handle.id, "signals": shown, "next": found[-1].seq if len(found) == query.limit else None}


@get("/runs/{run}/recovery", JSON)
async def get_recovery(ask: Ask) -> JSON:
    """Return whether a run can be recovered, its last success, and what a recovery would run again."""
    handle = await ask.handle()
    found: JSON = await ask.shown(plain.recovery_data(await handle.recover(dry_run=True)), "value")
    return found
