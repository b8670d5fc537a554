"""Reads a YAML or JSON file into plain values with their places; nothing in the file is looked up or executed.

Of YAML, only the parser's events are used. Scalars are interpreted here, by the core schema of YAML 1.2: a file can
hold null, true and false, numbers, texts, lists and mappings of texts. Tags and merge keys are refused. An alias counts
as much as its target, so that a small file cannot expand into a large one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import DefinitionError

#: Maximum size of a file in bytes. The parser reads about 100 KB per second, and no hand-written workflow is larger.
MAX_BYTES = 1_000_000
#: Maximum number of values in a file; values repeated by an alias count again.
MAX_NODES = 100_000
#: Maximum depth of nested lists and mappings. The format itself needs nine.
MAX_DEPTH = 50
#: Maximum digits of a number. More would take long to convert.
MAX_DIGITS = 40

_TOO_DEEP = f"lists and mappings are nested more than {MAX_DEPTH} deep"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_UNREAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a file, counted from 1."""

    line: int = 1
    column: int = 1


@dataclass(frozen=True, slots=True)
class Value:
    """A value and its place; `key` is the place of its key, if it has one.

    `data` is None, a bool, an int, a float, a text, a tuple of values, or a dict of values by text.
    """

    data: Any
    at: Spot
    key: Spot

    def plain(self) -> Any:
        """Return the value without places, as a JSON parser would."""
        made: dict[int, Any] = {}
        for value in _inside_out(self):
            if isinstance(value.data, dict):
                made[id(value)] = {name: made[id(part)] for name, part in value.data.items()}
            elif isinstance(value.data, tuple):
                made[id(value)] = [made[id(part)] for part in value.data]
            else:
                made[id(value)] = value.data
        return made[id(self)]


def _inside_out(value: Value) -> Iterator[Value]:
    """Yield every value, its parts before itself."""
    todo = [(value, False)]
    while todo:
        one, opened = todo.pop()
        if opened or not isinstance(one.data, dict | tuple):
            yield one
            continue
        todo.append((one, True))
        parts = one.data.values() if isinstance(one.data, dict) else one.data
        todo.extend((part, False) for part in parts)


class Unreadable(DefinitionError):
    """A file cannot be read; `at` is the place, `how` the advice."""

    def __init__(self, what: str, at: Spot, how: str = "") -> None:
        super().__init__(what)
        self.what, self.at, self.how = what, at, how


def read(content: bytes, *, is_json: bool) -> tuple[Value, list[Unreadable]]:
    """Return the value of a file's content, and the invalid keys in it; or raise `Unreadable`."""
    text = _decoded(content)
    tree = _Tree()
    return tree.grow(_json_events(text) if is_json else _yaml_events(text)), tree.problems


def _decoded(content: bytes) -> str:
    if len(content) > MAX_BYTES:
        raise Unreadable(f"the file has {len(content):,} bytes; at most {MAX_BYTES:,} are read", Spot())
    try:
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        at = _spot(content[: error.start].decode("utf-8", "replace"), error.start)
        raise Unreadable("the file is not UTF-8 text", at, "save it as UTF-8") from None


def _spot(text: str, position: int) -> Spot:
    before = text[:position]
    return Spot(before.count("\n") + 1, len(before) - before.rfind("\n"))


Event = tuple[str, Any, int, int]

# -- JSON --------------------------------------------------------------------------------------------------------------

