"""The table of tools: each with the role that it needs, and a wrapper that names the actor and reports errors."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

from ..engine.engine import Engine
from ..engine.handle import RunHandle
from ..engine.process import ACTOR
from ..errors import KeepstepError, RunNotFound
from ..model import Run
from ..ports import LOOKS
from ..views.finding import near_ids
from ..views.overview import readable
from ..views.plain import encrypted_with
from ..views.seen import check_seen, turn
from ..web.routes import Role
from .stored import Answer

log = logging.getLogger("keepstep")

#: Characters of the name that a client gives for the audit.
_LONGEST_NAME = 100


@dataclass(frozen=True, slots=True)
class Door:
    """The engine, and the address of the pages on which people answer; empty if there are none."""

    engine: Engine
    pages_url: str = ""


@dataclass(slots=True)
class Call:
    """One call of a tool: the engine and the actor. `hidden` says why values are not shown."""

    engine: Engine
    actor: str
    pages_url: str
    hidden: str = ""

    async def run(self, run_id: str) -> Run:
        """Return a run; without its key here, one whose values are hidden from the answer."""
        run = await self.engine.call(self.engine.store.get_run, run_id)
        if run is None:
            near = await self.engine.call(near_ids, self.engine.store, run_id)
            hint = f"did you mean {' or '.join(near)}?" if near else "list_runs lists the runs"
            raise RunNotFound(f"no run {run_id!r}; {hint}", run_id)
        plain, locked = readable(self.engine.encryption, run)
        if locked is not None:
            self.hidden = f"encrypted with the key {encrypted_with(run)!r}, which this server does not have"
        return plain

    async def handle(self, run_id: str, seen: int | None = None) -> RunHandle[Any]:
        """Return a handle that acts in the name of the caller; refuse it if the run has moved on since `seen`."""
        run = await self.run(run_id)
        handle: RunHandle[Any] = RunHandle(
            self.engine, run.id, self.engine.workflows.get(run.workflow), actor=self.actor
        )
        await check_seen(handle, seen)
        return handle


Function = Callable[..., Awaitable[dict[str, Any]]]
F = TypeVar("F", bound=Function)


@dataclass(frozen=True, slots=True)
class Tool:
    """One row of the table. Without `pages`, a door with pages for people does not have the tool."""

    function: Function
    role: Role
    annotations: ToolAnnotations
    pages: bool | None = None


#: Every tool, in the order in which clients see them.
TOOLS: list[Tool] = []
#: The functions of those that only read.
_LOOKING: set[Function] = set()


def look(function: F) -> F:
    """Add a tool that only reads."""
    hints = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    TOOLS.append(Tool(function, Role.READ, hints))
    _LOOKING.add(function)
    return function


def act(*, destroys: bool = False, repeatable: bool = False, answers: bool = False) -> Callable[[F], F]:
    """Add a tool that changes a run. One that `answers` for a person is missing where pages for people exist."""

    def add(function: F) -> F:
        hints = ToolAnnotations(
            read_only_hint=False, destructive_hint=destroys, idempotent_hint=repeatable, open_world_hint=True
        )
        TOOLS.append(Tool(function, Role.ADMIN if destroys else Role.ACT, hints, pages=False if answers else None))
        return function

    return add


def hands_out_link(function: F) -> F:
    """Add a tool that only exists where pages for people exist."""
    hints = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
    TOOLS.append(Tool(function, Role.READ, hints, pages=True))
    return function


def exposed(function: Function) -> Function:
    """Return a function as the server calls it: with the context of the request instead of the `Call`."""

    async def called(ctx: Context[Door, Any], **given: Any) -> dict[str, Any]:
        return await answered(ctx, function, given)

    first, *rest = inspect.signature(function).parameters.values()
    hints = get_type_hints(function, include_extras=True)
    parameters = [
        first.replace(name="ctx", annotation=Context),
        *(one.replace(annotation=hints[one.name]) for one in rest),
    ]
    signature = inspect.Signature(parameters, return_annotation=dict[str, Any])
    vars(called)["__signature__"] = signature
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": dict[str, Any]}
    called.__name__, called.__doc__ = function.__name__, inspect.getdoc(function)
    return called


async def answered(ctx: Context[Any, Any], function: Function, given: dict[str, Any]) -> dict[str, Any]:
    """Call a tool for a client, and return its answer or an error that says what is wrong and what to do."""
    door: Door = ctx.request_context.lifespan_context
    engine = door.engine
    call = Call(engine, actor_of(ctx), door.pages_url)
    token, looks = ACTOR.set(call.actor), LOOKS.set(function in _LOOKING)
    try:
        if "run_id" in given and "seq" in given:  # acts on the same run take turns
            async with turn(engine, given["run_id"]):
                found = await function(call, **given)
        else:
            found = await function(call, **given)
        return await engine.off_loop(Answer(engine.redaction.redact, hidden=call.hidden).of, found)
    except KeepstepError as error:
        raise ToolError(engine.redaction.redact(str(error))) from None
    except ToolError:
        raise
    except Exception as error:
        log.exception("a tool for assistants failed unexpectedly")
        raise ToolError("an unexpected error; the log of the server has details") from error
    finally:
        ACTOR.reset(token)
        LOOKS.reset(looks)


def actor_of(ctx: Context[Any, Any]) -> str:
    """Return the name for the audit: that of the client, which it gives itself, and that of the token."""
    request = ctx.request_context.request
    caller = None if request is None else request.scope.get("keepstep.caller")
    name = "mcp" if caller is None else caller.name
    params = ctx.request_context.session.client_params
    client = "" if params is None else params.client_info.name.strip()[:_LONGEST_NAME]
    return f"{client} ({name})" if client and client.isprintable() else name
