"""Agents and workflows of the Microsoft Agent Framework survive crashes, pause for people, and stream."""

import asyncio
import json

import pytest
from agent_framework import (
    Agent,
    AgentExecutor,
    AgentExecutorRequest,
    AgentExecutorResponse,
    BaseChatClient,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    Executor,
    FunctionInvocationContext,
    FunctionInvocationLayer,
    Message,
    ResponseStream,
    WorkflowBuilder,
    WorkflowContext,
    handler,
    response_handler,
    tool,
)
from pydantic import BaseModel

import keepstep as ks
from keepstep.agents.agent_framework import approvals, durable, responses
from keepstep.agents.contract import AgentContract
from tests.engine.world import replay_from_every_prefix, steps_of, until_status


def call(name, call_id, **arguments):
    return Content.from_function_call(call_id=call_id, name=name, arguments=json.dumps(arguments))


class Scripted(FunctionInvocationLayer, ChatMiddlewareLayer, BaseChatClient):
    """A chat client that answers by a function of the ids of the calls that are done."""

    def __init__(self, effects, script, **options):
        super().__init__(**options)
        self.effects, self.script = effects, script

    def _answer(self, messages):
        done = {one.call_id for message in messages for one in message.contents if one.type == "function_result"}
        given = self.script(done)
        given = [given] if isinstance(given, str) else given
        self.effects.append("model " + ",".join(one if isinstance(one, str) else one.call_id for one in given))
        return [Content.from_text(one) if isinstance(one, str) else one for one in given]

    async def _sent(self):
        pass

    def _inner_get_response(self, *, messages, stream, options, **_):
        usage = {"total_token_count": 7}
        if not stream:

            async def respond():
                message = Message(role="assistant", contents=self._answer(messages))
                return ChatResponse(messages=[message], usage_details=usage, model="scripted")

            return respond()

        async def updates():
            for one in self._answer(messages):
                for content in [Content.from_text(f"{word} ") for word in one.text.split()] if one.text else [one]:
                    yield ChatResponseUpdate(role="assistant", contents=[content], model="scripted")
                    if content.text:
                        await self._sent()
            yield ChatResponseUpdate(role="assistant", contents=[Content.from_usage(usage)])

        return ResponseStream(updates(), finalizer=ChatResponse.from_updates)


def results_in(messages):
    """The results of tools that a model is told, by call id."""
    found = [one for message in messages for one in message.contents if one.type == "function_result"]
    return {one.call_id: one.result for one in found}


class Told(Scripted):
    """A chat client that plays a conversation of the contract."""

    def __init__(self, talk, agent):
        super().__init__([], None)
        self.talk, self.agent = talk, agent

    def _answer(self, messages):
        turn = self.talk.think(self.agent, results_in(messages))
        calls = [call(one.tool, one.id, **one.arguments) for one in turn.calls]
        return calls or [Content.from_text(turn.text)]

    async def _sent(self):
        if self.talk.streamed:  # an agent that is a tool always streams
            await self.talk.sent()


class TestContract(AgentContract):
    def build(self, talk):
        def plain(name, mode="never_require"):
            @tool(name=name, approval_mode=mode)
            async def use(word: str) -> str:
                """Do it."""
                return await talk.use(name, word)

            return use

        async def converse(question):
            tools = [plain(name) for name in ("look", "meet", "flaky", "broken", "slow")]
            helper = durable(Agent(client=Told(talk, "helper"), name="helper", tools=[plain("look")]), **talk.options)
            tools += [plain("pay", "always_require"), helper.as_tool(name="ask", arg_name="word")]
            agent = durable(Agent(client=Told(talk, "main"), name="main", tools=tools), **talk.options)
            session = agent.create_session()

            async def turn(message):
                if not talk.streamed:
                    return await agent.run(message, session=session)
                stream = agent.run(message, session=session, stream=True)
                async for update in stream:
                    if update.text:
                        talk.saw(update)
                return await stream.get_final_response()

            response = await turn(question)
            while response.user_input_requests:
                response = await turn(await approvals(response))
            return {"answer": response.text.strip()}

        return converse


def desk_script(done):
    if "r1" in done:
        return "refunded five"
    if not done:
        return [call("look", "c1", at="a"), call("look", "c2", at="b")]
    if "c3" not in done:
        return [call("ask_poet", "c3", task="rhyme")]
    return [call("refund", "r1", eur=5)]


def poet_script(done):
    return "moon" if done else [call("look", "c1", at="poem")]


