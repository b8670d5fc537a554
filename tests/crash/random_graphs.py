"""Random graphs as plain data, the graphs that are made of it, and a simple model of what must come of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import strategies as st

import keepstep as ks
from keepstep.ports import CURRENT

#: What several writers may write at once, and how.
REDUCERS = {"log": "append", "sum": "add", "top": "max"}
FIRST = {"xs": [1, 2, 3], "log": [], "sum": 0, "top": 1, "deep": {"kept": {"a": 1}}}
#: More often than this no run needs to be retried.
MOST_FAILURES = 40

# -- plain data --------------------------------------------------------------------------------------------------------

WAYS = (
    "change",
    "append",
    "reduce",
    "nested",
    "state",
    "without",
    "nothing",
    "goto",
    "thread",
    "flaky",
    "thread flaky",
)
_step = st.tuples(st.just("step"), st.sampled_from(WAYS))
_point = st.one_of(
    _step,
    _step,
    st.tuples(st.just("map"), st.sampled_from([None, 1, 2])),
    st.tuples(st.just("wait"), st.booleans()),
    st.just(("late",)),
    st.just(("broken",)),
    st.just(("contended",)),
    st.just(("delay",)),
    st.just(("child",)),
)


def _larger(blocks):
    several = st.lists(blocks, min_size=1, max_size=3)
    branches = st.lists(several, min_size=1, max_size=3)
    losing = st.lists(st.sampled_from(["waits", "fails", "sleeps", "nested"]), min_size=1, max_size=2)
    return st.one_of(
        st.tuples(st.just("loop"), several, st.integers(1, 3)),
        st.tuples(st.just("choice"), several, several, st.booleans()),
        st.tuples(st.just("all"), branches),
        st.tuples(st.just("collect"), branches),
        st.tuples(st.just("some"), branches, losing),
        st.tuples(st.just("race"), st.lists(st.integers(1, 3), min_size=2, max_size=3), st.integers(1, 2)),
    )


PROGRAMS = st.lists(st.recursive(_point, _larger, max_leaves=7), min_size=1, max_size=4)


# -- the graph ---------------------------------------------------------------------------------------------------------


@ks.step
async def triple(number: int) -> int:
    await asyncio.sleep(0)
    return number * 3


@ks.workflow(name="random:kid")
async def kid(sum: int) -> int:  # noqa: A002 - a key of the state
    return await triple(sum)


@dataclass
class Made:
    """A graph, the signals that it waits for, and what its bodies saw."""

    graph: ks.Graph
    signals: Counter = field(default_factory=Counter)
    begun: Counter = field(default_factory=Counter)
    seen: dict = field(default_factory=dict)
    strange: list = field(default_factory=list)
    failed: int = 0

    async def play(self, engine):
        """Start it, send it what it waits for, and see how it ends; said again after a crash."""
        handle = await engine.start(self.graph, FIRST, run_id="main")
        while True:
            await self.send(handle)
            try:
                return await handle.result()
            except ks.RunFailed:
                self.failed += 1
                if self.failed > MOST_FAILURES:
                    raise
                await handle.retry()

    async def send(self, handle):
        """Every signal counts once; one that finds the run failed is not taken, and sent again."""
        for name, count in self.signals.items():
            for number in range(count):
                with contextlib.suppress(ks.AlreadyFinished):
                    await handle.signal(name, number, id=f"{name} {number}")

    def look(self, state):
        """A body that runs again, in this life or another, must be given the same state."""
        key = CURRENT.get().key
        now = json.dumps([dict(state), state.checkpoint_step], sort_keys=True, default=str)
        if self.seen.setdefault(key, now) != now:
            self.strange.append((key, self.seen[key], now))
        self.begun[key] += 1
        return self.begun[key]


def change_of(name, way, state):
    """What a step returns: its own key, and what it gives to the keys that all share."""
    mine = state.get(name, 0) + 1
    deep = f"deep of {name}"
    ways = {
        "append": lambda: {name: mine, "log": [name]},
        "reduce": lambda: {"sum": mine, "top": mine * 2},
        "nested": lambda: {name: mine, deep: {**state.get(deep, {}), str(mine): [mine]}},
        "state": lambda: ks.State(state).set(name, mine),
        "without": lambda: ks.State(state).without(name) if name in state else ks.State(state).set(name, mine),
        "nothing": lambda: None,
    }
    return ways.get(way, lambda: {name: mine})()


class Builder:
    """Makes the graph of a program: every block becomes points between `before` and what comes after it."""

    def __init__(self, program, **options):
        self.graph = ks.Graph("random", reducers=REDUCERS, **options)
        self.made = Made(self.graph)
        self.numbers = itertools.count(1)
        self.times = 1
        self.strict = True
        first, loose = self.sequence(program)
        self.add_step("end", "nothing")
        self.lead(loose, "end")
        self.graph.entry(first)
        self.graph.exit("end")

    def name(self, kind):
        return f"{kind}{next(self.numbers)}"

    def lead(self, loose, target):
        for source, when in loose:
            self.graph.edge(source, target, when=when)

    def sequence(self, blocks):
        """The first point, and the loose ends: the edges that lack their target."""
        first, loose = None, []
        for block in blocks:
            entry, after = getattr(self, f"make_{block[0]}")(*block[1:])
            self.lead(loose, entry)
            first, loose = first or entry, after
        return first, loose

    def add_step(self, name, way):
        made = self.made

        def change(state):
            number = made.look(state)
            if "flaky" in way and number < 2:
                raise ConnectionError("try again")
            return change_of(name, way, state)

        if "thread" in way:
            body = change
        else:

            async def body(state):
                await asyncio.sleep(0)
                return change(state)

        retry = ks.Retry(attempts=9, base_seconds=0.01) if "flaky" in way else None
        self.graph.add(body, name=name, **({"retry": retry} if retry else {}))
        return name, [(name, None)]

    def make_step(self, way):
        if way != "goto":
            return self.add_step(self.name("step"), way)
        made, name, target = self.made, self.name("jump"), self.name("landed")

        async def body(state):
            made.look(state)
            return ks.Goto(target, {name: 1})

        self.graph.add(body, name=name)
        self.add_step(target, "change")
        self.graph.edge(name, target)
        return name, [(target, None)]

    def make_map(self, concurrency):
        name = self.name("map")
        self.graph.map(name, triple, over="xs", into=name, concurrency=concurrency)
        return name, [(name, None)]

    def make_wait(self, into):
        name = self.name("wait")
        self.graph.wait(name, into=name if into else None)
        self.made.signals[name] += self.times
        return name, [(name, None)]

    def make_late(self):
        name = self.name("late")
        self.graph.wait(name, into=name, timeout=0.01, default="nobody")
        return name, [(name, None)]

    def make_broken(self):
        """A step that ends its run the first time; somebody retries that."""
        made, name = self.made, self.name("broken")
        if not self.strict:
            return self.add_step(name, "change")

        async def body(state):
            if made.look(state) == 1:
                raise ks.Permanent("not yet")
            return {name: state.get(name, 0) + 1, "log": [name]}

        self.graph.add(body, name=name)
        return name, [(name, None)]

    def make_contended(self):
        """A wait that may lose just when its signal comes: then the next wait must hear it."""
        join, later, end = self.name("join"), self.name("later"), self.name("heard")
        first, loose = self.make_sandbox(f"{join} steps", 3)
        self.graph.wait(f"{join} wait", signal=join, into=f"{join} won")
        self.made.signals[join] += self.times
        self.add_step(join, "change")
        entry, _ = self.part([(f"{join} wait", [(f"{join} wait", None)]), (first, loose)], join, wait=ks.Any())
        self.graph.wait(later, signal=join)
        self.graph.add(self.forgetting(f"{join} "), name=end)
        self.graph.edge(join, end, when=ks.when.exists(f"{join} won"))
        self.graph.edge(join, later)
        self.graph.edge(later, end)
        return entry, [(end, None)]

    def make_delay(self):
        name = self.name("delay")
        self.graph.delay(name, 0.01)
        return name, [(name, None)]

    def make_child(self):
        name = self.name("child")
        self.graph.add(kid, name=name, gives=name)
        return name, [(name, None)]

    def make_loop(self, blocks, rounds):
        name = self.name("again")
        self.times *= rounds
        first, loose = self.sequence(blocks)
        self.times //= rounds
        self.graph.add(self.counting(name, rounds), name=name)
        self.lead(loose, name)
        self.graph.edge(name, first, when=lambda state: state[name] % rounds)
        return first, [(name, None)]

    def counting(self, name, rounds):
        async def body(state):
            self.made.look(state)
            return {name: state.get(name, 0) + 1}

        return body

    def make_choice(self, one, other, first):
        name = self.name("choice")
        self.add_step(name, "change")
        left, ends = self.sequence(one)
        right, more = self.sequence(other)
        self.graph.edge(name, left, when=lambda state: bool(state[name] % 2) is first)
        self.graph.edge(name, right)
        return name, [*ends, *more]

    # -- at once ------------------------------------------------------------------------------------------------------

    def part(self, ways, join, **options):
        """A parallel part: each way is its first point and its loose ends."""
        name = self.name("part")
        for _, loose in ways:
            self.lead(loose, join)
        self.graph.parallel(name, [first for first, _ in ways], join, **options)
        return name, [(join, None)]

    def make_all(self, branches):
        join, _ = self.add_step(self.name("join"), "append")
        return self.part([self.sequence(one) for one in branches], join)

    def make_collect(self, branches):
        """One way fails, the others are waited for, and how it went is told."""
        join, _ = self.add_step(self.name("join"), "append")
        ways = [*(self.leniently(one) for one in branches), self.losing("fails")]
        return self.part(ways, join, collect=True, report=f"how {join}")

    def make_some(self, branches, losing):
        """As many as must succeed can; the others never do."""
        join, _ = self.add_step(self.name("join"), "append")
        ways = [*(self.losing(how) for how in losing), *(self.leniently(one) for one in branches)]
        return self.part(ways, join, wait=ks.Quorum(len(branches)) if len(branches) > 1 else ks.Any())

    def leniently(self, blocks):
        """A way whose failures would change what comes of it: it has none."""
        strict, self.strict = self.strict, False
        made = self.sequence(blocks)
        self.strict = strict
        return made

    def losing(self, how):
        name = self.name(how)
        if how == "waits":
            self.graph.wait(name)  # for a signal that never comes
        elif how == "nested":
            join, _ = self.add_step(self.name("join"), "change")
            return self.part([self.losing("waits"), self.losing("sleeps")], join)
        else:
            self.graph.add(_fails if how == "fails" else _sleeps, name=name)
        return name, [(name, None)]

    def make_race(self, lengths, needed):
        """Who comes first decides; all that is left of it is that it was decided once."""
        join = self.name("join")
        ways = [self.make_sandbox(f"{join} {number}", length) for number, length in enumerate(lengths)]
        self.graph.add(self.forgetting(f"{join} "), name=join)
        return self.part(ways, join, wait=ks.Quorum(min(needed, len(lengths))))

    def forgetting(self, prefix):
        """A step that removes what another time might have left otherwise."""

        async def body(state):
            self.made.look(state)
            return state.without(*[key for key in state if key.startswith(prefix)])

        return body

    def make_sandbox(self, key, length):
        """Racing steps that write under one key only."""
        made, names = self.made, [self.name("racer") for _ in range(length)]

        def racer(number):
            async def body(state):
                made.look(state)
                for _ in range(number):
                    await asyncio.sleep(0)
                return {key: [*state.get(key, []), number]}

            return body

        for number, name in enumerate(names):
            self.graph.add(racer(number), name=name)
        for one, other in itertools.pairwise(names):
            self.graph.edge(one, other)
        return names[0], [(names[-1], None)]


async def _fails(state):
    raise ks.Permanent("it cannot")


async def _sleeps(state):
    await asyncio.sleep(2)  # for ever, but for a run that is driven alone since it has killed its worker twice
    raise ks.Permanent("too late")


def build(program, **options) -> Made:
    """The graph of a program."""
    return Builder(program, **options).made
