"""Paths through a shape: its arrows as numbers, and non-recursive searches over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from .shape import Arrow, Shape

#: Maximum number of arrows to follow in the search for the shortest cycle. Beyond it, any short cycle is good enough.
_SEARCHED_ARROWS = 500_000
#: Maximum number of steps to visit in the search for the ends of parallel branches.
_SEARCHED_STEPS = 1_000_000


class Net:
    """The steps of a shape by number, in the order of their definition, and the successors of each."""

    def __init__(self, names: Iterable[str], arrows: Iterable[Arrow]) -> None:
        self.names = list(dict.fromkeys(names))
        self.index = {name: number for number, name in enumerate(self.names)}
        self.after: list[list[int]] = [[] for _ in self.names]
        self.before: list[list[int]] = [[] for _ in self.names]
        seen: set[tuple[int, int]] = set()
        for arrow in arrows:
            source, target = self.index.get(arrow.source), self.index.get(arrow.target)
            if source is None or target is None or (source, target) in seen:
                continue
            seen.add((source, target))
            self.after[source].append(target)
            self.before[target].append(source)

    @classmethod
    def of(cls, shape: Shape) -> Net:
        """Return the net of a shape; an arrow from or to an unknown step is left out."""
        return cls((node.name for node in shape.nodes), flowing(shape))

    def named(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of numbered steps."""
        return [self.names[number] for number in numbers]

    def __len__(self) -> int:
        return len(self.names)


def flowing(shape: Shape) -> tuple[Arrow, ...]:
    """Return the arrows that a run follows: into a join from the ends of the branches, not directly from the start.

    A branch follows its own edges up to the join, or ends where it has none.
    """
    joins = {arrow.source: arrow for arrow in shape.arrows if arrow.kind == "join"}
    if not joins:
        return shape.arrows
    branches: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {node.name: [] for node in shape.nodes}
    for arrow in shape.arrows:
        if arrow.kind == "fork" and arrow.source in joins:
            branches.setdefault(arrow.source, []).append(arrow.target)
        if arrow.source in after:
            after[arrow.source].append(arrow.target)
    parts, left = {}, _SEARCHED_STEPS
    for name, ways in branches.items():
        if left > 0:
            parts[name] = _branch_steps(after, ways, {name, joins[name].target})
            left -= len(parts[name])
    made: dict[Arrow, list[Arrow]] = {}
    for name in sorted(parts, key=lambda one: len(parts[one])):  # close an inner part before the part around it
        join = joins[name]
        ends = [step for step in parts[name] if not after[step]]
        for step in ends:
            after[step].append(join.target)
        if any(join.target in after[step] for step in parts[name]):
            made[join] = [Arrow(step, join.target, join.label, "join") for step in ends]
    return tuple(new for arrow in shape.arrows for new in made.get(arrow, [arrow])) if made else shape.arrows


def _branch_steps(after: dict[str, list[str]], branches: Iterable[str], outside: set[str]) -> list[str]:
    """Return the steps of a parallel part: those that its branches reach before they leave it."""
    found = dict.fromkeys(name for name in branches if name in after and name not in outside)
    waiting = list(found)
    while waiting:
        for target in after[waiting.pop()]:
            if target in after and target not in found and target not in outside:
                found[target] = None
                waiting.append(target)
    return list(found)


def ways_back(shape: Shape, arrows: Iterable[Arrow]) -> list[list[str]]:
    """Return, for each parallel part that its branches can re-enter before they join, a shortest such cycle.

    `arrows` need only include those that can be taken. An inner part is crossed from its start to its join.
    """
    after: dict[str, list[str]] = {node.name: [] for node in shape.nodes}
    branches: dict[str, list[str]] = {}
    joins: dict[str, set[str]] = {}
    for arrow in arrows:
        if arrow.kind == "fork":
            branches.setdefault(arrow.source, []).append(arrow.target)
        elif arrow.kind == "join":
            joins.setdefault(arrow.source, set()).add(arrow.target)
        if arrow.source in after and arrow.target in after:
            after[arrow.source].append(arrow.target)
    found, left = [], _SEARCHED_STEPS
    for name, ways in branches.items():
        if left <= 0:
            break
        outside = joins.get(name) or {end for one in ways for end in joins.get(one, ())}
        came_from = _followed(after, name, ways, outside)
        left -= len(came_from)
        if name in came_from:
            way = [name, came_from[name]]
            while way[-1] != name:
                way.append(came_from[way[-1]])
            found.append(way[::-1])
    return found


def _followed(after: dict[str, list[str]], name: str, branches: Iterable[str], outside: set[str]) -> dict[str, str]:
    """Return the steps that a part's branches reach before they leave it, with the predecessor of each."""
    came_from = {one: name for one in branches if one in after and one not in outside}
    waiting = deque(came_from)
    while waiting and name not in came_from:
        source = waiting.popleft()
        for target in after[source]:
            if target not in came_from and target not in outside:
                came_from[target] = source
                waiting.append(target)
    return came_from


