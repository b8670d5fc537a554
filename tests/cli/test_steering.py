"""The commands that steer a run, with the worker as a process of its own."""

from __future__ import annotations

import pytest

from keepstep.engine.handle import this_process
from keepstep.stores.sqlite.store import SQLiteStore
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


def test_approve_of_a_run_that_does_not_wait_is_refused(keepstep):
    keepstep("start", "program.py:approval", "--id", "a")
    done = keepstep("approve", "a")
    assert done.code == 7
    assert "does not wait for a signal" in done.err
    assert keepstep("approve", "a", "approved").code == 0  # early, by its name
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert keepstep("show", "a", "--json").json["result"] == "yes"


@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("command", ["signal", "approve"])
def test_a_signal_that_the_run_does_not_wait_for_promises_nothing(keepstep, status, command):
    waiting(keepstep, status, "approval", "a")
    done = keepstep(command, "a", "aproved")
    assert done.code == 0
    assert "it is kept until the run waits for it. Now it waits for signal approved" in done.out
    assert "goes on" not in done.out
    assert keepstep(command, "a", "again", "--json").json["awaited"] is False
    assert keepstep(command, "a", "approved", "--json").json["awaited"] is True


@pytest.mark.usefixtures("worker")
def test_signal_to_a_paused_run_names_the_command_to_resume(keepstep, status):
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
    assert ("quote text twice" in done.err) == bool(quoted)
    assert quoted in done.err


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_a_command_reads_the_run_once_before_it_writes(keepstep, monkeypatch, command):
    keepstep("start", "program.py:approval", "--id", "a")
    calls = []

    def counted(name):
        whole = getattr(SQLiteStore, name)

        def call(self, *args, **kwargs):
            calls.append(name)
            return whole(self, *args, **kwargs)

        monkeypatch.setattr(SQLiteStore, name, call)

    for name in ("get_run", "commit", "news"):
        counted(name)
    assert keepstep(command, "a").code == 0
    before = calls[: calls.index("commit")]
    assert before == ["get_run"] * (1 if command == "pause" else 2)  # a resume looks what the run waits for
    assert "news" not in calls


@pytest.mark.usefixtures("worker")
def test_paused_run_goes_on_after_resume(keepstep, status):
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


def test_cancel_without_a_worker_names_force_which_cancels(keepstep, status):
    keepstep("start", "program.py:approval", "--id", "a")
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    asked = keepstep("cancel", "a")
    assert asked.code == 0
    assert "end the run without its clean-up: keepstep cancel a --force" in asked.err
    assert status("a") == "waiting"
    assert keepstep("cancel", "a", "--force", "--reason", "nobody left").code == 0
    assert status("a") == "cancelled"
    assert "nobody left" in keepstep("audit", "a").out
    assert ": nobody left\n" in keepstep("show", "a").out
    told = keepstep("show", "a", "--json").json["cancelled"]
    assert (told["by"], told["reason"]) == (this_process(), "nobody left")
    assert keepstep("doctor", "--json").json["workers"] == []


def test_commands_in_hints_can_be_pasted(keepstep):
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


# -- a series ----------------------------------------------------------------------------------------------------------

SERIES = """
from pathlib import Path

import keepstep as ks


@ks.step
async def count(left: int) -> int:
    if not left and not Path("mended").exists():
        raise ks.Permanent("broken")
    return left


@ks.workflow
async def counting(left: int) -> str:
    if await count(left):
        ks.continue_as(left - 1)
    return ks.run_id()


@ks.workflow
async def listening(left: int) -> str:
    if left:
        ks.continue_as(left - 1)
    return await ks.wait_for("word")
"""


@pytest.fixture
def series(folder):
    (folder / "series.py").write_text(SERIES, encoding="utf-8")
    return folder


def test_the_first_id_of_a_series_shows_and_retries_the_newest_run(keepstep, series):
    assert keepstep("run", "series.py:counting", "2", "--id", "c").code == 1
    shown = keepstep("show", "c")
    assert "newest        c~3, failed" in shown.out
    assert "result" not in shown.out
    assert "keepstep retry 'c~3'" in shown.out
    assert keepstep("show", "c", "--json").json["newest"] == {"id": "c~3", "status": "failed"}
    (series / "mended").touch()
    done = keepstep("retry", "c")
    assert done.code == 0
    assert "keepstep worker FILE.py" in done.out
    assert keepstep("run", "series.py:counting", "--id", "c").out.strip() == '"c~3"'


@pytest.mark.usefixtures("series")
def test_signal_to_the_first_id_names_the_wait_of_the_newest_run(keepstep):
    keepstep("start", "series.py:listening", "1", "--id", "l")
    assert keepstep("worker", "series.py", "--until-idle").code == 0
    early = keepstep("signal", "l", "other")
    assert "Now it waits for signal word" in early.out
    done = keepstep("approve", "l", "--json")
    assert done.json == {"run": "l", "signal": "word", "approved": True, "awaited": True}


@pytest.mark.usefixtures("series")
def test_forced_cancel_of_the_first_id_ends_the_newest_run(keepstep, status):
    keepstep("start", "series.py:listening", "1", "--id", "l")
    assert keepstep("worker", "series.py", "--until-idle").code == 0
    assert keepstep("cancel", "l", "--force").code == 0
    assert status("l~2") == "cancelled"


UNDO_PROGRAM = """
import keepstep as ks


async def refund(result, number):
    if number == 2:
        raise ks.Permanent("the bank is closed")


@ks.step(undo=refund)
async def charge(number):
    return number


@ks.step
async def ship():
    raise ks.Permanent("no truck")


@ks.workflow
async def order():
    for number in (1, 2, 3):
        await charge(number)
    await ship()
"""


@pytest.fixture
def half_undone(keepstep, folder):
    """A run that is set aside, because one of its steps cannot be undone."""
    (folder / "orders.py").write_text(UNDO_PROGRAM, encoding="utf-8")
    assert keepstep("run", "orders.py:order", "--id", "o1").code != 0


@pytest.mark.usefixtures("half_undone")
def test_show_tells_what_is_undone_and_what_can_be_done_about_the_rest(keepstep):
    shown = keepstep("show", "o1")
    assert "undone: charge#3, charge; failed: charge#2" in shown.out
    assert "keepstep skip o1" in shown.out
    undo = keepstep("show", "o1", "--json").json["undo"]
    assert undo == {
        "undone": ["charge#3", "charge#1"],
        "failed": ["charge#2"],
        "skipped": [],
        "left": [],
        "at_end": True,
    }
    assert "undo begun, 3 steps" in keepstep("audit", "o1").out


@pytest.mark.usefixtures("half_undone")
def test_skip_accepts_a_failed_undo(keepstep):
    wrong = keepstep("skip", "o1", "ship")
    assert wrong.code != 0
    assert "no failed undo of 'ship'" in wrong.err
    done = keepstep("skip", "o1", "charge#2", "--reason", "paid by hand", "--json")
    assert done.json == {"run": "o1", "skipped": ["charge#2"]}
    assert "undo skipped" in keepstep("audit", "o1").out
    again = keepstep("skip", "o1")
    assert again.code != 0
    assert "no undo step of it has failed" in again.err


@pytest.mark.usefixtures("half_undone")
def test_cancel_of_a_half_undone_run_names_what_it_leaves(keepstep):
    done = keepstep("cancel", "o1", "--force", "--json")
    assert done.json["not_undone"] == ["charge#2"]
    assert "not undone: charge#2" in keepstep("audit", "o1").out
