"""Signals, questions, streams and published values (K25, K27)."""

import asyncio
import contextlib

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepstep as ks
from keepstep.engine import history, wakeups
from keepstep.engine.inbox import Inbox
from keepstep.engine.parking import SHORT_WAIT_SECONDS
from keepstep.engine.runner import Runner
from keepstep.engine.wakeups import receive
from keepstep.model import Signal
from keepstep.policies import recovery
from keepstep.ports import CURRENT, Send
from keepstep.values import VALUES
from tests.engine.world import replay_from_every_prefix, told, until, until_at_last_wait, until_recorded, until_status

pytestmark = pytest.mark.on_postgres


@ks.workflow(name="listening to one name")
async def listening(name, count, **options):
    return [await ks.wait_for(name, **options) for _ in range(count)]


async def test_a_signal_sent_early_is_lost(world):
    async with world.engine(worker=False) as client:
        run = await client.start(listening, "word", 2)
        await run.signal("word", "first")
        await run.signal("word", {"second": (1, 2)})
        async with world.engine():
            assert await run.result(30) == ["first", {"second": (1, 2)}]


async def test_a_signal_without_a_payload_says_nothing(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1)
        await run.signal("word")
        assert await run.result(30) == [True]


async def test_a_falsy_payload_is_taken_for_none(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 4)
        for payload in (None, False, 0, ""):
            await run.signal("word", payload)
        assert await run.result(30) == [None, False, 0, ""]


async def test_the_same_signal_is_heard_twice(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 2)
        await run.signal("word", 1, id="same")
        await run.signal("word", 2, id="same")
        await run.signal("word", 3, id="other")
        assert await run.result(30) == [1, 3]


async def test_two_waiters_get_each_others_signals(world):
    @ks.workflow
    async def both():
        return await ks.gather(ks.wait_for("word"), ks.wait_for("word"), ks.wait_for("other"))

    async with world.engine() as engine:
        run = await engine.start(both)
        await until(lambda: _waits(engine, 3))
        await run.signal("word", 1)
        await run.signal("word", 2)
        await run.signal("other", 3)
        assert await run.result(30) == [1, 2, 3]


def _waits(engine, count):
    return any(len(context.waits) == count for context in engine.live.values())


async def test_a_wait_that_timed_out_ends_differently_after_a_crash(world, effects):
    """The signal came after the time was over, and before the crash: the recorded outcome stands."""

    @ks.step
    async def note(what):
        effects.append(what)

    @ks.workflow
    async def impatient():
        got = []
        try:
            got.append(await ks.wait_for("word", timeout=0.01))
        except ks.TimedOut as error:
            got.append(str(error))
        got.append(await ks.wait_for("word", timeout=0.01, default="none"))
        await note("late")
        got.append(await ks.wait_for("word"))
        return got

    engine = await world.started(linger_seconds=60)
    run = await engine.start(impatient, run_id="r")
    await until(lambda: "late" in effects)
    await world.crash(engine)
    async with world.engine(worker=False) as client:
        await (await client.get("r")).signal("word", "too late")
    async with world.engine() as engine:
        run = await engine.get("r")
        assert await run.result(30) == ["no signal 'word' came within 0.01 s", "none", "too late"]


def due(engine):
    """When the only wait of run "r" ends."""
    (wait,) = engine.live["r"].waits.values()
    return wait.due


@pytest.mark.quick_store
@pytest.mark.parametrize("wait", [lambda: ks.wait_for("word", timeout=50.0), lambda: ks.sleep(SHORT_WAIT_SECONDS)])
async def test_a_timeout_or_a_sleep_whose_start_is_recorded_starts_over_after_a_crash(world, wait, monkeypatch):
    monkeypatch.setattr(wakeups, "RIDE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(wakeups, "RECORD_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "ALONE_FROM", 10)  # so that it stays in memory

    @ks.workflow
    async def waiting():
        await wait()

    engine = await world.started(linger_seconds=60)
    run = await engine.start(waiting, run_id="r")
    await until_at_last_wait(engine, "r")
    await until(lambda: _recorded_start(run))
    first = due(engine)
    for _ in range(2):
        await asyncio.sleep(0.01)  # a wait that began anew would end so much later at least
        engine = await world.crash_and_recover(engine, linger_seconds=60, recovery_limit=10)
        await until_at_last_wait(engine, "r")
        assert abs(due(engine) - first) < 0.001
    await engine.close()


