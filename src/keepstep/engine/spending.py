"""What a run spends, and its budget: summed from its records, so that a recovery knows what was spent before it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..model import Kind, Outcome
from ..model.ids import new_id
from ..policies.check import check_count, check_number
from ..ports import CURRENT
from ..stores.records import Record, StoredError
from .position import EDITS

if TYPE_CHECKING:
    from ..policies import Budget
    from .branch import DurableCall
    from .context import RunContext

#: The code of the failure of a step that was not started because the run's budget is used up.
BUDGET = "ks:budget"

_COMPLETED, _FAILED = Kind.STEP_COMPLETED.value, Kind.STEP_FAILED.value
_STARTED, _SUPERSEDED = Kind.RUN_STARTED.value, Kind.SUPERSEDED.value

#: Bodies may be in threads, and a step may have several of its own.
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Spending:
    """What a run has spent so far: all of it, whatever was retried or rewound since."""

    seconds: float
    steps: int
    cost: float
    tokens: int


class Spent:
    """What the records of a run say it has spent, and how much of that counts for its budget.

    A person who retries or rewinds a run grants its budget once more, from then on; money that is spent stays spent.
    What the records that a fork was made with tell was spent by the run that it comes from.
    """

    __slots__ = ("_before", "_copied", "began", "cost", "since", "steps", "tokens", "told")

    def __init__(self, since: datetime) -> None:
        self.began = since
        self.since = since
        self.steps = 0
        self.cost = 0.0
        self.tokens = 0
        self._before = (0, 0.0, 0)
        self._copied = 0
        #: What steps that are under way have told, by their keys: it goes into their next record.
        self.told: dict[str, list[Any]] = {}

    def add(self, record: Record) -> None:
        """Take in the next record of the run."""
        kind = record.kind
        if kind == _COMPLETED or (kind == _FAILED and record.retry_at is None):
            if record.started_at is not None:  # else it was no step's body, or one that was not started
                self.steps += 1
        elif kind == _STARTED:
            self.began = self.since = max(self.since, record.finished_at or self.since)
        elif kind == _SUPERSEDED and (record.data or {}).get("act") not in EDITS:
            self.since = record.finished_at or self.since
            self._before = (self.steps, self.cost, self.tokens)
        data = record.data
        if data is not None and "spent" in data:
            self.cost += data["spent"].get("cost", 0.0)
            self.tokens += data["spent"].get("tokens", 0)
        if data is not None and "origin_seq" in data:
            self._copied = data["origin_seq"]
        if self._copied and record.seq == self._copied:
            self._before, self.since = (self.steps, self.cost, self.tokens), max(self.since, self.began)

    def copied(self, seq: int, upto: int, forked_at: datetime) -> None:
        """These are the sums of a fork's origin up to `seq`; the fork has copied its records up to `upto`."""
        self.began = self.since = forked_at
        self._copied = upto
        if seq == upto:
            self._before = (self.steps, self.cost, self.tokens)

    def used(self, at: datetime) -> dict[str, float]:
        """What counts for the budget at a time."""
        steps, cost, tokens = self._before
        seconds = max(0.0, (at - self.since).total_seconds())
        return {
            "seconds": seconds,
            "steps": self.steps - steps,
            "cost": self.cost - cost,
            "tokens": self.tokens - tokens,
        }

    def all(self, at: datetime) -> Spending:
        """All that was ever spent, up to a time."""
        return Spending(max(0.0, (at - self.began).total_seconds()), self.steps, self.cost, self.tokens)

    def take(self, key: str) -> dict[str, Any] | None:
        """What a step has told since its last record, to be put into the next one."""
        with _LOCK:
            told = self.told.pop(key, None)
        return None if told is None else {"spent": {"cost": told[0], "tokens": told[1]}}

    def attach(self, record: Record) -> None:
        """Put what a step has told into the record of its end."""
        told = self.take(record.step)
        if told is not None:
            record.data = {**(record.data or {}), **told}

    def as_data(self) -> dict[str, Any]:
        """As plain data, for a state that stands for all records before it."""
        return {
            "since": [self.began.isoformat(), self.since.isoformat()],
            "now": [self.steps, self.cost, self.tokens],
            "before": list(self._before),
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Spent:
        """What `as_data` gave."""
        began, since = map(datetime.fromisoformat, data["since"])
        made = cls(began)
        made.since = since
        made.steps, made.cost, made.tokens = data["now"]
        steps, cost, tokens = data["before"]
        made._before = (steps, cost, tokens)
        return made


def spend(cost: float = 0.0, tokens: int = 0) -> None:
    """Say in a step what it has used: it is recorded with the step, failed attempts too, and counts for the budget."""
    cost = check_number(cost, "the cost that is spent", 0.0)
    check_count(tokens, "the number of tokens that are spent", 0)
    scope = CURRENT.get()
    if scope is None:
        return
    if not scope.in_step:
        raise DefinitionError("ks.spend is called in the workflow itself, which a replay repeats; call it in a step")
    with _LOCK:
        told = scope.run.spent.told.setdefault(scope.key, [0.0, 0])
        told[0] += cost
        told[1] += tokens


class Guard:
    """Holds a run to its budget: warns once of each kind that is nearly used up, and starts nothing beyond it."""

    __slots__ = ("_budget", "_run", "_started", "_warned")

    def __init__(self, run: RunContext, budget: Budget) -> None:
        self._run, self._budget = run, budget
        self._started: set[str] = set()  # steps that are under way, and have no outcome yet
        self._warned: set[str] = set()

    def loaded(self, at: datetime) -> None:
        """The history is in, up to this time: what was nearly used up then has been warned of."""
        self._warned.update(use.kind for use in self._budget.uses(self._used(at)) if use.warns)

    def _used(self, at: datetime) -> dict[str, float]:
        used = self._run.spent.used(at)
        used["steps"] += len(self._started)
        return used

    def look(self) -> None:
        """Something has become durable: warn of what is nearly used up."""
        run = self._run
        for use in self._budget.uses(run.spent.used(run.time())):
            if use.warns and use.kind not in self._warned:
                self._warned.add(use.kind)
                run.engine.teller.observe(
                    "run.budget", run, kind=use.kind, used=use.used, limit=use.limit, share=round(use.share, 3)
                )

    def admits(self, call: DurableCall[Any], attempt: int = 1) -> bool:
        """Whether a step may start; if the budget is used up, that is its recorded outcome."""
        run = self._run
        if run.cancelling or run.timed_out:  # the clean-up of a run that is ended is not cut short
            return True
        self.look()
        self._started.discard(call.key)
        use = self._budget.exceeded(self._used(run.time()))
        if use is None:
            self._started.add(call.key)
            return True
        message = f"step {call.key!r} was not started: the budget of run {run.id!r} is used up, {use}"
        error = StoredError(
            "keepstep.BudgetExceeded", message, "permanent", BUDGET, attempt=attempt, id=new_id("error")
        )
        run.append(call.record(Kind.STEP_FAILED, outcome=Outcome.FAILURE.value, attempt=attempt, error=error), call)
        return False

    def ended(self, key: str) -> None:
        """A step is no longer under way."""
        self._started.discard(key)
