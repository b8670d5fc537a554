"""Validation: everything that is wrong at once, in the same order, however large the definition is."""

from __future__ import annotations

import itertools
import logging
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import InvalidGraph
from keepstep.workflows import validate
from keepstep.workflows.reachability import Net, circles, flowing, ordered, reached, shortest_cycle
from keepstep.workflows.shape import Arrow, Node, Shape
from keepstep.workflows.validate import Validator, check, digest, order, problems
from tests.nightly import cases


def graph(*ways, entry="a", exits=("z",), nodes=None, kinds=None, **more):
    """A graph from ways written "a b", or "a b condition"."""
    arrows = tuple(Arrow(*way.split(" ", 2)) if isinstance(way, str) else way for way in ways)
    names = nodes or list(dict.fromkeys(end for arrow in arrows for end in (arrow.source, arrow.target)))
    made = tuple(Node(name, (kinds or {}).get(name, "step")) for name in names)
    return Shape("review", "graph", made, arrows, entry, tuple(exits), **more)


def dag(**needs):
    """A dag from each step's needs, written with spaces between."""
    arrows = tuple(Arrow(one, name, kind="needs") for name, said in needs.items() for one in said.split())
    return Shape("build", "dag", tuple(map(Node, needs)), arrows)


def fork(source, *branches, join=""):
    return [Arrow(source, one, kind="fork") for one in branches] + [
        Arrow(one, join, kind="join") for one in branches if join
    ]


def told(shape):
    return [str(one) for one in problems(shape)]


def test_a_sound_graph_has_no_problems():
    assert told(graph("a b", "b a low", "b c", *fork("c", "d", "e", join="z"), kinds={"c": "parallel"})) == []


def part(name, *branches, join):
    """A parallel part as a graph's shape shows it."""
    return [*(Arrow(name, one, kind="fork") for one in branches), Arrow(name, join, "all", "join")]


@pytest.mark.parametrize(
    "ways, path",
    [
        (["a p", *part("p", "b", join="z"), "b p low", "b z"], "p → b → p"),
        (["a p", *part("p", "p", "b", join="z")], "p → p"),
        (["a p", *part("p", "b", "c", join="z"), "b d", "d a late"], "p → b → d → a → p"),
        (["a p", *part("p", "q", join="z"), *part("q", "b", join="m"), "b m", "m p low", "m z"], "p → q → m → p"),
    ],
)
def test_a_parallel_part_that_begins_again_inside_itself_is_an_error(ways, path):
    how = "lead the branch to where it joins, and back from there"
    errors = [one for one in told(graph(*ways)) if one.startswith("error")]
    assert f"error: step 'p': it begins again inside one of its own branches: {path}; {how}" in errors


@pytest.mark.parametrize(
    "ways",
    [
        ["a p", *part("p", "b", "c", join="d"), "d a low", "d z"],  # a loop around it
        ["a p", *part("p", "b", join="d"), "b b again", "b d", "d p low", "d z"],  # and one within a branch
        ["a p", *part("p", "b", join="d"), "d q", *part("q", "b", join="e"), "e p low", "e z"],  # a branch of two
    ],
)
def test_loops_around_parallel_parts_are_sound(ways):
    assert told(graph(*ways)) == []


def test_edge_to_an_unknown_step_is_reported_once():
    """It is neither a way that a run always goes on by, nor is the step a dead end because of it."""
    shape = graph("a bb", nodes=["a"], exits=["a"])
    assert told(shape) == ["error: edge 'a' → 'bb': there is no step 'bb'; there are: 'a'"]
    shape = graph("a z x", "a b", "b zz", nodes=["a", "b", "z"])
    assert told(shape) == ["error: edge 'b' → 'zz': there is no step 'zz'; did you mean 'z'?"]


def test_only_a_repeated_need_is_reported():
    shape = Shape("x", "graph", (Node("a"), Node("b")), (Arrow("a", "b"), Arrow("a", "b", kind="needs")), "a", ("b",))
    assert told(shape) == []
    assert told(dag(a="", b="a a")) == ["warning: step 'b': it needs 'a' twice; name it once"]


def test_a_sound_dag_has_no_problems():
    assert told(dag(fetch="", lint="", compile="fetch lint", test="compile")) == []


