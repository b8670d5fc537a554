"""Graphs and agents of LangGraph in workflows: every node, model and tool call is a step, made once."""

import asyncio
import json
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import StructuredTool, ToolException
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, RetryPolicy, interrupt

import keepstep as ks
from keepstep.agents.contract import AgentContract, Trouble
from keepstep.agents.langgraph import durable
from tests.agents.langgraph_agent import ScriptedModel, State, graph_of, tools_of
from tests.engine.test_at_most_once import in_doubt
from tests.engine.world import steps_of, until, until_status

TWO = [[("look", {"x": "slow"}, "c1"), ("look", {"x": "b"}, "c2")], [("refund", {"eur": 5}, "c3")]]


def texts(state):
    return [message.content for message in state["messages"]]


async def test_agent_has_a_step_for_each_call(world, effects):
    agent = durable(create_agent(ScriptedModel(rounds=TWO, effects=effects), tools_of(effects), name="desk"))

    @ks.workflow
    async def chat():
        return texts(await agent.ainvoke({"messages": [("user", "money back?")]}))

    async with world.engine() as engine:
        run = await engine.start(chat)
        assert await run.result(30) == ["money back?", "", "<slow>", "<b>", "", "paid 5", "all is done"]
        steps = await steps_of(run)
        assert sorted(steps) == ["look#@c1", "look#@c2", "model#@1", "model#@3", "model#@5", "refund#@c3"]
        assert (await run.spent()).tokens == 15
        assert {one.agent for one in await run.checkpoints() if one.kind == "step completed"} == {"desk"}
    assert sorted(effects) == ["look b", "look slow", "model 0", "model 1", "model answers", "refund"]
    assert effects.index("look b") < effects.index("look slow"), "the tools did not run side by side"


async def test_agent_outside_a_workflow_is_itself(effects):
    plain = create_agent(ScriptedModel(rounds=TWO, effects=effects), tools_of(effects), checkpointer=InMemorySaver())
    agent = durable(plain)
    config = {"configurable": {"thread_id": "t"}}
    assert texts(await agent.ainvoke({"messages": [("user", "hi")]}, config))[-1] == "all is done"
    assert texts(agent.get_state(config).values)[-1] == "all is done"
    assert texts(agent.invoke({"messages": [("user", "again")]}, config))[-1] == "all is done"
    assert agent.get_graph().nodes.keys() == plain.get_graph().nodes.keys()


async def test_approval_is_a_signal(world, effects):
    middleware = [HumanInTheLoopMiddleware(interrupt_on={"refund": True})]
    agent = durable(create_agent(ScriptedModel(rounds=TWO, effects=effects), tools_of(effects), middleware=middleware))

    @ks.workflow
    async def chat():
        return texts(await agent.ainvoke({"messages": [("user", "money back?")]}))[-2:]

    async with world.engine() as engine:
        run = await engine.start(chat)
        await until_status(run, "waiting")
        name = "approve:c3"
        asked = (await run.published())[name]
        assert asked["action_requests"][0]["args"] == {"eur": 5}
        assert "refund" not in effects
        await run.signal(name, True)
        assert await run.result(30) == ["paid 5", "all is done"]
    assert effects.count("refund") == effects.count("model 1") == 1


async def test_doubled_approval_does_not_approve_the_next_call(world, effects):
    rounds = [
        [("refund", {"eur": 5}, "c1")],
        [("refund", {"eur": 7}, "c2"), ("look", {"x": "b"}, "c3"), ("refund", {"eur": 7}, "c4")],
    ]
    middleware = [HumanInTheLoopMiddleware(interrupt_on={"refund": True})]
    agent = durable(
        create_agent(ScriptedModel(rounds=rounds, effects=effects), tools_of(effects), middleware=middleware)
    )

    @ks.workflow
    async def chat():
        return texts(await agent.ainvoke({"messages": "money back?"}))[-4:-1]

    async with world.engine() as engine:
        run = await engine.start(chat)
        for _ in range(2):
            await run.signal("approve:c1", True)

        async def asks_again():
            return "approve:c2:c4" in await run.published()

        await until(asks_again, "the second question")
        await until_status(run, "waiting")
        assert effects.count("refund") == 1
        await run.signal("approve:c2:c4", True)
        assert sorted(await run.result(30)) == ["<b>", "paid 7", "paid 7"]
    assert effects.count("refund") == 3


