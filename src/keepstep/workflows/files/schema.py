"""The schema of declarative files, and a validator that reports everything in a file that does not fit.

`schema.json` is the only source: editors use it, and files are validated against it. The validator supports the part of
JSON Schema that is used there, and reports the place, the path and the advice for each problem.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from ...model.problem import Problem
from .read import Spot, Value

#: Maximum number of characters of a value in a message.
_SHOWN = 60
#: Maximum number of known words to compare an unknown word with.
_COMPARED = 500
#: Maximum number of problems of a file that come with a suggestion. More would take long without helping.
SUGGESTIONS = 100

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (tuple,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}
_TYPE_NAMES = {
    "object": "a mapping",
    "array": "a list",
    "string": "a text",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
}


@cache
def schema_text() -> str:
    """Return the JSON Schema of declarative files as text."""
    return files(__package__).joinpath("schema.json").read_text(encoding="utf-8")


@cache
def schema() -> dict[str, Any]:
    """Return the JSON Schema of declarative files, parsed."""
    read: dict[str, Any] = json.loads(schema_text())
    return read


def part(name: str) -> dict[str, Any]:
    """Return a definition of the schema by its name."""
    found: dict[str, Any] = schema()["$defs"][name]
    return found


@cache
def kinds() -> tuple[str, ...]:
    """Return the kinds of steps that a file may contain."""
    return tuple(one["$ref"].rpartition("/")[2] for one in part("step")["oneOf"])


def problem(where: str, what: str, how: str, at: Spot) -> Problem:
    """Return an error with its place; the caller adds the name of the file."""
    return Problem("error", where or "file", what, how, line=at.line, column=at.column)


def misfits(value: Value, rule: dict[str, Any] | None = None, path: str = "") -> Iterator[Problem]:
    """Yield everything in a value that its rule does not allow, in the order of the file."""
    rule = _resolved(schema() if rule is None else rule)
    if "anyOf" in rule:
        yield from _any_of(value, rule, path)
        return
    wrong = _wrong(value, rule, path)
    if wrong is not None:
        yield wrong
        return
    if "oneOf" in rule:
        rule = _kind(value)
        if rule is None:
            kind = value.data["kind"]
            how = nearest(str(kind.data), kinds()) or f"there are: {', '.join(kinds())}"
            yield problem(f"{path}.kind", f"there is no kind {shown(kind.data)}", how, kind.at)
            return
    if isinstance(value.data, dict):
        yield from _mapping(value, rule, path)
    elif isinstance(value.data, tuple):
        yield from _list(value, rule, path)
    elif isinstance(value.data, str):
        yield from _text(value, rule, path)
    elif isinstance(value.data, int | float) and not isinstance(value.data, bool):
        yield from _number(value, rule, path)


def _wrong(value: Value, rule: dict[str, Any], path: str) -> Problem | None:
    """Return a mismatch that makes an inspection of the parts pointless."""
    if "const" in rule and not _same(value.data, rule["const"]):
        return problem(path, f"it must be {rule['const']!r}, not {shown(value.data)}", "", value.at)
    if "enum" in rule and not any(_same(value.data, one) for one in rule["enum"]):
        meant = nearest(str(value.data), [str(one) for one in rule["enum"]])
        return problem(path, f"it must be {_listed(rule['enum'])}, not {shown(value.data)}", meant, value.at)
    if "type" in rule and not _is(value.data, rule["type"]):
        return problem(path, f"it must be {_title(rule)}, not {shown(value.data)}", _quotes(value, rule), value.at)
    return None


def _resolved(rule: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in rule:
        rule = part(rule["$ref"].rpartition("/")[2])
    return rule


def _kind(value: Value) -> dict[str, Any] | None:
    """Return the rule for a step, by its kind."""
    kind = value.data.get("kind")
    if kind is None:
        return part("function")
    return part(kind.data) if isinstance(kind.data, str) and kind.data in kinds() else None


def _any_of(value: Value, rule: dict[str, Any], path: str) -> Iterator[Problem]:
    choices = [_resolved(one) for one in rule["anyOf"]]
    found = [list(misfits(value, one, path)) for one in choices]
    if not all(found):
        return
    near = [each for one, each in zip(choices, found, strict=True) if "type" in one and _is(value.data, one["type"])]
    if len(near) == 1 and isinstance(value.data, dict | tuple):
        yield from near[0]
    else:
        yield problem(path, f"it must be {_title(rule)}, not {shown(value.data)}", "", value.at)


def _mapping(value: Value, rule: dict[str, Any], path: str) -> Iterator[Problem]:
    known = rule.get("properties", {})
    more = rule.get("additionalProperties", True)
    for name in rule.get("required", ()):
        if name not in value.data:
            yield problem(path or name, f"{name!r} is missing", f"add {name}: …", value.at)
    if len(value.data) < rule.get("minProperties", 0):
        yield problem(path, "it is empty", "add at least one", value.at)
    for name, inner in value.data.items():
        inside = f"{path}.{name}" if path else name
        if "propertyNames" in rule:
            key = Value(name, inner.key, inner.key)
            yield from misfits(key, rule["propertyNames"], inside)
        if name in known:
            yield from misfits(inner, known[name], inside)
        elif more is False:
            yield problem(inside, f"there is no {shown(name)} here", _unknown(name, known), inner.key)
        elif isinstance(more, dict):
            yield from misfits(inner, more, inside)


def _unknown(name: str, known: Iterable[str]) -> str:
    meant = nearest(name, known)
    if meant:
        return meant
    if "kind" in known:
        owners = [kind for kind in kinds() if name in part(kind)["properties"]]
        if owners:
            return f"{name!r} belongs to steps of kind {', '.join(owners)}"
    return f"there are: {', '.join(known)}"


def _list(value: Value, rule: dict[str, Any], path: str) -> Iterator[Problem]:
    if len(value.data) < rule.get("minItems", 0):
        yield problem(path, "the list is empty", "name at least one", value.at)
    seen: dict[str, Value] = {}
    for number, item in enumerate(value.data):
        if rule.get("uniqueItems"):
            text = json.dumps(item.plain(), sort_keys=True)
            if text in seen:
                yield problem(f"{path}[{number}]", f"{shown(item.data)} is listed twice", "keep one of them", item.at)
            seen[text] = item
        if "items" in rule:
            yield from misfits(item, rule["items"], f"{path}[{number}]")


def _text(value: Value, rule: dict[str, Any], path: str) -> Iterator[Problem]:
    if len(value.data) > rule.get("maxLength", len(value.data)):
        what = f"the text has {len(value.data)} characters, and {rule['maxLength']} is the limit"
        yield problem(path, what, "shorten it", value.at)
    elif len(value.data) < rule.get("minLength", 0):
        yield problem(path, "the text is empty", f"write {_title(rule)}", value.at)
    elif "pattern" in rule and not _pattern(rule["pattern"]).search(value.data):
        yield problem(path, f"it must be {_title(rule)}, not {shown(value.data)}", "", value.at)


@cache
def _pattern(pattern: str) -> re.Pattern[str]:
    """Return the pattern as JSON Schema defines it, where $ matches only at the very end."""
    return re.compile(pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern)


def _number(value: Value, rule: dict[str, Any], path: str) -> Iterator[Problem]:
    least, above, most = rule.get("minimum"), rule.get("exclusiveMinimum"), rule.get("maximum")
    if least is not None and value.data < least:
        yield problem(path, f"it must be at least {least}, not {shown(value.data)}", "", value.at)
    if above is not None and value.data <= above:
        yield problem(path, f"it must be more than {above}, not {shown(value.data)}", "", value.at)
    if most is not None and value.data > most:
        yield problem(path, f"it must be at most {most}, not {shown(value.data)}", "", value.at)


# -- words -------------------------------------------------------------------------------------------------------------


def _is(data: Any, name: str) -> bool:
    if isinstance(data, bool):
        return name == "boolean"
    if name == "integer" and isinstance(data, float):
        return data.is_integer()
    return isinstance(data, _TYPES[name])


def _same(data: Any, wanted: Any) -> bool:
    return isinstance(data, bool) == isinstance(wanted, bool) and bool(data == wanted)


def _title(rule: dict[str, Any]) -> str:
    return str(rule.get("title") or _TYPE_NAMES.get(rule.get("type", ""), "something else"))


def _listed(choices: list[Any]) -> str:
    words = [str(one) for one in choices]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _quotes(value: Value, rule: dict[str, Any]) -> str:
    wanted = rule.get("type") == "string"
    plain = isinstance(value.data, bool | int | float)
    return f'write it in quotes: "{shown(value.data)}"' if wanted and plain else ""


def shown(data: Any) -> str:
    """Return a value as a message shows it."""
    if data is None:
        return "nothing"
    if isinstance(data, bool):
        return str(data).lower()
    if isinstance(data, dict):
        return "a mapping"
    if isinstance(data, tuple):
        return "a list"
    text = repr(data)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest a known word for an unknown one."""
    near = [one for one in known if abs(len(one) - len(word)) <= 3][:_COMPARED]
    found = difflib.get_close_matches(word, near, n=1, cutoff=0.6)
    return f"did you mean {found[0]!r}?" if found else ""
