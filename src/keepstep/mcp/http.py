"""The server over HTTP: one address, behind the same guard as the pages, with the tools of the caller's role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..engine.engine import Engine
from ..web.guard import Guard
from ..web.problems import problem
from ..web.routes import Role
from ..web.tokens import Caller, Token
from .building import built

#: Seconds without a request after which a session of an older client ends.
IDLE_SECONDS = 1800.0


class _Sessions:
    """Sessions by role, so that a caller reaches only those with the tools of the caller's own role."""

    def __init__(self, engine: Engine, most: Role, pages_url: str) -> None:
        self.most = most
        self.managers = {
            role: StreamableHTTPSessionManager(
                built(engine, role, pages_url)._lowlevel_server,  # noqa: SLF001 - the only way to a manager with limits
                session_idle_timeout=IDLE_SECONDS,
            )
            for role in Role
            if Role.NONE < role <= most
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller: Caller | None = scope.get("keepstep.caller")
        if caller is None:
            headers = {"www-authenticate": 'Bearer realm="keepstep"'}
            refusal = problem(401, "no-token", "give a token: Authorization: Bearer TOKEN", headers)
            await refusal(scope, receive, send)
            return
        # Sessions belong to the token that began them: another one that learns the id does not find them.
        user = AuthenticatedUser(AccessToken(token="", client_id=caller.name, scopes=[]))
        await self.managers[min(caller.role, self.most)].handle_request({**scope, "user": user}, receive, send)


def build(
    engine: Engine,
    *,
    write: bool = False,
    destructive: bool = False,
    pages_url: str = "",
    tokens: Iterable[Token | str] = (),
    hosts: Iterable[str] = (),
) -> ASGIApp:
    """Return an ASGI application that answers at `/mcp`.

    The options are those of `keepstep.mcp.building.build`, and `tokens` and `hosts` those of `keepstep.web.app`. A
    token of the role `act` has no destructive tools, and one of the role `read` only reads.
    """
    given = [Token.parse(one) if isinstance(one, str) else one for one in tokens]
    sessions = _Sessions(engine, Role.ADMIN if destructive else Role.ACT if write else Role.READ, pages_url)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for one in sessions.managers.values():
                await stack.enter_async_context(one.run())
            yield

    guard = Middleware(Guard, tokens=given, hosts=list(hosts), anonymous="mcp")
    routes = [Route("/mcp", sessions, methods=["GET", "POST", "DELETE"])]
    return Starlette(routes=routes, middleware=[guard], lifespan=lifespan)
