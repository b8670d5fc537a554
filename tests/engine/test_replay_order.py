"""Outcomes reach the code in the recorded order, so that a program that races its steps replays as it ran (K4)."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.lives import Pace, live_then_many_lives
from tests.engine.world import steps_of

pytestmark = pytest.mark.every_loop


async def test_a_first_completed_wait_picks_another_winner_on_replay(world, effects):
    pace = Pace(a=0.03, bb=0.001)

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


async def test_outcomes_that_come_together_are_told_together(world, effects):
    """Two steps end in one pass and share a commit; the code sees one, comes to rest, and then the other."""
    pace = Pace(a=0.0, bb=0.0, ccc=0.0)

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


async def test_a_cancelled_loser_runs_further_on_replay(world, effects):
    pace = Pace(fast=0.03, slow=0.004)

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


async def test_an_asyncio_timeout_round_a_step_ends_differently_on_replay(world, effects):
    pace = Pace(slow=0.2)

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


async def test_asyncio_as_completed_gives_another_order_on_replay(world, effects):
    pace = Pace(a=0.02, bb=0.001, ccc=0.01)

    @ks.step
    async def ask(name):
        await pace.take(name)
        effects.append(name)
        return name

    @ks.step
    async def saw(names):
        effects.append(tuple(names))
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


async def test_asyncio_wait_for_ends_differently_on_replay(world, effects):
    pace = Pace(slow=0.2, b=0.0)

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


async def test_a_shielded_step_is_lost_on_replay(world, effects):
    pace = Pace(slow=0.05)

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


async def test_a_semaphore_in_the_code_lets_others_through_on_replay(world, effects):
    pace = Pace(a=0.02, bb=0.01, ccc=0.0, dddd=0.005)

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


async def test_nested_gathers_and_task_groups_are_numbered_otherwise_on_replay(world, effects):
    pace = Pace(a=0.01, bb=0.0)

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


async def test_a_failed_task_of_a_group_leaves_its_siblings_running_on_replay(world, effects):
    pace = Pace(bad=0.01, slow=0.2)

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


async def test_a_hand_over_between_branches_comes_out_otherwise_on_replay(world, effects):
    """One branch waits for an event that another sets after its step: the order is the recorded one."""
    pace = Pace(a=0.01, bb=0.0)

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


async def test_a_queue_between_branches_deadlocks_or_reorders_on_replay(world, effects):
    pace = Pace(make=0.003, use=0.001)

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

    assert await live_then_many_lives(world, stamped, Pace(), effects, lives=2) == []


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


async def test_a_race_has_another_winner_on_replay(world, effects):
    pace = Pace(a=0.05, bb=0.005)
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


async def test_as_completed_gives_another_order_on_replay(world, effects):
    pace = Pace(a=0.3, bb=0.0, ccc=0.1)
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


async def test_a_durable_timeout_ends_differently_on_replay(world, effects):
    pace = Pace(slow=0.3)
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


async def test_a_map_is_numbered_by_who_came_first(world, effects):
    pace = Pace(a=0.01, bb=0.0, ccc=0.005)
    work = worker_for(pace, effects)
    names = ["a", "bb", "ccc", "a", "bb", "ccc"]

    @ks.workflow
    async def mapped(concurrency):
        got = await ks.map(work, names, concurrency=concurrency)
        await ks.wait_for("go")
        return got

    assert await live_then_many_lives(world, mapped, pace, effects, 2, lives=3) == names


@pytest.mark.parametrize("concurrency", [1, 2, 50])
async def test_the_keys_of_a_map_depend_on_its_concurrency(world, effects, concurrency):
    work = worker_for(Pace(a=0.002, bb=0.0), effects)

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


async def test_a_map_forgets_on_replay_what_it_collected(world, effects):
    pace = Pace(a=0.01, bad=0.0)
    work = worker_for(pace, effects)

    @ks.workflow
    async def mapped():
        got = await ks.map(work, ["a", "bad", "a", "bad2"], collect=True)
        await ks.wait_for("go")
        return [list(got), sorted(got.failures), got.coverage, got.degraded]

    result = await live_then_many_lives(world, mapped, pace, effects, lives=2)
    assert result == [["a", None, "a", None], [1, 3], 0.5, True]


async def test_a_failing_map_leaves_the_others_running_on_replay(world, effects):
    pace = Pace(bad=0.01, slow=0.3)
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


async def test_a_quorum_waits_for_others_on_replay(world, effects):
    pace = Pace(a=0.3, bb=0.0, ccc=0.01)
    work = worker_for(pace, effects)

    @ks.workflow
    async def quorum():
        got = await ks.map(work, ["a", "bb", "ccc"], wait=ks.Quorum(2))
        await ks.wait_for("go")
        return list(got)

    assert await live_then_many_lives(world, quorum, pace, effects, lives=3) == [None, "bb", "ccc"]


async def test_a_chain_starts_over_on_replay(world, effects):
    pace = Pace(add=0.002)
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


async def test_a_gather_that_keeps_errors_gives_others_on_replay(world, effects):
    pace = Pace(a=0.01, bad=0.0)
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
