"""An agent and graphs of LangGraph for tests: a chat model that answers by what it has been told, tools, and nodes."""

import asyncio
import json
import operator
from typing import Annotated, Any, TypedDict

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

USAGE = {"input_tokens": 2, "output_tokens": 3, "total_tokens": 5}


class ScriptedModel(BaseChatModel):
    """Ask for the tools of `rounds`, one round after the other, then answer with words."""

    rounds: list[list[tuple[str, dict, str]]]
    effects: Any
    answer: str = "all is done"

    @property
    def _llm_type(self):
        return "scripted"

    def bind_tools(self, tools, **_):
        return self

    def _next(self, messages):
        done = {message.tool_call_id for message in messages if isinstance(message, ToolMessage)}
        for number, calls in enumerate(self.rounds):
            if not {call_id for _, _, call_id in calls} <= done:
                self.effects.append(f"model {number}")
                asked = [{"name": name, "args": args, "id": call_id} for name, args, call_id in calls]
                return AIMessage("", tool_calls=asked, usage_metadata=USAGE)
        self.effects.append("model answers")
        return AIMessage(self.answer, usage_metadata=USAGE, response_metadata={"model_name": "scripted"})

    def _generate(self, messages, *_, **__):
        return ChatResult(generations=[ChatGeneration(message=self._next(messages))])

    async def _astream(self, messages, *_, run_manager=None, **__):
        made = self._next(messages)
        chunks = [
            AIMessageChunk(
                "",
                tool_call_chunks=[
                    {"name": call["name"], "args": json.dumps(call["args"]), "id": call["id"], "index": number}
                    for number, call in enumerate(made.tool_calls)
                ],
            )
        ]
        if not made.tool_calls:
            chunks = [AIMessageChunk(f"{word} ") for word in made.content.split()]
        chunks[-1].usage_metadata = USAGE
        for chunk in chunks:
            yielded = ChatGenerationChunk(message=chunk)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.content, chunk=yielded)
            yield yielded


def tools_of(effects):
    @tool
    async def look(x: str) -> str:
        """Look something up."""
        if x == "slow":
            await asyncio.sleep(0.05)
        effects.append(f"look {x}")
        return f"<{x}>"

    @tool
    def refund(eur: int) -> str:
        """Pay money back."""
        effects.append("refund")
        return f"paid {eur}"

    @tool
    async def confirm(what: str) -> str:
        """Ask a person."""
        answer = interrupt({"confirm": what})
        effects.append(f"confirmed {answer}")
        return str(answer)

    return [look, refund, confirm]


class State(TypedDict, total=False):
    items: list[str]
    found: Annotated[list[str], operator.add]
    rounds: int
    ok: bool


def graph_of(effects):
    """Fan-out with Send, a plain function as node, a subgraph, two interrupts in one node, a command."""

    async def plan(state: State):
        effects.append("plan")
        return {"items": ["a", "slow", "c"], "rounds": state.get("rounds", 0) + 1}

    def fan(state: State):
        return [Send("look", {"x": x}) for x in state["items"]]

    async def look(item: dict):
        if item["x"] == "slow":
            await asyncio.sleep(0.05)
        effects.append(f"look {item['x']}")
        return {"found": [f"<{item['x']}>"]}

    def merge(state: State):
        effects.append("merge")
        return {"rounds": state["rounds"] + 1}

    def first(state: State):
        effects.append("first")
        return {"found": ["first"]}

    def second(state: State):
        effects.append("second")
        return {"found": ["second"]}

    async def ask(state: State):
        first_answer = interrupt({"question": "pay?"})
        second_answer = interrupt({"question": "sure?"})
        effects.append(f"asked {first_answer} {second_answer}")
        return Command(update={"ok": first_answer and second_answer}, goto="pay" if second_answer else END)

    async def pay(state: State):
        effects.append("pay")
        return {"found": ["paid"]}

    inner = StateGraph(State).add_node("first", first).add_node("second", second)
    inner = inner.add_edge(START, "first").add_edge("first", "second").compile()
    outer = StateGraph(State).add_node("plan", plan).add_node("look", look).add_node("merge", merge)
    outer = outer.add_node("inner", inner).add_node("ask", ask, destinations=("pay", END)).add_node("pay", pay)
    outer = outer.add_edge(START, "plan").add_conditional_edges("plan", fan, ["look"]).add_edge("look", "merge")
    return outer.add_edge("merge", "inner").add_edge("inner", "ask").compile()
