"""The archive format: runs as lines of JSON, complete and readable, with every record word for word.

An archive is a header, the runs, the documents, and a total. Each run is a line with its facts and head, then its
checkpoints, its signals, and an end that seals these lines. Values that are not JSON text on one line, such as
ciphertext, are stored as base64 under a field whose name says so.
"""

from __future__ import annotations

import gzip
import os
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from ..checks import MOST, check_id, check_name
from ..errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreFull, StoreUnavailable
from ..model import Run, Signal, Status
from ..model.ids import draw
from ..ports import Document, Put, Row
from ..records.keys import key_id
from ..records.record import EARLIEST_YEAR, LATEST_YEAR, Count, Instant
from ..stores.documents import check_puts, checksum_of

#: Newest format that this version reads. A newer one is refused.
FORMAT = 2
#: Format of an archive without documents, which older versions read, too.
FORMAT_OF_RUNS = 1
#: Bytes in a line at most. It fits an input, or a checkpoint with a packed value, with room to spare.
MAX_LINE = 256_000_000

Whole = Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)]
#: Counters that keep growing after an import. The limit keeps them within every store's range.
Growing = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Maybe = msgspec.Raw | msgspec.UnsetType


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    pass


class Header(_Line):
    """The first line."""

    keepstep: str
    format: Count
    made_at: Instant | None = None
    made_by: str = ""


class RunLine(_Line):
    """A run: its facts and its head, without its lease."""

    id: str
    workflow: str
    status: Status
    created_at: Instant
    created_by: str = ""
    version: str = "1"
    fingerprint: str = ""
    input: Maybe = msgspec.UNSET
    input_base64: str = ""
    seed: str = ""
    parent: str | None = None
    parent_key: str | None = None
    origin: str | None = None
    queue: str = "default"
    priority: Whole = 0
    key: str | None = None
    dedupe: str | None = None
    tags: dict[str, str] = {}
    deadline_at: Instant | None = None
    traceparent: str | None = None
    data_key: str = ""
    seq: Count = 0
    checksum: str = ""
    epoch: Growing = 0
    due_at: Instant | None = None
    wakes: tuple[str, ...] = ()
    signals: Count = 0
    recoveries: Growing = 0
    updated_at: Instant | None = None
    signals_read: Growing | None = None
    kept_from: Count = 0
    signals_from: Count = 0
    holds: Count = 0
    service: str | None = None


class CheckpointLine(_Line):
    """A checkpoint, its record word for word."""

    seq: Count
    kind: str
    record: Maybe = msgspec.UNSET
    record_base64: str = ""
    body: str | None = None


class SignalLine(_Line):
    """A signal of a run."""

    seq: Count
    name: str
    payload: Maybe = msgspec.UNSET
    payload_base64: str = ""
    id: str = ""
    sender: str = ""
    sent_at: Instant | None = None
    checksum: str = ""


class End(_Line):
    """The end of a run: its line count and a SHA-256 of them. `damaged` is the damage found when it was written."""

    run: str
    checkpoints: Count
    signals: Count
    sha256: str
    damaged: str = ""


class DocumentLine(_Line):
    """A version of a document; `checksum` is that of its row in a store."""

    collection: str
    key: str
    version: Count
    at: Instant
    checksum: str
    value: Maybe = msgspec.UNSET
    value_base64: str = ""
    writer: str = ""
    owner: str = ""
    expires_at: Instant | None = None


class Total(_Line):
    """The last line."""

    runs: Count
    documents: Count = 0


class Line(_Line):
    """Any line after the header; one field is set. `raw` is a part of a damaged run that only its store can read."""

    run: RunLine | None = None
    checkpoint: CheckpointLine | None = None
    signal: SignalLine | None = None
    raw: dict[str, Any] | None = None
    document: DocumentLine | None = None
    end: End | None = None
    total: Total | None = None


@dataclass(slots=True)
class Archived:
    """One run of an archive and the line that it begins on. `damaged` is the reason not to import it as it is."""

    run: Run
    rows: list[Row]
    signals: list[Signal]
    line: int
    damaged: str = ""


@dataclass(slots=True)
class ArchivedDocument:
    """A version of a document in an archive, and its line."""

    document: Document
    line: int


@dataclass(slots=True)
class Broken:
    """A place in an archive that cannot be read."""

    line: int
    what: str


