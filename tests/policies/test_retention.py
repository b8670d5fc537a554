"""Which finished runs stay, and which may go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.model import FINISHED, Status
from keepstep.policies import Retain

DAY = 86_400.0


@pytest.mark.parametrize(
    "rule, status, days, newer, stays",
    [
        (Retain(), "completed", 29, 5000, True),
        (Retain(), "completed", 31, 5000, False),
        (Retain(), "completed", 31, 999, True),
        (Retain(), "completed", 31, 1000, False),
        (Retain(), "failed", 31, 1000, False),
        (Retain(failed_days=90), "failed", 31, 1000, True),
        (Retain(failed_days=90), "cancelled", 31, 1000, True),
        (Retain(failed_days=90), "completed", 31, 1000, False),
        (Retain(failed_days=1), "failed", 2, 1000, False),
        (Retain(days=0, count=0), "completed", 0.001, 0, False),
        (Retain(preserve=False), "completed", 0, 0, False),
        (Retain(preserve=False), "failed", 0, 0, True),
    ],
)
def test_a_run_stays_by_its_age_or_by_its_place(rule, status, days, newer, stays):
    assert rule.keeps(Status(status), days * DAY, newer) is stays


def test_a_workflow_may_have_a_rule_of_its_own():
    short = Retain(days=1, count=0)
    rule = Retain(workflows={"ping": short})
    assert rule.of("ping") is short
    assert rule.of("digest") is rule


@given(
    st.sampled_from(sorted(frozenset(Status) - FINISHED)),
    st.floats(0, 1e9),
    st.integers(0, 10**9),
    st.booleans(),
)
def test_what_is_not_finished_always_stays(status, age, newer, preserve):
    assert Retain(days=0, count=0, preserve=preserve).keeps(status, age, newer)


@given(st.sampled_from(sorted(FINISHED)), st.floats(0, 1e9), st.integers(0, 10**6), st.floats(0, 1000))
def test_older_never_stays_where_younger_goes(status, age, newer, days):
    rule = Retain(days=days, count=10)
    assert rule.keeps(status, age, newer) or not rule.keeps(status, age * 2 + 1, newer + 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"days": -1},
        {"days": float("nan")},
        {"days": "30"},
        {"count": -1},
        {"count": 1.5},
        {"failed_days": -1},
        {"workflows": {"a": 30}},
        {"workflows": {"a": Retain(workflows={"b": Retain()})}},
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(DefinitionError):
        Retain(**wrong)
