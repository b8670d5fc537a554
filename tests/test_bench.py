"""The benchmarks do what they say, at a size at which nothing about speed can be seen."""

import asyncio
import json
import statistics
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest

import keepstep as ks
from bench import (
    called,
    conversing,
    floor,
    gauges,
    graphs,
    lists,
    measure,
    ours,
    peers,
    published,
    queued,
    queues,
    report,
    saver,
)
from keepstep.policies.queue import DECLARED

SMALL = {
    "j1": {"n": 3},
    "j2": {"runs": 3, "steps": 2},
    "j3": {"runs": 3, "at_once": 2},
    "j4": {"n": 3},
}


@pytest.mark.parametrize("job", SMALL)
@pytest.mark.parametrize("side", [ours, floor], ids=["ours", "floor"])
def test_a_rate_is_of_what_was_asked_for(side, job, tmp_path):
    answer = asyncio.run(side.JOBS[job](tmp_path, times=2, **SMALL[job]))
    assert answer["count"] == 2 * SMALL[job].get("n", SMALL[job].get("runs", 0) * SMALL[job].get("steps", 1))
    assert answer["per_second"] == pytest.approx(answer["count"] / answer["seconds"])


@pytest.mark.parametrize("job", ["dag", "dag_mapped"])
def test_dag_and_map_count_as_many_steps(job, tmp_path):
    assert asyncio.run(ours.JOBS[job](tmp_path, layers=3, width=2, times=2))["count"] == 12


@pytest.mark.parametrize("job", ["j1", "j2"])
def test_graphs_count_as_many_steps(job, tmp_path):
    assert asyncio.run(graphs.JOBS[job](tmp_path, times=2, **SMALL[job]))["count"] == {"j1": 6, "j2": 12}[job]


def test_a_large_state_is_changed_by_both_and_stored_once(tmp_path):
    (tmp_path / "floor").mkdir()
    (tmp_path / "ours").mkdir()
    assert asyncio.run(floor.j5(tmp_path / "floor", n=5, size=100_000))["count"] == 5
    answer = asyncio.run(graphs.j5(tmp_path / "ours", n=5, size=100_000))
    assert answer["count"] == 5
    assert answer["stored"] < 400_000


@pytest.mark.parametrize("job", ["j1", "j2"])
def test_a_rate_in_files_is_of_what_was_asked_for(job, tmp_path):
    count = {"j1": 3, "j2": 6}[job]
    assert asyncio.run(ours.JOBS[job](tmp_path, store="files", **SMALL[job]))["count"] == count
    assert (tmp_path / "runs" / "keepstep.json").is_file()
    assert asyncio.run(floor.JOBS[f"files_{job}"](tmp_path / "floor", **SMALL[job]))["count"] == count
    assert len(list((tmp_path / "floor").rglob("*.json"))) == count


def test_the_floor_keeps_a_row_for_every_step(tmp_path):
    asyncio.run(floor.j2(tmp_path, runs=3, steps=2))
    rows = floor.Journal(tmp_path, "apsw")._execute("SELECT count(*) FROM step WHERE number >= 0").fetchall()
    assert rows == [(20 + 3 * 2,)]  # the first run is the warm-up


@pytest.mark.crash
def test_a_killed_run_is_taken_up_and_its_bodies_are_counted(tmp_path):
    (tmp_path / "ours").mkdir()
    killed = measure.begin("ours", "j6_kill", tmp_path / "ours", {"n": 40, "at": 10})
    killed.communicate(timeout=60)
    assert killed.returncode == -9
    taken = measure._take_up(tmp_path, observed=True)
    assert taken["repeated"] == 1, "the body in which it was killed, and no other"
    assert list(taken["where"])[-3:] == ["claim and load", "replay", "begin the step"]
    assert sum(taken["where"].values()) == pytest.approx(taken["first"], abs=1e-6)


def test_readers_are_measured_in_one_process_and_in_two(tmp_path):
    here = asyncio.run(ours.read_here(tmp_path, n=2))
    assert here["watch"]["count"] == here["ask"]["count"] == 2

    async def across():
        read = asyncio.create_task(ours.read_across(tmp_path / "other", n=2))
        while not (tmp_path / "other" / "started").exists():  # noqa: ASYNC110 - another task makes it
            await asyncio.sleep(0.01)
        await ours.read_drive(tmp_path / "other", n=2)
        return await read

    (tmp_path / "other").mkdir()
    found = asyncio.run(across())
    assert found["watch"]["count"] == found["ask"]["count"] == 2


@pytest.fixture
def _no_queues():
    DECLARED.clear()
    yield
    DECLARED.clear()


@pytest.mark.parametrize("limit, keys", [(None, 0), (2, 0), (2, 2)])
@pytest.mark.usefixtures("_no_queues")
def test_a_queue_is_drained_under_its_limit(limit, keys, tmp_path):
    assert asyncio.run(queued.drain(tmp_path, runs=6, limit=limit, keys=keys))["count"] == 6


@pytest.mark.parametrize("service", [True, False])
def test_attempts_take_places_at_a_service(service, tmp_path):
    assert asyncio.run(called.j2(tmp_path, runs=3, steps=2, service=service))["count"] == 6


@pytest.mark.parametrize("publishers, size", [(1, 1), (2, 4)])
def test_messages_reach_all_subscribers_of_a_topic(publishers, size, tmp_path):
    found = asyncio.run(published.pass_on(tmp_path, n=9, publishers=publishers, size=size, subscribers=2))
    assert found["count"] == 18


