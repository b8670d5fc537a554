"""The tabs of the page of one run, each a page of its own."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from markupsafe import Markup

from ...engine.handle import RunHandle
from ...errors import DefinitionError
from ...history.audit import incarnations
from ...history.state_edits import run_with_state, trees_of
from ...kernel.graph.stored import position_at
from ...model import Run, RunQuery
from ...model.tree import thaw
from ...views import plain, run_records
from ...views.conversation import Turn, conversation_of
from ...views.cut import cut
from ...views.waits import waits_of
from ...views.wording import waits_in_words
from ..api_runs import Seq
from .run import found_run, head_of
from .table import Look, Shown, page

#: Rows of one page of signals or children.
ROWS = 100
#: Records up to which the audit of a run is shown, because it is made from all of them at once.
MANY_RECORDS = 10_000
#: Rows of an audit.
MOST_ENTRIES = 2_000
#: Keys under which messages of the common frameworks hold their text or the parts of it, and how deep they nest.
_TEXTS = ("text", "content", "parts", "message", "messages", "output", "choices", "data", "kwargs")
_DEEPEST = 6


class After(msgspec.Struct, forbid_unknown_fields=True):
    """A page after a number."""

    after: Seq = 0


@page("/runs/{run}/graph")
async def show_graph(look: Look) -> Shown:
    """Show the definition of a run as a picture, coloured by what happened."""
    engine, run = look.engine, await found_run(look)
    workflow: Any = engine.workflows.get(run.workflow)
    shape = workflow.shape() if hasattr(workflow, "shape") else None
    picture = await engine.call(run_records.picture_of, engine.store, run, shape)
    drawn = Markup(await look.redacted(picture.svg))  # noqa: S704 - the drawing has escaped every name
    known = shape is not None or workflow is not None or not run.fingerprint.startswith("graph:")
    data = {"picture": picture, "drawn": drawn, "known": known}
    return Shown("run_graph.html", await head_of(look, run) | data)


@page("/runs/{run}/state")
async def show_state(look: Look) -> Shown:
    """Show the state of a graph's run now, by level."""
    engine, run = look.engine, await found_run(look)
    head = await head_of(look, run)
    levels: list[dict[str, Any]] = []
    at: dict[str, Any] = {"carries": True, "step": None, "next": None}
    if head["view"].locked is None:
        try:
            await run_with_state(engine, run.id)
            position = await position_at(engine, run)
        except DefinitionError:
            at["carries"] = False
        else:
            at |= {"step": position.step, "next": position.at}
            for level in position.levels:
                state = position.state(trees_of(engine, run), run.id, level)
                keys = {key: cut(plain.untagged(thaw(tree))) for key, tree in state.kept().items()}
                levels.append({"name": level.replace(":", " "), "keys": keys})
    return Shown("run_state.html", {**head, "levels": await look.redacted(levels), "at": at})


@page("/runs/{run}/conversation", query=After)
async def show_conversation(look: Look) -> Shown:
    """Show the calls of models and tools by agents, and the answers of people, as messages."""
    engine, run = look.engine, await found_run(look)
    found = await engine.call(conversation_of, engine.store, run.id, look.query.after, ROWS)
    turns = await look.redacted(
        [{**msgspec.structs.asdict(one), "who": _who(one), "text": _text(one.value)} for one in found.turns]
    )
    return Shown("run_conversation.html", {**await head_of(look, run), "turns": turns, "next": found.next})


def _who(one: Turn) -> str:
    match one.kind:
        case "model":
            return "Model"
        case "answer":
            return f"{one.by or 'somebody'} answered {one.name}"
        case kind:
            return f"{kind.capitalize()} {one.name}"


def _text(value: Any, depth: int = 0) -> str:
    """Return the text of a message, wherever the common frameworks keep it; empty if there is none."""
    if isinstance(value, str) or depth > _DEEPEST:
        return value if isinstance(value, str) else ""
    if isinstance(value, list):
        return "\n".join(filter(None, (_text(one, depth + 1) for one in value)))
    if isinstance(value, dict):
        return next(filter(None, (_text(value.get(name), depth + 1) for name in _TEXTS)), "")
    return ""


