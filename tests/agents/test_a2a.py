"""A remote agent performs durable tasks, and a workflow is served as an agent, with the official library over HTTP."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
import uvicorn
from a2a.client import create_client
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.types import a2a_pb2 as types
from starlette.applications import Starlette

import keepstep as ks
from keepstep.agents.a2a import RemoteAgent, TaskFailed, WorkflowHandler, ask
from tests.agents.lives import free_port, live, noted, serving
from tests.engine.world import steps_of, until, until_status

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def clerk(tmp_path_factory):
    """The URL of the remote agent, and the folder in which it notes what it does."""
    folder, port = tmp_path_factory.mktemp("clerk"), free_port()
    with serving("a2a_clerk.py", folder, port, port=port):
        yield f"http://127.0.0.1:{port}", folder


def words(folder, word):
    return [one for one in noted(folder) if word in one.split()]


@pytest.mark.one_store
async def test_task_is_sent_once_and_polled(world, clerk):
    url, folder = clerk
    agent = await RemoteAgent.discover(url, poll_seconds=0.05)
    word = f"{world.mode}-{world.kind}"

    @ks.workflow
    async def team():
        answers = [await agent.perform(f"slow {word}"), await agent.perform(f"quick {word}")]
        await ks.wait_for("go")
        return answers

    async with agent, world.engine() as engine:
        run = await engine.start(team)
        await until_status(run, "waiting")
        await run.signal("go")
        assert await run.result(30) == [f"<slow {word}>", f"<quick {word}>"]
        assert {name.partition("#")[0].rpartition("/")[2] for name in await steps_of(run)} == {
            "clerk.send",
            "clerk.task",
        }
        assert {one.agent for one in await run.checkpoints() if one.step.startswith("clerk.send")} == {"clerk"}
    assert (agent.name, agent.capabilities) == ("clerk", ("filing", "paper"))
    assert len(words(folder, word)) == 2


@pytest.mark.one_store
async def test_question_of_an_agent_waits_for_a_person(world, clerk):
    url, folder = clerk
    agent = RemoteAgent("clerk", url, poll_seconds=0.05)
    word = f"asked-{world.mode}"

    @ks.workflow
    async def team():
        return await agent.perform(f"ask {word}")

    async with agent, world.engine() as engine:
        run = await engine.start(team)
        await until_status(run, "waiting")
        [(name, question)] = (await run.published()).items()
        assert name.startswith("input:clerk.")
        assert question == "how many?"
        await run.signal(name, f"seven {word}")
        assert await run.result(30) == f"<seven {word}>"
    assert [one.split()[0] for one in words(folder, word)] == ["ask", "seven"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_failed_task_and_absent_agent_are_told_apart(world, clerk):
    agent = RemoteAgent("clerk", clerk[0], poll_seconds=0.05)
    absent = RemoteAgent("absent", f"http://127.0.0.1:{free_port()}")

    @ks.workflow
    async def team():
        try:
            await agent.perform("fail a")
        except TaskFailed as error:
            first = f"{error.state}: {error}"
        try:
            await absent.perform("anything")
        except ks.StepFailed as error:
            return first, str(error.error.error_class)

    async with agent, world.engine() as engine:
        failed, refused = await (await engine.start(team)).result(30)
    assert failed.startswith("failed: ")
    assert "no paper" in failed
    assert refused == "network"
    assert await agent.probe() is True
    with pytest.raises(Exception, match=r"(?i)connect"):
        await absent.probe()
    await agent.close()


@pytest.mark.one_store
@pytest.mark.live_only
async def test_repeated_attempt_sends_the_same_message_id(world, clerk):
    url, folder = clerk
    agent = RemoteAgent("clerk", url, send={"retry": ks.Retry.by_class()}, poll_seconds=0.05)

    @ks.workflow
    async def team():
        return await agent.perform("flaky id")

    async with agent, world.engine() as engine:
        assert await (await engine.start(team)).result(30) == "<flaky id>"
    first, again = [one.split()[2] for one in words(folder, "flaky")]
    assert first == again


@pytest.mark.one_store
@pytest.mark.live_only
async def test_task_of_a_team_goes_to_a_remote_agent(world, clerk):
    remote = RemoteAgent("clerk", clerk[0], capabilities=["file"], poll_seconds=0.05)

    @ks.agent(capabilities=["file"], max_tasks=1)
    async def local(task):
        return f"local {task}"

    @ks.workflow
    async def desk(task):
        team = ks.Team("office", agents=["clerk", "local"])
        return [await ks.perform("clerk", task), await team.perform("file", f"reject {task}")]

    async with remote, world.engine(agents=[remote, local]) as engine:
        run = await engine.start(desk, "teamed")
        assert await run.result(60) == ["<teamed>", "local reject teamed"]
        assert (await engine.agents.get("clerk")).capabilities == ("file",)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_cancelled_run_cancels_the_remote_task(world, clerk):
    url, folder = clerk
    agent = RemoteAgent("clerk", url, poll_seconds=0.05)

    @ks.workflow
    async def team():
        await agent.perform("never a")

    async with agent, world.engine() as engine:
        run = await engine.start(team)
        await until(lambda: any(one.startswith("never a") for one in noted(folder)))
        await until_sent(run)
        await run.cancel("enough")
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
        await until(lambda: "cancelled" in noted(folder))


async def until_sent(run):
    async def sent():
        return any(one.startswith("clerk.send") for one in await steps_of(run))

    await until(sent)


async def test_calls_outside_a_run_only_run(clerk):
    async with RemoteAgent("clerk", clerk[0], poll_seconds=0.05) as agent:
        assert await agent.perform("slow outside") == "<slow outside>"
        with pytest.raises(ks.Permanent, match="asks for input, which only a workflow can wait for"):
            await agent.perform("ask outside")


def test_bad_target_is_refused():
    with pytest.raises(ks.DefinitionError, match="must be a URL or an AgentCard, not int"):
        RemoteAgent("clerk", 7)


@pytest.mark.crash
def test_a_kill_after_any_commit_sends_no_message_twice(tmp_path, clerk):
    url, folder = clerk
    kills = 0
    while True:
        here = tmp_path / str(kills)
        here.mkdir()
        if not _is_killed(here, url, kills + 1, f"killed{kills}"):
            break
        done = words(folder, f"killed{kills}")
        assert len(done) == len({one.split()[2] for one in done}) == 2
        kills += 1
    assert kills >= 3


def _is_killed(folder, url, after, word):
    agent = RemoteAgent("clerk", url, poll_seconds=0.05)

    @ks.workflow(name="a2a_killed")
    async def team():
        return [await agent.perform(f"{one} {word}") for one in ("slow", "quick")]

    async def play(engine):
        async with agent:
            run = await engine.start(team, run_id="r")
            assert await run.result(60) == [f"<slow {word}>", f"<quick {word}>"]

    killed = live(folder, play, kill_after=after)
    assert not live(folder, play)
    return killed


# -- a served workflow -------------------------------------------------------------------------------------------------


def card(port, *, streaming=False):
    return types.AgentCard(
        name="desk",
        description="A desk",
        version="1",
        capabilities=types.AgentCapabilities(streaming=streaming),
        supported_interfaces=[
            types.AgentInterface(protocol_binding="JSONRPC", protocol_version="1.0", url=f"http://127.0.0.1:{port}/")
        ],
        default_input_modes=["text/plain"],
        default_output_modes=["text/plain"],
        skills=[types.AgentSkill(id="desk", name="desk", description="desk", tags=["desk"])],
    )


@asynccontextmanager
async def served(engine, workflow, *, streaming=False):
    """Serve a workflow at a port of this process, and give the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        shown = card(port, streaming=streaming)
        handler = WorkflowHandler(engine, workflow, shown)
        app = Starlette(routes=[*create_agent_card_routes(shown), *create_jsonrpc_routes(handler, "/")])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        task = asyncio.create_task(server.serve([listener]))
        try:
            await until(lambda: server.started)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await task