@pytest.mark.parametrize("given, content", [("paid 5", "paid 5"), ({"paid": 5}, '{"paid": 5}'), (None, "null")])
async def test_tool_in_doubt_is_settled_with_a_plain_value(world, effects, given, content):
    began = asyncio.Event()

    async def refund(eur: int) -> str:
        """Pay money back."""
        effects.append("refund")
        began.set()
        await asyncio.sleep(60)

    plain = create_agent(ScriptedModel(rounds=TWO[1:], effects=effects), [refund])
    agent = durable(plain, tools={"refund": {"at_most_once": True}})

    @ks.workflow
    async def chat():
        _, _, told, answer = (await agent.ainvoke({"messages": "money back?"}))["messages"]
        return [told.type, told.name, told.tool_call_id, told.content, answer.content]

    engine = await world.started()
    await engine.start(chat, run_id="r")
    await began.wait()
    engine = await world.crash_and_recover(engine)
    await in_doubt(engine)
    run = await engine.get("r")
    await run.resolve("refund#@c3", "result", given)
    assert await run.result(30) == ["tool", "refund", "c3", content, "all is done"]
    assert effects.count("refund") == 1
    await engine.close()


@pytest.mark.parametrize("given", [{"ok": True}, "yes"])
async def test_node_in_doubt_is_settled_with_its_update(world, effects, given):
    began = asyncio.Event()

    async def pay(state: State):
        effects.append("pay")
        began.set()
        await asyncio.sleep(60)

    plain = StateGraph(State).add_node("pay", pay).add_edge(START, "pay").compile()
    graph = durable(plain, nodes={"pay": {"at_most_once": True}})

    @ks.workflow
    async def flow():
        return (await graph.ainvoke({"rounds": 1}))["ok"]

    engine = await world.started()
    await engine.start(flow, run_id="r")
    await began.wait()
    engine = await world.crash_and_recover(engine)
    await in_doubt(engine)
    run = await engine.get("r")
    await run.resolve("pay#@1", "result", given)
    if given == "yes":
        with pytest.raises(ks.RunFailed, match=r"given for node 'pay' is of type str; give the node's update"):
            await run.result(30)
    else:
        assert await run.result(30) is True
    assert effects == ["pay"]
    await engine.close()


@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_without_a_thread_are_independent(world, effects, streamed):
    first = durable(create_agent(ScriptedModel(rounds=TWO[:1], effects=effects), tools_of(effects)))
    other = durable(create_agent(ScriptedModel(rounds=[], effects=effects), []))

    async def talk(agent, messages):
        if not streamed:
            return texts(await agent.ainvoke({"messages": messages}))
        return [texts(state) async for state in agent.astream({"messages": messages}, stream_mode="values")][-1]

    @ks.workflow
    async def chat():
        one = await talk(first, "ann")
        two, three = await asyncio.gather(talk(first, "bob"), talk(first, "cid"))
        return [one, two, three, await talk(other, "dan"), texts((await first.aget_state()).values)]

    async with world.engine() as engine:
        run = await engine.start(chat)
        end = ["", "<slow>", "<b>", "all is done"]
        newest = ["cid", *end]
        assert await run.result(30) == [["ann", *end], ["bob", *end], newest, ["dan", "all is done"], newest]
        assert {"model#@1", "model#@call2.1", "model#@call3.1", "model#@call4.1"} <= set(await steps_of(run))
    assert effects.count("model 0") == 3


