"""Agents of smolagents whose calls of models and tools are steps, from whatever thread they are made."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from ..errors import DefinitionError, StepFailed
from ..kernel.context import in_workflow
from .calls import AskedIds, CallOptions, CallSteps, approval, used
from .threads import BlockingCalls, in_thread

try:
    from smolagents import ChatMessage, CodeAgent, Model, MultiStepAgent
    from smolagents.agent_types import AgentType
    from smolagents.local_python_executor import LocalPythonExecutor
    from smolagents.memory import AgentMemory
    from smolagents.models import parse_json_if_needed
    from smolagents.monitoring import TokenUsage
except ImportError as error:
    raise ImportError(
        "keepstep.agents.smolagents needs smolagents 1.20 or later: pip install 'keepstep[smolagents]'"
    ) from error

__all__ = ["durable", "run"]

A = TypeVar("A", bound=MultiStepAgent)


def durable(
    agent: A,
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
    approve: Collection[str] = (),
) -> A:
    """Return a copy of an agent with an empty memory, whose model and tool calls are steps inside a workflow.

    Make it in the workflow, because an agent keeps its memory, and run it there with `run`. Agents that it manages are
    durable, too. `model`, `tool` and `tools` hold options of the steps; a tool with None is not a step. Calls of the
    tools that `approve` names wait for the signal `approve:CALL_ID`.
    """
    if not isinstance(agent, MultiStepAgent):
        raise DefinitionError(f"agent must be an agent of smolagents, got {type(agent).__name__}")
    steps = CallSteps(agent.name or "agent", model=model, tool=tool, tools={"final_answer": None, **(tools or {})})
    calls, ids = BlockingCalls(steps), AskedIds()
    made = copy.copy(agent)
    made.model = _Model(agent.model, made, calls, ids)
    made.tools = {name: _tool(one, calls, ids, name in approve) for name, one in agent.tools.items()}
    made.managed_agents = {
        name: durable(one, model=model, tool=tool, tools=tools, approve=approve)
        for name, one in agent.managed_agents.items()
    }
    made.memory = AgentMemory(agent.memory.system_prompt.system_prompt)
    made.state = dict(agent.state)
    if hasattr(made, "stream_outputs"):
        made.stream_outputs = False
    if isinstance(made, CodeAgent):
        made.python_executor = _executor(made)
    return made


async def run(agent: MultiStepAgent, task: str, **options: Any) -> Any:
    """Run a durable agent in a workflow, and return its answer; `options` are those of `agent.run`."""
    if options.get("stream"):
        raise DefinitionError("stream=True gives a generator of a thread, which a workflow cannot read; leave it out")
    answer = await in_thread(agent.run, task, **options)
    return answer.to_raw() if isinstance(answer, AgentType) else answer


class _Model(Model):  # type: ignore[misc] # the framework has no types
    """A model whose generations are steps."""

    def __init__(self, inner: Any, agent: Any, calls: BlockingCalls, ids: AskedIds) -> None:
        super().__init__(
            flatten_messages_as_text=inner.flatten_messages_as_text,
            tool_name_key=inner.tool_name_key,
            tool_arguments_key=inner.tool_arguments_key,
            model_id=inner.model_id,
        )
        self._inner, self._agent, self._calls, self._ids = inner, agent, calls, ids

    def generate(self, messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        def body() -> Any:
            message = self._inner.generate(messages, *args, **kwargs)
            usage = message.token_usage
            if usage is not None:
                used(self.model_id, input_tokens=usage.input_tokens, output_tokens=usage.output_tokens)
            return json.loads(message.model_dump_json())

        # Not by the messages: the framework writes its own prompts into them, which change with its versions.
        found = dict(self._calls.model([getattr(self._agent, "task", None)], body))
        usage = found.get("token_usage")
        counted = None if usage is None else TokenUsage(usage["input_tokens"], usage["output_tokens"])
        message = ChatMessage.from_dict(found, token_usage=counted)
        for call in message.tool_calls or ():
            self._ids.ask(call.function.name, parse_json_if_needed(call.function.arguments), call.id)
        return message

    def parse_tool_calls(self, message: Any) -> Any:
        return self._inner.parse_tool_calls(message)

    def to_dict(self) -> Any:
        return self._inner.to_dict()


def _tool(inner: Any, calls: BlockingCalls, ids: AskedIds, needs_approval: bool) -> Any:
    """Return a tool that looks like the given one, and whose calls are steps."""
    made = copy.copy(inner)

    def forward(*args: Any, **kwargs: Any) -> Any:
        return calls.at_home(lambda: call(args, kwargs))

    def call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = [*args, kwargs] if args else kwargs
        call_id = ids.begin(inner.name, arguments)
        if needs_approval and in_workflow():
            question = {"tool": inner.name, "arguments": arguments}
            if not calls.wait(lambda: approval(call_id or inner.name, question)):
                return "The call was denied."
        try:
            return calls.tool(inner.name, call_id, lambda: inner.forward(*args, **kwargs), arguments=arguments)
        except StepFailed as failed:
            raise RuntimeError(failed.error.message if failed.error is not None else str(failed)) from failed

    made.forward = forward
    return made


def _executor(agent: Any) -> Any:
    """Return an executor that runs code in the agent's own thread: others do not know the run."""
    if not isinstance(agent.python_executor, LocalPythonExecutor):
        kind = type(agent.python_executor).__name__
        raise DefinitionError(
            f"the agent {agent.name!r} runs code with {kind}, where calls of tools cannot be steps; use "
            f"executor_type='local'"
        )
    made = agent.create_python_executor()
    made.timeout_seconds = None
    return made
