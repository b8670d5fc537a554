"""A Dask cluster on this machine: a scheduler and workers, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

#: Seconds that a process of the cluster may take to be there.
PATIENCE_SECONDS = 60.0


class Cluster:
    """A scheduler, and Dask workers by their names."""

    def __init__(self, folder: Path, port: int = 0, **settings: str) -> None:
        self.folder = folder
        self.file = folder / "scheduler.json"
        self.file.unlink(missing_ok=True)
        self._settings = {"DASK_DISTRIBUTED__WORKER__DAEMON": "False", **settings}
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.scheduler = self.start(
            "scheduler", "--port", str(port), "--no-dashboard", "--dashboard-address", "127.0.0.1:0"
        )
        _moment(self.file.exists, self.scheduler)
        time.sleep(0.05)
        self.address: str = json.loads(self.file.read_text(encoding="utf-8"))["address"]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def start(self, kind: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{kind}", "--host", "127.0.0.1"]
        with (self.folder / f"{kind}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, "--scheduler-file", str(self.file), *options],
                env=os.environ | self._settings,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a kill reaches the nanny's worker too
            )

    def add(self, name: str, *options: str, threads: int = 2, nanny: bool = False) -> None:
        """Start a Dask worker."""
        given = ["--name", name, "--nthreads", str(threads), "--nanny" if nanny else "--no-nanny"]
        given += ["--local-directory", str(self.folder), "--no-dashboard", *options]
        self.workers[name] = self.start("worker", *given)

    def kill(self, name: str) -> None:
        """Kill a Dask worker, with its nanny."""
        _end(self.workers.pop(name))

    def close(self) -> None:
        for one in [*self.workers.values(), self.scheduler]:
            _end(one)
        self.workers.clear()


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _moment(found: object, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not found():  # type: ignore[operator]
        assert process.poll() is None, "the scheduler has ended"
        assert time.monotonic() < end, "the scheduler never came"
        time.sleep(0.02)
