"""Retry decides: how often, after how long, and when not at all."""

import math
import pickle
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keepstep.errors import DefinitionError, NotSerializable, Permanent, RetryAfter
from keepstep.policies import Again, ClassRetry, ErrorClass, GiveUp, Retry, classify
from keepstep.policies.retry import LONGEST_ASKED_SECONDS

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT

policies = st.builds(
    Retry,
    attempts=st.integers(1, 2_000),
    base_seconds=st.floats(0, 1e6),
    factor=st.floats(1, 1e6),
    cap_seconds=st.floats(0, 1e6),
    jitter=st.floats(0, 1) | st.just("full"),
    backoff=st.sampled_from(["exponential", "linear", "immediate", "none"]),
)
randoms = st.floats(0, 1, exclude_max=True)


def waits(policy, n, **options):
    return [decision.after_seconds for decision in decisions(policy, n, **options)]


def decisions(policy, n, **options):
    return [policy.decide(attempt, ErrorClass.UNKNOWN, **options) for attempt in range(1, n + 1)]


# -- how often ---------------------------------------------------------------------------------------------------------


def test_attempts_are_totals():
    policy = Retry(attempts=3)
    assert [type(d) for d in decisions(policy, 4)] == [Again, Again, GiveUp, GiveUp]


def test_giving_up_says_how_many_attempts_there_were():
    assert "3" in Retry(attempts=3).decide(3, "unknown").reason


@pytest.mark.parametrize("policy", [Retry.none(), Retry(attempts=1), Retry(attempts=7, backoff="none")])
def test_single_attempt_is_not_retried(policy):
    assert policy.attempts == 1
    assert isinstance(policy.decide(1, ErrorClass.TRANSIENT), GiveUp)


@given(policies, randoms)
def test_a_step_never_gets_more_attempts_than_allowed(policy, random):
    attempt = 1
    while isinstance(policy.decide(attempt, ErrorClass.NETWORK, random=random), Again):
        attempt += 1
    assert attempt == policy.attempts


# -- after how long ----------------------------------------------------------------------------------------------------


def test_exponential_is_the_default():
    assert waits(Retry(attempts=9), 7) == [1, 2, 4, 8, 16, 30, 30]


def test_linear_backoff_grows_by_the_base():
    assert waits(Retry(attempts=9, base_seconds=10, backoff="linear"), 5) == [10, 20, 30, 30, 30]


def test_immediate_backoff_does_not_wait():
    assert waits(Retry(attempts=9, backoff="immediate", jitter=1), 3, random=0.9) == [0, 0, 0]


def test_jitter_spreads_the_wait_both_ways():
    policy = Retry(attempts=2, base_seconds=10, jitter=0.5)
    assert waits(policy, 1, random=0.0) == [5]
    assert waits(policy, 1, random=0.5) == [10]
    assert waits(policy, 1, random=0.75) == [12.5]


def test_full_jitter_draws_from_the_whole_wait():
    policy = Retry(attempts=9, base_seconds=20, jitter="full")
    assert [waits(policy, 3, random=chance) for chance in (0.0, 0.5, 1.0)] == [[0, 0, 0], [10, 15, 15], [20, 30, 30]]


@pytest.mark.parametrize("jitter", ["some", 1.1, -1])
def test_jitter_that_is_no_share_is_refused(jitter):
    with pytest.raises(DefinitionError, match="jitter"):
        Retry(jitter=jitter)


def test_the_cap_is_applied_after_the_jitter():
    assert waits(Retry(attempts=2, base_seconds=20, jitter=1), 1, random=0.99) == [30]


def test_attempts_at_the_cap_are_still_spread():
    policy = Retry(attempts=99, jitter=0.5)
    late = [policy.decide(50, "unknown", random=r).after_seconds for r in (0.0, 0.25, 0.4)]
    assert late == [15, 22.5, 27]


def test_the_same_random_number_gives_the_same_wait():
    policy = Retry(attempts=5, jitter=1)
    assert waits(policy, 4, random=0.123) == waits(policy, 4, random=0.123)


@given(policies, st.integers(1, 2_000), randoms)
@example(Retry(attempts=2_000, base_seconds=1e6, factor=1e6, cap_seconds=5), 1_999, 0.9)
@example(Retry(attempts=2_000, base_seconds=0, factor=1e6), 1_999, 0.9)
def test_a_wait_is_finite_and_within_the_cap(policy, attempt, random):
    decision = policy.decide(attempt, ErrorClass.UNKNOWN, random=random)
    if isinstance(decision, Again):
        assert math.isfinite(decision.after_seconds)
        assert 0 <= decision.after_seconds <= policy.cap_seconds


