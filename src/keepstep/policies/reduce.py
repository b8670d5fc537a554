"""How what several writers give to one key of a state becomes one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..errors import DefinitionError

Named = Literal["append", "add", "max", "min", "merge"]
Reducer = Callable[[Any, Any], Any]


def append(old: Any, given: Any) -> list[Any]:
    """The list with one more item, or with all items of a list that is given."""
    return [*old, *given] if isinstance(given, list) else [*old, given]


def add(old: Any, given: Any) -> Any:
    """The sum."""
    return old + given


def largest(old: Any, given: Any) -> Any:
    """The larger of the two."""
    return max(old, given)


def smallest(old: Any, given: Any) -> Any:
    """The smaller of the two."""
    return min(old, given)


def merge(old: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both dictionaries in one; what is given wins."""
    return {**old, **given}


NAMED: dict[str, Reducer] = {"append": append, "add": add, "max": largest, "min": smallest, "merge": merge}
#: What a named reducer begins with when the state does not have the key yet; the others take the first as it is.
_BEGINNINGS: dict[Reducer, Callable[[], Any]] = {append: list, merge: dict}


def reducers(given: Mapping[str, Named | Reducer] | None) -> dict[str, Reducer]:
    """Reducers by key, as functions; a name that there is none of is an error."""
    found: dict[str, Reducer] = {}
    for key, reducer in (given or {}).items():
        if isinstance(reducer, str) and reducer in NAMED:
            found[key] = NAMED[reducer]
        elif callable(reducer):
            found[key] = reducer
        else:
            raise DefinitionError(
                f"the reducer of {key!r} is {', '.join(NAMED)} or a function of the old value and what is given, "
                f"not {reducer!r}"
            )
    return found


def reduced(reducer: Reducer, state: Mapping[str, Any], key: str, given: Any) -> Any:
    """The value of a key after something was given to it."""
    if key in state:
        return reducer(state[key], given)
    begin = _BEGINNINGS.get(reducer)
    return reducer(begin(), given) if begin is not None else given


def described(reducer: Reducer) -> str:
    """The name of a reducer, for telling one definition from another."""
    return next((name for name, one in NAMED.items() if one is reducer), None) or str(
        getattr(reducer, "__qualname__", type(reducer).__qualname__)
    )
