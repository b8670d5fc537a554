"""Conversion of rows to runs, checkpoints and signals; SQLite accepts any value in any column, so each is checked."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from types import NoneType
from typing import Any, TypeVar

import msgspec

from ...errors import CheckpointCorrupt
from ...model import Run, Signal, Status
from ...ports import Row, instant
from .. import rules, services
from .connection import Cursor

T = TypeVar("T")

_json = msgspec.json.Encoder().encode
_json_text = msgspec.json.Decoder(msgspec.Raw).decode
_strings = msgspec.json.Decoder(tuple[str, ...]).decode
_tags = msgspec.json.Decoder(dict[str, str]).decode

#: The number of a run, as an expression of its row r or its head h; NULL if the value is not an integer.
NUMBER = "iif(typeof({0}.number) = 'integer', {0}.number, NULL)"
#: Columns of a run in order, with their types. SQLite accepts any value in any column, so each value is checked.
_COLUMNS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "coalesce(r.id, h.run)": (str,),
    "r.workflow": (str,),
    "h.status": (str,),
    "r.created_at": (float,),
    "r.version": (str,),
    "r.fingerprint": (str,),
    "CAST(r.input AS BLOB)": (bytes,),
    "r.seed": (str,),
    "r.parent": (str, NoneType),
    "r.parent_key": (str, NoneType),
    "r.origin": (str, NoneType),
    "r.queue": (str,),
    "r.priority": (int,),
    "r.key": (str, NoneType),
    "r.tags": (str,),
    "r.deadline_at": (float, NoneType),
    "r.traceparent": (str, NoneType),
    "h.seq": (int,),
    "h.checksum": (str,),
    "h.epoch": (int,),
    "h.worker": (str, NoneType),
    "h.due_at": (float, NoneType),
    "h.wakes": (str,),
    "h.signals": (int,),
    "h.recoveries": (int,),
    "h.updated_at": (float,),
    "r.created_by": (str,),
    "r.data_key": (str,),
    "h.signals_read": (int,),
    "h.kept_from": (int,),
    "h.signals_from": (int,),
    "r.dedupe": (str, NoneType),
    "h.holds": (int,),
    "h.gate": (str, NoneType),
}
_RUN_COLUMNS = ", ".join([*_COLUMNS][1:])
#: A stored value with text as bytes, so that text in any column that is not UTF-8 does not stop a query.
RAW = "iif(typeof({0}) = 'text', CAST({0} AS BLOB), {0})"
#: The columns of a run with text as bytes, for rows with text that is not UTF-8.
_RAW_COLUMNS = ", ".join(RAW.format(name) for name in [*_COLUMNS][1:])
#: The columns of a run with an empty input, which is only tested for NULL, so that its pages are not read.
_LISTED = ["iif(r.input IS NULL, NULL, x'')" if "r.input" in name else name for name in [*_COLUMNS][1:]]
_WITHOUT_INPUT = ", ".join(_LISTED)
_RAW_WITHOUT_INPUT = ", ".join(RAW.format(name) for name in _LISTED)
_ONE_RUN = "FROM keepstep_run r LEFT JOIN keepstep_head h ON h.run = r.id WHERE r.id = ?"


def typed(value: Any, kind: type[T]) -> T:
    """Return a stored value, or raise `TypeError` if it has another type."""
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def seconds(at: datetime | None) -> float | None:
    """Return the stored form of an instant."""
    return None if at is None else at.timestamp()


def names(text: str) -> tuple[str, ...]:
    """Parse a stored list of names."""
    return _strings(text) if text else ()


def names_text(values: Sequence[str]) -> str:
    """Return the stored form of a list of names."""
    return _json(tuple(values)).decode() if values else ""


def read_run(cursor: Cursor, run_id: str) -> Run | None:
    """Return the run with this id and its head, or None."""
    rows = run_rows(cursor, _ONE_RUN, (run_id,))
    return run_from(rows[0]) if rows else None


def run_rows(
    cursor: Cursor, where: str, values: Sequence[Any], number: str = NUMBER.format("r"), *, whole: bool = True
) -> list[Sequence[Any]]:
    """Return the rows of some runs for `run_from`, which reports damage: the number first, then the id.

    Unless `whole` is set, inputs are empty and not read.
    """
    columns, raw = (_RUN_COLUMNS, _RAW_COLUMNS) if whole else (_WITHOUT_INPUT, _RAW_WITHOUT_INPUT)
    try:
        rows: list[Sequence[Any]] = cursor.execute(f"SELECT {number}, {columns} {where}", values).fetchall()
    except UnicodeDecodeError:
        found = cursor.execute(f"SELECT {number}, {raw} {where}", values).fetchall()
        rows = [[*map(_text, row, _COLUMNS.values())] for row in found]
    return rows


def _text(value: Any, kinds: tuple[type, ...]) -> Any:
    return text_or_bytes(value) if str in kinds else value


def text_or_bytes(value: Any) -> Any:
    """Decode text that was read as bytes; return the bytes if that fails."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def run_from(row: Sequence[Any]) -> Run:
    """Return the run in a row; `CheckpointCorrupt` names a run whose row is damaged."""
    try:
        for value, (name, kinds) in zip(row, _COLUMNS.items(), strict=True):
            if type(value) not in kinds:
                raise TypeError(f"{name} is {value!r}")
        return _run(row)
    except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"run {run_name(row)!r}: its row cannot be read: {error}") from None