async def _recorded_start(run):
    return any(one.kind == "wait started" for one in await run.checkpoints())


async def test_a_signal_to_nobody_is_accepted(world):
    async with world.engine() as engine:
        with pytest.raises(ks.RunNotFound, match="nobody"):
            await engine.signal("nobody", "word")
        run = await engine.start(listening, "word", 0)
        await run.result(30)
        with pytest.raises(ks.AlreadyFinished, match="already completed"):
            await run.signal("word")


async def test_a_reserved_name_reaches_the_engine(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1)
        with pytest.raises(ks.DefinitionError, match="ks:"):
            await run.signal("ks:cancel")
        with pytest.raises(ks.DefinitionError):
            await run.signal("no/slash")
        await run.signal("word")
        await run.result(30)


async def test_a_signal_between_runs_is_sent_twice_after_a_crash(world):
    @ks.workflow
    async def sender(target):
        await ks.signal(target, "word", "hello")
        await ks.wait_for("go")
        try:
            await ks.signal("nobody", "word")
        except ks.RunNotFound as error:
            return error.run_id

    engine = await world.started(linger_seconds=60)
    receiver = await engine.start(listening, "word", 2, run_id="receiver")
    await engine.start(sender, "receiver", run_id="sender")
    await until(lambda: _heard(receiver))
    engine = await world.crash_and_recover(engine)
    await (await engine.get("sender")).signal("go")
    assert await (await engine.get("sender")).result(30) == "nobody"
    receiver = await engine.get("receiver")
    await receiver.signal("word", "second")
    assert await receiver.result(30) == ["hello", "second"]
    await engine.close()


async def _heard(run):
    return any(one.step == "wait_for:word#1" for one in await run.checkpoints())


async def test_a_signal_to_a_finished_run_stops_the_sender(world):
    @ks.workflow
    async def sender(target):
        try:
            await ks.signal(target, "word")
        except ks.AlreadyFinished as error:
            return error.run_id

    async with world.engine() as engine:
        done = await engine.start(listening, "word", 0, run_id="done")
        await done.result(30)
        assert await (await engine.start(sender, "done")).result(30) == "done"


# -- asking ------------------------------------------------------------------------------------------------------------


@ks.workflow
async def answering(count):
    total = 0
    for _ in range(count):
        request = await ks.wait_for("add")
        total += request.payload
        request.reply({"total": total})
    await ks.wait_for("end")
    return total


async def test_a_question_gets_no_answer_or_anothers(world):
    async with world.engine() as engine:
        run = await engine.start(answering, 3)
        assert await run.ask("add", 1, timeout=5) == {"total": 1}
        both = await asyncio.gather(run.ask("add", 10, timeout=5), run.ask("add", 10, timeout=5))
        assert sorted(answer["total"] for answer in both) == [11, 21]
        await run.signal("end")
        assert await run.result(30) == 21


async def test_a_question_is_answered_twice_after_a_crash(world):
    engine = await world.started(linger_seconds=60)
    run = await engine.start(answering, 1, run_id="r")
    assert await run.ask("add", 1, timeout=5) == {"total": 1}
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    assert [one.kind.value for one in await run.checkpoints()].count("reply") == 1
    await run.signal("end")
    assert await run.result(30) == 1
    await engine.close()


async def test_a_question_that_nobody_answers_waits_for_ever(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1)
        with pytest.raises(ks.TimedOut, match="did not reply"):
            await run.ask("add", 1, timeout=0.05)
        asked = asyncio.create_task(run.ask("add", 2, timeout=5))
        await run.signal("word")
        with pytest.raises(ks.AlreadyFinished):
            await asked


# -- publishing, streaming, progress -----------------------------------------------------------------------------------


