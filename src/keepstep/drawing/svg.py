"""A picture as SVG: one file without scripts, fonts or links, for a browser, a page or a print."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from html import escape

from ..errors import DefinitionError
from ..model.text import one_line
from ..workflows.shape import Node, Shape
from .layout import Box, Layout, Line
from .marks import LOOKS, Mark, counted, mark_of, visits_of
from .wording import about, conditions, cut, joined, prepared, title

#: Maximum number of steps to draw. No viewer shows a larger file well.
DRAWN = 2000

_NAME_SIZE, _NOTE_SIZE, _LABEL_SIZE = 13.0, 10.5, 11.0
#: Width of a character in a monospaced font, as a share of the font size.
_CHARACTER = 0.61
_NAME_WIDTH, _LABEL_WIDTH = 36, 40
_MARGIN = 20.0
#: Margin of a drawing that is an element of a page.
_EDGE = 6.0
_HEAD = 34.0

_STYLE = """
text { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #1f2328; text-anchor: middle; }
.title { font-size: 14px; font-weight: 600; text-anchor: start; }
.legend { font-size: 11px; text-anchor: start; }
.name { font-size: 13px; font-weight: 600; }
.note { font-size: 10.5px; fill: #57606a; }
.label { font-size: 11px; fill: #424a53; }
.step { fill: #ffffff; stroke: #57606a; stroke-width: 1.3; }
.inner { fill: none; stroke: #57606a; stroke-width: 1; }
.line { fill: none; stroke: #6e7781; stroke-width: 1.3; }
.fork, .join { stroke-width: 2.2; }
.behind { fill: #ffffff; fill-opacity: 0.92; }
"""

_ARROW_HEAD = (
    '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0.5 L10,5 L0,9.5 z" fill="#6e7781"/></marker></defs>'
)


def svg(shape: Shape, marks: Mapping[str, Mark] | None = None) -> str:
    """Return the drawing. Every name is escaped; a tooltip shows the full text of a shortened one."""
    return _sheet(shape, marks).text()


def figure(shape: Shape, marks: Mapping[str, Mark] | None = None) -> str:
    """Return the drawing as an element of a page, which brings the colours: it has classes, and no style of its own.

    Each step is a group of the class `node` with the class of its mark, such as `m-timed-out`, and with its name in
    `data-step`.
    """
    return _sheet(shape, marks).figure()


def _sheet(shape: Shape, marks: Mapping[str, Mark] | None) -> _Sheet:
    shape = prepared(shape)
    if len(shape.nodes) > DRAWN:
        raise DefinitionError(
            f"{shape.form} {shape.name!r} has {len(shape.nodes)} steps, and a drawing holds at most {DRAWN}; "
            "the forms dot and mermaid have no limit"
        )
    return _Sheet(shape, marks)


class _Sheet:
    """One drawing: boxes for the steps, lines for the arrows, laid out and then written."""

    def __init__(self, shape: Shape, marks: Mapping[str, Mark] | None) -> None:
        self.shape = shape
        self.marks = marks
        #: Whether the drawing brings its own colours.
        self.styled = True
        self.nodes = list({node.name: node for node in reversed(shape.nodes)}.values())[::-1]
        self.index = {node.name: number for number, node in enumerate(self.nodes)}
        self.boxes = [self._box(node) for node in self.nodes]
        self.steps = len(self.boxes)
        self.lines: list[Line] = []
        self.conditions: dict[int, str] = {}
        self.kinds: dict[int, str] = {}
        self._connect()
        self.layout = Layout(self.boxes, self.lines, self.index.get(shape.entry) if shape.entry is not None else None)

    def _connect(self) -> None:
        """Add one line for all arrows between the same two steps, and one from the start of the run."""
        found: dict[tuple[int, int], list[str]] = {}
        kinds: dict[tuple[int, int], str] = {}
        for arrow, condition in zip(self.shape.arrows, conditions(self.shape), strict=True):
            if arrow.source in self.index and arrow.target in self.index:
                pair = (self.index[arrow.source], self.index[arrow.target])
                found.setdefault(pair, []).append(condition)
                kinds.setdefault(pair, arrow.kind)
        for pair, labels in found.items():
            condition = joined(labels)
            label = Box(_width(cut(condition, _LABEL_WIDTH), _LABEL_SIZE) + 6, _LABEL_SIZE + 7) if condition else None
            self.conditions[len(self.lines)], self.kinds[len(self.lines)] = condition, kinds[pair]
            self.lines.append(Line(*pair, label))
        if self.shape.entry in self.index:
            self.boxes.append(Box(12.0, 12.0))
            self.lines.append(Line(self.steps, self.index[self.shape.entry]))

    def _box(self, node: Node) -> Box:
        name, note = self._words(node)
        width = max(_width(name, _NAME_SIZE), _width(note, _NOTE_SIZE), 40.0) + 28
        return Box(width, 44.0 if note else 32.0)

    def _words(self, node: Node) -> tuple[str, str]:
        """Return the text of a step: its sign, name and visits; and below, its kind and whether it is an exit."""
        name = cut(one_line(node.name), _NAME_WIDTH)
        if self.marks is not None:
            mark = mark_of(node.name, self.marks)
            name = " ".join(filter(None, (LOOKS[mark.state].sign, name, visits_of(mark))))
        notes = [about(node)] if about(node) else []
        if node.name in self.shape.exits:
            notes.append("exit")
        return name, cut(", ".join(notes), _LABEL_WIDTH)

    # -- writing ---------------------------------------------------------------------------------------------------

    def text(self) -> str:
        legend = self._legend()
        head = cut(title(self.shape), 80)
        across = max(self.layout.width, _width(head, 14.0), _width(legend[0], 11.0) if legend else 0.0)
        width = across + 2 * _MARGIN
        foot = 26.0 if legend else 0.0
        height = self.layout.height + _HEAD + foot + 2 * _MARGIN
        shift = _MARGIN + max((across - self.layout.width) / 2, 0.0)
        size = f'width="{width:.0f}" height="{height:.0f}"'
        parts = [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{_xml(title(self.shape))}</title>",
            f"<style>{_STYLE}</style>",
            _ARROW_HEAD,
            f'<rect {size} fill="#ffffff"/>',
            f'<text class="title" x="{_MARGIN:.0f}" y="{_MARGIN + 10:.0f}">{_xml(head)}</text>',
            *self._parts(shift, _MARGIN + _HEAD),
            *(
                f'<text class="legend" x="{_MARGIN:.0f}" y="{height - _MARGIN:.0f}">{_xml(words)}</text>'
                for words in legend
            ),
            "</svg>",
        ]
        return "\n".join(part for part in parts if part) + "\n"

    def figure(self) -> str:
        self.styled = False
        width, height = self.layout.width + 2 * _EDGE, self.layout.height + 2 * _EDGE
        parts = [
            (
                f'<svg class="figure" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
                f' role="img" aria-label="{_xml(title(self.shape))}">'
            ),
            _ARROW_HEAD.replace(' fill="#6e7781"', ""),
            *self._parts(_EDGE, _EDGE),
            "</svg>",
        ]
        return "\n".join(part for part in parts if part)

    def _parts(self, left: float, top: float) -> list[str]:
        return [
            f'<g transform="translate({left:.1f},{top:.1f})">',
            *(self._line(number, line) for number, line in enumerate(self.lines)),
            *(self._label(number, line) for number, line in enumerate(self.lines)),
            *(self._step(node, box) for node, box in zip(self.nodes, self.boxes, strict=False)),
            self._beginning(),
            "</g>",
        ]

    def _legend(self) -> list[str]:
        if self.marks is None:
            return []
        steps = counted([node.name for node in self.nodes], self.marks)
        return [
            "\u00a0\u00a0 ".join(f"{LOOKS[state].sign} {len(names)} {state.value}" for state, names in steps.items())
        ]

    def _beginning(self) -> str:
        if self.shape.entry not in self.index:
            return ""
        box = self.boxes[self.steps]
        look = 'fill="#1f2328"' if self.styled else 'class="entry"'
        return f'<circle cx="{box.x:.1f}" cy="{box.y:.1f}" r="6" {look}><title>entry</title></circle>'

    def _step(self, node: Node, box: Box) -> str:
        name, note = self._words(node)
        style, tooltip, group = "", one_line(node.name), "node"
        if self.marks is not None:
            mark = mark_of(node.name, self.marks)
            look = LOOKS[mark.state]
            dashes = ";stroke-dasharray:4 3" if look.dashed else ""
            style = f' style="fill:{look.fill};stroke:{look.line}{dashes}"' if self.styled else ""
            group += f" m-{mark.state.value.replace(' ', '-')}"
            tooltip += f": {mark.state.value}" + (f", {mark.visits} times" if mark.visits > 1 else "")
        middle = box.y + (-2 if note else 4.5)
        head = "<g>" if self.styled else f'<g class="{group}" data-step="{_xml(one_line(node.name))}">'
        parts = [f"{head}<title>{_xml(tooltip)}</title>", *self._outline(node, box, style)]
        parts.append(f'<text class="name" x="{box.x:.1f}" y="{middle:.1f}">{_xml(name)}</text>')
        if note:
            parts.append(f'<text class="note" x="{box.x:.1f}" y="{box.y + 13:.1f}">{_xml(note)}</text>')
        return "".join(parts) + "</g>"

    def _outline(self, node: Node, box: Box, style: str) -> list[str]:
        """Return the box of a step; its outline shows its kind."""
        corner = box.height / 2 if node.kind in ("wait", "delay", "approval") else 6.0
        found = [_rectangle("step", box, aside=4, style=style)] if node.kind == "map" else []
        found.append(_rectangle("step", box, corner=corner, style=style))
        if node.name in self.shape.exits:
            found.append(_rectangle("inner", box, inset=3, corner=corner - 3))
        if node.kind in ("child", "parallel", "barrier"):
            top, bottom, half = box.y - box.height / 2, box.y + box.height / 2, box.width / 2 - 7
            sides = (box.x - half, box.x + half)
            found += [f'<path class="inner" d="M{x:.1f},{top:.1f} V{bottom:.1f}"/>' for x in sides]
        return found

    def _line(self, number: int, line: Line) -> str:
        kind = self.kinds.get(number, "next")
        way = self._loop(line) if line.source == line.target else _curve(line.points)
        return f'<path class="line {kind}" d="{way}" marker-end="url(#head)"/>'

    def _loop(self, line: Line) -> str:
        box = self.boxes[line.source]
        x, y, far = box.x + box.width / 2, box.y, box.x + box.width / 2 + 30
        return f"M{x:.1f},{y - 6:.1f} C{far:.1f},{y - 18:.1f} {far:.1f},{y + 18:.1f} {x:.1f},{y + 6:.1f}"

    def _label(self, number: int, line: Line) -> str:
        words = self.conditions.get(number, "")
        if not words or line.label is None:
            return ""
        label = line.label
        if line.source == line.target:
            box = self.boxes[line.source]
            label.x, label.y = box.x + box.width / 2 + 28 + label.width / 2, box.y
        elif not line.bends:  # there were too many lines for the layout
            label.x = sum(x for x, _ in line.points) / len(line.points)
            label.y = sum(y for _, y in line.points) / len(line.points)
        return (
            f"<g><title>{_xml(words)}</title>{_rectangle('behind', label, corner=3)}"
            f'<text class="label" x="{label.x:.1f}" y="{label.y + 4:.1f}">{_xml(cut(words, _LABEL_WIDTH))}</text></g>'
        )


def _rectangle(
    kind: str, box: Box, *, aside: float = 0.0, inset: float = 0.0, corner: float = 6.0, style: str = ""
) -> str:
    left, top = box.x - box.width / 2 + inset + aside, box.y - box.height / 2 + inset + aside
    return (
        f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{box.width - 2 * inset:.1f}" '
        f'height="{box.height - 2 * inset:.1f}" rx="{corner:.1f}"{style}/>'
    )


def _curve(points: list[tuple[float, float]]) -> str:
    """Return a line that is vertical at every point and curves smoothly between points."""
    (x, y), *rest = points
    way = f"M{x:.1f},{y:.1f}"
    for to_x, to_y in rest:
        if abs(to_x - x) < 0.05:
            way += f" L{to_x:.1f},{to_y:.1f}"
        else:
            half = (y + to_y) / 2
            way += f" C{x:.1f},{half:.1f} {to_x:.1f},{half:.1f} {to_x:.1f},{to_y:.1f}"
        x, y = to_x, to_y
    return way


def _width(text: str, size: float) -> float:
    """Return the width of text in a monospaced font: an East Asian character is two wide, a combining one zero."""
    places = sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)
    return places * size * _CHARACTER


def _xml(text: str) -> str:
    """Return text for an element; characters that XML cannot hold have been spelt out before."""
    return escape(text)
