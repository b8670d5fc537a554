"""`graph`: what is drawn of a definition, what of a run, and what is said when nothing can be drawn."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET

import pytest

from keepstep.cli import errors
from tests.cli.conftest import ROOT

PROGRAM = """
from pathlib import Path

import keepstep as ks

review = ks.Graph("review")


@review.step
async def draft(state):
    return {"round": state.get("round", 0) + 1}


@review.step
async def critic(state):
    return {"good": state["round"] >= 3}


def not_good(state):
    return not state["good"]


@review.step
async def tweet(state):
    return {"tweeted": True}


@review.step
async def mail(state):
    if not Path("mended").exists():
        raise ConnectionError("no line")
    return {"mailed": True}


@review.step
async def done(state):
    return {}


@ks.step
async def fetch(url):
    return url


review.edge("draft", "critic")
review.edge("critic", "draft", when=not_good)
review.edge("critic", "fetch_all")
review.map("fetch_all", fetch, over="urls", into="pages")
review.edge("fetch_all", "approval")
review.wait("approval", signal="approved")
review.edge("approval", "publish")
review.parallel("publish", ["tweet", "mail"], join="done")
review.entry("draft")
review.exit("done")

build = ks.Dag("build")


@build.step
async def get():
    return 1


@build.step(needs=["get"], when=ks.when.equals("get", 2))
async def docs(get):
    return "docs"


@build.step(needs=["docs"])
async def site(docs):
    return "site"


@build.step(needs=["get"])
async def test(get):
    if not Path("mended").exists():
        raise ValueError("red")
    return "green"


@build.step(needs=["test", "site"])
async def release(test, site):
    return "out"


@ks.workflow
async def plain(n: int):
    await ks.map(fetch, list(range(n)))
    await ks.sleep(0.01)
    await fetch(1)
    await ks.wait_for("go")


