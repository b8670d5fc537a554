"""The commands that steer a run, with the worker as a process of its own."""

from __future__ import annotations

import pytest

from keepstep.engine.handle import this_process
from tests.cli.test_runs import wait_for


@pytest.fixture
def status(keepstep):
    return lambda run: keepstep("show", run, "--json").json["status"]


@pytest.fixture
def worker(spawn):
    return spawn("worker", "program.py", "--stop-seconds", "1")


def waiting(keepstep, status, workflow, run):
    keepstep("start", f"program.py:{workflow}", "--id", run)
    wait_for(lambda: status(run) == "waiting")


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("words, answer", [([], "yes"), (["approved"], "yes"), (["--deny"], "no")])
def test_approve_answers_the_signal_that_the_run_waits_for(keepstep, status, words, answer):
    waiting(keepstep, status, "approval", "a")
    assert "keepstep approve a approved" in keepstep("show", "a").out
    assert keepstep("approve", "a", *words).code == 0
    assert keepstep("watch", "a").code == 0
    assert keepstep("show", "a", "--json").json["result"] == answer
    again = keepstep("approve", "a")
    assert again.code == 7
    assert "already completed" in again.err


@pytest.mark.usefixtures("worker")
def test_approve_asks_which_signal_is_meant(keepstep, status):
    waiting(keepstep, status, "two", "t")
    done = keepstep("approve", "t")
    assert done.code == 2
    assert "left" in done.err
    assert "right" in done.err
    assert keepstep("signal", "t", "left", '{"x": 1}').code == 0
    assert keepstep("signal", "t", "right", "5", "--id", "once").code == 0
    assert keepstep("watch", "t").code == 0
    assert keepstep("show", "t", "--json").json["result"] == [{"x": 1}, 5]
    assert keepstep("signal", "t", "left").code == 7


def test_approve_of_a_run_that_does_not_wait_says_so(keepstep):
    keepstep("start", "program.py:approval", "--id", "a")
    done = keepstep("approve", "a")
    assert done.code == 7
    assert "waits for no signal" in done.err
    assert keepstep("approve", "a", "approved").code == 0  # early, by its name
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert keepstep("show", "a", "--json").json["result"] == "yes"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("command", ["signal", "approve"])
def test_a_signal_that_the_run_does_not_wait_for_promises_nothing(keepstep, status, command):
    waiting(keepstep, status, "approval", "a")
    done = keepstep(command, "a", "aproved")
    assert done.code == 0
    assert "it is kept until the run asks for it. Now it waits for signal approved" in done.out
    assert "goes on" not in done.out
    assert keepstep(command, "a", "again", "--json").json["awaited"] is False
    assert keepstep(command, "a", "approved", "--json").json["awaited"] is True


@pytest.mark.usefixtures("worker")
def test_a_signal_to_a_run_that_stands_says_what_lets_it_go_on(keepstep, status):
    waiting(keepstep, status, "approval", "a")
    keepstep("pause", "a")
    wait_for(lambda: status("a") == "paused")
    assert "The run is paused: keepstep resume a lets it go on" in keepstep("signal", "a", "approved").out


@pytest.mark.parametrize("words", [["signal", "a", "go", "{x"], ["signal", "a", "ks:cancel"], ["signal", "a", "1x"]])
def test_a_bad_signal_is_refused(keepstep, words):
    keepstep("start", "program.py:approval", "--id", "a")
    assert keepstep(*words).code == 2


@pytest.mark.usefixtures("worker")
def test_ask_prints_the_reply(keepstep, status):
    waiting(keepstep, status, "oracle", "o")
    done = keepstep("ask", "o", "question", "[1, 2]", "--json")
    assert (done.code, done.json["reply"]) == (0, {"answer": [1, 2]})


def test_ask_without_a_reply_ends_with_8(keepstep):
    keepstep("start", "program.py:oracle", "--id", "o")
    done = keepstep("ask", "o", "question", "--timeout", "0.1")
    assert done.code == 8
    assert "did not reply" in done.err


@pytest.mark.parametrize(
    "text, quoted",
    [("hello", "'\"hello\"'"), ("it's me", """'"it'"'"'s me"'"""), ("{x", ""), ("12.3.4", "")],
)
def test_text_that_is_no_json_is_shown_as_it_has_to_be_written(keepstep, text, quoted):
    keepstep("start", "program.py:oracle", "--id", "o")
    done = keepstep("ask", "o", "question", text)
    assert done.code == 2
    assert "the question is not JSON" in done.err
    assert ("quotes of its own" in done.err) == bool(quoted)
    assert quoted in done.err


@pytest.mark.usefixtures("worker")
def test_pause_and_resume(keepstep, status):
    waiting(keepstep, status, "approval", "a")
    assert keepstep("pause", "a", "--reason", "lunch").code == 0
    wait_for(lambda: status("a") == "paused")
    assert "keepstep resume a" in keepstep("show", "a").out
    assert keepstep("resume", "a").code == 0
    wait_for(lambda: status("a") == "waiting")
    assert any(one["reason"] == "lunch" for one in keepstep("audit", "a", "--json").json["entries"])


