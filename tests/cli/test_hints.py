"""What `run`, `show`, `list` and `history` tell of waits: the commands that fit, none that are stale, nothing cut."""

from __future__ import annotations

import sys
from datetime import UTC, datetime

import pytest

from keepstep.cli import errors
from keepstep.cli.progress import Lines
from keepstep.model import Event, Run, Status

PARCELS = """
import keepstep as ks


@ks.step
async def pack(what: str) -> str:
    return what


@ks.step
async def send(what: str) -> str:
    return what


@ks.workflow
async def paying() -> str:
    payment = await ks.callback("payment")
    return await payment.wait()


@ks.workflow(version="{version}")
async def parcel() -> str:
    await {first}("lamp")
    await ks.wait_for("go")
    return "sent"


@ks.workflow
def plain_parcel() -> str:
    {first}("lamp").result()
    ks.wait_for("go").result()
    return "sent"


@ks.workflow
async def family() -> str:
    ks.publish("stage", "counting the lamps in the cellar of the old house behind the mill")
    child = await ks.start(parcel)
    return await child
"""


@pytest.fixture
def parcels(folder):
    """Write the program, perhaps with another first step or version."""

    def write(first="pack", version="1"):
        text = PARCELS.format(first=first, version=version)
        (folder / "parcels.py").write_text(text, encoding="utf-8")

    write()
    return write


@pytest.fixture
def waiting(keepstep, parcels):
    """Start a run and let it come to its wait."""

    def start(workflow, run_id):
        assert keepstep("start", workflow, "--id", run_id).code == 0
        assert keepstep("worker", workflow.partition(":")[0], "--until-idle", "-q").code == 0

    return start


# -- the right command -------------------------------------------------------------------------------------------------


def test_a_callback_is_answered_by_its_signal_and_not_approved(keepstep, waiting):
    waiting("parcels.py:paying", "c")
    shown = keepstep("show", "c").out
    assert "waits for    callback payment\n" in shown
    assert "keepstep signal c callback:payment:2 JSON    (or keepstep complete TOKEN JSON)" in shown
    assert "approve" not in shown
    assert "callback payment" in keepstep("list").out
    assert keepstep("signal", "c", "callback:payment:2", '"paid"').code == 0
    assert keepstep("run", "parcels.py:paying", "--id", "c").out == '"paid"\n'


def test_a_signal_has_a_command_for_yes_or_no_and_one_for_other_values(keepstep, waiting):
    waiting("program.py:approval", "a")
    told = keepstep("run", "program.py:approval", "--id", "a", "--timeout", "0.01").err
    for text in (keepstep("show", "a").out, told):
        assert "keepstep approve a approved    (if it waits for a yes or no)" in text
        assert "keepstep signal a approved JSON    (if it waits for another value)" in text


# -- no stale ones -----------------------------------------------------------------------------------------------------


def test_run_does_not_ask_for_what_was_answered_before(keepstep, waiting):
    waiting("program.py:approval", "a")
    keepstep("approve", "a")
    done = keepstep("run", "program.py:approval", "--id", "a")
    assert done.out == '"yes"\n'
    assert "waits for" not in done.err
    assert "keepstep approve" not in done.err


@pytest.mark.parametrize(
    "wakes, said",
    [
        (("ks:resolve:pay#1",), "keepstep resolve p pay --result JSON | --failed | --again"),
        (("ks:go:pay#1.before",), "keepstep resume p"),
    ],
)
def test_a_wait_names_its_command_until_it_is_answered(capsys, wakes, said):
    now = datetime.now(UTC)
    run = Run("p", "w", Status.WAITING, created_at=now, wakes=wakes)
    Lines("p").waiting(run)
    assert said in capsys.readouterr().err
    Lines("p").waiting(Run("p", "w", Status.WAITING, created_at=now, wakes=wakes, due_at=now))
    assert capsys.readouterr().err == ""


def test_a_doubt_is_told_once(capsys):
    at = datetime.now(UTC)
    Lines("p").observe(Event("step.in_doubt", "p", at, step="pay#1"))
    assert capsys.readouterr().err == ""
    Lines("p").observe(Event("step.in_doubt", "other", at, step="pay#1"))
    assert "pay is in doubt: keepstep resolve other pay" in capsys.readouterr().err


def test_run_of_a_paused_run_says_how_it_goes_on(keepstep, waiting):
    waiting("program.py:approval", "a")
    keepstep("pause", "a")
    keepstep("worker", "program.py", "--until-idle", "-q")
    done = keepstep("run", "program.py:approval", "--id", "a", "--timeout", "0.01")
    assert done.code == errors.TIMED_OUT
    assert "keepstep resume a" in done.err


# -- a limit on the time -----------------------------------------------------------------------------------------------


def test_run_hands_back_after_its_timeout_and_goes_on_later(keepstep):
    done = keepstep("run", "program.py:approval", "--id", "a", "--timeout", "0.05")
    assert (done.code, done.out) == (8, "")
    assert "0.05 s are over" in done.err
    assert "run a is not finished; its finished steps are kept. Continue it with\n  keepstep run" in done.err
    again = keepstep("run", "program.py:approval", "--id", "a", "--timeout", "0.05", "--json")
    assert again.code == 8
    assert again.json == {"run": "a", "status": "timed out", "again": "keepstep run program.py:approval --id a"}
    keepstep("approve", "a", "approved")
    assert keepstep("run", "program.py:approval", "--id", "a", "--timeout", "60").out == '"yes"\n'


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_a_timeout_that_is_no_time_is_refused(keepstep, seconds):
    assert keepstep("run", "program.py:approval", "--timeout", seconds).code == 2


# -- whole lines -------------------------------------------------------------------------------------------------------


def test_show_cuts_a_value_on_a_terminal_and_not_in_a_pipe(keepstep, waiting, monkeypatch):
    waiting("parcels.py:family", "f")
    end = 'behind the mill"'
    assert end in keepstep("show", "f").out
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    assert end not in keepstep("show", "f").out


def test_history_names_the_run_of_a_child(keepstep, waiting):
    waiting("parcels.py:family", "f")
    [child] = keepstep("list", "--parent", "f", "--json").json["runs"]
    [line] = [line for line in keepstep("history", "f").out.splitlines() if "  child  " in line]
    assert child["id"] in line


def test_list_selects_runs_by_their_version(keepstep, waiting, parcels):
    waiting("parcels.py:parcel", "one")
    parcels(version="2")
    waiting("parcels.py:parcel", "two")
    for version, run in (("1", "one"), ("2", "two")):
        assert [one["id"] for one in keepstep("list", "--version", version, "--json").json["runs"]] == [run]
    assert keepstep("list", "--version", "3").out.startswith("no runs that match")


# -- the place of a mismatch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workflow, line", [("parcel", 23), ("plain_parcel", 30)])
def test_a_mismatch_names_the_line_that_does_not_fit(keepstep, waiting, parcels, workflow, line):
    waiting(f"parcels.py:{workflow}", "m")
    parcels(first="send")
    keepstep("signal", "m", "go")
    told = keepstep("worker", "parcels.py", "--until-idle")
    assert f"and the code asks for send#1 (parcels.py:{line} in {workflow})" in told.err
    shown = keepstep("show", "m")
    assert f'parcels.py", line {line}, in {workflow}\n' in shown.out
    assert 'send("lamp")' in shown.out
    frames = keepstep("show", "m", "--json").json["error"]["frames"]
    assert [(one["function"], one["line"]) for one in frames] == [(workflow, line)]
