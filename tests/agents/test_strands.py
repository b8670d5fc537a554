"""Strands agents survive crashes, pause for people, and stream."""

import asyncio
import json

import pytest
from pydantic import BaseModel
from strands import Agent, ToolContext, tool
from strands.models import Model
from strands.multiagent import GraphBuilder
from strands.types.exceptions import ContextWindowOverflowException

import keepstep as ks
from keepstep.agents.contract import AgentContract
from keepstep.agents.strands import approvals, durable
from tests.engine.world import replay_from_every_prefix, steps_of, until_status


class Scripted(Model):
    """A model that answers by a function of the ids of the calls that are done."""

    def __init__(self, effects, script):
        self.effects, self.script = effects, script

    def update_config(self, **_):
        pass

    def get_config(self):
        return {"model_id": "scripted"}

    def structured_output(self, *_, **__):
        raise NotImplementedError

    async def stream(self, messages, tool_specs=None, system_prompt=None, **_):
        done = {
            one["toolResult"]["toolUseId"] for message in messages for one in message["content"] if "toolResult" in one
        }
        given = self.script(done)
        given = [given] if isinstance(given, str) else given
        self.effects.append("model " + ",".join(one if isinstance(one, str) else one[1] for one in given))
        yield {"messageStart": {"role": "assistant"}}
        for one in given:
            if isinstance(one, str):
                yield {"contentBlockStart": {"start": {}}}
                for word in one.split():
                    yield {"contentBlockDelta": {"delta": {"text": f"{word} "}}}
            else:
                yield {"contentBlockStart": {"start": {"toolUse": {"name": one[0], "toolUseId": one[1]}}}}
                yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(one[2])}}}}
            yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn" if isinstance(given[0], str) else "tool_use"}}
        usage = {"inputTokens": 4, "outputTokens": 3, "totalTokens": 7}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


class Told(Scripted):
    """A model that plays a conversation of the contract."""

    def __init__(self, talk, agent):
        super().__init__([], None)
        self.talk, self.agent = talk, agent

    async def stream(self, messages, *rest, **options):
        found = [one["toolResult"] for message in messages for one in message["content"] if "toolResult" in one]
        turn = self.talk.think(self.agent, {one["toolUseId"]: one["content"][0]["text"] for one in found})
        self.script = lambda _: [(one.tool, one.id, one.arguments) for one in turn.calls] or turn.text
        async for event in super().stream(messages, *rest, **options):
            yield event
            if self.talk.streamed and "text" in event.get("contentBlockDelta", {}).get("delta", {}):
                await self.talk.sent()


class TestContract(AgentContract):
    def build(self, talk):  # noqa: C901 - one small function for each tool
        def plain(name):
            @tool(name=name)
            async def use(word: str) -> str:
                """Do it."""
                return await talk.use(name, word)

            return use

        @tool(context=True)
        async def pay(word: str, tool_context: ToolContext) -> str:
            """Pay."""
            allowed = tool_context.interrupt("pay", reason=word)
            return await talk.use("pay", word) if allowed else "denied"

        def new(name, tools):
            return durable(Agent(model=Told(talk, name), tools=tools, name=name, callback_handler=None), **talk.options)

        async def converse(question):
            helper = new("helper", [plain("look")])

            @tool
            async def ask(word: str) -> str:
                """Ask the helper."""
                return str(await helper.invoke_async(word)).strip()

            tools = [*(plain(name) for name in ("look", "meet", "flaky", "broken", "slow")), pay, ask]
            talk.tools.setdefault("ask", None)
            agent = new("main", tools)

            async def turn(prompt):
                async for event in agent.stream_async(prompt):
                    if "data" in event:
                        talk.saw(event)
                    if "result" in event:
                        result = event["result"]
                return result

            result = await turn(question)
            while result.stop_reason == "interrupt":
                result = await turn(await approvals(result))
            return {"answer": str(result).strip(), "messages": len(agent.messages)}

        return converse


def new_agent(effects, script, tools=(), name="agent", **options):
    return Agent(model=Scripted(effects, script), tools=list(tools), name=name, callback_handler=None, **options)


def desk_script(done):
    if "r1" in done:
        return "refunded five"
    if not done:
        return [("look", "c1", {"at": "a"}), ("look", "c2", {"at": "b"})]
    if "c3" not in done:
        return [("poet", "c3", {"input": "rhyme"})]
    return [("refund", "r1", {"eur": 5})]


def poet_script(done):
    return "moon" if done else [("look", "c1", {"at": "poem"})]


