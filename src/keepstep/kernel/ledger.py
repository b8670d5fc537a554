"""The spending of a run, summed from its records, so that a recovery knows it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from ..model import Kind
from ..policies.budget import NOTHING, ROUNDING, Amount
from ..records.data import Data, StepData, SupersededData, data_of, new_data
from ..records.record import Record
from .graph.position import EDITS

#: Code of the failure of a step that was not started because the run's budget is used up.
BUDGET = "ks:budget"


_COMPLETED = Kind.STEP_COMPLETED.value
_FAILED = Kind.STEP_FAILED.value
_CHILD = Kind.CHILD.value
_STARTED = Kind.RUN_STARTED.value
_SUPERSEDED = Kind.SUPERSEDED.value


#: Bodies may run in threads, and a step may have several of its own.
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Spending:
    """The total spending of a run, regardless of later retries and rewinds, and its parts."""

    seconds: float
    steps: int
    cost: float
    tokens: int
    by_step: dict[str, Amount] = field(default_factory=dict)
    by_agent: dict[str, Amount] = field(default_factory=dict)
    by_model: dict[str, Amount] = field(default_factory=dict)


class Spent:
    """The recorded spending of a run, and the part that counts for its budget.

    A person who retries or rewinds a run grants its budget once more from then on; money already spent stays spent. The
    spending in records that a fork has copied belongs to its original.
    """

    __slots__ = (
        "_before",
        "_branches",
        "_copied",
        "_parts",
        "began",
        "cost",
        "reported",
        "since",
        "steps",
        "tokens",
    )

    def __init__(self, since: datetime) -> None:
        self.began = since
        self.since = since
        self.steps = 0
        self.cost = 0.0
        self.tokens = 0
        self._before = (0, 0.0, 0)
        self._copied = 0
        #: Steps, cost and tokens of called workflows without a recorded result, by their keys, since the last retry.
        self._branches: dict[str, list[Any]] = {}
        #: Spending reported by steps in progress, by their keys. It goes into their next record.
        self.reported: dict[str, list[Any]] = {}
        #: Cost and tokens by the name of the step, its agent and the model; "" stands for none.
        self._parts: dict[tuple[str, str, str], list[Any]] = {}

    def add(self, record: Record) -> None:
        """Add the next record of the run."""
        kind = record.kind
        steps = 0
        if kind == _COMPLETED or (kind == _FAILED and record.retry_at is None):
            if record.started_at is not None:  # otherwise it was not a step's body, or was not started
                steps = 1
                self.steps += 1
        elif kind == _STARTED:
            self.began = self.since = max(self.since, record.finished_at or self.since)
        elif kind == _SUPERSEDED and data_of(record, SupersededData).get("act") not in EDITS:
            self.since = record.finished_at or self.since
            self._grant_again()
        data = record.data
        if data is not None and "spent" in data:
            self.cost += data["spent"].get("cost", 0.0)
            self.tokens += data["spent"].get("tokens", 0)
            self._add_parts(record, data["spent"])
        if "/" in record.step:
            self._add_to_branches(record, steps)
        if data is not None and "origin_seq" in data:
            self._copied = data["origin_seq"]
        if self._copied and record.seq == self._copied:
            self.since = max(self.since, self.began)
            self._grant_again()
        if self._branches and data is not None and "covers" in data:
            self._branches.pop(record.step, None)

    def _add_parts(self, record: Record, spent: dict[str, Any]) -> None:
        """Add the spending in a record to the sums of its step, its agent and its models."""
        name, agent = record.step.rpartition("/")[2].partition("#")[0], record.agent or ""
        if record.kind == _CHILD:
            name = name.removesuffix(".result")
        models: dict[str, list[Any]] = spent.get("models", {})
        cost = spent.get("cost", 0.0) - sum(one for one, _ in models.values())
        tokens = spent.get("tokens", 0) - sum(one for _, one in models.values())
        rest = {"": [cost, tokens]} if not models or tokens > 0 or cost > ROUNDING else {}
        for model, (model_cost, model_tokens) in (models | rest).items():
            sums = self._parts.setdefault((name, agent, model), [0.0, 0])
            sums[0] += model_cost
            sums[1] += model_tokens

    def _by(self, part: int) -> dict[str, Amount]:
        """Return the spending by the steps, agents or models that have a name, the most expensive first."""
        found: dict[str, Amount] = {}
        for names, (cost, tokens) in self._parts.items():
            if names[part]:
                found[names[part]] = found.get(names[part], NOTHING) + Amount(cost, int(tokens))
        return dict(sorted(found.items(), key=lambda one: (-one[1].cost, -one[1].tokens, one[0])))

    def models(self) -> dict[str, list[Any]]:
        """Return cost and tokens by the models that were named, as plain data."""
        return {model: [one.cost, one.tokens] for model, one in self._by(2).items()}

    def _grant_again(self) -> None:
        """Let only later spending count for the budgets."""
        self._before = (self.steps, self.cost, self.tokens)
        self._branches.clear()

    def _add_to_branches(self, record: Record, steps: int) -> None:
        """Add the spending in a record to the sums of the called workflows around its step."""
        spent: Any = data_of(record, StepData).get("spent", {})
        if steps or spent:
            for key in _called_around(record.step):
                sums = self._branches.setdefault(key, [0, 0.0, 0])
                sums[0] += steps
                sums[1] += spent.get("cost", 0.0)
                sums[2] += spent.get("tokens", 0)

    def copied(self, seq: int, upto: int, forked_at: datetime) -> None:
        """Note that these are the sums of a fork's original up to `seq`; records up to `upto` are copies."""
        self.began = self.since = forked_at
        self._copied = upto
        if seq == upto:
            self._before = (self.steps, self.cost, self.tokens)

    def used(self, at: datetime) -> dict[str, float]:
        """Return the amounts that count for the budget at a time."""
        steps, cost, tokens = self._before
        seconds = max(0.0, (at - self.since).total_seconds())
        return {
            "seconds": seconds,
            "steps": self.steps - steps,
            "cost": self.cost - cost,
            "tokens": self.tokens - tokens,
        }

    def used_in(self, key: str, began: datetime, at: datetime) -> dict[str, float]:
        """Return the amounts that count for the budget of a called workflow, which began at `began`."""
        steps, cost, tokens = self._branches.get(key, (0, 0.0, 0))
        seconds = max(0.0, (at - max(began, self.since)).total_seconds())
        return {"seconds": seconds, "steps": steps, "cost": cost, "tokens": tokens}

    def all(self, at: datetime) -> Spending:
        """Return the total spending up to a time."""
        seconds = max(0.0, (at - self.began).total_seconds())
        return Spending(seconds, self.steps, self.cost, self.tokens, self._by(0), self._by(1), self._by(2))

    def report(
        self, key: str, cost: float, tokens: int, model: str | None = None, parts: tuple[int, int] = (0, 0)
    ) -> None:
        """Add the usage that a step reports; its body may be in a thread. `parts` are tokens of input and output."""
        with _LOCK:
            add_report(self.reported, key, cost, tokens, model, *parts)

    def report_again(self, reported: dict[str, list[Any]]) -> None:
        """Take over reports of bodies that outlive this incarnation of the run."""
        self.reported.update(reported)

    def take(self, key: str) -> Data | None:
        """Return the spending reported since the step's last record, to put it into the next one."""
        with _LOCK:
            reported = self.reported.pop(key, None)
        if reported is None:
            return None
        cost, tokens, models, parts = reported
        spent: dict[str, Any] = {"cost": cost, "tokens": tokens}
        if models:
            spent["models"] = models
        if any(parts):
            spent["input_tokens"], spent["output_tokens"] = parts
        return new_data(StepData, spent=spent)

    def attach(self, record: Record) -> None:
        """Put the reported spending of a step into the record of its end."""
        reported = self.take(record.step)
        if reported is not None:
            record.data = {**data_of(record, Data), **reported}

    def as_data(self) -> dict[str, Any]:
        """Return plain data, for a state that replaces all earlier records."""
        return {
            "since": [self.began.isoformat(), self.since.isoformat()],
            "now": [self.steps, self.cost, self.tokens],
            "before": list(self._before),
            "parts": [[*names, *sums] for names, sums in self._parts.items()],
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Spent:
        """Restore the result of `as_data`."""
        began, since = map(datetime.fromisoformat, data["since"])
        one = cls(began)
        one.since = since
        one.steps, one.cost, one.tokens = data["now"]
        steps, cost, tokens = data["before"]
        one._before = (steps, cost, tokens)
        for step, agent, model, *sums in data.get("parts", ()):
            one._parts[step, agent, model] = sums
        return one


def add_report(
    reports: dict[str, list[Any]], key: str, cost: float, tokens: int, model: str | None, *parts: int
) -> None:
    """Add an amount to the reports of a step: cost, tokens, both by model, and the tokens of input and output."""
    reported = reports.setdefault(key, [0.0, 0, {}, [0, 0]])
    reported[0] += cost
    reported[1] += tokens
    for place, part in enumerate(parts):
        reported[3][place] += part
    if model is not None:
        sums = reported[2].setdefault(model, [0.0, 0])
        sums[0] += cost
        sums[1] += tokens


def _called_around(key: str) -> list[str]:
    """Return the keys of the called workflows around a call. Their last part is a name and a number or a given key."""
    around = []
    while key := key.rpartition("/")[0]:
        _, mark, number = key.rpartition("/")[2].partition("#")
        if mark and (number.isdecimal() or number.startswith("@")):
            around.append(key)
    return around
