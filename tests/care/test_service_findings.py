"""Findings about services: each names the promise at stake, and the command that mends it."""

from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from keepstep.care.service_findings import service_concerns
from keepstep.model import GateChange, GateInfo
from keepstep.model.gate import SERVICE, Share
from keepstep.policies.service import ServiceLimits

NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)
AGO = NOW - timedelta(minutes=20)


def found(limits, **fields):
    gate = GateInfo(SERVICE, "open ai", ServiceLimits(**limits).plain(), **fields)
    return [(one.code, one.message, one.advice) for one in service_concerns(gate, NOW)]


def codes(limits, **fields):
    return [code for code, _, _ in found(limits, **fields)]


def test_a_service_within_its_limits_is_healthy():
    shares = (Share("w1", 3, 3), Share("w2", 2, 9))
    assert found({"concurrency": 5}, shares=shares, parked=7, parked_since=AGO) == []
    assert found({}) == []


def test_shares_beyond_the_concurrency_are_found():
    [(code, message, advice)] = found({"concurrency": 5}, shares=(Share("w1", 3), Share("w2", 3)))
    assert (code, "6 places" in message, "keepstep services show 'open ai'" in advice) == ("service-over", True, True)


@pytest.mark.parametrize(
    "limits, fields, wanted",
    [
        ({"concurrency": 5}, {"shares": (Share("w", 4),)}, ["service-late"]),
        ({}, {}, ["service-late"]),
        ({"rate": ks.Rate(1, per=60)}, {"used_until": NOW.timestamp() + 30}, []),
        ({"rate": ks.Rate(1, per=60)}, {"used_until": NOW.timestamp() - 90}, ["service-late"]),
        ({"concurrency": 0}, {}, []),
    ],
)
def test_runs_that_wait_although_there_is_room_are_found(limits, fields, wanted):
    assert codes(limits, parked=2, parked_since=AGO, **fields) == wanted
    assert codes(limits, parked=2, parked_since=NOW - timedelta(seconds=50), **fields) == []


def test_a_breaker_that_holds_runs_back_for_long_is_found():
    limits, state = {"breaker": ks.Breaker()}, {"opened_at": NOW.timestamp() - 5}
    [(code, message, advice)] = found(limits, breaker=state, parked=3, parked_since=AGO)
    assert (code, "3 runs have waited for 20 min" in message) == ("breaker-open", True)
    assert "keepstep services close 'open ai'" in advice
    assert found(limits, breaker=state, parked=3, parked_since=NOW) == []


def test_a_breaker_that_a_person_holds_open_for_long_is_found():
    limits = {"breaker": ks.Breaker()}
    change = GateChange(AGO, "eva", "open", None, "maintenance")
    [(code, message, advice)] = found(limits, breaker={"hand": "open"}, log=(change,))
    assert (code, "eva has held the breaker open for 20 min" in message) == ("breaker-open", True)
    assert "keepstep services reset 'open ai'" in advice
