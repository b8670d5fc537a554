"""Model and tool calls of an agent framework as steps, which are found by the call and not by the framework's tasks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypedDict
from weakref import WeakKeyDictionary

from ..errors import DefinitionError
from ..kernel.budget import spend
from ..kernel.composing import branch
from ..kernel.context import in_step, in_workflow
from ..kernel.naming import acting
from ..kernel.publish import publish
from ..kernel.waits import wait_for
from ..model.ids import MAX_ID
from ..policies import Retry, Service, Timeout
from ..policies.classify import Classify
from ..ports import CURRENT
from ..workflows.definition import Expected, InDoubt, Step

#: The name of the step that a model call becomes.
_MODEL = "model"

log = logging.getLogger("keepstep")

#: Steps of which the log has said that they call an agent in their bodies.
_CALLS_AGENT: set[str] = set()

#: Characters of the digest in the key of a model call: 64 bits tell the calls of one run apart.
_DIGEST_CHARACTERS = 16


class CallOptions(TypedDict, total=False):
    """Options of the step that a call becomes; they mean the same as those of `ks.step`.

    Only a tool has `verify`, which is called with one value: the dictionary of the tool's arguments.
    """

    retry: Retry
    timeout: Timeout | float
    service: Service | str
    cost: Expected
    at_most_once: bool
    in_doubt: InDoubt
    verify: Callable[[Any], Any]
    classify: Classify


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded result of a streamed call: the last item of `CallSteps.stream`, live as on replay."""

    value: Any


async def _perform(of: Any, body: Callable[[], Awaitable[Any]]) -> Any:  # noqa: ARG001 - the input of the step
    """Run the body of a call; only `of` is compared on replay."""
    return await body()


