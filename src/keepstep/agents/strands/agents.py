"""Strands agents inside workflows: their model and tool calls are steps."""

from __future__ import annotations

import asyncio
import json
import re
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from strands import Agent
from strands.agent import AgentResult
from strands.interrupt import Interrupt, InterruptException
from strands.middleware import (
    ExecuteToolContext,
    ExecuteToolStage,
    InvokeModelContext,
    InvokeModelStage,
    ModelStopReason,
    ToolResultEvent,
    TypedEvent,
)
from strands.types.exceptions import ContextWindowOverflowException
from strands.types.session import decode_bytes_values, encode_bytes_values

from ...errors import DefinitionError
from ...kernel.context import in_workflow
from ...kernel.publish import emit
from ...ports import CURRENT
from ..calls import CallOptions, CallSteps, Recorded, approval, used, warn_in_step

_Next = Callable[[Any], AsyncGenerator[Any, None]]

#: The run that each durable agent is used in. An agent keeps its conversation, which a replay must build up again.
_OWNERS: weakref.WeakKeyDictionary[Agent, weakref.ref[Any]] = weakref.WeakKeyDictionary()
#: Agents whose calls are steps.
_DURABLE: weakref.WeakSet[Agent] = weakref.WeakSet()
#: The id of an interrupt that belongs to a tool call; it holds the id of the call.
_INTERRUPT_OF_CALL = re.compile(r"v\d+:\w+:(.+):[0-9a-f-]{36}")


def durable(
    agent: Agent,
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
) -> Agent:
    """Make steps of the model and tool calls of an agent inside a workflow, and return the agent.

    Make the agent in the workflow's code, since it keeps its conversation. A durable agent that is the tool of another
    one is not a step: its own calls are. Outside a workflow, the agent works as before.
    """
    if not isinstance(agent, Agent):
        raise DefinitionError(f"`agent` must be a strands.Agent, got {type(agent).__name__}")
    if agent in _DURABLE:
        raise DefinitionError(f"`agent` {agent.name!r} is durable already; call durable once for each agent")
    if agent.model.stateful:
        raise DefinitionError(
            f"the model of `agent` {agent.name!r} keeps the conversation in a service, which a replay cannot repeat; "
            "use a model that gets all messages with each call"
        )
    if getattr(agent, "_session_manager", None) is not None:
        raise DefinitionError(
            f"`agent` {agent.name!r} has a session manager, and a replay would repeat what that has stored; "
            "leave session_manager out, since the records of the run hold the conversation"
        )
    steps = CallSteps(agent.name, model=model, tool=tool, tools=tools)

    async def call_model(call: InvokeModelContext, next_fn: _Next) -> AsyncGenerator[TypedEvent, None]:
        warn_in_step()
        async with aclosing(_model_events(steps, call, next_fn) if in_workflow() else next_fn(call)) as events:
            async for event in events:
                yield event

    async def call_tool(call: ExecuteToolContext, next_fn: _Next) -> AsyncGenerator[TypedEvent, None]:
        is_step = in_workflow() and not _is_plain_code(call)
        async with aclosing(_tool_events(steps, call, next_fn) if is_step else next_fn(call)) as events:
            async for event in events:
                yield event

    agent.add_middleware(InvokeModelStage, call_model)
    agent.add_middleware(ExecuteToolStage, call_tool)
    _DURABLE.add(agent)
    return agent


async def approvals(result: AgentResult) -> list[Any]:
    """Wait for the answer to each interrupt of an agent, and return them as the prompt of its next invocation.

    The signal `approve:CALL_ID` answers an interrupt of a tool call, and `approve:NAME` any other one. Its payload is
    the response.
    """
    interrupts = list(result.interrupts or ())
    answers = await asyncio.gather(
        *(approval(_asked_by(one), {"name": one.name, "reason": _plain(one.reason)}) for one in interrupts)
    )
    return [
        {"interruptResponse": {"interruptId": one.id, "response": answer}}
        for one, answer in zip(interrupts, answers, strict=True)
    ]


def _asked_by(interrupt: Interrupt) -> str:
    found = _INTERRUPT_OF_CALL.fullmatch(interrupt.id)
    return found[1] if found else interrupt.name


async def _model_events(steps: CallSteps, call: InvokeModelContext, next_fn: _Next) -> AsyncGenerator[TypedEvent, None]:
    """Give the events of a model call; the last one comes from its record."""
    _check_owner(call.agent)
    asked = [_identity(message) for message in call.messages]
    async with aclosing(steps.stream(asked, partial(_invoke, call, next_fn))) as items:
        async for item in items:
            if not isinstance(item, Recorded):
                yield item
            elif "overflow" in item.value:
                raise ContextWindowOverflowException(item.value["overflow"])
            else:
                yield ModelStopReason(*decode_bytes_values(item.value["stop"]))


