"""Graphs that a seed makes up: a course of segments, and the graph that it becomes.

A segment is a list: its word, then its arguments. A course is laid out as steps and edges (`laid`), from which both the
real graph is made and the walk is foreseen (see `foreseen`). Where a walk may go one way or the other, both come to the
same. To add a segment, add a word to `SEGMENTS` with how it is drawn and laid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import keepstep as ks
from keepstep.model.tree import thaw
from keepstep.ports import CURRENT
from keepstep.workflows.definition import Workflow

from .bodies import Body, here, pass_time
from .programs import Maker, child

if TYPE_CHECKING:
    from random import Random

Segment = list[Any]
Course = list[Segment]
Values = dict[str, Any]

PREFIX = "sim:graph "
#: The key that only people write.
BY_HAND = "by hand"
#: Keys that several may give to, and how what they give becomes one value.
REDUCERS: dict[str, Any] = {"log": "append", "sum": "add", "top": "max", "bag": "merge"}
#: What every map goes over.
ITEMS = [3, 1, 2]
END = "end"
#: What a graph inside another is given of its state.
TAKEN = ("n0", "items")


# -- what steps do to the state ----------------------------------------------------------------------------------------


def change_by(ops: list[list[Any]], state: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """What the code of a step changes: other values, and keys that go."""
    change: Values = {}
    gone: list[str] = []
    for word, key, *more in ops:
        if word in ("set", "give"):
            change[key] = more[0]
        elif word == "bump":
            change[key] = state.get(key, 0) + 1
        elif word == "push":
            change[key] = [*state.get(key, []), more[0]]
        elif word == "first":
            change[key] = [more[0], *state.get(key, [])[1:]]
        elif word == "nest":
            change[key] = {**state.get(key, {}), more[0]: more[1]}
        elif word == "drop":
            change.pop(key, None)
            gone.append(key)
    return change, gone


def holds(predicate: list[Any], state: Mapping[str, Any]) -> bool:
    """Whether a predicate holds, as the judge sees it."""
    word, *more = predicate
    if word == "less":
        return bool(state.get(more[0], 0) < more[1])
    if word == "has":
        return more[0] in state
    if word == "is":
        return more[0] in state and bool(state[more[0]] == more[1])
    return not holds(more[0], state)


def _predicate(predicate: list[Any]) -> Any:
    """The same as the graph is given it."""
    word, *more = predicate
    if word == "has":
        return ks.when.exists(more[0])
    if word == "is":
        return ks.when.equals(*more)
    if word == "no":
        return ks.when.not_(_predicate(more[0]))
    key, limit = more
    return lambda state: state.get(key, 0) < limit


def _whim(_: Any) -> bool:
    return here().chance.random() < 0.5


# -- laying a course out -----------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A point of a graph: what stands there, and for a step who performs it, how long, and what it changes."""

    kind: str
    number: int
    seconds: float = 0.0
    ops: list[Any] = []  # noqa: RUF012 - nobody changes it
    more: Any = None


@dataclass
class Layout:
    """The points of a graph and the edges between them; an edge is a target and its predicate, or None."""

    points: dict[str, Point] = field(default_factory=dict)
    edges: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    entry: str = END

    def put(self, name: str, point: Point, *edges: tuple[str, Any]) -> str:
        self.points[name] = point
        self.edges[name] = list(edges)
        return name


def laid(course: Course) -> Layout:
    """The graph that a course becomes."""
    layout = Layout()
    layout.put(END, Point("work", 0))
    layout.entry = _lay(layout, course, END)
    return layout


def _lay(layout: Layout, course: Course, after: str) -> str:
    for segment in reversed(course):
        after = SEGMENTS[segment[0]].lay(layout, after, segment[1:])
    return after


def _lay_do(layout: Layout, after: str, given: list[Any]) -> str:
    kind, number, seconds, ops = given
    return layout.put(f"{kind}{number}", Point(kind, number, seconds, ops), (after, None))


def _lay_loop(layout: Layout, after: str, given: list[Any]) -> str:
    number, times, course = given
    turn = f"turn{number}"
    layout.put(turn, Point("work", number, 0.0, [["bump", f"c{number}"]]))
    first = _lay(layout, course, turn)
    layout.edges[turn] = [(first, ["less", f"c{number}", times]), (after, None)]
    return first


def _lay_choose(layout: Layout, after: str, given: list[Any]) -> str:
    number, predicate, one, other = given
    ways = (_lay(layout, one, after), predicate), (_lay(layout, other, after), None)
    return layout.put(f"pick{number}", Point("work", number), *ways)


