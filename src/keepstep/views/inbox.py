"""The inbox: everything in a store that waits for a person, with its context, and what people have decided lately."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from ..engine.handle import RunHandle
from ..kernel.replay import unsealed
from ..kernel.waits import reported_in
from ..model import Kind, Run, RunQuery, Signal, Status
from ..model.signal import CANCEL, GO, PAUSE, RESOLVE, RESUME
from ..model.undo import waits_for_answer
from ..model.wakes import sorted_wakes
from ..records.data import Data, data_of
from .aside import AsideRun, aside
from .overview import Locked, readable
from .plain import arguments, aside_data, iso, signal_data, value_of
from .requests import refused_signals
from .undo import undo_of
from .waits import Act, Wait, WaitKind, actions_for

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..history.host import CommandHost
    from ..ports import Store

#: Runs that one look at the inbox reads at most, so that it stays quick in a store of a million.
MOST_RUNS = 1000
#: Shown items whose fate is followed, decisions that are kept, and how long they are.
MOST_FOLLOWED, MOST_DECIDED, KEPT_FOR = 500, 100, timedelta(hours=1)
#: Signals and records after an item that are searched for its decision.
_MOST_AFTER = 200
_PAGE = 500


class ItemKind(StrEnum):
    """The kind of an item: the decision that a person is asked for."""

    APPROVAL = "approval"
    CALLBACK = "callback"
    DOUBT = "in doubt"
    BREAKPOINT = "breakpoint"
    PAUSED = "paused"
    SET_ASIDE = "set aside"
    UNDO = "failed undo"


class Key(NamedTuple):
    """The identity of an item."""

    run: str
    kind: ItemKind
    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that waits for a person.

    `name` is the awaited signal, the key of the step in doubt, or the breakpoint.
    """

    kind: ItemKind
    run: Run
    name: str = ""

    @property
    def key(self) -> Key:
        """The identity of the item."""
        return Key(self.run.id, self.kind, self.name)

    @property
    def since(self) -> datetime:
        """The time from which on it waits."""
        return self.run.updated_at or self.run.created_at


@dataclass(frozen=True, slots=True)
class InboxQuery:
    """A filter of the inbox: kinds, a workflow, and items that have waited since before an instant."""

    kinds: frozenset[ItemKind] = frozenset()
    workflow: str | None = None
    before: datetime | None = None


@dataclass(frozen=True, slots=True)
class Inbox:
    """Items, those with the earliest deadline first; `more` says that further runs were not looked at."""

    items: tuple[Item, ...]
    more: bool
    counts: dict[ItemKind, int]


@dataclass(frozen=True, slots=True)
class Context:
    """The facts that a person needs to decide about an item.

    `deadline` is when the wait is over, `stage` and `agent` name who asked, and `refused` are signals that did not fit.
    `by` and `reason` are of the person who paused the run. `question` is what was published under the name of the wait.
    `input` are the arguments of the run.
    """

    item: Item
    locked: Locked | None
    published: dict[str, Any]
    input: dict[str, Any]
    deadline: datetime | None = None
    stage: str | None = None
    agent: str | None = None
    asked_at: datetime | None = None
    refused: tuple[Signal, ...] = ()
    by: str = ""
    reason: str = ""
    aside: AsideRun | None = None
    failed_undo: tuple[str, ...] = ()

    @property
    def question(self) -> Any:
        """The value that the run has published under the name of the wait, or as `question`."""
        return self.published.get(self.item.name, self.published.get("question"))


@dataclass(frozen=True, slots=True)
class Decision:
    """The fate of an item: what was decided, by whom, when and why. `by` is empty if no person did it."""

    item: Item
    act: str
    at: datetime
    by: str = ""
    reason: str = ""
    value: Any = None
    seq: int = 0


# -- what waits --------------------------------------------------------------------------------------------------------


