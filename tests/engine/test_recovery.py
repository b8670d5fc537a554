"""Recovery handlers: asked after a worker died or by a person, recorded, and carried out by the verb of that name."""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep import errors
from keepstep.model import Kind
from tests.engine.world import until_status

pytestmark = pytest.mark.on_postgres


class Order:
    """A workflow of three steps whose second one hangs in the first life, and what its bodies did."""

    def __init__(self, recovery=None, **options):
        self.done = []
        self.hangs = asyncio.Event()
        self.hung = 0

        async def refund(result, item):
            self.done.append(f"refund {result}")

        @ks.step(undo=refund)
        async def charge(item):
            self.done.append("charge")
            return f"paid {item}"

        @ks.step
        async def pack(item):
            self.done.append("pack")
            if self.hung < 1:
                self.hung += 1
                self.hangs.set()
                await asyncio.Event().wait()
            return f"packed {item}"

        @ks.step
        async def ship(parcel):
            self.done.append("ship")
            return f"sent {parcel}"

        @ks.workflow(recovery=recovery, **options)
        async def order(item):
            paid = await charge(item)
            parcel = await pack(item)
            return paid, await ship(parcel)

        self.workflow = order


async def interrupted(world, order, **options):
    """An engine that has just found a run whose worker died in its second step, and the run."""
    engine = await world.started(**options)
    await engine.start(order.workflow, "pen", run_id="r")
    await order.hangs.wait()
    engine = await world.crash_and_recover(engine, **options)
    return engine, await engine.get("r")


RESULT = ("paid pen", "sent packed pen")


async def answers(run):
    return [one.data.get("handler") for one in await run.checkpoints() if one.kind is Kind.RECOVERED]


async def test_run_continues_without_a_handler(world):
    order = Order()
    engine, run = await interrupted(world, order)
    assert await run.result(30) == RESULT
    assert order.done == ["charge", "pack", "pack", "ship"]
    assert await answers(run) == [None]
    await engine.close()


@pytest.mark.parametrize(
    "handler, done",
    [
        ("continue", ["charge", "pack", "pack", "ship"]),
        ("retry step", ["charge", "pack", "pack", "ship"]),
        ("restart", ["charge", "pack", "charge", "pack", "ship"]),
    ],
)
async def test_named_handler_decides_how_the_run_goes_on(world, handler, done):
    order = Order(recovery=handler)
    engine, run = await interrupted(world, order)
    assert await run.result(30) == RESULT
    assert order.done == done
    assert await answers(run) == [handler]
    await engine.close()


async def test_skipped_step_gets_the_value_and_its_body_does_not_run(world):
    order = Order(recovery=ks.Recovery("skip step", value="a parcel"))
    engine, run = await interrupted(world, order)
    assert await run.result(30) == ("paid pen", "sent a parcel")
    assert order.done == ["charge", "pack", "ship"]
    await engine.close()


async def test_undo_cancels_the_run_and_undoes_its_steps(world):
    order = Order(recovery="undo")
    engine, run = await interrupted(world, order)
    with pytest.raises(ks.RunCancelled):
        await run.result(30)
    assert order.done == ["charge", "pack", "refund paid pen"]
    await engine.close()


async def test_set_aside_leaves_the_run_to_a_person(world):
    order = Order(recovery=ks.Recovery("set aside", reason="ask the shop"))
    engine, run = await interrupted(world, order)
    with pytest.raises(ks.RunSetAside, match="ask the shop") as refused:
        await run.result(30)
    assert isinstance(refused.value.__cause__, errors.HandlerFailed)
    assert order.done == ["charge", "pack"]
    await run.retry()
    assert await run.result(30) == RESULT
    await engine.close()


async def test_reason_cannot_control_the_terminal_through_the_log(world, caplog):
    order = Order(recovery=ks.Recovery("set aside", reason="ask\x1b[31m\nrun x is \x00fine"))
    engine, run = await interrupted(world, order)
    await until_status(run, "set aside")
    [line] = [one.getMessage() for one in caplog.records if "is set aside" in one.getMessage()]
    assert line == r"run r is set aside: ask\x1b[31m run x is \x00fine"
    await engine.close()


