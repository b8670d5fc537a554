"""The crash test: a workflow runs undisturbed, then is killed at every relevant moment, and recovered each time."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...checks import check_executor, check_name
from ...engine.engine import Engine
from ...errors import DefinitionError
from ...model.signal import RESERVED
from ...values import VALUES
from ...workflows.definition import Bound, Workflow
from .crash_points import Moment
from .findings import WARNING, Finding, Judge, name_of
from .process import CALLBACK, QUESTION, Answer, Plan
from .report import Report, StepReport
from .trial import LIFE_SECONDS, Setting, Trial, run_trials

#: Default maximum number of crashes; a longer workflow is sampled.
AT_MOST = 500
#: Defaults of options that a test does not give; options of pytest set them.
DEFAULTS: dict[str, Any] = {"at_most": AT_MOST}
#: Difference in seconds between the clocks of the two undisturbed runs.
LATER_SECONDS = 3_661.001
#: Maximum number of concurrent processes.
MAX_JOBS = 8


class Ask:
    """An answer that is a question: the workflow receives it as `handle.ask` sends it, and can reply."""

    def __init__(self, payload: Any = None) -> None:
        self.payload = payload


class Complete:
    """An answer that completes a callback: its name is that of `ks.callback(name)`, which may be empty."""

    def __init__(self, value: Any = True) -> None:
        self.value = value


#: Signals by name, or in order. Each is sent once, when a run waits for its name.
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
    executor: Any = None,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Report:
    """Run a workflow, kill it at every checkpoint and inside every step, recover it, and report the results.

    Each process works in its own empty folder (with copies of `files`), in memory, and in virtual time. `answers` are
    the signals that the workflow waits for; breakpoints of graphs are resumed without one. `set_up` is called before
    each crash, in that folder; a context manager that it returns lasts until the recovery is over. `each_life` is
    called in every process before the workflow. `ignore` names effects that may be repeated without harm. `executor` is
    that of plain functions that name none. Whatever a step names, bodies that run elsewhere run in processes of this
    machine: each of them dies alone, too, and with its worker.
    """
    limit = at_most or DEFAULTS["at_most"]
    plan = _plan(workflow, args, kwargs, answers, each_life)
    plan = replace(plan, executor=None if executor is None else check_executor(executor, "executor="))
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
    return report


def crashproof(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Turn a function that returns a workflow with its arguments into a test: `return pay.bind("order-1")`.

    The function's parameters are fixtures, as usual. The options are those of `crashtest`. The test fails, with the
    whole report, if a crash changes how the workflow ends or duplicates its effects.
    """
    known = [name for name, one in inspect.signature(crashtest).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]}?" if near else f"; its options are {', '.join(known)}"
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
                    f"{test.__name__} returned {type(bound).__name__}; it must be a plain def that returns the "
                    "workflow to crash, with its arguments: return workflow.bind(...)"
                )
            crashtest(bound, **options).check()

        return crashed

    return decorate if function is None else decorate(function)


def sample(moments: Sequence[Moment], at_most: int, seed: int) -> list[Moment]:
    """Return all moments, or a sample of `at_most`: one from each of as many equal stretches, drawn from the seed."""
    if len(moments) <= at_most:
        return list(moments)
    draw = random.Random(seed)  # noqa: S311 - the choice of moments is not a secret
    edges = [len(moments) * place // at_most for place in range(at_most + 1)]
    return [moments[draw.randrange(low, high)] for low, high in pairwise(edges)]


def _undisturbed(plan: Plan, setting: Setting) -> tuple[Plan, Trial, Trial]:
    """Return two runs without crashes; on SQLite if a step needs its transactions."""
    [first] = run_trials(plan, setting, [None], 1, curious=True)
    if first.wants_sqlite:
        plan = replace(plan, store="sqlite")
        [first] = run_trials(plan, setting, [None], 1, curious=True)
    if first.end.status in ("stuck", "hangs", "died", "broken"):
        return plan, first, first
    # A different time of day reveals results that depend on the clock.
    [second] = run_trials(replace(plan, epoch=plan.epoch + LATER_SECONDS), setting, [None], 1)
    return plan, first, second


def _of_chance(judge: Judge, report: Report) -> list[Finding]:
    """Return the workflow's own uses of a clock or randomness: errors if they broke something, else warnings."""
    found = {finding.code for crash in report.crashes for finding in crash.findings}
    if found & {"not-replayable", "different-result"}:
        return []
    return [
        Finding(
            WARNING,
            "chance",
            f"the workflow's own code calls {called}, which returns a different value on every replay",
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
        if deed.step and deed.text not in (effects := steps[name_of(deed.step)].effects):
            effects.append(deed.text)
    return list(steps.values())


def _plan(workflow: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answers: Answers, each_life: Any) -> Plan:
    """Return the plan of the test; refuse invalid arguments."""
    if isinstance(workflow, Bound):
        workflow, args, kwargs = workflow.workflow, (*workflow.args, *args), {**workflow.kwargs, **kwargs}
    if not isinstance(workflow, Workflow):
        raise DefinitionError(f"{workflow!r} is not a workflow; decorate it with @ks.workflow")
    workflow.check_arguments(args, kwargs)
    engine = Engine("memory:", worker=False)  # never opened: it only checks what may be stored
    engine.redaction.input_of(workflow, args, kwargs)
    pairs = answers.items() if isinstance(answers, Mapping) else answers
    sent = tuple(_answer(name, one) for name, one in pairs)
    for one in sent:
        engine.redaction.check(VALUES.encode(one.payload, f"{one.kind} {one.name!r}"), one.name, one.kind)
    return Plan(workflow, args, kwargs, sent, each_life)


def _answer(name: Any, given: Any) -> Answer:
    if isinstance(given, Complete):
        return Answer(name if name == "" else _checked_name(name), given.value, CALLBACK)
    if isinstance(given, Ask):
        return Answer(_checked_name(name), given.payload, QUESTION)
    return Answer(_checked_name(name), given)


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
            raise DefinitionError(f"files= names {path}, which does not exist; name files that can be copied")
    return Setting(set_up, paths, life_seconds)
