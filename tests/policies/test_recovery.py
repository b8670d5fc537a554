"""A run that crashes its workers is driven, then driven alone, then set aside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies import Recover, RecoverAlone, Recovery, RecoveryLimit, SetAside
from keepstep.workflows.recovery import recovery_handler


def test_three_crashes_without_progress_are_the_limit():
    limit = RecoveryLimit()
    assert [type(limit.decide(n)) for n in range(5)] == [Recover, Recover, RecoverAlone, SetAside, SetAside]


def test_the_reason_is_readable():
    assert "3 times" in RecoveryLimit().decide(3).reason
    assert "once" in RecoveryLimit(1).decide(1).reason


@given(st.integers(1, 100), st.integers(0, 200))
def test_every_run_is_set_aside_in_the_end_and_never_before_the_limit(limit, recoveries):
    assert isinstance(RecoveryLimit(limit).decide(recoveries), SetAside) == (recoveries >= limit)


@pytest.mark.parametrize("limit", [0, -1, 1.5, None, True])
def test_nonsense_is_refused(limit):
    with pytest.raises(DefinitionError):
        RecoveryLimit(limit)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"handler": "continue", "value": 3}, "value="),
        ({"handler": "restart", "step": "pay"}, "step="),
        ({"handler": "careful", "value": 3}, "value="),
        ({"handler": lambda: "continue"}, "take one argument"),
        ({"handler": lambda one, two: "continue"}, "take one argument"),
    ],
)
def test_policy_that_cannot_work_is_refused(given, named):
    with pytest.raises(DefinitionError, match=named):
        Recovery(**given)


def test_registered_handler_takes_one_argument():
    with pytest.raises(DefinitionError, match="take one argument"):
        recovery_handler("none at all")(lambda: "continue")
