"""LangGraph's serializer with an allow-list: nothing stored is unpickled, and only listed types are imported."""

from __future__ import annotations

import threading
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import ormsgpack
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.event_hooks import SerdeEvent, register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from ...errors import DefinitionError, NotSerializable

#: Key of a mapping in a record that stands for an extension of msgpack: a message, a dataclass, odd keys.
_MARK = "$ext"
#: The code of a mapping that JSON cannot hold as it is; LangGraph's own codes are not negative.
_PAIRS = -1

#: Kinds of values that are written, and read. LangGraph would revive objects from `json`, and unpickle `pickle`.
_KINDS = frozenset({"null", "bytes", "bytearray", "msgpack"})

_SEEN = threading.local()


def _note_blocked(event: SerdeEvent) -> None:
    if event["kind"].endswith("blocked") and (blocked := getattr(_SEEN, "blocked", None)) is not None:
        blocked.append(f"{event['module']}.{event['name']}")


register_serde_event_listener(_note_blocked)


class StrictSerializer(JsonPlusSerializer):
    """`JsonPlusSerializer` that raises an error for a stored type that is not on its list.

    LangGraph's own returns the fields of such a value as a dictionary. The list has the types of LangGraph and
    LangChain, and all that `types` and their annotations name.
    """

    def __init__(self, types: Iterable[Any] = ()) -> None:
        super().__init__(pickle_fallback=False, allowed_msgpack_modules=sorted(names_in(types)) or None)

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        if data[0] not in _KINDS:
            raise NotSerializable(
                f"a stored value is of kind {data[0]!r:.40}, and only {', '.join(sorted(_KINDS))} are read: other "
                "kinds import what they name; write it again"
            )
        before, _SEEN.blocked = getattr(_SEEN, "blocked", None), []
        try:
            value = super().loads_typed(data)
            blocked = _SEEN.blocked
        finally:
            _SEEN.blocked = before
        if blocked:
            names = ", ".join(sorted(set(blocked)))
            raise NotSerializable(f"a stored value has the type {names}, which is not listed; add it to types=")
        return value

    def plain(self, value: Any) -> list[Any]:
        """Return a value as plain data for a record, where a person can read it and redaction sees it."""
        kind, data = self.dumps_typed(value)
        return [kind, _opened(data) if kind == "msgpack" else bytes(data)]

    def revived(self, plain: list[Any]) -> Any:
        """Return the value that `plain` was made of."""
        kind, data = plain
        return self.loads_typed((kind, _packed(data) if kind == "msgpack" else data))


def _opened(data: bytes) -> Any:
    return _to_plain(ormsgpack.unpackb(data, ext_hook=_Extension, option=ormsgpack.OPT_NON_STR_KEYS))


class _Extension:
    def __init__(self, code: int, data: bytes) -> None:
        self.code, self.data = code, data


def _to_plain(value: Any) -> Any:
    if isinstance(value, _Extension):
        return {_MARK: value.code, "of": _opened(value.data)}
    if isinstance(value, dict):
        if _MARK in value or not all(isinstance(key, str) for key in value):
            return {_MARK: _PAIRS, "of": [[_to_plain(key), _to_plain(of)] for key, of in value.items()]}
        return {key: _to_plain(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value


def _packed(value: Any) -> bytes:
    return ormsgpack.packb(_from_plain(value), option=ormsgpack.OPT_NON_STR_KEYS)


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        code = value.get(_MARK)
        if code is None:
            return {key: _from_plain(of) for key, of in value.items()}
        if code == _PAIRS:
            return {_hashable(_from_plain(key)): _from_plain(of) for key, of in value["of"]}
        return ormsgpack.Ext(code, _packed(value["of"]))
    if isinstance(value, list):
        return [_from_plain(item) for item in value]
    return value


def _hashable(key: Any) -> Any:
    return tuple(map(_hashable, key)) if isinstance(key, list) else key


def names_in(types: Iterable[Any]) -> set[tuple[str, str]]:
    """Return module and name of the types, and of all types that their annotations name."""
    return {(kind.__module__, kind.__name__) for kind in _types_in(types, set())}


def _types_in(types: Iterable[Any], seen: set[int]) -> Iterator[type[Any]]:
    for kind in types:
        if id(kind) in seen:
            continue
        seen.add(id(kind))
        yield from _types_in(typing.get_args(kind), seen)
        if not isinstance(kind, type) or kind.__module__ == "builtins" or typing.get_origin(kind) is not None:
            continue
        yield kind
        try:
            hints = typing.get_type_hints(kind, include_extras=True)
        except (NameError, TypeError, AttributeError):  # names that exist only for type checkers
            hints = {}
        yield from _types_in(hints.values(), seen)


def strict(serde: SerializerProtocol | None, types: Iterable[Any]) -> SerializerProtocol:
    """Return the caller's serializer with an allow-list and without pickle; one of another kind stays as it is."""
    if serde is None:
        return StrictSerializer(types)
    if isinstance(serde, EncryptedSerializer):
        return EncryptedSerializer(serde.cipher, strict(serde.serde, types))
    if not isinstance(serde, JsonPlusSerializer):
        return serde
    if serde.pickle_fallback:
        raise DefinitionError("serde= has pickle_fallback=True, but Keepstep never unpickles; leave it out")
    if isinstance(serde, StrictSerializer) or serde._custom_unpack_ext_hook:  # noqa: SLF001 - the caller's own hook
        return serde
    made = StrictSerializer(types)
    listed = serde._allowed_msgpack_modules  # noqa: SLF001 - the list that the caller gave
    return made.with_msgpack_allowlist(listed) if isinstance(listed, set) else made
