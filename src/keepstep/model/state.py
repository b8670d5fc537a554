"""The state of a graph: an immutable mapping that knows which run and checkpoint it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import Any
from uuid import UUID

from .tree import PLAIN, SHOWN, TAG, TAGGED, FrozenDict, FrozenList, refuse_change, thaw

_JSON = frozenset((type(None), bool, int, str))
_IMMUTABLE = frozenset((bytes, complex, range, Decimal, UUID, datetime, date, time, timedelta))


class _Copied:
    """A mutable value; every reader receives its own copy."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class State(Mapping[str, Any]):
    """An immutable mapping that a graph passes from step to step, with its provenance.

    A value is read by its key, or as an attribute: `state["score"]`, `state.score`. Attributes that are not keys come
    from the class of the graph's schema.

    `set`, `merge` and `without` return a new state; `run_id`, `checkpoint_step` and `timestamp` remain those of the
    checkpoint that the state is based on. Before the first step, `timestamp` is when the run was created. Only the
    values that a step returns are stored.
    """

    __slots__ = ("_data", "_make", "_read", "_seen", "checkpoint_step", "run_id", "timestamp")

    def __init__(self, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        self._data: dict[str, Any] = {}
        self._seen: dict[str, Any] = {}
        self._read: Callable[[Any, str], Any] | None = None
        self._make: Callable[[State], Any] | None = None
        self.run_id: str | None = None
        self.checkpoint_step: str | None = None
        self.timestamp: datetime | None = None
        if isinstance(values, State):
            self._data, self._read, self._seen = values._parts()  # noqa: SLF001 - its own kind
            self._make = values._make
            self.run_id, self.checkpoint_step, self.timestamp = values.provenance
            values = None
        given = {**(values or {}), **more}
        if given:
            self._data, self._seen = {**self._data, **_kept(given)}, {}

    def _parts(self) -> tuple[dict[str, Any], Callable[[Any, str], Any] | None, dict[str, Any]]:
        return self._data, self._read, self._seen

    @property
    def provenance(self) -> tuple[str | None, str | None, datetime | None]:
        """The run, the checkpoint and the time that the state is based on."""
        return self.run_id, self.checkpoint_step, self.timestamp

    @classmethod
    def of(
        cls,
        trees: dict[str, Any],
        read: Callable[[Any, str], Any],
        provenance: tuple[str | None, str | None, datetime | None] = (None, None, None),
        make: Callable[[State], Any] | None = None,
    ) -> State:
        """Return the state of some trees; `read` gives the value of a tree that holds tagged values.

        `make` returns the state as an instance of the schema's class.
        """
        state = cls.__new__(cls)
        state._data, state._read, state._seen, state._make = trees, read, {}, make  # noqa: SLF001 - its own kind
        state.run_id, state.checkpoint_step, state.timestamp = provenance
        return state

    def __getitem__(self, key: str) -> Any:
        value = self._data[key]
        cls = type(value)
        if cls is _Copied:
            return deepcopy(value.value)
        if (cls is FrozenDict or cls is FrozenList) and value.holds == TAGGED and self._read is not None:
            return self._shown(key, value)
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of Python's own protocols
            raise AttributeError(name)
        if name in self._data:
            return self[name]
        if self._make is not None:
            return getattr(self._make(self), name)
        there = ", ".join(map(str, self._data)) or "none"
        raise AttributeError(f"the state has no key {name!r}; it has {there}")

    def _shown(self, key: str, tree: Any) -> Any:
        seen = self._seen.get(key)
        if seen is None and key not in self._seen:
            value = self._read(tree, key) if self._read is not None else tree
            seen = _kept_one(value)
            if type(seen) is _Copied:
                return value  # freshly built, so it needs no copy
            self._seen[key] = seen
        return seen

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __contains__(self, key: object) -> bool:
        return key in self._data

    def __repr__(self) -> str:
        return f"State({dict(self)!r})"

    def __setitem__(self, key: str, value: Any) -> None:
        refuse_change()

    __delitem__ = __ior__ = refuse_change

    def __deepcopy__(self, memo: Any) -> State:
        return self

    def __reduce__(self) -> Any:
        return State, (thaw(dict(self)),)

    def set(self, *pair: Any, **values: Any) -> State:
        """Return the state with some values set: `state.set("score", 1)` or `state.set(score=1, text="…")`."""
        if pair:
            key, value = pair
            values = {key: value, **values}
        return self.merge(values)

    def merge(self, other: Mapping[str, Any]) -> State:
        """Return the state with all values of another mapping; the provenance stays."""
        if isinstance(other, State):
            other = dict(other)  # take the values as read: the other state may read its trees with another codec
        return self._with({**self._data, **_kept(other)})

    def without(self, *keys: str) -> State:
        """Return the state without some keys, which need not be present."""
        return self._with({key: value for key, value in self._data.items() if key not in keys})

    def _with(self, data: dict[str, Any]) -> State:
        changed = State(self)
        changed._data, changed._seen = data, {}
        return changed

    def kept(self) -> dict[str, Any]:
        """Return every value in stored form: a tree if it came from the store, else the user's value."""
        return {key: value.value if type(value) is _Copied else value for key, value in self._data.items()}


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value if type(value) is _Copied else _kept_one(value) for key, value in values.items()}


def _kept_one(value: Any) -> Any:
    """Return an immutable form of a value: itself, a frozen copy, or a copy that every reader copies again."""
    try:
        return _frozen(value, 0)
    except _Mutable:
        return _Copied(deepcopy(value))


class _Mutable(Exception):
    """A value contains something mutable other than a dictionary or a list."""


#: Maximum depth to freeze. Deeper than the codec stores, so the codec refuses such a value and names its path.
_DEEPEST = 120


def _frozen(value: Any, depth: int) -> Any:
    cls = type(value)
    if cls in _JSON or cls in _IMMUTABLE or cls is float or isinstance(value, Enum):
        return value
    if depth > _DEEPEST:
        raise _Mutable
    if cls is FrozenDict or cls is FrozenList:
        return value
    if cls is dict:
        items = {key: _frozen(item, depth + 1) for key, item in value.items()}
        return FrozenDict(items, _holds(items.values(), items))
    if cls is list:
        parts = [_frozen(item, depth + 1) for item in value]
        return FrozenList(parts, _holds(parts))
    if cls is tuple:
        return tuple([_frozen(item, depth + 1) for item in value])
    if cls is frozenset:
        return frozenset(_frozen(item, depth + 1) for item in value)
    raise _Mutable


def _holds(parts: Any, keys: Any = ()) -> int:
    """Whether JSON can hold all parts as they are."""
    for part in parts:
        cls = type(part)
        if cls in _JSON or (cls is float and isfinite(part)):
            continue
        if (cls is FrozenDict or cls is FrozenList) and part.holds == PLAIN:
            continue
        return SHOWN
    return PLAIN if all(type(key) is str and key != TAG for key in keys) else SHOWN
