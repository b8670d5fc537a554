"""The report of a crash test, readable for people and programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from .findings import ERROR, NOTE, WARNING, Crash, Finding, name_of, short

_ORDER = (ERROR, WARNING, NOTE)
#: Findings whose message contains a run's result, which may differ each time.
_WITH_VALUES = frozenset({"memory", "different-result", "not-deterministic", "lost"})


def _kind(finding: Finding) -> Finding:
    """Return the finding without its variable parts, to compare two findings."""
    return replace(finding, message="") if finding.code in _WITH_VALUES else finding


@dataclass(slots=True)
class StepReport:
    """The results of one step over all crashes."""

    name: str
    crashes: int = 0
    repeated: int = 0
    effects: list[str] = field(default_factory=list)
    doubled: int = 0


@dataclass(slots=True)
class Report:
    """The outcome of a crash test. `ok` means that the workflow is crash-proof, as far as it was tested."""

    workflow: str
    result: str = ""
    crashes: list[Crash] = field(default_factory=list)
    steps: list[StepReport] = field(default_factory=list)
    #: Each distinct finding, with the number of crashes that showed it.
    findings: list[tuple[Finding, int]] = field(default_factory=list)
    #: Number of moments to die at; if it exceeds `crashes`, a sample was tested.
    moments: int = 0
    seconds: float = 0.0
    virtual_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not any(finding.severity == ERROR for finding, _ in self.findings)

    @property
    def verdict(self) -> str:
        """Return the outcome in one sentence."""
        if not self.crashes:
            return f"{self.workflow} was not crashed: its undisturbed run does not end"
        tried = [crash for crash in self.crashes if crash.reached]
        crashes = f"{len(tried)} crash{'es' if len(tried) != 1 else ''}"
        if len(self.crashes) < self.moments:
            crashes += f", a sample of {self.moments} moments"
        if not self.ok:
            bad = sum(not crash.ok for crash in tried)
            wrong = sum(finding.severity == ERROR for finding, _ in self.findings)
            problems = f"{wrong} thing{'s are' if wrong != 1 else ' is'} wrong"
            if not bad:
                return f"{self.workflow} is not crash-proof: {problems}, even without a crash ({crashes})"
            return f"{self.workflow} is not crash-proof: {problems} ({bad} of {crashes} went wrong)"
        doubt = sum(crash.ended == "in doubt" for crash in tried)
        left = f"; {doubt} left the run to a person, as at_most_once promises" if doubt else ""
        when = "a crash at any moment" if len(self.crashes) >= self.moments else "every crash that was tried"
        if any(finding.code == "varies" for finding, _ in self.findings):
            when += ", apart from what varies without one"
        return f"{self.workflow} is crash-proof: it ends the same after {when} ({crashes}{left})"

    def check(self) -> None:
        """Raise an AssertionError with the whole report, unless the workflow is crash-proof."""
        __tracebackhide__ = True
        if not self.ok:
            raise AssertionError(f"{self}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """Yield the report as text, without colours."""
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
        """Return the report for a program."""
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

    # -- collecting ----------------------------------------------------------------------------------------------------

    def gather(self, undisturbed: list[Finding]) -> None:
        """Count each finding once, the worst first, and sum up the results of each step."""
        first = {_kind(finding): finding for finding in undisturbed}
        counts = dict.fromkeys(first, 0)
        for crash in self.crashes:
            for kind, finding in {_kind(finding): finding for finding in crash.findings}.items():
                first.setdefault(kind, finding)
                counts[kind] = counts.get(kind, 0) + 1
        counted = [(first[kind], count) for kind, count in counts.items()]
        self.findings = sorted(counted, key=lambda one: _ORDER.index(one[0].severity))
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


def place_of(crash: Crash) -> str:
    """Return where the process died, in words."""
    if not crash.step:
        return crash.where
    line = f" (line {crash.line.rpartition(':')[2]})" if crash.line else ""
    return f"inside {short(crash.step)}, {crash.where}{line}"


def outcome_of(crash: Crash) -> str:
    """Return the result of a crash, in a word or two."""
    if not crash.reached:
        return "not reached"
    if crash.ok:
        return "in doubt" if crash.ended == "in doubt" else "same"
    return ", ".join(dict.fromkeys(finding.code for finding in crash.findings if finding.severity == "error"))
