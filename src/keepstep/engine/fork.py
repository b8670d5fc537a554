"""Forking: a new run with a copy of another's beginning, sealed anew, and from there on a life of its own.

The other run is only read. What it began and did not finish, the fork begins for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import DefinitionError, RunConflict, RunNotFound
from ..model import Kind, Run, Signal, Status
from ..model.ids import check_id, check_text, child_id, new_run_id
from ..model.series import SERIES
from ..model.signal import CANCEL, CHILD, RESERVED
from ..ports import Create, Verdict, instant
from ..stores.records import Record, unseal
from ..values import VALUES
from ..workflows.definition import Bound
from .children import is_word_of
from .handle import RunHandle
from .history import Entry
from .past import Past, past
from .rewind import SHOWN, Told, named, position, with_its_state
from .steering import DEADLINE

if TYPE_CHECKING:
    from .engine import Engine

#: What ends a run, or ends it soon: none of it is carried over.
_ENDS = frozenset({Kind.RUN_FINISHED.value, Kind.ERROR.value})
#: Stands in the place of a signal that a fork does not get.
LEFT = f"{RESERVED}left"
_EDITABLE = frozenset({Kind.STEP_COMPLETED.value, Kind.STEP_FAILED.value, Kind.SIGNAL.value, Kind.CHILD.value})


@dataclass(frozen=True, slots=True)
class Edits:
    """What is to be other in a fork than in the run it comes from."""

    input: Any = None
    results: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = None
    next_step: str | None = None
    signals: bool = True

    def digest(self) -> str:
        """What tells two forks of one prefix apart, beside their input."""
        other = [dict(self.results or {}), dict(self.state or {}), self.next_step, self.signals]
        return VALUES.for_values(other).digest(other, "what is other in the fork")


async def fork(
    engine: Engine,
    origin_id: str,
    *,
    at: int | None,
    step: str | None,
    run_id: str | None,
    edits: Edits,
    reason: str,
    actor: str,
) -> RunHandle[Any]:
    """Make the new run, durable, and ready for any worker; a known `run_id` gives the fork that is there already."""
    check_text(reason, "reason")
    name = new_run_id(engine.clock.now()) if run_id is None else check_id(run_id)
    engine.encryption.check_writing()
    run = await engine.read(engine.store.get_run, origin_id)
    if run is None:
        raise RunNotFound(f"no run {origin_id!r} in {engine.store.url}", origin_id)
    engine.encryption.cipher(run)
    whole = await past(engine, run)
    prefix = await engine.call(whole.until, _end(whole, at, step, edits))
    edits = await _with_fitting_results(engine, prefix, edits)
    signals = await _signals_of(engine, run)
    copy = _Copy(engine, prefix, name, signals, edits)
    if whole.rows and not prefix.rows:  # what is kept of the definition comes along also without the records
        began, _ = next(unseal(whole.rows[:1], run.id))
        copy.first = {key: value for key, value in (began.data or {}).items() if key in ("definition", "schema")}
    about = {"actor": actor, "reason": engine.censor.redact(reason), "act": "fork"}
    edited = await _edited_state(engine, run, prefix.seq, edits)
    create = await engine.call(copy.made, _input(engine, run, edits.input), about, edited)
    answer = await engine.journal.write(create)
    if answer.verdict is Verdict.EXISTS:
        await _check_same(engine, create.run, answer.run, prefix, edits)
    engine.poke()
    return RunHandle(engine, name, engine.workflows.get(run.workflow))


def _end(prefix: Past, at: int | None, step: str | None, edits: Edits) -> int:
    """The last record that is copied."""
    run, counted = prefix.run, prefix.history.entries
    last = _last(prefix)
    if at is not None and step is not None:
        raise DefinitionError("say either at=, the last record that is copied, or step=, the one to fork before")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= run.seq):
        raise DefinitionError(f"run {run.id!r} has the records 1 to {run.seq}: at= names one of them, or 0, not {at!r}")
    if step is not None:
        gone = prefix.history.superseded
        at = position(run, (Told(one) for one in prefix.records if one.seq not in gone), None, step)
    if at is None and edits.results:
        return max(_edited(prefix, key).seq for key in edits.results)
    if at is None and edits.input is not None:
        return 0
    if at is None:
        return last
    for key in (CANCEL, DEADLINE):
        entry = counted.get(key)
        if entry is not None and at >= entry.seq:
            raise DefinitionError(
                f"run {run.id!r} was {'cancelled' if key == CANCEL else 'out of time'} at seq {entry.seq}, and so "
                f"would its fork be; fork it at {entry.seq - 1} or before"
            )
    return min(with_its_state(at, [Told(one) for one in prefix.records[max(at - 1, 0) : at + 1]]), last)


def _last(prefix: Past) -> int:
    """The last record before the run's end, or before what led to it from outside."""
    last = prefix.seq
    for key in (CANCEL, DEADLINE):
        entry = prefix.history.entries.get(key)
        if entry is not None:
            last = min(last, entry.seq - 1)
    while last and prefix.rows[last - 1].kind in _ENDS:
        last -= 1
    return last


