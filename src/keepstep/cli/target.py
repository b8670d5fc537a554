"""How a workflow is named on the command line, file.py:workflow or module:workflow, and how its input is written."""

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
from typing import Any

from ..workflows.definition import Workflow
from . import exits

_NAMED = re.compile(r"([^\W\d]\w*)=(.*)", re.DOTALL)
#: A traceback of the user's own code is shown from its last calls; the whole of it with --debug.
_LAST_CALLS = 6


# -- the workflow ------------------------------------------------------------------------------------------------------


def load_workflow(target: str, *, modules: Sequence[str] = (), debug: bool = False) -> Workflow[..., Any]:
    """The workflow that `file.py:workflow` or `module:workflow` names; without a name, the only one there.

    A declarative file is one, with functions from `modules`.
    """
    if is_workflow_file(target):
        return load_file(target, modules, debug=debug)
    if modules:
        raise exits.Refused("--module is for workflows in YAML or JSON files", f"{target} imports what it needs")
    where, name = split(target)
    module = load_module(where, debug=debug)
    there = workflows_in(module)
    if name:
        return _chosen(there, name, module, where)
    if len(there) == 1:
        return next(iter(there.values()))
    if not there:
        raise exits.Refused(f"{where} defines no workflow", "decorate a function with @keepstep.workflow")
    raise exits.Refused(f"{where} defines several workflows", f"name one: {', '.join(f'{where}:{n}' for n in there)}")


def is_workflow_file(target: str) -> bool:
    """Whether a target is a declarative file, not Python."""
    return target.lower().endswith((".yaml", ".yml", ".json"))


def load_file(target: str, modules: Sequence[str], *, debug: bool = False) -> Workflow[..., Any]:
    """The workflow of a declarative file, with functions, agents and workflows from modules that the user names.

    Among the modules may be other files of workflows, each after those that it runs as children.
    """
    from ..errors import InvalidGraph
    from ..workflows.declarative import load

    found = [load_module(one, debug=debug) for one in modules if not is_workflow_file(one)]
    children = [one for one in modules if is_workflow_file(one)]
    try:
        return load(target, modules=found, workflows=children)
    except InvalidGraph as error:
        title, *lines = str(error).splitlines()
        missing = not modules and "modules=" in str(error)
        told = [*(line.strip() for line in lines), *(["name what it uses with --module FILE.py"] if missing else [])]
        raise exits.Refused(title.rstrip(":"), "\n".join(told)) from None


def split(target: str) -> tuple[str, str]:
    """The file or module, and the name after the colon, if there is one."""
    where, colon, name = target.rpartition(":")
    if not colon or "/" in name or "\\" in name:
        return target, ""
    if not where or not name:
        raise exits.Refused(f"{target!r} names no workflow", "write file.py:workflow or module:workflow")
    return where, name


def workflows_in(module: ModuleType) -> dict[str, Workflow[..., Any]]:
    """The workflows that a module holds, by the names it has for them; what it imported comes last."""
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
        raise exits.Refused(f"{name} in {where} is {what}, not a workflow", known)
    known = f"there are: {', '.join(there)}" if there else "it defines no workflow"
    raise exits.Refused(f"{where} has no workflow {name!r}{exits.nearest(name, there)}", known)


def load_module(where: str, *, debug: bool = False) -> ModuleType:
    """Import a file or a module of the user; what goes wrong in it is shown as theirs."""
    is_file = where.endswith(".py") or "/" in where or "\\" in where
    path = Path(where)
    if is_file and not path.is_file():
        near = exits.nearest(path.name, [one.name for one in path.parent.glob("*.py")]) if path.parent.is_dir() else ""
        raise exits.Refused(f"there is no file {where}{near}")
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        with redirect_stdout(sys.stderr):  # what it prints is no part of our answer
            return _load_file(path) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if not is_file and error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            hint = f"a file is named with its ending: {where}.py" if Path(f"{where}.py").is_file() else ""
            raise exits.Refused(f"there is no module {where!r} here or on the Python path", hint) from None
        raise _their_error(error, where, debug=debug) from error
    except exits.Refused:
        raise
    except (Exception, SystemExit) as error:
        raise _their_error(error, where, debug=debug) from error


