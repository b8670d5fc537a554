"""A picture as Mermaid text, for GitHub, GitLab and many editors."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ..model.text import one_line
from ..workflows.shape import Node, Shape
from .marks import LOOKS, Mark, State, mark_of, visits_of
from .wording import about, conditions, prepared, title

#: Brackets that give a node its outline.
_OUTLINES = {
    "parallel": ("{{", "}}"),
    "barrier": ("{{", "}}"),
    "branch": ("{", "}"),
    "map": ("[[", "]]"),
    "child": ("[[", "]]"),
    "wait": ("([", "])"),
    "delay": ("([", "])"),
    "approval": ("([", "])"),
}
_ARROWS = {"next": "-->", "fork": "==>", "join": "==>", "needs": "-->"}
#: Characters that Mermaid, or the page that it makes, would read as markup.
_ESCAPES = {ord(sign): f"#{ord(sign)};" for sign in '#&<>"`\\%'}


def mermaid(shape: Shape, marks: Mapping[str, Mark] | None = None) -> str:
    """Return a flowchart. Every name is escaped; none is used as an id."""
    shape = prepared(shape)
    lines = ["---", f"title: {json.dumps(title(shape))}", "---", "flowchart TD"]
    ids = {node.name: f"s{number}" for number, node in reversed(list(enumerate(shape.nodes)))}
    for number, node in enumerate(shape.nodes):
        opening, closing = _OUTLINES.get(node.kind, ("[", "]"))
        lines.append(f'    s{number}{opening}"{_label(node, marks)}"{closing}')
    for arrow, label in zip(shape.arrows, conditions(shape), strict=True):
        if arrow.source in ids and arrow.target in ids:
            condition = f'|"{escaped(label)}"|' if label else ""
            lines.append(f"    {ids[arrow.source]} {_ARROWS[arrow.kind]}{condition} {ids[arrow.target]}")
    if shape.entry in ids:
        lines += ['    start(("start"))', f"    start --> {ids[shape.entry]}"]
    ends = [ids[name] for name in dict.fromkeys(shape.exits) if name in ids]
    if ends:
        lines.append('    finish((("end")))')
        lines += [f"    {end} --> finish" for end in ends]
    if marks is not None:
        lines += _classes(shape, marks)
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return text that Mermaid shows unchanged."""
    return one_line(text).replace("$$", "$\u200b$").translate(_ESCAPES)  # `$$` would begin a formula


def _label(node: Node, marks: Mapping[str, Mark] | None) -> str:
    words = [escaped(node.name)]
    if marks is not None:
        mark = mark_of(node.name, marks)
        words = [LOOKS[mark.state].sign, *words, visits_of(mark)]
    first = " ".join(word for word in words if word)
    more = about(node)
    return f"{first}<br/>{escaped(more)}" if more else first


def _classes(shape: Shape, marks: Mapping[str, Mark]) -> list[str]:
    """Return a class for each state that occurs, and the steps in it."""
    steps: dict[State, list[str]] = {}
    for number, node in enumerate(shape.nodes):
        steps.setdefault(mark_of(node.name, marks).state, []).append(f"s{number}")
    lines = []
    for state, ids in steps.items():
        look, name = LOOKS[state], state.value.replace(" ", "_")
        dashes = ",stroke-dasharray:4 3" if look.dashed else ""
        lines.append(f"    classDef {name} fill:{look.fill},stroke:{look.line},color:#1f2328{dashes}")
        lines.append(f"    class {','.join(ids)} {name}")
    return lines
