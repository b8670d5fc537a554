"""What a run has made of each step, told by its records: the marks of a picture."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.drawing import State
from keepstep.drawing.run_marks import Moment, marks_of, moments, shape_of
from keepstep.model import Kind, Run, Status
from keepstep.workflows.shape import Arrow, Node, Shape
from tests.workflows.drawn import shapes

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BEGUN = Moment(Kind.RUN_STARTED, "", None)

#: a, then b and c at once (c is followed by d), then z.
FORKED = Shape(
    "x",
    "graph",
    (Node("a"), Node("p", "parallel"), Node("b"), Node("c"), Node("d", "wait"), Node("z")),
    (
        Arrow("a", "p"),
        Arrow("c", "d"),
        Arrow("p", "b", kind="fork"),
        Arrow("p", "c", kind="fork"),
        Arrow("p", "z", "All()", "join"),
    ),
    "a",
    ("z",),
)


def run(status=Status.RUNNING, **more):
    return Run("r", "x", status, NOW, **more)


def done(key, next_=None, kind=Kind.STEP_COMPLETED):
    return Moment(kind, key, State.COMPLETED, next_)


def failed(key):
    return Moment(Kind.STEP_FAILED, key, State.FAILED)


def told(shape, status, *happened):
    """Each step's state, with its visits if there were several."""
    found = marks_of(shape, run(status), [BEGUN, *happened])
    return {name: f"{mark.state}{mark.visits if mark.visits != 1 else ''}" for name, mark in found.items()}


def test_the_first_step_is_under_way_as_soon_as_a_run_has_begun():
    assert told(FORKED, Status.RUNNING) == {"a": "running"}
    assert told(FORKED, Status.WAITING) == {"a": "waiting"}
    assert told(FORKED, Status.CANCELLED) == {"a": "cancelled"}
    assert told(FORKED, Status.FAILED) == {"a": "failed"}
    assert marks_of(FORKED, run(Status.QUEUED), []) == {}


def test_each_branch_has_its_own_position():
    passed = [done("a#1", "p"), done("p#1.c/c#1", "d")]
    assert told(FORKED, Status.RUNNING, *passed) == {
        "a": "completed",
        "p": "running",
        "b": "running",
        "c": "completed",
        "d": "waiting",
    }
    assert told(FORKED, Status.RUNNING, *passed, done("p#1.b/b#1", "")) == {
        "a": "completed",
        "p": "running",
        "b": "completed",
        "c": "completed",
        "d": "waiting",
    }
    assert told(FORKED, Status.RUNNING, *passed, done("p#1", "z", Kind.BARRIER)) == {
        "a": "completed",
        "p": "completed",
        "c": "completed",
        "z": "running",
    }


def test_branch_at_the_join_waits_for_the_others():
    """It led there by an edge of its own; the join is not under way before all are there."""
    assert "z" not in told(FORKED, Status.RUNNING, done("a#1", "p"), done("p#1.b/b#1", "z"))


def test_step_under_way_beside_a_failure_is_cancelled():
    assert told(FORKED, Status.FAILED, done("a#1", "p"), failed("p#1.b/b#1")) == {
        "a": "completed",
        "p": "failed",
        "b": "failed",
        "c": "cancelled",
    }


def test_a_branch_may_fail_while_the_others_go_on():
    assert told(FORKED, Status.RUNNING, done("a#1", "p"), failed("p#1.b/b#1"))["b"] == "failed"


def test_a_choice_that_was_recorded_apart_counts():
    choice = Moment(Kind.DECISION, "a#1.next", None, "p")
    assert told(FORKED, Status.RUNNING, done("a#1"), choice)["p"] == "running"


def test_a_call_inside_of_a_step_is_no_step_though_it_has_its_name():
    """A map calls a step of the same name as one of the graph's."""
    shape = Shape("x", "graph", (Node("all", "map"), Node("one")), (Arrow("all", "one"),), "all", ("one",))
    assert told(shape, Status.RUNNING, done("all#1.0/one#1"), done("all#1.1/one#1")) == {"all": "running"}
    assert told(shape, Status.RUNNING, done("all#1", "one"), done("one#1", "")) == {
        "all": "completed",
        "one": "completed",
    }


def test_visits_are_counted_with_the_one_under_way():
    shape = Shape("x", "graph", (Node("a"), Node("b")), (Arrow("a", "b"), Arrow("b", "a")), "a", ("b",))
    passed = [done("a#1", "b"), done("b#1", "a"), done("a#2", "b")]
    assert told(shape, Status.RUNNING, *passed) == {"a": "completed2", "b": "running2"}
    assert told(shape, Status.COMPLETED, *passed, done("b#2", "")) == {"a": "completed2", "b": "completed2"}