@pytest.mark.parametrize(
    "shape, found",
    [
        (graph("draft z", entry="drat"), "error: entry: there is no step 'drat'; did you mean 'draft'?"),
        (graph("a z", entry=None), "error: graph 'review': it has no entry; name its first step as the entry"),
        (graph("a z", exits=()), "error: graph 'review': it has no exit; name at least one step as an exit"),
        (graph("a z", exits=("z", "end")), "error: exit: there is no step 'end'; there are: 'a', 'z'"),
        (
            graph("draft publsh", "draft z", entry="draft", nodes=["draft", "publish", "z"]),
            "error: edge 'draft' → 'publsh': there is no step 'publsh'; did you mean 'publish'?",
        ),
        (
            graph("drft z", "draft z", entry="draft", nodes=["draft", "z"]),
            "error: edge 'drft' → 'z': there is no step 'drft'; did you mean 'draft'?",
        ),
        (
            graph("a z", *fork("a", "tweet", "mial"), nodes=["a", "tweet", "mail", "z"]),
            "error: step 'a': its branch 'mial' is not a step; did you mean 'mail'?",
        ),
        (
            graph(*fork("a", "b", join="zed"), nodes=["a", "b", "z"]),
            "error: step 'b': it joins at 'zed', and there is no such step; there are: 'a', 'b', 'z'",
        ),
        (dag(fetch="", compile="fech"), "error: step 'compile': it needs 'fech', and there is no such step; "),
        (graph("a z", nodes=["a", "z", "a"]), "error: step 'a': 2 steps have this name; rename all but one"),
        (graph("a z", nodes=["a", "z", ""]), "error: graph 'review': a step has no name; give it one"),
        (graph(entry=None, nodes=[]), "error: graph 'review': it has no steps; add one"),
        (dag(), "error: dag 'build': it has no steps; add one"),
        (graph("a z", max_iterations=-1), "error: graph 'review': max_iterations is -1; give a whole number from 1 on"),
        (graph("a z", max_iterations=0), "error: graph 'review': max_iterations is 0; give a whole number from 1 on"),
        (
            graph("a z", "a b c", kinds={"b": "parallel"}),
            "error: step 'b': it runs in parallel, and has no branches; name at least one",
        ),
        (
            graph(*fork("a", "b", "c", join="c"), "c z"),
            "error: step 'a': it joins at 'c', which is one of its branches; join at another step",
        ),
        (graph(*fork("a", "b", join="a"), "a z"), "error: step 'a': it joins at itself; join at a step that comes"),
        (graph(*fork("a", "b", "b", join="z")), "error: step 'a': its branch 'b' is named 2 times; name it once"),
        (dag(a="", b="a a"), "warning: step 'b': it needs 'a' twice; name it once"),
        (dag(a="b", b="a"), "error: step 'a': the steps need each other in a circle: a → b → a; remove one of these"),
        (dag(a="a"), "error: step 'a': it needs itself: a → a; remove one of these needs"),
        (graph("a z", "b z"), "warning: step 'b': no way leads to it from the entry 'a'; add an edge to it"),
        (graph("a z x", "a b"), "warning: step 'b': it is a dead end: no way leads on, and it is not an exit; make"),
        (
            graph("a b x", "a z", "b c", "c b", "b z"),
            "warning: step 'b': the loop b → c → b never ends: no edge that can be taken leaves it",
        ),
        (graph("a a x", "a b", "b b"), "warning: step 'b': the loop b → b never ends: no edge that can be taken"),
        (
            graph("a b always", "a z low", "b z"),
            "warning: edge 'a' → 'z': it is never taken: the edge to 'b' stands before it and always holds; put the",
        ),
    ],
)
def test_problem_is_reported_with_its_place_and_what_to_do(shape, found):
    assert [one for one in told(shape) if one.startswith(found)], told(shape)


def test_everything_is_reported_at_once_with_errors_first():
    shape = graph("a b", "a c", "c nowhere", "d e", "e d", entry="a", exits=("nowhere",), max_iterations=0)
    shape = graph(*shape.arrows, nodes=["a", "b", "c", "d", "e"], exits=("no",), max_iterations=0)
    assert [one.split(": ", 2)[:2] for one in told(shape)] == [
        ["error", "graph 'review'"],
        ["error", "exit"],
        ["error", "edge 'c' → 'nowhere'"],
        ["warning", "step 'c'"],
        ["warning", "step 'd'"],
        ["warning", "step 'b'"],
        ["warning", "edge 'a' → 'c'"],
    ]


