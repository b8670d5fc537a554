"""The command `services`: limits are listed, shown, set and reset, and breakers opened and closed."""

import json
from pathlib import Path

import pytest

from keepstep.stores.open import open_store


@pytest.fixture(autouse=True)
def _store(keepstep):
    Path(".keepstep").mkdir()
    open_store(".keepstep/runs.db").close()


def test_limits_are_set_shown_and_reset(keepstep):
    assert "there is no service" in keepstep("services").out
    limits = ("--concurrency", "5", "--rate", "100/60/10", "--spend", "9000/60", "--breaker", "default")
    done = keepstep("services", "set", "openai", *limits, "--when-open", "fail", "--reason", "a rush")
    assert (done.code, "concurrency 5, rate 100 in 60 s, burst 10, spend 9000 in 60 s" in done.out) == (0, True)
    assert "a rush" in keepstep("services", "show", "openai").out
    assert "openai" in keepstep("services", "list").out
    keepstep("services", "set", "openai", "--breaker", "3/10/5")
    shown = json.loads(keepstep("--json", "services", "show", "openai").out)
    assert shown["limits"]["breaker"] == {
        "failures": 3,
        "within": 10.0,
        "open_seconds": 5.0,
        "probes": 3,
        "successes": 2,
    }
    assert (shown["set"], shown["parked"], shown["shares"]) == (True, 0, [])
    assert [change["act"] for change in shown["log"]] == ["set", "set"]
    assert "no limit" in keepstep("services", "reset", "openai").out


def test_a_breaker_is_opened_and_closed(keepstep):
    assert keepstep("services", "open", "openai").code == 2
    keepstep("services", "set", "openai", "--breaker", "default")
    done = keepstep("services", "open", "openai", "--reason", "maintenance")
    assert "open (by hand)" in done.out
    assert "open (by hand)" in keepstep("services").out
    assert json.loads(keepstep("--json", "services", "close", "openai").out)["breaker"]["status"] == "closed"


def test_a_mistake_is_told_in_one_line(keepstep):
    for words in (
        ("set", "openai", "--rate", "fast"),
        ("set", "openai", "--breaker", "often"),
        ("set", "openai", "--breaker", "0/1/1"),
        ("set", "openai"),
        ("show",),
        ("list", "--concurrency", "3"),
        ("drop", "openai"),
    ):
        done = keepstep("services", *words)
        assert (done.code, "Traceback" in done.err) == (2, False), words
