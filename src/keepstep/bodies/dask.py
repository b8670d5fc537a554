"""The process that speaks to a Dask scheduler for its worker, as `executors.bridge` tells it.

It knows no more than the names of bodies: the scheduler keeps them, so that another process can find them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from itertools import groupby
from typing import Any

import msgspec
from distributed import Client

from ..executors.task import (
    Begun,
    Ended,
    Frames,
    FromWorker,
    Given,
    Lost,
    Ready,
    Release,
    Run,
    Stop,
    ToWorker,
    Unfit,
    framed,
    read_order,
    read_report,
)
from .child import leave
from .dask_scheduler import NAME, SchedulerBodies
from .dask_worker import LARGE_BYTES, Home, Sent, WorkerBodies, encode_sent, run_body

#: Seconds between two looks at the connection, and between two questions whether the scheduler answers.
LOOK_SECONDS = 0.2
ASK_SECONDS = 5.0
#: Seconds during which outcomes are collected that need not be kept any longer.
GATHER_SECONDS = 0.005
#: Bodies and bytes of them that are given to the scheduler at once.
MOST_AT_ONCE = 500
MOST_BYTES_AT_ONCE = 4 << 20


class _Asked:
    """A body that the worker asks for."""

    __slots__ = ("fetching", "has_begun", "order", "seen")

    def __init__(self, order: Run) -> None:
        self.order = order
        #: Reports that were passed on.
        self.seen = order.seen
        self.has_begun = False
        self.fetching: asyncio.Task[None] | None = None


class Speaker(asyncio.Protocol):
    """Passes the orders of a worker to the scheduler, and the reports of bodies back."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._frames = Frames()
        self._line: asyncio.Transport
        self._client: Client | None = None
        self._asked: dict[str, _Asked] = {}
        self._names: dict[int, str] = {}
        self._new: list[_Asked] = []
        self._done: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    # -- the worker ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._line = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        leave()  # bodies go on, for the next worker

    def data_received(self, data: bytes) -> None:
        for one in self._frames.take(data):
            self._take(read_order(one))

    def tell(self, message: ToWorker) -> None:
        self._line.write(framed(message))

    def _take(self, order: FromWorker) -> None:
        match order:
            case Run():
                self._names[order.body] = order.task.name
                asked = self._asked[order.task.name] = _Asked(order)
                if not self._new:
                    asyncio.get_running_loop().call_soon(self._ask_new)
                self._new.append(asked)
            case Stop():
                if self._client is not None and (name := self._names.get(order.body)) is not None:
                    self._spawn(_call(self._client, "stop", name=name))
            case Release():
                name = self._names.pop(order.body, None)
                if name is not None and self._asked.pop(name, None) is None:
                    self._release(name)
                elif name is not None and self._client is not None:
                    self._spawn(_call(self._client, "leave", name=name, client=self._client.id))

    def _release(self, name: str) -> None:
        if not self._done:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._release_all)
        self._done.append(name)

    def _release_all(self) -> None:
        if self._client is not None:  # else the scheduler forgets them when nobody asks for them
            self._spawn(_call(self._client, "release", names=self._done))
        self._done = []

    def _spawn(self, work: Any) -> None:
        async def tried() -> None:
            with contextlib.suppress(OSError):  # the connection is lost, which is seen elsewhere
                await work

        task = asyncio.get_running_loop().create_task(tried())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _ask_new(self) -> None:
        new, self._new = self._new, []
        if self._client is not None:  # else they are asked for with all others
            self._spawn(self._ask(self._client, new))

    async def _ask(self, client: Client, bodies: list[_Asked]) -> None:
        """Ask the scheduler for bodies, and give it those that it does not know."""
        wanted = [(one.order.task.name, one.seen, one.order.task.may_begin and not one.has_begun) for one in bodies]
        unknown = set(await self._unknown(client, wanted))
        new: list[_Asked] = []
        for body, (name, _, may_begin) in zip(bodies, wanted, strict=True):
            if name in unknown and may_begin:
                new.append(body)
            elif name in unknown:
                self._lose(body, "is not known to the Dask scheduler any more")
        for _, group in groupby(new, lambda one: one.order.options):
            same = list(group)
            for start in range(0, len(same), MOST_AT_ONCE):
                await self._submit(client, same[start : start + MOST_AT_ONCE])

    async def _unknown(self, client: Client, bodies: list[tuple[str, int, bool]]) -> list[str]:
        """Ask the scheduler for bodies, and return the names of those that it does not know."""
        seconds = self._settings["abandoned_seconds"]
        found: list[str] = await _call(client, "ask", client=client.id, bodies=bodies, abandoned_seconds=seconds)
        return found

    async def _submit(self, client: Client, bodies: list[_Asked]) -> None:
        options, settings = bodies[0].order.options, self._settings
        home = Home(settings["program"], tuple(settings["path"]), options["memory_bytes"], settings["levels"])
        names: list[str] = []
        data: list[Any] = []
        size = 0
        for body in bodies:
            sent = encode_sent(Sent(body.order.task, home, options["grace_seconds"]))
            if len(sent) > LARGE_BYTES:  # not through the scheduler's own memory
                data.append(await client.scatter(sent, hash=False))
            else:
                data.append(sent)
                size += len(sent)
            names.append(body.order.task.name)
            if size > MOST_BYTES_AT_ONCE or body is bodies[-1]:
                client.map(
                    run_body,
                    data,
                    key=names,
                    pure=False,
                    resources=options["resources"] or None,
                    workers=options["workers"] or None,
                    priority=options["priority"],
                )
                names, data, size = [], [], 0

    def _lose(self, body: _Asked, why: str) -> None:
        self._end(body, Lost(body.order.body, why))

    def _end(self, body: _Asked, outcome: Ended) -> None:
        """Pass an outcome on. That of a body which is lost need not be kept."""
        name = body.order.task.name
        if self._asked.pop(name, None) is None:
            return
        if body.fetching is not None:
            body.fetching.cancel()
        if isinstance(outcome, Lost):
            del self._names[body.order.body]
            self._release(name)
        self.tell(msgspec.structs.replace(outcome, body=body.order.body))

    # -- the scheduler -------------------------------------------------------------------------------------------------

    def _event(self, event: dict[str, Any]) -> None:
        """Take what the scheduler sends about a body."""
        body = self._asked.get(event["name"])
        if body is None:
            return
        for data in event["messages"]:
            message: ToWorker = read_report(data)
            if isinstance(message, Ended):
                self._end(body, message)
                return
            if isinstance(message, Begun):
                body.has_begun = True
            else:
                body.seen += 1
            self.tell(msgspec.structs.replace(message, body=body.order.body))
        if event["is_large"] and body.fetching is None and self._client is not None:
            body.fetching = asyncio.get_running_loop().create_task(self._fetch(self._client, body))

    async def _fetch(self, client: Client, body: _Asked) -> None:
        """Fetch a large outcome from its Dask worker."""
        name = body.order.task.name
        try:
            answer = await client.scheduler.gather(keys=[name])  # type: ignore[union-attr]
        except OSError:
            return  # the connection is lost, which is seen elsewhere
        body.fetching = None
        data = answer.get("data", {}).get(name) if answer["status"] == "OK" else None
        message = read_report(data) if data else None
        if isinstance(message, Ended):
            self._end(body, message)
        else:  # another Dask worker was asked to perform it again, and has refused
            self._lose(body, "has lost its result with its Dask worker")

    async def speak(self) -> None:
        """Keep a connection to the scheduler until it is lost for good."""
        settings, scheduler = self._settings, ""
        limit = settings["lost_seconds"]
        why = f"cannot reach the Dask scheduler at {settings['address']}"
        while True:
            try:
                async with asyncio.timeout(limit):
                    client = await self._connected()
            except Exception as error:  # noqa: BLE001 - whatever stands in the way of a connection
                self.tell(Unfit(f"{why}: {str(error) or f'no answer in {limit:g} s'}"))
                return
            found = (await client.scheduler.identity(n_workers=0))["id"]  # type: ignore[union-attr]
            if scheduler and found != scheduler:
                for body in list(self._asked.values()):
                    self._lose(body, "was lost with its Dask scheduler")
            self._client, scheduler = client, found
            self.tell(Ready())
            self._new.clear()
            self._spawn(self._ask(client, list(self._asked.values())))
            await self._lost(client)
            self._client = None
            for body in self._asked.values():
                if body.fetching is not None:
                    body.fetching.cancel()
                    body.fetching = None
            with contextlib.suppress(Exception):
                await asyncio.wait_for(client.close(), 1.0)

    async def _connected(self) -> Client:
        settings = self._settings
        while True:
            try:
                client: Client = await Client(
                    settings["address"],
                    asynchronous=True,
                    set_as_default=False,
                    name="keepstep",
                    timeout=settings["lost_seconds"],
                )
                client.subscribe_topic(NAME, self._event)
                await client.register_plugin(SchedulerBodies())
                await client.register_plugin(WorkerBodies())
            except OSError:
                await asyncio.sleep(LOOK_SECONDS)
                continue
            return client

    async def _lost(self, client: Client) -> None:
        """Wait until the connection is lost, or the scheduler does not answer."""
        comm, loop, limit = client.scheduler_comm, asyncio.get_running_loop(), self._settings["lost_seconds"]
        pause = min(ASK_SECONDS, limit)
        asks_at = loop.time() + pause
        while client.scheduler_comm is comm and comm is not None and not comm.closed():
            await asyncio.sleep(LOOK_SECONDS)
            if loop.time() > asks_at:
                try:
                    async with asyncio.timeout(limit):
                        await self._unknown(client, [])
                except (OSError, TimeoutError):
                    return
                asks_at = loop.time() + pause


async def _call(to: Client, what: str, /, **arguments: Any) -> Any:
    """Call a function of the record of bodies on the scheduler."""
    return await getattr(to.scheduler, f"keepstep_{what}")(**arguments)


async def _speak(given: Given) -> None:
    speaker = Speaker(given.settings)
    line = socket.socket(fileno=given.descriptor)
    await asyncio.get_running_loop().create_connection(lambda: speaker, sock=line)
    await speaker.speak()
    speaker._line.close()  # noqa: SLF001 - after what is written
    await asyncio.sleep(1.0)  # its end ends this process


def main() -> None:
    """Speak to the scheduler that the first argument describes."""
    given = msgspec.json.decode(sys.argv[1], type=Given)
    del sys.argv[1:]
    for name in ("distributed", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what counts is reported to the worker
    asyncio.run(_speak(given))
