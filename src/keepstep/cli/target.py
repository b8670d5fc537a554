"""Parsing of workflow names (file.py:workflow or module:workflow) and of their input on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..workflows.definition import Workflow
from . import errors

if TYPE_CHECKING:
    from ..workflows.schema import KeyType

_NAMED = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)
#: Calls shown of a traceback in the user's code. --debug shows all of them.
_LAST_CALLS = 6


# -- the workflow ------------------------------------------------------------------------------------------------------


def load_workflow(target: str, *, modules: Sequence[str] = (), debug: bool = False) -> Workflow[..., Any]:
    """Return the workflow that `file.py:workflow` or `module:workflow` names; without a name, the only one there.

    A declarative file is a workflow itself, with functions from `modules`.
    """
    if is_workflow_file(target):
        return load_file(target, modules, debug=debug)
    if modules:
        raise errors.Refused("--module is for workflows in YAML or JSON files", f"{target} imports what it needs")
    where, name = split(target)
    module = load_module(where, debug=debug)
    there = workflows_in(module)
    if name:
        return _chosen(there, name, module, where)
    if len(there) == 1:
        return next(iter(there.values()))
    if not there:
        raise errors.Refused(f"{where} defines no workflow", "decorate a function with @keepstep.workflow")
    raise errors.Refused(f"{where} defines several workflows", f"name one: {', '.join(f'{where}:{n}' for n in there)}")


def load_agents(target: str, *, debug: bool = False) -> list[Any]:
    """Return the agents and teams that `file.py` or `module` defines, or the one that a name after a colon names."""
    from ..errors import DefinitionError
    from ..kernel.perform import Team, given_agents
    from ..workflows.agent import Agent

    where, name = split(target)
    module = load_module(where, debug=debug)
    there = {key: value for key, value in vars(module).items() if isinstance(value, Agent | Team)}
    if not name:
        if not there:
            raise errors.Refused(f"{where} defines no agent", "make one with ks.Agent(...) or @ks.agent")
        found = given_agents(list(there.values()))
        return list({id(one): one for one in found}.values())
    if not hasattr(module, name):
        known = f"there are: {', '.join(there)}" if there else "it defines no agent"
        raise errors.Refused(f"{where} has no agent {name!r}{errors.nearest(name, there)}", known)
    try:
        return given_agents(getattr(module, name))
    except DefinitionError as error:
        raise errors.Refused(f"{name} in {where} cannot be hosted", str(error)) from None


def is_workflow_file(target: str) -> bool:
    """Whether a target is a declarative file instead of Python."""
    return target.lower().endswith((".yaml", ".yml", ".json"))


def load_file(target: str, modules: Sequence[str], *, debug: bool = False) -> Workflow[..., Any]:
    """Load the workflow of a declarative file, with functions, agents and workflows from the given modules.

    The modules may include other workflow files, each after those that it runs as children.
    """
    from ..errors import InvalidGraph
    from ..workflows.files.load import load

    found = [load_module(one, debug=debug) for one in modules if not is_workflow_file(one)]
    children = [one for one in modules if is_workflow_file(one)]
    try:
        return load(target, modules=found, workflows=children)
    except InvalidGraph as error:
        title, *lines = str(error).splitlines()
        missing = not modules and "modules=" in str(error)
        hints = [*(line.strip() for line in lines), *(["add its functions with --module FILE.py"] if missing else [])]
        raise errors.Refused(title.rstrip(":"), "\n".join(hints)) from None


def split(target: str) -> tuple[str, str]:
    """Split a target into the file or module, and the name after the colon."""
    where, colon, name = target.rpartition(":")
    if not colon or "/" in name or "\\" in name:
        return target, ""
    if not where or not name:
        raise errors.Refused(f"{target!r} names no workflow", "write file.py:workflow or module:workflow")
    return where, name


def workflows_in(module: ModuleType) -> dict[str, Workflow[..., Any]]:
    """Return the workflows of a module by their names there; imported ones come last."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, Workflow)}
    own = {name: value for name, value in found.items() if value.place.module == module.__name__}
    return own or found


def _chosen(there: dict[str, Workflow[..., Any]], name: str, module: ModuleType, where: str) -> Workflow[..., Any]:
    value = getattr(module, name, None)
    if isinstance(value, Workflow):
        return value
    for workflow in there.values():
        if workflow.name == name:
            return workflow
    if value is not None:
        what = "a step" if type(value).__name__ == "Step" else f"a {type(value).__name__}"
        known = f"its workflows: {', '.join(there)}" if there else "decorate a function with @keepstep.workflow"
        raise errors.Refused(f"{name} in {where} is {what}, not a workflow", known)
    known = f"there are: {', '.join(there)}" if there else "it defines no workflow"
    raise errors.Refused(f"{where} has no workflow {name!r}{errors.nearest(name, there)}", known)


