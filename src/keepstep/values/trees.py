"""Trees: user values as immutable plain data that shares unchanged parts with earlier data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from operator import is_
from typing import Any

import msgspec

from ..errors import NotSerializable
from ..model.tree import PLAIN, SHOWN, TAG, FrozenDict, FrozenList, frozen, thaw
from .codec import Values, refuse_long_integers
from .kinds import LONG_DIGITS, is_text
from .plain import AS_IT_IS, Writer

_to_json = msgspec.json.Encoder().encode
_from_json = msgspec.json.Decoder().decode
_MISSING = object()


class Trees:
    """Converts the values of a state to trees and back, with the types of a codec."""

    def __init__(self, values: Values, make: Callable[[Mapping[str, Any]], Any] | None = None) -> None:
        self._values = values
        #: Makes an instance of the schema's class of a state; None without such a class.
        self.make = make
        self._write = Writer(values.known, careful=False, canonical=False).plain

    def lift(
        self, values: Mapping[str, Any], old: Mapping[str, Any], where: str, *, careful: bool = False
    ) -> dict[str, Any]:
        """Return values by key as trees; parts in common with `old` stay shared. `where` names the owner for messages.

        The careful mode inspects every text and number for content that JSON cannot hold.
        """
        lifted: dict[str, Any] = {}
        for key, value in values.items():
            if type(key) is not str or key == TAG:
                raise NotSerializable(f"{where}: a key of a state is text other than {TAG!r}, not {key!r}")
            if careful and not is_text(key):
                raise NotSerializable(f"{where}: the key {key!r} holds half of a character, which cannot be stored")
            before = old.get(key, _MISSING)
            try:
                if careful and value is not before:
                    raise ValueError
                lifted[key] = self._lift(value, before, 0)
            except Exception:  # noqa: BLE001 - retried by the careful writer, which also names the part in its message
                lifted[key] = frozen(_from_json(self._values.encode(value, f"{where}: [{key!r}]")))
        return lifted

    def encode(self, delta: Mapping[str, Any]) -> bytes:
        """Return a delta of trees as JSON text; raise `ValueError` if a tree needs the careful mode."""
        data = _to_json(delta)
        if len(data) >= LONG_DIGITS:
            refuse_long_integers(data)
        return data

    def read(self, tree: Any, key: str) -> Any:
        """Return the value of a tree."""
        if type(tree) not in (FrozenDict, FrozenList) or tree.holds == PLAIN:
            return tree
        return self._values.decode(_to_json(thaw(tree)), f"state[{key!r}]")

    def _lift(self, value: Any, old: Any, depth: int) -> Any:
        cls = type(value)
        if cls in AS_IT_IS or (cls is float and isfinite(value)):
            return value
        if depth > _DEEPEST:
            raise RecursionError
        if (cls is FrozenDict or cls is FrozenList) and value.holds != SHOWN:
            return value  # already a tree
        if cls is list or cls is FrozenList:
            return self._lift_list(value, old, depth + 1)
        if (cls is dict or cls is FrozenDict) and TAG not in value and _TEXT.issuperset(map(type, value)):
            if AS_IT_IS.issuperset(map(type, value.values())):
                return FrozenDict(value)
            before = old if type(old) is FrozenDict else _NOTHING
            items = {key: self._lift(item, before.get(key), depth + 1) for key, item in value.items()}
            return FrozenDict(items, _holds(items.values()))
        return frozen(self._write(value))

    def _lift_list(self, value: list[Any], old: Any, depth: int) -> FrozenList:
        if type(old) is not FrozenList or old.holds != PLAIN:
            parts = [self._lift(item, None, depth) for item in value]
            return FrozenList(parts, _holds(parts))
        others = [number for number, is_same in enumerate(map(is_, value, old)) if not is_same]
        if not others and len(value) == len(old):
            return old
        parts = list(value)  # an item that is the same object as before is already a tree
        others.extend(range(len(old), len(value)))
        for number in others:
            parts[number] = self._lift(value[number], old[number] if number < len(old) else None, depth)
        return FrozenList(parts, _holds(parts[number] for number in others))


_DEEPEST = 120
_NOTHING: dict[str, Any] = {}


_TEXT = frozenset((str,))


def _holds(parts: Any) -> int:
    holds = PLAIN
    for part in parts:
        if (type(part) is FrozenDict or type(part) is FrozenList) and part.holds > holds:
            holds = part.holds
    return holds
