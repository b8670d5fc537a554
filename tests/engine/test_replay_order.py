"""Outcomes reach the code in the recorded order, so that a program that races its steps replays as it ran (K4)."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.lives import PollInterval, live_then_many_lives
from tests.engine.world import steps_of, until_status

pytestmark = pytest.mark.every_loop


async def test_first_completed_wait_has_the_same_winner_on_replay(world, effects):
    pace = PollInterval(a=0.03, bb=0.001)

    @ks.step
    async def ask(name):
        await pace.take(name)
        effects.append(name)
        return name

    @ks.step
    async def use(names):
        effects.append(("use", *names))
        return names

    @ks.workflow
    async def first():
        tasks = [asyncio.create_task(ask("a")), asyncio.create_task(ask("bb"))]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        used = await use(sorted(task.result() for task in done))
        await asyncio.gather(*tasks)
        await ks.wait_for("go")
        return used

    assert await live_then_many_lives(world, first, pace, effects) == ["bb"]


async def test_outcomes_that_come_together_are_delivered_one_by_one(world, effects):
    """Two steps end in one pass and share a commit; the code sees one, comes to rest, and then the other."""
    pace = PollInterval(a=0.0, bb=0.0, ccc=0.0)

    @ks.step
    async def ask(name):
        await pace.take(name)
        effects.append(name)
        return name

    @ks.step
    async def use(names):
        effects.append(("use", *names))
        return names

    @ks.workflow
    async def together():
        left = {asyncio.create_task(ask(name)) for name in pace.seconds}
        seen = []
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            seen.append(await use(sorted(task.result() for task in done)))
        await ks.wait_for("go")
        return seen

    seen = await live_then_many_lives(world, together, pace, effects, lives=3)
    assert len(seen[0]) == 1, "the first outcome must be told alone"
    assert sorted(name for names in seen for name in names) == ["a", "bb", "ccc"]


async def test_cancelled_loser_stops_at_the_same_step_on_replay(world, effects):
    pace = PollInterval(fast=0.03, slow=0.004)

    @ks.step
    async def work(name, number):
        await pace.take(name)
        effects.append((name, number))

    @ks.step
    async def end(winner):
        effects.append(winner)
        return winner

    @ks.workflow
    async def loser():
        async def fast():
            await work("fast", 0)
            return "fast"

        async def slow():
            for number in range(50):
                await work("slow", number)
            return "slow"

        tasks = [asyncio.create_task(fast()), asyncio.create_task(slow())]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        winner = await end(next(iter(done)).result())
        await ks.wait_for("go")
        return winner

    assert await live_then_many_lives(world, loser, pace, effects) == "fast"


async def test_asyncio_timeout_around_a_step_ends_the_same_on_replay(world, effects):
    pace = PollInterval(slow=0.2)

    @ks.step
    async def slow():
        await pace.take("slow")
        effects.append("slow")

    @ks.step
    async def note(what):
        effects.append(what)
        return what

    @ks.workflow
    async def limited():
        try:
            async with asyncio.timeout(0.02):
                await slow()
            how = await note("in time")
        except TimeoutError:
            how = await note("fallback")
        await ks.wait_for("go")
        return how

    assert await live_then_many_lives(world, limited, pace, effects, lives=4) == "fallback"


async def test_timeout_of_no_seconds_lets_no_step_begin(world, effects):
    @ks.step
    async def work(name):
        effects.append(name)

    @ks.workflow
    async def limited():
        try:
            async with ks.timeout(0):
                try:
                    await ks.gather(work("one"), ks.gather(work("two")))
                finally:
                    await work("cleanup")
        except ks.TimedOut:
            await work("fallback")
        async with ks.timeout(0):
            pass  # as in asyncio, a block that waits for nothing is not ended
        await work("after")
        await ks.wait_for("go")

    await live_then_many_lives(world, limited, PollInterval(), effects, lives=2)
    assert effects == ["cleanup", "fallback", "after"]


async def test_asyncio_as_completed_keeps_its_order_on_replay(world, effects):
    pace = PollInterval(a=0.0, bb=0.0, ccc=0.0)
    seen_first = {"ccc": asyncio.Event(), "a": asyncio.Event()}  # what the code must have seen before a body ends

    @ks.step
    async def ask(name):
        if name in seen_first:
            await seen_first[name].wait()
        await pace.take(name)
        effects.append(name)
        return name

    @ks.step
    async def saw(names):
        effects.append(tuple(names))
        for event in list(seen_first.values())[: len(names)]:
            event.set()
        return names

    @ks.workflow
    async def ordered():
        seen = []
        for future in asyncio.as_completed([ask("a"), ask("bb"), ask("ccc")]):
            seen.append(await future)
            await saw(list(seen))
        await ks.wait_for("go")
        return seen

    assert await live_then_many_lives(world, ordered, pace, effects, lives=4) == ["bb", "ccc", "a"]


async def test_asyncio_wait_for_ends_the_same_on_replay(world, effects):
    pace = PollInterval(slow=0.2, b=0.0)

    @ks.step
    async def work(name):
        await pace.take(name)
        effects.append(name)
        return name

    @ks.workflow
    async def limited():
        try:
            got = await asyncio.wait_for(work("slow"), 0.02)
        except TimeoutError:
            got = await work("b")
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, limited, pace, effects, lives=3) == "b"


async def test_shielded_step_is_kept_on_replay(world, effects):
    pace = PollInterval(slow=0.05)

    @ks.step
    async def work(name):
        await pace.take(name)
        effects.append(name)
        return name

    @ks.workflow
    async def shielded():
        task = asyncio.ensure_future(work("slow"))
        try:
            async with asyncio.timeout(0.01):
                await asyncio.shield(task)
        except TimeoutError:
            await work("meanwhile")
        got = await task
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, shielded, pace, effects, lives=3) == "slow"


async def test_semaphore_in_the_code_keeps_its_order_on_replay(world, effects):
    pace = PollInterval(a=0.02, bb=0.01, ccc=0.0, dddd=0.005)

    @ks.step
    async def work(name, place):
        await pace.take(name)
        effects.append((name, place))
        return name

    @ks.workflow
    async def guarded():
        two = asyncio.Semaphore(2)
        order = []

        async def one(name):
            async with two:
                order.append(await work(name, len(order)))

        await asyncio.gather(*(one(name) for name in ("a", "bb", "ccc", "dddd")))
        await ks.wait_for("go")
        return order

    assert sorted(await live_then_many_lives(world, guarded, pace, effects, lives=4)) == ["a", "bb", "ccc", "dddd"]


async def test_nested_gathers_and_groups_keep_their_numbers_on_replay(world, effects):
    pace = PollInterval(a=0.01, bb=0.0)

    @ks.step
    async def work(name, path):
        await pace.take(name)
        effects.append((name, path))
        return path

    @ks.workflow
    async def nested():
        async def inner(path):
            return await asyncio.gather(work("a", f"{path}.1"), work("bb", f"{path}.2"))

        async def grouped(path):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(inner(f"{path}.{n}")) for n in range(2)]
            return [task.result() for task in tasks]

        results = await asyncio.gather(grouped("x"), grouped("y"), ks.gather(work("a", "z1"), work("bb", "z2")))
        await ks.wait_for("go")
        return results

    result = await live_then_many_lives(world, nested, pace, effects, lives=4)
    assert result == [
        [["x.0.1", "x.0.2"], ["x.1.1", "x.1.2"]],
        [["y.0.1", "y.0.2"], ["y.1.1", "y.1.2"]],
        ["z1", "z2"],
    ]
    assert len(effects) == len(set(effects)) == 10


async def test_failed_task_of_a_group_cancels_its_siblings_on_replay(world, effects):
    pace = PollInterval(bad=0.01, slow=0.2)

    @ks.step
    async def work(name):
        await pace.take(name)
        effects.append(name)
        if name == "bad":
            raise ValueError(name)

    @ks.step
    async def after(count):
        effects.append(("after", count))
        return count

    @ks.workflow
    async def grouped():
        count = 0
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(work("bad"))
                group.create_task(work("slow"))
        except* ks.StepFailed as failed:
            count = len(failed.exceptions)
        got = await after(count)
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, grouped, pace, effects, lives=4) == 1
    assert "slow" not in effects


async def test_hand_over_between_branches_keeps_its_order_on_replay(world, effects):
    """One branch waits for an event that another sets after its step: the order is the recorded one."""
    pace = PollInterval(a=0.01, bb=0.0)

    @ks.step
    async def work(name, seen):
        await pace.take(name)
        effects.append((name, tuple(seen)))
        return name

    @ks.workflow
    async def handed():
        ready, seen = asyncio.Event(), []

        async def first():
            seen.append(await work("a", list(seen)))
            ready.set()
            seen.append(await work("bb", list(seen)))

        async def second():
            await ready.wait()
            seen.append(await work("bb", list(seen)))

        await asyncio.gather(first(), second())
        await ks.wait_for("go")
        return sorted(seen)

    assert await live_then_many_lives(world, handed, pace, effects, lives=3) == ["a", "bb", "bb"]


async def test_queue_between_branches_keeps_its_order_on_replay(world, effects):
    pace = PollInterval(make=0.003, use=0.001)

    @ks.step
    async def work(name, number):
        await pace.take(name)
        effects.append((name, number))
        return number

    @ks.workflow
    async def piped():
        queue, used = asyncio.Queue(maxsize=1), []

        async def producer():
            for number in range(4):
                await queue.put(await work("make", number))
            await queue.put(None)

        async def consumer():
            while (number := await queue.get()) is not None:
                used.append(await work("use", number))

        await asyncio.gather(producer(), consumer())
        await ks.wait_for("go")
        return used

    assert await live_then_many_lives(world, piped, pace, effects, lives=3) == [0, 1, 2, 3]


async def test_outcome_waits_for_calls_that_followed_a_plain_wait(world, effects):
    """A branch that asked for a step after a plain sleep is given the same time and the same order on replay."""
    asked, came = asyncio.Event(), asyncio.Event()

    @ks.step
    async def slow():
        await asked.wait()
        effects.append("slow")

    @ks.step
    async def stamp(at, known):
        asked.set()
        await came.wait()
        effects.append("stamp")
        return known

    @ks.workflow
    async def stamped():
        known = []

        async def first():
            await slow()
            known.append("slow")
            came.set()

        async def second():
            await asyncio.sleep(0.01)
            return await stamp(ks.now().isoformat(), list(known))

        _, seen = await asyncio.gather(first(), second())
        await ks.wait_for("go")
        return seen

    assert await live_then_many_lives(world, stamped, PollInterval(), effects, lives=2) == []


async def test_cancel_waits_for_the_call_that_it_cancelled_after_a_plain_wait(world, effects):
    """A cancel that came while a step was under way is not delivered in the plain sleep before that step."""
    asked, cleaning, hold = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @ks.step
    async def slow():
        asked.set()
        await asyncio.Event().wait()

    @ks.step
    async def undo():
        cleaning.set()
        await hold.wait()
        effects.append("undo")

    @ks.workflow
    async def cleaned():
        await asyncio.sleep(0.05)
        try:
            await slow()
        finally:
            await undo()

    engine = await world.started()
    run = await engine.start(cleaned, run_id="r")
    await asked.wait()
    await run.cancel()
    await cleaning.wait()
    await world.crash(engine)
    hold.set()
    async with world.engine() as engine:
        run = await engine.get("r")
        await until_status(run, "cancelled", "set aside")
        assert await run.status() == "cancelled"
    assert effects == ["undo"]


# -- Keepstep's own ----------------------------------------------------------------------------------------------------


def worker_for(pace, effects):
    @ks.step
    async def work(name):
        await pace.take(name)
        effects.append(name)
        if name.startswith("bad"):
            raise ValueError(name)
        return name

    return work


async def test_race_has_the_same_winner_on_replay(world, effects):
    pace = PollInterval(a=0.05, bb=0.005)
    work = worker_for(pace, effects)

    @ks.workflow
    async def raced():
        async def two(name):
            await work(name)
            return await work(name)

        winner = await ks.race(work("a"), work("bb"))
        again = await ks.race(two("a"), two("bb"))
        await ks.wait_for("go")
        return [winner, again]

    assert await live_then_many_lives(world, raced, pace, effects, lives=4) == ["bb", "bb"]


async def test_as_completed_keeps_its_order_on_replay(world, effects):
    pace = PollInterval(a=0.3, bb=0.0, ccc=0.1)
    work = worker_for(pace, effects)

    @ks.step
    async def saw(name, at):
        effects.append((name, at))

    @ks.workflow
    async def ordered():
        seen = []
        async for name in ks.as_completed([work("a"), work("bb"), work("ccc")]):
            seen.append(name)
            await saw(name, ks.now())
        await ks.wait_for("go")
        return seen

    assert await live_then_many_lives(world, ordered, pace, effects, lives=4) == ["bb", "ccc", "a"]


async def test_durable_timeout_ends_the_same_on_replay(world, effects):
    pace = PollInterval(slow=0.3)
    work = worker_for(pace, effects)

    @ks.workflow
    async def limited():
        got = []
        try:
            async with ks.timeout(0.05):
                got.append(await work("a"))
                got.append(await work("slow"))
        except ks.TimedOut:
            got.append(await work("fallback"))
        async with ks.timeout(60):
            got.append(await work("a"))
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, limited, pace, effects, lives=4) == ["a", "fallback", "a"]
    assert "slow" not in effects


async def test_map_gives_results_in_the_order_of_its_items(world, effects):
    pace = PollInterval(a=0.01, bb=0.0, ccc=0.005)
    work = worker_for(pace, effects)
    names = ["a", "bb", "ccc", "a", "bb", "ccc"]

    @ks.workflow
    async def mapped(concurrency):
        got = await ks.map(work, names, concurrency=concurrency)
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, mapped, pace, effects, 2, lives=3) == names


@pytest.mark.parametrize("concurrency", [1, 2, 50])
async def test_keys_of_a_map_do_not_depend_on_its_concurrency(world, effects, concurrency):
    work = worker_for(PollInterval(a=0.002, bb=0.0), effects)

    @ks.workflow
    async def mapped():
        async def both(name):
            return [await work(name), await work(name)]

        return [await ks.map(work, ["a", "bb", "a"], concurrency=concurrency), await ks.map(both, ["bb", "a"])]

    async with world.engine() as engine:
        run = await engine.start(mapped)
        assert await run.result(30) == [["a", "bb", "a"], [["bb", "bb"], ["a", "a"]]]
        assert set(await steps_of(run)) == {
            "1.0/work#1",
            "1.1/work#1",
            "1.2/work#1",
            "2.0/work#1",
            "2.0/work#2",
            "2.1/work#1",
            "2.1/work#2",
        }


async def test_map_keeps_what_it_collected_on_replay(world, effects):
    pace = PollInterval(a=0.01, bad=0.0)
    work = worker_for(pace, effects)

    @ks.workflow
    async def mapped():
        got = await ks.map(work, ["a", "bad", "a", "bad2"], collect=True)
        await ks.wait_for("go")
        return [list(got), sorted(got.failures), got.coverage, got.degraded]

    result = await live_then_many_lives(world, mapped, pace, effects, lives=2)
    assert result == [["a", None, "a", None], [1, 3], 0.5, True]


async def test_failing_map_cancels_the_others_on_replay(world, effects):
    pace = PollInterval(bad=0.01, slow=0.3)
    work = worker_for(pace, effects)

    @ks.workflow
    async def mapped():
        try:
            await ks.map(work, ["slow", "bad", "slow"])
        except ks.StepFailed as error:
            got = str(error)
        await work("after")
        await ks.wait_for("go")
        return got

    assert "bad" in await live_then_many_lives(world, mapped, pace, effects, lives=3)
    assert "slow" not in effects


async def test_quorum_waits_for_the_same_items_on_replay(world, effects):
    pace = PollInterval(a=0.3, bb=0.0, ccc=0.01)
    work = worker_for(pace, effects)

    @ks.workflow
    async def quorum():
        got = await ks.map(work, ["a", "bb", "ccc"], wait=ks.Quorum(2))
        await ks.wait_for("go")
        return list(got)

    assert await live_then_many_lives(world, quorum, pace, effects, lives=3) == [None, "bb", "ccc"]


async def test_chain_repeats_no_step_on_replay(world, effects):
    pace = PollInterval(add=0.002)
    progress = []

    @ks.step
    async def add(total, number):
        await pace.take("add")
        effects.append(number)
        return total + number

    @ks.workflow
    async def chained():
        last = await ks.chain(add, [1, 2, 3], 10, on_progress=lambda done, total, value: progress.append((done, total)))
        states = await ks.chain(add, [1, 1], 0, intermediate=True)
        await ks.wait_for("go")
        return [last, states]

    assert await live_then_many_lives(world, chained, pace, effects, lives=2) == [16, [1, 2]]
    assert progress[-3:] == [(1, 3), (2, 3), (3, 3)]


async def test_gather_that_keeps_errors_gives_the_same_on_replay(world, effects):
    pace = PollInterval(a=0.01, bad=0.0)
    work = worker_for(pace, effects)

    @ks.workflow
    async def gathered():
        got = await ks.gather(work("a"), work("bad"), work("bb"), return_exceptions=True)
        await ks.wait_for("go")
        return [str(one) for one in got]

    result = await live_then_many_lives(world, gathered, pace, effects, lives=2)
    assert result[0] == "a"
    assert "ValueError: bad" in result[1]
    assert result[2] == "bb"