@pytest.mark.live_only
async def test_served_workflow_is_an_agent_for_another(world, effects):
    @ks.workflow
    async def desk(task):
        effects.append(task)
        if task == "broken":
            raise ValueError("no desk")
        if isinstance(task, dict):
            return {"sum": sum(task["numbers"])}
        return f"{task}: {await ask('sure?')}, {await ask('really?')}"

    @ks.workflow
    async def team():
        return [await remote.perform({"numbers": [1, 2]}), await remote.perform("pay")]

    async with (
        world.engine() as engine,
        served(engine, desk) as url,
        RemoteAgent("desk", url, poll_seconds=0.05) as remote,
    ):
        run = await engine.start(team)
        for question, answer in ("sure?", "yes"), ("really?", "no"):

            async def asked(question=question):
                return next((name for name, one in (await run.published()).items() if one == question), None)

            await run.signal(await until(asked), answer)
        assert await run.result(30) == [{"sum": 3}, "pay: yes, no"]
        with pytest.raises(TaskFailed, match="no desk"):
            await remote.perform("broken")


def message(text, message_id, task=""):
    return types.SendMessageRequest(
        message=types.Message(message_id=message_id, role=types.ROLE_USER, parts=[types.Part(text=text)], task_id=task)
    )


async def sent(client, request):
    return [one async for one in client.send_message(request)]