def _lay_whim(layout: Layout, after: str, given: list[Any]) -> str:
    number, ops = given
    for name in ("one", "two"):
        layout.put(f"{name}{number}", Point("work", number, 0.0, ops), (after, None))
    return layout.put(f"whim{number}", Point("work", number), (f"one{number}", ["whim"]), (f"two{number}", None))


def _lay_jump(layout: Layout, after: str, given: list[Any]) -> str:
    number, ops, course = given
    first = _lay(layout, course, after)
    return layout.put(f"jump{number}", Point("jump", number, 0.0, ops, after), (first, None))


def _lay_fan(layout: Layout, after: str, given: list[Any]) -> str:
    number, policy, ways = given
    branches = [
        _lay(layout, way or [["do", "work", f"{number}x{index}", 0.0, []]], after) for index, way in enumerate(ways)
    ]
    return layout.put(f"fan{number}", Point("fan", number, more=(policy, branches, after)), (after, None))


def _lay_map(layout: Layout, after: str, given: list[Any]) -> str:
    number, seconds, concurrency = given
    return layout.put(f"map{number}", Point("map", number, seconds, more=concurrency), (after, None))


def _lay_delay(layout: Layout, after: str, given: list[Any]) -> str:
    number, seconds = given
    return layout.put(f"delay{number}", Point("delay", number, seconds), (after, None))


def _lay_wait(layout: Layout, after: str, given: list[Any]) -> str:
    name, number, *_ = given
    return layout.put(f"wait{number}", Point("wait", number, more=(name, f"w{number}")), (after, None))


def _lay_pair(layout: Layout, after: str, given: list[Any]) -> str:
    """Two waits for signals of one name: each is heard once, whichever comes first."""
    name, number, other, _ = given
    layout.put(f"wait{other}", Point("wait", other, more=(name, "sum")), (after, None))
    layout.put(f"between{number}", Point("work", number, 0.0, [["give", "log", [number]]]), (f"wait{other}", None))
    return layout.put(f"wait{number}", Point("wait", number, more=(name, "sum")), (f"between{number}", None))


def _lay_child(layout: Layout, after: str, given: list[Any]) -> str:
    (number,) = given
    return layout.put(f"child{number}", Point("child", number), (after, None))


def _lay_sub(layout: Layout, after: str, given: list[Any]) -> str:
    number, course = given
    return layout.put(f"sub{number}", Point("sub", number, more=course), (after, None))


# -- the real graph ----------------------------------------------------------------------------------------------------


def graphs_of(run: Values, code: int) -> Iterator[Workflow[..., Any]]:
    """The graphs that a run needs, in the code of one process: its own, and those inside it."""
    yield from _made(f"{PREFIX}{run['id']}", run["parts"][0], run, code)


def _made(name: str, course: Course, run: Values, code: int) -> Iterator[ks.Graph]:
    layout = laid([*course, *([["do", "work", f"new{code}", 0.0, []]] if code else [])])
    stops = list(layout.points)[:: run["stops"]] if run.get("stops") else []  # where a person is asked to look
    graph = ks.Graph(
        name,
        interrupt_before=stops[::2],
        interrupt_after=stops[1::2],
        reducers=REDUCERS,
        max_iterations=run["most"],
        durability=run["durability"] or None,
        on_change="compatible" if run["compatible"] else "fail",
    )
    for point_name, point in layout.points.items():
        if point.kind == "sub":
            inside = list(_made(f"{name}.{point.number}", point.more, run, code))
            yield from inside
            graph.add(inside[-1], name=point_name, takes=TAKEN, gives=f"s{point.number}")
        else:
            _add(graph, point_name, point)
        for target, predicate in layout.edges[point_name]:
            if point.kind != "fan":
                when = _whim if predicate == ["whim"] else predicate and _predicate(predicate)
                graph.edge(point_name, target, when)
    graph.entry(layout.entry)
    graph.exit(END)
    yield graph


def _add(graph: ks.Graph, name: str, point: Point) -> None:
    number, more = point.number, point.more
    if point.kind == "fan":
        policy, branches, join = more
        graph.parallel(name, branches, join, wait=ks.Any() if policy == "any" else ks.All())
    elif point.kind == "map":
        graph.map(name, _mapped(point), over="items", into=f"m{number}", concurrency=more)
    elif point.kind == "delay":
        graph.delay(name, point.seconds)
    elif point.kind == "wait":
        graph.wait(name, signal=more[0], into=more[1])
    elif point.kind == "child":
        graph.add(child, name=name, takes=("statement",), gives=f"g{number}")
    else:
        options = _OPTIONS[point.kind](point) if point.kind in _OPTIONS else {}
        graph.add(_step(point), name=name, **options)


