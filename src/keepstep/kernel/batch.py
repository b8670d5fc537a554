"""The outcome of several calls at once: what became of each item, and why the wait for them ended."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ..errors import BatchFailed
from ..policies import All, Tolerate
from ..policies.quorum import Verdict, coverage, degraded

#: Errors of items in a message at most.
_NAMED = 3

_NO_VALUE: Any = object()

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
    """The outcomes of a batch so far: the values of its items, and the errors in the order in which they came.

    `total` is infinite until the last item of an iterator is drawn.
    """

    def __init__(self, total: float) -> None:
        self.total = total
        self.ended = 0
        self.errors: dict[int, BaseException] = {}
        self._values: list[Any] = []
        self._has_more = False  # whether an iterator may have further items

    @property
    def succeeded(self) -> int:
        return self.ended - len(self.errors)

    @property
    def results(self) -> list[Any]:
        """The values in the order of the items; None for an item without a value."""
        missing = int(self.total) - len(self._values)
        return [None if value is _NO_VALUE else value for value in (*self._values, *([_NO_VALUE] * missing))]

    def add(self, index: int, value: Any, error: BaseException | None) -> None:
        """Take in the outcome of an item."""
        self.ended += 1
        if error is not None:
            self.errors[index] = error
            return
        values = self._values
        while index >= len(values):
            values.append(_NO_VALUE)
        values[index] = value

    def value(self, index: int) -> Any:
        """Return the value of an item that has ended with one."""
        return self._values[index]

    def has_value(self, index: int) -> bool:
        """Whether an item has ended with a value."""
        return index < len(self._values) and self._values[index] is not _NO_VALUE

    def verdict(self, policy: Any, *, collect: bool) -> Verdict:
        """Decide whether enough items have ended; with `collect`, all of them must."""
        failed = len(self.errors)
        if collect and isinstance(policy, All):
            return Verdict.DONE if self.ended == self.total else Verdict.WAIT
        return policy.enough(self.total, self.ended - failed, failed)  # type: ignore[no-any-return]

    def first(self) -> int:
        """Return the item that has ended, of a batch that only one may end."""
        return next(iter(self.errors), max(len(self._values) - 1, 0))

    def first_error(self) -> BaseException | None:
        return next(iter(self.errors.values()), None)

    def concluded(self, policy: Any, begun: int, *, collect: bool) -> list[Any]:
        """Return or raise the outcome of the batch when the wait is over. `begun` is the number of items that began."""
        if self.total == math.inf:  # the items that were not drawn are not known
            self.total, self._has_more = begun, True
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

    def _result(self, verdict: Verdict, begun: int) -> MapResult:
        ended: Ended = "too many failures"
        if verdict is not Verdict.IMPOSSIBLE:
            ended = "complete" if self.ended == self.total and not self._has_more else "enough"
        return MapResult([self._item(index, index < begun) for index in range(int(self.total))], ended)

    def _item(self, index: int, begun: bool) -> BatchItem:
        if self.has_value(index):
            return BatchItem("value", self._values[index])
        error = self.errors.get(index)
        if error is None:
            return BatchItem("cancelled" if begun else "not begun")
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