def reached(after: Sequence[Sequence[int]], start: Iterable[int]) -> set[int]:
    """Return everything reachable from these steps, themselves included."""
    found = set(start)
    waiting = list(found)
    while waiting:
        for following in after[waiting.pop()]:
            if following not in found:
                found.add(following)
                waiting.append(following)
    return found


def back_arrows(net: Net, first: int | None = None) -> set[tuple[int, int]]:
    """Return the arrows that lead back to a step on the current path; without them there is no cycle.

    The walk begins at `first`, then at steps without predecessors, then at the remaining ones. It takes arrows in the
    order of their definition.
    """
    new, open_, done = 0, 1, 2
    state = [new] * len(net)
    found: set[tuple[int, int]] = set()
    starts = [] if first is None else [first]
    starts += [number for number in range(len(net)) if not net.before[number]]
    for start in (*starts, *range(len(net))):
        if state[start] != new:
            continue
        state[start] = open_
        path = [(start, iter(net.after[start]))]
        while path:
            number, rest = path[-1]
            for following in rest:
                if state[following] == open_:
                    found.add((number, following))
                elif state[following] == new:
                    state[following] = open_
                    path.append((following, iter(net.after[following])))
                    break
            else:
                state[number] = done
                path.pop()
    return found


def without(net: Net, arrows: set[tuple[int, int]]) -> list[list[int]]:
    """Return the successors of each step without these arrows."""
    if not arrows:
        return net.after
    return [
        [target for target in targets if (source, target) not in arrows] for source, targets in enumerate(net.after)
    ]


def ordered(after: Sequence[Sequence[int]]) -> list[int]:
    """Return every step after its predecessors, else in order of definition. Leave out steps in or behind a cycle."""
    open_before = [0] * len(after)
    for targets in after:
        for target in targets:
            open_before[target] += 1
    ready = [number for number, left in enumerate(open_before) if not left]
    heapify(ready)
    found = []
    while ready:
        number = heappop(ready)
        found.append(number)
        for target in after[number]:
            open_before[target] -= 1
            if not open_before[target]:
                heappush(ready, target)
    return found


def depths(after: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
    """Return the number of steps on the longest path to each step, itself excluded. The arrows must have no cycle."""
    found = [0] * len(after)
    for number in order:
        beyond = found[number] + 1
        for target in after[number]:
            found[target] = max(found[target], beyond)
    return found


def circles(net: Net) -> list[list[int]]:
    """Return the strongly connected parts, and the steps that follow themselves."""
    found = [sorted(part) for part in _parts(net.after) if len(part) > 1 or part[0] in net.after[part[0]]]
    return sorted(found)


def _parts(after: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the strongly connected parts (Tarjan's algorithm with an explicit stack)."""
    number_of, lowest = [-1] * len(after), [0] * len(after)
    in_stack = [False] * len(after)
    stack: list[int] = []
    parts: list[list[int]] = []
    count = 0
    for start in range(len(after)):
        if number_of[start] >= 0:
            continue
        path = [(start, iter(after[start]))]
        number_of[start] = lowest[start] = count
        count += 1
        stack.append(start)
        in_stack[start] = True
        while path:
            number, rest = path[-1]
            for following in rest:
                if number_of[following] < 0:
                    number_of[following] = lowest[following] = count
                    count += 1
                    stack.append(following)
                    in_stack[following] = True
                    path.append((following, iter(after[following])))
                    break
                if in_stack[following]:
                    lowest[number] = min(lowest[number], number_of[following])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[number])
                if lowest[number] == number_of[number]:
                    part: list[int] = []
                    while not part or part[-1] != number:
                        part.append(stack.pop())
                        in_stack[part[-1]] = False
                    parts.append(part)
    return parts


def shortest_cycle(net: Net, part: Sequence[int]) -> list[int]:
    """Return a shortest path from a step of a part back to itself, with the first step repeated at the end.

    In a very large part, it is the shortest through the steps that were searched.
    """
    inside = set(part)
    best: list[int] = []
    followed = 0
    for start in part:
        cycle, count = _cycle_through(net, start, inside, len(best))
        followed += count
        if cycle:
            best = cycle
        if len(best) == 2 or (best and followed > _SEARCHED_ARROWS):  # a step that follows itself, or the search limit
            break
    return best


def _cycle_through(net: Net, start: int, inside: set[int], shorter_than: int) -> tuple[list[int], int]:
    """Return the shortest cycle through a step if it beats the known one, and the number of arrows followed."""
    came_from = {start: start}
    ring = deque([(start, 2)])  # the number of steps that a cycle closed from here would list
    followed = 0
    while ring:
        number, length = ring.popleft()
        if shorter_than and length >= shorter_than:
            break
        for target in net.after[number]:
            followed += 1
            if target == start:
                cycle = [start, number]
                while cycle[-1] != start:
                    cycle.append(came_from[cycle[-1]])
                return cycle[::-1], followed
            if target in inside and target not in came_from:
                came_from[target] = number
                ring.append((target, length + 1))
    return [], followed