def _chat(body: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    """Return a body that notes that it calls a model."""

    async def noted() -> Any:
        CURRENT.get().call_is("chat")
        return await body()

    return noted


def _recordable(text: str) -> str:
    """Return a text that a model made up in a form that can be stored: bounded, and without broken characters."""
    return text[:MAX_ID].encode(errors="backslashreplace").decode()


def _tool_call(name: str, call_id: str | None, body: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
    """Return a body that notes which tool it calls."""

    async def noted() -> Any:
        named = {"tool": name} if call_id is None else {"tool": name, "id": call_id}
        CURRENT.get().call_is("execute_tool", **{key: _recordable(text) for key, text in named.items()})
        return await body()

    return noted


class CallSteps:
    """The steps that the model and tool calls of an agent become inside a workflow.

    Outside a workflow's code, a call only runs its body. `tools` gives options for tools by name. A tool with None is
    not a step: its body runs in the workflow's code, again on each replay, in a named branch for what it calls.
    """

    def __init__(
        self,
        agent: str | None = None,
        *,
        model: CallOptions | None = None,
        tool: CallOptions | None = None,
        tools: Mapping[str, CallOptions | None] | None = None,
    ) -> None:
        if "verify" in (model or {}):
            raise DefinitionError("model= has verify, which only tools have; give it in tools=, by the tool's name")
        self.agent = agent
        self._model = _step(_MODEL, model or {}, "model=")
        self._tool = _step("tool", tool or {}, "tool=")
        self._tools: dict[str, Step[..., Any] | None] = {
            name: None if options is None else _step("tool", options, f"tools[{name!r}]")
            for name, options in (tools or {}).items()
        }

    def records_tool(self, name: str) -> bool:
        """Whether the calls of a tool are steps."""
        return self._tools.get(name, self._tool) is not None

    async def model(self, content: Any, body: Callable[[], Awaitable[Any]], *, agent: str | None = None) -> Any:
        """Call a model, and return what `body` returned, as it is read from the record.

        `content` identifies the call: a plain projection of the messages (role, text, call ids, arguments) that the
        adapter makes, so that a later version of the framework makes the same one. Equal calls are counted.
        """
        if not in_workflow():
            warn_in_step()
            return await body()
        acts = agent or self.agent
        with _as_agent(acts):
            call = self._model.options(key=_counted(_MODEL, _digest([acts, content])))(acts, _chat(body))
        return await call

    def stream(
        self,
        content: Any,
        body: Callable[[Callable[[Any], None]], Awaitable[Any]],
        *,
        agent: str | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Call a model that streams. `body(send)` sends items and returns the result; the last item is `Recorded`.

        A replay gives only the `Recorded` result, and so does a call with a retry: another attempt would send its items
        again. If the reader leaves early, the call is cancelled, and its body has ended before the error goes on.
        """
        return _relay(lambda sending: self.model(content, sending, agent=agent), body, self._model)

    def stream_tool(
        self,
        name: str,
        call_id: str | None,
        body: Callable[[Callable[[Any], None]], Awaitable[Any]],
        *,
        arguments: Any = None,
        agent: str | None = None,
        record: bool = True,
    ) -> AsyncGenerator[Any, None]:
        """Call a tool that streams, as `stream` calls a model."""
        step = self._tools.get(name, self._tool) if record else None

        def start(sending: Callable[[], Awaitable[Any]]) -> Coroutine[Any, Any, Any]:
            return self.tool(name, call_id, sending, arguments=arguments, agent=agent, record=record)

        return _relay(start, body, step)

    async def tool(
        self,
        name: str,
        call_id: str | None,
        body: Callable[[], Awaitable[Any]],
        *,
        arguments: Any = None,
        given: Any = None,
        agent: str | None = None,
        record: bool = True,
    ) -> Any:
        """Call a tool, and return what `body` returned, as it is read from the record.

        The model's `call_id` identifies the call; without one, its arguments do. A replay compares the arguments. With
        `record=False`, for a tool that is a durable agent, the call is not a step, as with None in `tools`. `given` is
        the value for the tool's `verify`, if it is not `arguments`.
        """
        step = self._tools.get(name, self._tool) if record else None
        if not in_workflow():
            return await body()
        if step is None:
            with call_branch(name, call_id or _digest(arguments)):
                return await body()
        key = _counted(step_name(name), call_id or _digest(arguments))
        made = step.options(name=step_name(name), key=key)
        if step.verify is not None:
            made.verify = _about(step.verify, arguments if given is None else given)
        with _as_agent(agent or self.agent):
            call = made(arguments, _tool_call(name, call_id, body))
        return await call


def _about(verify: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    """Return a `verify` of the step that calls one with the arguments of the tool."""
    return lambda of, body: verify(arguments)  # noqa: ARG005 - the parameters of the step


def warn_in_step() -> None:
    """Log once for a step that it calls a durable agent in its body, where the agent's calls are not steps."""
    if not in_step():
        return
    outer = CURRENT.get().call.step
    # The body of a model call may call other models: that is one call.
    if outer.name not in _CALLS_AGENT and not (outer.name == _MODEL and outer.fn is _perform):
        _CALLS_AGENT.add(outer.name)
        log.warning(
            "step %r calls a durable agent in its body, where the calls of the agent are not steps: if the step is "
            "cut off, all of them are made again. Call the agent in the workflow; if the step is a tool of another "
            "agent, make it no step with tools={%r: None}",
            *(outer.name, outer.name),
        )


def _as_agent(agent: str | None) -> AbstractContextManager[object]:
    return nullcontext() if agent is None else acting(step_name(agent))


async def _relay(
    start: Callable[[Callable[[], Awaitable[Any]]], Coroutine[Any, Any, Any]],
    body: Callable[[Callable[[Any], None]], Awaitable[Any]],
    step: Step[..., Any] | None,
) -> AsyncGenerator[Any, None]:
    """Give the items that the body of a call sends, then its result."""
    may_repeat = in_workflow() and step is not None and step.retry != Retry.none()
    items: asyncio.Queue[Any] = asyncio.Queue()
    ended = asyncio.Event()
    ended.set()

    async def sending() -> Any:
        ended.clear()
        try:
            return await body(_drop if may_repeat else items.put_nowait)
        finally:
            ended.set()

    task = asyncio.ensure_future(start(sending))
    task.add_done_callback(lambda _: items.put_nowait(_END))
    try:
        while (item := await items.get()) is not _END:
            yield item
        yield Recorded(await task)
    finally:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await ended.wait()


def _drop(item: Any) -> None:
    """Send an item to nobody."""


#: Marks the end of a stream.
_END = object()

#: How often each key was used: by run, then by its named branch, name and key. A recovered run counts from the start.
_USED: WeakKeyDictionary[Any, dict[tuple[str, str, str], int]] = WeakKeyDictionary()


def _counted(name: str, key: str) -> str:
    """Return the key with the number of its use if it was used before: models repeat call ids, and agents prompts."""
    if not key.isprintable() or len(key.encode()) > MAX_ID // 2 or "~" in key:  # a key with ~ might be a counted one
        key = _digest(key)
    scope = CURRENT.get()
    if _running_loop() is not scope.run.loop:
        raise DefinitionError(
            "an agent is called outside the event loop of its workflow; await its asynchronous method in the workflow"
        )
    used = _USED.setdefault(scope.run, {})
    place = (scope.scope, name, key)
    used[place] = count = used.get(place, 0) + 1
    return key if count == 1 else f"{key}~{count}"


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_DIGEST_CHARACTERS]


def step_name(name: str) -> str:
    """Return a tool's or agent's name as the name of a step: letters, digits, spaces and _ . : - stay as they are."""
    plain = re.sub(r"[^A-Za-z0-9 _.:-]", "_", name)[:100]
    return plain if plain[:1].isalpha() else f"n{plain}"


def _step(name: str, options: CallOptions, what: str) -> Step[..., Any]:
    unknown = set(options) - set(CallOptions.__annotations__)
    if unknown:
        known = ", ".join(sorted(CallOptions.__annotations__))
        raise DefinitionError(f"{what} has unknown options {sorted(unknown)}; the options are {known}")
    return Step(_perform, name=name, ignore=("body",), **options)


@contextmanager
def call_branch(name: str, call_id: str | None) -> Iterator[None]:
    """Give the calls of an agent that is called as a tool keys of their own: its model may use the same call ids."""
    if not in_workflow():
        yield
        return
    with branch(_counted("agent", f"{step_name(name)}:{call_id or ''}")):
        yield


class AskedIds:
    """Ids of the calls that a model has asked for, for frameworks that give a tool nothing but its arguments."""

    def __init__(self) -> None:
        self._asked: WeakKeyDictionary[Any, dict[str, list[str]]] = WeakKeyDictionary()

    def ask(self, tool: str, arguments: Any, call_id: str) -> None:
        """Keep the id of a call until the call begins."""
        if in_workflow():
            self._asked.setdefault(CURRENT.get().run, {}).setdefault(_digest([tool, arguments]), []).append(call_id)

    def begin(self, tool: str, arguments: Any) -> str | None:
        """Return the id of the call that begins with these arguments; None if the model has asked for none."""
        if not in_workflow():
            return None
        asked = self._asked.get(CURRENT.get().run, {}).get(_digest([tool, arguments]))
        return asked.pop(0) if asked else None


def used(
    model: str | None,
    *,
    tokens: int | None = None,
    cost: float = 0.0,
    input_tokens: int | None = None,
    output_tokens: int | None = None,
) -> None:
    """Report what a call of a model has used; call it in the body."""
    spend(cost=cost, tokens=tokens, model=model, input_tokens=input_tokens or 0, output_tokens=output_tokens or 0)


async def approval(
    call_id: str,
    question: Any,
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - durable
    kind: str = "approve",
) -> Any:
    """Wait until a person answers a question about a call, and return the payload of the signal.

    The signal is named `approve:CALL_ID`, or after another `kind`; the question is published under the same name.
    Neither depends on the framework's tasks.
    """
    plain = step_name(call_id)
    name = f"{kind}:{plain if len(call_id) <= len(plain) else f'{plain[:80]}-{_digest(call_id)}'}"
    with branch(_counted(kind, name)):
        publish(name, question)
        return await wait_for(name, timeout)
