"""Circuit breakers as a state machine: every move, and clocks that jump."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError
from keepstep.policies.breaker import Breaker, BreakerState, held

BREAKER = Breaker(failures=3, within=10.0, open_seconds=60.0, probes=2, successes=2)


def opened(at=0.0):
    return BREAKER.after_news(BreakerState(), at, failures=3)


def test_failures_within_the_time_open_it():
    state = BreakerState()
    for now in (0.0, 4.0):
        state = BREAKER.after_news(state, now, failures=1)
        assert BREAKER.status(state, now) == "closed"
    state = BREAKER.after_news(state, 9.0, failures=1)
    assert (BREAKER.status(state, 9.0), state.opened_at) == ("open", 9.0)


def test_failures_that_lie_apart_do_not_open_it():
    state = BreakerState()
    for now in range(0, 100, 6):
        state = BREAKER.after_news(state, float(now), failures=1)
    assert BREAKER.status(state, 100.0) == "closed"
    assert len(state.failed_at) <= BREAKER.failures


def test_probes_are_counted_while_they_are_under_way():
    state = opened()
    assert BREAKER.probes_left(state, 59.9) == 0
    assert BREAKER.probes_left(state, 60.0) == 2
    state = BREAKER.begun(state, 60.0, 2, 5.0)
    assert BREAKER.probes_left(state, 60.0) == 0
    state = BREAKER.after_news(state, 61.0, passed=1)
    assert BREAKER.probes_left(state, 61.0) == 1


def test_enough_successes_close_it():
    state = BREAKER.begun(opened(), 60.0, 2, 5.0)
    assert BREAKER.after_news(state, 61.0, passed=2) == BreakerState()


def test_one_failed_probe_opens_it_again_whatever_else_is_told():
    state = BREAKER.begun(opened(), 60.0, 2, 5.0)
    state = BREAKER.after_news(state, 61.0, passed=1, failed=1)
    assert state == BreakerState(opened_at=61.0)


def test_a_late_probe_counts_as_failed_at_its_deadline():
    state = BREAKER.begun(opened(), 60.0, 1, 5.0)
    assert BREAKER.after_news(state, 65.0) == state
    late = BREAKER.after_news(state, 100.0)
    assert late == BreakerState(opened_at=65.0)
    assert BREAKER.status(late, 124.0) == "open"
    assert BREAKER.status(late, 125.0) == "half-open"


def test_a_success_that_is_told_late_counts_before_its_deadline_is_judged():
    state = BREAKER.begun(opened(), 60.0, 2, 5.0)
    assert BREAKER.after_news(state, 100.0, passed=2) == BreakerState()


def test_failures_of_attempts_that_began_before_do_not_touch_an_open_breaker():
    assert BREAKER.after_news(opened(), 30.0, failures=9) == opened()


def test_outcomes_of_an_earlier_round_are_nothing_to_an_open_breaker():
    assert BREAKER.after_news(opened(), 30.0, passed=5, failed=5, unused=5) == opened()


@pytest.mark.parametrize("act, status", [("open", "open"), ("close", "closed")])
def test_a_person_holds_it(act, status):
    state = BREAKER.after_news(held(act), 1.0, failures=99)
    assert BREAKER.status(state, 1e9) == status


def test_a_reset_forgets_everything():
    assert held("reset") == BreakerState()


@pytest.mark.parametrize("options", [{"failures": 0}, {"probes": True}, {"successes": 1.5}, {"within": 0}])
def test_bad_settings_are_refused(options):
    with pytest.raises(DefinitionError, match=f"ks.Breaker: {next(iter(options))} must be"):
        Breaker(**options)


def test_unknown_settings_of_a_newer_version_are_left_out():
    assert Breaker.of({**BREAKER.plain(), "colour": "red"}) == BREAKER


TOLD = st.fixed_dictionaries({name: st.integers(0, 3) for name in ("failures", "passed", "failed", "unused")})
MOVES = st.lists(st.tuples(st.floats(-1e5, 1e5), TOLD, st.integers(0, 3)), max_size=30)


@given(MOVES)
def test_it_lets_attempts_begin_again_wherever_the_clock_goes(moves):
    """However the clock jumps, a breaker that nobody holds is half-open or closed after its time."""
    state, now = BreakerState(), 1e6
    for seconds, told, probes in moves:
        now += seconds
        state = BREAKER.after_news(state, now, **told)
        state = BREAKER.begun(state, now, min(probes, BREAKER.probes_left(state, now) or 0), 5.0)
        assert len(state.probes) <= BREAKER.probes
    state = BREAKER.after_news(state, now)
    for _ in range(2):  # the probes of dead workers fail, and the next ones may begin
        now += BREAKER.open_seconds + 6.0
        state = BREAKER.after_news(state, now)
    assert BREAKER.status(state, now) != "open"
    assert BREAKER.probes_left(state, now) != 0
