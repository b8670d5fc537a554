"""The gates that an attempt passes before its body may run: the budget, `ready=` and the places of a service.

To add a gate, write a class with `enter` and `leave` and name it in `gates_of`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from ..model import Kind, Outcome
from ..model.ids import new_id
from ..model.text import one_line
from ..policies.budget import Amount
from ..ports import Admission, Gate
from ..records.record import StoredError
from .budget import expected_cost
from .call_states import NotYet
from .hooks import within
from .inbox import Wait
from .recorded_errors import BREAKER_OPEN
from .stored_errors import class_of
from .wakeups import add_wait, end_wait, pause_until

if TYPE_CHECKING:
    from ..workflows.definition import Step
    from .attempt import Attempt
    from .budget import Guard
    from .host import ServiceShare, Turn

log = logging.getLogger("keepstep")

#: Maximum time in seconds for a `ready=` function. After that the step counts as not ready.
READY_SECONDS = 30.0
#: Seconds of waiting for a place after which `ready=` is asked again.
STALE_SECONDS = 2.0
#: Seconds that a probe of a breaker may take if its step has no timeout.
PROBE_SECONDS = 60.0


def gates_of(guard: Guard | None, step: Step[..., Any]) -> tuple[Gate, ...]:
    """Return the gates in front of a step, in the order in which an attempt passes them."""
    if guard is None and step.ready is None:
        return AT_SERVICE
    gates: list[Gate] = []
    if step.ready is not None:
        if guard is not None:
            gates.append(BudgetLeft(guard))
        gates.append(Ready())
    if step.service is not None:
        gates.append(SERVICE_PLACE)
    if guard is not None:
        gates.append(BudgetPlace(guard))  # last, because it never waits: the budget holds when the body begins
    return tuple(gates)


async def pass_gates(attempt: Attempt) -> bool:
    """Wait until every gate admits the attempt. Return False if one refused it.

    An attempt that had to wait leaves the gates that it has passed, and starts again at the first gate.
    """
    if attempt.gates is AT_SERVICE and SERVICE_PLACE.is_taken(attempt):
        return True
    passed: list[Gate] = []
    while len(passed) < len(attempt.gates):
        gate = attempt.gates[len(passed)]
        admission = await gate.enter(attempt)
        if admission is Admission.ADMITTED:
            passed.append(gate)
            continue
        for one in passed:
            one.leave(attempt)
        if admission is Admission.REFUSED:
            return False
        passed.clear()
    return True


def leave_gates(attempt: Attempt) -> None:
    """Leave every gate: the body has ended, or does not begin."""
    for gate in attempt.gates:
        gate.leave(attempt)


def body_ended(attempt: Attempt) -> None:
    """Leave every gate, after the body has begun and ended."""
    if attempt.place is not None:
        attempt.place.has_begun = True
    leave_gates(attempt)
    attempt.failure = attempt.late = None


async def pass_service(attempt: Attempt) -> bool:
    """Wait for a place at the service of a marked step, whose doubt is resolved. The wait does not park the run.

    A parked run would be in doubt once more.
    """
    return await SERVICE_PLACE.enter(attempt, may_park=False) is not Admission.REFUSED


class BudgetLeft:
    """Refuses an attempt whose budget is used up, before the attempt waits for anything else."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def enter(self, attempt: Attempt) -> Admission:
        return Admission.ADMITTED if self._guard.permits(attempt.call, attempt.number) else Admission.REFUSED

    def leave(self, attempt: Attempt) -> None:
        pass


class BudgetPlace:
    """Refuses an attempt whose budget is used up. An admitted step counts until its last attempt has ended."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def enter(self, attempt: Attempt) -> Admission:
        return Admission.ADMITTED if self._guard.admits(attempt.call, attempt.number) else Admission.REFUSED

    def leave(self, attempt: Attempt) -> None:
        pass


class Ready:
    """Makes an attempt wait until the step's `ready=` function returns true. A wait may park the run."""

    async def enter(self, attempt: Attempt) -> Admission:
        objection = await self._objection(attempt)
        if objection is None:
            return Admission.ADMITTED
        run, seconds = attempt.run, attempt.call.step.ready_every
        run.host.events.observe("step.blocked", run, step=attempt.key, why=objection, again_seconds=seconds)
        await pause_until(run, run.host.clock.now() + seconds, blocked=attempt.key)
        return Admission.WAITED

    async def _objection(self, attempt: Attempt) -> str | None:
        """Return the reason why the step is not ready; None if it is ready."""
        call, run = attempt.call, attempt.run
        try:
            answer = await within(run.host, READY_SECONDS, call.step.ready, *call.args, **call.kwargs)
        except Exception as error:  # noqa: BLE001 - a `ready=` that raises counts as not ready
            message = f"{type(error).__name__}: {error}"
            log.warning(
                "run %s: ready= of step %s failed, so the step waits: %s", run.id, attempt.key, one_line(message)
            )
            return message
        return None if answer else "not ready"

    def leave(self, attempt: Attempt) -> None:
        pass


