"""The workflows of a store: who knows which version, how their runs and steps fare, and what fails most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import KeepstepError, RunNotFound
from ..model import FINISHED, Outcome, Run, RunQuery, Status, WorkerInfo
from ..model.agent import agent_of
from ..model.checkpoint import ENDS_STEP, LEAVES_STEP_OPEN
from ..model.keepers import is_reserved
from ..ports import instant
from ..stores.encrypted import below
from .counts import MOST as MOST_COUNTED
from .counts import Count, counts_by_status
from .plain import iso

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..ports import Store
    from ..workflows.definition import Workflow

#: Hours over which a rate is told at least; one of a few seconds says nothing.
SHORTEST_HOURS = 0.05
#: Newest runs among which workflows are looked for that no code and no worker knows.
MOST_LOOKED_AT = 500
#: Newest finished runs that rates and durations are made of.
MOST_RUNS = 200
#: Newest failed runs that common errors are made of; the error of each is read by itself.
MOST_FAILED = 100
#: Newest finished runs whose records are read for the durations of steps, and the records of each.
MOST_RUNS_READ, MOST_RECORDS = 20, 500
#: Common errors and steps that are told.
MOST_ERRORS, MOST_STEPS = 8, 50

_UNFINISHED = frozenset(Status) - FINISHED


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations in seconds: how many there are, half of them at most, nine in ten at most, all but one in a hundred."""

    count: int
    p50: float
    p90: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class VersionInfo:
    """One version of a workflow: whether this process has it, the workers pinned to it, and its unfinished runs."""

    version: str
    here: bool
    workers: tuple[str, ...]
    open: Count


@dataclass(frozen=True, slots=True)
class WorkflowInfo:
    """A workflow: its version here, if this process knows it, the living workers that do, and its runs by status."""

    name: str
    version: str | None
    workers: tuple[str, ...]
    counts: Mapping[Status, Count]

    @property
    def open(self) -> Count:
        """The runs that have not ended."""
        found = [self.counts[status] for status in _UNFINISHED if status in self.counts]
        return Count(sum(one.number for one in found), any(one.more for one in found))


