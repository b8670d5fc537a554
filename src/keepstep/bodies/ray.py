"""The process beside a worker that speaks to a Ray cluster: it passes orders on, and reports what becomes of them.

It ends with its worker, and by itself when the cluster or the supervisor there is lost. The worker starts the next one,
which asks for the bodies again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from typing import Any

import msgspec
import ray
from ray import exceptions

from ..executors.task import (
    Frames,
    FromWorker,
    Given,
    Lost,
    Ready,
    Run,
    Stop,
    ToWorker,
    Unfit,
    framed,
    read_order,
    read_report,
)
from .child import leave
from .ray_supervisor import NAME, Supervisor
from .ray_task import LARGE_BYTES

#: Seconds for which a cluster that does not answer is tried again.
CONNECT_SECONDS = 20.0
#: Seconds after which Ray hangs while it connects.
HUNG_SECONDS = 30.0
#: Least time in seconds for a new supervisor to start.
START_SECONDS = 20.0
#: Seconds after which a call for news is answered, even if there are none.
NEWS_SECONDS = 5.0
#: Bytes that are read from the worker at once.
CHUNK = 1 << 20
#: Exit code after the loss of the cluster or of the supervisor.
LOST = 71

_write = msgspec.msgpack.Encoder().encode


class _Speaker:
    """Passes orders of a worker to the supervisor in a cluster, and its answers back."""

    def __init__(self, line: socket.socket, given: Given) -> None:
        self._line = line
        self._settings = given.settings
        self._about = _write({"path": sys.path, "levels": given.levels})
        self._session: str = given.settings["session"]
        self._again: bool = given.settings.get("again", False)
        self._silent: float = given.settings["silent_seconds"]
        self._orders: queue.SimpleQueue[FromWorker] = queue.SimpleQueue()
        self._supervisor: Any = None

    def run(self) -> None:
        """Speak until the worker or the cluster ends."""
        threading.Thread(target=self._read, name="keepstep-lifeline", daemon=True).start()
        watch = threading.Timer(HUNG_SECONDS, self._give_up, [f"no answer within {HUNG_SECONDS:g} s"])
        watch.start()
        try:
            _connect(self._settings)
            watch.cancel()
            self._supervisor = self._met()
        except Exception as error:  # noqa: BLE001 - the worker shall know any reason
            self._give_up(str(error))
        threading.Thread(target=self._report, name="keepstep-news", daemon=True).start()
        self._send(Ready())
        while True:
            orders = [self._order(self._orders.get())]
            with contextlib.suppress(queue.Empty):
                while True:
                    orders.append(self._order(self._orders.get_nowait()))
            self._supervisor.order.remote(self._session, orders)

    def _give_up(self, why: str) -> None:
        """Tell the worker why the cluster cannot be reached, and end. Ray itself may hang."""
        self._send(Unfit(f"cannot be reached on Ray at {self._settings['address']!r}: {' '.join(why.split())}"))
        os._exit(LOST)

    def _met(self) -> Any:
        """Return the supervisor of the cluster. One that does not answer is replaced."""
        end = time.monotonic() + 3 * START_SECONDS
        while True:
            supervisor: Any = (
                ray.remote(Supervisor)
                .options(
                    name=NAME,
                    namespace=self._settings["namespace"],
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_concurrency=10_000,
                    resources={"node:__internal_head__": 0.001},  # the cluster ends with its head anyway
                )
                .remote(self._settings["namespace"], self._silent)
            )
            try:
                ray.get(
                    supervisor.hello.remote(self._session, self._about, self._again),
                    timeout=max(START_SECONDS, self._silent),
                )
            except exceptions.GetTimeoutError:
                ray.kill(supervisor)
            except exceptions.RayActorError:  # it is ending; its name is free soon
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
            else:
                return supervisor

    def _order(self, message: FromWorker) -> tuple[Any, ...]:
        """Return an order as the supervisor takes it."""
        if not isinstance(message, Run):
            return "stop" if isinstance(message, Stop) else "release", message.body
        task, given = message.task, message.task.input
        about = {
            "name": task.name,
            "seconds": task.seconds,
            "may_begin": task.may_begin,
            "options": message.options,
        }
        head = _write(msgspec.structs.replace(task, input=b""))
        return "run", message.body, head, ray.put(given) if len(given) > LARGE_BYTES else given, about

    # -- to the worker -------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Report what the supervisor knows, for as long as it answers."""
        taken, wait = 0, min(NEWS_SECONDS, self._silent / 2)
        while True:
            try:
                items = ray.get(self._supervisor.news.remote(self._session, taken, wait), timeout=self._silent)
            except Exception as error:  # noqa: BLE001 - the next process tries again after any error
                sys.stderr.write(f"keepstep: the supervisor on Ray is lost: {' '.join(str(error).split())}\n")
                os._exit(LOST)
            self._send(*[self._read_item(*item) for item in items])
            if items:
                taken = items[-1][0]

    def _read_item(self, _serial: int, number: int, message: bytes, data: Any) -> ToWorker:
        read: ToWorker = read_report(message)
        if data is not None:
            try:
                read = msgspec.structs.replace(read, data=bytes(ray.get(data)))
            except exceptions.RayError as error:
                read = Lost(0, f"has lost its result: {' '.join(str(error).split())[:300]}")
        return msgspec.structs.replace(read, body=number)

    def _send(self, *messages: ToWorker) -> None:
        if messages:
            self._line.sendall(b"".join(map(framed, messages)))

    # -- the lifeline --------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        frames = Frames()
        while True:
            try:
                data = self._line.recv(CHUNK)
            except OSError:
                data = b""
            if not data:
                leave()
            for one in frames.take(data):
                self._orders.put(read_order(one))


def _connect(settings: dict[str, Any]) -> None:
    """Connect to a cluster; never start one."""
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            ray.init(
                settings["address"],
                namespace=settings["namespace"],
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except ConnectionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
        else:
            return


def main() -> None:
    """Speak for the worker that holds the other end of the socket, as the first argument describes."""
    given = msgspec.json.decode(sys.argv[1], type=Given)
    del sys.argv[1:]
    _Speaker(socket.socket(fileno=given.descriptor), given).run()
