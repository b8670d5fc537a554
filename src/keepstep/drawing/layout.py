"""Layout of a drawing: steps in layers from top to bottom, few crossings, lines around the boxes between.

Every second layer lies between steps. A line's label is placed there like a step, so that nothing is drawn over it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..workflows.reachability import Net, back_arrows, depths, ordered, without
from ..workflows.shape import Arrow

#: Horizontal gap between boxes, in pixels, and the vertical gap between layers.
GAP_X = 26.0
GAP_Y = 24.0
_LINE_GAP = 12.0
#: Number of passes that improve the order within layers, and the positions.
_SWEEPS = 12
_MOVES = 8
#: Maximum number of bends to lay out. The longest lines beyond it are drawn straight across.
_BENDS = 20_000


@dataclass(slots=True)
class Box:
    """A box with a size and a position: a step, the label of a line, or a bend. `x` and `y` are its centre."""

    width: float
    height: float
    layer: int = 0
    x: float = 0.0
    y: float = 0.0
    spare: float = 0.0  # free space on the right, for a line from the box to itself
    bend: bool = False


@dataclass(slots=True)
class Line:
    """An arrow between two boxes, by their numbers, and its path from source to target."""

    source: int
    target: int
    label: Box | None = None
    back: bool = False
    points: list[tuple[float, float]] = field(default_factory=list)
    bends: list[int] = field(default_factory=list)  # boxes that the line passes, from top to bottom


class Layout:
    """Boxes and lines with their positions. `width` and `height` are those of the whole drawing."""

    def __init__(self, boxes: list[Box], lines: list[Line], first: int | None = None) -> None:
        self.boxes = boxes
        self.lines = lines
        self.steps = len(boxes)
        self._assign_layers(first)
        self._add_bends()
        self._neighbours()
        self._order()
        self._place_x()
        self._place_y()
        self._route()
        self.width = max((box.x + box.width / 2 + box.spare for box in boxes), default=0.0)
        self.height = max((box.y + box.height / 2 for box in boxes), default=0.0)

    # -- layers ----------------------------------------------------------------------------------------------------

    def _assign_layers(self, first: int | None) -> None:
        names = [str(number) for number in range(self.steps)]
        net = Net(names, (Arrow(names[line.source], names[line.target]) for line in self.lines))
        back = back_arrows(net, first)
        ahead = without(net, back)
        for source, target in back:
            if source != target:
                ahead[target].append(source)  # laid out in the opposite direction
        order = ordered(ahead)
        found = depths(ahead, order)
        for number in reversed(order):  # place a step without predecessors near its successors
            if not net.before[number] and ahead[number]:
                found[number] = max(min(found[target] for target in ahead[number]) - 1, 0)
        for number in range(self.steps):
            self.boxes[number].layer = 2 * found[number]
        for line in self.lines:
            line.back = (line.source, line.target) in back

    def _add_bends(self) -> None:
        """Add a box in every layer that a line passes; one of them has the size of the line's label."""
        left = _BENDS
        for line in sorted(self.lines, key=self._length):
            if line.source == line.target:
                self._make_room_for_loop(line)
                continue
            upper, lower = (line.target, line.source) if line.back else (line.source, line.target)
            top, bottom = self.boxes[upper].layer, self.boxes[lower].layer
            left -= bottom - top
            if left < 0:
                continue
            labelled = bottom - 1 if line.back else top + 1
            for layer in range(top + 1, bottom):
                box = Box(2.0, 0.0, layer, bend=True)
                if layer == labelled and line.label is not None:
                    box = line.label
                    box.layer = layer
                self.boxes.append(box)
                line.bends.append(len(self.boxes) - 1)

    def _length(self, line: Line) -> int:
        return abs(self.boxes[line.source].layer - self.boxes[line.target].layer)

    def _make_room_for_loop(self, line: Line) -> None:
        box = self.boxes[line.source]
        box.spare = max(box.spare, 34.0 + (line.label.width if line.label else 0.0))

    def _neighbours(self) -> None:
        self.above: list[list[int]] = [[] for _ in self.boxes]
        self.below: list[list[int]] = [[] for _ in self.boxes]
        for line in self.lines:
            if not line.bends:
                continue
            upper, lower = (line.target, line.source) if line.back else (line.source, line.target)
            stations = [upper, *line.bends, lower]
            for one, other in pairwise(stations):
                self.below[one].append(other)
                self.above[other].append(one)
        count = max((box.layer for box in self.boxes), default=-1) + 1
        self.layers: list[list[int]] = [[] for _ in range(count)]

    # -- order within a layer --------------------------------------------------------------------------------------

    def _order(self) -> None:
        self._begin_order()
        best, fewest = [list(layer) for layer in self.layers], self._crossings()
        for sweep in range(_SWEEPS):
            if not fewest:
                break
            down = sweep % 2 == 0
            self._sweep(down=down, ties_turned=sweep % 4 >= 2)
            crossings = self._crossings()
            if crossings < fewest:
                best, fewest = [list(layer) for layer in self.layers], crossings
        self.layers = best

    def _begin_order(self) -> None:
        """Set the initial order by a walk along the lines, starting with the steps in order of definition."""
        seen: set[int] = set()
        starts = sorted(range(self.steps), key=lambda number: self.boxes[number].layer)
        for start in starts:
            waiting = [start]
            while waiting:
                number = waiting.pop()
                if number not in seen:
                    seen.add(number)
                    self.layers[self.boxes[number].layer].append(number)
                    waiting.extend(reversed(self.below[number]))

    def _sweep(self, *, down: bool, ties_turned: bool) -> None:
        """Order each layer by the median of its neighbours; boxes with equal medians may be swapped."""
        layers = self.layers if down else self.layers[::-1]
        neighbours = self.above if down else self.below
        for fixed, layer in pairwise(layers):
            place = {number: float(position) for position, number in enumerate(fixed)}
            wanted = {}
            for position, number in enumerate(layer):
                near = [place[other] for other in neighbours[number] if other in place]
                wanted[number] = sum(near) / len(near) if near else float(position)
            if ties_turned:
                layer.reverse()
            layer.sort(key=wanted.__getitem__)

    def _crossings(self) -> int:
        count = 0
        for layer, following in pairwise(self.layers):
            place = {number: position for position, number in enumerate(following)}
            ends: list[int] = []
            for number in layer:
                found = sorted(place[other] for other in self.below[number] if other in place)
                count += sum(len(ends) - bisect_right(ends, end) for end in found)
                for end in found:
                    insort(ends, end)
        return count

    # -- positions -------------------------------------------------------------------------------------------------

    def _place_x(self) -> None:
        for layer in self.layers:
            right = 0.0
            for number in layer:
                box = self.boxes[number]
                box.x = right + box.width / 2
                right = box.x + box.width / 2 + box.spare + GAP_X
        for move in range(_MOVES):
            down = move % 2 == 0
            neighbours = self.above if down else self.below
            for layer in self.layers if down else self.layers[::-1]:
                self._settle(layer, neighbours)
        left = min((box.x - box.width / 2 for box in self.boxes), default=0.0)
        for box in self.boxes:
            box.x -= left

    def _settle(self, layer: Sequence[int], neighbours: list[list[int]]) -> None:
        """Move the boxes of a layer as near to their neighbours as their order and the gaps allow."""
        offsets, offset = [], 0.0
        for place, number in enumerate(layer):
            if place:
                offset += self._room(self.boxes[layer[place - 1]], self.boxes[number])
            offsets.append(offset)
        blocks: list[tuple[float, float, int]] = []  # weighted sum, weight, number of boxes
        for number, offset in zip(layer, offsets, strict=True):
            near = [self.boxes[other].x for other in neighbours[number]]
            weight = (4.0 if self.boxes[number].bend else 1.0) if near else 0.1
            wanted = (sum(near) / len(near) if near else self.boxes[number].x) - offset
            block = (wanted * weight, weight, 1)
            while blocks and blocks[-1][0] / blocks[-1][1] > block[0] / block[1]:
                last = blocks.pop()
                block = (last[0] + block[0], last[1] + block[1], last[2] + block[2])
            blocks.append(block)
        place = 0
        for total, weight, count in blocks:
            for _ in range(count):
                self.boxes[layer[place]].x = total / weight + offsets[place]
                place += 1

    @staticmethod
    def _room(one: Box, other: Box) -> float:
        """Return the minimum distance between the centres of two adjacent boxes."""
        gap = _LINE_GAP if one.bend and other.bend else GAP_X
        return one.width / 2 + one.spare + gap + other.width / 2

    def _place_y(self) -> None:
        """Place layers from top to bottom, with larger gaps where lines go far to the side."""
        top = 0.0
        self.heights: list[float] = []
        for layer in self.layers:
            height = max((self.boxes[number].height for number in layer), default=0.0)
            for number in layer:
                self.boxes[number].y = top + height / 2
            self.heights.append(height)
            aside = [
                abs(self.boxes[number].x - self.boxes[other].x) for number in layer for other in self.below[number]
            ]
            top += height + GAP_Y + min(max(aside, default=0.0) * 0.05, 30.0)

    # -- lines -----------------------------------------------------------------------------------------------------

    def _route(self) -> None:
        """Choose where each line leaves and enters a step: side by side, in the order of their next points."""
        leaving: list[list[tuple[float, Line]]] = [[] for _ in range(self.steps)]
        coming: list[list[tuple[float, Line]]] = [[] for _ in range(self.steps)]
        for line in self.lines:
            if line.source == line.target:
                continue
            upper, lower = (line.target, line.source) if line.back else (line.source, line.target)
            stations = [upper, *line.bends, lower]
            leaving[upper].append((self.boxes[stations[1]].x, line))
            coming[lower].append((self.boxes[stations[-2]].x, line))
        top = {id(line): x for number, lines in enumerate(leaving) for line, x in self._ports(number, lines)}
        bottom = {id(line): x for number, lines in enumerate(coming) for line, x in self._ports(number, lines)}
        for line in self.lines:
            if line.source != line.target:
                self._draw(line, top[id(line)], bottom[id(line)])

    def _ports(self, number: int, lines: list[tuple[float, Line]]) -> list[tuple[Line, float]]:
        box = self.boxes[number]
        step = min(box.width * 0.8 / max(len(lines), 1), 22.0)
        first = box.x - step * (len(lines) - 1) / 2
        placed = sorted(lines, key=lambda pair: pair[0])
        return [(line, first + step * place) for place, (_, line) in enumerate(placed)]

    def _draw(self, line: Line, top_x: float, bottom_x: float) -> None:
        upper, lower = (line.target, line.source) if line.back else (line.source, line.target)
        one, other = self.boxes[upper], self.boxes[lower]
        points = [(top_x, one.y + one.height / 2)]
        for number in line.bends:
            box = self.boxes[number]
            half = self.heights[box.layer] / 2
            if half:  # a layer without labels needs no bend
                points += [(box.x, box.y - half), (box.x, box.y + half)]
        points.append((bottom_x, other.y - other.height / 2))
        line.points = points[::-1] if line.back else points
