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
    assert process.wait(30) == 0


def test_server_takes_no_acts_for_a_store_that_was_moved_away(served, tmp_path):
    _, url = served()
    file = tmp_path / ".keepstep" / "runs.db"
    with httpx.Client(base_url=url) as client:
        file.rename(tmp_path / "moved.db")
        refused = client.post("/api/v1/runs", json={"workflow": "total", "args": [1]})
        assert (refused.status_code, refused.json()["type"]) == (503, "keepstep:store")
        assert "moved or removed" in refused.json()["detail"]
        assert client.get("/readyz").status_code == 503
        (tmp_path / "moved.db").rename(file)
        assert client.get("/readyz").status_code == 200
        assert client.post("/api/v1/runs/a/cancel", json={}).status_code == 202


def test_server_stops_at_once_although_pages_are_open(served):
    process, url = served()
    with (
        httpx.stream("GET", f"{url}/api/v1/changes") as changes,
        httpx.stream("GET", f"{url}/api/v1/runs/a/events") as events,
    ):
        assert next(changes.iter_lines()) == "event: changed"
        assert next(events.iter_lines()) == "event: head"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    out, err = process.communicate()
    assert "Traceback" not in f"{out}{err}"
    assert "ERROR" not in f"{out}{err}"


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
        (("--prefix", "ops"), "a prefix has the form /NAME"),
        (("--prefix", "/runs"), "is the path of a page"),
    ],
)
def test_unsafe_server_is_refused(keepstep, words, message):
    keepstep("start", "program.py:total", "1", "--id", "t")
    answer = keepstep("serve", *words)
    assert answer.code == 2
    assert message in answer.err
