"""Going back, forking, comparing and checking from the command line."""

from __future__ import annotations

import pytest

from tests.cli.test_runs import wait_for

CHANGED = """
import keepstep as ks


@ks.step
async def say(text: str) -> str:
    return text


@ks.workflow
async def total(a: int, b: int = 10) -> int:
    return len(await say("x"))


@ks.workflow
async def approval() -> str:
    await say("who is there")
    return "yes" if await ks.wait_for("approved") else "no"


@ks.workflow(version="2")
async def two() -> list:
    return []
"""

GRAPH = """
import keepstep as ks

graph = ks.Graph("review")


@graph.step
async def draft(state):
    return {"text": "draft"}


@graph.step
async def publish(state):
    return {"published": state["text"]}


graph.wait("gate", signal="go")
graph.edge("draft", "gate")
graph.edge("gate", "publish")
graph.entry("draft")
graph.exit("publish")
"""


@pytest.fixture
def done(keepstep):
    """A run of `total` that has completed."""
    assert keepstep("run", "program.py:total", "--id", "t", "1", "2").out.strip() == "3"


@pytest.mark.usefixtures("done")
def test_rewind_says_what_is_done_again_and_does_it(keepstep):
    dry = keepstep("rewind", "t", "--step", "add", "--dry-run")
    assert dry.code == 0
    assert "would go on after record 1" in dry.out
    assert "done again: add#1" in dry.out
    assert keepstep("show", "t", "--json").json["status"] == "completed"
    made = keepstep("rewind", "t", "--to", "1", "--reason", "wrong sum", "--json")
    assert made.json == {"run": "t", "to": 1, "again": ["add#1"], "children": [], "dry_run": False}
    assert keepstep("show", "t", "--json").json["status"] == "queued"
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert keepstep("show", "t", "--json").json["result"] == 3
    told = keepstep("history", "t", "--json").json["checkpoints"]
    assert [one["seq"] for one in told if not one["counts"]] == [2, 3]
    assert "(2)" in keepstep("history", "t").out
    audit = keepstep("audit", "t").out
    assert "rewind" in audit
    assert "wrong sum" in audit


@pytest.mark.usefixtures("done")
def test_impossible_rewind_is_refused_with_the_reason(keepstep):
    assert keepstep("rewind", "t").code == 2
    assert keepstep("rewind", "t", "--to", "1", "--step", "add").code == 2
    missing = keepstep("rewind", "t", "--step", "nobody")
    assert missing.code == 2
    assert "it has add#1" in missing.err
    assert keepstep("rewind", "t", "--to", "99").code == 2
    assert keepstep("rewind", "nobody", "--to", "1").code == 3
    keepstep("start", "program.py:approval", "--id", "a")
    keepstep("cancel", "a")
    keepstep("worker", "program.py", "--until-idle")
    final = keepstep("rewind", "a", "--to", "0")
    assert final.code == 7
    assert "fork it instead" in final.err


@pytest.mark.usefixtures("done")
def test_fork_takes_another_result_input_and_workflow(keepstep):
    made = keepstep("fork", "t", "--result", "add=40", "--id", "f", "--reason", "what if", "--json")
    assert made.json == {"run": "f", "origin": "t"}
    assert keepstep("fork", "t", "--input", '{"a": 5, "b": 6}', "--id", "g").code == 0
    assert keepstep("fork", "t", "--input", '{"a": 7}', "--workflow", "program.py:total", "--id", "h").code == 0
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    results = {name: keepstep("show", name, "--json").json["result"] for name in "fgh"}
    assert results == {"f": 40, "g": 11, "h": 17}
    assert keepstep("show", "f", "--json").json["origin"] == "t"
    assert "fork of" in keepstep("show", "f").out
    wrong = keepstep("fork", "t", "--input", '{"a": "x"}', "--workflow", "program.py:total")
    assert wrong.code == 2
    assert keepstep("fork", "t", "--result", "add").code == 2
    assert keepstep("fork", "t", "--state", "[1]").code == 2
    assert keepstep("fork", "t", "--at", "3", "--id", "t").code == 7
    assert keepstep("fork", "nobody").code == 3
    shown = keepstep("diff", "t", "--with", "f")
    assert shown.code == 0
    assert "~ add#1: 3 → 40" in shown.out


@pytest.mark.usefixtures("done")
def test_diff_shows_what_changed(keepstep):
    found = keepstep("diff", "t", "1", "--json").json
    assert (found["added"], found["left"]) == (["add#1"], ["t", 1])
    assert "+ add#1" in keepstep("diff", "t").out
    assert "nothing changed" in keepstep("diff", "t", "2", "2").out
    assert keepstep("diff", "t", "99").code == 2
    assert keepstep("diff", "t", "--with", "nobody").code == 3