async def test_function_is_told_about_the_run_and_answers(world):
    told = []

    async def decide(info):
        told.append(info)
        return ks.Recovery("skip step", step=info.next[0], value="by hand")

    order = Order(recovery=decide)
    engine, run = await interrupted(world, order)
    assert await run.result(30) == ("paid pen", "sent by hand")
    [info] = told
    assert (info.run, info.last_success, info.next, info.handler) == ("r", "charge#1", ("pack#1",), "decide")
    assert info.recoverable
    assert info.recoveries == 1
    assert info.taken_from in info.why
    await engine.close()


# -- when a handler is asked -------------------------------------------------------------------------------------------


@pytest.mark.one_store
async def test_no_handler_is_asked_at_a_start_a_wake_up_or_a_hand_back(world):
    asked = []

    @ks.step
    async def one():
        return 1

    @ks.workflow(recovery=asked.append)
    async def waiting():
        await one()
        return await ks.wait_for("go")

    async with world.engine() as engine:
        await until_status(await engine.start(waiting, run_id="r"), "waiting")
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go", 2)
        assert await run.result(30) == 2
    assert asked == []


@pytest.mark.one_store
async def test_suspect_is_asked_though_it_was_handed_back_before(world):
    asked = []

    def decide(info):
        asked.append(info.recoveries)
        return "continue"

    order = Order(recovery=decide)
    engine = await world.started(recovery_limit=5)
    await engine.start(order.workflow, "pen", run_id="r")
    for _ in range(2):
        await order.hangs.wait()
        order.hangs.clear()
        order.hung -= 1
        engine = await world.crash_and_recover(engine, recovery_limit=5)
    await order.hangs.wait()
    assert asked == [1, 2]
    await world.crash(engine)


@pytest.mark.one_store
async def test_answer_is_no_progress_and_the_limit_is_reached(world):
    """A run that kills its worker each time is set aside, whatever its handler answers."""
    order = Order(recovery="continue")
    engine = await world.started(recovery_limit=2)
    await engine.start(order.workflow, "pen", run_id="r")
    for _ in range(2):
        await order.hangs.wait()
        order.hangs.clear()
        order.hung -= 1
        engine = await world.crash_and_recover(engine, recovery_limit=2)
    run = await engine.get("r")
    with pytest.raises(ks.RunSetAside, match="died 2 times") as refused:
        await run.result(30)
    assert isinstance(refused.value.__cause__, errors.ValidationFailed)
    await engine.close()


@pytest.mark.one_store
@pytest.mark.parametrize("handler", ["restart", "retry step"])
async def test_going_back_again_and_again_ends_at_the_limit(world, handler):
    """A restart takes the progress back that would reset the count of recoveries; so do new attempts of a step."""
    lives = asyncio.Queue()

    @ks.step
    async def first():
        return 1

    @ks.step(retry=ks.Retry(attempts=3, backoff="immediate"))
    async def second():
        if ks.attempt() == 1:
            raise ConnectionError
        lives.put_nowait(ks.attempt())
        await asyncio.Event().wait()

    @ks.workflow(recovery=handler)
    async def looping():
        await first()
        return await second()

    engine = await world.started(recovery_limit=2)
    await engine.start(looping, run_id="r")
    for _ in range(3):
        await lives.get()
        engine = await world.crash_and_recover(engine, recovery_limit=2)
    run = await engine.get("r")
    with pytest.raises(ks.RunSetAside, match=f"answered '{handler}' 2 times in a row"):
        await run.result(30)
    await engine.close()


# -- a handler that fails ----------------------------------------------------------------------------------------------


async def raises(info):
    raise LookupError("no idea")


