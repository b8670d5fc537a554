"""Rewinding a run: it goes on from an earlier checkpoint, and what came after that no longer counts, but stays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import AlreadyFinished, DefinitionError, RunConflict, RunNotFound
from ..model import FINISHED, Kind, Signal, Status
from ..model.ids import check_text, is_child_id
from ..model.signal import CANCEL, RESERVED
from ..ports import instant
from ..stores.records import Record
from .control import append_and_release, claim_by_name, let_go_unless_done
from .copying import handed_over
from .history import Superseded, read_records

if TYPE_CHECKING:
    from ..model import Run
    from .engine import Engine

#: What can be rewound: everything that no worker drives, but for what was cancelled.
_REWINDABLE = frozenset(
    {Status.COMPLETED, Status.FAILED, Status.SET_ASIDE, Status.PAUSED, Status.WAITING, Status.QUEUED}
)

#: Records of what was done, or is known by now: going back beyond them, it is done or asked for again.
_DONE = frozenset(
    {
        Kind.STEP_STARTED.value,
        Kind.STEP_COMPLETED.value,
        Kind.STEP_FAILED.value,
        Kind.TIMER.value,
        Kind.SIGNAL.value,
        Kind.CHILD.value,
        Kind.BARRIER.value,
    }
)


@dataclass(frozen=True, slots=True)
class Rewound:
    """What a rewind does: `to` is the last record that counts, `again` are the calls whose outcome no longer does.

    `children` are the runs that those calls had started and that have not ended: they are cancelled.
    """

    run: str
    to: int
    again: tuple[str, ...] = ()
    children: tuple[str, ...] = ()


class Told:
    """As much of a record as tells whether it counts and what it was about."""

    __slots__ = ("child", "final", "kind", "migrates", "seq", "step")

    def __init__(self, record: Record) -> None:
        self.seq, self.kind, self.step = record.seq, record.kind, record.step
        self.child: str = (record.data or {}).get("child", "")
        self.migrates = (record.data or {}).get("act") == "migrate"
        self.final = record.kind in _DONE and record.kind != Kind.STEP_STARTED and record.retry_at is None


async def rewind(
    engine: Engine,
    run_id: str,
    *,
    to: int | None,
    step: str | None,
    reason: str,
    actor: str,
    dry_run: bool = False,
    force: bool = False,
) -> Rewound:
    """Let a run go on from an earlier record; with `dry_run` only say what that would mean."""
    check_text(reason, "reason")
    run = await engine.read(engine.store.get_run, run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {engine.store.url}", run_id)
    await _check(engine, run, force=force)
    engine.encryption.cipher(run)  # without its key nothing can be written
    plan = await _plan(engine, run, to, step)  # before the claim: a history that cannot be read leaves it as it is
    if dry_run:
        return plan
    claim = await claim_by_name(engine, run, _REWINDABLE)
    async with let_go_unless_done(engine, claim):
        if claim.run.seq != run.seq:
            plan = await _plan(engine, claim.run, to, step)
        data = {
            "beyond": plan.to,
            "actor": actor,
            "reason": engine.censor.redact(reason),
            "before": (claim.before or run.status).value,
            "act": "rewind",
        }
        record = Record(run_id, Kind.SUPERSEDED.value, worker=claim.lease.worker, trigger="manual", data=data)
        await append_and_release(engine, claim, record, Status.QUEUED, cancels(engine, claim.run, plan.children))
    return plan


def cancels(engine: Engine, run: Run, children: Sequence[str]) -> list[Signal]:
    """What children are told that no longer count; another rewind may tell the same child again."""
    now, sender = instant(engine.clock.now()), f"run {run.id}"
    return [Signal(child, CANCEL, b"true", f"cancel:{run.id}:{run.seq}", sender, now) for child in children]


async def _check(engine: Engine, run: Run, *, force: bool) -> None:
    """Refuse what cannot be rewound, with what to do instead."""
    if run.status is Status.CANCELLED:
        raise AlreadyFinished(f"run {run.id!r} is cancelled, which is final; fork it instead", run.id)
    if run.status not in _REWINDABLE:
        raise RunConflict(
            f"run {run.id!r} is {run.status.value}, driven by {run.worker}; pause it first, and rewind it then", run.id
        )
    if run.continued_as:
        raise RunConflict(f"run {run.id!r} goes on as {run.continued_as!r}; rewind that one, or fork this one", run.id)
    elsewhere = handed_over(run)
    if elsewhere and not force:
        raise RunConflict(
            f"run {run.id!r} was handed over: {elsewhere}; it would be driven in both stores. "
            "Only if it is not there, or is lost, let it go on here by force (force=True, or --force)",
            run.id,
        )
    if run.parent is not None and run.status in FINISHED:
        parent = await engine.read(engine.store.get_run, run.parent)
        if parent is not None:
            raise RunConflict(
                f"run {run.id!r} is a child whose parent {run.parent!r} was told how it ended; "
                "rewind the parent to before it, or fork this run",
                run.id,
            )


async def _plan(engine: Engine, run: Run, to: int | None, step: str | None) -> Rewound:
    gone, then = Superseded(), Superseded()
    told: list[Told] = []
    records: list[Record] = []
    async for record, _ in read_records(engine, run):
        told.append(Told(record))
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
            records.append(record)
    last = position(run, (one for one in told if one.seq not in gone), to, step)
    last = with_its_state(last, told[max(last - 1, 0) : last + 1])
    for record in records:
        if record.seq <= last:
            then.add(record)
    counts = {one.seq for one in told if one.seq <= last and one.seq not in then}
    kept = {one.step for one in told if one.seq in counts and one.final}
    left = [one for one in told if one.seq not in counts and one.seq not in gone and one.kind in _DONE]
    again = [one.step for one in left if one.step not in kept and not one.step.startswith(RESERVED)]
    children = {one.child: one.step for one in left if one.child}
    going = await going_children(engine, run, children, gone.generation)
    return Rewound(run.id, last, tuple(dict.fromkeys(again)), tuple(going))


def with_its_state(last: int, told: Sequence[Told]) -> int:
    """A point, given that record and the next: a migration and the state that was written with it are one."""
    return last + 1 if len(told) == 2 and told[0].migrates and told[1].kind == Kind.STATE else last


def position(run: Run, told: Iterable[Told], to: int | None, step: str | None) -> int:
    """The last record that is to count: it is named, or it is the one before the first word of a step."""
    if (to is None) == (step is None):
        raise DefinitionError("say either to=, the last record that is to count, or step=, the one to go back before")
    if to is not None:
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < run.seq:
            raise DefinitionError(
                f"run {run.id!r} has the records 1 to {run.seq}: to= names one that others follow, or 0, not {to!r}"
            )
        return to
    first: dict[str, int] = {}
    for one in told:
        if one.kind in _DONE and not one.step.startswith(RESERVED):
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
    """The key of a call, and those of the points of a graph that it is a part of, whose own record comes last."""
    yield key
    while key := key.rpartition("/")[0]:
        name, counted, rest = key.rpartition("#")
        if counted and "/" not in rest:  # a branch of it is named after a dot
            yield f"{name}#{rest.partition('.')[0]}"


#: How a step may be named: by its key, by its name, or by its name in a branch.
_WAYS: tuple[Callable[[str], str], ...] = (
    lambda key: key,
    lambda key: key.partition("#")[0] if "/" not in key else "",
    lambda key: key.rpartition("/")[2].partition("#")[0],
)


def named(keys: Collection[str], wanted: str) -> list[str]:
    """The keys of steps that a person may mean by a key or a name."""
    return next(filter(None, ([key for key in keys if how(key) == wanted] for how in _WAYS)), [])


#: So many steps are named to somebody who asked for one that is not there.
SHOWN = 50


async def going_children(engine: Engine, run: Run, children: Mapping[str, str], generation: int) -> list[str]:
    """The children that go on of those that no longer count, each given with the key of its start.

    One that was given its id is not among them: it is found again under it.
    """
    found = []
    for child, key in children.items():
        if is_born_of(run, child, key, generation):
            started = await engine.read(engine.store.get_run, child)
            if started is not None and started.status not in FINISHED:
                found.append(child)
    return found


def is_born_of(run: Run, child: str, key: str, generation: int) -> bool:
    """Whether a child's id was made by the run, in this generation or in one before."""
    return any(is_child_id(child, run.id, key, number) for number in range(generation + 1))
