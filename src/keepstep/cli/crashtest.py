"""The command `crashtest`: kills a workflow at every relevant moment and reports the consequences."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import EXECUTOR, MODULE, Settings, command

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from ..testing.crashtests.findings import Finding
    from ..testing.crashtests.report import Report

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan"}


@command(
    "crashtest",
    short_help="Kill a workflow everywhere and check that it recovers.",
    epilog="An ARGUMENT is a JSON value or plain text, or name=value. Exit code 0 means crash-proof, 1 that problems "
    "were found.",
)
@click.argument("target", metavar="FILE.py:WORKFLOW|FILE.yaml")
@click.argument("words", nargs=-1, metavar="[ARGUMENT...]")
@MODULE
@click.option("--input", "text", metavar="JSON", help="The input as JSON, @file, or - for standard input.")
@click.option(
    "--signal",
    "signals",
    multiple=True,
    metavar="NAME[=JSON]",
    help="Send this signal once, when the run waits for NAME.",
)
@click.option("--ask", "questions", multiple=True, metavar="NAME[=JSON]", help="Like --signal, as a question.")
@click.option(
    "--complete",
    "completions",
    multiple=True,
    metavar="NAME[=JSON]",
    help="Complete the callback NAME once, when the run waits for it; =JSON without a NAME one that has none.",
)
@click.option("--set-up", metavar="NAME", help="A function of FILE.py or --module to call before each crash.")
@click.option("--each-life", metavar="NAME", help="A function of FILE.py or --module to call in each process.")
@click.option(
    "--file", "files", multiple=True, metavar="PATH", help="A file or folder that the workflow reads; it is copied."
)
@click.option("--ignore", multiple=True, metavar="TEXT", help="Allow effects whose name contains TEXT to be repeated.")
@click.option("--may-fail", is_flag=True, help="Accept a run that fails, if it fails alike after every crash.")
@click.option(
    "--at-most", default=500, show_default=True, type=click.IntRange(1), metavar="N", help="Maximum number of crashes."
)
@click.option(
    "--seed", default=0, show_default=True, metavar="N", help="Seed that selects the crashes if there are more."
)
@click.option(
    "--life-seconds",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Time after which a process counts as hanging.",
)
@click.option(
    "--jobs", type=click.IntRange(1), metavar="N", help="Processes at once.  [default: one for each processor]"
)
@EXECUTOR
@click.option("-v", "--verbose", is_flag=True, help="Show every crash.")
def crashtest(
    settings: Settings, *, target: str, words: tuple[str, ...], module: tuple[str, ...], text: str | None, **given: Any
) -> int:
    """Kill a workflow at every checkpoint, and report.

    The workflow runs once, then it is killed before and after every write and inside every step, and recovered each
    time. A body in another process dies alone, too; one for a cluster runs in a process here.

    The report says whether it ends the same, which steps ran again, which outside effects were doubled, and what to do
    about it. Everything runs in memory and in virtual time: a month's sleep takes no time. Breakpoints are resumed.
    Effects outside its folder are real, and repeated: use a sandbox.
    """
    from ..testing.crashtests.crashtest import Ask, Complete
    from ..testing.crashtests.crashtest import crashtest as test
    from .target import is_workflow_file, load_module, load_workflow, read_input, split

    workflow = load_workflow(target, modules=module, debug=settings.debug)
    args, kwargs = read_input(workflow, text, words)
    places = [one for one in module if not is_workflow_file(one)] if is_workflow_file(target) else [split(target)[0]]
    modules = [load_module(one, debug=settings.debug) for one in places]  # loaded already: this finds them
    answers = [_answer(one, "--signal") for one in given["signals"]]
    answers += [(name, Ask(payload)) for name, payload in (_answer(one, "--ask") for one in given["questions"])]
    completed = [_answer(one, "--complete", may_lack_name=True) for one in given["completions"]]
    answers += [(name, Complete(value)) for name, value in completed]
    report = test(
        workflow.bind(*args, **kwargs),
        answers=answers,
        set_up=_function(modules, given["set_up"], "--set-up"),
        each_life=_function(modules, given["each_life"], "--each-life"),
        files=given["files"],
        ignore=given["ignore"],
        may_fail=given["may_fail"],
        at_most=given["at_most"],
        seed=given["seed"],
        life_seconds=given["life_seconds"],
        jobs=given["jobs"],
        executor=given["executor"],
        progress=_progress(settings),
    )
    settings.answer(report.as_json(), lambda: "\n".join(_text(report, verbose=given["verbose"])))
    return errors.OK if report.ok else errors.FAILED


# -- input -------------------------------------------------------------------------------------------------------------


def _answer(text: str, option: str, *, may_lack_name: bool = False) -> tuple[str, Any]:
    from .target import read_json

    name, given, payload = text.partition("=")
    if not name and not (may_lack_name and given):
        raise errors.Refused(f"{option} {text!r} has no name", f"write {option} NAME=JSON")
    return name, read_json(payload, f"the payload of {option} {name}") if given else True


def _function(modules: list[ModuleType], name: str | None, option: str) -> Callable[[], Any] | None:
    if name is None:
        return None
    if not modules:
        raise errors.Refused(
            f"{option} {name}: a workflow file holds no functions", "add --module FILE.py, which has it"
        )
    there = next((module for module in modules if hasattr(module, name)), None)
    where = ", ".join(Path(one.__file__).name if one.__file__ else one.__name__ for one in modules)
    if there is None:
        known = [known for module in modules for known in vars(module)]
        raise errors.Refused(f"{option}: {where} has no function {name}{errors.nearest(name, known)}")
    found = getattr(there, name)
    if not callable(found):
        raise errors.Refused(f"{option}: {name} in {where} must be a function")
    return found  # type: ignore[no-any-return]


def _progress(settings: Settings) -> Callable[[int, int], None] | None:
    if settings.json or not sys.stderr.isatty():
        return None

    def tell(done: int, of: int) -> None:
        end = "\r" + " " * 40 + "\r" if done == of else ""
        click.echo(f"\rcrashed and recovered {done} of {of} times {end}", err=True, nl=False)

    return tell


# -- report ------------------------------------------------------------------------------------------------------------


def _text(report: Report, *, verbose: bool) -> Iterator[str]:
    from ..testing.crashtests.report import outcome_of, place_of
    from . import formatting

    if report.steps:
        heads = ("STEP", "CRASHES", "REPEATED", "DOUBLED", "EFFECTS")
        rows = [
            (
                formatting.one_line(s.name),
                str(s.crashes),
                str(s.repeated),
                _marked(s.doubled),
                formatting.one_line("; ".join(s.effects)) or "-",
            )
            for s in report.steps
        ]
        yield formatting.table(heads, rows)
        yield ""
    if verbose and report.crashes:
        crashes = [
            (
                formatting.one_line(place_of(crash)),
                click.style(outcome_of(crash), fg="green" if crash.ok else "red"),
                formatting.one_line(", ".join(crash.repeated)) or "-",
                formatting.one_line("; ".join(crash.doubled)) or "-",
            )
            for crash in report.crashes
        ]
        yield formatting.table(("THE PROCESS DIED", "OUTCOME", "REPEATED", "DOUBLED"), crashes)
        yield ""
    for finding, count in report.findings:
        yield from _finding(finding, count)
        yield ""
    yield click.style(formatting.printable(report.verdict), fg="green" if report.ok else "red", bold=True)


def _marked(number: int) -> str:
    return click.style(str(number), fg="red", bold=True) if number else "0"


def _finding(finding: Finding, count: int) -> Iterator[str]:
    from . import formatting

    name = click.style(finding.severity, fg=_COLOURS[finding.severity], bold=True)
    seen = (
        click.style(f" ({formatting.count(count, 'crash') if count == 1 else f'{count} crashes'})", dim=True)
        if count
        else ""
    )
    yield f"{name}: {formatting.printable(finding.message)}{seen}"
    if finding.line:
        yield f"  in {formatting.printable(_near(finding.line))}"
    if finding.advice:
        yield f"  {formatting.printable(finding.advice)}"


def _near(line: str) -> str:
    """Return a place in a file with the shortest path from here."""
    here = f"{Path.cwd()}/"
    return line.removeprefix(here)
