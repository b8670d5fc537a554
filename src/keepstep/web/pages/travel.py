"""Time travel: a run as it was at any of its records, and the way on from there."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
from markupsafe import Markup

from ...drawing.run_marks import marks_of, moments_of, shape_of
from ...drawing.svg import figure
from ...errors import DefinitionError
from ...model import Run, Status
from ...model.checkpoint import EDITABLE
from ...stores.encrypted import below
from ...views import plain
from ...views.cut import cut
from ...views.run_records import records_of
from ...views.travel import Past, past
from .table import Look, Shown, page

if TYPE_CHECKING:
    from ...drawing.run_marks import Moment
    from ...engine.engine import Engine
    from ...model import Checkpoint
    from ...ports import Store

Seq = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
#: Records up to which the picture of a graph is drawn as of a record, because all of them are read for it.
MOST_DRAWN = 2000


#: The record to show, and the one to compare it with. A class statement cannot name a field `from`.
Travel = msgspec.defstruct(
    "Travel", [("at", Seq | None, None), ("from", Seq | None, None)], forbid_unknown_fields=True, module=__name__
)


@page("/runs/{run}/travel", query=Travel)
async def show_past(look: Look) -> Shown:
    """Show a run as it was at a record, and how to go on from there."""
    run = await (await look.engine.get(look.path["run"])).run()
    base: int | None = getattr(look.query, "from")
    then = await past(look.engine, run, look.query.at, base)
    data = {
        "run": run,
        "then": then,
        "beside": [(one, one.seq in then.gone) for one in then.beside],
        "picture": await picture(look.engine, run, then.at) if then.locked is None else None,
        "base": base,
        "path": f"/runs/{quote(run.id, safe='')}",
    }
    return Shown("travel.html", data | await look.engine.off_loop(_stored, look, then))


def _stored(look: Look, then: Past) -> dict[str, Any]:
    """Return the stored values that the page shows, and the acts that begin with them. They may be large."""
    return {
        "record": None if then.record is None else shown(look, then.record),
        "calls": [shown(look, one) for one in then.calls],
        "state": _cut(look, then.state),
        "published": _cut(look, then.published),
        "changes": None if then.changes is None else _changes(look, then),
        "acts": acts(look, then),
    }


def shown(look: Look, one: Checkpoint) -> dict[str, Any]:
    """Return a record for a page: without secrets, its value cut."""
    one = one if look.may("act") else plain.without_secret(one)
    found: dict[str, Any] = look.clean(plain.record_data(one))
    found["value"], found["left_out"] = cut(found.get("value"), 2000)
    found["has_value"] = one.value is not None
    took = (one.finished_at - one.started_at).total_seconds() if one.started_at is not None else None
    return found | {"took": took, "at": one.finished_at}


def _cut(look: Look, values: dict[str, Any] | None) -> dict[str, tuple[Any, int]] | None:
    if values is None:
        return None
    return {key: cut(value) for key, value in look.clean(values).items()}


def _changes(look: Look, then: Past) -> dict[str, Any]:
    changes = then.changes
    assert changes is not None  # noqa: S101 - the caller has looked
    both = {}
    for name in ("state", "published"):
        pairs = look.clean(getattr(changes, name))
        both[name] = {key: (cut(old, 5000), cut(new, 5000)) for key, (old, new) in pairs.items()}
    calls = [shown(look, one) for one in changes.calls]
    return {**both, "calls": calls, "more": changes.more, "base": changes.base}


async def picture(engine: Engine, run: Run, at: int) -> Markup | None:
    """Return the picture of a graph or dag as of a record; None for a function, and if it is not cheap."""
    if at > MOST_DRAWN or not run.fingerprint.startswith(("graph:", "dag:")):
        return None
    happened = await engine.call(_happened, engine.store, run, at)
    as_then = run if at == run.seq else replace(run, status=Status.RUNNING, error=None, wakes=())
    workflow: Any = engine.workflows.get(run.workflow)
    if workflow is None or not hasattr(workflow, "shape"):
        shape, marks = shape_of(as_then, happened)
    else:
        shape = workflow.shape()
        marks = marks_of(shape, as_then, happened)
    try:
        return Markup(await engine.call(figure, shape, marks))  # noqa: S704 - `figure` escapes every name
    except DefinitionError:  # it has too many steps to be drawn
        return None


def _happened(store: Store, run: Run, at: int) -> list[Moment]:
    return moments_of(takewhile(lambda one: one.seq <= at, records_of(below(store), run.id)))


# -- acts --------------------------------------------------------------------------------------------------------------

#: Statuses in which the state of a run may be edited.
_STILL = frozenset({Status.WAITING, Status.QUEUED, Status.PAUSED, Status.FAILED, Status.SET_ASIDE})


def acts(look: Look, then: Past) -> list[dict[str, Any]]:
    """Return the ways on from a record: forks with other values, a rewind, and an edit of the newest state."""
    if then.locked is not None:
        return []
    found = [_fork(then)]
    record = then.record
    if record is not None and record.kind.value in EDITABLE and not record.data.get("child") and then.counts:
        found.append(_fork_with_result(look, record))
    if then.at == 0:
        found.append(_fork_with_input(look, then))
    if then.state is not None:
        found.append(_fork_with_state(then))
    if then.at < then.run.seq:
        found.append(_rewind(then))
    elif then.state is not None and then.run.status in _STILL:
        found.append(_edit(then))
    return found


def _act(run: Run, verb: str, label: str, text: str, **more: Any) -> dict[str, Any]:
    return {
        "label": label,
        "title": f"{label}: {run.id}",
        "text": text,
        "url": f"/api/v1/runs/{quote(run.id, safe='')}/{verb}",
        "role": "admin",
        "done": f"{label}: {run.id}",
        **more,
    }


_NEW_ID = {"name": "run_id", "label": "Id of the new run", "help": "empty: a new one"}


def _line(words: str, run: str, *more: str) -> str:
    return shlex.join(("keepstep", words, run, *more))


def _fork(then: Past) -> dict[str, Any]:
    text = (
        f"A new run begins with a copy of the records up to {then.at}, and goes on from there. This run stays as it is."
    )
    return _act(
        then.run,
        "fork",
        "Fork from here…",
        text,
        body={"at": then.at},
        fields=[_NEW_ID],
        command=_line("fork", then.run.id, "--at", str(then.at)) + "[ --id {run_id}][ --reason {reason}]",
        go="/runs/{run}",
        main=True,
    )


def _fork_with_result(look: Look, record: Checkpoint) -> dict[str, Any]:
    value, left_out = cut(look.clean(plain.value_of(record.value)))
    given = {record.step: None if left_out else value}
    field = {"name": "results", "label": "Result by call", "type": "json", "required": True, "value": given}
    text = f"A new run begins with the records up to {record.seq}, in which {record.step} has this result, and goes on."
    run = record.run
    return {
        "label": "Fork with another result…",
        "title": f"Fork {run} with another result of {record.step}",
        "text": text,
        "url": f"/api/v1/runs/{quote(run, safe='')}/fork",
        "role": "admin",
        "fields": [field, _NEW_ID],
        "command": _line("fork", run, "--result")
        + f" {shlex.quote(record.step)}=JSON[ --id {{run_id}}][ --reason {{reason}}]",
        "go": "/runs/{run}",
        "done": "Forked with another result",
    }


def _fork_with_input(look: Look, then: Past) -> dict[str, Any]:
    given = look.clean(plain.arguments(then.run))
    field = {"name": "input", "label": "Arguments", "type": "json", "required": True, "value": given}
    text = "A new run of the same workflow begins with these arguments, and performs every step."
    return _act(
        then.run,
        "fork",
        "Fork with another input…",
        text,
        fields=[field, _NEW_ID],
        command=_line("fork", then.run.id, "--input") + " JSON[ --id {run_id}][ --reason {reason}]",
        go="/runs/{run}",
    )


def _fork_with_state(then: Past) -> dict[str, Any]:
    fields = [
        {"name": "state", "label": "New values of the state", "type": "json", "required": True, "value": {}},
        {"name": "next", "label": "Next step", "help": "empty: the one that comes next anyway"},
        _NEW_ID,
    ]
    text = f"A new run begins with the records up to {then.at}. These keys of its state get new values, and it goes on."
    return _act(
        then.run,
        "fork",
        "Fork with another state…",
        text,
        body={"at": then.at},
        fields=fields,
        command=_line("fork", then.run.id, "--at", str(then.at))
        + " --state {state}[ --next {next}][ --id {run_id}][ --reason {reason}]",
        go="/runs/{run}",
    )


def _rewind(then: Past) -> dict[str, Any]:
    text = (
        f"This run goes on from record {then.at}. Later records stay stored and no longer count; their calls run again."
    )
    return _act(
        then.run,
        "rewind",
        "Rewind to here…",
        text,
        body={"to": then.at, "seq": then.run.seq},
        dry={"dry_run": True},
        shows={"to": "last record that counts", "again": "runs again", "children": "children that are cancelled"},
        command=_line("rewind", then.run.id, "--to", str(then.at)) + "[ --reason {reason}]",
        danger=True,
    )


def _edit(then: Past) -> dict[str, Any]:
    fields = [
        {"name": "values", "label": "New values of the state", "type": "json", "required": True, "value": {}},
        {"name": "next", "label": "Next step", "help": "empty: the one that comes next anyway"},
    ]
    text = "These keys of the state get new values, and the run goes on with them. The history keeps the old ones."
    return _act(
        then.run,
        "edit",
        "Edit state…",
        text,
        body={"seq": then.run.seq},
        fields=fields,
        command=_line("edit", then.run.id, "--set") + " KEY=JSON[ --next {next}][ --reason {reason}]",
    )
