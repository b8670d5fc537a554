"""A retry goes back to just before the outcome that failed the run was delivered."""

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest

import keepstep as ks
from keepstep.model import Status
from keepstep.model.ids import new_id
from keepstep.ports import ClaimRequest
from tests.engine.world import until, until_at_last_wait, until_status


class Outage:
    """Steps that fail while something is down, and say whenever they are performed."""

    def __init__(self):
        self.down = True
        self.done = Counter()
        self.told = asyncio.Event()

        @ks.step
        async def pay():
            self.done["pay"] += 1
            if self.down:
                raise ks.Permanent("down")
            return "paid"

        @ks.step
        async def work(name):
            self.done[name] += 1
            return name

        @ks.step
        async def after_the_failure(run_id):
            """Go on only when the failure of another branch has been delivered."""
            self.done["after"] += 1
            await self.told.wait()
            return "after"

        self.pay, self.work, self.after_the_failure = pay, work, after_the_failure

    async def paying(self):
        try:
            return await self.pay()
        finally:
            self.told.set()

    async def fails_and_is_retried(self, engine, workflow, *args, times=1, error=ks.RunFailed, **options):
        """Start a run that fails; mend what is down, and retry it until then as often as is said."""
        run = await engine.start(workflow, *args, run_id="r", **options)
        for _ in range(times):
            with pytest.raises(error):
                await run.result(30)
            self.down = self.down and _ < times - 1
            await run.retry()
        return run


@pytest.mark.on_postgres
async def test_child_result_that_was_read_after_the_failure_is_read_again(world):
    outage = Outage()

    @ks.workflow
    async def child():
        return await outage.work("child")

    @ks.workflow
    async def parent():
        task = asyncio.create_task(outage.paying())
        started = await ks.start(child)
        after = await outage.after_the_failure("r")
        result = await started
        return await task, after, result

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, parent)
        assert await run.result(30) == ("paid", "after", "child")
        assert len((await engine.list(parent="r")).runs) == 1
    assert outage.done["child"] == 1


@pytest.mark.on_postgres
async def test_signal_that_was_read_after_the_failure_is_read_again(world):
    outage = Outage()

    @ks.workflow
    async def approving():
        task = asyncio.create_task(outage.paying())
        await outage.after_the_failure("r")
        who = await ks.wait_for("approved")
        return await task, who

    async with world.engine() as engine:
        run = await engine.start(approving, run_id="r")
        await run.signal("approved", "Ada")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        outage.down = False
        await run.retry()
        assert await run.result(30) == ("paid", "Ada")


@pytest.mark.parametrize("way", ["gather", "map"])
async def test_clean_up_in_branches_is_done_again_at_each_failure(world, way):
    outage = Outage()

    async def undo(name):
        return await outage.work(name)

    @ks.workflow
    async def cleaning(way):
        try:
            return await outage.pay()
        except ks.StepFailed:
            if way == "gather":
                await ks.gather(undo("flight"), undo("hotel"))
            else:
                await ks.map(outage.work, ["flight", "hotel"])
            raise

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, cleaning, way, times=3)
        assert await run.result(30) == "paid"
    assert outage.done == {"pay": 4, "flight": 3, "hotel": 3}


async def test_failure_raised_later_undoes_what_cancelled_siblings_did(world):
    outage, goes = Outage(), asyncio.Event()

    @ks.step
    async def slow():
        outage.done["slow"] += 1
        await goes.wait()
        return "slow"

    async def left():
        task = asyncio.create_task(outage.paying())
        await outage.after_the_failure("r")
        return await task

    async def right():
        await outage.work("before")
        try:
            return await slow()
        except asyncio.CancelledError:
            await outage.work("undo")
            raise

    @ks.workflow
    async def later():
        async with asyncio.TaskGroup() as group:
            parts = [group.create_task(left()), group.create_task(right())]
        return [part.result() for part in parts]

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, later)
        goes.set()
        assert await run.result(30) == ["paid", "slow"]
    assert outage.done["before"] == 1


async def test_failed_clean_up_is_undone_with_the_failure_before_it(world):
    outage = Outage()

    @ks.step
    async def undo():
        if outage.down:
            raise ks.Permanent("down too")

    @ks.workflow
    async def both():
        await outage.work("before")
        try:
            return await outage.pay()
        except ks.StepFailed:
            await undo()
            raise

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, both)
        assert await run.result(30) == "paid"
    assert outage.done == {"before": 1, "pay": 2}


