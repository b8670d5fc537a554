"""Conversion of records to PostgreSQL columns, many rows at a time, and back."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import psycopg
from psycopg.adapt import Dumper, Loader
from psycopg.pq import Format
from psycopg.types.datetime import TimestamptzBinaryLoader, TimestamptzLoader

from ...errors import CheckpointCorrupt
from ...model import Run, Signal, Status
from .. import rules
from ..services import service_in

_json = msgspec.json.Encoder().encode
_strings = msgspec.json.Decoder(tuple[str, ...]).decode
_pair = msgspec.json.Decoder(tuple[str, str]).decode
_json_text = msgspec.json.Decoder(msgspec.Raw).decode

# -- whole columns as parameters ---------------------------------------------------------------------------------------
#
# A batch is written by a few statements over arrays, one array per column. They are packed here, in PostgreSQL's
# binary format, because psycopg does so value by value.

_NULL = b"\xff\xff\xff\xff"
_pack_length = struct.Struct(">i").pack
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Array(bytes):
    """An array in PostgreSQL's binary format."""

    oid = 0


class Texts(Array):
    """An array of text."""

    oid = 1009


class Blobs(Array):
    """An array of bytea."""

    oid = 1001


class Numbers(Array):
    """An array of bigint."""

    oid = 1016


class Times(Array):
    """An array of timestamptz."""

    oid = 1185


class _ArrayDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: bytes) -> bytes:
        return obj


_DUMPERS = {
    kind: type(f"{kind.__name__}Dumper", (_ArrayDumper,), {"oid": kind.oid}) for kind in (Texts, Blobs, Numbers, Times)
}


def register(connection: psycopg.Connection[Any]) -> None:
    """Let a connection accept our arrays, and return every row whatever its columns hold."""
    for kind, dumper in _DUMPERS.items():
        connection.adapters.register_dumper(kind, dumper)
    for loader in (_InstantBinaryLoader, _InstantLoader):
        connection.adapters.register_loader("timestamptz", loader)


def load_strictly(cursor: psycopg.Cursor[Any]) -> None:
    """Let a cursor for a user's statements load values with psycopg's defaults."""
    for loader in (TimestamptzBinaryLoader, TimestamptzLoader):
        cursor.adapters.register_loader("timestamptz", loader)


class OddInstant(str):
    """An instant that PostgreSQL can hold and Python cannot, such as infinity; reading its run reports it."""

    __slots__ = ()

    def astimezone(self, _: Any) -> datetime:
        raise ValueError(f"the time {self} is out of range")


class _InstantBinaryLoader(Loader):
    format = Format.BINARY

    def load(self, data: Any) -> datetime | OddInstant:
        (count,) = _unpack_wide(data)
        try:
            return _EPOCH + timedelta(microseconds=count)
        except OverflowError:
            return OddInstant(_INFINITIES.get(count) or f"{count} microseconds from {_EPOCH:%Y-%m-%d}")


class _InstantLoader(TimestamptzLoader):
    def load(self, data: Any) -> datetime | OddInstant:  # type: ignore[override]
        try:
            return super().load(data)
        except psycopg.DataError:
            return OddInstant(bytes(data).decode())


_unpack_wide = struct.Struct(">q").unpack
_INFINITIES = {2**63 - 1: "infinity", -(2**63): "-infinity"}


def _packed(element: int, items: list[bytes], count: int) -> bytes:
    if not count:
        return struct.pack(">iiI", 0, 0, element)
    return struct.pack(">iiIii", 1, 1, element, count, 1) + b"".join(items)


def eight_bytes(value: int) -> bytes:
    """Return a whole number in binary format; raise OverflowError beyond 64 bits."""
    return value.to_bytes(8, "big", signed=True)


def texts(values: Iterable[str | None]) -> Texts:
    """Pack texts; None is NULL."""
    return Texts(_bytes(25, [None if value is None else value.encode() for value in values]))


def blobs(values: Iterable[bytes | None]) -> Blobs:
    """Pack bytes; None is NULL."""
    return Blobs(_bytes(17, list(values)))


def _bytes(element: int, values: Sequence[bytes | None]) -> bytes:
    items: list[bytes] = []
    add = items.append
    for value in values:
        if value is None:
            add(_NULL)
        else:
            add(_pack_length(len(value)))
            add(value)
    return _packed(element, items, len(values))


def numbers(values: Iterable[int | None]) -> Numbers:
    """Pack whole numbers; None is NULL. Raise OverflowError beyond 64 bits."""
    return Numbers(_wide(20, list(values)))


def times(values: Iterable[datetime | None]) -> Times:
    """Pack instants; None is NULL."""
    return Times(_wide(1184, [None if value is None else microseconds(value) for value in values]))