def make_desk(effects):
    """An agent with two tools at once, a sub-agent with the same call ids, and a tool that asks for approval."""

    @tool(approval_mode="never_require")
    async def look(at: str) -> str:
        """Look somewhere."""
        await asyncio.sleep(0.01 if at == "a" else 0)
        effects.append(f"look {at}")
        return f"<{at}>"

    @tool(approval_mode="always_require")
    def refund(eur: int) -> str:
        """Pay back."""
        effects.append(f"refund {eur}")
        return f"paid {eur}"

    poet = durable(Agent(client=Scripted(effects, poet_script), name="poet", tools=[look]))
    tools = [look, refund, poet.as_tool(name="ask_poet")]
    return durable(Agent(client=Scripted(effects, desk_script), name="desk", tools=tools))


async def turn(agent, message, session, streamed):
    if not streamed:
        return await agent.run(message, session=session)
    stream = agent.run(message, session=session, stream=True)
    async for _ in stream:
        pass
    return await stream.get_final_response()


@ks.workflow(name="maf desk")
async def desk(streamed: bool) -> str:
    agent = make_desk(EFFECTS)
    session = agent.create_session()
    response = await turn(agent, "money back?", session, streamed)
    while response.user_input_requests:
        response = await turn(agent, await approvals(response), session, streamed)
    return response.text.strip()


EFFECTS = []
ALL = {"model c1,c2", "look a", "look b", "model c3", "look poem", "model moon", "model r1", "refund 5"}


@pytest.fixture(autouse=True)
def _effects():
    EFFECTS.clear()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_agent_is_made_of_steps_and_waits_for_approval(world, streamed):
    async with world.engine() as engine:
        run = await engine.start(desk, streamed)
        await until_status(run, "waiting")
        assert (await run.published())["approve:r1"] == {"tool": "refund", "arguments": {"eur": 5}}
        await run.signal("approve:r1", True)
        assert await run.result(30) == "refunded five"
        steps = await steps_of(run)
        assert {"look#@c1", "look#@c2", "@ask_poet:c3/look#@c1", "refund#@r1"} <= set(steps)
        assert sum("model#" in step for step in steps) == 6
        assert {one.agent for one in await run.checkpoints() if one.kind == "step completed"} == {"desk", "poet"}
        assert (await run.spent()).tokens == 42
    assert set(EFFECTS) == ALL | {"model c1", "model refunded five"}
    assert len(EFFECTS) == 10


@pytest.mark.one_store
@pytest.mark.live_only
async def test_agent_recovers_from_every_record(world):
    async with world.engine() as engine:
        run = await engine.start(desk, True)
        await run.signal("approve:r1", True)
        assert await run.result(30) == "refunded five"
        kinds = [one.kind.value for one in await run.checkpoints()]

        async def check(again, length):
            assert await again.result(30) == "refunded five"
            assert len(EFFECTS) == len(set(EFFECTS)) == 10 - kinds[:length].count("step completed")
            EFFECTS.clear()

        EFFECTS.clear()
        await replay_from_every_prefix(run, check)


async def test_denied_call_is_not_made(world):
    async with world.engine() as engine:
        run = await engine.start(desk, False)
        await run.signal("approve:r1", False)
        assert await run.result(30) == "refunded five"
    assert "refund 5" not in EFFECTS


async def test_durable_agent_works_outside_a_workflow(effects):
    agent = make_desk(effects)
    session = agent.create_session()
    response = await agent.run("money back?", session=session)
    [asked] = response.user_input_requests
    answer = Message(role="user", contents=[asked.to_function_approval_response(True)])
    assert (await agent.run(answer, session=session)).text == "refunded five"
    assert len(effects) == 10


async def test_streamed_words_reach_readers_of_the_run(world, effects):
    updates = []

    @ks.workflow
    async def speak():
        stream = durable(Agent(client=Scripted(effects, lambda _: "one two"), name="a")).run("hi", stream=True)
        updates.append([update.text async for update in stream])
        return (await stream.get_final_response()).text

    async with world.engine() as engine:
        run = await engine.start(speak)
        assert await run.result(30) == "one two "
        assert [one.data["value"] async for one in run.watch() if one.name == "token.emitted"] == ["one ", "two "]
    assert updates[-1] == ["one ", "two ", ""]
    assert effects == ["model one two"]


async def test_structured_answer_is_parsed_live_and_on_replay(world, effects):
    class Price(BaseModel):
        eur: int

    @ks.workflow
    async def ask(streamed):
        agent = durable(Agent(client=Scripted(effects, lambda _: '{"eur": 5}'), name="a"))
        if not streamed:
            first = await agent.run("price?", options={"response_format": Price})
        else:
            first = await agent.run("price?", stream=True, options={"response_format": Price}).get_final_response()
        await ks.wait_for("go")
        return first.value.eur

    async with world.engine() as engine:
        for streamed in (False, True):
            run = await engine.start(ask, streamed)
            await run.signal("go")
            assert await run.result(30) == 5


