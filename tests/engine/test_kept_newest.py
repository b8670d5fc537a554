"""Graphs with `keep="newest"`: a run keeps its newest whole states and what follows them, and goes on as any other."""

from __future__ import annotations

import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.care.verify import verify
from keepstep.errors import DefinitionError
from keepstep.kernel.graph import position, walk
from keepstep.model import Kind
from tests.engine.world import until, until_status

pytestmark = pytest.mark.live_only  # a run that is replayed after every step writes no whole states


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(position, "ENOUGH_DELTAS", 4)
    monkeypatch.setattr(position, "MOST_RECORDS", 8)
    monkeypatch.setattr(walk, "KEPT_SIGNALS", 1)


def counting(upto, *, keep="newest", fails=None, **options):
    """A graph that counts, waits for a word now and then, and ends with one."""
    graph = ks.Graph("counting", keep=keep, max_iterations=1000, **options)

    @graph.step
    async def turn(state):
        if fails and state["n"] in fails:
            raise ks.Permanent(f"broken at {state['n']}")
        ks.publish("early" if state["n"] < 3 else "late", state["n"])
        ks.spend(cost=1)
        return {"n": state["n"] + 1}

    graph.wait("word", signal="word", into="word")
    graph.edge("turn", "turn", lambda state: state["n"] % upto != 0)
    graph.edge("turn", "word")
    graph.edge("word", "turn", lambda state: state["word"] == "more")
    graph.entry("turn")
    graph.exit("word")
    return graph


async def seqs(run):
    return [one.seq for one in await run.checkpoints()]


async def kept(engine):
    return (await (await engine.get("r")).run()).kept_from


