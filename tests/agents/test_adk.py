"""Google ADK agents survive crashes, ask for confirmations, transfer, and stream."""

import asyncio
from typing import Any

import pytest
from google.adk.agents import LlmAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models import BaseLlm, Gemini
from google.adk.models.llm_response import LlmResponse
from google.adk.runners import InMemoryRunner
from google.adk.tools.agent_tool import AgentTool
from google.adk.tools.function_tool import FunctionTool
from google.adk.tools.tool_context import ToolContext
from google.genai import types

import keepstep as ks
from keepstep.agents.adk import KeepstepPlugin, approvals, durable
from keepstep.agents.contract import AgentContract
from tests.engine.world import replay_from_every_prefix, steps_of, until_status

#: The framework deprecates parts of itself that it still uses.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def call(name, call_id, **arguments):
    return types.Part(function_call=types.FunctionCall(id=call_id, name=name, args=arguments))


def results_in(contents):
    """The results of tools that a model is told, by call id; a request for a confirmation is none."""
    found = [part.function_response for content in contents for part in content.parts or () if part.function_response]
    return {one.id: one.response for one in found if "requires confirmation" not in str(one.response)}


class Scripted(BaseLlm):
    """A model that answers by a function of the ids of the calls that are done."""

    model: str = "scripted"
    effects: list
    script: Any

    def answer(self, request):
        given = self.script(set(results_in(request.contents)))
        given = [given] if isinstance(given, str) else given
        self.effects.append("model " + ",".join(one if isinstance(one, str) else one.function_call.id for one in given))
        return [types.Part(text=one) if isinstance(one, str) else one for one in given]

    async def sent(self):
        pass

    async def generate_content_async(self, llm_request, stream=False):
        parts = self.answer(llm_request)
        for word in (parts[0].text or "").split() if stream else ():
            content = types.Content(role="model", parts=[types.Part(text=f"{word} ")])
            yield LlmResponse(content=content, partial=True)
            await self.sent()
        usage = types.GenerateContentResponseUsageMetadata(total_token_count=7)
        yield LlmResponse(content=types.Content(role="model", parts=parts), usage_metadata=usage)


def scripted(effects, script):
    return Scripted(effects=effects, script=script).model_copy(update={"effects": effects})


async def turns(runner, message, *, streamed=False, saw=lambda _: None):
    """Talk until nothing is left to confirm; return the last text and the session."""
    session = await runner.session_service.create_session(app_name=runner.app_name, user_id="u")
    config = RunConfig(streaming_mode=StreamingMode.SSE if streamed else StreamingMode.NONE)
    text, content = "", types.Content(role="user", parts=[types.Part(text=message)])
    while content is not None:
        events = []
        async for event in runner.run_async(user_id="u", session_id=session.id, new_message=content, run_config=config):
            events.append(event)
            for part in (event.content.parts if event.content else None) or ():
                if part.text and event.partial:
                    saw(part.text)
                elif part.text:
                    text = part.text
        content = await approvals(events)
    return text, await runner.session_service.get_session(app_name=runner.app_name, user_id="u", session_id=session.id)


class Told(Scripted):
    """A model that plays a conversation of the contract."""

    talk: Any
    agent: str

    def answer(self, request):
        found = {key: (value or {}).get("result", value) for key, value in results_in(request.contents).items()}
        turn = self.talk.think(self.agent, found)
        return [call(one.tool, one.id, **one.arguments) for one in turn.calls] or [types.Part(text=turn.text)]

    async def sent(self):
        await self.talk.sent()


