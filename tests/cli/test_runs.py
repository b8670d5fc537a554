"""`run` and `start`: how a workflow is named, how its input is written, and how a run ends."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.cli import errors
from keepstep.cli import run as run_command
from keepstep.model import ErrorInfo
from keepstep.stores.sqlite.writer import Turnstile


def wait_for(condition, what="the moment"):
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"{what} never came")


# -- results -----------------------------------------------------------------------------------------------------------


def test_a_run_shows_its_steps_and_prints_its_result(keepstep):
    done = keepstep("run", "program.py:total", "2", "--id", "t1")
    assert done.code == 0
    assert json.loads(done.out) == 12
    assert "t1" in done.err
    assert "add" in done.err


def test_a_run_as_json_is_one_object(keepstep):
    done = keepstep("run", "program.py:greet", "ann", "--json", "--id", "g")
    assert done.json == {"run": "g", "status": "completed", "result": ["hello ann", 3]}


@pytest.mark.parametrize(
    "words, result",
    [
        (["2", "3"], 5),
        (["a=2", "b=3"], 5),
        (["2", "b=3"], 5),
        (["--input", '{"a": 2, "b": 3}'], 5),
        (["--input", "2"], 12),
    ],
)
def test_input_is_written_as_words_or_as_json(keepstep, words, result):
    assert keepstep("run", "program.py:total", *words, "--json").json["result"] == result


def test_input_comes_from_a_file(keepstep, folder):
    (folder / "input.json").write_text('{"a": 1}', encoding="utf-8")
    assert keepstep("run", "program.py:total", "--input", "@input.json", "--json").json["result"] == 11


def test_text_stays_text_where_text_is_wanted(keepstep):
    assert keepstep("run", "program.py:greet", "007", "--json").json["result"] == ["hello 007", 3]


def test_an_object_becomes_what_the_signature_says(keepstep):
    words = ["--input", '{"parcel": {"weight": 2, "to": "Oslo"}}', "--json"]
    assert keepstep("run", "program.py:post", *words).json["result"] == "Parcel of 2 kg to Oslo"


def test_a_module_is_named_without_its_ending(keepstep):
    assert keepstep("run", "program:total", "1", "--json").json["result"] == 11


def test_a_known_id_gives_the_one_result_and_runs_nothing_again(keepstep):
    keepstep("run", "program.py:total", "1", "--id", "t")
    again = keepstep("run", "program.py:total", "1", "--id", "t")
    assert (again.code, json.loads(again.out)) == (0, 11)
    assert "add" not in again.err
    without_input = keepstep("run", "program.py:total", "--id", "t")
    assert json.loads(without_input.out) == 11


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_failed_run_ends_with_1_and_says_what_to_do(keepstep, folder):
    done = keepstep("run", "program.py:call", "--id", "c")
    assert done.code == 1
    assert done.out == ""
    assert "attempt 1" in done.err
    assert "attempt 2" in done.err
    assert "ConnectionError" in done.err
    assert "keepstep retry c" in done.err
    assert r"\x1b[31mdown" in done.err  # what a run says cannot steer the terminal: it is spelt out
    (folder / "mended").touch()
    assert keepstep("retry", "c").code == 0
    assert json.loads(keepstep("run", "program.py:call", "--id", "c").out) == "up"


def test_a_failed_run_as_json_holds_its_error(keepstep):
    done = keepstep("run", "program.py:call", "--id", "c", "--json")
    assert done.code == 1
    assert (done.json["run"], done.json["status"]) == ("c", "failed")
    assert "ConnectionError" in done.json["error"]["message"]


@pytest.mark.parametrize("with_json", [False, True])
def test_another_input_for_a_known_id_ends_with_7(keepstep, with_json):
    keepstep("run", "program.py:total", "1", "--id", "t")
    done = keepstep("run", "program.py:total", "2", "--id", "t", *(["--json"] if with_json else []))
    assert done.code == 7
    assert "another input" in done.err


def test_the_id_of_another_workflow_ends_with_7(keepstep):
    keepstep("run", "program.py:total", "1", "--id", "t")
    assert keepstep("run", "program.py:call", "--id", "t").code == 7


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_without_a_command_the_help_is_shown_once(keepstep):
    done = keepstep()
    said = done.out + done.err
    assert said.count("Usage: keepstep") == 1
    assert "Start with `keepstep demo`" in said
    assert not said.startswith("keepstep:")


@pytest.mark.parametrize(
    "words, said",
    [
        (["progam.py:total", "1"], "did you mean program.py"),
        (["program.py:totl", "1"], "did you mean total"),
        (["program.py:not_a_workflow"], "not a workflow"),
        (["program.py:add", "1"], "is a step"),
        (["program.py:add", "1"], "its workflows: "),
        (["program.py"], "several workflows"),
        (["nowhere:total"], "no module 'nowhere'"),
        ([":total"], "names no workflow"),
        (["program.py:total"], "missing a required argument: 'a'"),
        (["program.py:total", "1", "2", "3"], "too many positional arguments"),
        (["program.py:total", "1", "2", "colour=red"], "it has no parameter 'colour'; it takes ("),
        (["program.py:total", "--input", '{"a": 1'], "--input is not JSON"),
        (["program.py:total", "--input", "{a: 1}"], "--input is not JSON"),
        (["program.py:total", "--input", "NaN"], "not a JSON value"),
        (["program.py:total", "--input", '{"c": 1}'], "a"),
        (["program.py:total", "1", "--input", "1"], "given twice"),
        (["program.py:total", "one"], "argument 'a'"),
        (["program.py:total", "1", "colour=red"], "it has no parameter 'colour'; it takes ("),
        (["program.py:post", "--input", '{"parcel": {"weight": "x", "to": "y"}}'], "weight"),
        (["program.py:total", "--input", "@nothing.json"], "cannot be read"),
        (["program.py:total", "1", "--id", "../x"], "refused"),
        (["program.py:total", "1", "--tag", "x"], "name=value"),
        (["program.py:total", "1", "--deadline", "0"], "deadline"),
    ],
)
@pytest.mark.parametrize("command", ["run", "start"])
def test_a_mistake_is_answered_with_a_sentence_and_2(keepstep, command, words, said):
    done = keepstep(command, *words)
    assert done.code == 2
    assert said in done.err
    assert done.out == ""


@pytest.mark.parametrize("with_debug", [False, True])
def test_error_in_the_user_file_is_shown_without_own_frames(keepstep, folder, with_debug):
    (folder / "broken.py").write_text("import keepstep as ks\n\n\ndef f():\n    1 / 0\n\n\nf()\n", encoding="utf-8")
    done = keepstep("run", "broken.py:x", *(["--debug"] if with_debug else []))
    assert done.code == 2
    assert "broken.py" in done.err
    assert "ZeroDivisionError" in done.err
    assert "1 / 0" in done.err
    assert "importlib" not in done.err


def test_a_module_that_the_users_file_misses_is_named(keepstep, folder):
    (folder / "needy.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    done = keepstep("run", "needy.py:x")
    assert done.code == 2
    assert "not_installed_anywhere" in done.err


def test_file_that_exits_when_imported_is_reported(keepstep, folder):
    (folder / "script.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    done = keepstep("run", "script.py:x")
    assert done.code == 2
    assert "script.py" in done.err


def test_a_file_that_is_named_like_a_loaded_module_is_refused(keepstep, folder):
    (folder / "json.py").write_text("", encoding="utf-8")
    done = keepstep("run", "json.py:x")
    assert done.code == 2
    assert "another name" in done.err


def test_a_mistake_as_json_is_an_object_on_standard_error(keepstep):
    done = keepstep("run", "program.py:totl", "--json")
    told = json.loads(done.err)
    assert (told["exit"], done.code) == (2, 2)
    assert "totl" in told["message"]


# -- start -------------------------------------------------------------------------------------------------------------


def test_start_leaves_a_durable_run_for_a_worker(keepstep):
    done = keepstep("start", "program.py:total", "1", "--id", "s", "--tag", "team=blue")
    assert (done.code, done.out) == (0, "s\n")
    assert "keepstep worker program.py" in done.err
    shown = keepstep("show", "s", "--json").json
    assert (shown["status"], shown["tags"]) == ("queued", {"team": "blue"})
    assert shown["input"] == {"args": [1], "kwargs": {}}
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert keepstep("show", "s", "--json").json["result"] == 11


def test_start_as_json_is_one_object(keepstep):
    assert keepstep("start", "program.py:total", "1", "--id", "s", "--json").json == {
        "run": "s",
        "workflow": "total",
        "status": "queued",
    }


# -- being stopped -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_hands_the_run_back_and_says_how_to_go_on(keepstep, spawn, number):
    process = spawn("run", "program.py:approval", "--id", "a")
    wait_for(lambda: Path(".keepstep/runs.db").exists() and "a" in keepstep("list").out)
    wait_for(lambda: keepstep("show", "a", "--json").json["status"] == "waiting")
    process.send_signal(number)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "keepstep run program.py:approval --id a" in err
    assert out == ""
    assert keepstep("doctor", "--json").json["workers"] == []
    assert keepstep("approve", "a").code == 0
    assert json.loads(keepstep("run", "program.py:approval", "--id", "a").out) == "yes"


@pytest.mark.crash
def test_a_killed_run_goes_on_with_the_same_command(keepstep, spawn, folder):
    process = spawn("run", "program.py:stuck", "--id", "k")
    wait_for((folder / "hanging").exists)
    process.kill()
    process.wait()
    (folder / "hanging").unlink()
    second = spawn("run", "program.py:stuck", "--id", "k")
    wait_for((folder / "hanging").exists)
    assert keepstep("show", "k", "--json").json["recoveries"] == 1
    second.kill()
    second.wait()
    history = keepstep("history", "k", "--json").json["checkpoints"]
    assert [one["step"] for one in history if one["kind"] == "step completed"] == ["add#1"]


@pytest.mark.crash
def test_a_second_ctrl_c_ends_at_once_and_loses_nothing(keepstep, spawn, folder):
    process = spawn("run", "program.py:stuck", "--id", "k")
    wait_for((folder / "hanging").exists)
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "stopping" in process.stderr.readline())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "stopped at once" in err
    assert keepstep("doctor").code == 0
    history = keepstep("history", "k", "--json").json["checkpoints"]
    assert [one["step"] for one in history if one["kind"] == "step completed"] == ["add#1"]


def test_a_store_that_does_not_answer_does_not_keep_a_run_alive(keepstep, folder, monkeypatch):
    held, ended = [], []

    async def asked_once_it_hangs(stop, *others, seconds=None):
        await asyncio.to_thread(wait_for, (folder / "hanging").exists)
        held.append(Turnstile(f"{folder}/.keepstep/runs.db-turnstile"))
        assert held[0].enter(10)  # from now on nobody else can write
        stop.asked.set()

    def end(code):
        ended.append(code)
        held[0].close()

    monkeypatch.setattr(run_command.Stop, "or_", asked_once_it_hangs)
    monkeypatch.setattr(run_command, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(run_command, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(run_command.os, "_exit", end)
    keepstep("run", "program.py:stuck", "--id", "k")
    assert ended == [130]


# -- what a workflow prints --------------------------------------------------------------------------------------------


def test_output_of_a_workflow_is_no_part_of_its_result(keepstep, folder):
    (folder / "loud.py").write_text(
        "import keepstep as ks\n\nprint('loaded')\n\n\n"
        "@ks.workflow\nasync def loud():\n    print('hello')\n    return 1\n",
        encoding="utf-8",
    )
    done = keepstep("run", "loud.py:loud")
    assert json.loads(done.out) == 1
    assert "hello" in done.err


# -- programs with a workflow of the same name -------------------------------------------------------------------------

NAMESAKE = """
import keepstep as ks


