"""The command `doctor`: proves that every unfinished run can go on, or reports those that cannot and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from . import errors
from .settings import Settings, command, shown_url

if TYPE_CHECKING:
    from ..care.doctor import Report
    from ..engine.engine import Engine
    from ..model import WorkerInfo

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@command("doctor")
@click.option(
    "--stale",
    type=click.FloatRange(0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="MINUTES",
    help="Report driven runs without a new record for this long.",
)
@click.option("--deep", is_flag=True, help="Also verify the records of every run, finished ones too.")
@click.option("--strict", is_flag=True, help="Also fail on warnings.")
def doctor(settings: Settings, *, stale: float, deep: bool, strict: bool) -> int:
    """Examine the store, its workers and every unfinished run.

    Exit code 1 if a promise is broken: a run that can never go on, a damaged record, a store that cannot be written.
    """
    from ..care.doctor import Severity, examine
    from ..views import plain

    async def look(engine: Engine) -> tuple[Report, str]:
        return await examine(engine, stale_seconds=stale * 60, deep=deep), shown_url(engine.store)

    report, url = settings.talk(look)
    bad = not report.healthy or (strict and any(one.severity is Severity.WARNING for one in report.findings))
    value = {**plain.report_data(report), "healthy": not bad}
    for finding in value["findings"]:
        finding["advice"] = errors.advice(finding["advice"])
    settings.answer(value, lambda: _text(report, url, bad=bad))
    return errors.FAILED if bad else errors.OK


def _known(worker: WorkerInfo) -> list[str]:
    return [f"{name} (version {worker.pins[name]})" if name in worker.pins else name for name in worker.known]


def _text(report: Report, url: str, *, bad: bool) -> str:
    from . import formatting

    counts = ", ".join(f"{count} {status.value}" for status, count in sorted(report.runs.items()))
    lines = [f"store    {url}", f"runs     {counts or 'no unfinished runs'}"]
    alive = [one for one in report.workers if one.alive]
    for one in alive:
        knows = f", knows {', '.join(_known(one))}" if one.known else ""
        drains = "" if one.claims else ", drains"
        lines.append(f"worker   {formatting.worker_name(one)} drives {one.leases}{drains}{formatting.one_line(knows)}")
    if not alive:
        lines.append("workers  none alive")
    for finding in report.findings:
        name = click.style(finding.severity.value, fg=_COLOURS[finding.severity.value], bold=True)
        lines += ["", f"{name}: {formatting.printable(finding.message)}"]
        if finding.advice:
            lines.append(f"  {errors.advice(finding.advice)}")
    if not report.findings:
        end = "all is well: every unfinished run is driven, due, paused, or holds a wake-up"
        lines += ["", click.style(end, fg="green")]
    elif not bad:
        lines += ["", "no promise is broken, but see the warnings above"]
    return "\n".join(lines)
