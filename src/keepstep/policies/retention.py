"""How long finished runs are kept: which of them may go, decided and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import DefinitionError
from ..model import FINISHED, Status
from .check import check_count, check_number

_DAY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Retain:
    """Which finished runs stay: those of the last `days`, and the newest `count` of each workflow, whichever is more.

    `failed_days` is for runs that failed or were cancelled, if they shall stay for another time. With
    `preserve=False` a run that completed need not stay at all. `workflows` names those that have a rule of their own.
    A run that is not finished always stays.
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

    def of(self, workflow: str) -> Retain:
        """The rule for one workflow."""
        return self.workflows.get(workflow, self)

    def keeps(self, status: Status, age_seconds: float, newer: int) -> bool:
        """Whether a run stays that came to this status so long ago, and has so many newer ones of its workflow."""
        if status not in FINISHED:
            return True
        completed = status is Status.COMPLETED
        if completed and not self.preserve:
            return False
        days = self.days if completed or self.failed_days is None else self.failed_days
        return age_seconds <= days * _DAY_SECONDS or newer < self.count
