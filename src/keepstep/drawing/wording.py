"""Wording of names, kinds and conditions, shared by all formats before each applies its own escapes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ..model.text import one_line
from ..workflows.reachability import flowing
from ..workflows.shape import Arrow, Node, Shape

#: Conditions that are not shown.
_ALWAYS = frozenset({"", "always"})
#: Kinds that are not shown.
_PLAIN = frozenset({"step", "function"})
_WAIT = re.compile(r"\b(All|Any)\(\)")
_QUORUM = re.compile(r"\bQuorum\(n=(\d+)\)")


def cut(text: str, width: int) -> str:
    """Return text of at most `width` characters."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def prepared(shape: Shape) -> Shape:
    """Return the shape to draw: branches lead into their join, and a dag, which just ends, has no exits."""
    arrows = flowing(shape)
    joining = {arrow.source for arrow in arrows if arrow.kind == "join"}
    exits = () if shape.form == "dag" else tuple(name for name in shape.exits if name not in joining)
    return replace(shape, arrows=arrows, exits=exits)


def about(node: Node) -> str:
    """Return the description of a step beside its name: its kind unless that is plain, and its label."""
    parts = [] if node.kind in _PLAIN else [node.kind]
    label = _worded(node.label) if node.label != node.name else ""
    return one_line(" ".join([*parts, label]))


def title(shape: Shape) -> str:
    """Return the title of a definition."""
    steps = len(shape.nodes)
    form = "" if shape.form == "run" else f"{shape.form}, "
    return f"{one_line(shape.name)}: {form}{steps} step{'' if steps == 1 else 's'}"


def conditions(shape: Shape) -> list[str]:
    """Return the text of each arrow of a shape, in order: its condition, or that it is taken otherwise."""
    conditional: set[str] = set()
    found = []
    for arrow in shape.arrows:
        found.append(_condition(arrow, after_others=arrow.source in conditional))
        if arrow.kind == "next" and arrow.label not in _ALWAYS:
            conditional.add(arrow.source)
    return found


def _condition(arrow: Arrow, *, after_others: bool) -> str:
    if arrow.kind != "next":
        return one_line(_worded(arrow.label))
    if arrow.label not in _ALWAYS:
        return f"when {one_line(arrow.label)}"
    return "otherwise" if after_others else ""


def _worded(label: str) -> str:
    """Return a label with its wait policies in words."""
    return _QUORUM.sub(r"\1 of them", _WAIT.sub(lambda found: found[1].lower(), label))


def joined(labels: Iterable[str]) -> str:
    """Return the text for several arrows between the same steps."""
    return " or ".join(dict.fromkeys(label for label in labels if label))
