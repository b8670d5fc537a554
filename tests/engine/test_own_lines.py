"""Errors show the user's own lines, say how to go on, and keep the class of a registered exception."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass

import pytest

import keepstep as ks
from keepstep.cli import settings
from keepstep.engine import heartbeat
from keepstep.engine.engine import DEFAULT_URL
from keepstep.errors import ExecutionError
from keepstep.history import go_on
from keepstep.values import VALUES
from tests.engine.world import until_at_last_wait


@ks.step
async def parse(data: dict) -> int:
    return data["missing"]["deeper"]


@ks.workflow
async def reading() -> int:
    return await parse({})


async def failure_of(engine, workflow, *args, error=ks.RunFailed, **options):
    run = await engine.start(workflow, *args, **options)
    with pytest.raises(error) as caught:
        await run.result()
    return caught.value


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", []))


# -- frames and the command --------------------------------------------------------------------------------------------


async def test_run_failed_shows_the_lines_of_workflow_and_step(world):
    error = await failure_of(await world.started(), reading)
    lines = re.findall(r'File "(.+)", line \d+, in (\w+)\n    (.+)', notes_of(error))
    assert lines == [
        (__file__, "reading", "return await parse({})"),
        (__file__, "parse", 'return data["missing"]["deeper"]'),
    ]
    assert [frame.function for frame in error.error.frames] == ["reading", "parse"]


async def test_step_failed_shows_the_line_of_its_body(world):
    seen = []

    @ks.workflow
    async def catching():
        try:
            await parse({})
        except ks.StepFailed as failure:
            seen.append((failure.error.frames[-1].source, notes_of(failure).splitlines()[-1].strip()))

    await (await (await world.started()).start(catching)).result()
    assert set(seen) == {('return data["missing"]["deeper"]',) * 2}


@ks.step
def is_slow() -> int:
    raise TimeoutError("slow")


@ks.workflow
async def asking() -> int:
    return await is_slow()


async def test_a_timeout_error_of_a_plain_step_shows_its_line(world):
    error = await failure_of(await world.started(), asking)
    assert [frame.function for frame in error.error.frames] == ["asking", "is_slow"]


async def test_run_failed_names_the_command_that_goes_on(world, monkeypatch):
    engine = await world.started()
    error = await failure_of(engine, reading, run_id="the run")
    if engine.url.startswith("memory:"):
        assert "keepstep retry" not in notes_of(error)
        return
    monkeypatch.chdir(world.path.parent)
    error = await failure_of(engine, reading, run_id="the run")
    assert f"keepstep retry 'the run' --store {world.path.name}" in notes_of(error)
    monkeypatch.setenv("KEEPSTEP_STORE", world.path.name)
    error = await failure_of(engine, reading, run_id="the run")
    assert notes_of(error).endswith("keepstep retry 'the run'")


def test_default_store_is_the_same_everywhere():
    assert DEFAULT_URL == go_on.DEFAULT_STORE == settings.DEFAULT_STORE


@pytest.mark.one_store
async def test_secret_in_a_line_is_redacted(world):
    @ks.step
    async def connect():
        raise ValueError("no")  # as in postgres://me:hunter2@host/db

    @ks.workflow
    async def connecting():
        await connect()

    error = await failure_of(await world.started(), connecting)
    assert "me:[redacted]@host" in notes_of(error)
    assert "hunter2" not in notes_of(error) + error.error.traceback


# -- no stacked prefixes -----------------------------------------------------------------------------------------------


async def test_message_names_each_thing_once(world):
    graph = ks.Graph("lone graph")

    @graph.step
    async def only(state):
        raise ValueError("no")

    graph.entry("only")
    graph.exit("only")
    dag = ks.Dag("lone dag")

    @dag.step
    async def single():
        raise ValueError("no")

    @ks.workflow
    async def parent():
        return await (await ks.start(reading))

    engine = await world.started()
    step = "failed after 1 attempt"
    message = str(await failure_of(engine, reading, run_id="r"))
    assert message == f"run 'r' failed: step 'parse#1' {step}: KeyError: 'missing'"
    message = str(await failure_of(engine, graph, run_id="g", error=ExecutionError))
    assert message == f"run 'g' failed: step 'only#1' {step}: ValueError: no (path: only)"
    message = str(await failure_of(engine, dag, run_id="d", error=ExecutionError))
    assert message == f"run 'd' failed: step 'single#1' {step}: ValueError: no"
    message = str(await failure_of(engine, parent, run_id="p"))
    pattern = rf"run 'p' failed: child run '\S+' failed: step 'parse#1' {step}: KeyError: 'missing'"
    assert re.fullmatch(pattern, message)


async def test_run_of_a_parent_shows_the_lines_of_its_child(world):
    @ks.workflow
    async def parent():
        return await (await ks.start(reading))

    error = await failure_of(await world.started(), parent)
    assert [frame.function for frame in error.error.frames] == ["parent", "reading", "parse"]


async def test_failed_graph_shows_the_line_of_its_step(world):
    graph = ks.Graph("graph with a line")

    @graph.step
    async def only(state):
        raise ValueError("here")

    graph.entry("only")
    graph.exit("only")
    error = await failure_of(await world.started(), graph, error=ExecutionError)
    assert 'raise ValueError("here")' in notes_of(error)
    assert 'raise ValueError("here")' in notes_of(error.__cause__)


# -- registered exceptions ---------------------------------------------------------------------------------------------


@ks.register
class PaymentRefused(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"refused: {why}")
        self.code = code


@ks.register
class LineDown(ConnectionError):
    """An error of the system, with a number."""


@ks.register
@dataclass
class OutOfStock(Exception):
    item: str
    left: tuple[int, ...] = ()


class Unknown(Exception):
    """Nobody has registered it."""


@ks.step
async def charge() -> None:
    try:
        try:
            raise Unknown("deep")
        except Unknown as deep:
            raise LineDown(5, "cut") from deep
    except LineDown as down:
        raise PaymentRefused(402, "no money") from down


@pytest.mark.on_postgres
async def test_registered_exception_comes_back_as_itself_with_its_causes(world):
    seen, notes = [], set()

    @ks.workflow
    async def paying():
        try:
            await charge()
        except PaymentRefused as refused:
            down = refused.__cause__
            seen.append((str(refused), refused.code, type(down), down.errno, repr(down.__cause__)))
            notes.add(notes_of(refused))
        await ks.wait_for("go")
        return "caught"

    engine = await world.started(linger_seconds=60)
    await engine.start(paying, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    await run.signal("go")
    assert await run.result() == "caught"
    assert len(seen) >= 2
    assert set(seen) == {("refused: no money", 402, LineDown, 5, f"StepFailed('{__name__}.Unknown: deep')")}
    assert len(notes) == 1
    assert "step 'charge#1' failed after 1 attempt" in min(notes)
    assert "raise PaymentRefused(402" in min(notes)


async def test_registered_exception_is_the_cause_of_the_failed_run(world):
    @ks.workflow
    async def paying():
        await charge()

    @ks.workflow
    async def refusing():
        raise OutOfStock("shoe", (1, 2))

    @ks.workflow
    async def parent():
        try:
            await (await ks.start(refusing))
        except ks.StepFailed as failure:
            raise failure.__cause__ from None

    engine = await world.started()
    error = await failure_of(engine, paying)
    assert isinstance(error.__cause__, PaymentRefused)
    assert str(error).endswith("PaymentRefused: refused: no money")
    for workflow in (refusing, parent):
        error = await failure_of(engine, workflow)
        assert (error.__cause__.item, error.__cause__.left) == ("shoe", (1, 2))


async def test_retry_repeats_the_step_that_raised_a_registered_exception(world, effects):
    @ks.step
    async def flaky():
        effects.append("flaky")
        if len(effects) == 1:
            raise OutOfStock("shoe")
        return "bought"

    @ks.workflow
    async def buying():
        return await flaky()

    engine = await world.started()
    run = await engine.start(buying)
    with pytest.raises(ks.RunFailed):
        await run.result()
    await run.retry()
    assert await run.result() == "bought"
    assert effects == ["flaky", "flaky"]


async def test_unregistered_exception_stays_step_failed(world):
    @ks.step
    async def unknown():
        raise Unknown("no")

    @ks.workflow
    async def asking():
        try:
            await unknown()
        except ks.StepFailed as failure:
            return failure.error.type

    assert await (await (await world.started()).start(asking)).result() == f"{__name__}.Unknown"


async def test_registered_exception_that_cannot_be_stored_is_step_failed(world, logged):
    @ks.step
    async def broken():
        raise OutOfStock(object())

    @ks.workflow
    async def asking():
        try:
            await broken()
        except ks.StepFailed as failure:
            return failure.error.type

    assert await (await (await world.started()).start(asking)).result() == f"{__name__}.OutOfStock"
    assert any("cannot be stored, so it comes back as an unregistered one" in line for line in logged())


async def test_secret_in_a_registered_exception_is_redacted(world):
    @ks.step
    async def connect():
        raise OutOfStock("postgres://me:hunter2@host/db")

    @ks.workflow
    async def connecting():
        try:
            await connect()
        except OutOfStock as error:
            return error.item.split(":")

    run = await (await world.started()).start(connecting)
    assert await run.result() == ["postgres", "//me", "[redacted]@host/db"]
    assert "hunter2" not in repr(await run.checkpoints())


async def test_failed_dag_names_the_step_of_a_registered_exception(world):
    dag = ks.Dag("refusing dag")

    @dag.step
    async def buy():
        raise OutOfStock("shoe")

    error = await failure_of(await world.started(), dag, run_id="d", error=ExecutionError)
    assert str(error).startswith("run 'd' failed: step 'buy' failed: OutOfStock: ")
    assert isinstance(error.__cause__, OutOfStock)


async def test_class_that_is_no_longer_registered_sets_the_run_aside(world):
    @ks.workflow
    async def paying():
        with contextlib.suppress(PaymentRefused):
            await charge()
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(paying, run_id="r")
    await until_at_last_wait(engine, "r")
    known = VALUES.known
    registered = known.registered.by_name.pop("PaymentRefused")
    known.is_learnt = False
    type(known).changes += 1
    try:
        engine = await world.crash_and_recover(engine, linger_seconds=60)
        with pytest.raises(ks.RunSetAside, match=r"recorded value of charge#1 cannot be restored"):
            await (await engine.get("r")).result(timeout=30)
    finally:
        known.registered.by_name["PaymentRefused"] = registered
        known.is_learnt = False
        type(known).changes += 1


# -- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.live_only
async def test_failed_attempts_are_logged_with_the_line_and_the_next_attempt(world, logged):
    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0.01, jitter=0))
    async def flaky():
        raise ValueError("no")

    @ks.workflow
    async def trying():
        await flaky()

    await failure_of(await world.started(), trying, run_id="r")
    told = [line for line in logged() if "attempt" in line and "flaky#1" in line]
    where = r"\(test_own_lines\.py:\d+ in flaky\)"
    assert len(told) == 2
    assert re.search(rf"run r: attempt 1 of step flaky#1 failed: ValueError: no {where}; .* begins in 0\.01 s", told[0])
    assert re.search(rf"run r: attempt 2 of step flaky#1 failed: ValueError: no {where}; no attempt is left", told[1])


@pytest.mark.live_only
@pytest.mark.one_store
async def test_message_of_a_failed_attempt_cannot_imitate_another_line(world, logged):
    @ks.step
    async def forging():
        raise ValueError("no\n2026-01-01 run other: all is well\x1b[31m")

    @ks.workflow
    async def trusting():
        await forging()

    await failure_of(await world.started(), trusting, run_id="r")
    [told] = [line for line in logged() if "attempt 1 of step forging#1" in line]
    assert told.isprintable()
    assert "ValueError: no 2026-01-01 run other: all is well\\x1b[31m" in told


@pytest.mark.live_only
@pytest.mark.one_store
async def test_observer_that_logs_reports_a_failed_attempt_alone(world, logged):
    await failure_of(await world.started(observers="log"), reading)
    assert sum("parse#1" in line and "KeyError" in line and "step.failed" not in line for line in logged()) <= 1
    assert not any("attempt 1 of step parse#1 failed" in line for line in logged())


@pytest.mark.live_only
@pytest.mark.one_store
@pytest.mark.parametrize("inside", ["step", "workflow"])
async def test_code_that_blocks_the_loop_is_named_once(world, logged, monkeypatch, inside):
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "BLOCKED_SECONDS", 0.3)

    @ks.step
    async def busy():
        time.sleep(1.0 if inside == "step" else 0)  # noqa: ASYNC251 - the mistake that is to be named

    @ks.workflow
    async def blocking():
        await busy()
        time.sleep(1.0 if inside == "workflow" else 0)  # noqa: ASYNC251 - the mistake that is to be named

    engine = await world.started()
    await (await engine.start(blocking, run_id="r")).result()
    told = [line for line in logged() if "has blocked the event loop" in line]
    who = "step busy#1 of run r" if inside == "step" else "workflow code of run r"
    function = "busy" if inside == "step" else "blocking"
    assert len(told) == 1
    assert re.search(
        rf"{who} has blocked the event loop for 0\.\d s, at test_own_lines\.py:\d+ in {function};", told[0]
    )


@pytest.mark.live_only
@pytest.mark.one_store
async def test_plain_def_step_does_not_block_the_loop(world, logged, monkeypatch):
    monkeypatch.setattr(heartbeat, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "BLOCKED_SECONDS", 0.3)

    @ks.step
    def slow():
        time.sleep(0.8)

    @ks.workflow
    async def waiting():
        await slow()

    await (await (await world.started()).start(waiting)).result()
    assert not any("has blocked the event loop" in line for line in logged())
