"""Shapes and marks that the tests of pictures draw."""

from __future__ import annotations

from hypothesis import strategies as st

from keepstep.drawing import Mark, State
from keepstep.workflows.shape import Arrow, Node, Shape

REVIEW = Shape(
    "review",
    "graph",
    (Node("draft"), Node("critic"), Node("publish", "parallel"), Node("tweet"), Node("mail", "child"), Node("done")),
    (
        Arrow("draft", "critic"),
        Arrow("critic", "draft", "score_is_low"),
        Arrow("critic", "publish"),
        Arrow("publish", "tweet", kind="fork"),
        Arrow("publish", "mail", kind="fork"),
        Arrow("tweet", "done", "all", kind="join"),
        Arrow("mail", "done", "all", kind="join"),
    ),
    "draft",
    ("done",),
)

MARKS = {
    "draft": Mark(State.COMPLETED, 3),
    "critic": Mark(State.COMPLETED, 3),
    "publish": Mark(State.RUNNING, 1),
    "tweet": Mark(State.FAILED, 1),
    "mail": Mark(State.WAITING, 1),
}

BUILD = Shape(
    "build",
    "dag",
    tuple(map(Node, ["fetch", "lint", "compile", "test", "package", "docs", "release", "announce"])),
    tuple(
        Arrow(need, step, kind="needs")
        for step, needs in {
            "compile": "fetch lint",
            "test": "compile",
            "package": "compile",
            "docs": "fetch",
            "release": "test package docs",
            "announce": "release",
        }.items()
        for need in needs.split()
    ),
)

TRIAGE = Shape(
    "triage",
    "graph",
    (
        Node("read"),
        Node("classify", "agent"),
        Node("refund"),
        Node("ask", "wait", "approved"),
        Node("escalate", "child"),
        Node("cool", "delay"),
        Node("reply", "map"),
        Node("archive"),
        Node("spam"),
        Node("lost"),
    ),
    (
        Arrow("read", "classify"),
        Arrow("classify", "spam", "equals('kind', 'spam')"),
        Arrow("classify", "refund", "equals('kind', 'refund')"),
        Arrow("classify", "escalate", "equals('kind', 'angry')"),
        Arrow("classify", "ask"),
        Arrow("refund", "reply"),
        Arrow("ask", "classify", "exists('answer')"),
        Arrow("ask", "cool"),
        Arrow("cool", "ask"),
        Arrow("escalate", "reply", "solved"),
        Arrow("escalate", "escalate"),
        Arrow("reply", "archive"),
    ),
    "read",
    ("archive", "spam"),
)

NAMES = st.sampled_from("abcdefghijkl") | st.text(max_size=12)
KINDS = st.sampled_from(["step", "parallel", "map", "wait", "delay", "child", "agent", "branch", "barrier", "other"])


@st.composite
def shapes(draw):
    """Any shape at all, sound or not."""
    nodes = draw(st.lists(st.builds(Node, NAMES, KINDS, st.just("") | st.text(max_size=8)), max_size=14))
    ends = st.sampled_from([node.name for node in nodes]) | NAMES if nodes else NAMES
    arrows = draw(
        st.lists(
            st.builds(
                Arrow,
                ends,
                ends,
                st.sampled_from(["", "always", "low"]) | st.text(max_size=60),
                st.sampled_from(["next", "fork", "join", "needs"]),
            ),
            max_size=25,
        )
    )
    form = draw(st.sampled_from(["graph", "dag"]))
    exits = tuple(draw(st.lists(ends, max_size=3)))
    return Shape(draw(NAMES), form, tuple(nodes), tuple(arrows), draw(st.none() | ends), exits, draw(st.integers()))


MARKED = st.none() | st.dictionaries(NAMES, st.builds(Mark, st.sampled_from(State), st.integers(0, 99)))
