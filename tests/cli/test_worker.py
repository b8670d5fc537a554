"""`worker` and `doctor` with real processes: recovery, a graceful stop, and what the doctor sees of them."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from unittest import mock

import httpx
import pytest

from keepstep.cli import errors
from keepstep.cli import run as run_command
from keepstep.cli import worker as worker_command
from keepstep.engine.engine import Engine
from keepstep.errors import StoreError, StoreUnavailable
from keepstep.stores.sqlite.writer import Turnstile
from keepstep.workflows.definition import KNOWN
from tests.cli.test_runs import wait_for


def test_a_worker_drives_what_was_started_and_leaves_when_idle(keepstep):
    for number in range(3):
        keepstep("start", "program.py:total", str(number), "--id", f"t{number}")
    done = keepstep("worker", "program.py", "--until-idle", "-v")
    assert done.code == 0
    assert "t2  completed" in done.err
    assert "add" in done.err
    assert [run["status"] for run in keepstep("list", "--json").json["runs"]] == ["completed"] * 3


def test_worker_until_idle_stays_while_the_store_is_unavailable(keepstep, monkeypatch):
    keepstep("start", "program.py:total", "1", "--id", "t")
    ask, asked = Engine.list, []

    async def failing(engine, query):
        asked.append(query)
        if len(asked) < 20:
            raise StoreUnavailable("no server at all")
        return await ask(engine, query)

    monkeypatch.setattr(Engine, "list", failing)
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert len(asked) > 20

    async def broken(engine, query):
        raise StoreError("it is closed")

    monkeypatch.setattr(Engine, "list", broken)
    done = keepstep("worker", "program.py", "--until-idle")
    assert done.code == errors.STORE
    assert "it is closed" in done.err


PINNED = """
import keepstep as ks


@ks.workflow(version="{version}", on_change="pin")
async def article() -> str:
    return "{version}"
