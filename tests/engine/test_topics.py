"""Topics: messages reach all subscribers in order and once, and publishers wait for slow ones (F3, L37)."""

import asyncio

import pytest

import keepstep as ks
from keepstep.kernel.topic import FULL_AT, MOST_UNREAD
from keepstep.model.keepers import topic_id
from tests.engine.world import KEYS, until, until_status

pytestmark = pytest.mark.on_postgres

NEWS = ks.Topic("news")


@ks.workflow(name="subscriber of news")
async def subscriber(count):
    seen = []
    async with NEWS.subscribe() as messages:
        ks.publish("ready", True)
        async for message in messages:
            seen.append(message)
            if len(seen) == count:
                break
    return seen


@ks.workflow(name="plain subscriber of news")
def plain_subscriber(count):
    seen = []
    with NEWS.subscribe() as messages:
        ks.publish("ready", True)
        for message in messages:
            seen.append(message)
            if len(seen) == count:
                break
    return seen


@ks.workflow(name="publisher of news")
async def publisher(values):
    for value in values:
        await NEWS.publish(value)


@ks.workflow(name="plain publisher of news")
def plain_publisher(values):
    NEWS.publish(*values).result()


async def until_ready(*handles):
    async def ready():
        return all([(await one.published()).get("ready") for one in handles])

    await until(ready, "a subscription")


async def test_all_subscribers_get_all_messages_in_order(world):
    values = [{"number": number, "pair": (number, None)} for number in range(30)]
    async with world.engine() as engine:
        readers = [await engine.start(workflow, 30) for workflow in (subscriber, subscriber, plain_subscriber)]
        await until_ready(*readers)
        await (await engine.start(publisher, values[:10])).result(60)
        await engine.start(plain_publisher, values[10:])
        for reader in readers:
            assert await reader.result(60) == values


async def test_subscriber_begins_with_its_subscription(world):
    async with world.engine() as engine:
        await (await engine.start(publisher, ["early"])).result(30)
        reader = await engine.start(subscriber, 1)
        await until_ready(reader)
        await (await engine.start(publisher, ["late"])).result(30)
        assert await reader.result(30) == ["late"]


@ks.workflow(name="reads on request")
async def on_request(count):
    """Reads as many messages as each signal says, until it is told 0."""
    seen = []
    async with NEWS.subscribe() as messages:
        ks.publish("ready", True)
        while wanted := await ks.wait_for("read"):
            seen += [await messages.next() for _ in range(wanted)]
            ks.publish("seen", len(seen))
    assert seen == list(range(count))
    return len(seen)


@ks.workflow(name="publishes many")
async def publish_many(first, last, size):
    for start in range(first, last, size):
        await NEWS.publish(*range(start, min(start + size, last)))
        ks.publish("sent", min(start + size, last))


async def unread(engine):
    (info,) = await engine.topics.list()
    return info.unread


@pytest.mark.one_store
@pytest.mark.live_only
@pytest.mark.parametrize("size", [1, 70])
async def test_publishers_wait_for_a_slow_subscriber(world, size):
    total = 2000
    async with world.engine() as engine:
        slow = await engine.start(on_request, total)
        fast = await engine.start(subscriber, total)
        await until_ready(slow, fast)
        writer = await engine.start(publish_many, 0, total, size)
        await until_status(writer, "waiting")
        sent = (await writer.published())["sent"]
        assert FULL_AT - 60 <= sent < MOST_UNREAD, sent
        assert "room:news" in str((await writer.run()).wakes)
        read = 0
        while read < total:
            await slow.signal("read", min(350, total - read))
            read += min(350, total - read)
            await until(lambda now=read: is_seen(slow, now))
            assert await unread(engine) <= MOST_UNREAD
        await slow.signal("read", 0)
        assert await slow.result(60) == total
        assert await fast.result(60) == list(range(total))
        await writer.result(60)


async def is_seen(handle, count):
    return (await handle.published()).get("seen", 0) >= count


