"""Forks: a new run that begins with a copy of another run's records, sealed again, and then goes its own way.

The original run is only read. The fork begins unfinished calls of the original again for itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..checks import check_run_id, check_text
from ..errors import DefinitionError, RunConflict, RunNotFound
from ..kernel.children import is_word_of, says_cancelled
from ..kernel.replay import Entry, check_kept
from ..kernel.steering import DEADLINE
from ..kernel.tracing import traceparent_from
from ..kernel.undo_records import Outline
from ..model import Kind, Run, Signal, Status
from ..model.checkpoint import ABOUT_CHILD, ABOUT_UNDO, EDITABLE, ENDS_RUN, ENDS_STEP, MOVES_GRAPH
from ..model.ids import child_id, new_run_id
from ..model.series import SERIES
from ..model.signal import CANCEL, CHILD, RESERVED
from ..ports import Create, Verdict, instant
from ..records.data import (
    CommandData,
    Data,
    DefinitionData,
    RunStartedData,
    StepCompletedData,
    SupersededData,
    data_of,
    new_data,
)
from ..records.record import Record, unseal
from ..values import VALUES
from ..workflows.definition import Bound
from .commands import check_not_keeper
from .names import named
from .prefix import Prefix, read_prefix
from .rewind import SHOWN, RecordOutline, position, with_its_state
from .undone import check_not_torn

if TYPE_CHECKING:
    from .host import CommandHost

#: Name of the placeholder for a signal that a fork does not receive.
LEFT = f"{RESERVED}left"


@dataclass(frozen=True, slots=True)
class Edits:
    """The differences between a fork and its original that a person asked for."""

    input: Any = None
    results: Mapping[str, Any] | None = None
    state: Mapping[str, Any] | None = None
    next_step: str | None = None
    signals: bool = True

    def digest(self) -> str:
        """Return a digest of everything but the input that distinguishes two forks of one prefix."""
        other = [dict(self.results or {}), dict(self.state or {}), self.next_step, self.signals]
        return VALUES.for_values(other).digest(other, "a fork's results and state")


async def fork(
    host: CommandHost,
    origin_id: str,
    *,
    at: int | None,
    step: str | None,
    run_id: str | None,
    edits: Edits,
    reason: str,
    actor: str,
) -> tuple[str, str]:
    """Create the fork, durable and ready for any worker, or find it by its id; return its id and its workflow."""
    check_text(reason, "reason")
    check_not_keeper(origin_id, "fork")
    name = new_run_id(host.clock.now()) if run_id is None else check_run_id(run_id)
    host.encryption.check_writing()
    run = await host.stored_run(origin_id)
    if run is None:
        raise RunNotFound(f"no run {origin_id!r} in {host.url}", origin_id)
    host.encryption.cipher(run)
    if edits.state is not None:
        from .state_edits import plain  # noqa: PLC0415 - rarely needed

        edits = replace(edits, state=plain(host, run, edits.state))
    whole = await read_prefix(host, run)
    last = _end(whole, at, step, edits)
    undo = [Outline.of(record) for record in whole.records if record.kind in ABOUT_UNDO]
    marks = [record for record in whole.records if record.kind == Kind.SUPERSEDED]
    check_not_torn(run, undo, marks, last, "forked")
    prefix = await host.call(whole.until, last)
    edits = await _with_fitting_results(host, prefix, edits)
    signals = await _signals_of(host, run)
    copy = _Copy(host, prefix, name, signals, edits)
    # A fork without copied records still keeps the stored definition.
    if whole.rows and not prefix.rows:
        began, _ = next(unseal(whole.rows[:1], run.id))
        kept = data_of(began, RunStartedData)
        if "definition" in kept:
            copy.first["definition"] = kept["definition"]
        if "schema" in kept:
            copy.first["schema"] = kept["schema"]
    about: CommandData = {"actor": actor, "reason": host.redaction.redact(reason), "act": "fork"}
    edited = await _edited_state(host, run, prefix.seq, edits)
    create = await host.call(copy.made, _input(host, run, edits.input), about, edited)
    answer = await host.journal.write(create)
    if answer.verdict is Verdict.EXISTS:
        await _check_same(host, create.run, answer.run, prefix, edits)
    host.claim_soon()
    return name, run.workflow


def _end(prefix: Prefix, at: int | None, step: str | None, edits: Edits) -> int:
    """Return the number of the last record to copy."""
    run, counted = prefix.run, prefix.history.entries
    last = _last(prefix)
    if at is not None and step is not None:
        raise DefinitionError("give either at=, the last record to copy, or step=, the step to fork before")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int) or not 0 <= at <= run.seq):
        raise DefinitionError(f"at= must be a record of run {run.id!r}, from 0 to {run.seq}, got {at!r}")
    if step is not None:
        gone = prefix.history.superseded
        at = position(run, (RecordOutline(one) for one in prefix.records if one.seq not in gone), None, step)
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
                f"run {run.id!r} was {'cancelled' if key == CANCEL else 'out of time'} at seq {entry.seq}, so its "
                f"fork would end too; fork it at seq {entry.seq - 1} or before"
            )
    check_kept(run, at)
    chosen = with_its_state(at, [RecordOutline(one) for one in prefix.records if one.seq in (at, at + 1)])
    return _before_end(prefix, min(chosen, last))


def _last(prefix: Prefix) -> int:
    """Return the last record before the run's end, or before the cancel or deadline that led to it."""
    last = prefix.seq
    for key in (CANCEL, DEADLINE):
        entry = prefix.history.entries.get(key)
        if entry is not None:
            last = min(last, entry.seq - 1)
    return _before_end(prefix, last)