class TestContract(AgentContract):
    def build(self, talk):
        def plain(name):
            async def use(word: str) -> str:
                """Do it."""
                return await talk.use(name, word)

            use.__name__ = name
            return use

        def tell(error):
            return {"error": str(error)}

        def new(name, tools):
            model = Told(effects=[], script=None, talk=talk, agent=name)
            return LlmAgent(
                name=name,
                model=model.model_copy(update={"talk": talk}),
                tools=tools,
                on_tool_error_callback=lambda *, error, **_: tell(error),
            )

        async def converse(question):
            async def ask(word: str) -> str:
                """Ask the helper."""
                return (await turns(durable(new("helper", [plain("look")]), **talk.options), word))[0]

            talk.tools.setdefault("ask", None)
            tools = [plain(name) for name in ("look", "meet", "flaky", "broken", "slow")]
            tools += [FunctionTool(plain("pay"), require_confirmation=True), ask]
            runner = durable(new("main", tools), **talk.options)
            text, session = await turns(runner, question, streamed=talk.streamed, saw=talk.saw)
            return {"answer": text, "events": len(session.events)}

        return converse


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    """The framework imports parts of itself late; processes that are forked before would do so each."""
    agent = LlmAgent(name="a", model=scripted([], lambda done: "hi" if done else [call("look", "c1")]), tools=[look])
    asyncio.run(turns(durable(agent), "hi", streamed=True))


def look() -> str:
    """Look."""
    return "nothing"


def desk_script(done):
    if not done:
        return [call("look", "c1", at="a"), call("look", "c2", at="b")]
    if "c3" not in done:
        return [call("poet", "c3", request="rhyme")]
    return [call("transfer_to_agent", "h1", agent_name="billing")]


def make_desk(effects):
    """An agent with two tools at once, a sub-agent with the same call ids, and one that asks for a confirmation."""

    async def look(at: str, tool_context: ToolContext) -> dict:
        """Look somewhere."""
        await asyncio.sleep(0.01 if at == "a" else 0)
        effects.append(f"look {at}")
        tool_context.state[f"seen {at}"] = [at]
        return {"found": f"<{at}>"}

    def refund(eur: int) -> str:
        """Pay back."""
        effects.append(f"refund {eur}")
        return f"paid {eur}"

    def poet_script(done):
        return "moon" if done else [call("look", "c1", at="poem")]

    def billing_script(done):
        return "refunded five" if "r1" in done else [call("refund", "r1", eur=5)]

    poet = LlmAgent(name="poet", model=scripted(effects, poet_script), tools=[look])
    billing = LlmAgent(
        name="billing",
        model=scripted(effects, billing_script),
        tools=[FunctionTool(refund, require_confirmation=True)],
    )
    tools = [look, AgentTool(poet)]
    return LlmAgent(name="desk", model=scripted(effects, desk_script), tools=tools, sub_agents=[billing])


EFFECTS = []


@ks.workflow(name="adk desk")
async def desk(streamed: bool) -> list:
    text, session = await turns(durable(make_desk(EFFECTS)), "money back?", streamed=streamed)
    return [text.strip(), sorted(key for key in session.state if key.startswith("seen"))]


@pytest.fixture(autouse=True)
def _effects():
    EFFECTS.clear()


ENDED = ["refunded five", ["seen a", "seen b", "seen poem"]]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_agents_are_made_of_steps_and_wait_for_confirmation(world, streamed):
    async with world.engine() as engine:
        run = await engine.start(desk, streamed)
        await until_status(run, "waiting")
        assert (await run.published())["approve:r1"] == {"tool": "refund", "arguments": {"eur": 5}}
        await run.signal("approve:r1", True)
        assert await run.result(30) == ENDED
        steps = await steps_of(run)
        assert {"look#@c1", "look#@c2", "@poet:c3/look#@c1", "transfer_to_agent#@h1", "refund#@r1"} <= set(steps)
        assert sum("model#" in step for step in steps) == 7
        acted = {one.agent for one in await run.checkpoints() if one.kind == "step completed"}
        assert acted == {"desk", "poet", "billing"}
        assert (await run.spent()).tokens == 49
    assert len(EFFECTS) == len(set(EFFECTS)) == 11


