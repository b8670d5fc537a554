"""Another process with the same store, which does what it is told line by line: `python -m tests.stores.peer URL`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import keepstep
from keepstep.errors import KeepstepError
from keepstep.model import Run, Status, WorkerInfo
from keepstep.ports import Advance, ClaimRequest, Create, Row, SystemClock, instant
from keepstep.stores.open import open_store

ROOT = Path(__file__).parents[2]


class Program:
    """The other process. Each method is something it can be told to do; its result is printed."""

    def __init__(self, path):
        self.path = path
        self.store = None
        self.hog = None
        self.enough = threading.Event()

    def open(self, **options):
        self.store = open_store(self.path, **options)

    def enrol(self, worker):
        return self.store.renew_leases(WorkerInfo(worker, "here", os.getpid()))

    def create(self, runs):
        """One commit each; which of them this process won."""
        answers = [self.store.commit([Create(queued(run))])[0] for run in runs]
        return [run for run, answer in zip(runs, answers, strict=True) if answer.verdict == "done"]

    def claim(self, worker, limit=1):
        found = self.store.claim_runs(ClaimRequest(worker, frozenset({"digest"}), limit)).claims
        return [claim.run.id for claim in found]

    def claim_all(self, worker, limit):
        taken = []
        while some := self.claim(worker, limit):
            taken += some
        return taken

    def write(self, run, worker, epoch, after):
        row = Row(after + 1, "step completed", b"{}")
        (answer,) = self.store.commit([Advance(run, worker, epoch, after, [row], "x")])
        return answer.verdict

    def start_hog(self, worker, run):
        """Commit as fast as possible until told to stop."""
        self.enrol(worker)
        self.store.commit([Create(queued(run, status=Status.RUNNING, worker=worker, epoch=1))])

        def work():
            after = 0
            while not self.enough.is_set():
                assert self.write(run, worker, 1, after) == "done"
                after += 1
            self.commits = after

        self.hog = threading.Thread(target=work)
        self.hog.start()

    def stop_hog(self):
        self.enough.set()
        self.hog.join()
        return self.commits

    def hold(self):
        """Stay inside a transaction until the next line comes."""

        def wait():
            print(json.dumps("holding"), flush=True)
            sys.stdin.readline()

        self.store._writer.run(wait)

    def fork_and_hold(self):
        """Fork inside a transaction, and stay there until the next line comes."""

        def wait():
            print(json.dumps(self.fork()), flush=True)
            sys.stdin.readline()

        self.store._writer.run(wait)

    def fork(self):
        """Fork a child that tries the store, says what it got, and lives on until it is killed."""
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for use in (lambda: self.store.get_run("r"), lambda: self.store.commit([])):
                try:
                    use()
                except KeepstepError as error:
                    said.append(f"{type(error).__name__}: {error}")
            os.write(tell, json.dumps(said).encode())
            threading.Event().wait()
        return child, json.loads(os.read(told, 10_000))


def queued(run, **fields):
    now = instant(SystemClock().now())
    return Run(**{"id": run, "workflow": "digest", "status": Status.QUEUED, "created_at": now, **fields})


class Peer:
    """The handle on such a process, for a test."""

    def __init__(self, path, **options):
        source = str(Path(keepstep.__file__).parents[1])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.stores.peer", str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([source, str(ROOT)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.options = options
        self.pid = self.process.pid

    def tell(self, what, **arguments):
        """Say what to do, and do not wait."""
        self.process.stdin.write(json.dumps([what, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.process.stdout.readline()
        assert line, f"the other process ended with {self.process.wait()}"
        return json.loads(line)

    def ask(self, what, **arguments):
        self.tell(what, **arguments)
        return self.answer()

    def opened(self):
        self.ask("open", **self.options)
        return self

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


def main():
    program = Program(sys.argv[1])
    for line in iter(sys.stdin.readline, ""):
        what, arguments = json.loads(line)
        print(json.dumps(getattr(program, what)(**arguments)), flush=True)


if __name__ == "__main__":
    main()
