"""Conditions in CEL, the Common Expression Language: compiled once, without side effects, and within limits.

An expression cannot call, import or change anything. The library limits its depth to 32 and its loops to 10,000 rounds;
the schema limits its length. An expression receives plain values, and only for the keys that it names, so the size of
the rest of a state does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any

from ...errors import DefinitionError

#: Maximum depth of a value in a condition. The library would run out of stack on a deeper one.
MAX_DEPTH = 100
#: The variable of a condition, in a graph and in a dag.
VARIABLES = {"graph": "state", "dag": "inputs"}

_PLAIN = (str, bytes, bool, int, float, type(None))
_POSITION = re.compile(r"<input>:(-?\d+):(-?\d+): (.*)")


class BadCondition(DefinitionError):
    """An expression that cannot be compiled; `how` is the advice for its author."""

    def __init__(self, what: str, how: str = "") -> None:
        super().__init__(what)
        self.what, self.how = what, how


@dataclass(frozen=True, slots=True)
class Condition:
    """A predicate written in CEL, identified by its text; `place` is its place in the file."""

    text: str
    variable: str = "state"
    place: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        compiled(self.text, self.variable)

    def __str__(self) -> str:
        return self.text

    @property
    def keys(self) -> frozenset[str] | None:
        """The keys that the condition reads; None if it may read any."""
        return compiled(self.text, self.variable).keys

    def __call__(self, state: Mapping[str, Any]) -> bool:
        found = compiled(self.text, self.variable)
        try:
            seen = _seen(state, found.keys, self.variable)
            answer = found.program.eval(data={self.variable: seen})
            kind, value = answer.type().name(), answer.value()
        except (RuntimeError, ValueError, _NotPlain) as error:
            raise self._failed(str(error)) from None
        if kind == "ERROR":
            raise self._failed(str(value))
        if not isinstance(value, bool):
            raise self._failed(f"it gives {value!r:.60}, not true or false")
        return value

    def _failed(self, why: str) -> DefinitionError:
        place = f"{self.place}: " if self.place else ""
        why = _in_words(re.sub(r"^[A-Z_]+: | \[[A-Z_]+\]$", "", why))
        missing = re.search(r"No such key|no such key|key not found|Key not found", why, re.IGNORECASE)
        how = f"; guard it with has({self.variable}.…) && …" if missing else ""
        if "cannot be applied to" in why:
            how = "; see what the steps before it give, or compare with int(…), double(…) or string(…) of it"
        return DefinitionError(f"{place}the condition `{self.text}` cannot be decided: {why}{how}")


@dataclass(frozen=True, slots=True)
class _Compiled:
    program: Any
    keys: frozenset[str] | None  # keys of the variable; None if any of them may be read


@lru_cache(maxsize=4096)
def compiled(text: str, variable: str) -> _Compiled:
    """Return the program of an expression, or raise `BadCondition`."""
    try:
        from cel_expr_python import cel  # noqa: PLC0415 - only an extra installs it
    except ImportError:
        raise BadCondition("conditions cannot be read here", "install keepstep[yaml]") from None
    try:
        program = _environment(variable).compile(text)
    except RuntimeError as error:
        raise BadCondition(*_explained(str(error), text, variable)) from None
    if program.return_type() not in (cel.Type.BOOL, cel.Type.DYN):
        gives = program.return_type().name().lower()
        raise BadCondition(f"it gives {gives}, not true or false", f"compare it: … == {variable}.…")
    return _Compiled(program, _keys(text, variable))


@lru_cache(maxsize=4)
def _environment(variable: str) -> Any:
    from cel_expr_python import cel  # noqa: PLC0415 - only an extra installs it

    return cel.NewEnv(variables={variable: cel.Type.DYN})


def _explained(message: str, text: str, variable: str) -> tuple[str, str]:
    """Return the library's message with the position in words and without its drawing."""
    found = _POSITION.findall(message)
    if not found:
        return re.sub(r"^[A-Z_]+: | \[[A-Z_]+\]$", "", message).splitlines()[0], "write it in a simpler way"
    line, column, what = found[0]
    what = _in_words(re.sub(r" \(in container '.*?'\)| expecting .*| \[[A-Z_]+\]$", "", what)[:300])
    where = f"line {line}, character {column} of it" if int(line) > 1 else f"character {column} of it"
    how = _INSTEAD if what.endswith("does not belong here") else ""
    unknown = re.search(r"undeclared reference to '(\w+)", what)
    if unknown is not None:
        how = _unknown(unknown[1], text, variable)
    return (f"{what}, at {where}" if int(column) > 0 else what), how