async def test_failure_still_being_cleaned_up_after_is_tried_again(world):
    outage, failing = Outage(), asyncio.Event()

    @ks.step
    async def clean():
        failing.set()
        await asyncio.Event().wait()

    @ks.step
    async def later():
        await failing.wait()
        if outage.down:
            raise ks.Permanent("down too")
        return "later"

    async def first():
        try:
            return await outage.pay()
        except ks.StepFailed:
            await clean()
            raise

    @ks.workflow
    async def both():
        return await ks.gather(first(), later())

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, both)
        assert await run.result(30) == ["paid", "later"]


async def test_missed_deadline_and_the_clean_up_after_it_no_longer_count(world):
    outage, goes = Outage(), asyncio.Event()

    @ks.step
    async def fetch():
        await goes.wait()
        return "fetched"

    @ks.workflow
    async def late():
        try:
            fetched = await fetch()
        except asyncio.CancelledError:
            await outage.work("cleaned")
            raise
        return await outage.work(fetched)

    async with world.engine() as engine:
        run = await engine.start(late, run_id="r", deadline=0.1)
        with pytest.raises(ks.RunTimedOut):
            await run.result(30)
        goes.set()
        await run.retry()
        assert await run.result(30) == "fetched"
    assert outage.done["cleaned"] == 1


async def test_deadline_removed_by_a_retry_stays_off_for_the_successor(world):
    outage, goes = Outage(), asyncio.Event()

    @ks.step
    async def fetch():
        await goes.wait()

    @ks.workflow
    async def series(number: int):
        if number:
            await fetch()
            ks.continue_as(number - 1)
        return await outage.work("last")

    async with world.engine() as engine:
        run = await engine.start(series, 1, run_id="r", deadline=0.1)
        with pytest.raises(ks.RunTimedOut):
            await run.result(30)
        goes.set()
        await run.retry()
        assert await run.result(30) == "last"


async def here(wrong, undo, got):
    try:
        return await wrong(got)
    except KeyError:
        await undo("undo")
        await undo("undo")
        raise


async def gathered(wrong, undo, got):
    try:
        return await wrong(got)
    except KeyError:
        await ks.gather(undo("undo"), undo("undo"))
        raise


async def leaving(wrong, undo, got):
    found = None
    try:
        found = await wrong(got)
    finally:
        if found is None:
            await undo("undo")
            await undo("undo")
    return found


async def branch(wrong, undo, got):
    (found,) = await asyncio.gather(wrong(got), return_exceptions=True)
    if isinstance(found, KeyError):
        await undo("undo")
        raise found
    return found


@pytest.mark.parametrize("way", [here, gathered, branch, leaving])
async def test_code_that_failed_by_itself_goes_back_to_what_it_was_given_last(world, way):
    outage = Outage()

    async def undo(name):
        return await outage.work(name)

    async def wrong(got):
        return got["prise" if outage.down else "price"]

    @ks.step
    async def get():
        outage.done["get"] += 1
        return {"price": 3}

    @ks.workflow
    async def buggy():
        return await outage.work(await way(wrong, undo, await get()))

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, buggy)
        assert await run.result(30) == 3
    assert outage.done["get"] == 1


@pytest.mark.parametrize("nested", [False, True])
async def test_decision_of_a_race_that_the_failure_won_no_longer_counts(world, nested):
    outage, goes = Outage(), asyncio.Event()

    @ks.step
    async def secondary():
        await goes.wait()
        return "secondary"

    async def both(call):
        return await call

    @ks.workflow
    async def racing(nested):
        parts = [outage.pay(), secondary()]
        return await ks.race(*[both(part) for part in parts] if nested else parts)

    @ks.workflow
    async def completing(nested):
        parts = [outage.pay(), secondary()]
        parts = [both(part) for part in parts] if nested else parts
        return [part async for part in ks.as_completed(parts)]

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, racing, nested)
        assert await run.result(30) == "paid"
        outage.down = True
        run = await engine.start(completing, nested, run_id="c")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        outage.down = False
        await run.retry()
        goes.set()
        assert sorted(await run.result(30)) == ["paid", "secondary"]


