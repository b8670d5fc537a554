"""The simulation can fail: every mutant of the engine breaks a promise in it, under which the engine itself holds."""

from __future__ import annotations

import itertools

import pytest

from tests.simulation import draw, play

from .mutants import MUTANTS, broken_under, found, hunt, kept_plans

PLANS = kept_plans()


def test_there_are_many_mutants_and_each_has_its_name_and_its_plan():
    names = [one.name for one in MUTANTS]
    assert len(names) >= 40
    assert len(set(names)) == len(names)
    assert set(PLANS) == set(names), "make mutants ARGS=--keep"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutant_breaks_a_promise_that_the_engine_keeps(mutant):
    # The kept plan first. Where it has become harmless, because the engine has changed, others are tried.
    kill = hunt(mutant, itertools.chain([PLANS[mutant.name]], map(draw, range(300))))
    assert kill is not None, f"{mutant.name} survives: {mutant.breaks}"
    outcome = play(kill.plan)
    assert not outcome.broken, f"without the mutant too: {outcome.broken}"


def test_a_mutant_leaves_nothing_behind():
    codes = {patch.where: found(patch.where).__code__ for one in MUTANTS for patch in one.patches}
    broken_under(MUTANTS[0], draw(0))
    for one in MUTANTS:
        with one.applied():
            assert all(found(patch.where).__code__ is not codes[patch.where] for patch in one.patches)
    assert all(found(where).__code__ is code for where, code in codes.items())