async def test_ended_subscriber_holds_up_nobody(world):
    async with world.engine() as engine:
        stuck = await engine.start(on_request, 0)
        await until_ready(stuck)
        await (await engine.start(publish_many, 0, FULL_AT, 200)).result(60)
        writer = await engine.start(publish_many, FULL_AT, FULL_AT + 1, 1)
        await until(lambda: waits_for_room(engine))
        await stuck.cancel()
        await writer.result(60)

        async def is_idle():
            info = await engine.topics.get("news")
            return (info.published, info.subscribers, info.publishers) == (FULL_AT + 1, (), ())

        await until(is_idle)


async def waits_for_room(engine):
    return bool((await engine.topics.get("news")).publishers)


@ks.workflow(name="series of subscribers")
async def series(total, seen=()):
    async with NEWS.subscribe() as messages:
        ks.publish("ready", True)
        for _ in range(7):
            seen = (*seen, await messages.next())
            if len(seen) == total:
                break
        else:
            ks.continue_as(total, seen)
    return list(seen)


async def test_subscription_survives_continue_as(world):
    async with world.engine() as engine:
        reader = await engine.start(series, 50)
        await until_ready(reader)
        await (await engine.start(publisher, list(range(50)))).result(60)
        assert await reader.result(60) == list(range(50))


async def test_fork_subscribes_for_itself(world):
    async with world.engine() as engine:
        reader = await engine.start(subscriber, 2)
        await until_ready(reader)
        fork = await engine.fork(reader.id)

        async def two():
            return len((await engine.topics.get("news")).subscribers) == 2

        await engine.publish("news", "first")
        await until(two, "the fork's subscription")
        await engine.publish("news", "second")
        assert await reader.result(30) == ["first", "second"]
        await engine.publish("news", "third")
        assert (await fork.result(30))[-1] in {"second", "third"}


async def test_next_message_may_be_late(world):
    @ks.workflow(name="impatient subscriber")
    async def impatient():
        async with NEWS.subscribe() as messages:
            first = await messages.next(0.01, default="nothing")
            try:
                await messages.next(timeout=0.01)
            except ks.TimedOut as error:
                return first, str(error)

    async with world.engine() as engine:
        assert await (await engine.start(impatient)).result(30) == (
            "nothing",
            "no message of topic 'news' came within 0.01 s",
        )


async def test_program_publishes_and_lists(world):
    async with world.engine() as engine:
        reader = await engine.start(subscriber, 3)
        await until_ready(reader)
        await engine.publish("news", 1, 2)
        await engine.topics.publish("news", 3)
        assert await reader.result(30) == [1, 2, 3]
        assert [one.name for one in await engine.topics.list()] == ["news"]
        assert await engine.topics.recent("news", 2) == [2, 3]
        with pytest.raises(ks.RunNotFound, match="no topic 'old'"):
            await engine.topics.get("old")
        with pytest.raises(ks.DefinitionError, match="at most 200"):
            await engine.publish("news", *range(201))
        with pytest.raises(ks.DefinitionError, match="at least one value"):
            await engine.publish("news")


async def test_cancelled_topic_fails_the_waits_for_it(world):
    async with world.engine() as engine:
        reader = await engine.start(subscriber, 1)
        await until_ready(reader)
        topic = await engine.get(topic_id("news"))
        await topic.cancel("no more news")
        with pytest.raises(ks.RunFailed, match="topic 'news' was cancelled"):
            await reader.result(30)
        assert (await topic.run()).status == "cancelled", "leaving it creates no new one"
        again = await engine.start(subscriber, 1)
        await until_ready(again)
        await engine.publish("news", "again")
        assert await again.result(30) == ["again"]


async def test_paused_topic_keeps_its_messages(world):
    async with world.engine() as engine:
        reader = await engine.start(subscriber, 2)
        await until_ready(reader)
        topic = await engine.get(topic_id("news"))
        await topic.pause()
        await until_status(topic, "paused")
        await engine.publish("news", 1, 2)
        assert (await topic.run()).due_at is None
        await topic.resume()
        assert await reader.result(30) == [1, 2]