def run_name(row: Sequence[Any]) -> str:
    """Return the id in a row of a run, as far as it can be read."""
    return row[1].decode("utf-8", "backslashreplace") if isinstance(row[1], bytes) else str(row[1])


def _run(row: Sequence[Any]) -> Run:
    return Run(
        id=row[1],
        workflow=row[2],
        status=Status(row[3]),
        created_at=instant(row[4]),
        version=row[5],
        fingerprint=row[6],
        input=row[7],
        seed=row[8],
        parent=row[9],
        parent_key=row[10],
        origin=row[11],
        queue=row[12],
        priority=row[13],
        key=row[14],
        tags=_tags(row[15]) if row[15] else {},
        deadline_at=_instant(row[16]),
        traceparent=row[17],
        seq=row[18],
        checksum=row[19],
        epoch=row[20],
        worker=row[21],
        due_at=_instant(row[22]),
        wakes=names(row[23]),
        signals=row[24],
        recoveries=row[25],
        updated_at=_instant(row[26]),
        created_by=row[27],
        data_key=row[28],
        signals_read=row[29],
        kept_from=row[30],
        signals_from=row[31],
        dedupe=row[32],
        holds=row[33],
        service=None if row[21] is not None else services.service_in(row[34]),
    )


def _instant(value: float | None) -> datetime | None:
    return None if value is None else instant(value)


def row_from(run_id: str, row: Sequence[Any]) -> Row:
    """Return the checkpoint in a row. A malformed number would sort after all others and be read forever."""
    seq, kind, record, body = row
    if type(seq) is not int or type(kind) is not str:
        raise CheckpointCorrupt(f"run {run_id!r}: its record {seq!r} of kind {kind!r} cannot be read")
    return Row(seq, kind, record, body)


def signal_from(row: Sequence[Any]) -> Signal:
    """Return the signal in a row. Its payload must be JSON, because the record that consumes it contains it."""
    run, name, payload, identity, sender, sent_at, seq, checksum = row
    try:
        _json_text(payload)
        signal = Signal(
            run=run,
            name=typed(name, str),
            payload=payload,
            id=typed(identity, str),
            sender=typed(sender, str),
            sent_at=instant(typed(sent_at, float)),
            seq=typed(seq, int),
            checksum=typed(checksum, str),
        )
    except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise CheckpointCorrupt(f"run {run!r}: its signal {seq} cannot be read: {error}") from None
    return rules.check_signal(signal)
