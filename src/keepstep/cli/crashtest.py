"""The command `crashtest`: kills a workflow at every moment that counts, and tells what came of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import exits
from .frame import Settings, command

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ..testing.findings import Finding
    from ..testing.report import Report

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@command(
    "crashtest",
    short_help="Kill a workflow everywhere, and see whether it recovers.",
    epilog="An ARGUMENT is a JSON value or plain text, or name=value. Exit code 0 means crash-proof, 1 that something "
    "was found.",
)
@click.argument("target", metavar="FILE.py:WORKFLOW")
@click.argument("words", nargs=-1, metavar="[ARGUMENT...]")
@click.option("--input", "text", metavar="JSON", help="The input as JSON, @file, or - for standard input.")
@click.option("--signal", "signals", multiple=True, metavar="NAME[=JSON]", help="Sent once, when it waits for NAME.")
@click.option("--ask", "questions", multiple=True, metavar="NAME[=JSON]", help="As --signal, as a question.")
@click.option("--set-up", metavar="NAME", help="A function of FILE.py to call before each crash.")
@click.option("--each-life", metavar="NAME", help="A function of FILE.py to call in each process.")
@click.option("--file", "files", multiple=True, metavar="PATH", help="A file or folder that it reads: copied for it.")
@click.option("--ignore", multiple=True, metavar="TEXT", help="An effect that may be repeated, by a part of its name.")
@click.option("--may-fail", is_flag=True, help="The run may fail, if it fails the same after every crash.")
@click.option("--at-most", default=500, show_default=True, type=click.IntRange(1), metavar="N", help="So many crashes.")
@click.option("--seed", default=0, show_default=True, metavar="N", help="Which crashes, if there could be more.")
@click.option(
    "--life-seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="A process that goes on for longer hangs.",
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Processes at once.  [default: one for each processor]"
)
@click.option("--html", metavar="FILE", help="Write the report as a page.")
@click.option("--junit", metavar="FILE", help="Write the report as JUnit's XML.")
@click.option("-v", "--verbose", is_flag=True, help="Show every crash.")
def crashtest(settings: Settings, *, target: str, words: tuple[str, ...], text: str | None, **given: Any) -> int:
    """Kill a workflow at every checkpoint, and report.

    It is run, then killed before and after every write and inside every step, and recovered each time.

    Does it end the same? Which steps ran again, which effects on the outside world were doubled, and what to do about
    it? It runs in memory and in virtual time: a month's sleep takes no time. What it does outside its folder it really
    does, again and again: give it a sandbox.
    """
    from ..testing.crashtests import Ask
    from ..testing.crashtests import crashtest as test
    from .target import load_module, load_workflow, read_input, split

    for name in ("html", "junit"):
        _check_writable(given[name])
    workflow = load_workflow(target, debug=settings.debug)
    args, kwargs = read_input(workflow, text, words)
    module = load_module(split(target)[0], debug=settings.debug)
    answers = [_answer(one, "--signal") for one in given["signals"]]
    answers += [(name, Ask(payload)) for name, payload in (_answer(one, "--ask") for one in given["questions"])]
    report = test(
        workflow.bind(*args, **kwargs),
        answers=answers,
        set_up=_function(module, given["set_up"], "--set-up"),
        each_life=_function(module, given["each_life"], "--each-life"),
        files=given["files"],
        ignore=given["ignore"],
        may_fail=given["may_fail"],
        at_most=given["at_most"],
        seed=given["seed"],
        life_seconds=given["life_seconds"],
        jobs=given["jobs"],
        progress=_progress(settings),
    )
    _write(report, given["html"], given["junit"])
    settings.answer(report.as_json(), lambda: "\n".join(_told(report, verbose=given["verbose"])))
    return exits.OK if report.ok else exits.FAILED


# -- what it is given --------------------------------------------------------------------------------------------------


def _answer(text: str, option: str) -> tuple[str, Any]:
    from .target import read_json

    name, given, payload = text.partition("=")
    if not name:
        raise exits.Refused(f"{option} {text!r} has no name", f"write {option} NAME=JSON")
    return name, read_json(payload, f"the payload of {option} {name}") if given else True


def _function(module: ModuleType, name: str | None, option: str) -> Callable[[], Any] | None:
    if name is None:
        return None
    found = getattr(module, name, None)
    if not callable(found):
        where = Path(module.__file__).name if module.__file__ else module.__name__
        if hasattr(module, name):
            raise exits.Refused(f"{option}: {name} in {where} is not a function")
        raise exits.Refused(f"{option}: there is no function {name} in {where}{exits.nearest(name, vars(module))}")
    return found  # type: ignore[no-any-return]


def _check_writable(name: str | None) -> None:
    """Say that a report cannot be written before minutes were spent on it."""
    if name is None:
        return
    try:
        with Path(name).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise exits.Refused(f"the report {name} cannot be written: {error.strerror}") from None


def _write(report: Report, html: str | None, junit: str | None) -> None:
    from ..testing.pages import as_html, as_junit

    for name, made in ((html, as_html), (junit, as_junit)):
        if name is not None:
            Path(name).write_text(made(report), encoding="utf-8", errors="replace")


def _progress(settings: Settings) -> Callable[[int, int], None] | None:
    if settings.json or not sys.stderr.isatty():
        return None

    def tell(done: int, of: int) -> None:
        end = "\r" + " " * 40 + "\r" if done == of else ""
        click.echo(f"\rcrashed and recovered {done} of {of} times {end}", err=True, nl=False)

    return tell


# -- what it tells -----------------------------------------------------------------------------------------------------


def _told(report: Report, *, verbose: bool) -> Iterator[str]:
    from ..testing.pages import outcome_of, place_of
    from . import words

    if report.steps:
        heads = ("STEP", "CRASHES", "REPEATED", "DOUBLED", "EFFECTS")
        rows = [
            (
                words.one_line(s.name),
                str(s.crashes),
                str(s.repeated),
                _marked(s.doubled),
                words.one_line("; ".join(s.effects)) or "-",
            )
            for s in report.steps
        ]
        yield words.table(heads, rows)
        yield ""
    if verbose and report.crashes:
        crashes = [
            (
                words.one_line(place_of(crash)),
                click.style(outcome_of(crash), fg="green" if crash.ok else "red"),
                words.one_line(", ".join(crash.repeated)) or "-",
                words.one_line("; ".join(crash.doubled)) or "-",
            )
            for crash in report.crashes
        ]
        yield words.table(("THE PROCESS DIED", "OUTCOME", "REPEATED", "DOUBLED"), crashes)
        yield ""
    for finding, count in report.findings:
        yield from _finding(finding, count)
        yield ""
    yield click.style(words.printable(report.verdict), fg="green" if report.ok else "red", bold=True)


def _marked(number: int) -> str:
    return click.style(str(number), fg="red", bold=True) if number else "0"


def _finding(finding: Finding, count: int) -> Iterator[str]:
    from . import words

    name = click.style(finding.severity, fg=_COLOURS[finding.severity], bold=True)
    seen = (
        click.style(f" ({words.count(count, 'crash') if count == 1 else f'{count} crashes'})", dim=True)
        if count
        else ""
    )
    yield f"{name}: {words.printable(finding.message)}{seen}"
    if finding.line:
        yield f"  in {words.printable(_near(finding.line))}"
    if finding.advice:
        yield f"  {words.printable(finding.advice)}"


def _near(line: str) -> str:
    """A place in a file, as briefly as it can be named from here."""
    here = f"{Path.cwd()}/"
    return line.removeprefix(here)
