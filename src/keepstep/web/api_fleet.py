"""Routes of the API about the store as a whole: queues, services, schedules, channels, workers and the doctor."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from ..care.doctor import examine
from ..errors import RunNotFound
from ..policies import Breaker, Rate
from ..views import plain
from ..views.top import sample
from .api_runs import JSON
from .api_steering import Act, Done, Reason
from .routes import Ask, NotJson, Role, get, post


@get("/queues", JSON)
async def list_queues(ask: Ask) -> JSON:
    """List the queues that have limits."""
    return {"queues": [plain.queue_data(one) for one in await ask.engine.queues.list()]}


@get("/queues/{name}", JSON)
async def get_queue(ask: Ask) -> JSON:
    """Return one queue: its limits, its runs and its last changes."""
    return plain.queue_data(await ask.engine.queues.get(ask.path["name"]))


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """Limits to change, as the options of `ks.Queue` or `ks.Service`; those that are not named stay."""

    limits: dict[str, Any]
    reason: Reason = ""


class Why(msgspec.Struct, forbid_unknown_fields=True):
    """The reason of a change."""

    reason: Reason = ""


#: Limits that are objects, and their classes.
_OBJECTS: dict[str, Any] = {"rate": Rate, "spend": Rate, "breaker": Breaker}


def _given(limits: dict[str, Any]) -> dict[str, Any]:
    """Return the limits with their classes; refuse one that is named like a parameter of the change itself."""
    if taken := {"name", "reason", "self"} & set(limits):
        raise NotJson(f"limits must not have the names {', '.join(sorted(taken))}")
    given = dict(limits)
    for name, kind in _OBJECTS.items():
        if isinstance(given.get(name), dict):
            try:
                given[name] = kind(**given[name])
            except TypeError as error:
                raise NotJson(f"{name}: {error}") from None
    return given


@post("/queues/{name}/set", JSON, body=Limits, role=Role.ADMIN)
async def set_queue(ask: Ask) -> JSON:
    """Change limits of a queue; they win over the code until they are reset."""
    limits = _given(ask.body.limits)
    return plain.queue_data(await ask.engine.queues.set(ask.path["name"], reason=ask.body.reason, **limits))


@post("/queues/{name}/reset", JSON, body=Why, role=Role.ADMIN)
async def reset_queue(ask: Ask) -> JSON:
    """Let the limits that code declares hold again."""
    return plain.queue_data(await ask.engine.queues.reset(ask.path["name"], reason=ask.body.reason))


@get("/services", JSON)
async def list_services(ask: Ask) -> JSON:
    """List the services that have limits or waiting attempts."""
    return {"services": [plain.service_data(one) for one in await ask.engine.services.list()]}


@get("/services/{name}", JSON)
async def get_service(ask: Ask) -> JSON:
    """Return one service: its limits, shares, breaker and last changes."""
    return plain.service_data(await ask.engine.services.get(ask.path["name"]))


@post("/services/{name}/set", JSON, body=Limits, role=Role.ADMIN)
async def set_service(ask: Ask) -> JSON:
    """Change limits of a service; they win over the code until they are reset."""
    limits = _given(ask.body.limits)
    return plain.service_data(await ask.engine.services.set(ask.path["name"], reason=ask.body.reason, **limits))


@post("/services/{name}/reset", JSON, body=Why, role=Role.ADMIN)
async def reset_service(ask: Ask) -> JSON:
    """Let the limits that code declares hold again."""
    return plain.service_data(await ask.engine.services.reset(ask.path["name"], reason=ask.body.reason))


@post("/services/{name}/open", JSON, body=Why, role=Role.ADMIN)
async def open_breaker(ask: Ask) -> JSON:
    """Open the breaker of a service by hand, until it is closed by hand."""
    return plain.service_data(await ask.engine.services.open_breaker(ask.path["name"], reason=ask.body.reason))


@post("/services/{name}/close", JSON, body=Why, role=Role.ADMIN)
async def close_breaker(ask: Ask) -> JSON:
    """Close the breaker of a service."""
    return plain.service_data(await ask.engine.services.close_breaker(ask.path["name"], reason=ask.body.reason))


@get("/schedules", JSON)
async def list_schedules(ask: Ask) -> JSON:
    """List the schedules, with their next ticks."""
    return {"schedules": [plain.schedule_data(one) for one in await ask.engine.schedules.list()]}


@get("/schedules/{name}", JSON)
async def get_schedule(ask: Ask) -> JSON:
    """Return one schedule: its ticks, its open runs and its last changes."""
    return plain.schedule_data(await ask.engine.schedules.get(ask.path["name"]))


@post("/schedules/{name}/pause", Done, body=Why, status=202)
async def pause_schedule(ask: Ask) -> Done:
    """Let a schedule make no ticks until it is resumed."""
    await ask.engine.schedules.pause(ask.path["name"], ask.body.reason)
    return Done(ask.path["name"], "pause")


@post("/schedules/{name}/resume", Done, body=Why, status=202)
async def resume_schedule(ask: Ask) -> Done:
    """Let a paused schedule make ticks again."""
    await ask.engine.schedules.resume(ask.path["name"], ask.body.reason)
    return Done(ask.path["name"], "resume")


@post("/schedules/{name}/trigger", Done, body=Why, status=202)
async def trigger_schedule(ask: Ask) -> Done:
    """Start a run of a schedule now."""
    return Done(await ask.engine.schedules.trigger(ask.path["name"], ask.body.reason), "trigger")


class Span(msgspec.Struct, forbid_unknown_fields=True):
    """The first and the last instant of the ticks to start, with time zones."""

    first: datetime
    last: datetime
    reason: Reason = ""


@post("/schedules/{name}/backfill", JSON, body=Span, role=Role.ADMIN, status=202)
async def backfill_schedule(ask: Ask) -> JSON:
    """Start the runs of past ticks."""
    body, name = ask.body, ask.path["name"]
    return {"schedule": name, "ticks": await ask.engine.schedules.backfill(name, body.first, body.last, body.reason)}


@get("/channels", JSON)
async def list_channels(ask: Ask) -> JSON:
    """List the channels of notices."""
    return {"channels": [plain.channel_data(one) for one in await ask.engine.channels.list()]}


@get("/workers", JSON)
async def list_workers(ask: Ask) -> JSON:
    """List the workers that are alive or hold a run."""
    return {"workers": [plain.worker_data(one) for one in await ask.engine.workers()]}


@post("/workers/{worker}/drain", Done, body=Act, role=Role.ADMIN, status=202)
async def drain_worker(ask: Ask) -> Done:
    """Tell a worker to claim no more runs, and to end."""
    worker = ask.path["worker"]
    if not await ask.engine.drain(worker):
        raise RunNotFound(f"no living worker {worker!r}", worker)
    return Done(worker, "drain")


@get("/doctor", JSON)
async def get_doctor(ask: Ask) -> JSON:
    """Check that every unfinished run can go on or waits for somebody who is named."""
    return plain.report_data(await examine(ask.engine))


@get("/top", JSON)
async def get_top(ask: Ask) -> JSON:
    """Return the store at a glance: rates, queues, services, workers and slow steps."""
    return plain.sample_data(await ask.engine.call(sample, ask.engine.store))


@get("/workflows", JSON)
async def list_workflows(ask: Ask) -> JSON:
    """List the workflows that this server can start, and those that living workers know."""
    engine = ask.engine
    known = {name: one.version for name, one in engine.workflows.items() if not one.is_built_in}
    there: dict[str, list[str]] = {}
    for worker in await engine.workers():
        for name in worker.known if worker.alive else ():
            there.setdefault(name, []).append(worker.id)
    names = sorted({*known, *there})
    return {"workflows": [{"name": n, "version": known.get(n), "workers": there.get(n, [])} for n in names]}