@dataclass(frozen=True, slots=True)
class CommonError:
    """Failures with one error: its type and message, how many runs failed so, and the newest of them."""

    type: str
    message: str
    count: int
    run: str
    at: datetime


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The attempts of one step: how many succeeded and failed, and how long they took."""

    name: str
    done: int
    failed: int
    durations: Durations


@dataclass(frozen=True, slots=True)
class WorkflowFacts:
    """Everything about one workflow. Figures of the newest runs come with the number of these runs."""

    info: WorkflowInfo
    versions: tuple[VersionInfo, ...]
    finished: int
    finished_since: datetime | None
    per_hour: float | None
    durations: Durations | None
    succeeded: float | None
    errors: tuple[CommonError, ...]
    failures: int
    steps: tuple[StepInfo, ...]
    runs_read: int
    records_cut: bool


async def workflows(engine: Engine) -> list[WorkflowInfo]:
    """Return the workflows that this process or a living worker knows, or that new runs have, by name."""
    known, there = await _known(engine)
    page = await engine.call(engine.store.list_runs, RunQuery(limit=MOST_LOOKED_AT))
    seen = {run.workflow for run in page.runs if not is_reserved(run.workflow) and agent_of(run.workflow) is None}
    names = sorted({*known, *there, *seen})
    return [await _info(engine, name, known, there) for name in names]


async def workflow_facts(engine: Engine, name: str) -> WorkflowFacts:
    """Return the facts of one workflow; raise `RunNotFound` if nobody knows it and no run has it."""
    known, there = await _known(engine)
    info = await _info(engine, name, known, there)
    if name not in known and name not in there and not any(one.number for one in info.counts.values()):
        names = ", ".join(sorted({*known, *there})) or "none"
        raise RunNotFound(f"no workflow {name!r}: no code here, no worker and no run has it; there are: {names}")
    workers = await engine.call(engine.store.list_workers)
    return await engine.call(_facts, engine.store, info, workers)


def startable(engine: Engine) -> dict[str, Workflow[..., Any]]:
    """Return the workflows of this process that a person may start, by name."""
    return {name: one for name, one in engine.workflows.items() if not one.is_built_in and one.agent is None}


async def _known(engine: Engine) -> tuple[dict[str, Workflow[..., Any]], dict[str, list[str]]]:
    known = startable(engine)
    there: dict[str, list[str]] = {}
    for worker in await engine.workers():
        for name in worker.known if worker.alive else ():
            if not is_reserved(name) and agent_of(name) is None:
                there.setdefault(name, []).append(worker.id)
    return known, there


async def _info(
    engine: Engine, name: str, known: Mapping[str, Workflow[..., Any]], there: Mapping[str, Sequence[str]]
) -> WorkflowInfo:
    version = known[name].version if name in known else None
    counts = await counts_by_status(engine, RunQuery(workflow=name))
    return WorkflowInfo(name, version, tuple(there.get(name, ())), counts)


def _facts(store: Store, info: WorkflowInfo, workers: Sequence[WorkerInfo]) -> WorkflowFacts:
    name = info.name
    finished = store.list_runs(RunQuery(workflow=name, status=FINISHED, limit=MOST_RUNS)).runs
    query = RunQuery(workflow=name, status=frozenset({Status.FAILED, Status.SET_ASIDE}), limit=MOST_FAILED)
    failed = _with_errors(store, store.list_runs(query).runs)
    ended = sorted(_end(run) for run in finished)
    hours = (instant(store.clock.now()) - ended[0]).total_seconds() / 3600 if ended else 0.0
    times = [_seconds(run.created_at, _end(run)) for run in finished if run.status is Status.COMPLETED]
    judged = [run for run in finished if run.status in (Status.COMPLETED, Status.FAILED)]
    steps, is_cut = _steps(store, finished[:MOST_RUNS_READ])
    return WorkflowFacts(
        info=info,
        versions=_versions(store, info, workers),
        finished=len(finished),
        finished_since=ended[0] if ended else None,
        per_hour=len(ended) / hours if hours >= SHORTEST_HOURS else None,
        durations=durations_of(times),
        succeeded=sum(run.status is Status.COMPLETED for run in judged) / len(judged) if judged else None,
        errors=tuple(common_errors(failed)),
        failures=len(failed),
        steps=steps,
        runs_read=len(finished[:MOST_RUNS_READ]),
        records_cut=is_cut,
    )


def _with_errors(store: Store, runs: Iterable[Run]) -> list[Run]:
    """Return runs as stored, with their errors, which a list leaves out."""
    found = []
    for run in runs:
        try:
            whole = store.get_run(run.id)
        except KeepstepError:  # it is damaged, or its key is missing
            whole = None
        found.append(run if whole is None else whole)
    return found


def _end(run: Run) -> datetime:
    """Return when a finished run ended: its last change."""
    return run.updated_at or run.created_at


def _seconds(first: datetime, last: datetime) -> float:
    return max(0.0, (last - first).total_seconds())


def durations_of(seconds: Iterable[float]) -> Durations | None:
    """Return how long things took; None if there were none."""
    found = sorted(seconds)
    if not found:
        return None

    def at(share: float) -> float:
        return found[min(len(found) - 1, int(share * len(found)))]

    return Durations(len(found), at(0.5), at(0.9), at(0.99), found[-1])


def _versions(store: Store, info: WorkflowInfo, workers: Sequence[WorkerInfo]) -> tuple[VersionInfo, ...]:
    page = store.list_runs(RunQuery(workflow=info.name, status=_UNFINISHED, limit=MOST_COUNTED))
    runs = Counter(run.version for run in page.runs)
    pinned: dict[str, list[str]] = {}
    for worker in workers:
        if worker.alive and info.name in worker.pins:
            pinned.setdefault(worker.pins[info.name], []).append(worker.id)
    here = {info.version} if info.version is not None else set()
    return tuple(
        VersionInfo(
            one, one in here, tuple(pinned.get(one, ())), Count(runs[one], page.next is not None and one in runs)
        )
        for one in sorted({*runs, *pinned, *here}, key=_in_order, reverse=True)
    )


def _in_order(version: str) -> list[tuple[int, str]]:
    """Return a key that sorts the numbers in versions as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", version)]


