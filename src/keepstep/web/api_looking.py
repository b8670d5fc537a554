"""Routes of the API that look deeper: the inbox, children, figures, conversations and statistics."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec

from ..errors import RunNotFound
from ..model import RunQuery
from ..views import plain
from ..views.conversation import Conversation, conversation_of
from ..views.counts import count, counts_by_status
from ..views.cut import cut_fields
from ..views.explain import explain, explanation_data
from ..views.inbox import InboxQuery, ItemKind, context_data, context_of, decision_data, decisions_of, inbox
from ..views.statistics import Statistics, statistics_of
from .api_runs import JSON, MOST_ROWS, RunFilter, Seq
from .routes import Ask, Content, NotJson, get


class InboxFilter(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the inbox: of some kinds, of one workflow, and of what has waited since before an instant."""

    kind: list[ItemKind] = []
    workflow: str | None = None
    before: datetime | None = None
    offset: Annotated[int, msgspec.Meta(ge=0, le=100_000)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 25


class InboxPage(msgspec.Struct):
    """Items that wait for a person, the earliest deadline first; `more` says that not every run was looked at."""

    items: list[JSON]
    counts: dict[str, int]
    total: int
    more: bool


@get("/inbox", InboxPage, query=InboxFilter)
async def list_inbox(ask: Ask) -> Any:
    """List everything that waits for a person, with its question, context and deadline."""
    query, now = ask.query, datetime.now(UTC)
    if query.before is not None and query.before.tzinfo is None:
        raise NotJson("before needs a time zone, such as 2026-01-31T12:00:00Z")
    found = await inbox(ask.engine, InboxQuery(frozenset(query.kind), query.workflow, query.before), now)
    items = found.items[query.offset : query.offset + query.limit]
    contexts = [await context_of(ask.engine, item) for item in items]
    decisions_of(ask.engine).show(items)
    shown = [cut_fields(await ask.shown(context_data(one)), ("question", "published", "input")) for one in contexts]
    return InboxPage(shown, {kind.value: count for kind, count in found.counts.items()}, len(found.items), found.more)


class Decided(msgspec.Struct):
    """Decisions about items that somebody has seen, the newest first."""

    decisions: list[JSON]


@get("/inbox/decided", Decided)
async def list_decided(ask: Ask) -> Any:
    """List what was decided in the last hour about items that this server has shown."""
    found = await decisions_of(ask.engine).recent(datetime.now(UTC))
    return Decided([await ask.shown(decision_data(one), "value") for one in found])


class Counted(msgspec.Struct):
    """A number of runs; with `more`, there are more than this number."""

    number: int
    more: bool


class Counts(msgspec.Struct):
    """How many runs match a filter: with any of its statuses, and with each status."""

    total: Counted
    statuses: dict[str, Counted]


@get("/counts", Counts, query=RunFilter)
async def count_runs(ask: Ask) -> Counts:
    """Count the runs of a filter, up to 1,000 of each status; counts are at most two seconds old."""
    query = ask.query.query()
    total, by_status = await count(ask.engine, query), await counts_by_status(ask.engine, query)
    return Counts(
        Counted(total.number, total.more),
        {status.value: Counted(one.number, one.more) for status, one in by_status.items()},
    )


class Explained(msgspec.Struct, forbid_unknown_fields=True):
    """Without `plans`, a retry and a recovery are not planned; `to` or `step` also plan a rewind."""

    plans: bool = True
    to: Seq | None = None
    step: str | None = None


@get("/runs/{run}/explain", JSON, query=Explained)
async def explain_run(ask: Ask) -> JSON:
    """Explain why a run stands where it does, and what a person can do."""
    run, query = await (await ask.handle()).run(), ask.query
    found = await explain(ask.engine, run, plans=query.plans, to=query.to, step=query.step)
    shown: JSON = await ask.shown(explanation_data(found))
    return shown


class ChildPage(msgspec.Struct):
    """One page of a run's children, newest first. `call` is the key of the call, and `children` whether it has some."""

    run: str
    parent: str | None
    children: list[JSON]
    next: str | None
    unreadable: list[str]


class Children(msgspec.Struct, forbid_unknown_fields=True):
    """A page of children; `after` is the `next` of the page before."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 50
    after: str | None = None


@get("/runs/{run}/children", ChildPage, query=Children)
async def list_children(ask: Ask) -> Any:
    """List the children of a run, page by page; a tree asks for each of them in turn."""
    run, query = await (await ask.handle()).run(), ask.query
    store = ask.engine.store

    def look() -> ChildPage:
        page = store.list_runs(RunQuery(parent=run.id, limit=query.limit, after=query.after))
        found = [
            {
                **plain.run_data(one),
                "call": one.parent_key,
                "children": bool(store.list_runs(RunQuery(parent=one.id, limit=1)).runs),
            }
            for one in page.runs
        ]
        return ChildPage(run.id, run.parent, found, page.next, list(page.unreadable))

    return await ask.shown(await ask.engine.call(look))


class Form(msgspec.Struct, forbid_unknown_fields=True):
    """The form of a figure; `figure` is an SVG without colours of its own, for a page that brings them."""

    form: Literal["svg", "figure", "mermaid", "dot", "text"] = "svg"


@get("/runs/{run}/figure", Content, query=Form, media_type="image/svg+xml")
async def get_run_figure(ask: Ask) -> Content:
    """Return a figure of what a run did."""
    from ..views.figures import MEDIA, figure_of_run  # noqa: PLC0415 - a server starts without its layouts

    run = await (await ask.handle()).run()
    text = await figure_of_run(ask.engine, run, ask.query.form)
    return Content(ask.engine.redaction.redact(text).encode(), MEDIA[ask.query.form])


@get("/workflows/{name}/figure", Content, query=Form, media_type="image/svg+xml")
async def get_workflow_figure(ask: Ask) -> Content:
    """Return a figure of a graph or dag whose code this server has."""
    from ..views.figures import MEDIA, figure_of_workflow  # noqa: PLC0415 - as above

    text = await figure_of_workflow(ask.engine, ask.path["name"], ask.query.form)
    if text is None:
        why = "it is a function, or its code is not here; draw one of its runs"
        raise RunNotFound(f"this server cannot draw {ask.path['name']!r}: {why}")
    return Content(ask.engine.redaction.redact(text).encode(), MEDIA[ask.query.form])


class Turns(msgspec.Struct, forbid_unknown_fields=True):
    """A page of turns after a record."""

    after: Seq = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)] = 100


@get("/runs/{run}/conversation", Conversation, query=Turns)
async def get_conversation(ask: Ask) -> Any:
    """Return the calls of models and tools that the agents of a run made, and the answers of people."""
    query, store = ask.query, ask.engine.store
    return await ask.shown(await ask.engine.call(conversation_of, store, ask.path["run"], query.after, query.limit))


@get("/runs/{run}/statistics", Statistics)
async def get_statistics(ask: Ask) -> Any:
    """Return what the records of a run add up to: kinds, workers, errors, and the calls and seconds of each step."""
    return await ask.shown(await ask.engine.call(statistics_of, ask.engine.store, ask.path["run"]))
