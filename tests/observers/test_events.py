"""Every event that is emitted is listed, and every listed event is emitted."""

import ast
import asyncio
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import keepstep as ks
from keepstep.engine.events import Events
from keepstep.model import Event, Kind, Status
from keepstep.model.event import EVENTS, FIELDS, STATUS_EVENTS, EventName, event_of_record, problem_with
from keepstep.observers import Observers

SRC = Path(ks.__file__).parent


@cache
def emitted_by_name():
    """The names that the code gives to events where it emits them."""
    found = set()
    for path in SRC.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not re.search(r"\b(events\.observe|Event|event)\(", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = ast.unparse(node.func)
                if called.endswith("events.observe") or called in ("Event", "event"):
                    found.add(node.args[0].value)
    return frozenset(found)


def test_names_are_a_thing_and_what_became_of_it():
    assert [name for name in EVENTS if not re.fullmatch(r"[a-z]+\.[a-z]+(_[a-z]+)*", name)] == []


def test_the_type_of_names_and_the_list_agree():
    names = get_args(EventName)
    assert set(names) == set(EVENTS)
    assert list(names) == sorted(names)


def test_every_field_is_described_and_used():
    assert {one for spec in EVENTS.values() for one in spec.data} == set(FIELDS)


def test_every_kind_and_status_has_an_event():
    assert {event_of_record(kind.value, None) for kind in Kind} <= set(EVENTS)
    assert set(STATUS_EVENTS) == set(Status)
    assert set(STATUS_EVENTS.values()) <= set(EVENTS)


def test_start_and_result_of_a_child_are_two_events():
    assert event_of_record("child", {"child": "c"}) == "child.started"
    assert event_of_record("child", {"signal": 1}) == event_of_record("child", None) == "child.ended"


def test_events_are_emitted_by_listed_names_only():
    found = emitted_by_name()
    assert {"run.created", "step.started", "token.emitted"} <= found
    assert found <= set(EVENTS)


def test_every_listed_event_is_emitted():
    found = {*emitted_by_name(), *STATUS_EVENTS.values(), event_of_record("child", {"child": "c"})}
    found |= {event_of_record(kind.value, None) for kind in Kind}
    for prefix, module in (("schedule.", "kernel/schedule.py"), ("breaker.", "engine/shares.py")):
        text = (Path(ks.__file__).parent / module).read_text(encoding="utf-8")
        found |= {name for name in EVENTS if name.startswith(prefix) and f'"{name}"' in text}
    assert set(EVENTS) - found == set()


@pytest.mark.parametrize(
    "name, data, problem",
    [
        ("run.set aside", {}, "no event is named 'run.set aside'"),
        ("step.blocked", {"why": "", "because": 1}, "step.blocked has no data named because"),
    ],
)
def test_an_unlisted_event_is_refused(name, data, problem):
    told = Event(name, "r", datetime(2026, 1, 1, tzinfo=UTC), data=data)
    assert problem_with(told) == problem
    with pytest.raises(LookupError, match=problem):
        Events(None, Observers()).emit(told)


@ks.step
async def counted(number):
    ks.emit("first")
    ks.emit("second")
    ks.publish("number", number)
    return number


@ks.step(retry=ks.Retry(attempts=1))
async def fails():
    raise ValueError("no")


@ks.workflow(name="events-child")
async def child():
    return 1


@ks.workflow(name="events-parent")
async def parent():
    await ks.checkpoint()
    await ks.sleep(0)
    await ks.race(counted(1), counted(2))
    if ks.patched("newer"):
        await (await ks.start(child))
    try:
        await fails()
    except ks.StepFailed:
        ks.emit("failed")
    return await ks.wait_for("go")


async def observed_and_watched():
    seen = []
    async with ks.open("memory:", observers=seen.append) as engine:
        run = await engine.start(parent)
        await run.signal("go", 1)
        assert await run.result(30) == 1
        return seen, [one async for one in run.watch()]


def test_observed_and_watched_events_are_listed():
    seen, watched = asyncio.run(observed_and_watched())
    assert [problem_with(one) for one in (*seen, *watched) if problem_with(one)] == []
    both = {"step.completed", "step.failed", "child.started", "child.ended", "timer.fired", "barrier.passed"}
    both |= {"signal.received", "decision.recorded", "patch.recorded", "value.published", "token.emitted"}
    assert both - {one.name for one in seen} == set()
    assert both - {one.name for one in watched} == set()
    assert watched[-1].name == "run.finished"
    tokens = [one.data["value"] for one in watched if one.name == "token.emitted"]
    assert tokens[-1] == "failed"
    assert {"first", "second"} <= set(tokens)
