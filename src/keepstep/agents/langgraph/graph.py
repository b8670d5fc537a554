"""A compiled LangGraph graph in a workflow: its nodes and tool calls are steps, and its interrupts wait for signals."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any, TypeVar

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.pregel import Pregel
from langgraph.types import Command, Interrupt, RetryPolicy

from ...errors import DefinitionError
from ...kernel.context import in_workflow, run_id
from ...policies import Retry
from ...ports import CURRENT
from ..calls import CallOptions, CallSteps, approval
from .nodes import PLACE, OpenNode, Recorder, StepNode, derived_ids, of_run, step_task, step_tools, with_ids
from .serde import StrictSerializer

T = TypeVar("T")

#: The name of the node that calls the model in the graphs of `create_agent`.
_MODEL = "model"
#: The name of a graph that was given none.
_UNNAMED = "LangGraph"


def durable(
    graph: Any,
    *,
    model: CallOptions | None = None,
    tool: CallOptions | None = None,
    tools: Mapping[str, CallOptions | None] | None = None,
    node: CallOptions | None = None,
    nodes: Mapping[str, CallOptions | None] | None = None,
    types: Iterable[Any] = (),
    ask: bool = True,
    stream: bool = False,
) -> Any:
    """Return a graph for use in a workflow, in which every node and every tool call is a step.

    `graph` is a compiled graph, as `StateGraph.compile` and `create_agent` return it, or an `@entrypoint`. The body of
    an entrypoint is code of the workflow; make each of its tasks durable: `durable(task)`. `model` has the options of
    the node `model`, `tool` those of tool calls, `node` those of other nodes. `tools` and `nodes` give options by name;
    a tool or node with None is not a step: its body is code of the workflow. `types` are classes of the state that
    annotations of the graph do not name. With `ask`, an interrupt publishes its value and waits for the signal
    `approve:NODE`, or `approve:CALL_ID` for one that is about a tool call; without it, the caller gets the interrupt.
    With `stream`, every model call streams its tokens to `ks.emit`.

    Outside a workflow, the graph is used as it is.
    """
    if isinstance(graph, DurableGraph):
        graph = graph.original
    options = dict(nodes or {})
    if model is not None:
        options.setdefault(_MODEL, model)
    if isinstance(graph, Pregel):
        unknown = set(nodes or ()) - set(graph.nodes)
        if unknown:
            raise DefinitionError(f"nodes= names {sorted(unknown)}, but the nodes of the graph are {_names(graph)}")
        return DurableGraph(graph, _Options(node, options, tool, tools, tuple(types), stream=stream), ask=ask)
    if callable(function := getattr(graph, "func", None)) and hasattr(graph, "retry_policy"):
        made = copy.copy(graph)
        name = getattr(function, "__name__", "task")
        calls = CallSteps(tool=node or _options_of(graph))
        made.func = step_task(function, name, Recorder(calls, calls, StrictSerializer(types), (), stream=stream))
        made.func.__name__, made.retry_policy, made.cache_policy = name, (), None
        return made
    raise DefinitionError(f"durable needs a compiled graph, an entrypoint or a task, got {type(graph).__name__}")


class _Options:
    """The options of a graph and of its subgraphs."""

    def __init__(
        self,
        node: CallOptions | None,
        nodes: Mapping[str, CallOptions | None],
        tool: CallOptions | None,
        tools: Mapping[str, CallOptions | None] | None,
        types: tuple[Any, ...],
        *,
        stream: bool,
    ) -> None:
        self.node, self.nodes, self.tool, self.tools = node, nodes, tool, tools
        self.types, self.stream = types, stream

    def recorder(self, graph: Pregel[Any, Any, Any, Any]) -> Recorder:
        """Return the recorder of a graph. A node without options has the retries and the timeout of its own."""
        agent = None if graph.name == _UNNAMED else graph.name
        given = {name: self.node or _options_of(node) for name, node in graph.nodes.items()}
        builder = getattr(graph, "builder", None)
        schemas = () if builder is None else (*builder.schemas, *builder.channels.values())
        annotated = [getattr(schema, "UpdateType", schema) for schema in schemas]
        keys = [name for name, channel in graph.channels.items() if getattr(channel, "operator", None) is add_messages]
        return Recorder(
            CallSteps(agent, tool=self.node, tools={**given, **self.nodes}),
            CallSteps(agent, tool=self.tool, tools=self.tools),
            StrictSerializer([*annotated, *self.types]),
            keys,
            stream=self.stream,
        )


class DurableGraph:
    """A graph whose nodes and tool calls are steps inside a workflow; other attributes are those of the graph."""

    def __init__(self, graph: Pregel[Any, Any, Any, Any], options: _Options, *, ask: bool) -> None:
        self.original = graph
        self._ask = ask
        self._recorder = options.recorder(graph)
        self._inner = _in_steps(graph, self._recorder, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        """Run the graph as its own `ainvoke` does; inside a workflow, wait for the answers to its interrupts."""
        if not in_workflow():
            return await self.original.ainvoke(input, config, **options)
        graph, config, place = self._of_run(config, is_new=_begins(input))
        input = self._with_ids(input, place)  # noqa: A001 - the name that LangGraph gives it
        before = PLACE.set(place)
        try:
            while True:
                result = await graph.ainvoke(input, config, **{"durability": "exit", **options})
                if not self._ask or not (asked := await self._asked(graph, config)):
                    return result
                input = await self._answers(asked)  # noqa: A001 - as above
        finally:
            PLACE.reset(before)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> AsyncIterator[Any]:  # noqa: A002
        """Stream as the graph's own `astream` does. A replay streams no tokens, and goes through the same updates."""
        if not in_workflow():
            async for chunk in self.original.astream(input, config, **options):
                yield chunk
            return
        graph, config, place = self._of_run(config, is_new=_begins(input))
        input = self._with_ids(input, place)  # noqa: A001 - the name that LangGraph gives it
        while True:
            async with aclosing(graph.astream(input, config, **{"durability": "exit", **options})) as chunks:
                while (chunk := await _at(place, chunks)) is not _END:
                    yield chunk
            if not self._ask or not (asked := await self._asked(graph, config)):
                return
            input = await self._answers(asked)  # noqa: A001 - as above

    def invoke(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Any:  # noqa: A002
        """Run the graph from plain code outside a workflow."""
        self._only_outside("invoke", "ainvoke")
        return self.original.invoke(input, config, **options)

    def stream(self, input: Any, config: RunnableConfig | None = None, **options: Any) -> Iterator[Any]:  # noqa: A002
        """Stream from plain code outside a workflow."""
        self._only_outside("stream", "astream")
        return self.original.stream(input, config, **options)

    async def aget_state(self, config: RunnableConfig | None = None, **options: Any) -> Any:
        """Return the state of the thread; inside a workflow, of this run's newest thread if none is named."""
        if not in_workflow():
            return await self.original.aget_state(config or {}, **options)
        graph, config, _ = self._of_run(config)
        return await graph.aget_state(config, **options)

    async def aupdate_state(self, config: RunnableConfig | None, values: Any, **options: Any) -> Any:
        """Update the state of the thread; inside a workflow, of this run's newest thread if none is named."""
        if not in_workflow():
            return await self.original.aupdate_state(config or {}, values, **options)
        graph, config, place = self._of_run(config)
        return await graph.aupdate_state(config, self._with_ids(values, place), **options)

    def _only_outside(self, name: str, instead: str) -> None:
        if in_workflow():
            raise DefinitionError(f"{name} blocks the loop of the workflow; use `await graph.{instead}(…)`")

    def _of_run(self, config: RunnableConfig | None, *, is_new: bool = False) -> tuple[Any, RunnableConfig, str]:
        """Return the graph with a saver of this life, the configuration with a thread, and the place of its nodes.

        A new call that names no thread has one of its own; what goes on without a name goes on in the newest one.
        """
        life = self._recorder.life()
        if life.graph is None:
            life.graph = self._inner.copy({"checkpointer": InMemorySaver(serde=self._recorder.serde)})
        config = RunnableConfig(**(config or {}))
        configurable = config.get("configurable", {})
        here = PLACE.get()
        if "thread_id" in configurable:
            thread = configurable["thread_id"]
            place = here if _is_own(thread) else f"{here}{thread}."
        else:
            scope = (CURRENT.get().scope, here)
            if is_new or scope not in life.threads:
                life.threads[scope] = _own_thread(here)
            thread, place = life.threads[scope]
        config["configurable"] = {**configurable, "thread_id": thread}
        return life.graph, config, place

    def _with_ids(self, value: Any, place: str) -> Any:
        return with_ids(value, self._recorder.keys, lambda: derived_ids(place))

    async def _asked(self, graph: Any, config: RunnableConfig) -> list[tuple[str, Interrupt[Any]]]:
        """Return the open interrupts, each with the name of the signal that answers it."""
        names = of_run().names
        tasks = (await graph.aget_state(config)).tasks
        return [(names.get(one.id, task.name), one) for task in tasks for one in task.interrupts]

    async def _answers(self, asked: list[tuple[str, Interrupt[Any]]]) -> Command[Any]:
        answers = await asyncio.gather(*(approval(name, one.value) for name, one in asked))
        by_id = {one.id: _decisions(answer, one.value) for (_, one), answer in zip(asked, answers, strict=True)}
        return Command(resume=by_id if len(by_id) > 1 else next(iter(by_id.values())))


def _begins(input: Any) -> bool:  # noqa: A002 - as LangGraph names it
    """Whether a call begins a conversation; None and a command go on with one."""
    return input is not None and not isinstance(input, Command)


def _own_thread(here: str) -> tuple[str, str]:
    """Return the thread of a call that names none, and the place of its nodes; the first call of a run has its id."""
    number = of_run().next("call", here)
    place = here if number == 1 else f"{here}call{number}."
    return "/".join(part for part in (run_id(), CURRENT.get().scope, place) if part), place


def _is_own(thread: Any) -> bool:
    """Whether a thread is the run's own; the configuration of a node names it, too."""
    return str(thread).split("/")[0] == run_id()


#: Marks the end of a stream.
_END = object()


async def _at(place: str, chunks: AsyncIterator[Any]) -> Any:
    """Return the next chunk of a stream, whose tasks begin at a place; the reader of the stream is not there."""
    before = PLACE.set(place)
    try:
        return await anext(chunks, _END)
    finally:
        PLACE.reset(before)


def _decisions(answer: Any, question: Any) -> Any:
    """Return the answer to an interrupt; True or False decides all tool calls that a middleware asks about."""
    if isinstance(answer, bool) and isinstance(question, dict) and "action_requests" in question:
        decision = {"type": "approve" if answer else "reject"}
        return {"decisions": [decision] * len(question["action_requests"])}
    return answer


def _in_steps(graph: Pregel[Any, Any, Any, Any], recorder: Recorder, options: _Options) -> Any:
    """Return a copy of a graph whose nodes are steps; LangGraph's retries, timeouts and caches are off in it."""
    nodes = {name: _node_in_steps(graph, name, recorder, options) for name in graph.nodes}
    off: dict[str, Any] = {"retry_policy": (), "cache": None, "cache_policy": None, "step_timeout": None}
    return graph.copy({"nodes": nodes, **off})


def _node_in_steps(graph: Pregel[Any, Any, Any, Any], name: str, recorder: Recorder, options: _Options) -> Any:
    node = graph.nodes[name]
    bound: Any = node.bound
    if name == "__start__" or not isinstance(graph, CompiledStateGraph):
        made = bound
    elif isinstance(bound, Pregel):
        inner = _in_steps(bound, options.recorder(bound), options)
        return node.copy({"bound": OpenNode(name, inner), "subgraphs": [inner], **_OFF})
    elif isinstance(bound, ToolNode):
        made = step_tools(bound, recorder)
    elif recorder.nodes.records_tool(name):
        made = StepNode(name, bound, recorder)
    else:
        made = OpenNode(name, bound)
    return node.copy({"bound": made, **_OFF})


#: Options of a node that are off, because Keepstep's replace them.
_OFF: dict[str, Any] = {"retry_policy": None, "cache_policy": None, "timeout": None}


def _options_of(node: Any) -> CallOptions:
    """Return the retries and the timeout of a node or task as those of a step."""
    made = CallOptions()
    policies = node.retry_policy
    policy = (
        policies[0]
        if isinstance(policies, Sequence) and policies and not isinstance(policies, RetryPolicy)
        else policies
    )
    if isinstance(policy, RetryPolicy):
        on = policy.retry_on
        kinds = on if isinstance(on, type) else tuple(on) if isinstance(on, Sequence) else ()
        made["retry"] = Retry(
            policy.max_attempts,
            policy.initial_interval,
            policy.backoff_factor,
            policy.max_interval,
            jitter=0.5 if policy.jitter else 0.0,
            on=kinds,
        )
    limit = getattr(getattr(node, "timeout", None), "run_timeout", None)
    if limit is not None:
        made["timeout"] = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    return made


def _names(graph: Pregel[Any, Any, Any, Any]) -> str:
    return ", ".join(name for name in graph.nodes if not name.startswith("__"))
