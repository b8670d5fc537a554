"""The command `check`: replays every unfinished run against new code before the deployment."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import MODULE, Settings, command

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..history.compatibility import Checked
    from ..workflows.definition import Workflow

_COLOURS = {"fits": "green", "pinned": "cyan", "unknown": "yellow", "locked": "yellow"}


@command("check")
@click.argument("target", metavar="MODULE[:WORKFLOW]")
@MODULE
@click.option("--strict", is_flag=True, help="Also fail if a run's workflow or a recovery handler is missing.")
def check(settings: Settings, *, target: str, module: tuple[str, ...], strict: bool) -> int:
    """Replay every unfinished run against this code before it is deployed, and report those that would be set aside.

    No step runs and nothing is written. Exit code 1 if a run would break, or is encrypted with a key that is not here.
    """
    from ..history.compatibility import check as check_runs
    from ..workflows.recovery import unknown_handlers

    workflows, only = _loaded(target, module, debug=settings.debug)
    warnings = list(unknown_handlers(one for name, one in workflows.items() if not only or name in only))
    for warning in warnings:
        _warn(warning)

    async def look(engine: Engine) -> list[Checked]:
        found: list[Checked] = []
        seen: dict[tuple[str, str, str], str] = {}
        async for one in check_runs(engine, workflows, only=only):
            found.append(one)
            if not settings.json and (one.fit.breaks or one.fit in ("unknown", "locked")):
                first = seen.setdefault((one.fit.value, one.workflow, one.why), one.run)
                click.echo(_line(one, "" if first == one.run else first))
        return found

    found = settings.talk(look)
    counts = Counter(one.fit.value for one in found)
    bad = any(one.fit.breaks or one.fit == "locked" or (strict and one.fit == "unknown") for one in found)
    bad = bad or (strict and bool(warnings))
    value = {"fits": not bad, "counts": dict(counts), "runs": [_as_json(one) for one in found], "warnings": warnings}
    settings.answer(value, lambda: _summary(found, bad=bad))
    return errors.FAILED if bad else errors.OK


def _loaded(
    target: str, modules: tuple[str, ...], *, debug: bool
) -> tuple[dict[str, Workflow[..., Any]], frozenset[str]]:
    """Return the workflows that the code defines, and the names that were given."""
    from ..workflows.definition import KNOWN
    from .target import is_workflow_file, load_module, load_workflow, split

    if is_workflow_file(target) or split(target)[1]:
        workflow = load_workflow(target, modules=modules, debug=debug)
        return {**KNOWN, workflow.name: workflow}, frozenset({workflow.name})
    if modules:
        raise errors.Refused("--module is for workflows in YAML or JSON files", f"{target} imports what it needs")
    load_module(target, debug=debug)
    return dict(KNOWN), frozenset()


def _warn(text: str) -> None:
    from . import formatting

    click.echo(f"{click.style('warning', fg='yellow', bold=True)}: {formatting.one_line(text)}", err=True)


def _line(one: Checked, same: str = "") -> str:
    """Describe a run that does not fit; for one with a known reason, refer to the earlier run."""
    from . import formatting

    name = click.style(one.fit.value, fg=_COLOURS.get(one.fit.value, "red"), bold=True)
    head = f"{name}: {formatting.one_line(one.run)} ({formatting.one_line(one.workflow)})"
    return (
        f"{head}, in the same way as {formatting.one_line(same)}"
        if same
        else f"{head}\n  {formatting.printable(one.why)}"
    )


def _as_json(one: Checked) -> dict[str, Any]:
    return {
        "run": one.run,
        "workflow": one.workflow,
        "version": one.version,
        "status": one.status,
        "verdict": one.fit.value,
        "why": one.why or None,
        "next": list(one.next),
    }


def _summary(found: list[Checked], *, bad: bool) -> str:
    """Summarise the findings by workflow."""
    from ..history.compatibility import Fit
    from . import formatting

    if not found:
        return "there are no unfinished runs"
    fits = [fit for fit in Fit if any(one.fit is fit for one in found)]
    rows = [["workflow", *(fit.value for fit in fits)]]
    for name in sorted({one.workflow for one in found}):
        mine = Counter(one.fit for one in found if one.workflow == name)
        rows.append([formatting.one_line(name) or "?", *(str(mine[fit]) for fit in fits)])
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    broken, locked = sum(one.fit.breaks for one in found), sum(one.fit is Fit.LOCKED for one in found)
    end = f"{broken} of {len(found)} unfinished runs would be set aside" if broken else ""
    if locked:
        lacking = f"{locked} of {len(found)} unfinished runs cannot be checked without their keys; set KEEPSTEP_KEYS"
        end = f"{end}\n{lacking}" if end else lacking
    end = end or "every run fits, or can wait"
    return "\n".join(["", *table, "", click.style(end, fg="red" if bad else "green")])