def _before_end(prefix: Prefix, last: int) -> int:
    """Return the newest record up to `last` that does not end the run: a fork that copied an end would end with it."""
    for row in reversed(prefix.rows):
        if row.seq <= last:
            if row.kind not in ENDS_RUN:
                return row.seq
            last = row.seq - 1
    return 0


def _edited(prefix: Prefix, key: str) -> Entry:
    """Return the recorded outcome to replace."""
    counted = prefix.history.entries
    known = [one.key for one in counted.values() if one.kind in EDITABLE and not one.child]
    found = named(known, key)
    if len(found) != 1:
        count = f"{len(found)} recorded results" if found else "no recorded result"
        raise DefinitionError(
            f"run {prefix.run.id!r} has {count} of {key!r} up to seq {prefix.seq}; it has "
            f"{', '.join(found or known[:SHOWN]) or 'none'}"
        )
    return counted[found[0]]


async def _edited_state(host: CommandHost, run: Run, at: int, edits: Edits) -> bytes | None:
    """Return the stored form of the state edit of a graph's fork, or None if there is no edit."""
    if edits.state is None and edits.next_step is None:
        return None
    from ..kernel.graph.stored import position_at  # noqa: PLC0415 - rarely needed
    from .state_edits import Edit, begun, run_with_state, under_way  # noqa: PLC0415 - rarely needed

    await run_with_state(host, run.id)
    edit = Edit(edits.state or {}, next_step=edits.next_step)
    await edit.check_next(host, run)
    stands = await position_at(host, run, at)
    inner = await under_way(host, run, stands, at)
    if inner is not None:
        raise DefinitionError(
            f"cannot edit the state of run {run.id!r} at seq {at}: step {stands.at!r} was running with the old state. "
            f"Fork at seq {inner.seq - 1} or before, or after the step completes"
        )
    for first in (await begun(host, run, stands, edit, at))[:1]:
        raise DefinitionError(
            f"run {run.id!r} began {first.step} at seq {first.seq}, so a fork cannot go on with "
            f"{edits.next_step!r} after it; fork it at seq {first.seq - 1}"
        )
    return await edit.delta(host, run, stands)


async def _with_fitting_results(host: CommandHost, prefix: Prefix, edits: Edits) -> Edits:
    """Return the edits with results that fit: those of graph steps are converted to the graph's schema."""
    if not edits.results:
        return edits
    if not _is_graph(prefix.run):
        workflow = host.workflows.get(prefix.run.workflow)
        for key, value in edits.results.items():
            if workflow is not None and _edited(prefix, key).kind in ENDS_STEP:
                workflow.check_result(_edited(prefix, key).key, value, f"edited result of {key!r}")
        return edits
    from ..kernel.graph.stored import position_at  # noqa: PLC0415 - rarely needed
    from .state_edits import fitting, plain, trees_of  # noqa: PLC0415 - rarely needed

    results = dict(edits.results)
    for key, given in results.items():
        entry, value = _edited(prefix, key), plain(host, prefix.run, given)
        if isinstance(value, Mapping) and not entry.digest:
            before = (await position_at(host, prefix.run, entry.seq - 1)).state(
                trees_of(host, prefix.run), prefix.run.id
            )
            results[key] = await fitting(host, prefix.run, value, f"edited result of {key!r}", before)
    return replace(edits, results=results)


def _is_graph(run: Run) -> bool:
    return run.fingerprint.startswith("graph:")


