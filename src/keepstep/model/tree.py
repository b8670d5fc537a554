"""Immutable plain data, and the differences between two such values: the basis of a state.

A tree holds JSON types only. Consecutive states share their unchanged parts, so a change costs only its own size. A
delta is readable JSON: `set` and `removed` keys, `items` of a list by index, items `appended` to a list, and deltas
`within` a dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import copysign
from operator import is_
from typing import Any, NoReturn, SupportsIndex

#: Key under which the codec stores the type of a value that is not a JSON type.
TAG = "$"

#: Content of a part: only JSON types; tagged values, to be decoded before use; or values as users see them.
PLAIN, TAGGED, SHOWN = range(3)


def refuse_change(*_: Any, **__: Any) -> NoReturn:
    """Replace every method that would change a state in place."""
    raise TypeError("a state cannot be changed; return the change from the step, or use state.set(...)")


class FrozenDict(dict[str, Any]):
    """An immutable dictionary; `dict(...)` makes a mutable copy."""

    __slots__ = ("holds",)

    def __init__(self, items: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), holds: int = PLAIN) -> None:
        super().__init__(items)
        self.holds = holds

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = refuse_change

    def __copy__(self) -> FrozenDict:
        return self

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return thaw(self)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return dict, (thaw(self),)


class FrozenList(list[Any]):
    """An immutable list; `list(...)` makes a mutable copy."""

    __slots__ = ("holds",)

    def __init__(self, items: Iterable[Any] = (), holds: int = PLAIN) -> None:
        super().__init__(items)
        self.holds = holds

    __setitem__ = __delitem__ = append = extend = insert = pop = remove = clear = sort = reverse = refuse_change
    __iadd__ = __imul__ = refuse_change

    def __mul__(self, times: SupportsIndex) -> list[Any]:
        return list(self) * times

    def __copy__(self) -> FrozenList:
        return self

    def __deepcopy__(self, memo: Any) -> list[Any]:
        return thaw(self)  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        return list, (thaw(self),)


def frozen(value: Any) -> Any:
    """Return JSON data as a tree; a part that is already a tree is not copied."""
    cls = type(value)
    if cls is dict:
        items = {key: frozen(item) if type(item) in _CONTAINERS else item for key, item in value.items()}
        return FrozenDict(items, TAGGED if TAG in items else _holds(items.values()))
    if cls is list or cls is tuple:
        parts = [frozen(item) if type(item) in _CONTAINERS else item for item in value]
        return FrozenList(parts, _holds(parts))
    return value


_CONTAINERS = frozenset((dict, list, tuple))
_FROZEN = frozenset((FrozenDict, FrozenList))


def _holds(parts: Iterable[Any]) -> int:
    return TAGGED if any(type(part) in _FROZEN and part.holds for part in parts) else PLAIN


def thaw(value: Any) -> Any:
    """Return a mutable copy of a tree."""
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    if isinstance(value, list):
        return [thaw(item) for item in value]
    return value


# -- differences -------------------------------------------------------------------------------------------------------


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return the delta from one dictionary of trees to another; empty if they are equal.

    A delta keeps the order of the remaining keys and adds new keys after them. A nested dictionary whose keys change
    order is set as a whole; the order of the outermost keys is ignored.
    """
    delta: dict[str, Any] = {}
    for key, item in new.items():
        if key not in old:
            delta.setdefault("set", {})[key] = item
            continue
        before = old[key]
        if before is item:
            continue
        if _is_plain_dict(before) and _is_plain_dict(item):
            if not _in_order(before, item):
                delta.setdefault("set", {})[key] = item
                continue
            inner = diff(before, item)
            if inner:
                delta.setdefault("within", {})[key] = inner
        elif type(before) is FrozenList and type(item) is FrozenList:
            _diff_lists(delta, key, before, item)
        elif not same(before, item):
            delta.setdefault("set", {})[key] = item
    removed = [key for key in old if key not in new]
    if removed:
        delta["removed"] = removed
    return delta


def _diff_lists(delta: dict[str, Any], key: str, before: FrozenList, after: FrozenList) -> None:
    moved = _moved(before, after)
    if moved is None:
        delta.setdefault("set", {})[key] = after
        return
    if moved:
        delta.setdefault("items", {})[key] = moved
    if len(after) > len(before):
        delta.setdefault("appended", {})[key] = after[len(before) :]


def _in_order(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether the remaining keys come first, in their old order."""
    keys = [*new]
    if keys == [*old]:
        return True
    kept = [key for key in old if key in new]
    return keys[: len(kept)] == kept


def _is_plain_dict(value: Any) -> bool:
    return type(value) is FrozenDict and TAG not in value


def _moved(before: FrozenList, after: FrozenList) -> dict[str, Any] | None:
    """Return the changed items by index, or None if storing the whole list is smaller."""
    if len(after) < len(before):
        return None
    others = [number for number, is_same in enumerate(map(is_, before, after)) if not is_same]
    numbers = [number for number in others if not same(before[number], after[number])]
    if 2 * len(numbers) > len(before):
        return None
    return {str(number): after[number] for number in numbers}


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, including types and key order: 1 differs from True, 0.0 from -0.0."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is FrozenDict:
        return [*a] == [*b] and all(same(item, b[key]) for key, item in a.items())
    if type(a) is FrozenList:
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and (type(a) is not float or copysign(1.0, a) == copysign(1.0, b))


def patch(old: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the dictionary after a delta, sharing unchanged parts. Raise `ValueError` if the delta does not fit."""
    items = dict(old)
    try:
        for key in delta.get("removed", ()):
            del items[key]
        for key, value in delta.get("set", {}).items():
            items[key] = frozen(value)
        for key, moved in delta.get("items", {}).items():
            items[key] = _replaced(items[key], moved)
        for key, tail in delta.get("appended", {}).items():
            items[key] = _longer(items[key], tail)
        for key, inner in delta.get("within", {}).items():
            items[key] = _patched(items[key], inner)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"the change does not fit the state before it: {error!r}") from None
    return items


def _replaced(items: FrozenList, moved: Mapping[str, Any]) -> FrozenList:
    if type(items) is not FrozenList:
        raise TypeError(f"expected a list, found a {type(items).__name__}")
    new = {int(number): frozen(item) for number, item in moved.items()}
    changed = list(items)
    for number, item in new.items():
        changed[number] = item
    return FrozenList(changed, items.holds or _holds(new.values()))


def _longer(items: FrozenList, tail: Iterable[Any]) -> FrozenList:
    if type(items) is not FrozenList:
        raise TypeError(f"expected a list, found a {type(items).__name__}")
    new = [frozen(item) for item in tail]
    return FrozenList([*items, *new], items.holds or _holds(new))


def _patched(items: FrozenDict, delta: Mapping[str, Any]) -> FrozenDict:
    if type(items) is not FrozenDict:
        raise TypeError(f"expected a dictionary, found a {type(items).__name__}")
    changed = patch(items, delta)
    named = [changed[key] for part in ("set", "items", "appended", "within") for key in delta.get(part, ())]
    return FrozenDict(changed, items.holds or _holds(named))
