"""Pictures of a graph or dag, one module per format: for the terminal, Mermaid, DOT and SVG."""

from __future__ import annotations

from collections.abc import Mapping

from ..workflows.shape import Shape
from .dot import dot
from .marks import Mark, State
from .mermaid import mermaid
from .svg import svg
from .text import text

__all__ = ["FORMS", "Mark", "State", "draw"]

#: Every format, with its file name suffixes.
FORMS = {"text": (".txt",), "mermaid": (".mmd", ".mermaid"), "dot": (".dot", ".gv"), "svg": (".svg",)}

_DRAWN_BY = {"text": text, "mermaid": mermaid, "dot": dot, "svg": svg}


def draw(shape: Shape, form: str, marks: Mapping[str, Mark] | None = None) -> str:
    """Return a picture in one of the FORMS; with marks, of what a run did."""
    return _DRAWN_BY[form](shape, marks)