"""


def test_worker_until_idle_leaves_runs_of_other_pinned_versions(keepstep, folder, caplog):
    (folder / "first.py").write_text(PINNED.format(version="1"), encoding="utf-8")
    assert keepstep("start", "first.py:article", "--id", "a").code == 0
    (folder / "second.py").write_text(PINNED.format(version="2"), encoding="utf-8")
    done = keepstep("worker", "second.py", "--until-idle", "-q")
    assert done.code == 0
    told = "1 due run of workflow 'article' is left to workers that have version '1'; this one has version '2'"
    assert caplog.text.count(told) == 1
    assert keepstep("list", "--json").json["runs"][0]["status"] == "queued"


def test_a_quiet_worker_says_nothing(keepstep):
    keepstep("start", "program.py:total", "1", "--id", "t")
    done = keepstep("worker", "program.py", "--until-idle", "-q")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_a_worker_takes_only_the_workflows_that_it_was_given(keepstep):
    keepstep("start", "program.py:total", "1", "--id", "t")
    keepstep("start", "program.py:greet", "ann", "--id", "g")
    keepstep("worker", "program.py:greet", "--until-idle", "-q")
    assert keepstep("show", "g", "--json").json["status"] == "completed"
    assert keepstep("show", "t", "--json").json["status"] == "queued"


@pytest.mark.parametrize("target, said", [("empty.py", "defines no workflow"), ("nothing.py", "no file")])
def test_a_worker_without_workflows_is_refused(keepstep, folder, target, said):
    (folder / "empty.py").write_text("", encoding="utf-8")
    with mock.patch.dict(KNOWN, clear=True):  # other tests of this process define workflows
        done = keepstep("worker", target)
    assert done.code == 2
    assert said in done.err


@pytest.mark.crash
def test_worker_recovers_runs_of_a_killed_one(keepstep, spawn, folder):
    """The tests of crashed processes see that it does not wait for the lease."""
    first = spawn("worker", "program.py")
    keepstep("start", "program.py:stuck", "--id", "s")
    wait_for((folder / "hanging").exists)
    first.kill()
    first.wait()
    dead = keepstep("doctor", "--json").json
    assert [finding["code"] for finding in dead["findings"]] == ["dead-worker"]
    assert "a worker: its own is dead" in keepstep("list").out
    (folder / "hanging").unlink()
    spawn("worker", "program.py")
    wait_for((folder / "hanging").exists)
    assert keepstep("show", "s", "--json").json["recoveries"] == 1
    assert "taken over" in keepstep("audit", "s").out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_stops_gracefully_though_a_step_hangs(keepstep, spawn, folder, number):
    worker = spawn("worker", "program.py", "--stop-seconds", "0.5")
    keepstep("start", "program.py:stuck", "--id", "s")
    wait_for((folder / "hanging").exists)
    worker.send_signal(number)
    _, err = worker.communicate(timeout=90)
    assert worker.returncode == 0
    assert "handed back" in err
    shown = keepstep("show", "s", "--json").json
    assert (shown["status"], shown["worker"], shown["recoveries"]) == ("queued", None, 0)
    assert keepstep("doctor", "--json").json["workers"] == []


def test_a_thread_that_never_returns_does_not_keep_a_worker_alive(keepstep, spawn, folder):
    (folder / "threads.py").write_text(
        "import threading\nfrom pathlib import Path\nimport keepstep as ks\n\n\n@ks.step\ndef forever():\n"
        "    Path('hanging').touch()\n    threading.Event().wait()\n\n\n@ks.workflow\nasync def blocked():\n"
        "    await forever()\n",
        encoding="utf-8",
    )
    worker = spawn("worker", "threads.py", "--stop-seconds", "0.2")
    keepstep("start", "threads.py:blocked", "--id", "b")
    wait_for((folder / "hanging").exists)
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=90)
    assert worker.returncode == 0
    assert keepstep("show", "b", "--json").json["status"] == "queued"


def test_a_store_that_does_not_answer_does_not_keep_a_worker_alive(keepstep, monkeypatch):
    """Whoever stopped it would kill it after 30 s, and it could not say why."""
    ended = []

    async def blocked(engine):
        ended.append(Turnstile(f"{engine.store._path}-turnstile"))
        assert ended[0].enter(10)  # from now on nobody else can write

    def end(code):
        ended[0].close()
        ended.append(code)

    monkeypatch.setattr(worker_command, "_idle", blocked)
    monkeypatch.setattr(run_command, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(run_command.os, "_exit", end)
    done = keepstep("worker", "program.py", "--until-idle", "--stop-seconds", "0.1")
    assert ended[1:] == [0]
    assert "the next worker recovers the unfinished work" in done.err


def test_a_worker_that_leaves_in_time_is_not_ended(keepstep, monkeypatch):
    ended = []
    monkeypatch.setattr(run_command.os, "_exit", ended.append)
    assert keepstep("worker", "program.py", "--until-idle").code == 0
    assert worker_command.STOP_SECONDS + run_command.CLOSE_SECONDS < 30
    assert not [one for one in threading.enumerate() if isinstance(one, threading.Timer) and one.interval == 28.0]
    assert ended == []


@pytest.mark.crash
def test_the_doctor_sees_a_stopped_worker(keepstep, spawn, folder):
    worker = spawn("worker", "program.py")
    keepstep("start", "program.py:stuck", "--id", "s")
    wait_for((folder / "hanging").exists)
    time.sleep(0.2)  # between two writes, or the stopped process would hold the store's turnstile
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        told = wait_for(lambda: keepstep("doctor", "--json").json["findings"])
        assert told[0]["code"] in ("worker-stopped", "store")
        assert str(worker.pid) in told[0]["message"]
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def test_a_drained_worker_is_shown_and_ends(keepstep, spawn, folder):
    (folder / "naps.py").write_text(
        "import asyncio\nfrom pathlib import Path\nimport keepstep as ks\n\n\n@ks.step\nasync def nap():\n"
        "    Path('begun').touch()\n    while not Path('go').exists():\n        await asyncio.sleep(0.02)\n\n\n"
        "@ks.workflow\nasync def rest():\n    await nap()\n    await nap()\n",
        encoding="utf-8",
    )
    keepstep("start", "naps.py:rest", "--id", "r")
    worker = spawn("worker", "naps.py", "--json")
    wait_for((folder / "begun").exists)
    (shown,) = keepstep("workers", "--json").json["workers"]
    assert (shown["pid"], shown["leases"], shown["drain_at"]) == (worker.pid, 1, None)
    waiting = spawn("drain", "--all", "--wait", "60", "--json")
    wait_for(lambda: keepstep("workers", "--json").json["workers"][0]["drain_at"])
    assert keepstep("drain", shown["id"][:-2]).out == f"{shown['id']} drains\n"
    assert "drains" in keepstep("workers").out
    assert [one["code"] for one in keepstep("doctor", "--json").json["findings"]] == ["worker-drains"]
    assert any("told to drain; stopping within 20 s, 1 runs in progress" in line for line in worker.stderr)
    late = keepstep("drain", "--all", "--wait", "0", "--json")
    assert (late.code, late.json) == (errors.TIMED_OUT, {"drained": [shown["id"]], "alive": [shown["id"]]})
    (folder / "go").touch()
    out, _ = worker.communicate(timeout=60)
    assert (worker.returncode, json.loads(out)["left"]) == (0, "drained")
    out, _ = waiting.communicate(timeout=60)
    assert (waiting.returncode, json.loads(out)) == (0, {"drained": [shown["id"]], "alive": []})
    left = keepstep("show", "r", "--json").json
    assert (left["status"], left["recoveries"]) == ("queued", 0), "the second step has begun, or the lease was left"
    assert keepstep("workers").out.startswith("no worker is alive")


def test_draining_nobody_is_refused(keepstep):
    keepstep("run", "program.py:total", "1")
    unknown = keepstep("drain", "worker-1")
    assert (unknown.code, "no living worker 'worker-1'" in unknown.err) == (errors.NOT_FOUND, True)
    assert keepstep("drain").code == errors.USAGE
    assert keepstep("drain", "worker-1", "--all").code == errors.USAGE
    assert keepstep("drain", "--all").out == "no worker is alive\n"


def test_healthy_store_ends_with_0(keepstep):
    keepstep("run", "program.py:total", "1")
    done = keepstep("doctor", "--deep")
    assert done.code == 0
    assert "all is well" in done.out


def test_a_damaged_store_ends_with_1(keepstep, folder):
    import apsw

    keepstep("run", "program.py:greet", "abcdef", "--id", "g")
    with apsw.Connection(str(folder / ".keepstep" / "runs.db")) as database:
        database.execute("UPDATE keepstep_checkpoint SET record = replace(record, 'hello', 'hallo')")
    done = keepstep("doctor", "--deep")
    assert done.code == 1
    assert (
        "chain broken" in done.out
        or "head names" in done.out
        or "corrupt" in keepstep("doctor", "--deep", "--json").out
    )


GUARDED = """
import keepstep as ks


