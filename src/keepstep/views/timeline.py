"""The timeline of a run: its records as columns without values, with the leases, crashes and rewinds between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ..errors import CheckpointCorrupt, RunNotFound
from ..kernel.replay import Superseded
from ..model import Kind, Outcome, Status, Trigger
from ..model.undo import is_undo
from ..model.wakes import sorted_wakes
from ..records.record import unseal_some
from ..stores.encrypted import below

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row, Store

#: Records of one page at most, so that a page is read and drawn at once.
MOST_RECORDS = 10_000
#: Bits of `flags`: the step is tried again; a person caused the record; a recovery caused it; it belongs to an undo, or
#: can be undone; its result was taken from another run; its input is stored.
RETRIED, BY_PERSON, BY_RECOVERY, UNDO, CACHED, HAS_INPUT = (1 << bit for bit in range(6))

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class _Claimed(msgspec.Struct):
    epoch: _Number
    at: datetime
    before: str
    since: datetime | None = None


class _Error(msgspec.Struct):
    type: str


class _Data(msgspec.Struct, rename={"from_": "from"}):
    """The keys of a record's data that a timeline shows. They stay readable in an encrypted run."""

    undo: bool = False
    cached: str = ""
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    signal_name: str = ""
    to: str = ""
    child: str = ""
    continued_as: str = ""
    key: str = ""
    next: str = ""
    act: str = ""
    actor: str = ""
    sender: str = ""
    handler: str = ""
    from_: str = ""
    recoveries: _Number = 0
    beyond: _Number | None = None


class _Line(msgspec.Struct, gc=False):
    """A record without its value. It decodes several times faster than the whole record."""

    kind: str
    seq: int
    step: str = ""
    outcome: str = Outcome.SUCCESS.value
    attempt: _Number = 0
    trigger: str = Trigger.AUTOMATIC.value
    worker: str = ""
    agent: str | None = None
    stage: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error: _Error | None = None
    retry_at: datetime | None = None
    details: _Data | None = msgspec.field(default=None, name="data")
    claimed: _Claimed | None = None


_decode = msgspec.json.Decoder(_Line).decode


class Names(msgspec.Struct):
    """The texts that columns name by their places. The first text of a table is empty if records may have none."""

    kinds: list[str]
    outcomes: list[str]
    steps: list[str]
    branches: list[str]
    given: list[str]
    workers: list[str]
    agents: list[str]
    stages: list[str]
    errors: list[str]


class Columns(msgspec.Struct):
    """One entry for each record.

    `start` is in milliseconds after `zero`, and `took` in milliseconds. The key of a step is its branch, `/`, its name,
    `#`, and its call or the key that the code has given it; what a step lacks is left out.
    """

    seq: list[int] = []
    kind: list[int] = []
    outcome: list[int] = []
    step: list[int] = []
    branch: list[int] = []
    call: list[int] = []
    given: list[int] = []
    start: list[int] = []
    took: list[int] = []
    attempt: list[int] = []
    worker: list[int] = []
    agent: list[int] = []
    stage: list[int] = []
    error: list[int] = []
    flags: list[int] = []


class LeaseMark(msgspec.Struct):
    """A worker's lease that begins with the record `seq`; `ended` is when the one before it ended.

    A `recovery` took the run from the dead worker `lost`.
    """

    seq: int
    epoch: int
    worker: str
    at: float
    before: str
    ended: float | None
    recovery: bool
    lost: str


class Detail(msgspec.Struct, omit_defaults=True):
    """Further facts of a record."""

    seq: int
    child: str = ""
    signal: str = ""
    to: str = ""
    key: str = ""
    next: str = ""
    act: str = ""
    actor: str = ""
    handler: str = ""
    continued_as: str = ""
    cached: str = ""
    retry_at: float | None = None
    back_to: int | None = None


