"""Rules that every store shares beside the decision of a commit: pure functions over the port's records."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import sha256
from typing import Any, Protocol

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, EraseUnfinished, RunConflict
from ..model import FINISHED, Kind, Run, RunQuery, Signal, Status
from ..model.keepers import is_keeper
from ..model.run import HANDED_OVER
from ..model.wakes import asks_person
from ..ports import Create, Row
from ..records.data import RunFinishedData, data_of
from ..records.record import unseal

#: A page of checkpoints stops after about this many bytes, so that loading a long history needs bounded memory.
PAGE_BYTES = 4_000_000

_encode = msgspec.json.Encoder().encode

#: A cursor is the number of a run, which fits 64 bits; in a damaged row it may be any such number.
_CURSOR = re.compile(r"-?[0-9]{1,19}")

#: Statuses in which a run stays until a person acts: it has no owner, no wake-up and is never claimed by itself.
ENDED = FINISHED | {Status.SET_ASIDE}


class Standing(Protocol):
    """The parts of a run's status that a query may filter by."""

    @property
    def status(self) -> Status: ...
    @property
    def worker(self) -> str | None: ...
    @property
    def updated_at(self) -> datetime | None: ...
    @property
    def due_at(self) -> datetime | None: ...
    @property
    def wakes(self) -> tuple[str, ...]: ...


def extends(rows: Sequence[Row], after: int) -> bool:
    """Whether the rows carry on from `after` without a gap."""
    if len(rows) == 1:
        return rows[0].seq == after + 1
    return all(row.seq == after + place for place, row in enumerate(rows, 1))


def follows(rows: Sequence[Row], after: int, kept_from: int) -> bool:
    """Whether the rows carry on from `after`; records removed between the first and `kept_from` leave no gap."""
    if not kept_from or after > 1:
        return extends(rows, after)
    first = 0 if after else 1
    return extends(rows[:first], 0) and extends(rows[first:], kept_from - 1)


def check_create(create: Create) -> Run:
    """The run as it is to be stored. A queued run without a time is due at once: a run must never wait for nothing."""
    run = create.run
    last = create.rows[-1].seq if create.rows else 0
    if not follows(create.rows, 0, run.kept_from) or last != run.seq or run.kept_from > last:
        raise ValueError(f"run {run.id!r}: its first rows must be numbered from 1 up to its seq, {run.seq}")
    if create.signals or run.signals or run.signals_from:
        # The count may be any number that someone wrote into an archive: it is never counted up to.
        first = run.signals_from or 1
        numbered = all(signal.seq == place for place, signal in enumerate(create.signals, first))
        if not numbered or len(create.signals) != run.signals + 1 - first:
            raise ValueError(f"run {run.id!r}: it must bring the {run.signals} signals that its head counts")
    if (run.worker is None) == run.status.active:
        raise ValueError(f"run {run.id!r}: it cannot be created {run.status} with the owner {run.worker!r}")
    updated_at = run.updated_at or run.created_at
    due_at = run.due_at
    if due_at is None and run.status is Status.QUEUED:
        due_at = run.created_at
    if updated_at is run.updated_at and due_at is run.due_at:
        return run
    return replace(run, updated_at=updated_at, due_at=due_at)


def seal_signal(signal: Signal, seq: int, now: datetime) -> Signal:
    """The signal as it is stored: with its number, its time, and a checksum over all of it."""
    numbered = replace(signal, seq=seq, sent_at=signal.sent_at or now, checksum="")
    object.__setattr__(numbered, "checksum", _signal_checksum(numbered))  # nobody else has seen it yet
    return numbered


def check_signal(signal: Signal) -> Signal:
    """The signal, if it is as it was written; those of the first schema have no checksum to be held to."""
    if signal.checksum and signal.checksum != _signal_checksum(signal):
        raise CheckpointCorrupt(f"run {signal.run!r}: its signal {signal.seq} is not as it was written")
    return signal


