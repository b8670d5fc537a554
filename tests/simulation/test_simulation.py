"""The simulated world: kept plans, many seeds, and that nothing of the real world leaks in."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import msgspec
import pytest

from keepstep.stores.transition import Transition
from tests.simulation import FAULTS, draw, play
from tests.simulation.graphs import SEGMENTS
from tests.simulation.programs import STATEMENTS
from tests.simulation.run_promises import wanted
from tests.simulation.seeds import CASES, FIRST_SEED, SEEDS
from tests.simulation.shrink import shrink

ROOT = Path(__file__).parents[2]
KEPT = sorted((Path(__file__).parent / "kept").glob("*.json"))


def story(outcome) -> str:
    return "\n".join([*outcome.broken, "", *outcome.story[-60:], "", json.dumps(outcome.plan)])


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_plan_breaks_no_promise(path):
    outcome = play(json.loads(path.read_text(encoding="utf-8"))["plan"])
    assert not outcome.broken, story(outcome)


@pytest.mark.parametrize("first", range(FIRST_SEED, FIRST_SEED + SEEDS, SEEDS // CASES))
def test_seeds_break_no_promise(first):
    for seed in range(first, first + SEEDS // CASES):
        plan = draw(seed)
        outcome = play(plan)
        if outcome.broken:
            pytest.fail(f"seed {seed}\n" + story(play(shrink(plan, outcome.broken, play, tries=60))))


# -- what the judge knows ----------------------------------------------------------------------------------------------


def test_every_statement_and_every_fault_is_drawn():
    plans = [draw(seed) for seed in range(400)]
    text = json.dumps(plans)
    assert all(f'["{word}"' in text for word in (*STATEMENTS, *SEGMENTS))
    assert {run["workflow"] for plan in plans for run in plan["runs"]} == {"program", "buffered", "graph", "dag"}
    assert {event["what"] for plan in plans for event in plan["events"]} == set(FAULTS)


def test_undisturbed_programs_give_what_is_expected_of_them():
    ended = set()
    for seed in range(120):
        plan = draw(seed)
        plan.pop("poison", None)
        for run in plan["runs"]:
            run.pop("deadline", None)
        outcome = play({**plan, "events": [], "workers": 1})
        assert not outcome.broken, story(outcome)
        ended |= {(run["workflow"], wanted(run) is None) for run in plan["runs"]}
    assert {(what, failed) for what in ("program", "graph", "dag") for failed in (True, False)} <= ended


# -- the same seed, the same history -----------------------------------------------------------------------------------

_DIGESTS = """
import sys
from tests.simulation import draw, play
print(*[play(draw(seed)).digest for seed in map(int, sys.argv[1:])])
"""


def digests(hash_seed, *seeds):
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", _DIGESTS, *map(str, seeds)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=100).stdout.split()


def test_the_same_seed_gives_the_same_history_byte_for_byte():
    seeds = range(FIRST_SEED, FIRST_SEED + 40)
    here = [play(draw(seed)).digest for seed in seeds]
    assert digests("1", *seeds) == here
    assert digests("2", *reversed(seeds)) == here[::-1]
    assert len(set(here)) == len(here)


def test_two_askers_of_one_run_are_answered_in_one_order():
    child = ["child", ["timeout", 0.3, ["keyed", 4, 0.2]]]
    asks = [["reply", "s6", 7, 0.948], ["reply", "s8", 9, 1.502]]
    parts = [["gather", [["checkpoint"], child]], ["called", ["sleep", 9.0]], ["drawn", 5], *asks]
    run = {"id": "run-0", "workflow": "program", "parts": [parts], "by": -1, "at": 0.955}
    plan = {"seed": 240773657, "workers": 3, "lease": 2.0, "latency": 0.0, "limit": 2, "runs": [run], "events": []}
    assert len({play(plan).digest for _ in range(30)}) == 1


# -- nothing real leaks in ---------------------------------------------------------------------------------------------


class Leak(BaseException):
    """Something asked the real world."""


def test_simulation_uses_no_thread_no_real_time_and_no_real_chance(monkeypatch):
    def leak(*_, **__):
        raise Leak

    for module, names in (
        (time, ("time", "monotonic", "perf_counter", "sleep", "time_ns", "monotonic_ns", "clock_gettime")),
        (random, ("random", "randrange", "choice", "seed", "SystemRandom")),
        (os, ("urandom", "getrandom")),
        (uuid, ("uuid1", "uuid4")),
        (threading.Thread, ("start",)),
    ):
        for name in names:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, leak)
    monkeypatch.setattr("secrets.token_bytes", leak)
    before = threading.active_count()
    outcomes = [play(draw(seed)) for seed in range(FIRST_SEED, FIRST_SEED + 30)]
    assert threading.active_count() == before
    broken = [outcome for outcome in outcomes if outcome.broken]
    assert not broken, story(broken[0])


# -- it can fail -------------------------------------------------------------------------------------------------------


def first_broken(limit=300, first=0):
    for seed in range(first, first + limit):
        outcome = play(draw(seed))
        if outcome.broken:
            return outcome
    return None


def test_a_store_without_a_fence_is_caught_and_the_story_is_short(monkeypatch):
    honest = Transition._advance

    def without_fence(self, change):
        head = self._head(change.run)
        if head is not None and head.seq == change.after:
            self._heads[change.run] = msgspec.structs.replace(head, worker=change.worker, epoch=change.epoch)
        return honest(self, change)

    monkeypatch.setattr(Transition, "_advance", without_fence)
    outcome = first_broken(1000, first=1170)  # the first thousand do not meet it: a head is seldom the expected one
    assert outcome is not None
    short = play(shrink(outcome.plan, outcome.broken, play, tries=6))
    assert short.broken
    assert len(short.story) <= len(outcome.story)


def test_a_lost_wake_up_is_caught(monkeypatch):
    honest = Transition._deliver

    def without_waking(self, signal):
        wakes = self._head(signal.run).wakes
        self._heads[signal.run] = msgspec.structs.replace(self._head(signal.run), wakes=())
        seq = honest(self, signal)
        self._put(signal.run, msgspec.structs.replace(self._head(signal.run), wakes=wakes))
        return seq

    monkeypatch.setattr(Transition, "_deliver", without_waking)
    outcome = first_broken()
    assert outcome is not None
    assert "every accepted run ends" in outcome.broken[0]


def test_step_without_a_last_record_is_caught_unless_its_start_is_lost(monkeypatch):
    from keepstep.kernel.calls import DurableCall

    honest = DurableCall.cancelled_by_code
    plan = json.loads((Path(__file__).parent / "kept" / "begun-after-what-was-lost.json").read_text("utf-8"))["plan"]
    promise = "every step that began has a last word"
    assert not play(plan).broken

    def without_a_trace(self):
        appended, self.run.append = self.run.append, lambda record, then: then(None)
        try:
            honest(self)
        finally:
            self.run.append = appended

    monkeypatch.setattr(DurableCall, "cancelled_by_code", without_a_trace)
    # Of what the second life began from what was saved, something must be said.
    assert [one for one in play(plan).broken if one.startswith(promise)] == [
        f"{promise}: run-0 1/work#1 began, and nothing says how it ended"
    ]
    # Without the outage nothing is lost, so the loser of the race that began ahead of the store needs its word.
    undisturbed = {**plan, "events": []}
    assert [one for one in play(undisturbed).broken if one.startswith(promise)] == [
        f"{promise}: run-0 1/limited#1 began, and nothing says how it ended"
    ]


def test_errors_of_the_engine_itself_are_seen(monkeypatch):
    from keepstep.engine.signal_reader import SignalReader

    async def broken(self, context):
        raise ValueError("a bug")

    monkeypatch.setattr(SignalReader, "_fetch", broken)
    outcome = first_broken()
    assert outcome is not None
    assert "nothing fails inside the engine" in "".join(outcome.broken)
