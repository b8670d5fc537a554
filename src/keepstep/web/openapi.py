"""The description of the API as OpenAPI 3.1, made from the table of routes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import msgspec

from .problems import Problem
from .routes import ROUTES, Role, Route

_REFERENCE = "#/components/schemas/{name}"


@cache
def description(version: str) -> dict[str, Any]:
    """Return the whole description."""
    types = [Problem, *(kind for one in ROUTES for kind in (one.query, one.body, one.answer) if kind is not None)]
    unique = list(dict.fromkeys(kind for kind in types if isinstance(kind, type)))
    schemas, components = msgspec.json.schema_components([*unique], ref_template=_REFERENCE)
    by_type = dict(zip(unique, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(f"/api/v1{route.path}", {})[route.method.lower()] = _operation(route, by_type, components)
    paths["/api/v1/runs/{run}/events"] = {"get": _EVENTS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Keepstep", "version": version, "description": "Runs of a Keepstep store: see and steer."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _operation(route: Route, by_type: dict[Any, Any], components: dict[str, Any]) -> dict[str, Any]:
    answer = by_type.get(route.answer, {"type": "object"})
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "description": f"Needs the role `{route.role.name.lower()}`." if route.role else "Needs no token.",
        "parameters": [*_path(route), *_query(route, by_type, components)],
        "responses": {
            str(route.status): {"description": "Done.", "content": {"application/json": {"schema": answer}}},
            **{str(status): _PROBLEM for status in _statuses(route)},
        },
    }
    if route.body is not None:
        schema = by_type[route.body]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


_PROBLEM = {
    "description": "A problem; `type` tells which.",
    "content": {"application/problem+json": {"schema": {"$ref": _REFERENCE.format(name="Problem")}}},
}
_EVENTS = {
    "operationId": "watch_run",
    "summary": "Stream the records of a run as they are written, one message for each, until the run has ended.",
    "parameters": [
        {"name": "run", "in": "path", "required": True, "schema": {"type": "string"}},
        {"name": "after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
    ],
    "responses": {
        "200": {"description": "Server-sent events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
        "401": _PROBLEM,
        "404": _PROBLEM,
        "422": _PROBLEM,
    },
}


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
