"""The command `graph`: a picture of a workflow, or of what a run of it did."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import exits
from .frame import MODULE, Settings, command, find

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..engine.engine import Engine
    from ..engine.traced import Moment
    from ..model import Run
    from ..workflows.pictures import Mark
    from ..workflows.shape import Problem, Shape

_FORMATS = ("text", "mermaid", "dot", "svg")


@command("graph")
@click.argument("target", required=False, metavar="[TARGET]")
@click.option("--run", "run_id", metavar="RUN", help="Show what this run did, in signs, colours and numbers of visits.")
@click.option("--format", "form", type=click.Choice(_FORMATS), help="What to draw; else what the ending of FILE says.")
@click.option("-o", "--output", metavar="FILE", help="Write it there; - is standard output.")
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
    """Draw a graph or dag, in the terminal, or as Mermaid, DOT or SVG.

    TARGET is file.py:workflow, module:workflow, or a file that holds a workflow (.yaml, .json). It may be left out with
    --run: then the run's steps are shown in the order in which they ended, as they are for a workflow that is a
    function. What is wrong with a definition is told beside the picture; exit code 2 if it could not run so.
    """
    if target is None and run_id is None:
        raise exits.Refused("there is nothing to draw", "name a workflow as file.py:workflow, or a run with --run")
    drawing = _Drawing() if target is None else _load(target, module, debug=settings.debug)
    shape, found = drawing.shape, drawing.problems
    marks: Mapping[str, Mark] | None = None
    run: Run | None = None
    if run_id is not None:
        run, happened = _read(settings, run_id, drawing.name)
        shape, marks = _marked(shape, run, happened)
    if shape is None:
        raise exits.Refused(
            f"{target} is a function: its steps are known only when they run", "show a run of it with --run"
        )
    _answer(settings, shape, marks, run=run, found=found, form=form, output=output)
    _tell(settings, found)
    return exits.USAGE if any(one.severity == "error" for one in found) else exits.OK


# -- what is drawn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Drawing:
    """What is to be drawn: a workflow's name, its shape, which a function has none of, and what is wrong with it."""

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
    """A file is drawn as it is written; what it names is looked for only in modules that are given."""
    from ..workflows.declarative import check, outline
    from .validate import names_in

    shape, problems = outline(path)
    if modules:
        problems = check(path, names_in(modules, debug=debug)).problems
    if shape is None:
        raise exits.Refused(f"{path} cannot be drawn", "\n".join(map(str, problems)))
    return _Drawing(shape.name, shape, problems)


def _read(settings: Settings, run_id: str, workflow: str | None) -> tuple[Run, list[Moment]]:
    from ..engine.traced import moments

    async def look(engine: Engine) -> tuple[Run, list[Moment]]:
        run = await (await find(engine, run_id)).run()
        if workflow is not None and run.workflow != workflow:
            raise exits.Refused(
                f"run {run.id!r} is a run of {run.workflow!r}, not of {workflow!r}",
                "name its workflow, or leave the workflow out",
            )
        return run, await moments(engine, run)

    return settings.talk(look)


def _marked(shape: Shape | None, run: Run, happened: list[Moment]) -> tuple[Shape, Mapping[str, Mark]]:
    from ..engine.traced import marks_of, shape_of, unknown_steps
    from . import words

    if shape is None:
        return shape_of(run, happened)
    gone = unknown_steps(shape, happened)
    if gone:
        named = ", ".join(map(words.one_line, gone[:10])) + (f" and {len(gone) - 10} more" if len(gone) > 10 else "")
        click.echo(f"not drawn, for the definition no longer has what the run passed: {named}", err=True)
    return shape, marks_of(shape, run, happened)


# -- how it is told ----------------------------------------------------------------------------------------------------


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
        assert output is not None  # noqa: S101 - or it would be the terminal
        drawn = _drawn(titled, marks, chosen, terminal=False)
        try:
            Path(output).write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise exits.Refused(f"{output} cannot be written: {error.strerror}") from None
        settings.answer({"file": output, "format": chosen, "steps": len(shape.nodes)}, f"written to {output}")


def _form_of(output: str | None, given: str | None) -> str:
    """The form that is asked for, or that the ending of a file stands for; they may not contradict each other."""
    from ..workflows.pictures import FORMS

    if output in (None, "-"):
        return given or "text"
    ending = Path(str(output)).suffix.lower()
    meant = next((form for form, endings in FORMS.items() if ending in endings), None)
    if given is not None and meant not in (None, given):
        raise exits.Refused(
            f"--format {given} does not go with {output}, which would hold {meant} by its ending",
            f"leave --format out, or write to a file that ends in {FORMS[given][0]}",
        )
    if given is not None or meant is not None:
        return str(given or meant)
    known = ", ".join(one for endings in FORMS.values() for one in endings)
    raise exits.Refused(f"it is not clear what to write to {output}", f"give --format, or an ending of {known}")


def _drawn(shape: Shape, marks: Mapping[str, Mark] | None, form: str, *, terminal: bool) -> str:
    from ..workflows.pictures import draw
    from ..workflows.pictures.text import text

    if form != "text" or not terminal:
        return draw(shape, form, marks)
    return text(shape, marks, colours=True, ascii_only=not _has_signs())  # click takes colours away for a pipe


def _has_signs() -> bool:
    try:
        "○│├╰─→↑✓✗●…↷−·×".encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _tell(settings: Settings, found: Sequence[Problem]) -> None:
    """What is wrong with the definition, beside its picture."""
    from . import words

    if settings.json:
        return
    for one in found:
        colour = "red" if one.severity == "error" else "yellow"
        said = words.printable(str(one)).replace(f"{one.severity}:", click.style(f"{one.severity}:", fg=colour), 1)
        click.echo(said, err=True)


def _as_json(
    shape: Shape, marks: Mapping[str, Mark] | None, run: Run | None, found: Sequence[Problem]
) -> dict[str, Any]:
    from dataclasses import asdict

    from ..workflows.pictures.marks import mark_of

    value = asdict(shape)
    if marks is not None:
        for node in value["nodes"]:
            mark = mark_of(node["name"], marks)
            node |= {"state": mark.state.value, "visits": mark.visits}
    ran = None if run is None else {"id": run.id, "status": run.status.value}
    return {**value, "run": ran, "problems": [asdict(one) for one in found]}
