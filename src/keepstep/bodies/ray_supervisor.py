"""Keepstep's part of a Ray cluster: an actor that owns the bodies, so that they go on when their worker ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import ray
from ray import exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import DefinitionError
from ..executors.failures import described
from ..executors.task import Begun, Failed, Lost
from .child import ORPHANED
from .ray_task import ASK_SECONDS, PARENT, kill, run

#: The actor's name. It changes with the form of the calls, so that workers of different forms do not share an actor.
NAME = "keepstep-1"
#: Items and bytes of one answer.
MOST_ITEMS, MOST_BYTES = 2_000, 4 << 20
#: Messages of one body that are kept for a worker that adopts it. Beyond that, the oldest tokens and logs are dropped.
MOST_KEPT = 10_000
#: Seconds between two looks for what nobody asks for.
LOOK_SECONDS = 2.0
#: Seconds after which a worker that asks for nothing is forgotten, and without workers and bodies, the actor ends.
IDLE_SECONDS = 600.0
#: Seconds that a body may take beyond its time. A worker that is there stops it first.
LATE_SECONDS = 2.0
#: Seconds after which bodies of an earlier supervisor have ended: they ask for it, and end without it.
ALONE_SECONDS = ASK_SECONDS + 1.0
#: Seconds that Ray has to end a process, before that is killed by its id.
FORCE_SECONDS = 2.0

#: Messages of a body: the key under which one replaces another, whether it must not be dropped, and the message.
Items = list[tuple[str, bool, bytes]]

_write = msgspec.msgpack.Encoder().encode


class _Asker:
    """An engine that asks for bodies, and the messages that it has not taken yet."""

    def __init__(self, about: bytes, now: float) -> None:
        #: Paths and levels of its worker, for the processes of bodies.
        self.about = about
        self.bodies: dict[int, _Body] = {}
        self.items: dict[int, tuple[int, bytes, Any]] = {}
        self.serial = 0
        self.news = asyncio.Event()
        #: The call for news that waits, and the time of the last one.
        self.waits = 0
        self.seen_at = now

    def put(self, number: int, message: bytes, data: Any = None) -> None:
        self.serial += 1
        self.items[self.serial] = (number, message, data)
        self.news.set()


class _Body:
    """A body, by its name."""

    def __init__(self, name: str, options: dict[str, Any], seconds: float | None, now: float) -> None:
        self.name = name
        self.options = options
        self.seconds = seconds
        self.asker: _Asker | None = None
        self.number = 0
        #: Since when no worker asks for it, if none does.
        self.left_at = now
        self.input: Any = None
        self.ref: Any = None
        self.began_at: float | None = None
        #: Node and id of its process.
        self.place: tuple[str, int] | None = None
        #: Its messages, for a worker that adopts it.
        self.kept: dict[Any, bytes] = {}
        self.count = 0
        self.stopping = ""
        self.late: asyncio.TimerHandle | None = None
        #: How it has ended, and its result if that is large.
        self.outcome: bytes | None = None
        self.result: Any = None
        self.ended_at = 0.0
        self.may_begin_again = False

    def put(self, message: bytes, data: Any = None) -> None:
        """Hand a message to the worker that asks for the body."""
        if self.asker is not None:
            self.asker.put(self.number, message, data)

    def attach(self, asker: _Asker, number: int) -> None:
        self.detach(0.0)
        self.asker, self.number = asker, number
        asker.bodies[number] = self

    def detach(self, now: float) -> None:
        if self.asker is not None:
            self.asker.bodies.pop(self.number, None)
            self.asker, self.left_at = None, now


class Supervisor:
    """Starts bodies as tasks of its own, once for each name, and gives their messages and outcomes to engines."""

    def __init__(self, namespace: str, silent_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._self = (NAME, namespace, ray.get_runtime_context().get_actor_id(), silent_seconds)
        self._bodies: dict[str, _Body] = {}
        self._askers: dict[str, _Asker] = {}
        self._run: Any = ray.remote(max_retries=0, num_returns=2)(run)
        self._kill: Any = ray.remote(max_retries=0, num_cpus=0)(kill)
        self._busy_at = self._begins_at = self._loop.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._spawn(self._look())

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- calls of the process beside a worker --------------------------------------------------------------------------

    async def hello(self, session: str, about: bytes, again: bool) -> None:
        """Greet a process that speaks for an engine; `again` if one did before, perhaps to another supervisor."""
        now = self._loop.time()
        if again and session not in self._askers:
            self._begins_at = max(self._begins_at, now + ALONE_SECONDS)
        self._askers.setdefault(session, _Asker(about, now)).seen_at = now

    async def order(self, session: str, orders: list[tuple[Any, ...]]) -> None:
        """Take orders for bodies, in their order."""
        asker = self._askers[session]
        for what, number, *more in orders:
            body = asker.bodies.get(number)
            if what == "run":
                self._begin(asker, number, *more)
            elif body is None:
                continue
            elif what == "stop":
                self._stop(body, "was stopped")
            else:
                body.detach(self._loop.time())
                if body.outcome is not None:
                    del self._bodies[body.name]

    async def news(self, session: str, taken: int, wait: float) -> list[tuple[int, int, bytes, Any]]:
        """Return the messages that an engine has not taken yet, or none after a while."""
        asker = self._askers[session]
        asker.waits += 1
        try:
            for serial in [one for one in asker.items if one <= taken]:
                del asker.items[serial]
            if not asker.items:
                asker.news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asker.news.wait(), wait)
        finally:
            asker.waits -= 1
            asker.seen_at = self._loop.time()
        return list(_some(asker.items))

    # -- calls of the process of a body --------------------------------------------------------------------------------

    async def tell(self, name: str, place: tuple[str, int], ago: float | None, items: Items) -> bool:
        """Take messages of a body, and how many seconds ago it began. Return whether it may go on."""
        body = self._bodies.get(name)
        if body is None or body.outcome is not None:
            return False
        body.place = place
        self._take(body, ago, items)
        return True

    # -- bodies --------------------------------------------------------------------------------------------------------

    def _begin(self, asker: _Asker, number: int, head: bytes, given: Any, about: dict[str, Any]) -> None:
        """Start a body, or attach the engine to the one that has this name."""
        name, may_begin = about["name"], about["may_begin"]
        body = self._bodies.get(name)
        if body is None or (body.may_begin_again and may_begin):
            body = self._bodies[name] = _Body(name, about["options"], about["seconds"], self._loop.time())
            body.attach(asker, number)
            body.input = given
            if may_begin:
                self._spawn(self._perform(body, head, asker.about))
            else:
                why = "is not known to the cluster: it was lost with a part of that, or ended long ago"
                self._loop.call_later(ALONE_SECONDS, self._ended, body, _write(Lost(0, why)))
            return
        body.input = given  # the one that the last worker gave may be lost with that
        if body.asker is asker and body.number == number:
            return
        body.attach(asker, number)
        if body.began_at is not None:
            body.put(_write(Begun(0, self._loop.time() - body.began_at)))
        for message in body.kept.values():
            body.put(message)
        if body.outcome is not None:
            body.put(body.outcome, body.result)

    async def _perform(self, body: _Body, head: bytes, about: bytes) -> None:
        """See a body to its end."""
        outcome, result = b"", None
        await asyncio.sleep(self._begins_at - self._loop.time())
        while not outcome:
            given = body.input
            if body.stopping:
                outcome, body.may_begin_again = _write(Lost(0, body.stopping)), True
                break
            try:
                first, second = self._run.options(**body.options["ray"]).remote(head, given, about, self._self)
                body.ref = first
                ago, items, outcome, is_large = await first
                self._take(body, ago, items)
                result = second if is_large else None
            except exceptions.OwnerDiedError:
                if given is body.input:
                    why = "lost its arguments with the worker that gave them"
                    outcome, body.may_begin_again = _write(Lost(0, why)), True
            except exceptions.TaskCancelledError:
                outcome = _write(Lost(0, body.stopping or "was cancelled by Ray"))
            except (exceptions.RayTaskError, exceptions.RuntimeEnvSetupError, TypeError, ValueError) as error:
                refused = DefinitionError(f"the body could not be called on Ray: {_brief(error)}")
                outcome = _write(Failed(0, described(refused)))
            except Exception as error:  # noqa: BLE001 - Ray has many ways to lose a task
                outcome = _write(Lost(0, body.stopping or f"was lost: {_brief(error)}"))
        self._ended(body, outcome, result)

    def _take(self, body: _Body, ago: float | None, items: Items) -> None:
        """Take messages of a body. The first ones tell that it has begun."""
        if body.began_at is None and ago is not None:
            body.began_at = self._loop.time() - ago
            body.put(_write(Begun(0, ago)))
            if body.seconds is not None:
                wait = body.seconds - ago + LATE_SECONDS
                body.late = self._loop.call_later(wait, self._stop, body, "took longer than its time")
        for key, must_be_kept, message in items:
            body.count += 1
            place = key or ("+" * must_be_kept, body.count)
            body.kept.pop(place, None)
            body.kept[place] = message
            body.put(message)
        while len(body.kept) > MOST_KEPT:
            body.kept.pop(next((one for one in body.kept if one[0] == ""), next(iter(body.kept))))

    def _ended(self, body: _Body, outcome: bytes, result: Any = None) -> None:
        body.outcome, body.result, body.ended_at = outcome, result, self._loop.time()
        body.ref = body.input = None
        if body.late is not None:
            body.late.cancel()
        body.put(outcome, result)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _stop(self, body: _Body, why: str) -> None:
        """End a body: politely, then by force, then by the id of its process."""
        if body.outcome is not None or body.stopping:
            return
        body.stopping = why
        grace = body.options["grace_seconds"]
        self._cancel(body, force=False)
        self._loop.call_later(grace, lambda: self._cancel(body, force=True))
        self._loop.call_later(grace + FORCE_SECONDS, self._kill_process, body)

    def _cancel(self, body: _Body, *, force: bool) -> None:
        if body.outcome is None and body.ref is not None:
            ray.cancel(body.ref, force=force)

    def _kill_process(self, body: _Body) -> None:
        """Kill a process that does not answer Ray, such as a suspended one."""
        if body.outcome is None and body.place is not None:
            node, pid = body.place
            self._kill.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(pid)

    # -- leftovers ------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if os.getppid() != PARENT:
                os._exit(ORPHANED)
            self._sweep(self._loop.time())

    def _sweep(self, now: float) -> None:
        """End bodies and drop outcomes that no worker asks for. End the actor if nobody needs it."""
        for asker in self._askers.values():
            if asker.waits:
                asker.seen_at = now
        for body in list(self._bodies.values()):
            left_at = body.left_at if body.asker is None else body.asker.seen_at
            if body.outcome is None and now - left_at > body.options["unasked_seconds"]:
                self._stop(body, "was stopped, because no worker asked for it")
            elif body.outcome is not None and now - body.ended_at > body.options["kept_seconds"]:
                body.detach(now)
                del self._bodies[body.name]
        self._forget_askers(now)
        if self._bodies or self._askers:
            self._busy_at = now
        elif now - self._busy_at > IDLE_SECONDS:
            ray.kill(ray.get_runtime_context().current_actor)

    def _forget_askers(self, now: float) -> None:
        for session, asker in list(self._askers.items()):
            if now - asker.seen_at > IDLE_SECONDS:
                for body in list(asker.bodies.values()):
                    body.detach(asker.seen_at)
                del self._askers[session]


def _some(items: dict[int, tuple[int, bytes, Any]]) -> Iterator[tuple[int, int, bytes, Any]]:
    """Return the first items, as many as one answer holds."""
    size = 0
    for count, (serial, (number, message, data)) in enumerate(items.items()):
        size += len(message)
        if count and (count >= MOST_ITEMS or size > MOST_BYTES):
            return
        yield serial, number, message, data


def _brief(error: BaseException) -> str:
    """Return the first sentence of what Ray says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
