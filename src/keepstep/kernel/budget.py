"""The budgets of a run and of the workflows that it calls; the spending is summed from the records."""

from __future__ import annotations

import logging
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..checks import MOST_SPENT, check_count, check_key, check_number
from ..errors import DefinitionError
from ..model import Kind, Outcome
from ..model.ids import new_id
from ..model.text import one_line
from ..model.undo import is_undo
from ..policies.budget import NOTHING, Amount
from ..ports import CURRENT
from ..records.record import StoredError
from .ledger import BUDGET

if TYPE_CHECKING:
    from ..policies import Budget
    from .calls import DurableCall
    from .driver import RunDriver


log = logging.getLogger("keepstep")


def spend(
    cost: float = 0.0,
    tokens: int | None = None,
    *,
    model: str | None = None,
    input_tokens: int = 0,
    output_tokens: int = 0,
) -> None:
    """Report what a step has used, and the model that it has paid for.

    The record of the attempt keeps it, whether it failed or not, and it counts for the budget. Without `tokens`, those
    of the input and of the output count.
    """
    if model is not None:
        check_key(model, "model")
    cost = check_number(cost, "cost", 0.0, MOST_SPENT)
    parts = (check_count(input_tokens, "input_tokens", 0), check_count(output_tokens, "output_tokens", 0))
    total = sum(parts) if tokens is None else check_count(tokens, "tokens", 0)
    check_number(total, "tokens", 0.0, MOST_SPENT)
    scope = CURRENT.get()
    if scope is None:
        return
    if not scope.in_step:
        raise DefinitionError("ks.spend was called in the workflow itself, which a replay repeats; call it in a step")
    scope.spend(cost, total, model, parts)


class Guard:
    """Enforces a budget: warns once for each kind that is nearly used up, and starts no step beyond it.

    The budget is that of the run or, with a `key`, that of the workflow called there, which began at `began`. The
    spending of a called workflow counts for the budgets `around` it, too.
    """

    __slots__ = ("_around", "_began", "_budget", "_key", "_run", "_started", "_warned", "expects")

    def __init__(
        self, run: RunDriver, budget: Budget, key: str = "", began: datetime | None = None, around: Guard | None = None
    ) -> None:
        self._run, self._budget = run, budget
        self._key, self._began, self._around = key, began, around
        self._started: dict[str, Amount] = {}  # steps in progress, without an outcome yet, and what they expect
        self._warned: set[str] = set()
        #: Whether expected amounts can exceed a limit here or around.
        self.expects: bool = (budget.cost, budget.tokens) != (None, None) or (around is not None and around.expects)

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
        self._started.pop(call.key, None)
        expected = sum(self._started.values(), expected_of(call)) if self.expects else NOTHING
        use = self._budget.exceeded(self._used(run.time()), expected)
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
            self.started(call.key, expected_of(call) if self.expects else NOTHING)
        return True

    def started(self, key: str, expected: Amount = NOTHING) -> None:
        """Count a step while it is in progress, and the amount that it expects to spend."""
        self._started[key] = expected
        if self._around is not None:
            self._around.started(key, expected)

    def ended(self, key: str) -> None:
        """Note that a step is no longer in progress."""
        self._started.pop(key, None)
        if self._around is not None:
            self._around.ended(key)


def expected_of(call: DurableCall[Any]) -> Amount:
    """Return the amount that the `cost=` of a call's step expects; a number counts only for its service."""
    cost = expected_cost(call)
    return cost if isinstance(cost, Amount) else NOTHING


def expected_cost(call: Any) -> float | Amount | None:
    """Return the spend expected of a call by its step's `cost=`; None if there is none."""
    cost = getattr(getattr(call, "step", None), "cost", None)
    if cost is None or isinstance(cost, int | float | Amount):
        return cost
    try:
        expected = cost(*call.args, **call.kwargs)
        return expected if isinstance(expected, Amount) else min(max(0.0, float(expected)), MOST_SPENT)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - an estimate that fails, `SystemExit` too, is replaced by the mean
        message = one_line(f"{type(error).__name__}: {error}")
        log.warning("run %s: cost= of step %s failed: %s", call.run.id, call.key, message)
        return None
