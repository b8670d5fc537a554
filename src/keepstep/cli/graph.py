"""The command `graph`: draws a workflow, or what a run of it did."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import MODULE, Settings, command, find_run

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..drawing import Mark
    from ..drawing.run_marks import Moment
    from ..engine.engine import Engine
    from ..model import Run
    from ..model.problem import Problem
    from ..workflows.shape import Shape

_FORMATS = ("text", "mermaid", "dot", "svg")


@command("graph")
@click.argument("target", required=False, metavar="[TARGET]")
@click.option("--run", "run_id", metavar="RUN", help="Show what this run did: marks, colours and numbers of visits.")
@click.option(
    "--format", "form", type=click.Choice(_FORMATS), help="Output format; by default that of FILE's extension."
)
@click.option("-o", "--output", metavar="FILE", help="Write to this file; - is standard output.")
@MODULE
def graph(
    settings: Settings,
    *,
    target: str | None,
    run_id: str | None,
    form: str | None,
    output: str | None,
    module: tuple[str, ...],
) -> int:
    """Draw a graph or dag in the terminal, or as Mermaid, DOT or SVG.

    TARGET is file.py:workflow, module:workflow, or a workflow file (.yaml, .json). With --run it may be omitted: then
    the run's steps are shown in the order in which they ended, as for a workflow that is a function. Problems of the
    definition are reported beside the picture; exit code 2 if it could not run.
    """
    if target is None and run_id is None:
        raise errors.Refused("nothing to draw", "name a workflow as file.py:workflow, or a run with --run")
    drawing = _Drawing() if target is None else _load(target, module, debug=settings.debug)
    shape, found = drawing.shape, drawing.problems
    marks: Mapping[str, Mark] | None = None
    run: Run | None = None
    if run_id is not None:
        run, happened = _read(settings, run_id, drawing.name)
        shape, marks = _marked(shape, run, happened)
    if shape is None:
        raise errors.Refused(
            f"{target} is a function: its steps are known only when they run", "show a run of it with --run"
        )
    _answer(settings, shape, marks, run=run, found=found, form=form, output=output)
    _tell(settings, found)
    return errors.USAGE if any(one.severity == "error" for one in found) else errors.OK


# -- input -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Drawing:
    """A drawing: the workflow's name, its shape (None for a function), and the problems of its definition."""

    name: str | None = None
    shape: Shape | None = None
    problems: Sequence[Problem] = ()


def _load(target: str, modules: tuple[str, ...], *, debug: bool) -> _Drawing:
    from .target import is_workflow_file, load_workflow

    if is_workflow_file(target):
        return _load_file(target, modules, debug=debug)
    workflow: Any = load_workflow(target, modules=modules, debug=debug)
    if not hasattr(workflow, "shape"):
        return _Drawing(workflow.name)
    return _Drawing(workflow.name, workflow.shape(), workflow.problems())


def _load_file(path: str, modules: tuple[str, ...], *, debug: bool) -> _Drawing:
    """Load a file and draw it as written; names are resolved only in the given modules."""
    from ..workflows.files.load import check, outline
    from .validate import names_in

    shape, problems = outline(path)
    if modules:
        problems = check(path, names_in(modules, debug=debug)).problems
    if shape is None:
        raise errors.Refused(f"{path} cannot be drawn", "\n".join(map(str, problems)))
    return _Drawing(shape.name, shape, problems)


def _read(settings: Settings, run_id: str, workflow: str | None) -> tuple[Run, list[Moment]]:
    from ..drawing.run_marks import moments

    async def look(engine: Engine) -> tuple[Run, list[Moment]]:
        run = await find_run(engine, run_id)
        if workflow is not None and run.workflow != workflow:
            raise errors.Refused(
                f"run {run.id!r} belongs to {run.workflow!r}, not to {workflow!r}",
                "name its workflow, or omit the workflow",
            )
        return run, await moments(engine, run)

    return settings.look(look)


