"""The description of the API as OpenAPI 3.1, made from the table of routes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from . import api_fleet, api_looking, api_many, api_runs, api_shared, api_steering  # noqa: F401 - their routes are in the table
from .problems import Problem
from .routes import ROUTES, Content, Role, Route

_REFERENCE = "#/components/schemas/{name}"


@cache
def description(version: str) -> dict[str, Any]:
    """Return the whole description."""
    types = [Problem, *(kind for one in ROUTES for kind in (one.query, one.body, one.answer) if kind is not None)]
    unique = list(dict.fromkeys(kind for kind in types if isinstance(kind, type) and kind is not Content))
    schemas, components = msgspec.json.schema_components([*unique], ref_template=_REFERENCE)
    by_type = dict(zip(unique, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(f"/api/v1{route.path}", {})[route.method.lower()] = _operation(route, by_type, components)
    paths["/api/v1/runs/{run}/events"] = {"get": _EVENTS}
    paths["/api/v1/changes"] = {"get": _CHANGES}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Keepstep", "version": version, "description": "Runs of a Keepstep store: see and steer."},
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _PROBLEMS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(route: Route, by_type: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    answer = by_type.get(route.answer, {"type": "object"})
    if route.answer is Content:
        answer = {} if route.media_type == "application/json" else {"type": "string"}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"Needs the role `{route.role.name.lower()}`." if route.role else "Needs no token.",
        "parameters": [*_path(route), *_query(route, by_type, components)],
        "responses": {
            str(route.status): {"description": "Done.", "content": {route.media_type: {"schema": answer}}},
            **{str(status): _PROBLEM for status in _statuses(route)},
        },
    }
    if route.body is not None:
        schema = by_type[route.body]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


_PROBLEMS = {
    "Problem": {
        "description": "A problem; `type` tells which.",
        "content": {"application/problem+json": {"schema": {"$ref": _REFERENCE.format(name="Problem")}}},
    }
}
_PROBLEM = {"$ref": "#/components/responses/Problem"}


def _stream(name: str, summary: str, about: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    events = {"description": about, "content": {"text/event-stream": {"schema": {"type": "string"}}}}
    problems = {str(status): _PROBLEM for status in (401, 403, 404, 421, 422, 503)}
    return {
        "operationId": name,
        "summary": summary,
        "description": "Needs the role `read`.",
        "parameters": parameters,
        "responses": {"200": events, **problems},
    }


_NUMBER = {"type": "integer", "minimum": 0, "maximum": 2**53 - 1}
_EVENTS = _stream(
    "watch_run",
    "Stream the records of a run as they are written, one message for each, until the run has ended.",
    "Server-sent events. `record` and `tokens` have the number of a record as their `id`, and at "
    "most 500 characters of its error; `head` tells the status, the worker, whether it is alive, and the epoch, at the "
    "beginning and after each change; `end` the run as it ended; "
    "`gone` that it was removed; `damaged` that it cannot be read.",
    [
        {"name": "run", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},
        {"name": "after", "in": "query", "schema": _NUMBER},
        {"name": "follow", "in": "query", "schema": {"type": "boolean", "default": False}},
        {"name": "Last-Event-ID", "in": "header", "schema": _NUMBER},
    ],
)
_CHANGES = _stream(
    "watch_changes",
    "Stream a message when something in the store has changed, at most twice a second.",
    "Server-sent events: `changed`, first at once.",
    [],
)


def _statuses(route: Route) -> list[int]:
    always = [401, 403, 404, 409, 413, 421, 422, 429, 503, 504]
    return always if route.role is not Role.NONE else [status for status in always if status != 401]


def _path(route: Route) -> list[dict[str, Any]]:
    found = re.findall(r"\{(\w+)\}", route.path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in found]


def _query(route: Route, by_type: dict[Any, Any], components: dict[str, Any]) -> list[dict[str, Any]]:
    schema = by_type[route.query]
    schema = components[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": one}
        for name, one in schema.get("properties", {}).items()
    ]
