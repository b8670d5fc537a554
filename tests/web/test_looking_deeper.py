"""The API shows what waits for a person, children, figures, conversations and workflows, and values up to a size."""

import time

import pytest

import keepstep as ks
from keepstep.agents.calls import CallSteps
from tests.engine.world import KEYS, until_status
from tests.web.test_api import approving, client_of, double, waiting


async def test_inbox_shows_questions_with_their_context(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        found = (await client.get("/inbox")).json()
        item = found["items"][0]
        assert (item["run"], item["kind"], item["name"], item["status"]) == ("r", "approval", "approved", "waiting")
        assert (item["question"], item["published"]) == ("double 21?", {"question": "double 21?"})
        assert (found["total"], found["counts"]["approval"]) == (1, 1)
        assert (await client.get("/inbox", params={"kind": "paused"})).json()["items"] == []
        seen = {"seq": item["seq"], "signals": item["signals"]}
        await client.post("/runs/r/approve", json={**seen, "name": "approved"}, headers={"x-keepstep-actor": "ann"})
        await run.result(30)
        assert (await client.get("/inbox")).json()["items"] == []
        (made,) = (await client.get("/inbox/decided")).json()["decisions"]
        assert [made[part] for part in ("act", "name", "by")] == ["approved", "approved", "ann (web)"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_inbox_is_read_part_by_part(world):
    async with world.engine() as engine, client_of(engine) as client:
        program = approving()
        for number in range(7):
            await until_status(await engine.start(program, number, run_id=f"r{number}"), "waiting")
        found = []
        for offset in (0, 3, 6):
            page = (await client.get("/inbox", params={"limit": 3, "offset": offset})).json()
            assert page["total"] == 7
            found += [one["run"] for one in page["items"]]
        assert sorted(found) == [f"r{number}" for number in range(7)]


async def in_doubt(engine):
    """A run whose at-most-once step may have happened."""

    @ks.step(at_most_once=True, timeout=0.03)
    def launch():
        time.sleep(0.2)

    @ks.workflow(name="launching")
    async def launching():
        return await launch()

    run = await engine.start(launching, run_id="d")
    await until_status(run, "waiting")
    return run


@pytest.mark.live_only
async def test_step_in_doubt_and_set_aside_run_are_in_the_inbox(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await in_doubt(engine)
        (item,) = (await client.get("/inbox")).json()["items"]
        assert (item["kind"], item["name"]) == ("in doubt", "launch#1")
        assert (await client.get("/runs/d/timeline")).json()["in_doubt"] == ["launch#1"]
        body = {"step": "launch", "verdict": "result", "value": 5, "reason": "seen"}
        await client.post("/runs/d/resolve", json=body)
        assert await run.result(30) == 5
        (made,) = (await client.get("/inbox/decided")).json()["decisions"]
        assert (made["act"], made["name"], made["reason"]) == ("resolved with a result", "launch#1", "seen")


async def test_children_are_listed_page_by_page(world):
    @ks.workflow
    async def child(number):
        return number

    @ks.workflow
    async def starting():
        started = [await ks.start(child, number) for number in range(3)]
        return [await one for one in started]

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(starting, run_id="p")
        await run.result(30)
        page = (await client.get("/runs/p/children", params={"limit": 2})).json()
        assert (page["run"], page["parent"], len(page["children"])) == ("p", None, 2)
        seen = page["children"]
        seen += (await client.get("/runs/p/children", params={"limit": 2, "after": page["next"]})).json()["children"]
        assert sorted(one["call"] for one in seen) == ["child#1", "child#2", "child#3"]
        assert {(one["parent"], one["children"], one["status"]) for one in seen} == {("p", False, "completed")}


@pytest.mark.one_store
@pytest.mark.live_only
async def test_figures_are_drawn_of_runs_and_workflows(world):
    dag = ks.Dag("drawn")
    dag.step(double, name="begin")
    async with world.engine() as engine, client_of(engine) as client:
        await waiting(engine)
        answer = await client.get("/runs/r/figure")
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/svg+xml")
        assert "<svg" in answer.text
        figure = (await client.get("/runs/r/figure", params={"form": "figure"})).text
        assert "<style" not in figure
        assert "style=" not in figure
        assert "approved" in (await client.get("/runs/r/figure", params={"form": "mermaid"})).text
        assert (await client.get("/workflows/approving/figure")).status_code == 404
        assert "begin" in (await client.get("/workflows/drawn/figure")).text


@pytest.mark.one_store
async def test_conversation_shows_calls_of_models_and_tools(world):
    steps = CallSteps("ann")

    @ks.workflow
    async def talk():
        async def answer():
            return {"role": "assistant", "content": "look it up"}

        async def look():
            return 42

        await steps.model([{"role": "user", "content": "hi"}], answer)
        await steps.tool("search", "call_1", look, arguments={"q": "x"})
        return await ks.wait_for("approved")

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(talk, run_id="t")
        await run.signal("approved", "fine")
        await run.result(30)
        turns = (await client.get("/runs/t/conversation")).json()["turns"]
        assert [(one["kind"], one["name"], one["agent"], one["value"]) for one in turns] == [
            ("model", "model", "ann", {"role": "assistant", "content": "look it up"}),
            ("tool", "search", "ann", 42),
            ("answer", "approved", None, "fine"),
        ]
        assert turns[1]["call"] == "call_1"
        assert not any(one["has_input"] for one in turns)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_statistics_add_up_what_the_records_say(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await waiting(engine)
        await run.signal("approved")
        await run.result(30)
        found = (await client.get("/runs/r/statistics")).json()
        assert found["counted"] == found["seq"] == len(await run.checkpoints())
        assert [(one["step"], one["completed"]) for one in found["steps"]] == [("double", 1)]
        assert found["kinds"]["run finished"] == 1


@ks.step
async def large():
    return "é" * 30_000


@ks.workflow
async def producing():
    ks.publish("draft", "d" * 25_000)
    return await large()


@pytest.mark.one_store
@pytest.mark.live_only
async def test_large_values_are_cut_and_can_be_fetched_whole(world):
    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(producing, run_id="r")
        whole = await run.result(30)
        shown = (await client.get("/runs/r")).json()
        assert len(shown["result"].encode()) <= 20_000
        assert shown["missing"]["result"] == len(whole.encode()) + 2 - 20_000
        assert shown["missing"]["published"] == {"draft": 25_002 - 20_000}
        raw = await client.get("/runs/r/raw")
        assert (raw.json(), raw.headers["content-disposition"]) == (whole, 'attachment; filename="result.json"')
        seq = next(one.seq for one in await run.checkpoints() if one.step == "large#1")
        assert (await client.get(f"/runs/r/records/{seq}")).json()["missing"] == {"value": 60_002 - 20_000}
        assert (await client.get(f"/runs/r/records/{seq}/raw")).json() == whole
        assert (await client.get("/runs/r/raw", params={"part": "progress"})).status_code == 404
        assert (await client.get("/runs/r/records/1/raw", params={"part": "input"})).status_code == 404


@pytest.mark.one_store
@pytest.mark.live_only
async def test_secret_stored_before_is_never_shown(world):
    secret = "sk-" + "b2" * 12

    @ks.step
    async def leak():
        return {"text": f"the key is {secret}"}

    @ks.workflow
    async def leaking(where: str):
        ks.publish("key", secret)
        await ks.wait_for("go")
        return await leak()

    async with world.engine() as engine, client_of(engine) as client:
        run = await engine.start(leaking, secret, run_id="r")
        await run.signal("go", secret)
        await run.result(30)
        paths = (
            *("", "/records?values=true", "/records/3", "/records/3/raw", "/raw", "/raw?part=input", "/audit"),
            *("/signals?values=true", "/conversation", "/timeline", "/diff", "/figure", "/statistics"),
        )
        for path in (*(f"/runs/r{path}" for path in paths), "/inbox/decided", "/runs"):
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            assert secret not in answer.text, path


@pytest.mark.plaintext
@pytest.mark.live_only
async def test_encrypted_values_are_hidden_without_the_key(world):
    async with world.engine(keys=KEYS) as engine:
        run = await engine.start(producing, run_id="r")
        await run.result(30)
        await waiting_again(engine)
    async with world.engine(worker=False) as engine, client_of(engine) as client:
        for path in ("/runs/r", "/runs/r/records/2"):
            answer = (await client.get(path)).json()
            assert answer["hidden"] is True, path
            assert "ddd" not in str(answer)
        records = (await client.get("/runs/r/records", params={"values": "true"})).json()["records"]
        assert {one["hidden"] for one in records} <= {True, False}
        assert all(one["value"] is None for one in records)
        assert (await client.get("/runs/r/diff")).json() == {"hidden": True}
        assert (await client.get("/runs/r/raw")).status_code == 403
        assert (await client.get("/runs/r/records/2/raw")).status_code == 403
        assert (await client.get("/inbox")).json()["items"][0]["hidden"] is True
        for path in ("/runs/r/timeline", "/runs/r/conversation", "/runs/r/audit", "/inbox/decided", "/runs"):
            assert (await client.get(path)).status_code == 200, path


async def waiting_again(engine):
    await until_status(await engine.start(approving(), 21, run_id="w"), "waiting")
