"""Sums of a run's records, made off the loop: its picture, spending, tokens, signals and published values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..drawing.run_marks import folded_shape_of, marks_of, moments_of, unknown_steps
from ..drawing.svg import figure
from ..errors import DefinitionError
from ..kernel.graph.position import Position
from ..kernel.ledger import Spending, Spent
from ..kernel.replay import Superseded
from ..model import FINISHED, Kind
from ..model.checkpoint import CARRIES_SIGNAL, ENDS_STEP, TELLS_PUBLISHED
from ..records.data import Data, EmittedData, data_of
from ..records.keys import is_encrypted
from ..records.record import ENCRYPTED, unseal_some
from ..stores.encrypted import below
from .cut import cut
from .plain import value_of

if TYPE_CHECKING:
    from ..model import Run, Signal
    from ..ports import Store
    from ..records.record import Record
    from ..workflows.shape import Shape

#: Newest records that a picture, the senders of signals, and tokens are made from at most.
MOST_RECORDS = 20_000
#: Different steps of a function that are drawn at most, because a layout takes seconds for more.
MOST_DRAWN = 150
#: Bytes of a payload or of a published value.
MOST_VALUE = 4_000
#: Bytes of the text of one step's tokens.
MOST_TEXT = 100_000


def records_of(store: Store, run_id: str, after: int = 0, kinds: Sequence[str] = ()) -> Iterator[Record]:
    """Yield the records of a run after a number. It takes long for many, so call it in a thread."""
    while rows := store.list_checkpoints(run_id, after, 1000, kinds):
        for record, _ in unseal_some(rows, run_id):
            yield record
        after = rows[-1].seq


def _begin(run: Run) -> int:
    """Return the number of the record after which the newest ones of a run begin."""
    return max(0, run.seq - MOST_RECORDS)


# -- the picture -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Picture:
    """The picture of a run as an SVG element, or why there is none.

    `defined` tells whether it shows the definition; otherwise it shows the steps of a function that the run has called,
    each once. `unknown` are steps that the definition no longer has. `after` is the record after which it begins.
    """

    svg: str
    why_not: str = ""
    defined: bool = False
    unknown: tuple[str, ...] = ()
    after: int = 0


def picture_of(store: Store, run: Run, shape: Shape | None) -> Picture:
    """Draw a run: the shape of its definition, or the shape that emerged at run time."""
    after = _begin(run)
    happened = moments_of(records_of(below(store), run.id, after))
    if shape is None:
        emerged, marks = folded_shape_of(run, happened)
        if not emerged.nodes:
            return Picture("", "The run has not called anything yet.")
        if len(emerged.nodes) > MOST_DRAWN:
            return Picture("", f"The run has called {len(emerged.nodes):,} different steps, too many for a picture.")
        return Picture(figure(emerged, marks), after=after)
    try:
        drawn = figure(shape, marks_of(shape, run, happened))
    except DefinitionError as error:
        return Picture("", str(error), defined=True)
    return Picture(drawn, defined=True, unknown=tuple(unknown_steps(shape, happened)), after=after)


# -- what it cost ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StepSums:
    """How often a step ended, how often it failed, and the seconds of its attempts."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """The spending of a run, and the sums of its steps by name, the longest first."""

    spent: Spending
    steps: dict[str, StepSums] = field(default_factory=dict)


def cost_of(store: Store, run: Run, now: datetime) -> Cost:
    """Add up what a run has spent, and the time of its steps."""
    spent, steps = Spent(run.created_at), dict[str, StepSums]()
    for record in records_of(store, run.id):
        spent.add(record)
        if record.seq == run.kept_from and record.kind == Kind.STATE:  # it tells what the removed records spent
            spent = Spent.from_data(Position.restored(record)[1].spent)
        if record.kind in ENDS_STEP:
            sums = steps.setdefault(record.step.rpartition("/")[2].partition("#")[0], StepSums())
            sums.calls += record.retry_at is None
            sums.failures += record.error is not None
            if record.started_at is not None and record.finished_at is not None:
                sums.seconds += (record.finished_at - record.started_at).total_seconds()
    ended = run.updated_at if run.status in FINISHED else None
    longest = dict(sorted(steps.items(), key=lambda one: (-one[1].seconds, one[0])))
    return Cost(spent.all(ended or now), longest)


# -- tokens ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Streamed:
    """The tokens of one body of a step, joined. `missing` are the bytes that were cut at its beginning."""

    step: str
    life: int
    attempt: int
    seq: int
    text: str = ""
    missing: int = 0


def tokens_of(store: Store, run: Run) -> list[Streamed]:
    """Return what the steps of a run have emitted, oldest first; from a long run, only what it emitted lately."""
    found: dict[tuple[str, int, int], Streamed] = {}
    for record in records_of(store, run.id, _begin(run), (Kind.EMITTED.value,)):
        if record.packed == ENCRYPTED:
            continue
        life = data_of(record, EmittedData).get("epoch", 0)
        one = found.setdefault((record.step, life, record.attempt), Streamed(record.step, life, record.attempt, 0))
        tokens = value_of(record.raw())
        one.text += "".join(map(token_text, tokens if isinstance(tokens, list) else [tokens]))
        one.seq = record.seq
        if (more := len(one.text) - MOST_TEXT) > 0:
            one.text, one.missing = one.text[more:], one.missing + more
    return list(found.values())


def token_text(token: Any) -> str:
    """Return a token as text: a string as it is, anything else as JSON."""
    if isinstance(token, str):
        return token
    shown, missing = cut(token, MOST_VALUE)
    return f"{shown if missing else json.dumps(shown, ensure_ascii=False)}\n"


# -- signals and published values --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SignalView:
    """A signal that a run has received, and the record that read it; None while it is unread.

    `hidden` tells that its payload is encrypted, and `missing` how many bytes of it were cut.
    """

    signal: Signal
    read_at: int | None
    payload: Any
    missing: int
    hidden: bool


def signals_of(store: Store, run: Run, after: int, limit: int) -> list[SignalView]:
    """Return a page of the signals of a run after a number, in order."""
    read: dict[int, int] = {}
    for record in records_of(below(store), run.id, _begin(run), sorted(CARRIES_SIGNAL)):
        number = data_of(record, Data).get("signal")
        if number is not None:
            read[number] = record.seq
    found = []
    for one in store.list_signals(run.id, after, limit):
        hidden = is_encrypted(bytes(one.payload))
        payload, missing = (None, 0) if hidden else cut(value_of(one.payload), MOST_VALUE)
        found.append(SignalView(replace(one, payload=b"null"), read.get(one.seq), payload, missing, hidden))
    return found


def published_of(store: Store, run: Run) -> dict[str, tuple[Any, int]]:
    """Return the newest value of each key that a run has published lately, and the bytes that were cut from it."""
    gone, shown = Superseded(), list[tuple[int, str, Any]]()
    for record in records_of(store, run.id, _begin(run), TELLS_PUBLISHED):
        if record.kind == Kind.SUPERSEDED:
            gone.add(record)
        elif record.packed != ENCRYPTED:
            shown.append((record.seq, str(data_of(record, Data).get("key", "")), value_of(record.raw())))
    return {key: cut(value, MOST_VALUE) for seq, key, value in shown if seq not in gone}
