"""A picture as DOT text, for Graphviz and compatible readers."""

from __future__ import annotations

from collections.abc import Mapping

from ..model.text import one_line
from ..workflows.shape import Node, Shape
from .marks import LOOKS, Mark, mark_of, visits_of
from .wording import about, conditions, prepared, title

_OUTLINES = {
    "parallel": "hexagon",
    "barrier": "hexagon",
    "branch": "diamond",
    "map": "folder",
    "child": "component",
    "wait": "oval",
    "delay": "oval",
    "approval": "oval",
}
_ARROWS = {"fork": ' style="bold"', "join": ' style="bold"'}


def dot(shape: Shape, marks: Mapping[str, Mark] | None = None) -> str:
    """Return a digraph. Every name is quoted; none is used as an id."""
    shape = prepared(shape)
    lines = [
        f"digraph {quoted(shape.name)} {{",
        f'    label={quoted(title(shape))}; labelloc="t"; rankdir="TB"; fontname="Helvetica";',
        '    node [shape="box" style="rounded,filled" fillcolor="white" fontname="Helvetica" fontsize="11"];',
        '    edge [fontname="Helvetica" fontsize="9"];',
    ]
    ids = {node.name: f"s{number}" for number, node in reversed(list(enumerate(shape.nodes)))}
    for number, node in enumerate(shape.nodes):
        lines.append(f"    s{number} [{_attributes(node, shape, marks)}];")
    for arrow, label in zip(shape.arrows, conditions(shape), strict=True):
        if arrow.source in ids and arrow.target in ids:
            more = (f" label={quoted(label)}" if label else "") + _ARROWS.get(arrow.kind, "")
            lines.append(f"    {ids[arrow.source]} -> {ids[arrow.target]}{f' [{more.strip()}]' if more else ''};")
    if shape.entry in ids:
        lines += ['    start [shape="circle" label="" width="0.15" style="filled" fillcolor="black"];']
        lines += [f"    start -> {ids[shape.entry]};"]
    return "\n".join([*lines, "}"]) + "\n"


def quoted(text: str) -> str:
    """Return text in quotes, without anything that DOT would read as an escape."""
    kept = one_line(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{kept}"'


def _attributes(node: Node, shape: Shape, marks: Mapping[str, Mark] | None) -> str:
    words, more = [node.name], about(node)
    found = []
    if marks is not None:
        mark = mark_of(node.name, marks)
        look = LOOKS[mark.state]
        words = [look.sign, node.name, visits_of(mark)]
        style = "rounded,filled,dashed" if look.dashed else "rounded,filled"
        found += [f'fillcolor="{look.fill}"', f'color="{look.line}"', f'style="{style}"']
        found.append(f"tooltip={quoted(mark.state.value)}")
    lines = [" ".join(word for word in words if word), *([more] if more else [])]
    found.insert(0, "label=" + '"' + "\\n".join(quoted(line)[1:-1] for line in lines) + '"')
    if node.kind in _OUTLINES:
        found.append(f'shape="{_OUTLINES[node.kind]}"')
    if node.name in shape.exits:
        found.append('peripheries="2"')
    return " ".join(found)
