"""Annotations: the classes that a type annotation reaches, as far as its names can be resolved."""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from .classes import is_pydantic, kind_for

_PLAIN = frozenset(
    (None, type(None), bool, int, float, str, bytes, list, dict, tuple, set, object, Any, inspect.Parameter.empty)
)


def is_plain(annotation: Any) -> bool:
    """Whether an annotation certainly reaches no user-defined class."""
    try:
        return annotation in _PLAIN
    except TypeError:  # unhashable
        return False


def reachable(annotation: Any) -> tuple[list[type], list[str]]:
    """Return every class of a storable shape that `annotation` reaches, and the names that could not be resolved."""
    found: dict[type, None] = {}
    unresolved: dict[str, None] = {}
    seen: set[int] = set()
    todo = [annotation]
    keep = []  # ids are unique only while their objects live
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        keep.append(item)
        if isinstance(item, str):
            unresolved[item] = None
        elif isinstance(item, typing.ForwardRef):
            unresolved[item.__forward_arg__] = None
        elif isinstance(item, (list, tuple)):  # the parameters of a Callable
            todo.extend(item)
        else:
            if isinstance(item, type) and typing.get_origin(item) is None and kind_for(item, "") is not None:
                found[item] = None
            todo.extend(_parts(item))
    return list(found), list(unresolved)


def _parts(item: Any) -> list[Any]:
    origin = typing.get_origin(item)
    if origin is typing.Literal:
        return [type(value) for value in typing.get_args(item) if isinstance(value, Enum)]
    if origin is typing.Annotated:
        return [item.__origin__]
    if origin is not None:
        return [origin, *typing.get_args(item)]
    if isinstance(item, typing.TypeVar):
        return [item.__bound__, *item.__constraints__, getattr(item, "__default__", None)]
    for attribute in ("__supertype__", "__value__"):  # NewType, and the `type` statement of Python 3.12
        if not isinstance(item, type) and hasattr(item, attribute):
            return [_softly(lambda: getattr(item, attribute))]  # noqa: B023 - called at once
    if isinstance(item, type) and item.__module__ != "builtins":
        return _class_parts(item)
    return []


def _softly(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception:  # noqa: BLE001 - a name that is not defined yet may raise anything
        return None


def _class_parts(cls: type) -> list[Any]:
    if kind_for(cls, "") is None and not typing.is_typeddict(cls):
        return []
    hints = hints_of(cls)
    if is_pydantic(cls):  # Pydantic has resolved its annotations itself, with names that are not reachable from here
        hints |= {key: field.annotation for key, field in getattr(cls, "model_fields", {}).items()}
    parts = list(hints.values())
    for base in getattr(cls, "__orig_bases__", ()):
        parts += typing.get_args(base)
    return parts


def hints_of(thing: Any, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the annotations of a class or function; an unresolvable one stays a string."""
    try:
        return typing.get_type_hints(thing, localns=dict(names) if names else None, include_extras=True)
    except Exception:  # noqa: BLE001, S110 - evaluation may raise anything; fall back to one by one
        pass
    hints: dict[str, Any] = {}
    for owner in reversed(thing.__mro__) if isinstance(thing, type) else (thing,):
        annotations = _softly(lambda: vars(owner).get("__annotations__", owner.__annotations__))  # noqa: B023
        for key, hint in (annotations or {}).items():
            hints[key] = _resolved(hint, owner, names) if isinstance(hint, str) else hint
    return hints


def enclosed(function: Any) -> dict[str, Any]:
    """Return the names that a function takes from its enclosing functions."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    enclosed = {name: _softly(lambda: cell.cell_contents) for name, cell in zip(names, cells, strict=False)}  # noqa: B023
    return {name: value for name, value in enclosed.items() if value is not None}


def _resolved(hint: str, owner: Any, names: Mapping[str, Any] | None) -> Any:
    module = sys.modules.get(getattr(owner, "__module__", ""))
    known: dict[str, Any] = dict(getattr(owner, "__globals__", None) or vars(module or typing))
    known.update(enclosed(owner))
    known.update(names or {})
    if isinstance(owner, type):
        known.setdefault(owner.__name__, owner)

    def annotated() -> None: ...

    annotated.__annotations__ = {"it": hint}
    try:
        return typing.get_type_hints(annotated, known, known, include_extras=True)["it"]
    except Exception:  # noqa: BLE001 - evaluation may raise anything
        return hint
