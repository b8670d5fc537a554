"""How names, kinds and conditions read in every form of picture, before each form escapes them in its own way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ..routes import flowing
from ..shape import Arrow, Node, Shape

#: Conditions that need no word.
_ALWAYS = frozenset({"", "always"})
#: Kinds that are what one expects.
_PLAIN = frozenset({"step", "function"})
_WAIT = re.compile(r"\b(All|Any)\(\)")
_QUORUM = re.compile(r"\bQuorum\(n=(\d+)\)")


def printable(text: str) -> str:
    """Text on one line that cannot steer a terminal or break a file: what cannot be printed is spelt out."""
    flat = " ".join(text.split())
    if flat.isprintable():
        return flat
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat)


def cut(text: str, width: int) -> str:
    """Text that is at most so long."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def prepared(shape: Shape) -> Shape:
    """The shape as it is drawn: branches lead into their join, and a dag, which just ends, has no exits."""
    arrows = flowing(shape)
    joining = {arrow.source for arrow in arrows if arrow.kind == "join"}
    exits = () if shape.form == "dag" else tuple(name for name in shape.exits if name not in joining)
    return replace(shape, arrows=arrows, exits=exits)


def about(node: Node) -> str:
    """What is said of a step beside its name: its kind if that is not plain, and its label."""
    parts = [] if node.kind in _PLAIN else [node.kind]
    label = _worded(node.label) if node.label != node.name else ""
    return printable(" ".join([*parts, label]))


def title(shape: Shape) -> str:
    """The definition in a few words."""
    steps = len(shape.nodes)
    form = "" if shape.form == "run" else f"{shape.form}, "
    return f"{printable(shape.name)}: {form}{steps} step{'' if steps == 1 else 's'}"


def conditions(shape: Shape) -> list[str]:
    """What is written on each arrow of a shape, in their order: its condition, or that it is taken otherwise."""
    conditional: set[str] = set()
    found = []
    for arrow in shape.arrows:
        found.append(_condition(arrow, after_others=arrow.source in conditional))
        if arrow.kind == "next" and arrow.label not in _ALWAYS:
            conditional.add(arrow.source)
    return found


def _condition(arrow: Arrow, *, after_others: bool) -> str:
    if arrow.kind != "next":
        return printable(_worded(arrow.label))
    if arrow.label not in _ALWAYS:
        return f"when {printable(arrow.label)}"
    return "otherwise" if after_others else ""


def _worded(label: str) -> str:
    """A label in which policies of waiting are said in words."""
    return _QUORUM.sub(r"\1 of them", _WAIT.sub(lambda found: found[1].lower(), label))


def joined(labels: Iterable[str]) -> str:
    """What is written on several arrows between the same steps."""
    return " or ".join(dict.fromkeys(label for label in labels if label))