@pytest.mark.usefixtures("done")
def test_replay_says_what_would_run(keepstep, folder):
    (folder / "changed.py").write_text(CHANGED, encoding="utf-8")
    fits = keepstep("replay", "t", "program.py:total")
    assert fits.code == 0
    assert "the run ends as before" in fits.out
    broken = keepstep("replay", "t", "changed.py:total")
    assert broken.code == 1
    assert "recorded as add#1, and the code asks for say#1" in broken.out
    assert keepstep("replay", "t", "changed.py:total", "--json").json["fits"] is False
    assert keepstep("replay", "t", "program.py:echo").code == 2


def test_check_replays_every_unfinished_run(keepstep, folder, spawn):
    (folder / "new").mkdir()
    (folder / "new" / "program.py").write_text(CHANGED, encoding="utf-8")
    assert "no store at" in keepstep("check", "program.py").err
    for name in ("approval", "two"):
        keepstep("start", f"program.py:{name}", "--id", name)
    worker = spawn("worker", "program.py", "--stop-seconds", "1")
    for name in ("approval", "two"):
        wait_for(lambda name=name: keepstep("show", name, "--json").json["status"] == "waiting")
    keepstep("signal", "two", "left")
    wait_for(lambda: len(keepstep("history", "two", "--json").json["checkpoints"]) > 1)
    wait_for(lambda: keepstep("show", "two", "--json").json["status"] == "waiting")
    worker.terminate()
    worker.wait()
    keepstep("start", "program.py:oracle", "--id", "o")
    before = {name: keepstep("show", name, "--json").json for name in ("approval", "two", "o")}
    good = keepstep("check", "program.py")
    assert good.code == 0
    assert "every run fits" in good.out
    bad = keepstep("check", "new/program.py", "--json")
    assert bad.code == 1
    assert {one["run"]: one["verdict"] for one in bad.json["runs"]} == {
        "approval": "fits",  # it has recorded nothing yet, so what was inserted lies ahead of it
        "two": "changed",
        "o": "unknown",
    }
    told = keepstep("check", "new/program.py")
    assert "changed: two (two)" in told.out
    assert "began under version '1', and this worker has '2'" in told.out
    assert "1 of 3 unfinished runs would be set aside" in told.out
    assert keepstep("check", "new/program.py:approval").code == 0
    assert keepstep("check", "new/program.py:total", "--strict").code == 0
    assert "there are no unfinished runs" in keepstep("check", "new/program.py:total").out
    assert before == {name: keepstep("show", name, "--json").json for name in ("approval", "two", "o")}
    assert keepstep("check", "nowhere.py").code == 2


def test_same_change_of_a_definition_is_reported_once(keepstep, folder):
    (folder / "review.py").write_text(GRAPH, encoding="utf-8")
    for name in ("a", "b"):
        keepstep("start", "review.py", "--id", name)
    assert keepstep("worker", "review.py", "--until-idle").code == 0
    changed = GRAPH.replace('graph.wait("gate", signal="go")', 'graph.wait("gate", signal="yes", timeout=60)')
    (folder / "review.py").write_text(changed, encoding="utf-8")
    told = keepstep("check", "review.py")
    assert told.code == 1
    lines = told.out.splitlines()
    assert lines.pop(4).startswith("  deploy the old version beside the new one, or")
    assert lines[:5] == [
        "changed: b (review)",
        "  workflow 'review' has changed since the run began under version '1':",
        "  - wait gate for go",
        "  + wait gate for yes timeout 60",
        "changed: a (review), in the same way as b",
    ]


def test_a_graph_is_forked_with_another_state(keepstep, folder):
    (folder / "review.py").write_text(GRAPH, encoding="utf-8")
    keepstep("start", "review.py", "--id", "r")
    keepstep("signal", "r", "go")
    assert keepstep("worker", "review.py", "--until-idle").code == 0
    made = keepstep("fork", "r", "--step", "gate", "--state", '{"text": "mine"}', "--next", "publish", "--id", "f")
    assert made.code == 0
    assert keepstep("worker", "review.py", "--until-idle").code == 0
    assert keepstep("show", "f", "--json").json["result"] == {"text": "mine", "published": "mine"}
    assert '~ state text: "draft" → "mine"' in keepstep("diff", "r", "--with", "f").out