@pytest.mark.live_only
async def test_repeated_message_finds_its_task(world):
    @ks.workflow
    async def desk(task):
        return f"{task}: {await ask('sure?')}"

    state = types.TaskState
    async with world.engine() as engine, served(engine, desk) as url:
        async with await create_client(url) as client:
            [first] = await sent(client, message("pay", "m1"))
            [again] = await sent(client, message("pay", "m1"))
            assert first.task.id == again.task.id
            assert first.task.status.state == state.TASK_STATE_INPUT_REQUIRED
            assert first.task.status.message.parts[0].text == "sure?"
            for _ in range(2):
                [done] = await sent(client, message("yes", "m2", first.task.id))
                assert done.task.status.state == state.TASK_STATE_COMPLETED
                assert done.task.artifacts[0].parts[0].text == "pay: yes"
            with pytest.raises(Exception, match="does not wait for a message"):
                await sent(client, message("more", "m3", first.task.id))
            listed = await client.list_tasks(types.ListTasksRequest(include_artifacts=True))
            assert [task.id for task in listed.tasks] == [first.task.id]
            with pytest.raises(Exception, match=r"(?i)not found"):
                await client.get_task(types.GetTaskRequest(id="unknown"))
        assert len((await engine.list()).runs) == 1


@pytest.mark.one_store
@pytest.mark.live_only
async def test_served_task_survives_its_server_and_is_cancelled(world):
    @ks.workflow
    async def desk(task):
        return await ask("sure?")

    state = types.TaskState
    async with world.engine() as engine, served(engine, desk) as url, await create_client(url) as client:
        [first] = await sent(client, message("pay", "m1"))
    async with (
        world.engine() as engine,
        served(engine, desk, streaming=True) as url,
        await create_client(url) as client,
    ):
        task = await client.get_task(types.GetTaskRequest(id=first.task.id))
        assert task.status.state == state.TASK_STATE_INPUT_REQUIRED
        events = await sent(client, message("yes", "m2", first.task.id))
        assert events[-1].status_update.status.state == state.TASK_STATE_COMPLETED or len(events) == 1
        events = await sent(client, message("other", "m3"))
        cancelled = await client.cancel_task(types.CancelTaskRequest(id=events[0].task.id))
        assert cancelled.status.state == state.TASK_STATE_CANCELED