def items_of(run: Run, now: datetime) -> tuple[Item, ...]:
    """Return what a run asks of people."""
    found = list[Item]()
    for action in actions_for(run, now):
        if action.act is Act.APPROVE:
            found.append(Item(ItemKind.APPROVAL, run, action.name))
        elif action.act is Act.SIGNAL:
            found.append(Item(ItemKind.CALLBACK, run, action.name))
        elif action.act is Act.RESOLVE:
            found.append(Item(ItemKind.DOUBT, run, action.name))
        elif action.act is Act.RESUME and run.status is Status.PAUSED:
            found.append(Item(ItemKind.PAUSED, run))
        elif action.act is Act.RESUME:
            found += [Item(ItemKind.BREAKPOINT, run, name) for name in sorted_wakes(run.wakes).breakpoints]
        elif action.act is Act.RETRY and run.status is Status.SET_ASIDE:
            found.append(Item(ItemKind.UNDO if waits_for_answer(run) else ItemKind.SET_ASIDE, run))
    return tuple(found)


async def inbox(host: CommandHost, query: InboxQuery, now: datetime) -> Inbox:
    """Return what waits for people: of the newest `MOST_RUNS` runs that a filter selects."""
    wanted = RunQuery(needs_person=True, workflow=query.workflow, updated_before=query.before, limit=_PAGE)
    found, seen = list[Item](), 0
    while True:
        page = await host.call(host.store.list_runs, wanted)
        runs = await host.call(_with_errors, host.store, page.runs)
        found += [item for run in runs for item in items_of(run, now)]
        seen += len(page.runs)
        if page.next is None or seen >= MOST_RUNS:
            break
        wanted = replace(wanted, after=page.next)
    counts = {kind: sum(item.kind is kind for item in found) for kind in ItemKind}
    shown = [item for item in found if not query.kinds or item.kind in query.kinds]
    return Inbox(tuple(sorted(shown, key=_urgency)), page.next is not None, counts)


def _with_errors(store: Store, runs: Iterable[Run]) -> list[Run]:
    """Return runs, those that are set aside with their error, which lists leave out; it tells the kind of the item."""
    return [(store.get_run(run.id) or run) if run.status is Status.SET_ASIDE else run for run in runs]


def _urgency(item: Item) -> tuple[datetime, datetime]:
    return _deadline(item.run) or _NEVER, item.since


_NEVER = datetime.max.replace(tzinfo=UTC)


def _deadline(run: Run) -> datetime | None:
    """Return the next instant at which the run goes on by itself, or ends."""
    ends = [at for at in (run.due_at if run.status is Status.WAITING else None, run.deadline_at) if at is not None]
    return min(ends, default=None)


# -- its context -------------------------------------------------------------------------------------------------------


async def context_of(engine: Engine, item: Item) -> Context:
    """Collect what a person needs to decide about an item; nothing of it grows with the length of the run."""
    run = await engine.call(engine.store.get_run, item.run.id)
    if run is None:
        return Context(item, None, {}, {})
    plain, locked = readable(engine.encryption, run)
    if locked is not None:
        return Context(item, locked, {}, {}, deadline=_deadline(run))
    published = await RunHandle(engine, run.id).published_raw()
    found = Context(item, None, {key: value_of(one) for key, one in published.items()}, arguments(plain))
    if item.kind in (ItemKind.APPROVAL, ItemKind.CALLBACK):
        return await _with_wait(engine, found, run)
    if item.kind is ItemKind.PAUSED:
        return await _with_pause(engine, found, run)
    if item.kind is ItemKind.SET_ASIDE:
        return replace(found, aside=await aside(engine, run.id))
    if item.kind is ItemKind.UNDO:
        undo = undo_of(await RunHandle(engine, run.id).checkpoints(counted=True))
        return replace(found, aside=await aside(engine, run.id), failed_undo=() if undo is None else undo.failed)
    return found


