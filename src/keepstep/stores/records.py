"""The stored form of a checkpoint: how a record is sealed on write and verified on read."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from hashlib import sha256
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from ..errors import CheckpointCorrupt, EncryptionError, SchemaMismatch
from ..model import Checkpoint, Claim, ErrorInfo, Kind, Outcome, Run, Status, Trigger
from ..ports import Create, Row
from .keys import Cipher

#: The format of a record that older versions understand, too. Older ones are migrated on read.
FORMAT = 2
#: The format of records that only versions understand which record when waits began.
FORMAT_WITH_WAITS = 3
#: The newest format that this version reads; newer ones are refused.
NEWEST_FORMAT = FORMAT_WITH_WAITS
#: The first format whose chains begin with how their run was created, rather than with nothing.
_FORMAT_WITH_ORIGIN = 2

#: A value larger than this is kept compressed beside its record.
COMPRESS_OVER = 100_000
#: A consolidated state larger than this is: everything in it can be read in the records before it.
COMPRESS_STATES_OVER = 10_000
#: A value larger than this is refused, with the step's name.
MAX_VALUE = 10_000_000
#: No packed value grows beyond this when it is read, whatever limit it was written under.
LARGEST_UNPACKED = 1 << 30
_STATE = Kind.STATE.value


#: A whole number that counts something, and an instant; what is stored is held to it when it is read.
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
    """How the worker that wrote a record came by its run: told by the first record that it writes of it.

    `before` is the status that the claim found, `since` when the lease before ended or its owner last wrote.
    """

    epoch: Count
    at: Instant
    before: str
    since: Instant | None = None


class Record(msgspec.Struct, omit_defaults=True, gc=False):
    """A checkpoint as it is stored. Defaults are left out of the text, so that the common record is short."""

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
    data: dict[str, Any] | None = None
    claimed: Claimed | None = None
    asked: Count = 0
    format: Count = 0
    previous: str = ""

    def raw(self) -> bytes:
        """The value's JSON text; `null` if there is none."""
        value = self.value
        if value is msgspec.UNSET:
            if self.packed == ENCRYPTED:
                raise EncryptionError(f"run {self.run!r}: the value at seq {self.seq} is encrypted; its key is needed")
            return b"null"
        return bytes(value)


#: Stands in for a time that a damaged record lacks.
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Record).decode
_check_json = msgspec.json.Decoder(msgspec.Raw).decode

#: What is fixed when a run is created, beside its input.
_facts = attrgetter(
    "id", "workflow", "version", "fingerprint", "queue", "priority", "seed", "parent", "parent_key", "origin", "key"
)


def origin(run: Run) -> str:
    """What the chain of a run begins with, so that it holds its creation too: half for its input, half for the rest."""
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
    """The creation of a run that nobody else has seen yet, with the beginning of its chain and its first record."""
    checksum = origin(run)
    rows = []
    if first is not None:
        row, checksum = seal(first, 1, checksum, cipher)
        rows.append(row)
    object.__setattr__(run, "seq", len(rows))  # a copy of it would cost three times as much as all this
    object.__setattr__(run, "checksum", checksum)
    return Create(run, rows)


def chain_end(run: Run) -> str:
    """What the next record of a run names as the one before; a run of format 1 that has none begins its chain now."""
    return run.checksum if run.checksum or run.seq else origin(run)


def check_origin(run: Run) -> None:
    """Refuse a run without records whose input, seed or other facts are not those that it was created with."""
    if not run.seq and run.checksum:
        _compare_origin(run.id, run.checksum, origin(run))


def _compare_origin(run: str, named: str, found: str) -> None:
    if named != found:
        what = "its input" if named[:32] != found[:32] else "its seed, tags, deadline or another fact of its creation"
        raise CheckpointCorrupt(f"run {run!r}: chain broken at its beginning: {what} is not what it was created with")