def _load_file(path: Path) -> ModuleType:
    name, full = path.stem, path.resolve()
    loaded = sys.modules.get(name)
    if loaded is not None:
        if getattr(loaded, "__file__", None) == str(full):
            return loaded
        raise exits.Refused(
            f"{path} cannot be loaded: a module named {name!r} is loaded already", "give the file another name"
        )
    spec = importlib.util.spec_from_file_location(name, full)
    if spec is None or spec.loader is None:
        raise exits.Refused(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _their_error(error: BaseException, where: str, *, debug: bool) -> exits.Refused:
    """The end of the traceback, without our own calls and those of the import machinery."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    kept = frames if debug else frames[-_LAST_CALLS:]
    lines = traceback.format_list(kept) + traceback.format_exception_only(error)
    return exits.Refused(f"{where} cannot be imported", "".join(lines).rstrip())


# -- its input ---------------------------------------------------------------------------------------------------------


def read_input(
    workflow: Workflow[..., Any], text: str | None, words: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a run, from --input or from words, made into the types that the workflow's signature names.

    An object given with --input holds arguments by name; any other JSON is the first argument. A word is a JSON value,
    or plain text; name=value gives an argument by its name.
    """
    if text is not None and words:
        raise exits.Refused("the input is given twice", "use --input or arguments after the workflow, not both")
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
        raise exits.Refused(
            f"workflow {workflow.name!r} cannot be started so: {error}", f"it takes {workflow.signature}"
        ) from None
    return _convert(workflow, args, kwargs)


def _from_words(workflow: Workflow[..., Any], words: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = list(workflow.signature.parameters)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in workflow.signature.parameters.values())
    hints = _hints(workflow)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word in words:
        named = _NAMED.fullmatch(word)
        if named is not None and (named[1] in names or takes_any):
            kwargs[named[1]] = _value(named[2], hints.get(named[1]))
        elif named is not None and (near := exits.nearest(named[1], names)):
            raise exits.Refused(
                f"workflow {workflow.name!r} has no parameter {named[1]!r}{near}",
                f"text that looks like name=value is given by name: {names[min(len(args), len(names) - 1)]}={word}",
            )
        else:
            hint = hints.get(names[len(args)]) if len(args) < len(names) else None
            args.append(_value(word, hint))
    return tuple(args), kwargs


def _value(word: str, hint: Any) -> Any:
    """A word of the command line: text where text is wanted, else JSON if it is, else text."""
    if hint is str:
        return word
    try:
        return json.loads(word)
    except (ValueError, RecursionError):
        return word


def _source(text: str) -> str:
    """The JSON itself, or what `-` (standard input) or `@file` holds."""
    if text == "-":
        return sys.stdin.read()
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise exits.Refused(f"the input file {text[1:]} cannot be read: {error}") from None
    return text


def read_json(text: str, what: str) -> Any:
    """A JSON value, or a sentence about what is wrong with it."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 10, 0) : error.pos + 10]
        quoted = shlex.quote(json.dumps(text, ensure_ascii=False))
        hint = f"text is written in quotes of its own, for JSON and for the shell: {quoted}" if _is_word(text) else ""
        raise exits.Refused(
            f"{what} is not JSON: {error.msg} at character {error.pos + 1}" + (f", near {near!r}" if near else ""), hint
        ) from None
    except (ValueError, RecursionError) as error:
        raise exits.Refused(f"{what} is not JSON: {error}") from None


def _is_word(text: str) -> bool:
    """Whether plain text may have been meant, not a list, an object or a number that went wrong."""
    return bool(text.strip()) and text.strip()[0] not in "{[\"'-0123456789"


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _hints(workflow: Workflow[..., Any]) -> dict[str, Any]:
    """The annotations of its parameters; from one that cannot be resolved nothing is learnt."""
    return {name: hint for name, hint in workflow.hints().items() if not isinstance(hint, str)}


def _convert(
    workflow: Workflow[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make each argument what its annotation says: a dataclass from an object, a date from text."""
    hints = _hints(workflow)
    parameters = workflow.signature.parameters
    hints = {name: hint for name, hint in hints.items() if name in parameters and _is_single(parameters[name])}
    names = [*parameters, *[""] * len(args)]

    def made(name: str, value: Any) -> Any:
        if name not in hints:
            return value
        try:
            return _converted(value, hints[name], f"argument {name!r} of {workflow.name!r}")
        except exits.Refused as refusal:
            named = _NAMED.fullmatch(value) if isinstance(value, str) else None
            unknown = f"it has no parameter {named[1]!r}; " if named is not None and named[1] not in parameters else ""
            raise exits.Refused(refusal.message, f"{unknown}it takes {workflow.signature}") from None

    by_place = tuple(made(name, value) for name, value in zip(names, args, strict=False))
    return by_place, {name: made(name, value) for name, value in kwargs.items()}


def _is_single(parameter: Any) -> bool:
    return parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _converted(value: Any, hint: Any, what: str) -> Any:
    import msgspec

    validate = getattr(hint, "model_validate", None)  # Pydantic's own way
    try:
        return validate(value) if validate is not None else msgspec.convert(value, hint)
    except ValueError as error:  # msgspec's and Pydantic's refusals are such
        raise exits.Refused(f"{what} is not right: {error}") from None
    except TypeError:
        return value  # a type that only the user's code understands
