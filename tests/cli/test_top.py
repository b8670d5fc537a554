"""`top`: one sample for a person and for a program, and the live view in a terminal."""

from __future__ import annotations

import base64
import os
import pty
import select
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import ROOT


def test_a_sample_shows_workers_queues_and_slow_steps(keepstep, spawn, folder):
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
    text = keepstep("top", "--once").out
    for word in ("runs/s", "mail", "concurrency 2", "claims", str(worker.pid), "SLOW STEP", "crunch"):
        assert word in text


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