def test_edge_of_an_unknown_step_to_itself_is_reported_once():
    assert len([one for one in told(graph("x x", "a z", nodes=["a", "z"])) if "'x'" in one]) == 1


def test_steps_behind_an_unreachable_one_are_reported_with_it():
    found = told(graph("a z", "b c", "c d", "d c low", "d z", "e e", nodes=[*"abcdefz"]))
    lost = [one.partition("; ")[0] for one in found if "no way leads to it" in one]
    assert lost == [
        "warning: step 'b': no way leads to it from the entry 'a', and so not to 'c', 'd'",
        "warning: step 'e': no way leads to it from the entry 'a'",
        "warning: step 'f': no way leads to it from the entry 'a'",
    ]


def test_unreachable_cycle_is_reported_once():
    found = told(graph("a z", "b c", "c b low", "c z"))
    assert found == [one for one in found if one.startswith("warning: step 'b': no way leads to it")]
    assert "and so not to 'c'" in found[0]


def test_a_way_that_is_never_taken_leads_nowhere():
    """What only such an edge leads to is not come to, and a loop is not left by it."""
    found = told(graph("a b", "b a", "b z"))
    assert any("the loop a → b → a never ends" in one for one in found)
    assert any(one.startswith("warning: step 'z': no way leads to it") for one in found)


def test_a_loop_with_an_exit_in_it_ends():
    assert told(graph("a b", "b a low", exits=("b",))) == []


def test_exit_that_is_always_left_is_reported():
    found = told(graph("a b", "b a", exits=("b",)))
    assert found[0].startswith("warning: exit 'b': a run never ends here: it always goes on to 'a'; give that edge a")
    assert "the loop a → b → a never ends" in found[1]


def joining(source, *branches, join):
    """A parallel part as a graph tells of it: the join stands at its beginning."""
    return [*(Arrow(source, one, kind="fork") for one in branches), Arrow(source, join, "All()", "join")]


def test_a_branch_may_end_without_an_edge():
    shape = graph(*joining("a", "b", "c", join="z"), "b d", kinds={"a": "parallel"})
    assert told(shape) == []
    assert [(one.source, one.target) for one in flowing(shape) if one.kind == "join"] == [("c", "z"), ("d", "z")]


def test_parallel_parts_within_parallel_parts_join_their_own_way():
    shape = graph(*joining("a", "b", "p", join="z"), *joining("p", "c", "d", join="e"), nodes=[*"abcdepz"])
    assert told(shape) == []
    ends = {(one.source, one.target) for one in flowing(shape) if one.kind == "join"}
    assert ends == {("b", "z"), ("c", "e"), ("d", "e"), ("e", "z")}


def test_the_way_through_branches_counts_for_depth():
    names = [f"s{number}" for number in range(999)]
    ways = [Arrow(one, other) for one, other in itertools.pairwise(names)]
    shape = graph(*joining("a", "s0", "b", join="z"), *ways, nodes=["a", "b", *names, "z"])
    assert "1001 steps" in told(shape)[0]


def test_a_branch_that_never_comes_to_its_end_is_a_loop():
    found = told(graph(*joining("a", "b", "c", join="z"), "b d", "d b"))
    assert ["the loop b → d → b never ends" in one for one in found] == [True]


def test_the_cycle_that_is_printed_is_a_shortest_one():
    found = told(dag(a="e", b="a", c="b", d="c", e="d c", f="g", g="f"))
    assert "a circle: a → b → c → e → a;" in found[0]
    assert "a circle: f → g → f;" in found[1]
    assert len(found) == 2


# -- how deep, and how large -------------------------------------------------------------------------------------------


def chain(length, form="graph"):
    names = [f"s{number}" for number in range(length)]
    kind = "next" if form == "graph" else "needs"
    arrows = tuple(Arrow(one, other, kind=kind) for one, other in itertools.pairwise(names))
    ends = (names[0], (names[-1],)) if form == "graph" else (None, ())
    return Shape("long", form, tuple(map(Node, names)), arrows, *ends)


