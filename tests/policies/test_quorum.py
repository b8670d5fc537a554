"""Wait policies say when enough branches have succeeded, and when no longer enough can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies import All, Any, Quorum, Verdict, coverage, degraded


@pytest.mark.parametrize(
    "policy, total, succeeded, failed, verdict",
    [
        (All(), 3, 2, 0, "wait"),
        (All(), 3, 3, 0, "done"),
        (All(), 3, 0, 1, "impossible"),
        (All(), 0, 0, 0, "done"),
        (Any(), 3, 0, 2, "wait"),
        (Any(), 3, 1, 0, "done"),
        (Any(), 3, 1, 2, "done"),
        (Any(), 3, 0, 3, "impossible"),
        (Any(), 0, 0, 0, "impossible"),
        (Quorum(2), 3, 1, 1, "wait"),
        (Quorum(2), 3, 2, 0, "done"),
        (Quorum(2), 3, 1, 2, "impossible"),
        (Quorum(4), 3, 0, 0, "impossible"),
    ],
)
def test_policies_say_when_enough_have_succeeded(policy, total, succeeded, failed, verdict):
    assert policy.enough(total, succeeded, failed) == verdict


@given(
    st.one_of(st.just(All()), st.just(Any()), st.builds(Quorum, st.integers(1, 12))),
    st.lists(st.booleans(), max_size=12),
)
def test_a_verdict_is_reached_and_never_taken_back(policy, outcomes):
    total, succeeded, reached = len(outcomes), 0, None
    for finished in range(total + 1):
        verdict = policy.enough(total, succeeded, finished - succeeded)
        if reached:
            assert verdict is reached
        elif verdict is not Verdict.WAIT:
            reached = verdict
        if finished < total:
            succeeded += outcomes[finished]
    assert reached


@pytest.mark.parametrize("n", [0, -1, 0.7, None, True])
def test_a_quorum_is_a_whole_number(n):
    with pytest.raises(DefinitionError):
        Quorum(n)


def test_coverage_is_the_share_that_succeeded():
    assert coverage(4, 1) == 0.25
    assert coverage(0, 0) == 1.0
    assert not degraded(10, 7)
    assert degraded(10, 6)
    assert not degraded(0, 0)
