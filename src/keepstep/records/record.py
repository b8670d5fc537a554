"""The stored form of a checkpoint: how a record is sealed on write and verified on read."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec

from ..errors import CheckpointCorrupt, EncryptionError, SchemaMismatch
from ..model import Checkpoint, Claim, ErrorInfo, Kind, Outcome, Run, Status, Trigger
from ..ports import Create, Row
from .data import CHECKED, OPEN, STEERING
from .keys import Cipher

if TYPE_CHECKING:
    from .data import Data
else:
    Data = dict[str, Any]  # msgspec keeps every key, also those of a newer version

#: Format of a record that older versions can read, too. Records of older formats are migrated on read.
FORMAT = 2
#: Format of a record that only versions that record the start of waits can read.
FORMAT_WITH_WAITS = 3
#: Format of a record that only versions that know saved progress can read.
FORMAT_WITH_SAVED = 4
#: Format of a record that only versions that can undo steps can read.
FORMAT_WITH_UNDO = 5
#: Format of a record that only versions that know keepers can read.
FORMAT_WITH_KEPT = 6
#: Newest format that this version reads; newer ones are refused.
NEWEST_FORMAT = FORMAT_WITH_KEPT
#: First format whose chains begin with a digest of the run's creation.
_FORMAT_WITH_ORIGIN = 2

#: Size in bytes above which a value is compressed and stored beside its record.
COMPRESS_OVER = 100_000
#: Size in bytes above which a consolidated state is compressed. It is lower because earlier records hold its content.
COMPRESS_STATES_OVER = 10_000
#: Size in bytes above which a value is refused, with the step's name.
MAX_VALUE = 10_000_000
#: Maximum size in bytes of a decompressed value, whatever limit it was written under. Stops decompression bombs.
LARGEST_UNPACKED = 1 << 30
_STATE = Kind.STATE.value


#: A non-negative integer and an instant, as validated when a record is read.
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Instant = Annotated[datetime, msgspec.Meta(tz=True)]


class StoredError(msgspec.Struct, omit_defaults=True):
    """An error inside a record."""

    type: str
    message: str
    error_class: str = "unknown"
    code: str | None = None
    traceback: str = ""
    attempt: Count = 0
    id: str = ""
    caused_by: tuple[Count, ...] = ()

    def info(self) -> ErrorInfo:
        return ErrorInfo(*(getattr(self, name) for name in self.__struct_fields__))


class Claimed(msgspec.Struct, omit_defaults=True):
    """How the worker that wrote a record claimed its run; stored in the first record under each lease.

    `before` is the status before the claim. `since` is the end of the previous lease, or the last write of its owner.
    """

    epoch: Count
    at: Instant
    before: str
    since: Instant | None = None


class Record(msgspec.Struct, omit_defaults=True, gc=False):
    """A checkpoint in stored form. Defaults are omitted from the text, so that common records are short."""

    run: str
    kind: str
    seq: Count = 0
    step: str = ""
    outcome: str = "success"
    ordinal: Count = 0
    attempt: Count = 0
    trigger: str = "automatic"
    worker: str = ""
    agent: str | None = None
    stage: str | None = None
    started_at: Instant | None = None
    finished_at: Instant | None = None
    digest: str = ""
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    packed: str = ""
    error: StoredError | None = None
    retry_at: Instant | None = None
    data: Data | None = None
    claimed: Claimed | None = None
    asked: Count = 0
    format: Count = 0
    previous: str = ""

    def raw(self) -> bytes:
        """Return the value's JSON text; `null` if there is none."""
        value = self.value
        if value is msgspec.UNSET:
            if self.packed == ENCRYPTED:
                raise EncryptionError(f"run {self.run!r}: the value at seq {self.seq} is encrypted; its key is needed")
            return b"null"
        return bytes(value)


#: Placeholder for a time that is missing from a damaged record.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode

#: Fields that are fixed when a run is created, besides its input.
_facts = attrgetter(
    "id", "workflow", "version", "fingerprint", "queue", "priority", "seed", "parent", "parent_key", "origin", "key"
)


def origin(run: Run) -> str:
    """Return the start of a run's chain, which seals its creation: half for its input, half for the rest."""
    deadline = None if run.deadline_at is None else run.deadline_at.timestamp()
    facts = (
        *_facts(run),
        sorted(run.tags.items()),
        deadline,
        run.traceparent,
        run.created_at.timestamp(),
        run.created_by,
    )
    return sha256(run.input).hexdigest()[:32] + sha256(_encode(facts)).hexdigest()[:32]