@pytest.mark.usefixtures("worker")
def test_cancel_reaches_a_step_that_hangs(keepstep, folder):
    keepstep("start", "program.py:stuck", "--id", "s")
    wait_for((folder / "hanging").exists)
    assert keepstep("cancel", "s", "--force").code == 7  # its worker lives: it is asked, not robbed
    assert keepstep("cancel", "s").code == 0
    assert keepstep("watch", "s").code == 4
    assert f"by {this_process()} at " in keepstep("show", "s").out
    assert ", without a reason\n" in keepstep("show", "s").out
    assert keepstep("cancel", "s").code == 7
    assert keepstep("run", "program.py:stuck", "--id", "s").code == 4


def test_cancel_ends_a_run_that_has_not_begun(keepstep, status):
    keepstep("start", "program.py:approval", "--id", "a", "--delay", "1000")
    done = keepstep("cancel", "a", "--reason", "not needed")
    assert (done.code, done.out, done.err) == (0, "a is cancelled\n", "")
    assert status("a") == "cancelled"
    assert ": not needed\n" in keepstep("show", "a").out


def test_cancel_says_when_nobody_is_there_to_do_it_and_force_does(keepstep, status):
    keepstep("start", "program.py:approval", "--id", "a")
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    asked = keepstep("cancel", "a")
    assert asked.code == 0
    assert "end it without its clean-up: keepstep cancel a --force" in asked.err
    assert status("a") == "waiting"
    assert keepstep("cancel", "a", "--force", "--reason", "nobody left").code == 0
    assert status("a") == "cancelled"
    assert "nobody left" in keepstep("audit", "a").out
    assert ": nobody left\n" in keepstep("show", "a").out
    told = keepstep("show", "a", "--json").json["cancelled"]
    assert (told["by"], told["reason"]) == (this_process(), "nobody left")
    assert keepstep("doctor", "--json").json["workers"] == []


def test_what_a_hint_shows_can_be_pasted(keepstep):
    keepstep("run", "program.py:call", "--id", "it's $HOME; ls")
    quoted = """'it'"'"'s $HOME; ls'"""
    assert f"keepstep retry {quoted}\n" in keepstep("show", "it's $HOME; ls").out
    assert f"(keepstep history {quoted})" in keepstep("show", "it's $HOME; ls").out
    assert f"keepstep retry {quoted} lets it go on" in keepstep("run", "program.py:call", "--id", "it's $HOME; ls").err
    keepstep("start", "program.py:approval", "--id", "a b")
    assert "keepstep approve 'a b' NAME" in keepstep("approve", "a b").err
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert "keepstep cancel 'a b' --force" in keepstep("cancel", "a b").err
    assert "keepstep resume 'a b'" in keepstep("pause", "a b").out


def test_retry_of_a_run_that_has_not_failed_ends_with_7(keepstep):
    keepstep("run", "program.py:total", "1", "--id", "t")
    assert keepstep("retry", "t").code == 7


@pytest.mark.crash
def test_resolve_settles_a_step_in_doubt(keepstep, spawn, status, folder):
    first = spawn("worker", "program.py")
    keepstep("start", "program.py:purchase", "--id", "p")
    wait_for((folder / "paying").exists)
    early = keepstep("resolve", "p", "pay", "--again")
    assert early.code == 7
    assert "in doubt" in early.err
    first.kill()
    first.wait()
    spawn("worker", "program.py")
    wait_for(lambda: status("p") == "waiting")
    assert "keepstep resolve p pay --result" in keepstep("show", "p").out
    assert keepstep("doctor").code == 0
    assert "pay#1" in keepstep("doctor").out
    assert keepstep("resolve", "p", "pay").code == 2
    assert keepstep("resolve", "p", "pay", "--again", "--failed").code == 2
    assert keepstep("resolve", "p", "buy", "--again").code == 2
    assert keepstep("resolve", "p", "pay", "--result", "{").code == 2
    assert keepstep("resolve", "p", "pay", "--result", "42", "--reason", "the bank says so").code == 0
    assert keepstep("watch", "p").code == 0
    assert keepstep("show", "p", "--json").json["result"] == 42
    assert "the bank says so" in keepstep("audit", "p").out


@pytest.mark.crash
def test_a_run_that_is_set_aside_ends_with_5_and_can_be_dropped(keepstep, spawn, status, folder):
    process = spawn("run", "program.py:stuck", "--id", "s")
    wait_for((folder / "hanging").exists)
    process.kill()
    process.wait()
    program = (folder / "program.py").read_text(encoding="utf-8")
    (folder / "program.py").write_text(program.replace("await add(1, 1)", "await add(2, 2)"), encoding="utf-8")
    aside = keepstep("run", "program.py:stuck", "--id", "s")
    assert aside.code == 5
    assert "add#1" in aside.err
    assert keepstep("run", "program.py:stuck", "--id", "s", "--json").json["status"] == "set aside"
    assert keepstep("watch", "s").code == 5
    assert keepstep("pause", "s").code == 7
    assert keepstep("doctor").code == 0
    assert keepstep("doctor", "--strict").code == 1
    assert "set aside" in keepstep("doctor").out
    assert keepstep("cancel", "s").code == 0
    assert status("s") == "cancelled"