async def test_state_that_a_tool_sets_is_kept(world, effects):
    @tool(approval_mode="never_require")
    def remember(what: str, ctx: FunctionInvocationContext) -> str:
        """Remember something."""
        effects.append(f"remember {what}")
        ctx.session.state["memory"] = [*ctx.session.state.get("memory", []), what]
        return "ok"

    def script(done):
        wanted = [name for name in ("one", "two") if name not in done]
        return [call("remember", wanted[0], what=wanted[0])] if wanted else "done"

    @ks.workflow
    async def talk():
        agent = durable(Agent(client=Scripted(effects, script), name="a", tools=[remember]))
        session = agent.create_session()
        await agent.run("remember", session=session)
        await ks.wait_for("go")
        return session.state["memory"]

    async with world.engine() as engine:
        run = await engine.start(talk)
        await until_status(run, "waiting")
        await run.signal("go")
        assert await run.result(30) == ["one", "two"]
    assert effects.count("remember one") == 1


async def test_failing_tool_is_retried_and_its_error_goes_to_the_model(world, effects):
    @tool(approval_mode="never_require")
    def flaky() -> str:
        """Fail."""
        effects.append("tried")
        raise OSError("down")

    @ks.workflow
    async def talk():
        client = Scripted(effects, lambda done: "sorry" if done else [call("flaky", "c1")])
        agent = durable(Agent(client=client, tools=[flaky]), tool={"retry": ks.Retry(attempts=2, base_seconds=0)})
        return (await agent.run("go")).text

    async with world.engine() as engine:
        assert await (await engine.start(talk)).result(30) == "sorry"
    assert effects.count("tried") == 2


class Start(Executor):
    @handler
    async def begin(self, question: str, ctx: WorkflowContext[AgentExecutorRequest]) -> None:
        await ctx.send_message(AgentExecutorRequest([Message(role="user", contents=[question])], should_respond=True))


class Join(Executor):
    @handler
    async def join(self, given: list[AgentExecutorResponse], ctx: WorkflowContext[None, str]) -> None:
        self.text = " & ".join(sorted(one.agent_response.text for one in given))
        await ctx.request_info(request_data={"publish": self.text}, response_type=bool)

    @response_handler
    async def answered(self, original: dict, agreed: bool, ctx: WorkflowContext[None, str]) -> None:
        await ctx.yield_output(f"{self.text}: {'yes' if agreed else 'no'}")


async def test_workflow_of_the_framework_runs_inside(world, effects):
    def build():
        start, join = Start(id="start"), Join(id="join")
        poets = [
            AgentExecutor(
                durable(Agent(client=Scripted(effects, lambda _, word=word: word), name=word)),
                id=word,
            )
            for word in ("moon", "sun")
        ]
        graph = WorkflowBuilder(name="poems", start_executor=start)
        return graph.add_fan_out_edges(start, poets).add_fan_in_edges(poets, join).build()

    @ks.workflow
    async def poems():
        graph = build()
        result = await graph.run("rhyme")
        while result.get_request_info_events():
            result = await graph.run(responses=await responses(result))
        return result.get_outputs()

    async with world.engine() as engine:
        run = await engine.start(poems)
        await until_status(run, "waiting")
        assert (await run.published())["approve:join"] == {"publish": "moon & sun"}
        await run.signal("approve:join", True)
        assert await run.result(30) == ["moon & sun: yes"]
    assert sorted(effects) == ["model moon", "model sun"]


def test_what_cannot_be_durable_is_refused(effects):
    class Bare(BaseChatClient):
        def _inner_get_response(self, **_):
            raise NotImplementedError

    with pytest.raises(ks.DefinitionError, match=r"`agent` must be an agent_framework\.Agent, got str"):
        durable("agent")
    with pytest.raises(ks.DefinitionError, match="Bare, runs no chat middleware"):
        durable(Agent(client=Bare()))


async def test_compaction_inside_a_call_is_refused(world, effects):
    async def compact(messages):
        return False

    @ks.workflow
    async def talk():
        return (
            await durable(Agent(client=Scripted(effects, lambda _: "hi"), compaction_strategy=compact)).run("x")
        ).text

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="compaction_strategy changes the messages"):
            await (await engine.start(talk)).result(30)
