"""Channels: the commit that leaves a run to a person tells them, and a few signed deliveries tell the person."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.engine import channels as engine_channels
from keepstep.errors import DefinitionError
from keepstep.model import RunQuery
from keepstep.model.keepers import channel_id
from keepstep.policies.service import DECLARED
from keepstep.workflows import channel as channel_module
from keepstep.workflows.channel import CHANNELS
from keepstep.workflows.definition import KNOWN, SERVICES
from tests.engine.lives import set_aside
from tests.engine.world import until, until_status

pytestmark = pytest.mark.live_only

SIGNING = "a signing secret of the tests"


class Receiver:
    """An HTTP server that keeps what it is sent, and answers with the next of `answers`, or 204."""

    def __init__(self):
        self.requests, self.answers = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.requests.append(({name.lower(): value for name, value in self.headers.items()}, body))
                self.send_response(outer.answers.pop(0) if outer.answers else 204)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?token=very-secret-token"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def digests(self):
        return [json.loads(body) for _, body in self.requests]


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setattr(channel_module, "DELIVERY_RETRY", ks.Retry(attempts=4, base_seconds=0.01))
    made = Receiver()
    monkeypatch.setenv("HOOK_URL", made.url)
    monkeypatch.setenv("HOOK_SECRET", SIGNING)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def _no_channels():
    def forget():
        for one in CHANNELS.values():
            KNOWN.pop(one.delivery.name, None)
        CHANNELS.clear()
        DECLARED.clear()
        SERVICES.clear()

    forget()
    yield
    forget()


def hooked(name="ops", **options):
    return ks.Channel(name, webhook=ks.Secret("HOOK_URL"), secret=ks.Secret("HOOK_SECRET"), gather=0.1, **options)


@ks.workflow
async def breaks(number=0):
    raise ValueError(f"number {number} is broken")


@pytest.mark.on_postgres
async def test_a_failed_run_is_told_by_a_signed_request(world, receiver):
    hooked()
    async with world.engine(workflows=[breaks]) as engine:
        run = await engine.start(breaks, 7, run_id="r7")
        await until_status(run, "failed")
        await until(lambda: receiver.requests, "a delivery")
        assert not [one for one in (await engine.list()).runs if one.id.startswith("ks:")]
        info = await settled(engine)
        assert (info.name, info.attended, info.declared, info.delivered) == ("ops", True, True, 1)
        assert (info.undelivered, info.failures, info.failed) == (0, 0, ())
    headers, body = receiver.requests[0]
    digest = json.loads(body)
    assert (digest["channel"], digest["number"], digest["total"]) == ("ops", 1, 1)
    assert digest["counts"] == [{"topic": "failed", "workflow": "breaks", "count": 1}]
    (notice,) = digest["notices"]
    assert (notice["topic"], notice["about"], notice["workflow"]) == ("failed", "r7", "breaks")
    assert notice["text"] == "ValueError: number 7 is broken"
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(SIGNING.encode(), signed, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"


async def test_failures_at_once_become_one_delivery(world, receiver):
    ks.Channel("ops", webhook=receiver.url, gather=0.5)
    async with world.engine(workflows=[breaks]) as engine:
        for number in range(30):
            await engine.start(breaks, number)
        await until(lambda: receiver.requests, "a delivery")
    assert [one["total"] for one in receiver.digests] == [30]
    assert len(receiver.digests[0]["notices"]) == 20


async def test_many_failures_are_counted_and_few_signals_sent(world, receiver, monkeypatch):
    monkeypatch.setattr(engine_channels, "MOST_SENT", 10)
    monkeypatch.setattr(engine_channels, "SPAN_SECONDS", 0.2)
    ks.Channel("ops", webhook=receiver.url, gather=0.1)
    async with world.engine(workflows=[breaks]) as engine:
        await asyncio.gather(*(engine.start(breaks, number) for number in range(300)))
        await until(lambda: sum(one["total"] for one in receiver.digests) >= 300, "all notices")
        signals = await engine.signals(channel_id("ops"))
    assert sum(one["total"] for one in receiver.digests) == 300
    assert len(signals) < 150
    assert len(receiver.requests) < 30


async def test_a_delivery_is_retried_and_keeps_its_id(world, receiver):
    receiver.answers = [503, 429]
    hooked()
    async with world.engine(workflows=[breaks]) as engine:
        await engine.start(breaks)
        await until(lambda: len(receiver.requests) == 3, "the third request")
        await until_status(await delivery(engine), "completed")
    assert len({headers["webhook-id"] for headers, _ in receiver.requests}) == 1


async def test_nothing_is_told_about_deliveries(world, receiver):
    receiver.answers = [400] * 10
    hooked()
    async with world.engine(workflows=[breaks]) as engine:
        await engine.start(breaks)
        await until_status(await delivery(engine), "failed")
        failed = (await engine.list(RunQuery(workflow="keepstep.deliver:ops"))).runs
        assert [one.status.value for one in failed] == ["failed"]
        await engine.start(breaks)
        await until(lambda: any(one["number"] == 2 for one in receiver.digests), "the next delivery")
    told = {one["about"] for digest in receiver.digests for one in digest["notices"]}
    assert told.isdisjoint(one.id for one in failed)


async def settled(engine):
    """Return the channel when it knows the end of its first delivery."""
    seen = []

    async def known():
        seen[:] = await engine.channels.list()
        return seen[0].delivered + seen[0].failures > 0

    await until(known, "the end of the delivery")
    return seen[0]


async def test_a_failed_delivery_is_counted_and_the_doctor_warns_until_it_is_retried(world, receiver):
    receiver.answers = [400] * 4
    hooked()
    async with world.engine(workflows=[breaks]) as engine:
        await engine.start(breaks)
        run = await delivery(engine)
        info = await settled(engine)
        assert (info.delivered, info.undelivered, info.failures, info.failed) == (0, 1, 1, (run.id,))
        (found,) = [one for one in (await examine(engine)).findings if one.code == "channel-failed"]
        assert found.runs == (run.id,)
        assert f"keepstep retry {run.id}" in found.advice
        await run.retry()
        await until_status(run, "completed")
        assert not [one for one in (await examine(engine)).findings if one.code == "channel-failed"]


async def test_a_worker_warns_of_a_missing_secret_when_it_starts(world, receiver, monkeypatch, caplog):
    hooked()
    monkeypatch.delenv("HOOK_SECRET")
    async with world.engine(workflows=[breaks]):
        pass
    (warned,) = [one.getMessage() for one in caplog.records if "cannot deliver" in one.getMessage()]
    assert "channel 'ops'" in warned
    assert "'HOOK_SECRET' is not set" in warned


async def delivery(engine):
    """Return the first delivery, when there is one."""

    async def found():
        return await engine.stored_run("keepstep.deliver:ops:1") is not None

    await until(found, "the delivery")
    return await engine.get("keepstep.deliver:ops:1")


def test_secrets_are_neither_stored_nor_logged(tmp_path, receiver, caplog):
    receiver.answers = [500] * 4
    hooked()

    async def fail():
        async with ks.open(tmp_path / "runs.db", workflows=[breaks], observers="log") as engine:
            await engine.start(breaks)
            await until_status(await delivery(engine), "failed")

    asyncio.run(fail())
    stored = (tmp_path / "runs.db").read_bytes()
    assert b"number 0 is broken" in stored
    for secret in (SIGNING, "very-secret-token"):
        assert secret.encode() not in stored
        assert secret not in caplog.text


async def test_a_run_that_is_set_aside_is_told(world, receiver):
    hooked()
    async with set_aside(world):
        await until(lambda: receiver.requests, "a delivery")
    (notice,) = receiver.digests[0]["notices"]
    assert (notice["topic"], notice["about"], notice["workflow"]) == ("set_aside", "r", "changing")
    assert "version" in notice["text"]


async def test_a_step_in_doubt_is_told_once(world, receiver):
    hooked()

    @ks.step(at_most_once=True, timeout=0.05)
    async def launch():
        await asyncio.sleep(60)

    @ks.workflow
    async def rocket():
        await launch()

    async with world.engine(workflows=[rocket]) as engine:
        run = await engine.start(rocket, run_id="moon")
        await until(lambda: receiver.requests, "a delivery")
        await run.pause()
        await until_status(run, "paused")
        await run.resume()
        await until_status(run, "waiting")
        await engine.start(rocket, run_id="mars")
        await until(lambda: len(receiver.requests) == 2, "the second delivery")
    notices = [one for digest in receiver.digests for one in digest["notices"]]
    assert [(one["topic"], one["about"]) for one in notices] == [("in_doubt", "moon"), ("in_doubt", "mars")]
    assert notices[0]["text"] == "step launch#1 may or may not have happened"


async def test_an_open_breaker_is_told_once(world, monkeypatch):
    monkeypatch.setattr(engine_channels, "AGAIN_SECONDS", 1e12)
    told = []
    ks.Channel("ops", notify=told.append, on=["breaker"], gather=0.1)
    ks.Service("api", breaker=ks.Breaker(failures=1, open_seconds=0.2), when_open="fail")

    @ks.step(service="api")
    async def call():
        raise ConnectionError("refused")

    @ks.workflow
    async def calling():
        await call()

    async with world.engine(workflows=[calling]) as engine:
        opened = 0
        while opened < 2:  # a failed probe opens it again
            with pytest.raises(ks.RunFailed):
                await (await engine.start(calling)).result(60)
            opened = engine.counts.failures
            await asyncio.sleep(0.25)
        await until(lambda: told, "a notice")
        signals = await engine.signals(channel_id("ops"))
    assert [one["notices"][0]["about"] for one in told] == ["api"]
    assert "breaker of service api has opened" in told[0]["notices"][0]["text"]
    assert len([one for one in signals if one.id.startswith("breaker:")]) == 1


async def test_a_wait_is_told_if_the_channel_wants_it(world):
    told, other = [], []
    ks.Channel("people", notify=told.append, on=["waiting"], gather=0.1)

    async def collect(digest):
        other.append(digest)

    ks.Channel("others", notify=collect, gather=0.1)

    @ks.workflow
    async def approval():
        await ks.wait_for("approved")

    async with world.engine(workflows=[approval, breaks]) as engine:
        run = await engine.start(approval, run_id="a")
        await until(lambda: told, "a notice")
        assert told[0]["notices"][0]["text"] == "waits for signal 'approved'"
        await run.signal("approved")
        await run.result()
        await engine.start(breaks)
        await until(lambda: other, "the other notice")
    assert [one["total"] for one in told] == [1]
    assert [one["notices"][0]["topic"] for one in other] == ["failed"]


async def test_notices_wait_for_a_worker_that_delivers_them(world, receiver):
    """The commit that fails the run holds the notice: a crash just after it loses nothing."""
    hooked()
    engine = await world.started(workflows=[breaks])
    run = await engine.start(breaks, run_id="lost")
    await until_status(run, "failed")
    engine = await world.crash_and_recover(engine, workflows=[breaks])
    await until(lambda: receiver.requests, "a delivery")
    await engine.close()
    assert receiver.digests[0]["notices"][0]["about"] == "lost"


async def test_a_test_is_delivered_and_an_unknown_channel_refused(world, receiver):
    hooked()
    async with world.engine(workflows=[breaks]) as engine:
        await engine.channels.test("ops", "hello")
        await until(lambda: receiver.requests, "a delivery")
        with pytest.raises(DefinitionError, match="no channel 'nobody'"):
            await engine.channels.test("nobody")
    assert receiver.digests[0]["notices"][0]["text"] == "hello"


def test_notices_are_encrypted_in_the_store(tmp_path, receiver):
    hooked()
    keys = ks.Keys("a", {"a": b"k" * 32})

    async def fail():
        async with ks.open(tmp_path / "runs.db", workflows=[breaks], keys=keys) as engine:
            await engine.start(breaks, 31)
            await until(lambda: receiver.requests, "a delivery")
            await until_status(await delivery(engine), "completed")

    asyncio.run(fail())
    assert receiver.digests[0]["notices"][0]["text"] == "ValueError: number 31 is broken"
    for path in tmp_path.glob("runs.db*"):
        if path.is_file():
            assert b"number 31 is broken" not in path.read_bytes()


def test_channels_on_a_blocking_engine(tmp_path):
    told = []
    ks.Channel("ops", notify=told.append, gather=0.1)
    with ks.open(f"{tmp_path}/runs.db", workflows=[breaks]) as engine:
        engine.channels.test("ops")
        assert [one.name for one in engine.channels.list()] == ["ops"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "either webhook= or notify="),
        ({"webhook": "ftp://a"}, "begins with https://"),
        ({"webhook": "https://a", "secret": "plain"}, "must be a ks.Secret"),
        ({"webhook": "https://a", "on": ["fail"]}, "no topic 'fail'; choose from failed"),
        ({"notify": 3}, "must be a function of one dict, got int"),
        ({"notify": print, "secret": ks.Secret("A")}, "notify= makes none"),
        ({"webhook": "https://a", "gather": 0}, "gather"),
    ],
)
def test_a_wrong_channel_is_refused(options, message):
    with pytest.raises(DefinitionError, match=message):
        ks.Channel("ops", **options)
