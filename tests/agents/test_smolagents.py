"""smolagents inside a workflow: blocking agents, whose calls come from several threads."""

import threading
from contextlib import suppress
from contextvars import copy_context

import pytest
from smolagents import ChatMessage, CodeAgent, MessageRole, Model, ToolCallingAgent, tool
from smolagents.models import ChatMessageToolCall, ChatMessageToolCallFunction, TokenUsage
from smolagents.monitoring import LogLevel

import keepstep as ks
from keepstep.agents.calls import CallSteps
from keepstep.agents.contract import AgentContract
from keepstep.agents.smolagents import durable, run
from keepstep.agents.threads import BlockingCalls, Stopped, in_thread
from tests.engine.world import steps_of, until


def asking(*calls):
    """A message of a model that asks for tools: each is a name, arguments and an id."""
    made = [
        ChatMessageToolCall(id=one, type="function", function=ChatMessageToolCallFunction(name=name, arguments=given))
        for name, given, one in calls
    ]
    return ChatMessage(role=MessageRole.ASSISTANT, content="", tool_calls=made, token_usage=TokenUsage(7, 0))


class Scripted(Model):
    def __init__(self, talk, who):
        super().__init__(model_id="scripted")
        self.talk, self.who = talk, who

    def generate(self, messages, **kwargs):
        done = [m for m in messages if m.role == MessageRole.TOOL_RESPONSE]
        lines = [line for message in done for line in message.content[0]["text"].splitlines()]
        results = [
            line for line in lines if line.startswith(("<", "helper", "Error executing tool", "The call was denied"))
        ]
        turn = self.talk.think(self.who, results)
        if turn.calls:
            return asking(*((call.tool, call.arguments, call.id) for call in turn.calls))
        return asking(("final_answer", {"answer": turn.text}, "end"))


class TestContract(AgentContract):
    lacks = {  # noqa: RUF012
        "cancel": "a thread cannot be ended; it stops at its next call",
        "parking": "a thread of the framework waits with the run",
        "streaming": "the framework streams to its own thread",
        "timeouts": "a thread cannot be ended; it stops at its next call",
    }

    def build(self, talk):
        def made(name):
            @tool
            def use(word: str) -> str:
                """Use it.

                Args:
                    word: the word
                """
                return talk.use_in_thread(name, word)

            use.name = name
            return use

        def agent(who, tools, **more):
            return ToolCallingAgent(tools=tools, model=Scripted(talk, who), verbosity_level=LogLevel.OFF, **more)

        async def converse(question):
            helper = agent("helper", [made("look")], name="ask", description="helper")
            main = agent("main", [made(one) for one in ("look", "meet", "flaky", "broken", "slow", "pay")], name="main")

            @tool
            def ask(word: str) -> str:
                """Ask.

                Args:
                    word: the word
                """
                return str(durable(helper, **talk.options).run(word))

            main.tools["ask"] = ask
            options = {**talk.options, "tools": {**talk.options["tools"], "ask": None}}
            return {"answer": str(await run(durable(main, **options, approve=["pay"]), question))}

        return converse


@tool
def look(word: str) -> str:
    """Look.

    Args:
        word: the word
    """
    EFFECTS.append(word)
    return f"<{word}>"


EFFECTS = []


class Coder(Model):
    """A model that writes code which calls tools, and has an agent of its own do a part."""

    def __init__(self, *answers):
        super().__init__(model_id="coder")
        self.answers = answers

    def generate(self, messages, **kwargs):
        done = sum(m.role == MessageRole.ASSISTANT for m in messages)
        return ChatMessage(role="assistant", content=self.answers[done], token_usage=TokenUsage(3, 2))


@pytest.mark.one_store
async def test_tools_of_generated_code_and_managed_agents_are_steps(world):
    EFFECTS.clear()

    def team():
        helper = CodeAgent(
            tools=[look],
            model=Coder("<code>\nfinal_answer(look(word='b'))\n</code>"),
            name="helper",
            description="helps",
            verbosity_level=LogLevel.OFF,
        )
        answers = ("<code>\nprint(look('a'))\n</code>", "<code>\nfinal_answer(helper('b')[-3:])\n</code>")
        return CodeAgent(
            tools=[look], model=Coder(*answers), managed_agents=[helper], name="main", verbosity_level=LogLevel.OFF
        )

    @ks.workflow
    async def desk():
        return await run(durable(team()), "look")

    async with world.engine() as engine:
        handle = await engine.start(desk)
        assert "b" in await handle.result(60)
        steps = await steps_of(handle)
        assert sum(name.startswith("look#") for name in steps) == 2
        assert sum(name.startswith("model#") for name in steps) == 3
        assert (await handle.spent()).tokens == 15
    assert EFFECTS == ["a", "b"]


# -- the bridge --------------------------------------------------------------------------------------------------------


