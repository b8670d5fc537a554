"""A2A: a remote agent whose tasks are durable, and a workflow that is served as an agent."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

from ..engine.engine import Engine
from ..engine.handle import RunHandle
from ..errors import (
    AgentRefused,
    AlreadyFinished,
    DefinitionError,
    KeepstepError,
    Permanent,
    RunFailed,
    StepError,
    StepInDoubt,
    TimedOut,
)
from ..kernel.composing import branch
from ..kernel.context import idempotency_key, in_workflow
from ..kernel.publish import publish
from ..kernel.until import wait_until
from ..kernel.waits import wait_for
from ..model import Status
from ..policies import Retry
from ..policies.classify import ErrorClass, checked_rules, classify
from ..workflows.definition import Step, Workflow
from .calls import CallOptions, CallSteps, _counted, approval, step_name

try:
    import httpx
    from a2a.client import A2ACardResolver, Client, ClientConfig, create_client
    from a2a.client.errors import A2AClientError
    from a2a.server.context import ServerCallContext
    from a2a.server.request_handlers.request_handler import RequestHandler, validate_request_params
    from a2a.types import a2a_pb2 as types
    from a2a.utils import errors as a2a_errors
    from google.protobuf import json_format, struct_pb2
except ImportError as error:
    raise ImportError("keepstep.agents.a2a needs the A2A library 1.1 or later: pip install 'keepstep[a2a]'") from error

M = TypeVar("M")

__all__ = ["RemoteAgent", "TaskFailed", "WorkflowHandler", "ask"]

_STATE = types.TaskState
#: States in which a remote task goes on by itself.
_UNDER_WAY = frozenset({_STATE.TASK_STATE_UNSPECIFIED, _STATE.TASK_STATE_SUBMITTED, _STATE.TASK_STATE_WORKING})
#: States in which a remote task waits for its client.
_ASKING = frozenset({_STATE.TASK_STATE_INPUT_REQUIRED, _STATE.TASK_STATE_AUTH_REQUIRED})

#: Classes of the protocol's errors, for retries by class.
_CLASSES: tuple[tuple[type[BaseException], ErrorClass], ...] = (
    (a2a_errors.InvalidParamsError, ErrorClass.VALIDATION),
    (a2a_errors.InvalidRequestError, ErrorClass.VALIDATION),
    (a2a_errors.ContentTypeNotSupportedError, ErrorClass.VALIDATION),
    (a2a_errors.MethodNotFoundError, ErrorClass.PERMANENT),
    (a2a_errors.UnsupportedOperationError, ErrorClass.PERMANENT),
    (a2a_errors.TaskNotFoundError, ErrorClass.PERMANENT),
    (a2a_errors.InternalError, ErrorClass.INTERNAL),
)

#: Keys of the tags of a run that serves a task.
_CONTEXT, _MESSAGE, _OWNER = "a2a_context", "a2a_message", "a2a_owner"
#: Key under which a served workflow publishes its question.
_QUESTION = "a2a:question"
#: Beginning of the id of a run that serves a task.
_PREFIX = "a2a-"
#: Space of the ids of tasks, which are made from the ids of their first messages.
_TASKS = uuid.UUID("6f0f7f0e-6a86-4c42-9c0e-6d3b9a2f4c1b")
#: Seconds that the answer to a cancel waits for the clean-up of the run, which may take longer.
_CANCEL_SECONDS = 10.0
#: Most tasks on one page of a list.
_PAGE = 100


# -- a remote agent ----------------------------------------------------------------------------------------------------


class TaskFailed(Exception):
    """A remote agent did not complete a task: it failed or was cancelled there, as `state` says."""

    def __init__(self, message: str, state: str = "") -> None:
        super().__init__(message)
        self.state = state


class RemoteAgent:
    """An agent behind the A2A protocol, which performs tasks like any agent of a team.

    `target` is the agent's base URL or its card. Inside a workflow, each message is a step whose idempotency key is the
    id of the message. The remote task is then polled durably, every `poll_seconds`. `send` holds options of the step
    that sends, and `config` is the client's configuration.
    """

    def __init__(
        self,
        name: str,
        target: str | types.AgentCard,
        *,
        capabilities: Iterable[str] = (),
        send: CallOptions | None = None,
        poll_seconds: float = 2.0,
        config: ClientConfig | None = None,
    ) -> None:
        if not isinstance(target, str | types.AgentCard):
            raise DefinitionError(
                f"the target of the remote agent {name!r} must be a URL or an AgentCard, not {type(target).__name__}"
            )
        if isinstance(capabilities, str):
            raise DefinitionError(f"capabilities= of the remote agent {name!r} must be a list of names, not a text")
        self.name = step_name(name)
        self.capabilities = tuple(step_name(one) for one in capabilities)
        self._target, self._poll_seconds = target, poll_seconds
        self._config = config or ClientConfig(streaming=False, polling=True)
        options = send or CallOptions()
        self._is_once = options.get("at_most_once", False)
        rules = (*checked_rules(options.get("classify"), "classify="), _class_of)
        self._calls = CallSteps(self.name, tool={**options, "classify": rules})
        self._check: Step[..., Any] = Step(
            self._ended, name=f"{self.name}.task", retry=Retry.by_class(), classify=rules
        )
        #: A program may run several loops, one after the other or in threads: each needs a client of its own.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = WeakKeyDictionary()

    @classmethod
    async def discover(cls, url: str, **options: Any) -> Self:
        """Return the agent that answers at a URL, with the name and the skills of its card."""
        async with httpx.AsyncClient() as client:
            card = await A2ACardResolver(client, url).get_agent_card()
        skills = dict.fromkeys(one for skill in card.skills for one in (skill.id, *skill.tags))
        return cls(card.name, url, **{"capabilities": tuple(skills), **options})

    async def perform(self, task: Any) -> Any:
        """Have the agent perform a task, and return its answer: a text, or data.

        A text is sent as text, anything else as data. If the agent asks, the run waits for a signal,
        `input:NAME.TASK_ID`, and sends its payload. A cancelled run cancels the remote task.
        """
        reply = await self._send(task)
        number = 0
        try:
            while not reply.HasField("message"):
                remote, number = reply.task, number + 1
                if remote.status.state in _UNDER_WAY:
                    reply = types.SendMessageResponse(task=await self._settled(remote.id, number))
                elif remote.status.state in _ASKING:
                    reply = await self._answered(remote, number)
                else:
                    return _answer_of(remote, self.name)
        except asyncio.CancelledError:
            with suppress(StepError):
                await self._cancel(reply.task.id)
            raise
        return _plain(reply.message.parts)

    async def probe(self) -> bool:
        """Whether the agent answers; an error says why it does not."""
        client = await self._client()
        with suppress(a2a_errors.TaskNotFoundError):
            await client.get_task(types.GetTaskRequest(id="keepstep-probe", history_length=0))
        return True

    async def close(self) -> None:
        """Close the client of this loop; the next call makes another."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _client(self) -> Client:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = await create_client(self._target, client_config=self._config)
            self._clients.setdefault(loop, client)
        return self._clients[loop]

    async def _send(self, content: Any, remote: types.Task | None = None) -> types.SendMessageResponse:
        """Send a message that begins a task, or one to the given task."""
        part = types.Part(text=content) if isinstance(content, str) else _data_part(content)
        to = ("", "") if remote is None else (remote.id, remote.context_id)

        async def body() -> Any:
            message = types.Message(
                message_id=idempotency_key(), role=types.ROLE_USER, parts=[part], task_id=to[0], context_id=to[1]
            )
            request = types.SendMessageRequest(message=message)
            request.configuration.return_immediately = True
            client = await self._client()
            reply = types.SendMessageResponse()
            try:
                async for one in client.send_message(request):
                    if one.HasField("task"):
                        reply.task.CopyFrom(one.task)
                    elif one.HasField("message"):
                        reply.message.CopyFrom(one.message)
            except A2AClientError as error:
                if self._is_once and classify(error) in (ErrorClass.NETWORK, ErrorClass.TIMEOUT):
                    raise StepInDoubt(f"a message to {self.name!r} was sent, and no answer came: {error}") from error
                raise
            return json_format.MessageToDict(reply)

        found = await self._calls.tool(f"{self.name}.send", None, body, arguments=[to[0], content])
        return _parsed(found, types.SendMessageResponse())

    async def _settled(self, task_id: str, number: int) -> types.Task:
        """Return a task when it has ended, or asks for something."""
        if in_workflow():
            with branch(step_name(f"{self.name}.{task_id}.{number}")):
                found = await wait_until(self._check, task_id, every=self._poll_seconds)
        else:
            while not (found := await self._ended(task_id)):  # noqa: ASYNC110 - another process ends it
                await asyncio.sleep(self._poll_seconds)
        return _parsed(found, types.Task())

    async def _ended(self, task_id: str) -> Any:
        client = await self._client()
        task = await client.get_task(types.GetTaskRequest(id=task_id, history_length=0))
        return None if task.status.state in _UNDER_WAY else json_format.MessageToDict(task)

    async def _answered(self, remote: types.Task, number: int) -> types.SendMessageResponse:
        """Ask a person on behalf of the remote agent, and send the answer."""
        if not in_workflow():
            raise Permanent(
                f"the remote agent {self.name!r} asks for input, which only a workflow can wait for; perform the task "
                f"in the code of a workflow"
            )
        given = await approval(f"{self.name}.{remote.id}", _plain(remote.status.message.parts), kind="input")
        if given is True and remote.status.state == _STATE.TASK_STATE_AUTH_REQUIRED:  # done elsewhere: no message
            return types.SendMessageResponse(task=await self._settled(remote.id, -number))
        return await self._send(given, remote)

    async def _cancel(self, task_id: str) -> None:
        async def body() -> None:
            client = await self._client()
            with suppress(a2a_errors.TaskNotCancelableError, a2a_errors.TaskNotFoundError):
                await client.cancel_task(types.CancelTaskRequest(id=task_id))

        await self._calls.tool(f"{self.name}.cancel", None, body, arguments=task_id)


