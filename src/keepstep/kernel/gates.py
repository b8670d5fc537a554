"""The gates that an attempt passes before its body may run: the budget and `ready=`.

To add a gate, write a class with `enter` and `leave` and name it in `gates_of`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ..ports import Admission, Gate
from .hooks import within
from .wakeups import pause_until

if TYPE_CHECKING:
    from ..workflows.definition import Step
    from .attempt import Attempt
    from .budget import Guard

log = logging.getLogger("keepstep")

#: Maximum time in seconds for a `ready=` function. After that the step counts as not ready.
READY_SECONDS = 30.0


def gates_of(guard: Guard | None, step: Step[..., Any]) -> tuple[Gate, ...]:
    """Return the gates in front of a step, in the order in which an attempt passes them."""
    gates: list[Gate] = []
    if step.ready is not None:
        if guard is not None:
            gates.append(BudgetLeft(guard))
        gates.append(Ready())
    if guard is not None:
        gates.append(BudgetPlace(guard))
    return tuple(gates)


async def pass_gates(attempt: Attempt) -> bool:
    """Wait until every gate admits the attempt. Return False if one refused it.

    An attempt that had to wait leaves the gates that it has passed, and starts again at the first gate.
    """
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
    """Leave every gate: the body has ended."""
    for gate in attempt.gates:
        gate.leave(attempt)


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
            log.warning("run %s: ready= of step %s failed, so the step waits: %s", run.id, attempt.key, message)
            return message
        return None if answer else "not ready"

    def leave(self, attempt: Attempt) -> None:
        pass