_encode = msgspec.json.Encoder().encode
_line = msgspec.json.Decoder(Line).decode
_header = msgspec.json.Decoder(Header).decode
_is_json = msgspec.json.Decoder(msgspec.Raw).decode
_RUN_FIELDS = tuple(name for name in RunLine.__struct_fields__ if name not in {"input", "input_base64"})
_SIGNAL_FIELDS = ("seq", "name", "id", "sender", "sent_at", "checksum")


# -- writing -----------------------------------------------------------------------------------------------------------


class ArchiveWriter:
    """Writes an archive run by run."""

    def __init__(self, file: IO[bytes], made_at: datetime, made_by: str, *, with_documents: bool = False) -> None:
        self._file = file
        self._digest = sha256()
        self._run = ""
        self._checkpoints = self._signals = 0
        self.runs = self.documents = 0
        written = FORMAT if with_documents else FORMAT_OF_RUNS
        file.write(_encode(Header("archive", written, made_at, made_by)) + b"\n")

    def begin(self, run: Run) -> None:
        """Write the facts of a run; its checkpoints, its signals and its end must follow."""
        self._digest, self._run = sha256(), run.id
        self._checkpoints = self._signals = 0
        line = RunLine(**{name: getattr(run, name) for name in _RUN_FIELDS})
        line.input, line.input_base64 = _json_or_base64(run.input)
        self._write(Line(run=line))

    def checkpoint(self, row: Row) -> None:
        record, packed = _json_or_base64(bytes(row.record))
        body = None if row.body is None else b64encode(bytes(row.body)).decode()
        self._write(Line(checkpoint=CheckpointLine(row.seq, row.kind, record, packed, body)))
        self._checkpoints += 1

    def signal(self, signal: Signal) -> None:
        line = SignalLine(**{name: getattr(signal, name) for name in _SIGNAL_FIELDS})
        line.payload, line.payload_base64 = _json_or_base64(bytes(signal.payload))
        self._write(Line(signal=line))
        self._signals += 1

    def raw(self, found: dict[str, Any]) -> None:
        """Write a part of a damaged run that only its store can read, unchanged."""
        self._write(Line(raw=found))

    def end(self, damaged: str = "") -> None:
        end = End(self._run, self._checkpoints, self._signals, self._digest.hexdigest(), damaged)
        self._write(Line(end=end))
        self.runs += 1

    def document(self, one: Document) -> None:
        """Write a version of a document, after the runs."""
        line = DocumentLine(one.collection, one.key, one.version, one.at, checksum_of_document(one))
        line.writer, line.owner, line.expires_at = one.writer, one.owner, one.expires_at
        line.value, line.value_base64 = _json_or_base64(one.value)
        self._write(Line(document=line))
        self.documents += 1

    def close(self) -> None:
        """Write the last line. An archive without it counts as truncated."""
        self._write(Line(total=Total(self.runs, self.documents)))

    def _write(self, line: Line) -> None:
        data = _encode(line) + b"\n"
        self._digest.update(data)
        self._file.write(data)


def _json_or_base64(data: bytes) -> tuple[Maybe, str]:
    """Return bytes as JSON if they are JSON text on one line, else as base64."""
    try:
        if b"\n" not in data and data == data.strip():
            _is_json(data)
            return msgspec.Raw(data), ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        pass
    return msgspec.UNSET, b64encode(data).decode() or "="


