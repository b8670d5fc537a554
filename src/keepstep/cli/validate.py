"""The command `validate`: reports every problem of workflows in YAML or JSON files, with file, line and column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import MODULE, Settings, command

if TYPE_CHECKING:
    from ..model.problem import Problem
    from ..workflows.files.build import Names
    from ..workflows.files.load import Checked

_COLOURS = {"error": "red", "warning": "yellow"}


@command("validate")
@click.argument("files", nargs=-1, metavar="FILE.yaml...")
@MODULE
@click.option("--strict", is_flag=True, help="Also fail on warnings.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of these files, for editors and other tools.")
def validate(settings: Settings, *, files: tuple[str, ...], module: tuple[str, ...], strict: bool, schema: bool) -> int:
    """Check workflows in YAML or JSON files: every problem of every file, with its place and its fix.

    Nothing that a file names is imported. With --module, the functions are checked too. Exit code 1 if a file has an
    error.
    """
    from ..workflows.files import load

    if schema:
        click.echo(load.schema_text(), nl=False)
        return errors.OK
    if not files:
        raise errors.Refused("no file given", "keepstep validate FILE.yaml...")
    results = load.check_all(files, names_in(module, debug=settings.debug))
    bad = [one for one in results if not one.ok or (strict and one.problems)]
    cache = load.cache_info()
    value = {
        "valid": not bad,
        "files": [_as_json(one) for one in results],
        "cache": {"hits": cache.hits, "misses": cache.misses},
    }
    settings.answer(value, lambda: _text(results, len(bad)))
    return errors.FAILED if bad else errors.OK


def names_in(modules: tuple[str, ...], *, debug: bool) -> Names | None:
    """Return the names that a file may use from the given modules, or None without modules."""
    from ..workflows.files.build import Names
    from .target import is_workflow_file, load_file, load_module

    if not modules:
        return None
    python = [one for one in modules if not is_workflow_file(one)]
    files: list[str] = []
    children = {}
    for one in modules:
        if is_workflow_file(one):
            child = load_file(one, [*python, *files], debug=debug)
            children[child.name] = child
            files.append(one)
    return Names(tuple(load_module(one, debug=debug) for one in python), workflows=children)


def _as_json(checked: Checked) -> dict[str, Any]:
    return {
        "file": checked.file,
        "valid": checked.ok,
        "form": checked.form,
        "problems": [_problem_as_json(one) for one in checked.problems],
    }


def _problem_as_json(problem: Problem) -> dict[str, Any]:
    return {
        "severity": problem.severity,
        "line": problem.line,
        "column": problem.column,
        "where": problem.where,
        "what": problem.what,
        "how": problem.how,
    }


def _text(results: list[Checked], bad: int) -> str:
    from .formatting import printable

    lines = []
    for one in results:
        for problem in one.problems:
            place = ":".join(str(part) for part in (problem.file, problem.line, problem.column) if part)
            word = click.style(problem.severity, fg=_COLOURS[problem.severity])
            lines.append(f"{printable(place)}: {word}: {printable(f'{problem.where}: {problem.what}')}")
            if problem.how:
                lines.append(f"    {printable(problem.how)}")
        if one.ok:
            lines.append(f"{printable(one.file)}: {click.style('valid', fg='green')} ({one.form})")
    if len(results) > 1:
        lines.append(f"{len(results)} files, {len(results) - bad} valid")
    return "\n".join(lines)