async def test_secret_is_not_published(world, monkeypatch):
    if world.encrypted:
        pytest.skip("an encrypted store may hold secrets")
    monkeypatch.setenv("API_TOKEN", "s3cret-value-of-the-token")
    secret = ks.Secret("API_TOKEN").reveal()

    @ks.workflow(name="publishing a secret")
    async def leaking():
        await NEWS.publish({"token": ks.Secret("API_TOKEN").reveal()})

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="revealed secret"):
            await (await engine.start(leaking)).result(30)
        with pytest.raises(ks.NotSerializable, match="revealed secret"):
            await engine.publish("news", secret)


async def test_foreign_signal_does_not_stop_a_topic(world):
    async with world.engine() as engine:
        reader = await engine.start(subscriber, 1)
        await until_ready(reader)
        await engine.signal(topic_id("news"), "hello", [1, 2])
        await engine.publish("news", "still here")
        assert await reader.result(30) == ["still here"]


async def test_large_messages_are_passed_on_in_parts(world):
    async with world.engine() as engine:
        reader = await engine.start(lengths, 6)
        await until_ready(reader)
        await engine.publish("news", *("x" * 400_000 for _ in range(6)))
        assert await reader.result(60) == [400_000] * 6


@ks.workflow(name="lengths of news")
async def lengths(count):
    async with NEWS.subscribe() as messages:
        ks.publish("ready", True)
        return [len(await messages.next()) for _ in range(count)]


async def test_batch_gives_all_that_came_together(world):
    @ks.workflow(name="batches of news")
    async def batches():
        seen = []
        async with NEWS.subscribe() as messages:
            ks.publish("ready", True)
            while len(seen) < 20:
                seen += await messages.batch()
        return seen

    async with world.engine() as engine:
        reader = await engine.start(batches)
        await until_ready(reader)
        await engine.publish("news", *range(20))
        assert await reader.result(30) == list(range(20))
        records = [one for one in await reader.checkpoints() if one.step.startswith("topic.next")]
        assert len(records) == 1


async def test_outside_publisher_waits_for_room(world):
    async with world.engine() as engine:
        slow = await engine.start(on_request, FULL_AT + 1)
        await until_ready(slow)
        for start in range(0, FULL_AT, 200):
            await engine.publish("news", *range(start, start + 200))
        await until(lambda: is_full(engine))
        with pytest.raises(ks.TimedOut, match="800 unread"):
            await engine.publish("news", "too much", timeout=0.05)
        waits = asyncio.ensure_future(engine.publish("news", FULL_AT))
        await slow.signal("read", FULL_AT + 1)
        await waits
        await slow.signal("read", 0)
        assert await slow.result(60) == FULL_AT + 1


async def is_full(engine):
    return await unread(engine) >= FULL_AT


async def test_messages_are_encrypted_with_everything_else(tmp_path):
    path = tmp_path / "runs.db"
    async with ks.Engine(str(path), keys=KEYS, linger_seconds=0.05) as engine:
        reader = await engine.start(subscriber, 2)
        await until_ready(reader)
        await engine.publish("news", "a needle in the haystack")
        await (await engine.start(publisher, ["another needle"])).result(30)
        assert await reader.result(30) == ["a needle in the haystack", "another needle"]
        assert await engine.topics.recent("news", 1) == ["another needle"]
    stored = b"".join(one.read_bytes() for one in tmp_path.iterdir() if one.is_file())
    assert b"news" in stored, "names stay readable"
    assert b"needle" not in stored


async def test_two_tasks_cannot_read_at_once(world):
    @ks.workflow(name="greedy subscriber")
    async def greedy():
        async with NEWS.subscribe() as messages:
            await ks.gather(messages.next(), messages.next())

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="awaited by another task"):
            await (await engine.start(greedy)).result(30)


async def test_race_leaves_the_message_unread(world):
    @ks.workflow(name="racing subscriber")
    async def racing():
        async with NEWS.subscribe() as messages:
            ks.publish("ready", True)
            first = await ks.race(messages.next(), ks.wait_for("go"))
            return first, await messages.next()

    async with world.engine() as engine:
        run = await engine.start(racing)
        await until_ready(run)
        await run.signal("go", "signal")
        await until(lambda: _has_record(run, "wait_for:go#1"))
        await engine.publish("news", "message")
        assert await run.result(30) == ("signal", "message")


async def _has_record(handle, step):
    return any(one.step.endswith(step) for one in await handle.checkpoints())
