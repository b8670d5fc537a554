"""`serve`: the API of a store in a process of its own, which only this machine reaches without a token."""

from __future__ import annotations

import re
import signal

import httpx
import pytest


@pytest.fixture
def served(spawn, keepstep):
    """Start a server, and return its process and its address."""
    keepstep("start", "program.py:approval", "--id", "a")

    def start(*words):
        process = spawn("serve", "program.py", "--port", "0", *words)
        line = process.stdout.readline()
        return process, re.search(r"http://[^;]+", line)[0].rstrip("/")

    return start


def test_server_shows_and_steers_runs_until_it_is_stopped(served, keepstep):
    process, url = served()
    with httpx.Client(base_url=url) as client:
        assert client.get("/api/v1/runs/a").json()["status"] == "queued"
        made = client.post("/api/v1/runs", json={"workflow": "total", "args": [1], "run_id": "t"})
        assert made.status_code == 201
        assert client.post("/api/v1/runs/a/cancel", json={"reason": "test"}).status_code == 202
    assert keepstep("show", "a", "--json").json["status"] == "cancelled"
    assert keepstep("show", "t", "--json").json["created_by"] == "web"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)


def test_prefix_and_token_hold_in_the_process(served):
    _, url = served("--prefix", "/ops", "--token", "ann:read:" + "s" * 20)
    assert url.endswith("/ops")
    base = url.removesuffix("/ops")
    assert httpx.get(f"{base}/api/v1/runs").status_code == 401
    assert httpx.get(f"{base}/api/v1/runs", headers={"authorization": "Bearer " + "s" * 20}).status_code == 200


@pytest.mark.parametrize(
    "words, message",
    [
        (("--host", "192.0.2.1"), "needs a token"),
        (("--host", "0.0.0.0", "--token", "s" * 20), "needs --name HOST"),
        (("--token", "short"), "at least 16"),
        (("--token", "boss:" + "s" * 20), "the roles are read, act, admin"),
        (("--prefix", "ops"), "--prefix begins with /"),
    ],
)
def test_unsafe_server_is_refused(keepstep, words, message):
    keepstep("start", "program.py:total", "1", "--id", "t")
    answer = keepstep("serve", *words)
    assert answer.code == 2
    assert message in answer.err
