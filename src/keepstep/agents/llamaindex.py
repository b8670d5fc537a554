"""LlamaIndex: agents and agent workflows whose calls of models and tools are steps."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import DefinitionError, StepFailed
from ..kernel.context import in_workflow
from ..kernel.publish import emit
from .calls import AskedIds, CallOptions, CallSteps, Recorded, approval, used

try:
    from llama_index.core.agent.workflow import AgentWorkflow
    from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        CompletionResponse,
        LLMMetadata,
        TextBlock,
        ToolCallBlock,
    )
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.tools import AsyncBaseTool, FunctionTool, ToolMetadata, ToolOutput, adapt_to_async_tool
    from llama_index.core.workflow import HumanResponseEvent, InputRequiredEvent
except ImportError as error:
    raise ImportError(
        "keepstep.agents.llamaindex needs llama-index-core 0.14.13 or later: pip install 'keepstep[llamaindex]'"
    ) from error

__all__ = ["durable", "finish"]

A = TypeVar("A", AgentWorkflow, BaseWorkflowAgent)


def durable(
    agent: A,
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
    approve: Collection[str] = (),
) -> A:
    """Return a copy of an agent, or of a workflow of agents, whose model and tool calls are steps inside a workflow.

    `model`, `tool` and `tools` hold options of the steps; a tool with None is not a step. Calls of the tools that
    `approve` names wait for the signal `approve:CALL_ID`. A tool that takes the framework's `Context` is not a step.
    """
    if isinstance(agent, AgentWorkflow):
        made = copy.copy(agent)
        made.agents = {
            name: durable(one, model=model, tool=tool, tools=tools, approve=approve)
            for name, one in agent.agents.items()
        }
        return made
    if not isinstance(agent, BaseWorkflowAgent):
        raise DefinitionError(
            f"agent must be an AgentWorkflow or an agent of one, got {type(agent).__name__}; make the calls of plain "
            f"workflows steps with @ks.step"
        )
    if agent.tool_retriever is not None:
        raise DefinitionError(
            f"the agent {agent.name!r} has a tool_retriever, whose tools cannot be made steps; give it tools= instead"
        )
    calls = _Calls(CallSteps(agent.name, model=model, tool=tool, tools=tools), frozenset(approve))
    made = copy.copy(agent)
    made.llm = _Llm(inner=agent.llm, calls=calls)
    made.tools = [_durable_tool(one, calls) for one in agent.tools or []]
    return made


async def finish(handler: Any) -> Any:
    """Return the result of `agent.run(...)`. Questions of its tools (`InputRequiredEvent`) wait for a signal.

    The signal is named `input:NUMBER`, counted in the run from 1; its payload is the response.
    """
    number = 0
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            number += 1
            question = dict(event.items())
            answer = await approval(str(number), question.get("prefix", question), kind="input")
            handler.ctx.send_event(HumanResponseEvent(response=answer))  # type: ignore[call-arg] # its fields are free
    return await handler


class _Calls:
    """The steps of an agent, the ids of calls that its model asked for, and the tools that need an approval."""

    def __init__(self, steps: CallSteps, approve: frozenset[str]) -> None:
        self.steps, self.approve, self.ids = steps, approve, AskedIds()


# -- models ------------------------------------------------------------------------------------------------------------


class _Llm(FunctionCallingLLM):
    """A model whose asynchronous chats are steps."""

    inner: Any
    calls: Any

    @property
    def metadata(self) -> LLMMetadata:
        return self.inner.metadata  # type: ignore[no-any-return]

    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        async def body() -> Any:
            return self._dumped(await self.inner.achat(messages, **kwargs))

        return self._loaded(await self.calls.steps.model(_projected(messages), body))

    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        return self._stream(messages, kwargs)

    async def _stream(self, messages: Sequence[ChatMessage], kwargs: Any) -> AsyncGenerator[ChatResponse, None]:
        async def body(send: Any) -> Any:
            last = ChatResponse(message=ChatMessage(role="assistant"))
            async for last in await self.inner.astream_chat(messages, **kwargs):
                if last.delta:
                    emit(last.delta)
                send(last)
            return self._dumped(last)

        sent = False
        async for item in self.calls.steps.stream(_projected(messages), body):
            if not isinstance(item, Recorded):
                sent = True
                yield item
                continue
            last = self._loaded(item.value)
            last.delta = "" if sent else last.message.content or ""
            yield last

    def _dumped(self, response: ChatResponse) -> Any:
        used(getattr(self.metadata, "model_name", None), tokens=_tokens(response))
        dumped = response.model_dump(mode="json", exclude={"raw", "delta", "logprobs"})
        return json.loads(json.dumps(dumped, default=str))

    def _loaded(self, value: Any) -> ChatResponse:
        response = ChatResponse.model_validate(value)
        if self.metadata.is_function_calling_model:
            for one in self.get_tool_calls_from_response(response, error_on_no_tool_call=False):
                self.calls.ids.ask(one.tool_name, one.tool_kwargs, one.tool_id)
        return response

    def _prepare_chat_with_tools(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.inner._prepare_chat_with_tools_compat(*args, **kwargs)  # type: ignore[no-any-return] # noqa: SLF001

    def _validate_chat_with_tools_response(self, *args: Any, **kwargs: Any) -> ChatResponse:
        return self.inner._validate_chat_with_tools_response(*args, **kwargs)  # type: ignore[no-any-return] # noqa: SLF001

    def get_tool_calls_from_response(self, *args: Any, **kwargs: Any) -> list[ToolSelection]:
        return self.inner.get_tool_calls_from_response(*args, **kwargs)  # type: ignore[no-any-return]

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._plain("chat")(messages, **kwargs)  # type: ignore[no-any-return]

    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Any:
        return self._plain("stream_chat")(messages, **kwargs)

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return self._plain("complete")(prompt, formatted, **kwargs)  # type: ignore[no-any-return]

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return self._plain("stream_complete")(prompt, formatted, **kwargs)

    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        async def body() -> Any:
            found = await self.inner.acomplete(prompt, formatted, **kwargs)
            return json.loads(json.dumps(found.model_dump(mode="json", exclude={"raw"}), default=str))

        return CompletionResponse.model_validate(await self.calls.steps.model([prompt], body))

    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return await self._plain("astream_complete")(prompt, formatted, **kwargs)

    def _plain(self, method: str) -> Any:
        """Return a method of the model itself, which cannot be a step."""
        if in_workflow():
            raise DefinitionError(f"{method} of a model cannot be a step; use achat or astream_chat inside a workflow")
        return getattr(self.inner, method)


def _projected(messages: Sequence[ChatMessage]) -> Any:
    """Return what identifies messages: roles, texts, call ids and arguments, without the framework's system prompts."""
    return [
        [
            message.role.value,
            message.additional_kwargs.get("tool_call_id"),
            [
                [block.tool_call_id, block.tool_name, block.tool_kwargs]
                if isinstance(block, ToolCallBlock)
                else block.text
                if isinstance(block, TextBlock)
                else block.model_dump(mode="json")
                for block in message.blocks
            ],
        ]
        for message in messages
        if message.role.value != "system"
    ]


