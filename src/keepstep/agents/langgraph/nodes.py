"""Nodes, tools and tasks of LangGraph as steps: each is recorded once, and a replay gives its result again."""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_messages
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import merge_configs, var_child_runnable_config
from langgraph.errors import GraphInterrupt, ParentCommand
from langgraph.prebuilt.tool_node import msg_content_output
from langgraph.types import Command, Interrupt, Send

from ...errors import DefinitionError
from ...kernel.context import in_workflow, run_id
from ...kernel.publish import emit
from ...ports import CURRENT
from ..calls import CallSteps, call_branch, used

if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult
    from langgraph.prebuilt import ToolNode

    from .serde import StrictSerializer

#: Keys of LangGraph in the configuration of a task; it has no public names for them.
_SEND, _SCRATCHPAD, _RESUME = "__pregel_send", "__pregel_scratchpad", "__resume__"

#: Where the code is in the graphs around it: the place of each node whose body runs a graph, or the name of a thread.
PLACE: ContextVar[str] = ContextVar("keepstep_langgraph_place", default="")


class Life:
    """The memory of a graph while one worker carries out a run; a replay begins with a new one."""

    def __init__(self) -> None:
        self.graph: Any = None
        #: The newest thread of calls that name none, by branch and place: a resume goes on in it.
        self.threads: dict[tuple[str, str], tuple[str, str]] = {}
        #: Results of tool calls by place and call id: a node that goes on after an interrupt does not repeat them.
        self.results: dict[tuple[str, str], Any] = {}


class OfRun:
    """The memory that all graphs of a run share while one worker has the run; a replay begins with a new one."""

    def __init__(self) -> None:
        #: Names of the signals that answer interrupts, by the interrupt's id; one of an inner graph may be in it.
        self.names: dict[str, str] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def next(self, what: str, place: str) -> int:
        """Count what happens at a place: apart for each branch, so that a replay counts the same."""
        counted = (what, CURRENT.get().scope, place)
        self._counts[counted] += 1
        return self._counts[counted]


_RUNS: WeakKeyDictionary[Any, OfRun] = WeakKeyDictionary()


def of_run() -> OfRun:
    """Return what the graphs of the current run share."""
    return _RUNS.setdefault(CURRENT.get().run, OfRun())


class Recorder:
    """Makes steps of the nodes of a graph, with their options, the serializer, and a life for each run."""

    def __init__(
        self, nodes: CallSteps, tools: CallSteps, serde: StrictSerializer, keys: Collection[str], *, stream: bool
    ) -> None:
        """`keys` are those of the state that hold messages. With `stream`, every model call streams its tokens."""
        self.nodes, self.tools, self.serde, self.keys, self.stream = nodes, tools, serde, keys, stream
        self._lives: WeakKeyDictionary[Any, Life] = WeakKeyDictionary()

    def life(self) -> Life:
        run = CURRENT.get().run
        if run not in self._lives:
            self._lives[run] = Life()
        return self._lives[run]

    async def recorded(
        self,
        call: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]],
        body: Callable[[RunnableConfig], Awaitable[Any]],
        config: RunnableConfig,
        name: Callable[[Any], str],
        given: Callable[[Any], Any],
    ) -> Any:
        """Run a body in the step that `call` makes, and return its result as it is read from the record.

        An interrupt and a command to the parent graph are recorded as values, and raised outside the step. `name` gives
        that of the signal that answers an interrupt, by its value. `given` makes a result of the plain value with which
        a person has settled a step in doubt.
        """
        is_live = False
        scratchpad = config.get("configurable", {}).get(_SCRATCHPAD)

        async def step() -> dict[str, Any]:
            nonlocal is_live
            is_live = True
            watch = _StreamingWatch() if self.stream else _Watch()
            try:
                value = await _watched(body, merge_configs(config, {"callbacks": [watch]}))
                kind, value = "value", with_ids(value, self.keys, _random_ids)
            except GraphInterrupt as error:
                kind, value = "interrupt", [one.value for one in error.args[0]]
            except ParentCommand as error:
                kind, value = "parent", with_ids(error.args[0], self.keys, _random_ids)
            return {"kind": kind, "value": self.serde.plain(value), "answers": len(getattr(scratchpad, "resume", ()))}

        result = await call(step)
        if not isinstance(result, dict) or set(result) != {"kind", "value", "answers"}:
            return given(result)
        answers = result["answers"]
        if answers and not is_live:
            _take_answers(config, answers)
        value = self.serde.revived(result["value"])
        if result["kind"] == "interrupt":
            raise GraphInterrupt([self._interrupt(one, config, answers, name(one)) for one in value])
        if result["kind"] == "parent":
            raise ParentCommand(value)
        return value

    def _interrupt(self, value: Any, config: RunnableConfig, answers: int, name: str) -> Interrupt[Any]:
        """Return an interrupt with the id that LangGraph gives to the task of this life."""
        space = config["configurable"]["checkpoint_ns"]
        made: Interrupt[Any] = Interrupt.from_ns(value=value, ns=f"{space}|{answers}" if answers else space)
        of_run().names[made.id] = name
        return made


