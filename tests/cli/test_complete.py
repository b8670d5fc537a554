"""Answers from outside on the command line: by token, with errors and heartbeats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_runs import wait_for

PROGRAM = """
import keepstep as ks


@ks.workflow
async def hooked(heartbeat: float = 3600.0) -> str:
    callback = await ks.callback("payment")
    ks.publish("token", callback.token)
    try:
        return f"paid {await callback.wait(heartbeat=heartbeat)}"
    except ks.WaitFailed as failure:
        return f"{failure.error.type}: {failure.error.message}"


@ks.workflow
async def listening() -> str:
    try:
        return await ks.wait_for("word", heartbeat=3600)
    except ks.WaitFailed as failure:
        return f"{failure.error.type}: {failure.error.message}"
"""


@pytest.fixture
def started(keepstep, spawn):
    """Start a run of a workflow, and return its token, if it has one."""
    Path("hooks.py").write_text(PROGRAM, encoding="utf-8")
    spawn("worker", "hooks.py", "--stop-seconds", "1")

    def start(workflow):
        keepstep("start", f"hooks.py:{workflow}", "--id", "r")
        wait_for(lambda: keepstep("show", "r", "--json").json["status"] == "waiting")
        return keepstep("show", "r", "--json").json.get("published", {}).get("token")

    return start


def result(keepstep):
    assert keepstep("watch", "r").code == 0
    return keepstep("show", "r", "--json").json["result"]


@pytest.mark.parametrize(
    "words, answer",
    [
        ([], "paid True"),
        (['{"by": "card"}'], "paid {'by': 'card'}"),
        (["--fail", "no funds", "--type", "CardDeclined"], "CardDeclined: no funds"),
        (["--fail", "no funds"], "keepstep.WaitFailed: no funds"),
    ],
)
def test_complete_ends_the_wait_of_a_token(keepstep, started, words, answer):
    token = started("hooked")
    done = keepstep("complete", token, "--beat")
    assert (done.code, done.out.strip()) == (0, "sent a heartbeat to the callback of r")
    done = keepstep("complete", token, *words)
    assert (done.code, done.out.strip()) == (0, f"{'failed' if '--fail' in words else 'completed'} the callback of r")
    assert result(keepstep) == answer
    assert keepstep("complete", token, *words, "--json").json["run"] == "r"
    other = keepstep("complete", token, "2")
    assert other.code == 7
    assert "answered otherwise" in other.err


def test_wrong_token_is_not_found(keepstep, started):
    token = started("hooked")
    for wrong in ("x", token.replace("cb_", "cb_0"), f"{token}x"):
        done = keepstep("complete", wrong)
        assert (done.code, done.out) == (3, "")
        assert "no callback has this token" in done.err
        assert "Traceback" not in done.err


def test_signal_reports_an_error_or_a_heartbeat(keepstep, started):
    started("listening")
    done = keepstep("signal", "r", "word", "--beat")
    assert (done.code, done.out.strip()) == (0, "sent a heartbeat for word to r")
    assert keepstep("signal", "r", "word", "--fail", "broken", "--type", "Lost").code == 0
    assert result(keepstep) == "Lost: broken"


@pytest.mark.parametrize(
    "words", [["1", "--beat"], ["1", "--fail", "x"], ["--type", "X"], ["--beat", "--fail", "x"], ["not json"]]
)
def test_contradicting_answers_are_refused(keepstep, words):
    assert keepstep("complete", "cb_0.1.r", *words).code == 2
    assert keepstep("signal", "r", "word", *words).code == 2
