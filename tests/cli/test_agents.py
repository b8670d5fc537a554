"""`agents`: what there is, how healthy, and what a person may tell them; and `worker --agents`."""

from __future__ import annotations

import asyncio
import threading

import pytest

import keepstep as ks

PROGRAM = """
import keepstep as ks

@ks.agent(capabilities=["write"])
async def writer(task):
    return task.upper()

team = ks.Team("press", agents=[writer])
something = 1

@ks.workflow
async def article(topic):
    return await ks.perform("write", topic, wait=True)
"""


@pytest.fixture
def host(folder):
    """A worker in a thread that hosts an agent."""
    ready, end = threading.Event(), threading.Event()

    async def serve():
        agent = ks.Agent("writer", perform=len, capabilities=["write"], probe=lambda: not (folder / "broken").exists())
        async with ks.open(str(folder / ".keepstep/runs.db"), agents=[agent], workflows=[], lease_seconds=1.0):
            ready.set()
            await asyncio.to_thread(end.wait)

    (folder / ".keepstep").mkdir(exist_ok=True)
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(30)
    yield
    end.set()
    thread.join(30)


def test_agents_are_listed_and_shown(keepstep, host):
    (one,) = keepstep("agents", "--json").json["agents"]
    assert (one["agent"], one["status"], one["capabilities"]) == ("writer", "healthy", ["write"])
    assert one["health"] == {"score": 100.0, "status": "healthy", "parts": {}}
    assert "writer" in keepstep("agents").out
    assert "healthy (100)" in keepstep("agents", "show", "writer").out
    assert keepstep("agents", "show", "painter").code == 3


def test_agent_is_drained_and_resumed(keepstep, host):
    assert keepstep("agents", "drain", "writer", "--reason", "new model", "--json").json["status"] == "draining"
    assert keepstep("agents", "--json").json["agents"][0]["status"] == "draining"
    assert keepstep("agents", "resume", "writer", "--json").json["status"] == "healthy"
    assert keepstep("agents", "drain", "writer", "--worker", "nobody").code == 3


def test_agent_is_probed(keepstep, host, folder):
    done = keepstep("agents", "probe", "writer", "--json")
    assert (done.code, done.json["hosts"][0]["probe_error"]) == (0, None)
    (folder / "broken").touch()
    done = keepstep("agents", "probe", "writer", "--json")
    assert done.json["hosts"][0]["probe_error"] == "the probe returned False"


def test_worker_hosts_agents_by_module_and_name(keepstep, folder):
    (folder / "press.py").write_text(PROGRAM, encoding="utf-8")
    assert keepstep("start", "press.py:article", '"bees"', "--id", "a").code == 0
    assert keepstep("worker", "press.py", "--agents", "press.py", "--until-idle", "-q").code == 0
    assert keepstep("show", "a", "--json").json["result"] == "BEES"
    history = keepstep("history", "a", "--json").json["checkpoints"]
    assert {one["agent"] for one in history if one["kind"].startswith("agent")} == {"writer"}
    assert keepstep("worker", "--agents", "press.py:team", "--until-idle", "-q").code == 0
    assert keepstep("worker", "--agents", "press.py:painter").code == 2
    assert keepstep("worker", "--agents", "press.py:something").code == 2
    assert keepstep("worker").code == 2


def test_doctor_names_an_agent_that_nobody_hosts(keepstep, folder):
    (folder / "press.py").write_text(PROGRAM, encoding="utf-8")

    async def leave_a_task():
        from keepstep.stores.open import open_store
        from keepstep.workflows.agent import AgentWorkflow

        (folder / ".keepstep").mkdir(exist_ok=True)
        store = open_store(str(folder / ".keepstep/runs.db"))

        async def nothing(task):
            pass

        workflow = AgentWorkflow("ghost", nothing, "1")
        async with ks.open(store, workflows=[workflow], queues=["other"]) as engine:
            await engine.start(workflow, "task", run_id="t")
        store.close()

    asyncio.run(leave_a_task())
    codes = [one["code"] for one in keepstep("doctor", "--json").json["findings"]]
    assert codes == ["agent-unhosted"]
    assert "agent 'ghost'" in keepstep("doctor").out