@pytest.mark.one_store
@pytest.mark.parametrize(
    "handler, kind, text",
    [
        ("page ops", errors.HandlerMissing, r"register a function with @ks.recovery_handler\('page ops'\)"),
        (raises, errors.HandlerFailed, "LookupError: no idea"),
        (lambda _: "give up", errors.HandlerFailed, "answered 'give up'; it must answer with one of continue"),
        (lambda _: None, errors.HandlerFailed, "answered None"),
        (lambda _: ks.Recovery("page ops"), errors.HandlerFailed, "must answer with one of"),
        (
            lambda _: ks.Recovery("skip step", step="none"),
            errors.HandlerFailed,
            "steps under way in run 'r': pack#1",
        ),
        (ks.Recovery("skip step", value=object()), errors.HandlerFailed, "value for step 'pack#1'"),
    ],
)
async def test_handler_that_fails_sets_the_run_aside_and_changes_nothing(world, handler, kind, text):
    order = Order(recovery=handler)
    engine, run = await interrupted(world, order)
    with pytest.raises(ks.RunSetAside, match=text) as refused:
        await run.result(30)
    assert type(refused.value.__cause__) is kind
    assert refused.value.__cause__.phase == "handler"
    kinds = [one.kind.value for one in await run.checkpoints()]
    assert kinds == ["run started", "step completed", "error"]
    await run.retry()
    assert await run.result(30) == RESULT
    assert order.done == ["charge", "pack", "pack", "ship"]
    await engine.close()


@pytest.mark.one_store
async def test_handler_that_takes_too_long_is_cancelled_and_the_run_set_aside(world):
    cancelled = asyncio.Event()

    async def thinks(info):
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    order = Order(recovery=ks.Recovery(thinks, timeout=0.2))
    engine, run = await interrupted(world, order)
    with pytest.raises(ks.RunSetAside, match=r"took longer than 0\.2 s in its phase 'handler'"):
        await run.result(30)
    await cancelled.wait()
    assert [one.kind.value for one in await run.checkpoints()][-1] == "error"
    await engine.close()


@pytest.mark.one_store
async def test_crash_in_a_handler_lets_the_next_worker_ask_again(world):
    asked = []
    begun = asyncio.Event()

    async def decide(info):
        asked.append(info.recoveries)
        if len(asked) == 1:
            begun.set()
            await asyncio.Event().wait()
        return "restart"

    order = Order(recovery=decide)
    engine, run = await interrupted(world, order)
    await begun.wait()
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    assert await run.result(30) == RESULT
    assert asked == [1, 2]
    assert order.done == ["charge", "pack", "charge", "pack", "ship"]
    await engine.close()


@pytest.mark.parametrize("wrong", [5, "", [], object()])
def test_recovery_must_be_a_policy_a_name_or_a_function(wrong):
    with pytest.raises(ks.DefinitionError, match="recovery"):
        ks.workflow(name="wrong", recovery=wrong)(raises)


def test_handlers_have_different_names():
    @ks.recovery_handler("the same")
    def one(info):
        return "continue"

    assert ks.recovery_handler("the same")(one) is one
    with pytest.raises(errors.DuplicateName, match="the same"):
        ks.recovery_handler("the same")(raises)
    with pytest.raises(errors.DuplicateName, match="built in"):
        ks.recovery_handler("restart")(raises)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"timeout": "soon"}, {"step": "a"}, {"reason": 5}])
def test_options_of_a_recovery_are_checked(options):
    with pytest.raises(ks.DefinitionError, match="recovery"):
        ks.Recovery("restart", **options)


# -- by a person -------------------------------------------------------------------------------------------------------


async def failed(world, engine):
    """A run that has failed at its second step, and the list of its effects."""
    done = []

    @ks.step
    async def charge():
        done.append("charge")
        return 1

    @ks.step
    async def ship():
        done.append("ship")
        if len(done) < 3:
            raise ks.Permanent("no carrier")
        return "sent"

    @ks.workflow
    async def selling():
        return await charge(), await ship()

    run = await engine.start(selling, run_id="r")
    with pytest.raises(ks.RunFailed):
        await run.result(30)
    return run, done


