"""Routes of the API about the store as a whole: queues, services, schedules, channels, workers and the doctor."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec

from ..care.doctor import examine
from ..engine.start import definition_of
from ..errors import RunNotFound
from ..policies import Breaker, Rate
from ..views import plain
from ..views.start_form import OPTIONS, command_of, parameters_of, started_by
from ..views.top import sample
from ..views.workflows import facts_data, startable, workflow_data, workflow_facts, workflows
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
    """Limits to change, as the options of `ks.Queue` or `ks.Service`; those that are not named stay.

    A limit may also be written as on the command line: `none` lifts it, and a rate is `100/60/10`.
    """

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
    given = {name: None if value == "none" else value for name, value in limits.items()}
    for name, value in given.items():
        if isinstance(value, str) and name in _OBJECTS:
            given[name] = _OBJECTS[name].written(value)
        elif isinstance(value, str) and value.isdecimal() and len(value) < 20:
            given[name] = int(value)
    for name, kind in _OBJECTS.items():
        if isinstance(value := given.get(name), dict):
            try:
                given[name] = kind(**value)
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


@post("/schedules/{name}/remove", Done, body=Why, role=Role.ADMIN, status=202)
async def remove_schedule(ask: Ask) -> Done:
    """Remove a schedule; its runs go on. One that living workers declare is refused."""
    await ask.engine.schedules.remove(ask.path["name"], ask.body.reason)
    return Done(ask.path["name"], "remove")


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


@get("/agents", JSON)
async def list_agents(ask: Ask) -> JSON:
    """List the agents that have a living host or had one lately, with their health."""
    return {"agents": [plain.agent_data(one) for one in await ask.engine.agents.list()]}


@get("/agents/{name}", JSON)
async def get_agent(ask: Ask) -> JSON:
    """Return one agent: its health with its parts, its load, and its hosts."""
    return plain.agent_data(await ask.engine.agents.get(ask.path["name"]))


class Drain(Why):
    """The worker on which the agent is drained; without one, on all."""

    worker: str = ""


@post("/agents/{name}/drain", JSON, body=Drain, role=Role.ADMIN)
async def drain_agent(ask: Ask) -> JSON:
    """Give an agent no more tasks; its current ones go on."""
    body = ask.body
    return plain.agent_data(await ask.engine.agents.drain(ask.path["name"], worker=body.worker, reason=body.reason))


@post("/agents/{name}/resume", JSON, body=Why, role=Role.ADMIN)
async def resume_agent(ask: Ask) -> JSON:
    """Give a drained agent tasks again, on all its hosts."""
    return plain.agent_data(await ask.engine.agents.resume(ask.path["name"], reason=ask.body.reason))


class Probe(msgspec.Struct, forbid_unknown_fields=True):
    """Seconds to wait for the hosts."""

    timeout: Annotated[float, msgspec.Meta(ge=0, le=60)] = 15.0


@post("/agents/{name}/probe", JSON, body=Probe)
async def probe_agent(ask: Ask) -> JSON:
    """Let the hosts of an agent probe it now, and return the agent after that."""
    return plain.agent_data(await ask.engine.agents.probe(ask.path["name"], timeout=ask.body.timeout))


@get("/topics", JSON)
async def list_topics(ask: Ask) -> JSON:
    """List the topics, with their subscribers and the publishers that wait."""
    return {"topics": [plain.topic_data(one) for one in await ask.engine.topics.list()]}


class Recent(msgspec.Struct, forbid_unknown_fields=True):
    """The number of newest messages to return."""

    recent: Annotated[int, msgspec.Meta(ge=0, le=100)] = 10


@get("/topics/{name}", JSON, query=Recent)
async def get_topic(ask: Ask) -> JSON:
    """Return one topic with its newest messages that are still stored, the oldest of them first."""
    topics, name = ask.engine.topics, ask.path["name"]
    found = await topics.get(name)
    shown: JSON = await ask.shown(plain.topic_data(found, await topics.recent_raw(name, ask.query.recent)), "recent")
    return shown


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message, and the seconds to wait while a subscriber is far behind."""

    value: Any = None
    timeout: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0


@post("/topics/{name}/publish", Done, body=Message, status=202)
async def publish(ask: Ask) -> Done:
    """Publish a message to a topic, which is created if there is none."""
    name, body = ask.path["name"], ask.body
    await ask.engine.topics.publish(name, body.value, timeout=body.timeout)
    return Done(name, "publish")


@get("/channels", JSON)
async def list_channels(ask: Ask) -> JSON:
    """List the channels of notices."""
    return {"channels": [plain.channel_data(one) for one in await ask.engine.channels.list()]}


class Test(msgspec.Struct, forbid_unknown_fields=True):
    """The text of the notice."""

    text: Annotated[str, msgspec.Meta(max_length=1000)] = "this is a test"


@post("/channels/{name}/test", Done, body=Test, status=202)
async def test_channel(ask: Ask) -> Done:
    """Send a channel a notice, which is delivered like any other."""
    name = ask.path["name"]
    await ask.engine.channels.test(name, ask.engine.redaction.redact(ask.body.text))
    return Done(name, "test")


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
    """List the workflows that this server can start, that living workers know, or that new runs have."""
    return {"workflows": [workflow_data(one) for one in await workflows(ask.engine)]}


@get("/workflows/{name}", JSON)
async def get_workflow(ask: Ask) -> JSON:
    """Return one workflow: its versions, runs, durations, common errors and steps, and the fields of its input."""
    engine, name = ask.engine, ask.path["name"]
    known = startable(engine).get(name)
    found = facts_data(await workflow_facts(engine, name))
    parameters = None if known is None else [msgspec.to_builtins(one) for one in parameters_of(known)]
    shown: JSON = await ask.shown({**found, "input": parameters})
    return shown


class StartForm(msgspec.Struct, forbid_unknown_fields=True):
    """A new run by the texts of a form: one for each parameter, and the options of a start.

    With `dry`, nothing is started. `tags` has the form NAME=VALUE, several of them on lines of their own.
    """

    input: dict[str, str] = {}
    run_id: str = ""
    queue: str = ""
    priority: str = ""
    delay: str = ""
    deadline: str = ""
    key: str = ""
    dedupe: str = ""
    tags: str = ""
    dry: bool = False


@post("/workflows/{name}/start", JSON, body=StartForm)
async def start_by_form(ask: Ask) -> JSON:
    """Start a run by the texts of a form, or only check them; a problem names each field that does not fit."""
    engine, body = ask.engine, ask.body
    workflow = definition_of(startable(engine), ask.path["name"])
    args, kwargs, options = started_by(workflow, body.input, {name: getattr(body, name) for name in OPTIONS})
    answer: JSON = await ask.shown({"command": command_of(workflow, body.input, options)})
    if body.dry:
        return answer
    handle = await engine.start(workflow, *args, **options, **kwargs)
    return {**await ask.shown(plain.run_data(await handle.run())), **answer}
