"""Named predicates, for edges of a graph and steps of a dag."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from ..errors import DefinitionError

Predicate = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Always:
    """Holds always."""

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return True

    def __str__(self) -> str:
        return "always"


@dataclass(frozen=True, slots=True)
class Exists:
    """Holds when the state has the key, with any value."""

    key: str

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return self.key in state

    def __str__(self) -> str:
        return f"exists({self.key!r})"


@dataclass(frozen=True, slots=True)
class Equals:
    """Holds when the state has the key with this value."""

    key: str
    value: Any

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return self.key in state and bool(state[self.key] == self.value)

    def __str__(self) -> str:
        return f"equals({self.key!r}, {self.value!r})"


@dataclass(frozen=True, slots=True)
class Not:
    """Holds when the other predicate does not."""

    other: Predicate

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return not self.other(state)

    def __str__(self) -> str:
        return f"not_({described(self.other)})"


@dataclass(frozen=True, slots=True)
class AllOf:
    """Holds when every predicate holds."""

    others: tuple[Predicate, ...]

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return builtins.all(other(state) for other in self.others)

    def __str__(self) -> str:
        return f"all_({', '.join(map(described, self.others))})"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Holds when at least one predicate holds."""

    others: tuple[Predicate, ...]

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return builtins.any(other(state) for other in self.others)

    def __str__(self) -> str:
        return f"any_({', '.join(map(described, self.others))})"


always = Always()


def exists(key: str) -> Exists:
    """Return a predicate that holds when the state has the key."""
    return Exists(key)


def equals(key: str, value: Any) -> Equals:
    """Return a predicate that holds when the state's key has this value."""
    return Equals(key, value)


def not_(other: Predicate) -> Not:
    """Return a predicate that holds when the other does not."""
    return Not(_checked(other))


def all_(*others: Predicate) -> AllOf:
    """Return a predicate that holds when all others hold."""
    return AllOf(tuple(map(_checked, others)))


def any_(*others: Predicate) -> AnyOf:
    """Return a predicate that holds when at least one other holds."""
    return AnyOf(tuple(map(_checked, others)))


def described(predicate: Predicate | None) -> str:
    """Return the text of a predicate, for pictures and fingerprints of definitions."""
    if predicate is None:
        return "always"
    name = getattr(predicate, "__qualname__", None)  # only functions have it; others have a str()
    return str(predicate if name is None else name)


def keys_of(predicate: Predicate | None) -> frozenset[str] | None:
    """Return the keys that a predicate reads; None if unknown, as for a plain function."""
    if predicate is None or isinstance(predicate, Always):
        return frozenset()
    if isinstance(predicate, Exists | Equals):
        return frozenset((predicate.key,))
    others: tuple[Predicate, ...] = ()
    if isinstance(predicate, Not):
        others = (predicate.other,)
    elif isinstance(predicate, AllOf | AnyOf):
        others = predicate.others
    else:
        named_keys = getattr(predicate, "keys", None)
        return named_keys if isinstance(named_keys, frozenset) else None
    found: set[str] = set()
    for keys in map(keys_of, others):
        if keys is None:
            return None
        found |= keys
    return frozenset(found)


def functions_in(predicate: Predicate | None) -> list[Callable[..., Any]]:
    """Return the plain functions that a predicate consists of."""
    if isinstance(predicate, Not):
        return functions_in(predicate.other)
    if isinstance(predicate, AllOf | AnyOf):
        return [function for other in predicate.others for function in functions_in(other)]
    return [predicate] if isinstance(predicate, FunctionType | MethodType) else []


def _checked(predicate: Predicate) -> Predicate:
    if not callable(predicate):
        raise DefinitionError(f"a predicate must be a function of the state, not {predicate!r}")
    return predicate