def _answer_of(task: types.Task, name: str) -> Any:
    if task.status.state == _STATE.TASK_STATE_COMPLETED:
        parts = [part for artifact in task.artifacts for part in artifact.parts]
        return _plain(parts or task.status.message.parts)
    state = _STATE.Name(task.status.state).removeprefix("TASK_STATE_").lower()
    reason = _plain(task.status.message.parts) or "it gave no reason"
    message = f"the remote agent {name!r} has not completed the task, which is {state}: {reason}"
    if task.status.state == _STATE.TASK_STATE_REJECTED:
        raise AgentRefused(message)
    raise TaskFailed(message, state)


def _class_of(error: BaseException) -> ErrorClass | None:
    return next((found for kind, found in _CLASSES if isinstance(error, kind)), None)


# -- values ------------------------------------------------------------------------------------------------------------


def _parsed(found: Any, into: M) -> M:
    json_format.ParseDict(found, into, ignore_unknown_fields=True)
    return into


def _plain(parts: Iterable[types.Part]) -> Any:
    """Return the content of a message: its text, its data, or a list of parts if it has several kinds of them."""
    given = list(parts)
    if all(part.HasField("text") for part in given):
        return "\n".join(part.text for part in given)
    if len(given) == 1 and given[0].HasField("data"):
        return _whole(json_format.MessageToDict(given[0].data))
    return [_whole(json_format.MessageToDict(part)) for part in given]


