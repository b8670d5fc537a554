"""Workflows as files: `load` makes a graph or a dag of a YAML or JSON file, `check` tells what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import DefinitionError, InvalidGraph
from .declarative_build import Builder, Names, checked_names
from .declarative_check import CacheInfo, Examined, cache_info, examine, inside, shape_of
from .declarative_read import MAX_BYTES, Spot, Value
from .declarative_schema import problem, schema, schema_text
from .definition import Workflow
from .shape import Problem, Shape

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

#: What a workflow's file is called; everything else that a command is given is Python.
ENDINGS = (".yaml", ".yml", ".json")


def is_workflow_file(name: str) -> bool:
    """Whether a name is that of a declarative file."""
    return name.lower().endswith(ENDINGS)


def load(
    file: str | Path,
    *,
    modules: Iterable[Any] = (),
    functions: Mapping[str, Any] | None = None,
    agents: Mapping[str, Any] | None = None,
    workflows: Iterable[Workflow[..., Any] | str | Path] = (),
) -> Workflow[..., Any]:
    """The graph or dag that a YAML or JSON file describes; `InvalidGraph` lists everything that is wrong with it.

    A file names functions, agents and workflows; only those given here are found. `workflows` may name other files,
    which are loaded with the same functions and agents. Loading imports nothing and executes nothing of a file.
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
    """What came of checking one file: its name, its form if it can be told, and all its problems."""

    file: str
    form: str | None
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether it can be loaded: it may have warnings, but no errors."""
        return not any(one.severity == "error" for one in self.problems)


def check(file: str | Path, names: Names | None = None) -> Checked:
    """Everything that is wrong with a file; with `names`, also whether what it names is there and fits."""
    examined = _examined(Path(file))
    found = list(examined.named(str(file)))
    if examined.ok and names is not None:
        missing = Builder(examined, names, str(file)).check()
        found = [replace(one, file=str(file)) for one in missing] + found
    return Checked(str(file), examined.form if examined.value is not None else None, tuple(found))


def outline(file: str | Path) -> tuple[Shape | None, tuple[Problem, ...]]:
    """The shape of what a file describes, as far as that can be read, and everything that is wrong with the file.

    Nothing that it names is looked for, so that it can be drawn where its functions are not.
    """
    examined = _examined(Path(file))
    steps = inside(examined.value, "steps")
    readable = steps is not None and isinstance(steps.data, dict) and any(map(_is_step, steps.data.values()))
    found = shape_of(examined.value, examined.form) if examined.value is not None and readable else None
    return found, examined.named(str(file))


def _is_step(value: Value) -> bool:
    return isinstance(value.data, dict)


def check_all(files: Iterable[str | Path], names: Names | None = None) -> list[Checked]:
    """The result of each file, in the order given; the same content is examined once."""
    return [check(file, names) for file in files]


def _examined(path: Path) -> Examined:
    if not is_workflow_file(path.name):
        how = f"a workflow's file ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}"
        return _unread("its name does not say what it is", how)
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return _unread("it is no file", "a pipe or a device cannot be read")
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        return _unread(f"it cannot be read: {error.strerror or error}", "")
    except ValueError as error:  # a name with a null character
        return _unread(f"it cannot be read: {error}", "")
    return examine(content, is_json=path.suffix.lower() == ".json")


def _unread(what: str, how: str) -> Examined:
    return Examined(None, "graph", (replace(problem("file", what, how, Spot()), line=0, column=0),))
