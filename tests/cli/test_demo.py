"""`demo`: the first thing a newcomer sees; it must prove what it says, quickly, and fail when it does not hold."""

from __future__ import annotations

import time

import pytest

from keepstep.cli import demo as demo_module

pytestmark = pytest.mark.crash


def test_the_demo_proves_that_nothing_finished_ran_twice(keepstep):
    done = keepstep("demo")
    assert done.code == 0
    assert "SIGKILL in the middle of pack" in done.out
    assert "4 checkpoints in the store" in done.out
    assert "proved: 4 of 4 finished steps ran once, 8 of 8 completed" in done.out
    assert "\x1b[" not in done.out
    assert max(map(len, done.out.splitlines())) <= 100


def test_the_demo_as_json_gives_the_counts(keepstep):
    began = time.monotonic()
    done = keepstep("demo", "--json")
    assert time.monotonic() - began < 120  # a few seconds on a machine that is not busy
    assert done.code == 0
    assert [step["began"] for step in done.json["steps"]] == [[1, 0]] * 4 + [[1, 1]] + [[0, 1]] * 3


def test_a_demo_that_repeats_a_finished_step_fails(keepstep, monkeypatch):
    look = demo_module._Stage._look

    def twice(stage):
        fresh = look(stage)
        if len(stage.pids) == 2 and not getattr(stage, "lied", False):
            stage.lied = True
            stage.effects.append(demo_module.Effect(time.time(), stage.pids[1], "begin", "charge_card"))
        return fresh

    monkeypatch.setattr(demo_module._Stage, "_look", twice)
    done = keepstep("demo")
    assert done.code == 1
    assert "charge_card had a checkpoint and ran 2 times" in done.err
    assert "does not hold" in done.out