@given(st.floats(0, 100), st.floats(1, 10), st.sampled_from(["exponential", "linear"]))
def test_waits_never_shrink_without_jitter(base, factor, backoff):
    found = waits(Retry(attempts=50, base_seconds=base, factor=factor, backoff=backoff), 49)
    assert found == sorted(found)


# -- which errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error_class", [c for c in ErrorClass if c is not ErrorClass.PERMANENT])
def test_a_plain_policy_retries_every_class_but_permanent(error_class):
    assert Retry().decide(1, error_class) == Again(1.0)


def test_a_class_from_another_version_counts_as_unknown():
    assert Retry.by_class().decide(2, "haunted") == Again(2.0)
    assert isinstance(Retry.by_class().decide(3, "haunted"), GiveUp)


@pytest.mark.parametrize("policy", [Retry(), Retry.by_class(), Retry(on=Exception), Retry(on=(Permanent, ValueError))])
def test_a_raised_permanent_is_always_the_end(policy):
    assert isinstance(policy.decide(1, ErrorClass.TRANSIENT, Permanent("no")), GiveUp)
    assert isinstance(policy.decide(1, "permanent", caused(RuntimeError("wrapped"), Permanent("no"))), GiveUp)


def test_an_answer_to_permanent_that_fails_is_judged_by_itself():
    def answer():
        try:
            raise Permanent("the first way is closed")
        except Permanent:
            raise RuntimeError("so is the second")  # noqa: B904 - the implicit context is the point

    with pytest.raises(RuntimeError) as caught:
        answer()
    assert classify(caught.value) is ErrorClass.UNKNOWN
    assert Retry().decide(1, classify(caught.value), caught.value) == Again(1.0)


def test_a_permanent_class_is_the_end_even_without_the_error():
    assert isinstance(Retry().decide(1, "permanent"), GiveUp)


def test_code_to_be_fixed_is_not_retried():
    error = NotSerializable("a socket")
    assert isinstance(Retry().decide(1, classify(error), error), GiveUp)


def test_on_limits_retries_to_its_types():
    policy = Retry(on=(ConnectionError, KeyError))
    assert isinstance(policy.decide(1, "network", ConnectionResetError()), Again)
    assert isinstance(policy.decide(1, "unknown", KeyError()), Again)
    refusal = policy.decide(1, "transient", ValueError())
    assert isinstance(refusal, GiveUp)
    assert "ValueError" in refusal.reason


def test_on_overrules_the_class():
    class NotThereYet(Exception):
        status_code = 404

    assert classify(NotThereYet()) is ErrorClass.PERMANENT
    assert isinstance(Retry().decide(1, "permanent", NotThereYet()), GiveUp)
    assert isinstance(Retry(on=NotThereYet).decide(1, "permanent", NotThereYet()), Again)


def test_never_takes_types_out():
    policy = Retry(on=LookupError, never=KeyError)
    assert isinstance(policy.decide(1, "unknown", IndexError()), Again)
    assert isinstance(policy.decide(1, "unknown", KeyError()), GiveUp)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_an_exit_is_not_a_failure(error):
    assert isinstance(Retry(on=BaseException).decide(1, "unknown", error), GiveUp)


# -- by class ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error_class, retries, base, factor",
    [
        ("transient", 3, 1, 2),
        ("rate limited", 5, 5, 2),
        ("resource exhausted", 3, 10, 3),
        ("timeout", 3, 2, 2),
        ("network", 4, 1, 2),
        ("internal", 2, 2, 2),
        ("unknown", 2, 1, 2),
        ("validation", 0, 0, 0),
        ("authentication", 0, 0, 0),
        ("authorization", 0, 0, 0),
        ("permanent", 0, 0, 0),
    ],
)
def test_by_class_follows_the_table_of_classes(error_class, retries, base, factor):
    policy = Retry.by_class()
    found = [policy.decide(attempt, error_class) for attempt in range(1, retries + 2)]
    assert found[:-1] == [Again(min(30.0, base * factor**n)) for n in range(retries)]
    assert isinstance(found[-1], GiveUp)
    assert ErrorClass(error_class).retryable == (retries > 0)


def test_the_table_can_be_changed_line_by_line():
    policy = Retry.by_class(ClassRetry("network", attempts=2, base_seconds=7), ClassRetry("validation", attempts=2))
    assert policy.decide(1, "network") == Again(7.0)
    assert isinstance(policy.decide(2, "network"), GiveUp)
    assert policy.decide(1, "validation") == Again(1.0)
    assert policy.decide(3, "transient") == Again(4.0)


# -- Retry-After -------------------------------------------------------------------------------------------------------


