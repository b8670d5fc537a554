"""The conversation of a run: the calls of models and tools by its agents, and what people answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RunNotFound
from ..model import Kind
from ..model.checkpoint import ENDS_STEP
from ..records.data import Data, data_of
from ..records.record import ENCRYPTED, Record, unseal_some
from .cut import cut
from .plain import iso, value_of

if TYPE_CHECKING:
    from ..ports import Store

#: The name of the step that a model call is.
_MODEL = "model"
_KINDS = (*sorted(ENDS_STEP), Kind.SIGNAL.value)


class Turn(msgspec.Struct):
    """One call of a model or a tool, or an answer of a person.

    `input` holds the arguments of the step, and `has_input` whether they were recorded. The messages that a model was
    sent are not recorded: the turns before it show most of them. `missing` are the bytes that were cut.
    """

    seq: int
    kind: str
    agent: str | None
    stage: str | None
    name: str
    call: str
    step: str
    outcome: str
    attempt: int
    started_at: str | None
    finished_at: str | None
    value: Any
    input: Any
    has_input: bool
    missing: int
    error: str | None
    spent: dict[str, Any]
    by: str
    hidden: bool


class Conversation(msgspec.Struct):
    """One page of a conversation; `next` is the `after` of the following page, None at the end."""

    run: str
    turns: list[Turn]
    next: int | None


def conversation_of(store: Store, run_id: str, after: int, limit: int) -> Conversation:
    """Read the turns after a record. It may take long, so call it in a thread."""
    run = store.get_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
    turns: list[Turn] = []
    while rows := store.list_checkpoints(run_id, after, 500, _KINDS):
        for record, _ in unseal_some(rows, run_id):
            after = record.seq
            if (turn := _turn(record)) is not None:
                turns.append(turn)
                if len(turns) == limit:
                    return Conversation(run_id, turns, after if after < run.seq else None)
    return Conversation(run_id, turns, None)


def _turn(record: Record) -> Turn | None:
    name, _, call = record.step.rpartition("/")[2].rpartition("#")
    call = call.removeprefix("@") if call.startswith("@") else ""
    if record.kind == Kind.SIGNAL:
        if record.step.startswith("ks:"):
            return None
        kind, name = "answer", name.removeprefix("wait_for:")
    elif record.agent is None:
        return None
    else:
        kind = "model" if name == _MODEL else "tool" if call else "step"
    data = data_of(record, Data)
    hidden = record.packed == ENCRYPTED
    value, missing = (None, 0) if hidden else cut(value_of(record.raw()))
    stored = data.get("input")
    given = value_of(stored.encode()) if isinstance(stored, str) else None
    shown, lacks = cut(given)
    return Turn(
        seq=record.seq,
        kind=kind,
        agent=record.agent,
        stage=record.stage,
        name=name,
        call=call,
        step=record.step,
        outcome=record.outcome,
        attempt=record.attempt,
        started_at=iso(record.started_at),
        finished_at=iso(record.finished_at),
        value=value,
        input=shown,
        has_input=stored is not None,
        missing=missing + lacks,
        error=None if record.error is None else f"{record.error.type}: {record.error.message}",
        spent=dict(data.get("spent", {})),
        by=str(data.get("sender", "")),
        hidden=hidden,
    )