def load_module(where: str, *, debug: bool = False) -> ModuleType:
    """Import a file or module of the user; its errors are shown as the user's own."""
    is_file = where.endswith(".py") or "/" in where or "\\" in where
    path = Path(where)
    if is_file and not path.is_file():
        near = errors.nearest(path.name, [one.name for one in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise errors.Refused(f"no file {where}{near}")
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):  # the module's prints are not part of the answer
            return _load_file(path) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            hint = f"a file is named with its ending: {where}.py" if Path(f"{where}.py").is_file() else ""
            raise errors.Refused(f"no module {where!r} here or on the Python path", hint) from None
        raise _their_error(error, where, debug=debug) from error
    except errors.Refused:
        raise
    except (Exception, SystemExit) as error:
        raise _their_error(error, where, debug=debug) from error


def _load_file(path: Path) -> ModuleType:
    name, full = path.stem, path.resolve()
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(full):
            return loaded
        raise errors.Refused(
            f"{path} cannot be loaded: a module named {name!r} is loaded already", "give the file another name"
        )
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise errors.Refused(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _their_error(error: BaseException, where: str, *, debug: bool) -> errors.Refused:
    """Return the end of the traceback, without Keepstep's calls and those of the import machinery."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    kept = frames if debug else frames[-_LAST_CALLS:]
    lines = traceback.format_list(kept) + traceback.format_exception_only(error)
    return errors.Refused(f"{where} cannot be imported", "".join(lines).rstrip())


# -- its input ---------------------------------------------------------------------------------------------------------


def read_input(
    workflow: Workflow[..., Any], text: str | None, words: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a run from --input or from words, converted to the types of the workflow's signature.

    An object given with --input holds arguments by name; any other JSON is the first argument. A word is a JSON value
    or plain text; name=value gives an argument by its name.
    """
    if text is not None and words:
        raise errors.Refused("the input is given twice", "use --input or arguments after the workflow, not both")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if text is not None:
        value = read_json(_source(text), "--input")
        if isinstance(value, dict):
            kwargs = value
        else:
            args = (value,)
    else:
        args, kwargs = _from_words(workflow, words)
    try:
        workflow.signature.bind(*args, **kwargs)
    except TypeError as error:
        named = filter(None, map(_NAMED.fullmatch, words))
        unknown = [f"it has no parameter {one[1]!r}; " for one in named if one[1] not in workflow.signature.parameters]
        raise errors.Refused(
            f"workflow {workflow.name!r} cannot be started with this input: {error}",
            f"{''.join(unknown[:1])}it takes {workflow.signature}",
        ) from None
    return _convert(workflow, args, kwargs)


def _from_words(workflow: Workflow[..., Any], words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = list(workflow.signature.parameters)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in workflow.signature.parameters.values())
    types = workflow.types
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        named = _NAMED.fullmatch(word)
        if named is not None and (named[1] in names or takes_any):
            kwargs[named[1]] = _value(named[2], types.hint_of(named[1]))
        elif named is not None and (near := errors.nearest(named[1], names)):
            raise errors.Refused(
                f"workflow {workflow.name!r} has no parameter {named[1]!r}{near}",
                f"give text that looks like name=value by name: {names[min(len(args), len(names) - 1)]}={word}",
            )
        else:
            args.append(_value(word, types.hint_of(types.name_at(len(args)))))
    return tuple(args), kwargs


def _value(word: str, expected: KeyType | None) -> Any:
    """Convert a word of the command line: text where text is expected, else JSON if it parses, else text."""
    if expected is not None and expected.hint is str:
        return word
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _source(text: str) -> str:
    """Return the JSON itself, or the contents of `-` (standard input) or `@file`."""
    if text == "-":
        return sys.stdin.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise errors.Refused(f"the input file {text[1:]} cannot be read: {error}") from None
    return text


def read_json(text: str, what: str) -> Any:
    """Parse a JSON value, or raise an error that describes the problem."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 10, 0) : error.pos + 10]
        quoted = shlex.quote(json.dumps(text, ensure_ascii=False))
        hint = f"quote text twice, for JSON and for the shell: {quoted}" if _is_word(text) else ""
        raise errors.Refused(
            f"{what} is not JSON: {error.msg} at character {error.pos + 1}" + (f", near {near!r}" if near else ""), hint
        ) from None
    except (ValueError, RecursionError) as error:
        raise errors.Refused(f"{what} is not JSON: {error}") from None


def _is_word(text: str) -> bool:
    """Whether plain text may have been meant, rather than a malformed list, object or number."""
    return bool(text.strip()) and text.strip()[0] not in "{[\"'-0123456789"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def with_names(workflow: Workflow[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return values of a graph's state in which members of enums stand in place of their names."""
    from ..workflows.graph import Graph
    from ..workflows.schema import with_members

    if not isinstance(workflow, Graph) or workflow.schema is None:
        return values
    return {key: with_members(value, workflow.schema.type_of(key)) for key, value in values.items()}


def _convert(
    workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert each argument to its annotation, as a start does; an enum may be given by the name of a member."""
    from ..errors import DefinitionError
    from ..workflows.schema import with_members

    types = workflow.types
    by_place = [with_members(value, types.hint_of(types.name_at(index))) for index, value in enumerate(args)]
    named = {name: with_members(value, types.hint_of(name)) for name, value in kwargs.items()}
    try:
        made, made_named = types.arguments(by_place, named)
    except DefinitionError as error:
        words = [_NAMED.fullmatch(value) for value in args if isinstance(value, str)]
        unknown = [one[1] for one in words if one is not None and one[1] not in workflow.signature.parameters]
        hint = "".join(f"it has no parameter {name!r}; " for name in unknown[:1])
        raise errors.Refused(str(error), f"{hint}it takes {workflow.signature}") from None
    return tuple(made), made_named