@contextmanager
def writing(path: str, *, replace: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for writing. It appears complete and durable when the block succeeds, and not at all if it fails."""
    if path == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.exists() and not replace:
        raise DefinitionError(f"{path} exists already; choose another name")
    half = target.with_name(f".{target.name}.{os.getpid()}-{draw(4).hex()}")
    try:
        with half.open("wb") as file:
            if target.suffix == ".gz":
                with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0, filename="") as packed:
                    yield packed  # type: ignore[misc]
            else:
                yield file
            file.flush()
            os.fsync(file.fileno())
        _put(half, target, replace=replace)
        _sync(target.parent)
    except OSError as error:
        failure = StoreFull if error.errno in {28, 122} else StoreUnavailable
        raise failure(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        half.unlink(missing_ok=True)


def _put(half: Path, target: Path, *, replace: bool) -> None:
    """Rename a finished file to its target. Another process may have created the target meanwhile."""
    if not replace:
        try:
            os.link(half, target)
        except FileExistsError:
            raise DefinitionError(f"{target} exists already; choose another name") from None
        except OSError:  # the file system has no hard links
            pass
        else:
            return
    half.replace(target)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- reading -----------------------------------------------------------------------------------------------------------


@contextmanager
def reading(path: str) -> Iterator[IO[bytes]]:
    """Open an archive for reading, decompressed if necessary."""
    if path == "-":
        yield sys.stdin.buffer
        return
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
                    yield unpacked  # type: ignore[misc]
            else:
                yield file
    except OSError as error:
        raise StoreUnavailable(f"{path} cannot be read: {error.strerror or error}") from None


def runs_in(file: IO[bytes], name: str) -> Iterator[Archived | ArchivedDocument | Broken]:
    """Yield runs, then documents of an archive in order, and unreadable places. Only one run is in memory at a time."""
    lines = _lines(file)
    _check_header(lines, name)
    reader = _Reader()
    for number, data in lines:
        found = Broken(number, data) if isinstance(data, str) else reader.take(number, data)
        if found is not None:
            yield found
    if not reader.complete:
        yield Broken(reader.number + 1, "the archive is cut short: its last line is missing")


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes | str]]:
    """Yield numbered lines; a `str` in place of a line is the reason why it cannot be read."""
    number = 0
    while True:
        number += 1
        try:
            data = file.readline(MAX_LINE + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield number, f"it cannot be unpacked: {error}"
            return
        if not data:
            return
        if len(data) > MAX_LINE:
            yield number, f"it is longer than {MAX_LINE:,} bytes"
            return
        yield number, data


def _check_header(lines: Iterator[tuple[int, bytes | str]], name: str) -> None:
    _, data = next(lines, (1, b""))
    try:
        header = _header(data if isinstance(data, bytes) else b"")
    except (msgspec.MsgspecError, ValueError, RecursionError):
        header = Header("", 0)
    if header.keepstep != "archive":
        detail = f": {data}" if isinstance(data, str) else ""
        raise SchemaMismatch(f"{name}, line 1: this is not a Keepstep archive{detail}")
    if header.format > FORMAT:
        raise SchemaMismatch(
            f"{name}, line 1: the archive has format {header.format}, and this Keepstep reads formats up to {FORMAT}; "
            "upgrade Keepstep"
        )


class _Reader:
    """Assembles lines into runs and reports lines that do not fit."""

    def __init__(self) -> None:
        self.number = 0
        self.complete = False
        self._begun = 0
        self._run: Run | None = None
        self._rows: list[Row] = []
        self._signals: list[Signal] = []
        self._digest = sha256()
        self._raw = False
        self._runs = self._documents = 0
        self._skipping = False

    def take(self, number: int, data: bytes) -> Archived | ArchivedDocument | Broken | None:
        self.number = number
        try:
            return self._take(number, data)
        except (msgspec.MsgspecError, ValueError, RecursionError, DefinitionError, StoreError) as error:
            self._run, self._skipping = None, True  # skip the following lines up to the next run
            return Broken(number, str(error))

    def _take(self, number: int, data: bytes) -> Archived | ArchivedDocument | Broken | None:
        if self.complete:
            raise CheckpointCorrupt("a line follows the last line")
        line = _line(data)
        fields = [name for name in line.__struct_fields__ if getattr(line, name) is not None]
        if len(fields) != 1:
            raise CheckpointCorrupt(f"a line must have one field, and has {', '.join(fields) or 'none'}")
        if line.total is not None:
            return self._finish(line.total)
        if line.run is not None:
            cut = Broken(number, "a run begins before the previous one has ended") if self._run is not None else None
            self._run, self._begun, self._digest = _run(line.run), number, sha256(data)
            self._rows, self._signals, self._raw, self._skipping = [], [], False, False
            return cut
        if self._run is None:
            return self._take_outside(number, line)
        if line.end is not None:
            return self._end(line.end)
        self._digest.update(data)
        if line.checkpoint is not None:
            self._rows.append(_row(line.checkpoint, self._next_seq(self._run)))
        elif line.signal is not None:
            self._signals.append(_signal(line.signal, self._run.id))
        else:
            self._raw = True
        return None

    def _take_outside(self, number: int, line: Line) -> ArchivedDocument | None:
        """Take a line that belongs to no run: a document, or the rest of a run that cannot be read."""
        if line.document is not None:
            self._documents += 1
            return ArchivedDocument(_document(line.document), number)
        if not self._skipping:
            raise CheckpointCorrupt("the line belongs to no run")
        self._runs += line.end is not None
        return None

    def _next_seq(self, run: Run) -> int:
        last = self._rows[-1].seq if self._rows else 0
        return run.kept_from if last == 1 and run.kept_from else last + 1

    def _end(self, end: End) -> Archived | Broken:
        run, self._run = self._run, None
        self._runs += 1
        if run is None or end.run != run.id:
            raise CheckpointCorrupt("the line ends a run other than the one that began")
        if (end.checkpoints, end.signals) != (len(self._rows), len(self._signals)):
            raise CheckpointCorrupt(f"run {run.id!r}: some of its lines are missing")
        if end.sha256 != self._digest.hexdigest():
            raise CheckpointCorrupt(f"run {run.id!r}: its lines were changed")
        damaged = end.damaged or ("it was put aside by a repair" if self._raw else "")
        return Archived(run, self._rows, self._signals, self._begun, damaged)

    def _finish(self, total: Total) -> Broken | None:
        self.complete = True
        if self._run is not None:
            return Broken(self.number, "a run has no end")
        if total.documents != self._documents:
            there = f"{total.documents} documents, and {self._documents} were found"
            return Broken(self.number, f"the archive should hold {there}")
        if total.runs != self._runs:
            return Broken(self.number, f"the archive should hold {total.runs} runs, and {self._runs} were found")
        return None


def _run(line: RunLine) -> Run:
    check_id(line.id)
    check_name(line.workflow, "workflow")
    for value, what in ((line.parent, "parent"), (line.origin, "origin")):
        if value is not None:
            check_id(value, what)
    if line.data_key:
        key_id(line.data_key)
    for at in (line.created_at, line.deadline_at, line.due_at, line.updated_at):
        _check_near(at)
    values = {name: getattr(line, name) for name in _RUN_FIELDS}
    return Run(**values, input=_bytes(line.input, line.input_base64))


def _row(line: CheckpointLine, expected: int) -> Row:
    if line.seq != expected:
        raise CheckpointCorrupt(f"expected checkpoint {expected}, got {line.seq}")
    body = None if line.body is None else b64decode(line.body, validate=True)
    return Row(line.seq, line.kind, _bytes(line.record, line.record_base64), body)


def _signal(line: SignalLine, run: str) -> Signal:
    _check_near(line.sent_at)
    values = {name: getattr(line, name) for name in _SIGNAL_FIELDS}
    return Signal(run=run, payload=_bytes(line.payload, line.payload_base64), **values)


def _document(line: DocumentLine) -> Document:
    for at in (line.at, line.expires_at):
        _check_near(at)
    value = _bytes(line.value, line.value_base64)
    facts = (line.collection, line.key, line.version, value, line.at, line.writer, line.owner, line.expires_at)
    one = Document(*facts)
    if checksum_of_document(one) != line.checksum:
        raise CheckpointCorrupt(f"document {one.key!r} of collection {one.collection!r}: its line was changed")
    check_puts([[put_of(one)]])
    return one


def put_of(one: Document) -> Put:
    """Return the put that writes a version of a document into another store."""
    return Put(
        one.collection,
        one.key,
        one.value,
        writer=one.writer,
        owner=one.owner,
        keep=MOST,
        expires_at=one.expires_at,
        version=one.version,
        at=one.at,
    )


def checksum_of_document(one: Document) -> str:
    """Return the checksum of a version, as a store has it."""
    expires_at = None if one.expires_at is None else one.expires_at.timestamp()
    facts = (one.key, one.version, one.at.timestamp(), one.writer, one.owner or None, expires_at)
    return checksum_of(one.collection, facts, one.value)


def _bytes(value: Maybe, packed: str) -> bytes:
    if isinstance(value, msgspec.UnsetType):
        return b"" if packed == "=" else b64decode(packed, validate=True)
    return bytes(value)


def _check_near(at: datetime | None) -> None:
    if at is not None and not EARLIEST_YEAR <= at.year <= LATEST_YEAR:
        raise CheckpointCorrupt(f"times must be from {EARLIEST_YEAR} to {LATEST_YEAR}")
