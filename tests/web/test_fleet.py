"""The API about everything that is not one run: agents, topics, channels, workflows, and starts by a form."""

import pytest

import keepstep as ks
from keepstep.errors import Permanent
from tests.engine.world import until_status
from tests.web.test_api import approving, client_of


def failing():
    @ks.step
    async def explode(number):
        raise Permanent(f"no account {number}")

    @ks.workflow(name="failing")
    async def failing(number: int, note: str = "none"):
        await explode(number)

    return failing


async def test_workflow_tells_its_versions_durations_and_common_errors(world):
    async with world.engine(workflows=[failing(), approving()]) as engine, client_of(engine) as client:
        for number in range(3):
            await until_status(await engine.start("failing", number), "failed")
        await until_status(await engine.start("approving", 1, run_id="w"), "waiting")
        await (await engine.get("w")).signal("approved")
        await (await engine.get("w")).result(30)
        listed = {one["name"]: one for one in (await client.get("/workflows")).json()["workflows"]}
        assert listed["failing"]["runs"]["failed"] == {"count": 3, "more": False}
        assert listed["approving"]["runs"]["completed"]["count"] == 1
        found = (await client.get("/workflows/failing")).json()
        [error] = found["errors"]
        assert (error["type"], error["message"], error["count"]) == ("StepFailed", error["message"], 3)
        assert "no account 2" in error["message"]
        assert found["steps"] == [{**found["steps"][0], "step": "explode", "done": 0, "failed": 3, "count": 3}]
        assert [(one["version"], one["here"]) for one in found["versions"]] == [("1", True)]
        assert [one["name"] for one in found["input"]] == ["number", "note"]
        done = (await client.get("/workflows/approving")).json()
        assert done["durations"]["count"] == 1
        assert done["succeeded"] == 1.0
        assert (await client.get("/workflows/unknown")).status_code == 404


async def test_form_starts_a_run_or_names_each_field_that_does_not_fit(world):
    async with world.engine(workflows=[approving()]) as engine, client_of(engine) as client:
        bad = {"input": {"number": "many", "other": "1"}, "priority": "high"}
        answer = await client.post("/workflows/approving/start", json=bad)
        assert answer.status_code == 422
        assert answer.json()["type"] == "keepstep:unfit"
        assert answer.json()["errors"].keys() == {"number", "other", "priority"}
        good = {"input": {"number": "4"}, "run_id": "f-1", "priority": "2", "tags": "team=a\nkind=b"}
        dry = await client.post("/workflows/approving/start", json={**good, "dry": True})
        assert "--id f-1" in dry.json()["command"]
        assert (await client.get("/runs/f-1")).status_code == 404
        assert (await client.post("/workflows/approving/start", json=good)).json()["id"] == "f-1"
        run = await (await engine.get("f-1")).run()
        assert (run.tags, run.priority, bytes(run.input)) == ({"team": "a", "kind": "b"}, 2, b'[[],{"number":4}]')
        assert (await client.post("/workflows/ks:topic/start", json={})).status_code == 422


async def test_agents_are_drained_resumed_and_probed(world):
    @ks.agent(capabilities=["write"])
    async def writer(task):
        return task

    async with world.engine() as engine, client_of(engine) as client:
        await engine.host(writer)
        [one] = (await client.get("/agents")).json()["agents"]
        assert (one["agent"], one["status"]) == ("writer", "healthy")
        assert (await client.post("/agents/writer/drain", json={"reason": "r"})).json()["status"] == "draining"
        assert (await client.post("/agents/writer/resume", json={})).json()["status"] == "healthy"
        assert (await client.post("/agents/writer/probe", json={"timeout": 0})).json()["agent"] == "writer"
        assert (await client.post("/agents/nobody/drain", json={})).status_code == 404


async def test_topic_is_published_to_and_channel_tested(world):
    channel = ks.Channel("ops", webhook="http://127.0.0.1:9/none")
    async with world.engine(workflows=[approving()]) as engine, client_of(engine) as client:
        assert (await client.post("/topics/news/publish", json={"value": {"a": 1}})).status_code == 202
        found = (await client.get("/topics/news")).json()
        assert found["recent"] == [{"a": 1}]
        assert (await client.get("/topics/unknown")).status_code == 404
        assert (await client.post(f"/channels/{channel.name}/test", json={"text": "t"})).status_code == 202
        assert (await client.post("/channels/unknown/test", json={})).status_code == 422


@pytest.mark.one_store
@pytest.mark.live_only
async def test_limits_need_the_role_admin(world):
    secret = "a-secret-of-the-tests"
    async with world.engine() as engine, client_of(engine, secret, tokens=[f"ann:act:{secret}"]) as client:
        for path in ("queues/mail/set", "services/bank/open", "agents/writer/drain", "workers/w/drain"):
            body = {"limits": {"concurrency": 1}} if path.endswith("set") else {}
            assert (await client.post(f"/{path}", json=body)).status_code == 403, path