def _input(host: CommandHost, run: Run, given: Any) -> bytes:
    """Return the stored input of the fork in plain text."""
    if given is None:
        return host.encryption.input(run)
    workflow = host.workflows.get(run.workflow)
    if isinstance(given, Bound):
        if given.workflow.name != run.workflow:
            raise DefinitionError(
                f"input= must be a call of workflow {run.workflow!r}, got one of {given.workflow.name!r}"
            )
        workflow, args, kwargs = given.workflow, list(given.args), given.kwargs
    else:
        by_name = isinstance(given, Mapping)
        kwargs = dict(given) if by_name else {}
        args = [] if by_name else list(given) if isinstance(given, list | tuple) else [given]
    if workflow is not None:
        workflow.check_arguments(tuple(args), kwargs)
        return host.redaction.input_of(workflow, args, kwargs)
    data = VALUES.encode([args, kwargs], f"workflow {run.workflow!r}: input")
    host.redaction.check(data, run.workflow, "input of workflow")
    return data


async def _signals_of(host: CommandHost, run: Run) -> list[Signal]:
    signals: list[Signal] = []
    while page := await host.signals(run.id, signals[-1].seq if signals else 0):
        signals += page
    return signals


class _Copy:
    """Makes the records and signals of a fork from those of its original."""

    def __init__(self, host: CommandHost, prefix: Prefix, name: str, signals: Sequence[Signal], edits: Edits) -> None:
        self.host, self.prefix, self.name, self.edits = host, prefix, name, edits
        self.first: DefinitionData = {}  # what the first record says beside the names, if none is copied
        self.edited = {_edited(prefix, key).seq: value for key, value in (edits.results or {}).items()}
        self.anew: dict[int, str] = {}  # start record of a child → id of the fork's own child
        self.renamed: dict[str, str] = {}  # id of the original's child → id of the fork's own child
        self.kept: dict[str, str] = {}  # name of the signal of a child that has ended → its id; the signal is copied
        self._share_children(signals)
        self.signals = [self._copied(signal) for signal in signals]
        while self.signals and self.signals[-1].name == LEFT:
            self.signals.pop()

    def _share_children(self, signals: Sequence[Signal]) -> None:
        """Decide for each started child whether the fork shares it or starts its own."""
        history = self.prefix.history
        begun = [entry for entry in history.entries.values() if entry.child and not entry.cancelled]
        if not begun:
            return
        delivered = {
            entry.digest for entry in history.entries.values() if entry.kind in ABOUT_CHILD and not entry.child
        }
        for entry in begun:
            name = f"{CHILD}{entry.key}"
            if entry.child in delivered:
                continue
            signalled_at = self._signalled_at(entry)
            words = [one.payload for one in signals if one.name == name and is_word_of(one.payload, entry.child)]
            if signalled_at is not None and not words:
                raise DefinitionError(
                    f"run {self.prefix.run.id!r} signalled its child {entry.child!r} at seq {signalled_at}, and the "
                    "child has not ended; a child of the fork would miss the signal. Fork at seq "
                    f"{signalled_at - 1} or before, or after the child has ended"
                )
            # A rewind of the original may have cancelled the child since. The fork then starts its own.
            if signalled_at is not None or not all(map(says_cancelled, words)):
                self.kept[name] = entry.child
                continue
            self.anew[entry.seq] = child_id(self.name, entry.key, history.generation)
            self.renamed[entry.child] = self.anew[entry.seq]

    def _signalled_at(self, entry: Entry) -> int | None:
        """Return the first record by which the code sent a signal to its child, or None."""
        for record in self.prefix.records:
            sent = data_of(record, Data)
            if "signal_name" in sent and record.seq > entry.seq and _reaches(str(sent.get("to")), entry.child):
                return record.seq
        return None

    def _copied(self, signal: Signal) -> Signal:
        """Return the signal for the fork, or a placeholder that nobody waits for if the fork does not receive it.

        The placeholder preserves the numbers of the signals, which the records refer to.
        """
        if self._comes_along(signal):
            return replace(signal, run=self.name)
        return Signal(self.name, LEFT, b"null", f"left:{signal.seq}", seq=signal.seq)

    def _comes_along(self, signal: Signal) -> bool:
        if signal.seq in self.prefix.history.signals:
            return True
        if signal.name.startswith(RESERVED):  # commands to the original do not apply to the fork
            child = self.kept.get(signal.name)
            return child is not None and is_word_of(signal.payload, child)
        return self.edits.signals

    def made(self, data: bytes, about: CommandData, edited: bytes | None) -> Create:
        """The creation of the fork; `edited` is what a person makes of its state."""
        old, now = self.prefix.run, instant(self.host.clock.now())
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
            traceparent=traceparent_from(self.host.tracer, old),
            tags={name: text for name, text in old.tags.items() if name != SERIES},
            due_at=now,
            signals=self.signals[-1].seq if self.signals else max(old.signals_from - 1, 0),
            signals_read=len(self.prefix.history.signals),
            kept_from=old.kept_from if self.prefix.seq > 1 else 0,
            signals_from=old.signals_from,
        )
        named: RunStartedData = {
            "origin": old.id,
            "origin_seq": self.prefix.seq,
            "origin_checksum": self.prefix.checksum,
            "other": self.edits.digest(),
        }
        records = [self._record(record) for record in self.prefix.records]
        if not records:
            first = new_data(RunStartedData, workflow=old.workflow, version=old.version, **self.first)
            first["exact_time"] = first["nests"] = first["typed"] = True
            records.append(Record(self.name, Kind.RUN_STARTED.value, finished_at=now, data=first))
        records[0].data = {**data_of(records[0], Data), **named, **about}
        if edited is not None:
            edit_data = new_data(SupersededData, **about)
            edit_data["act"] = "edit"
            if self.edits.next_step:
                edit_data["next"] = self.edits.next_step
            last = Record(self.name, Kind.SUPERSEDED.value, finished_at=now, trigger="manual", data=edit_data)
            last.value = msgspec.Raw(edited)
            records.append(last)
        return self.host.encryption.copied(run, records, self.signals)

    def _record(self, record: Record) -> Record:
        """Convert a record of the original into one of the fork."""
        record.run, record.claimed, record.packed = self.name, None, ""
        record.digest = self.renamed.get(record.digest, record.digest)  # of a wait for a child that was given up
        if record.data and "child" in record.data:
            data: Data = {**record.data}
            anew = self.anew.get(record.seq)
            if anew is not None:
                data["child"], data["renew"] = anew, True
            elif self._was_given_up(record):
                del data["child"]
            record.data = data
        if record.seq in self.edited:
            self._edit(record, self.edited[record.seq])
        return record

    def _was_given_up(self, record: Record) -> bool:
        """Whether the code abandoned a child before its outcome; the fork must not cancel such a child."""
        entry = self.prefix.history.entries.get(record.step)
        return entry is not None and entry.cancelled

    def _edit(self, record: Record, value: Any) -> None:
        """Replace the outcome of a record and mark it as a person's edit."""
        if _is_graph(self.prefix.run) and not record.digest:
            self._edit_change(record, value)
            return
        data = VALUES.for_values(value).encode(value, f"edited result of {record.step!r}")
        self.host.redaction.check(data, record.step, "edited result of")
        if record.kind in ABOUT_CHILD:
            word = msgspec.json.decode(record.raw())
            data = msgspec.json.encode({"status": "completed", "child": word["child"], "value": msgspec.Raw(data)})
        elif record.kind == Kind.STEP_FAILED:
            record.kind = Kind.STEP_COMPLETED.value
        record.value, record.outcome, record.error, record.trigger = msgspec.Raw(data), "success", None, "manual"
        record.data = {**data_of(record, Data), "act": "edit"}

    def _edit_change(self, record: Record, value: Any) -> None:
        """Replace the change that a graph's step made to the state; the next edge is chosen again."""
        if not isinstance(value, Mapping):
            raise DefinitionError(
                f"the result of graph step {record.step!r} must be a mapping of the state keys that it sets, "
                f"got {value!r}"
            )
        later = [one for one in self.prefix.records if one.seq > record.seq and one.kind in MOVES_GRAPH]
        if later:
            raise DefinitionError(
                f"the steps after {record.step!r}, up to {later[-1].step!r}, used its old result. Fork at seq "
                f"{record.seq} (or omit at=)"
            )
        from .state_edits import trees_of  # noqa: PLC0415 - rarely needed

        trees = trees_of(self.host, self.prefix.run)
        data = msgspec.json.encode({"set": trees.lift(value, {}, f"edited result of {record.step!r}", careful=True)})
        self.host.redaction.check(data, record.step, "edited result of")
        record.kind, record.outcome, record.error = Kind.STEP_COMPLETED.value, "success", None
        record.value, record.trigger = msgspec.Raw(data), "manual"
        record.data = new_data(StepCompletedData, act="edit")


def _reaches(target: str, child: str) -> bool:
    """Whether a signal to this id may have reached a child or a successor of it."""
    return target == child or target.startswith(f"{child}~")


async def _check_same(host: CommandHost, wanted: Run, existing: Run | None, prefix: Prefix, edits: Edits) -> None:
    """Raise `RunConflict` unless the existing run of this id is the same fork."""
    if existing is not None and existing.origin == prefix.run.id:
        rows = await host.records(existing.id, 0, 1)
        first = data_of(next(unseal(rows, existing.id))[0], RunStartedData) if rows else RunStartedData()
        same = first.get("origin_checksum") == prefix.checksum and first.get("other") == edits.digest()
        if same and host.encryption.input(existing) == host.encryption.input(wanted):
            return
    raise RunConflict(
        f"run id {wanted.id!r} is taken by a run other than this fork of {prefix.run.id!r}; use another id",
        wanted.id,
        existing,
    )
