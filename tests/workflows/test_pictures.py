"""Pictures: as they were agreed on, whatever the names are, and with nothing drawn over anything else."""

from __future__ import annotations

import os
import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep.drawing import FORMS, Mark, State, draw
from keepstep.drawing.layout import Layout
from keepstep.drawing.marks import LOOKS
from keepstep.drawing.svg import DRAWN, _Sheet, figure
from keepstep.drawing.text import text
from keepstep.errors import DefinitionError
from keepstep.model.text import one_line
from keepstep.workflows.shape import Arrow, Node, Shape
from keepstep.workflows.validate import problems
from tests.workflows.drawn import BUILD, MARKED, MARKS, REVIEW, TRIAGE, shapes

GOLDEN = Path(__file__).parent / "pictures"
CASES = {"review": (REVIEW, None), "review-run": (REVIEW, MARKS), "build": (BUILD, None), "triage": (TRIAGE, None)}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_a_picture_is_the_agreed_one(case, form):
    """Look at the difference; if it is better than before, KEEPSTEP_UPDATE_PICTURES=1 agrees on it."""
    shape, marks = CASES[case]
    drawn, kept = draw(shape, form, marks), GOLDEN / f"{case}{FORMS[form][0]}"
    if os.environ.get("KEEPSTEP_UPDATE_PICTURES"):
        kept.write_text(drawn, encoding="utf-8")
    assert drawn == kept.read_text(encoding="utf-8")


