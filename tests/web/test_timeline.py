"""The timeline of a run: columns that agree with its records, page by page, whatever happened to the run."""

import gzip

import pytest

import keepstep as ks
from keepstep.model import Kind, Outcome
from keepstep.views import timeline
from tests.engine.world import KEYS, until_status
from tests.web.test_api import approving, client_of, waiting


@ks.step
async def square(value):
    return value * value


@ks.workflow
async def squares():
    with ks.stage("first"):
        await ks.map(square, range(5), concurrency=5)
    await ks.wait_for("go")
    with ks.acting("ann"):
        await square(7)
        await square.options(key="last one")(8)


def keys_of(page):
    names, columns = page["names"], page["columns"]
    found = []
    parts = (columns[name] for name in ("step", "branch", "call", "given"))
    for step, branch, call, given in zip(*parts, strict=True):
        path, name, key = names["branches"][branch], names["steps"][step], names["given"][given]
        found.append((f"{path}/" if path else "") + name + (f"#{call or key}" if call or key else ""))
    return found


async def pages(client, run, limit):
    found, after = [], 0
    while after is not None:
        answer = await client.get(f"/runs/{run}/timeline", params={"after": after, "limit": limit})
        assert answer.status_code == 200, answer.text
        found.append(answer.json())
        after = found[-1]["next"]
    return found


@pytest.mark.parametrize("limit", [3, 10_000])
async def test_columns_agree_with_the_records(world, limit):
    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(squares, run_id="r")
        await until_status(run, "waiting")
        await run.signal("go")
        await run.result(30)
        records = await run.checkpoints()
        seen = 0
        for page in await pages(client, "r", limit):
            names, columns = page["names"], page["columns"]
            for place, key in enumerate(keys_of(page)):
                record = records[seen]
                seen += 1
                assert (columns["seq"][place], key) == (record.seq, record.step)
                assert list(Kind)[columns["kind"][place]] == names["kinds"][columns["kind"][place]] == record.kind
                assert list(Outcome)[columns["outcome"][place]] == record.outcome
                assert names["workers"][columns["worker"][place]] == record.worker
                assert names["stages"][columns["stage"][place]] == (record.stage or "")
                assert names["agents"][columns["agent"][place]] == (record.agent or "")
                began = record.started_at or record.finished_at
                at = page["zero"] + columns["start"][place]
                assert abs(at - began.timestamp() * 1000) <= 1
                assert abs(at + columns["took"][place] - record.finished_at.timestamp() * 1000) <= 2
        assert seen == len(records)
        assert (page["status"], page["seq"]) == ("completed", len(records))


async def test_timeline_goes_on_where_it_was(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        first = (await client.get("/runs/r/timeline")).json()
        await run.signal("approved")
        await run.result(30)
        second = (await client.get("/runs/r/timeline", params={"after": first["seq"]})).json()
        seqs = first["columns"]["seq"] + second["columns"]["seq"]
        assert seqs == [record.seq for record in await run.checkpoints()]
        assert second["leases"][0]["epoch"] >= 2


@pytest.mark.live_only
async def test_crash_is_marked_with_the_lost_worker(world):
    @ks.workflow
    async def program():
        await square(1)
        await ks.wait_for("go")

    engine = await world.started(linger_seconds=60)
    run = await engine.start(program, run_id="r")
    await until_status(run, "running")
    while (await run.run()).seq < 2:
        await engine.changed(1)
    lost = engine.worker.id
    engine = await world.crash_and_recover(engine)
    async with client_of(engine) as client:
        run = await engine.get("r")
        await run.signal("go")
        await run.result(30)
        page = (await client.get("/runs/r/timeline")).json()
    await engine.close()
    taken = [one for one in page["leases"] if one["recovery"]]
    assert [(one["epoch"], one["worker"], one["lost"]) for one in taken] == [(2, engine.worker.id, lost)]
    assert taken[0]["ended"] <= taken[0]["at"]
    assert page["epoch"] >= 2


async def test_superseded_records_are_named_as_ranges(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(squares, run_id="r")
        await until_status(run, "waiting")
        await run.signal("go")
        await run.result(30)
        kept = next(one.seq for one in await run.checkpoints() if one.step == "wait_for:go#1") - 1
        await run.rewind(kept)
        await run.result(30)  # the signal is read again
        page = (await client.get("/runs/r/timeline", params={"limit": 1})).json()
        counted = {one.seq for one in await run.checkpoints(counted=True)}
        gone = [seq for first, last in page["superseded"] for seq in range(first, last + 1)]
        assert gone == [one.seq for one in await run.checkpoints() if one.seq not in counted] != []
        acts = [one for part in await pages(client, "r", 100) for one in part["details"] if one.get("act") == "rewind"]
        assert [one["back_to"] for one in acts] == [kept]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_failures_retries_and_doubts_are_flagged(world):
    tries = []

    @ks.step(retry=ks.Retry(attempts=3, base_seconds=0.001))
    async def flaky():
        tries.append(1)
        if len(tries) < 3:
            raise ValueError("not yet")

    @ks.workflow
    async def program():
        await flaky()

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(program, run_id="r")
        await run.result(30)
        page = (await client.get("/runs/r/timeline")).json()
        columns, names = page["columns"], page["names"]
        failed = [place for place, error in enumerate(columns["error"]) if error]
        assert [names["errors"][columns["error"][place]] for place in failed] == ["ValueError"] * 2
        assert [columns["flags"][place] & timeline.RETRIED for place in failed] == [timeline.RETRIED] * 2
        assert [columns["attempt"][place] for place in failed] == [1, 2]


@pytest.mark.plaintext
@pytest.mark.live_only
async def test_encrypted_run_shows_the_same_timeline_without_its_key(world):
    async with world.engine(keys=KEYS) as engine, client_of(engine) as client:
        await waiting(engine)
        with_key = (await client.get("/runs/r/timeline")).json()
    async with world.engine(worker=False) as engine, client_of(engine) as client:
        without = (await client.get("/runs/r/timeline")).json()
    for one in (with_key, without):
        for moving in ("status", "seq", "epoch", "worker", "kept_from"):
            del one[moving]
    assert with_key["columns"] == without["columns"]
    assert "publish:question" in str(without["names"])


@pytest.mark.one_store
@pytest.mark.live_only
async def test_secret_in_a_name_is_not_shown(world):
    secret = "sk-" + "a1" * 12

    @ks.workflow
    async def program():
        with ks.stage(f"deploy {secret}"):
            await square(2)

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(program, run_id="r")
        await run.result(30)
        text = (await client.get("/runs/r/timeline")).text
        assert secret not in text
        assert "deploy [redacted]" in text


@pytest.mark.one_store
@pytest.mark.live_only
async def test_large_answer_is_packed_if_the_client_can(world):
    async with world.engine() as engine, client_of(engine) as client:
        await (await engine.start(squares, run_id="r")).reached("waiting")
        packed = await client.get("/runs/r/timeline", headers={"accept-encoding": "gzip"})
        assert packed.headers["content-encoding"] == "gzip"
        plain = await client.get("/runs/r/timeline", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert packed.json()["columns"] == plain.json()["columns"]
        assert len(gzip.compress(plain.content)) < len(plain.content)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_timeline_of_an_unknown_run_is_not_found(world):
    async with world.engine(workflows=[approving()]) as engine, client_of(engine) as client:
        assert (await client.get("/runs/nobody/timeline")).status_code == 404
        assert (await client.get("/runs/nobody/timeline", params={"limit": 10_001})).status_code == 422