async def test_values_published_after_the_failure_no_longer_count(world):
    outage = Outage()

    @ks.workflow
    async def publishing():
        try:
            await outage.pay()
        except ks.StepFailed:
            ks.publish("state", "failed")
            raise
        ks.publish("state", "good")

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, publishing)
        await run.result(30)
        assert await run.published() == {"state": "good"}


async def test_wait_that_timed_out_has_its_full_time_again(world):
    seconds, took = 0.3, []

    @ks.workflow
    async def approval():
        return await ks.wait_for("approved", timeout=seconds)

    async with world.engine() as engine:
        begun = time.monotonic()
        run = await engine.start(approval, run_id="r")
        for _ in range(3):
            with pytest.raises(ks.RunFailed, match="no signal"):
                await run.result(60)
            took.append(time.monotonic() - begun)
            seconds = 0.3 if len(took) < 3 else 60.0
            begun = time.monotonic()
            await run.retry()
        await run.signal("approved", "yes")
        assert await run.result(60) == "yes"
    assert min(took) >= 0.29


async def test_block_that_timed_out_is_tried_again(world):
    goes = asyncio.Event()

    @ks.step
    async def slow():
        await goes.wait()
        return "done"

    @ks.workflow
    async def block():
        async with ks.timeout(0.5):
            return await slow()

    async with world.engine() as engine:
        run = await engine.start(block, run_id="r")
        with pytest.raises(ks.RunFailed, match="took longer"):
            await run.result(30)
        goes.set()
        await run.retry()
        assert await run.result(30) == "done"


async def test_block_in_which_a_step_failed_has_its_full_time_again(world):
    """The run may be retried long after the time of the block is over."""
    outage = Outage()

    @ks.workflow
    async def block():
        await outage.work("before")
        async with ks.timeout(1.0):
            await outage.work("inside")
            return await outage.pay()

    async with world.engine() as engine:
        run = await engine.start(block, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        begun = asyncio.get_running_loop().time()
        await until(lambda: asyncio.get_running_loop().time() > begun + 1.1)
        outage.down = False
        await run.retry()
        assert await run.result(30) == "paid"
    assert outage.done == {"before": 1, "inside": 1, "pay": 2}


async def test_all_failures_of_a_group_are_tried_again(world):
    outage = Outage()

    @ks.step
    async def charge(number):
        outage.done[number] += 1
        if outage.down and number != 1:
            raise ks.Permanent("down")
        return number

    @ks.workflow
    async def group():
        found = await ks.gather(*[charge(number) for number in range(4)], return_exceptions=True)
        failed = [one for one in found if isinstance(one, Exception)]
        if failed:
            raise ExceptionGroup("some failed", failed)
        return found

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, group)
        assert await run.result(30) == [0, 1, 2, 3]
    assert outage.done == {0: 2, 1: 1, 2: 2, 3: 2}


async def test_failures_that_came_too_late_to_be_delivered_are_tried_again(world):
    outage = Outage()

    @ks.workflow
    async def both():
        return await ks.gather(outage.pay(), outage.pay())

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, both)
        assert await run.result(30) == ["paid", "paid"]


@pytest.mark.on_postgres
async def test_result_of_a_child_that_was_retried_and_completed_is_used(world):
    outage = Outage()

    @ks.workflow
    async def child():
        await outage.work("paid")
        return await outage.pay()

    @ks.workflow
    async def parent():
        return await (await ks.start(child))

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        outage.down = False
        one = await engine.get((await engine.list(parent="r")).runs[0].id)
        await one.retry()
        assert await one.result(30) == "paid"
        await run.retry()
        assert await run.result(30) == "paid"
        assert len((await engine.list(parent="r")).runs) == 1
    assert outage.done == {"paid": 1, "pay": 2}