@pytest.mark.parametrize("form", ["graph", "dag"])
def test_a_thousand_steps_in_a_row_are_the_limit(form):
    assert told(chain(1000, form)) == []
    (found,) = told(chain(1001, form))
    assert found.startswith(f"error: {form} 'long': the longest way through it is 1001 steps, and 1000 is the limit; ")
    assert problems(chain(1001, form), depth_limit=1001) == []


def test_depth_is_the_longest_way_and_going_back_is_no_way():
    """Two ways to the end, one of them short; the way back to the beginning does not make it longer."""
    long = chain(1000)
    made = Shape(
        "x",
        "graph",
        long.nodes,
        (Arrow("s0", "s999", "short"), Arrow("s5", "s0", "again"), *long.arrows),
        "s0",
        ("s999",),
    )
    assert [one.where for one in problems(made)] == []


MANY = 20_000


@pytest.mark.parametrize("form", ["graph", "dag"])
@pytest.mark.parametrize("size", cases([10_000, 100_000], quick=[10_000]))
def test_a_great_many_steps_need_no_recursion(form, size, monkeypatch):
    shape = chain(size, form)
    monkeypatch.setattr(sys, "setrecursionlimit", None)
    assert problems(shape, depth_limit=size) == []
    assert order(shape) == [node.name for node in shape.nodes]


@pytest.mark.parametrize("form", ["graph", "dag"])
def test_very_long_cycle_is_printed_without_its_middle(form):
    shape = chain(MANY, form)
    arrows = (*shape.arrows, Arrow(f"s{MANY - 1}", "s0", kind=shape.arrows[0].kind))
    found = told(Shape("ring", form, shape.nodes, arrows, shape.entry, ("s7",) if form == "graph" else ()))
    (loop,) = [one for one in found if f"({MANY - 29:,} more)" in one]
    assert len(loop) < 500, "a very long cycle is printed without its middle"


def test_very_many_problems_are_all_reported():
    nodes = tuple(Node(f"s{number}") for number in range(MANY))
    arrows = tuple(Arrow(f"t{number}", f"s{number}", kind="needs") for number in range(MANY))
    assert len(problems(Shape("x", "dag", nodes, arrows))) == MANY


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_order_is_by_needs_then_as_written():
    assert order(dag(d="c", c="", b="", a="b")) == ["c", "d", "b", "a"]


def test_the_order_of_a_dag_with_a_cycle_is_an_error():
    with pytest.raises(InvalidGraph, match="a → b → a"):
        order(dag(a="b", b="a"))


def test_the_order_of_a_graph_leaves_out_the_ways_back():
    assert order(graph("a b", "b a low", "b c", "c z")) == ["a", "b", "c", "z"]


# -- refusing ----------------------------------------------------------------------------------------------------------


def test_check_lists_every_error():
    with pytest.raises(InvalidGraph) as caught:
        check(graph("a b", "a z", entry="x", exits=("y",)))
    assert str(caught.value).splitlines() == [
        "graph 'review' cannot run; 2 errors:",
        "  error: entry: there is no step 'x'; there are: 'a', 'b', 'z'",
        "  error: exit: there is no step 'y'; there are: 'a', 'b', 'z'",
    ]
    assert [one.severity for one in caught.value.problems] == ["error", "error", "warning", "warning", "warning"]


def test_warnings_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(validate, "_SHARED", Validator())
    shape = graph("a z", "b z")
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        check(shape)
        check(shape)
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("graph 'review': warning: step 'b': no way leads to it from the entry 'a'; add an edge to")


def test_a_flood_of_warnings_is_cut_in_the_log(caplog):
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        found = Validator().validate(graph("a z", nodes=["a", "z", *(f"n{number}" for number in range(100))]))
    assert len(found.warnings) == 100
    assert len(caplog.records) == 21
    assert caplog.records[-1].getMessage().endswith("80 more warnings")


# -- many, and the same ones again -------------------------------------------------------------------------------------


def test_examined_shape_is_remembered_by_its_full_content():
    validator = Validator()
    one, same, other = graph("a z"), graph("a z"), graph("a z when")
    assert validator.validate(one).subject is one
    assert validator.validate(same).subject is same
    assert validator.validate(other).subject is other
    assert (validator.hits, validator.misses) == (1, 2)


