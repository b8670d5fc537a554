"""Waits that outsiders fail, keep alive or end with a token."""

import asyncio

import pytest

import keepstep as ks
from keepstep import testing
from keepstep.testing.faults.crash import MemoryDisk, crash_everywhere
from tests.engine.world import KEYS, replay_from_every_prefix, told, until, until_at_last_wait, until_status

pytestmark = pytest.mark.on_postgres

HOUR = 3600.0


class CardDeclined(Exception):
    """An error that a service reports."""


# -- waits that fail ---------------------------------------------------------------------------------------------------


@ks.workflow(name="paying")
async def paying():
    try:
        return await ks.wait_for("payment")
    except ks.WaitFailed as error:
        return [str(error), error.error.type, error.error.message]


@pytest.mark.parametrize(
    "error, options, kind",
    [
        (CardDeclined("no funds"), {}, "tests.engine.test_callbacks.CardDeclined"),
        ("no funds", {"type": "CardDeclined"}, "CardDeclined"),
        ("no funds", {}, "keepstep.WaitFailed"),
    ],
)
async def test_reported_error_is_raised_with_class_and_message(world, error, options, kind):
    async with world.engine() as engine:
        run = await engine.start(paying)
        await run.fail("payment", error, **options)
        message, kind_, told_ = await run.result(30)
        assert (kind_, told_) == (kind, "no funds")
        assert message == f"the wait for 'payment' failed: {kind}: no funds"


async def test_error_reported_early_is_kept_and_replayed(world):
    @ks.workflow
    async def late():
        await ks.sleep(0.01)
        return await paying.fn()

    async with world.engine() as engine:
        run = await engine.start(late)
        await run.fail("payment", CardDeclined("no funds"))
        result = await run.result(30)

        async def check(recovered, _):
            assert await recovered.result(30) == result

    if world.kind == "memory" and not world.encrypted:
        await replay_from_every_prefix(run, check)


async def test_reported_error_wakes_a_parked_run(world):
    async with world.engine() as engine:
        run = await engine.start(paying)
        await until_status(run, "waiting")
        await run.fail("payment", "no funds", type="CardDeclined")
        assert (await run.result(30))[1] == "CardDeclined"


async def test_retry_after_a_reported_error_waits_again(world):
    @ks.workflow
    async def strict():
        return await ks.wait_for("payment")

    async with world.engine() as engine:
        run = await engine.start(strict)
        await run.fail("payment", "no funds")
        with pytest.raises(ks.RunFailed, match="no funds"):
            await run.result(30)
        await run.retry()
        await run.signal("payment", "paid")
        assert await run.result(30) == "paid"


async def test_reported_error_that_lost_a_race_stays_unread(world):
    @ks.workflow
    async def both():
        await ks.race(ks.wait_for("go"), ks.wait_for("payment"))
        return await paying.fn()

    async with world.engine(worker=False) as client:
        run = await client.start(both)
        await run.signal("go")
        await run.fail("payment", "no funds", type="CardDeclined")
        async with world.engine():
            assert (await run.result(30))[1] == "CardDeclined"


# -- heartbeats --------------------------------------------------------------------------------------------------------


@ks.workflow(name="beating")
async def beating(heartbeat, longest=None):
    try:
        return await ks.wait_for("done", timeout=longest, heartbeat=heartbeat)
    except ks.TimedOut as late:
        return str(late)


async def test_silence_ends_the_wait(world):
    async with world.engine() as engine:
        run = await engine.start(beating, 0.05)
        assert await run.result(30) == "no heartbeat for signal 'done' came within 0.05 s"


async def test_beats_keep_a_run_in_memory_waiting(world):
    async with world.engine() as engine:
        run = await engine.start(beating, 0.8)
        for _ in range(6):
            await asyncio.sleep(0.25)
            await run.beat("done")
        assert await run.status() in ("running", "waiting")
        assert await run.result(30) == "no heartbeat for signal 'done' came within 0.8 s"


def test_beats_keep_a_parked_run_waiting_and_silence_ends_it():
    with testing.world() as world:
        run = world.start(beating, HOUR)
        for _ in range(10):
            world.advance(minutes=50)
            run.beat("done")
        assert run.status() == ks.Status.WAITING
        begun = world.now
        assert run.result() == "no heartbeat for signal 'done' came within 3600 s"
        assert (world.now - begun).total_seconds() == pytest.approx(HOUR, abs=5)