def _marked(shape: Shape | None, run: Run, happened: list[Moment]) -> tuple[Shape, Mapping[str, Mark]]:
    from ..drawing.run_marks import marks_of, shape_of, unknown_steps
    from . import formatting

    if shape is None:
        return shape_of(run, happened)
    missing = unknown_steps(shape, happened)
    if missing:
        named = ", ".join(map(formatting.one_line, missing[:10])) + (
            f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        )
        click.echo(f"not drawn, because the definition no longer has these steps of the run: {named}", err=True)
    return shape, marks_of(shape, run, happened)


# -- output ------------------------------------------------------------------------------------------------------------


def _answer(
    settings: Settings,
    shape: Shape,
    marks: Mapping[str, Mark] | None,
    *,
    run: Run | None,
    found: Sequence[Problem],
    form: str | None,
    output: str | None,
) -> None:
    from dataclasses import replace

    chosen = _form_of(output, form)
    titled = shape if run is None else replace(shape, name=f"{shape.name}, run {run.id} ({run.status.value})")
    if settings.json and output in (None, "-"):
        settings.answer(_as_json(shape, marks, run, found))
    elif output in (None, "-"):
        click.echo(_drawn(titled, marks, chosen, terminal=True).removesuffix("\n"))
    else:
        assert output is not None  # noqa: S101 - otherwise it would be the terminal
        drawn = _drawn(titled, marks, chosen, terminal=False)
        try:
            Path(output).write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise errors.Refused(f"{output} cannot be written: {error.strerror}") from None
        settings.answer({"file": output, "format": chosen, "steps": len(shape.nodes)}, f"written to {output}")


def _form_of(output: str | None, given: str | None) -> str:
    """Return the format that was asked for, or that of the file's extension. Refuse a contradiction."""
    from ..drawing import FORMS

    if output in (None, "-"):
        return given or "text"
    ending = Path(str(output)).suffix.lower()
    meant = next((form for form, endings in FORMS.items() if ending in endings), None)
    if given is not None and meant not in (None, given):
        raise errors.Refused(
            f"--format {given} contradicts the extension of {output}, which means {meant}",
            f"omit --format, or write to a file that ends in {FORMS[given][0]}",
        )
    if given is not None or meant is not None:
        return str(given or meant)
    known = ", ".join(one for endings in FORMS.values() for one in endings)
    raise errors.Refused(f"the format of {output} is unknown", f"use --format, or one of the extensions {known}")


def _drawn(shape: Shape, marks: Mapping[str, Mark] | None, form: str, *, terminal: bool) -> str:
    from ..drawing import draw
    from ..drawing.text import text

    if form != "text" or not terminal:
        return draw(shape, form, marks)
    return text(shape, marks, colours=True, ascii_only=not _has_signs())  # click removes colours in a pipe


def _has_signs() -> bool:
    try:
        "○│├╰─→↑✓✗●…↷−◷·×".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _tell(settings: Settings, found: Sequence[Problem]) -> None:
    """Report the problems of the definition beside its picture."""
    from . import formatting

    if settings.json:
        return
    for one in found:
        colour = "red" if one.severity == "error" else "yellow"
        message = formatting.printable(str(one)).replace(
            f"{one.severity}:", click.style(f"{one.severity}:", fg=colour), 1
        )
        click.echo(message, err=True)


def _as_json(
    shape: Shape, marks: Mapping[str, Mark] | None, run: Run | None, found: Sequence[Problem]
) -> dict[str, Any]:
    from dataclasses import asdict

    from ..drawing.marks import mark_of

    value = asdict(shape)
    if marks is not None:
        for node in value["nodes"]:
            mark = mark_of(node["name"], marks)
            node |= {"state": mark.state.value, "visits": mark.visits}
    ran = None if run is None else {"id": run.id, "status": run.status.value}
    return {**value, "run": ran, "problems": [asdict(one) for one in found]}