def born(run: Run, first: Record | None = None, cipher: Cipher | None = None) -> Create:
    """Return the creation of a run that is not stored yet, with the start of its chain and its first record."""
    checksum = origin(run)
    rows = []
    if first is not None:
        row, checksum = seal(first, 1, checksum, cipher)
        rows.append(row)
    object.__setattr__(run, "seq", len(rows))  # a copy would cost three times as much as the rest of this function
    object.__setattr__(run, "checksum", checksum)
    return Create(run, rows)


def chain_end(run: Run) -> str:
    """Return the checksum that the next record names as its predecessor; a run of format 1 may begin its chain now."""
    return run.checksum if run.checksum or run.seq else origin(run)


def check_origin(run: Run) -> None:
    """Refuse a run without records whose input, seed or other facts differ from those of its creation."""
    if not run.seq and run.checksum:
        _compare_origin(run.id, run.checksum, origin(run))


def _compare_origin(run: str, named: str, found: str) -> None:
    if named != found:
        what = "its input" if named[:32] != found[:32] else "its seed, tags, deadline or another fact of its creation"
        raise CheckpointCorrupt(f"run {run!r}: chain broken at its beginning: {what} is not what it was created with")


def claimed(claim: Claim) -> Claimed | None:
    """Return the claim to store in the first record under a lease; None if the run was created with the lease."""
    if claim.before is None:
        return None
    return Claimed(claim.lease.epoch, claim.run.updated_at or EPOCH, claim.before.value, claim.since)


def seal(
    record: Record, seq: int, previous: str, cipher: Cipher | None = None, packed: bytes | None = None
) -> tuple[Row, str]:
    """Append a record to the chain: return its row, and the checksum that the next record will hold.

    With the run's cipher, content from user code is encrypted and bound to everything that stays readable. `packed` is
    the value as compressed by `pack`; without it, a large value is compressed here.
    """
    record.seq = seq
    record.previous = previous
    if record.format < FORMAT:  # noqa: PLR1730 - `max` is slower
        record.format = FORMAT
    if record.asked == seq - 1:  # the common case, omitted from the text
        record.asked = 0
    if cipher is not None:
        return _sealed_and_hidden(record, cipher)
    body = None
    value = record.value
    if (
        value is not msgspec.UNSET
        and len(value) > COMPRESS_STATES_OVER
        and (len(value) > COMPRESS_OVER or record.kind == _STATE)
    ):
        body = pack(bytes(value)) if packed is None else packed
        record = msgspec.structs.replace(record, value=msgspec.UNSET, packed="zlib")
    text = _encode(record)
    if body is None:
        return Row(seq, record.kind, text, None), sha256(text).hexdigest()
    return Row(seq, record.kind, text, body), sha256(text + body).hexdigest()


def numbers(run: Run) -> Iterator[int]:
    """Yield the numbers of a run's records, without those that were removed."""
    yield 1
    yield from count(run.kept_from or 2)


class _Hidden(msgspec.Struct, omit_defaults=True):
    """The encrypted part of a record."""

    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    digest: str = ""
    message: str = ""
    traceback: str = ""
    data: Data | None = None


#: Value of `packed` for a body that holds the encrypted part of its record.
ENCRYPTED = "aes-256-gcm"
#: Placeholder for the message of an encrypted error.
HIDDEN = "(encrypted)"
_PLAIN, _DEFLATED = b"j", b"z"
_decode_hidden = msgspec.json.Decoder(_Hidden).decode


def _sealed_and_hidden(record: Record, cipher: Cipher) -> tuple[Row, str]:
    hidden = _Hidden(record.value, record.digest)
    error, data = record.error, record.data
    if error is not None:
        hidden.message, hidden.traceback = error.message, error.traceback
        error = msgspec.structs.replace(error, message="", traceback="")
    if data is not None and not OPEN.issuperset(data):
        hidden.data = cast("Data", {name: item for name, item in data.items() if name not in OPEN})
        data = cast("Data", {name: item for name, item in data.items() if name in OPEN})
    shown = msgspec.structs.replace(record, value=msgspec.UNSET, digest="", error=error, data=data, packed=ENCRYPTED)
    text, plain = _encode(shown), _encode(hidden)
    plain = _DEFLATED + zlib.compress(plain, 1) if len(plain) > COMPRESS_OVER else _PLAIN + plain
    body = cipher.hide(plain, "record", text)
    return Row(record.seq, record.kind, text, body), sha256(text + body).hexdigest()