def _tokens(response: ChatResponse) -> int:
    """Return the tokens that a response reports, in the places where integrations put them."""
    raw = response.raw
    usage = raw.get("usage") if isinstance(raw, Mapping) else getattr(raw, "usage", None)
    for found in (response.additional_kwargs, usage):
        get = found.get if isinstance(found, Mapping) else lambda key, of=found: getattr(of, key, None)
        if total := get("total_tokens"):
            return int(total)
        parts = ("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens")
        if tokens := sum(int(get(one) or 0) for one in parts):
            return tokens
    return 0


# -- tools -------------------------------------------------------------------------------------------------------------


def _durable_tool(tool: Any, calls: _Calls) -> Any:
    if isinstance(tool, FunctionTool) and tool.requires_context:
        return tool
    return _Tool(adapt_to_async_tool(tool), calls)


class _Tool(AsyncBaseTool):
    """A tool whose asynchronous calls are steps."""

    def __init__(self, inner: AsyncBaseTool, calls: _Calls) -> None:
        self._inner, self._calls = inner, calls

    @property
    def metadata(self) -> ToolMetadata:
        return self._inner.metadata

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        if in_workflow():
            raise DefinitionError(f"call of the tool {self.metadata.get_name()!r} cannot be a step; use acall")
        return self._inner.call(*args, **kwargs)

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        name = self.metadata.get_name()
        call_id = self._calls.ids.begin(name, kwargs)
        if name in self._calls.approve and in_workflow():
            question = {"tool": name, "arguments": kwargs}
            if not await approval(call_id or name, question):
                return ToolOutput(tool_name=name, content="The call was denied.", raw_input=kwargs, is_error=True)
        if not self._calls.steps.records_tool(name):
            output: ToolOutput = await self._calls.steps.tool(
                name, call_id, lambda: self._inner.acall(*args, **kwargs), arguments=kwargs
            )
            return output

        async def body() -> Any:
            output = await self._inner.acall(*args, **kwargs)
            dumped = output.model_dump(mode="json", exclude={"raw_output"})
            return json.loads(json.dumps({**dumped, "raw_output": output.raw_output}, default=str))

        try:
            found = await self._calls.steps.tool(name, call_id, body, arguments=[*args, kwargs], given=kwargs)
        except StepFailed as failed:
            message = failed.error.message if failed.error is not None else str(failed)
            return ToolOutput(tool_name=name, content=message, raw_input=kwargs, is_error=True, exception=failed)
        if not isinstance(found, dict) or not found.keys() >= {"tool_name", "raw_input", "raw_output"}:
            # A person gave the result.
            return ToolOutput(tool_name=name, content=str(found), raw_input=kwargs, raw_output=found)
        return ToolOutput(**found)
