"""Signals, questions, streams and published values (K25, K27)."""

import asyncio
import contextlib
from datetime import timedelta

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepstep as ks
from keepstep.kernel import recovery as phases
from keepstep.kernel import replay, wakeups
from keepstep.kernel.inbox import Inbox
from keepstep.kernel.parking import SHORT_WAIT_SECONDS
from keepstep.kernel.runner import Runner
from keepstep.kernel.wakeups import receive
from keepstep.model import Signal
from keepstep.model.signal import CANCEL
from keepstep.policies import recovery
from keepstep.ports import CURRENT, Send
from keepstep.values import VALUES
from tests.engine.world import replay_from_every_prefix, told, until, until_at_last_wait, until_recorded, until_status

pytestmark = pytest.mark.on_postgres


@ks.workflow(name="listening to one name")
async def listening(name, count, **options):
    return [await ks.wait_for(name, **options) for _ in range(count)]


async def test_early_signal_is_kept(world):
    async with world.engine(worker=False) as client:
        run = await client.start(listening, "word", 2)
        await run.signal("word", "first")
        await run.signal("word", {"second": (1, 2)})
        async with world.engine():
            assert await run.result(30) == ["first", {"second": (1, 2)}]


async def test_signal_without_a_payload_gives_true(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1)
        await run.signal("word")
        assert await run.result(30) == [True]


async def test_falsy_payload_is_delivered_as_it_is(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 4)
        for payload in (None, False, 0, ""):
            await run.signal("word", payload)
        assert await run.result(30) == [None, False, 0, ""]


async def test_signal_with_a_known_id_is_delivered_once(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 2)
        await run.signal("word", 1, id="same")
        await run.signal("word", 2, id="same")
        await run.signal("word", 3, id="other")
        assert await run.result(30) == [1, 3]


async def test_waiters_get_signals_of_their_name_in_order(world):
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


async def test_timed_out_wait_stays_timed_out_after_a_crash(world, effects):
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
async def test_wait_with_a_recorded_start_keeps_its_end_over_a_crash(world, wait, monkeypatch):
    monkeypatch.setattr(wakeups, "RIDE_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(wakeups, "RECORD_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(recovery, "ALONE_FROM", 10)  # so that it stays in memory

    @ks.workflow
    async def waiting():
        await wait()

    engine = await world.started(linger_seconds=60)
    run = await engine.start(waiting, run_id="r")
    await until(lambda: _recorded_start(run))
    await until_at_last_wait(engine, "r")
    first = due(engine)
    for _ in range(2):
        await asyncio.sleep(0.01)  # a wait that began anew would end so much later at least
        engine = await world.crash_and_recover(engine, linger_seconds=60, recovery_limit=10)
        await until_at_last_wait(engine, "r")
        assert abs(due(engine) - first) < 0.001
    await engine.close()


async def _recorded_start(run):
    return any(one.kind == "wait started" for one in await run.checkpoints())


async def test_signal_to_an_unknown_or_finished_run_is_refused(world):
    async with world.engine() as engine:
        with pytest.raises(ks.RunNotFound, match="nobody"):
            await engine.signal("nobody", "word")
        run = await engine.start(listening, "word", 0)
        await run.result(30)
        with pytest.raises(ks.AlreadyFinished, match="already completed"):
            await run.signal("word")


async def test_reserved_or_invalid_signal_name_is_refused(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1)
        with pytest.raises(ks.DefinitionError, match="ks:"):
            await run.signal("ks:cancel")
        with pytest.raises(ks.DefinitionError):
            await run.signal("no/slash")
        await run.signal("word")
        await run.result(30)


async def test_signal_between_runs_is_sent_once_despite_a_crash(world):
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


async def test_sender_can_catch_that_the_receiver_has_finished(world):
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


async def test_each_question_gets_its_own_answer(world):
    async with world.engine() as engine:
        run = await engine.start(answering, 3)
        assert await run.ask("add", 1, timeout=60) == {"total": 1}
        both = await asyncio.gather(run.ask("add", 10, timeout=60), run.ask("add", 10, timeout=60))
        assert sorted(answer["total"] for answer in both) == [11, 21]
        await run.signal("end")
        assert await run.result(30) == 21


async def test_question_is_answered_once_despite_a_crash(world):
    engine = await world.started(linger_seconds=60)
    run = await engine.start(answering, 1, run_id="r")
    assert await run.ask("add", 1, timeout=60) == {"total": 1}
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    assert [one.kind.value for one in await run.checkpoints()].count("reply") == 1
    await run.signal("end")
    assert await run.result(30) == 1
    await engine.close()


async def test_unanswered_question_ends_by_timeout_or_with_the_run(world):
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1)
        with pytest.raises(ks.TimedOut, match="did not reply"):
            await run.ask("add", 1, timeout=0.05)
        asked = asyncio.create_task(run.ask("add", 2, timeout=60))
        await run.signal("word")
        with pytest.raises(ks.AlreadyFinished):
            await asked


