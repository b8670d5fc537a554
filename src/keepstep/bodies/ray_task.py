"""A body as a task of Ray: performs it, and tells the supervisor of it while it runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import exceptions

from ..executors.task import Done, Failed, Lost, Published, Report, Reported, Saved, Spent, Task
from .child import leave
from .perform import FarLog, perform

#: Seconds after which a body is reported to have begun. A shorter one costs no message of its own.
BEGUN_SECONDS = 0.03
#: Seconds without messages after which a body asks whether it may go on.
ASK_SECONDS = 2.0
#: Bytes above which a value stays where it is until it is fetched.
LARGE_BYTES = 100_000
#: The process of Ray that has started this one. Without it, its node is lost to the cluster.
PARENT = os.getppid()

_write = msgspec.msgpack.Encoder().encode
_read_task = msgspec.msgpack.Decoder(Task).decode


def run(head: bytes, data: bytes, about: bytes, supervisor: tuple[str, str, str, float]) -> Any:
    """Perform a body. Return how long ago it began, its last messages, its outcome, and a large result apart."""
    _prepare(about)
    task = msgspec.structs.replace(_read_task(head), input=bytes(data))
    line = _Line(task.name, supervisor)
    log = FarLog(line.tell)
    logging.getLogger().addHandler(log)
    try:
        outcome: Done | Failed | Lost = perform(task, line.tell, line.begin)
    finally:
        logging.getLogger().removeHandler(log)
        left = line.close()
    if isinstance(outcome, Failed) and outcome.error.builtin == "KeyboardInterrupt":  # with it, Ray cancels a task
        outcome = Lost(0, "was cancelled by Ray")
    result = b""
    if isinstance(outcome, Done) and len(outcome.data) > LARGE_BYTES:
        result, outcome = outcome.data, msgspec.structs.replace(outcome, data=b"")
    return (line.ago(), left, _write(outcome), bool(result)), result or None


@cache
def _prepare(about: bytes) -> None:
    """Search for modules where the worker does, too, and log at its levels."""
    given = msgspec.msgpack.decode(about)
    sys.path += [one for one in given["path"] if one not in sys.path and Path(one).exists()]
    for name, level in given["levels"].items():
        logging.getLogger(name or None).setLevel(level)


def key_of(message: Report) -> str:
    """Return the key under which a message replaces an earlier one; empty if it replaces none."""
    match message:
        case Saved() | Reported():
            return type(message).__name__
        case Published():
            return f"Published {message.key}"
    return ""


class _Line:
    """Sends the messages of one body in order, in batches, from a thread of its own.

    It is the lifeline of the body, too: without its supervisor, nobody takes the outcome, and the process ends.
    """

    def __init__(self, name: str, supervisor: tuple[str, str, str, float]) -> None:
        self._name = name
        self._supervisor = supervisor
        self._began: float | None = None
        self._has_sent = False
        self._items: list[tuple[str, bool, bytes]] = []
        self._news = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._loop, name="keepstep-line", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Note that the body begins."""
        self._began = time.monotonic()
        if self._has_sent:  # a slow import came before it
            self._news.set()

    def ago(self) -> float | None:
        """Return how many seconds ago the body began; None if it has not."""
        return None if self._began is None else time.monotonic() - self._began

    def tell(self, message: Report) -> None:
        """Send a message soon. Any thread may call this."""
        self._items.append((key_of(message), isinstance(message, Spent), _write(message)))
        self._news.set()

    def close(self) -> list[tuple[str, bool, bytes]]:
        """Send nothing more, and return what was not sent."""
        self._is_closing = True
        self._news.set()
        self._thread.join()
        return self._items

    def _loop(self) -> None:
        self._news.wait(BEGUN_SECONDS)
        while not self._is_closing:
            self._news.clear()
            count = len(self._items)
            self._send(self._items[:count])
            del self._items[:count]
            self._news.wait(ASK_SECONDS)

    def _send(self, items: list[tuple[str, bool, bytes]]) -> None:
        self._has_sent = True
        try:
            actor = _supervisor(*self._supervisor[:3])
            place = ray.get_runtime_context().get_node_id(), os.getpid()
            sent = actor.tell.remote(self._name, place, self.ago(), items)
            may_go_on = ray.get(sent, timeout=self._supervisor[3])
        except (exceptions.RayError, ValueError):  # it is gone, or does not answer
            may_go_on = False
        if os.getppid() != PARENT or not may_go_on:
            leave()


@cache
def _supervisor(name: str, namespace: str, actor_id: str) -> Any:
    """Return the supervisor that has started the body."""
    actor = ray.get_actor(name, namespace)
    if actor._actor_id.hex() != actor_id:  # noqa: SLF001 - there is no other way to see it
        raise ValueError(f"supervisor {actor_id} is gone")
    return actor


def kill(pid: int) -> None:
    """Kill the process of a body on this node."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
