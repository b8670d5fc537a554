"""Figures of workflows and of runs, as files or for pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..drawing import draw
from ..drawing.run_marks import marks_of, moments, shape_of
from ..drawing.svg import figure
from ..errors import DefinitionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..drawing import Mark
    from ..engine.engine import Engine
    from ..model import Run
    from ..workflows.shape import Shape

#: Records of a run that are drawn at most: its figure is made of all of them.
MOST_RECORDS = 10_000
#: Steps of a figure at most: a layout of more takes seconds, and nobody can read it.
MOST_STEPS = 500
#: Forms of a figure, with their media types; `figure` is an SVG without colours of its own, for a page to bring in.
MEDIA = {
    "svg": "image/svg+xml",
    "figure": "image/svg+xml",
    "mermaid": "text/plain; charset=utf-8",
    "dot": "text/vnd.graphviz",
    "text": "text/plain; charset=utf-8",
}


async def figure_of_run(engine: Engine, run: Run, form: str) -> str:
    """Return a figure of what a run did: on its definition, if its code is here, or else its steps in order."""
    if run.seq > MOST_RECORDS:
        raise DefinitionError(
            f"run {run.id!r} has {run.seq:,} records, and a figure shows at most {MOST_RECORDS:,}; look at its timeline"
        )
    happened = await moments(engine, run)
    known: Any = engine.workflows.get(run.workflow)
    marks: Mapping[str, Mark]
    if known is not None and hasattr(known, "shape") and engine.is_own(run):
        shape = known.shape()
        marks = marks_of(shape, run, happened)
    else:
        shape, marks = shape_of(run, happened)
    return await engine.off_loop(_drawn, shape, form, marks)


async def figure_of_workflow(engine: Engine, name: str, form: str) -> str | None:
    """Return a figure of a graph or dag that is known here; None for a function, or if its code is not here."""
    known: Any = engine.workflows.get(name)
    if known is None or not hasattr(known, "shape"):
        return None
    return await engine.off_loop(_drawn, known.shape(), form, None)


def _drawn(shape: Shape, form: str, marks: Mapping[str, Mark] | None) -> str:
    if len(shape.nodes) > MOST_STEPS:
        raise DefinitionError(f"{shape.name!r} has {len(shape.nodes)} steps, and a figure shows at most {MOST_STEPS}")
    return figure(shape, marks) if form == "figure" else draw(shape, form, marks)