# -- publishing, streaming, progress -----------------------------------------------------------------------------------


async def test_published_values_are_not_written_again_on_replay(world):
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
    before = await told(run)
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    await until_at_last_wait(engine, "r")
    run = await engine.get("r")
    assert await told(run) == before
    await run.signal("go")
    await run.result(30)
    assert await run.published() == {"count": "done", "step": 2}
    await engine.close()


async def test_reconnecting_reader_gets_each_token_once(world):
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
            if event.name == "token.emitted":
                seen.append(event.data["value"])
                last = event.seq
            if event.name == "step.completed" and event.step == "speak_in_a_thread#1":
                break
        assert seen == ["start", "a", "b", "c", "d"]
        await run.signal("go")
        await run.result(30)
        rest = [event async for event in run.watch(after=last)]
        assert [event.data["value"] for event in rest if event.name == "token.emitted"] == ["end"]
        assert rest[-1].name == "run.finished"
        whole = [event async for event in run.watch()]
        assert [event.data["value"] for event in whole if event.name == "token.emitted"] == [*seen, "end"]
        assert [event.seq for event in whole] == sorted(event.seq for event in whole)


async def test_tokens_carry_their_attempt(world):
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
        tokens = [(event.attempt, event.data["value"]) async for event in run.watch() if event.name == "token.emitted"]
        assert tokens == [(1, "try 1"), (2, "try 2")]


async def test_progress_is_visible_while_the_step_runs(world):
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


async def test_signal_from_another_process_wakes_a_parked_run(world):
    """The sender has no worker; the listener's engine hears of it by looking."""
    async with world.engine() as engine:
        run = await engine.start(listening, "word", 1, run_id="r")
        await until_status(run, "waiting")
        async with world.engine(worker=False) as client:
            await (await client.get("r")).signal("word", "hello")
        assert await run.result(30) == ["hello"]


@pytest.mark.parametrize("kind", ["sleep", "wait_for", "timeout"])
@pytest.mark.quick_store
async def test_wait_counts_from_its_call_whatever_siblings_do(world, kind, monkeypatch):
    """The clock of a wait counts from when the code asked, whatever a sibling does meanwhile."""
    monkeypatch.setattr(wakeups, "RIDE_AFTER_SECONDS", 0.0)

    @ks.step
    async def tick(number):
        await asyncio.sleep(0.05)

    async def clock():
        if kind == "sleep":
            await ks.sleep(600)
        elif kind == "wait_for":
            await ks.wait_for("never", timeout=600, default=None)
        else:
            with contextlib.suppress(ks.TimedOut):
                async with ks.timeout(600):
                    await ks.wait_for("never")

    @ks.workflow
    async def both():
        async def ticking():
            for number in range(3):
                await tick(number)

        await ks.gather(clock(), ticking())

    engine = await world.started(linger_seconds=60)
    run = await engine.start(both, run_id="r")
    await until(lambda: _ticked(run, 3))
    engine = await world.crash_and_recover(engine, linger_seconds=0.05)
    run = await engine.get("r")
    await until_status(run, "waiting")
    first_tick = next(one for one in await run.checkpoints() if "tick" in one.step)
    asked_at = (await run.run()).due_at - timedelta(seconds=600)
    assert asked_at < first_tick.finished_at
    await engine.close()


