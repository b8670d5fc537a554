"""Reducers: they combine the values that several writers give to one key of a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..errors import DefinitionError

Named = Literal["append", "add", "max", "min", "merge"]
Reducer = Callable[[Any, Any], Any]


def append(old: Any, given: Any) -> list[Any]:
    """Return the list with the item, or with all items of a given list, appended."""
    return [*old, *given] if isinstance(given, list) else [*old, given]


def add(old: Any, given: Any) -> Any:
    """Return the sum."""
    return old + given


def largest(old: Any, given: Any) -> Any:
    """Return the larger value."""
    return max(old, given)


def smallest(old: Any, given: Any) -> Any:
    """Return the smaller value."""
    return min(old, given)


def merge(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return both dictionaries merged; given values win."""
    return {**old, **given}


NAMED: dict[str, Reducer] = {"append": append, "add": add, "max": largest, "min": smallest, "merge": merge}
#: Initial value of a named reducer for a missing key. The other reducers take the first given value unchanged.
_BEGINNINGS: dict[Reducer, Callable[[], Any]] = {append: list, merge: dict}


def reducers(given: Mapping[str, Named | Reducer] | None) -> dict[str, Reducer]:
    """Return the reducer function of each key; raise `DefinitionError` for an unknown name."""
    found: dict[str, Reducer] = {}
    for key, reducer in (given or {}).items():
        if isinstance(reducer, str) and reducer in NAMED:
            found[key] = NAMED[reducer]
        elif callable(reducer):
            found[key] = reducer
        else:
            raise DefinitionError(
                f"the reducer of {key!r} must be {', '.join(NAMED)} or a function of the old and the given value, "
                f"not {reducer!r}"
            )
    return found


def reduced(reducer: Reducer, state: Mapping[str, Any], key: str, given: Any) -> Any:
    """Return the value of a key after a writer gave a value to it."""
    if key in state:
        return reducer(state[key], given)
    begin = _BEGINNINGS.get(reducer)
    return reducer(begin(), given) if begin is not None else given


def described(reducer: Reducer) -> str:
    """Return the name of a reducer, for fingerprints of definitions."""
    return next((name for name, one in NAMED.items() if one is reducer), None) or str(
        getattr(reducer, "__qualname__", type(reducer).__qualname__)
    )