async def test_published_values_are_written_again_on_replay(world):
    @ks.step
    async def work(number):
        ks.publish("step", number)
        return number

    @ks.workflow
    async def showing():
        for number in range(3):
            ks.publish("count", number)
            await work(number)
        await ks.wait_for("go")
        ks.publish("count", "done")

    engine = await world.started(linger_seconds=60)
    run = await engine.start(showing, run_id="r")
    await until_at_last_wait(engine, "r")
    assert await run.published() == {"count": 2, "step": 2}
    history = await told(run)
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    assert await told(run) == history
    await run.signal("go")
    await run.result(30)
    assert await run.published() == {"count": "done", "step": 2}
    await engine.close()


async def test_tokens_are_lost_or_doubled_by_a_reader_that_reconnects(world):
    @ks.step
    async def speak():
        for token in ("a", "b", "c"):
            ks.emit(token)
            await asyncio.sleep(0)
        return "abc"

    @ks.step
    def speak_in_a_thread():
        ks.emit("d")

    @ks.workflow
    async def speaking():
        ks.emit("start")
        await speak()
        await speak_in_a_thread()
        await ks.wait_for("go")
        ks.emit("end")

    async with world.engine() as engine:
        run = await engine.start(speaking, run_id="r")
        seen, last = [], 0
        async for event in run.watch():
            if event.name == "token":
                seen.append(event.data["value"])
                last = event.seq
            if event.name == "step.completed" and event.step == "speak_in_a_thread#1":
                break
        assert seen == ["start", "a", "b", "c", "d"]
        await run.signal("go")
        await run.result(30)
        rest = [event async for event in run.watch(after=last)]
        assert [event.data["value"] for event in rest if event.name == "token"] == ["end"]
        assert rest[-1].name == "run.finished"
        whole = [event async for event in run.watch()]
        assert [event.data["value"] for event in whole if event.name == "token"] == [*seen, "end"]
        assert [event.seq for event in whole] == sorted(event.seq for event in whole)


async def test_tokens_of_a_repeated_attempt_cannot_be_told_from_the_first(world):
    tries = []

    @ks.step(retry=ks.Retry(attempts=2, base_seconds=0))
    async def speak():
        tries.append(1)
        ks.emit(f"try {len(tries)}")
        if len(tries) == 1:
            raise ConnectionError

    @ks.workflow
    async def speaking():
        await speak()

    async with world.engine() as engine:
        run = await engine.start(speaking)
        await run.result(30)
        tokens = [(event.attempt, event.data["value"]) async for event in run.watch() if event.name == "token"]
        assert tokens == [(1, "try 1"), (2, "try 2")]


async def test_progress_is_not_seen_while_the_step_runs(world):
    hold = asyncio.Event()

    @ks.step
    async def long():
        ks.progress(0.25, "a quarter")
        ks.progress(1.5, "too much")
        await hold.wait()

    @ks.workflow
    async def working():
        await long()

    async with world.engine() as engine:
        run = await engine.start(working)

        async def seen():
            return await run.progress()

        progress = await until(seen)
        assert progress == {"fraction": 1.0, "message": "too much", "step": "long#1"}
        hold.set()
        await run.result(30)
        assert await run.progress() is None


async def test_a_parked_listener_is_not_woken_by_another_process(world):
    """The sender has no worker; the listener's engine hears of it by looking."""
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1, run_id="r")
        await until_status(run, "waiting")
        async with world.engine(worker=False) as client:
            await (await client.get("r")).signal("word", "hello")
        assert await run.result(30) == ["hello"]


@pytest.mark.parametrize("kind", ["sleep", "wait_for", "timeout"])
@pytest.mark.quick_store
async def test_other_outcomes_push_a_waiting_clock_back_on_every_replay(world, kind):
    """The clock of a wait counts from when the code asked, whatever a sibling does meanwhile."""

    @ks.step
    async def tick(number):
        await asyncio.sleep(0.3)

    async def clock():
        if kind == "sleep":
            await ks.sleep(1.0)
        elif kind == "wait_for":
            await ks.wait_for("never", timeout=1.0, default=None)
        else:
            with contextlib.suppress(ks.TimedOut):
                async with ks.timeout(1.0):
                    await ks.wait_for("never")
        return ks.now()

    @ks.workflow
    async def both():
        async def ticking():
            for number in range(3):
                await tick(number)

        began = ks.now()
        rung, _ = await ks.gather(clock(), ticking())
        return (rung - began).total_seconds()

    engine = await world.started(linger_seconds=60)
    run = await engine.start(both, run_id="r")
    await until(lambda: _ticked(run, 3))
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    # counted anew from the last tick it would be 1.9 s
    assert 1.0 <= await (await engine.get("r")).result(9) < 1.85
    await engine.close()