async def _watched(body: Callable[[RunnableConfig], Awaitable[Any]], config: RunnableConfig) -> Any:
    """Run a body with a configuration, which also holds for models that are called without one."""
    before = var_child_runnable_config.set(config)
    try:
        return await body(config)
    finally:
        var_child_runnable_config.reset(before)


def _take_answers(config: RunnableConfig, answers: int) -> None:
    """Do what `interrupt` does in a body that ran in an earlier life: take its answers, and save them for its task."""
    scratchpad = config["configurable"][_SCRATCHPAD]
    while len(scratchpad.resume) < answers:
        scratchpad.resume.append(scratchpad.get_null_resume(True))
    config["configurable"][_SEND]([(_RESUME, scratchpad.resume[:answers])])


class StepNode(Runnable[Any, Any]):
    """A node as a step. Its key is the node's place in the graph's history, without ids that LangGraph draws."""

    def __init__(self, node: str, inner: Runnable[Any, Any], recorder: Recorder) -> None:
        self.node, self.inner, self.recorder = node, inner, recorder
        self.name = node

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        return self.inner.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        if config is None or not in_workflow():
            return await self.inner.ainvoke(input, config, **kwargs)
        place, name = _place(self.node, config)
        return await self.recorder.recorded(
            lambda body: self.recorder.nodes.tool(self.node, place, body),
            lambda inner: self.inner.ainvoke(input, inner, **kwargs),
            config,
            lambda question: _calls_asked_about(question, input) or name,
            lambda value: self._given(value, place),
        )

    def _given(self, value: Any, place: str) -> Any:
        """Return an update that a person has given as plain data."""
        if not isinstance(value, dict):
            raise DefinitionError(
                f"the result that was given for node {self.node!r} is of type {type(value).__name__}; "
                'give the node\'s update of the state: a mapping such as {"ok": true}'
            )
        return with_ids(value, self.recorder.keys, lambda: derived_ids(f"{place} {self.node}"))


def _calls_asked_about(question: Any, state: Any) -> str:
    """Return the ids of the tool calls that a middleware asks about, with colons between them; "" if it asks for none.

    The question has only names and arguments of the calls; they are in the order of the model's message.
    """
    asked = list(question.get("action_requests", ())) if isinstance(question, dict) else []
    messages = (state.get("messages") if isinstance(state, dict) else getattr(state, "messages", None)) or ()
    calls = next((one.tool_calls for one in reversed(messages) if isinstance(one, AIMessage)), ())
    ids = []
    for call in calls:
        if asked and (asked[0].get("name"), asked[0].get("args")) == (call["name"], call["args"]):
            asked.pop(0)
            ids.append(call["id"] or "")
    return "" if asked or not all(ids) else ":".join(ids)


class OpenNode(Runnable[Any, Any]):
    """A node that is not a step: a graph, whose nodes are steps, or a body that calls models, tools and tasks."""

    def __init__(self, node: str, inner: Runnable[Any, Any]) -> None:
        self.node, self.inner = node, inner
        self.name = node

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        return self.inner.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        if config is None or not in_workflow():
            return await self.inner.ainvoke(input, config, **kwargs)
        before = PLACE.set(f"{_place(self.node, config)[0]}.{self.node}.")
        try:
            return await self.inner.ainvoke(input, config, **kwargs)
        finally:
            PLACE.reset(before)


def _place(node: str, config: RunnableConfig) -> tuple[str, str]:
    """Return the place of a node's task, and the name of the signal that answers its interrupt."""
    metadata = config["metadata"]
    path = metadata.get("langgraph_path", ())
    sent = f".{path[1]}" if len(path) > 1 and isinstance(path[1], int) else ""
    return f"{PLACE.get()}{metadata['langgraph_step']}{sent}", node + sent


def step_tools(node: ToolNode, recorder: Recorder) -> ToolNode:
    """Return a copy of a tool node in which each tool call is a step, keyed by the id of the call."""
    made = copy.copy(node)
    outer, sync = node._awrap_tool_call, node._wrap_tool_call  # noqa: SLF001 - ToolNode has no way to read them

    async def call_tool(request: Any, execute: Callable[[Any], Awaitable[Any]]) -> Any:
        call, config = request.tool_call, request.runtime.config.copy()

        async def body(inner: RunnableConfig) -> Any:
            request.runtime.config["callbacks"] = inner.get("callbacks")
            if outer is not None:
                return await outer(request, execute)
            if sync is not None:
                return await asyncio.to_thread(sync, request, lambda one: asyncio.run(_once(execute(one))))
            return await execute(request)

        if not in_workflow():
            return await body(config)
        if not recorder.tools.records_tool(call["name"]):
            with call_branch(call["name"], call["id"]):
                return await body(config)
        results = recorder.life().results
        place = (_place("", config)[0], call["id"] or "")
        if place not in results:
            value = await recorder.recorded(
                lambda step: recorder.tools.tool(call["name"], call["id"], step, arguments=call["args"]),
                body,
                config,
                lambda _: call["id"] or call["name"],
                lambda given: _tool_message(given, call),
            )
            if not place[1]:
                return value
            results[place] = value
        return results[place]

    made._awrap_tool_call = call_tool  # noqa: SLF001 - as above
    made.func, made.afunc = made._func, made._afunc  # noqa: SLF001 - they are methods of the original until now
    return made


