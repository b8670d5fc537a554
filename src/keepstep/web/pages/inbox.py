"""The inbox: everything that waits for a person, what is needed to decide, and what was decided lately."""

from __future__ import annotations

import shlex
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec

from ...model import Run
from ...views.inbox import Context, InboxQuery, Item, ItemKind, context_of, decisions_of, inbox
from ...views.wording import one_line, step_name
from .table import Look, Shown, page

#: Items of one page.
ROWS = 25
#: Characters of a question that stand in the heading of its item.
LONGEST_TITLE = 200
Older = Literal["", "5m", "1h", "1d", "7d"]
_OLDER = {
    "5m": timedelta(minutes=5),
    "1h": timedelta(hours=1),
    "1d": timedelta(days=1),
    "7d": timedelta(days=7),
}


class InboxFilter(msgspec.Struct, forbid_unknown_fields=True):
    """A page of the inbox, of one kind, one workflow, and of items that have waited for at least `older`."""

    kind: ItemKind | None = None
    workflow: str | None = None
    older: Older = ""
    page: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1


@page("/inbox", query=InboxFilter)
async def show_inbox(look: Look) -> Shown:
    """Show what waits for a person, the earliest deadline first."""
    query, now, engine = look.query, datetime.now(UTC), look.engine
    before = now - _OLDER[query.older] if query.older else None
    found = await inbox(engine, InboxQuery(workflow=query.workflow, before=before), now)
    items = [item for item in found.items if query.kind in (None, item.kind)]
    first = (query.page - 1) * ROWS
    contexts = [await redacted(look, await context_of(engine, item)) for item in items[first : first + ROWS]]
    decisions = decisions_of(engine)
    decided = await decisions.recent(now)
    decisions.show(context.item for context in contexts)
    data = {
        "waiting": [(one, asked(one), acts(one)) for one in contexts],
        "decided": [replace(one, value=await look.redacted(one.value)) for one in decided],
        "counts": found.counts,
        "total": sum(found.counts.values()),
        "more": found.more,
        "first": first,
        "last": first + len(contexts),
        "of": len(items),
        "filters": msgspec.structs.asdict(query) | {"page": None},
        "kinds": list(ItemKind),
        "older": list(_OLDER),
    }
    return Shown("inbox.html", data)


async def redacted(look: Look, context: Context) -> Context:
    """Return a context without secrets that a redaction pattern finds now, although they were stored before."""
    published, given = await look.redacted((context.published, context.input))
    return replace(context, published=published, input=given)


def asked(context: Context) -> str:
    """Return what a person is asked, in words."""
    item, name, question = context.item, step_name(context.item.name), context.question
    match item.kind:
        case ItemKind.APPROVAL:
            return (
                one_line(question, LONGEST_TITLE)
                if isinstance(question, str) and question.strip()
                else f"Answer {name}"
            )
        case ItemKind.CALLBACK:
            return f"Complete {name}"
        case ItemKind.DOUBT:
            return f"Did {name} happen?"
        case ItemKind.BREAKPOINT:
            return f"Stopped {name}"
        case ItemKind.PAUSED:
            return f"Paused by {context.by}" if context.by else "Paused"
        case ItemKind.UNDO:
            return f"Undo failed: {', '.join(map(step_name, context.failed_undo)) or 'steps'}"
        case ItemKind.SET_ASIDE:
            return "Set aside"


# -- acts --------------------------------------------------------------------------------------------------------------


def acts(context: Context) -> list[dict[str, Any]]:
    """Return the acts on an item, the usual one first."""
    item = context.item
    match item.kind:
        case ItemKind.APPROVAL | ItemKind.CALLBACK:
            return _answers(context)
        case ItemKind.DOUBT:
            return _verdicts(item)
        case ItemKind.BREAKPOINT | ItemKind.PAUSED:
            go = _act(item, "resume", "Resume", "The run goes on where it stopped.", main=True)
            return [go, *_edit(item), _cancel(item, "Cancel", "keepstep cancel")]
        case ItemKind.UNDO:
            again = _act(item, "retry", "Retry", "The failed undo steps are performed again.", main=True)
            accept = "The failed undo steps stay as they are: what they should have undone remains. The run ends."
            skip = _act(item, "skip", "Skip", accept, role="admin", danger=True)
            return [again, skip]
        case ItemKind.SET_ASIDE:
            text = "A worker takes the run again. Completed steps do not run again."
            go = _act(item, "retry", "Retry", text, command=_line("aside retry", item.run), main=True)
            return [go, *_edit(item), _cancel(item, "Drop", "keepstep aside drop")]


