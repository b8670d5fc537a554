"""How our records become columns of PostgreSQL, many rows at a time, and come back."""

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

from ..errors import CheckpointCorrupt
from ..model import Run, Signal, Status
from . import rules

_json = msgspec.json.Encoder().encode
_strings = msgspec.json.Decoder(tuple[str, ...]).decode
_pair = msgspec.json.Decoder(tuple[str, str]).decode
_json_text = msgspec.json.Decoder(msgspec.Raw).decode

# -- whole columns as parameters ---------------------------------------------------------------------------------------
#
# A batch is written by a few statements over arrays, one array for each column. They are packed here, in PostgreSQL's
# binary form, because psycopg does so value by value.

_NULL = b"\xff\xff\xff\xff"
_pack_length = struct.Struct(">i").pack
_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


class Array(bytes):
    """An array as PostgreSQL takes it."""

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
    """Have a connection take our arrays, and give every row whatever its columns hold."""
    for kind, dumper in _DUMPERS.items():
        connection.adapters.register_dumper(kind, dumper)
    for loader in (_InstantBinaryLoader, _InstantLoader):
        connection.adapters.register_loader("timestamptz", loader)


def load_strictly(cursor: psycopg.Cursor[Any]) -> None:
    """Have a cursor that runs a user's statements load values as psycopg does by itself."""
    for loader in (TimestamptzBinaryLoader, TimestamptzLoader):
        cursor.adapters.register_loader("timestamptz", loader)


class OddInstant(str):
    """An instant that PostgreSQL can hold and Python cannot, such as infinity: whoever reads its run is told."""

    __slots__ = ()

    def astimezone(self, _: Any) -> datetime:
        raise ValueError(f"the time {self} is beyond the calendar")


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
    """A whole number as PostgreSQL takes it; one beyond 64 bits is an OverflowError."""
    return value.to_bytes(8, "big", signed=True)


def texts(values: Iterable[str | None]) -> Texts:
    """Text, some of it perhaps missing."""
    return Texts(_bytes(25, [None if value is None else value.encode() for value in values]))


def blobs(values: Iterable[bytes | None]) -> Blobs:
    """Bytes, some of them perhaps missing."""
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
    """Whole numbers, some of them perhaps missing; one beyond 64 bits is an OverflowError."""
    return Numbers(_wide(20, list(values)))


def times(values: Iterable[datetime | None]) -> Times:
    """Instants, some of them perhaps missing."""
    return Times(_wide(1184, [None if value is None else microseconds(value) for value in values]))


def _wide(element: int, values: list[int | None]) -> bytes:
    pack = struct.Struct(">iq").pack
    try:
        return _packed(element, [_NULL if value is None else pack(8, value) for value in values], len(values))
    except struct.error as error:
        raise OverflowError(str(error)) from None


def microseconds(at: datetime) -> int:
    """An instant as PostgreSQL counts it."""
    passed = at - _EPOCH
    return (passed.days * 86_400 + passed.seconds) * 1_000_000 + passed.microseconds


# -- text --------------------------------------------------------------------------------------------------------------
#
# PostgreSQL's text holds every character but NUL. Where people may write what they like, it is written in two others.


def plain(text: str) -> str:
    """Any text as one that PostgreSQL takes."""
    if "\0" in text or "\x1a" in text:
        return text.replace("\x1a", "\x1a1").replace("\0", "\x1a0")
    return text


def plain_or_none(text: str | None) -> str | None:
    """The same, of a text that may be missing."""
    return None if text is None else plain(text)


def original(text: str) -> str:
    """The text that was written."""
    return text.replace("\x1a0", "\0").replace("\x1a1", "\x1a") if "\x1a" in text else text


def original_or_none(text: str | None) -> str | None:
    """The same, of a text that may be missing."""
    return None if text is None else original(text)


def names(text: str) -> tuple[str, ...]:
    """A list of names as it was stored."""
    return _strings(text) if text else ()


def names_text(values: Sequence[str]) -> str:
    """A list of names as it is stored."""
    return _json(tuple(values)).decode() if values else ""


def tag(name: str, value: str) -> str:
    """A tag as it is stored, in a form that can be looked for."""
    return _json((name, value)).decode()


def tags_text(tags: dict[str, str]) -> str:
    """Tags as the text of an array."""
    items = (tag(name, value).replace("\\", "\\\\").replace('"', '\\"') for name, value in tags.items())
    return "{" + ",".join(f'"{item}"' for item in items) + "}"


# -- rows --------------------------------------------------------------------------------------------------------------

#: What a run is read from, in the order of `run_from`: r is its row, h its head.
RUN_COLUMNS = (
    "coalesce(r.number, h.number), coalesce(r.id, h.run), r.workflow, h.status, r.created_at, r.version,"
    " r.fingerprint, r.input, r.seed, r.parent, r.parent_key, r.origin, r.queue, r.priority, r.key, r.tags,"
    " r.deadline_at, r.traceparent, h.seq, h.checksum, h.epoch, h.worker, h.due_at, h.wakes, h.signals, h.recoveries,"
    " h.updated_at, r.created_by, r.data_key"
)
RUN_WIDTH = 29


def run_from(row: Sequence[Any]) -> Run:
    """The run in a row; `CheckpointCorrupt` names one whose row is damaged, or of whose two rows one is gone."""
    if row[2] is None or row[3] is None:
        raise CheckpointCorrupt(f"run {row[1]!r}: its row cannot be read: of its two rows one is gone")
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
        )
    except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"run {row[1]!r}: its row cannot be read: {error}") from None


def _utc(at: datetime | None) -> datetime | None:
    return None if at is None else at.astimezone(UTC)


def signal_from(row: Sequence[Any]) -> Signal:
    """The signal in a row. Its payload must be JSON, or the record that takes it up would be none."""
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