async def _with_wait(engine: Engine, context: Context, run: Run) -> Context:
    """Add when the wait began, when it is over, who asked, and the signals that did not fit."""
    name = context.item.name
    waits = (Wait(WaitKind.SIGNAL, name),)
    context = replace(context, refused=await refused_signals(engine, run, waits), deadline=run.deadline_at)
    began = None
    after, kinds = 0, (Kind.WAIT_STARTED.value,)
    while rows := await engine.records(run.id, after, kinds=kinds):
        for row in rows:
            after = row.seq
            async for record, _ in unsealed(engine, [row], run.id, row.seq - 1):
                if record.step.rpartition("wait_for:")[2].rpartition("#")[0] == name:
                    began = record
    if began is None or began.started_at is None:
        return context
    over = began.started_at + timedelta(seconds=float(began.digest)) if began.digest else None
    if over is not None and run.due_at is not None:
        over = max(over, run.due_at)  # a person who let the run go on gave the wait its whole time again
    ends = [at for at in (over, run.deadline_at) if at is not None]
    deadline = min(ends, default=None)
    return replace(context, deadline=deadline, stage=began.stage, agent=began.agent, asked_at=began.started_at)


async def _with_pause(engine: Engine, context: Context, run: Run) -> Context:
    """Add who paused the run, and why."""
    for signal in reversed(await engine.signals(run.id, max(0, run.signals - _MOST_AFTER), _MOST_AFTER)):
        if signal.name == PAUSE:
            return replace(context, by=signal.sender, reason=_reason(engine, signal), asked_at=signal.sent_at)
    return context


# -- what was decided --------------------------------------------------------------------------------------------------


class Decisions:
    """The fate of items that people have been shown: an item that waits no longer was decided, or its time is over.

    The facts come from the store; only which items were shown is kept here, until the process ends.
    """

    def __init__(self, host: CommandHost) -> None:
        self._host = host
        self._shown: OrderedDict[Key, Item] = OrderedDict()
        self._decided: deque[Decision] = deque(maxlen=MOST_DECIDED)

    def show(self, items: Iterable[Item]) -> None:
        """Follow items that people see now."""
        for item in items:
            self._shown.setdefault(item.key, item)
            self._shown.move_to_end(item.key)
        while len(self._shown) > MOST_FOLLOWED:
            self._shown.popitem(last=False)

    async def recent(self, now: datetime) -> list[Decision]:
        """Return what was decided lately, the newest first."""
        for item, run, again in await self._moved(now):
            if again is None:
                if self._shown.pop(item.key, None) is None:  # another reader has found it meanwhile
                    continue
            else:
                self._shown[item.key] = again
            found = await fate(self._host, item, run)
            if found.by or again is None:
                self._decided.append(found)
        while self._decided and self._decided[0].at < now - KEPT_FOR:
            self._decided.popleft()
        return sorted(self._decided, key=lambda one: one.at, reverse=True)

    async def _moved(self, now: datetime) -> list[tuple[Item, Run, Item | None]]:
        """Return shown items whose runs have moved on, with their runs, and the same item if it waits again."""
        found = dict[str, Run]()
        query = RunQuery(ids=frozenset(key.run for key in self._shown), limit=_PAGE)
        while query.ids:
            page = await self._host.call(self._host.store.list_runs, query)
            found.update((run.id, run) for run in await self._host.call(_with_errors, self._host.store, page.runs))
            if page.next is None:
                break
            query = replace(query, after=page.next)
        waiting = {item.key: item for run in found.values() for item in items_of(run, now)}
        moved = list[tuple[Item, Run, Item | None]]()
        for key, item in list(self._shown.items()):
            run, again = found.get(key.run), waiting.get(key)
            if run is None:  # it was removed
                self._shown.pop(key, None)
            elif again is None or again.run.seq != item.run.seq:
                moved.append((item, run, again))
        return moved


async def fate(host: CommandHost, item: Item, run: Run) -> Decision:
    """Return what happened to an item that waits no longer; `run` is its run now."""
    before = item.run
    for signal in await host.signals(run.id, before.signals, _MOST_AFTER):
        if (found := _answer(host, item, signal, run)) is not None:
            return found
    rows = await host.records(run.id, before.seq, _MOST_AFTER) if readable(host.encryption, run)[1] is None else ()
    async for record, _ in unsealed(host, rows, run.id, before.seq):
        data, at = data_of(record, Data), record.finished_at or run.created_at
        if "actor" in data and (act := data.get("act") or _ENDED.get(record.outcome)):
            reason = host.redaction.redact(str(data.get("reason") or ""))
            return Decision(item, _PAST.get(act, act), at, str(data["actor"]), reason, seq=record.seq)
        if record.kind == Kind.TIMER and record.outcome == "failure":
            return Decision(item, "its time ran out", at, seq=record.seq)
    return Decision(item, f"moved on: {run.status.value}", run.updated_at or run.created_at, seq=run.seq)


