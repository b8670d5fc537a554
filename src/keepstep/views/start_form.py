"""The input of a workflow as a form: its parameters with kinds, defaults and help, and texts checked field by field."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import EnumType
from pathlib import Path
from shlex import quote
from typing import Any

import msgspec

from ..checks import check_name
from ..errors import DefinitionError, KeepstepError
from ..values import Values
from ..values.classes import is_pydantic
from ..workflows.definition import Workflow
from ..workflows.graph import Graph
from ..workflows.options import LONGEST_SECONDS, check_options, checked_tags
from ..workflows.schema import Schema, as_written, with_members
from .plain import value_of

#: Choices of a parameter that a form offers; one with more takes text.
MOST_CHOICES = 200
#: Fields of a class that the help of a parameter lists.
MOST_FIELDS = 50

_TEXT, _WHOLE, _NUMBER, _YES, _CHOICE, _JSON, _ANY = "text", "integer", "number", "boolean", "choice", "json", "any"
#: Kinds of field for types that JSON holds as text, each with an example of the text.
_AS_TEXT: dict[Any, tuple[str, str]] = {
    date: ("date", "2026-01-31"),
    datetime: (_TEXT, "2026-01-31T12:00:00Z"),
    time: (_TEXT, "12:00:00"),
    timedelta: (_TEXT, "PT1H30M, an hour and a half"),
    Decimal: (_TEXT, "12.50"),
    Path: (_TEXT, "data/input.csv"),
    bytes: (_TEXT, "aGVsbG8=, in base64"),
}
_KINDS: dict[Any, str] = {str: _TEXT, int: _WHOLE, float: _NUMBER, bool: _YES}
_MISSING: Any = object()
_Way = inspect.Parameter


class Unfit(DefinitionError):
    """Texts of a form that do not fit: `fields` has the problem of each, under `""` one of the whole."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {problem}" if name else problem for name, problem in fields.items()))
        self.fields = dict(fields)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One field of a form. `kind` is text, integer, number, boolean, choice, date, json or any.

    `default` is the text that a form shows; `choices` are pairs of the text that is sent and the label. `fields` are
    those of the class that JSON describes: name, type, and what it says about itself.
    """

    name: str
    kind: str
    type: str
    required: bool
    default: str = ""
    example: str = ""
    about: str = ""
    choices: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, str, str], ...] = ()
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter, and how a value reaches the workflow."""

    shown: Parameter
    hint: Any
    way: Any = _Way.KEYWORD_ONLY
    default: Any = field(default=_MISSING)


def parameters_of(workflow: Workflow[..., Any]) -> list[Parameter]:
    """Return the fields of the form that starts a workflow."""
    return [slot.shown for slot in _slots(workflow)]


