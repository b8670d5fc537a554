"""Lives of a program that are killed after so many commits, and noted effects that outlive all of them."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

import keepstep as ks
from keepstep.ports import Advance
from keepstep.stores.sqlite.store import SQLiteStore

HERE = Path(__file__).parent
#: Seconds until a server that is started must answer; importing its libraries takes a while on a busy machine.
STARTING_SECONDS = 60.0


class MortalStore(SQLiteStore):
    """A store whose process is killed after so many commits of records."""

    left = None

    def commit(self, changes, *, wait=True):
        answers = super().commit(changes, wait=wait)
        if self.left is not None and any(isinstance(change, Advance) and change.rows for change in changes):
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return answers


def live(folder, play, kill_after=None):
    """Have one life in a process of its own, and say whether it was killed. `play(engine)` is the whole program."""

    async def life():
        store = MortalStore(folder / "runs.db", power_loss="may_lose_last")
        store.left = kill_after
        async with ks.Engine(store, linger_seconds=0.05) as engine:
            await play(engine)
        store.close()

    child = os.fork()
    if not child:
        code = 1
        try:
            out = os.open(folder / "printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stdout = sys.stderr = os.fdopen(out, "w")
            asyncio.set_event_loop(None)
            asyncio.run(life())
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, (folder / "printed").read_text()
    return False


def noted(folder):
    """What servers really did, in order."""
    path = folder / "effects"
    return path.read_text().splitlines() if path.exists() else []


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@contextmanager
def serving(program, *arguments, port):
    """A server in a process of its own, which answers at the port; it is killed at the end."""
    with subprocess.Popen([sys.executable, str(HERE / program), *map(str, arguments)]) as process:
        try:
            deadline = time.monotonic() + STARTING_SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    assert process.poll() is None, f"{program} has ended"
                    assert time.monotonic() < deadline, f"{program} never answered"
                    time.sleep(0.02)
            yield process
        finally:
            process.kill()
