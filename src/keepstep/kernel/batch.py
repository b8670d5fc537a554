"""The outcome of several calls at once: what became of each item, and why the wait for them ended."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import BatchFailed
from ..policies import All, Tolerate
from ..policies.quorum import Verdict, coverage, degraded

#: Errors of items in a message at most.
_NAMED = 3

#: How an item ended.
ItemOutcome = Literal["value", "error", "cancelled", "not begun"]
#: Why a batch ended: every item has ended, enough of them have succeeded, or too many have failed.
Ended = Literal["complete", "enough", "too many failures"]


class BatchItem(NamedTuple):
    """The outcome of one item. It has a `value` or an `error`, or neither: it was cancelled, or never begun."""

    outcome: ItemOutcome
    value: Any = None
    error: BaseException | None = None


class MapResult(list[Any]):
    """The results of a batch, in the order given; None for an item without a result.

    `items` has the outcome of each item, `failures` the errors by index, and `ended` the reason why the batch ended.
    """

    def __init__(self, items: Sequence[BatchItem], ended: Ended) -> None:
        super().__init__(item.value for item in items)
        self.items = list(items)
        self.failures = {index: item.error for index, item in enumerate(items) if item.error is not None}
        self.ended: Ended = ended
        succeeded = sum(item.outcome == "value" for item in items)
        self.coverage = coverage(len(self), succeeded)
        self.degraded = degraded(len(self), succeeded)


class Outcomes:
    """The outcomes of a batch so far: the values and errors of its items, in the order in which they ended."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.results: list[Any] = [None] * total
        self.errors: dict[int, BaseException] = {}
        self.order: list[int] = []

    @property
    def succeeded(self) -> int:
        return len(self.order) - len(self.errors)

    def add(self, index: int, value: Any, error: BaseException | None) -> None:
        """Take in the outcome of an item."""
        self.order.append(index)
        if error is None:
            self.results[index] = value
        else:
            self.errors[index] = error

    def verdict(self, policy: Any, *, collect: bool) -> Verdict:
        """Decide whether enough items have ended; with `collect`, all of them must."""
        failed = len(self.errors)
        if collect and isinstance(policy, All):
            return Verdict.DONE if len(self.order) == self.total else Verdict.WAIT
        return policy.enough(self.total, len(self.order) - failed, failed)  # type: ignore[no-any-return]

    def first_error(self) -> BaseException | None:
        return next((self.errors[index] for index in self.order if index in self.errors), None)

    def concluded(self, policy: Any, begun: Collection[int], *, collect: bool) -> list[Any]:
        """Return or raise the outcome of the batch when the wait is over; `begun` are the items that were begun."""
        verdict = policy.enough(self.total, self.succeeded, len(self.errors))
        if verdict is not Verdict.DONE and not collect:
            error = self.first_error()
            if isinstance(policy, Tolerate):
                raise self._failed(policy, self._result(verdict, begun)) from _together(self.errors)
            if error is not None:
                raise error
        if isinstance(policy, All) and not collect:
            return self.results
        return self._result(self.verdict(policy, collect=collect), begun)

    def _result(self, verdict: Verdict, begun: Collection[int]) -> MapResult:
        ended: Ended = "too many failures"
        if verdict is not Verdict.IMPOSSIBLE:
            ended = "complete" if len(self.order) == self.total else "enough"
        known, has_begun = set(self.order), set(begun)
        return MapResult([self._item(index, index in known, index in has_begun) for index in range(self.total)], ended)

    def _item(self, index: int, ended: bool, begun: bool) -> BatchItem:
        if not ended:
            return BatchItem("cancelled" if begun else "not begun")
        error = self.errors.get(index)
        if error is None:
            return BatchItem("value", self.results[index])
        return BatchItem("cancelled" if isinstance(error, asyncio.CancelledError) else "error", None, error)

    def _failed(self, policy: Tolerate, batch: MapResult) -> BatchFailed:
        named = "; ".join(f"item {index}: {error}" for index, error in sorted(self.errors.items())[:_NAMED])
        more = "; …" if len(self.errors) > _NAMED else ""
        detail = f": {named}{more}" if named else ""
        what = f"{len(self.errors)} of {self.total} items failed, which {policy} does not allow"
        return BatchFailed(f"{what}{detail}", batch)


def _together(errors: Mapping[int, BaseException]) -> BaseException | None:
    """Return the errors of all items as one cause, so that a retry of the run tries all of them again."""
    found = [error for error in errors.values() if isinstance(error, Exception)]
    return ExceptionGroup("the items that failed", found) if found else None