async def test_messages_of_one_graph_go_to_another_one(world, effects):
    first, second = (durable(create_agent(ScriptedModel(rounds=[], effects=effects), [])) for _ in range(2))

    @ks.workflow
    async def chat():
        state = await first.ainvoke({"messages": [("user", "hi")]})
        return texts(await second.ainvoke({"messages": [("user", "look:"), *state["messages"]]}))

    async with world.engine() as engine:
        run = await engine.start(chat)
        assert await run.result(30) == ["look:", "hi", "all is done", "all is done"]


async def test_resume_without_a_thread_goes_on_in_the_newest_one(world, effects):
    rounds = [[("confirm", {"what": "a"}, "c1")]]
    agent = durable(create_agent(ScriptedModel(rounds=rounds, effects=effects), tools_of(effects)), ask=False)

    @ks.workflow
    async def chat():
        await agent.ainvoke({"messages": "first"})
        state = await agent.ainvoke({"messages": "second"})
        assert [one.value for one in state["__interrupt__"]] == [{"confirm": "a"}]
        return texts(await agent.ainvoke(Command(resume="yes")))

    async with world.engine() as engine:
        run = await engine.start(chat)
        assert await run.result(30) == ["second", "", "yes", "all is done"]
    assert effects.count("confirmed yes") == 1


async def test_graph_with_fan_out_subgraph_and_interrupts(world, effects):
    graph = durable(graph_of(effects), types=[State])

    @ks.workflow
    async def flow():
        state = await graph.ainvoke({"rounds": 0})
        return [state["found"], state["ok"], state["rounds"]]

    async with world.engine() as engine:
        run = await engine.start(flow)
        for answer in (True, "yes"):
            await until_status(run, "waiting")
            await run.signal("approve:ask", answer)
        found = ["<a>", "<slow>", "<c>"]  # the subgraph returns what it was given, and the reducer adds it again
        assert await run.result(30) == [[*found, *found, "first", "second", "paid"], "yes", 2]
        steps = await steps_of(run)
    assert sorted(effects) == sorted(
        ["plan", "look a", "look slow", "look c", "merge", "first", "second", "asked True yes", "pay"]
    )
    assert {"look#@2.0", "look#@2.1", "look#@2.2", "first#@4.inner.1", "ask#@5", "ask#@5~2", "ask#@5~3"} <= set(steps)


async def test_interrupts_of_parallel_tools_are_answered_apart(world, effects):
    rounds = [[("confirm", {"what": "a"}, "c1"), ("look", {"x": "b"}, "c2"), ("confirm", {"what": "c"}, "c3")]]
    agent = durable(create_agent(ScriptedModel(rounds=rounds, effects=effects), tools_of(effects)))

    @ks.workflow
    async def chat():
        return texts(await agent.ainvoke({"messages": [("user", "go")]}))[2:5]

    async with world.engine() as engine:
        run = await engine.start(chat)
        await until_status(run, "waiting")
        await run.signal("approve:c3", "no")
        await run.signal("approve:c1", "yes")
        assert await run.result(30) == ["yes", "<b>", "no"]
    assert sorted(effects) == ["confirmed no", "confirmed yes", "look b", "model 0", "model answers"]


async def test_tool_node_that_asks_repeats_no_finished_tool(world, effects):
    """A tool node without Send runs again as a whole after an interrupt; finished calls give their results."""
    rounds = [[("look", {"x": "a"}, "c1"), ("confirm", {"what": "b"}, "c2")]]
    model, tools = ScriptedModel(rounds=rounds, effects=effects), tools_of(effects)

    async def talk(state: MessagesState):
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("talk", talk).add_node("tools", ToolNode(tools)).add_edge(START, "talk")
    agent = durable(graph.add_conditional_edges("talk", tools_condition).add_edge("tools", "talk").compile())

    @ks.workflow
    async def chat():
        return texts(await agent.ainvoke({"messages": "go"}))

    async with world.engine() as engine:
        run = await engine.start(chat)
        await until_status(run, "waiting")
        await run.signal("approve:c2", "yes")
        assert await run.result(30) == ["go", "", "<a>", "yes", "all is done"]
    assert effects == ["model 0", "look a", "confirmed yes", "model answers"]


