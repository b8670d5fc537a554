"""The budgets of a run and of the workflows that it calls; the spending is summed from the records."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..checks import MOST_SPENT, check_count, check_number
from ..errors import DefinitionError
from ..model import Kind, Outcome
from ..model.ids import new_id
from ..model.undo import is_undo
from ..ports import CURRENT
from ..records.record import StoredError
from .ledger import BUDGET

if TYPE_CHECKING:
    from ..policies import Budget
    from .calls import DurableCall
    from .driver import RunDriver


def spend(cost: float = 0.0, tokens: int = 0) -> None:
    """Report what a step has used.

    The record of the attempt keeps it, whether it failed or not, and it counts for the budget.
    """
    cost = check_number(cost, "cost", 0.0, MOST_SPENT)
    check_number(check_count(tokens, "tokens", 0), "tokens", 0.0, MOST_SPENT)
    scope = CURRENT.get()
    if scope is None:
        return
    if not scope.in_step:
        raise DefinitionError("ks.spend was called in the workflow itself, which a replay repeats; call it in a step")
    scope.run.spent.report(scope.key, cost, tokens)


class Guard:
    """Enforces a budget: warns once for each kind that is nearly used up, and starts no step beyond it.

    The budget is that of the run or, with a `key`, that of the workflow called there, which began at `began`. The
    spending of a called workflow counts for the budgets `around` it, too.
    """

    __slots__ = ("_around", "_began", "_budget", "_key", "_run", "_started", "_warned")

    def __init__(
        self, run: RunDriver, budget: Budget, key: str = "", began: datetime | None = None, around: Guard | None = None
    ) -> None:
        self._run, self._budget = run, budget
        self._key, self._began, self._around = key, began, around
        self._started: set[str] = set()  # steps in progress, without an outcome yet
        self._warned: set[str] = set()

    def loaded(self, at: datetime) -> None:
        """Note that the history is loaded up to this time; warnings for it were given before."""
        self._warned.update(use.kind for use in self._budget.uses(self._recorded(at)) if use.warns)

    def _recorded(self, at: datetime) -> dict[str, float]:
        spent = self._run.spent
        return spent.used(at) if self._began is None else spent.used_in(self._key, self._began, at)

    def _used(self, at: datetime) -> dict[str, float]:
        used = self._recorded(at)
        used["steps"] += len(self._started)
        return used

    def look(self) -> None:
        """Warn of limits that are nearly used up, after a record has become durable."""
        run = self._run
        for use in self._budget.uses(self._recorded(run.time())):
            if use.warns and use.kind not in self._warned:
                self._warned.add(use.kind)
                facts: dict[str, Any] = {"kind": use.kind, "used": use.used, "limit": use.limit}
                share = round(use.share, 3)
                run.host.events.observe("budget.nearly_spent", run, step=self._key, share=share, **facts)

    def permits(self, call: DurableCall[Any], attempt: int = 1) -> bool:
        """Whether anything is left of each budget. If not, append the refusal as the outcome of the call."""
        run = self._run
        if run.stop.is_ending or is_undo(call.key):  # the clean-up of a run that ends is not cut short
            return True
        self.look()
        self._started.discard(call.key)
        use = self._budget.exceeded(self._used(run.time()))
        if use is None:
            return self._around is None or self._around.permits(call, attempt)
        whose = f"called workflow {self._key!r}" if self._key else f"run {run.id!r}"
        message = f"step {call.key!r} was not started: the budget of {whose} is used up, {use}"
        error = StoredError(
            "keepstep.BudgetExceeded", message, "permanent", BUDGET, attempt=attempt, id=new_id("error")
        )
        run.append(call.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=attempt, error=error), call)
        return False

    def admits(self, call: DurableCall[Any], attempt: int = 1) -> bool:
        """Whether a step may start. One that starts counts toward the budget while it is under way."""
        if not self.permits(call, attempt):
            return False
        if not self._run.stop.is_ending and not is_undo(call.key):
            self.started(call.key)
        return True

    def started(self, key: str) -> None:
        """Count a step while it is in progress."""
        self._started.add(key)
        if self._around is not None:
            self._around.started(key)

    def ended(self, key: str) -> None:
        """Note that a step is no longer in progress."""
        self._started.discard(key)
        if self._around is not None:
            self._around.ended(key)
