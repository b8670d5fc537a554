"""The application: the API and its description, live events, and checks of health, behind the guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.routing import Route as Path

from ..engine.health_port import CONTENT_TYPE, why_unready
from ..engine.process import ACTOR
from ..ports import LOOKS, STARTER, looking
from ..views.metrics import StoreMetrics
from .guard import Guard, protect
from .openapi import description
from .pages.render import missing_page, page_routes
from .problems import problem, problem_of
from .routes import ROUTES, Ask, Content, Role, Route, body_of, query_of
from .stream import Stream, Streams
from .tokens import Caller, Token

if TYPE_CHECKING:
    from ..engine.engine import Engine


def build(
    engine: Engine,
    *,
    tokens: Iterable[Token | str] = (),
    hosts: Iterable[str] = (),
    read_only: bool = False,
    close: bool = False,
) -> Starlette:
    """Return an ASGI application for an engine, which must be open while requests come.

    Without `tokens`, everybody who reaches it may do everything, so it only answers for names of this machine and for
    the given `hosts`. A token is a `Token`, or text of the form NAME:ROLE:SECRET. With `close`, the engine is closed
    when the server stops.
    """
    given = [Token.parse(one) if isinstance(one, str) else one for one in tokens]

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if close:
            await engine.close()

    guard = Middleware(Guard, tokens=given, hosts=list(hosts), read_only=read_only)
    packed = Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5)  # leaves streams as they are
    routes: list[BaseRoute] = [
        Mount("/api/v1", routes=_api(engine)),
        Path("/openapi.json", _described),
        Path("/healthz", _healthy),
        Path("/readyz", _ready(engine)),
        Path("/metrics", _metrics(engine)),
        *page_routes(engine, given, read_only=read_only),
    ]
    missing = _not_found(engine)
    handlers = {Exception: _failed(engine), 404: missing, 405: missing}
    return Starlette(routes=routes, middleware=[guard, packed], exception_handlers=handlers, lifespan=lifespan)


def _api(engine: Engine) -> list[BaseRoute]:
    routes: list[BaseRoute] = [Path(one.path, _endpoint(engine, one), methods=[one.method]) for one in ROUTES]
    streams = Streams(engine)
    live = [
        Path("/runs/{run}/events", _watch(engine, lambda request: streams.run(request.path_params["run"], request))),
        Path("/changes", _watch(engine, streams.changes)),
    ]
    return [*live, *routes]


def _refused(caller: Caller | None, role: Role) -> Response | None:
    """Return a refusal if the caller lacks the role."""
    if role is Role.NONE or (caller is not None and caller.role >= role):
        return None
    if caller is None:
        headers = {"www-authenticate": 'Bearer realm="keepstep"'}
        return problem(401, "no-token", "give a token: Authorization: Bearer TOKEN", headers)
    return problem(403, "role", f"the token of {caller.name!r} does not have the role {role.name.lower()}")


def _endpoint(engine: Engine, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        caller: Caller | None = request.scope.get("keepstep.caller")
        if (refusal := _refused(caller, route.role)) is not None:
            return refusal
        token, looks = ACTOR.set(_actor(request, caller)), LOOKS.set(route.method == "GET")
        starter = STARTER.set(request.headers.get("traceparent"))
        try:
            query = query_of(route.query, request.query_params.multi_items())
            body = None if route.body is None else body_of(route.body, await request.body())
            role = Role.NONE if caller is None else caller.role
            ask = Ask(engine, ACTOR.get(), role, dict(request.path_params), query, body)
            found = await ask.answered(route.handler)
            if isinstance(found, Content):
                return Response(found.data, route.status, headers=found.headers, media_type=found.media_type)
            return Response(msgspec.json.encode(found), route.status, media_type="application/json")
        except Exception as error:  # noqa: BLE001 - every error becomes problem details
            return problem_of(error, engine.redaction.redact)
        finally:
            ACTOR.reset(token)
            LOOKS.reset(looks)
            STARTER.reset(starter)

    return answer


#: Characters of the name that a caller gives for the audit.
_LONGEST_NAME = 100


def _actor(request: Request, caller: Caller | None) -> str:
    """Return the name for the audit: that of the token and, if the caller gives one, that of the person."""
    name = "web" if caller is None else caller.name
    given = request.headers.get("x-keepstep-actor", "").strip()[:_LONGEST_NAME]
    return f"{given} ({name})" if given and given.isprintable() else name


def _watch(engine: Engine, stream: Callable[[Request], Awaitable[Stream]]) -> Callable[[Request], Awaitable[Response]]:
    async def watch(request: Request) -> Response:
        if (refusal := _refused(request.scope.get("keepstep.caller"), Role.READ)) is not None:
            return refusal
        try:
            with looking():
                return await stream(request)
        except Exception as error:  # noqa: BLE001 - as above
            return problem_of(error, engine.redaction.redact)

    return watch


async def _described(request: Request) -> Response:
    from .. import __version__  # noqa: PLC0415 - the package itself loads this module

    found = {**description(__version__), "servers": [{"url": request.scope.get("root_path", "") or "/"}]}
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _healthy(_: Request) -> Response:
    return Response("ok\n", media_type="text/plain")


def _ready(engine: Engine) -> Callable[[Request], Awaitable[Response]]:
    async def ready(_: Request) -> Response:
        why = await why_unready(engine)
        return Response(f"{why or 'ok'}\n", 503 if why else 200, media_type="text/plain")

    return ready


def _metrics(engine: Engine) -> Callable[[Request], Awaitable[Response]]:
    found = StoreMetrics(engine)

    async def metrics(request: Request) -> Response:
        if (refusal := _refused(request.scope.get("keepstep.caller"), Role.READ)) is not None:
            return refusal
        try:
            with looking():
                text = await found.text()
        except Exception as error:  # noqa: BLE001 - as above
            return problem_of(error, engine.redaction.redact)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    return metrics


def _failed(engine: Engine) -> Callable[[Request, Exception], Response]:
    def failed(_: Request, error: Exception) -> Response:
        answer = problem_of(error, engine.redaction.redact)
        protect(answer.headers)  # this answer does not pass the guard
        return answer

    return failed


def _not_found(engine: Engine) -> Callable[[Request, Any], Response]:
    def not_found(request: Request, error: Any) -> Response:
        if error.status_code == 404 and (page := missing_page(engine, request)) is not None:
            return page
        kind = "not-found" if error.status_code == 404 else "method"
        return problem(error.status_code, kind, f"{error.detail}", dict(error.headers or {}))

    return not_found