@pytest.mark.one_store
async def test_two_threads_ask_at_once_and_meet(world):
    meeting = threading.Barrier(2)
    seen = []

    def body(name):
        if not world.replaying:
            meeting.wait(30)
        seen.append(name)
        return name.upper()

    def agent():
        calls = BlockingCalls(CallSteps())
        results = {}

        def work(name):
            with suppress(Stopped):
                results[name] = calls.tool("look", name, lambda: body(name))

        threads = [threading.Thread(target=copy_context().run, args=(work, name)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    @ks.workflow
    async def desk():
        return await in_thread(agent)

    async with world.engine() as engine:
        handle = await engine.start(desk)
        assert await handle.result(30) == {"a": "A", "b": "B"}
    assert sorted(seen) == ["a", "b"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_cancel_ends_a_thread_at_its_next_call(world):
    began, go, ended = threading.Event(), threading.Event(), []

    def body():
        began.set()
        go.wait(30)
        return "late"

    def agent():
        calls = BlockingCalls(CallSteps())
        try:
            calls.tool("slow", "c1", body)
            calls.tool("never", "c2", lambda: ended.append("repeated"))
        except Exception:
            ended.append("swallowed")
        except Stopped:
            ended.append("stopped")
            raise

    @ks.workflow
    async def desk():
        return await in_thread(agent)

    async with world.engine() as engine:
        handle = await engine.start(desk)
        await until(began.is_set)
        await handle.cancel("enough")
        with pytest.raises(ks.RunCancelled):
            await handle.result(30)
        go.set()
        await until(lambda: ended)
    assert ended == ["stopped"]


@pytest.mark.one_store
async def test_failed_attempt_is_tried_again_in_the_same_thread(world):
    threads = []

    def agent():
        def body():
            threads.append(threading.get_ident())
            if len(threads) == 1:
                raise OSError("down")
            ks.spend(tokens=3)
            return threads[-1] == threading.get_ident()

        calls = BlockingCalls(CallSteps(tool={"retry": ks.Retry(attempts=2, base_seconds=0)}))
        return calls.tool("look", None, body, arguments={"word": "a"})

    @ks.workflow
    async def desk():
        return await in_thread(agent)

    async with world.engine() as engine:
        handle = await engine.start(desk)
        assert await handle.result(30) is True
        assert (await handle.spent()).tokens == 3
    assert len(threads) == 2


@pytest.mark.one_store
async def test_thread_without_context_finds_its_run(world):
    def agent():
        calls, found = BlockingCalls(CallSteps()), []

        def work():
            with suppress(Stopped):
                found.append(calls.at_home(lambda: calls.tool("look", "c1", lambda: "seen")))

        calls.model([], lambda: "look")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return found

    @ks.workflow
    async def desk():
        return await in_thread(agent)

    async with world.engine() as engine:
        handle = await engine.start(desk)
        assert await handle.result(30) == ["seen"]
        assert (await steps_of(handle))[1:] == ["look#@c1"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_thread_without_context_ends_with_its_run(world):
    calls, go, ended = BlockingCalls(CallSteps()), threading.Event(), []

    def work():
        go.wait(30)
        try:
            calls.at_home(lambda: calls.tool("look", "c1", lambda: ended.append("ran")))
        except Stopped:
            ended.append("stopped")

    def agent():
        calls.model([], lambda: "look")
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    @ks.workflow
    async def desk():
        await in_thread(agent)

    async with world.engine() as engine:
        handle = await engine.start(desk)
        await until(lambda: calls._home)
        await handle.cancel("enough")
        with pytest.raises(ks.RunCancelled):
            await handle.result(30)
        go.set()
        await until(lambda: ended)
    assert ended == ["stopped"]
    assert calls.model([], lambda: "outside") == "outside"
    assert calls.at_home(lambda: calls.tool("look", "c1", lambda: "outside")) == "outside"


@pytest.mark.one_store
@pytest.mark.live_only
async def test_agent_of_two_runs_at_once_is_refused(world):
    calls, both = BlockingCalls(CallSteps()), threading.Barrier(2)

    def agent():
        try:
            calls.model([], lambda: both.wait(1))
        except ks.StepFailed:
            return "alone"
        except ks.DefinitionError as error:
            return str(error)

    @ks.workflow
    async def desk():
        return await in_thread(agent)

    async with world.engine() as engine:
        runs = [await engine.start(desk) for _ in range(2)]
        answers = sorted([await run.result(30) for run in runs])
    assert answers == ["alone", "an agent is used by two runs at once; make it inside the workflow"]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_call_without_the_bridge_is_refused(world):
    calls = BlockingCalls(CallSteps())

    @ks.workflow
    async def desk():
        try:
            calls.tool("look", "c1", lambda: 1)
        except ks.DefinitionError as error:
            return str(error)

    async with world.engine() as engine:
        assert "in_thread(agent.run, task)" in await (await engine.start(desk)).result(30)
    assert calls.tool("look", "c1", lambda: 1) == 1


def test_other_objects_are_refused():
    with pytest.raises(ks.DefinitionError, match="must be an agent of smolagents, got str"):
        durable("agent")
