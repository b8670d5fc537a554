"""How names, kinds and conditions read in every form of picture, before each form escapes them in its own way."""

from __future__ import annotations

from collections.abc import Iterable

from ..shape import Arrow, Node, Shape

#: Conditions that need no word.
_ALWAYS = frozenset({"", "always"})


def printable(text: str) -> str:
    """Text on one line that cannot steer a terminal or break a file: what cannot be printed is spelt out."""
    flat = " ".join(text.split())
    if flat.isprintable():
        return flat
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in flat)


def cut(text: str, width: int) -> str:
    """Text that is at most so long."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def about(node: Node) -> str:
    """What is said of a step beside its name: its kind if that is not plain, and its label."""
    parts = [] if node.kind == "step" else [node.kind]
    return printable(" ".join(parts + ([node.label] if node.label and node.label != node.name else [])))


def title(shape: Shape) -> str:
    """The definition in a few words."""
    steps = len(shape.nodes)
    return f"{printable(shape.name)}: {shape.form}, {steps} step{'' if steps == 1 else 's'}"


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
        return printable(arrow.label)
    if arrow.label not in _ALWAYS:
        return f"when {printable(arrow.label)}"
    return "otherwise" if after_others else ""


def joined(labels: Iterable[str]) -> str:
    """What is written on several arrows between the same steps."""
    return " or ".join(dict.fromkeys(label for label in labels if label))
