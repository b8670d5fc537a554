"""The command `queues`: limits are listed, shown, set and reset, with the actor and the reason."""

import json
from pathlib import Path

import pytest

from keepstep.stores.open import open_store


@pytest.fixture(autouse=True)
def _store(keepstep):
    Path(".keepstep").mkdir()
    open_store(".keepstep/runs.db").close()


def test_limits_are_set_shown_and_reset(keepstep):
    assert "no queue has limits" in keepstep("queues").out
    done = keepstep("queues", "set", "mail", "--concurrency", "5", "--rate", "100/60/10", "--reason", "a rush")
    assert (done.code, "concurrency 5, rate 100 in 60 s, burst 10" in done.out) == (0, True)
    assert "a rush" in keepstep("queues", "show", "mail").out
    assert "mail" in keepstep("queues", "list").out
    keepstep("queues", "set", "mail", "--concurrency", "none")
    shown = json.loads(keepstep("--json", "queues", "show", "mail").out)
    assert (shown["limits"], shown["set"]) == ({"rate": {"count": 100.0, "per": 60.0, "burst": 10}}, True)
    assert [change["act"] for change in shown["log"]] == ["set", "set"]
    assert "no limit" in keepstep("queues", "reset", "mail").out


def test_a_mistake_is_told_in_one_line(keepstep):
    for words in (
        ("set", "mail", "--rate", "fast"),
        ("set", "mail", "--concurrency", "many"),
        ("set", "mail"),
        ("show",),
        ("list", "--concurrency", "3"),
        ("drop", "mail"),
    ):
        done = keepstep("queues", *words)
        assert (done.code, "Traceback" in done.err) == (2, False), words