async def _ticked(run, count):
    return sum("tick" in one.step for one in await run.checkpoints()) >= count


async def test_a_signal_is_lost_when_its_waiter_is_cancelled_at_that_moment(world):
    """Both outcomes are durable, the other is delivered first, the waiter is withdrawn: the signal is still unread."""
    go_on = asyncio.Event()

    @ks.step
    async def decide():
        await go_on.wait()
        return "decided"

    @ks.workflow
    async def choosing():
        winner = await ks.race(decide(), ks.wait_for("word"))
        await ks.wait_for("go")
        return [winner, await ks.wait_for("word", timeout=0.2, default="lost")]

    async with world.engine(linger_seconds=60, worker=True) as engine:
        run = await engine.start(choosing, run_id="r")
        await until(lambda: (context := engine.live.get("r")) and context.performing and context.waits)
        context = engine.live["r"]
        go_on.set()
        # Pass by pass, to be there in the very one.
        while not context.in_flight and not context.arrived and not engine.journal.holds(context):  # noqa: ASYNC110
            await asyncio.sleep(0)
        receive(context, [_sent_now(engine, "r", "word", "heard")])  # in the same pass as the step's outcome
        await run.signal("go")
        assert await run.result(30) == ["decided", "heard"]
    async with world.engine() as engine:
        run = await engine.get("r")
        read = [one for one in await run.checkpoints() if one.step.startswith("wait_for:word")]
        assert [one.outcome.value for one in read][-1] == "success"


def _sent_now(engine, run_id, name, payload):
    signal = Signal(run_id, name, VALUES.encode(payload), "now")
    engine.store.commit([Send(signal)])
    return engine.store.list_signals(run_id)[-1]


@pytest.mark.live_only
async def test_a_large_signal_is_lost_when_its_wait_is_cancelled_after_a_crash(world, monkeypatch):
    """Its payload is not in memory when the wait that heard it is cancelled: the next wait must hear it still."""
    monkeypatch.setattr(history, "KEEP_BYTES", 0)
    large = "x" * 5000

    @ks.step
    async def tell(ticks):
        engine = CURRENT.get().run.engine
        telling = asyncio.ensure_future(engine.signal(ks.run_id(), "news", f"{large}{ticks}", id=str(ticks)))
        for _ in range(ticks):
            await asyncio.sleep(0)
        telling.add_done_callback(lambda done: done.cancelled() or done.exception())
        return "told"

    @ks.workflow
    async def contended():
        heard = []
        for ticks in range(7):
            first = await ks.race(tell(ticks), ks.wait_for("news"))
            heard.append(await ks.wait_for("news") if first == "told" else first)
        return [len(one) for one in heard]

    async with world.engine() as engine:
        run = await engine.start(contended)
        assert await run.result(timeout=5) == [5001] * 7

        async def check(again, length):
            assert await again.result(timeout=10) == [5001] * 7, length

        await replay_from_every_prefix(run, check)


# -- signals that come while a run is taken up -------------------------------------------------------------------------


async def test_a_signal_between_the_claim_and_the_first_look_is_not_heard(world, monkeypatch):
    """It came too late for the claim to count it, and was told before the worker knew the run."""
    drive = Runner.drive

    async def late(runner, claim):
        engine = runner.engine
        if not claim.run.signals:
            engine.store.commit([Send(Signal("r", "go", b"1"))])
            engine.worker._heard(engine.store.news(engine.worker.id, engine.worker._cursor))
        await drive(runner, claim)

    async with world.engine(worker=False) as engine:
        await engine.start(listening, "go", 2, run_id="r")
    monkeypatch.setattr(Runner, "drive", late)
    async with world.engine(linger_seconds=60) as engine:
        run = await engine.get("r")
        await until_recorded(run, "wait_for:go#1")
        await run.signal("go", 2)
        assert await run.result(30) == [1, 2]


