"""The command `validate`: everything that is wrong with workflows in YAML or JSON files, with file, line and column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import exits
from .frame import MODULE, Settings, command

if TYPE_CHECKING:
    from ..workflows.declarative import Checked
    from ..workflows.declarative_build import Names
    from ..workflows.shape import Problem

_COLOURS = {"error": "red", "warning": "yellow"}


@command("validate")
@click.argument("files", nargs=-1, metavar="FILE.yaml...")
@MODULE
@click.option("--strict", is_flag=True, help="Warnings make it fail too.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of these files, for editors and other tools.")
def validate(settings: Settings, *, files: tuple[str, ...], module: tuple[str, ...], strict: bool, schema: bool) -> int:
    """Check workflows in YAML or JSON files: every problem of every file, with its place and what to do.

    Nothing that a file names is imported; with --module it is also checked that the functions are there. Exit code 1
    if a file has an error.
    """
    from ..workflows import declarative

    if schema:
        click.echo(declarative.schema_text(), nl=False)
        return exits.OK
    if not files:
        raise exits.Refused("no file is named", "keepstep validate FILE.yaml...")
    results = declarative.check_all(files, names_in(module, debug=settings.debug))
    bad = [one for one in results if not one.ok or (strict and one.problems)]
    cache = declarative.cache_info()
    value = {
        "valid": not bad,
        "files": [_as_json(one) for one in results],
        "cache": {"hits": cache.hits, "misses": cache.misses},
    }
    settings.answer(value, lambda: _told(results, len(bad)))
    return exits.FAILED if bad else exits.OK


def names_in(modules: tuple[str, ...], *, debug: bool) -> Names | None:
    """What a file may name, from the modules that are given; None if there are none."""
    from ..workflows.declarative_build import Names
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


def _told(results: list[Checked], bad: int) -> str:
    from .words import printable

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