def opened(row: Row, cipher: Cipher) -> Row:
    """Return the row with its encrypted part decrypted; refuse a row that is not encrypted.

    A row that only sets the run aside may be in plain text, because repairing or moving a store needs no keys.
    """
    if row.body is None:
        if _only_sets_aside(row):
            return row
        raise CheckpointCorrupt(f"run {cipher.run!r}: the record at seq {row.seq} is not encrypted, and must be")
    plain = cipher.reveal(bytes(row.body), "record", bytes(row.record))
    return Row(row.seq, row.kind, row.record, row.body, plain)


def _only_sets_aside(row: Row) -> bool:
    """Whether the row is a set-aside notice that carries no data the engine acts on."""
    try:
        record = _decode(bytes(row.record))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    if record.kind != Kind.ERROR.value or row.kind != record.kind or record.packed or record.error is None:
        return False
    return record.value is msgspec.UNSET and not record.error.caused_by and STEERING.isdisjoint(record.data or ())


def _reveal(run: str, record: Record, plain: bytes | None) -> None:
    """Restore the encrypted part of a record; without the key, fill in placeholders."""
    if plain is None:
        if record.error is not None:
            record.error.message = HIDDEN
        return
    text = plain[1:]
    if plain[:1] == _DEFLATED:
        text = _inflate(run, record, text)
    try:
        hidden = _decode_hidden(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"run {run!r}: the record at seq {record.seq} is not readable: {error}") from None
    record.value, record.digest, record.packed = hidden.value, hidden.digest, ""
    if record.error is not None:
        record.error.message, record.error.traceback = hidden.message, hidden.traceback
    if hidden.data is not None:
        record.data = {**(record.data or {}), **hidden.data}


def pack(value: bytes) -> bytes:
    """Return a large value compressed, to be stored beside its record."""
    return zlib.compress(value, 1)


def unseal(
    rows: Iterable[Row], run: str, after: int = 0, previous: str = "", kept_from: int = 0
) -> Iterator[tuple[Record, str]]:
    """Verify rows in order and yield each record with its checksum.

    `previous` is the checksum of the record before the first row, or the run's `origin`; without it, the predecessor
    that the first row names is trusted. If records were removed, `kept_from` follows the first one, and the predecessor
    that it names is trusted, too.
    """
    for row in rows:
        text, body = bytes(row.record), row.body
        try:
            record = _decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            _refuse_newer(run, row.seq, _format_of(text))
            raise CheckpointCorrupt(f"run {run!r}: the record at seq {row.seq} is not readable: {error}") from None
        _refuse_newer(run, row.seq, record.format)
        after += 1
        if after == 2 and kept_from:
            after, previous = kept_from, ""
        if row.seq != after or record.seq != after or record.run != run:
            raise CheckpointCorrupt(
                f"run {run!r}: chain broken at seq {after}: found the record {record.seq} of run {record.run!r}"
            )
        if after == 1 and previous and record.format >= _FORMAT_WITH_ORIGIN:
            _compare_origin(run, record.previous, previous)
        elif after > 1 and previous and record.previous != previous:
            raise CheckpointCorrupt(
                f"run {run!r}: chain broken at seq {after}: the record before it is not the one it names"
            )
        problem = _problem(record)
        if problem:
            raise CheckpointCorrupt(f"run {run!r}: the record at seq {after} is not one of ours: {problem}")
        if row.kind != record.kind:  # a query by kind would miss it
            raise CheckpointCorrupt(f"run {run!r}: the {record.kind!r} at seq {after} is kept as a {row.kind[:60]!r}")
        if body is not None:
            previous = sha256(text + bytes(body)).hexdigest()
            _take_in(run, record, bytes(body), row.opened)
        else:
            previous = sha256(text).hexdigest()
        yield record, previous


def _refuse_newer(run: str, seq: int, number: int) -> None:
    if number > NEWEST_FORMAT:
        raise SchemaMismatch(
            f"run {run!r}: the record at seq {seq} has format {number}, newer than {NEWEST_FORMAT}; upgrade Keepstep"
        )


class _Formatted(msgspec.Struct):
    """The part of a record that names its format."""

    format: Count = 0


_decode_format = msgspec.json.Decoder(_Formatted).decode


def _format_of(text: bytes) -> int:
    """Return the format that a record names; 0 if it names none."""
    try:
        return _decode_format(text).format
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0


