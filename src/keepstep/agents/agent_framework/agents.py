"""Agents and workflows of the Microsoft Agent Framework inside Keepstep workflows."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, TypeVar

import agent_framework
from agent_framework import (
    Agent,
    AgentResponse,
    ChatContext,
    ChatMiddleware,
    ChatMiddlewareLayer,
    ChatResponse,
    ChatResponseUpdate,
    Content,
    FunctionInvocationContext,
    FunctionMiddleware,
    FunctionTool,
    Message,
    ResponseStream,
    UserInputRequiredException,
    WorkflowRunResult,
)
from pydantic import BaseModel

from ...errors import DefinitionError
from ...kernel.context import in_workflow
from ...kernel.publish import emit
from ..calls import CallOptions, CallSteps, Recorded, approval, call_branch, used, warn_in_step

AgentT = TypeVar("AgentT", bound=Agent[Any])

#: Marks a tool that is a durable agent: its own calls are the steps.
_IS_AGENT = "keepstep_agent"


def durable(
    agent: AgentT,
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
) -> AgentT:
    """Return a copy of an agent whose model and tool calls are steps inside a workflow.

    `as_tool()` of the copy gives a tool that is not a step: the calls of the agent behind it are. Outside a workflow,
    the copy works like the agent.
    """
    if not isinstance(agent, Agent):
        raise DefinitionError(
            f"`agent` must be an agent_framework.Agent, got {type(agent).__name__}; "
            "call an agent of another kind in a step"
        )
    if not isinstance(agent.client, ChatMiddlewareLayer):
        raise DefinitionError(
            f"the chat client of `agent`, {type(agent.client).__name__}, runs no chat middleware; "
            "derive it from agent_framework.ChatMiddlewareLayer too"
        )
    steps = CallSteps(agent.name, model=model, tool=tool, tools=tools)
    clone = copy.copy(agent)
    clone.middleware = [*(agent.middleware or ()), _ChatSteps(steps), _ToolSteps(steps)]
    clone.as_tool = partial(_as_tool, clone)  # type: ignore[method-assign]
    return clone


def _as_tool(agent: Agent[Any], **options: Any) -> FunctionTool:
    made = type(agent).as_tool(agent, **options)
    made.additional_properties = {**(made.additional_properties or {}), _IS_AGENT: True}
    return made


async def approvals(response: AgentResponse[Any]) -> Message:
    """Wait for the answer to each approval that an agent asks for, and return them as the message for its next run.

    The signal `approve:CALL_ID` answers a call with True or False.
    """
    requests = response.user_input_requests
    for request in requests:
        if request.type != "function_approval_request" or request.function_call is None:
            raise DefinitionError(
                f"`response` asks for {request.type}, which is not an approval; wait for its answer with ks.wait_for"
            )
    calls = [request.function_call for request in requests]
    answers = await asyncio.gather(
        *(
            approval(str(call.call_id), {"tool": call.name, "arguments": call.parse_arguments() or {}})
            for call in calls
            if call is not None
        )
    )
    contents = [
        request.to_function_approval_response(bool(answer)) for request, answer in zip(requests, answers, strict=True)
    ]
    return Message(role="user", contents=contents)


async def responses(result: WorkflowRunResult) -> dict[str, Any]:
    """Wait for the answer to each request of a framework's workflow, and return them for `workflow.run(responses=…)`.

    The signal `approve:EXECUTOR_ID` answers a request of that executor; its payload is the response.
    """
    requests = result.get_request_info_events()
    answers = await asyncio.gather(
        *(approval(str(request.source_executor_id), _plain(request.data)) for request in requests)
    )
    return {request.request_id: answer for request, answer in zip(requests, answers, strict=True)}


class _ChatSteps(ChatMiddleware):
    """Makes a step of each model call."""

    def __init__(self, steps: CallSteps) -> None:
        self.steps = steps

    async def process(self, chat: ChatContext, call_next: Callable[[], Awaitable[None]]) -> None:
        if not in_workflow():
            warn_in_step()
            await call_next()
            return
        _refuse_compaction(chat)
        asked = [_identity(message) for message in chat.messages]
        form = (chat.options or {}).get("response_format")
        if chat.stream:
            chat.result = self._stream(chat, call_next, asked, form)
            return

        async def call() -> Any:
            await call_next()
            given: Any = chat.result
            _count_usage(given)
            return _plain(given)

        response = ChatResponse[Any].from_dict(await self.steps.model(asked, call))
        response._response_format = form  # noqa: SLF001 - parses `value` on demand, as the client's own response does
        chat.result = response

    def _stream(
        self, chat: ChatContext, call_next: Callable[[], Awaitable[None]], asked: Any, form: Any
    ) -> ResponseStream[ChatResponseUpdate, ChatResponse[Any]]:
        async def call(send: Callable[[Any], None]) -> Any:
            await call_next()
            stream: Any = chat.result
            given = []
            async for update in stream:
                given.append(_plain(update))
                send(given[-1])
                if update.text:
                    emit(update.text)
            _count_usage(await stream.get_final_response())
            return given

        async def updates() -> AsyncIterator[ChatResponseUpdate]:
            live = False
            async with aclosing(self.steps.stream(asked, call)) as items:
                async for item in items:
                    if not isinstance(item, Recorded):
                        live = True
                        yield ChatResponseUpdate.from_dict(item)
                    elif not live:
                        for update in item.value:
                            yield ChatResponseUpdate.from_dict(update)

        return ResponseStream(updates(), finalizer=partial(ChatResponse[Any].from_updates, output_format_type=form))


class _ToolSteps(FunctionMiddleware):
    """Makes a step of each tool call, and a named branch of each durable agent that is called as a tool."""

    def __init__(self, steps: CallSteps) -> None:
        self.steps = steps

    async def process(self, request: FunctionInvocationContext, call_next: Callable[[], Awaitable[None]]) -> None:
        name, call_id = request.function.name, request.metadata.get("call_id")
        if not in_workflow():
            await call_next()
            return
        if (request.function.additional_properties or {}).get(_IS_AGENT) or not self.steps.records_tool(name):
            with call_branch(name, call_id):
                await call_next()
            return

        async def call() -> dict[str, Any]:
            before = _states(request)
            try:
                await call_next()
                given: dict[str, Any] = {"result": _plain(_contents(request))}
            except UserInputRequiredException as error:
                given = {"asks": _plain(error.contents), "message": str(error)}
            except tuple(_SIGNALS.values()) as error:
                given = {"raises": type(error).__name__, "message": str(error)}
            after = _states(request)
            changed = {key: json.loads(text) for key, text in after.items() if before.get(key) != text}
            return {**given, "state": changed}

        given = await self.steps.tool(name, call_id, call, arguments=_plain(request.arguments))
        if not isinstance(given, dict) or "state" not in given or not given.keys() & {"result", "asks", "raises"}:
            request.result = request.function.parse_result(given)  # a person gave the result
            return
        if given["state"] and request.session is not None:
            request.session.state.update(given["state"])
        if "raises" in given:
            raise _SIGNALS[given["raises"]](given["message"])
        if "asks" in given:
            raise UserInputRequiredException([Content.from_dict(one) for one in given["asks"]], given["message"])
        request.result = [Content.from_dict(one) for one in given["result"]]


#: Errors by which a tool or middleware steers the framework's loop. They are recorded as values and raised again.
_SIGNALS: dict[str, type[Exception]] = {
    name: getattr(agent_framework, name)
    for name in ("MiddlewareTermination", "MiddlewareFailure")
    if hasattr(agent_framework, name)
}


def _contents(context: FunctionInvocationContext) -> list[Content]:
    """The result of a tool as the framework's contents; middleware may have set any value."""
    result = context.result
    is_parsed = isinstance(result, list) and all(isinstance(one, Content) for one in result)
    return result if is_parsed else context.function.parse_result(result)