@pytest.mark.on_postgres
async def test_child_that_goes_on_after_a_retry_of_its_own_is_waited_for(world):
    outage, goes = Outage(), asyncio.Event()

    @ks.step
    async def slow():
        await goes.wait()

    @ks.workflow
    async def child():
        await outage.pay()
        await slow()
        return "child"

    @ks.workflow
    async def parent():
        return await (await ks.start(child))

    async with world.engine(linger_seconds=0.05) as engine:
        run = await engine.start(parent, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        outage.down = False
        one = await engine.get((await engine.list(parent="r")).runs[0].id)
        await one.retry()
        await run.retry()
        await until_status(run, "waiting")
        goes.set()
        assert await run.result(30) == "child"
        assert len((await engine.list(parent="r")).runs) == 1


async def test_steps_between_start_and_failure_of_a_child_are_kept(world):
    outage = Outage()

    @ks.workflow
    async def child():
        await outage.work("child")
        return await outage.pay()

    @ks.workflow
    async def parent():
        started = await ks.start(child)
        await outage.work("between")
        return await started

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, parent, times=2)
        assert await run.result(30) == "paid"
    assert outage.done == {"child": 1, "between": 1, "pay": 3}


async def test_child_that_was_cancelled_is_started_anew(world):
    outage, goes = Outage(), asyncio.Event()

    @ks.step
    async def slow():
        await goes.wait()
        return "slow"

    @ks.workflow
    async def child():
        return await slow()

    @ks.workflow
    async def parent():
        await outage.work("before")
        started = await ks.start(child)
        await outage.work("between")
        return await started

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="r")
        await until(lambda: outage.done["between"])
        one = await engine.get((await engine.list(parent="r")).runs[0].id)
        await one.cancel()
        with pytest.raises(ks.RunFailed, match="cancelled"):
            await run.result(30)
        goes.set()
        await run.retry()
        assert await run.result(30) == "slow"
        assert len((await engine.list(parent="r")).runs) == 2
    assert outage.done["before"] == 1


async def test_child_started_in_reaction_to_the_failure_is_cancelled(world):
    outage, goes = Outage(), asyncio.Event()

    @ks.step
    async def slow():
        await goes.wait()

    @ks.workflow
    async def undoing():
        await slow()

    @ks.workflow
    async def parent():
        try:
            return await outage.pay()
        except ks.StepFailed:
            await ks.start(undoing)
            raise

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, parent)
        assert await run.result(30) == "paid"
        (one,) = (await engine.list(parent="r")).runs
        await until_status(await engine.get(one.id), "cancelled")


async def test_at_most_once_step_that_has_failed_is_performed_again(world):
    outage = Outage()

    @ks.step(at_most_once=True)
    async def once():
        outage.done["once"] += 1
        if outage.down:
            raise ks.Permanent("refused")
        return "once"

    @ks.workflow
    async def parent():
        return await once()

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, parent)
        assert await run.result(30) == "once"
    assert outage.done["once"] == 2


async def test_outcome_that_was_kept_may_fail_the_run_next(world):
    """What counts after a retry is what the next one goes back to, not what counted when that record was newest."""
    outage, wrong = Outage(), [True]

    @ks.workflow
    async def twice():
        task = asyncio.create_task(outage.paying())
        try:
            await outage.after_the_failure("r")
            if wrong and not outage.down:
                raise KeyError("a mistake")
        except KeyError:
            await outage.work("undo")
            raise
        return await task

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, twice)
        with pytest.raises(ks.RunFailed, match="a mistake"):
            await run.result(30)
        wrong.clear()
        await run.retry()
        assert await run.result(30) == "paid"
    assert outage.done["after"] == 1
    assert outage.done["pay"] <= 3


async def test_approval_that_did_not_come_in_time_is_waited_for_again(world):
    """A default that the code takes for a reason to fail is an outcome like any other."""

    @ks.workflow
    async def approval():
        if not await ks.wait_for("approved", timeout=0.2, default=False):
            raise ks.Permanent("not approved in time")
        return "approved"

    async with world.engine() as engine:
        run = await engine.start(approval, run_id="r")
        with pytest.raises(ks.RunFailed, match="not approved"):
            await run.result(30)
        await run.retry()
        await run.signal("approved")
        assert await run.result(30) == "approved"


async def test_thread_of_a_plain_workflow_is_retried_like_any_code(world):
    outage = Outage()

    @ks.workflow
    def plain():
        outage.work("before").result()
        try:
            return outage.pay().result()
        except ks.StepFailed:
            outage.work("undo").result()
            raise

    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, plain, times=2)
        assert await run.result(30) == "paid"
    assert outage.done == {"before": 1, "pay": 3, "undo": 2}


