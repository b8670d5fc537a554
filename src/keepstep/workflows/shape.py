"""The shape of a graph or dag as plain data: what validation looks at and pictures show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Node:
    """A step, or another point that a run passes."""

    name: str
    kind: str = "step"
    label: str = ""


@dataclass(frozen=True, slots=True)
class Arrow:
    """A way from one node to another: the next step, into or out of a parallel part, or what a dag's step needs."""

    source: str
    target: str
    label: str = ""
    kind: Literal["next", "fork", "join", "needs"] = "next"


@dataclass(frozen=True, slots=True)
class Shape:
    """A whole definition: its nodes in the order in which they were written, and the arrows between them.

    One whose form is `run` shows what a run of a function did: its steps in the order in which they ended.
    """

    name: str
    form: Literal["graph", "dag", "run"]
    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]
    entry: str | None = None
    exits: tuple[str, ...] = ()
    max_iterations: int = 1000


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong with a definition, where, and what to do about it."""

    severity: Literal["error", "warning"]
    where: str
    what: str
    how: str = ""
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part) if self.file else ""
        place = f"{place}: " if place else ""
        told = f"; {self.how}" if self.how else ""
        return f"{place}{self.severity}: {self.where}: {self.what}{told}"