def _whole(value: Any) -> Any:
    """Return whole numbers as int again: the protocol's data has only floating ones."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    return [_whole(one) for one in value] if isinstance(value, list) else value


def _data_part(value: Any) -> types.Part:
    plain = json.loads(json.dumps(value, default=str))
    return types.Part(data=json_format.ParseDict(plain, struct_pb2.Value()))


def _parts(value: Any) -> list[types.Part]:
    return [types.Part(text=value) if isinstance(value, str) else _data_part(value)]


# -- a served workflow -------------------------------------------------------------------------------------------------


async def ask(question: Any) -> Any:
    """Ask the client of the task that this workflow serves, and return the content of its next message."""
    signal = step_name(f"a2a:{_counted('a2a', 'answer')}")
    with branch(signal):
        publish(_QUESTION, {"signal": signal, "question": question})
        return await wait_for(signal)


class WorkflowHandler(RequestHandler):
    """A workflow of one argument as an A2A agent: each task is a run, and nothing else is stored.

    Give it to the routes of `a2a.server.routes`. A message that is sent again finds its task. The workflow asks its
    client with `ask`. Tasks belong to the user that the server has authenticated.
    """

    def __init__(self, engine: Engine, workflow: Workflow[..., Any], card: types.AgentCard) -> None:
        self._engine, self._workflow, self._card = engine, workflow, card

    @validate_request_params
    async def on_message_send(self, params: types.SendMessageRequest, context: ServerCallContext) -> types.Task:
        run = await self._received(params.message, context)
        if params.configuration.return_immediately:
            return await self._task(run)
        return await self._settled(run)

    @validate_request_params
    async def on_message_send_stream(
        self, params: types.SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Any]:
        run = await self._received(params.message, context)
        async for event in self._events(run):
            yield event

    @validate_request_params
    async def on_subscribe_to_task(
        self, params: types.SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Any]:
        run = await self._found(params.id, context)
        async for event in self._events(run):
            yield event

    @validate_request_params
    async def on_get_task(self, params: types.GetTaskRequest, context: ServerCallContext) -> types.Task:
        return await self._task(await self._found(params.id, context))

    @validate_request_params
    async def on_cancel_task(self, params: types.CancelTaskRequest, context: ServerCallContext) -> types.Task:
        run = await self._found(params.id, context)
        try:
            await run.cancel("the client of the task has cancelled it")
        except AlreadyFinished:
            raise a2a_errors.TaskNotCancelableError from None
        with suppress(TimedOut):
            await run.reached(timeout=_CANCEL_SECONDS)
        return await self._task(run)

    @validate_request_params
    async def on_list_tasks(
        self, params: types.ListTasksRequest, context: ServerCallContext
    ) -> types.ListTasksResponse:
        tags = {_OWNER: _owner(context)} | ({_CONTEXT: params.context_id} if params.context_id else {})
        page = await self._engine.list(
            workflow=self._workflow.name,
            tags=tags,
            limit=min(params.page_size or _PAGE, _PAGE),
            after=params.page_token or None,
        )
        tasks = [await self._task(await self._engine.get(run.id)) for run in page.runs]
        if params.status:
            tasks = [task for task in tasks if task.status.state == params.status]
        return types.ListTasksResponse(tasks=tasks, next_page_token=page.next or "", page_size=len(tasks))

    async def on_get_extended_agent_card(
        self, params: types.GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> types.AgentCard:
        return self._card

    async def on_create_task_push_notification_config(self, params: Any, context: ServerCallContext) -> Any:
        raise a2a_errors.PushNotificationNotSupportedError

    async def on_get_task_push_notification_config(self, params: Any, context: ServerCallContext) -> Any:
        raise a2a_errors.PushNotificationNotSupportedError

    async def on_list_task_push_notification_configs(self, params: Any, context: ServerCallContext) -> Any:
        raise a2a_errors.PushNotificationNotSupportedError

    async def on_delete_task_push_notification_config(self, params: Any, context: ServerCallContext) -> None:
        raise a2a_errors.PushNotificationNotSupportedError

    async def _received(self, message: types.Message, context: ServerCallContext) -> RunHandle[Any]:
        """Take a message: start the run of a new task, or send the message to the run of its task."""
        if not message.task_id:
            owner = _owner(context)
            task_id = str(uuid.uuid5(_TASKS, json.dumps([owner, message.message_id])))
            tags = {_CONTEXT: message.context_id or task_id, _MESSAGE: message.message_id, _OWNER: owner}
            try:
                return await self._engine.start(
                    self._workflow, _plain(message.parts), run_id=f"{_PREFIX}{task_id}", tags=tags
                )
            except KeepstepError as error:
                raise a2a_errors.InvalidParamsError(message=str(error)) from error
        run = await self._found(message.task_id, context)
        signals = await self._engine.read(self._engine.store.list_signals, run.id)
        if any(signal.id == message.message_id for signal in signals):
            return run
        question = await self._question(run)
        if question is None:
            raise a2a_errors.UnsupportedOperationError(message=f"task {message.task_id} does not wait for a message")
        try:
            await run.signal(question["signal"], _plain(message.parts), id=message.message_id)
        except KeepstepError as error:
            raise a2a_errors.UnsupportedOperationError(message=str(error)) from error
        return run

    async def _found(self, task_id: str, context: ServerCallContext) -> RunHandle[Any]:
        try:
            handle = await self._engine.get(f"{_PREFIX}{task_id}")
            run = await handle.run()
        except KeepstepError:
            raise a2a_errors.TaskNotFoundError from None
        if run.workflow != self._workflow.name or run.tags.get(_OWNER) != _owner(context):
            raise a2a_errors.TaskNotFoundError
        return handle

    async def _question(self, run: RunHandle[Any]) -> Any:
        """Return the question that the run asks its client, or None."""
        question = (await run.published()).get(_QUESTION)
        if question is None:
            return None
        signals = await self._engine.read(self._engine.store.list_signals, run.id)
        return None if any(signal.name == question["signal"] for signal in signals) else question

    async def _settled(self, run: RunHandle[Any]) -> types.Task:
        """Return the task when it has ended, or asks its client."""
        with self._engine.waiting.reader() as reader:
            while (task := await self._task(run)).status.state in _UNDER_WAY:
                await reader.changed()
        return task

    async def _events(self, run: RunHandle[Any]) -> AsyncGenerator[Any]:
        task = await self._task(run)
        yield task
        if task.status.state not in _UNDER_WAY:
            return
        task = await self._settled(run)
        for artifact in task.artifacts:
            yield types.TaskArtifactUpdateEvent(task_id=task.id, context_id=task.context_id, artifact=artifact)
        yield types.TaskStatusUpdateEvent(task_id=task.id, context_id=task.context_id, status=task.status)

    async def _task(self, handle: RunHandle[Any]) -> types.Task:
        run = await (await handle.latest()).run()
        task_id = handle.id.removeprefix(_PREFIX)
        task = types.Task(id=task_id, context_id=(await handle.run()).tags.get(_CONTEXT, ""))
        task.status.timestamp.FromDatetime(run.updated_at)
        if run.status is Status.COMPLETED:
            task.status.state = _STATE.TASK_STATE_COMPLETED
            task.artifacts.add(artifact_id="result", name="result", parts=_parts(await handle.result()))
        elif run.status is Status.CANCELLED:
            task.status.state = _STATE.TASK_STATE_CANCELED
        elif run.status.finished:
            task.status.state = _STATE.TASK_STATE_FAILED
            self._say(task, await _reason(handle))
        elif (question := await self._question(handle)) is not None:
            task.status.state = _STATE.TASK_STATE_INPUT_REQUIRED
            self._say(task, question["question"])
        else:
            queued = run.status is Status.QUEUED
            task.status.state = _STATE.TASK_STATE_SUBMITTED if queued else _STATE.TASK_STATE_WORKING
        return task

    @staticmethod
    def _say(task: types.Task, content: Any) -> None:
        message = types.Message(
            message_id=f"{task.id}-{task.status.timestamp.ToNanoseconds()}",
            role=types.ROLE_AGENT,
            parts=_parts(content),
            task_id=task.id,
            context_id=task.context_id,
        )
        task.status.message.CopyFrom(message)


async def _reason(handle: RunHandle[Any]) -> str:
    """Return the message of the error with which a run has failed; no traceback leaves the process."""
    try:
        await handle.result()
    except RunFailed as error:
        root = error.root
        return root.message if root is not None else str(error)
    return ""


def _owner(context: ServerCallContext) -> str:
    return context.user.user_name if context.user.is_authenticated else ""
