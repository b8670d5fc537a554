"""Services as declared: their limits, as text and as plain data."""

from __future__ import annotations

import pytest

from keepstep.errors import DefinitionError
from keepstep.policies.breaker import Breaker
from keepstep.policies.rate import Rate
from keepstep.policies.service import DECLARED, Service, ServiceLimits, service_name

FULL = ServiceLimits(20, Rate(500, 60, 5), Rate(90_000, 60), Breaker(failures=2), "fail")


def test_limits_come_back_from_plain_data():
    assert ServiceLimits.of(FULL.plain()) == FULL
    assert ServiceLimits.of({}) == ServiceLimits()
    assert ServiceLimits().plain() == {}


def test_unknown_limits_of_a_newer_version_are_left_out():
    assert ServiceLimits.of({**FULL.plain(), "colour": "red"}) == FULL


def test_limits_can_be_changed_and_lifted():
    lifted = dict.fromkeys(("rate", "spend", "breaker"))
    assert FULL.changed({**lifted, "concurrency": 3, "when_open": "wait"}).plain() == {"concurrency": 3}


def test_limits_read_as_text():
    assert str(ServiceLimits()) == "no limit"
    assert str(ServiceLimits(2, Rate(5, 60))) == "concurrency 2, rate 5 in 60 s"


@pytest.mark.parametrize(
    "options, error",
    [
        ({"concurrency": -1}, "concurrency must be a whole number from 0 to 2147483647, got -1"),
        ({"concurrency": True}, "concurrency must be"),
        ({"rate": 5}, "rate must be a ks.Rate, got 5"),
        ({"spend": "5"}, "spend must be a ks.Rate, got '5'"),
        ({"breaker": True}, "breaker must be a ks.Breaker, got True"),
        ({"when_open": "go"}, "when_open must be 'wait' or 'fail', got 'go'"),
    ],
)
def test_bad_limits_are_refused_with_the_name_of_the_service(options, error):
    with pytest.raises(DefinitionError) as caught:
        Service("bank of tests", **options)
    assert str(caught.value).startswith("ks.Service('bank of tests'): " + error)
    assert "bank of tests" not in DECLARED


def test_the_newest_declaration_of_a_name_counts(monkeypatch):
    monkeypatch.setattr("keepstep.policies.service.DECLARED", {})
    from keepstep.policies import service

    service.Service("bank", concurrency=1)
    second = service.Service("bank", concurrency=2)
    assert {"bank": second} == service.DECLARED
    assert (service_name(second), service_name("x")) == ("bank", "x")
