"""Timeouts limit an attempt, and a step with all of its attempts."""

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies import Timeout

limits = st.one_of(st.none(), st.floats(0.001, 1e6))


@pytest.mark.parametrize(
    "timeout, elapsed, remaining",
    [
        (Timeout(), 1e9, None),
        (Timeout(attempt_seconds=5), 1e9, 5),
        (Timeout(step_seconds=10), 4, 6),
        (Timeout(step_seconds=10), 11, 0),
        (Timeout(step_seconds=10), -1, 10),  # a clock that went backwards gives no extra time
        (Timeout(5, 10), 2, 5),
        (Timeout(5, 10), 8, 2),
    ],
)
def test_remaining_time_is_the_smaller_limit(timeout, elapsed, remaining):
    assert timeout.remaining(elapsed) == remaining
    assert timeout.expired(elapsed) == (remaining == 0)


@given(limits, limits, st.floats(0, 1e7))
def test_an_attempt_never_outlives_either_limit(attempt, step, elapsed):
    left = Timeout(attempt, step).remaining(elapsed)
    assert (left is None) == (attempt is None and step is None)
    if left is not None:
        assert left >= 0
        assert attempt is None or left <= attempt
        assert step is None or elapsed + left <= max(step, elapsed) * (1 + 1e-9)


@pytest.mark.parametrize(
    "written, meant",
    [
        (None, Timeout()),
        (30, Timeout(attempt_seconds=30)),
        (0.5, Timeout(attempt_seconds=0.5)),
        (timedelta(minutes=1), Timeout(attempt_seconds=60)),
        (Timeout(1, 2), Timeout(1, 2)),
    ],
)
def test_every_written_form_is_understood(written, meant):
    assert Timeout.of(written) == meant


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "30", True])
def test_nonsense_is_refused(value):
    with pytest.raises(DefinitionError):
        Timeout(attempt_seconds=value)
    with pytest.raises(DefinitionError):
        Timeout(step_seconds=value)
    with pytest.raises(DefinitionError):
        Timeout.of(value)