class Timeline(msgspec.Struct):
    """One page of a timeline; `next` is the `after` of the following page, None at the end.

    All instants are milliseconds after `zero`, which is in milliseconds since 1970. `superseded` are the first and last
    numbers of the records of the whole run that no longer count. `open` is the lease under which nothing is recorded
    yet. `in_doubt` are keys of steps that a person must resolve.
    """

    run: str
    status: Status
    seq: int
    next: int | None
    zero: float
    names: Names
    columns: Columns
    leases: list[LeaseMark]
    details: list[Detail]
    superseded: list[tuple[int, int]]
    in_doubt: list[str]
    epoch: int
    worker: str | None
    recoveries: int
    kept_from: int


class _Table:
    """A table of texts; each has one place."""

    def __init__(self, *first: str) -> None:
        self.places: dict[str, int] = {text: place for place, text in enumerate(first)}

    def place(self, text: str) -> int:
        return self.places.setdefault(text, len(self.places))

    def shown(self, redact: Callable[[str], str]) -> list[str]:
        """Return the texts without secrets; the whole is looked at once, because almost no table has any."""
        texts = list(self.places)
        together = "\n".join(texts)
        return texts if redact(together) == together else [redact(text) for text in texts]


def timeline_of(
    store: Store, run_id: str, after: int, limit: int, redact: Callable[[str], str] = lambda text: text
) -> Timeline:
    """Read a page of a run's timeline. It takes long for many records, so call it in a thread."""
    run = store.get_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
    encrypted = below(store)  # a timeline shows nothing that a key would open
    page = _Page(run, redact)
    last, left = after, min(limit, MOST_RECORDS)
    while left and (rows := encrypted.list_checkpoints(run_id, last, min(left, 1000))):
        for row in rows:
            page.add(_line(run_id, row))
        last, left = rows[-1].seq, left - len(rows)
    gone, back = Superseded(), 0
    while rows := encrypted.list_checkpoints(run_id, back, 1000, (Kind.SUPERSEDED.value,)):
        for record, _ in unseal_some(rows, run_id):
            gone.add(record)
        back = rows[-1].seq
    return page.timeline(None if left or last >= run.seq else last, gone.ranges())


def _parts(key: str) -> tuple[str, str, int, str]:
    """Return the branch, the name, the number and the given key of a call; 0 and an empty text for what it lacks."""
    path, _, rest = key.rpartition("/")
    name, mark, number = rest.rpartition("#")
    if mark and number.startswith("@"):  # the code gave the key of the call
        return path, name, 0, number
    if not mark or not number.isdecimal() or number.startswith("0"):
        return path, rest, 0, ""
    return path, name, int(number), ""


def _line(run: str, row: Row) -> _Line:
    try:
        line = _decode(bytes(row.record))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"run {run!r}: the record at seq {row.seq} is not readable: {error}") from None
    if line.seq != row.seq or line.kind not in _KINDS or line.outcome not in _OUTCOMES:
        raise CheckpointCorrupt(f"run {run!r}: the record at seq {row.seq} is not one of ours")
    return line


_KINDS = {kind.value: place for place, kind in enumerate(Kind)}
_OUTCOMES = {outcome.value: place for place, outcome in enumerate(Outcome)}
_TRIGGERS = {Trigger.MANUAL.value: BY_PERSON, Trigger.RECOVERY.value: BY_RECOVERY}


