"""Every route of the table is held to its role, to the read-only mode, and to its methods."""

import re

import httpx
import pytest

from keepstep.web import app
from keepstep.web.pages.table import PAGES
from keepstep.web.routes import ROUTES, Role

pytestmark = [pytest.mark.one_store, pytest.mark.live_only]

TOKENS = {role: role.name.lower() * 8 for role in Role if role is not Role.NONE}
#: Changes that need no role, because the token in the path is the permission.
BY_TOKEN = {"/callbacks/{token}", "/callbacks/{token}/beat"}
#: Changes that end, rewrite or copy a run, or that concern all runs.
BY_ADMIN = {
    *(f"/runs/{{run}}/{act}" for act in ["cancel", "drop", "consolidate", "skip", "rewind", "fork", "edit", "recover"]),
    *(f"/queues/{{name}}/{act}" for act in ["set", "reset"]),
    *(f"/services/{{name}}/{act}" for act in ["set", "reset", "open", "close"]),
    *(f"/schedules/{{name}}/{act}" for act in ["remove", "backfill"]),
    *(f"/agents/{{name}}/{act}" for act in ["drain", "resume"]),
    *("/workers/{worker}/drain", "/many/cancel"),
}
#: Paths that answer everybody: they tell nothing of a run.
OPEN = {"/openapi.json", "/healthz", "/readyz", "/login"}


def needed(route):
    """The role that a route must ask for, told apart from the table."""
    if route.method == "GET":
        return Role.READ
    return Role.NONE if route.path in BY_TOKEN else Role.ADMIN if route.path in BY_ADMIN else Role.ACT


def at(path):
    return re.sub(r"{\w+}", "nobody", path)


def client_of(engine, **options):
    transport = httpx.ASGITransport(app(engine, **options), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


async def test_every_route_refuses_callers_with_a_lower_role(world):
    tokens = [f"{role.name.lower()}:{role.name.lower()}:{secret}" for role, secret in TOKENS.items()]
    wrong = []
    async with world.engine() as engine, client_of(engine, tokens=tokens) as client:
        for route in ROUTES:
            for role in Role:
                headers = {} if role is Role.NONE else {"authorization": f"Bearer {TOKENS[role]}"}
                body = None if route.method == "GET" else {}
                answer = await client.request(route.method, f"/api/v1{at(route.path)}", json=body, headers=headers)
                refused = answer.status_code == 401 or answer.json().get("type") == "keepstep:role"
                if refused != (role < needed(route)) or answer.status_code >= 500:
                    wrong.append((route.method, route.path, role.name, answer.status_code))
        for path in ("/api/v1/changes", "/api/v1/runs/nobody/events", "/metrics"):
            assert (await client.get(path)).status_code == 401, path
        for page in PAGES:
            answer = await client.get(at(page.path))
            assert (answer.status_code, answer.headers["location"][:12]) == (303, "/login?next="), page.path
        for path in OPEN:
            assert (await client.get(path)).status_code == 200, path
    assert wrong == []


async def test_read_only_server_refuses_every_change(world):
    async with world.engine() as engine, client_of(engine, read_only=True) as client:
        for route in ROUTES:
            for method in ("POST", "PUT", "PATCH", "DELETE"):
                answer = await client.request(method, f"/api/v1{at(route.path)}", json={})
                assert (answer.status_code, answer.json()["type"]) == (403, "keepstep:read-only"), (method, route.path)


async def test_every_route_answers_methods_that_it_lacks(world):
    async with world.engine() as engine, client_of(engine) as client:
        for path in [*(f"/api/v1{at(one.path)}" for one in ROUTES), *(at(one.path) for one in PAGES)]:
            for method in ("OPTIONS", "DELETE"):
                answer = await client.request(method, path)
                assert answer.status_code == 405, (method, path)
                assert answer.headers["allow"], (method, path)
                assert answer.json()["type"] == "keepstep:method", (method, path)
            head = await client.head(path)
            assert head.status_code in {200, 303, 404, 405, 409, 422}, path
            assert head.content == b"", path


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"sec-fetch-site": "same-origin"}, 404),
        ({"origin": "http://localhost"}, 404),
        ({}, 401),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site", "origin": "http://other.localhost"}, 403),
        ({"origin": "null"}, 403),
    ],
)
async def test_cookie_counts_for_changes_of_this_site_only(world, headers, status):
    async with world.engine() as engine, client_of(engine, tokens=[TOKENS[Role.ADMIN]]) as client:
        signed = await client.post("/login", data={"token": TOKENS[Role.ADMIN]})
        assert signed.status_code == 303
        assert (await client.get("/runs")).status_code == 200
        answer = await client.post("/api/v1/runs/nobody/cancel", json={}, headers=headers)
        assert answer.status_code == status


async def test_application_is_made_again_and_again(world):
    """The module that builds it must not take the place of the function in the package."""
    from keepstep import mcp, web

    async with world.engine() as engine:
        for _ in range(2):
            assert callable(web.app(engine))
            assert mcp.server(engine).name
            assert callable(mcp.app(engine))
