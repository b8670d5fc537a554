"""Every route of the API, fuzzed from its description: no failure of the server, and answers as they are described."""

import asyncio
import copy
import threading
import time

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

import keepstep as ks
from keepstep.web import app
from keepstep.web.openapi import description
from keepstep.workflows.definition import KNOWN
from tests.engine.world import until_status
from tests.nightly import examples

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
#: Streams do not end; `test_live` is about them.
STREAMS = {"watch_run", "watch_changes"}
#: Longest that a fuzzed request may ask the server to wait.
WAIT_SECONDS = 0.05

#: The statuses of a request whose wait was over, and of a store that is busy.
WAITED = {503, 504}

RUNS = ["queued", "waiting", "paused", "completed", "failed", "cancelled", "aside", "graph", "doubt", "parent"]
NAMES = {
    "run": RUNS,
    "name": ["mail", "bank", "hourly", "simple", "news"],
    "namespace": ["facts"],
    "worker": ["worker-0"],
    "seq": ["1", "2", "3", "9999"],
    "digest": ["0" * 64],
    "token": ["nonsense"],
}


@ks.step
async def double(number):
    ks.emit(number)
    return number * 2


async def populate(engine):  # noqa: C901 - each workflow is defined beside the others
    """Runs in every status that needs no crash, and one of everything else."""

    @ks.workflow(name="simple")
    async def simple(number: int = 1):
        ks.publish("question", f"double {number}?")
        await ks.wait_for("approved")
        if number < 0:
            raise ValueError("negative")
        return await double(number)

    def broken(number):
        raise ValueError("cannot be undone")

    @ks.step(undo=broken)
    async def charge():
        return 1

    @ks.workflow(name="undoing")
    async def undoing():
        await charge()
        raise ValueError("failed")

    @ks.step(at_most_once=True, timeout=0.01)
    def launch():
        time.sleep(0.1)

    @ks.workflow(name="launching")
    async def launching():
        await launch()

    @ks.workflow(name="parent")
    async def parent():
        await (await ks.start(simple, 3))

    graph = ks.Graph("graph", reducers={"log": "append"})

    @graph.step
    async def begin(state):
        return {"log": ["begin"], "count": 1}

    graph.entry("begin")
    graph.exit("begin")
    ks.Queue("mail", concurrency=2)
    ks.Service("bank", concurrency=1, breaker=ks.Breaker())
    await engine.queues.open()
    await engine.services.open()
    await engine.start(simple, 1, run_id="queued", delay=3600)
    for name, number in (("waiting", 1), ("paused", 2), ("completed", 3), ("failed", -1), ("cancelled", 4)):
        await until_status(await engine.start(simple, number, run_id=name, tags={"a": "b"}), "waiting")
    for name in ("completed", "failed"):
        await (await engine.get(name)).signal("approved")
    await (await engine.get("paused")).pause("later")
    await (await engine.get("cancelled")).cancel("never")
    await (await engine.start(graph, {}, run_id="graph")).reached("completed", "failed")
    await engine.start(undoing, run_id="aside")
    await engine.start(launching, run_id="doubt")
    await engine.start(parent, run_id="parent")
    statuses = {"paused": "paused", "completed": "completed", "failed": "failed", "cancelled": "cancelled"}
    for name, status in {**statuses, "aside": "set aside", "doubt": "waiting", "parent": "waiting"}.items():
        await until_status(await engine.get(name), status)
    await ks.Memory("facts", engine=engine).put("a", [1, 2])
    await engine.publish("news", {"a": 1})
    await engine.schedule("hourly", simple, ks.Every(3600))


class Served(threading.Thread):
    """A server with its engine on a loop of its own, because fuzzing is blocking code."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url = url
        self.ready = threading.Event()
        self.failed = None

    def run(self):
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failed = error
            raise
        finally:
            self.ready.set()

    async def _serve(self):
        async with ks.open(self.url, linger_seconds=0.01, power_loss="may_lose_last") as engine:
            await populate(engine)
            config = uvicorn.Config(app(engine), port=0, lifespan="off", log_level="error")
            self.server = uvicorn.Server(config)
            listening = config.bind_socket()
            listening.listen()
            self.base = f"http://127.0.0.1:{listening.getsockname()[1]}"
            self.ready.set()
            await self.server.serve(sockets=[listening])


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    before = dict(KNOWN)
    server = Served(f"sqlite:///{tmp_path_factory.mktemp('fuzzed')}/runs.db")
    server.start()
    server.ready.wait(60)
    assert server.failed is None
    yield server.base
    server.server.should_exit = True
    server.join(30)
    KNOWN.clear()
    KNOWN.update(before)


def narrowed():
    """The description, with names that exist, and with short waits."""
    found = copy.deepcopy(description("0"))
    for operations in found["paths"].values():
        for operation in operations.values():
            for one in operation["parameters"]:
                if one["in"] == "path":
                    one["schema"] = {"anyOf": [{"enum": NAMES[one["name"]]}, one["schema"]]}
    for schema in found["components"]["schemas"].values():
        if "timeout" in (properties := schema.get("properties", {})):
            properties["timeout"] = {
                "type": "number",
                "minimum": 0.001,
                "maximum": WAIT_SECONDS,
                "default": WAIT_SECONDS,
            }
            schema["required"] = [*schema.get("required", []), "timeout"]
    return schemathesis.openapi.from_dict(found)


OPERATIONS = {one.ok().definition.raw["operationId"]: one.ok() for one in narrowed().get_all_operations()}
assert set(OPERATIONS) >= STREAMS


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - STREAMS))
def test_route_keeps_its_description(served, name, mode):
    operation = OPERATIONS[name]
    if mode is GenerationMode.NEGATIVE and not (operation.query or operation.body):
        pytest.skip("it takes nothing but names, and every text may be one")
    checks = [*CHECKS, negative_data_rejection] if mode is GenerationMode.NEGATIVE else CHECKS

    @settings(
        max_examples=examples(4, 100),
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case):
        response = case.call(base_url=served, timeout=30)
        excluded = [not_a_server_error] if response.status_code in WAITED else []
        case.validate_response(response, checks=checks, excluded_checks=excluded)

    fuzz()