def _edited(prefix: Past, key: str) -> Entry:
    """The recorded outcome that is to be another one."""
    counted = prefix.history.entries
    known = [one.key for one in counted.values() if one.kind in _EDITABLE and not one.child]
    found = named(known, key)
    if len(found) != 1:
        told = f"{len(found)} recorded results" if found else "no recorded result"
        raise DefinitionError(
            f"run {prefix.run.id!r} has {told} of {key!r} up to seq {len(prefix.rows)}; it has "
            f"{', '.join(found or known[:SHOWN]) or 'none'}"
        )
    return counted[found[0]]


async def _edited_state(engine: Engine, run: Run, at: int, edits: Edits) -> bytes | None:
    """What is to be other in the state of a graph's fork, as it is stored."""
    if edits.state is None and edits.next_step is None:
        return None
    from .states import Edit, begun, position_at, run_with_state, under_way  # noqa: PLC0415 - needed by few

    await run_with_state(engine, run.id)
    edit = Edit(edits.state or {}, next_step=edits.next_step)
    await edit.check_next(engine, run)
    stands = await position_at(engine, run, at)
    inner = await under_way(engine, run, stands, at)
    if inner is not None:
        raise DefinitionError(
            f"run {run.id!r} was inside {stands.at!r} at seq {at}, which began with the state before; fork it at "
            f"{inner.seq - 1} or before, or when that is done"
        )
    for first in (await begun(engine, run, stands, edit, at))[:1]:
        raise DefinitionError(
            f"run {run.id!r} had begun {first.step} at seq {first.seq}, and a fork that goes on with "
            f"{edits.next_step!r} has no place for that; fork it at {first.seq - 1}"
        )
    return await edit.delta(engine, run, stands)


async def _with_fitting_results(engine: Engine, prefix: Past, edits: Edits) -> Edits:
    """The edits, with the changes that steps of a graph are to have made held to its schema."""
    if not edits.results or not _is_graph(prefix.run):
        return edits
    from .states import fitting  # noqa: PLC0415 - needed by few

    results = dict(edits.results)
    for key, value in results.items():
        if isinstance(value, Mapping) and not _edited(prefix, key).digest:
            results[key] = await fitting(engine, prefix.run, value, f"edited result of {key!r}")
    return replace(edits, results=results)


def _is_graph(run: Run) -> bool:
    return run.fingerprint.startswith("graph:")


def _input(engine: Engine, run: Run, given: Any) -> bytes:
    """The stored input of the fork, in plain text."""
    if given is None:
        return engine.encryption.input(run)
    workflow = engine.workflows.get(run.workflow)
    if isinstance(given, Bound):
        if given.workflow.name != run.workflow:
            raise DefinitionError(
                f"the input is one of {given.workflow.name!r}, and the run is one of {run.workflow!r}"
            )
        workflow, args, kwargs = given.workflow, list(given.args), given.kwargs
    else:
        by_name = isinstance(given, Mapping)
        kwargs = dict(given) if by_name else {}
        args = [] if by_name else list(given) if isinstance(given, list | tuple) else [given]
    if workflow is not None:
        workflow.check_arguments(tuple(args), kwargs)
        return engine.censor.input_of(workflow, args, kwargs)
    data = VALUES.encode([args, kwargs], f"workflow {run.workflow!r}: input")
    engine.censor.check(data, run.workflow, "input of workflow")
    return data


