"""Google ADK agents inside workflows: a plugin makes steps of their model and tool calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import cache, partial
from typing import Any

from ..errors import DefinitionError
from ..kernel.context import idempotency_key, in_workflow
from ..kernel.publish import emit
from .calls import CallOptions, CallSteps, Recorded, approval, used, warn_in_step

try:
    from google.adk.agents import BaseAgent, LlmAgent
    from google.adk.apps.app import App
    from google.adk.events import Event, EventActions
    from google.adk.models import BaseLlm
    from google.adk.models.llm_request import LlmRequest
    from google.adk.models.llm_response import LlmResponse
    from google.adk.plugins.base_plugin import BasePlugin
    from google.adk.runners import InMemoryRunner
    from google.adk.tools.agent_tool import AgentTool
    from google.adk.tools.base_tool import BaseTool
    from google.adk.tools.tool_context import ToolContext
    from google.genai import types
    from pydantic import BaseModel
except ImportError as error:
    raise ImportError(
        "keepstep.agents.adk needs the package google-adk; install it with: pip install 'keepstep[adk]'"
    ) from error

#: The name of the plugin, by which its tools find it.
_NAME = "keepstep"
#: The function call by which the framework asks a person to confirm a tool call.
_CONFIRMATION = "adk_request_confirmation"
#: Begins ids of calls that the model has given none. The framework does not send ids that begin so to a model.
_ID_PREFIX = "adk-ks-"
#: The steps of the plugin that serves the current model call, and the name of the agent.
_SERVING: ContextVar[tuple[CallSteps, str] | None] = ContextVar("keepstep_adk", default=None)


class KeepstepPlugin(BasePlugin):
    """A plugin that makes steps of model and tool calls inside a workflow. Outside a workflow, it changes nothing.

    The options are those of steps: `model` for model calls, `tool` for tools, `tools` for a tool by name.
    """

    def __init__(
        self,
        *,
        model: CallOptions | None = None,
        tool: CallOptions | None = None,
        tools: Mapping[str, CallOptions | None] | None = None,
    ) -> None:
        super().__init__(name=_NAME)
        self.steps = CallSteps(model=model, tool=tool, tools=tools)

    async def before_agent_callback(self, *, agent: BaseAgent, callback_context: Any) -> None:
        if isinstance(agent, LlmAgent):
            llm = agent.canonical_model
            if not isinstance(llm, _Steps):
                object.__setattr__(llm, "__class__", _with_steps(type(llm)))
            if agent.canonical_model is not llm:
                agent.model = llm  # an old version makes another one for each call

    async def before_model_callback(self, *, callback_context: Any, llm_request: LlmRequest) -> None:
        _SERVING.set((self.steps, callback_context.agent_name))

    async def before_tool_callback(self, *, tool: BaseTool, tool_args: dict[str, Any], tool_context: Any) -> None:
        if "run_async" not in vars(tool):
            tool.run_async = partial(_run_tool, tool)  # type: ignore[method-assign]


def durable(
    agent: BaseAgent,
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
) -> InMemoryRunner:
    """Return a runner for an agent whose model and tool calls are steps inside a workflow.

    Its sessions are in memory, where a replay builds them up again: make it in the workflow's code.
    """
    if not isinstance(agent, BaseAgent):
        raise DefinitionError(f"`agent` must be an agent of google.adk, got {type(agent).__name__}")
    plugin = KeepstepPlugin(model=model, tool=tool, tools=tools)
    return _Runner(app=App(name="keepstep", root_agent=agent, plugins=[plugin]), app_name=None)


class _Runner(InMemoryRunner):
    """A runner that refuses to leave the loop of a workflow, where its calls would not be steps."""

    def run(self, **options: Any) -> Generator[Event, None, None]:
        if in_workflow():
            raise DefinitionError(
                "`run` calls the agent in another thread, where its calls are not steps; use `run_async` in a workflow"
            )
        return super().run(**options)


async def approvals(events: Iterable[Event]) -> types.Content | None:
    """Wait for the answer to each confirmation that events ask for, and return them as the next message of the user.

    Return None if they ask for none. The signal `approve:CALL_ID` answers a call with True, False, or a dictionary with
    `confirmed` and `payload`.
    """
    asked = [call for event in events for call in event.get_function_calls() if call.name == _CONFIRMATION]
    if not asked:
        return None
    calls = [(call.args or {})["originalFunctionCall"] for call in asked]
    answers = await asyncio.gather(
        *(approval(call["id"], {"tool": call["name"], "arguments": call.get("args") or {}}) for call in calls)
    )
    parts = []
    for call, answer in zip(asked, answers, strict=True):
        response = answer if isinstance(answer, dict) else {"confirmed": bool(answer)}
        parts.append(
            types.Part(function_response=types.FunctionResponse(id=call.id, name=call.name, response=response))
        )
    return types.Content(role="user", parts=parts)


class _Steps:
    """The base of model classes whose calls are steps."""

    async def generate_content_async(
        self, llm_request: LlmRequest, stream: bool = False
    ) -> AsyncGenerator[LlmResponse, None]:
        inner = partial(super().generate_content_async, llm_request, stream)  # type: ignore[misc]
        serving = _SERVING.get()
        if serving is not None:
            warn_in_step()
        if not in_workflow() or serving is None:
            async with aclosing(inner()) as responses:
                async for response in responses:
                    yield response
            return
        steps, agent = serving
        asked = [_identity(content) for content in llm_request.contents]
        body = partial(_generate, inner, llm_request.model)
        live = False
        async with aclosing(steps.stream(asked, body, agent=agent)) as items:
            async for item in items:
                if not isinstance(item, Recorded):
                    live = True
                    yield LlmResponse.model_validate(item)
                elif not live:
                    for one in item.value:
                        yield LlmResponse.model_validate(one)


@cache
def _with_steps(kind: type[BaseLlm]) -> type[BaseLlm]:
    """Return a subclass whose calls are steps. The framework asks models for their class, so a wrapper will not do."""
    metaclass: Any = type(kind)
    made: type[BaseLlm] = metaclass(kind.__name__, (_Steps, kind), {"__module__": kind.__module__})
    return made


async def _generate(
    inner: Callable[[], AsyncGenerator[LlmResponse, None]], model: str | None, send: Callable[[Any], None]
) -> list[Any]:
    """Call a model, and return all its responses. A call that it gives no id gets one here, where it is recorded."""
    given: list[Any] = []
    made, tokens = 0, 0
    async with aclosing(inner()) as responses:
        async for response in responses:
            for part in (response.content.parts if response.content else None) or ():
                if part.text and response.partial and not part.thought:
                    emit(part.text)
                if part.function_call and not part.function_call.id and not response.partial:
                    made += 1
                    part.function_call.id = f"{_ID_PREFIX}{idempotency_key()[:16]}-{made}"
            if response.usage_metadata and not response.partial:
                tokens += response.usage_metadata.total_token_count or 0
            given.append(response.model_dump(mode="json", exclude_none=True))
            send(given[-1])
    used(model, tokens=tokens)
    return given


async def _run_tool(tool: BaseTool, *, args: dict[str, Any], tool_context: ToolContext) -> Any:
    """Run a tool in a step, and apply its actions to the context as they are recorded."""
    inner = partial(type(tool).run_async, tool, args=args, tool_context=tool_context)
    invocation = tool_context._invocation_context  # noqa: SLF001 - the way to the plugin
    plugin = invocation.plugin_manager.get_plugin(_NAME)
    if not in_workflow() or not isinstance(plugin, KeepstepPlugin) or _only_asks(tool, tool_context):
        return await inner()
    # The calls of an agent are steps themselves, if the plugin serves that agent, too.
    record = not (isinstance(tool, AgentTool) and getattr(tool, "include_plugins", True))
    record = record and plugin.steps.records_tool(tool.name)

    async def run() -> Any:
        result = await inner()
        if not record:
            return result
        return {"result": _plain(result), "actions": tool_context.actions.model_dump(mode="json", exclude_none=True)}

    call_id, agent = tool_context.function_call_id, tool_context.agent_name
    given = await plugin.steps.tool(tool.name, call_id, run, arguments=_plain(args), agent=agent, record=record)
    if not record or not isinstance(given, dict) or given.keys() != {"result", "actions"}:
        return given  # a plain value, which a person gave, is the result itself
    actions = EventActions.model_validate(given["actions"])
    for name in EventActions.model_fields:
        value, current = getattr(actions, name), getattr(tool_context.actions, name)
        if isinstance(value, dict) and isinstance(current, dict):
            current.update(value)  # the context writes its state into this very dictionary
        else:
            setattr(tool_context.actions, name, value)
    for key, value in actions.state_delta.items():
        tool_context.state[key] = value
    return given["result"]


def _only_asks(tool: BaseTool, tool_context: ToolContext) -> bool:
    """Whether a tool will do no more than ask for its confirmation. Newer versions ask in its place."""
    return getattr(tool, "_require_confirmation", None) is True and not tool_context.tool_confirmation


def _identity(content: types.Content) -> list[Any]:
    """Return the parts of a message that every version of the framework has."""
    parts = []
    for part in content.parts or ():
        call, response = part.function_call, part.function_response
        called = [call.id, call.name, _plain(call.args)] if call else None
        parts.append([part.text, called, [response.id, response.name, _plain(response.response)] if response else None])
    return [content.role, parts]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=_as_json))


def _as_json(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if isinstance(value, BaseModel) else str(value)
