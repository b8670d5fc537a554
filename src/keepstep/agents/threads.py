"""Steps for frameworks that run agents in threads: any thread asks, the run's loop records, the thread performs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar, cast

from ..errors import DefinitionError
from ..kernel.context import in_workflow
from ..ports import CURRENT
from .calls import CallSteps, warn_in_step

__all__ = ["BlockingCalls", "Stopped", "in_thread"]

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds to wait for a thread of a cancelled run. Its next call ends it, but nothing ends the code between two calls.
STOP_SECONDS = 1.0


class Stopped(BaseException):
    """The run of this thread has been cancelled or goes on elsewhere. It is not an `Exception`, so that it passes."""


class _Bridge:
    """The way from the threads of a framework to the loop of their run."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_open = True

    def wait(self, make: Callable[[], Coroutine[Any, Any, T]], box: SimpleQueue[Any] | None = None) -> T:
        """Await something on the loop. Meanwhile, perform in this thread what arrives in the box."""
        if not self.is_open:
            raise Stopped
        asked = asyncio.run_coroutine_threadsafe(make(), self.loop)
        if box is not None:
            asked.add_done_callback(lambda _: box.put(None))
            while (work := box.get()) is not None:
                work()
        try:
            return asked.result()
        except BaseException:
            if asked.cancelled() or not self.is_open:
                raise Stopped from None
            raise


_BRIDGE: ContextVar[_Bridge] = ContextVar("keepstep_bridge")


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Run blocking code of a framework in a thread of its own, where its calls of models and tools are steps.

    Use it in the code of an async workflow. If the run is cancelled, the next call in any of the framework's threads
    raises `Stopped` there.
    """
    bridge = _Bridge()
    context = copy_context()
    context.run(_BRIDGE.set, bridge)
    ended: asyncio.Future[T] = bridge.loop.create_future()

    def run() -> None:
        try:
            value = context.run(function, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - it is raised where the thread is awaited
            _settle(ended, error, None)
        else:
            _settle(ended, None, value)

    threading.Thread(target=run, name="keepstep-agent", daemon=True).start()
    try:
        return await asyncio.shield(ended)
    except asyncio.CancelledError:
        bridge.is_open = False
        await asyncio.wait([ended], timeout=STOP_SECONDS)
        raise
    finally:
        bridge.is_open = False
        ended.add_done_callback(lambda one: one.cancelled() or one.exception())


def _settle(future: asyncio.Future[Any], error: BaseException | None, value: Any) -> None:
    """Give a future its outcome, from another thread."""
    if isinstance(error, StopIteration | Stopped):  # neither may end a future
        error = RuntimeError(f"the code of the agent ended with {type(error).__name__}")

    def settle() -> None:
        if future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    loop = future.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)


class BlockingCalls:
    """The steps of an agent, for code that cannot await.

    A body runs in the thread that asked for the call, with all that the framework keeps in that thread. If an attempt
    times out, the next one begins when that body has returned. Outside a workflow, a call only runs its body.
    """

    def __init__(self, steps: CallSteps) -> None:
        self.steps = steps
        self._home: tuple[_Bridge, Context] | None = None

    def at_home(self, function: Callable[[], T]) -> T:
        """Call a function in the context of the run, which some frameworks do not give to their threads.

        It is the context of the last model call, so an agent belongs to one run at a time. When that run is over here,
        the thread must not go on outside it.
        """
        if CURRENT.get() is not None or self._home is None:
            return function()
        bridge, context = self._home
        if not bridge.is_open:
            raise Stopped
        return context.copy().run(function)

    def model(self, content: Any, body: Callable[[], T], *, agent: str | None = None) -> T:
        """Call a model, as `CallSteps.model` does."""
        if CURRENT.get() is None:
            self._home = None  # the agent is used outside a workflow now
        warn_in_step()
        return cast("T", self._call(body, lambda perform: self.steps.model(content, perform, agent=agent)))

    def tool(
        self,
        name: str,
        call_id: str | None,
        body: Callable[[], T],
        *,
        arguments: Any = None,
        agent: str | None = None,
    ) -> T:
        """Call a tool, as `CallSteps.tool` does. A tool that is not a step only runs."""
        if not self.steps.records_tool(name):
            return body()
        made = self._call(
            body, lambda perform: self.steps.tool(name, call_id, perform, arguments=arguments, agent=agent)
        )
        return cast("T", made)

    def wait(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await something in the workflow, such as `approval`, from a thread of the framework."""
        return _bridge().wait(make)

    def _call(self, body: Callable[[], T], call: Callable[[Callable[[], Awaitable[Any]]], Coroutine[Any, Any, T]]) -> T:
        if not in_workflow():
            return body()
        bridge = _bridge()
        if self._home is None or not self._home[0].is_open:
            self._home = bridge, copy_context()
        elif self._home[0] is not bridge:
            raise DefinitionError("an agent is used by two runs at once; make it inside the workflow")
        box: SimpleQueue[Any] = SimpleQueue()

        async def perform() -> T:
            """The body of the step: let the thread that asked perform it."""
            scope, performed = CURRENT.get(), bridge.loop.create_future()

            def work() -> None:
                if performed.cancelled():
                    return
                token = CURRENT.set(scope)
                try:
                    value = body()
                except BaseException as error:  # noqa: BLE001 - it is the outcome of the attempt
                    _settle(performed, error, None)
                else:
                    _settle(performed, None, value)
                finally:
                    CURRENT.reset(token)

            box.put(work)
            return await performed  # type: ignore[no-any-return]

        return bridge.wait(lambda: call(perform), box)


def _bridge() -> _Bridge:
    bridge = _BRIDGE.get(None)
    if bridge is None:
        raise DefinitionError(
            "a framework that runs in threads is called in the code of a workflow; call it with "
            "`await keepstep.agents.threads.in_thread(agent.run, task)`"
        )
    return bridge
