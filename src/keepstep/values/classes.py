"""Classes: conversion of dataclasses, Enums, NamedTuples, Structs, Pydantic models and exceptions, and back.

An object is restored exactly as stored: no `__init__`, `__post_init__` or validator changes it. Pydantic is not
imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from enum import Enum, Flag
from functools import cached_property
from types import MemberDescriptorType
from typing import Any

import msgspec

from ..errors import DefinitionError
from .kinds import BUILTIN_BY_TYPE, Kind, Refusal, expect, text_back, type_name


def kind_for(cls: type, name: str) -> Kind | None:
    """Return how a class of a known shape is stored, or None if it needs `to` and `back`."""
    if issubclass(cls, Enum):
        return _enum(cls, name)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return _named_tuple(cls, name)
    if issubclass(cls, msgspec.Struct) and cls is not msgspec.Struct:
        return _struct(cls, name)
    if is_pydantic(cls):
        return _pydantic(cls, name)
    if issubclass(cls, Exception):
        return None if issubclass(cls, BaseExceptionGroup) else _exception(cls, name)
    if dataclasses.is_dataclass(cls) and _made_in_python(cls):
        return _dataclass(cls, name)
    if is_pydantic_url(cls):
        return Kind(name, cls, str, text_back(cls))
    return None


def is_pydantic(cls: type) -> bool:
    """Whether a class is a Pydantic model, without importing Pydantic."""
    main = sys.modules.get("pydantic.main")
    model = getattr(main, "BaseModel", None)
    return model is not None and cls is not model and issubclass(cls, model)


def is_pydantic_url(cls: type) -> bool:
    """Whether a class is one of Pydantic's URL types, which are validated text."""
    networks = sys.modules.get("pydantic.networks")
    bases = tuple(base for name in ("_BaseUrl", "_BaseMultiHostUrl") if (base := getattr(networks, name, None)))
    return issubclass(cls, bases)


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: created by a class statement, not in C


def _made_in_python(cls: type) -> bool:
    new: Any = cls.__new__
    if new is not object.__new__ and not hasattr(new, "__code__"):
        return False
    return all(base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__)


def _enum(cls: type[Enum], name: str) -> Kind:
    if issubclass(cls, Flag):

        def flag_back(value: Any) -> Enum:
            return cls(expect(value, int))

        return Kind(name, cls, lambda member: int(member._value_), flag_back)

    def to(member: Enum) -> str:
        return member._name_

    def back(member: Any) -> Enum:
        try:
            return cls[expect(member, str)]
        except KeyError:
            raise ValueError(f"{cls.__qualname__} has no member {member!r}") from None

    return Kind(name, cls, to, back)


def _stray_attributes(cls: type, names: Iterable[str]) -> Callable[[Any], None]:
    """Return a check that an instance has no attributes besides its fields, because these would be lost."""
    known = set(names)
    for base in cls.__mro__:
        known.update(key for key, value in vars(base).items() if isinstance(value, cached_property))
    slots = [
        slot
        for base in cls.__mro__
        for slot in _slots_of(base)
        if slot not in known and not slot.endswith("__")  # __dict__, __weakref__ and Pydantic's own slots
    ]

    def check(value: Any) -> None:
        stray = [slot for slot in slots if hasattr(value, slot)] if slots else []
        attributes = getattr(value, "__dict__", None)
        if attributes and not known.issuperset(attributes):
            stray += [key for key in attributes if key not in known]
        if stray:
            raise Refusal(f"is a {type_name(cls)} with the attribute {stray[0]!r}, which is not one of its fields")

    return check