def _states(context: FunctionInvocationContext) -> dict[str, str]:
    """The entries of the session's state that JSON can hold, each as its text: a tool may change them."""
    states = {}
    for key, value in (context.session.state if context.session is not None else {}).items():
        with suppress(TypeError, ValueError):
            states[key] = json.dumps(value, sort_keys=True)
    return states


def _identity(message: Message) -> list[Any]:
    """Return the parts of a message that every version of the framework has."""
    return [
        str(message.role),
        [[one.type, one.text, one.name, one.call_id, _plain(one.arguments)] for one in message.contents],
    ]


def _plain(value: Any) -> Any:
    """Return what the framework's own serialisation makes of a value, as plain JSON."""
    return json.loads(json.dumps(value, default=_as_json))


def _as_json(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value)


def _count_usage(response: ChatResponse[Any]) -> None:
    usage: Mapping[str, Any] = response.usage_details or {}
    used(
        response.model,
        tokens=usage.get("total_token_count") or None,
        input_tokens=usage.get("input_token_count"),
        output_tokens=usage.get("output_token_count"),
    )


def _refuse_compaction(context: ChatContext) -> None:
    if context.kwargs.get("compaction_strategy") or getattr(context.client, "compaction_strategy", None):
        raise DefinitionError(
            "compaction_strategy changes the messages inside a model call, which a replay does not repeat; "
            "leave it out for a durable agent"
        )
