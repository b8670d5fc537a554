"""The report of a crash test: whole, as text and as JSON."""

from __future__ import annotations

import json

import pytest

from keepstep.testing.crashtests.findings import Crash, Finding
from keepstep.testing.crashtests.report import Report, StepReport


def report_with(text):
    bad = Finding("error", "doubled", f"did this: {text}", f"advice {text}", "charge", f"{text}:3")
    crashes = [
        Crash("1", f"before {text}", ended="completed"),
        Crash("2", f"at {text}", "charge#1", f"{text}:7", repeated=["charge"], doubled=[text], findings=[bad]),
        Crash("3", "never", reached=False),
    ]
    report = Report(text, result=text, crashes=crashes, moments=10, seconds=1.5)
    report.steps = [StepReport("charge", effects=[text])]
    report.gather([Finding("warning", "chance", f"calls {text}"), Finding("error", "outside-step", f"does {text}")])
    return report


def test_the_report_is_json_and_text():
    report = report_with("charge")
    value = json.loads(json.dumps(report.as_json()))
    assert value["ok"] is False
    assert [finding["crashes"] for finding in value["findings"]] == [0, 1, 0]
    assert [finding["severity"] for finding in value["findings"]] == ["error", "error", "warning"]
    assert value["steps"] == [{"name": "charge", "crashes": 1, "repeated": 1, "effects": ["charge"], "doubled": 1}]
    assert [crash["ok"] for crash in value["crashes"]] == [True, False, True]
    with pytest.raises(
        AssertionError, match=r"2 things are wrong \(1 of 2 crashes, a sample of 10 moments went wrong\)"
    ):
        report.check()


def test_the_verdict_says_no_more_than_was_tried():
    tried = [Crash("1", "before")]
    assert "after a crash at any moment (1 crash)" in Report("pay", crashes=tried, moments=1).verdict
    assert "after every crash that was tried (1 crash, a sample" in Report("pay", crashes=tried, moments=9).verdict
    varies = [(Finding("warning", "varies", "two runs end differently"), 0)]
    assert "apart from what varies without one" in Report("pay", crashes=tried, moments=1, findings=varies).verdict
    outside = [(Finding("error", "outside-step", "a file"), 0)]
    assert "even without a crash (1 crash)" in Report("pay", crashes=tried, moments=1, findings=outside).verdict


def test_a_clean_report_passes():
    report = Report("pay", crashes=[Crash("1", "before")], moments=1)
    report.check()
    assert str(report) == report.verdict
