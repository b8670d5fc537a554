"""Any program sees the same, in the same order: live, replayed after every record, parked and killed."""

from __future__ import annotations

import os
import random
from unittest import mock

import pytest

from tests.replay.random_programs import Maker, Program, parts_of
from tests.replay.ways import WORKFLOWS, Loop, loops, try_seed

#: Programs for each kind of loop and durability; uvloop runs in real time. `make soak` draws others all the time.
EXAMPLES = int(os.environ.get("KEEPSTEP_EXAMPLES", "0"))
PROGRAMS = {"plain": 8, "eager": 4, "uvloop": 1}


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("durability", WORKFLOWS)
@pytest.mark.parametrize("kind", [kind for kind in loops() if kind in PROGRAMS])
def test_a_replay_of_any_program_equals_its_live_execution(kind, durability):
    for seed in range(EXAMPLES or PROGRAMS[kind]):
        report = try_seed(seed, Loop(kind), (), durability)
        assert not report, report


def test_a_program_that_does_not_replay_is_found_and_made_small():
    programs = {seed: Maker(seed).program() for seed in range(200)}
    drawing = [seed for seed, program in programs.items() if any("drawn" in words_of(one) for one in program)]
    seed = min(drawing, key=lambda seed: len(str(programs[seed])))

    async def drawn(self, number):
        return random.random()

    with mock.patch.object(Program, "drawn", drawn):
        report = try_seed(seed, Loop())
    assert '[["drawn", ' in report


def words_of(statement):
    return [one[0] for one in parts_of(statement)]
