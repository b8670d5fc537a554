"""The command `validate`, and running a workflow that is a file."""

import json
import signal

import pytest

from keepstep.workflows.definition import KNOWN
from keepstep.workflows.files.load import schema_text

GOOD = """
keepstep: 1
metadata: {name: review}
steps:
  draft: {function: write, with: {topic: topic}, into: text, next: ask}
  ask: {kind: approval, branches: [{when: state.ask, next: publish}, {next: shelve}]}
  publish: {}
  shelve: {function: publish}
"""
BAD = """
keepstep: 1
metadata: {name: bad}
steps:
  draft: {nxt: ask, timeout: -1}
  ask: {next: nowhere}
"""
FUNCTIONS = """
from pathlib import Path

async def write(topic):
    with Path("written").open("a") as file:
        print(topic, file=file)
    return f"about {topic}"

def publish(state):
    return {"published": bool(state["ask"])}
"""


NO_TIME = "it must be a time above 0: a number of seconds, or a text like 500ms, 30s, 5m, 2h or 7d"


@pytest.fixture
def files(folder):
    for name, text in (("good.yaml", GOOD), ("bad.yaml", BAD), ("texts.py", FUNCTIONS)):
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_good_file_is_valid(keepstep, files):
    result = keepstep("validate", "good.yaml")
    assert (result.code, result.out, result.err) == (0, "good.yaml: valid (graph)\n", "")


def test_every_problem_of_every_file_is_reported(keepstep, files):
    result = keepstep("validate", "bad.yaml", "good.yaml", "nosuch.yaml")
    assert result.code == 1
    assert result.out.splitlines() == [
        "bad.yaml:5:11: error: steps.draft.nxt: there is no 'nxt' here",
        "    did you mean 'next'?",
        f"bad.yaml:5:30: error: steps.draft.timeout: {NO_TIME}, not -1",
        "bad.yaml:6:15: error: steps.ask.next: there is no step 'nowhere'",
        "    there are: draft, ask",
        "good.yaml: valid (graph)",
        "nosuch.yaml: error: file: it cannot be read: No such file or directory",
        "3 files, 1 valid",
    ]  # fmt: skip


def test_problems_as_json_are_the_same(keepstep, files):
    (files / "again.yaml").write_text(BAD, encoding="utf-8")
    result = keepstep("validate", "--json", "bad.yaml", "again.yaml", "good.yaml")
    assert result.code == 1
    assert [(one["file"], one["valid"], one["form"]) for one in result.json["files"]] == [
        ("bad.yaml", False, "graph"),
        ("again.yaml", False, "graph"),
        ("good.yaml", True, "graph"),
    ]
    assert result.json["files"][0]["problems"] == result.json["files"][1]["problems"]
    assert result.json["files"][0]["problems"][0] == {
        "severity": "error", "line": 5, "column": 11, "where": "steps.draft.nxt",
        "what": "there is no 'nxt' here", "how": "did you mean 'next'?",
    }  # fmt: skip
    assert result.json["valid"] is False
    assert result.json["cache"]["hits"] >= 1


def test_functions_are_looked_for_only_if_a_module_is_named(keepstep, files):
    assert keepstep("validate", "good.yaml", "--module", "texts.py").code == 0
    (files / "texts.py").write_text("def writ(topic): ...\ndef publish(state): ...\n", encoding="utf-8")
    result = keepstep("validate", "good.yaml", "--module", "texts.py")
    assert result.code == 1
    assert (
        "good.yaml:5:21: error: steps.draft.function: there is no function 'write'\n    did you mean 'writ'?"
        in result.out
    )


def test_missing_functions_are_reported_beside_other_errors(keepstep, files):
    text = "  ask: {function: aks, timeout: -1}\n  odd: {kind: odd}\n  list: {function: [write]}\n  none: 1\n"
    (files / "both.yaml").write_text(f"keepstep: 1\nmetadata: {{}}\nsteps:\n{text}", encoding="utf-8")
    (files / "asking.py").write_text("def ask(state): ...\n", encoding="utf-8")
    result = keepstep("validate", "both.yaml", "--module", "asking.py")
    assert result.code == 1
    assert "both.yaml:4:19: error: steps.ask.function: there is no function 'aks'\n    did you mean" in result.out
    assert "there is no function 'odd'" not in result.out
    for path in ("steps.ask.timeout", "steps.odd.kind", "steps.list.function", "steps.none"):
        assert f"error: {path}: " in result.out
    (files / "unreadable.yaml").write_text("a: [", encoding="utf-8")
    assert keepstep("validate", "unreadable.yaml", "--module", "asking.py").code == 1


def test_with_its_functions_a_file_is_valid_only_if_it_can_be_run(keepstep, files):
    steps = "  one: {function: first}\n  two: {function: second}\n"
    (files / "dag.yaml").write_text(f"keepstep: 1\nmetadata: {{name: d}}\nsteps:\n{steps}", encoding="utf-8")
    (files / "fn.py").write_text("def first(): ...\ndef second(one): ...\n", encoding="utf-8")
    assert keepstep("validate", "dag.yaml").code == 0
    for command in ("validate", "run"):
        result = keepstep(command, "dag.yaml", "--module", "fn.py")
        assert result.code != 0
        assert "its parameter 'one' is the name of a step that it does not need" in result.out + result.err
    assert "d" not in KNOWN


