"""Drives a keeper: a run that holds a state, answers signals by a pure function, and is never replayed.

Each answer is one commit: the whole state, the signals that it sends and the runs that it starts. A claim loads the
newest state, so a keeper has no code that could differ from its history.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ..errors import CheckpointCorrupt, EncryptionError, SchemaMismatch, StoreError
from ..model import FINISHED, Event, Kind, Outcome, Run, Signal, Status
from ..model.event import STATUS_EVENTS, EventName
from ..model.ids import new_id, seed_in
from ..model.keepers import KEEPER_QUEUE, TELL
from ..model.signal import CANCEL, PAUSE, RESUME
from ..model.text import one_line
from ..ports import Advance, Answer, Create, Send, Verdict, instant
from ..records.data import RunStartedData, new_data
from ..records.record import FORMAT_WITH_KEPT, Record, StoredError, chain_end, check_origin, claimed, seal, unseal
from .attempt import idempotency_key
from .host import StoredRuns

if TYPE_CHECKING:
    from ..model import Claim
    from ..ports import Clock, Row
    from .host import Events, Journal, Redaction

log = logging.getLogger("keepstep")

#: Signals that a keeper reads for one commit.
MOST_SIGNALS = 100
#: Bytes of their payloads from which on the rest waits for the next commit. A single larger one is read by itself.
MOST_BYTES = 1_000_000
#: Records and read signals that stay when older ones are removed, together with all of the last hour.
KEPT_RECORDS = 1000
KEPT_SPAN = timedelta(hours=1)
#: Records after which older ones are removed, so that few commits remove any.
TRIM_EVERY = 100
#: Records that may follow the newest state: an end, or the notice that sets the keeper aside.
MOST_AFTER = 3
#: Signals that wake a keeper.
WAKES = (TELL, CANCEL, PAUSE, RESUME)
#: Signals that wake a keeper while it gathers others.
COMMANDS = (CANCEL, PAUSE, RESUME)
_ENDS = {Status.COMPLETED: Outcome.SUCCESS, Status.FAILED: Outcome.FAILURE, Status.CANCELLED: Outcome.CANCELLED}


@dataclass(frozen=True, slots=True)
class Message:
    """A signal as a keeper gets it: its name, its decoded payload, its sender, and its time."""

    name: str
    payload: Any
    sender: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Moment:
    """The input of an answer, besides the state.

    `ended` are those of its `watched` runs that have ended or are gone, `failed` those of them that ended, but did not
    complete. `taken` are ids of runs to start that belong to other runs.
    """

    now: datetime
    messages: Sequence[Message] = ()
    ended: frozenset[str] = frozenset()
    taken: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Start:
    """A run to start. The keeper is not its parent: neither waits for the other, nor ends with it."""

    run: str
    workflow: str
    input: bytes
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Reaction:
    """The answer of a keeper. `wake_at` None waits for a signal. With `more`, it is asked again at once.

    With `gathers`, only the time and commands of people wake it, and signals wait unread until then. `unread` counts
    signals that it has read and still has to do with: a sender that asks for `room` finds them unread.
    """

    state: Any
    sends: list[tuple[str, str, Any]] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    wake_at: datetime | None = None
    paused: bool = False
    end: Status | None = None
    more: bool = False
    gathers: bool = False
    unread: int = 0
    events: list[tuple[EventName, dict[str, Any]]] = field(default_factory=list)


class Kept(Protocol):
    """A kind of keeper: its state and its answers, without a clock, a store or a side effect."""

    #: Version of its state. Every Keepstep reads all older ones.
    version: int
    #: The type of a signal's payload. Any other payload is given as None.
    payload: Any
    #: Whether its signals follow a run that was continued. Its runs that have ended are then `ended` without a look.
    follows: bool

    def begin(self, given: Any, at: datetime) -> Any:
        """Return the first state from the input of the run."""

    def read(self, version: int, data: bytes) -> Any:
        """Return a state that was stored in this version."""

    def watched(self, state: Any) -> Sequence[str]:
        """Return the runs whose end matters for the next answer."""

    def react(self, state: Any, moment: Moment) -> Reaction:
        """Return the answer to some signals at a moment."""


class KeeperHost(StoredRuns, Protocol):
    """The process of a keeper: the parts that driving it needs."""

    clock: Clock

    @property
    def journal(self) -> Journal: ...

    @property
    def events(self) -> Events: ...

    @property
    def redaction(self) -> Redaction: ...

    def release_later(self, run_id: str, epoch: int) -> None: ...

    def signalled(self, run_id: str) -> None: ...

    def claim_soon(self) -> None: ...

    def notify_waiters(self) -> None: ...

    async def put_back(self, claim: Claim, error: EncryptionError | SchemaMismatch) -> None: ...


class _Mark(msgspec.Struct, array_like=True):
    """How far a keeper had come at a time: its last record, and the last signal that it had read."""

    at: datetime
    seq: int = 0
    signals_read: int = 0


class _Held(msgspec.Struct, omit_defaults=True):
    """The value of a keeper's record: the version and text of its state, and the number of the last signal read.

    The two `marks` are at least an hour apart, and the first is at least an hour old, or stands for the beginning.
    """

    version: int
    state: msgspec.Raw
    signals_read: int
    marks: tuple[_Mark, _Mark]


_encode = msgspec.json.Encoder().encode
_decode_held = msgspec.json.Decoder(_Held).decode


async def keep(host: KeeperHost, kept: Kept, claim: Claim) -> None:
    """Answer everything that a claimed keeper has to answer, and put it away."""
    try:
        keeper = Keeper(host, kept, claim)
    except EncryptionError as error:
        host.encryption.cannot_read(error)
        await host.put_back(claim, error)
        return
    try:
        await keeper.load()
        while await keeper.answer():
            pass
    except (EncryptionError, SchemaMismatch) as error:
        await host.put_back(claim, error)
    except CheckpointCorrupt as error:
        await keeper.set_aside("CheckpointCorrupt", str(error))
    except StoreError as error:
        log.warning("keeper %s is halted, recoverable: %s", claim.run.id, error)
        host.release_later(claim.run.id, claim.lease.epoch)
    except Exception as error:
        log.exception("keeper %s failed", claim.run.id)
        await keeper.set_aside("InternalError", f"the keeper failed: {error!r}")


class Keeper:
    """A claimed keeper: its state, and its position in its journal."""

    def __init__(self, host: KeeperHost, kept: Kept, claim: Claim) -> None:
        self._host, self._kept, self._run = host, kept, claim.run
        self._worker, self._epoch = claim.lease.worker, claim.lease.epoch
        self._cipher = host.encryption.cipher(claim.run)
        self._seq, self._checksum = claim.run.seq, chain_end(claim.run)
        self._claimed = claimed(claim)
        self._state: Any = None
        self._signals_read = 0
        self._latest = claim.run.created_at
        self._marks = (_Mark(self._latest), _Mark(self._latest))
        #: The runs that get the signals to runs which have ended: those that continue them, or none.
        self._routes: dict[str, str | None] = {}

    async def load(self) -> None:
        """Read the newest state."""
        run = self._run
        if not run.seq:
            check_origin(run)
            given = msgspec.json.decode(self._host.encryption.input(run))
            self._state = self._kept.begin(given, run.created_at)
            return
        rows = await self._host.records(run.id, run.seq - 1, 1)
        record, checksum = next(unseal(rows, run.id, run.seq - 1), (None, ""))
        if record is None or checksum != run.checksum or record.kind != Kind.KEPT.value:
            raise CheckpointCorrupt(f"run {run.id!r}: its last record is not the state that its head names")
        held = stored_state(record)
        if held.version > self._kept.version:
            raise SchemaMismatch(
                f"run {run.id!r}: its state has version {held.version}, newer than {self._kept.version}; "
                "upgrade Keepstep"
            )
        self._state, self._signals_read = self._kept.read(held.version, bytes(held.state)), held.signals_read
        self._latest, self._marks = record.finished_at or run.created_at, held.marks

    async def answer(self) -> bool:
        """Answer the signals that there are, in one commit. Return whether there may be more to answer."""
        host, run = self._host, self._run
        signals = await host.signals(run.id, self._signals_read, MOST_SIGNALS)
        for place, signal in enumerate(signals, self._signals_read + 1):
            if signal.seq != place:
                raise CheckpointCorrupt(f"run {run.id!r}: its signal {place} is missing: {signal.seq} follows")
        page, signals = signals, _within(signals)
        messages = [_message(signal, run.created_at, self._kept.payload) for signal in signals]
        ends = {one: end for one in self._kept.watched(self._state) if (end := await self._end_of(one)) is not None}
        unread = signals[-1].seq if signals else self._signals_read
        taken: frozenset[str] = frozenset()
        may_release = len(page) < MOST_SIGNALS and len(page) == len(signals)
        self._routes.clear()
        while True:
            now = instant(host.clock.now())
            state = msgspec.json.decode(_encode(self._state), type=type(self._state))  # `react` may change its copy
            failed = frozenset(one for one, end in ends.items() if end is not Status.COMPLETED)
            reaction = self._kept.react(state, Moment(now, messages, frozenset(ends), taken, failed))
            release = (may_release and not reaction.more) or reaction.end is not None
            change = self._change(reaction, now, unread, release=release)
            answer = await host.journal.write(change)
            if answer.verdict is Verdict.CONFLICT and answer.about not in taken:
                taken |= {answer.about}
            elif answer.verdict in (Verdict.FINISHED, Verdict.NOT_FOUND) and answer.about not in self._routes:
                ends |= await self._follow([answer.about, *(send.signal.run for send in change.sends)])
            elif answer.verdict is Verdict.MISSED:
                may_release = False  # it is written without being put away, so that more signals cannot delay it
                if reaction.end is not None:
                    return True
            else:
                break
        return self._answered(reaction, change, answer, unread, now)

    async def _follow(self, runs: Sequence[str]) -> dict[str, Status]:
        """Find the runs that continue those that have ended. Return how the others have ended."""
        ends: dict[str, Status] = {}
        for one in dict.fromkeys(runs):
            if one in self._routes:
                continue
            newest = await self._host.newest_of_series(one)
            if newest is None or newest.status in FINISHED:
                self._routes[one], ends[one] = None, Status.COMPLETED if newest is None else newest.status
            elif newest.id != one:
                self._routes[one] = newest.id
        return ends

    def _routed(self, run: str) -> str | None:
        """Return the run that gets the signals to a run; None if there is none."""
        to: str | None = run
        while to in self._routes:
            to = self._routes[to]
        return to

    def _answered(self, reaction: Reaction, change: Advance, answer: Answer, signals_read: int, now: datetime) -> bool:
        host, run = self._host, self._run
        if answer.verdict is not Verdict.DONE:
            if answer.verdict is not Verdict.FENCED:
                log.error("keeper %s: the store refused a change: %s %s", run.id, answer.verdict, answer.about)
            host.release_later(run.id, self._epoch)
            return False
        if change.rows:
            self._seq, self._checksum, self._claimed = change.rows[-1].seq, change.checksum, None
        self._state, self._signals_read = reaction.state, signals_read
        if host.events.observed:
            for name, data in reaction.events:
                self._emit(name, now, data)
            if reaction.end is not None:
                self._emit(STATUS_EVENTS[reaction.end], now, {})
        for send in change.sends:
            host.signalled(send.signal.run)
        host.claim_soon()  # for the runs that it starts, and to learn when it is due
        host.notify_waiters()
        return not change.release

    def _emit(self, name: EventName, at: datetime, data: dict[str, Any]) -> None:
        run = self._run
        self._host.events.emit(Event(name, run.id, at, run.workflow, self._seq, worker=self._worker, data=data))

    async def _end_of(self, run_id: str) -> Status | None:
        """Return how a run, with those that continue it, has ended; one that is gone counts as completed."""
        try:
            run = await self._host.newest_of_series(run_id)
        except CheckpointCorrupt:  # a damaged run waits for a person, who may repair it
            return None
        if run is None:
            return Status.COMPLETED
        return run.status if run.status in FINISHED else None

    # -- writing ------------------------------------------------------------------------------------------------------

    def _change(self, reaction: Reaction, now: datetime, signals_read: int, *, release: bool) -> Advance:
        """Return the one change of an answer."""
        run = self._run
        change = Advance(run.id, self._worker, self._epoch, self._seq)
        if release:
            change.release = True
            change.status = reaction.end or (Status.PAUSED if reaction.paused else Status.WAITING)
            change.due_at, change.wakes, change.signals_seen = reaction.wake_at, WAKES, signals_read
            if reaction.gathers and reaction.end is None:
                change.wakes, change.signals_seen = COMMANDS, None
            if self._seq and signals_read == self._signals_read and self._is_idle(reaction):
                change.progress = False
                return change
        self._latest = max(self._latest, now)
        change.signals_read = signals_read - reaction.unread
        if self._latest - self._marks[1].at >= KEPT_SPAN:
            self._marks = (self._marks[1], _Mark(self._latest, self._seq, signals_read))
        held = _Held(self._kept.version, msgspec.Raw(_encode(reaction.state)), signals_read, self._marks)
        records = [self._record(Kind.KEPT, value=msgspec.Raw(_encode(held)), format=FORMAT_WITH_KEPT)]
        if not self._seq:
            data = new_data(RunStartedData, workflow=run.workflow, version=run.version)
            records.insert(0, self._record(Kind.RUN_STARTED, data=data))
        if reaction.end is not None:
            last = self._record(Kind.RUN_FINISHED, outcome=_ENDS[reaction.end].value, value=msgspec.Raw(b"null"))
            records.append(last)
        change.rows, change.checksum = self._sealed(records)
        change.creates = [self._create(start) for start in reaction.starts]
        change.sends = [
            Send(self._signal(one, name, payload, number), optional=not self._kept.follows)
            for number, (to, name, payload) in enumerate(reaction.sends)
            if (one := self._routed(to)) is not None
        ]
        self._trim(change)
        return change

    def _signal(self, to: str, name: str, payload: Any, number: int) -> Signal:
        run = self._run.id
        return Signal(to, name, _encode(payload), f"{run}:{self._seq + 1}:{number}", f"run {run}", self._latest)

    def _trim(self, change: Advance) -> None:
        """Let the change remove records and signals that nobody needs: a claim loads the newest state only."""
        seq = change.rows[-1].seq
        if seq // TRIM_EVERY == self._seq // TRIM_EVERY:
            return
        first = min(self._marks[0].seq, seq - KEPT_RECORDS)
        oldest = min(self._marks[0].signals_read, (change.signals_read or 0) - KEPT_RECORDS)
        change.trim = first if first > MOST_AFTER else None
        change.trim_signals = oldest if oldest > 1 else None

    def _is_idle(self, reaction: Reaction) -> bool:
        """Whether an answer changes nothing but the next wake-up, so that it needs no record."""
        if reaction.end is not None or reaction.starts or reaction.sends:
            return False
        return _encode(reaction.state) == _encode(self._state)

    def _record(self, kind: Kind, **fields: Any) -> Record:
        return Record(self._run.id, kind.value, worker=self._worker, finished_at=self._latest, **fields)

    def _sealed(self, records: Sequence[Record]) -> tuple[list[Row], str]:
        rows: list[Row] = []
        checksum = self._checksum
        records[0].claimed = self._claimed
        for number, record in enumerate(records, self._seq + 1):
            row, checksum = seal(record, number, checksum, self._cipher)
            rows.append(row)
        return rows, checksum

    def _create(self, start: Start) -> Create:
        """Return the creation of a run that nobody waits for."""
        workflow = self._host.workflows[start.workflow]
        options = workflow.starting
        deadline = options.get("deadline")
        return self._host.encryption.born(
            Run(
                id=start.run,
                workflow=workflow.name,
                status=Status.QUEUED,
                created_at=self._latest,
                created_by=f"run {self._run.id}",
                version=workflow.version,
                fingerprint=workflow.fingerprint,
                input=start.input,
                seed=seed_in(idempotency_key(self._run.seed, start.run, 0)[:16], workflow.module),
                queue=options.get("queue", "default"),
                priority=options.get("priority", 0),
                tags={**self._host.redaction.tags(options.get("tags")), **start.tags},
                deadline_at=None if deadline is None else instant(self._latest.timestamp() + float(deadline)),
                due_at=self._latest,
            )
        )

    async def set_aside(self, kind: str, reason: str) -> None:
        """Leave the keeper to a person, with the reason."""
        host, run = self._host, self._run
        reason = host.redaction.redact(reason)
        log.error("run %s is set aside: %s", run.id, one_line(reason))
        self._latest = max(self._latest, instant(host.clock.now()))
        error = StoredError(kind, reason, error_class="permanent", code="ks:recovery-load", id=new_id("error"))
        rows, checksum = self._sealed([self._record(Kind.ERROR, outcome=Outcome.FAILURE.value, error=error)])
        change = Advance(run.id, self._worker, self._epoch, self._seq, rows, checksum, status=Status.SET_ASIDE)
        change.release, change.progress = True, False
        try:
            answer = await host.journal.write(change)
        except StoreError:
            host.release_later(run.id, self._epoch)
            return
        if answer.verdict is Verdict.DONE:
            if host.events.observed:
                self._emit("run.set_aside", self._latest, {"reason": reason})
            host.notify_waiters()


async def newest_state(host: StoredRuns, run: Run, kept: Kept) -> tuple[Any, int]:
    """Return the newest state of a keeper, ended or not, and the number of the last signal that it includes."""
    if not run.seq:
        return kept.begin(msgspec.json.decode(host.encryption.input(run)), run.created_at), 0
    after = max(0, run.seq - MOST_AFTER)
    rows = [row for row in await host.records(run.id, after) if row.kind == Kind.KEPT.value]
    if not rows:
        raise CheckpointCorrupt(f"run {run.id!r}: its last records hold no state")
    held = stored_state(next(unseal([rows[-1]], run.id, rows[-1].seq - 1))[0])
    if held.version > kept.version:
        raise SchemaMismatch(f"run {run.id!r}: its state has version {held.version}; upgrade Keepstep to read it")
    return kept.read(held.version, bytes(held.state)), held.signals_read


def stored_state(record: Record) -> _Held:
    """Return what a keeper's record holds."""
    try:
        return _decode_held(record.raw())
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointCorrupt(f"run {record.run!r}: the state at seq {record.seq} is not readable: {error}") from None


