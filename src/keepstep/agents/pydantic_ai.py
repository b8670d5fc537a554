"""Agents of Pydantic AI inside a workflow: every model request and every tool call is a step."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Literal, TypeVar

from ..errors import DefinitionError
from ..kernel.context import in_workflow
from ..kernel.deterministic import now, uuid
from ..kernel.publish import emit
from .calls import CallOptions, CallSteps, Recorded, approval, used, warn_in_step

try:
    from pydantic import ValidationError
    from pydantic_ai import DeferredToolRequests, DeferredToolResults, RunContext, ToolApproved, ToolDenied, messages
    from pydantic_ai.agent import AbstractAgent, WrapperAgent
    from pydantic_ai.durable_exec import (
        JSON_CODEC,
        BaseDurabilityCapability,
        CallToolResult,
        DurabilityEngineSpec,
        DurableOperationId,
        JournalCallableOperationBackend,
        RoleBasedOperationConfig,
        ToolsetCallToolId,
    )
    from pydantic_ai.models import (
        CompletedStreamedResponse,
        Model,
        ModelRequestContext,
        ModelRequestParameters,
        StreamedResponse,
    )
    from pydantic_ai.models.wrapper import WrapperModel
    from pydantic_ai.run import AgentRun, AgentRunResult
    from pydantic_ai.settings import ModelSettings
    from pydantic_ai.usage import RequestUsage
except ImportError as error:
    raise ImportError("keepstep.agents.pydantic_ai needs Pydantic AI: pip install 'keepstep[pydantic-ai]'") from error

D = TypeVar("D")
R = TypeVar("R")

__all__ = ["KeepstepDurability", "approved", "durable"]


def durable(
    agent: AbstractAgent[D, R],
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
) -> AbstractAgent[D, R]:
    """Return the agent with its model requests and tool calls as steps inside a workflow; outside, it is the same.

    `model`, `tool` and `tools` are options of the steps. A tool with None is not a step: use this for a tool that calls
    another agent, whose calls are steps.
    """
    return _DurableAgent(agent, KeepstepDurability(model=model, tool=tool, tools=tools))


class KeepstepDurability(BaseDurabilityCapability[Any]):
    """The capability that `durable` adds: give it to `Agent(capabilities=[…])` instead, if you like."""

    engine_spec = DurabilityEngineSpec(
        engine_name="Keepstep",
        durable_unit_noun="step",
        durable_container_noun="workflow",
        codec=JSON_CODEC,
        wrapped_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
    )

    def __init__(
        self,
        *,
        model: CallOptions | None = None,
        tool: CallOptions | None = None,
        tools: Mapping[str, CallOptions | None] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._calls = CallSteps(model=model, tool=tool, tools=tools)

    @property
    def in_durable_context(self) -> bool:
        """Whether the caller is the code of a workflow."""
        return in_workflow()

    def get_durable_operation_backend(self) -> _Steps:
        """Return what makes steps of the framework's operations."""
        return _Steps(self.name, self._calls)

    def get_default_run_id(self) -> str | None:
        """Return an id for the agent's run that a replay makes again."""
        return str(uuid()) if in_workflow() else None

    def get_default_conversation_id(self, run_id: str) -> str | None:
        """Return an id for the conversation that a replay makes again."""
        return run_id if in_workflow() else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        """Return the recorded time, from which the framework counts its own timeout."""
        return now() if in_workflow() else None

    # The framework would rebuild the model from its name in another process. A step's body runs in this one.

    async def wrap_model_request(
        self,
        ctx: RunContext[Any],
        *,
        request_context: ModelRequestContext,
        handler: Callable[[ModelRequestContext], Awaitable[messages.ModelResponse]],
    ) -> messages.ModelResponse:
        return await handler(self._recorded(request_context))

    async def before_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        return self._recorded(request_context)

    async def prepare_model_request(
        self, ctx: RunContext[Any], request_context: ModelRequestContext
    ) -> ModelRequestContext:
        return self._recorded(request_context)

    def _recorded(self, request: ModelRequestContext) -> ModelRequestContext:
        """Return the request with a model whose calls are steps, unless it has one."""
        model: Model | None = request.model
        while isinstance(model, WrapperModel):
            if isinstance(model, _RecordedModel):
                return request
            model = model.wrapped
        warn_in_step()
        if in_workflow():
            request.model = _RecordedModel(request.model, self._calls, self.name)
        return request


