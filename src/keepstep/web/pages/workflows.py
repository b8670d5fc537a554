"""The pages of workflows: what there is, how it fares, and a form that starts a run."""

from __future__ import annotations

import inspect
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any
from urllib.parse import quote as segment

import msgspec
from markupsafe import Markup

from ...drawing.svg import figure
from ...errors import DefinitionError, InvalidGraph, KeepstepError
from ...model import Status
from ...views.plain import arguments
from ...views.queues import all_queues
from ...views.start_form import parameters_of, texts_of
from ...views.workflows import facts_data, startable, workflow_data, workflow_facts, workflows
from .table import Look, Shown, page

if TYPE_CHECKING:
    from ...workflows.definition import Workflow
    from ...workflows.shape import Shape

#: Drawings that are kept, because the layout of a large one takes a second.
MOST_DRAWINGS = 50
#: Statuses of the list, in the order of its columns.
_COLUMNS = (Status.RUNNING, Status.WAITING, Status.QUEUED, Status.FAILED, Status.SET_ASIDE, Status.COMPLETED)

_drawn = lru_cache(maxsize=MOST_DRAWINGS)(figure)


def _about(workflow: Workflow[..., Any] | None) -> str:
    text = None if workflow is None else inspect.getdoc(workflow.fn)
    return (text or "").strip().partition("\n\n")[0]


def _form(workflow: Workflow[..., Any]) -> str:
    return str(workflow.shape().form) if hasattr(workflow, "shape") else "function"


@page("/workflows")
async def list_workflows(look: Look) -> Shown:
    """Show the workflows that this server or a living worker knows, or that new runs have."""
    known = startable(look.engine)
    found = [
        {**workflow_data(one), "open": str(one.open), "form": _form(known[one.name]) if one.name in known else ""}
        for one in await workflows(look.engine)
    ]
    return Shown("workflows.html", {"workflows": found, "columns": [status.value for status in _COLUMNS]})


@page("/workflows/{name}")
async def show_workflow(look: Look) -> Shown:
    """Show one workflow: its picture, versions, rates, durations, common errors and steps."""
    engine, name = look.engine, look.path["name"]
    facts = await workflow_facts(engine, name)
    known = startable(engine).get(name)
    picture, trouble = await _picture(look, known)
    data = {
        "one": await look.redacted(facts_data(facts)),
        "open": facts.info.open,
        "counts": facts.info.counts,
        "known": known is not None,
        "form": "" if known is None else _form(known),
        "about": await look.redacted(_about(known)),
        "picture": picture,
        "trouble": trouble,
        "command": _command(known) if known is not None else f"keepstep start FILE.py:{name}",
    }
    return Shown("workflow.html", data)


async def _picture(look: Look, workflow: Workflow[..., Any] | None) -> tuple[Markup | None, str]:
    """Return the drawing of a definition, or why there is none."""
    if workflow is None:
        return None, "Its code is not here. Start the server with it: keepstep serve FILE.py"
    if not hasattr(workflow, "shape"):
        return None, "It is a function: its steps are known when it runs. The page of a run shows them."
    try:
        shape: Shape = workflow.shape()
        return Markup(await look.engine.call(_drawn, shape)), ""  # noqa: S704 - every name in it is escaped
    except (DefinitionError, InvalidGraph) as error:
        return None, str(error)


def _command(workflow: Workflow[..., Any]) -> str:
    place = workflow.place
    return f"keepstep start {quote(f'{Path(place.file).name}:{place.name}')}"


class StartLike(msgspec.Struct, forbid_unknown_fields=True):
    """A run whose input and options fill the form."""

    like: str = ""


@page("/workflows/{name}/start", query=StartLike)
async def start_workflow(look: Look) -> Shown:
    """Show the form that starts a run of a workflow."""
    engine, name = look.engine, look.path["name"]
    facts = await workflow_facts(engine, name)
    known = startable(engine).get(name)
    given: dict[str, str] = {}
    options: dict[str, str] = {}
    if look.query.like and known is not None:
        run = await (await engine.get(look.query.like)).run()
        try:
            found = await look.redacted(arguments(run))
            given = texts_of(known, found["args"], found["kwargs"])
        except (KeepstepError, TypeError):  # another version of the workflow had other parameters
            given = {}
        tags = "\n".join(f"{tag}={value}" for tag, value in (await look.redacted(dict(run.tags))).items())
        options = {"queue": run.queue, "priority": str(run.priority or ""), "key": run.key or "", "tags": tags}
    data = {
        "name": name,
        "known": known is not None,
        "workers": facts.info.workers,
        "about": await look.redacted(_about(known)),
        "parameters": [] if known is None else parameters_of(known),
        "given": given,
        "options": options,
        "source": look.query.like,
        "queues": [one.name for one in await all_queues(engine)],
        "command": f"keepstep start FILE.py:{name}" if known is None else _command(known),
        "path": f"/api/v1/workflows/{segment(name, safe='')}/start",
    }
    return Shown("start.html", data)