def _returned(point: Point, state: Any) -> Any:
    """What the code of a step returns: its change, or the whole state if something goes."""
    change, gone = change_by(point.ops, state)
    if gone:
        return state.merge(change).without(*gone)
    return ks.Goto(point.more, change) if point.kind == "jump" else change


def _step(point: Point) -> Callable[..., Any]:
    def sees(state: Any) -> None:
        scope = CURRENT.get()
        here().saw(scope.run.id, scope.key, thaw(dict(state)))

    async def step(state: Any) -> Any:
        with Body(_number(point)) as attempt:
            sees(state)
            await pass_time(point.seconds)
            if point.kind == "flaky" and attempt < 3:
                raise ConnectionError("again")
            if point.kind == "fails":
                raise ks.Permanent(f"step {point.number} cannot work")
        return _returned(point, state)

    def plain(state: Any) -> Any:
        with Body(_number(point)):
            sees(state)
            return _returned(point, state)

    return plain if point.kind == "plain" else step


def _number(point: Point) -> int:
    return point.number if isinstance(point.number, int) else 0


def _mapped(point: Point) -> Any:
    async def item(value: int) -> int:
        with Body(point.number):
            await pass_time(point.seconds)
        return 10 * value + point.number

    return ks.step(name=f"item{point.number}")(item)


def _once(point: Point) -> Values:
    def looked_up(state: Any) -> Any:
        scope = CURRENT.get()
        return ks.Done(_returned(point, state)) if here().has_begun(scope.run.id, scope.key) else ks.NotDone()

    return {"at_most_once": True, "verify": looked_up}


_OPTIONS: dict[str, Callable[[Point], Values]] = {
    "flaky": lambda _: {"retry": ks.Retry(attempts=4, base_seconds=0.2, factor=2.0, jitter=0.2)},
    "once": _once,
}


def first_state(run: Values) -> Values:
    """What a run is started with."""
    return {"items": ITEMS, "n0": 0, "statement": run["statement"]}


# -- drawing -----------------------------------------------------------------------------------------------------------


