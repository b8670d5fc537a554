"""What leaves the server: no secret, no mark that turns the direction of text, and headers on every answer."""

import json
import re
from urllib.parse import quote

import httpx
import pytest

import keepstep as ks
from keepstep.values.secret import Secret
from keepstep.web import app
from keepstep.web.pages import render
from tests.engine.world import until_status
from tests.web.served import messages, served

pytestmark = [pytest.mark.one_store, pytest.mark.live_only]


def client_of(engine, **options):
    transport = httpx.ASGITransport(app(engine, **options), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@ks.workflow
async def leaving_a_failure():
    raise ValueError("no such account")


async def test_encrypted_failed_run_is_shown_without_its_key(tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    async with ks.open(url, keys=ks.Keys("k", {"k": b"k" * 32})) as engine:
        await until_status(await engine.start(leaving_a_failure, run_id="f"), "failed")
    async with ks.open(url, worker=False) as engine, client_of(engine) as client:
        for tab in ("", "/graph", "/values", "/audit"):
            page = await client.get(f"/runs/f{tab}")
            assert page.status_code == 200, tab
            assert "values are encrypted and hidden" in page.text
            assert "no such account" not in page.text


async def test_page_whose_template_fails_is_a_page_for_errors(world, monkeypatch, logged):
    monkeypatch.setattr(render.Look, "may", property(lambda _: 1 / 0))
    async with world.engine() as engine, client_of(engine) as client:
        answer = await client.get("/runs")
    assert answer.status_code == 500
    assert "an unexpected error" in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_unexpected_answer_of_500_has_the_headers_too(world, monkeypatch):
    monkeypatch.setattr(render, "respond", lambda *_: 1 / 0)
    async with world.engine() as engine, client_of(engine) as client:
        answer = await client.get("/login")
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["cache-control"] == "no-store"


#: A secret that JSON text writes with other characters, and a pattern that JSON text lets reach beyond its string.
PASSWORD, PATTERN = 's3cr"et\\pass-\nXYZZY', "hidden: [^?]*"


@ks.step
async def telling(value):
    ks.emit(value)
    return value


@ks.workflow
async def waiting_page():
    await ks.wait_for("approved")


@ks.workflow
async def leaking(value):
    ks.publish("told", await telling(value))
    return value


async def test_secret_leaves_in_no_form(world, monkeypatch):
    redactor = ks.Redactor([PATTERN])
    async with world.engine(redact=redactor) as engine, client_of(engine) as client, served(engine) as live:
        value = {"one": [PASSWORD], "two": "hidden: word", "three": "kept?"}
        await (await engine.start(leaking, value, run_id="r", tags={"pass": "hidden: tag"})).result()
        monkeypatch.setattr(Secret, "revealed", {PASSWORD: json.dumps(PASSWORD)[1:-1].encode()})
        texts = {path: (await client.get(path)).text for path in LEAVING}
        stream = [data async for _, _, data in messages(live, "/runs/r/events")]
        texts["the stream"] = json.dumps(stream)
        raw = json.loads(texts["/api/v1/runs/r/raw"])
    leaks = [path for path, text in texts.items() if "XYZZY" in text or "hidden: " in text]
    assert leaks == []
    assert raw == {"one": ["[redacted]"], "two": "[redacted]", "three": "kept?"}


LEAVING = [
    "/api/v1/runs",
    "/api/v1/runs/r",
    "/api/v1/runs/r/raw",
    "/api/v1/runs/r/raw?part=input",
    "/api/v1/runs/r/records?values=true",
    "/runs",
    "/runs/r",
    "/runs/r/values",
    "/runs/r/tokens",
    "/runs/r/travel",
    "/inbox",
    "/workflows/leaking/start?like=r",
]


async def test_marks_that_turn_text_reach_no_page(world):
    turned = "r\u202egnol"
    async with world.engine() as engine, client_of(engine) as client:
        await until_status(await engine.start(waiting_page, run_id=turned, tags={"a": "plain"}), "waiting")
        path = f"/runs/{quote(turned)}"
        for page in ("/", "/runs", path, f"{path}/travel", "/inbox", "/queues/default"):
            text = (await client.get(page)).text
            assert "gnol" in text, page
            assert "\u202e" not in re.sub(r'(?:id|value|data-[a-z]+)="[^"]*"', "", text), page


async def test_marks_in_stored_values_turn_no_page(world):
    turned = "r\u202egnol\x1b[31m"
    async with world.engine() as engine, client_of(engine) as client:
        await (await engine.start(leaking, turned, run_id="r")).result()
        for page in (one for one in LEAVING if one.startswith("/runs/r")):
            text = (await client.get(page)).text
            assert "\u202e" not in re.sub(r'data-[a-z]+="[^"]*"', "", text), page
            assert "\x1b" not in text, page
        assert "r\\x202egnol" in (await client.get("/runs/r/tokens")).text


async def test_client_that_leaves_within_its_request_is_no_failure(world, caplog):
    async with world.engine() as engine:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/api/v1/runs",
            "raw_path": b"/api/v1/runs",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost")],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        parts = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
        sent = []

        async def receive():
            return parts.pop(0) if len(parts) > 1 else parts[0]

        async def send(message):
            sent.append(message)

        await app(engine)(scope, receive, send)
    assert sent[0]["status"] == 400
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@ks.workflow
async def leaving_a_long_failure():
    raise ValueError("x" * 5000)


async def test_messages_of_a_stream_are_small(world):
    async with world.engine() as engine, served(engine) as live:
        await until_status(await engine.start(leaving_a_long_failure, run_id="f"), "failed")
        found = [(kind, data) async for kind, _, data in messages(live, "/runs/f/events")]
    assert max(len(json.dumps(data)) for _, data in found) < 1200
    assert "raceback" not in json.dumps(found)
    assert any(data["error"]["type"] == "ValueError" for kind, data in found if kind == "record" and data["error"])


async def test_path_that_leads_nowhere_is_a_page_for_a_browser(world):
    async with world.engine() as engine, client_of(engine) as client:
        answer = await client.get("/run/r<b>", headers={"accept": "text/html,*/*"})
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert "r&lt;b&gt;" in answer.text
        assert (await client.get("/run/r")).json()["type"] == "keepstep:not-found"


async def test_front_page_does_not_call_open_failures_well(world):
    async with world.engine() as engine, client_of(engine) as client:
        await engine.start(leaving_a_failure, run_id="r")
        await until_status(await engine.get("r"), "failed")
        text = (await client.get("/")).text
        assert "failed runs are open" in text
        assert "All is well" not in text


async def test_times_are_told_without_a_script(world):
    """A live page is fetched again and again: its times must not flicker until the script has rewritten them."""
    async with world.engine() as engine, client_of(engine) as client:
        await until_status(await engine.start(waiting_page, run_id="r"), "waiting")
        text = (await client.get("/runs/r/audit")).text
        shown = re.findall(r"<time[^>]*>([^<]*)</time>", text)
        assert shown
        assert not [one for one in shown if "T" in one]
        assert any(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}", one) for one in shown)
