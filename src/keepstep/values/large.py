"""Large values: those that would block the event loop for too long."""

from __future__ import annotations

import sys
from typing import Any

#: Size in bytes from which a value is encoded, searched, compressed, sealed and decoded off the event loop. To encode
#: and decode this much takes up to 30 ms; to pass a value to a thread takes 0.1 ms.
LARGE_BYTES = 250_000
#: Number of parts from which a value counts as large. Each part takes about a microsecond to encode and decode.
MANY_PARTS = 5_000
#: Size in bytes of a record's body that may hold a large value, because compression shortens text 5 to 50 times.
LARGE_BODY_BYTES = 10_000

#: Types whose values are never large.
SMALL_TYPES = frozenset((type(None), bool, int, float))
_all_small = SMALL_TYPES.issuperset
_SIZED = frozenset((str, bytes, bytearray))
_PLAIN = frozenset((list, tuple))
_ITEMS = (list, tuple, set, frozenset)
#: Number of items from which one check that all are small is faster than a check of each.
_FEW = 16


def is_large_text(data: Any) -> bool:
    """Whether an encoded value is large."""
    return len(data) > LARGE_BYTES


def is_large(value: Any) -> bool:
    """Whether a value is likely to be large when encoded. It looks at no more than a few thousand parts."""
    cls = type(value)
    if cls in SMALL_TYPES:
        return False
    if cls in _SIZED:
        return len(value) > LARGE_BYTES
    if cls is dict and len(value) <= _FEW:  # usually a few short values
        if _all_small(map(type, value.values())):
            return False
        for item in value.values():
            if type(item) not in SMALL_TYPES and (type(item) is not str or len(item) > LARGE_BYTES // _FEW):
                break
        else:
            return False
    if cls in _PLAIN and len(value) <= _FEW and _all_small(map(type, value)):
        return False
    try:
        return _has_many_parts(value)
    except Exception:  # noqa: BLE001 - an odd object, which the codec will refuse with a precise message
        return False


def _has_many_parts(value: Any) -> bool:
    room, parts = LARGE_BYTES, MANY_PARTS
    todo = [value]
    for part in todo:  # `todo` grows during the loop
        cls = type(part)
        inner = part.values() if cls is dict else part if cls in _PLAIN else _inner(part)
        if inner is None:
            room -= sys.getsizeof(part)
            inner = ()
        parts -= len(inner)
        if parts < 0:
            return True
        if len(inner) > _FEW and SMALL_TYPES.issuperset(map(type, inner)):
            continue
        for item in inner:
            cls = type(item)
            if cls in _SIZED:
                room -= len(item)
            elif cls not in SMALL_TYPES:
                todo.append(item)
        if room < 0:
            return True
    return False


def _inner(part: Any) -> Any:
    """Return the contents of a container or an object; None for anything else."""
    if isinstance(part, dict):
        return part.values()
    if isinstance(part, _ITEMS):
        return part
    fields = getattr(part, "__dict__", None)
    if type(fields) is dict:
        return fields.values()
    names = getattr(type(part), "__struct_fields__", None) or getattr(type(part), "__slots__", None)
    return [getattr(part, name, None) for name in names] if names and not isinstance(names, str) else None
