"""The page of one run: where it stands and why, what can be done, and its records on a timeline."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote

import msgspec

from ...errors import RunNotFound
from ...records.progress import report_in
from ...views import plain
from ...views.explain import explain
from ...views.finding import near_ids
from ...views.run_records import published_of
from ...views.waits import WaitKind
from .run_acts import acts_of
from .table import Look, Shown, page

if TYPE_CHECKING:
    from ...model import ErrorInfo, Run
    from ...views.explain import Explanation

T = TypeVar("T")

#: Characters of an error's message on the page; its record has all of it.
MOST_MESSAGE = 4_000
#: Published values that are shown beside a wait for an answer.
MOST_CONTEXT = 5
#: The tabs of a run: the end of the path, and the name.
TABS = (
    ("", "Timeline"),
    ("graph", "Graph"),
    ("state", "State"),
    ("conversation", "Conversation"),
    ("tokens", "Tokens"),
    ("cost", "Cost"),
    ("signals", "Signals"),
    ("audit", "Audit"),
    ("children", "Children"),
    ("values", "Values"),
)


class Chosen(msgspec.Struct, forbid_unknown_fields=True):
    """The filters of a timeline. The script of the page reads them; in the URL, a link keeps them."""

    q: str = ""
    show: Literal["all", "open", "failed", "waits", "people", "steps"] = "all"
    fold: Literal["", "1"] = ""


@page("/runs/{run}", query=Chosen)
async def show_run(look: Look) -> Shown:
    """Show one run and its timeline."""
    return Shown("run_timeline.html", await head_of(look))


async def found_run(look: Look) -> Run:
    """Return the run that the path names."""
    engine, run_id = look.engine, look.path["run"]
    run = await engine.call(engine.store.get_run, run_id)
    if run is None:
        near = await engine.call(near_ids, engine.store, run_id)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise RunNotFound(f"no run {run_id!r}{hint}", run_id)
    return run


async def head_of(look: Look, run: Run | None = None) -> dict[str, Any]:
    """Return the data of the head, which every tab shows. Nothing here grows with the number of records."""
    run = run or await found_run(look)
    found = await explain(look.engine, run, datetime.now(UTC), plans=False)
    view = found.view
    path = f"/runs/{quote(run.id, safe='')}"
    stored = {
        "tags": dict(view.run.tags),
        "values": _values(found),
        "failure": _failure(found),
        "context": await _context(look, found),
        "progress": _progress(view.run),
    }
    return {
        "run": view.run,
        "path": path,
        "view": view,
        "found": found,
        "reasons": _reasons(found),
        "acts": acts_of(view),
        "tabs": [(f"{path}/{end}" if end else path, name) for end, name in TABS],
        **await look.redacted(stored),
    }


async def _context(look: Look, found: Explanation) -> dict[str, str]:
    """Return what a run has published, if it waits for an answer: most questions are among it."""
    waits = any(wait.kind is WaitKind.SIGNAL for wait in found.view.waits)
    if not waits or found.view.locked is not None:
        return {}
    engine = look.engine
    shown = await engine.call(published_of, engine.store, found.view.run)
    newest = list(shown.items())[-MOST_CONTEXT:]
    return {key: value if isinstance(value, str) else _line(value) for key, (value, _) in newest}


def _line(value: Any) -> str:
    """Return a plain value as JSON on one line."""
    return json.dumps(value, ensure_ascii=False)


def _reasons(found: Explanation) -> list[tuple[str, bool]]:
    """Return the sentences that tell why the run stands where it does, and whether each is an obstacle."""
    stuck = dict.fromkeys(one.text for one in found.obstacles)
    awaited = [one for one in found.waits if one.wait.kind is not WaitKind.TIME] or found.waits
    waits = [one.text for one in awaited]
    if len(waits) == 1:  # the summary has told the rest
        waits = [f"It is the turn of {awaited[0].turn.value}."]
    texts = dict.fromkeys([found.summary, *stuck, *waits])
    return [(text, text in stuck) for text in texts if text]


def _progress(run: Run) -> dict[str, Any] | None:
    """Return what the running step has reported, if anything."""
    report = plain.value_of(report_in(run.progress)) if run.status.active else None
    if not isinstance(report, dict) or not isinstance(report.get("fraction"), int | float):
        return None
    percent = max(0.0, min(100.0, 100.0 * report["fraction"]))
    return {"step": str(report.get("step") or ""), "percent": percent, "message": str(report.get("message") or "")}


def _values(found: Explanation) -> dict[str, Any]:
    """Return the input and the result of the run."""
    run = found.view.run
    if found.view.locked is not None:
        return {}
    values: dict[str, Any] = {"input": plain.arguments(run)}
    if run.output is not None and run.status.finished and run.error is None:
        values["result"] = plain.value_of(run.output)
    return values


def _failure(found: Explanation) -> dict[str, Any] | None:
    """Return why the run failed, for the template."""
    failure, run = found.failure, found.view.run
    error = failure.error if failure is not None else run.error
    if failure is None and error is None:
        return None
    text = "" if failure is None or failure.text in found.summary else failure.text
    shown: dict[str, Any] = {
        "text": text,
        "error": None if error is None or found.view.locked is not None else _error(error),
        "step": "",
        "child": None,
        "attempts": [],
        "more": 0,
    }
    if failure is not None:
        shown |= {
            "step": failure.step,
            "child": failure.child,
            "attempts": [
                {
                    "seq": one.seq,
                    "number": one.attempt,
                    "at": plain.iso(one.at),
                    "error": "" if one.error is None else one.error.summary[:500],
                }
                for one in failure.attempts
            ],
            "more": failure.failures - len(failure.attempts),
        }
    return shown


def _error(error: ErrorInfo) -> dict[str, Any]:
    rest = len(error.message) - MOST_MESSAGE
    message = error.message if rest <= 0 else f"{error.message[:MOST_MESSAGE]}… {rest:,} characters more"
    frames = [{"at": frame.brief, "source": frame.source} for frame in error.frames]
    return {"type": error.type, "message": message, "frames": frames, "class": error.error_class}