# -- what a run did ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_state_has_a_sign_of_its_own(form):
    """So that nobody has to tell colours apart."""
    shape = Shape("x", "dag", tuple(Node(state.value) for state in State), ())
    drawn = draw(shape, form, {state.value: Mark(state, 7) for state in State})
    for state in State:
        assert f"{LOOKS[state].sign} {state.value} ×7" in drawn
    assert (
        len({look.sign for look in LOOKS.values()}) == len({look.plain_sign for look in LOOKS.values()}) == len(State)
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_step_without_a_mark_was_not_reached(form):
    assert "· done" in draw(REVIEW, form, MARKS)
    assert "·" not in draw(REVIEW, form)


def test_colours_are_only_for_a_terminal():
    assert "\x1b[" not in text(REVIEW, MARKS)
    assert "\x1b[32m✓ draft ×3\x1b[0m" in text(REVIEW, MARKS, colours=True)
    assert re.sub(r"\x1b\[\d+m", "", text(REVIEW, MARKS, colours=True)) == text(REVIEW, MARKS)


def needing(needs):
    """A dag of steps by number, written in reverse, each with the numbers of those that it needs."""
    arrows = [Arrow(f"s{need}", f"s{step}", kind="needs") for step, all_ in enumerate(needs) for need in sorted(all_)]
    return Shape("d", "dag", tuple(Node(f"s{step}") for step in reversed(range(len(needs)))), tuple(arrows))


@given(st.lists(st.sets(st.integers(0, 8)), max_size=9))
@example([set(), {0}, {0}, {1, 2}, {0, 3}, {4}])
def test_a_step_of_a_dag_stands_below_what_it_needs(needs):
    needs = [{need for need in all_ if need < step} for step, all_ in enumerate(needs)]
    lines = text(needing(needs)).splitlines()
    at = [next(n for n, line in enumerate(lines) if f"○ s{step}" in line) for step in range(len(needs))]
    assert all(at[need] < at[step] for step, all_ in enumerate(needs) for need in all_), "\n".join(lines)


@pytest.mark.parametrize("case", CASES)
def test_a_terminal_without_unicode_is_drawn_on_too(case):
    shape, marks = CASES[case]
    drawn = text(shape, marks, ascii_only=True)
    assert drawn.isascii()
    assert "\\u" not in drawn
    assert [len(line) for line in drawn.splitlines()] == [len(line) for line in text(shape, marks).splitlines()]


# -- names that would do more than be shown ----------------------------------------------------------------------------

HOSTILE = [
    '"]; evil["x',
    "<script>alert(1)</script>",
    '<img src="x" onerror="alert(1)">',
    "a --> b",
    "`**bold**`",
    "%%{init: {}}%%",
    'x"]; e [label="y',
    'x\\" ]; e [ label=\\"y',
    "\x1b[31mred\x07",
    "two\nlines\r\n    s0 --> s1",
    'click s0 "javascript:alert(1)"',
    "]]></title><script/>",
    "#quot;&lt;",
    "\x00\ud800\uffff",
    "end",
    "s0",
    "}",
    "日本語",
]
EVIL = Shape(
    HOSTILE[0] + HOSTILE[1],
    "graph",
    tuple(Node(name, "map", name[::-1]) for name in HOSTILE),
    tuple(Arrow(one, other, one) for one, other in pairwise(HOSTILE)),
    HOSTILE[0],
    (HOSTILE[-1],),
)


def test_mermaid_has_nothing_but_what_we_wrote():
    lines = draw(EVIL, "mermaid", MARKS).splitlines()
    label = r'"(?:[^"<>&`\\%]|<br/>)*"'
    allowed = re.compile(
        rf"---|title: \"(?:[^\"\\]|\\.)*\"|flowchart TD|    s\d+\[\[{label}\]\]|    s\d+ -->(\|{label}\|)? s\d+"
        r'|    start\(\("start"\)\)|    start --> s0|    finish\(\(\("end"\)\)\)|    s17 --> finish'
        r"|    classDef not_reached [\w:#, -]+|    class [s\d,]+ not_reached"
    )
    assert [line for line in lines if not allowed.fullmatch(line)] == []
    assert sum(line.startswith("    s") and "[[" in line for line in lines) == len(HOSTILE)


def test_dot_has_nothing_but_what_we_wrote():
    lines = draw(EVIL, "dot").splitlines()
    text_ = r'"(?:[^"\\]|\\\\|\\"|\\n)*"'
    allowed = re.compile(
        rf"digraph {text_} \{{|    (\w+={text_};? ?)+|    (node|edge|start|s\d+) \[(\w+={text_} ?)+\];"
        rf"|    s\d+ -> s\d+( \[label={text_}\])?;|    start -> s0;|\}}"
    )
    assert [line for line in lines if not allowed.fullmatch(line)] == []


def test_svg_has_nothing_but_what_we_wrote():
    root = ET.fromstring(draw(EVIL, "svg"))
    assert {found.tag.removeprefix(SVG) for found in root.iter()} == {
        *("svg", "title", "style", "defs", "marker", "path", "rect", "text", "g", "circle")
    }
    assert not [name for found in root.iter() for name in found.attrib if name.startswith("on") or "href" in name]
    shown = {found.text for found in root.iter(f"{SVG}text")}
    assert {"<script>alert(1)</script>", "a --> b", "日本語", "#quot;&lt;", "\\x1b[31mred\\x07"} <= shown


def test_a_terminal_is_not_steered():
    drawn = text(EVIL, MARKS)
    assert "\x1b" not in drawn
    assert "\x07" not in drawn
    assert "two lines s0 --> s1" in drawn


# -- many steps --------------------------------------------------------------------------------------------------------


def row(count):
    names = [f"s{number}" for number in range(count)]
    arrows = tuple(Arrow(one, other) for one, other in pairwise(names))
    return Shape("row", "graph", tuple(map(Node, names)), (*arrows, Arrow("s3", "s1", "again")), "s0", (names[-1],))


def test_hundred_steps_are_drawn_and_more_are_summarised():
    assert "○ s99  (exit)" in text(row(100))
    drawn = text(row(101), {"s0": Mark(State.COMPLETED, 2), "s1": Mark(State.FAILED, 1)})
    assert "○" not in drawn
    for line in (
        "entry        s0",
        "exits        s100",
        "longest way  101 steps",
        "loops        1, as s1 → s2 → s3 → s1",
    ):
        assert line in drawn
    assert "failed       1: s1" in drawn
    assert "not reached  99: s2, s3, s4, s5, s6 and 94 more" in drawn


def test_branches_within_branches_stay_readable():
    """Thirty choices, one in the other: each a little further to the right, none over another."""
    arrows = [Arrow(f"q{n}", f"yes{n}", "yes") for n in range(30)] + [Arrow(f"q{n}", f"q{n + 1}") for n in range(30)]
    names = [name for n in range(31) for name in (f"q{n}", f"yes{n}")]
    drawn = text(Shape("deep", "graph", tuple(map(Node, names)), tuple(arrows), "q0", ("q30",)))
    assert max(map(len, drawn.splitlines()[1:])) < 20


def test_forms_for_other_programs_have_no_limit():
    shape = row(20_000)
    assert draw(shape, "dot").count("\n") > 40_000
    assert draw(shape, "mermaid").count("\n") > 40_000


def test_a_drawing_that_no_viewer_shows_is_refused():
    assert draw(row(DRAWN), "svg").count('class="name"') == DRAWN
    with pytest.raises(
        DefinitionError, match=f"{DRAWN + 1} steps, and a drawing holds at most {DRAWN}.*dot and mermaid"
    ):
        draw(row(DRAWN + 1), "svg")


def test_number_of_bends_in_long_lines_is_bounded():
    """The number of bends is bounded: what is beyond is drawn, only not round the others."""
    names = [f"s{number}" for number in range(400)]
    arrows = [Arrow(one, other, kind="needs") for one, other in pairwise(names)]
    arrows += [Arrow(names[number], names[-1], "far", kind="needs") for number in range(200)]
    sheet = _Sheet(Shape("x", "dag", tuple(map(Node, names)), tuple(arrows)), None)
    assert len(sheet.layout.boxes) < 25_000
    assert sheet.text().count('class="line') == len(arrows)
    assert sheet.text().count(">far</text>") == 200


# -- any shape ---------------------------------------------------------------------------------------------------------


def apart(one, other):
    return (
        one.x + one.width / 2 + one.spare <= other.x - other.width / 2 + 0.01
        or other.x + other.width / 2 + other.spare <= one.x - one.width / 2 + 0.01
        or one.y + one.height / 2 <= other.y - other.height / 2 + 0.01
        or other.y + other.height / 2 <= one.y - one.height / 2 + 0.01
    )


@settings(max_examples=50)
@given(shapes(), MARKED)
def test_no_two_things_are_drawn_over_each_other(shape, marks):
    layout: Layout = _Sheet(shape, marks).layout
    for one, other in combinations([box for box in layout.boxes if not box.bend], 2):
        assert apart(one, other)
    for box in layout.boxes:
        assert box.x - box.width / 2 >= -0.01
        assert box.x + box.width / 2 <= layout.width + 0.01
        assert box.y - box.height / 2 >= -0.01
        assert box.y + box.height / 2 <= layout.height + 0.01


@settings(max_examples=50)
@given(shapes(), MARKED)
def test_any_shape_can_be_judged_and_drawn(shape, marks):
    assert problems(shape) == problems(shape)
    for form in FORMS:
        assert draw(shape, form, marks) == draw(shape, form, marks)
    root = ET.fromstring(draw(shape, "svg", marks))
    boxes = [found for found in root.iter(f"{SVG}text") if found.get("class") == "name"]
    assert len(boxes) == len({node.name for node in shape.nodes})
    assert text(shape, marks, ascii_only=True).isascii()
    steps = [line for line in text(shape).splitlines()[2:] if re.match(r"[│├╰─ ]*○( |$)", line)]
    assert len(steps) == len(boxes) or any("○" in arrow.label for arrow in shape.arrows)


def test_figure_for_a_page_brings_no_style_of_its_own():
    drawn = figure(EVIL, {node.name: Mark(State.TIMED_OUT) for node in EVIL.nodes})
    root = ET.fromstring(drawn)
    assert {one.tag for one in root.iter()} <= {"svg", "title", "defs", "marker", "path", "rect", "text", "g", "circle"}
    assert not [one for one in root.iter() if {"style", "fill"} & set(one.attrib)]
    nodes = [one for one in root.iter("g") if "node" in one.get("class", "").split()]
    assert [one.get("data-step") for one in nodes] == [one_line(node.name) for node in EVIL.nodes]
    assert {one.get("class") for one in nodes} == {"node m-timed-out"}