class _DurableAgent(WrapperAgent[D, R]):
    """The agent with the capability in each of its runs."""

    def __init__(self, agent: AbstractAgent[D, R], capability: KeepstepDurability) -> None:
        super().__init__(agent)
        if agent.name is None:
            raise DefinitionError("the agent has no name, which its steps are recorded with; give it Agent(name=…)")
        self._capability = capability

    def iter(self, user_prompt: Any = None, **options: Any) -> AbstractAsyncContextManager[AgentRun[D, Any]]:
        capabilities: Sequence[Any] = options.pop("capabilities", None) or ()
        return self.wrapped.iter(user_prompt, capabilities=[*capabilities, self._capability], **options)

    def run_sync(self, *args: Any, **options: Any) -> AgentRunResult[Any]:
        if in_workflow():
            raise DefinitionError(
                "agent.run_sync cannot run inside a workflow; await agent.run(…) in an async workflow"
            )
        return super().run_sync(*args, **options)


class _Steps(JournalCallableOperationBackend[dict[str, Any]]):
    """Makes steps of the framework's operations on tools: calls, and the lists of tools of servers."""

    def __init__(self, agent: str, calls: CallSteps) -> None:
        config: RoleBasedOperationConfig[dict[str, Any]] = RoleBasedOperationConfig(
            model={}, event={}, capability={}, tool={}, resolve_tool=self._resolve
        )
        super().__init__(agent_name=agent, config=config)
        self._agent, self._calls = agent, calls

    def _resolve(self, operation: DurableOperationId, tool: object, name: str) -> dict[str, Any] | Literal[False]:
        return {} if self._calls.records_tool(name) else False

    async def execute(
        self,
        *,
        operation_id: DurableOperationId,
        name: str,
        body: Callable[[], Awaitable[object]],
        cache_key: tuple[object, ...],
        config: dict[str, Any],
    ) -> object:
        context = next((one for one in cache_key if isinstance(one, RunContext)), None)
        call_id = context.tool_call_id if context is not None else None
        if isinstance(operation_id, ToolsetCallToolId):
            tool, given = str(cache_key[0]), cache_key[1]
            return _outcome(await self._calls.tool(tool, call_id, body, given=given, agent=self._agent))
        key = call_id or (str(context.run_step) if context is not None else "once")
        return await self._calls.tool(name.removeprefix(f"{self._agent}__"), key, body, agent=self._agent)


def _outcome(value: Any) -> Any:
    """Return the recorded outcome of a tool; a plain value, which a person gave, is the tool's result."""
    if isinstance(value, dict) and "kind" in value:
        with suppress(ValidationError):
            JSON_CODEC.load(CallToolResult, value)
            return value
    return {"kind": "tool_return", "result": value}