async def test_cancel_caused_by_an_early_failure_is_undone_with_it(world):
    outage, cancelled = Outage(), asyncio.Event()

    async def fails(state):
        outage.done["fails"] += 1
        if outage.down:
            raise ks.Permanent("down")
        return {"fails": 1}

    async def slow(state):
        outage.done["slow"] += 1
        try:
            if outage.down:
                await asyncio.Event().wait()
        finally:
            cancelled.set()
        return {"slow": 1}

    async def fails_later(state):
        await cancelled.wait()
        outage.done["fails_later"] += 1
        if outage.down:
            raise ks.Permanent("down")
        return {"fails_later": 1}

    graph = ks.Graph("cancelled-early")
    for step in (fails, slow, fails_later):
        graph.add(step, name=step.__name__)
    graph.add(lambda state: {"joined": 1}, name="joined")
    graph.add(lambda state: {"end": 1}, name="end")
    graph.parallel("outer", ["inner", "fails_later"], join="end", wait=ks.Any())
    graph.parallel("inner", ["fails", "slow"], join="joined")
    graph.entry("outer")
    graph.exit("end")
    async with world.engine() as engine:
        run = await outage.fails_and_is_retried(engine, graph, {})
        assert (await run.result(30))["end"] == 1
    assert outage.done["fails"] == 2


@asynccontextmanager
async def taken(world, run_id):
    """Take the lease of a run as a person's command does that has written nothing yet. At the end it dies."""
    store, worker = world.store(), new_id("command")
    try:
        assert store.claim_runs(ClaimRequest(worker, run=run_id, statuses=frozenset(Status))).claims
        yield
    finally:
        if world.kind == "memory":
            store.mark_dead(worker)
        else:
            store.close()


@pytest.mark.on_postgres
@pytest.mark.live_only
@pytest.mark.parametrize("end", ["failed", "completed", "set aside"])
async def test_run_that_had_ended_stays_so_if_a_command_dies_before_its_record(world, end):
    outage = Outage()
    outage.down = end == "failed"

    @ks.workflow(durability="off")
    async def paying():
        await outage.pay()
        if end == "set aside":
            await ks.wait_for("never")

    async with world.engine(linger_seconds=60.0) as engine:
        run = await engine.start(paying, run_id="r")
        if end == "set aside":
            await until_at_last_wait(engine, "r")
            engine.set_aside(engine.live["r"], "Doubt", "a person shall look at it")
        await until_status(run, end)
        records = await run.checkpoints()
    for _ in range(4):  # more often than a run may be recovered without progress
        async with taken(world, "r"):
            pass
        async with world.engine() as engine:
            run = await engine.get("r")
            await until_status(run, "failed", "completed", "set aside", "waiting")
            assert await run.status() == end
            assert await run.checkpoints() == records
    assert outage.done["pay"] == 1


class Family:
    """A parent that has failed because its child has."""

    def __init__(self):
        self.outage = Outage()

        @ks.workflow
        async def child():
            return await self.outage.pay()

        @ks.workflow
        async def parent():
            return await (await ks.start(child))

        self.parent = parent

    async def failed(self, engine):
        run = await engine.start(self.parent, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        self.outage.down = False
        return run, await engine.get((await engine.list(parent="r")).runs[0].id)


@pytest.mark.on_postgres
@pytest.mark.live_only
async def test_failed_child_held_by_a_command_keeps_its_parent_from_being_retried(world):
    family = Family()
    async with world.engine() as engine:
        run, child = await family.failed(engine)
        async with taken(world, child.id):
            for one in (child, run):
                with pytest.raises(ks.RunConflict, match=f"{child.id}.* try again"):
                    await one.retry()
            assert await run.status() == "failed"
    async with world.engine() as engine:
        run, child = await engine.get("r"), await engine.get(child.id)
        await until_status(child, "failed")
        await run.retry()
        assert await run.result(30) == "paid"


@pytest.mark.on_postgres
@pytest.mark.live_only
async def test_parent_that_goes_on_believes_the_end_of_a_child_held_by_a_command(world):
    async with world.engine() as engine:
        run, child = await Family().failed(engine)
        start = next(one.seq for one in await run.checkpoints() if one.kind.value == "child")
        async with taken(world, child.id):
            await run.rewind(to=start)
            with pytest.raises(ks.RunFailed, match="down"):
                await run.result(10)