async def _ticked(run, count):
    return sum("tick" in one.step for one in await run.checkpoints()) >= count


async def test_signal_stays_unread_if_its_waiter_is_cancelled_meanwhile(world):
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


@pytest.mark.live_only
@pytest.mark.parametrize("durability", ["every_step", "at_exit"])
async def test_signal_stays_unread_if_a_graph_gives_up_its_wait(world, durability):
    """The wait has heard it, and its branch loses before the wait's own record is delivered: the next wait hears it."""
    graph = ks.Graph("choosing", durability=durability)

    @graph.step
    async def decide(state):
        run = CURRENT.get().run
        if not run.inbox.seen:  # in the same pass as this step's outcome, and before it
            receive(run, [_sent_now(run.host, run.id, "word", "heard")])

    graph.wait("first", signal="word", into="won")
    graph.parallel("race", ["first", "decide"], join="go", wait=ks.Any())
    graph.wait("go")
    graph.wait("second", signal="word", into="later", timeout=0.5, default="lost")
    graph.edge("go", "second")
    graph.entry("race")
    graph.exit("second")
    async with world.engine(linger_seconds=60) as engine:
        run = await engine.start(graph, run_id="r")
        await until_at_last_wait(engine, "r")
        await run.signal("go")
        assert await run.result(30) == {"later": "heard"}

        async def check(again, length):
            assert await again.result(60) in ({"later": "heard"}, {"won": "heard", "later": "lost"}), length

        await replay_from_every_prefix(run, check)


def _sent_now(engine, run_id, name, payload):
    signal = Signal(run_id, name, VALUES.encode(payload), "now")
    engine.store.commit([Send(signal)])
    return engine.store.list_signals(run_id)[-1]


@pytest.mark.live_only
async def test_large_signal_survives_a_cancelled_wait_after_a_crash(world, monkeypatch):
    """Its payload is not in memory when the wait that heard it is cancelled: the next wait must hear it still."""
    monkeypatch.setattr(replay, "KEEP_BYTES", 0)
    large = "x" * 5000

    @ks.step
    async def tell(ticks):
        engine = CURRENT.get().run.host
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
        assert await run.result(timeout=60) == [5001] * 7

        async def check(again, length):
            assert await again.result(timeout=60) == [5001] * 7, length

        await replay_from_every_prefix(run, check)


# -- signals that come while a run is taken up -------------------------------------------------------------------------


async def test_signal_between_claim_and_first_look_is_read(world, monkeypatch):
    """It came too late for the claim to count it, and was told before the worker knew the run."""
    drive = Runner.drive

    async def late(runner, claim):
        engine = runner.host
        if not claim.run.signals:
            engine.store.commit([Send(Signal("r", "go", b"1"))])
            engine.worker._received(engine.store.news(engine.worker.id, engine.worker._cursor))
        await drive(runner, claim)

    async with world.engine(worker=False) as engine:
        await engine.start(listening, "go", 2, run_id="r")
    monkeypatch.setattr(Runner, "drive", late)
    async with world.engine(linger_seconds=60) as engine:
        run = await engine.get("r")
        await until_recorded(run, "wait_for:go#1")
        await run.signal("go", 2)
        assert await run.result(30) == [1, 2]


