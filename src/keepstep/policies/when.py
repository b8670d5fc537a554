"""Predicates with a name: what an edge of a graph or a step of a dag may depend on."""

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
    """It always holds."""

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return True

    def __str__(self) -> str:
        return "always"


@dataclass(frozen=True, slots=True)
class Exists:
    """The key is there, whatever its value."""

    key: str

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return self.key in state

    def __str__(self) -> str:
        return f"exists({self.key!r})"


@dataclass(frozen=True, slots=True)
class Equals:
    """The key is there and has this value."""

    key: str
    value: Any

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return self.key in state and bool(state[self.key] == self.value)

    def __str__(self) -> str:
        return f"equals({self.key!r}, {self.value!r})"


@dataclass(frozen=True, slots=True)
class Not:
    """The other does not hold."""

    other: Predicate

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return not self.other(state)

    def __str__(self) -> str:
        return f"not_({described(self.other)})"


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every one of them holds."""

    others: tuple[Predicate, ...]

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return builtins.all(other(state) for other in self.others)

    def __str__(self) -> str:
        return f"all_({', '.join(map(described, self.others))})"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of them holds."""

    others: tuple[Predicate, ...]

    def __call__(self, state: Mapping[str, Any]) -> bool:
        return builtins.any(other(state) for other in self.others)

    def __str__(self) -> str:
        return f"any_({', '.join(map(described, self.others))})"


always = Always()


def exists(key: str) -> Exists:
    """Holds when the state has the key."""
    return Exists(key)


def equals(key: str, value: Any) -> Equals:
    """Holds when the state's key has this value."""
    return Equals(key, value)


def not_(other: Predicate) -> Not:
    """Holds when the other does not."""
    return Not(_checked(other))


def all_(*others: Predicate) -> AllOf:
    """Holds when all of them do."""
    return AllOf(tuple(map(_checked, others)))


def any_(*others: Predicate) -> AnyOf:
    """Holds when one of them does."""
    return AnyOf(tuple(map(_checked, others)))


def described(predicate: Predicate | None) -> str:
    """The text of a predicate, for pictures and for telling one definition from another."""
    if predicate is None:
        return "always"
    name = getattr(predicate, "__qualname__", None)  # of a function; what has none says itself what it is
    return str(predicate if name is None else name)


def keys_of(predicate: Predicate | None) -> frozenset[str] | None:
    """The keys that a predicate looks at; None if it does not say, as a plain function does not."""
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
        told = getattr(predicate, "keys", None)
        return told if isinstance(told, frozenset) else None
    found: set[str] = set()
    for keys in map(keys_of, others):
        if keys is None:
            return None
        found |= keys
    return frozenset(found)


def functions_in(predicate: Predicate | None) -> list[Callable[..., Any]]:
    """The plain functions that a predicate is, or is made of."""
    if isinstance(predicate, Not):
        return functions_in(predicate.other)
    if isinstance(predicate, AllOf | AnyOf):
        return [function for other in predicate.others for function in functions_in(other)]
    return [predicate] if isinstance(predicate, FunctionType | MethodType) else []


def _checked(predicate: Predicate) -> Predicate:
    if not callable(predicate):
        raise DefinitionError(f"a predicate is a function of the state, not {predicate!r}")
    return predicate