@pytest.mark.parametrize(
    "handler, value, result, effects",
    [
        ("", None, (1, "sent"), ["charge", "ship", "ship"]),
        ("retry step", None, (1, "sent"), ["charge", "ship", "ship"]),
        ("skip step", "by hand", (1, "by hand"), ["charge", "ship"]),
        ("restart", None, (1, "sent"), ["charge", "ship", "charge", "ship"]),
    ],
)
async def test_person_recovers_a_failed_run(world, handler, value, result, effects):
    async with world.engine() as engine:
        run, done = await failed(world, engine)
        info = await run.recover(handler, value=value, dry_run=True)
        assert (info.recoverable, info.failed, info.last_success) == (True, "ship#1", "charge#1")
        assert info.again == {"skip step": (), "restart": ("charge#1", "ship#1")}.get(handler, ("ship#1",))
        assert await run.status() == "failed"
        await run.recover(handler, value=value, reason="a test")
        assert await run.result(30) == result
        assert done == effects
        [entry] = [one for one in await run.audit() if one.what.startswith("recovery asked for")]
        assert (entry.reason, entry.before, entry.after) == ("a test", "failed", "queued")


async def test_finished_run_is_already_complete_and_stays_as_it_is(world):
    @ks.workflow
    async def quick():
        return 1

    @ks.workflow
    async def endless():
        await ks.wait_for("never")

    async with world.engine() as engine:
        done = await engine.start(quick)
        await done.result(30)
        gone = await engine.start(endless)
        await gone.cancel()
        await until_status(gone, "cancelled")
        for run in (done, gone):
            before = await run.run()
            with pytest.raises(ks.AlreadyFinished, match="already complete"):
                await run.recover("restart")
            info = await run.recover(dry_run=True)
            assert (info.recoverable, "already complete" in info.why) == (False, True)
            assert await run.run() == before