broken = ks.Graph("broken")
broken.add(draft, name="a")
broken.add(critic, name="b")
broken.edge("a", "bb")
broken.entry("a")
broken.exit("a")
"""


@pytest.fixture
def drawn(keepstep, folder):
    """The command line in a folder with graphs, a dag and a function."""
    (folder / "graphs.py").write_text(PROGRAM, encoding="utf-8")
    return keepstep


@pytest.fixture
def runs(drawn):
    """A run of each, as far as it goes by itself."""
    drawn("start", "graphs.py:review", "--input", '{"urls": [1, 2]}', "--id", "r")
    drawn("start", "graphs.py:build", "--id", "b")
    drawn("start", "graphs.py:plain", "3", "--id", "p")
    drawn("worker", "graphs.py", "--until-idle", "-q")
    return drawn


def write_file(folder):
    """A workflow as a file, with a parallel part."""
    steps = {
        "begin": {"next": ["left", "right"], "join": "meet"},
        "left": {"function": "left"},
        "right": {"kind": "approval"},
        "meet": {"kind": "barrier", "next": "end"},
        "end": {},
    }
    (folder / "flow.json").write_text(json.dumps({"keepstep": 1, "metadata": {"name": "flow"}, "steps": steps}))


def states(result):
    assert result.code == 0, result.err
    return {node["name"]: (node["state"], node["visits"]) for node in result.json["nodes"]}


def test_a_graph_is_drawn(drawn):
    done = drawn("graph", "graphs.py:review")
    assert done.code == 0
    assert done.out == (
        "review: graph, 8 steps\n"
        "\n"
        "○ draft\n"
        "│\n"
        "○ critic\n"
        "├─ when not_good ↑ draft\n"
        "│ otherwise\n"
        "○ fetch_all  (map fetch over urls)\n"
        "│\n"
        "○ approval  (wait for approved)\n"
        "│\n"
        "○ publish  (parallel)\n"
        "├─○ tweet  → done (all)\n"
        "├─○ mail  → done (all)\n"
        "│\n"
        "○ done  (exit)\n"
    )
    assert done.err == ""


def test_a_dag_is_drawn(drawn):
    done = drawn("graph", "graphs.py:build")
    assert done.out.startswith(
        "build: dag, 5 steps\n\n○ get\n├─○ docs  (when equals('get', 2))\n│ │\n│ ○ site  → release\n"
    )


def test_a_file_is_drawn_without_its_functions(drawn, folder):
    write_file(folder)
    done = drawn("graph", "flow.json")
    assert done.code == 0, done.err
    assert done.out.splitlines()[2:] == [
        *(
            "○ begin",
            "├─○ left  → meet",
            "├─○ right  (approval)  → meet",
            "│",
            "○ meet  (barrier)",
            "│",
            "○ end  (exit)",
        )
    ]


def test_the_examples_are_drawn_and_nothing_is_wrong_with_them(drawn, monkeypatch):
    told = {}
    for path in sorted((ROOT / "examples").glob("*.py")):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
        told[path.stem] = drawn("graph", path)
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    graphs = {name: done for name, done in told.items() if "is a function" not in done.err}
    assert "newsroom" in graphs
    assert {(done.code, done.err) for done in graphs.values()} == {(0, "")}


@pytest.mark.parametrize(
    "file, beginning",
    [("x.svg", "<?xml"), ("x.dot", "digraph"), ("x.gv", "digraph"), ("x.mmd", "---"), ("x.txt", "review:")],
)
def test_the_ending_of_a_file_says_what_is_written(drawn, folder, file, beginning):
    done = drawn("graph", "graphs.py:review", "-o", file)
    assert (done.code, done.out) == (0, f"written to {file}\n")
    assert (folder / file).read_text(encoding="utf-8").startswith(beginning)


def test_a_format_may_be_named(drawn, folder):
    assert drawn("graph", "graphs.py:review", "--format", "mermaid").out.startswith("---\ntitle:")
    assert drawn("graph", "graphs.py:review", "--format", "dot", "-o", "-").out.startswith("digraph")
    drawn("graph", "graphs.py:review", "--format", "svg", "-o", "picture")
    ET.parse(folder / "picture")


# -- with a run --------------------------------------------------------------------------------------------------------


def test_a_run_that_has_not_begun_has_reached_nothing(drawn):
    drawn("start", "graphs.py:review", "--input", '{"urls": []}', "--id", "r")
    assert set(states(drawn("graph", "graphs.py:review", "--run", "r", "--json")).values()) == {("not reached", 0)}


def test_the_steps_of_a_run_show_what_happened(runs):
    before = runs("show", "r", "--json").json
    done = runs("graph", "graphs.py:review", "--run", "r")
    assert done.out.splitlines()[0] == "review, run r (waiting): graph, 8 steps"
    assert "✓ draft ×3" in done.out
    assert states(runs("graph", "graphs.py:review", "--run", "r", "--json")) == {
        "draft": ("completed", 3),
        "critic": ("completed", 3),
        "fetch_all": ("completed", 1),
        "approval": ("waiting", 1),
        "publish": ("not reached", 0),
        "tweet": ("not reached", 0),
        "mail": ("not reached", 0),
        "done": ("not reached", 0),
    }
    assert runs("show", "r", "--json").json == before, "looking changes nothing"


def test_failed_branch_is_shown_before_and_after_its_repair(runs, folder):
    runs("approve", "r")
    runs("worker", "graphs.py", "--until-idle", "-q")
    found = states(runs("graph", "graphs.py:review", "--run", "r", "--json"))
    assert [found[name] for name in ("approval", "publish", "tweet", "mail", "done")] == [
        *(("completed", 1), ("failed", 1), ("completed", 1), ("failed", 1), ("not reached", 0))
    ]
    (folder / "mended").touch()
    runs("retry", "r")
    found = states(runs("graph", "graphs.py:review", "--run", "r", "--json"))
    assert found["mail"] == ("waiting", 1), "what was superseded no longer counts"
    runs("worker", "graphs.py", "--until-idle", "-q")
    found = states(runs("graph", "graphs.py:review", "--run", "r", "--json"))
    assert {state for state, _ in found.values()} == {"completed"}
    assert found["mail"] == ("completed", 1)


def test_the_steps_of_a_dag_show_what_was_skipped(runs, folder):
    assert states(runs("graph", "graphs.py:build", "--run", "b", "--json")) == {
        "get": ("completed", 1),
        "docs": ("skipped", 0),
        "site": ("skipped", 0),
        "test": ("failed", 1),
        "release": ("not reached", 0),
    }
    (folder / "mended").touch()
    runs("retry", "b")
    assert states(runs("graph", "graphs.py:build", "--run", "b", "--json"))["test"] == ("waiting", 1)
    runs("worker", "graphs.py", "--until-idle", "-q")
    assert states(runs("graph", "graphs.py:build", "--run", "b", "--json"))["release"] == ("completed", 1)


def test_a_run_of_a_function_shows_its_steps_in_order(runs):
    done = runs("graph", "--run", "p")
    assert done.out == runs("graph", "graphs.py:plain", "--run", "p").out
    assert done.out.splitlines() == [
        "plain, run p (waiting): 4 steps",
        "",
        "✓ fetch ×3",
        "│",
        "✓ sleep  (delay)",
        "│",
        "✓ fetch (2)",
        "│",
        "… wait_for:go  (wait)",
        "",
        "✓ 3 completed   … 1 waiting",
    ]


def test_a_run_of_a_file_is_drawn_where_its_functions_are_not(drawn, folder):
    """A step of a file that leads to several is followed by a point of its own, which the file does not show."""
    write_file(folder)
    code = "def begin(state): return {}\ndef left(state): return {}\ndef end(state): return {}\n"
    (folder / "work.py").write_text(code, encoding="utf-8")
    drawn("start", "flow.json", "--module", "work.py", "--id", "f", "--input", "{}")
    drawn("worker", "flow.json", "--module", "work.py", "--until-idle", "-q")
    assert states(drawn("graph", "flow.json", "--run", "f", "--json")) == {
        "begin": ("completed", 1),
        "left": ("completed", 1),
        "right": ("waiting", 1),
        "meet": ("not reached", 0),
        "end": ("not reached", 0),
    }
    drawn("approve", "f")
    drawn("worker", "flow.json", "--module", "work.py", "--until-idle", "-q")
    done = drawn("graph", "flow.json", "--run", "f", "--json")
    assert set(states(done).values()) == {("completed", 1)}
    assert done.err == ""  # nothing is missing from the picture


def test_missing_functions_of_a_file_are_reported_with_a_module(drawn, folder):
    write_file(folder)
    (folder / "work.py").write_text("def begin(state): ...\ndef left(state): ...\n", encoding="utf-8")
    assert drawn("graph", "flow.json").code == 0
    done = drawn("graph", "flow.json", "--module", "work.py")
    assert (done.code, "begin" in done.out) == (errors.USAGE, True)
    assert "error: steps.end: there is no function 'end'" in done.err
    (folder / "work.py").write_text("def begin(state): ...\ndef left(state): ...\ndef end(state): ...\n", "utf-8")
    done = drawn("graph", "flow.json", "--module", "work.py")
    assert (done.code, done.err) == (0, "")


def test_steps_that_the_definition_no_longer_has_are_named(runs, folder):
    text = (folder / "graphs.py").read_text(encoding="utf-8")
    (folder / "graphs.py").write_text(
        text.replace('"draft"', '"write"').replace("def draft", "def write").replace("draft,", "write,"), "utf-8"
    )
    done = runs("graph", "graphs.py:review", "--run", "r")
    assert done.code == 0
    assert done.err == "not drawn, because the definition no longer has these steps of the run: draft\n"


# -- what cannot be drawn ----------------------------------------------------------------------------------------------


def test_definition_with_errors_is_drawn_and_reported(drawn):
    done = drawn("graph", "graphs.py:broken")
    assert done.code == errors.USAGE
    assert "○ a  (exit)" in done.out
    assert "error: edge 'a' → 'bb': there is no step 'bb'; did you mean 'b'?" in done.err
    assert "warning: step 'b': no way leads to it from the entry 'a'" in done.err
    told = drawn("graph", "graphs.py:broken", "--json").json["problems"]
    assert [one["severity"] for one in told] == ["error", *["warning"] * (len(told) - 1)]


@pytest.mark.parametrize(
    "words, code, said",
    [
        ([], errors.USAGE, "nothing to draw"),
        (["graphs.py:plain"], errors.USAGE, "is a function: its steps are known only when they run"),
        (["graphs.py:nothing"], errors.USAGE, "has no workflow 'nothing'"),
        (["nowhere.py:x"], errors.USAGE, "no file nowhere.py"),
        (["nowhere.yaml"], errors.USAGE, "nowhere.yaml cannot be drawn"),
        (["graphs.py:review", "--run", "q"], errors.NOT_FOUND, "no run 'q'"),
        (["graphs.py:review", "--run", "b"], errors.USAGE, "belongs to 'build', not to 'review'"),
        (
            ["graphs.py:review", "--module", "graphs.py"],
            errors.USAGE,
            "--module is for workflows in YAML or JSON files",
        ),
        (["graphs.py:review", "-o", "x.png"], errors.USAGE, "the format of x.png is unknown"),
        (
            ["graphs.py:review", "-o", "x.svg", "--format", "dot"],
            errors.USAGE,
            "--format dot contradicts the extension of x.svg",
        ),
        (["graphs.py:review", "-o", "no/such/x.svg"], errors.USAGE, "no/such/x.svg cannot be written: No such file"),
        (["graphs.py:review", "--format", "png"], errors.USAGE, "'png' is not one of"),
        (["graphs.py:review", "--run", "r", "--store", "nowhere.db"], errors.STORE, "no store at nowhere.db"),
    ],
)
def test_mistake_is_reported_in_a_sentence(drawn, words, code, said):
    if "--run" in words:
        drawn("start", "graphs.py:build", "--id", "b")
    done = drawn("graph", *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
