"""What a run may use up is a plain value that decides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies import Budget


def test_a_budget_says_what_is_used_up_and_how_much():
    use = Budget(cost=2, tokens=10_000).exceeded({"cost": 2.5, "tokens": 12_000})
    assert (use.kind, str(use)) == ("cost", "2.5 of 2 cost")
    assert str(Budget(tokens=10_000).exceeded({"tokens": 12_000})) == "12,000 of 10,000 tokens"


@pytest.mark.parametrize(
    "used, warns, exceeded", [(0, 0, 0), (89, 0, 0), (90, 1, 0), (99, 1, 0), (100, 1, 1), (101, 1, 1)]
)
def test_it_warns_at_90_percent_and_stops_at_100(used, warns, exceeded):
    [use] = Budget(steps=100).uses({"steps": used})
    assert (use.warns, use.exceeded) == (bool(warns), bool(exceeded))


@given(st.integers(1, 1000))
def test_many_small_amounts_that_make_the_limit_reach_it(parts):
    limit, spent = 1.0, 0.0
    for _ in range(parts):
        spent += limit / parts
    assert Budget(cost=limit).exceeded({"cost": spent}) is not None


def test_what_has_no_limit_is_never_used_up():
    assert Budget(steps=5).exceeded({"cost": 1e9, "tokens": 10**9, "seconds": 1e9, "steps": 4}) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"seconds": 0},
        {"seconds": -1},
        {"seconds": float("nan")},
        {"seconds": "5"},
        {"steps": 0},
        {"steps": 1.5},
        {"cost": -0.1},
        {"cost": True},
        {"tokens": 0},
        {"tokens": "many"},
    ],
)
def test_nonsense_is_refused(options):
    with pytest.raises(DefinitionError):
        Budget(**options)
