"""Findings of the doctor about services: places beyond a limit, runs that could begin and do not, open breakers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from shlex import quote

from ..model import GateInfo
from ..policies.breaker import CLOSED
from ..policies.rate import tokens
from ..stores.services import breaker_of, limits_of
from .queue_findings import READY, Concern

#: Time for which a breaker may hold runs back before it is reported.
OPEN = timedelta(minutes=10)


def service_concerns(gate: GateInfo, now: datetime) -> Iterator[Concern]:
    """Yield the findings about one service."""
    limits, name = limits_of(gate), quote(gate.name)
    held = sum(share.held for share in gate.shares)
    waited = timedelta() if gate.parked_since is None else now - gate.parked_since
    if limits.concurrency is not None and held > limits.concurrency:
        text = f"service {gate.name!r}: workers hold {held} places, and concurrency is {limits.concurrency}"
        advice = f"a limit that was lowered holds as attempts end: keepstep services show {name} tells the last changes"
        yield Concern("service-over", text, advice, ())
    status = CLOSED if limits.breaker is None else limits.breaker.status(breaker_of(gate), now.timestamp())
    if status != CLOSED:
        yield from _open(gate, status, waited, now)
        return
    has_place = limits.concurrency is None or held < limits.concurrency
    has_token = limits.rate is None or tokens(limits.rate, gate.used_until, now.timestamp()).left > 0
    if gate.parked and waited > READY and has_place and has_token and limits.spend is None:
        many = "1 run waits" if gate.parked == 1 else f"{gate.parked} runs wait"
        text = f"service {gate.name!r} has room, but {many} for it, the first for {_minutes(waited)}"
        advice = (
            f"its workers are full or stuck, or serve other queues: keepstep services show {name} names them; "
            "start another that uses the service, or check logs"
        )
        yield Concern("service-late", text, advice, ())


def _open(gate: GateInfo, status: str, waited: timedelta, now: datetime) -> Iterator[Concern]:
    by_hand = next((one for one in reversed(gate.log) if one.act in ("open", "close", "reset")), None)
    name = quote(gate.name)
    if breaker_of(gate).hand and by_hand is not None:
        if now - by_hand.at > OPEN:
            text = f"service {gate.name!r}: {by_hand.actor} has held the breaker open for {_minutes(now - by_hand.at)}"
            advice = f"keepstep services reset {name} lets it follow its own rules again"
            yield Concern("breaker-open", text, advice, ())
    elif waited > OPEN:
        many = "1 run has" if gate.parked == 1 else f"{gate.parked} runs have"
        text = f"service {gate.name!r}: the breaker is {status}, and {many} waited for {_minutes(waited)}"
        advice = f"mend the service; its next probe closes the breaker, or keepstep services close {name} does"
        yield Concern("breaker-open", text, advice, ())


def _minutes(time: timedelta) -> str:
    return f"{time.total_seconds() / 60:.0f} min"