@pytest.mark.live_only
async def test_second_recoverer_is_refused_and_a_dead_one_replaced(world):
    order = Order()
    engine = await world.started()
    run = await engine.start(order.workflow, "pen", run_id="r")
    await order.hangs.wait()
    async with world.engine(worker=False) as other:
        with pytest.raises(ks.RunConflict, match="which is alive"):
            await (await other.get("r")).recover("restart")
    await world.crash(engine)
    async with world.engine(worker=False) as other:
        run = await other.get("r")
        await run.recover("restart", reason="first")
        with pytest.raises(ks.RunConflict, match="is being recovered already"):
            await run.recover("undo")
    async with world.engine() as engine:
        assert await (await engine.get("r")).result(30) == RESULT
    assert order.done == ["charge", "pack", "charge", "pack", "ship"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_request_that_no_worker_took_up_can_be_replaced(world, monkeypatch):
    monkeypatch.setattr("keepstep.history.recovery.RECOVERY_SECONDS", 0.0)
    async with world.engine() as engine:
        await failed(world, engine)
    async with world.engine(worker=False) as engine:
        run = await engine.get("r")
        await run.recover("set aside")
        await run.recover("restart")
    async with world.engine() as engine:
        assert await (await engine.get("r")).result(30) == (1, "sent")


@pytest.mark.one_store
async def test_paused_unbegun_and_unknown_runs_are_refused(world):
    @ks.workflow
    async def endless():
        await ks.wait_for("never")

    async with world.engine() as engine:
        run = await engine.start(endless)
        await run.pause()
        await until_status(run, "paused")
        with pytest.raises(ks.RunConflict, match="resume it instead"):
            await run.recover()
    async with world.engine(worker=False) as engine:
        run = await engine.start(endless)
        with pytest.raises(ks.RunConflict, match="has recorded nothing"):
            await run.recover()
        with pytest.raises(ks.RunNotFound):
            await ks.RunHandle(engine, "nobody").recover()


@pytest.mark.one_store
async def test_validation_lists_all_problems_and_can_be_skipped(world):
    begun = asyncio.Event()

    def looping(version):
        @ks.step
        async def first():
            return 1

        @ks.step
        async def second():
            begun.set()
            if version == "1":
                await asyncio.Event().wait()
            return 2

        @ks.workflow(name="looping", version=version)
        async def made():
            return await first() + await second()

        return made

    old = looping("1")
    engine = await world.started(workflows=[old])
    await engine.start(old, run_id="r")
    await begun.wait()
    await world.crash(engine)
    engine = await world.started(workflows=[looping("2")], recovery_limit=1)
    run = await engine.get("r")
    with pytest.raises(ks.RunSetAside) as refused:
        await run.result(30)
    cause = refused.value.__cause__
    assert isinstance(cause, errors.ValidationFailed)
    assert cause.kind == "RecoveryLimit"
    assert [text.partition("'")[0] for text in cause.problems] == [
        "its worker died once while executing it, without progress (recovery_limit=1)",
        "workflow ",
    ]
    await run.recover()
    with pytest.raises(ks.RunSetAside, match="has changed since the run began"):
        await run.result(30)
    await run.recover(skip_validation=True)
    assert await run.result(30) == 3
    await engine.close()


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize("by_person", [True, False])
async def test_answered_run_that_is_handed_back_is_not_asked_again(world, by_person):
    asked = []

    @ks.recovery_handler("counting")
    def decide(info):
        asked.append(info.why)
        return "continue"

    order = Order(recovery=None if by_person else decide)
    engine = await world.started()
    await engine.start(order.workflow, "pen", run_id="r")
    await order.hangs.wait()
    await world.crash(engine)
    order.hangs.clear()
    order.hung -= 1
    if by_person:
        async with world.engine(worker=False) as engine:
            await (await engine.get("r")).recover("counting")
    async with world.engine(stop_seconds=0.0):
        await order.hangs.wait()  # the answer is recorded, and the step is handed back without an outcome
    async with world.engine() as engine:
        assert await (await engine.get("r")).result(30) == RESULT
    assert len(asked) == 1


@pytest.mark.parametrize("handler, expected", [("restart", "abcabcd"), ("skip step", "abcd"), ("retry step", "abccd")])
async def test_graph_is_recovered_from_its_whole_state_or_from_its_beginning(world, monkeypatch, handler, expected):
    monkeypatch.setattr("keepstep.kernel.graph.position.ENOUGH_DELTAS", 1)
    monkeypatch.setattr("keepstep.kernel.graph.position.MOST_RECORDS", 1)
    done, hangs = [], asyncio.Event()
    graph = ks.Graph("letters", recovery=ks.Recovery(handler, value={"c": True} if handler == "skip step" else None))

    def step(name):
        async def body(state):
            done.append(name)
            if name == "c" and not hangs.is_set():
                hangs.set()
                await asyncio.Event().wait()
            return {name: True}

        return body

    for name in "abcd":
        graph.add(step(name), name=name)
    for one, other in ("ab", "bc", "cd"):
        graph.edge(one, other)
    graph.entry("a")
    graph.exit("d")
    engine = await world.started()
    await engine.start(graph, run_id="r")
    await hangs.wait()
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    assert await run.result(30) == dict.fromkeys("abcd", True)
    assert "".join(done) == expected
    await engine.close()


async def test_restarted_step_does_not_find_what_it_saved_before(world):
    found, hangs = [], asyncio.Event()

    @ks.step
    async def long():
        found.append(ks.saved_progress())
        if not hangs.is_set():
            ks.save_progress(7)
            await asyncio.sleep(0)
            hangs.set()
            await asyncio.Event().wait()

    @ks.workflow(recovery="restart")
    async def saving():
        await long()

    engine = await world.started()
    await engine.start(saving, run_id="r")
    await hangs.wait()
    await engine.call(engine.worker._renew)  # the heartbeat holds the value
    engine = await world.crash_and_recover(engine)
    await (await engine.get("r")).result(30)
    assert found == [None, None]
    await engine.close()