_ENDED = {"cancelled": "cancel"}
_PAST = {
    "retry": "retried",
    "edit": "edited",
    "rewind": "rewound",
    "skip": "skipped",
    "recover": "recovered",
    "cancel": "dropped",
}


def _answer(host: CommandHost, item: Item, signal: Signal, run: Run) -> Decision | None:
    """Return the decision that a signal is, or None."""
    at, by = signal.sent_at or run.updated_at or run.created_at, signal.sender
    if signal.name == CANCEL:
        return Decision(item, "cancelled", at, by, _reason(host, signal))
    if item.kind in (ItemKind.APPROVAL, ItemKind.CALLBACK) and signal.name == item.name:
        if run.data_key and readable(host.encryption, run)[1] is not None:
            return Decision(item, "answered", at, by)
        if (error := reported_in(signal.payload)) is not None:
            return Decision(item, "failed", at, by, host.redaction.redact(error.message))
        value = value_of(signal.payload)
        act = {True: "approved", False: "denied"}[value] if isinstance(value, bool) else "answered"
        return Decision(item, act, at, by, value=None if isinstance(value, bool) else value)
    if item.kind is ItemKind.DOUBT and signal.name == f"{RESOLVE}:{item.name}":
        content = _content(signal)
        act = {"result": "resolved with a result", "failed": "resolved as failed"}.get(
            str(content.get("verdict")), "performed again"
        )
        return Decision(item, act, at, by, _reason(host, signal), content.get("value"))
    resumed = signal.name == RESUME or signal.name.startswith(GO)
    if resumed and item.kind in (ItemKind.BREAKPOINT, ItemKind.PAUSED):
        return Decision(item, "resumed", at, by, _reason(host, signal))
    return None


def _content(signal: Signal) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(signal.payload)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # encrypted, or not ours
        return {}
    return content if isinstance(content, dict) else {}


def _reason(host: CommandHost, signal: Signal) -> str:
    return host.redaction.redact(str(_content(signal).get("reason") or ""))


def decisions_of(engine: Engine) -> Decisions:
    """Return the decisions that an engine follows."""
    return _DECISIONS.setdefault(engine, Decisions(engine))


#: By engine, so that those of a closed engine are forgotten.
_DECISIONS: WeakKeyDictionary[Engine, Decisions] = WeakKeyDictionary()


# -- as plain data ----------------------------------------------------------------------------------------------------


def context_data(one: Context) -> dict[str, Any]:
    """Return one thing that waits for a person, with what is needed to decide."""
    run = one.item.run
    return {
        "kind": one.item.kind.value,
        "name": one.item.name,
        "run": run.id,
        "workflow": run.workflow,
        "status": run.status.value,
        "seq": run.seq,
        "signals": run.signals,
        "tags": dict(run.tags),
        "parent": run.parent,
        "since": iso(one.item.since),
        "deadline": iso(one.deadline),
        "question": one.question,
        "published": one.published,
        "input": one.input,
        "stage": one.stage,
        "agent": one.agent,
        "asked_at": iso(one.asked_at),
        "by": one.by or None,
        "reason": one.reason or None,
        "refused": [signal_data(signal) for signal in one.refused],
        "failed_undo": list(one.failed_undo),
        "aside": None if one.aside is None else aside_data(one.aside),
        "hidden": one.locked is not None,
    }


def decision_data(one: Decision) -> dict[str, Any]:
    """Return what was decided about one thing that waited for a person."""
    item = one.item
    return {
        "kind": item.kind.value,
        "name": item.name,
        "run": item.run.id,
        "workflow": item.run.workflow,
        "act": one.act,
        "at": iso(one.at),
        "by": one.by or None,
        "reason": one.reason or None,
        "value": one.value,
        "seq": one.seq,
    }