def _signal_checksum(signal: Signal) -> str:
    sent_at = None if signal.sent_at is None else signal.sent_at.timestamp()
    facts = (signal.run, signal.seq, signal.name, signal.id, signal.sender, sent_at)
    return sha256(_encode(facts) + signal.payload).hexdigest()


def page_start(query: RunQuery) -> int | None:
    """The number of the run that ended the page before, or None for the first page."""
    if query.after is None:
        return None
    if not _CURSOR.fullmatch(query.after) or not -(2**63) <= int(query.after) < 2**63:
        raise DefinitionError(f"after={query.after[:60]!r} is not the `next` of a page of runs")
    return int(query.after)


#: Statuses in which a run may wait for a person.
_FOR_PERSON = frozenset({Status.WAITING, Status.PAUSED, Status.SET_ASIDE})
#: Statuses of a failure that may be open.
_FAILURES = frozenset({Status.FAILED, Status.SET_ASIDE})
#: Part of the record that sets a run aside because it goes on in another store. No text in a record contains it,
#: because quotes in texts are escaped.
HANDED_OVER_MARK = f'"type":"{HANDED_OVER.capitalize()}"'.encode()


#: The characters around those that no text holds, and the last one.
_BEFORE_SURROGATES, _AFTER_SURROGATES, _LAST = 0xD7FF, 0xE000, 0x10FFFF


def end_of_prefix(prefix: str) -> str | None:
    """The first text after all that begin with a prefix, byte by byte in UTF-8; None if there is none."""
    kept = prefix.rstrip(chr(_LAST))
    if not kept:
        return None
    last = ord(kept[-1])
    return kept[:-1] + chr(_AFTER_SURROGATES if last == _BEFORE_SURROGATES else last + 1)


def with_statuses(query: RunQuery) -> RunQuery | None:
    """The query with every status that its other filters allow; None if they allow none."""
    allowed = frozenset(Status)
    if query.awaits is not None:
        allowed &= {Status.WAITING}
    if query.needs_person:
        allowed &= _FOR_PERSON
    if query.open_failure:
        allowed &= _FAILURES
    if len(allowed) == len(Status):
        return query
    allowed &= query.status or allowed
    return replace(query, status=allowed) if allowed else None


def matches(query: RunQuery, run: Run, now: Standing | None = None, at: datetime | None = None) -> bool:
    """Whether a run is one that a query asks for; `now` is how it stands, if the run itself is as it was created.

    `at` is the present. The query has its statuses by `with_statuses`. For `is_open`, ask separately.
    """
    now = now or run
    return (
        (query.workflow is None or run.workflow == query.workflow)
        and (not query.workflows or run.workflow in query.workflows)
        and run.workflow not in query.not_workflows
        and (query.queue is None or run.queue == query.queue)
        and (not query.status or now.status in query.status)
        and (query.parent is None or run.parent == query.parent)
        and (query.worker is None or now.worker == query.worker)
        and all(run.tags.get(name) == value for name, value in query.tags.items())
        and (query.created_before is None or run.created_at < query.created_before)
        and (query.created_after is None or run.created_at > query.created_after)
        and (query.updated_before is None or (now.updated_at or run.created_at) < query.updated_before)
        and (query.updated_after is None or (now.updated_at or run.created_at) > query.updated_after)
        and (query.awaits is None or query.awaits in now.wakes)
        and not (query.needs_person and now.status is Status.WAITING and not asks_person(now.wakes))
        and not ((query.awaits is not None or query.needs_person) and _is_due(now, at))
        and (query.id_prefix is None or run.id.startswith(query.id_prefix))
        and (query.ids is None or run.id in query.ids)
        and (query.system or not is_keeper(run.id))
        and (query.version is None or run.version == query.version)
    )


def _is_due(now: Standing, at: datetime | None) -> bool:
    """Whether a worker may take a free run, because what it waited for has come."""
    return now.due_at is not None and at is not None and now.due_at <= at


