"""Plain data: conversion of a value to JSON types and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any

import msgspec

from ..model.tree import FrozenDict, FrozenList
from .kinds import BUILTIN_BY_NAME, BUILTIN_BY_TYPE, Kind, Refusal, is_text, long_int_text, type_name
from .known import KnownTypes

#: Maximum depth of nesting. Reading one level takes up to four of Python's roughly thousand stack frames.
MAX_DEPTH = 100
_MAX_JSON_DEPTH = 3 * MAX_DEPTH + 3

to_sorted_json: Callable[[Any], bytes] = msgspec.json.Encoder(order="deterministic").encode

_TEXT = frozenset((str,))
_FLOAT = frozenset((float,))
_LEAVES = frozenset((int, float, str))
_NONE = type(None)
#: Types that msgspec writes directly, except lone surrogates and very long integers, which the careful writer tags.
AS_IT_IS: frozenset[type] = frozenset((_NONE, bool, int, str))
_SURELY_AS_IT_IS: frozenset[type] = frozenset((_NONE, bool))


class Writer:
    """Converts a value to plain data; an unchanged part is passed on, not copied.

    The careful writer inspects every text and integer; the quick writer leaves that to msgspec. The canonical writer
    sorts pairs; the keys of objects are sorted when they are written.
    """

    __slots__ = ("_as_it_is", "_canonical", "_careful", "_known", "_of")

    def __init__(self, known: KnownTypes, *, careful: bool, canonical: bool) -> None:
        self._known = known
        self._careful = careful
        self._canonical = canonical
        self._as_it_is = _SURELY_AS_IT_IS if careful else AS_IT_IS
        self._of: dict[type, Callable[[Any, int], Any]] = {
            dict: self._of_dict,
            list: self._items,
            FrozenDict: self._of_dict,  # a part of a state is stored in its original form
            FrozenList: self._items,
            tuple: self._of_tuple,
            float: self._of_float,
            int: self._of_int,
            str: self._of_str,
            set: self._of_set,
            frozenset: self._of_set,
        }

    def plain(self, value: Any, depth: int = 0) -> Any:
        cls = type(value)
        if cls in self._as_it_is:
            return value
        if depth > MAX_DEPTH and cls not in _LEAVES:
            raise Refusal(f"is nested more than {MAX_DEPTH} deep, or contains itself")
        of = self._of.get(cls)
        return of(value, depth + 1) if of is not None else self._of_other(value, depth + 1)

    # Each of these methods receives the depth of the contained values.

    def _of_dict(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        if _TEXT.issuperset(map(type, value)) and "$" not in value and (not self._careful or all(map(is_text, value))):
            return value if self._as_it_is.issuperset(map(type, value.values())) else self._fields(value, depth)
        return {"$": "dict", "v": self._pairs(value, depth)}

    def _of_tuple(self, value: tuple[Any, ...], depth: int) -> dict[str, Any]:
        return {"$": "tuple", "v": self._items(value, depth)}

    def _of_float(self, value: float, _: int) -> Any:
        return value if isfinite(value) else {"$": "float", "v": str(value)}

    def _of_int(self, value: int, _: int) -> Any:
        text = long_int_text(value)
        return value if text is None else {"$": "int", "v": text}

    def _of_str(self, value: str, _: int) -> Any:
        return value if is_text(value) else {"$": "str", "v": BUILTIN_BY_TYPE[str].to(value)}

    def _of_set(self, value: set[Any] | frozenset[Any], depth: int) -> dict[str, Any]:
        return {"$": type(value).__name__, "v": sorted(self._items(list(value), depth), key=to_sorted_json)}

    def _of_other(self, value: Any, depth: int) -> dict[str, Any]:
        kind = self._known.of_type(type(value))
        if kind is None:
            raise Refusal(self._known.why_not(type(value)))
        stored, rest = _taken_apart(kind, value)
        stored = self._fields(stored, depth, attributes=True) if kind.record else self.plain(stored, depth)
        if rest:
            return {"$": kind.name, "v": stored, "more": self.plain(rest, depth)}
        return {"$": kind.name, "v": stored}

    def _fields(self, value: dict[str, Any], depth: int, *, attributes: bool = False) -> dict[str, Any]:
        as_it_is = self._as_it_is
        plain: dict[str, Any] = {}
        key = ""
        try:
            for key, item in value.items():
                plain[key] = item if type(item) in as_it_is else self.plain(item, depth)
        except Refusal as refusal:
            refusal.path.append(f".{key}" if attributes else item_path(key))
            raise
        return plain

    def _items(self, value: Sequence[Any], depth: int) -> Sequence[Any]:
        as_it_is = self._as_it_is
        if as_it_is.issuperset(map(type, value)):
            return value
        if _FLOAT.issuperset(map(type, value)) and all(map(isfinite, value)):
            return value
        plain: list[Any] = []
        try:
            for item in value:
                plain.append(item if type(item) in as_it_is else self.plain(item, depth))  # noqa: PERF401 - its length
        except Refusal as refusal:  # add the index of the item to the path
            refusal.path.append(f"[{len(plain)}]")
            raise
        return plain

    def _pairs(self, value: dict[Any, Any], depth: int) -> list[Any]:
        pairs: list[Any] = []
        key: Any = None
        try:
            for key, item in value.items():
                pairs.append((self.plain(key, depth), self.plain(item, depth)))
        except Refusal as refusal:
            refusal.path.append(item_path(key))
            raise
        if self._canonical:
            pairs.sort(key=to_sorted_json)
        return pairs


def item_path(key: Any) -> str:
    """Return the text of a key in the path to a part."""
    try:
        shown = repr(key)
    except Exception:  # noqa: BLE001 - repr() of a user's class or of a huge integer may fail
        shown = f"a {type(key).__name__}"
    return f"[{shown}]" if len(shown) <= _LONGEST_KEY else f"[{shown[:_LONGEST_KEY]}...]"


_LONGEST_KEY = 60


def _taken_apart(kind: Kind, value: Any) -> tuple[Any, dict[str, Any] | None]:
    try:
        return kind.to(value), kind.rest(value) if kind.rest is not None else None
    except (Refusal, RecursionError):
        raise
    except Exception as error:
        raise Refusal(f"is a {type_name(kind.cls)} that could not be taken apart: {error!r}") from error


class Reader:
    """Converts plain data to the value; the plain data is consumed."""

    __slots__ = ("_known",)

    def __init__(self, known: KnownTypes) -> None:
        self._known = known

    def value(self, plain: Any, depth: int = 0) -> Any:
        if depth > _MAX_JSON_DEPTH:
            raise Refusal("is nested too deeply")
        if type(plain) is dict:
            if "$" in plain:
                return self._untagged(plain, depth)
            parts: Iterable[tuple[Any, Any]] = plain.items()
        elif type(plain) is list:
            parts = enumerate(plain)
        else:
            return plain
        key: Any = None
        try:
            for key, part in parts:
                if type(part) is dict or type(part) is list:
                    plain[key] = self.value(part, depth + 1)
        except Refusal as refusal:
            refusal.path.append(item_path(key))
            raise
        return plain

    def _untagged(self, plain: dict[str, Any], depth: int) -> Any:
        name = plain["$"]
        kind = BUILTIN_BY_NAME.get(name) or self._known.named(name) if type(name) is str else None
        if kind is None:
            raise Refusal(f"was stored as {name!r}, which is not known here; annotate that type, or ks.register it")
        if "v" not in plain or len(plain) > (2 if kind.rest is None or "more" not in plain else 3):
            raise Refusal(f"is not a stored {name}: it has the keys {list(plain)}")
        stored = self.value(plain["v"], depth + 1)
        more = self.value(plain.get("more", {}), depth + 1) if kind.rest is not None else None
        return _put_together(kind, stored, more)


def _put_together(kind: Kind, stored: Any, more: Any) -> Any:
    try:
        return kind.back(stored) if kind.rest is None else kind.back(stored, more)
    except RecursionError:
        raise
    except Exception as error:
        raise Refusal(f"cannot be restored as {kind.name}: {error}") from error
