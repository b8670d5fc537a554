"""Code that no longer fits its history is found before anything new runs, and leaves the run to a person (K3, K7)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.workflows.definition import Step
from tests.engine.world import steps_of, told, until, until_at_last_wait, until_status


def steps(effects):
    @ks.step
    async def book(what):
        effects.append(f"book {what}")
        return what

    @ks.step
    async def pay(what):
        effects.append(f"pay {what}")
        return what

    @ks.step
    async def mail(what):
        effects.append(f"mail {what}")
        return what

    return book, pay, mail


def trip(*calls):
    """Code that makes these calls, one after the other, and then waits."""

    async def code():
        for step, what in calls:
            await step(what)
        await ks.wait_for("go")

    return code


async def deployed(world, effects, old, new, *, allowed=False, old_options=None, new_options=None):
    """Run the old code up to its wait, then recover with the new code: what becomes of the run."""
    ks.workflow(name="trip", **(old_options or {}))(old)
    engine = await world.started(linger_seconds=60)
    run = await engine.start("trip", run_id="r")
    await until_at_last_wait(engine, "r")
    before, ran = await told(run), list(effects)
    await world.crash(engine)
    ks.workflow(name="trip", **(new_options or {}))(new)
    engine = await world.started(linger_seconds=60)
    run = await engine.get("r")
    if allowed:
        await run.signal("go")
        return await run.result(30)
    with pytest.raises(ks.RunSetAside) as refused:
        await run.result(30)
    assert effects == ran, "something new ran before the change was found"
    assert (await told(run))[:-1] == before
    assert (await run.run()).status is ks.Status.SET_ASIDE
    await engine.close()
    return str(refused.value)


async def test_inserted_step_is_a_replay_mismatch(world, effects):
    book, pay, mail = steps(effects)

    old = trip((book, "flight"), (pay, "flight"))
    new = trip((book, "flight"), (mail, "flight"), (pay, "flight"))

    message = await deployed(world, effects, old, new)
    assert "ReplayMismatch" in message
    assert "call 2" in message
    assert "recorded as pay#1" in message
    assert "asks for mail#1" in message


async def test_removed_step_is_a_replay_mismatch(world, effects):
    book, pay, mail = steps(effects)

    old = trip((book, "flight"), (pay, "flight"), (mail, "flight"))
    new = trip((book, "flight"), (mail, "flight"))

    message = await deployed(world, effects, old, new)
    assert "mail#1 was recorded as call 3 of its branch and is now call 2" in message


async def test_removed_last_step_is_a_replay_mismatch(world, effects):
    book, pay, _ = steps(effects)

    old = trip((book, "flight"), (pay, "flight"))

    async def new():
        await book("flight")

    message = await deployed(world, effects, old, new)
    assert "recorded pay#1" in message


async def test_renamed_step_is_a_replay_mismatch(world, effects):
    book, pay, _ = steps(effects)
    charge = Step(pay.fn, name="charge")

    old = trip((book, "flight"), (pay, "flight"))
    new = trip((book, "flight"), (charge, "flight"))

    message = await deployed(world, effects, old, new)
    assert "recorded as pay#1" in message
    assert "asks for charge#1" in message


async def test_reordered_steps_are_a_replay_mismatch(world, effects):
    book, pay, _ = steps(effects)

    old = trip((book, "flight"), (pay, "flight"))
    new = trip((pay, "flight"), (book, "flight"))

    message = await deployed(world, effects, old, new)
    assert "pay#1 was recorded as call 2 of its branch and is now call 1" in message


async def test_changed_input_is_a_replay_mismatch(world, effects):
    book, pay, _ = steps(effects)

    old = trip((book, "flight"), (pay, "flight"))
    new = trip((book, "train"), (pay, "flight"))

    message = await deployed(world, effects, old, new)
    assert "book#1 was recorded with another input at seq 2" in message


async def test_step_inserted_before_an_open_wait_does_not_run(world, effects):
    """The new step stands where the history holds a wait: it must not run, though it has no record of its own."""
    book, _, mail = steps(effects)

    async def old():
        await book("flight")
        await ks.sleep(60)

    async def new():
        await book("flight")
        await mail("flight")
        await ks.sleep(60)

    ks.workflow(name="trip")(old)
    engine = await world.started()
    run = await engine.start("trip", run_id="r")
    await until_status(run, "waiting")
    await world.crash(engine)
    ks.workflow(name="trip")(new)
    async with world.engine() as engine:
        run = await engine.get("r")
        # A wait leaves no record before it ends, so this change cannot be seen, and is allowed.
        await run.signal("unheard")
        assert await steps_of(run) == ["book#1"]
        assert await run.status() is ks.Status.WAITING


async def test_added_branch_is_a_replay_mismatch(world, effects):
    book, pay, mail = steps(effects)

    async def old():
        await ks.gather(_twice(book, "a"), _twice(pay, "b"))
        await ks.wait_for("go")

    async def new():
        await ks.gather(_twice(mail, "c"), _twice(book, "a"), _twice(pay, "b"))
        await ks.wait_for("go")

    message = await deployed(world, effects, old, new)
    assert "book#1" in message
    assert "mail#1" in message


async def _twice(step, what):
    await step(what)
    await step(what)


async def test_def_workflow_stops_at_a_mismatch(world, effects):
    book, pay, mail = steps(effects)

    def old():
        book("flight").result()
        pay("flight").result()
        ks.wait_for("go").result()

    def new():
        book("flight").result()
        mail("flight").result()
        pay("flight").result()
        ks.wait_for("go").result()

    message = await deployed(world, effects, old, new)
    assert "recorded as pay#1" in message
    assert "asks for mail#1" in message


async def test_swallowed_mismatch_sets_the_run_aside(world, effects):
    book, pay, mail = steps(effects)

    old = trip((book, "flight"), (pay, "flight"))

    async def new():
        await book("flight")
        try:
            await mail("flight")
        except BaseException:
            effects.append("swallowed")
            effects.remove("swallowed")
        finally:
            for _ in range(3):
                try:
                    await pay("train")
                except BaseException:
                    continue
        return "done"

    message = await deployed(world, effects, old, new)
    assert "mail#1" in message


# -- allowed changes ---------------------------------------------------------------------------------------------------


async def test_compatible_workflow_may_insert_a_step(world, effects):
    book, pay, mail = steps(effects)

    old = trip((book, "flight"), (pay, "flight"))

    async def new():
        await book("flight")
        extra = await mail("flight")
        await pay("flight")
        await ks.wait_for("go")
        return extra

    new_options = {"version": "2", "on_change": "compatible"}
    assert await deployed(world, effects, old, new, allowed=True, new_options=new_options) == "flight"
    assert effects == ["book flight", "pay flight", "mail flight"]


async def test_compatible_workflow_may_not_drop_a_recorded_step(world, effects):
    book, pay, _ = steps(effects)

    old = trip((book, "flight"), (pay, "flight"))
    new = trip((book, "flight"))

    with pytest.raises(ks.RunSetAside, match="recorded pay#1, which"):
        await deployed(world, effects, old, new, allowed=True, new_options={"version": "2", "on_change": "compatible"})
    assert effects == ["book flight", "pay flight"]


async def test_compatible_workflow_may_wait_between_recorded_steps(world, effects):
    book, pay, _ = steps(effects)

    @ks.workflow(name="trip")
    async def old():
        await book("flight")
        await pay("flight")
        await ks.wait_for("go")
        return "done"

    async with world.engine(workflows=[old]) as engine:
        await until_status(await engine.start(old, run_id="r"), "waiting")

    @ks.workflow(name="trip", version="2", on_change="compatible")
    async def new():
        await book("flight")
        await ks.wait_for("checked")
        await pay("flight")
        await ks.wait_for("go")
        return "done"

    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        await until(
            lambda: "r" in engine.live and any(one.name == "checked" for one in engine.live["r"].waits.values())
        )
        await until_status(run, "waiting")
        await run.signal("checked")
        assert await run.result(30) == "done"
    assert effects == ["book flight", "pay flight"]


async def test_another_version_sets_the_run_aside(world, effects):
    book, _, _ = steps(effects)

    code = trip((book, "flight"))

    message = await deployed(world, effects, code, code, new_options={"version": "2"})
    assert "DefinitionChanged" in message
    assert "began under version '1', and this worker has '2'" in message


async def test_pinned_run_is_claimed_only_by_its_version(world, effects):
    book, _, _ = steps(effects)

    async def code():
        await book("flight")
        await ks.wait_for("go")
        return "done"

    ks.workflow(name="trip", on_change="pin")(code)
    engine = await world.started(linger_seconds=60)
    await engine.start("trip", run_id="r")
    await until_at_last_wait(engine, "r")
    await world.crash(engine)
    ks.workflow(name="trip", version="2", on_change="pin")(code)
    async with world.engine() as engine:
        other = await engine.start("trip", run_id="new")
        await other.signal("go")
        assert await other.result(30) == "done"
        run = await engine.get("r")
        assert (await run.run()).worker not in {None, engine.worker.id}
    ks.workflow(name="trip", version="1", on_change="pin")(code)
    async with world.engine() as engine:
        run = await engine.get("r")
        await run.signal("go")
        assert await run.result(30) == "done"


async def test_patch_leaves_runs_past_it_unchanged(world, effects):
    book, pay, mail = steps(effects)

    async def old():
        await book("flight")
        await pay("flight")
        await ks.wait_for("go")
        return "old"

    async def new():
        await book("flight")
        if ks.patched("mail first"):
            await mail("flight")
        await pay("flight")
        await ks.wait_for("go")
        return "new" if ks.patched("mail first") else "old"

    assert await deployed(world, effects, old, new, allowed=True) == "old"
    assert effects == ["book flight", "pay flight"]


async def test_patch_is_kept_by_runs_that_took_it(world, effects):
    book, pay, mail = steps(effects)

    async def new():
        await book("flight")
        if ks.patched("mail first"):
            await mail("flight")
        await pay("flight")
        await ks.wait_for("go")
        return "new" if ks.patched("mail first") else "old"

    assert await deployed(world, effects, new, new, allowed=True) == "new"
    assert effects == ["book flight", "mail flight", "pay flight"]


async def test_patch_first_reached_after_a_recovery_applies(world, effects):
    """The run stopped before the changed place, so the change is for it."""
    book, pay, mail = steps(effects)

    async def old():
        await book("flight")
        await ks.wait_for("go")
        await pay("flight")
        return "old"

    async def new():
        await book("flight")
        await ks.wait_for("go")
        if ks.patched("mail first"):
            await mail("flight")
        await pay("flight")
        return "new"

    assert await deployed(world, effects, old, new, allowed=True) == "new"
    assert effects == ["book flight", "mail flight", "pay flight"]


async def test_removed_step_is_a_mismatch_under_a_shield(world, effects):
    """Else a task that waits inside `asyncio.shield` looks busy for ever, and the mismatch is never judged."""
    book, pay, _ = steps(effects)

    async def old():
        await book("flight")
        await pay("flight")
        await asyncio.shield(ks.wait_for("go"))

    async def new():
        await asyncio.shield(asyncio.ensure_future(ks.wait_for("go")))

    old_wait = await deployed(world, effects, old, new)
    assert "replay mismatch" in old_wait


@pytest.mark.live_only
async def test_run_that_waits_under_a_shield_is_parked(world):
    @ks.workflow
    async def guarded():
        return await asyncio.shield(ks.wait_for("go"))

    async with world.engine() as engine:
        run = await engine.start(guarded)
        await until_status(run, "waiting")
        await run.signal("go", 3)
        assert await run.result(timeout=60) == 3