def test_beat_does_not_wake_a_parked_run():
    with testing.world() as world:
        run = world.start(beating, HOUR)
        world.advance(minutes=10)
        epoch = run.run().epoch
        run.beat("done")
        world.advance(minutes=10)
        assert run.run().epoch == epoch
        run.signal("done", "yes")
        assert run.result() == "yes"


def test_timeout_ends_a_wait_with_heartbeats():
    with testing.world() as world:
        run = world.start(beating, HOUR, 2.5 * HOUR)
        begun = world.now
        for _ in range(3):
            world.advance(minutes=45)
            run.beat("done")
        assert run.result() == "no signal 'done' came within 9000 s"
        assert (world.now - begun).total_seconds() == pytest.approx(2.5 * HOUR, abs=5)


async def test_beats_before_a_crash_count_after_it(world):
    engine = await world.started()
    run = await engine.start(beating, 1.0)
    await until_at_last_wait(engine, run.id)
    await asyncio.sleep(0.7)
    await run.beat("done")
    engine = await world.crash_and_recover(engine)
    run = await engine.get(run.id)
    await asyncio.sleep(0.6)  # 1.3 s after the beginning, and 0.6 s after the beat
    await run.signal("done", "yes")
    assert await run.result(30) == "yes"
    await engine.close()


async def test_audit_names_heartbeats_and_reported_errors(world):
    async with world.engine() as engine:
        run = await engine.start(paying)
        await run.by("ann").beat("payment")
        await run.by("bob").fail("payment", "no funds", type="CardDeclined")
        await run.result(30)
        entries = {entry.what: entry for entry in await run.audit()}
        assert entries["heartbeat for payment sent"].actor == "ann"
        assert entries["signal received"].actor == "bob"
        assert entries["signal received"].reason == "CardDeclined: no funds"


async def test_dry_replay_performs_no_check(world, effects):
    @ks.workflow
    async def waits():
        return await ks.wait_until(lambda: effects.append("look"), every=HOUR)

    async with world.engine() as engine:
        run = await engine.start(waits)
        await until_status(run, "waiting")
        before = len(effects)
        assert (await run.replay()).asks == ("lambda#1",)
        assert len(effects) == before


async def test_beats_are_no_answer_and_do_not_move_to_a_successor(world):
    @ks.workflow
    async def series(turn):
        if turn == 0:
            await ks.sleep(0.02)
            ks.continue_as(1)
        return await ks.wait_for("done", timeout=5)

    async with world.engine() as engine:
        run = await engine.start(series, 0)
        await run.beat("done")
        await run.signal("done", "yes")
        assert await run.result(30) == "yes"
        assert [one.name for one in await engine.signals((await run.latest()).id)] == ["done"]


@pytest.mark.one_store
async def test_heartbeat_of_no_time_is_refused(world):
    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="heartbeat must be longer"):
            await (await engine.start(beating, 0)).result(30)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def hooked(sent, **options):
    """A workflow that sends its token out and waits for the answer."""

    @ks.step
    async def send(token):
        sent.append(token)

    @ks.workflow(name="hooked")
    async def program():
        callback = await ks.callback("payment")
        await send(callback.token)
        try:
            return await callback.wait(**options)
        except (ks.WaitFailed, ks.TimedOut) as error:
            return [type(error).__name__, str(error)]

    return program


async def test_token_completes_its_wait(world):
    sent = []
    async with world.engine() as engine:
        run = await engine.start(hooked(sent))
        await until(lambda: sent)
        async with world.engine(worker=False) as web:
            await web.complete(sent[0], {"paid": (1, 2)})
        assert await run.result(30) == {"paid": (1, 2)}


async def test_token_is_the_same_on_replay_and_wakes_a_parked_run(world):
    sent = []

    @ks.workflow
    async def program():
        callback = await ks.callback()
        sent.append(callback.token)
        return await callback.wait()

    engine = await world.started()
    run = await engine.start(program)
    await until_status(run, "waiting")
    engine = await world.crash_and_recover(engine)
    await engine.complete(sent[0], "yes")
    assert await (await engine.get(run.id)).result(30) == "yes"
    await engine.close()
    assert len(sent) > 1
    assert len(set(sent)) == 1


async def test_token_is_durable_before_it_is_given_out_whatever_the_durability(world):
    sent = []

    @ks.step
    async def send(token):
        sent.append(token)
        await asyncio.sleep(0.05)

    @ks.workflow(durability="at_exit")
    async def program():
        callback = await ks.callback()
        await send(callback.token)
        return await callback.wait()

    engine = await world.started()
    run = await engine.start(program)
    await until(lambda: sent)
    engine = await world.crash_and_recover(engine)
    await engine.complete(sent[0], "yes")
    assert await (await engine.get(run.id)).result(30) == "yes"
    await engine.close()
    assert len(set(sent)) == 1