def birth(
    host: Any,
    run_id: str,
    workflow: str,
    given: Any,
    *,
    actor: str,
    at: datetime,
    over: int | None = None,
    waits: bool = False,
) -> Create:
    """Return the creation of a keeper; `over` is the epoch of an ended one that it replaces.

    A keeper that `waits` has nothing to do before its first signal.
    """
    status, due = (Status.WAITING, None) if waits else (Status.QUEUED, at)
    run = Run(run_id, workflow, status, at, created_by=actor, updated_at=at, due_at=due, wakes=WAKES)
    object.__setattr__(run, "queue", KEEPER_QUEUE)
    object.__setattr__(run, "input", _encode(given))
    object.__setattr__(run, "seed", new_id("seed"))
    create: Create = host.encryption.born(run)
    create.over = over
    return create


def _within(signals: Sequence[Signal]) -> Sequence[Signal]:
    """Return the first signals, up to the size that one commit may have."""
    size = 0
    for place, signal in enumerate(signals):
        size += len(signal.payload)
        if size > MOST_BYTES and place:
            return signals[:place]
    return signals


def _message(signal: Signal, created_at: datetime, kind: Any) -> Message:
    try:
        payload = msgspec.json.decode(signal.payload, type=kind)
    except msgspec.ValidationError:
        payload = None
    except msgspec.MsgspecError as error:
        raise CheckpointCorrupt(f"run {signal.run!r}: its signal {signal.seq} is not JSON: {error}") from None
    return Message(signal.name, payload, signal.sender, signal.sent_at or created_at)
