"""The shape of a graph or dag as plain data, for validation and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Node:
    """A step, or another point of a definition."""

    name: str
    kind: str = "step"
    label: str = ""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A way between two nodes: to the next step, into or out of a parallel part, or from a need in a dag."""

    source: str
    target: str
    label: str = ""
    kind: Literal["next", "fork", "join", "needs"] = "next"


@dataclass(frozen=True, slots=True)
class Shape:
    """A whole definition: its nodes in the order of their definition, and the arrows between them.

    A shape of the form `run` shows the history of a function's run: its steps in the order in which they ended.
    """

    name: str
    form: Literal["graph", "dag", "run"]
    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]
    entry: str | None = None
    exits: tuple[str, ...] = ()
    max_iterations: int = 1000
