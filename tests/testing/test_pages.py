"""The report of a crash test as a page and as JUnit's XML: whole, valid, and safe whatever it holds."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from keepstep.testing.findings import Crash, Finding
from keepstep.testing.pages import as_html, as_junit
from keepstep.testing.report import Report, StepReport

EVIL = "<script>alert('\"&\x1b[31m\x00\ud800')</script>"


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


class Page(HTMLParser):
    """What a browser would see: tags that match, and nothing that is fetched or run."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.seen = [], [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        assert not {"src", "href", "onload", "onclick"} & {name for name, _ in attrs}
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("text", ["charge order-1", EVIL])
def test_the_page_is_whole_and_safe(text):
    page = Page(as_html(report_with(text)))
    assert page.open == []
    assert not page.seen & {"script", "link", "img", "iframe"}
    shown = "".join(page.text)
    assert "url(" not in shown
    assert "@import" not in shown
    for part in (f"did this: {text}", f"advice {text}", f"calls {text}", "not reached", "a sample of 10 moments"):
        assert part.replace("\x00", "\x00") in shown
    assert {"h1", "h2", "table", "th", "main", "title"} <= page.seen


@pytest.mark.parametrize("text", ["charge order-1", EVIL])
def test_junit_is_valid_and_counts(text):
    root = ET.fromstring(as_junit(report_with(text)).encode("utf-8"))
    [suite] = root
    cases = suite.findall("testcase")
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("4", "2", "1")
    assert len(cases) == 4
    assert [len(case.findall("failure")) for case in cases] == [1, 0, 1, 0]
    assert cases[3].find("skipped") is not None
    failure = cases[2].find("failure")
    assert failure.get("type") == "doubled"
    assert failure.text.startswith("did this:")
    assert len({case.get("name") for case in cases}) == 4


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
    assert "but for what varies without one" in Report("pay", crashes=tried, moments=1, findings=varies).verdict
    outside = [(Finding("error", "outside-step", "a file"), 0)]
    assert "even without a crash (1 crash)" in Report("pay", crashes=tried, moments=1, findings=outside).verdict


def test_a_clean_report_passes():
    report = Report("pay", crashes=[Crash("1", "before")], moments=1)
    report.check()
    assert "Nothing was found" in as_html(report)
    assert ET.fromstring(as_junit(report))[0].get("failures") == "0"
