"""Readable JSON: indented, with sorted keys, and still an exact representation of the stored bytes."""

from __future__ import annotations

from base64 import b64decode, b64encode
from hashlib import sha256
from typing import Any

import msgspec

from ...errors import CheckpointCorrupt

_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder().decode

#: Maximum depth to show as JSON. Deeper values are stored as one line of text, because decoders have a limit.
_DEEPEST = 100

#: Order of the fields of a sealed record, at its root and in its two nested records. Fixed for this layout; a record in
#: another order stores its order.
_FIELDS: dict[str, tuple[str, ...]] = {
    "": (
        *("run", "kind", "seq", "step", "outcome", "ordinal", "attempt", "trigger", "worker", "agent", "stage"),
        *("started_at", "finished_at", "digest", "value", "packed", "error", "retry_at", "data", "claimed"),
        *("asked", "format", "previous"),
    ),
    "error": ("type", "message", "error_class", "code", "traceback", "attempt", "id", "caused_by"),
    "claimed": ("epoch", "at", "before", "since"),
}
_NO_FIELDS: dict[str, tuple[str, ...]] = {}

Shapes = dict[frozenset[str], tuple[str, ...]]


# -- bytes in a file ---------------------------------------------------------------------------------------------------


def put(into: dict[str, Any], name: str, data: bytes, *, record: bool = False) -> None:
    """Add stored bytes to a file's fields: as JSON if that is exact, else as text, else in base 64.

    Sorting loses the order of keys. For an object whose keys are neither sorted nor in the order of a record's fields,
    `<name>_order` lists its keys in their order. It applies to every object with exactly these keys.
    """
    value, shapes = _readable(data, _FIELDS if record else _NO_FIELDS)
    if shapes is not None:
        into[name] = value
        if shapes:
            into[f"{name}_order"] = list(shapes.values())
        return
    try:
        into[f"{name}_text"] = data.decode()
    except UnicodeDecodeError:
        into[f"{name}_base64"] = b64encode(data).decode()


def take(fields: dict[str, Any], name: str, *, record: bool = False) -> bytes:
    """Return the bytes that were passed to `put`."""
    if name in fields:
        shapes = {frozenset(keys): tuple(keys) for keys in fields.get(f"{name}_order", ())}
        return _encode(_restored(fields[name], shapes, _FIELDS if record else _NO_FIELDS, ""))
    if f"{name}_text" in fields:
        text: str = fields[f"{name}_text"]
        return text.encode()
    return b64decode(fields[f"{name}_base64"], validate=True)


def _readable(data: bytes, fields: dict[str, tuple[str, ...]]) -> tuple[Any, Shapes | None]:
    """Return the value and the key orders that restore its text; None in place of the orders if that is impossible."""
    try:
        value = _decode(data)
        if _encode(value) != data:
            return None, None
        seen: Shapes = {}
        if not _gather(value, seen, fields, "", _DEEPEST):
            return None, None
        shapes = {keys: shape for keys, shape in seen.items() if list(shape) != sorted(shape)}
        if _encode(_restored(value, shapes, fields, "")) != data:
            return None, None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None, None
    return value, shapes


def _gather(value: Any, seen: Shapes, fields: dict[str, tuple[str, ...]], where: str | None, room: int) -> bool:
    """Collect the key order of every object; return False if two objects have the same keys in different orders."""
    if type(value) is dict:
        keys = tuple(value)
        if keys != _natural(value, fields, where) and seen.setdefault(frozenset(keys), keys) != keys:
            return False
        if where is None and len(keys) > 1 and seen.setdefault(frozenset(keys), keys) != keys:
            return False
        below = fields if where == "" else _NO_FIELDS
        return room > 0 and all(
            _gather(item, seen, fields, key if key in below else None, room - 1)
            for key, item in value.items()
            if type(item) is dict or type(item) is list
        )
    if type(value) is list:
        return room > 0 and all(
            _gather(item, seen, fields, None, room - 1) for item in value if type(item) is dict or type(item) is list
        )
    return True


def _restored(value: Any, shapes: Shapes, fields: dict[str, tuple[str, ...]], where: str | None) -> Any:
    """Return the value with the keys of its objects in their original order."""
    if type(value) is dict:
        keys = (shapes.get(frozenset(value)) if shapes else None) or _natural(value, fields, where)
        below = fields if where == "" else _NO_FIELDS
        return {key: _restored(value[key], shapes, fields, key if key in below else None) for key in keys}
    if type(value) is list:
        return [_restored(item, shapes, fields, None) for item in value]
    return value


def _natural(value: dict[str, Any], fields: dict[str, tuple[str, ...]], where: str | None) -> tuple[str, ...]:
    """Return the default order of an object's keys."""
    if where is not None and where in fields:
        known = tuple(key for key in fields[where] if key in value)
        if len(known) == len(value):
            return known
    return tuple(sorted(value))


# -- whole files -------------------------------------------------------------------------------------------------------


def sealed(fields: dict[str, Any]) -> bytes:
    """Return the text of a file: readable fields, and a checksum over their content, which sorts last."""
    compact = _encode_sorted(fields)
    text = compact[:-1] + b',"seal":"' + sha256(compact).hexdigest().encode() + b'"}'
    return msgspec.json.format(text, indent=2) + b"\n"


def unsealed(data: bytes, what: str) -> dict[str, Any]:
    """Return the fields of a file after verifying them; indentation does not matter."""
    try:
        fields = _decode(data)
        seal = fields.pop("seal")
        compact = _encode_sorted(fields)
    except (msgspec.MsgspecError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointCorrupt(f"{what} cannot be read: {error}") from None
    if seal != sha256(compact).hexdigest():
        raise CheckpointCorrupt(f"{what} was changed after it was written")
    return fields  # type: ignore[no-any-return]