class Answered(Exception):
    """An error as HTTP clients raise it."""

    def __init__(self, headers, status=429):
        super().__init__("answered")
        self.response = SimpleNamespace(status_code=status, headers=headers)


def caused(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("seconds", [0.0, 0.25, 45.0, 10 * LONGEST_ASKED_SECONDS])
def test_a_raised_retry_after_is_exact_and_not_capped(seconds):
    assert Retry(jitter=1).decide(1, "rate limited", RetryAfter(seconds), random=0.9) == Again(seconds)


def test_a_raised_retry_after_does_not_add_attempts():
    assert isinstance(Retry(attempts=2).decide(2, "rate limited", RetryAfter(1)), GiveUp)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_a_senseless_retry_after_falls_back_to_the_policy(seconds):
    assert Retry().decide(1, "rate limited", RetryAfter(seconds)) == Again(1.0)


@pytest.mark.parametrize(
    "headers, seconds",
    [
        ({"Retry-After": "40"}, 40),
        ({"retry-after": "40"}, 40),
        ({b"x": b"y", "RETRY-AFTER": b" 40 "}, 40),
        ({"retry-after-ms": "1500", "retry-after": "2"}, 1.5),
        ({"Retry-After": "Tue, 14 Nov 2023 22:14:00 GMT"}, 40),
        ({"Retry-After": "Tue, 14 Nov 2023 22:00:00 GMT"}, 1),  # in the past: the policy's own wait
        ({"Retry-After": "0"}, 1),  # a service may only ask for more
        ({"Retry-After": "soon"}, 1),
        ({"Retry-After": "-5"}, 1),
        ({"Retry-After": "nan"}, 1),
        ({}, 1),
        (None, 1),
        ("Retry-After: 40", 1),
    ],
)
def test_a_services_retry_after_is_the_least_wait(headers, seconds):
    assert Retry().decide(1, "rate limited", Answered(headers), now=NOW) == Again(seconds)


def test_a_date_without_a_clock_is_not_understood():
    error = Answered({"Retry-After": "Tue, 14 Nov 2023 22:14:00 GMT"})
    assert Retry().decide(1, "rate limited", error) == Again(1.0)


def test_retry_after_is_read_from_an_attribute_or_a_cause():
    error = RuntimeError("wrapped")
    error.retry_after = 12
    assert Retry().decide(1, "unknown", error) == Again(12.0)
    assert Retry().decide(1, "unknown", caused(RuntimeError(), Answered({"Retry-After": "9"}))) == Again(9.0)


def test_a_service_cannot_put_a_run_to_sleep_for_years():
    decision = Retry().decide(1, "rate limited", Answered({"Retry-After": "1e9"}))
    assert isinstance(decision, GiveUp)
    assert "1000000000 s" in decision.reason


@given(st.floats(0, LONGEST_ASKED_SECONDS), policies, randoms)
def test_wait_is_at_least_as_long_as_asked(seconds, policy, random):
    decision = policy.decide(1, "rate limited", Answered({"Retry-After": repr(seconds)}), random=random)
    assert isinstance(decision, GiveUp) or decision.after_seconds >= seconds


# -- as a value --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"attempts": 0},
        {"attempts": -1},
        {"attempts": 2.0},
        {"attempts": True},
        {"attempts": "3"},
        {"base_seconds": -0.1},
        {"base_seconds": math.nan},
        {"base_seconds": None},
        {"factor": 0.5},
        {"factor": math.inf},
        {"cap_seconds": -1},
        {"cap_seconds": math.inf},
        {"jitter": 1.1},
        {"jitter": -0.1},
        {"backoff": "fibonacci"},
        {"on": "ValueError"},
        {"on": (ValueError, int)},
        {"never": ValueError("an instance")},
        {"classes": (ClassRetry("network", 2), ClassRetry("network", 3))},
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(options):
    with pytest.raises(DefinitionError):
        Retry(**options)


@pytest.mark.parametrize("options", [{"error_class": "haunted"}, {"attempts": 0}, {"base_seconds": -1}, {"factor": 0}])
def test_nonsense_is_refused_in_the_table(options):
    with pytest.raises(DefinitionError):
        ClassRetry(**{"error_class": "network", "attempts": 2, **options})


@pytest.mark.parametrize("policy", [Retry(), Retry.none(), Retry.by_class(), Retry(on=OSError, never=(KeyError,))])
def test_a_policy_is_a_value(policy):
    copy = pickle.loads(pickle.dumps(policy))
    assert copy == policy
    assert hash(copy) == hash(policy)
    assert repr(copy) == repr(policy)
    with pytest.raises(AttributeError):
        policy.attempts = 9
