"""The application answers below any prefix, in applications of others, and tells every problem in one form."""

import httpx
import pytest
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpResponse
from django.urls import path as django_path
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from keepstep.errors import DefinitionError
from keepstep.web import app
from keepstep.web.prefix import Prefixed
from tests.web.test_api import waiting

pytestmark = [pytest.mark.one_store, pytest.mark.live_only]


async def own(_):
    return PlainTextResponse("own")


def in_starlette(inner):
    return Starlette(routes=[Route("/own", own), Mount("/ops/keepstep", app=inner)])


def in_fastapi(inner):
    outer = FastAPI()
    outer.get("/own", response_class=PlainTextResponse)(lambda: "own")
    outer.mount("/ops/keepstep", inner)
    return outer


urlpatterns = [django_path("own", lambda _: HttpResponse("own"))]


def in_django(inner):
    if not settings.configured:
        settings.configure(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["localhost"], SECRET_KEY="x" * 50)
    django, below = get_asgi_application(), Prefixed(inner, "/ops/keepstep")

    async def dispatch(scope, receive, send):
        chosen = below if scope["path"].startswith("/ops/keepstep/") else django
        await chosen(scope, receive, send)

    return dispatch


def behind_proxy(inner):
    """A proxy that takes the prefix away, in front of `serve --prefix`."""
    below = Prefixed(inner, "/ops/keepstep")

    async def proxy(scope, receive, send):
        if scope["path"] == "/own":
            await PlainTextResponse("own")(scope, receive, send)
        else:
            await below({**scope, "path": scope["path"].removeprefix("/ops/keepstep")}, receive, send)

    return proxy


@pytest.mark.parametrize("mounted", [in_starlette, in_fastapi, in_django, behind_proxy])
async def test_api_answers_below_a_prefix(world, mounted):
    async with world.engine() as engine:
        run = await waiting(engine)
        transport = httpx.ASGITransport(mounted(app(engine)), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/own")).text == "own"
            base = "/ops/keepstep"
            described = (await client.get(f"{base}/openapi.json")).json()
            assert described["servers"] == [{"url": base}]
            assert (await client.get(f"{base}/api/v1/runs/r")).json()["status"] == "waiting"
            unknown = await client.get(f"{base}/api/v1/nothing")
            assert (unknown.status_code, unknown.headers["content-type"]) == (404, "application/problem+json")
            foreign = {"origin": "http://evil.example"}
            assert (await client.post(f"{base}/api/v1/runs/r/approve", json={}, headers=foreign)).status_code == 403
            forwarded = {"x-forwarded-host": "evil.example", "x-forwarded-for": "1.2.3.4"}
            assert (await client.post(f"{base}/api/v1/runs/r/approve", json={}, headers=forwarded)).status_code == 202
            assert await run.result(30) == 42
            stream = await client.get(f"{base}/api/v1/runs/r/events")
            assert "event: end" in stream.text


@pytest.mark.parametrize(
    "prefix", ["ops", "//evil.example", "/ops/", "/a/../b", "/a b", "/runs", "/api/v1", "/login/x"]
)
async def test_prefix_that_is_no_path_or_a_page_is_refused(world, prefix):
    async with world.engine() as engine:
        with pytest.raises(DefinitionError, match="prefix"):
            Prefixed(app(engine), prefix)
        assert Prefixed(app(engine), "/ops/keep-step.v1").prefix


async def test_head_and_unknown_methods_are_answered(world):
    async with world.engine() as engine:
        await waiting(engine)
        transport = httpx.ASGITransport(app(engine), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1") as client:
            assert (await client.head("/runs/r")).status_code == 200
            refused = await client.options("/runs/r/approve")
            assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
            assert refused.json()["type"] == "keepstep:method"
