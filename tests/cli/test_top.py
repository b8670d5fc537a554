"""`top`: one sample for a person and for a program, and the live view in a terminal."""

from __future__ import annotations

import base64
import os
import pty
import select
import subprocess
import sys
import time
from datetime import UTC, datetime

import pytest

from keepstep.cli.top import _printed
from keepstep.model import WorkerInfo
from keepstep.model.agent import AGENTS, AgentRecord, HostedAgent, agents_text
from keepstep.stores.memory import MemoryStore
from keepstep.views.top import AgentSample, sample
from tests.cli.conftest import ROOT


def test_a_sample_shows_workers_queues_and_slow_steps(keepstep, spawn, folder, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # in a pipe nothing is cut
    (folder / "load.py").write_text(
        "import time\nimport keepstep as ks\n\nmail = ks.Queue('mail', concurrency=2)\n\n\n@ks.step\ndef crunch():\n"
        "    time.sleep(0.15)\n\n\n@ks.workflow(queue=mail)\nasync def job():\n    await crunch()\n",
        encoding="utf-8",
    )
    worker = spawn("worker", "load.py", "-q")
    for number in range(3):
        keepstep("start", "load.py:job", "--id", f"j{number}")
    until = time.monotonic() + 60
    while not (shown := keepstep("top", "--json").json)["slow_steps"]:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert [one["queue"] for one in shown["queues"]] == ["default", "mail"]
    assert shown["queues"][1]["limits"] == {"concurrency": 2}
    (only,) = shown["workers"]
    assert (only["pid"], only["alive"], only["halted"]) == (worker.pid, True, 0)
    assert shown["slow_steps"][0]["step"] == "crunch"
    assert only["resources"]["resident_bytes"] > 10_000_000
    assert only["resources"]["threads"] > 1
    text = keepstep("top", "--once").out
    for word in ("runs/s", "mail", "concurrency 2", "claims", str(worker.pid), "SLOW STEP", "crunch"):
        assert word in text


def test_what_a_person_has_to_do_comes_first(keepstep, folder):
    (folder / "care.py").write_text(
        "import keepstep as ks\n\n\n@ks.workflow\nasync def asking():\n    await ks.wait_for('approved')\n\n\n"
        "@ks.workflow\nasync def broken():\n    raise ks.Permanent('no')\n",
        encoding="utf-8",
    )
    for name in ("asking", "broken", "broken"):
        keepstep("start", f"care.py:{name}")
    keepstep("worker", "care.py", "-q", "--until-idle")
    keepstep("start", "care.py:asking")
    lines = keepstep("top", "--once").out.splitlines()
    assert lines[1:3] == [
        "1 waiting for a person (keepstep list --needs-person)",
        "2 failed and still open (keepstep list --open-failures)",
    ]
    assert lines[3].startswith("the oldest run that waits to begin: ")
    shown = keepstep("top", "--json").json
    assert (shown["needs_person"], shown["open_failures"], bool(shown["oldest_at"])) == (1, 2, True)
    assert keepstep("list", "--needs-person", "--json").json["runs"]
    assert len(keepstep("list", "--open-failures", "--json").json["runs"]) == 2


def test_agents_are_shown_with_their_hosts_and_tasks():
    agent = HostedAgent("writer", max_tasks=2, tasks=1, record=AgentRecord(completed=5, failed=1))
    hosted = WorkerInfo("w", progress={AGENTS: agents_text([agent])})
    dead = WorkerInfo("gone", alive=False, progress={AGENTS: agents_text([agent])})
    store = MemoryStore()
    store.list_workers = lambda: [hosted, hosted, dead]
    taken = sample(store)
    assert taken.agents == (AgentSample("writer", 2, 2, 4, 10, 2),)
    assert "writer  2      2 of 4  10         2" in _printed(taken, "memory:")


@pytest.mark.parametrize("width, last", [(120, "PROCESS"), (80, "LAG"), (40, "RUNS")])
def test_narrow_terminal_shows_whole_columns(monkeypatch, width, last):
    monkeypatch.setenv("COLUMNS", str(width))
    store = MemoryStore()
    store.list_workers = lambda: [WorkerInfo("worker-0123456789abcdef", "machine", 1234, renewed_at=datetime.now(UTC))]
    lines = _printed(sample(store), "memory:").splitlines()
    (head,) = [line for line in lines if line.startswith("WORKER")]
    assert head.split()[-1] == last
    assert max(map(len, lines)) <= width


def test_an_encrypted_store_needs_no_keys(keepstep, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_KEYS", f"a={base64.b64encode(b'k' * 32).decode()}")
    assert keepstep("run", "program.py:total", "1").code == 0
    monkeypatch.delenv("KEEPSTEP_KEYS")
    done = keepstep("top")
    assert (done.code, "QUEUE" in done.out) == (0, True)


def test_a_missing_store_is_refused(keepstep):
    assert keepstep("top").code == 6


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_the_live_view_ends_with_q(keepstep, folder):
    keepstep("run", "program.py:total", "1")
    main, other = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "keepstep", "top", "--every", "0.2"]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=other, stdout=other)
    os.close(other)
    seen = b""
    try:
        while b"QUEUE" not in seen:
            assert select.select([main], [], [], 60)[0], seen
            seen += os.read(main, 65536)
        os.write(main, b"q")
        until = time.monotonic() + 60
        while process.poll() is None:  # the terminal must be read, or the process cannot write
            assert time.monotonic() < until
            if select.select([main], [], [], 0.1)[0]:
                try:
                    os.read(main, 65536)
                except OSError:
                    break
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_nothing_is_cut_in_a_pipe(keepstep, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    keepstep("run", "program.py:total", "1")
    name = f"a-service-with-a-{'long-' * 20}name"
    limits = ("--concurrency", "123", "--rate", "1000/3600/100", "--spend", "10000/60/1000", "--breaker", "5/300/60")
    keepstep("services", "set", name, *limits)
    (line,) = [line for line in keepstep("top", "--once").out.splitlines() if line.startswith(name)]
    assert line.endswith(keepstep("services", "show", name).out.splitlines()[1].removeprefix("limits").strip())
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, keepstep("top", "--once").out.splitlines())) <= 60
