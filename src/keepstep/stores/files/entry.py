"""An entry: one file of a run's log, and its content.

Each entry holds the run's whole head, so that the newest one describes the current run. It also holds the checkpoint
that was written with it, if there was one, and its effects on other runs.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec

from ...errors import CheckpointCorrupt, SchemaMismatch
from ...model import Run, Signal
from ...ports import Create, Row
from ...records.record import Count, Instant, numbers
from .. import rules, transition
from .text import put, sealed, take, unsealed

#: Layout of folders and files that this version writes; a newer one is refused.
LAYOUT = 1


#: Exceptions raised by reading malformed fields.
MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, KeyError, AttributeError, RecursionError)


class Head(transition.Head, omit_defaults=True, frozen=True, kw_only=True):
    """The head of a run after an entry.

    `born` distinguishes two runs that had the same id one after the other. `base` is the entry that created the run,
    `outcome` the one that holds its newest final record. If records were removed, `first_entry` holds the first one and
    `kept_entry` the oldest of the others; an entry between the two that held no signal is replaced by a mark.
    """

    born: str
    base: Count = 1
    outcome: Count = 0
    data_key: str = ""
    deleted: bool = False
    first_entry: Count = 0
    kept_entry: Count = 0


class Facts(msgspec.Struct, omit_defaults=True, frozen=True):
    """The facts that are fixed when a run is created; `number` is its place in the list of runs."""

    workflow: str
    created_at: Instant
    number: Count
    created_by: str = ""
    version: str = "1"
    fingerprint: str = ""
    seed: str = ""
    parent: str | None = None
    parent_key: str | None = None
    origin: str | None = None
    queue: str = "default"
    priority: int = 0
    key: str | None = None
    dedupe: str | None = None
    tags: dict[str, str] = {}
    deadline_at: Instant | None = None
    traceparent: str | None = None
    input: bytes = b"null"


class Sending(msgspec.Struct, frozen=True):
    """A signal on its way to another run. Its token identifies a repeated delivery."""

    signal: Signal
    token: str


class Outbox(msgspec.Struct, frozen=True):
    """The pending effects of an entry on other runs: runs to create, then signals to send."""

    creates: tuple[Create, ...] = ()
    sends: tuple[Sending, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.creates or self.sends)


class Attachment(msgspec.Struct, frozen=True):
    """A file beside an entry: an earlier checkpoint of the same commit, or the compressed value of one."""

    name: str
    data: bytes


class Entry(msgspec.Struct):
    """One entry as read."""

    number: int
    act: str
    head: Head
    fields: dict[str, Any]
    outbox: Outbox
    rows: int
    signals: int


_FACTS = tuple(name for name in Facts.__struct_fields__ if name not in ("number", "input"))
_OWN = ("born", "base", "outcome", "deleted", "first_entry", "kept_entry")
_HEAD = tuple(name for name in Head.__struct_fields__ if name not in _OWN)
_SIGNAL = tuple(one.name for one in fields_of(Signal) if one.name not in ("payload", "run"))
_SIGNAL_DEFAULTS = {one.name: one.default for one in fields_of(Signal)}


# -- runs --------------------------------------------------------------------------------------------------------------


def facts_of(run: Run, number: int) -> Facts:
    """Return the fixed facts of a run."""
    return Facts(number=number, input=run.input, **{name: getattr(run, name) for name in _FACTS})


def head_of(run: Run, born: str, base: int) -> Head:
    """Return the head of a run."""
    return Head(born=born, base=base, **{name: getattr(run, name) for name in _HEAD})


def run_of(run_id: str, facts: Facts, head: Head) -> Run:
    """Return the run from its facts and its head."""
    return Run(
        id=run_id,
        workflow=facts.workflow,
        status=head.status,
        created_at=facts.created_at,
        created_by=facts.created_by,
        version=facts.version,
        fingerprint=facts.fingerprint,
        input=facts.input,
        seed=facts.seed,
        parent=facts.parent,
        parent_key=facts.parent_key,
        origin=facts.origin,
        queue=facts.queue,
        priority=facts.priority,
        key=facts.key,
        tags=dict(facts.tags),
        deadline_at=facts.deadline_at,
        traceparent=facts.traceparent,
        data_key=head.data_key,
        seq=head.seq,
        checksum=head.checksum,
        epoch=head.epoch,
        worker=head.worker,
        due_at=head.due_at,
        wakes=head.wakes,
        signals=head.signals,
        recoveries=head.recoveries,
        updated_at=head.updated_at,
        signals_read=head.signals_read,
        kept_from=head.kept_from,
        signals_from=head.signals_from,
        dedupe=facts.dedupe,
        holds=head.holds,
        service=head.service,
    )


def _facts_fields(facts: Facts) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(facts, input=b"null"))
    put(plain, "input", facts.input)
    return plain


def _facts_from(plain: dict[str, Any]) -> Facts:
    rest = {name: value for name, value in plain.items() if not name.startswith("input")}
    return msgspec.structs.replace(msgspec.convert(rest, Facts), input=take(plain, "input"))


# -- rows, signals, and effects on other runs --------------------------------------------------------------------------


def _row_fields(row: Row) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    put(fields, "checkpoint", row.record, record=True)
    known = fields.get("checkpoint")
    if not isinstance(known, dict) or known.get("kind") != row.kind:
        fields["kind"] = row.kind
    return fields


def _row_from(fields: dict[str, Any], seq: int, body: bytes | None) -> Row:
    kind = _text(fields if "kind" in fields else fields["checkpoint"], "kind")
    return Row(seq, kind, take(fields, "checkpoint", record=True), body)


def _signal_fields(signal: Signal, token: str = "") -> dict[str, Any]:
    fields = {
        name: msgspec.to_builtins(value)
        for name in _SIGNAL
        if (value := getattr(signal, name)) != _SIGNAL_DEFAULTS[name]
    }
    put(fields, "payload", signal.payload)
    return {**fields, "token": token} if token else fields


def _signal_from(run: str, fields: dict[str, Any]) -> Signal:
    at = fields.get("sent_at")
    return Signal(
        run=run,
        name=msgspec.convert(fields["name"], str),
        payload=take(fields, "payload"),
        id=_text(fields, "id"),
        sender=_text(fields, "sender"),
        sent_at=None if at is None else msgspec.convert(at, datetime),
        seq=msgspec.convert(fields.get("seq", 0), Count),
        checksum=_text(fields, "checksum"),
    )


def _text(fields: dict[str, Any], name: str) -> str:
    return msgspec.convert(fields.get(name, ""), str)


def _create_fields(create: Create) -> dict[str, Any]:
    run = create.run
    rows = []
    for row in create.rows:
        fields = _row_fields(row)
        if row.body is not None:
            fields["body_base64"] = b64encode(row.body).decode()
        rows.append(fields)
    return {
        "run": run.id,
        "created": _facts_fields(facts_of(run, 0)),
        "head": msgspec.to_builtins(head_of(run, "", 1)),
        "rows": rows,
        "signals": [_signal_fields(signal) for signal in create.signals],
    }


def _create_from(fields: dict[str, Any]) -> Create:
    run = run_of(fields["run"], _facts_from(fields["created"]), msgspec.convert(fields["head"], Head))
    rows = [
        _row_from(row, seq, b64decode(row["body_base64"]) if "body_base64" in row else None)
        for seq, row in zip(numbers(run), fields["rows"], strict=False)
    ]
    return Create(run, rows, [_signal_from(run.id, signal) for signal in fields["signals"]])


def _outbox_fields(outbox: Outbox) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if outbox.creates:
        fields["creates"] = [_create_fields(create) for create in outbox.creates]
    if outbox.sends:
        fields["sends"] = [{"run": one.signal.run, **_signal_fields(one.signal, one.token)} for one in outbox.sends]
    return fields


def _outbox_from(fields: dict[str, Any]) -> Outbox:
    creates = tuple(_create_from(create) for create in fields.get("creates", ()))
    sends = tuple(Sending(_signal_from(send["run"], send), send["token"]) for send in fields.get("sends", ()))
    return Outbox(creates, sends)


# -- entries -----------------------------------------------------------------------------------------------------------


class Draft(msgspec.Struct):
    """An entry to be written: its act, the head after it, and its rows and signals."""

    act: str
    head: Head
    rows: Sequence[Row] = ()
    signals: Sequence[Signal] = ()
    tokens: Sequence[str] = ()
    facts: Facts | None = None
    outbox: Outbox = Outbox()


def entry_text(run: str, number: int, draft: Draft, attach: Any) -> tuple[bytes, list[Attachment]]:
    """Return the text of an entry, and the files to write before it; `attach(place, kind)` returns their names."""
    attachments: list[Attachment] = []
    fields: dict[str, Any] = {"act": draft.act, "entry": number, "head": draft.head, "layout": LAYOUT, "run": run}
    if draft.facts is not None:
        fields["created"] = _facts_fields(draft.facts)
    if draft.rows:
        parts = []
        for place, row in enumerate(draft.rows[:-1], 1):
            part = {"layout": LAYOUT, "part": place, "run": run, **_attached(row, place, attach, attachments)}
            attachments.append(Attachment(attach(place, "json"), sealed(part)))
            parts.append(attachments[-1].name)
        if parts:
            fields["parts"] = parts
        fields |= _attached(draft.rows[-1], len(draft.rows), attach, attachments)
    if draft.signals:
        tokens = draft.tokens or ("",) * len(draft.signals)
        fields["received"] = [_signal_fields(one, token) for one, token in zip(draft.signals, tokens, strict=True)]
    if draft.outbox:
        fields["outbox"] = _outbox_fields(draft.outbox)
    return sealed(fields), attachments


def _attached(row: Row, place: int, attach: Any, attachments: list[Attachment]) -> dict[str, Any]:
    fields = _row_fields(row)
    if row.body is not None:
        attachments.append(Attachment(attach(place, "packed"), row.body))
        fields["body"] = attachments[-1].name
    return fields


class NewerEntry(CheckpointCorrupt, SchemaMismatch):
    """An entry that only a newer Keepstep can read, for example one fetched by git. It affects only its own run."""


def read_entry(data: bytes, run: str, number: int, where: str) -> Entry:
    """Return the entry in a file. Raise `CheckpointCorrupt` if it is not the one that was written there."""
    fields = unsealed(data, f"run {run!r}: {where}")
    try:
        if fields["layout"] > LAYOUT:
            raise NewerEntry(
                f"run {run!r}: {where} has layout {fields['layout']}, newer than {LAYOUT}; upgrade Keepstep"
            )
        if fields["run"] != run or fields["entry"] != number:
            raise CheckpointCorrupt(f"run {run!r}: {where} is entry {fields['entry']} of run {fields['run']!r}")
        return Entry(
            number=number,
            act=fields["act"],
            head=msgspec.convert(fields["head"], Head),
            fields=fields,
            outbox=_outbox_from(fields["outbox"]) if "outbox" in fields else Outbox(),
            rows=len(fields.get("parts", ())) + ("checkpoint" in fields or any(map(fields.__contains__, _AS_BYTES))),
            signals=len(fields.get("received", ())),
        )
    except MALFORMED as error:
        raise CheckpointCorrupt(f"run {run!r}: {where} is not one of ours: {error!r}") from None


_AS_BYTES = ("checkpoint_text", "checkpoint_base64")


def entry_facts(entry: Entry) -> Facts:
    """Return the fixed facts of the run that an entry created."""
    return _facts_from(entry.fields["created"])


def entry_signals(entry: Entry, run: str) -> list[tuple[Signal, str]]:
    """Return the signals that an entry added, each with its token."""
    received = entry.fields.get("received", ())
    try:
        return [(rules.check_signal(_signal_from(run, fields)), _text(fields, "token")) for fields in received]
    except MALFORMED as error:
        raise CheckpointCorrupt(f"run {run!r}: entry {entry.number} is not one of ours: {error!r}") from None


def _row_numbers(entry: Entry) -> Sequence[int]:
    """Return the numbers of the checkpoints that an entry added; a copied run may lack those after the first."""
    head, last = entry.head, entry.head.seq
    if entry.act == "created" and head.kept_from:
        return (1, *range(last - entry.rows + 2, last + 1))
    return range(last - entry.rows + 1, last + 1)


def entry_rows(entry: Entry, run: str, read: Any) -> list[Row]:
    """Return the checkpoints that an entry added, in order; `read(name)` reads the files beside it."""
    rows = []
    seqs = _row_numbers(entry)
    try:
        for place, name in enumerate(entry.fields.get("parts", ()), 1):
            part = unsealed(read(name), f"run {run!r}: {name}")
            if part["run"] != run or part["part"] != place:
                raise CheckpointCorrupt(f"run {run!r}: {name} is part {part['part']} of run {part['run']!r}")
            rows.append(_row_from(part, seqs[place - 1], read(part["body"]) if "body" in part else None))
        if entry.rows:
            body = entry.fields.get("body")
            rows.append(_row_from(entry.fields, entry.head.seq, None if body is None else read(body)))
    except MALFORMED as error:
        raise CheckpointCorrupt(f"run {run!r}: entry {entry.number} is not one of ours: {error!r}") from None
    return rows


def numbered(signals: Sequence[Signal], run: str) -> list[Signal]:
    """Return the signals of a run copied from another store, under its id."""
    return [replace(signal, run=run) for signal in signals]