async def test_a_signal_that_comes_while_the_history_is_loaded_brings_the_old_ones_back(world, monkeypatch):
    load = Runner._load

    async def loading(runner, context):
        engine = runner.engine
        if context.run.signals == 1:
            engine.store.commit([Send(Signal("r", "go", b"2"))])
            engine.signalled("r")
            await until(lambda: not engine.hearing._fetching)
        await load(runner, context)

    engine = await world.started(linger_seconds=60)
    run = await engine.start(listening, "go", 2, run_id="r")
    await run.signal("go", 1)
    await until_recorded(run, "wait_for:go#1")
    monkeypatch.setattr(Runner, "_load", loading)
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    assert await (await engine.get("r")).result(30) == [1, 2]
    await engine.close()


async def test_a_signal_that_is_missing_among_others_sets_its_run_aside(tmp_path):
    @ks.workflow
    async def hearing():
        return [await ks.wait_for("go"), await ks.wait_for("go")]

    path = tmp_path / "runs.db"
    async with ks.open(path, worker=False) as engine:
        run = await engine.start(hearing, run_id="r")
        for number in range(3):
            await run.signal("go", number)
    database = apsw.Connection(str(path))
    database.execute("DELETE FROM keepstep_signal WHERE seq = 2")
    database.close()
    async with ks.open(path, linger_seconds=0.01) as engine:
        with pytest.raises(ks.RunSetAside, match="its signal 2 is gone: 3 follows"):
            await (await engine.get("r")).result(30)


async def test_a_signal_that_is_missing_while_its_run_is_driven_sets_it_aside(tmp_path):
    @ks.workflow
    async def hearing():
        return [await ks.wait_for("go") for _ in range(3)]

    path = tmp_path / "runs.db"
    async with ks.open(path, linger_seconds=60) as engine:
        run = await engine.start(hearing, run_id="r")
        await run.signal("go", 1)
        await until_recorded(run, "wait_for:go#1")
        database = apsw.Connection(str(path))
        database.execute("UPDATE keepstep_head SET signals = signals + 2")
        database.close()
        await run.signal("go", 2)
        with pytest.raises(ks.RunSetAside, match="its signal 2 is gone: 4 follows"):
            await run.result(30)


@pytest.mark.parametrize("waits", [True, False], ids=["when it waits", "when it ends"])
async def test_a_signal_that_was_accepted_and_is_gone_sets_its_run_aside(tmp_path, waits):
    """Its worker would look for it again and again."""

    @ks.workflow
    async def hearing():
        if waits:
            await ks.wait_for("go")

    path = tmp_path / "runs.db"
    async with ks.open(path, worker=False) as engine:
        run = await engine.start(hearing, run_id="r")
        await run.signal("go")
    database = apsw.Connection(str(path))
    database.execute("DELETE FROM keepstep_signal")
    database.close()
    async with ks.open(path, linger_seconds=0.01) as engine:
        with pytest.raises(ks.RunSetAside, match="1 signals were accepted, and only 0 are there"):
            await (await engine.get("r")).result(30)


# -- many that nobody reads --------------------------------------------------------------------------------------------


def test_taking_a_signal_costs_the_same_however_many_others_are_unread():
    inbox = Inbox()
    for seq in range(1, 20_001):
        inbox.add(Signal("r", "tick", b"1", seq=seq))
    inbox.add(Signal("r", "stop", b"2", seq=20_001))
    looked = []
    assert inbox.take("stop", lambda signal: looked.append(signal) or True).seq == 20_001
    assert len(looked) == 1


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["add", "take", "again"]))))
def test_an_inbox_gives_the_oldest_of_a_name_and_keeps_the_order(acts):
    inbox, unread, taken = Inbox(), [], []
    for seq, (name, act) in enumerate(acts, 1):
        if act == "again" and taken:
            signal = taken.pop(0)
            inbox.add(signal)
            unread = sorted([*unread, signal], key=lambda one: one.seq)
        elif act == "take":
            expected = next((one for one in unread if one.name == name), None)
            assert inbox.take(name) == expected
            if expected is not None:
                unread.remove(expected)
                taken.append(expected)
        else:
            signal = Signal("r", name, seq=seq)
            inbox.add(signal)
            unread.append(signal)
        assert list(inbox) == unread
        assert list(inbox.named(name)) == [one for one in unread if one.name == name]