def make_desk(effects):
    """An agent with two tools at once, a sub-agent with the same call ids, and a tool that interrupts."""

    @tool
    async def look(at: str) -> str:
        """Look somewhere."""
        await asyncio.sleep(0.01 if at == "a" else 0)
        effects.append(f"look {at}")
        return f"<{at}>"

    @tool(context=True)
    def refund(eur: int, tool_context: ToolContext) -> str:
        """Pay back."""
        if not tool_context.interrupt("approval", reason={"eur": eur}):
            return "denied"
        effects.append(f"refund {eur}")
        return f"paid {eur}"

    poet = durable(new_agent(effects, poet_script, [look], "poet"))
    return durable(new_agent(effects, desk_script, [look, refund, poet.as_tool()], "desk"))


EFFECTS = []
ALL = {"model c1,c2", "look a", "look b", "model c3", "model c1", "look poem", "model moon", "model r1", "refund 5"}


@pytest.fixture(autouse=True)
def _effects():
    EFFECTS.clear()


async def turn(agent, prompt, streamed):
    if not streamed:
        return await agent.invoke_async(prompt)
    async for event in agent.stream_async(prompt):
        if "result" in event:
            result = event["result"]
    return result


@ks.workflow(name="strands desk")
async def desk(streamed: bool) -> str:
    agent = make_desk(EFFECTS)
    result = await turn(agent, "money back?", streamed)
    while result.stop_reason == "interrupt":
        result = await turn(agent, await approvals(result), streamed)
    return str(result).strip()


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_agent_is_made_of_steps_and_waits_for_approval(world, streamed):
    async with world.engine() as engine:
        run = await engine.start(desk, streamed)
        await until_status(run, "waiting")
        assert (await run.published())["approve:r1"] == {"name": "approval", "reason": {"eur": 5}}
        await run.signal("approve:r1", True)
        assert await run.result(30) == "refunded five"
        steps = await steps_of(run)
        assert {"look#@c1", "look#@c2", "@poet:c3/look#@c1", "refund#@r1", "refund#@r1~2"} <= set(steps)
        assert sum("model#" in step for step in steps) == 6
        assert {one.agent for one in await run.checkpoints() if one.kind == "step completed"} == {"desk", "poet"}
        assert (await run.spent()).tokens == 42
    assert set(EFFECTS) == ALL | {"model refunded five"}
    assert len(EFFECTS) == 10


@pytest.mark.one_store
@pytest.mark.live_only
async def test_agent_recovers_from_every_record(world):
    async with world.engine() as engine:
        run = await engine.start(desk, True)
        await run.signal("approve:r1", True)
        assert await run.result(30) == "refunded five"
        done = [one.step for one in await run.checkpoints() if one.kind.value == "step completed"]
        history = [one.step if one.kind.value == "step completed" else "" for one in await run.checkpoints()]
        assert len(done) == 11, "ten effects, and the call that interrupts"

        async def check(again, length):
            assert await again.result(30) == "refunded five"
            recorded = [step for step in history[:length] if step and step != "refund#@r1"]
            assert len(EFFECTS) == len(set(EFFECTS)) == 10 - len(recorded)
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
    result = await agent.invoke_async("money back?")
    [asked] = result.interrupts
    answer = [{"interruptResponse": {"interruptId": asked.id, "response": True}}]
    assert str(await agent.invoke_async(answer)).strip() == "refunded five"
    assert len(effects) == 10


async def test_streamed_words_reach_readers_of_the_run(world, effects):
    @ks.workflow
    async def speak():
        return str(await durable(new_agent(effects, lambda _: "one two")).invoke_async("hi")).strip()

    async with world.engine() as engine:
        run = await engine.start(speak)
        assert await run.result(30) == "one two"
        assert [one.data["value"] async for one in run.watch() if one.name == "token.emitted"] == ["one ", "two "]
    assert effects == ["model one two"]


async def test_state_that_a_tool_sets_is_kept(world, effects):
    @tool(context=True)
    def remember(what: str, tool_context: ToolContext) -> str:
        """Remember something."""
        effects.append(f"remember {what}")
        tool_context.agent.state.set("memory", [*(tool_context.agent.state.get("memory") or []), what])
        return "ok"

    def script(done):
        wanted = [name for name in ("one", "two") if name not in done]
        return [("remember", wanted[0], {"what": wanted[0]})] if wanted else "done"

    @ks.workflow
    async def talk():
        agent = durable(new_agent(effects, script, [remember]))
        await agent.invoke_async("remember")
        await ks.wait_for("go")
        return agent.state.get("memory")

    async with world.engine() as engine:
        run = await engine.start(talk)
        await until_status(run, "waiting")
        await run.signal("go")
        assert await run.result(30) == ["one", "two"]
    assert effects.count("remember one") == 1