class _Page:
    """Collects the records of one page."""

    def __init__(self, run: Run, redact: Callable[[str], str]) -> None:
        self._run = run
        self._redact = redact
        self._zero = run.created_at.timestamp() * 1000
        self._columns = Columns()
        self._steps, self._branches, self._given, self._workers = _Table(""), _Table(""), _Table(""), _Table("")
        self._agents, self._stages, self._errors = _Table(""), _Table(""), _Table("")
        self._leases: list[LeaseMark] = []
        self._details: list[Detail] = []

    def _at(self, at: datetime) -> float:
        return round(at.timestamp() * 1000 - self._zero)

    def add(self, line: _Line) -> None:
        columns, data = self._columns, line.details
        path, name, number, given = _parts(line.step)
        end = line.finished_at or line.started_at
        start = line.started_at or line.finished_at
        began = 0.0 if start is None else self._at(start)
        flags = _TRIGGERS.get(line.trigger, 0)
        if line.retry_at is not None:
            flags |= RETRIED
        if data is not None:
            if data.undo:
                flags |= UNDO
            if data.cached:
                flags |= CACHED
            if data.input is not msgspec.UNSET:
                flags |= HAS_INPUT
        if line.step.startswith("ks:") and is_undo(line.step):
            flags |= UNDO
        columns.seq.append(line.seq)
        columns.kind.append(_KINDS[line.kind])
        columns.outcome.append(_OUTCOMES[line.outcome])
        columns.step.append(self._steps.place(name))
        columns.branch.append(self._branches.place(path))
        columns.call.append(number)
        columns.given.append(self._given.place(given))
        columns.start.append(int(began))
        columns.took.append(0 if end is None else max(0, int(self._at(end) - began)))
        columns.attempt.append(line.attempt)
        columns.worker.append(self._workers.place(line.worker))
        columns.agent.append(self._agents.place(line.agent or ""))
        columns.stage.append(self._stages.place(line.stage or ""))
        columns.error.append(0 if line.error is None else self._errors.place(line.error.type))
        columns.flags.append(flags)
        if line.claimed is not None or line.kind == Kind.RUN_STARTED.value:
            self._add_lease(line)
        if data is not None or line.retry_at is not None:
            self._add_detail(line, data or _Data())

    def _add_lease(self, line: _Line) -> None:
        claimed, data = line.claimed, line.details or _Data()
        began = line.started_at or line.finished_at or self._run.created_at
        if claimed is None:  # created with a lease
            mark = LeaseMark(line.seq, 1, line.worker, self._at(began), "", None, recovery=False, lost="")
        else:
            is_recovery = claimed.before in (Status.RUNNING.value, Status.RECOVERING.value)
            ended = None if claimed.since is None else self._at(claimed.since)
            at, lost = self._at(claimed.at), data.from_ if is_recovery else ""
            mark = LeaseMark(line.seq, claimed.epoch, line.worker, at, claimed.before, ended, is_recovery, lost)
        self._leases.append(mark)

    def _add_detail(self, line: _Line, data: _Data) -> None:
        detail = Detail(
            line.seq,
            child=data.child,
            signal=data.signal_name,
            to=data.to,
            key=data.key,
            next=data.next,
            act=data.act,
            actor=data.actor or data.sender,
            handler=data.handler,
            continued_as=data.continued_as,
            cached=data.cached,
            retry_at=None if line.retry_at is None else self._at(line.retry_at),
            back_to=data.beyond,
        )
        if detail != Detail(line.seq):
            self._details.append(detail)

    def timeline(self, following: int | None, superseded: list[tuple[int, int]]) -> Timeline:
        """Return the page."""
        run, redact = self._run, self._redact
        tables = (self._steps, self._branches, self._given, self._workers, self._agents, self._stages, self._errors)
        steps, branches, given, workers, agents, stages, errors = (table.shown(redact) for table in tables)
        return Timeline(
            run=run.id,
            status=run.status,
            seq=run.seq,
            next=following,
            zero=self._zero,
            names=Names(list(_KINDS), list(_OUTCOMES), steps, branches, given, workers, agents, stages, errors),
            columns=self._columns,
            leases=_redacted(self._leases, redact),
            details=_redacted(self._details, redact),
            superseded=superseded,
            in_doubt=list(sorted_wakes(run.wakes).in_doubt),
            epoch=run.epoch,
            worker=run.worker,
            recoveries=run.recoveries,
            kept_from=run.kept_from,
        )


def _redacted(marks: list[Any], redact: Callable[[str], str]) -> list[Any]:
    """Return structs whose texts hold no secrets."""
    texts = {text for mark in marks for text in _texts(mark)}
    together = "\n".join(texts)
    if redact(together) == together:
        return marks
    return [
        msgspec.structs.replace(
            mark,
            **{name: redact(text) for name in mark.__struct_fields__ if isinstance(text := getattr(mark, name), str)},
        )
        for mark in marks
    ]


def _texts(mark: msgspec.Struct) -> Iterable[str]:
    return (text for name in mark.__struct_fields__ if isinstance(text := getattr(mark, name), str) and text)