@ks.workflow
async def main() -> str:
    await ks.wait_for("go")
    return __name__
"""


@pytest.fixture
def namesakes(keepstep, folder):
    """Two programs whose workflows have one name, and a run of the first."""
    for name in ("one.py", "other.py"):
        (folder / name).write_text(NAMESAKE, encoding="utf-8")
    assert keepstep("start", "one.py:main", "--id", "r").code == 0


@pytest.mark.usefixtures("namesakes")
def test_run_refuses_a_run_that_another_program_has_started(keepstep):
    done = keepstep("run", "other.py:main", "--id", "r")
    assert done.code == 7
    assert "module 'one'" in done.err
    assert "@ks.workflow(name=...)" in done.err


@pytest.mark.usefixtures("namesakes")
def test_check_says_that_a_run_belongs_to_another_program(keepstep):
    found = keepstep("check", "other.py", "--json").json
    assert [run["verdict"] for run in found["runs"]] == ["unknown"]
    assert "module 'one'" in found["runs"][0]["why"]
    assert keepstep("check", "other.py", "--strict").code == 1
    assert keepstep("check", "one.py", "--strict").code == 0


@pytest.mark.usefixtures("namesakes")
def test_run_that_was_given_back_is_reported(keepstep, spawn):
    keepstep("signal", "r", "go")
    spawn("worker", "other.py")
    wait_for(lambda: "handed back" in keepstep("list").out)
    assert "a worker (handed back, due again in" in keepstep("show", "r").out
    done = keepstep("doctor")
    assert done.code == 0
    assert "run r (main) was handed back by the worker that claimed it" in done.out
    assert "module 'one'" in done.out


def test_run_of_a_run_that_waits_already_says_for_what(keepstep, spawn):
    keepstep("start", "program.py:approval", "--id", "a")
    keepstep("worker", "program.py", "--until-idle")
    process = spawn("run", "program.py:approval", "--id", "a")
    told = [process.stderr.readline() for _ in range(3)]
    assert "waits for signal approved" in told[1]
    assert "keepstep approve a approved" in told[2]


@pytest.mark.parametrize("kind, mended", [("ReplayMismatch", True), ("DefinitionChanged", True), ("ValueError", False)])
def test_a_run_that_does_not_fit_the_code_says_to_mend_that_first(kind, mended):
    told = errors._how_to_go_on(ks.RunSetAside("run 'r' is set aside", "r", ErrorInfo(kind, "why")))
    assert ("keepstep check FILE.py checks whether the code fits the run; fix the code first" in told) is mended
    assert "keepstep retry r lets it go on" in told