@pytest.mark.live_only
async def test_signal_during_a_look_for_signals_is_read(world, monkeypatch):
    """It is told while the store answers a look that came too early for it: there is another look."""
    hold = asyncio.Event()

    @ks.step
    async def work():
        await hold.wait()

    @ks.workflow
    async def working():
        await work()

    async with world.engine() as engine:
        run = await engine.start(working, run_id="r")
        context = await until(lambda: (one := engine.live.get("r")) and one.performing and one)
        read, looks = engine.read, []

        async def reading(function, *args):
            answer = await read(function, *args)
            if function == engine.store.list_signals and not looks:
                looks.append(answer)
                engine.store.commit([Send(Signal("r", CANCEL, b"{}", "now"))])
                engine.signalled("r")
                news = await engine.call(engine.store.news, engine.worker.id, engine.worker._cursor)
                engine.worker._received(news)
            return answer

        monkeypatch.setattr(engine, "read", reading)
        engine.signal_reader.fetch(context)
        with pytest.raises(ks.RunCancelled):
            await run.result(60)
        assert looks == [[]]


async def test_signal_during_loading_brings_no_read_ones_back(world, monkeypatch):
    load = phases.load_history

    async def loading(context):
        engine = context.host
        if context.run.signals == 1:
            engine.store.commit([Send(Signal("r", "go", b"2"))])
            engine.signalled("r")
            await until(lambda: not engine.signal_reader._fetching)
        await load(context)

    engine = await world.started(linger_seconds=60)
    run = await engine.start(listening, "go", 2, run_id="r")
    await run.signal("go", 1)
    await until_recorded(run, "wait_for:go#1")
    monkeypatch.setattr(phases, "load_history", loading)
    engine = await world.crash_and_recover(engine, linger_seconds=60)
    assert await (await engine.get("r")).result(30) == [1, 2]
    await engine.close()


async def test_missing_signal_among_others_sets_its_run_aside(tmp_path):
    @ks.workflow
    async def signal_reader():
        return [await ks.wait_for("go"), await ks.wait_for("go")]

    path = tmp_path / "runs.db"
    async with ks.open(path, worker=False) as engine:
        run = await engine.start(signal_reader, run_id="r")
        for number in range(3):
            await run.signal("go", number)
    database = apsw.Connection(str(path))
    database.execute("DELETE FROM keepstep_signal WHERE seq = 2")
    database.close()
    async with ks.open(path, linger_seconds=0.01) as engine:
        with pytest.raises(ks.RunSetAside, match="its signal 2 is missing: 3 follows"):
            await (await engine.get("r")).result(30)


async def test_missing_signal_sets_a_driven_run_aside(tmp_path):
    @ks.workflow
    async def signal_reader():
        return [await ks.wait_for("go") for _ in range(3)]

    path = tmp_path / "runs.db"
    async with ks.open(path, linger_seconds=60) as engine:
        run = await engine.start(signal_reader, run_id="r")
        await run.signal("go", 1)
        await until_recorded(run, "wait_for:go#1")
        database = apsw.Connection(str(path))
        database.execute("UPDATE keepstep_head SET signals = signals + 2")
        database.close()
        await run.signal("go", 2)
        with pytest.raises(ks.RunSetAside, match="its signal 2 is missing: 4 follows"):
            await run.result(30)


@pytest.mark.parametrize("waits", [True, False], ids=["when it waits", "when it ends"])
async def test_a_signal_that_was_accepted_and_is_gone_sets_its_run_aside(tmp_path, waits):
    """Its worker would look for it again and again."""

    @ks.workflow
    async def signal_reader():
        if waits:
            await ks.wait_for("go")

    path = tmp_path / "runs.db"
    async with ks.open(path, worker=False) as engine:
        run = await engine.start(signal_reader, run_id="r")
        await run.signal("go")
    database = apsw.Connection(str(path))
    database.execute("DELETE FROM keepstep_signal")
    database.close()
    async with ks.open(path, linger_seconds=0.01) as engine:
        with pytest.raises(ks.RunSetAside, match="1 signals were accepted, but only 0 exist"):
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