class ServicePlace:
    """Makes an attempt wait for a place at the service that its step calls. A long wait parks the run there."""

    def is_taken(self, attempt: Attempt) -> bool:
        """Whether the first attempt of a step has taken a place without waiting."""
        if attempt.number > 1:
            return False
        attempt.place = attempt.run.host.shares.of(attempt.call.step.service).take(_cost(attempt))
        return attempt.place is not None

    async def enter(self, attempt: Attempt, *, may_park: bool = True) -> Admission:
        run, step = attempt.run, attempt.call.step
        share: ServiceShare = run.host.shares.of(step.service)
        is_retry = attempt.number > 1 and attempt.queued_at is None and may_park
        if is_retry and (seconds := share.retry_seconds(run.id)) > 0:
            why = f"too many retries at {share.name}"
            run.host.events.observe("step.blocked", run, step=attempt.key, why=why, again_seconds=seconds)
            await pause_until(run, run.host.clock.now() + seconds)
            return Admission.WAITED
        since = attempt.queued_at
        turn = share.turn(
            run.id, run.run.priority, since, _cost(attempt), step.timeout.attempt_seconds or PROBE_SECONDS
        )
        if not turn.done():
            attempt.queued_at = turn.since
            run.host.events.observe("step.blocked", run, step=attempt.key, why=share.waits, again_seconds=0.0)
            await self._wait(attempt, share, turn, may_park=may_park)
        place = turn.result()
        if place is None:
            _refuse(attempt, share)
            return Admission.REFUSED
        if step.ready is not None and may_park and run.loop.time() - turn.since > STALE_SECONDS and since is None:
            place.leave()
            return Admission.WAITED
        attempt.place, attempt.queued_at = place, None
        return Admission.ADMITTED

    async def _wait(self, attempt: Attempt, share: ServiceShare, turn: Turn, *, may_park: bool) -> None:
        run, token = attempt.run, object()
        try:
            if not may_park:
                await turn
                return
            run.work_ended()
            try:
                add_wait(run, Wait(token, None, None, at=share))
                await turn
            finally:
                end_wait(run, token)
                run.work_began()
            await run.stop.release_decided()  # if the run is parked, its attempts are cancelled
        except BaseException:
            share.withdraw(turn)
            raise

    def leave(self, attempt: Attempt) -> None:
        place, attempt.place = attempt.place, None
        if place is None:
            return
        run, late = attempt.run, attempt.late
        if attempt.failure is None and place.has_begun and not run.spent.reported and run.host.forgetting is None:
            place.succeed()
            return
        try:
            if place.has_begun:
                place.ended(_counts(attempt), _spent(attempt))
        finally:
            self._give_back(attempt, place, late)

    @staticmethod
    def _give_back(attempt: Attempt, place: Any, late: asyncio.Future[Any] | None) -> None:
        run = attempt.run
        if run.host.forgetting is not None and run.host.forgetting.keeps(run):
            place.leave_to(run.id)
        elif late is not None and not late.done():  # a thread cannot be stopped: its call is still going on
            late.add_done_callback(lambda _: place.leave(), context=run.host.context)
        else:
            place.leave()


SERVICE_PLACE = ServicePlace()
#: The gates of most steps that call a service.
AT_SERVICE: tuple[Gate, ...] = (SERVICE_PLACE,)


def _cost(attempt: Attempt) -> float | None:
    """Return the spend expected of an attempt by the step's `cost=`; None if there is none."""
    cost = None if attempt.call.step.cost is None else expected_cost(attempt.call)
    return cost.units if isinstance(cost, Amount) else cost


def _spent(attempt: Attempt) -> float | None:
    """Return what the body reported with `ks.spend`: its tokens or else its cost; None if it reported nothing."""
    reported = attempt.run.spent.reported.get(attempt.key)
    return None if reported is None else float(reported[1] or reported[0])


def _counts(attempt: Attempt) -> bool | None:
    """Whether the attempt failed in a way that counts for the breaker; None if it was cancelled."""
    failure, step = attempt.failure, attempt.call.step
    if failure is None or isinstance(failure, NotYet):
        return False
    if isinstance(failure, asyncio.CancelledError):
        return None
    rules = step.classify + attempt.call.branch.rules + attempt.run.host.rules
    return bool(step.retry.counts_for_breaker(class_of(failure, rules)))


def _refuse(attempt: Attempt, share: ServiceShare) -> None:
    """Append the failure of a step whose service has an open breaker."""
    call, number = attempt.call, attempt.number
    message = f"step {call.key!r} was not attempted: the breaker of service {share.name!r} is open"
    error = StoredError("keepstep.BreakerOpen", message, "transient", BREAKER_OPEN, attempt=number, id=new_id("error"))
    record = call.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=number, error=error)
    attempt.run.append(record, call)
