"""MCP: calls of a server's tools as steps, over a session that no run owns."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from ..errors import DefinitionError, Permanent, StepInDoubt
from ..kernel.context import idempotency_key, in_workflow
from ..kernel.publish import progress
from ..kernel.waits import sleep
from ..policies.classify import ErrorClass, checked_rules
from .calls import CallOptions, CallSteps, approval, step_name

try:
    import mcp_types as types
    from mcp import MCPError, StdioServerParameters, stdio_client
    from mcp.client import Client, Transport
    from mcp.client.streamable_http import streamable_http_client
    from mcp.server.lowlevel import Server as LowLevelServer
    from mcp.server.mcpserver import MCPServer
    from pydantic import TypeAdapter, ValidationError
except ImportError as error:
    raise ImportError("keepstep.agents.mcp needs the MCP library 2.0 or later: pip install 'keepstep[mcp]'") from error

__all__ = ["Connection"]

log = logging.getLogger("keepstep")

T = TypeVar("T")

#: Where a server of tools is: at a URL, behind a command or a function that makes a transport, or in this process.
Target = str | StdioServerParameters | Callable[[], Transport] | MCPServer | LowLevelServer[Any]

#: Key under which a call carries its idempotency key, in the metadata of the request.
IDEMPOTENCY_KEY = "keepstep/idempotency-key"

#: Maximum rounds of questions in one call: a server that asks on and on has an error. MCP's own clients have the same.
MAX_QUESTIONS = 10

#: Longest wait in seconds before a server that asked for more time is called again.
_LONGEST_PAUSE_SECONDS = 30.0

_RESULT: TypeAdapter[types.CallToolResult | types.InputRequiredResult] = TypeAdapter(
    types.CallToolResult | types.InputRequiredResult
)
_TOOLS: TypeAdapter[list[types.Tool]] = TypeAdapter(list[types.Tool])

#: Classes of the protocol's errors by their codes, for retries by class.
_CLASSES = {
    types.CONNECTION_CLOSED: ErrorClass.NETWORK,
    types.REQUEST_TIMEOUT: ErrorClass.TIMEOUT,
    types.INTERNAL_ERROR: ErrorClass.INTERNAL,
    types.INVALID_REQUEST: ErrorClass.VALIDATION,
    types.INVALID_PARAMS: ErrorClass.VALIDATION,
    types.METHOD_NOT_FOUND: ErrorClass.VALIDATION,
}

#: Codes of errors after which a request that was sent may have been performed.
_NO_ANSWER = frozenset({types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT})

#: Messages of a server, or of the client for it, that does not know the session: it has restarted.
_NO_SESSION = frozenset({"Session terminated", "Session not found"})


class _Lost(ConnectionError):
    """The session ended during a request, which may have been performed."""


class Connection:
    """The tools of an MCP server. Inside a workflow each call of a tool is a step.

    The first call that really runs opens a session. A task outside every run owns it, so that runs come and go while
    it stays. If it ends, the next call opens another. A replay opens none. `name` is part of the steps' names:
    `NAME.TOOL`. Further options go to `mcp.Client`.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        *,
        tool: CallOptions | None = None,
        tools: Mapping[str, CallOptions | None] | None = None,
        **client: Any,
    ) -> None:
        if not isinstance(target, str | StdioServerParameters | MCPServer | LowLevelServer) and not callable(target):
            raise DefinitionError(
                f"the target of the MCP connection {name!r} must be a URL, StdioServerParameters, a server of this "
                f"process or a function that returns a transport, not {type(target).__name__}"
            )
        self.name = name
        self._target = target
        self._client = {"elicitation_callback": _cancel, **client}
        self._options, self._by_tool = tool or CallOptions(), dict(tools or {})
        self._calls = CallSteps(
            tool=_classified(tool or {}),
            tools={
                f"{name}.{one}": None if options is None else _classified(options)
                for one, options in (tools or {}).items()
            },
        )
        #: A program may run several loops, one after the other or in threads: each needs a session of its own.
        self._sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, _Session] = WeakKeyDictionary()

    async def list_tools(self) -> list[types.Tool]:
        """Return the server's tools. Inside a workflow they are recorded: a replay sees the tools that the run saw."""

        async def body() -> Any:
            return _TOOLS.dump_python(await self._request(_all_tools), mode="json", by_alias=True, exclude_none=True)

        return _TOOLS.validate_python(await self._calls.tool(f"{self.name}.list_tools", None, body))

    async def call_tool(
        self,
        tool: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        call_id: str | None = None,
    ) -> types.CallToolResult:
        """Call a tool and return its result, `is_error` included, as it is read from the record.

        `call_id` is the model's id of the call; without one, the arguments identify it. If the server asks for input,
        the run waits for a signal, `input:CALL_ID:KEY`, and the answer is sent with a second step.
        """
        given = dict(arguments or {})
        request = _Request()
        questions = pauses = 0
        while True:
            found = await self._round(tool, given, call_id, request)
            if isinstance(found, types.CallToolResult):
                return found
            if not in_workflow():
                raise Permanent(
                    f"the tool {tool!r} of the MCP server {self.name!r} asks for input, which only a workflow can wait "
                    f"for; call it in the code of a workflow"
                )
            answers = None
            if found.input_requests:
                questions += 1
                if questions > MAX_QUESTIONS:
                    raise Permanent(f"the tool {tool!r} asked for input more than {MAX_QUESTIONS} times in one call")
                answers = await self._answers(tool, call_id, found.input_requests)
            else:
                pauses += 1
                await sleep(min(0.05 * 2.0 ** min(pauses, 20), _LONGEST_PAUSE_SECONDS))
            request = _Request(request.number + 1, found, answers)

    async def close(self) -> None:
        """Close the session of this loop; the next call opens another."""
        session = self._sessions.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _round(
        self, tool: str, arguments: dict[str, Any], call_id: str | None, request: _Request
    ) -> types.CallToolResult | types.InputRequiredResult:
        """Make one request of a call."""
        number, asked = request.number, request.asked
        state = None if asked is None else asked.request_state

        async def body() -> Any:
            meta: Any = {IDEMPOTENCY_KEY: idempotency_key()}
            report = _progress_of_step()

            async def send(answers: dict[str, Any] | None, state: str | None) -> Any:
                async def call(client: Client) -> Any:
                    return await client.session.call_tool(
                        tool,
                        arguments,
                        progress_callback=report,
                        input_responses=_responses(answers),
                        request_state=state,
                        meta=meta,
                        allow_input_required=True,
                    )

                try:
                    return await self._request(call)
                except (_Lost, MCPError) as error:
                    if self._is_once(tool) and (isinstance(error, _Lost) or error.code in _NO_ANSWER):
                        raise StepInDoubt(f"the call of {tool!r} was sent, and no answer came: {error}") from error
                    raise

            try:
                found = await send(request.answers, state)
            except MCPError as error:
                if asked is None or not _is_lost_state(error):
                    raise
                found = await send(None, None)  # the server has forgotten what it asked: let it ask again
                if isinstance(found, types.InputRequiredResult) and found.input_requests == asked.input_requests:
                    found = await send(request.answers, found.request_state)
            return _RESULT.dump_python(found, mode="json", by_alias=True, exclude_none=True)

        identity = f"{call_id}.{number}" if call_id and number else call_id
        of: Any = arguments if asked is None else [arguments, number, request.answers, state]
        name = f"{self.name}.{tool}"
        return _result(await self._calls.tool(name, identity, body, arguments=of, given=arguments))

    async def _answers(self, tool: str, call_id: str | None, requests: types.InputRequests) -> dict[str, Any]:
        """Ask a person for everything that a server asks for."""
        answers = {}
        for key, request in requests.items():
            if not isinstance(request, types.ElicitRequest):
                raise Permanent(
                    f"the tool {tool!r} of the MCP server {self.name!r} asks for {request.method}, which a workflow "
                    f"does not answer; give the connection no callback for it"
                )
            question = request.params.model_dump(mode="json", by_alias=True, exclude_none=True)
            given = await approval(f"{step_name(call_id or tool)}:{key}", question, kind="input")
            answers[key] = _answer(given)
        return answers

    async def _request(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        """Send a request over the session of this loop, which is opened if there is none that lives."""
        try:
            return await self._session().request(ask)
        except MCPError as error:
            if error.code != types.INVALID_REQUEST or error.message not in _NO_SESSION:
                raise
            await self.close()  # an HTTP server has restarted and refuses the session: it did not see the request
            return await self._session().request(ask)

    def _is_once(self, tool: str) -> bool:
        options = self._by_tool.get(tool, self._options)
        return options is not None and options.get("at_most_once", False)

    def _session(self) -> _Session:
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None or session.has_ended:
            session = self._sessions[loop] = _Session(self.name, self._new_client)
        return session

    def _new_client(self, ended: Callable[[], None]) -> Client:
        target = self._target
        if isinstance(target, MCPServer | LowLevelServer):
            return Client(target, **self._client)
        if isinstance(target, str):
            transport: Any = streamable_http_client(target)
        elif isinstance(target, StdioServerParameters):
            transport = stdio_client(target)
        else:
            transport = target()
        return Client(_watched(transport, ended), **self._client)


@dataclass(frozen=True, slots=True)
class _Request:
    """The number of a request within a call, and what the server asked before, with the answers of a person."""

    number: int = 0
    asked: types.InputRequiredResult | None = None
    answers: dict[str, Any] | None = None


class _Session:
    """A client session that one task enters and leaves, as its scopes demand, outside the context of every run."""

    def __init__(self, name: str, make: Callable[[Callable[[], None]], Client]) -> None:
        self._name, self._make = name, make
        self._ready: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._owner = Context().run(asyncio.ensure_future, self._own())
        self._owner.add_done_callback(lambda owner: owner.cancelled() or owner.exception())

    @property
    def has_ended(self) -> bool:
        return self._leave.is_set() or self._owner.done()

    async def request(self, ask: Callable[[Client], Awaitable[T]]) -> T:
        either: list[asyncio.Future[Any]] = [self._ready, self._owner]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            raise self._reason() or ConnectionError(f"the session of the MCP server {self._name!r} was closed")
        client = self._ready.result()
        task = Context().run(asyncio.ensure_future, ask(client))
        try:
            await asyncio.wait([task, self._owner], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await asyncio.wait({task}, timeout=1.0)  # the end of a session tells its requests
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled() or (self._owner.done() and task.exception() is not None):
            raise _Lost(f"the session of the MCP server {self._name!r} ended during a request") from self._reason()
        return task.result()

    def _reason(self) -> BaseException | None:
        """Return the error that ended the session, out of the groups that the client's task groups put around it."""
        error = None if not self._owner.done() or self._owner.cancelled() else self._owner.exception()
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        return error

    async def close(self) -> None:
        self._leave.set()
        await asyncio.wait({self._owner})

    async def _own(self) -> None:
        try:
            async with self._make(self._leave.set) as client:
                await _all_tools(client)  # the client takes headers and schemas of tools from their list
                self._ready.set_result(client)
                await self._leave.wait()
        finally:
            self._leave.set()


class _Watched:
    """The reading end of a transport, which tells when the connection has ended."""

    def __init__(self, inner: Any, ended: Callable[[], None]) -> None:
        self._inner, self._ended = inner, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def receive(self) -> Any:
        try:
            return await self._inner.receive()
        except Exception:
            self._ended()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._inner.__anext__()
        except BaseException:
            self._ended()
            raise

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> Any:
        return await self._inner.__aexit__(*error)


@asynccontextmanager
async def _watched(
    transport: AbstractAsyncContextManager[tuple[Any, Any]], ended: Callable[[], None]
) -> AsyncIterator[tuple[Any, Any]]:
    async with transport as (read, write):
        yield _Watched(read, ended), write


async def _all_tools(client: Client) -> list[types.Tool]:
    tools: list[types.Tool] = []
    cursor: str | None = None
    while True:
        page = await client.session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools


async def _cancel(*_: Any) -> types.ElicitResult:
    """Answer a question that a server of an older protocol asks while a call runs: nobody can wait for long then."""
    return types.ElicitResult(action="cancel")


def _answer(given: Any) -> dict[str, Any]:
    """Return the answer that the payload of a signal means: a form, yes or no, or the protocol's own answer."""
    if given is True or given is None:
        return {"action": "accept", "content": {}}
    if given is False:
        return {"action": "decline"}
    if not isinstance(given, Mapping):
        raise Permanent(f"the answer to an MCP server must be a form (a dict), True or False, not {given!r}")
    if given.get("action") in ("accept", "decline", "cancel") and set(given) <= {"action", "content"}:
        return dict(given)
    return {"action": "accept", "content": dict(given)}


def _responses(answers: dict[str, Any] | None) -> types.InputResponses | None:
    return {key: types.ElicitResult.model_validate(one) for key, one in answers.items()} if answers else None


def _is_lost_state(error: MCPError) -> bool:
    return isinstance(error.data, Mapping) and error.data.get("reason") == "invalid_request_state"


def _progress_of_step() -> Any:
    """Return a callback that reports the progress of a call as that of the step which makes it."""
    step = copy_context()

    async def report(done: float, total: float | None, message: str | None) -> None:
        if total:
            step.run(progress, done / total, message or "")

    return report


def _class_of(error: BaseException) -> ErrorClass | None:
    return _CLASSES.get(error.code) if isinstance(error, MCPError) else None


def _result(value: Any) -> types.CallToolResult | types.InputRequiredResult:
    """Return the recorded result of a call; a plain value, which a person gave, is its content."""
    try:
        return _RESULT.validate_python(value)
    except ValidationError:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        structured = value if isinstance(value, dict) else {"result": value}  # as a server makes it
        return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=structured)


def _classified(options: CallOptions) -> CallOptions:
    rules = checked_rules(options.get("classify"), "classify=")
    return {**options, "classify": (*rules, _class_of)}