#: One part of a text that is known to be JSON: a quoted text, a bracket, or a number or word.
_JSON_PART = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]|[^\s\[\]{},:"]+')


def _json_events(text: str) -> Iterator[Event]:
    """Yield the parts of a JSON text: `{`, `[`, `end`, and `scalar` with its value; this needs no other package."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=str)  # converts no number before its check
    except json.JSONDecodeError as error:
        raise Unreadable(f"this is not JSON: {error.msg}", _spot(text, error.pos)) from None
    except RecursionError:
        raise Unreadable(_TOO_DEEP, Spot()) from None
    line, line_start, counted = 1, 0, 0
    for part in _JSON_PART.finditer(text):
        written, position = part[0], part.start()
        newlines = text.count("\n", counted, position)
        if newlines:
            line, line_start = line + newlines, text.rindex("\n", counted, position) + 1
        counted = position
        place = (line, position - line_start + 1)
        if written in "{[":
            yield (written, None, *place)
        elif written in "}]":
            yield ("end", None, *place)
        else:
            if written[0] != '"':
                _check_length(written, Spot(*place))
            yield ("scalar", json.loads(written), *place)


# -- YAML --------------------------------------------------------------------------------------------------------------


def _yaml_events(text: str) -> Iterator[Event]:
    """Yield the parts of a YAML text: `{`, `[`, `end`, `scalar` with its value, `alias` and `anchor` by name."""
    try:
        from ruamel.yaml import YAML  # noqa: PLC0415 - only installed with an extra
    except ImportError:
        raise Unreadable(
            "YAML cannot be read here", Spot(), "install keepstep[yaml], or write the file as JSON"
        ) from None
    from ruamel.yaml.error import MarkedYAMLError, YAMLError  # noqa: PLC0415 - only installed with an extra

    documents = 0
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            place = (event.start_mark.line + 1, event.start_mark.column + 1)
            kind = type(event).__name__
            if kind == "DocumentStartEvent":
                documents += 1
                if documents > 1:
                    raise Unreadable("the file holds a second document", Spot(*place), "write one workflow in a file")
                if event.version not in (None, (1, 2)):
                    raise Unreadable("only YAML 1.2 is read", Spot(*place), "remove the %YAML line")
            else:
                yield from _yaml_event(kind, event, place)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Spot(mark.line + 1, mark.column + 1) if mark is not None else Spot()
        message = ", ".join(str(part) for part in (error.context, error.problem) if part)
        how = "indent with spaces: YAML takes no tabs" if r"'\t'" in message else ""
        raise Unreadable(f"this is not YAML: {message}", at, how) from None
    except (YAMLError, ValueError, OverflowError, IndexError, RecursionError) as error:
        position = getattr(error, "position", 0)
        at = _spot(text, position) if isinstance(position, int) else Spot()
        raise Unreadable(f"this is not YAML: {str(error).splitlines()[0] if str(error) else error!r}", at) from None


def _yaml_event(kind: str, event: Any, at: tuple[int, int]) -> Iterator[Event]:
    if kind == "AliasEvent":
        yield ("alias", event.anchor, *at)
        return
    if kind in ("ScalarEvent", "MappingStartEvent", "SequenceStartEvent"):
        if event.tag is not None:
            raise Unreadable(f"the tag {event.tag!r:.100} is not allowed", Spot(*at), "a file holds plain values only")
        if event.anchor is not None:
            yield ("anchor", event.anchor, *at)
    if kind == "ScalarEvent":
        plain = event.style is None or event.style == ""
        yield ("scalar", _meant(event.value, Spot(*at)) if plain else event.value, *at)
    elif kind == "MappingStartEvent":
        yield ("{", None, *at)
    elif kind == "SequenceStartEvent":
        yield ("[", None, *at)
    elif kind in ("MappingEndEvent", "SequenceEndEvent"):
        yield ("end", None, *at)


def _meant(text: str, at: Spot) -> Any:
    """Return the meaning of a plain scalar in YAML 1.2: `yes` and `2026-01-01` are texts."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        _check_length(text, at)
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        _check_length(text, at)
        return float(text)
    if _UNREAL.fullmatch(text):
        raise Unreadable(f"{text} is not a number that can be stored", at, "write it in quotes if it is a text")
    return text


def _check_length(text: str, at: Spot) -> None:
    if len(text) > MAX_DIGITS:
        raise Unreadable(f"the number has {len(text)} digits; at most {MAX_DIGITS} are read", at)


# -- the tree ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Known:
    """The target of an anchor, its number of values, and its depth."""

    value: Value
    weight: int = 1
    height: int = 0


class _Tree:
    """Builds values from events, without recursion and within the limits."""

    def __init__(self) -> None:
        self.problems: list[Unreadable] = []
        self.anchors: dict[str, _Known | None] = {}
        self.count = 0

    def grow(self, events: Iterator[Event]) -> Value:
        stack: list[_Open] = []
        root: Value | None = None
        anchor = ""
        for kind, given, line, column in events:
            at = Spot(line, column)
            if kind == "anchor":
                anchor = given
                self.anchors[anchor] = None  # until it is complete
                continue
            if kind in ("{", "["):
                if stack and stack[-1].wants_key:
                    what = "a key must be a text, not a list or a mapping"
                    raise Unreadable(what, at, "write a text that begins with { or [ in quotes")
                stack.append(_Open(kind == "{", at, anchor, self.count))
                self._check_depth(len(stack), at)
                anchor = ""
                continue
            if kind == "end":
                done = stack.pop()
                at = done.at
                known, anchor = _Known(done.closed(), self.count - done.before + 1, done.height + 1), done.anchor
            elif kind == "alias":
                known = self._alias(given, at)
                self._check_depth(len(stack) + known.height, at)
                self.count += known.weight - 1
            else:
                known = _Known(Value(_checked(given, at), at, at))
            self._count(at)
            if anchor:
                self.anchors[anchor] = known
                anchor = ""
            if stack:
                stack[-1].add(known.value, at, self.problems)
                stack[-1].height = max(stack[-1].height, known.height)
            else:
                root = known.value
        if root is None:
            raise Unreadable("the file is empty", Spot(), "a workflow has keepstep: 1, metadata and steps")
        return root

    def _alias(self, name: str, at: Spot) -> _Known:
        if name not in self.anchors:
            raise Unreadable(f"nothing before this is called &{name:.100}", at)
        found = self.anchors[name]
        if found is None:
            raise Unreadable(f"*{name:.100} would hold itself", at)
        return found

    def _count(self, at: Spot) -> None:
        self.count += 1
        if self.count > MAX_NODES:
            raise Unreadable(f"the file holds more than {MAX_NODES:,} values, aliases counted in full", at)

    def _check_depth(self, depth: int, at: Spot) -> None:
        if depth > MAX_DEPTH:
            raise Unreadable(_TOO_DEEP, at)


class _Open:
    """A list or mapping that is not yet closed."""

    def __init__(self, is_mapping: bool, at: Spot, anchor: str, before: int) -> None:
        self.is_mapping, self.at, self.anchor, self.before = is_mapping, at, anchor, before
        self.height = 0
        self.items: list[Value] = []
        self.parts: dict[str, Value] = {}
        self.key: tuple[str, Spot] | None = None

    @property
    def wants_key(self) -> bool:
        return self.is_mapping and self.key is None

    def add(self, value: Value, at: Spot, problems: list[Unreadable]) -> None:
        if not self.is_mapping:
            self.items.append(value)
        elif self.key is None:
            self.key = (value.data if isinstance(value.data, str) else _named(value.data), at)
            problem = self._wrong(value.data, at)
            if problem is not None:
                problems.append(problem)
        else:
            name, key = self.key
            self.parts.setdefault(name, Value(value.data, at, key))
            self.key = None

    def _wrong(self, data: Any, at: Spot) -> Unreadable | None:
        if not isinstance(data, str):
            return Unreadable(f"a key must be a text, not {_named(data)}", at, "write it in quotes")
        if data == "<<":
            return Unreadable("merge keys (<<) are not part of YAML 1.2", at, "write out what should be merged")
        if data in self.parts:
            first = self.parts[data].key
            return Unreadable(f"{data!r:.100} is given twice, first in line {first.line}", at, "keep one of them")
        return None

    def closed(self) -> Value:
        return Value(self.parts if self.is_mapping else tuple(self.items), self.at, self.at)


def _checked(data: Any, at: Spot) -> Any:
    """Return a scalar; refuse one that cannot be stored."""
    if isinstance(data, float) and not math.isfinite(data):
        _refuse(f"{data!r} is not a number that can be stored", at)
    if isinstance(data, str):
        try:
            data.encode()
        except UnicodeEncodeError:
            _refuse("the text holds half of a character (a lone surrogate)", at)
    return data


def _refuse(what: str, at: Spot) -> NoReturn:
    raise Unreadable(what, at)


def _named(data: Any) -> str:
    if data is None:
        return "nothing"
    return f"{data!r:.40}" if not isinstance(data, bool) else str(data).lower()
