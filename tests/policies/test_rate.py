"""Rates that can be counted, and those that are refused because no store could."""

import math

import pytest

from keepstep.errors import DefinitionError
from keepstep.policies import Breaker, Rate
from keepstep.policies.queue import Limits
from keepstep.policies.rate import spend_left, tokens
from keepstep.policies.service import ServiceLimits

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    "rate",
    [
        {"count": 1e300, "per": 1e-300},
        {"count": 1e-300, "per": 1e300},
        {"count": 10**400},
        {"count": 10**5000},
        {"count": 1, "per": 10**400},
        {"count": 1e-10},
        {"count": 1e13},
        {"count": math.nan},
        {"count": math.inf},
        {"count": 1, "per": 0},
        {"count": 1, "burst": 2**31},
        {"count": 1, "burst": 10**5000},
    ],
)
def test_a_rate_that_cannot_be_counted_is_refused(rate):
    with pytest.raises(DefinitionError, match=r"ks\.Rate: "):
        Rate(**rate)


@pytest.mark.parametrize("rate", [Rate(1e12, burst=2**31 - 1), Rate(1e-9, burst=2**31 - 1), Rate(1, per=1e9)])
def test_the_widest_and_the_narrowest_rate_can_be_counted(rate):
    for used_until in (0.0, NOW, NOW + 1e9):
        assert tokens(rate, used_until, NOW).left >= 0
        assert math.isfinite(spend_left(rate, used_until, NOW)[0])


@pytest.mark.parametrize("value", [2**31, 2**63, 10**5000, -1, True, "auto"], ids=lambda value: type(value).__name__)
def test_a_limit_that_a_store_cannot_keep_is_refused(value):
    limit = "must be a whole number from 0 to 2147483647"
    for name in ("concurrency", "per_worker", "per_key", "max_waiting"):
        with pytest.raises(DefinitionError, match=f"{name} {limit}"):
            Limits(**{name: value})
    with pytest.raises(DefinitionError, match=f"concurrency {limit}"):
        ServiceLimits(concurrency=value)


@pytest.mark.parametrize("settings", [{"failures": 2**31}, {"within": 1e300}, {"open_seconds": 10**400}])
def test_a_breaker_that_cannot_be_counted_is_refused(settings):
    with pytest.raises(DefinitionError, match=rf"ks\.Breaker: {next(iter(settings))} must be"):
        Breaker(**settings)


@pytest.mark.parametrize(
    "stored",
    [
        {"concurrency": "auto"},
        {"concurrency": 2**63},
        {"rate": {"count": 1e300, "per": 1e-300, "burst": 1}},
        {"rate": "fast"},
        {"rate": {}},
        {"concurrency": 1, "rate": [1]},
        [1],
    ],
)
def test_stored_limits_that_cannot_be_read_limit_nothing(stored):
    assert Limits.of(stored) == Limits()
    assert ServiceLimits.of(stored) == ServiceLimits()