def claimed(claim: Claim) -> Claimed | None:
    """What the first record under a lease says about it; nothing when the run was leased at birth."""
    if claim.before is None:
        return None
    return Claimed(claim.lease.epoch, claim.run.updated_at or EPOCH, claim.before.value, claim.since)


def seal(
    record: Record, seq: int, previous: str, cipher: Cipher | None = None, packed: bytes | None = None
) -> tuple[Row, str]:
    """Give a record its place in the chain: its row, and the checksum that the next one will hold.

    With the cipher of its run, what the user's code said is encrypted, bound to all that stays readable. `packed` is
    what `pack` made of the value before; without it, a large value is compressed here.
    """
    record.seq = seq
    record.previous = previous
    if record.format < FORMAT:  # noqa: PLR1730 - max takes its time
        record.format = FORMAT
    if record.asked == seq - 1:  # as a rule, and left out
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


class _Hidden(msgspec.Struct, omit_defaults=True):
    """What is encrypted of a record."""

    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    digest: str = ""
    message: str = ""
    traceback: str = ""
    data: dict[str, Any] | None = None


#: How a body is packed that holds the encrypted part of its record.
ENCRYPTED = "aes-256-gcm"
#: Stands in for the message of an error that is encrypted.
HIDDEN = "(encrypted)"
#: What stays readable of `data`: the structure that repairs, audits and the doctor go by. Anything else is hidden.
_OPEN_DATA = frozenset(
    (
        *("signal", "signal_name", "sender", "to", "child", "continued_as", "choice", "key", "ask", "seqs", "beyond"),
        *("next", "act", "actor", "before", "workflow", "version", "from", "epoch", "recoveries"),
        *("origin", "origin_seq", "origin_checksum", "renew", "fingerprint", "renames"),
    )
)
_PLAIN, _DEFLATED = b"j", b"z"
_decode_hidden = msgspec.json.Decoder(_Hidden).decode


def _sealed_and_hidden(record: Record, cipher: Cipher) -> tuple[Row, str]:
    hidden = _Hidden(record.value, record.digest)
    error, data = record.error, record.data
    if error is not None:
        hidden.message, hidden.traceback = error.message, error.traceback
        error = msgspec.structs.replace(error, message="", traceback="")
    if data is not None and not _OPEN_DATA.issuperset(data):
        hidden.data = {name: item for name, item in data.items() if name not in _OPEN_DATA}
        data = {name: item for name, item in data.items() if name in _OPEN_DATA}
    shown = msgspec.structs.replace(record, value=msgspec.UNSET, digest="", error=error, data=data, packed=ENCRYPTED)
    text, plain = _encode(shown), _encode(hidden)
    plain = _DEFLATED + zlib.compress(plain, 1) if len(plain) > COMPRESS_OVER else _PLAIN + plain
    body = cipher.hide(plain, "record", text)
    return Row(record.seq, record.kind, text, body), sha256(text + body).hexdigest()


def opened(row: Row, cipher: Cipher) -> Row:
    """The row with its encrypted part in plain text beside it; one that is not encrypted is refused.

    But for one that only leaves the run to a person: those who repair or move a store need no keys for that.
    """
    if row.body is None:
        if _only_sets_aside(row):
            return row
        raise CheckpointCorrupt(f"run {cipher.run!r}: the record at seq {row.seq} is not encrypted, and must be")
    plain = cipher.reveal(bytes(row.body), "record", bytes(row.record))
    return Row(row.seq, row.kind, row.record, row.body, plain)


def _only_sets_aside(row: Row) -> bool:
    """Whether a row says nothing that any code or command will ever go by."""
    try:
        record = _decode(bytes(row.record))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    if record.kind != Kind.ERROR.value or row.kind != record.kind or record.packed or record.error is None:
        return False
    return record.value is msgspec.UNSET and not record.error.caused_by and _STEERING.isdisjoint(record.data or ())


#: What in `data` tells the engine that something has happened.
_STEERING = frozenset(("signal", "choice", "child", "continued_as", "key", "ask", "seqs", "beyond", "next"))