@pytest.mark.usefixtures("_no_queues")
def test_the_first_step_of_a_queued_run_is_timed_in_another_process(tmp_path):
    ours.DELAYS.clear()
    ours.LEDGER.bodies = 0

    async def both():
        hears = asyncio.create_task(queued.start_hear(tmp_path, n=2))
        await queued.start_send(tmp_path, n=2)
        return await hears

    assert asyncio.run(both())["count"] == 2


@pytest.mark.parametrize("limits", queues.LIMITS.values(), ids=["open key", "used key"])
def test_claims_in_a_long_queue_take_what_they_may(limits):
    with ExitStack() as stack:
        long = queues.LongQueue(*queues._open(stack, None), 50, limits)
        assert all(long.claim() > 0 for _ in range(3))


def test_memory_is_measured_over_runs_that_are_parked(tmp_path):
    answer = asyncio.run(ours.j7_hoard(tmp_path, n=3))
    assert answer["count"] == 3
    ours.LEDGER.bodies = 0
    again = asyncio.run(ours.j7_replay(tmp_path, n=3))  # raises if a body ran again
    assert again["count"] == 3
    assert len(gauges.text(100_000, 1)) == len(gauges.text(100_000, 4711)) == 100_000
    assert gauges.text(100_000, 1) != gauges.text(100_000, 2)


def findings():
    return [
        measure.Finding("j1", "one <run>", 700.0, "steps/s", floor=1000.0, ratio=0.7, least_ratio=0.6),
        measure.Finding("j6", "killed", 0.9, "s", most=0.5, detail={"where": {"import": 0.1}, "repeated": 1}),
        measure.Finding("signal", "in between", 3.0, "ms"),
    ]


def test_target_is_about_the_ratio_or_the_figure():
    assert [finding.reached for finding in findings()] == [True, False, None]


def test_rounds_that_disagree_about_a_target_are_shown_to_disagree():
    one = measure.Finding(
        "j3", "short", 1.0, "runs/s", 3.0, 0.32, least_ratio=0.3, detail={"ratios": [0.15, 0.32, 0.51]}
    )
    assert one.reached
    assert not one.sure
    assert "0.32 (0.15–0.51)" in report.table([one])
    assert "yes, but rounds differ" in report.table([one])
    one.detail["ratios"] = [0.31, 0.32, 0.51]
    assert one.sure
    assert "differ" not in report.table([one])


def test_the_report_shows_and_keeps_everything(tmp_path):
    text = report.table(findings())
    assert ["yes" in line for line in text.splitlines()[2:]] == [True, False, False]
    assert ["NO" in line for line in text.splitlines()[2:]] == [False, True, False]
    assert "import 0.100 s" in report.spent(findings())
    report.write(findings(), [], tmp_path)
    kept = json.loads((tmp_path / "latest.json").read_text(encoding="utf-8"))
    assert [one["reached"] for one in kept["findings"]] == [True, False, None]
    bars = ET.parse(tmp_path / "latest.svg").getroot().findall("{*}rect")
    assert len(bars) == 2


def test_a_body_that_was_repeated_too_often_is_no_success():
    finding = measure.Finding("j6", "killed", 0.1, "s", most=0.5, detail={"repeated": 2})
    assert finding.reached is False
    assert "2 bodies repeated" in report.table([finding])


def test_peers_are_optional(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ROOT", tmp_path / "repository")
    monkeypatch.setenv("PEERS", "1")  # as `make bench PEERS=1` leaves it
    assert peers.scripts() is None
    assert peers.compare(["j1"], measure.Effort(quick=True)) == []
    script = tmp_path / "peer"
    script.write_text('#!/bin/sh\necho "RESULT {\\"per_s\\": 12.5}"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PEERS", str(tmp_path))
    assert peers.scripts() == tmp_path
    assert peers._peer(tmp_path, "dbos", "j1", []) == 12.5


def test_a_spread_is_ordered():
    spread = gauges.spread([3.0, 1.0, 2.0])
    assert (spread["median"], spread["p99"], spread["worst"]) == (statistics.median([1, 2, 3]), 3.0, 3.0)


@pytest.mark.parametrize("whose", ["keepstep", "langgraph", "memory"])
def test_savers_do_the_same_steps(whose, tmp_path):
    assert asyncio.run(saver.one(tmp_path, saver=whose, steps=3))["count"] == 3
    assert asyncio.run(saver.many(tmp_path, saver=whose, threads=2, steps=3))["count"] == 6


@pytest.mark.parametrize("framework", conversing.JOBS)
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "plain"])
def test_agents_make_as_many_calls_with_and_without_us(framework, durable, tmp_path):
    answer = asyncio.run(conversing.JOBS[framework](tmp_path, durable=durable, times=1))
    assert answer["calls"] == 60
    assert answer["seconds"] > 0
    if durable:
        steps = asyncio.run(_steps(tmp_path))
        assert steps == 2 * answer["calls"], "the one that does not count, and one that does"


async def _steps(where):
    async with ks.open(f"sqlite:///{where}/runs.db", worker=False) as engine:
        runs = (await engine.list()).runs
        records = [one for run in runs for one in await (await engine.get(run.id)).checkpoints()]
    return sum(one.kind == "step completed" for one in records)


def test_lists_find_what_was_filled_in(tmp_path):
    now, url = datetime(2026, 5, 1, tzinfo=UTC), f"sqlite:///{tmp_path / 'runs.db'}"
    lists.fill(url, 3000, now)
    found = {name: one[2:] for name, one in asyncio.run(lists.look(url, 3000, now, 1)).items()}
    assert found["newest"] == (50, 1001)
    assert found["old workflow"] == (3, 3)
    assert found["rare status"] == found["wide prefix, set aside"] == (3, 3)
    assert found["common tag"] == (30, 30)
    assert found["common tag, failed"] == found["absent workflow"] == (0, 0)