class GraphMaker(Maker):
    """Draws courses. Ways that are gone at once write keys of their own, or give to those that have a reducer."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self.own = ""
        self.looping = False

    def course(self, least: int = 1, most: int = 3) -> Course:
        return [self.segment() for _ in range(self.random.randint(least, most))]

    def segment(self) -> Segment:
        words = [
            word
            for word, one in SEGMENTS.items()
            if not (one.nests and self.depth >= 2) and not (word in ("wait", "pair") and self.looping)  # sent once
        ]
        word = self.random.choices(words, [SEGMENTS[one].weight for one in words])[0]
        self.depth += 1
        looping, self.looping = self.looping, self.looping or word == "loop"
        try:
            return [word, *SEGMENTS[word].draw(self)]
        finally:
            self.depth -= 1
            self.looping = looping

    def ops(self, most: int = 3) -> list[list[Any]]:
        found = [self._op() for _ in range(self.random.randint(0, most))]
        if any(op[0] == "drop" for op in found):  # a whole state is returned: nothing is given to a reducer
            return [op for op in found if op[0] != "give"]
        return found

    def _op(self) -> list[Any]:
        random, own = self.random, self.own
        word = random.choice(("set", "bump", "push", "push", "push", "first", "nest", "give", "give", "drop"))
        value = random.randint(0, 9)
        if word in ("push", "first"):
            return [word, f"l{own}{random.randint(0, 1)}", value]
        if word == "nest":
            return [word, f"d{own}0", f"k{random.randint(0, 2)}", value]
        if word == "drop":
            return [word, random.choice((f"l{own}0", f"d{own}0", f"n{own}1"))]
        if word == "give":
            return random.choice(
                (
                    [word, "log", [value]],
                    [word, "sum", value],
                    [word, "top", value],
                    [word, "bag", {f"k{value}": value}],
                )
            )
        return [word, f"n{own}{random.randint(0, 1)}", *([value] if word == "set" else [])]

    def predicate(self) -> list[Any]:
        own = self.own
        found = self.random.choice(
            (["has", f"l{own}0"], ["is", f"n{own}0", 0], ["less", f"n{own}0", 3], ["has", f"d{own}0"])
        )
        return ["no", found] if found[0] != "less" and self.random.random() < 0.3 else found

    def ways(self, number: int) -> list[Course]:
        before, found = self.own, []
        for index in range(self.random.choice((2, 2, 3))):
            self.own = f"{number}x{index}y"
            found.append(self.course(1, 2))
        self.own = before
        return found


class Segments(NamedTuple):
    """What one word of a course means: how it is drawn, and how it is laid."""

    draw: Callable[[GraphMaker], list[Any]]
    lay: Callable[..., str]
    weight: int = 2
    nests: bool = False


def _draw_do(maker: GraphMaker) -> list[Any]:
    kind = maker.random.choices(("work", "flaky", "plain", "once", "fails"), (20, 3, 3, 3, 1))[0]
    return [kind, maker.number(), maker.seconds(), maker.ops()]


def _draw_fan(maker: GraphMaker) -> list[Any]:
    number = maker.number()
    if maker.random.random() < 0.3:  # whoever wins gives the same
        ways = [[["do", "work", maker.number(), maker.seconds(), [["give", "top", 5]]]] for _ in range(2)]
        return [number, "any", ways]
    return [number, "all", maker.ways(number)]


def _draw_wait(maker: GraphMaker) -> list[Any]:
    number = maker.number()
    return [f"s{number}", number, round(4 * maker.random.random(), 3), maker.random.random() < 0.3]


def _draw_pair(maker: GraphMaker) -> list[Any]:
    number = maker.number()
    return [f"s{number}", number, maker.number(), round(3 * maker.random.random(), 3)]


def _draw_sub(maker: GraphMaker) -> list[Any]:
    """A graph inside: nobody outside knows its run."""
    number, (depth, maker.depth) = maker.number(), (maker.depth, 2)
    course = [one for one in maker.course(1, 3) if one[0] not in ("wait", "pair", "child")]
    maker.depth = depth
    return [number, course]


SEGMENTS: dict[str, Segments] = {
    "do": Segments(_draw_do, _lay_do, 14),
    "loop": Segments(lambda m: [m.number(), m.random.randint(1, 4), m.course(0, 2)], _lay_loop, 4, nests=True),
    "choose": Segments(
        lambda m: [m.number(), m.predicate(), m.course(0, 2), m.course(0, 2)], _lay_choose, 3, nests=True
    ),
    "whim": Segments(lambda m: [m.number(), m.ops(1)], _lay_whim, 3),
    "jump": Segments(lambda m: [m.number(), _kept(m.ops()), m.course(1, 1)], _lay_jump, 2, nests=True),
    "fan": Segments(_draw_fan, _lay_fan, 4, nests=True),
    "map": Segments(lambda m: [m.number(), m.seconds(), m.random.randint(1, 3)], _lay_map, 2),
    "delay": Segments(lambda m: [m.number(), m.random.choice((0.0, 0.5, 2.5, 5.0))], _lay_delay, 2),
    "wait": Segments(_draw_wait, _lay_wait, 2),
    "pair": Segments(_draw_pair, _lay_pair, 2),
    "child": Segments(lambda m: [m.number()], _lay_child, 1),
    "sub": Segments(_draw_sub, _lay_sub, 1, nests=True),
}


def _kept(ops: list[list[Any]]) -> list[list[Any]]:
    return [op for op in ops if op[0] != "drop"]


def draw_graph(random: Random) -> Values:
    """The part of a run's plan that says what its graph is."""
    maker = GraphMaker(random)
    course = maker.course(2, 6)
    maker.in_child, maker.depth = True, 2
    return {
        "workflow": "graph",
        "parts": [course],
        "statement": maker.statement(),
        "most": random.choice((8, 100, 100, 100)),
        "durability": random.choice(("", "", "", "every=3")),
        "compatible": random.random() < 0.3,
        "stops": random.choice((0, 0, 0, 2, 3)),
    }


def smaller_course(course: Course) -> Iterator[Course]:
    """Courses with one segment less, with what is inside a segment instead of it, or with one that is smaller."""
    for index, segment in enumerate(course):
        before, after = course[:index], course[index + 1 :]
        yield [*before, *after]
        for place, part in enumerate(segment):
            if _is_course(part):
                yield [*before, *part, *after]
            for one in _smaller_part(part):
                yield [*before, [*segment[:place], one, *segment[place + 1 :]], *after]


def _is_course(part: Any) -> bool:
    return (
        isinstance(part, list)
        and bool(part)
        and all(isinstance(one, list) and one and str(one[0]) in SEGMENTS for one in part)
    )


def _smaller_part(part: Any) -> Iterator[list[Any]]:
    """What an argument of a segment may be instead: a course, several of them, or what a step changes."""
    if _is_course(part):
        yield from smaller_course(part)
    elif isinstance(part, list) and part and all(map(_is_course, part)):
        for index, way in enumerate(part):
            for one in smaller_course(way):
                yield [*part[:index], one, *part[index + 1 :]]
    elif isinstance(part, list) and all(isinstance(one, list) for one in part):
        for index in range(len(part)):
            yield part[:index] + part[index + 1 :]
