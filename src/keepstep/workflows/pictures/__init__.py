"""Pictures of a graph or dag, one file per form: for the terminal, Mermaid, DOT and SVG."""

from __future__ import annotations

from collections.abc import Mapping

from ..shape import Shape
from .dot import dot
from .marks import Mark, State
from .mermaid import mermaid
from .svg import svg
from .text import text

__all__ = ["FORMS", "Mark", "State", "draw"]

#: Every form, and how the names of files that hold it end.
FORMS = {"text": (".txt",), "mermaid": (".mmd", ".mermaid"), "dot": (".dot", ".gv"), "svg": (".svg",)}

_DRAWN_BY = {"text": text, "mermaid": mermaid, "dot": dot, "svg": svg}


def draw(shape: Shape, form: str, marks: Mapping[str, Mark] | None = None) -> str:
    """A picture in one of the FORMS; with marks, of what a run did."""
    return _DRAWN_BY[form](shape, marks)