def _slots_of(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = f"_{cls.__name__.lstrip('_')}"
    return tuple(private + name if name.startswith("__") and not name.endswith("__") else name for name in names)


def _check_fields(cls: type, stored: Any, known: Iterable[str]) -> None:
    for name in expect(stored, dict):
        if name not in known:
            raise ValueError(f"{cls.__qualname__} has no field {name!r} any more")


def _lacks(cls: type, name: str) -> ValueError:
    return ValueError(f"{cls.__qualname__} now requires {name!r}, which was not stored")


_ABSENT: Any = object()


def _dataclass(cls: type[Any], name: str) -> Kind:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    names = tuple(fields)
    check = _stray_attributes(cls, names)

    def to(value: Any) -> dict[str, Any]:
        check(value)
        stored = {key: getattr(value, key, _ABSENT) for key in names}
        absent = [key for key, item in stored.items() if item is _ABSENT]
        for key in absent:
            if fields[key].init or not _has_no_default(fields[key]):
                raise Refusal(f"is a {type_name(cls)} that lacks its field {key!r}")
            del stored[key]
        return stored

    def back(stored: Any) -> Any:
        _check_fields(cls, stored, fields)
        value: Any = object.__new__(cls)
        for key, field in fields.items():
            item = stored.get(key, _ABSENT)
            if item is _ABSENT:
                if _has_no_default(field):
                    if field.init:
                        raise _lacks(cls, key)
                    continue
                made = field.default_factory
                item = field.default if made is dataclasses.MISSING else made()
            object.__setattr__(value, key, item)
        return value

    return Kind(name, cls, to, back, record=True)


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _exception(cls: type[Exception], name: str) -> Kind:
    """Store the arguments, the attributes and the notes. Its cause, context and traceback are left out."""
    native = next(base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE)
    members = [
        member
        for base in cls.__mro__
        for member, found in vars(base).items()
        if isinstance(found, MemberDescriptorType) and base is not BaseException and not _is_dunder(member)
        if member != "obj"  # of an AttributeError: any object
    ]

    def to(error: Any) -> dict[str, Any]:
        kept = {key: getattr(error, key, None) for key in members}
        kept = {key: item for key, item in kept.items() if item is not None}
        kept |= {key: item for key, item in error.__dict__.items() if key == "__notes__" or not _is_dunder(key)}
        return {"args": list(error.args), "attributes": kept} if kept else {"args": list(error.args)}

    def back(stored: Any) -> Any:
        _check_fields(cls, stored, ("args", "attributes"))
        args, kept = expect(stored.get("args", []), list), expect(stored.get("attributes", {}), dict)
        error: Any = native.__new__(cls, *args)
        error.args = tuple(args)
        for key in kept.keys() & set(members):
            object.__setattr__(error, key, kept[key])
        error.__dict__.update((key, item) for key, item in kept.items() if key not in members)
        return error

    return Kind(name, cls, to, back, record=True)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _named_tuple(cls: type[Any], name: str) -> Kind:
    names: tuple[str, ...] = cls._fields
    defaults: dict[str, Any] = getattr(cls, "_field_defaults", {})
    check = _stray_attributes(cls, ())

    def to(value: Any) -> dict[str, Any]:
        check(value)
        return dict(zip(names, value, strict=True))

    def back(stored: Any) -> Any:
        _check_fields(cls, stored, names)
        items = []
        for key in names:
            if key not in stored and key not in defaults:
                raise _lacks(cls, key)
            items.append(stored[key] if key in stored else defaults[key])
        return tuple.__new__(cls, items)

    return Kind(name, cls, to, back, record=True)


def _struct(cls: type[msgspec.Struct], name: str) -> Kind:
    from msgspec.structs import force_setattr  # noqa: PLC0415 - only needed for structs

    names = cls.__struct_fields__
    check = _stray_attributes(cls, names)

    def to(value: Any) -> dict[str, Any]:
        check(value)
        return {key: getattr(value, key) for key in names}

    def back(stored: Any) -> Any:
        _check_fields(cls, stored, names)
        value = cls(**stored)
        for key, item in stored.items():  # undo changes by __post_init__
            force_setattr(value, key, item)
        return value

    return Kind(name, cls, to, back, record=True)


def _pydantic(cls: type[Any], name: str) -> Kind:
    """Store the fields, extra and private attributes, the names of set fields and the names of missing ones."""
    fields, privates = tuple(cls.model_fields), tuple(cls.__private_attributes__)
    check = _stray_attributes(cls, (*fields, "__pydantic_private__"))  # a RootModel stores its private attributes there

    def to(model: Any) -> dict[str, Any]:
        check(model)
        attributes = model.__dict__
        return {key: attributes[key] for key in fields if key in attributes}

    def rest(model: Any) -> dict[str, Any]:
        extra, private = model.__pydantic_extra__ or {}, model.__pydantic_private__ or {}
        given, attributes = model.__pydantic_fields_set__, model.__dict__
        here = [*(key for key in fields if key in attributes), *extra]
        absent = [key for key in fields if key not in attributes] + [key for key in privates if key not in private]
        named = {
            "unset": [key for key in here if key not in given],
            "set": sorted(given.difference(here)),
            "absent": absent,
            "extra": extra,
            "private": private,
        }
        return {key: item for key, item in named.items() if item}

    def back(stored: Any, more: Any) -> Any:
        _check_fields(cls, stored, fields)
        unset, given, absent, extra, private = _rest_of(more)
        may_have_extra = cls.model_config.get("extra") == "allow"
        if extra and not may_have_extra:
            raise ValueError(f"{cls.__qualname__} has no field {next(iter(extra))!r} any more")
        model: Any = object.__new__(cls)
        object.__setattr__(model, "__dict__", _with_defaults(cls, stored, absent))
        object.__setattr__(model, "__pydantic_fields_set__", {*stored, *extra, *given}.difference(unset))
        kept = {"__pydantic_extra__": extra if may_have_extra else None}
        kept["__pydantic_private__"] = _with_private_defaults(cls, private, absent)
        for key, item in kept.items():
            if getattr(model, key, _ABSENT) is not item:  # a RootModel has None there, and no slot
                object.__setattr__(model, key, item)
        return model

    return Kind(name, cls, to, back, record=True, rest=rest)


def _with_defaults(cls: type[Any], stored: dict[str, Any], absent: list[str]) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for key, field in cls.model_fields.items():
        if key in stored:
            attributes[key] = stored[key]
        elif key not in absent:
            if field.is_required():
                raise _lacks(cls, key)
            attributes[key] = _pydantic_default(field, attributes)
    return attributes


def _with_private_defaults(cls: type[Any], private: dict[str, Any], absent: list[str]) -> dict[str, Any] | None:
    known = cls.__private_attributes__
    for key in private:
        if key not in known:
            raise ValueError(f"{cls.__qualname__} has no private attribute {key!r} any more")
    for key, attribute in known.items():
        if key not in private and key not in absent and _has_default(attribute):
            private[key] = attribute.get_default()
    return private if known else None


def _has_default(attribute: Any) -> bool:
    return attribute.default_factory is not None or type(attribute.default).__name__ != "PydanticUndefinedType"


def _rest_of(more: Any) -> tuple[list[str], list[str], list[str], dict[str, Any], dict[str, Any]]:
    more = dict(expect(more, dict))
    names = [expect(more.pop(part, []), list) for part in ("unset", "set", "absent")]
    tables = [expect(more.pop(part, {}), dict) for part in ("extra", "private")]
    if more:
        raise ValueError(f"unknown parts {list(more)}")
    for name in (name for part in names for name in part):
        expect(name, str)
    return names[0], names[1], names[2], tables[0], tables[1]


def _pydantic_default(field: Any, attributes: dict[str, Any]) -> Any:
    try:
        return field.get_default(call_default_factory=True, validated_data=attributes)
    except TypeError:  # before Pydantic 2.10 a default factory received no other fields
        return field.get_default(call_default_factory=True)


def checked_kind(
    cls: Any, name: str | None, to: Callable[[Any], Any] | None, back: Callable[[Any], Any] | None
) -> Kind:
    """Return the kind of a class that a user registers; raise `DefinitionError` if something is missing."""
    if not isinstance(cls, type):
        raise DefinitionError(f"register() takes a class, not {cls!r}")
    if cls in BUILTIN_BY_TYPE or cls in (bool, list, type(None)):
        raise DefinitionError(f"{type_name(cls)} is stored as it is; it cannot be registered")
    if (to is None) != (back is None):
        raise DefinitionError(f"register({cls.__qualname__}) needs both to= and back=, or neither")
    if to is not None and back is not None:
        return Kind(name or cls.__qualname__, cls, to, back)
    kind = kind_for(cls, name or cls.__qualname__)
    if kind is None:
        raise DefinitionError(
            f"{type_name(cls)} is not a dataclass, Enum, NamedTuple, Pydantic model, msgspec Struct or exception; "
            f"pass register({cls.__qualname__}, to=..., back=...) to define how it is stored"
        )
    return kind