DIAMOND = Shape(
    "x",
    "dag",
    tuple(map(Node, "abcz")),
    tuple(Arrow(one, other, kind="needs") for one, other in ("ab", "ac", "bz", "cz")),
)


def test_a_step_of_a_dag_is_under_way_when_its_needs_are_there():
    assert told(DIAMOND, Status.RUNNING) == {"a": "running"}
    assert told(DIAMOND, Status.RUNNING, done("a#1"), done("b#1")) == {
        "a": "completed",
        "b": "completed",
        "c": "running",
    }


def test_a_skipped_step_of_a_dag_takes_along_what_needs_only_it():
    skipped = [Moment(Kind.DECISION, f"when:{name}#1", None, None, 0) for name in "bc"]
    assert told(DIAMOND, Status.RUNNING, done("a#1"), skipped[0], done("c#1")) == {
        "a": "completed",
        "b": "skipped0",
        "c": "completed",
        "z": "running",
    }
    assert told(DIAMOND, Status.COMPLETED, done("a#1"), *skipped)["z"] == "skipped0"


def test_a_child_of_a_dag_is_under_way_until_its_result_is_there():
    shape = Shape("x", "dag", (Node("a", "child"),), ())
    begun = Moment(Kind.CHILD, "a#1", None)
    assert told(shape, Status.WAITING, begun) == {"a": "waiting"}
    assert told(shape, Status.RUNNING, begun, Moment(Kind.CHILD, "a.result#1", State.FAILED)) == {"a": "failed"}


def test_a_function_that_is_under_way_shows_what_it_tries():
    happened = [BEGUN, done("a#1"), Moment(Kind.STEP_FAILED, "1/b#1", None), Moment(Kind.STEP_STARTED, "c#1", None)]
    shape, marks = shape_of(run(), happened)
    assert [(node.name, str(marks[node.name].state)) for node in shape.nodes] == [
        *(("a", "completed"), ("b", "running"), ("c", "running"))
    ]
    assert [(arrow.source, arrow.target) for arrow in shape.arrows] == [("a", "b"), ("b", "c")]


def test_names_that_look_like_ours_do_not_collide():
    shape, marks = shape_of(run(), [done("a (2)#1"), done("a#1"), done("b#1"), done("a#2")])
    assert len({node.name for node in shape.nodes}) == len(marks) == 4


@pytest.mark.parametrize("to", [2, 3])
async def test_what_was_rewound_no_longer_counts(world, to):
    graph = ks.Graph("row")
    for name in ("one", "two", "three"):
        graph.add(lambda state: {}, name=name)
    graph.edge("one", "two")
    graph.edge("two", "three")
    graph.entry("one")
    graph.exit("three")
    engine = await world.started()
    handle = await engine.start(graph, run_id="r")
    await handle.result(60)
    stored = await handle.run()
    full = marks_of(graph.shape(), stored, await moments(engine, stored))
    assert {mark.state for mark in full.values()} == {State.COMPLETED}
    await world.crash(engine)
    looker = await world.started(worker=False)
    await (await looker.get("r")).rewind(to=to)
    stored = await (await looker.get("r")).run()
    marks = marks_of(graph.shape(), stored, await moments(looker, stored))
    assert [name for name, mark in marks.items() if mark.state == State.COMPLETED] == ["one", "two"][: to - 1]


KEYS = st.sampled_from(["a#1", "b#2", "p#1.a/b#1", "x/y#1", "a#1.next", "when:a#1", "", "/", "#", "a.fork#1.b/c#1"])
HAPPENED = st.lists(
    st.builds(
        Moment,
        st.sampled_from(Kind),
        KEYS | st.text(max_size=6),
        st.none() | st.sampled_from(State),
        st.none() | st.sampled_from("abc"),
        st.none() | st.integers(0, 1),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(shapes(), HAPPENED, st.sampled_from(Status))
def test_whatever_was_recorded_can_be_drawn(shape, happened, status):
    marks = marks_of(shape, run(status), happened)
    assert set(marks) <= {node.name for node in shape.nodes}
    drawn, _ = shape_of(dataclasses.replace(run(status), wakes=("go", "ks:cancel")), happened)
    assert len({node.name for node in drawn.nodes}) == len(drawn.nodes)