async def test_failing_tool_is_retried_and_its_error_goes_to_the_model(world, effects):
    @tool
    def flaky() -> str:
        """Fail."""
        effects.append("tried")
        raise OSError("down")

    @ks.workflow
    async def talk():
        agent = new_agent(effects, lambda done: "sorry" if done else [("flaky", "c1", {})], [flaky])
        result = await durable(agent, tool={"retry": ks.Retry(attempts=2, base_seconds=0)}).invoke_async("go")
        [failed] = [one["toolResult"] for one in agent.messages[-2]["content"]]
        return [failed["status"], str(result).strip()]

    async with world.engine() as engine:
        assert await (await engine.start(talk)).result(30) == ["error", "sorry"]
    assert effects.count("tried") == 2


async def test_structured_answer_is_parsed_live_and_on_replay(world, effects):
    class Price(BaseModel):
        """A price."""

        eur: int

    @ks.workflow
    async def ask():
        agent = durable(new_agent(effects, lambda done: "done" if done else [("Price", "p1", {"eur": 5})]))
        result = await agent.invoke_async("price?", structured_output_model=Price)
        await ks.wait_for("go")
        return result.structured_output.eur

    async with world.engine() as engine:
        run = await engine.start(ask)
        await run.signal("go")
        assert await run.result(30) == 5


async def test_overflow_of_the_context_reaches_the_agent(world, effects):
    def script(_):
        if not effects:
            effects.append("overflow")
            raise ContextWindowOverflowException("too long")
        return "short"

    @ks.workflow
    async def talk():
        agent = durable(new_agent(effects, script))
        agent.messages.extend({"role": role, "content": [{"text": "old"}]} for role in ("user", "assistant") * 3)
        text = str(await agent.invoke_async("hi")).strip()
        return [text, len(agent.messages)]

    async with world.engine() as engine:
        text, kept = await (await engine.start(talk)).result(30)
        assert text == "short"
        assert kept < 8
    assert effects == ["overflow", "model short"]


async def test_graph_of_agents_runs_inside(world, effects):
    @ks.workflow
    async def poems():
        graph = GraphBuilder()
        for name in ("moon", "sun"):
            graph.add_node(durable(new_agent(effects, lambda _, name=name: name, name=name)), name)
        graph.add_node(durable(new_agent(effects, lambda _: "both", name="join")), "join")
        for name in ("moon", "sun"):
            graph.add_edge(name, "join")
        result = await graph.set_max_node_executions(9).build().invoke_async("rhyme")
        return {name: str(one.result).strip() for name, one in result.results.items()}

    async with world.engine() as engine:
        found = await (await engine.start(poems)).result(30)
        assert found == {"moon": "moon", "sun": "sun", "join": "both"}
    assert sorted(effects) == ["model both", "model moon", "model sun"]


async def test_cancelled_run_ends_the_model_call_first(world, effects):
    speaking = asyncio.Event()

    class Slow(Scripted):
        async def stream(self, messages, *_, **__):
            try:
                yield {"messageStart": {"role": "assistant"}}
                speaking.set()
                await asyncio.sleep(3600)
            finally:
                effects.append("model left")

    @ks.workflow
    async def talk():
        await durable(Agent(model=Slow(effects, None), callback_handler=None)).invoke_async("hi")

    async with world.engine() as engine:
        run = await engine.start(talk)
        await speaking.wait()
        await run.cancel("enough")
        await until_status(run, "cancelled")
    assert effects == ["model left"]


@pytest.mark.live_only
async def test_agent_of_another_run_is_refused(world, effects):
    shared = durable(new_agent(effects, lambda _: "hi", name="shared"))

    @ks.workflow
    async def talk():
        return str(await shared.invoke_async("hi"))

    async with world.engine() as engine:
        await (await engine.start(talk)).result(30)
        with pytest.raises(ks.RunFailed, match="agent 'shared' was used in another run"):
            await (await engine.start(talk)).result(30)


async def test_blocking_call_inside_a_workflow_is_refused(world, effects):
    @ks.workflow
    async def talk():
        durable(new_agent(effects, lambda _: "hi"))("hi")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="outside the event loop of its workflow"):
            await (await engine.start(talk)).result(30)


def test_what_cannot_be_durable_is_refused(effects):
    class Stateful(Scripted):
        stateful = True

    with pytest.raises(ks.DefinitionError, match=r"`agent` must be a strands\.Agent, got str"):
        durable("agent")
    with pytest.raises(ks.DefinitionError, match="keeps the conversation in a service"):
        durable(Agent(model=Stateful(effects, None), callback_handler=None))
    with pytest.raises(ks.DefinitionError, match="is durable already"):
        durable(durable(new_agent(effects, None)))