async def test_messages_keep_their_ids_in_a_replay(world, effects):
    async def say(state: MessagesState):
        return {"messages": [AIMessage("hi")]}

    async def trim(state: MessagesState):
        effects.append("trim")
        return {"messages": [RemoveMessage(id=state["messages"][0].id), RemoveMessage(id=state["messages"][1].id)]}

    async def end(state: MessagesState):
        return {"messages": ("ai", "bye")}

    graph = StateGraph(MessagesState).add_sequence([say, trim, end]).add_edge(START, "say").compile()
    agent = durable(graph)

    @ks.workflow
    async def chat():
        return texts(await agent.ainvoke({"messages": [HumanMessage("hello")]}))

    async with world.engine() as engine:
        assert await (await engine.start(chat)).result(30) == ["bye"]
    assert effects == ["trim"]


async def test_stream_reaches_the_consumer_and_readers(world, effects):
    agent = durable(create_agent(ScriptedModel(rounds=[], effects=effects), tools_of(effects)), stream=True)

    @ks.workflow
    async def chat():
        modes = [mode async for mode, _ in agent.astream({"messages": "hi"}, stream_mode=["updates", "values"])]
        await ks.wait_for("go")
        return modes

    async with world.engine() as engine:
        run = await engine.start(chat)
        await until_status(run, "waiting")
        await run.signal("go")
        assert await run.result(30) == ["values", "updates", "values"]
        tokens = [event.data["value"] async for event in run.watch() if event.name == "token.emitted"]
    assert tokens == ["all ", "is ", "done "]
    assert effects == ["model answers"]


