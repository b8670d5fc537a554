"""A picture for the terminal: steps down the page, branches to the right, ways back by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ..model.text import one_line
from ..workflows.reachability import Net, back_arrows, circles, depths, ordered, shortest_cycle, without
from ..workflows.shape import Shape
from .marks import LOOKS, Mark, counted, mark_of, visits_of
from .wording import about, conditions, cut, joined, prepared, title

#: Maximum number of steps to draw. A larger definition is summarised, because a longer drawing is unreadable.
DRAWN = 100
#: Maximum number of characters of a name, a condition or a list.
_WIDTH = 80

_ASCII = str.maketrans(
    {
        "○": "o",
        "│": "|",
        "├": "+",
        "╰": "`",
        "─": "-",
        "→": ">",
        "←": "<",
        "↑": "^",
        "×": "x",
        "…": "~",
        **{look.sign: look.plain_sign for look in LOOKS.values()},
    }
)


def text(
    shape: Shape, marks: Mapping[str, Mark] | None = None, *, colours: bool = False, ascii_only: bool = False
) -> str:
    """Return the drawing, with a legend for a run; above 100 steps, a summary. Colours are terminal escapes."""
    shape, pen = prepared(shape), _Pen(marks, colours=colours)
    lines = [title(shape), ""]
    lines += _Drawing(shape, pen).lines() if len(shape.nodes) <= DRAWN else _summary(shape, pen)
    if marks is not None:
        lines += ["", *_legend(shape, marks, pen)]
    drawn = "\n".join(lines) + "\n"
    return drawn.translate(_ASCII).encode("ascii", "backslashreplace").decode() if ascii_only else drawn


class _Pen:
    """Formats a step: its sign, its name in the colour of its state, and how often it was reached."""

    def __init__(self, marks: Mapping[str, Mark] | None, *, colours: bool) -> None:
        self.marks = marks
        self.colours = colours

    def step(self, name: str) -> str:
        shown = cut(one_line(name), _WIDTH)
        if self.marks is None:
            return f"○ {shown}"
        mark = mark_of(name, self.marks)
        look = LOOKS[mark.state]
        return self.ink(" ".join(filter(None, (look.sign, shown, visits_of(mark)))), look.ansi)

    def faint(self, words: str) -> str:
        return self.ink(words, 2)

    def ink(self, words: str, code: int) -> str:
        return f"\x1b[{code}m{words}\x1b[0m" if self.colours else words


def _legend(shape: Shape, marks: Mapping[str, Mark], pen: _Pen) -> list[str]:
    steps = counted([node.name for node in shape.nodes], marks)
    words = [
        pen.ink(f"{LOOKS[state].sign} {len(names)} {state.value}", LOOKS[state].ansi) for state, names in steps.items()
    ]
    return ["   ".join(words)]


# -- the drawing -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Piece:
    """A line still to be drawn, right of the rails: a step after its sign, or only text."""

    rails: str
    words: str = ""
    step: int | None = None
    meets: bool = False


class _Drawing:
    """Draws each step once, below the step that all paths to it pass; every other path is a reference to it."""

    def __init__(self, shape: Shape, pen: _Pen) -> None:
        self.shape = shape
        self.pen = pen
        self.net = net = Net.of(shape)
        entry = net.index.get(shape.entry) if shape.entry is not None else None
        self.ahead = without(net, back_arrows(net, entry))
        self.order = ordered(self.ahead)
        self.place = {number: place for place, number in enumerate(self.order)}
        self.below = _below(net, self.ahead, self.order, entry)
        self.nodes = {node.name: node for node in reversed(shape.nodes)}
        self.conditions: dict[tuple[int, int], str] = {}
        self.kinds: dict[tuple[int, int], str] = {}
        for arrow, condition in zip(shape.arrows, conditions(shape), strict=True):
            if arrow.source in net.index and arrow.target in net.index:
                pair = (net.index[arrow.source], net.index[arrow.target])
                self.conditions[pair] = joined((self.conditions.get(pair, ""), cut(condition, _WIDTH)))
                self.kinds.setdefault(pair, arrow.kind)

    def lines(self) -> list[str]:
        """Return all lines. Pieces to be drawn wait on a stack, each with the rails to its left."""
        found: list[str] = []
        waiting: list[_Piece] = []
        for top in reversed(self.below[-1]):
            waiting += [_Piece("", step=top), _Piece("")]
        waiting = waiting[:-1]  # no empty line before the first
        while waiting:
            piece = waiting.pop()
            if piece.step is None:
                found.append((piece.rails + piece.words).rstrip())
                continue
            found.append((piece.rails + piece.words + self._step(piece.step, meets=piece.meets)).rstrip())
            inner = piece.rails + ("" if not piece.words else "│ " if piece.words.startswith("├") else "  ")
            waiting.extend(reversed(self._ways(piece.step, inner)))
        return found

    def _step(self, number: int, *, meets: bool) -> str:
        name = self.net.names[number]
        notes = [about(self.nodes[name])] if about(self.nodes[name]) else []
        if name in self.shape.exits:
            notes.append("exit")
        line = self.pen.step(name)
        if notes:
            line += self.pen.faint(f"  ({', '.join(notes)})")
        if meets or self._needs_others(number):
            others = ", ".join(map(one_line, self.net.named(self.net.before[number])))
            line += self.pen.faint(f"  ← {cut(others, _WIDTH)}")
        if self._refers_only(number):
            line += "  " + self._reference(number, self.net.after[number][0])
        return line

    def _refers_only(self, number: int) -> bool:
        """Whether the only way on leads to a step that is drawn elsewhere, so that it fits on the same line."""
        return len(self.net.after[number]) == 1 and not self.below[number]

    def _reference(self, number: int, target: int) -> str:
        back = self.place[target] <= self.place[number]
        condition = self.conditions[number, target]
        shown = f"{'↑' if back else '→'} {cut(one_line(self.net.names[target]), _WIDTH)}"
        if condition and self.kinds[number, target] == "next":
            return self.pen.faint(f"{condition} ") + shown
        return shown + (self.pen.faint(f" ({condition})") if condition else "")

    def _ways(self, number: int, rails: str) -> list[_Piece]:
        """Return the pieces below a step: references and branches in the order of its arrows, then the next step."""
        if self._refers_only(number):
            return []
        below = self.below[number]
        going_on = self._going_on(number, below)
        targets = list(dict.fromkeys((*self.net.after[number], *below)))
        if self.shape.form == "dag":  # references first, then steps in order, each below its needs
            targets.sort(key=lambda target: self.place[target] if target in below else -1)
        targets = [target for target in targets if target != going_on]
        found: list[_Piece] = []
        for place, target in enumerate(targets, 1):
            last = place == len(targets) and going_on is None
            lead, condition = "╰─" if last else "├─", self.conditions.get((number, target), "")
            if target not in below:
                gap = " " if condition else ""
                found.append(_Piece(rails, f"{lead}{gap}{self._reference(number, target)}"))
            elif condition:
                found.append(_Piece(rails, f"{lead} {self.pen.faint(condition)}"))
                found.append(_Piece(rails + ("  " if last else "│ "), step=target))
            else:
                found.append(_Piece(rails, lead, target, meets=target not in self.net.after[number]))
        if going_on is not None:
            condition = self.conditions.get((number, going_on), "")
            found.append(_Piece(rails, f"│ {self.pen.faint(condition)}" if condition else "│"))
            found.append(_Piece(rails, step=going_on))
        return found

    def _needs_others(self, target: int) -> bool:
        return self.shape.form == "dag" and len(self.net.before[target]) > 1

    def _going_on(self, number: int, below: list[int]) -> int | None:
        """Return the step on the same rail: the only one, else where branches meet, else the last choice."""
        if len(below) < 2:
            return below[0] if below else None
        meetings = [target for target in below if target not in self.net.after[number] or self._needs_others(target)]
        if meetings:
            return meetings[-1]
        choices = [target for target in self.net.after[number] if target in below]
        return choices[-1] if self.kinds[number, choices[-1]] in ("next", "join") else None


def _below(net: Net, ahead: list[list[int]], order: list[int], entry: int | None) -> dict[int, list[int]]:
    """Return the steps that are drawn below each step: those it dominates directly. -1 stands for the page."""
    before: list[list[int]] = [[] for _ in net.names]
    for source, targets in enumerate(ahead):
        for target in targets:
            before[target].append(source)
    place = {number: position for position, number in enumerate(order)} | {-1: -1}
    above: dict[int, int] = {-1: -1}
    for number in order:
        sources = before[number] if number != entry else []
        over = sources[0] if sources else -1
        for source in sources[1:]:
            while over != source:
                if place[over] > place[source]:
                    over = above[over]
                else:
                    source = above[source]  # noqa: PLW2901 - both climb until they meet
        above[number] = over
    below: dict[int, list[int]] = {number: [] for number in (-1, *order)}
    for number in order:
        below[above[number]].append(number)
    return below


# -- the summary -------------------------------------------------------------------------------------------------------


def _summary(shape: Shape, pen: _Pen) -> list[str]:
    net = Net.of(shape)
    entry = net.index.get(shape.entry) if shape.entry is not None else None
    ahead = without(net, back_arrows(net, entry))
    kinds = Counter(node.kind for node in shape.nodes)
    loops = circles(net)
    facts = {
        "entry": one_line(shape.entry or ""),
        "exits": _few(list(shape.exits)),
        "kinds": ", ".join(f"{count} {kind}" for kind, count in kinds.items()) if len(kinds) > 1 else "",
        "arrows": str(len(shape.arrows)),
        "longest way": f"{max(depths(ahead, ordered(ahead)), default=-1) + 1} steps",
        "loops": f"{len(loops)}, as {cut(' → '.join(net.named(shortest_cycle(net, loops[0]))), _WIDTH)}"
        if loops
        else "",
    }
    if pen.marks is not None:
        for state, names in counted(net.names, pen.marks).items():
            facts[state.value] = f"{len(names)}: {_few(names)}"
    width = max(map(len, facts))
    lines = [f"{pen.faint(name.ljust(width))}  {value}" for name, value in facts.items() if value]
    return [*lines, "", f"More than {DRAWN} steps are not drawn here; the forms svg, dot and mermaid have all of them."]


def _few(names: list[str]) -> str:
    """Return the first names, and the number of the others."""
    shown = ", ".join(map(one_line, names[:5]))
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown
