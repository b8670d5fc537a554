"""Workers of an older Keepstep and of this one on one store: the newer waits for the older, and says so."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter

import pytest

from keepstep.cli import errors
from keepstep.model import FINISHED
from tests.crash.test_draining import ROOT, fleet_on, wait_for
from tests.nightly import cases

#: A version of this program with older schemas: SQLite 4, PostgreSQL 2.
OLDER = "e7fe418"
RUNS = 4

#: A process of the older version that only starts runs, and stays open during the upgrade.
CLIENT = """
import asyncio, os, sys
import keepstep as ks, program

async def main():
    async with ks.open(os.environ["KEEPSTEP_STORE"], worker=False) as engine:
        print("open", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await (await engine.start(program.job, run_id="r3")).result(timeout=60)

asyncio.run(main())
"""


@pytest.fixture(scope="session")
def older(tmp_path_factory):
    """The source of the older version, from the history of this repository."""
    folder = tmp_path_factory.mktemp("older")
    packed = folder / "older.tar"
    git = shutil.which("git")
    command = [git or "git", "-C", str(ROOT), "archive", "-o", str(packed), OLDER, "src"]
    if git is None or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("the history of the repository is not here")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


@pytest.mark.parametrize("kind", cases(["sqlite", "postgres"], quick=["sqlite"]))
def test_an_upgrade_by_a_rolling_restart_loses_and_repeats_nothing(kind, tmp_path, older):
    with fleet_on(kind, tmp_path) as fleet:
        for number in range(RUNS - 1):
            words = ("start", "program.py:job", "--id", f"r{number}")
            assert fleet.keepstep(*words, source=older, stdout=subprocess.DEVNULL).wait(60) == 0
        old = fleet.keepstep("worker", "program.py", "-q", source=older)
        environment = {**fleet.environment, "PYTHONPATH": f"{older}:{tmp_path}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        client = subprocess.Popen([sys.executable, "-c", CLIENT], env=environment, cwd=tmp_path, **pipes)
        fleet.workers += [old, client]
        assert client.stdout.readline() == "open\n"
        wait_for(lambda: len(fleet.record()) > RUNS)
        with (tmp_path / "log").open("w") as log:
            new = fleet.keepstep("worker", "program.py", "-q", stderr=log)
        fleet.workers.append(new)
        wait_for(lambda: "waiting up to 40 s for them to stop" in (tmp_path / "log").read_text(encoding="utf-8"))
        assert f"(pid {old.pid} on " in (tmp_path / "log").read_text(encoding="utf-8")
        old.send_signal(signal.SIGTERM)
        assert old.wait(60) == 0
        client.communicate("go\n", timeout=60)
        assert client.returncode == 0
        wait_for(lambda: all(run.status in FINISHED for run in fleet.runs()), pause=0.25)
        assert {(run.status.value, run.recoveries) for run in fleet.runs()} == {("completed", 0)}
        assert Counter(fleet.record()) == {f"r{run} {number}": 1 for run in range(RUNS) for number in range(9)}
        late = fleet.keepstep("worker", "program.py", "-q", source=older, stderr=subprocess.PIPE, text=True)
        _, said = late.communicate(timeout=60)
        assert (late.returncode, "so upgrade this one" in said) == (errors.STORE, True)
        assert new.poll() is None
