"""What an act would do is told first, and what runs share is listed and steered."""

import asyncio

import pytest

import keepstep as ks
from tests.engine.world import until_status
from tests.web.test_api import client_of, waiting

pytestmark = [pytest.mark.live_only]


@pytest.mark.one_store
async def test_retry_tells_first_what_it_would_do(world):
    fails = [True]

    @ks.step(retry=None)
    async def work():
        if fails:
            raise ValueError("broken")

    @ks.workflow
    async def program():
        await work()

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(program, run_id="r")
        await until_status(run, "failed")
        planned = (await client.post("/runs/r/retry", json={"dry_run": True})).json()
        assert (planned["again"], planned["possible"]) == (["work#1"], True)
        assert await run.status() == "failed"
        fails.clear()
        await client.post("/runs/r/retry", json={})
        await (await engine.get("r")).result(30)
        assert (await client.post("/runs/r/retry", json={"dry_run": True})).status_code == 409


async def test_cancel_names_the_children_that_go_with_it(world):
    @ks.workflow
    async def child():
        await ks.wait_for("never")

    @ks.workflow
    async def parent():
        await (await ks.start(child))

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(parent, run_id="p")
        await until_status(run, "waiting")
        (one,) = (await client.get("/runs/p/children")).json()["children"]
        await until_status(await engine.get(one["id"]), "waiting")
        planned = (await client.post("/runs/p/cancel", json={"dry_run": True})).json()
        assert (planned["children"], planned["more"]) == ([one["id"]], False)
        assert await run.status() == "waiting"
        await client.post("/runs/p/cancel", json={"reason": "enough"})
        await until_status(run, "cancelled")
        await until_status(await engine.get(one["id"]), "cancelled")


@pytest.mark.one_store
async def test_second_answer_to_the_same_wait_is_refused(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        seen = {"seq": (await run.run()).seq, "signals": (await run.run()).signals}
        await run.pause()
        await until_status(run, "paused")
        seen = {"signals": (await run.run()).signals}
        assert (await client.post("/runs/r/approve", json={"name": "approved", **seen})).status_code == 202
        late = await client.post("/runs/r/deny", json={"name": "approved", **seen})
        assert (late.status_code, late.json()["type"]) == (409, "keepstep:moved")


@pytest.mark.one_store
async def test_one_of_two_answers_at_once_is_accepted(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        await run.pause()
        await until_status(run, "paused")
        given = {"name": "approved", "signals": (await run.run()).signals}
        paths = ("/runs/r/approve", "/runs/r/deny")
        answers = await asyncio.gather(*(client.post(path, json=given) for path in paths))
        assert sorted(answer.status_code for answer in answers) == [202, 409]
        assert (await run.run()).signals == given["signals"] + 1


@pytest.mark.one_store
async def test_drop_is_for_runs_that_are_set_aside(world):
    async with world.engine() as engine, client_of(engine) as client:
        await waiting(engine)
        assert (await client.post("/runs/r/drop", json={})).status_code == 409


async def test_memories_are_shown_page_by_page(world):
    async with world.engine() as engine, client_of(engine) as client:
        memory = ks.Memory("facts", engine=engine)
        for number in range(5):
            await memory.put(f"k{number}", number)
        await memory.delete("k0")
        assert (await client.get("/memories")).json()["memories"][0]["namespace"] == "facts"
        first = (await client.get("/memories/facts", params={"limit": 3})).json()
        assert [one["key"] for one in first["values"]] == ["k1", "k2"]
        rest = (await client.get("/memories/facts", params={"limit": 3, "after": first["next"]})).json()
        assert ([one["value"] for one in rest["values"]], rest["next"]) == ([3, 4], None)
        history = (await client.get("/memories/facts", params={"prefix": "k0", "history": "true"})).json()
        assert [one["deleted"] for one in history["values"]] == [False, True]


@pytest.mark.one_store
async def test_artifact_is_fetched_as_a_file(world, tmp_path):
    async with world.engine(artifacts=tmp_path) as engine, client_of(engine) as client:
        made = await engine.artifacts.write(b"<script>", name="page.html", owner="")
        (shown,) = (await client.get("/artifacts")).json()["artifacts"]
        assert shown["digest"] == made.digest
        answer = await client.get(f"/artifacts/{made.digest}")
        assert (answer.content, answer.headers["content-type"]) == (b"<script>", "application/octet-stream")
        assert answer.headers["content-disposition"].startswith("attachment")
        assert (await client.get("/artifacts/0")).status_code == 404