def _unknown(name: str, text: str, variable: str) -> str:
    """Return the advice for an unknown name."""
    if name in _OTHERWISE:
        return f"write {_OTHERWISE[name]}"
    if re.search(rf"\b{name}\s*\(", text):
        return "CEL has no such function; let a step find it out, and look at what it gives"
    return f"what a condition looks at is written {variable}.…, and a text in quotes"


def _in_words(message: str) -> str:
    """Rephrase the library's message about its grammar for the author of the condition."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    overload = _OVERLOAD.search(message)
    if overload is None:
        return message
    kinds = " and ".join(_KINDS.get(kind, kind) for kind in (overload[2] or "").split(", ") if kind)
    return f"'{overload[1].strip('_@')}' cannot be applied to {kinds or 'these values'}"


_INSTEAD = "CEL has ==, &&, || and ! for =, and, or and not"
_OTHERWISE = {"len": "size(…)", "None": "null", "nil": "null", "True": "true", "False": "false", "bool": "… == true"}
_WORDS = (
    (r"Syntax error: missing '(.+)' at '<EOF>'", r"'\1' is missing"),
    (r"Syntax error: (?:mismatched|extraneous) input '<EOF>'", "it ends where more must come"),
    (r"Syntax error: (?:mismatched|extraneous) input '(.+)'", r"'\1' does not belong here"),
    (r"Syntax error: token recognition error at: '(.+?)\s*'$", r"'\1' does not belong here"),
    (r"reserved identifier: (\w+)", r"'\1' does not belong here"),
    (r"Applying SELECT to non-message type", "a key is looked up in a value that is not a mapping"),
)
_OVERLOAD = re.compile(r"(?:overload for '|overloads found : )([^\s('\"]+)'?(?: applied to ')?(?:\((.*)\))?")
_KINDS = {
    **dict.fromkeys(("int", "int64", "uint", "uint64"), "a whole number"),
    "double": "a number",
    "string": "a text",
    "bool": "true or false",
    "list": "a list",
    "map": "a mapping",
    **dict.fromkeys(("null", "null_type"), "null"),
}


# -- keys and values ---------------------------------------------------------------------------------------------------


def _keys(text: str, variable: str) -> frozenset[str] | None:
    """Return the keys that an expression names; None if it also uses the whole. A key in quoted text is harmless."""
    key = r"[A-Za-z_]\w*+"
    named = rf"\b{variable}\s*(?:\.\s*({key})(?!\s*\()|\[\s*(?:'({key})'|\"({key})\")\s*\])"  # no call: state.all(…)
    if "//" in text or re.search(rf"\b{variable}\b", re.sub(named, "", text)):
        return None
    return frozenset(one for found in re.findall(named, text) for one in found if one)


class _NotPlain(Exception):
    pass


def _seen(state: Mapping[str, Any], keys: frozenset[str] | None, variable: str) -> dict[str, Any]:
    names = state if keys is None else (key for key in keys if key in state)
    return {name: _plain(state[name], f"{variable}.{name}", MAX_DEPTH) for name in names}


def _plain(value: Any, path: str, depth: int) -> Any:
    """Return the value in the types of the library."""
    if isinstance(value, _PLAIN):
        return value if type(value) in _PLAIN else _bare(value)
    if isinstance(value, datetime):
        return value.isoformat()  # timestamp(…) and duration(…) parse these texts for comparison
    if isinstance(value, timedelta):
        return f"{value.total_seconds()}s"
    if depth <= 0:
        raise _NotPlain(f"{path[:100]}… is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        return {_plain(key, path, 0): _plain(part, f"{path}.{key}", depth - 1) for key, part in value.items()}
    if isinstance(value, list | tuple | AbstractSet):
        return [_plain(part, f"{path}[{number}]", depth - 1) for number, part in enumerate(value)]
    raise _NotPlain(f"{path} is a {type(value).__name__}, which a condition cannot look at")


def _bare(value: Any) -> Any:
    """Return a value of a subclass, such as a text Enum, as its base type."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return bytes(value)
    return int(value) if isinstance(value, int) else float(value) if isinstance(value, float) else value