@ks.step
async def look(at): ...


@ks.workflow
async def guarded():
    await look("left")
    await ks.wait_for("go")
"""


def test_worker_reports_once_that_a_run_is_set_aside(keepstep, folder, caplog):
    (folder / "guard.py").write_text(GUARDED, encoding="utf-8")
    keepstep("start", "guard.py", "--id", "g")
    keepstep("worker", "guard.py", "--until-idle")
    (folder / "guard.py").write_text(GUARDED.replace("left", "right!"), encoding="utf-8")
    keepstep("signal", "g", "go")
    done = keepstep("worker", "guard.py", "--until-idle")
    said = [*done.err.splitlines(), *caplog.messages]
    assert len([line for line in said if "set aside" in line]) == 1
    assert "look#1" in done.err


def test_worker_answers_scrapes_and_checks_of_health(keepstep, spawn):
    keepstep("start", "program.py:total", "1", "--id", "t")
    worker = spawn("worker", "program.py", "--metrics-port", "0")
    lines = iter(worker.stderr.readline, "")
    url = next(line for line in lines if "metrics and health at" in line).split()[-1]
    assert httpx.get(url.replace("/metrics", "/readyz")).text == "ok\n"
    until = time.monotonic() + 30
    while 'keepstep_runs_total{workflow="total",status="completed"} 1' not in (text := httpx.get(url).text):
        assert time.monotonic() < until, text
        time.sleep(0.05)