def _reveal(run: str, record: Record, plain: bytes | None) -> None:
    """Give a record back what was hidden of it; without the key, what stands for it."""
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
    """A large value as it is kept beside its record."""
    return zlib.compress(value, 1)


def unseal(rows: Iterable[Row], run: str, after: int = 0, previous: str = "") -> Iterator[tuple[Record, str]]:
    """Verify rows in order and give each record with its checksum.

    `previous` is the checksum of the record before the first row, or the run's `origin`; without it the first row's
    own word is taken.
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
        if row.kind != record.kind:  # what is asked for by its kind would not be found
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
    """As much of a record as says in which format it is."""

    format: Count = 0


_decode_format = msgspec.json.Decoder(_Formatted).decode


def _format_of(text: bytes) -> int:
    """The format that a record says it has; 0 if it says none."""
    try:
        return _decode_format(text).format
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return 0


def unseal_some(rows: Iterable[Row], run: str) -> Iterator[tuple[Record, str]]:
    """Verify rows that do not follow each other, each by itself."""
    for row in rows:
        yield from unseal([row], run, row.seq - 1)


def _take_in(run: str, record: Record, body: bytes, plain: bytes | None) -> None:
    """Give a record what is kept beside it."""
    if record.packed == ENCRYPTED:
        _reveal(run, record, plain)
    else:
        record.value = msgspec.Raw(_unpack(run, record, body))


def _problem(record: Record) -> str:
    """What no record of ours says, or nothing: whoever reads a record need not expect it."""
    if record.kind not in _KINDS or record.outcome not in _OUTCOMES or record.trigger not in _TRIGGERS:
        return f"it is a {record.kind[:60]!r}, {record.outcome[:60]!r}, by {record.trigger[:60]!r}"
    if not (_is_near(record.finished_at) and _is_near(record.started_at) and _is_near(record.retry_at)):
        return f"it tells of a time before {EARLIEST_YEAR} or after {LATEST_YEAR}"
    lease = record.claimed
    if lease is not None and not (lease.before in _STATUSES and _is_near(lease.at) and _is_near(lease.since)):
        return f"it was claimed from {lease.before[:60]!r} at {lease.at}"
    return _problem_in(record.data) if record.data is not None else ""


def _is_near(at: datetime | None) -> bool:
    return at is None or EARLIEST_YEAR <= at.year <= LATEST_YEAR


def _problem_in(data: dict[str, Any]) -> str:
    for name, item in data.items():
        wanted = _DATA.get(name)
        if wanted is not None and type(item) is not wanted:
            return f"its {name!r} is a {type(item).__name__}"
        if name == "seqs" and not _NUMBERS.issuperset(map(type, item)):
            return "its 'seqs' are not numbers"
        if name == "renames" and not all(type(one) is str for one in (*item, *item.values())):
            return "its 'renames' are not names"
        if name == "before" and item not in _STATUSES:
            return f"its 'before' is {item[:60]!r}"
    return ""


#: Times that a record may tell of: with any of them, and the longest waits, one can calculate.
EARLIEST_YEAR, LATEST_YEAR = 1900, 9000
_KINDS, _OUTCOMES, _TRIGGERS, _STATUSES = (
    frozenset(one.value for one in names) for names in (Kind, Outcome, Trigger, Status)
)
_NUMBERS = frozenset((int,))
#: What is read from `data`, and as what.
_DATA: dict[str, type] = {
    **dict.fromkeys(("signal", "choice", "beyond", "origin_seq"), int),
    **dict.fromkeys(("sender", "child", "continued_as", "key", "ask", "before", "act", "next"), str),
    **dict.fromkeys(("origin", "origin_checksum", "fingerprint", "definition"), str),
    "renames": dict,
    "renew": bool,
    "seqs": list,
    "given": dict,
}


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
    """The record as a reader sees it."""
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
