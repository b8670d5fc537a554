"""Going back: a run goes on from an earlier checkpoint, and nothing of what it had done is lost (D3, K25, K29)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.care.verify import verify
from keepstep.kernel.replay import Superseded
from keepstep.records.record import Record
from tests.engine.world import steps_of, told, until, until_status

pytestmark = pytest.mark.on_postgres


class Counting:
    """A program of three steps, each of which says how often it really ran."""

    def __init__(self, effects):
        self.keys = []

        @ks.step
        async def one():
            effects.append("one")
            return effects.count("one")

        @ks.step
        async def two(number):
            effects.append("two")
            self.keys.append(ks.idempotency_key())
            return 10 * number + effects.count("two")

        @ks.step
        async def three(number):
            effects.append("three")
            return 10 * number + effects.count("three")

        self.one, self.two, self.three = one, two, three

        @ks.workflow
        async def counting():
            return await three(await two(await one()))

        self.workflow = counting


async def seq_of(run, step, kind="step completed"):
    return [one.seq for one in await run.checkpoints() if one.step == step and one.kind.value == kind][-1]


async def is_sound(engine):
    """Nothing is damaged, and no run is stuck."""
    store = engine.store if engine.encryption.store is None else engine.encryption.store.inner
    assert (await engine.call(verify, store)).sound
    return not [found for found in (await examine(engine)).findings if found.severity == "error"]


async def test_kept_steps_never_run_again_and_the_others_run_once(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r")
        assert await run.result(30) == 111
        old = await told(run)
        rewound = await run.rewind(await seq_of(run, "one#1"), reason="prices changed", actor="ann")
        assert rewound.again == ("two#1", "three#1")
        assert await run.result(30) == 122
        assert (await told(run))[: len(old)] == old, "a rewind must keep the old history"
        assert await is_sound(engine)
        [entry] = [one for one in await run.audit() if one.what.startswith("rewind")]
        assert (entry.actor, entry.reason) == ("ann", "prices changed")
        assert entry.what == "rewind, 3 records superseded"
        assert (entry.before.value, entry.after.value) == ("completed", "queued")
    assert effects == ["one", "two", "three", "two", "three"]
    assert program.keys[0] != program.keys[1], "after a rewind the idempotency key is another"


async def test_run_goes_back_to_before_a_step_and_to_the_beginning(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r")
        await until_status(run, "completed")
        assert (await run.rewind(step="three")).again == ("three#1",)
        assert await run.result(30) == 112
        assert (await run.rewind(0)).again == ("one#1", "two#1", "three#1")
        assert await run.result(30) == 223
    assert effects.count_of() == {"one": 2, "two": 2, "three": 3}


async def test_run_goes_back_repeatedly_and_into_superseded_records(world, effects):
    program = Counting(effects)
    async with world.engine() as engine:
        run = await engine.start(program.workflow, run_id="r")
        assert await run.result(30) == 111
        two = await seq_of(run, "two#1")
        await run.rewind(step="two")
        assert await run.result(30) == 122
        await run.rewind(step="three")
        assert await run.result(30) == 123
        await run.rewind(two)  # what counted then counts again: the first outcome of two, and nothing after it
        assert await run.result(30) == 114
        assert await is_sound(engine)
    assert effects.count_of() == {"one": 1, "two": 2, "three": 4}


async def test_a_dry_run_changes_nothing(world, effects):
    async with world.engine() as engine:
        run = await engine.start(Counting(effects).workflow, run_id="r")
        assert await run.result(30) == 111
        before = await run.run()
        assert (await run.rewind(step="two", dry_run=True)).again == ("two#1", "three#1")
        assert await run.run() == before


async def test_a_failed_run_goes_back_and_then_is_retried(world, effects):
    program = Counting(effects)
    broken = [True, True]

    @ks.step
    async def shaky(number):
        effects.append("shaky")
        if broken.pop():
            raise ValueError("broken")
        return number

    @ks.workflow
    async def failing():
        return await program.three(await shaky(await program.two(await program.one())))

    async with world.engine() as engine:
        run = await engine.start(failing, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        await run.rewind(step="two")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        broken.append(False)
        await run.retry()
        assert await run.result(30) == 121
        assert await is_sound(engine)
    assert effects.count_of() == {"one": 1, "two": 2, "three": 1, "shaky": 3}


async def test_a_retry_is_undone_by_a_rewind_to_before_it(world, effects):
    program = Counting(effects)
    broken = [False, True]

    @ks.step
    async def shaky():
        effects.append("shaky")
        if broken.pop():
            raise ValueError("broken")

    @ks.workflow
    async def failing():
        number = await program.one()
        try:
            await shaky()
        finally:
            await program.two(number)

    async with world.engine() as engine:
        run = await engine.start(failing, run_id="r")
        with pytest.raises(ks.RunFailed):
            await run.result(30)
        failed = (await run.run()).seq
        await run.retry()
        await run.result(30)
        await run.rewind(failed - 1)  # the failure counts again, and the code ends as it did
        with pytest.raises(ks.RunFailed):
            await run.result(30)
    assert effects.count_of() == {"one": 1, "shaky": 2, "two": 2}


async def test_parked_run_reads_a_freed_signal_again(world, effects):
    program = Counting(effects)

    @ks.workflow
    async def approved():
        number = await program.one()
        first = await ks.wait_for("first")
        number = await program.two(number)
        second = await ks.wait_for("second")
        return [number, first, second]

    async with world.engine() as engine:
        run = await engine.start(approved, run_id="r")
        await run.signal("first", "yes")
        await until(lambda: "two" in effects)
        await until_status(run, "waiting")
        rewound = await run.rewind(step="wait_for:first")
        assert rewound.again == ("wait_for:first#1", "two#1")
        await until(lambda: effects.count("two") == 2)
        await until_status(run, "waiting")
        await run.signal("second", "too")
        assert await run.result(30) == [12, "yes", "too"]
        await run.rewind(step="wait_for:second")
        assert await run.result(30) == [12, "yes", "too"]
        assert await is_sound(engine)
    assert effects.count_of() == {"one": 1, "two": 2}


async def test_a_paused_run_goes_on_and_is_not_paused_again(world, effects):
    program = Counting(effects)
    goes = asyncio.Event()

    @ks.step
    async def slow():
        effects.append("slow")
        await goes.wait()

    @ks.workflow
    async def pausing():
        number = await program.one()
        await slow()
        return await program.two(number)

    async with world.engine() as engine:
        run = await engine.start(pausing, run_id="r")
        await until(lambda: "slow" in effects)
        await run.pause("to look")
        await until(lambda: engine.live["r"].stop.pause is not None)
        goes.set()
        await until_status(run, "paused")
        await run.rewind(step="one")
        assert await run.result(30) == 21
    assert effects == ["one", "slow", "one", "slow", "two"]


@pytest.mark.live_only
async def test_driven_cancelled_or_continued_run_is_not_rewound(world, effects):
    goes = asyncio.Event()

    @ks.step
    async def slow():
        effects.append("slow")
        await goes.wait()

    @ks.workflow
    async def busy():
        await slow()

    @ks.workflow
    async def again(number):
        if not number:
            ks.continue_as(1)

    async with world.engine() as engine:
        run = await engine.start(busy, run_id="r")
        await until(lambda: effects)
        with pytest.raises(ks.RunConflict, match="pause it before you rewind it"):
            await run.rewind(0)
        await run.cancel()
        await until_status(run, "cancelled")
        with pytest.raises(ks.AlreadyFinished, match="fork it instead"):
            await run.rewind(0)
        series = await engine.start(again, 0, run_id="s")
        await series.result(30)
        with pytest.raises(ks.RunConflict, match="was continued as 's~2'; rewind the newest"):
            await series.rewind(0)
        with pytest.raises(ks.RunNotFound):
            await engine.rewind("nobody", to=0)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_rewind_to_an_unknown_place_is_refused(world, effects):
    async with world.engine() as engine:
        run = await engine.start(Counting(effects).workflow, run_id="r")
        await run.result(30)
        last = (await run.run()).seq
        for wrong in (-1, last, last + 1, True, "2"):
            with pytest.raises(ks.DefinitionError, match="from 0 to 4"):
                await run.rewind(wrong)
        with pytest.raises(ks.DefinitionError, match="no step 'four'; it has one#1, two#1, three#1"):
            await run.rewind(step="four")
        with pytest.raises(ks.DefinitionError, match="either to="):
            await run.rewind()
        with pytest.raises(ks.DefinitionError, match="either to="):
            await run.rewind(1, step="one")
        assert (await run.run()).seq == last


async def test_children_get_new_ids_and_those_left_are_cancelled(world, effects):
    @ks.step
    async def work(number):
        effects.append(f"work {number}")
        return number

    @ks.workflow
    async def child(number):
        await work(number)
        return [number, await ks.wait_for("go")]

    @ks.workflow
    async def parent():
        first = await ks.start(child, 1)
        second = await ks.start(child, 2)
        return [await first, await second]

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        await until(lambda: len(effects) == 2)
        await until_status(run, "waiting")
        old = {one.parent_key: one.id for one in (await engine.list(parent="p")).runs}
        await engine.signal(old["child#1"], "go", "early")
        await until_status(await engine.get(old["child#1"]), "completed")

        async def heard():
            return "child.result#1" in {one.step for one in await run.checkpoints()}

        await until(heard)
        await until_status(run, "waiting")
        rewound = await run.rewind(step="child#2")
        assert rewound.children == (old["child#2"],)
        await until_status(await engine.get(old["child#2"]), "cancelled")
        await until(lambda: len(effects) == 3)
        await until_status(run, "waiting")
        assert await is_sound(engine)
        [born] = [one for one in (await engine.list(parent="p")).runs if one.id not in old.values()]
        assert born.parent_key == "child#2"
        await engine.signal(born.id, "go", "late")
        assert await run.result(30) == [[1, "early"], [2, "late"]], "the word of the old child must not be taken"
        with pytest.raises(ks.RunConflict, match="rewind the parent"):
            await engine.rewind(born.id, to=1)
    assert effects == ["work 1", "work 2", "work 2"]


async def test_result_of_a_kept_child_is_read_again(world, effects):
    @ks.step
    async def work():
        effects.append("work")

    @ks.workflow
    async def child():
        await work()
        return "done"

    @ks.workflow
    async def parent():
        return await (await ks.start(child))

    async with world.engine() as engine:
        run = await engine.start(parent, run_id="p")
        assert await run.result(30) == "done"
        await run.rewind(step="child.result")
        assert await run.result(30) == "done"
        await run.rewind(step="child")
        assert await run.result(30) == "done"
    assert effects == ["work", "work"]


async def test_an_at_most_once_step_is_performed_again_only_from_before_it(world, effects):
    @ks.step(at_most_once=True)
    async def charge():
        effects.append("charge")
        return "paid"

    @ks.workflow
    async def shop():
        return await charge()

    async with world.engine() as engine:
        run = await engine.start(shop, run_id="r")
        assert await run.result(30) == "paid"
        await run.rewind(await seq_of(run, "charge#1", "step started"))  # begun, and nobody knows what came of it
        await until_status(run, "waiting")
        await run.resolve("charge#1", "result", "settled by hand")
        assert await run.result(30) == "settled by hand"
        assert effects == ["charge"]
        await run.rewind(step="charge")
        assert await run.result(30) == "paid"
    assert effects == ["charge", "charge"]


async def test_published_values_are_those_that_count(world, effects):
    program = Counting(effects)

    @ks.workflow
    async def showing():
        ks.publish("stage", "first")
        await program.one()
        ks.publish("stage", "second")
        ks.publish("more", 1)
        return await ks.wait_for("go")

    async with world.engine() as engine:
        run = await engine.start(showing, run_id="r")
        await until_status(run, "waiting")
        assert await run.published() == {"stage": "second", "more": 1}

    async with world.engine(worker=False) as engine:  # so that nobody takes it up
        run = await engine.get("r")
        await run.rewind(step="one")
        assert await run.published() == {"stage": "first"}
        assert await steps_of(run) == ["one#1"]


def superseded(seq, **data):
    return Record("r", "superseded", seq=seq, data=data)


def gone(last, *records):
    found = Superseded()
    for record in records:
        found.add(record)
    return [seq for seq in range(1, last + 1) if seq in found]


def test_what_counts_after_a_rewind_is_what_counted_then():
    assert gone(9, superseded(6, seqs=[2, 4])) == [2, 4]
    assert gone(9, superseded(6, beyond=3)) == [4, 5]
    assert gone(9, superseded(5, beyond=2), superseded(9, beyond=7)) == [3, 4, 8]
    assert gone(9, superseded(5, beyond=3), superseded(9, beyond=4)) == [5, 6, 7, 8], "into what was left"
    assert gone(9, superseded(5, seqs=[2]), superseded(9, beyond=4)) == [5, 6, 7, 8], "a retry is undone"
    assert gone(9, superseded(5, seqs=[2]), superseded(9, beyond=5)) == [2, 6, 7, 8]
    assert gone(9, superseded(5, beyond=0)) == [1, 2, 3, 4]
    again = [superseded(4, beyond=1), superseded(8, beyond=1), superseded(12, beyond=6)]
    assert gone(12, *again) == [2, 3, 7, 8, 9, 10, 11], "what the first rewind had left stays left"


async def test_pause_overtaken_by_the_end_is_over_after_a_rewind(world):
    gate = asyncio.Event()

    @ks.step
    async def last():
        await gate.wait()
        return "ended"

    @ks.workflow
    async def ends_while_it_is_to_pause():
        return await last()

    async with world.engine() as engine:
        run = await engine.start(ends_while_it_is_to_pause)
        await until(lambda: run.id in engine.live and engine.live[run.id].performing)
        await run.pause("too late")
        await until(lambda: engine.live[run.id].stop.pause)
        gate.set()
        if not world.replaying:  # which puts the run down after its last step, and so pauses it
            assert await run.result(timeout=60) == "ended"
            await run.rewind(to=0)
            assert await run.result(timeout=60) == "ended"


def test_rewind_point_out_of_range_is_clamped():
    assert gone(9, superseded(5, beyond=10**30)) == []
    assert gone(9, superseded(5, beyond=-7)) == [1, 2, 3, 4]
    assert gone(9, superseded(5, beyond=-7), superseded(8, beyond=-1)) == [1, 2, 3, 4, 5, 6, 7]