def arguments_of(workflow: Workflow[..., Any], texts: Mapping[str, str]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that the texts of a form give; raise `Unfit` with the problem of each field.

    A text that is left out, or equal to the shown default, leaves the argument to its default.
    """
    slots = _slots(workflow)
    wrong: dict[str, str] = {}
    given: dict[str, Any] = {}
    for name in texts.keys() - {slot.shown.name for slot in slots}:
        wrong[name] = f"workflow {workflow.name!r} has no such parameter"
    for slot in slots:
        name = slot.shown.name
        text = texts.get(name, "")
        if name not in texts or text == slot.shown.default and not slot.shown.required:  # noqa: RUF021 - as it reads
            if slot.shown.required:
                wrong[name] = "this is required"
            continue
        try:
            given[name] = _value(slot, text)
        except (ValueError, KeepstepError, RecursionError) as error:
            wrong[name] = _problem(error, name)
    if wrong:
        raise Unfit(wrong)
    args, kwargs = _placed(slots, given)
    try:
        workflow.check_arguments(tuple(args), kwargs)
    except DefinitionError as error:
        raise Unfit({"": str(error)}) from None
    return args, kwargs


def texts_of(workflow: Workflow[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, str]:
    """Return the texts of a form for arguments as plain data, for example those of an earlier run."""
    slots = _slots(workflow)
    by_place = [slot for slot in slots if slot.way in (_Way.POSITIONAL_ONLY, _Way.POSITIONAL_OR_KEYWORD)]
    found = {slot.shown.name: value for slot, value in zip(by_place, args, strict=False)}
    if isinstance(workflow, Graph) and args and isinstance(args[0], dict):
        found = dict(args[0])
    found |= kwargs
    return {slot.shown.name: _as_text(slot, found[slot.shown.name]) for slot in slots if slot.shown.name in found}


def started_by(
    workflow: Workflow[..., Any], texts: Mapping[str, str], given: Mapping[str, str]
) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Return arguments by place and by name, and the options of a start; raise `Unfit` with every problem."""
    wrong: dict[str, str] = {}
    options: dict[str, Any] = {}
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for name, text in given.items():
        if not text.strip():
            continue
        try:
            options[name] = _OPTIONS[name](text.strip())
        except (ValueError, KeepstepError) as error:
            wrong[name] = str(error)
    try:
        args, kwargs = arguments_of(workflow, texts)
    except Unfit as error:
        wrong |= error.fields
    if wrong:
        raise Unfit(wrong)
    return args, kwargs, options


def _as_name(text: str) -> str:
    return check_name(text, "this")


def _as_priority(text: str) -> int:
    try:
        found = int(text)
    except ValueError:
        raise ValueError(f"it must be a whole number, got {text[:50]!r}") from None
    check_options("default", found, 0)
    return found


def _as_seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        raise ValueError(f"it must be a number of seconds, got {text[:50]!r}") from None
    if not 0 <= found < LONGEST_SECONDS:
        raise ValueError(f"it must be from 0 to below {LONGEST_SECONDS:,.0f} seconds, got {text[:50]!r}")
    return found


def _as_tags(text: str) -> dict[str, str]:
    tags = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals:
            raise ValueError(f"a tag has the form NAME=VALUE, got {line[:50]!r}")
        tags[name.strip()] = value.strip()
    return checked_tags(tags)


#: The options of a start that a form has, and how the text of each is read.
_OPTIONS: dict[str, Callable[[str], Any]] = {
    "run_id": str,
    "queue": _as_name,
    "priority": _as_priority,
    "delay": _as_seconds,
    "deadline": _as_seconds,
    "key": _as_name,
    "dedupe": _as_name,
    "tags": _as_tags,
}
OPTIONS = tuple(_OPTIONS)


def command_of(workflow: Workflow[..., Any], texts: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """Return the command line that starts the same run; its input holds what the texts say, as plain JSON."""
    plain = {}
    for slot in _slots(workflow):
        name, text = slot.shown.name, texts.get(slot.shown.name, "")
        if name in texts and (slot.shown.required or text != slot.shown.default):
            try:
                plain[name] = _read(slot, text)
            except (ValueError, RecursionError):
                plain[name] = text
    place = workflow.place
    target = f"{Path(place.file).name}:{place.name}" if place.file.endswith(".py") else Path(place.file).name
    words = ["keepstep", "start", quote(target)]
    for name, value in options.items():
        if name == "tags":
            words += [f"--tag {quote(f'{tag}={text}')}" for tag, text in value.items()]
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words.append(f"--{'id' if name == 'run_id' else name} {quote(text)}")
    words += [f"--input {quote(json.dumps(plain, ensure_ascii=False))}"] if plain else []
    return " ".join(words)


# -- the fields --------------------------------------------------------------------------------------------------------


def _slots(workflow: Workflow[..., Any]) -> list[_Slot]:
    if isinstance(workflow, Graph):
        return _of_graph(workflow)
    hints = workflow.hints()
    found = []
    for one in workflow.signature.parameters.values():
        hint, default = hints.get(one.name, one.annotation), one.default
        if one.kind is one.VAR_POSITIONAL:
            hint, default = (list if hint is one.empty else types.GenericAlias(list, (hint,))), []
        elif one.kind is one.VAR_KEYWORD:
            hint, default = (dict if hint is one.empty else types.GenericAlias(dict, (str, hint))), {}
        hint = Any if hint is one.empty else hint
        default = _MISSING if default is one.empty else default
        found.append(_Slot(_parameter(workflow, one.name, hint, default), hint, one.kind, default))
    return found


def _of_graph(graph: Graph) -> list[_Slot]:
    """Return the keys of a graph's first state; without a schema, the state as one object."""
    schema: Schema | None = graph.schema
    if schema is None:
        shown = _parameter(graph, "state", dict, {})
        return [_Slot(shown, dict, _Way.POSITIONAL_ONLY, {})]
    found = []
    for key in schema.keys:
        kind = schema.type_of(key)
        hint = Any if kind is None else kind.hint
        default = _MISSING if key in schema.required else schema.default_of(key, None)
        shown = _parameter(graph, key, hint, default)
        found.append(_Slot(shown, hint, default=default))
    return found


def _parameter(workflow: Workflow[..., Any], name: str, hint: Any, default: Any) -> Parameter:
    kind, example, choices, plain, nullable, about = _kind_of(hint)
    shown = "" if default is _MISSING else _default_text(workflow.values, default, kind, choices)
    fields: tuple[tuple[str, str, str], ...] = ()
    if kind == _JSON:
        schema = _schema_of(plain)
        fields = tuple(_fields_of(schema))
        about = about or schema.get("description", "")
        example = json.dumps(_skeleton(schema, schema), ensure_ascii=False, indent=2)
    return Parameter(
        name=name,
        kind=kind,
        type=_type_text(hint),
        required=default is _MISSING,
        default=shown,
        example=example,
        about=about.strip(),
        choices=choices,
        fields=fields,
        nullable=nullable,
    )


def _kind_of(hint: Any) -> tuple[str, str, tuple[tuple[str, str], ...], Any, bool, str]:
    """Return a hint's kind of field, an example of its text, its choices, its bare type, and what it says."""
    about, nullable = "", False
    while True:
        if typing.get_origin(hint) is typing.Annotated:
            about = about or next((text for one in hint.__metadata__ if (text := _description(one))), "")
            hint = hint.__origin__
            continue
        inner = [one for one in typing.get_args(hint) if one is not type(None)]
        if typing.get_origin(hint) in (typing.Union, types.UnionType) and len(inner) == 1:
            hint, nullable = inner[0], True
            continue
        break
    if typing.get_origin(hint) is typing.Literal:
        choices = tuple((json.dumps(one), str(one)) for one in typing.get_args(hint))
        return _choice(choices, hint, about, nullable=nullable)
    if isinstance(hint, EnumType):
        choices = tuple((json.dumps(_member_text(one)), str(one.name)) for one in hint)  # type: ignore[var-annotated]
        return _choice(choices, hint, about, nullable=nullable)
    if hint is bool and nullable:
        return _choice((("true", "yes"), ("false", "no")), hint, about, nullable=True)
    if hint in _AS_TEXT:
        kind, example = _AS_TEXT[hint]
        return kind, example, (), hint, nullable, about
    if hint in _KINDS:
        return _KINDS[hint], "", (), hint, nullable, about
    if hint in (Any, object) or isinstance(hint, str):
        return _ANY, "JSON, or plain text", (), hint, nullable, about
    return _JSON, "", (), hint, nullable, about


def _choice(
    choices: tuple[tuple[str, str], ...], hint: Any, about: str, *, nullable: bool
) -> tuple[str, str, tuple[tuple[str, str], ...], Any, bool, str]:
    if len(choices) > MOST_CHOICES:
        return _ANY, "JSON, or plain text", (), hint, nullable, about
    return _CHOICE, "", (*choices, *([("null", "none")] if nullable else [])), hint, nullable, about


def _member_text(member: Any) -> Any:
    """Return a member of an enum as a person may write it: its value if that is simple, otherwise its name."""
    return member.value if isinstance(member.value, str | int) else member.name


def _description(mark: Any) -> str:
    """Return what a mark of an annotation says about it, as `msgspec.Meta` and the fields of Pydantic do."""
    if isinstance(mark, str):
        return mark
    found = getattr(mark, "description", None)
    return found if isinstance(found, str) else ""


def _default_text(values: Values, default: Any, kind: str, choices: tuple[tuple[str, str], ...]) -> str:
    if kind == _CHOICE:
        for text, label in choices:
            if default is None and text == "null" or label == getattr(default, "name", str(default)):  # noqa: RUF021
                return text
    try:
        plain = value_of(values.encode(default, "the default"))
    except KeepstepError:
        return ""
    return _text_for(plain, kind)


def _text_for(plain: Any, kind: str) -> str:
    if plain is None:
        return "null" if kind == _CHOICE else ""
    if kind == _YES:
        return "true" if plain else "false"
    if kind in (_JSON, _CHOICE) or (kind == _ANY and not isinstance(plain, str)):
        return json.dumps(plain, ensure_ascii=False, indent=2 if kind == _JSON and plain else None)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _as_text(slot: _Slot, plain: Any) -> str:
    return _text_for(plain, slot.shown.kind)


#: Modules in front of the names of an annotation, but not in texts of a literal.
_MODULES = re.compile(r"(?<![\w'\"])(?:\w+\.|<locals>\.)+(?=\w)")


def _type_text(hint: Any) -> str:
    """Return an annotation as people write it, without modules and marks."""
    if typing.get_origin(hint) is typing.Annotated:
        return _type_text(hint.__origin__)
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    text = _MODULES.sub("", str(hint))
    return text.replace("NoneType", "None")[:200]


# -- the schema of classes ---------------------------------------------------------------------------------------------


def _schema_of(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type; empty if it has none."""
    try:
        if is_pydantic(hint):
            return dict(hint.model_json_schema())
        found = msgspec.json.schema(hint, schema_hook=_of_others)
    except Exception:  # noqa: BLE001 - a class of the program may refuse in any way
        return {}
    name = found.get("$ref", "").rpartition("/")[2]
    return {**found, **found["$defs"][name]} if name and name in found.get("$defs", {}) else dict(found)


def _of_others(cls: type) -> dict[str, Any]:
    return dict(cls.model_json_schema()) if is_pydantic(cls) else {}  # type: ignore[attr-defined]


def _resolved(part: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(part.get("$ref", "")).rpartition("/")[2]
    found: Mapping[str, Any] = whole.get("$defs", {}).get(name, part) if name else part
    return found


def _fields_of(schema: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Yield the fields of an object: name, type and description, those of the items for a list of objects."""
    if "properties" not in schema and isinstance(schema.get("items"), dict):
        schema = {**_resolved(schema["items"], schema), "$defs": schema.get("$defs", {})}
    required = schema.get("required", ())
    for name, part in list(schema.get("properties", {}).items())[:MOST_FIELDS]:
        whole = _resolved(part, schema)
        words = _kind_text(part, schema) + ("" if name in required else ", optional")
        yield name, words, str(part.get("description") or whole.get("description") or "")


def _kind_text(part: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    found = _resolved(part, whole)
    if "enum" in found:
        return "one of " + ", ".join(json.dumps(one, ensure_ascii=False) for one in found["enum"][:20])
    if "anyOf" in found:
        return " or ".join(_kind_text(one, whole) for one in found["anyOf"])
    kind = str(found.get("format") or found.get("type") or found.get("title") or "any value")
    if kind == "array" and isinstance(found.get("items"), dict):
        return f"list of {_kind_text(found['items'], whole)}"
    return found.get("title", "object") if kind == "object" else kind


#: Values that stand for a type in the skeleton of an object.
_EMPTY = {"string": "", "integer": 0, "number": 0.0, "boolean": False, "array": [], "object": {}, "null": None}
#: Depth to which the skeleton of an object is written out, because classes may contain themselves.
_DEEPEST = 4


def _skeleton(part: Mapping[str, Any], whole: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value of the form that a schema describes, with empty parts, to type over."""
    part = _resolved(part, whole)
    if "default" in part:
        return part["default"]
    if part.get("enum"):
        return part["enum"][0]
    if part.get("anyOf"):
        return _skeleton(part["anyOf"][0], whole, depth)
    kind = part.get("type", "object" if "properties" in part else "null")
    if kind == "object" and depth < _DEEPEST:
        return {name: _skeleton(one, whole, depth + 1) for name, one in part.get("properties", {}).items()}
    if kind == "array" and isinstance(part.get("items"), dict) and depth < _DEEPEST:
        inner = _resolved(part["items"], whole)
        return [_skeleton(inner, whole, depth + 1)] if "properties" in inner else []
    return _EMPTY.get(str(kind))


# -- reading texts -----------------------------------------------------------------------------------------------------


def _read(slot: _Slot, text: str) -> Any:
    """Return the plain value that a text stands for, or raise `ValueError`."""
    shown = slot.shown
    if shown.nullable and text.strip() in ("", "null"):
        return None
    if shown.kind == _CHOICE and text not in [one for one, _ in shown.choices]:
        raise ValueError(f"it must be one of {', '.join(label for _, label in shown.choices)}")
    if shown.kind not in _READ:
        return text
    read, expected = _READ[shown.kind]
    try:
        return read(text)
    except ValueError as error:
        why = f": {error}" if shown.kind == _JSON else f", got {text[:50]!r}"
        raise ValueError(f"it must be {expected}{why}") from None


def _true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


#: How the text of each kind is read, and what it must be; the text of other kinds is the value.
_READ: dict[str, tuple[Callable[[str], Any], str]] = {
    _WHOLE: (int, "a whole number"),
    _NUMBER: (float, "a number"),
    _YES: (_true_or_false, "true or false"),
    _CHOICE: (json.loads, "one of the choices"),
    _JSON: (json.loads, "JSON"),
    _ANY: (_json_or_text, "JSON or text"),
}


def _value(slot: _Slot, text: str) -> Any:
    plain = _read(slot, text)
    hint = slot.hint
    return plain if hint is Any else as_written(with_members(plain, hint), hint, _WHERE)


#: Begins the messages of values that do not fit; the form shows them beside their field.
_WHERE = "it"


def _problem(error: BaseException, name: str) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split()) or f"{name} does not fit"


def _placed(slots: list[_Slot], given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the values as arguments by place and by name."""
    kwargs: dict[str, Any] = {}
    rest: list[Any] = next(
        (given[one.shown.name] for one in slots if one.way is _Way.VAR_POSITIONAL and one.shown.name in given), []
    )
    ways = {_Way.POSITIONAL_ONLY, *([_Way.POSITIONAL_OR_KEYWORD] if rest else [])}
    by_place = [one for one in slots if one.way in ways]
    last = max((place for place, one in enumerate(by_place) if rest or one.shown.name in given), default=-1)
    args = [given.get(one.shown.name, one.default) for one in by_place[: last + 1]] + rest
    for one in slots:
        name = one.shown.name
        if name not in given or one.way is _Way.VAR_POSITIONAL or one in by_place:
            continue
        if one.way is _Way.VAR_KEYWORD:
            kwargs |= given[name]
        else:
            kwargs[name] = given[name]
    return args, kwargs
