"""Counters of a worker: what it has written, what it could not save, and how others see them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.engine.journal import _count
from keepstep.kernel.log import Draft
from keepstep.model import Kind, Status
from keepstep.records.counts import COUNTS, MOST_SLOW, Counter, Counts, counts_in
from keepstep.records.record import Record
from keepstep.stores.sqlite.writer import Turnstile
from keepstep.views.top import sample
from tests.engine.world import until

pytestmark = pytest.mark.live_only

START = datetime(2026, 1, 1, tzinfo=UTC)


@ks.step(retry=ks.Retry(attempts=2, base_seconds=0.0))
async def once_wrong():
    if ks.attempt() == 1:
        raise OSError("not yet")


@ks.workflow
async def fine():
    await once_wrong()
    await ks.sleep(0.01)


@ks.workflow(name="counted as failed")
async def broken():
    raise ValueError("no")


@pytest.mark.on_postgres
async def test_runs_steps_and_failures_are_counted(world):
    async with world.engine() as engine:
        await (await engine.start(fine)).result()
        with pytest.raises(ks.RunFailed):
            await (await engine.start(broken)).result()
        counts = engine.counts
        assert (counts.completed, counts.failed, counts.cancelled, counts.set_aside) == (1, 1, 0, 0)
        assert (counts.steps, counts.failures) == (1, 1)
        assert counts.commits > 3
        assert (counts.save_failures, counts.halted) == (0, 0)
        seen = await engine.call(sample, engine.store)
        assert [one.worker.id for one in seen.workers] == [engine.worker.id]
        assert [one.name for one in seen.queues] == ["default"]


def test_a_save_that_fails_for_good_is_an_event_and_counted(tmp_path):
    """Others see it with the next heartbeat, and the run goes on when the store works again."""
    events, body = [], asyncio.Event()

    @ks.step
    async def work():
        body.set()
        await go.wait()

    @ks.workflow
    async def job():
        await work()
        return "done"

    go = asyncio.Event()

    async def main():
        observers = [lambda event: events.append(event) if event.name == "run.halted" else None]
        path = tmp_path / "runs.db"
        async with ks.open(path, observers=observers, busy_seconds=0.05, lease_seconds=2) as engine:
            run = await engine.start(job)
            await body.wait()
            turn = Turnstile(f"{path}-turnstile")
            assert turn.enter(10.0)
            go.set()
            await until(lambda: events, "the halt")
            turn.leave()
            turn.close()
            assert await run.result(timeout=60) == "done"
            assert (engine.counts.halted, engine.counts.save_failures >= 5) == (1, True)

            async def told():
                return sample(engine.store).halted

            await until(told, "the heartbeat")
            (finding,) = (await examine(engine)).findings
            assert (finding.severity.value, finding.code) == ("warning", "not-saved")
            assert "1 run" in finding.message

    asyncio.run(main())
    assert events[0].data["error"]


def record(kind, seconds, step="a/slow#3"):
    return Draft(Record("r", kind.value, step=step, started_at=START, finished_at=START + timedelta(seconds=seconds)))


def test_slow_steps_are_bounded_by_their_time():
    counter = Counter()
    done = [record(Kind.STEP_COMPLETED, seconds) for seconds in (0.01, 2)]
    _count(counter, [*done, record(Kind.STEP_FAILED, 4)], None)
    assert list(counter.counts.slow) == ["slow"]
    slow = counter.counts.slow["slow"]
    assert (slow.count, slow.seconds, slow.longest_seconds) == (2, 6.0, 4.0)
    for number in range(2 * MOST_SLOW):
        _count(counter, [record(Kind.STEP_COMPLETED, 1 + number / 10, f"s{number}#1")], None)
    assert len(counter.counts.slow) == MOST_SLOW
    assert {"slow", f"s{2 * MOST_SLOW - 1}"} <= set(counter.counts.slow)


def test_rates_cover_the_time_between_two_heartbeats():
    counter = Counter()
    counter.text(100.0)
    _count(counter, [record(Kind.STEP_COMPLETED, 0.0) for _ in range(50)], Status.COMPLETED)
    assert counts_in({COUNTS: counter.text(101.0)}).rates.steps == 0.0, "an early heartbeat measures nothing"
    rates = counts_in({COUNTS: counter.text(105.0)}).rates
    assert (rates.runs, rates.steps, rates.failures) == (0.2, 10.0, 0.0)
    assert counts_in({COUNTS: counter.text(110.0)}).rates.steps == 0.0


@pytest.mark.parametrize("progress", [{}, {COUNTS: b"not json"}, {COUNTS: b'{"steps":"many"}'}])
def test_counts_that_cannot_be_read_are_zeros(progress):
    assert counts_in(progress) == Counts()
