"""The crash test: a workflow is run undisturbed, then killed at every moment that counts, and recovered each time."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..engine.engine import Engine
from ..errors import DefinitionError
from ..model.ids import check_name
from ..model.signal import RESERVED
from ..values import VALUES
from ..workflows.definition import Bound, Workflow
from .findings import WARNING, Finding, Judge, name_of
from .life import Plan
from .moments import Moment
from .pages import as_html
from .report import Report, StepReport
from .trial import LIFE_SECONDS, Setting, Trial, run_trials

#: No more crashes than this are made unless the user wants more; a longer workflow is sampled.
AT_MOST = 500
#: What is used where a test does not say; options of pytest set it.
DEFAULTS: dict[str, Any] = {"at_most": None, "html": None}
#: The second undisturbed run starts so much later by its clock.
LATER_SECONDS = 3_661.001
#: Processes at once, at most.
MAX_JOBS = 8


class Ask:
    """An answer that is a question: the workflow hears it as `handle.ask` sends it, and can reply."""

    def __init__(self, payload: Any = None) -> None:
        self.payload = payload


#: Signals by name, or in order: each is sent once, when a run waits for its name.
Answers = Mapping[str, Any] | Iterable[tuple[str, Any]]


def crashtest(
    workflow: Workflow[..., Any] | Bound[Any],
    /,
    *args: Any,
    answers: Answers = (),
    set_up: Callable[[], Any] | None = None,
    each_life: Callable[[], Any] | None = None,
    files: Iterable[str | os.PathLike[str]] = (),
    ignore: Sequence[str] = (),
    may_fail: bool = False,
    at_most: int | None = None,
    seed: int = 0,
    life_seconds: float = LIFE_SECONDS,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Report:
    """Run a workflow, kill it at every checkpoint and inside every step, recover it, and report what came of it.

    Each process works in an empty folder of its own (with copies of `files`), in memory, and in virtual time. `answers`
    are the signals it waits for. `set_up` is called before each crash, in that folder; if it gives a context manager,
    that lasts until the recovery is over. `each_life` is called in every process before the workflow. `ignore` names
    effects that are harmless when repeated.
    """
    limit = at_most or DEFAULTS["at_most"] or AT_MOST
    plan = _plan(workflow, args, kwargs, answers, each_life)
    setting = _setting(set_up, files, life_seconds)
    began = time.monotonic()
    several = jobs or (1 if set_up is not None else min(os.cpu_count() or 1, MAX_JOBS))
    plan, first, second = _undisturbed(plan, setting)
    judge = Judge(first, second, tuple(ignore))
    report = Report(plan.workflow.name, result=first.end.output or "", virtual_seconds=first.end.seconds)
    report.steps = _steps(judge)
    found = list(judge.undisturbed(may_fail=may_fail))
    moments = [moment for moment in first.moments if moment is not first.moments[0]]
    report.moments = len(moments)
    if first.end.status not in ("stuck", "hangs", "died", "broken"):
        chosen = sample(moments, limit, seed)
        for trial in run_trials(plan, setting, chosen, several):
            report.crashes.append(judge.judge(trial))
            if progress is not None:
                progress(len(report.crashes), len(chosen))
        order = {moment.id: place for place, moment in enumerate(chosen)}
        report.crashes.sort(key=lambda crash: order[crash.id])
    found += _of_chance(judge, report)
    report.gather(found)
    report.seconds = time.monotonic() - began
    if DEFAULTS["html"]:
        folder = Path(DEFAULTS["html"])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_page_name(report)}.html").write_text(as_html(report), encoding="utf-8", errors="replace")
    return report


def crashproof(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a test of a function that returns a workflow with its arguments: `return pay.bind("order-1")`.

    What the function takes are fixtures, as ever. The options are those of `crashtest`. The test fails, with the whole
    report, if a crash anywhere changes how the workflow ends or doubles what it does.
    """
    known = [name for name, one in inspect.signature(crashtest).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
            raise DefinitionError(f"crashproof has no option {name!r}{meant}")

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def crashed(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            bound = test(*args, **kwargs)
            if not isinstance(bound, Bound | Workflow):
                if inspect.iscoroutine(bound):
                    bound.close()
                raise DefinitionError(
                    f"{test.__name__} gives {type(bound).__name__}; it must be a plain def that returns the workflow "
                    "to crash, with its arguments: return workflow.bind(...)"
                )
            crashtest(bound, **options).check()

        return crashed

    return decorate if function is None else decorate(function)


def sample(moments: Sequence[Moment], at_most: int, seed: int) -> list[Moment]:
    """All moments, or so many of them: one from each of as many stretches of equal length, drawn from the seed."""
    if len(moments) <= at_most:
        return list(moments)
    draw = random.Random(seed)  # noqa: S311 - which moments are tried is no secret
    edges = [len(moments) * place // at_most for place in range(at_most + 1)]
    return [moments[draw.randrange(low, high)] for low, high in pairwise(edges)]


def _page_name(report: Report) -> str:
    """What the page of a report is called: after its test, so that two tests of one workflow give two pages."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    return re.sub(r"[^\w.-]+", "-", test or report.workflow)[-200:].strip("-")


def _undisturbed(plan: Plan, setting: Setting) -> tuple[Plan, Trial, Trial]:
    """Two runs that nothing disturbs; on SQLite if a step wants its transactions."""
    [first] = run_trials(plan, setting, [None], 1, curious=True)
    if first.wants_sqlite:
        plan = replace(plan, store="sqlite")
        [first] = run_trials(plan, setting, [None], 1, curious=True)
    if first.end.status in ("stuck", "hangs", "died", "broken"):
        return plan, first, first
    # At another time of the day: what follows from the clock is not to be the same after a crash.
    [second] = run_trials(replace(plan, epoch=plan.epoch + LATER_SECONDS), setting, [None], 1)
    return plan, first, second


def _of_chance(judge: Judge, report: Report) -> list[Finding]:
    """A clock or chance in the workflow's own code: named with whatever it broke, else a warning."""
    found = {finding.code for crash in report.crashes for finding in crash.findings}
    if found & {"not-replayable", "different-result"}:
        return []
    return [
        Finding(
            WARNING,
            "chance",
            f"the workflow's own code calls {called}, which gives something else on every replay",
            f"use {instead}, or call it in a step",
            line=line,
        )
        for called, line, instead in judge.chance
    ]


def _steps(judge: Judge) -> list[StepReport]:
    steps: dict[str, StepReport] = {}
    for moment in judge.first.moments:
        if moment.step:
            steps.setdefault(name_of(moment.step), StepReport(name_of(moment.step)))
    for deed in judge.deeds:
        if deed.step and deed.text not in (told := steps[name_of(deed.step)].effects):
            told.append(deed.text)
    return list(steps.values())


def _plan(workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Answers, each_life: Any) -> Plan:
    """What is to be tested, or a clear error."""
    if isinstance(workflow, Bound):
        workflow, args, kwargs = workflow.workflow, (*workflow.args, *args), {**workflow.kwargs, **kwargs}
    if not isinstance(workflow, Workflow):
        raise DefinitionError(f"{workflow!r} is not a workflow; decorate it with @ks.workflow")
    workflow.check_arguments(args, kwargs)
    engine = Engine("memory:", worker=False)  # never opened: it only says what may be stored
    engine.censor.input_of(workflow, args, kwargs)
    pairs = answers.items() if isinstance(answers, Mapping) else answers
    sent = [(_checked_name(name), one) for name, one in pairs]
    signals = tuple((name, one.payload, True) if isinstance(one, Ask) else (name, one, False) for name, one in sent)
    for name, payload, _ in signals:
        engine.censor.check(VALUES.encode(payload, f"signal {name!r}"), name, "signal")
    return Plan(workflow, args, kwargs, signals, each_life)


def _checked_name(name: Any) -> str:
    if check_name(name, "signal").startswith(RESERVED):
        raise DefinitionError(f"signal name {name!r} is refused: names that begin with {RESERVED!r} are Keepstep's own")
    return str(name)


def _setting(set_up: Any, files: Iterable[str | os.PathLike[str]], life_seconds: float) -> Setting:
    if not hasattr(os, "fork"):
        raise DefinitionError("a crash test needs os.fork, which this system does not have")
    paths = tuple(Path(path).resolve() for path in files)
    for path in paths:
        if not path.exists():
            raise DefinitionError(f"there is no {path} to copy for the crash test")
    return Setting(set_up, paths, life_seconds)
