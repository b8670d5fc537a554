"""Workflow files: `load` builds a graph or a dag from a YAML or JSON file, `check` lists the problems of one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import DefinitionError, InvalidGraph
from ...model.problem import Problem
from ..definition import Workflow
from ..shape import Shape
from .build import Builder, Names, checked_names, unknown_handler
from .check import CacheInfo, Examined, cache_info, examine, inside, shape_of
from .read import MAX_BYTES, Spot, Value
from .schema import problem, schema, schema_text

__all__ = [
    "CacheInfo",
    "Checked",
    "cache_info",
    "check",
    "check_all",
    "is_workflow_file",
    "load",
    "outline",
    "schema",
    "schema_text",
]

#: Suffixes of workflow files. Every other argument of a command is Python.
ENDINGS = (".yaml", ".yml", ".json")


def is_workflow_file(name: str) -> bool:
    """Whether a name is that of a workflow file."""
    return name.lower().endswith(ENDINGS)


def load(
    file: str | Path,
    *,
    modules: Iterable[Any] = (),
    functions: Mapping[str, Any] | None = None,
    agents: Mapping[str, Any] | None = None,
    workflows: Iterable[Workflow[..., Any] | str | Path] = (),
) -> Workflow[..., Any]:
    """Return the graph or dag of a YAML or JSON file. Raise `InvalidGraph` with all problems.

    A file refers to functions, agents and workflows by name; only those given here are found. `workflows` may name
    other files, which are loaded with the same functions and agents. Loading imports and executes nothing from a file.
    """
    given, by_name, minds = checked_names(modules, functions, agents)
    known: dict[str, Workflow[..., Any]] = {}
    for one in workflows:
        if isinstance(one, Workflow):
            known[one.name] = one
        else:
            child = _loaded(one, Names(given, by_name, minds, dict(known)))
            known[child.name] = child
    return _loaded(file, Names(given, by_name, minds, known))


def _loaded(file: str | Path, names: Names) -> Workflow[..., Any]:
    if not isinstance(file, str | Path):
        raise DefinitionError(f"a workflow's file is named by a path, not by {file!r:.60}")
    examined = _examined(Path(file))
    if not examined.ok:
        _refuse(file, examined.named(str(file)))
    builder = Builder(examined, names, str(file))
    workflow = builder.build()
    if workflow is None:
        _refuse(file, tuple(replace(one, file=str(file)) for one in builder.problems))
        raise AssertionError("a file without problems gives a workflow")
    return workflow


def _refuse(file: str | Path, problems: tuple[Problem, ...]) -> None:
    errors = [one for one in problems if one.severity == "error"]
    count = "1 error" if len(errors) == 1 else f"{len(errors)} errors"
    raise InvalidGraph("\n  ".join([f"{file} cannot be loaded; {count}:", *map(str, errors)]), problems)


# -- checking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of checking one file: its name, its form if known, and all its problems."""

    file: str
    form: str | None
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether it can be loaded. It may have warnings, but no errors."""
        return not any(one.severity == "error" for one in self.problems)


def check(file: str | Path, names: Names | None = None) -> Checked:
    """Return all problems of a file; with `names`, also names that are missing or do not fit."""
    examined = _examined(Path(file))
    found = list(examined.named(str(file)))
    if examined.value is not None and names is not None:
        builder = Builder(examined, names, str(file))
        missing = builder.check() if examined.ok else builder.check_names()
        found = [replace(one, file=str(file)) for one in missing] + found
    elif examined.ok:  # the module that registers the handler may just not be given
        found += [replace(one, file=str(file)) for one in unknown_handler(examined.value, "warning")]
    return Checked(str(file), examined.form if examined.value is not None else None, tuple(found))


def outline(file: str | Path) -> tuple[Shape | None, tuple[Problem, ...]]:
    """Return the shape of a file's workflow, as far as it can be read, and all problems of the file.

    Names are not looked up, so the workflow can be drawn where its functions are not installed.
    """
    examined = _examined(Path(file))
    steps = inside(examined.value, "steps")
    readable = steps is not None and isinstance(steps.data, dict) and any(map(_is_step, steps.data.values()))
    found = shape_of(examined.value, examined.form) if examined.value is not None and readable else None
    return found, examined.named(str(file))


def _is_step(value: Value) -> bool:
    return isinstance(value.data, dict)


def check_all(files: Iterable[str | Path], names: Names | None = None) -> list[Checked]:
    """Return the result of each file, in order; equal contents are examined once."""
    return [check(file, names) for file in files]


def _examined(path: Path) -> Examined:
    if not is_workflow_file(path.name):
        how = f"a workflow's file ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        return _unread("its name does not say what it is", how)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return _unread("it is not a file", "a pipe or a device cannot be read")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return _unread(f"it cannot be read: {error.strerror or error}", "")
    except ValueError as error:  # a name with a null character
        return _unread(f"it cannot be read: {error}", "")
    return examine(content, is_json=path.suffix.lower() == ".json")


def _unread(what: str, how: str) -> Examined:
    return Examined(None, "graph", (replace(problem("file", what, how, Spot()), line=0, column=0),))