def unseal_some(rows: Iterable[Row], run: str) -> Iterator[tuple[Record, str]]:
    """Verify rows that are not consecutive, each by itself."""
    for row in rows:
        yield from unseal([row], run, row.seq - 1)


def _take_in(run: str, record: Record, body: bytes, plain: bytes | None) -> None:
    """Add the value that is stored beside a record."""
    if record.packed == ENCRYPTED:
        _reveal(run, record, plain)
    else:
        record.value = msgspec.Raw(_unpack(run, record, body))


def _problem(record: Record) -> str:
    """Return what makes a record invalid, or an empty text; callers rely on these checks."""
    if record.kind not in _KINDS or record.outcome not in _OUTCOMES or record.trigger not in _TRIGGERS:
        return f"it is a {record.kind[:60]!r}, {record.outcome[:60]!r}, by {record.trigger[:60]!r}"
    if not (_is_near(record.finished_at) and _is_near(record.started_at) and _is_near(record.retry_at)):
        return f"it tells of a time before {EARLIEST_YEAR} or after {LATEST_YEAR}"
    lease = record.claimed
    if lease is not None and not (lease.before in _STATUSES and _is_near(lease.at) and _is_near(lease.since)):
        return f"it was claimed from {lease.before[:60]!r} at {lease.at}"
    return _problem_in(cast("dict[str, Any]", record.data)) if record.data is not None else ""


def _is_near(at: datetime | None) -> bool:
    return at is None or EARLIEST_YEAR <= at.year <= LATEST_YEAR


def _problem_in(data: dict[str, Any]) -> str:
    for name, item in data.items():
        wanted = CHECKED.get(name)
        if wanted is not None and type(item) is not wanted:
            return f"its {name!r} is a {type(item).__name__}"
        if name == "seqs" and not _NUMBERS.issuperset(map(type, item)):
            return "its 'seqs' are not numbers"
        if name == "renames" and not all(type(one) is str for one in (*item, *item.values())):
            return "its 'renames' are not names"
        if name == "before" and item not in _STATUSES:
            return f"its 'before' is {item[:60]!r}"
    return ""


#: First and last year that a record may contain. Times in this range can be added to the longest waits.
EARLIEST_YEAR, LATEST_YEAR = 1900, 9000
_KINDS, _OUTCOMES, _TRIGGERS, _STATUSES = (
    frozenset(one.value for one in names) for names in (Kind, Outcome, Trigger, Status)
)
_NUMBERS = frozenset((int,))


def _unpack(run: str, record: Record, body: bytes) -> bytes:
    if record.packed != "zlib":
        raise CheckpointCorrupt(f"run {run!r}: the value at seq {record.seq} is packed as {record.packed!r}")
    value = _inflate(run, record, body)
    try:
        _check_json(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"run {run!r}: the value at seq {record.seq} is not JSON: {error}") from None
    return value


def _inflate(run: str, record: Record, body: bytes) -> bytes:
    inflate = zlib.decompressobj()
    try:
        value = inflate.decompress(body, LARGEST_UNPACKED)
    except zlib.error as error:
        raise CheckpointCorrupt(f"run {run!r}: the value at seq {record.seq} cannot be unpacked: {error}") from None
    if inflate.unconsumed_tail or not inflate.eof:
        raise CheckpointCorrupt(f"run {run!r}: the value at seq {record.seq} is cut short or too large")
    return value


def checkpoint(record: Record, checksum: str) -> Checkpoint:
    """Return the record as a reader sees it."""
    try:
        return _checkpoint(record, checksum)
    except ValueError as error:
        raise CheckpointCorrupt(
            f"run {record.run!r}: the record at seq {record.seq} is not readable: {error}"
        ) from None


def _checkpoint(record: Record, checksum: str) -> Checkpoint:
    return Checkpoint(
        run=record.run,
        seq=record.seq,
        kind=Kind(record.kind),
        step=record.step,
        outcome=Outcome(record.outcome),
        ordinal=record.ordinal,
        attempt=record.attempt,
        trigger=Trigger(record.trigger),
        worker=record.worker,
        agent=record.agent,
        stage=record.stage,
        started_at=record.started_at,
        finished_at=record.finished_at or EPOCH,
        digest=record.digest,
        value=None if record.value is msgspec.UNSET else bytes(record.value),
        error=record.error.info() if record.error else None,
        retry_at=record.retry_at,
        format=record.format,
        previous=record.previous,
        checksum=checksum,
        data=dict(record.data or {}),
    )
