"""What was found, as a table, as JSON and as a chart."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from .measure import ROOT, Finding

RESULTS = ROOT / "bench" / "results"


def table(findings: Iterable[Finding], floor: str = "floor") -> str:
    """Ours, the floor, the ratio, the target, and whether it is reached."""
    head = ("job", "what", "ours", floor, "ratio", "target", "reached")
    rows = [head, *(_row(finding) for finding in findings)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(_aligned(cell, i, widths[i]) for i, cell in enumerate(row)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _aligned(cell: str, column: int, width: int) -> str:
    return cell.ljust(width) if column < 2 or column == 6 else cell.rjust(width)


def _row(finding: Finding) -> tuple[str, ...]:
    target = ""
    if finding.least_ratio is not None:
        target = f"≥ {finding.least_ratio:g}"
    elif finding.most is not None:
        target = f"≤ {finding.most:g} {finding.unit}"
    reached = {True: "yes", False: "NO", None: ""}[finding.reached]
    if not finding.sure:
        reached += ", but rounds differ"
    if finding.detail.get("repeated", 0) > 1:
        reached = f"NO: {finding.detail['repeated']} bodies repeated"
    return (
        finding.job,
        finding.what,
        f"{number(finding.ours)} {finding.unit}",
        "" if finding.floor is None else number(finding.floor),
        _ratio(finding),
        target,
        reached,
    )


def _ratio(finding: Finding) -> str:
    if finding.ratio is None:
        return ""
    ratios = finding.detail.get("ratios")
    return f"{finding.ratio:.2f}" + (f" ({min(ratios):.2f}–{max(ratios):.2f})" if ratios else "")


def number(value: float) -> str:
    """A measurement with as many digits as mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def spent(findings: Iterable[Finding]) -> str:
    """Where the time of a recovery goes."""
    lines = []
    for finding in findings:
        parts = finding.detail.get("where")
        if parts:
            lines.append(f"{finding.what}:")
            lines.append("    " + " · ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items()))
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures were taken on; they mean little elsewhere, the ratios more."""
    return {
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def write(findings: list[Finding], peers: list[Finding], into: Path = RESULTS) -> None:
    """Keep everything: `latest.json` with each single measurement, `latest.svg` to look at."""
    into.mkdir(parents=True, exist_ok=True)
    record = {
        "machine": machine(),
        "findings": [finding.plain() for finding in findings],
        "peers": [finding.plain() for finding in peers],
    }
    (into / "latest.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (into / "latest.svg").write_text(chart(findings), encoding="utf-8")


# -- the chart ---------------------------------------------------------------------------------------------------------

_LEFT, _WIDTH, _LINE = 430, 360, 26


def chart(findings: list[Finding]) -> str:
    """Two groups of bars: shares of the floor, and shares of what is allowed. A mark stands at each target."""
    shares = [(f, f.ratio, f.least_ratio) for f in findings if f.least_ratio is not None and f.ratio is not None]
    limits = [(f, f.ours / f.most, 1.0) for f in findings if f.most]
    parts: list[str] = []
    y = 30
    y = _group(parts, y, "Share of the floor (more is better; the mark is the target)", shares, 1.0)
    y = _group(parts, y + 20, "Share of what is allowed (less is better; the mark is the limit)", limits, 1.5)
    size = f'width="{_LEFT + _WIDTH + 120}" height="{y + 10}"'
    style = "text{font:13px sans-serif;fill:#222}.head{font-weight:bold}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>\n' + "\n".join(parts) + "\n</svg>\n"


def _group(parts: list[str], y: int, title: str, bars: list[tuple[Finding, float, float]], most: float) -> int:
    if not bars:
        return y
    parts.append(f'<text class="head" x="10" y="{y}">{escape(title)}</text>')
    for finding, value, mark in bars:
        y += _LINE
        colour = "#2f7d4f" if finding.reached else "#b5482f"
        width = min(value, most) / most * _WIDTH
        at = _LEFT + mark / most * _WIDTH
        what = finding.what if len(finding.what) < 58 else finding.what[:57] + "…"
        parts.append(f'<text x="10" y="{y}">{escape(finding.job)}  {escape(what)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y - 13}" width="{width:.1f}" height="16" fill="{colour}"/>')
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 16}" y2="{y + 6}" stroke="#222" stroke-width="2"/>')
        label = f"{value:.2f}" if finding.least_ratio is not None else f"{number(finding.ours)} {finding.unit}"
        parts.append(f'<text x="{_LEFT + _WIDTH + 12}" y="{y}">{escape(label)}</text>')
    return y + _LINE