_NUMBERS = re.compile(r"\d+")


def common_errors(runs: Iterable[Run]) -> list[CommonError]:
    """Return the errors of failed runs, the most common first; messages that differ in numbers only are one."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.error is not None:
            line = run.error.message.strip().partition("\n")[0][:200]
            found.setdefault((run.error.name, _NUMBERS.sub("#", line)), []).append(run)
    ranked = sorted(found.items(), key=lambda one: (-len(one[1]), one[0]))[:MOST_ERRORS]
    errors = []
    for (name, _), ones in ranked:
        newest = max(ones, key=_end)
        message = "" if newest.error is None else newest.error.message.strip().partition("\n")[0][:200]
        errors.append(CommonError(name, message, len(ones), newest.id, _end(newest)))
    return errors


class _Line(msgspec.Struct, gc=False):
    """The parts of a record that durations need. They stay readable in an encrypted run."""

    step: str = ""
    outcome: str = Outcome.SUCCESS.value
    started_at: datetime | None = None
    finished_at: datetime | None = None


_decode = msgspec.json.Decoder(_Line).decode
_ATTEMPTS = tuple(sorted(ENDS_STEP | LEAVES_STEP_OPEN))


def _steps(store: Store, runs: Sequence[Run]) -> tuple[tuple[StepInfo, ...], bool]:
    """Return how the steps of some runs fared, those with the most time first, and whether records were left out."""
    taken: dict[str, list[float]] = {}
    failed: Counter[str] = Counter()
    is_cut = False
    for run in runs:
        rows = below(store).list_checkpoints(run.id, 0, MOST_RECORDS, _ATTEMPTS)
        is_cut |= len(rows) == MOST_RECORDS
        for row in rows:
            try:
                line = _decode(bytes(row.record))
            except msgspec.MsgspecError:
                continue  # `keepstep doctor` reports damaged records
            name = line.step.rpartition("/")[2].partition("#")[0]
            if not name or name.startswith("ks:") or line.started_at is None or line.finished_at is None:
                continue
            taken.setdefault(name, []).append(_seconds(line.started_at, line.finished_at))
            failed[name] += line.outcome != Outcome.SUCCESS.value
    ranked = sorted(taken.items(), key=lambda one: -sum(one[1]))[:MOST_STEPS]
    found = [(name, durations_of(times), len(times) - failed[name]) for name, times in ranked]
    return tuple(StepInfo(name, done, failed[name], made) for name, made, done in found if made is not None), is_cut


# -- plain data --------------------------------------------------------------------------------------------------------


def workflow_data(info: WorkflowInfo) -> dict[str, Any]:
    """Return a workflow for a program."""
    return {
        "name": info.name,
        "version": info.version,
        "workers": list(info.workers),
        "runs": {status.value: _count_data(count) for status, count in info.counts.items()},
    }


def _count_data(count: Count) -> dict[str, Any]:
    return {"count": count.number, "more": count.more}


def _durations_data(found: Durations | None) -> dict[str, Any] | None:
    return None if found is None else {name: getattr(found, name) for name in ("count", "p50", "p90", "p99", "longest")}


def facts_data(facts: WorkflowFacts) -> dict[str, Any]:
    """Return everything about one workflow for a program; all durations are seconds."""
    return {
        **workflow_data(facts.info),
        "versions": [
            {"version": one.version, "here": one.here, "workers": list(one.workers), "open": _count_data(one.open)}
            for one in facts.versions
        ],
        "finished": facts.finished,
        "finished_since": iso(facts.finished_since),
        "per_hour": facts.per_hour,
        "succeeded": facts.succeeded,
        "durations": _durations_data(facts.durations),
        "failures": facts.failures,
        "errors": [
            {"type": one.type, "message": one.message, "count": one.count, "run": one.run, "at": iso(one.at)}
            for one in facts.errors
        ],
        "steps": [
            {"step": one.name, "done": one.done, "failed": one.failed, **(_durations_data(one.durations) or {})}
            for one in facts.steps
        ],
        "runs_read": facts.runs_read,
    }
