"""Recovery handlers in the simulated world: with more kills, every promise holds under each of them."""

from __future__ import annotations

import json
import random

import pytest

from keepstep.kernel import recovery
from keepstep.policies import Recovery
from tests.nightly import case
from tests.simulation import draw, play

#: Seeds of one case, and bodies of a worker's steps in each history that are killed with their process.
SEEDS, KILLS = 30, 3


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
