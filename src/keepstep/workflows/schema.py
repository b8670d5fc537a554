"""The schema of a state: its keys with their types, defaults and reducers, and the validators of its class."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import EnumType
from functools import cached_property, lru_cache
from operator import is_
from pathlib import PurePath
from types import UnionType
from typing import Any, NamedTuple

import msgspec

from ..errors import DefinitionError
from ..policies.reduce import Reducer
from ..values import VALUES, Values
from ..values.annotations import hints_of, reachable
from ..values.classes import is_pydantic, kind_for

Converter = Callable[[Any], Any]

_MISSING: Any = object()
#: Types whose empty value a key with a reducer starts with, if it has no default.
_EMPTY = (list, dict, set, frozenset, tuple, str, int, float)


class Schema:
    """Converts values to a TypedDict, a dataclass, a Pydantic model or a msgspec Struct, and validates them.

    A Pydantic model converts as for any input. The others build dataclasses, enums, instants and similar types from
    plain data, and refuse text for a number. A class with validators (of Pydantic, or `__post_init__`) validates the
    whole state after each change.
    """

    def __init__(self, cls: Any, option: str = "schema=") -> None:
        self.cls = cls
        if not has_schema(cls):
            raise DefinitionError(
                f"{option} takes a TypedDict, a dataclass, a Pydantic model or a msgspec Struct, not {cls!r}"
            )
        self.name = cls.__name__
        #: Whether the class makes instances with attributes; a TypedDict is a dictionary.
        self.has_instances = not typing.is_typeddict(cls)

    # -- reading the class; annotations may name classes that are defined after the graph -----------------------------

    @cached_property
    def _hints(self) -> dict[str, Any]:
        """The annotation of each key, without Required, NotRequired and ReadOnly."""
        for key, hint in self._annotations.items():
            if isinstance(hint, str):
                raise DefinitionError(
                    f"{self.name}: the annotation {hint!r} of {key!r} cannot be resolved; define it in the module"
                )
        return {key: _unwrapped(hint) for key, hint in self._annotations.items()}

    @cached_property
    def _annotations(self) -> dict[str, Any]:
        if not is_pydantic(self.cls):
            known = hints_of(self.cls)
            if dataclasses.is_dataclass(self.cls):
                known = {field.name: known[field.name] for field in dataclasses.fields(self.cls)}
            elif not typing.is_typeddict(self.cls):
                known = {key: known[key] for key in self.cls.__struct_fields__}
            return known
        hints: dict[str, Any] = {}
        for key, field in self.cls.model_fields.items():
            hints[key] = field.annotation
            for part in field.metadata:
                hints[key] = typing.Annotated[hints[key], part]
        return hints

    @cached_property
    def _converters(self) -> dict[str, Converter]:
        if not is_pydantic(self.cls):
            return {key: _converter(hint) for key, hint in self._hints.items()}
        return {key: _pydantic_converter(hint) for key, hint in self._hints.items()}

    @cached_property
    def _defaults(self) -> dict[str, Callable[[], Any]]:
        """Makers of the values of keys that may be missing at the start."""
        found: dict[str, Callable[[], Any]] = {}
        for key in self.reducers:
            plain = _plain(self._hints[key])
            if plain in _EMPTY:
                found[key] = plain
        for name, default, factory in _field_defaults(self.cls):
            if factory is not _MISSING:
                found[name] = factory
            elif default is not _MISSING:
                found[name] = _constant(default)
        return found

    @cached_property
    def required(self) -> frozenset[str]:
        """The keys that every state has."""
        if is_pydantic(self.cls):
            keys = [key for key, field in self.cls.model_fields.items() if field.is_required()]
        elif typing.is_typeddict(self.cls):
            keys = [key for key, hint in self._annotations.items() if _is_required(self.cls, key, hint)]
        elif dataclasses.is_dataclass(self.cls):
            keys = [one.name for one in dataclasses.fields(self.cls) if one.init]
        else:
            keys = list(self.cls.__struct_fields__)
        return frozenset(key for key in keys if key not in self._defaults)

    @cached_property
    def reducers(self) -> dict[str, Reducer]:
        """The reducers in the annotations: `Annotated[list[str], operator.add]`, or any function of two values."""
        found = {key: _reducer(hint) for key, hint in self._hints.items()}
        return {key: reducer for key, reducer in found.items() if reducer is not None}

    @cached_property
    def _validates(self) -> bool:
        """Whether the class has validators beyond the types of its fields."""
        if not is_pydantic(self.cls):
            return hasattr(self.cls, "__post_init__")
        rules = self.cls.__pydantic_decorators__
        return any((rules.validators, rules.field_validators, rules.root_validators, rules.model_validators))

    # -- converting ----------------------------------------------------------------------------------------------------

    def plain(self, given: Any) -> Any:
        """Return the fields of an instance of the class as a dictionary; anything else is returned unchanged."""
        if not self.has_instances or not isinstance(given, self.cls):
            return given
        return {key: getattr(given, key) for key in self._hints if hasattr(given, key)}

    def result(self, state: Mapping[str, Any], where: str) -> Any:
        """Return the keys of a state that the class names as an instance of it, or as the dictionary that it describes.

        Refuse a state that does not fit.
        """
        whole = self.first({key: state[key] for key in self._hints if key in state}, where)
        return self.instance(whole) if self.has_instances else whole

    def instance(self, state: Mapping[str, Any]) -> Any:
        """Return the state as an instance of the class; its validators do not run again."""
        values = {key: state[key] for key in self._hints if key in state}
        kind = kind_for(self.cls, "")
        if kind is None:
            raise DefinitionError(f"{self.name} cannot be made of a state; take the state without this annotation")
        try:
            return kind.back(values, {}) if kind.rest is not None else kind.back(values)
        except ValueError as error:
            raise DefinitionError(f"the state is not a whole {self.name}: {error}") from None

    def first(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the first state: converted, validated, with defaults. Refuse it if a required key is missing."""
        if is_pydantic(self.cls):
            self._check_known(given, where)
            begun = {key: make() for key, make in self._defaults.items() if key in self._absent(given)}
            return self._validated({**begun, **given}, where)
        values = self.converted(given, where)
        missing = [key for key in self._hints if key in self.required and key not in values]
        if missing:
            raise DefinitionError(_missing(missing, self.cls, where))
        made = {key: make() for key, make in self._defaults.items() if key not in values}
        both = {**made, **values}
        whole = {key: both[key] for key in self._hints if key in both}
        return self._validated(whole, where) if self._validates else whole

    def _absent(self, given: Mapping[str, Any]) -> list[str]:
        """Return the keys of a Pydantic model that have neither a value nor a default of their own."""
        fields = self.cls.model_fields
        return [key for key, field in fields.items() if key not in given and field.is_required()]

    def changed(self, state: Mapping[str, Any], changes: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a change of a state, converted and validated; validators may change further keys.

        A key that the schema does not have is refused, and so is a value that does not fit.
        """
        if (
            not changes or not self._validates or not self.required <= {*state, *changes}
        ):  # the state of an older run may lack keys
            return self.converted(changes, where)
        if is_pydantic(self.cls):
            self._check_known(changes, where)
        else:
            changes = self.converted(changes, where)
        whole = {**{key: state[key] for key in self._hints if key in state}, **changes}
        made = self._validated(whole, where)
        return {key: value for key, value in made.items() if key in changes or value is not whole.get(key, _MISSING)}

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, in the order of the class."""
        return tuple(self._hints)

    def default_of(self, key: str, default: Any = None) -> Any:
        """Return the value with which a key starts, or `default` if it has none."""
        if is_pydantic(self.cls) and key not in self._defaults:
            known = self.cls.model_fields[key]
            return default if known.is_required() else known.get_default(call_default_factory=True)
        return self._defaults[key]() if key in self._defaults else default

    def type_of(self, key: str) -> KeyType | None:
        """Return the type of a key, or None if the schema does not have it."""
        return KeyType(self._hints[key], self._converters[key]) if key in self._hints else None

    def check_removed(self, keys: Iterable[str], where: str) -> None:
        """Refuse the removal of keys that every state has."""
        missing = [key for key in keys if key in self.required]
        if missing:
            raise DefinitionError(
                f"{where}: {', '.join(map(repr, missing))} cannot be removed; {self.name} requires it"
            )

    def converted(self, changes: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return values converted to the types of their keys; `where` names their owner for messages."""
        self._check_known(changes, where)
        fitting: dict[str, Any] = {}
        for key, value in changes.items():
            try:
                fitting[key] = self._converters[key](value)
            except Exception as error:  # noqa: BLE001 - reported as a value that does not fit
                raise DefinitionError(f"{where}: [{key!r}] does not fit {self.name}: {_problem(error)}") from None
        return fitting

    def same_first(self, stored: Mapping[str, Any], given: Mapping[str, Any], same: Callable[[Any, Any], bool]) -> bool:
        """Whether a stored first state may come from the given values; a default from a factory may differ."""
        made = self.first(given, "")
        if not made.keys() >= stored.keys():
            return False
        for key, value in made.items():
            if key not in given and (key not in stored or not self._is_constant(key)):
                continue
            if key not in stored or not same(value, stored[key]):
                return False
        return True

    def _is_constant(self, key: str) -> bool:
        """Whether the default of a key is the same each time."""
        if is_pydantic(self.cls):
            return self.cls.model_fields[key].default_factory is None
        return isinstance(self._defaults.get(key), _constant)

    def _check_known(self, values: Mapping[str, Any], where: str) -> None:
        for key in values:
            if key not in self._hints:
                raise DefinitionError(
                    f"{where}: {self.name} has no key {key!r}; it has {', '.join(self._hints) or 'none'}"
                )

    def _validated(self, whole: dict[str, Any], where: str) -> dict[str, Any]:
        """Return the fields of an instance that the class itself made of the whole state."""
        try:
            if is_pydantic(self.cls):
                aliased = any(field.validation_alias is not None for field in self.cls.model_fields.values())
                made = self.cls.model_validate(whole, **({"by_alias": False, "by_name": True} if aliased else {}))
            else:
                made = self.cls(**{key: value for key, value in whole.items() if key in self._initial})
        except Exception as error:
            if _is_of_pydantic(error):
                raise DefinitionError(self._misfits(error, where)) from None
            raise DefinitionError(f"{where}: it does not fit {self.name}: {_problem(error)}") from error
        fields = {key: getattr(made, key) for key in self._hints if hasattr(made, key)}
        return {key: _shared(whole[key], value) if key in whole else value for key, value in fields.items()}

    @cached_property
    def _initial(self) -> frozenset[str]:
        """The fields that the class takes when it is called."""
        if dataclasses.is_dataclass(self.cls):
            return frozenset(one.name for one in dataclasses.fields(self.cls) if one.init)
        return frozenset(self._hints)

    def _misfits(self, error: Any, where: str) -> str:
        """Return the errors of Pydantic as one message, missing keys first."""
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        missing = [str(one["loc"][0]) for one in errors if one["type"] == "missing" and len(one["loc"]) == 1]
        if missing:
            return _missing(missing, self.cls, where)
        shown = [f"{''.join(f'[{part!r}]' for part in one['loc']) or 'it'}: {one['msg']}" for one in errors]
        place, _, problem = shown[0].partition(": ")
        return "; ".join([f"{where}: {place} does not fit {self.name}: {problem}", *shown[1:]])


class KeyType(NamedTuple):
    """The type of a key of a schema or of a parameter, and its conversion."""

    hint: Any
    convert: Converter


def type_for(hint: Any) -> KeyType | None:
    """Return the type of an annotation, or None if any value fits it or its names cannot be resolved."""
    if hint in (None, type(None), Any, object) or isinstance(hint, str):
        return None
    return KeyType(hint, _converter(hint))


def values_for(hint: Any) -> Values:
    """Return the codec that knows the classes of an annotation."""
    return VALUES.for_annotation(hint.hint if isinstance(hint, KeyType) else hint)


def as_annotated(value: Any, hint: Any, where: str) -> Any:
    """Return a value converted to the type of an annotation. Refuse it if it does not fit."""
    if hint is None or hint is Any or isinstance(hint, str):
        return value
    hint, convert = hint if isinstance(hint, KeyType) else (hint, _converter(hint))
    if type(value) is hint:
        return value
    try:
        return convert(value)
    except (TypeError, NameError):  # an annotation that cannot be checked, such as a union of two dataclasses
        return value
    except Exception as error:  # noqa: BLE001 - validators may raise anything
        shown = getattr(hint, "__name__", None) or str(hint)
        raise DefinitionError(f"{where} does not fit {shown}: {_problem(error)}") from None


def as_written(value: Any, hint: Any, where: str) -> Any:
    """Return plain data that a person may have written, converted as by `as_annotated`.

    A person sees an enum by its names, so a name is taken where its value would fit.
    """
    try:
        return as_annotated(value, hint, where)
    except DefinitionError:
        found = with_members(value, hint)
        if found is value:
            raise
    return as_annotated(found, hint, where)


def with_members(value: Any, hint: Any) -> Any:
    """Return plain data in which members of the annotation's enums stand in place of their names."""
    hint = _unwrapped(hint.hint if isinstance(hint, KeyType) else hint)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if _is_annotated(hint):
        return with_members(value, hint.__origin__)
    if isinstance(hint, EnumType):
        members: Mapping[str, Any] = hint.__members__
        is_value = value in [one.value for one in members.values()]
        return members.get(value, value) if isinstance(value, str) and not is_value else value
    if origin in (typing.Union, UnionType):
        made = [with_members(value, one) for one in inner if str not in inner or not isinstance(value, str)]
        return next((one for one in made if one is not value), value)
    if isinstance(value, list) and inner and origin is not dict:
        items = [with_members(item, inner[0]) for item in value]
        return value if all(map(is_, items, value)) else items
    if isinstance(value, dict):
        known = _types_of_keys(hint) if has_schema(hint) else {}
        rest = inner[1] if len(inner) > 1 else None
        parts = {key: with_members(part, known.get(key, rest)) for key, part in value.items()}
        return value if all(map(is_, parts.values(), value.values())) else parts
    return value


@lru_cache(maxsize=1000)
def _types_of_keys(cls: type) -> dict[str, Any]:
    """Return the annotations of a class, which are resolved once."""
    return Schema(cls)._hints  # noqa: SLF001 - its own kind


def has_schema(cls: Any) -> bool:
    """Whether a class can be the schema of a state: a TypedDict, a dataclass, a Pydantic model or a Struct."""
    return isinstance(cls, type) and (is_pydantic(cls) or _has_fields(cls))


def _has_fields(cls: type) -> bool:
    return typing.is_typeddict(cls) or dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)


def _field_defaults(cls: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the default and the default's factory of each field of a dataclass or Struct."""
    fields: Iterable[Any] = ()
    if dataclasses.is_dataclass(cls):
        fields = dataclasses.fields(cls)
    elif issubclass(cls, msgspec.Struct):
        fields = msgspec.structs.fields(cls)
    for one in fields:
        default, factory = one.default, one.default_factory
        yield one.name, _MISSING if _is_nothing(default) else default, _MISSING if _is_nothing(factory) else factory


def _is_nothing(default: Any) -> bool:
    return default is dataclasses.MISSING or default is msgspec.NODEFAULT


def _missing(keys: list[str], cls: type, where: str) -> str:
    cure = "make it NotRequired" if typing.is_typeddict(cls) else "give it a default"
    return f"{where}: {cls.__name__} requires {', '.join(map(repr, keys))}; pass it, or {cure} in {cls.__name__}"


def _problem(error: BaseException) -> str:
    if isinstance(error, msgspec.ValidationError) and _is_of_pydantic(error.__cause__):
        place = str(error).rpartition(" - at `$")[2] if " - at `$" in str(error) else ""
        return f"{_problem(error.__cause__)}{f' - at `${place}' if place else ''}"
    if _is_of_pydantic(error):
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        return "; ".join("".join(f"[{part!r}]" for part in one["loc"]) + f" {one['msg']}" for one in errors).strip()
    return " ".join(str(error).split()) or type(error).__name__


def _is_of_pydantic(error: Any) -> typing.TypeGuard[Any]:
    return hasattr(error, "errors") and type(error).__name__ == "ValidationError"


class _constant:  # noqa: N801 - used like a function
    """Makes the same value each time."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value


# -- annotations -------------------------------------------------------------------------------------------------------


def _is_annotated(hint: Any) -> bool:
    return typing.get_origin(hint) is typing.Annotated


def _plain(hint: Any) -> Any:
    """Return the class of an annotation without its metadata and parameters."""
    while _is_annotated(hint):
        hint = hint.__origin__
    return typing.get_origin(hint) or hint


def _wrapper(hint: Any) -> str:
    """Return "Required", "NotRequired" or "ReadOnly" if the annotation is one of these, else ""."""
    name = getattr(typing.get_origin(hint), "_name", "")
    return name if name in ("Required", "NotRequired", "ReadOnly") else ""


def _unwrapped(hint: Any) -> Any:
    """Return the type inside Required, NotRequired and ReadOnly."""
    while _wrapper(hint):
        hint = typing.get_args(hint)[0]
    return hint


def _is_required(cls: Any, key: str, hint: Any) -> bool:
    while word := _wrapper(hint):
        if word != "ReadOnly":
            return word == "Required"
        hint = typing.get_args(hint)[0]
    return key in cls.__required_keys__


def _reducer(hint: Any) -> Reducer | None:
    """Return the last function of two values in an annotation."""
    found = None
    for part in getattr(hint, "__metadata__", ()):
        if callable(part) and not isinstance(part, type) and _takes_two(part):
            found = part
    return found


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # max and min tell no signature
        return function in (max, min)
    return True


# -- conversion --------------------------------------------------------------------------------------------------------


def _converter(hint: Any) -> Converter:
    other: Converter | None = None

    def convert(value: Any) -> Any:
        nonlocal other
        if other is None:
            try:
                return _kept(value, msgspec.convert(value, hint, from_attributes=True, dec_hook=_instance))
            except TypeError:  # msgspec does not know the annotation, such as a union with a Pydantic model
                if not any(map(is_pydantic, reachable(hint)[0])):
                    raise
                other = _pydantic_converter(hint)
        return other(value)

    return convert


def _pydantic_converter(hint: Any) -> Converter:
    from pydantic import TypeAdapter  # noqa: PLC0415 - only installed for users of Pydantic models

    validate = TypeAdapter(hint).validate_python
    return lambda value: _shared(value, validate(value))


def _kept(given: Any, made: Any) -> Any:
    """Return a converted value with everything that msgspec drops: extra keys of a TypedDict, and subclasses.

    Parts without conversion stay the same objects, so that an extended list is recognised as such.
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


def _shared(given: Any, made: Any) -> Any:
    """Return a validated value in which equal lists and dictionaries are the given ones, down to unchanged parts."""
    if made is given:
        return given
    if isinstance(made, list) and isinstance(given, list):
        items = [*map(_shared, given, made), *made[len(given) :]]
        return given if len(given) == len(made) and all(map(is_, items, given)) else items
    if isinstance(made, dict) and isinstance(given, dict):
        parts = {key: _shared(given[key], part) if key in given else part for key, part in made.items()}
        return given if [*parts] == [*given] and all(map(is_, parts.values(), given.values())) else parts
    return made


def _instance(cls: type, value: Any) -> Any:
    try:
        if isinstance(value, cls):
            return value
    except TypeError:  # a protocol or a generic, which has no instances that could be told
        return value
    if is_pydantic(cls):
        return cls.model_validate(value)  # type: ignore[attr-defined]
    if isinstance(value, str) and issubclass(cls, PurePath):
        return cls(value)
    raise TypeError(f"expected {cls.__name__}, got {type(value).__name__}")
