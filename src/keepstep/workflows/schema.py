"""The schema of a state: which keys it may have, and of which types."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any

import msgspec

from ..errors import DefinitionError


class Schema:
    """Holds changes of a state to a TypedDict, a dataclass, a Pydantic model or a msgspec Struct.

    Values become what the annotations say: a Pydantic model converts as it does for any input, the others make
    dataclasses, enums, instants and such of plain data, and refuse a text where a number belongs.
    """

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self._converters: dict[str, Callable[[Any], Any]] | None = None
        if not (isinstance(cls, type) and (_is_pydantic(cls) or _has_fields(cls))):
            raise DefinitionError(
                f"schema= takes a TypedDict, a dataclass, a Pydantic model or a msgspec Struct, not {cls!r}"
            )

    def converted(self, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The changes as they may be stored; `where` says whose they are.

        A key that the schema does not have is refused, and so is a value that is not of its type and cannot become it.
        """
        converters = self._converters
        if converters is None:  # names in annotations may be defined after the graph
            converters = _pydantic_converters(self.cls) if _is_pydantic(self.cls) else _plain_converters(self.cls)
            self._converters = converters
        fitting: dict[str, Any] = {}
        for key, value in changes.items():
            convert = converters.get(key)
            if convert is None:
                raise DefinitionError(
                    f"{where}: {self.cls.__name__} has no key {key!r}; it has {', '.join(converters) or 'none'}"
                )
            try:
                fitting[key] = convert(value)
            except Exception as error:  # noqa: BLE001 - told as what it is: a value that does not fit
                told = " ".join(str(error).split())
                raise DefinitionError(f"{where}: [{key!r}] does not fit {self.cls.__name__}: {told}") from None
        return fitting


def as_annotated(value: Any, hint: Any) -> Any:
    """What a person gave as plain data, made into the type of an annotation; as it is if it does not fit."""
    if hint is None or hint is Any or isinstance(hint, str):
        return value
    try:
        return _converter(hint)(value)
    except Exception:  # noqa: BLE001 - an annotation promises nothing about a value that a body returns, either
        return value


def _is_pydantic(cls: type) -> bool:
    return hasattr(cls, "model_fields") and hasattr(cls, "model_validate")


def _has_fields(cls: type) -> bool:
    return typing.is_typeddict(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)


def _plain_converters(cls: Any) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {key: _converter(_unwrapped(hint)) for key, hint in hints.items()}


def _unwrapped(hint: Any) -> Any:
    """The type inside Required, NotRequired and ReadOnly."""
    while getattr(typing.get_origin(hint), "_name", "") in ("Required", "NotRequired", "ReadOnly"):
        hint = typing.get_args(hint)[0]
    return hint


def _converter(hint: Any) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        return _kept(value, msgspec.convert(value, hint, from_attributes=True, dec_hook=_instance))

    return convert


def _kept(given: Any, made: Any) -> Any:
    """What was made of a value, with what msgspec leaves out: more keys than a TypedDict has, and subclasses.

    Parts that needed no conversion stay the same objects, by which a list that grew is told from a new one.
    """
    if made is given:
        return given
    if isinstance(made, list) and isinstance(given, list) and len(made) == len(given):
        items = [*map(_kept, given, made)]
        return given if all(map(is_, items, given)) else items
    if isinstance(made, dict) and isinstance(given, dict) and made.keys() <= given.keys():
        parts = {key: _kept(part, made[key]) if key in made else part for key, part in given.items()}
        return given if all(map(is_, parts.values(), given.values())) else parts
    is_of_subclass = type(given) is not type(made) and isinstance(given, type(made))
    return given if is_of_subclass and not isinstance(given, dict | list) else made


def _instance(cls: type, value: Any) -> Any:
    if isinstance(value, cls):
        return value
    if _is_pydantic(cls):
        return cls.model_validate(value)  # type: ignore[attr-defined]
    raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")


def _pydantic_converters(cls: Any) -> dict[str, Callable[[Any], Any]]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - only who has such a model has Pydantic

    converters: dict[str, Callable[[Any], Any]] = {}
    for key, field in cls.model_fields.items():
        annotation = field.annotation
        for part in field.metadata:
            annotation = typing.Annotated[annotation, part]
        converters[key] = TypeAdapter(annotation).validate_python
    return converters