@page("/runs/{run}/tokens")
async def show_tokens(look: Look) -> Shown:
    """Show the tokens of a run as they stream."""
    engine, run = look.engine, await found_run(look)
    head = await head_of(look, run)
    found = [] if head["view"].locked else await engine.call(run_records.tokens_of, engine.store, run)
    shown = [
        {"step": one.step, "life": one.life, "attempt": one.attempt, "text": one.text, "missing": one.missing}
        for one in found
    ]
    return Shown("run_tokens.html", {**head, "streams": await look.redacted(shown)})


@page("/runs/{run}/cost")
async def show_cost(look: Look) -> Shown:
    """Show what a run has spent, by step, agent and model."""
    engine, run = look.engine, await found_run(look)
    head = await head_of(look, run)
    cost = None
    if head["view"].locked is None:
        cost = await engine.call(run_records.cost_of, engine.store, run, datetime.now(UTC))
    return Shown("run_cost.html", {**head, "cost": cost})


@page("/runs/{run}/signals", query=After)
async def show_signals(look: Look) -> Shown:
    """Show the signals of a run: who sent each, and whether it was read."""
    engine, run = look.engine, await found_run(look)
    found = await engine.call(run_records.signals_of, engine.store, run, look.query.after, ROWS)
    payloads = await look.redacted({one.signal.seq: one.payload for one in found}) if look.may("act") else None
    rows = {int(seq): payload for seq, payload in payloads.items()} if payloads is not None else None
    following = found[-1].signal.seq if len(found) == ROWS else None
    return Shown(
        "run_signals.html", {**await head_of(look, run), "signals": found, "payloads": rows, "next": following}
    )


@page("/runs/{run}/audit")
async def show_audit(look: Look) -> Shown:
    """Show who did what to a run, when and why, and which workers held it."""
    engine, run = look.engine, await found_run(look)
    head = await head_of(look, run)
    data: dict[str, Any] = {"entries": [], "leases": [], "more": 0, "long": run.seq > MANY_RECORDS}
    if not data["long"]:
        entries = await RunHandle(engine, run.id).audit()
        shown = await look.redacted([plain.audit_data(one) for one in entries[-MOST_ENTRIES:]])
        leases = await look.redacted([plain.incarnation_data(one) for one in incarnations(entries)])
        data |= {"entries": shown[::-1], "leases": leases[::-1], "more": len(entries) - len(shown)}
    return Shown("run_audit.html", head | data)


class Page(msgspec.Struct, forbid_unknown_fields=True):
    """A page of a list after a cursor."""

    after: str | None = None


@page("/runs/{run}/children", query=Page)
async def show_children(look: Look) -> Shown:
    """Show the children of a run; the children of each are read when it is opened."""
    run = await found_run(look)
    return Shown("run_children.html", {**await head_of(look, run), **await _children(look, run)})


@page("/runs/{run}/children/list", query=Page)
async def list_children(look: Look) -> Shown:
    """Show the children of a run as a part of a tree."""
    run = await found_run(look)
    return Shown("run_children_part.html", {"run": run, **await _children(look, run)})


async def _children(look: Look, run: Run) -> dict[str, Any]:
    query = RunQuery(parent=run.id, limit=ROWS, after=look.query.after, system=True)
    found = await look.engine.call(look.engine.store.list_runs, query)
    now = datetime.now(UTC)
    waits = {one.id: waits_in_words(waits_of(one, now), now) for one in found.runs}
    return {"children": found.runs, "waits": waits, "next": found.next}


@page("/runs/{run}/values")
async def show_values(look: Look) -> Shown:
    """Show the input and the result of a run, and what it has published."""
    engine, run = look.engine, await found_run(look)
    head = await head_of(look, run)
    shown = {} if head["view"].locked else await engine.call(run_records.published_of, engine.store, run)
    return Shown("run_values.html", {**head, "published": await look.redacted(shown)})