async def _invoke(call: InvokeModelContext, next_fn: _Next, send: Callable[[Any], None]) -> dict[str, Any]:
    """Invoke a model. An overflow of its context is a value: the agent answers it with fewer messages."""
    stop = None
    try:
        async with aclosing(next_fn(call)) as events:
            async for event in events:
                if isinstance(event, ModelStopReason):
                    stop = event
                    continue
                send(event)
                if isinstance(event.get("data"), str):
                    emit(event["data"])
    except ContextWindowOverflowException as error:
        return {"overflow": str(error)}
    if stop is None:
        raise RuntimeError("the model call has ended without a result")
    used(
        call.model.get_config().get("model_id"),
        tokens=stop.usage.get("totalTokens", 0),
        input_tokens=stop.usage.get("inputTokens"),
        output_tokens=stop.usage.get("outputTokens"),
    )
    return {"stop": encode_bytes_values([stop.stop_reason, stop.message, stop.usage, stop.metrics])}


async def _tool_events(steps: CallSteps, call: ExecuteToolContext, next_fn: _Next) -> AsyncGenerator[TypedEvent, None]:
    """Give the events of a tool call; the last one comes from its record."""
    name, call_id = call.tool_use["name"], call.tool_use["toolUseId"]
    record = steps.records_tool(name) and getattr(call.tool, "agent", None) not in _DURABLE
    body = partial(_execute if record else _forward, call, next_fn)
    arguments = _plain(call.tool_use["input"])
    async with aclosing(steps.stream_tool(name, call_id, body, arguments=arguments, record=record)) as items:
        async for item in items:
            if not isinstance(item, Recorded):
                yield item
            elif record:
                yield _taken_up(call, item.value)


async def _forward(call: ExecuteToolContext, next_fn: _Next, send: Callable[[Any], None]) -> None:
    """Execute a tool whose calls are recorded in place of itself."""
    async with aclosing(next_fn(call)) as events:
        async for event in events:
            send(event)


async def _execute(call: ExecuteToolContext, next_fn: _Next, send: Callable[[Any], None]) -> dict[str, Any]:
    """Execute a tool, and return its result or its interrupt, with the state that it has changed."""
    before = _states(call)
    given: dict[str, Any] = {}
    try:
        async with aclosing(next_fn(call)) as events:
            async for event in events:
                if isinstance(event, ToolResultEvent):
                    if event.exception is not None:
                        raise event.exception
                    given = {"result": encode_bytes_values(event.tool_result)}
                elif "tool_interrupt_event" in event:
                    given = {"asks": event["tool_interrupt_event"]["interrupts"][0].to_dict()}
                else:
                    send(event)
    except InterruptException as error:
        given = {"asks": error.interrupt.to_dict()}
    for part, entries in _states(call).items():
        given[part] = {key: value for key, value in entries.items() if before[part].get(key, ...) != value}
    return given


def _taken_up(call: ExecuteToolContext, given: Any) -> ToolResultEvent:
    """Apply what a tool call has recorded, and return its result or raise its interrupt.

    A plain value, which a person gave, is the result itself.
    """
    if not isinstance(given, dict) or not given.keys() >= {"state", "request_state"}:
        text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False, default=str)
        return ToolResultEvent(
            {"toolUseId": call.tool_use["toolUseId"], "status": "success", "content": [{"text": text}]}
        )
    for key, value in given["state"].items():
        call.agent.state.set(key, value)
    call.invocation_state.setdefault("request_state", {}).update(given["request_state"])
    if "asks" in given:
        raise InterruptException(Interrupt(**given["asks"]))
    return ToolResultEvent(decode_bytes_values(given["result"]))


def _is_plain_code(call: ExecuteToolContext) -> bool:
    """Whether a tool call is only a check of its arguments: an unknown tool, or the form of a structured answer."""
    return call.tool is None or call.tool.tool_type == "structured_output"


def _check_owner(agent: Any) -> None:
    run = CURRENT.get().run
    if _OWNERS.setdefault(agent, weakref.ref(run))() is not run:
        raise DefinitionError(
            f"agent {agent.name!r} was used in another run, or before this one was replayed, and keeps that "
            "conversation; make the agent in the workflow's code"
        )


def _states(call: ExecuteToolContext) -> dict[str, dict[str, Any]]:
    """Return the state of the agent and that of the request: a tool may change both."""
    return {
        "state": call.agent.state.get(),
        "request_state": _plain(call.invocation_state.get("request_state") or {}),
    }


def _identity(message: Any) -> list[Any]:
    """Return the parts of a message that every version of the framework has."""
    blocks = []
    for block in message["content"]:
        use, result = block.get("toolUse") or {}, block.get("toolResult") or {}
        call_id = use.get("toolUseId") or result.get("toolUseId")
        blocks.append([sorted(block), block.get("text"), use.get("name"), call_id, _plain(use.get("input"))])
    return [message["role"], blocks]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