async def test_entrypoint_has_a_step_for_each_task(world, effects):
    @durable
    @task
    async def look(x: str) -> str:
        effects.append(f"look {x}")
        return f"<{x}>"

    @durable
    @task
    def plain(x: str) -> str:
        effects.append(f"plain {x}")
        return x

    @durable
    @entrypoint()
    async def agent(question: str) -> dict:
        found = [await one for one in [look(x) for x in "aba"]]
        ok = interrupt("pay?")
        return {"found": found, "paid": await plain("pay") if ok else None}

    @ks.workflow
    async def flow():
        return await agent.ainvoke("q")

    async with world.engine() as engine:
        run = await engine.start(flow)
        await until_status(run, "waiting")
        (name,) = await run.published()
        await run.signal(name, True)
        assert await run.result(30) == {"found": ["<a>", "<b>", "<a>"], "paid": "pay"}
    assert sorted(effects) == ["look a", "look a", "look b", "plain pay"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_threads_of_one_run_are_kept_apart(world, effects, streamed):
    agent = durable(create_agent(ScriptedModel(rounds=TWO[:1], effects=effects), tools_of(effects)))

    async def talk(thread):
        config = {"configurable": {"thread_id": thread}}
        if not streamed:
            return texts(await agent.ainvoke({"messages": thread}, config))
        return [texts(state) async for state in agent.astream({"messages": thread}, config, stream_mode="values")][-1]

    @ks.workflow
    async def chat():
        both = await asyncio.gather(talk("anna"), talk("ben"))
        return [*both, len(await talk("anna"))]

    async with world.engine() as engine:
        run = await engine.start(chat)
        anna, ben, length = await run.result(30)
        assert (anna[0], ben[0], anna[-1]) == ("anna", "ben", "all is done")
        assert length == len(anna) + 2, "the thread goes on in the same run"
        steps = await steps_of(run)
        assert {"model#@anna.1", "model#@ben.1"} <= set(steps)
    assert effects.count("model 0") == 2


async def test_retries_of_a_node_are_those_of_the_step(world, effects):
    async def shaky(state: State):
        effects.append("try")
        if len(effects) < 3:
            raise ConnectionError("not yet")
        return {"ok": True}

    policy = RetryPolicy(initial_interval=0.01, max_attempts=3, retry_on=ConnectionError)
    graph = durable(StateGraph(State).add_node("shaky", shaky, retry_policy=policy).add_edge(START, "shaky").compile())

    @ks.workflow
    async def flow():
        return (await graph.ainvoke({"rounds": 1}))["ok"]

    async with world.engine() as engine:
        run = await engine.start(flow)
        assert await run.result(30) is True
        assert await steps_of(run) == ["shaky#@1"]
    assert effects == ["try", "try", "try"]


async def test_failing_tool_fails_the_run_with_its_error(world, effects):
    from langchain_core.tools import tool

    @tool
    async def broken() -> str:
        """Break."""
        effects.append("broken")
        raise RuntimeError("no network")

    rounds = [[("broken", {}, "c1")]]
    agent = durable(create_agent(ScriptedModel(rounds=rounds, effects=effects), [broken]))

    @ks.workflow
    async def chat():
        try:
            await agent.ainvoke({"messages": "go"})
        except ks.StepFailed as error:
            return str(error)

    async with world.engine() as engine:
        assert "no network" in await (await engine.start(chat)).result(30)
    assert effects == ["model 0", "broken"]


async def test_node_that_is_no_step_calls_durable_graphs(world, effects):
    helper = durable(create_agent(ScriptedModel(rounds=TWO[:1], effects=effects), tools_of(effects), name="helper"))

    async def delegate(state: State):
        answer = await helper.ainvoke({"messages": "look"})
        return {"found": texts(answer)[-1:]}

    graph = StateGraph(State).add_node("delegate", delegate).add_edge(START, "delegate").compile()
    graph = durable(graph, nodes={"delegate": None})

    @ks.workflow
    async def flow():
        return (await graph.ainvoke({"rounds": 1}))["found"]

    async with world.engine() as engine:
        run = await engine.start(flow)
        assert await run.result(30) == ["all is done"]
        assert "model#@1.delegate.1" in await steps_of(run)
    assert effects.count("model 0") == 1


@pytest.mark.one_store
async def test_unlisted_type_is_a_clear_error(world, effects):
    import dataclasses

    @dataclasses.dataclass
    class Hidden:
        x: int

    async def make(state: dict):
        return {"found": [Hidden(1)]}

    graph = durable(StateGraph(State).add_node("make", make).add_edge(START, "make").compile())

    @ks.workflow
    async def flow():
        return len((await graph.ainvoke({"rounds": 1}))["found"])

    async with world.engine() as engine:
        run = await engine.start(flow)
        with pytest.raises(ks.RunFailed, match=r"Hidden, which is not listed; add it to types="):
            await run.result(30)


@pytest.mark.one_store
async def test_blocking_use_in_a_workflow_is_refused(world, effects):
    graph = durable(graph_of(effects))

    @ks.workflow
    async def flow():
        graph.invoke({"rounds": 0})

    async with world.engine() as engine:
        run = await engine.start(flow)
        with pytest.raises(ks.RunFailed, match=r"use `await graph\.ainvoke"):
            await run.result(30)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: durable(print), "needs a compiled graph"),
        (lambda: durable(graph_of([]), nodes={"plam": None}), r"the nodes of the graph are plan, look"),
        (lambda: durable(graph_of([]), node={"retries": 3}), "unknown options"),
    ],
)
def test_wrong_use_is_refused(wrong, message):
    with pytest.raises(ks.DefinitionError, match=message):
        wrong()