def _wide(element: int, values: list[int | None]) -> bytes:
    pack = struct.Struct(">iq").pack
    try:
        return _packed(element, [_NULL if value is None else pack(8, value) for value in values], len(values))
    except struct.error as error:
        raise OverflowError(str(error)) from None


def microseconds(at: datetime) -> int:
    """Return an instant in PostgreSQL's count of microseconds."""
    passed = at - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


# -- text --------------------------------------------------------------------------------------------------------------
#
# PostgreSQL's text holds every character except NUL. In free text, NUL is written as two other characters.


def plain(text: str) -> str:
    """Return any text in a form that PostgreSQL accepts."""
    if "\0" in text or "\x1a" in text:
        return text.replace("\x1a", "\x1a1").replace("\0", "\x1a0")
    return text


def plain_or_none(text: str | None) -> str | None:
    """Return any text, or None, in a form that PostgreSQL accepts."""
    return None if text is None else plain(text)


def original(text: str) -> str:
    """Return the original of a stored text."""
    return text.replace("\x1a0", "\0").replace("\x1a1", "\x1a") if "\x1a" in text else text


def original_or_none(text: str | None) -> str | None:
    """Return the original of a stored text, or None."""
    return None if text is None else original(text)


def names(text: str) -> tuple[str, ...]:
    """Return a stored list of names."""
    return _strings(text) if text else ()


def names_text(values: Sequence[str]) -> str:
    """Return a list of names in stored form."""
    return _json(tuple(values)).decode() if values else ""


def tag(name: str, value: str) -> str:
    """Return a tag in stored form, which can be searched."""
    return _json((name, value)).decode()


def tags_text(tags: dict[str, str]) -> str:
    """Return tags as the text of an array."""
    items = (tag(name, value).replace("\\", "\\\\").replace('"', '\\"') for name, value in tags.items())
    return "{" + ",".join(f'"{item}"' for item in items) + "}"


# -- rows --------------------------------------------------------------------------------------------------------------

#: Columns of a run, in the order of `run_from`: r is its row, h its head.
RUN_COLUMNS = (
    "coalesce(r.number, h.number), coalesce(r.id, h.run), r.workflow, h.status, r.created_at, r.version,"
    " r.fingerprint, r.input, r.seed, r.parent, r.parent_key, r.origin, r.queue, r.priority, r.key, r.tags,"
    " r.deadline_at, r.traceparent, h.seq, h.checksum, h.epoch, h.worker, h.due_at, h.wakes, h.signals, h.recoveries,"
    " h.updated_at, r.created_by, r.data_key, h.signals_read, h.kept_from, h.signals_from, r.dedupe, h.holds,"
    " h.gate"
)
RUN_WIDTH = 35


def run_from(row: Sequence[Any]) -> Run:
    """Return the run in a row. Raise `CheckpointCorrupt` if a row is damaged, or if one of its two rows is missing."""
    if row[2] is None or row[3] is None:
        raise CheckpointCorrupt(f"run {row[1]!r}: its row cannot be read: one of its two rows is missing")
    try:
        return Run(
            id=row[1],
            workflow=row[2],
            status=Status(row[3]),
            created_at=row[4].astimezone(UTC),
            version=row[5],
            fingerprint=original(row[6]),
            input=row[7],
            seed=row[8],
            parent=original_or_none(row[9]),
            parent_key=original_or_none(row[10]),
            origin=original_or_none(row[11]),
            queue=original(row[12]),
            priority=row[13],
            key=original_or_none(row[14]),
            tags=dict(map(_pair, row[15])) if row[15] else {},
            deadline_at=_utc(row[16]),
            traceparent=original_or_none(row[17]),
            seq=row[18],
            checksum=row[19],
            epoch=row[20],
            worker=row[21],
            due_at=_utc(row[22]),
            wakes=names(row[23]),
            signals=row[24],
            recoveries=row[25],
            updated_at=_utc(row[26]),
            created_by=original(row[27]),
            data_key=row[28],
            signals_read=row[29],
            kept_from=row[30],
            signals_from=row[31],
            dedupe=original_or_none(row[32]),
            holds=row[33],
            service=None if row[21] is not None else service_in(original_or_none(row[34])),
        )
    except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"run {row[1]!r}: its row cannot be read: {error}") from None


def _utc(at: datetime | None) -> datetime | None:
    return None if at is None else at.astimezone(UTC)


def signal_from(row: Sequence[Any]) -> Signal:
    """Return the signal in a row. Its payload must be JSON; otherwise the record that consumes it would be invalid."""
    run, seq, name, payload, identity, sender, sent_at, checksum = row
    try:
        _json_text(payload)
        signal = Signal(
            run=run,
            name=original(name),
            payload=payload,
            id=original(identity),
            sender=original(sender),
            sent_at=sent_at.astimezone(UTC),
            seq=seq,
            checksum=checksum,
        )
    except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"run {run!r}: its signal {seq} cannot be read: {error}") from None
    return rules.check_signal(signal)