def _line(words: str, run: Run, *more: str) -> str:
    return shlex.join(("keepstep", *words.split(), run.id, *more))


def _act(
    item: Item, verb: str, label: str, text: str, *, command: str = "", reason: bool = True, **more: Any
) -> dict[str, Any]:
    run = item.run
    body = {"seq": run.seq, "signals": run.signals, **more.pop("body", {})}
    line = command or _line(verb, run)
    return {
        "label": label,
        "title": f"{label}: {run.id}",
        "text": text,
        "url": f"/api/v1/runs/{quote(run.id, safe='')}/{verb}",
        "body": body,
        "command": f"{line}[ --reason {{reason}}]" if reason else line,
        "reason": reason,
        "done": f"{label}: {run.id}",
        **more,
    }


def _answers(context: Context) -> list[dict[str, Any]]:
    item, asked_with = context.item, context.question
    name, run = item.name, item.run
    # The id keeps a second answer that is sent at the same moment from being read as well.
    body = {"name": name, "id": f"inbox:{name}:{run.seq}:{run.signals}"}
    other = asked_with.get("arguments") if isinstance(asked_with, dict) else None
    is_dict = isinstance(other, dict)
    field = {
        "name": "payload",
        "label": "Arguments" if is_dict else "Value",
        "type": "json",
        "required": True,
        "help": 'JSON, for example true, 42, "text" or {"amount": 10}',
        **({"value": other} if is_dict else {}),
    }
    edited = _act(
        item,
        "approve",
        "Approve with changes" if is_dict else "Answer…",
        f"The run receives this value as its answer to {name}.",
        command=_line("signal", run, name) + " {payload}",
        reason=False,
        fields=[field],
        body=body,
    )
    if item.kind is ItemKind.CALLBACK:
        return [{**edited, "label": "Complete…", "main": True}]
    yes = _act(
        item,
        "approve",
        "Approve",
        f"The run receives true as its answer to {name}.",
        command=_line("approve", run, name),
        reason=False,
        body=body,
        main=True,
    )
    no = _act(
        item,
        "deny",
        "Deny",
        f"The run receives false as its answer to {name}.",
        command=_line("approve", run, name, "--deny"),
        reason=False,
        body=body,
        danger=True,
    )
    return [yes, no, edited]


def _verdicts(item: Item) -> list[dict[str, Any]]:
    name, run = step_name(item.name), item.run
    given = {"name": "value", "label": "Result", "type": "json", "required": True, "help": "JSON, such as null"}
    body = {"step": item.name}
    happened = _act(
        item,
        "resolve",
        "It happened…",
        f"{name} counts as completed with this result, and its body does not run again.",
        command=_line("resolve", run, item.name) + " --result {value}",
        fields=[given],
        body={**body, "verdict": "result"},
        main=True,
    )
    failed = _act(
        item,
        "resolve",
        "It failed",
        f"{name} counts as failed, and the run receives StepInDoubt. Its body does not run again.",
        command=_line("resolve", run, item.name, "--failed"),
        body={**body, "verdict": "failed"},
    )
    again = _act(
        item,
        "resolve",
        "Run it again",
        f"The body of {name} runs again. If it has happened, its effect happens twice.",
        command=_line("resolve", run, item.name, "--again"),
        body={**body, "verdict": "again"},
        danger=True,
    )
    return [happened, failed, again]


def _edit(item: Item) -> list[dict[str, Any]]:
    """Return the edit of a graph's state; other runs carry none."""
    if not item.run.fingerprint.startswith("graph:"):
        return []
    fields = [
        {"name": "values", "label": "New values of the state", "type": "json", "required": True, "value": {}},
        {"name": "next", "label": "Next step", "help": "empty: the one that comes next anyway"},
    ]
    text = "These keys of the state get new values, and the run goes on with them. The history keeps the old ones."
    command = _line("edit", item.run, "--set") + " KEY=JSON[ --next {next}]"
    return [_act(item, "edit", "Edit state…", text, command=command, fields=fields, role="admin")]


def _cancel(item: Item, label: str, words: str) -> dict[str, Any]:
    text = "The run ends as cancelled. This is final."
    line = f"{words} {shlex.quote(item.run.id)}"
    return _act(item, "cancel", label, text, command=line, role="admin", danger=True)