def test_every_field_counts():
    base = graph("a z")
    others = [
        graph("a z x"),
        graph("a z", kinds={"a": "map"}),
        graph("a z", max_iterations=7),
        graph("a z", exits=("a",)),
        graph("a z", entry="z"),
        graph(Arrow("a", "z", kind="join")),
        graph("a z", nodes=["z", "a"]),
        Shape("other", "graph", base.nodes, base.arrows, "a", ("z",)),
        Shape("review", "dag", base.nodes, base.arrows, "a", ("z",)),
        Shape("review", "graph", (Node("a", label="x"), Node("z")), base.arrows, "a", ("z",)),
    ]
    assert len({digest(one) for one in (base, *others)}) == len(others) + 1
    assert digest(graph("a z")) == digest(base)


def test_names_cannot_be_mixed_up_in_the_digest():
    assert digest(graph(nodes=['a","b'])) != digest(graph(nodes=["a", "b"]))


def test_memory_is_bounded_and_the_oldest_goes():
    validator = Validator(size=2)
    for name in "abac":  # a is used again, so b goes
        validator.validate(graph(nodes=[name]))
    assert (validator.hits, validator.misses) == (1, 3)
    validator.validate(graph(nodes=["a"]))
    assert validator.hits == 2
    validator.validate(graph(nodes=["b"]))
    assert validator.misses == 4


class Defined:
    def __init__(self, shape):
        self.made = shape

    def shape(self):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def test_a_batch_has_a_result_for_each():
    validator = Validator()
    given_ = [Defined(graph("a z")), Defined(ValueError("no such file")), Defined(graph("a z")), Defined(dag(a="a"))]
    found = validator.validate_all(given_)
    assert [one.subject for one in found] == given_
    assert [one.ok for one in found] == [True, False, True, False]
    assert str(found[1].problems[0]) == "error: item 2: it has no shape: ValueError: no such file"
    assert (validator.hits, validator.misses) == (1, 2)
    assert found[0].check() is given_[0]
    with pytest.raises(InvalidGraph, match="needs itself"):
        found[3].check()


# -- against a simple model --------------------------------------------------------------------------------------------

NAMES = "abcdef"
ARROWS = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), max_size=14)


def closure(arrows):
    """What can be come to from each, by an arrow or more, found the slow way."""
    pairs = set(arrows)
    while True:
        more = {(a, d) for a, b in pairs for c, d in pairs if b == c} - pairs
        if not more:
            return pairs
        pairs |= more


@given(ARROWS)
def test_ways_equal_those_of_a_simple_model(arrows):
    net = Net(NAMES, [Arrow(*ends) for ends in arrows])
    ways = closure(arrows)
    for name in NAMES:
        assert set(net.named(reached(net.after, [net.index[name]]))) == {name} | {b for a, b in ways if a == name}
    on_cycle = {name for name in NAMES if (name, name) in ways}
    parts = [net.named(part) for part in circles(net)]
    assert {name for part in parts for name in part} == on_cycle
    for part in parts:
        assert all((a, b) in ways for a in part for b in part)
    behind = {b for a, b in ways if a in on_cycle}
    assert set(net.named(ordered(net.after))) == set(NAMES) - behind


@given(ARROWS)
def test_a_cycle_is_a_cycle_and_none_is_shorter(arrows):
    net = Net(NAMES, [Arrow(*ends) for ends in arrows])
    for part in circles(net):
        cycle = net.named(shortest_cycle(net, part))
        assert cycle[0] == cycle[-1]
        assert all(pair in arrows for pair in itertools.pairwise(cycle))
        inside = net.named(part)
        for length in range(1, len(cycle) - 1):
            for ring in itertools.product(inside, repeat=length):
                assert not all(pair in arrows for pair in itertools.pairwise((*ring, ring[0])))


@given(ARROWS)
def test_the_order_keeps_every_need(arrows):
    shape = Shape("x", "dag", tuple(map(Node, NAMES)), tuple(Arrow(*ends, kind="needs") for ends in arrows))
    ways = closure(arrows)
    if any(a == b for a, b in ways):
        assert any("circle" in one or "itself" in one for one in told(shape))
        return
    found = order(shape)
    assert sorted(found) == sorted(NAMES)
    assert all(found.index(a) < found.index(b) for a, b in arrows)
    assert not [one for one in problems(shape) if one.severity == "error"]
