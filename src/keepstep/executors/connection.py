"""The worker's end of a process that it has started for bodies: the process, the socket, and the messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from .task import Frames, FromWorker, Given, Ready, ToWorker, framed, read_report

log = logging.getLogger("keepstep")

#: Seconds that a killed process may take to be gone. More means that it hangs in the kernel.
GONE_SECONDS = 10.0
_START = "import sys; sys.path[:] = sys.argv[2:]; from {module} import main; main()"


#: The worker's ends of all sockets. A process that the worker forks closes them, so that they end with the worker.
_ENDS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_ends() -> None:
    for end in list(_ENDS):
        with contextlib.suppress(OSError):
            os.close(end.detach())  # the event loop of some worker keeps a closed socket open


os.register_at_fork(after_in_child=_close_ends)


class Connection(asyncio.Protocol):
    """A process in which bodies run, or which speaks to a cluster for them. It ends when the worker does.

    `report` receives its messages, and `ended` is called once, with the reason, when it has ended.
    """

    def __init__(self, report: Callable[[Any], None], ended: Callable[[str], None]) -> None:
        self._report = report
        self._ended = ended
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        self._reaping: asyncio.Future[int] | None = None
        #: Set when nothing of the process is left.
        self.gone = asyncio.Event()
        self.is_ready = False

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def is_connected(self) -> bool:
        """Whether the loop holds a socket to the process."""
        return self._transport is not None and not self._transport.is_closing()

    def start(self, module: str, given: Given) -> None:
        """Start a process with a module of `keepstep.bodies`, or of a full name. Messages wait until it is ready."""
        given = msgspec.structs.replace(given, levels=levels())
        self._process, mine = start_process(module, given)
        mine.setblocking(False)
        _ENDS.add(mine)
        self._connecting = self._loop.create_task(self._connect(mine))

    async def _connect(self, mine: socket.socket) -> None:
        await self._loop.create_connection(lambda: self, sock=mine)

    def send(self, message: FromWorker) -> None:
        """Send a message; after the end of the process it is lost."""
        data = framed(message)
        if self._transport is None:
            self._unsent.append(data)
        else:
            self._transport.write(data)

    def kill(self) -> None:
        """End the process and whatever its bodies have started."""
        if self._process is not None:
            kill(self._process)

    def is_stopped(self) -> bool:
        """Whether the process is suspended, as by SIGSTOP; False where the system does not tell."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
            return state.rpartition(")")[2].split()[0] in "Tt"
        except (OSError, IndexError):
            return False

    # -- of the socket -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        for data in self._unsent:
            transport.write(data)  # type: ignore[attr-defined]
        self._unsent.clear()

    def data_received(self, data: bytes) -> None:
        for one in self._frames.take(data):
            try:
                message: ToWorker = read_report(one)
            except msgspec.MsgspecError as error:
                log.error(  # noqa: TRY400 - its traceback is ours, and says nothing
                    "the process %d for bodies sent what is no message, and is ended: %s", self.pid, error
                )
                self.kill()
                return
            if isinstance(message, Ready):
                self.is_ready = True
            self._report(message)

    def connection_lost(self, error: Exception | None) -> None:
        self.kill()  # it may have closed its end and go on
        self._reaping = self._loop.run_in_executor(None, self._wait)
        self._reaping.add_done_callback(self._reaped)

    def _wait(self) -> int:
        assert self._process is not None  # noqa: S101 - a socket is made after its process
        return self._process.wait(GONE_SECONDS)

    def _reaped(self, waited: asyncio.Future[int]) -> None:
        self.gone.set()
        self._ended(end_of(None if waited.exception() is not None else waited.result()))


def start_process(
    module: str, given: Given, more_path: Iterable[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process with a module of `keepstep.bodies`, and return it with this end of its socket."""
    mine, theirs = socket.socketpair()
    text = msgspec.json.encode(msgspec.structs.replace(given, descriptor=theirs.fileno())).decode()
    path = [os.path.abspath(one) for one in (*sys.path, *more_path)]  # noqa: PTH100 - a Path of "" is "."
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001 - as multiprocessing does
    start = _START.format(module=module if "." in module else f"keepstep.bodies.{module}")
    command = [sys.executable, *flags, "-P", "-c", start, text, *path]
    try:
        # Its own session: a Ctrl-C in the terminal reaches the worker alone, and a kill reaches all it has started.
        process = subprocess.Popen(  # noqa: S603 - this Python, and a module of ours
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
        )
    except OSError:
        mine.close()
        raise
    finally:
        theirs.close()
    return process, mine


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and whatever its bodies have started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def levels() -> dict[str, int]:
    """Return the levels that loggers of this process have been given."""
    known = logging.root.manager.loggerDict.items()
    named = {name: one.level for name, one in known if isinstance(one, logging.Logger) and one.level}
    return {"": logging.root.level, **named}


def end_of(code: int | None) -> str:
    """Return how a process has ended, by its exit code; None if it has not."""
    if code is None:
        return "does not end"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"was killed by {name}"
