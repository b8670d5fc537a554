"""Makes a failing plan shorter: parts of it are deleted as long as the same promise stays broken."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from .dags import smaller_dag
from .graphs import smaller_course
from .plans import Plan
from .programs import STATEMENTS

#: A plan is played at most this often while it is made shorter.
TRIES = 400


def shrink(plan: Plan, broken: list[str], play: Callable[[Plan], Any], tries: int = TRIES) -> Plan:
    """The shortest plan found that breaks the same promise."""
    promise = _promise(broken)
    improved = True
    while improved and tries > 0:
        improved = False
        for smaller in _smaller(plan):
            tries -= 1
            if tries < 0:
                break
            if _promise(play(smaller).broken) == promise:
                plan, improved = smaller, True
                break
    return plan


def _promise(broken: list[str]) -> str:
    return broken[0].partition(":")[0] if broken else ""


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one thing less, the larger cuts first."""
    for key in ("runs", "events"):
        for index in range(len(plan[key])):
            if key == "runs" and len(plan["runs"]) == 1:
                continue
            yield _with(plan, **{key: plan[key][:index] + plan[key][index + 1 :]})
    for key in ("poison", "schedule", "queue", "service"):
        if key in plan:
            yield {name: value for name, value in plan.items() if name != key}
    jobs = plan.get("queue", {}).get("jobs", [])
    for index in range(len(jobs) if len(jobs) > 1 else 0):
        yield _with(plan, queue={**plan["queue"], "jobs": jobs[:index] + jobs[index + 1 :]})
    calls = plan.get("service", {}).get("calls", [])
    for index in range(len(calls) if len(calls) > 1 else 0):
        yield _with(plan, service={**plan["service"], "calls": calls[:index] + calls[index + 1 :]})
    yield from _smaller_runs(plan)
    if plan["workers"] > 1:
        last = plan["workers"] - 1
        events = [event for event in plan["events"] if event["slot"] != last]
        runs = [{**run, "by": min(run["by"], last - 1)} for run in plan["runs"]]
        yield _with(plan, workers=last, events=events, runs=runs)
    if plan["latency"]:
        yield _with(plan, latency=0.0)


def _smaller_runs(plan: Plan) -> Iterator[Plan]:
    for index, run in enumerate(plan["runs"]):
        for parts in _smaller_parts_of(run):
            runs = copy.deepcopy(plan["runs"])
            runs[index]["parts"] = parts
            yield _with(plan, runs=runs)
        for option in ("deadline", "delay"):
            if option in run:
                runs = copy.deepcopy(plan["runs"])
                del runs[index][option]
                yield _with(plan, runs=runs)


def _with(plan: Plan, **changes: Any) -> Plan:
    return {**plan, **changes}


def _smaller_parts_of(run: dict[str, Any]) -> Iterator[list[Any]]:
    if run["workflow"] in ("graph", "dag"):
        smaller = smaller_course if run["workflow"] == "graph" else smaller_dag
        return ([part] for part in smaller(run["parts"][0]))
    return _smaller_parts(run["parts"])


def _smaller_parts(parts: list[Any]) -> Iterator[list[Any]]:
    for index, part in enumerate(parts):
        if len(parts) > 1:
            yield parts[:index] + parts[index + 1 :]
        for smaller in _smaller_lists(part):
            yield [*parts[:index], smaller, *parts[index + 1 :]]


def _smaller_lists(statements: list[Any]) -> Iterator[list[Any]]:
    for index, statement in enumerate(statements):
        if len(statements) > 1:
            yield statements[:index] + statements[index + 1 :]
        for smaller in _smaller_statement(statement):
            yield [*statements[:index], smaller, *statements[index + 1 :]]


def _smaller_statement(statement: Any) -> Iterator[Any]:
    """One of the statements inside instead of the whole, or the whole with one of them smaller."""
    for index, part in enumerate(statement):
        if _is_statement(part):
            yield part
            for smaller in _smaller_statement(part):
                yield [*statement[:index], smaller, *statement[index + 1 :]]
        elif isinstance(part, list):
            yield from part
            for smaller in _smaller_lists(part):
                yield [*statement[:index], smaller, *statement[index + 1 :]]


def _is_statement(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and isinstance(part[0], str) and part[0] in STATEMENTS
