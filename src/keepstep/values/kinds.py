"""Kinds: how types that JSON lacks are converted to storable values and back, with the built-in ones."""

from __future__ import annotations

import re
import sys
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import msgspec

from .secret import Secret


class Refusal(Exception):
    """The reason why a value cannot be stored or restored; `path` is collected on the way out, innermost first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []


class Kind:
    """One type and its tag: `to` returns a storable value, `back` restores the object from it.

    For a record, `to` returns the fields by name. If the kind has a `rest`, it returns further parts of the record, and
    `back` receives both.
    """

    __slots__ = ("back", "cls", "name", "record", "rest", "to")

    def __init__(
        self,
        name: str,
        cls: type,
        to: Callable[[Any], Any],
        back: Callable[..., Any],
        *,
        record: bool = False,
        rest: Callable[[Any], dict[str, Any]] | None = None,
    ) -> None:
        self.name = name
        self.cls = cls
        self.to = to
        self.back = back
        self.record = record
        self.rest = rest


def type_name(cls: type) -> str:
    """Return the name of a type for messages."""
    return cls.__qualname__ if cls.__module__ in ("builtins", "__main__") else f"{cls.__module__}.{cls.__qualname__}"


# -- built in ----------------------------------------------------------------------------------------------------------

#: Integers of more bits, or at least 617 digits, are tagged, because a process may limit integers to 640 digits.
LONG_BITS = 2048
LONG_DIGITS = 617


def long_int_text(value: int) -> str | None:
    """Return the tagged text of an integer that is too long for a JSON number, or None."""
    return hex(value) if value.bit_length() > LONG_BITS else None


def is_text(value: str) -> bool:
    """Whether a string is Unicode text, without lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def expect(value: Any, cls: type) -> Any:
    """Return the value if its type is exactly `cls`."""
    if type(value) is not cls:
        raise ValueError(f"expected a {cls.__name__}, found a {type(value).__name__}")
    return value


def _int_back(text: Any) -> int:
    return int(expect(text, str), 16)


def _str_to(value: str) -> str:
    return value.encode("unicode_escape").decode("ascii")


def _str_back(text: Any) -> str:
    value = expect(text, str).encode("ascii").decode("unicode_escape")
    if _str_to(value) != text:
        raise ValueError("the escapes are not those of a stored text")
    return str(value)