async def test_token_fails_its_wait(world):
    sent = []
    async with world.engine() as engine:
        run = await engine.start(hooked(sent))
        await until(lambda: sent)
        await engine.fail(sent[0], CardDeclined("no funds"))
        name, message = await run.result(30)
        assert name == "WaitFailed"
        assert "CardDeclined: no funds" in message


def test_token_beats_its_wait():
    sent = []
    with testing.world() as world:
        run = world.start(hooked(sent, heartbeat=HOUR))
        for _ in range(3):
            world.advance(minutes=50)
            world.beat(sent[0])
        assert run.status() == ks.Status.WAITING
        assert run.result() == ["TimedOut", "no heartbeat for callback 'payment' came within 3600 s"]


async def test_same_answer_again_changes_nothing_and_another_is_refused(world):
    sent = []

    @ks.workflow
    async def program():
        callback = await ks.callback()
        sent.append(callback.token)
        value = await callback.wait()
        return [value, await ks.wait_for("end")]

    async with world.engine() as engine:
        run = await engine.start(program)
        await until(lambda: sent)
        token = sent[0]
        await asyncio.gather(*(engine.complete(token, {"paid": 1}) for _ in range(3)))
        for _ in range(2):
            await engine.complete(token, {"paid": 1})
            for use in (engine.complete(token, 2), engine.fail(token, "no"), engine.complete(token)):
                with pytest.raises(ks.AlreadyFinished, match="answered otherwise"):
                    await use
        await until(lambda: _read(run))
        with pytest.raises(ks.AlreadyFinished, match="answered otherwise"):
            await engine.beat(token)
        await run.signal("end", "over")
        assert await run.result(30) == [{"paid": 1}, "over"]
        with pytest.raises(ks.AlreadyFinished):
            await engine.complete(token, 2)


async def _read(run):
    return any(one.kind.value == "signal received" for one in await run.checkpoints())


async def test_same_error_again_changes_nothing(world):
    sent = []
    async with world.engine() as engine:
        run = await engine.start(hooked(sent))
        await until(lambda: sent)
        await engine.fail(sent[0], "no funds", type="CardDeclined")
        assert (await run.result(30))[0] == "WaitFailed"
        await engine.fail(sent[0], "no funds", type="CardDeclined")
        with pytest.raises(ks.AlreadyFinished):
            await engine.complete(sent[0], "paid")


async def test_wrong_tokens_are_unknown(world):
    sent = []
    async with world.engine() as engine:
        run = await engine.start(hooked(sent))
        await until(lambda: sent)
        secret, number, run_id = sent[0].removeprefix("cb_").split(".", 2)
        other = "0" * len(secret)
        wrong = [
            *("", "cb_", "cb_a", run.id, None, 7, sent[0][:-1], f"x{sent[0]}", f"{secret}.{number}.{run_id}"),
            *(f"cb_{other}.{number}.{run_id}", f"cb_{secret}.1.{run_id}", f"cb_{secret}.3.{run_id}"),
            *(f"cb_{secret}.{10**30}.{run_id}", f"cb_{secret}.{number}.missing", f"cb_{secret}.{number}.../x"),
        ]
        for token in wrong:
            for use in (engine.complete(token, 1), engine.fail(token, "no"), engine.beat(token)):
                with pytest.raises(ks.UnknownToken) as error:
                    await use
                assert secret not in str(error.value)
        await engine.complete(sent[0], "right")
        assert await run.result(30) == "right"


async def test_tokens_of_two_runs_and_of_two_calls_differ(world):
    sent = []

    @ks.workflow
    async def program():
        callbacks = [await ks.callback(), await ks.callback()]
        tokens = [one.token for one in callbacks]
        sent.append(tokens)
        return await ks.gather(*(one.wait() for one in callbacks))

    async with world.engine() as engine:
        runs = [await engine.start(program, run_id=f"run {number}") for number in range(2)]
        await until(lambda: len({tuple(one) for one in sent}) == 2)
        tokens = {tokens[0].rpartition(".")[2]: tokens for tokens in sent}
        secrets = {token.split(".")[0] for both in tokens.values() for token in both}
        assert len(secrets) == 4
        for run in runs:
            first, second = tokens[run.id]
            await engine.complete(second, f"{run.id} second")
            await engine.complete(first, f"{run.id} first")
        for run in runs:
            assert await run.result(30) == [f"{run.id} first", f"{run.id} second"]