def _tool_message(content: Any, call: Any) -> ToolMessage:
    """Return the message of a tool call whose result a person has given."""
    fresh = next(derived_ids(f"{call['name']} {call['id']}"))
    text: Any = msg_content_output(content)
    return ToolMessage(text, name=call["name"], tool_call_id=call["id"], id=fresh)


async def _once(result: Awaitable[Any]) -> Any:
    return await result


def step_task(function: Callable[..., Any], name: str, recorder: Recorder) -> Callable[..., Any]:
    """Return the function of a task as a step, keyed by its arguments."""

    async def call_task(*args: Any, **kwargs: Any) -> Any:
        async def body(_: RunnableConfig) -> Any:
            if asyncio.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            return await asyncio.to_thread(function, *args, **kwargs)

        if not in_workflow():
            return await body({})
        from langgraph.config import get_config  # noqa: PLC0415 - it works only inside a graph

        arguments = recorder.serde.plain([args, kwargs])
        call = lambda step: recorder.nodes.tool(name, None, step, arguments=arguments)  # noqa: E731 - it is passed on
        return await recorder.recorded(call, body, get_config(), lambda _: name, lambda given: given)

    return call_task


# -- messages ----------------------------------------------------------------------------------------------------------


def with_ids(value: Any, keys: Collection[str], ids: Callable[[], Iterator[str]]) -> Any:
    """Give messages without an id one: those that LangGraph draws differ in every replay."""
    fresh = ids()
    for message in _messages(value := _converted(value, keys)):
        if message.id is None:
            message.id = next(fresh)
    return value


def _converted(value: Any, keys: Collection[str]) -> Any:
    """Return an update with messages in place of the texts, pairs and dictionaries that stand for them."""
    if isinstance(value, dict):
        return {key: _as_messages(of) if key in keys else of for key, of in value.items()}
    if isinstance(value, Command) and isinstance(value.update, dict):
        value.update.update(_converted(value.update, keys))
    if isinstance(value, list) and any(isinstance(item, Command) for item in value):
        return [_converted(item, keys) for item in value]
    return value


def _as_messages(value: Any) -> Any:
    if isinstance(value, str | tuple | dict):
        value = [value]
    return convert_to_messages(value) if isinstance(value, list) else value


def _messages(value: Any) -> Iterator[BaseMessage]:
    if isinstance(value, BaseMessage):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _messages(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _messages(item)
    elif isinstance(value, Command):
        yield from _messages(value.update)
        yield from _messages(value.goto)
    elif isinstance(value, Send):
        yield from _messages(value.arg)


def derived_ids(place: str) -> Iterator[str]:
    """Yield ids that are the same in every replay."""
    run, counts = run_id(), of_run()
    while True:
        number = counts.next("message", place)
        yield str(uuid.uuid5(uuid.NAMESPACE_OID, f"{run} {CURRENT.get().scope} {place} {number}"))


def _random_ids() -> Iterator[str]:
    while True:
        yield str(uuid.uuid4())


# -- models in a body --------------------------------------------------------------------------------------------------


class _Watch(BaseCallbackHandler):
    """Emit the tokens that models stream in a body, and report what they use."""

    run_inline = True
    raise_error = True

    def on_llm_new_token(self, token: Any, **_: Any) -> None:
        if token:
            emit(token)

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        for made in (one for line in response.generations for one in line):
            message = getattr(made, "message", None)
            if usage := getattr(message, "usage_metadata", None):
                model = message.response_metadata.get("model_name") if message else None
                used(
                    model,
                    tokens=usage["total_tokens"],
                    input_tokens=usage.get("input_tokens"),
                    output_tokens=usage.get("output_tokens"),
                )


class _StreamingWatch(_Watch):
    """Make models stream, too: LangChain asks a handler for these two methods."""

    def tap_output_aiter(self, _run_id: uuid.UUID, output: AsyncIterator[Any]) -> AsyncIterator[Any]:
        return output

    def tap_output_iter(self, _run_id: uuid.UUID, output: Iterator[Any]) -> Iterator[Any]:
        return output
