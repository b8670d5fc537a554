"""What the code sees live is what it sees on replay: every value passes through its stored form (K5)."""

import enum
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import pytest

import keepstep as ks
from tests.engine.world import steps_of, until_at_last_wait


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Order:
    name: str
    colour: Colour
    at: datetime
    sizes: tuple[int, ...] = (1, 2)
    tags: set[str] = field(default_factory=set)


ORDER = Order("shoe", Colour.RED, datetime(2026, 1, 2, tzinfo=UTC), (3, 4), {"new"})
VALUES = [
    ORDER,
    Colour.RED,
    datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
    (1, (2, "three"), [4]),
    {1: "int key", (1, 2): "tuple key"},
    {"a", "b"},
    Decimal("1.10"),
    UUID(int=7),
    b"\x00\xff",
    float("inf"),
    None,
    False,
    0,
    "",
    [],
    {"$": "looks like a tag"},
]


@pytest.mark.parametrize("value", VALUES, ids=[type(value).__name__ + str(n) for n, value in enumerate(VALUES)])
async def test_value_comes_back_unchanged_after_a_recovery(world, value, effects):
    @ks.step
    async def give(value: Order | Colour | object) -> Order | Colour | object:
        effects.append(value)
        return value

    seen = []

    @ks.workflow
    async def asking(value: Order | Colour | object) -> Order | Colour | object:
        got = await give(value)
        seen.append(got)
        await ks.wait_for("go")
        return got

    engine = await world.started(linger_seconds=60)
    run = await engine.start(asking, value, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    await run.signal("go")
    result = await run.result(30)
    for one in [*seen, *effects, result]:
        assert one == value
        assert type(one) is type(value)
    assert len(effects) == 1
    await engine.close()


async def test_result_changed_later_leaves_the_history_unchanged(world, effects):
    @ks.step
    async def give():
        effects.append(kept)
        return kept

    @ks.step
    async def use(items):
        items.append("changed by the step")
        return items

    kept = ["a"]

    @ks.workflow
    async def changing():
        got = await give()
        assert got is not kept
        got.append("changed by the workflow")
        kept.append("changed by someone")
        mine = ["mine"]
        used = await use(mine)
        assert mine == ["mine"], "a body must get a copy"
        return [got, used]

    async with world.engine() as engine:
        run = await engine.start(changing)
        assert await run.result(30) == [["a", "changed by the workflow"], ["mine", "changed by the step"]]
        give_record = next(one for one in await run.checkpoints() if one.step == "give#1")
        assert give_record.value == b'["a"]'


async def test_argument_changed_after_the_call_reaches_the_body_unchanged(world):
    @ks.step
    async def count(items):
        return len(items)

    @ks.workflow
    async def changing():
        items = [1, 2]
        call = count(items)
        items.append(3)
        return await call

    async with world.engine() as engine:
        assert await (await engine.start(changing)).result(30) == 2


async def test_input_is_not_shared_between_caller_and_run(world):
    @ks.workflow
    async def taking(items):
        items.append("run")
        await ks.sleep(0)
        return items

    async with world.engine() as engine:
        mine = ["mine"]
        run = await engine.start(taking, mine, run_id="r")
        assert await run.result(30) == ["mine", "run"]
        assert mine == ["mine"]
        assert (await run.input())[0] == [["mine"]]
        assert await run.result(30) == ["mine", "run"]


async def test_failed_step_raises_the_same_error_live_and_on_replay(world, effects):
    """Live as on replay it is StepFailed, built from the record: the body's own exception never reaches the code."""

    class Custom(Exception):
        def __init__(self):
            super().__init__("only here")
            self.secret = object()

    @ks.step
    async def bad():
        effects.append("bad")
        raise Custom

    @ks.workflow
    async def catching():
        try:
            await bad()
        except Custom:
            return "the body's own"
        except ks.StepFailed as error:
            got = [
                type(error).__name__ if error.__cause__ is None else "the body's own is its cause",
                str(error),
                error.step,
                error.error.message,
                error.error.traceback[:9],
            ]
        await ks.wait_for("go")
        return got

    engine = await world.started(linger_seconds=60)
    await engine.start(catching, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("go")
    kind, message, step, told, trace = await run.result(30)
    assert kind == "StepFailed"
    assert "step 'bad#1' failed after 1 attempt:" in message
    assert message.endswith("Custom: only here")
    assert (step, told, trace) == ("bad#1", "only here", "Traceback")
    assert effects == ["bad"]
    await engine.close()


async def test_unstorable_result_fails_the_step_and_is_not_written(world, effects):
    @ks.step
    async def bad():
        effects.append("bad")
        return {"ok": 1, "handle": object()}

    @ks.workflow
    async def storing():
        await bad()

    async with world.engine() as engine:
        run = await engine.start(storing)
        with pytest.raises(ks.RunFailed) as failed:
            await run.result(30)
        assert "bad#1" in str(failed.value)
        assert "handle" in str(failed.value)
        assert "NotSerializable" in str(failed.value)
        assert await steps_of(run) == []
    assert effects == ["bad"]


async def test_unstorable_argument_is_refused_before_the_body(world, effects):
    @ks.step
    async def take(client, number):
        effects.append(number)

    @ks.workflow
    async def passing():
        await take(object(), 1)

    async with world.engine() as engine:
        run = await engine.start(passing)
        with pytest.raises(ks.RunFailed, match="client"):
            await run.result(30)
    assert effects == []


async def test_ignored_parameter_does_not_count_for_the_digest(world, effects):

    @ks.step(ignore=("client",))
    async def take(client, number):
        effects.append(number)
        return number

    @ks.workflow
    async def passing():
        await take(object(), 1)
        await take(number=2, client=object())
        return await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    await engine.start(passing, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("go")
    assert await run.result(30) is True
    assert effects == [1, 2]
    await engine.close()


async def test_unstorable_workflow_result_fails_the_run(world):
    @ks.workflow
    async def bad():
        return object()

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match=r"NotSerializable.*workflow 'bad'"):
            await (await engine.start(bad)).result(30)


async def test_unstorable_input_starts_no_run(world):
    @ks.workflow
    async def taking(thing):
        return 1

    async with world.engine() as engine:
        with pytest.raises(ks.NotSerializable, match="taking"):
            await engine.start(taking, object(), run_id="r")
        with pytest.raises(ks.RunNotFound):
            await engine.get("r")


async def test_value_over_the_limit_is_refused_with_the_step_named(world, effects):
    @ks.step
    async def large(size):
        effects.append(size)
        return "x" * size

    @ks.workflow
    async def growing():
        await large(10)
        try:
            await large(2000)
        except ks.StepFailed as error:
            return error.error.message

    async with world.engine(max_value_bytes=1000) as engine:
        message = await (await engine.start(growing)).result(30)
    assert "large#2" in message
    assert "2,002 bytes" in message
    assert "1,000" in message


async def test_large_value_survives_compression(world):
    @ks.step
    async def large():
        return ["x" * 1000] * 300

    @ks.workflow
    async def growing():
        got = await large()
        await ks.wait_for("go")
        return got

    engine = await world.started(linger_seconds=60)
    await engine.start(growing, run_id="r")
    await until_at_last_wait(engine, "r")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("go")
    assert await run.result(30) == ["x" * 1000] * 300
    await engine.close()
