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


def test_a_run_in_a_queue_that_nobody_serves_says_so(keepstep, spawn):
    worker = spawn("worker", "program.py", "--queue", "orders")
    assert " in queue orders only; stop it" in worker.stderr.readline()
    (row,) = keepstep("workers", "--json").json["workers"]
    assert row["queues"] == ["orders"]
    assert "orders" in keepstep("workers").out
    assert keepstep("start", "program.py:total", "1", "--id", "lost", "--queue", "mail").code == 0
    shown = keepstep("show", "lost").out
    assert "a worker that serves queue mail (no living one does)" in shown
    assert "keepstep worker FILE.py --queue mail" in shown
    (found,) = keepstep("doctor", "--json").json["findings"]
    assert (found["code"], found["runs"]) == ("queue-unattended", ["lost"])
    assert "no living worker serves queue 'mail'; 1 run in it: lost" in found["message"]


def test_a_run_in_a_stopped_or_full_queue_says_so(keepstep):
    keepstep("queues", "set", "mail", "--concurrency", "0")
    keepstep("start", "program.py:total", "1", "--id", "held", "--queue", "mail")
    shown = keepstep("show", "held").out
    assert "queue mail, which is stopped (concurrency 0)" in shown
    assert "keepstep queues show mail" in shown
    keepstep("queues", "set", "mail", "--concurrency", "none", "--rate", "1/60/1")
    keepstep("worker", "program.py", "--until-idle", "-q")
    keepstep("start", "program.py:total", "1", "--id", "later", "--queue", "mail")
    assert "its turn in queue mail (rate)" in keepstep("show", "later").out


@pytest.mark.parametrize("kind", ["queue", "service"])
def test_a_name_that_nobody_knows_is_noted(keepstep, kind):
    done = keepstep(f"{kind}s", "set", "mail", "--concurrency", "3")
    assert (done.code, f"no code declares {kind} 'mail'" in done.err, f"no {kind} is known" in done.err) == (
        0,
        True,
        True,
    )
    done = keepstep(f"{kind}s", "show", "nope")
    assert (done.code, f"no code declares {kind} 'nope', and no run waits for it; known: mail" in done.err) == (0, True)
