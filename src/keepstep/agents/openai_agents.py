"""Agents of the OpenAI Agents SDK inside a workflow: every model call and every tool call is a step."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from pydantic import TypeAdapter

from ..errors import DefinitionError, StepError
from ..kernel.publish import emit
from .calls import CallOptions, CallSteps, Recorded, approval, call_branch, used

try:
    from agents import (
        Agent,
        ApplyPatchTool,
        ComputerTool,
        FunctionTool,
        Handoff,
        LocalShellTool,
        Model,
        ModelProvider,
        ModelResponse,
        MultiProvider,
        RunState,
        ShellTool,
        ToolOutputFileContent,
        ToolOutputImage,
        ToolOutputText,
    )
    from agents.result import RunResultBase
    from agents.tool import (
        maybe_invoke_function_tool_failure_error_function as error_text,
    )
    from agents.tool import (
        set_function_tool_failure_error_function as set_error_function,
    )
    from openai.types.responses import ResponseCompletedEvent, ResponseFailedEvent, ResponseIncompleteEvent
except ImportError as error:
    raise ImportError(
        "keepstep.agents.openai_agents needs the OpenAI Agents SDK: pip install 'keepstep[openai-agents]'"
    ) from error

C = TypeVar("C")

__all__ = ["approved", "durable", "recorded"]

_RESPONSE: TypeAdapter[ModelResponse] = TypeAdapter(ModelResponse)
#: Events with which a stream ends; one of them is recorded.
_LAST = (ResponseCompletedEvent, ResponseFailedEvent, ResponseIncompleteEvent)
_LAST_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseCompletedEvent | ResponseFailedEvent | ResponseIncompleteEvent)
_STRUCTURED = (ToolOutputText, ToolOutputImage, ToolOutputFileContent)
_OUTPUT: TypeAdapter[Any] = TypeAdapter(ToolOutputText | ToolOutputImage | ToolOutputFileContent)

#: Tools that act on this machine where no step can record what they did.
_LOCAL_TOOLS = (ApplyPatchTool, ComputerTool, LocalShellTool, ShellTool)


def durable(
    agent: Agent[C],
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
    provider: ModelProvider | None = None,
) -> Agent[C]:
    """Return a clone of the agent, and of those it hands off to, whose calls are steps inside a workflow.

    `model`, `tool` and `tools` are options of the steps; a tool with None is not a step. `provider` finds models by
    name, as `RunConfig(model_provider=…)` does. An agent as a tool must be durable itself: `durable(other).as_tool(…)`.
    Outside a workflow, the clone acts as the agent does.
    """
    calls = CallSteps(model=model, tool=tool, tools=tools)
    return _Cloning(calls, provider or MultiProvider()).clone(agent)


def recorded(model: Model, *, agent: str | None = None, options: CallOptions | None = None) -> Model:
    """Return a model whose calls are steps, for `RunConfig(model=…)`, which replaces the models of agents."""
    return _RecordedModel(lambda: model, CallSteps(agent, model=options), agent)


class _Cloning:
    """Clones of agents that hand off to each other, each made once."""

    def __init__(self, calls: CallSteps, provider: ModelProvider) -> None:
        self._calls, self._provider = calls, provider
        self._clones: dict[int, Agent[Any]] = {}

    def clone(self, agent: Agent[C]) -> Agent[C]:
        if id(agent) in self._clones or _is_durable(agent):
            return self._clones.get(id(agent), agent)
        if agent.mcp_servers:
            raise DefinitionError(
                f"agent {agent.name!r} has mcp_servers, whose calls no step can record; "
                "give it tools that call keepstep.agents.mcp instead"
            )
        clone = self._clones[id(agent)] = agent.clone()
        clone.model = self._model(agent)
        clone.tools = [self._tool(one, agent.name) for one in agent.tools]
        clone.handoffs = [self._handoff(one) if isinstance(one, Handoff) else self.clone(one) for one in agent.handoffs]
        return clone

    def _model(self, agent: Agent[Any]) -> Model:
        given = agent.model
        if isinstance(given, Model):
            return _RecordedModel(lambda: given, self._calls, agent.name)
        return _RecordedModel(lambda: self._provider.get_model(given), self._calls, agent.name)

    def _handoff(self, handoff: Handoff[Any, Any]) -> Handoff[Any, Any]:
        hand_over = handoff.on_invoke_handoff

        async def invoke(context: Any, arguments: str) -> Agent[Any]:
            return self.clone(await hand_over(context, arguments))

        other = copy.copy(handoff)
        other.on_invoke_handoff = invoke
        return other

    def _tool(self, tool: Any, agent: str) -> Any:
        if isinstance(tool, _LOCAL_TOOLS):
            raise DefinitionError(
                f"agent {agent!r} has a {type(tool).__name__}, whose actions no step can record; "
                "write a function tool that does the same"
            )
        if not isinstance(tool, FunctionTool):
            return tool  # the provider runs it, inside the model call
        if tool._is_agent_tool:  # noqa: SLF001 - nothing public tells an agent from a function
            return self._agent_tool(tool, agent)
        return self._function_tool(tool, agent)

    def _agent_tool(self, tool: FunctionTool, agent: str) -> FunctionTool:
        asked = tool._agent_instance  # noqa: SLF001 - as above
        if not _is_durable(asked):
            raise DefinitionError(
                f"tool {tool.name!r} of agent {agent!r} is an agent whose calls are no steps; "
                f"make it with durable({asked.name}).as_tool(…)"
            )
        ask = tool.on_invoke_tool

        async def invoke(context: Any, arguments: str) -> Any:
            with call_branch(tool.name, context.tool_call_id):
                return await ask(context, arguments)

        return _with_invoker(tool, invoke)

    def _function_tool(self, tool: FunctionTool, agent: str) -> FunctionTool:
        calls, plain = self._calls, copy.copy(tool)
        tells_errors = hasattr(tool.on_invoke_tool, "__agents_bind_function_tool__")
        if tells_errors:
            set_error_function(plain, None)  # the body raises, so that the step can retry

        async def invoke(context: Any, arguments: str) -> Any:
            raised: list[Exception] = []

            async def body() -> Any:
                try:
                    return _dumped_output(await plain.on_invoke_tool(context, arguments))
                except Exception as error:
                    raised[:] = [error]
                    raise

            async def tell() -> str | None:
                return await error_text(function_tool=tool, context=context, error=raised[0] if raised else failure)

            call_id = context.tool_call_id
            try:
                given = _arguments(arguments)
                return _loaded_output(await calls.tool(tool.name, call_id, body, given=given, agent=agent))
            except StepError as error:
                if not tells_errors:
                    raise
                failure = error
                text = await calls.tool(f"{tool.name}.error", call_id, tell, agent=agent)
                if text is None:
                    raise
                return text

        return _with_invoker(tool, invoke)


def _is_durable(agent: Agent[Any]) -> bool:
    return isinstance(agent.model, _RecordedModel)


def _with_invoker(tool: FunctionTool, invoke: Callable[[Any, str], Awaitable[Any]]) -> FunctionTool:
    other = copy.copy(tool)
    other.on_invoke_tool = invoke
    return other


class _RecordedModel(Model):
    """A model whose calls are steps. It is found by the first call that really runs."""

    def __init__(self, find: Callable[[], Model], calls: CallSteps, agent: str | None) -> None:
        self._find, self._calls, self._agent = find, calls, agent

    async def get_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the name of the framework
        *args: Any,
        **options: Any,
    ) -> ModelResponse:
        async def body() -> Any:
            model = self._find()
            response = await model.get_response(system_instructions, input, *args, **options)
            _used(model, response.usage)
            return _RESPONSE.dump_python(response, mode="json", warnings=False)

        value = await self._calls.model(_content(input, options), body, agent=self._agent)
        return _RESPONSE.validate_python(value)

    async def stream_response(
        self,
        system_instructions: str | None,
        input: Any,  # noqa: A002 - the name of the framework
        *args: Any,
        **options: Any,
    ) -> AsyncIterator[Any]:
        async def body(send: Callable[[Any], None]) -> Any:
            model, last = self._find(), None
            async for event in model.stream_response(system_instructions, input, *args, **options):
                if isinstance(event, _LAST):
                    last = event
                    continue
                if event.type == "response.output_text.delta":
                    emit(event.delta)
                send(event)
            if last is None:
                raise RuntimeError(f"the stream of model {_name_of(model)!r} ended before its response was complete")
            if last.response.usage is not None:
                _used(model, last.response.usage)
            return _LAST_EVENT.dump_python(last, mode="json", warnings=False)

        async with aclosing(self._calls.stream(_content(input, options), body, agent=self._agent)) as items:
            async for item in items:
                yield _LAST_EVENT.validate_python(item.value) if isinstance(item, Recorded) else item


def _used(model: Any, usage: Any) -> None:
    used(
        _name_of(model),
        tokens=usage.total_tokens,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
    )


def _name_of(model: Model) -> str | None:
    name = getattr(model, "model", None)
    return None if name is None else str(name)


def _content(given: Any, options: Mapping[str, Any]) -> list[Any]:
    """Return what identifies a call: messages and tool calls. Instructions may differ on a replay."""
    items = [given] if isinstance(given, str) else [_item(one) for one in given]
    return [options.get("previous_response_id"), options.get("conversation_id"), *items]


def _item(item: Any) -> Any:
    item = item if isinstance(item, Mapping) else item.model_dump()
    parts = [item.get(name) for name in ("type", "role", "call_id", "name", "arguments")]
    content = item.get("content")
    if not isinstance(content, list):
        return [*parts, content]
    return [*parts, *(one.get("text") if isinstance(one, dict) else str(one) for one in content)]


def _dumped_output(output: Any) -> Any:
    """Return the output of a tool as a value that can be recorded."""
    if isinstance(output, _STRUCTURED):
        return {"structured": [_OUTPUT.dump_python(output, mode="json")], "alone": True}
    if isinstance(output, list) and output and all(isinstance(one, _STRUCTURED) for one in output):
        return {"structured": [_OUTPUT.dump_python(one, mode="json") for one in output], "alone": False}
    return {"value": output}


def _loaded_output(value: Any) -> Any:
    """Return the output of a tool from its record; a plain value, which a person gave, is the output itself."""
    if not isinstance(value, dict) or value.keys() not in ({"value"}, {"structured", "alone"}):
        return value
    if "value" in value:
        return value["value"]
    found = [_OUTPUT.validate_python(one) for one in value["structured"]]
    return found[0] if value["alone"] else found


def _arguments(text: Any) -> Any:
    """Return the arguments of a call from their JSON; text that is not JSON stays as it is."""
    with suppress(ValueError):
        return json.loads(text or "{}")
    return text


async def approved(result: RunResultBase, *, timeout: float | None = None) -> RunState[Any, Any]:  # noqa: ASYNC109 - durable
    """Ask a person about each tool call that needs approval, and return the state with which the run goes on.

    Each call is published as `approve:CALL_ID` and waits for the signal of that name: True lets it run, False rejects
    it, and a text rejects it with that message for the model.
    """
    state: RunState[Any, Any] = result.to_state()  # type: ignore[attr-defined]
    for item in result.interruptions:  # type: ignore[attr-defined]
        call = item.raw_item
        call_id, arguments = (
            (call.get("call_id"), call.get("arguments")) if isinstance(call, dict) else (call.call_id, call.arguments)
        )
        question = {"tool": item.tool_name, "arguments": _arguments(arguments)}
        answer = await approval(str(call_id), question, timeout=timeout)
        if isinstance(answer, str):
            state.reject(item, rejection_message=answer)
        elif answer:
            state.approve(item)
        else:
            state.reject(item)
    return state