def asks_for_open(query: RunQuery) -> bool:
    """Whether a query leaves runs out that are settled elsewhere, so that `is_open` decides."""
    return query.needs_person or query.open_failure


def is_open(
    query: RunQuery, run: str, status: Status, last: Callable[[], Row | None], mended: Container[str | None]
) -> bool:
    """Whether a run that matches is settled neither in another store nor by a fork.

    `last` reads its newest record. `mended` holds the origins of the forks that completed.
    """
    if not asks_for_open(query):
        return True
    if query.open_failure and run in mended:
        return False
    if status is not Status.SET_ASIDE:
        return True
    row = last()
    return row is None or row.kind != Kind.ERROR.value or HANDED_OVER_MARK not in bytes(row.record)


def check_twin(run: str, twin: str | None) -> None:
    """Raise `RunConflict` if a finished run may not go on because another run of its queue has the same `dedupe`."""
    if twin is not None and twin != run:
        raise RunConflict(
            f"run {run!r} cannot go on: run {twin!r} has the same queue and dedupe=, and has not finished; wait for "
            "its end, or cancel it",
            run,
        )


def outcome_kind(status: Status) -> Kind | None:
    """The kind of record that says how a run in this status came to its end."""
    if status in FINISHED:
        return Kind.RUN_FINISHED
    return Kind.ERROR if status is Status.SET_ASIDE else None


#: The status that a run has after its end, by the outcome that is recorded there.
_ENDS = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}


def ends_as(kind: str, outcome: str) -> Status | None:
    """The status of a run whose newest record is of this kind and outcome, if that record is an end."""
    if kind == Kind.RUN_FINISHED:
        return _ENDS.get(outcome)
    return Status.SET_ASIDE if kind == Kind.ERROR else None


def erasing(run_id: str) -> str:
    """The name of the mark that a store keeps while a run is erased; it must not tell the id of the run."""
    return f"erasing {sha256(run_id.encode('utf-8', 'surrogatepass')).hexdigest()}"


#: Bytes that a store rewrites at once to erase a run. Rewriting holds up every run; so much takes half a second or less
#: on an ordinary disk (70 to 90 MB a second were measured).
REWRITTEN_AT_ONCE = 16 * 2**20


def erase_unfinished(store: str, size: int) -> EraseUnfinished:
    """The error of a store that has removed runs, and is too large to be rewritten unasked."""
    return EraseUnfinished(
        f"{store}: removed, but not yet erased: the text is still in unused parts of the store's files. Rewriting them"
        f" ({size // 2**20} MB) holds up every run meanwhile, so it is left to you: choose a time, and finish with"
        " keepstep erase --rewrite (in Python engine.care.rewrite())"
    )


def with_outcome(run: Run, row: Row) -> Run:
    """The run with the output or the error that its newest final record holds."""
    record, checksum = next(unseal([row], run.id, after=row.seq - 1))
    if row.seq == run.seq and checksum != run.checksum:
        raise CheckpointCorrupt(
            f"run {run.id!r}: chain broken at seq {row.seq}: its last record is not what its head names"
        )
    if run.status in FINISHED and (row.seq != run.seq or _ENDS.get(record.outcome) is not run.status):
        raise CheckpointCorrupt(f"run {run.id!r}: it is {run.status.value}, but its last record does not say so")
    output = None
    if run.status is Status.COMPLETED and isinstance(record.value, (bytes, msgspec.Raw)):
        output = bytes(record.value)
    error = record.error.info() if record.error else None
    return replace(run, output=output, error=error, continued_as=data_of(record, RunFinishedData).get("continued_as"))


#: The progress of runs, as the heartbeat of their worker holds it.
progress_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def progress_in(stored: Any) -> dict[str, msgspec.Raw]:
    """The progress that a heartbeat holds, if any: worth showing, never worth failing for."""
    try:
        return progress_of(stored) if stored is not None else {}
    except (TypeError, ValueError, msgspec.MsgspecError):
        return {}
