"""The report of a crash test as files: one page of HTML that needs nothing else, and JUnit's XML."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from xml.sax.saxutils import quoteattr

from .findings import Crash, Finding, short
from .report import Report

#: What XML cannot hold, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #b3261e; --warn: #8a5a00; --good: #1a7f37; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; --warn: #ffc766; --good: #7ee297; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p.verdict { font-size: 1.1rem; border-left: .4rem solid var(--good); padding: .5rem 1rem; background: var(--soft); }
p.verdict.bad { border-color: var(--bad); }
.table { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; padding-right: 1.5rem; } td code { overflow-wrap: normal; }
article { border: 1px solid var(--line); border-left: .4rem solid var(--warn); border-radius: .3rem;
  padding: .5rem 1rem; margin: .75rem 0; }
article.error { border-left-color: var(--bad); } article.note { border-left-color: var(--line); }
article p { margin: .25rem 0; } code { font-size: .9em; overflow-wrap: anywhere; }
.error b, .bad { color: var(--bad); } .warning b { color: var(--warn); } .good { color: var(--good); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; margin: 1rem 0; } dt { opacity: .7; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


def as_html(report: Report) -> str:
    """One page that holds everything; nothing of it is fetched, and everything that was found is escaped."""
    title = f"Crash test of {report.workflow}"
    bad = "" if report.ok else " bad"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head>",
            f"<body><main><h1>{escape(title)}</h1>",
            f'<p class="verdict{bad}">{escape(report.verdict)}.</p>',
            _facts(report),
            *_findings(report),
            *_steps(report),
            *_crashes(report),
            "</main></body></html>\n",
        ]
    )


def _facts(report: Report) -> str:
    facts = [
        ("Undisturbed result", report.result or "none"),
        ("Moments to die at", str(report.moments)),
        ("Crashes tried", str(sum(crash.reached for crash in report.crashes))),
        ("Took", f"{report.seconds:.1f} s, for {_span(report.virtual_seconds)} of the workflow's own time"),
    ]
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts) + "</dl>"


def _span(seconds: float) -> str:
    return f"{seconds / 86_400:,.0f} days" if seconds > 2 * 86_400 else f"{seconds:,.1f} s"


def _findings(report: Report) -> Iterator[str]:
    yield f"<h2>Findings ({len(report.findings)})</h2>"
    if not report.findings:
        yield "<p>Nothing was found.</p>"
    for finding, count in report.findings:
        seen = f" Seen in {count} crash{'es' if count != 1 else ''}." if count else ""
        yield f'<article class="{escape(finding.severity)}">'
        yield f"<p><b>{escape(finding.severity)}</b>: {escape(finding.message)}.{seen}</p>"
        if finding.line:
            yield f"<p>In <code>{escape(finding.line)}</code></p>"
        if finding.advice:
            yield f"<p>What to do: {escape(finding.advice)}.</p>"
        yield "</article>"


def _table(caption: str, heads: list[tuple[str, bool]], rows: list[list[str]]) -> Iterator[str]:
    """A table of cells that are escaped already; a head says whether its column is of numbers."""
    yield f'<h2>{escape(caption)}</h2><div class="table"><table><thead><tr>'
    yield "".join(f'<th scope="col"{_number(numbers)}>{escape(head)}</th>' for head, numbers in heads)
    yield "</tr></thead><tbody>"
    for row in rows:
        cells = zip(row, heads, strict=True)
        yield "<tr>" + "".join(f"<td{_number(numbers)}>{cell}</td>" for cell, (_, numbers) in cells) + "</tr>"
    yield "</tbody></table></div>"


def _number(numbers: bool) -> str:
    return ' class="n"' if numbers else ""


def _steps(report: Report) -> Iterator[str]:
    heads = [("Step", False), ("Crashes inside", True), ("Repeated", True), ("Doubled", True), ("Effects", False)]
    rows = [
        [
            f"<code>{escape(step.name)}</code>",
            str(step.crashes),
            str(step.repeated),
            f'<span class="bad">{step.doubled}</span>' if step.doubled else "0",
            "<br>".join(escape(text) for text in step.effects) or "none seen",
        ]
        for step in report.steps
    ]
    return _table("Steps", heads, rows)


def _crashes(report: Report) -> Iterator[str]:
    heads = [
        ("The process died", False),
        ("Outcome", False),
        ("Repeated", False),
        ("Doubled", False),
        ("Seconds", True),
    ]
    rows = [
        [
            escape(place_of(crash)),
            f'<span class="{"good" if crash.ok else "bad"}">{escape(outcome_of(crash))}</span>',
            escape(", ".join(crash.repeated)) or "nothing",
            escape("; ".join(crash.doubled)) or "nothing",
            f"{crash.seconds:.2f}",
        ]
        for crash in report.crashes
    ]
    return _table("Crashes", heads, rows)


def place_of(crash: Crash) -> str:
    """Where the process died, in words."""
    if not crash.step:
        return crash.where
    line = f" (line {crash.line.rpartition(':')[2]})" if crash.line else ""
    return f"inside {short(crash.step)}, {crash.where}{line}"


def outcome_of(crash: Crash) -> str:
    """What came of a crash, in a word or two."""
    if not crash.reached:
        return "not reached"
    if crash.ok:
        return "in doubt" if crash.ended == "in doubt" else "same"
    return ", ".join(dict.fromkeys(finding.code for finding in crash.findings if finding.severity == "error"))


# -- JUnit -------------------------------------------------------------------------------------------------------------


def as_junit(report: Report) -> str:
    """One test case for the undisturbed run, and one for each crash."""
    found = {finding for crash in report.crashes for finding in crash.findings}
    before = [finding for finding, _ in report.findings if finding not in found and finding.severity == "error"]
    failures = bool(before) + sum(not crash.ok for crash in report.crashes)
    skipped = sum(not crash.reached for crash in report.crashes)
    suite = f"name={_attribute(f'crashtest {report.workflow}')} tests={quoteattr(str(len(report.crashes) + 1))}"
    lines = [
        '<?xml version="1.0" encoding="utf-8"?>',
        "<testsuites>",
        f'<testsuite {suite} failures="{failures}" errors="0" skipped="{skipped}" time="{report.seconds:.3f}">',
        *_case(report, "undisturbed", before, 0.0),
    ]
    for number, crash in enumerate(report.crashes, 1):
        wrong = [finding for finding in crash.findings if finding.severity == "error"]
        name = f"{number}. {place_of(crash)}"
        lines += _case(report, name, wrong, crash.seconds, skipped=not crash.reached)
    return "\n".join([*lines, "</testsuite>", "</testsuites>", ""])


def _case(report: Report, name: str, wrong: list[Finding], seconds: float, *, skipped: bool = False) -> Iterator[str]:
    yield f'<testcase classname={_attribute(report.workflow)} name={_attribute(name)} time="{seconds:.3f}">'
    if wrong:
        text = "\n".join(filter(None, (line for one in wrong for line in (one.message, one.line, one.advice))))
        first = f"<failure type={_attribute(wrong[0].code)} message={_attribute(wrong[0].message)}>"
        yield f"{first}{escape(_NOT_XML.sub('?', text), quote=False)}</failure>"
    elif skipped:
        yield '<skipped message="this moment did not come again"/>'
    yield "</testcase>"


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("?", text))
