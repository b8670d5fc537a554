"""Retention: which finished runs are kept, and for how long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..checks import check_count, check_number
from ..errors import DefinitionError
from ..model import FINISHED, Status

_DAY_SECONDS = 86_400.0
#: Days of the rule `forever`: 2,700 years.
_FOREVER_DAYS = 1e6
#: The rules that have a name, and what each keeps. A text chooses one where a workflow is defined.
NAMES = ("delete_on_success", "forever")


@dataclass(frozen=True, slots=True)
class Retain:
    """A rule that keeps finished runs of the last `days` and the newest `count` of each workflow, whichever is more.

    `failed_days` replaces `days` for runs that failed or were cancelled. With `preserve=False`, completed runs may be
    removed at once. `workflows` holds the rules of individual workflows. A run that is not finished is always kept.
    """

    days: float = 30.0
    count: int = 1000
    failed_days: float | None = None
    preserve: bool = True
    workflows: Mapping[str, Retain] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_number(self.days, "the days that runs are kept", 0)
        check_count(self.count, "the number of runs that are kept", 0)
        if self.failed_days is not None:
            check_number(self.failed_days, "the days that failed runs are kept", 0)
        for name, own in self.workflows.items():
            if not isinstance(own, Retain) or own.workflows:
                raise DefinitionError(f"the rule for workflow {name!r} must be a Retain without workflows, not {own!r}")

    @classmethod
    def named(cls, value: Retain | str) -> Retain:
        """Return a rule, or the one of this name: `delete_on_success` or `forever`."""
        if isinstance(value, Retain):
            return value
        if value == "delete_on_success":
            return cls(preserve=False)
        if value == "forever":
            return cls(days=_FOREVER_DAYS)
        raise DefinitionError(f"retain= takes a ks.Retain(...), {' or '.join(map(repr, NAMES))}, not {value!r}")

    @property
    def shortest_seconds(self) -> float:
        """The age below which it keeps every run, except for completed ones that it need not keep at all."""
        days = [self.days, *([] if self.failed_days is None else [self.failed_days])]
        return min(min(days) * _DAY_SECONDS, *(own.shortest_seconds for own in self.workflows.values()), 1e12)

    def __str__(self) -> str:
        """Return the rule in words, for people."""
        if self.days >= _FOREVER_DAYS:
            return "all of them"
        failed = "" if self.failed_days is None else f" (failed ones {self.failed_days:g} days)"
        span = "day" if self.days == 1 else f"{self.days:g} days"
        kept = f"those of the last {span}{failed}, and the newest {self.count:,}"
        return kept if self.preserve else f"no completed ones; of the others {kept}"

    def of(self, workflow: str) -> Retain:
        """Return the rule for one workflow."""
        return self.workflows.get(workflow, self)

    def keeps(self, status: Status, age_seconds: float, newer: int) -> bool:
        """Whether to keep a run that reached this status `age_seconds` ago, with `newer` newer runs of its workflow."""
        if status not in FINISHED:
            return True
        completed = status is Status.COMPLETED
        if completed and not self.preserve:
            return False
        days = self.days if completed or self.failed_days is None else self.failed_days
        return age_seconds <= days * _DAY_SECONDS or newer < self.count