def test_warnings_fail_only_when_asked(keepstep, files):
    (files / "warned.yaml").write_text(GOOD + "  lost: {next: ask}\n", encoding="utf-8")
    assert keepstep("validate", "warned.yaml").code == 0
    assert keepstep("validate", "warned.yaml", "--strict").code == 1


def test_the_schema_is_printed(keepstep, folder):
    result = keepstep("validate", "--schema")
    assert (result.code, result.out) == (0, schema_text())
    assert json.loads(result.out)["title"] == "a Keepstep workflow"


def test_no_file_is_a_mistake(keepstep, folder):
    assert keepstep("validate").code == 2


def test_text_of_a_file_cannot_steer_the_terminal(keepstep, folder):
    (folder / "evil.yaml").write_text('steps: {"a\\e[31m": 1}', encoding="utf-8")
    result = keepstep("validate", "evil.yaml")
    assert result.code == 1
    assert "\x1b" not in result.out


def test_a_file_is_run(keepstep, files):
    assert keepstep("start", "good.yaml", "--module", "texts.py", "topic=trees", "--id", "r").code == 0
    assert keepstep("approve", "r", "ask").code == 0
    result = keepstep("run", "good.yaml", "--module", "texts.py", "--id", "r")
    assert result.json == {"topic": "trees", "text": "about trees", "ask": True, "published": True}


def test_a_child_in_another_file_is_driven_by_the_same_worker(keepstep, files):
    (files / "outer.yaml").write_text(
        "keepstep: 1\nmetadata: {name: outer}\nsteps:\n"
        "  inner: {kind: subworkflow, takes: [topic], into: inner, next: echo}\n"
        "  echo: {kind: subworkflow, takes: [topic], into: echo}\n",
        encoding="utf-8",
    )
    (files / "inner.yaml").write_text(
        "keepstep: 1\nmetadata: {name: inner}\nsteps: {write: {with: {topic: topic}, into: text, exit: true}}\n",
        encoding="utf-8",
    )
    (files / "echoes.py").write_text(
        "import keepstep as ks\n@ks.workflow\nasync def echo(topic): return topic * 2\n", encoding="utf-8"
    )
    modules = ["--module", "texts.py", "--module", "echoes.py", "--module", "inner.yaml"]
    assert keepstep("validate", "outer.yaml", *modules).code == 0
    assert keepstep("validate", "outer.yaml", *modules[:4]).code == 1
    assert keepstep("start", "outer.yaml", *modules, "topic=ab", "--id", "r").code == 0
    assert keepstep("worker", "outer.yaml", *modules, "--until-idle").code == 0
    result = keepstep("run", "outer.yaml", *modules, "--id", "r")
    assert result.json == {"topic": "ab", "inner": {"topic": "ab", "text": "about ab"}, "echo": "abab"}


def test_missing_functions_are_reported_with_what_to_do(keepstep, files):
    result = keepstep("run", "good.yaml", "topic=x")
    assert result.code == 2
    assert "good.yaml cannot be loaded; 3 errors" in result.err
    assert "add its functions with --module FILE.py" in result.err
    result = keepstep("run", "bad.yaml")
    assert result.code == 2
    assert "bad.yaml:6:15: error: steps.ask.next: there is no step 'nowhere'" in result.err
    result = keepstep("run", "program.py:total", "--module", "texts.py", "1")
    assert (result.code, "--module is for workflows in YAML or JSON files" in result.err) == (2, True)


def test_run_of_a_file_survives_a_kill_while_it_waits(keepstep, spawn, files):
    """The approval comes after the kill; what was written before is not written again."""
    run = spawn("run", "good.yaml", "--module", "texts.py", "topic=trees", "--id", "r")
    for line in run.stderr:
        if "waits for signal ask" in line:
            break
    run.send_signal(signal.SIGKILL)
    run.wait(60)
    assert keepstep("approve", "r", "ask", "--deny").code == 0
    result = spawn("worker", "good.yaml", "--module", "texts.py", "--until-idle")
    assert result.wait(60) == 0, result.stderr.read()
    shown = keepstep("show", "r", "--json").json
    assert shown["status"] == "completed"
    assert (files / "written").read_text(encoding="utf-8") == "trees\n"


def test_a_mistyped_service_and_a_missing_undo_are_reported(keepstep, folder):
    (folder / "fns.py").write_text("def reserve(state): return {}\n", encoding="utf-8")
    text = (
        "keepstep: 1\nmetadata: {name: typo}\nspec:\n  entrypoint: reserve\n  services: {bank: {concurrency: 2}}\n"
        "steps:\n  reserve: {service: bnak, undo: release}\n"
    )
    (folder / "typo.yaml").write_text(text, encoding="utf-8")
    done = keepstep("validate", "typo.yaml")
    assert (done.code, "no service 'bnak'" in done.out, "did you mean 'bank'?" in done.out) == (0, True, True)
    assert keepstep("validate", "typo.yaml", "--strict").code == 1
    assert "there is no function 'release'" in keepstep("validate", "typo.yaml", "--module", "fns.py").out
    refused = keepstep("worker", "typo.yaml").err
    assert "there is no function 'reserve'" in refused
    assert "there is no function 'release'" in refused