async def test_cancel_in_a_tool_ends_the_run(world, effects):
    from langchain_core.tools import tool

    started = asyncio.Event()

    @tool
    async def sleep() -> str:
        """Sleep."""
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            effects.append("left")
        return ""

    agent = durable(create_agent(ScriptedModel(rounds=[[("sleep", {}, "c1")]], effects=effects), [sleep]))

    @ks.workflow
    async def chat():
        await agent.ainvoke({"messages": "go"})

    async with world.engine() as engine:
        run = await engine.start(chat)
        await started.wait()
        await run.cancel("enough")
        with pytest.raises(ks.RunCancelled):
            await run.result(30)
    assert effects == ["model 0", "left"]


async def test_secret_in_a_tool_result_is_refused(world, effects):
    from langchain_core.tools import tool

    @tool
    async def leak() -> str:
        """Leak."""
        return "sk-" + "a1B2" * 12

    agent = durable(create_agent(ScriptedModel(rounds=[[("leak", {}, "c1")]], effects=effects), [leak]))

    @ks.workflow
    async def chat():
        await agent.ainvoke({"messages": "go"})

    async with world.engine(on_suspect="refuse") as engine:
        run = await engine.start(chat)
        with pytest.raises(ks.RunFailed, match="looks like a secret"):
            await run.result(30)


def results_in(messages):
    return {message.tool_call_id: message.content for message in messages if isinstance(message, ToolMessage)}


class TalkingModel(ScriptedModel):
    """The model of the contract."""

    rounds: tuple = ()
    effects: Any = None
    talk: Any
    agent: str

    def _generate(self, messages, *_, **__):
        turn = self.talk.think(self.agent, results_in(messages))
        calls = [{"name": call.tool, "args": call.arguments, "id": call.id} for call in turn.calls]
        usage = {"input_tokens": turn.tokens, "output_tokens": 0, "total_tokens": turn.tokens}
        return ChatResult(
            generations=[ChatGeneration(message=AIMessage(turn.text, tool_calls=calls, usage_metadata=usage))]
        )

    async def _astream(self, messages, *_, run_manager=None, **__):
        turn = self.talk.think(self.agent, results_in(messages))
        calls = [
            {"name": call.tool, "args": json.dumps(call.arguments), "id": call.id, "index": number}
            for number, call in enumerate(turn.calls)
        ]
        for piece in turn.pieces if turn.text else ("",):
            chunk = ChatGenerationChunk(message=AIMessageChunk(piece, tool_call_chunks=calls))
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
            if piece:
                await self.talk.sent()


class TestContract(AgentContract):
    def build(self, talk):  # noqa: C901 - one small function for each kind of tool
        def used(name, act=talk.use):
            async def call(word: str) -> str:
                return await act(name, word)

            return StructuredTool.from_function(coroutine=call, name=name, description=name)

        async def failing(name, word):
            try:
                return await talk.use(name, word)
            except Trouble as trouble:
                raise ToolException(str(trouble)) from trouble

        async def approved(name, word):
            return await talk.use(name, word) if interrupt({"pay": word}) else "denied"

        async def asked(_, word):
            return texts(await helper.ainvoke({"messages": word}))[-1]

        broken = used("broken", failing)
        broken.handle_tool_error = True
        tools = [used("look"), used("meet"), used("flaky"), broken, used("slow"), used("pay", approved)]
        helper = durable(
            create_agent(TalkingModel(talk=talk, agent="helper"), [used("look")], name="helper"), **talk.options
        )
        main = create_agent(TalkingModel(talk=talk, agent="main"), [*tools, used("ask", asked)], name="main")
        agent = durable(main, **{**talk.options, "tools": {**talk.tools, "ask": None}})

        async def converse(question):
            if not talk.streamed:
                return {"answer": texts(await agent.ainvoke({"messages": question}))[-1]}
            answer = ""
            async for mode, item in agent.astream({"messages": question}, stream_mode=["messages", "values"]):
                if mode == "messages":
                    talk.saw(item)
                else:
                    answer = texts(item)[-1]
            return {"answer": answer}

        return converse