def _float_back(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError("expected nan, inf or -inf")
    return float(text)


def _tuple_back(items: Any) -> tuple[Any, ...]:
    return tuple(expect(items, list))


def _set_back(items: Any) -> set[Any]:
    value = set(expect(items, list))
    if len(value) != len(items):
        raise ValueError("an element occurs twice")
    return value


def _frozenset_back(items: Any) -> frozenset[Any]:
    return frozenset(_set_back(items))


def _dict_back(pairs: Any) -> dict[Any, Any]:
    for pair in expect(pairs, list):
        if len(expect(pair, list)) != 2:
            raise ValueError("expected pairs of a key and its value")
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _bytes_to(value: bytes | bytearray) -> str:
    return b2a_base64(value, newline=False).decode("ascii")


def _bytes_back(text: Any) -> bytes:
    return a2b_base64(expect(text, str), strict_mode=True)


def _bytearray_back(text: Any) -> bytearray:
    return bytearray(_bytes_back(text))


def _clock_to(value: datetime | time) -> str | dict[str, Any]:
    """Return ISO text, with the zone's name if it has one, and the fold in the second pass of an ambiguous hour."""
    zone = value.tzinfo
    more: dict[str, Any] = {}
    if zone is not None:
        if type(zone) is timezone:
            offset_and_name: tuple[Any, ...] = zone.__getinitargs__()  # type: ignore[attr-defined]
            if offset_and_name[0].microseconds:  # fromisoformat does not read microseconds of an offset reliably
                more["offset"] = offset_and_name[0]
                value = value.replace(tzinfo=None)
            if len(offset_and_name) > 1:
                more["name"] = offset_and_name[1]
        else:
            more["zone"] = _zone_key(zone)
            value = value.replace(tzinfo=None)
    if value.fold:
        more["fold"] = 1
    text = value.isoformat()
    return {"at": text, **more} if more else text


def _zone_key(zone: Any) -> str:
    zoneinfo = sys.modules.get("zoneinfo")
    if zoneinfo is None or type(zone) is not zoneinfo.ZoneInfo:
        raise Refusal(
            f"has a time zone of type {type_name(type(zone))}; only ZoneInfo and datetime.timezone are stored"
        )
    key: str | None = zone.key
    if key is None:
        raise Refusal("has a time zone without a name, so it could not be found again")
    _zone(key)
    return key


def _zone(key: str) -> tzinfo:
    from zoneinfo import ZoneInfo  # noqa: PLC0415 - slow to import and rarely needed

    if not _is_zone(key):
        raise ValueError(f"{key[:60]!r} is not the name of a time zone")
    return ZoneInfo(key)


@lru_cache(1000)
def _is_zone(key: str) -> bool:
    """Whether the zone exists. An untrusted name must lead to no other file and no import."""
    from zoneinfo import TZPATH  # noqa: PLC0415 - slow to import and rarely needed

    if not _ZONE_KEY.fullmatch(key) or len(key) > _LONGEST_ZONE:
        return False
    return any(Path(folder, key).is_file() for folder in TZPATH) or key in _all_zones()


@lru_cache(1)
def _all_zones() -> set[str]:
    from zoneinfo import available_timezones  # noqa: PLC0415 - slow to import and rarely needed

    return available_timezones()


_LONGEST_ZONE = 100


_ZONE_KEY = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")


def _clock_back(cls: type[Any], stored: Any) -> Any:
    if type(stored) is str:
        return _iso(cls, stored)
    more = dict(expect(stored, dict))
    value = _iso(cls, more.pop("at", None))
    if "offset" in more:
        value = value.replace(tzinfo=timezone(more.pop("offset")))
    fold, zone, name = more.pop("fold", 0), more.pop("zone", None), more.pop("name", None)
    if more or type(fold) is not int:
        raise ValueError(f"unknown parts {list(more)}")
    if zone is not None:
        value = value.replace(tzinfo=_zone(expect(zone, str)))
    elif name is not None:
        value = value.replace(tzinfo=timezone(value.utcoffset(), expect(name, str)))
    return value.replace(fold=fold)


def _iso(cls: type[Any], text: Any) -> Any:
    value = cls.fromisoformat(expect(text, str))
    if value.isoformat() != text:
        raise ValueError(f"expected ISO text as Python writes it, found {text!r}")
    return value


def _datetime_back(stored: Any) -> datetime:
    value: datetime = _clock_back(datetime, stored)
    return value


def _time_back(stored: Any) -> time:
    value: time = _clock_back(time, stored)
    return value


def _date_back(stored: Any) -> date:
    value: date = _iso(date, stored)
    return value


def _timedelta_to(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _timedelta_back(parts: Any) -> timedelta:
    days, seconds, microseconds = (expect(part, int) for part in expect(parts, list))
    return timedelta(days, seconds, microseconds)


def _decimal_back(text: Any) -> Decimal:
    value = Decimal(expect(text, str))
    if str(value) != text:  # a context without traps returns NaN for text that it cannot read
        raise ValueError(f"{text[:40]!r} is not a decimal number as Python writes it")
    return value


def _uuid_back(text: Any) -> UUID:
    return UUID(expect(text, str))


def _complex_to(value: complex) -> list[float]:
    return [value.real, value.imag]


def _complex_back(parts: Any) -> complex:
    real, imaginary = (expect(part, float) for part in expect(parts, list))
    return complex(real, imaginary)


def _range_to(value: range) -> list[int]:
    return [value.start, value.stop, value.step]


def _range_back(parts: Any) -> range:
    start, stop, step = (expect(part, int) for part in expect(parts, list))
    return range(start, stop, step)


def text_back(cls: type[Any]) -> Callable[[Any], Any]:
    """Return the `back` function of a type that is created from its text."""

    def back(text: Any) -> Any:
        return cls(expect(text, str))

    return back


def _unset_back(stored: Any) -> Any:
    return msgspec.UNSET if stored is None else expect(stored, type(None))


def _secret_name(value: Secret) -> str:
    return value.name


_ADDRESSES: tuple[type, ...] = (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
)

BUILTIN: tuple[Kind, ...] = (
    Kind("int", int, hex, _int_back),
    Kind("str", str, _str_to, _str_back),
    Kind("float", float, str, _float_back),
    Kind("tuple", tuple, list, _tuple_back),
    Kind("set", set, list, _set_back),
    Kind("frozenset", frozenset, list, _frozenset_back),
    Kind("dict", dict, lambda value: [list(pair) for pair in value.items()], _dict_back),
    Kind("bytes", bytes, _bytes_to, _bytes_back),
    Kind("bytearray", bytearray, _bytes_to, _bytearray_back),
    Kind("datetime", datetime, _clock_to, _datetime_back),
    Kind("date", date, date.isoformat, _date_back),
    Kind("time", time, _clock_to, _time_back),
    Kind("timedelta", timedelta, _timedelta_to, _timedelta_back),
    Kind("decimal", Decimal, str, _decimal_back),
    Kind("uuid", UUID, str, _uuid_back),
    Kind("complex", complex, _complex_to, _complex_back),
    Kind("range", range, _range_to, _range_back),
    Kind("path", type(Path()), str, text_back(Path)),
    Kind("posixpath", PurePosixPath, str, text_back(PurePosixPath)),
    Kind("windowspath", PureWindowsPath, str, text_back(PureWindowsPath)),
    Kind("secret", Secret, _secret_name, text_back(Secret)),
    *(Kind(cls.__name__.lower(), cls, str, text_back(cls)) for cls in _ADDRESSES),
    Kind("unset", type(msgspec.UNSET), lambda _: None, _unset_back),
)

BUILTIN_BY_TYPE: dict[type, Kind] = {kind.cls: kind for kind in BUILTIN}
BUILTIN_BY_NAME: dict[str, Kind] = {kind.name: kind for kind in BUILTIN}
