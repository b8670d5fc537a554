"""What a crash test found: a report that a person can read, and a program too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .findings import ERROR, NOTE, WARNING, Crash, Finding, name_of

_ORDER = (ERROR, WARNING, NOTE)
#: Findings whose message holds what a run ended with, which may be another each time.
_WITH_VALUES = frozenset({"memory", "different-result", "not-deterministic"})


def _kind(finding: Finding) -> Finding:
    """What makes two findings the same."""
    return replace(finding, message="") if finding.code in _WITH_VALUES else finding


@dataclass(slots=True)
class StepReport:
    """What became of one step over all crashes."""

    name: str
    crashes: int = 0
    repeated: int = 0
    effects: list[str] = field(default_factory=list)
    doubled: int = 0


@dataclass(slots=True)
class Report:
    """The outcome of a crash test. `ok` says that the workflow is crash-proof, as far as it was tried."""

    workflow: str
    result: str = ""
    crashes: list[Crash] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    #: Each finding once, with the number of crashes that showed it.
    findings: list[tuple[Finding, int]] = field(default_factory=list)
    #: How many moments there were to die at; if there are more than `crashes`, a sample was tried.
    moments: int = 0
    seconds: float = 0.0
    virtual_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not any(finding.severity == ERROR for finding, _ in self.findings)

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        if not self.crashes:
            return f"{self.workflow} was not crashed: its undisturbed run does not come to an end"
        tried = [crash for crash in self.crashes if crash.reached]
        crashes = f"{len(tried)} crash{'es' if len(tried) != 1 else ''}"
        if len(self.crashes) < self.moments:
            crashes += f", a sample of {self.moments} moments"
        if not self.ok:
            bad = sum(not crash.ok for crash in tried)
            wrong = sum(finding.severity == ERROR for finding, _ in self.findings)
            said = f"{wrong} thing{'s are' if wrong != 1 else ' is'} wrong"
            if not bad:
                return f"{self.workflow} is not crash-proof: {said}, even without a crash ({crashes})"
            return f"{self.workflow} is not crash-proof: {said} ({bad} of {crashes} went wrong)"
        doubt = sum(crash.ended == "in doubt" for crash in tried)
        left = f"; {doubt} left the run to a person, as at_most_once promises" if doubt else ""
        when = "a crash at any moment" if len(self.crashes) >= self.moments else "every crash that was tried"
        if any(finding.code == "varies" for finding, _ in self.findings):
            when += ", but for what varies without one"
        return f"{self.workflow} is crash-proof: it ends the same after {when} ({crashes}{left})"

    def check(self) -> None:
        """Raise an AssertionError that holds the whole report, unless the workflow is crash-proof."""
        __tracebackhide__ = True
        if not self.ok:
            raise AssertionError(f"{self}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The report as text, without colours."""
        yield self.verdict
        for finding, count in self.findings:
            seen = f" ({count} crash{'es' if count != 1 else ''})" if count else ""
            yield ""
            yield f"{finding.severity}: {finding.message}{seen}"
            if finding.line:
                yield f"  in {finding.line}"
            if finding.advice:
                yield f"  → {finding.advice}"

    def as_json(self) -> dict[str, Any]:
        """The report for a program."""
        return {
            "workflow": self.workflow,
            "ok": self.ok,
            "verdict": self.verdict,
            "result": self.result,
            "moments": self.moments,
            "seconds": round(self.seconds, 3),
            "virtual_seconds": round(self.virtual_seconds, 3),
            "findings": [asdict(finding) | {"crashes": count} for finding, count in self.findings],
            "steps": [asdict(step) for step in self.steps],
            "crashes": [asdict(crash) | {"ok": crash.ok} for crash in self.crashes],
        }

    # -- gathering -----------------------------------------------------------------------------------------------------

    def gather(self, undisturbed: list[Finding]) -> None:
        """Count each finding once, the worst first, and add up what became of each step."""
        first = {_kind(finding): finding for finding in undisturbed}
        counts = dict.fromkeys(first, 0)
        for crash in self.crashes:
            for kind, finding in {_kind(finding): finding for finding in crash.findings}.items():
                first.setdefault(kind, finding)
                counts[kind] = counts.get(kind, 0) + 1
        told = [(first[kind], count) for kind, count in counts.items()]
        self.findings = sorted(told, key=lambda one: _ORDER.index(one[0].severity))
        steps = {step.name: step for step in self.steps}
        for crash in self.crashes:
            if crash.step and crash.reached:
                steps.setdefault(name_of(crash.step), StepReport(name_of(crash.step))).crashes += 1
            for key in crash.repeated:
                steps.setdefault(name_of(key), StepReport(name_of(key))).repeated += 1
            for finding in crash.findings:
                if finding.code == "doubled":
                    steps[finding.step].doubled += 1
        self.steps = list(steps.values())
