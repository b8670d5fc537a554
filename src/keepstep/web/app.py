"""The application: the API and its description, live events, and checks of health, behind the guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.routing import Route as Path

from ..engine.health_port import CONTENT_TYPE
from ..engine.process import ACTOR
from ..views.metrics import store_metrics
from . import api_fleet, api_runs, api_steering  # noqa: F401 - their routes are in the table
from .guard import Caller, Guard, Token
from .openapi import description
from .problems import problem, problem_of
from .routes import ROUTES, Ask, Role, Route, body_of, query_of
from .stream import events

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
    routes: list[BaseRoute] = [
        Mount("/api/v1", routes=_api(engine)),
        Path("/openapi.json", _described),
        Path("/healthz", _healthy),
        Path("/readyz", _ready(engine)),
        Path("/metrics", _metrics(engine)),
    ]
    handlers = {Exception: _failed(engine), 404: _not_found, 405: _not_found}
    return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=lifespan)


def _api(engine: Engine) -> list[BaseRoute]:
    routes: list[BaseRoute] = [Path(one.path, _endpoint(engine, one), methods=[one.method]) for one in ROUTES]
    return [Path("/runs/{run}/events", _watch(engine)), *routes]


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
        token = ACTOR.set(_actor(request, caller))
        try:
            query = query_of(route.query, request.query_params.multi_items())
            body = None if route.body is None else body_of(route.body, await request.body())
            ask = Ask(engine, ACTOR.get(), dict(request.path_params), query, body)
            found = await route.handler(ask)
            return Response(msgspec.json.encode(found), route.status, media_type="application/json")
        except Exception as error:  # noqa: BLE001 - every error becomes problem details
            return problem_of(error, engine.redaction.redact)
        finally:
            ACTOR.reset(token)

    return answer


#: Characters of the name that a caller gives for the audit.
_LONGEST_NAME = 100


def _actor(request: Request, caller: Caller | None) -> str:
    """Return the name for the audit: that of the token and, if the caller gives one, that of the person."""
    name = "web" if caller is None else caller.name
    given = request.headers.get("x-keepstep-actor", "").strip()[:_LONGEST_NAME]
    return f"{given} ({name})" if given and given.isprintable() else name


def _watch(engine: Engine) -> Callable[[Request], Awaitable[Response]]:
    async def watch(request: Request) -> Response:
        if (refusal := _refused(request.scope.get("keepstep.caller"), Role.READ)) is not None:
            return refusal
        try:
            return await events(engine, request.path_params["run"], request)
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
        try:
            await engine.call(engine.store.list_workers)
        except Exception:  # noqa: BLE001 - any error means that the store does not answer
            return Response("the store does not answer\n", 503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    return ready


def _metrics(engine: Engine) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        if (refusal := _refused(request.scope.get("keepstep.caller"), Role.READ)) is not None:
            return refusal
        try:
            text = await engine.call(store_metrics, engine.store)
        except Exception as error:  # noqa: BLE001 - as above
            return problem_of(error, engine.redaction.redact)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    return metrics


def _failed(engine: Engine) -> Callable[[Request, Exception], Response]:
    return lambda _, error: problem_of(error, engine.redaction.redact)


def _not_found(_: Request, error: Any) -> Response:
    return problem(error.status_code, "not-found" if error.status_code == 404 else "method", f"{error.detail}")
