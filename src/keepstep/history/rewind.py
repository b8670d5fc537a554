"""Rewinds a run to an earlier checkpoint; later records stay in the store but no longer count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..checks import check_text
from ..errors import AlreadyFinished, DefinitionError, RunConflict, RunNotFound
from ..kernel.graph.position import generation_in
from ..kernel.replay import Superseded, read_records
from ..kernel.undo_records import Outline
from ..model import FINISHED, Kind, Signal, Status
from ..model.checkpoint import ABOUT_UNDO, DONE_AGAIN
from ..model.ids import is_child_id
from ..model.run import handed_over, removed_records
from ..model.signal import CANCEL
from ..model.undo import is_command, is_undo
from ..ports import instant
from ..records.data import Data, SupersededData, data_of, new_data
from ..records.record import Record
from .commands import append_and_release, check_not_keeper, claim_by_name, hand_back_on_error
from .names import named
from .undone import check_not_torn

if TYPE_CHECKING:
    from ..model import Run
    from .host import CommandHost

#: Statuses that allow a rewind: no worker drives the run, and it was not cancelled.
_REWINDABLE = frozenset(
    {Status.COMPLETED, Status.FAILED, Status.SET_ASIDE, Status.PAUSED, Status.WAITING, Status.QUEUED}
)


@dataclass(frozen=True, slots=True)
class Rewound:
    """The effects of a rewind: `to` is the last record that counts, `again` are calls whose outcomes no longer do.

    `children` are unfinished runs that those calls had started; they are cancelled.
    """

    run: str
    to: int
    again: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


class RecordOutline:
    """The parts of a record that a rewind needs to decide whether it counts."""

    __slots__ = ("child", "final", "kind", "migrates", "seq", "step")

    def __init__(self, record: Record) -> None:
        self.seq, self.kind, self.step = record.seq, record.kind, record.step
        data = data_of(record, Data)
        self.child = data.get("child", "")
        self.migrates = data.get("act") == "migrate"
        self.final = record.kind in DONE_AGAIN and record.kind != Kind.STEP_STARTED and record.retry_at is None


async def rewind(
    host: CommandHost,
    run_id: str,
    *,
    to: int | None,
    step: str | None,
    reason: str,
    actor: str,
    dry_run: bool = False,
    force: bool = False,
) -> Rewound:
    """Let a run go on from an earlier record; with `dry_run`, only return the effects."""
    check_text(reason, "reason")
    check_not_keeper(run_id, "rewind")
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    await _check(host, run, force=force)
    host.encryption.cipher(run)  # nothing can be written without the run's key
    # Plan before the claim, so that an unreadable history leaves the run untouched.
    plan = await plan_rewind(host, run, to, step)
    if dry_run:
        return plan
    claim = await claim_by_name(host, run, _REWINDABLE)
    async with hand_back_on_error(host, claim):
        if claim.run.seq != run.seq:
            plan = await plan_rewind(host, claim.run, to, step)
        data = new_data(
            SupersededData,
            beyond=plan.to,
            actor=actor,
            reason=host.redaction.redact(reason),
            before=(claim.before or run.status).value,
            act="rewind",
        )
        record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
        await append_and_release(host, claim, record, Status.QUEUED, cancels(host, claim.run, plan.children))
    return plan


def cancels(host: CommandHost, run: Run, children: Sequence[str]) -> list[Signal]:
    """Return cancels for children that no longer count; a later rewind may cancel the same child again."""
    now, sender = instant(host.clock.now()), f"run {run.id}"
    return [Signal(child, CANCEL, b"true", f"cancel:{run.id}:{run.seq}", sender, now) for child in children]


async def _check(host: CommandHost, run: Run, *, force: bool) -> None:
    """Raise an error that names an alternative if the run cannot be rewound."""
    if run.status is Status.CANCELLED:
        raise AlreadyFinished(f"run {run.id!r} is cancelled, which is final; fork it instead", run.id)
    if run.status not in _REWINDABLE:
        raise RunConflict(
            f"run {run.id!r} is {run.status.value}, driven by {run.worker}; pause it before you rewind it", run.id
        )
    if run.continued_as:
        raise RunConflict(
            f"run {run.id!r} was continued as {run.continued_as!r}; rewind the newest run of the series, "
            "or fork this one",
            run.id,
        )
    elsewhere = handed_over(run)
    if elsewhere and not force:
        raise RunConflict(
            f"run {run.id!r} was handed over: {elsewhere}; it would be driven in both stores. "
            "If it is missing or lost there, let it go on here with force=True (--force)",
            run.id,
        )
    if run.parent is not None and run.status in FINISHED:
        parent = await host.stored_run(run.parent)
        if parent is not None:
            raise RunConflict(
                f"run {run.id!r} is a child, and its outcome was sent to its parent {run.parent!r}; "
                "rewind the parent to before it, or fork this run",
                run.id,
            )


async def plan_rewind(host: CommandHost, run: Run, to: int | None, step: str | None = None) -> Rewound:
    """Return the effects that a rewind of a run would have."""
    gone, then = Superseded(), Superseded()
    outlines: list[RecordOutline] = []
    marks: list[Record] = []
    undo: list[Outline] = []
    async for record, _ in read_records(host, run):
        outlines.append(RecordOutline(record))
        if record.seq == run.kept_from:
            gone = Superseded(generation_in(record))
        if record.kind in ABOUT_UNDO:
            undo.append(Outline.of(record))
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
            marks.append(record)
    last = position(run, (one for one in outlines if one.seq not in gone), to, step)
    if last < run.kept_from:
        raise DefinitionError(
            f"run {run.id!r} cannot go back to before record {run.kept_from}, because {removed_records(run)}; rewind "
            "it to that record or a later one, or start it anew with a fork at record 0"
        )
    last = with_its_state(last, [one for one in outlines if one.seq in (last, last + 1)])
    check_not_torn(run, undo, marks, last, "rewound")
    for record in marks:
        if record.seq <= last:
            then.add(record)
    counts = {one.seq for one in outlines if one.seq <= last and one.seq not in then}
    kept = {one.step for one in outlines if one.seq in counts and one.final}
    left = [one for one in outlines if one.seq not in counts and one.seq not in gone and one.kind in DONE_AGAIN]
    again = [one.step for one in left if one.step not in kept and not (is_command(one.step) or is_undo(one.step))]
    children = {one.child: one.step for one in left if one.child}
    going = await unfinished_children(host, run, children, gone.generation)
    return Rewound(run.id, last, tuple(dict.fromkeys(again)), tuple(going))


def with_its_state(last: int, records: Sequence[RecordOutline]) -> int:
    """Include the state that follows a migration: the two belong together. `records` are the two."""
    return last + 1 if len(records) == 2 and records[0].migrates and records[1].kind == Kind.STATE else last


def position(run: Run, records: Iterable[RecordOutline], to: int | None, step: str | None) -> int:
    """Return the last record that is to count: `to`, or the one before the first record of `step`."""
    if (to is None) == (step is None):
        raise DefinitionError("give either to=, the last record that is to count, or step=, the step to rewind to")
    if to is not None:
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < run.seq:
            raise DefinitionError(
                f"to= must be a record of run {run.id!r} before the last one, from 0 to {run.seq - 1}, got {to!r}"
            )
        return to
    first: dict[str, int] = {}
    for one in records:
        if one.kind in DONE_AGAIN and not is_command(one.step):
            for key in _with_outer(one.step):
                first.setdefault(key, one.seq)
    wanted = step or ""
    found = named(first, wanted)
    if len(found) != 1:
        raise DefinitionError(
            f"run {run.id!r} has recorded {f'{len(found)} steps' if found else 'no step'} {wanted!r}; "
            f"it has {', '.join(found or list(first)[:SHOWN]) or 'none'}"
        )
    return first[found[0]] - 1


def _with_outer(key: str) -> Iterator[str]:
    """Yield the key of a call, then the keys of the graph steps around it, whose own records come later."""
    yield key
    while key := key.rpartition("/")[0]:
        name, counted, rest = key.rpartition("#")
        if counted and "/" not in rest:  # a branch's number follows a dot
            yield f"{name}#{rest.partition('.')[0]}"


#: Steps listed at most in the error for an unknown step, so that the message stays readable.
SHOWN = 50


async def unfinished_children(host: CommandHost, run: Run, children: Mapping[str, str], generation: int) -> list[str]:
    """Return the unfinished children among those that no longer count, given with the keys of their starts.

    A child whose id the code chose is left out: the code finds it again under that id.
    """
    found = []
    for child, key in children.items():
        if is_born_of(run.id, child, key, generation):
            started = await host.stored_run(child)
            if started is not None and started.status not in FINISHED:
                found.append(child)
    return found


def is_born_of(run_id: str, child: str, key: str, generation: int) -> bool:
    """Whether the run made a child's id, in this generation or an earlier one."""
    return any(is_child_id(child, run_id, key, number) for number in range(generation + 1))
