"""Large values are prepared for people in threads, so that one page of them does not stop the server for everybody."""

import threading

import httpx
import pytest

import keepstep as ks
from keepstep.kernel.redaction import Redaction
from keepstep.web import app
from tests.engine.world import until_status

pytestmark = [pytest.mark.one_store, pytest.mark.live_only]

#: Characters of a value that is large here; names and sentences are shorter.
LARGE = 50_000


@ks.step
async def enlarge(text):
    return text


@ks.step
async def shrink(text):
    raise ks.Permanent(text)


@ks.workflow
async def large(text, fails):
    ks.publish("question", text)
    await enlarge(text)
    await ks.wait_for("approved")
    return await (shrink if fails else enlarge)(text)


PAGES = [
    *("/", "/runs", "/inbox", "/compare?a=failed&b=waiting", "/compare?a=failed&b=done&show=all"),
    *(f"/runs/{run}{tab}" for run in ("waiting", "failed", "done") for tab in ("", "/values", "/signals", "/audit")),
    *(f"/runs/done/{tab}" for tab in ("travel", "travel?at=0", "travel?at=3", "graph", "conversation", "tokens")),
    *("/workflows/large/start?like=done", "/api/v1/inbox", "/api/v1/runs", "/api/v1/runs/done/diff?a=1&b=5"),
    *(f"/api/v1/runs/done{end}" for end in ("", "/raw", "/records?values=true", "/signals?values=true", "/figure")),
    *(f"/api/v1/runs/done/{end}" for end in ("conversation", "explain", "recovery", "audit", "timeline")),
]


async def test_large_texts_are_searched_for_secrets_off_the_loop(world, monkeypatch):
    text, loop, searched = "word " * (LARGE // 5), threading.get_ident(), []
    redact = Redaction.redact

    def seen(self, text):
        searched.append((len(text) >= LARGE, threading.get_ident() == loop))
        return redact(self, text)

    async with world.engine() as engine:
        for run, fails in (("waiting", False), ("failed", True), ("done", False)):
            await until_status(await engine.start(large, text, fails, run_id=run), "waiting")
        for run, status in (("failed", "failed"), ("done", "completed")):
            await engine.signal(run, "approved", {"text": text})
            await until_status(await engine.get(run), status)
        await engine.signal("waiting", "later", {"text": text})
        monkeypatch.setattr(Redaction, "redact", seen)
        transport = httpx.ASGITransport(app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            held = []
            for page in PAGES:
                searched.clear()
                answer = await client.get(page)
                assert answer.status_code == 200, (page, answer.text)
                if (True, True) in searched:
                    held.append(page)
    print(held)
    assert held == []