@pytest.mark.one_store
@pytest.mark.live_only
async def test_agents_recover_from_every_record(world):
    async with world.engine() as engine:
        run = await engine.start(desk, True)
        await run.signal("approve:r1", True)
        assert await run.result(30) == ENDED
        history = [one.step if one.kind.value == "step completed" else "" for one in await run.checkpoints()]
        quiet = {"", "transfer_to_agent#@h1"}

        async def check(again, length):
            assert await again.result(30) == ENDED
            recorded = [step for step in history[:length] if step not in quiet]
            assert len(EFFECTS) == len(set(EFFECTS)) == 11 - len(recorded)
            EFFECTS.clear()

        EFFECTS.clear()
        await replay_from_every_prefix(run, check)


async def test_streamed_words_reach_readers_of_the_run(world, effects):
    @ks.workflow
    async def speak():
        runner = durable(LlmAgent(name="a", model=scripted(effects, lambda _: "one two")))
        return (await turns(runner, "hi", streamed=True))[0]

    async with world.engine() as engine:
        run = await engine.start(speak)
        assert await run.result(30) == "one two"
        assert [one.data["value"] async for one in run.watch() if one.name == "token.emitted"] == ["one ", "two "]
    assert effects == ["model one two"]


async def test_call_without_an_id_and_bytes_of_a_model_are_kept(world, effects):
    signatures = []

    class Nameless(Scripted):
        def answer(self, request):
            parts = [part for content in request.contents for part in content.parts or ()]
            signatures.append([part.thought_signature for part in parts if part.thought_signature])
            if any(part.function_response for part in parts):
                return [types.Part(text="done")]
            wanted = types.FunctionCall(name="look", args={})
            return [types.Part(function_call=wanted, thought_signature=b"\xff\x00")]

    def look() -> str:
        """Look."""
        effects.append("look")
        return "nothing"

    @ks.workflow
    async def talk():
        agent = LlmAgent(name="a", model=Nameless(effects=[], script=None), tools=[look])
        return (await turns(durable(agent), "hi"))[0]

    async with world.engine() as engine:
        run = await engine.start(talk)
        assert await run.result(30) == "done"
        [step] = [one for one in await steps_of(run) if one.startswith("look")]
        assert step.startswith("look#@adk-ks-")
    assert (effects, signatures[-1]) == (["look"], [b"\xff\x00"])


async def test_agents_in_parallel_have_keys_of_their_own(world, effects):
    @ks.workflow
    async def poems():
        poets = [LlmAgent(name=name, model=scripted(effects, lambda _, name=name: name)) for name in ("moon", "sun")]
        last = LlmAgent(name="last", model=scripted(effects, lambda _: "both"))
        every = SequentialAgent(name="every", sub_agents=[ParallelAgent(name="both", sub_agents=poets), last])
        return (await turns(durable(every), "rhyme"))[0]

    async with world.engine() as engine:
        assert await (await engine.start(poems)).result(30) == "both"
    assert sorted(effects) == ["model both", "model moon", "model sun"]


async def test_model_keeps_its_class_and_works_outside():
    class Quiet(Gemini):
        async def generate_content_async(self, llm_request, stream=False):
            yield LlmResponse(content=types.Content(role="model", parts=[types.Part(text="hi")]))

    agent = LlmAgent(name="a", model=Quiet(model="gemini-test"))
    assert (await turns(durable(agent), "hi"))[0] == "hi"
    assert isinstance(agent.model, Quiet)
    assert (await turns(InMemoryRunner(agent), "hi"))[0] == "hi"


async def test_blocking_run_inside_a_workflow_is_refused(world, effects):
    @ks.workflow
    async def talk():
        durable(LlmAgent(name="a", model=scripted(effects, lambda _: "hi"))).run(user_id="u", session_id="s")

    async with world.engine() as engine:
        with pytest.raises(ks.RunFailed, match="`run` calls the agent in another thread"):
            await (await engine.start(talk)).result(30)


def test_what_is_no_agent_is_refused():
    with pytest.raises(ks.DefinitionError, match=r"`agent` must be an agent of google\.adk, got str"):
        durable("agent")
    with pytest.raises(ks.DefinitionError, match="unknown options"):
        KeepstepPlugin(tools={"pay": {"retries": 3}})
