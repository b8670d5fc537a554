"""Gates as every store keeps them: their stored form, the effect of a change, and where a new run waits."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ..model import Run, Status
from ..model.gate import MOST_CHANGES, GateChange, GateInfo
from ..policies.breaker import held
from ..policies.queue import Limits
from . import services

_encode = msgspec.json.Encoder().encode
_plain = msgspec.json.Decoder(dict[str, Any]).decode
_log = msgspec.json.Decoder(tuple[GateChange, ...]).decode


def changed(gate: GateInfo, change: GateChange) -> GateInfo:
    """Return a gate after a change: `declare` by code; `set` or `reset` by a person.

    A person may also `open` or `close` the breaker of a service; it stays so until a `reset`.
    """
    if change.act == "declare":
        if gate.declared == change.limits:
            return gate
        after = replace(gate, declared=change.limits or {})
    elif change.act in ("open", "close"):
        after = services.with_breaker(gate, held(change.act))
    else:
        after = replace(gate, changed=change.limits if change.act == "set" else None)
        if change.act == "reset":
            after = services.with_breaker(after, held(change.act))
    return replace(after, log=(*gate.log, change)[-MOST_CHANGES:])


def texts_of(gate: GateInfo) -> tuple[str, str, str]:
    """Return the stored form of what is declared, what is set, and the log."""
    declared = "" if gate.declared is None else _encode(gate.declared).decode()
    set_by_hand = "" if gate.changed is None else _encode(gate.changed).decode()
    return declared, set_by_hand, _encode(gate.log).decode() if gate.log else ""


def state_text(gate: GateInfo) -> str:
    """Return the stored form of the spend and the breaker of a service; empty for a queue."""
    state = {"spent_until": gate.spent_until, "breaker": gate.breaker}
    return _encode({name: value for name, value in state.items() if value}).decode() if any(state.values()) else ""


#: Columns of a gate, in the order of `gate_of`.
GATE_COLUMNS = ("kind", "name", "declared", "changed", "log", "tat", "turn", "parity", "breaker")


def gate_of(row: Sequence[Any]) -> GateInfo:
    """Return the gate in a stored row. A damaged row must not stop claims, so it limits nothing."""
    kind, name, declared, set_by_hand, log, used_until, turn, parity, state = row
    found = _read(_plain, state) or {}
    spent_until, breaker = found.get("spent_until"), found.get("breaker")
    return GateInfo(
        str(kind),
        str(name),
        _read(_plain, declared),
        _read(_plain, set_by_hand),
        _read(_log, log) or (),
        used_until if isinstance(used_until, float) else 0.0,
        turn if isinstance(turn, str) else "",
        bool(parity),
        spent_until if isinstance(spent_until, float) else 0.0,
        breaker if isinstance(breaker, dict) else None,
    )


def _read(decode: Any, text: Any) -> Any:
    try:
        return decode(text) if text else None
    except (msgspec.MsgspecError, ValueError, TypeError):
        return None


def limits_of(gate: GateInfo) -> Limits:
    """Return the limits of a queue that hold now. Damage lifts them, so that it does not stop runs."""
    return Limits.of(gate.limits)


def waits_at(run: Run, limited: Container[str]) -> str | None:
    """Return the gate at which a new run waits, or the limited queue whose place it holds; None if there is none.

    A run that is not due yet, or has begun elsewhere, waits for its time first. The claim that finds it moves it.
    """
    if run.service is not None and run.worker is None:
        return services.gate_text(run.service)
    if run.queue not in limited:
        return None
    if run.worker is not None:
        return run.queue
    is_due = run.due_at is not None and run.due_at <= run.created_at
    is_ready = is_due and run.status is Status.QUEUED and run.epoch == 0
    return run.queue if is_ready and not run.holds else None