async def test_long_run_keeps_a_bounded_number_of_records(world):
    async with world.engine() as engine:
        run = await engine.start(counting(200), {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        found = await run.checkpoints()
        stored = await run.run()
        assert stored.seq > 200
        assert len(found) < 40
        assert found[0].kind is Kind.RUN_STARTED
        assert (found[1].kind, found[1].seq) == (Kind.STATE, stored.kept_from)
        assert [one.seq for one in found[1:]] == list(range(stored.kept_from, stored.seq + 1))
        await run.signal("word", "done")
        assert (await run.result())["n"] == 200
        assert (await run.state())["n"] == 200


async def test_result_is_that_of_a_run_that_keeps_all(world):
    results = []
    for keep in ("all", "newest"):
        async with world.engine() as engine:
            run = await engine.start(counting(30, keep=keep), {"n": 0}, run_id=keep)
            await run.signal("word", "done")
            results.append((await run.result(), await run.published(), (await run.spent()).cost))
    assert results[0] == results[1]
    assert results[0][1:] == ({"early": 2, "late": 29}, 30)


async def test_recovered_run_goes_on_from_its_newest_state(world):
    graph = counting(50)
    engine = await world.started()
    run = await engine.start(graph, {"n": 0}, run_id="r")
    await until_status(run, "waiting")
    for _ in range(3):
        engine = await world.crash_and_recover(engine)
        before = await kept(engine)
        run = await engine.get("r")
        n = (await run.state())["n"]
        await run.signal("word", "more")
        await until(lambda run=run, n=n: _is_beyond(run, n))
        assert await kept(engine) > before
    await run.signal("word", "done")
    assert (await run.result())["n"] == 200
    assert await run.published() == {"early": 2, "late": 199}
    await engine.close()


async def _is_beyond(run, n):
    return (await run.state())["n"] == n + 50 and (await run.run()).status == "waiting"


async def test_rewind_fork_state_and_diff_refuse_removed_records(world):
    async with world.engine() as engine:
        run = await engine.start(counting(40), {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        oldest = await kept(engine)
        gone = f"records before {oldest} were removed by keep='newest'"
        for call in (
            lambda: run.rewind(oldest - 1),
            lambda: run.rewind(0),
            lambda: engine.fork("r", at=oldest - 1),
            lambda: run.state(oldest - 1),
            lambda: run.diff(oldest - 1),
        ):
            with pytest.raises(DefinitionError, match=gone):
                await call()
        assert (await run.run()).status == "waiting"


async def test_rewind_to_a_kept_record_goes_on_from_there(world):
    async with world.engine() as engine:
        run = await engine.start(counting(40), {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        oldest = await kept(engine)
        n = (await run.state(oldest))["n"]
        assert n < 40
        await run.rewind(oldest)
        await until_status(run, "waiting")
        assert (await run.state())["n"] == 40
        assert verify(engine.store).sound
        await run.signal("word", "done")
        assert (await run.result())["n"] == 40


async def test_fork_at_a_kept_record_goes_its_own_way(world):
    async with world.engine() as engine:
        run = await engine.start(counting(40), {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        oldest = await kept(engine)
        fork = await engine.fork("r", at=oldest, run_id="f")
        await fork.signal("word", "done")
        assert (await fork.result())["n"] == 40
        assert verify(engine.store).sound
        whole = await engine.fork("r", at=0, run_id="g")
        await whole.signal("word", "done")
        assert (await whole.result())["n"] == 40
        late = await engine.fork("r", run_id="h")
        await late.signal("word", "done")
        assert (await late.result())["n"] == 40
        await run.signal("word", "done")


async def test_failed_run_is_retried_and_edited(world):
    fails = {33}
    async with world.engine() as engine:
        run = await engine.start(counting(40, fails=fails), {"n": 0}, run_id="r")
        with pytest.raises(ks.ExecutionError, match="broken at 33"):
            await run.result()
        assert await kept(engine)
        fails.clear()
        await run.retry()
        await until_status(run, "waiting")
        await run.edit({"n": 77})
        await run.signal("word", "done")
        assert (await run.result())["n"] == 77


async def test_paused_run_and_breakpoints_go_on(world):
    async with world.engine() as engine:
        run = await engine.start(counting(20, interrupt_before=["word"]), {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        assert await kept(engine)
        await run.pause()
        await until_status(run, "paused")
        await run.resume()
        await until_status(run, "waiting")
        await run.resume()
        await run.signal("word", "done")
        assert (await run.result(10))["n"] == 20


async def test_history_audit_and_care_pass_over_what_was_removed(world):
    async with world.engine() as engine:
        run = await engine.start(counting(40), {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        oldest = await kept(engine)
        told = [entry.what for entry in await run.audit()]
        assert f"records before {oldest} were removed by keep='newest'" in told
        assert verify(engine.store).sound
        assert (await examine(engine)).healthy
        events = [event.seq async for event in _some(run, 5)]
        assert events[0] == oldest
        info = await run.info()
        assert info.recoverable
        assert (await run.replay()).fits
        await run.signal("word", "done")
        await run.result()


async def _some(run, after):
    seq = (await run.run()).seq
    async for event in run.watch(after):
        yield event
        if event.seq >= seq:
            return


async def test_read_signals_are_removed_and_unread_ones_stay(world):
    async with world.engine() as engine:
        run = await engine.start(counting(5), {"n": 0}, run_id="r")
        await run.signal("other", "kept")
        for _ in range(12):
            await run.signal("word", "more")
        await until(lambda: _has_counted(run, 65))
        await run.signal("word", "done")
        assert (await run.result())["n"] == 65
        left = await engine.read(engine.store.list_signals, "r")
        assert left[0].seq == 1  # nobody has read it
        assert verify(engine.store).sound


async def _has_counted(run, n):
    return (await run.state())["n"] == n


async def test_run_whose_signals_were_all_removed_still_parks(world):
    engine = await world.started()
    run = await engine.start(counting(5), {"n": 0}, run_id="r")
    for _ in range(11):
        await run.signal("word", "more")
    await until(lambda: _has_counted(run, 60))
    await until_status(run, "waiting")
    if world.kind != "files":
        assert (await run.run()).signals_from > 1
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await until_status(run, "waiting")
    await run.signal("word", "done")
    assert (await run.result(10))["n"] == 60
    await engine.close()


def test_keep_is_all_or_newest():
    with pytest.raises(DefinitionError, match="keep is 'all' or 'newest', not 'some'"):
        ks.Graph("odd", keep="some")


async def test_definition_that_a_run_was_made_to_fit_is_kept(world):
    engine = await world.started()
    run = await engine.start(counting(20), {"n": 0}, run_id="r")
    await until_status(run, "waiting")
    await world.crash(engine)

    def migrate(info):
        return {**info.state, "new": True}

    newer = counting(20, version="2", migrate=migrate)
    engine = await world.started(workflows=[newer])
    run = await engine.get("r")
    await run.signal("word", "more")
    await until(lambda: _has_counted(run, 40))
    assert await kept(engine)
    engine = await world.crash_and_recover(engine, workflows=[newer])
    run = await engine.get("r")
    await run.signal("word", "more")
    await until(lambda: _has_counted(run, 60))
    migrated = [one for one in await run.checkpoints() if one.data.get("act") == "migrate"]
    assert migrated == []
    await run.signal("word", "done")
    assert (await run.result())["new"] is True
    await engine.close()