class _RecordedModel(WrapperModel):
    """A model whose requests are steps."""

    def __init__(self, wrapped: Model, calls: CallSteps, agent: str) -> None:
        super().__init__(wrapped)
        self._calls, self._agent = calls, agent

    async def request(
        self,
        messages: list[messages.ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> messages.ModelResponse:
        async def body() -> Any:
            response = await self.wrapped.request(messages, model_settings, model_request_parameters)
            return _dumped(response)

        return _loaded(await self._calls.model(_content(messages), body, agent=self._agent))

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[messages.ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncGenerator[StreamedResponse]:
        async def body(send: Callable[[Any], None]) -> Any:
            async with self.wrapped.request_stream(
                messages, model_settings, model_request_parameters, run_context
            ) as stream:
                send(stream)
                async for event in stream:
                    if text := _text_of(event):
                        emit(text)
                    send(event)
            return _dumped(stream.get())

        async with aclosing(self._calls.stream(_content(messages), body, agent=self._agent)) as items:
            first = await anext(items)
            if isinstance(first, Recorded):
                response = _loaded(first.value)
                yield CompletedStreamedResponse(
                    response, model_request_parameters=model_request_parameters, replay_events=True
                )
            else:
                yield _LiveResponse(first, items, model_request_parameters)


class _LiveResponse(StreamedResponse):
    """The events of a model's stream as they arrive from the body of its step, and at the end the recorded response."""

    def __init__(
        self, stream: StreamedResponse, items: AsyncIterator[Any], model_request_parameters: ModelRequestParameters
    ) -> None:
        super().__init__(model_request_parameters)
        self._stream, self._items = stream, items
        self._recorded: messages.ModelResponse | None = None

    def __aiter__(self) -> AsyncIterator[messages.ModelResponseStreamEvent]:
        if self._event_iterator is None:
            self._event_iterator = self._get_event_iterator()
        return self._event_iterator

    async def _get_event_iterator(self) -> AsyncIterator[messages.ModelResponseStreamEvent]:
        async for item in self._items:
            if isinstance(item, Recorded):
                self._recorded = _loaded(item.value)
                self._finished = True
                return
            if isinstance(item, messages.FinalResultEvent):
                self.final_result_event = item
            yield item

    async def close_stream(self) -> None:
        await self._stream.close_stream()

    def get(self) -> messages.ModelResponse:
        return self._recorded or self._stream.get()

    @property
    def usage(self) -> RequestUsage:
        return self.get().usage

    @property
    def model_name(self) -> str:
        return self._stream.model_name

    @property
    def provider_name(self) -> str | None:
        return self._stream.provider_name

    @property
    def provider_url(self) -> str | None:
        return self._stream.provider_url

    @property
    def timestamp(self) -> datetime:
        return self._stream.timestamp


def _dumped(response: messages.ModelResponse) -> Any:
    """Return a response as plain values, and report what it has used; called in the body of a step."""
    usage = response.usage
    used(
        response.model_name,
        tokens=usage.total_tokens,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
    )
    return JSON_CODEC.dump(messages.ModelResponse, response)


def _loaded(value: Any) -> messages.ModelResponse:
    response: messages.ModelResponse = JSON_CODEC.load(messages.ModelResponse, value)
    return response


def _text_of(event: object) -> str:
    """Return the text that an event of a stream adds to the answer."""
    if isinstance(event, messages.PartStartEvent) and isinstance(event.part, messages.TextPart):
        return event.part.content
    if isinstance(event, messages.PartDeltaEvent) and isinstance(event.delta, messages.TextPartDelta):
        return event.delta.content_delta
    return ""


def _content(history: Sequence[messages.ModelMessage]) -> list[Any]:
    """Return what identifies a request: prompts, texts and calls. Instructions and times may differ on a replay."""
    return [part for message in history for part in map(_part, message.parts) if part is not None]


def _part(part: Any) -> Any:
    if isinstance(part, messages.UserPromptPart):
        content = [part.content] if isinstance(part.content, str) else part.content
        return ["user", *(one if isinstance(one, str) else getattr(one, "identifier", "") for one in content)]
    if isinstance(part, messages.TextPart):
        return ["text", part.content]
    if part.part_kind.startswith("retry") and getattr(part, "tool_name", None) is None:
        return ["retry"]  # its call id is another one on each replay
    call_id = getattr(part, "tool_call_id", None)
    if call_id is None:
        return None
    # Versions of the framework name the kinds of results differently.
    return ["call" if part.part_kind.endswith("tool-call") else "result", call_id]


async def approved(requests: DeferredToolRequests, *, timeout: float | None = None) -> DeferredToolResults:  # noqa: ASYNC109 - durable
    """Ask a person about each tool call that needs approval, and return the answers for the agent's next run.

    Each call is published as `approve:CALL_ID` and waits for the signal of that name: True lets it run, False denies
    it, and a text denies it with that message. A dictionary lets it run with these arguments instead.
    """
    results = DeferredToolResults()
    for call in requests.approvals:
        question = {"tool": call.tool_name, "arguments": call.args_as_dict()}
        results.approvals[call.tool_call_id] = _verdict(await approval(call.tool_call_id, question, timeout=timeout))
    return results


def _verdict(answer: Any) -> Any:
    if isinstance(answer, dict):
        return ToolApproved(override_args=answer)
    return ToolDenied(answer) if isinstance(answer, str) else ToolDenied() if not answer else True