async def _signals_of(engine: Engine, run: Run) -> list[Signal]:
    signals: list[Signal] = []
    while page := await engine.read(engine.store.list_signals, run.id, len(signals)):
        signals += page
    return signals


class _Copy:
    """Makes the records and signals of a fork from those of the run it comes from."""

    def __init__(self, engine: Engine, prefix: Past, name: str, signals: Sequence[Signal], edits: Edits) -> None:
        self.engine, self.prefix, self.name, self.edits = engine, prefix, name, edits
        self.first: dict[str, Any] = {}  # what the first record says beside the names, if none is copied
        self.edited = {_edited(prefix, key).seq: value for key, value in (edits.results or {}).items()}
        self.anew: dict[int, str] = {}  # by the record of its start: a child that the fork starts for itself
        self.renamed: dict[str, str] = {}  # and what that is called instead
        self.kept: dict[str, str] = {}  # by the name of its word: a child that has ended, and whose word comes along
        self._share_children(signals)
        self.signals = [self._copied(signal) for signal in signals]
        while self.signals and self.signals[-1].name == LEFT:
            self.signals.pop()

    def _share_children(self, signals: Sequence[Signal]) -> None:
        """Which of the children that were started count for the fork as they are, and which it starts anew."""
        history = self.prefix.history
        begun = [entry for entry in history.entries.values() if entry.child and not entry.cancelled]
        if not begun:
            return
        heard = {entry.digest for entry in history.entries.values() if entry.kind == Kind.CHILD and not entry.child}
        for entry in begun:
            name = f"{CHILD}{entry.key}"
            if entry.child in heard:
                continue
            if any(signal.name == name and is_word_of(signal.payload, entry.child) for signal in signals):
                self.kept[name] = entry.child
                continue
            self._check_not_signalled(entry)
            self.anew[entry.seq] = child_id(self.name, entry.key, history.generation)
            self.renamed[entry.child] = self.anew[entry.seq]

    def _check_not_signalled(self, entry: Entry) -> None:
        for record in self.prefix.records:
            sent = record.data is not None and "signal_name" in record.data
            if sent and record.seq > entry.seq and _reaches(str((record.data or {}).get("to")), entry.child):
                raise DefinitionError(
                    f"run {self.prefix.run.id!r} had signalled its child {entry.child!r} at seq {record.seq}, and the "
                    f"child has not ended: a fork would need one of its own that was told the same; fork at "
                    f"{record.seq - 1} or before, or when the child has ended"
                )

    def _copied(self, signal: Signal) -> Signal:
        """The signal for the fork; in the place of one that does not come along, a word that nobody waits for.

        So each keeps its number, by which the records name it.
        """
        if self._comes_along(signal):
            return replace(signal, run=self.name)
        return Signal(self.name, LEFT, b"null", f"left:{signal.seq}", seq=signal.seq)

    def _comes_along(self, signal: Signal) -> bool:
        if signal.seq in self.prefix.history.signals:
            return True
        if signal.name.startswith(RESERVED):  # what steered the other run is none of the fork's concern
            child = self.kept.get(signal.name)
            return child is not None and is_word_of(signal.payload, child)
        return self.edits.signals

    def made(self, data: bytes, about: dict[str, Any], edited: bytes | None) -> Create:
        """The creation of the fork; `edited` is what a person makes of its state."""
        old, now = self.prefix.run, instant(self.engine.clock.now())
        run = Run(
            id=self.name,
            workflow=old.workflow,
            status=Status.QUEUED,
            created_at=now,
            created_by=about["actor"],
            updated_at=now,
            version=old.version,
            fingerprint=old.fingerprint,
            input=data,
            seed=old.seed,
            origin=old.id,
            queue=old.queue,
            priority=old.priority,
            key=old.key,
            tags={name: text for name, text in old.tags.items() if name != SERIES},
            due_at=now,
            signals=len(self.signals),
        )
        named = {"origin": old.id, "origin_seq": len(self.prefix.rows), "origin_checksum": self.prefix.checksum}
        named["other"] = self.edits.digest()
        records = [self._record(record) for record in self.prefix.records]
        if not records:
            first = {"workflow": old.workflow, "version": old.version, **self.first, "exact_time": True}
            records.append(Record(self.name, Kind.RUN_STARTED.value, finished_at=now, data=first))
        records[0].data = {**(records[0].data or {}), **named, **about}
        if edited is not None:
            said = {**about, "act": "edit", **({"next": self.edits.next_step} if self.edits.next_step else {})}
            last = Record(self.name, Kind.SUPERSEDED.value, finished_at=now, trigger="manual", data=said)
            last.value = msgspec.Raw(edited)
            records.append(last)
        return self.engine.encryption.copied(run, records, self.signals)

    def _record(self, record: Record) -> Record:
        """A record as the fork has it."""
        record.run, record.claimed, record.packed = self.name, None, ""
        record.digest = self.renamed.get(record.digest, record.digest)  # of a wait for a child that was given up
        data = record.data
        if data and "child" in data:
            data = dict(data)
            anew = self.anew.get(record.seq)
            if anew is not None:
                data.update(child=anew, renew=True)
            elif self._was_given_up(record):
                del data["child"]
        record.data = data
        if record.seq in self.edited:
            self._edit(record, self.edited[record.seq])
        return record

    def _was_given_up(self, record: Record) -> bool:
        """Whether the code had no use for a child before it was told of it: then it is not the fork's to cancel."""
        entry = self.prefix.history.entries.get(record.step)
        return entry is not None and entry.cancelled

    def _edit(self, record: Record, value: Any) -> None:
        """Give a record another outcome: the record says that a person did."""
        if _is_graph(self.prefix.run) and not record.digest:
            self._edit_change(record, value)
            return
        data = VALUES.for_values(value).encode(value, f"edited result of {record.step!r}")
        self.engine.censor.check(data, record.step, "edited result of")
        if record.kind == Kind.CHILD:
            word = msgspec.json.decode(record.raw())
            data = msgspec.json.encode({"status": "completed", "child": word["child"], "value": msgspec.Raw(data)})
        elif record.kind == Kind.STEP_FAILED:
            record.kind = Kind.STEP_COMPLETED.value
        record.value, record.outcome, record.error, record.trigger = msgspec.Raw(data), "success", None, "manual"
        record.data = {**(record.data or {}), "act": "edit"}

    def _edit_change(self, record: Record, value: Any) -> None:
        """Give a graph's step another change of the state; the edge after it is chosen anew."""
        if not isinstance(value, Mapping):
            raise DefinitionError(
                f"the result of {record.step!r}, a graph's step, is its change of the state: an object with the keys "
                f"that it sets, not {value!r}"
            )
        later = [one for one in self.prefix.records if one.seq > record.seq and one.kind in _MADE]
        if later:
            raise DefinitionError(
                f"what came after {record.step!r} was made with its other result, up to {later[-1].step!r}; fork it at "
                f"{record.seq} (or leave at= out)"
            )
        from .states import trees_of  # noqa: PLC0415 - needed by few

        trees = trees_of(self.engine, self.prefix.run)
        data = msgspec.json.encode({"set": trees.lift(value, {}, f"edited result of {record.step!r}", careful=True)})
        self.engine.censor.check(data, record.step, "edited result of")
        record.kind, record.outcome, record.error = Kind.STEP_COMPLETED.value, "success", None
        record.value, record.trigger = msgspec.Raw(data), "manual"
        record.data = {"act": "edit"}


def _reaches(target: str, child: str) -> bool:
    """Whether a signal to this id may have reached a child, or a run that continues it."""
    return target == child or target.startswith(f"{child}~")


#: What moves a graph, and was made with what was before it.
_MADE = frozenset({Kind.STEP_COMPLETED.value, Kind.BARRIER.value, Kind.STATE.value, Kind.DECISION.value})


async def _check_same(engine: Engine, wanted: Run, existing: Run | None, prefix: Past, edits: Edits) -> None:
    """A run of this id is there: it must be this fork."""
    if existing is not None and existing.origin == prefix.run.id:
        rows = await engine.read(engine.store.list_checkpoints, existing.id, 0, 1)
        data = (next(unseal(rows, existing.id))[0].data if rows else None) or {}
        same = data.get("origin_checksum") == prefix.checksum and data.get("other") == edits.digest()
        if same and engine.encryption.input(existing) == engine.encryption.input(wanted):
            return
    raise RunConflict(
        f"run id {wanted.id!r} is taken by another run than this fork of {prefix.run.id!r}; use another id",
        wanted.id,
        existing,
    )