async def test_wait_that_timed_out_may_wait_again(world):
    sent = []

    @ks.workflow
    async def program():
        callback = await ks.callback()
        sent.append(callback.token)
        while (answer := await callback.wait(timeout=0.02, default=None)) is None:
            pass
        return answer

    async with world.engine() as engine:
        run = await engine.start(program)
        await until(lambda: sent)
        await asyncio.sleep(0.05)
        await engine.complete(sent[0], "late")
        assert await run.result(30) == "late"


@pytest.mark.one_store
async def test_second_wait_after_the_answer_is_refused(world):
    sent = []

    @ks.workflow
    async def program():
        callback = await ks.callback()
        sent.append(callback.token)
        await callback.wait()
        await callback.wait()

    async with world.engine() as engine:
        run = await engine.start(program)
        await until(lambda: sent)
        await engine.complete(sent[0])
        with pytest.raises(ks.RunFailed, match="completed before"):
            await run.result(30)


async def test_token_serves_again_after_a_retry(world):
    sent = []

    @ks.workflow
    async def program():
        callback = await ks.callback()
        sent.append(callback.token)
        return await callback.wait()

    async with world.engine() as engine:
        run = await engine.start(program)
        await until(lambda: sent)
        await engine.fail(sent[0], "no funds")
        with pytest.raises(ks.RunFailed, match="no funds"):
            await run.result(30)
        await run.retry()
        await engine.complete(sent[0], "paid")
        assert await run.result(30) == "paid"


async def test_token_of_a_rewound_callback_is_unknown(world):
    sent = []
    async with world.engine() as engine:
        run = await engine.start(hooked(sent))
        await until(lambda: sent)
        await until_status(run, "waiting")
        await run.rewind(1)
        await until(lambda: len(set(sent)) == 2)
        with pytest.raises(ks.UnknownToken):
            await engine.complete(sent[0], "old")
        await engine.complete(sent[-1], "new")
        assert await run.result(30) == "new"


async def test_token_works_in_an_encrypted_store(world):
    sent = []
    async with world.engine(keys=KEYS) as engine:
        run = await engine.start(hooked(sent))
        await until(lambda: sent)
        secret = sent[0].split(".")[0].removeprefix("cb_")
        assert all(secret.encode() not in row.record for row in engine.store.list_checkpoints(run.id, 0))
        await engine.complete(sent[0], "yes")
        assert await run.result(30) == "yes"


async def test_crash_at_every_write_sends_tokens_that_work():
    @ks.workflow(name="hooked at every write")
    async def program(sent):
        @ks.step
        async def send(token):
            tokens.append(token)

        callback = await ks.callback()
        await send(callback.token)
        return await callback.wait()

    tokens = []

    async def play(engine):
        run = await engine.start(program, [], run_id="r")
        await until(lambda: tokens)
        await engine.complete(tokens[0], "yes")
        return await run.result(30)

    async def judge(disk, lives):
        assert lives.result == "yes"
        assert len(set(tokens)) == 1
        tokens.clear()

    assert await crash_everywhere(MemoryDisk, play, judge) >= 4


def test_blocking_engine_has_the_same_verbs(tmp_path):
    sent = []
    with ks.open(tmp_path / "runs.db") as engine:
        run = engine.start(hooked(sent))
        run.reached("waiting", timeout=30)
        engine.beat(sent[0])
        engine.complete(sent[0], 1)
        assert run.result(30) == 1
        other = engine.start(paying)
        other.beat("payment")
        other.fail("payment", "no", type="Refused")
        assert other.result(30)[1] == "Refused"
        third = engine.start(hooked(sent))
        third.reached("waiting", timeout=30)
        engine.fail(sent[-1], "no")
        assert third.result(30)[0] == "WaitFailed"


def test_request_is_public():
    assert ks.Request.__name__ == "Request"


async def test_told_history_of_a_callback_is_the_same_after_a_replay(world):
    sent = []
    async with world.engine() as engine:
        run = await engine.start(hooked(sent))
        await until(lambda: sent)
        await engine.complete(sent[0], "yes")
        await run.result(30)
        kinds = [(kind, step) for kind, step, *_ in await told(run)]
        assert ("signal received", "wait_for:callback:payment:2#1") in kinds
