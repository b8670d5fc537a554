"""Recovery handlers in the simulated world: with more kills, every promise holds under each of them."""

from __future__ import annotations

import json
import random

import pytest

from keepstep.kernel import recovery
from keepstep.policies import Recovery
from tests.nightly import case
from tests.simulation import draw, play
from tests.simulation.mutants import mutant

#: Seeds of one case, and bodies of a worker's steps in each history that are killed with their process.
SEEDS, KILLS = 15, 3


def with_kills(seed):
    """Return a plan whose workers are often killed while they perform steps."""
    plan = draw(seed)
    chance = random.Random(seed)
    for slot in range(plan["workers"]):
        for _ in range(KILLS):
            at = ["body", chance.randint(1, 8)]
            plan["events"].append({"what": "kill", "slot": slot, "at": at, "back": chance.uniform(0.1, 2.0)})
    return plan


@pytest.fixture
def answers(monkeypatch):
    """Answers that handlers gave, by name."""
    given = []
    carried_out = recovery._carry_out

    async def noted(run, answer, plan):
        given.append(answer.name)
        return await carried_out(run, answer, plan)

    monkeypatch.setattr(recovery, "_carry_out", noted)
    return given


@pytest.mark.parametrize(
    "handler, first",
    [
        case(handler, first, nightly=first > 0)
        for handler in ("continue", "retry step", "restart")
        for first in (0, 500)
    ],
)
def test_recovery_handlers_break_no_promise(handler, first, answers, monkeypatch):
    monkeypatch.setattr(Recovery, "of", classmethod(lambda *_: Recovery(handler)))
    for seed in range(first, first + SEEDS * (10 if first else 1)):
        outcome = play(with_kills(seed))
        story = [*outcome.broken, "", *outcome.story[-60:], "", json.dumps(outcome.plan)]
        assert not outcome.broken, f"seed {seed}\n" + "\n".join(story)
    assert len(answers) >= SEEDS // 2


#: Defects of recoveries: the handler and a seed under which each breaks a promise, and the mutant.
MUTANTS = [
    (
        "restart",
        6,
        mutant(
            "answer taken for progress",
            "the answer of a recovery handler resets the count of crashes",
            ("kernel.versions:write_first", "change.progress, change.sends = False, list(sends)", "pass"),
        ),
    ),
    (
        "restart",
        75,
        mutant(
            "restart goes on from the state",
            "a graph that is restarted goes on from the state that it had read before",
            (
                "kernel.driver:RunDriver.loaded",
                "self.position, self.last_delivered = history.position, 1",
                "self.position = history.position or self.position",
            ),
        ),
    ),
    (
        "continue",
        3,
        mutant(
            "answer not looked at",
            "the history is not read again after an answer, so its records are written twice",
            ("kernel.recovery:_carry_out", "    await load_history(run)\n", "    run.loaded(run.history, 1)\n"),
        ),
    ),
]


@pytest.mark.parametrize("handler, first, defect", MUTANTS, ids=[one.name.replace(" ", "-") for _, _, one in MUTANTS])
def test_defect_of_a_recovery_breaks_a_promise(handler, first, defect, monkeypatch):
    monkeypatch.setattr(Recovery, "of", classmethod(lambda *_: Recovery(handler)))
    for seed in range(first, first + 700):
        with defect.applied():
            is_found = is_broken(seed)
        if is_found:
            assert not is_broken(seed)
            return
    pytest.fail(f"{defect.name} survives: {defect.breaks}")


def is_broken(seed):
    """Whether a history breaks a promise, or records changes that cannot follow each other."""
    try:
        return bool(play(with_kills(seed)).broken)
    except LookupError:
        return True
