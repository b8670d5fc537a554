"""Plain code of a run: a function in a thread, beside a task that awaits for it whatever it asks for.

The run sees only the task. A cancel, a timeout, a park and the order of deliveries are therefore the same as for async
code.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..executors.thread import in_own_thread, plainly
from ..workflows.definition import Step, Workflow
from .failure_point import clear_frames

if TYPE_CHECKING:
    from .driver import RunDriver

#: Starts a function in a thread with these context variables.
Submit = Callable[[Context, Callable[[], Any]], Future[Any]]


class PlainCode:
    """One function in a thread, and the task that awaits calls for it."""

    __slots__ = (
        "_answered",
        "_asked",
        "_cancelled",
        "_context",
        "_end",
        "_error",
        "_function",
        "_gone",
        "_request",
        "_run",
        "_submit",
        "_value",
        "task",
    )

    def __init__(self, run: RunDriver, function: Callable[[], Any], submit: Submit) -> None:
        self._run = run
        self._function = function
        self._submit: Submit | None = submit
        self._context = copy_context()  # of the task; another thread may give this one its turn
        self.task: Any = asyncio.current_task()
        self._end: Future[Any] | None = None
        self._request: Awaitable[Any] | None = None
        self._asked: asyncio.Future[None] | None = None
        #: Whether to raise a cancel at the next wait of the code, because it came while the code was running.
        self._cancelled = False
        self._gone = False
        self._answered = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    # -- on the loop: the task ----------------------------------------------------------------------------------------

    async def drive(self) -> Any:
        """Return the result of the function; meanwhile await what it asks for."""
        try:
            while True:
                self._run.code_ready(self)
                await self._until_asked()
                if self._end is not None:
                    return self._end.result()
                await self._answer()
        finally:
            self._run.thread.end_turn(self)
            self._run.watch()
            self.leave()

    async def _until_asked(self) -> None:
        """Wait until the code asks for a call or has ended."""
        while self._request is None and self._end is None:
            self._asked = self._run.loop.create_future()
            try:
                await self._asked
            except asyncio.CancelledError:
                if self._run.stop.detached or getattr(self.task, "cancelled_from_outside", False):
                    raise
                self._cancelled = True

    async def _answer(self) -> None:
        """Await the requested call, and keep its outcome for the code."""
        request, self._request = self._request, None
        self._value = self._error = None
        try:
            if request is not None:
                self._value = await request
        except GeneratorExit:
            raise
        except BaseException as error:
            if self._run.stop.detached:
                raise
            self._error = error

    def go(self) -> None:
        """Let the code go on, or begin."""
        submit, self._submit = self._submit, None
        if submit is None:
            self._answered.set()
            return
        future = submit(self._context, self._in_thread)
        future.add_done_callback(partial(self._report_end, self._context.copy()))

    def leave(self) -> None:
        """Release waiting code of a run that is no longer driven here."""
        self._gone = True
        self._answered.set()

    def _receive(self, begin: Callable[[], Awaitable[Any] | None], refuse: Callable[[], None] | None) -> None:
        """Begin what the code asks for, in the context of its thread."""
        run = self._run
        if self._gone or run.stop.detached:
            self.leave()
            return
        run.moved()
        self._value = self._error = None
        try:
            if self._cancelled and refuse is not None:
                self._cancelled = False
                refuse()
                self._error = asyncio.CancelledError()
            else:
                self._request = begin()
        except BaseException as error:  # noqa: BLE001 - it is raised in the code
            self._error = error
        if self._request is None:
            self._answered.set()
            return
        self._wake()

    def _ended(self, future: Future[Any]) -> None:
        self._end = future
        self._wake()

    def _wake(self) -> None:
        """Let the task see that the code waits or has ended."""
        if self._asked is not None and not self._asked.done():
            self._asked.set_result(None)
        self._run.thread.end_turn(self)
        self._run.watch()

    # -- in the thread ------------------------------------------------------------------------------------------------

    def _in_thread(self) -> Any:
        threads = self._run.thread
        threads.entered(self)
        try:
            return plainly(self._function)
        except BaseException as error:
            # Clear the variables of the code here. Otherwise the clean-up of a generator would run later, outside the
            # run.
            clear_frames(error)
            raise
        finally:
            threads.ended()

    def _report_end(self, context: Context, future: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._run.loop.call_soon_threadsafe(self._ended, future, context=context)

    def ask(self, begin: Callable[[], Awaitable[Any] | None], refuse: Callable[[], None] | None = None) -> Any:
        """Let the task await what `begin` returns, and return the outcome; without an awaitable, go on at once.

        If the code is cancelled, `refuse` is called instead of `begin`. Without `refuse`, the cancel waits for a later
        call.
        """
        run = self._run
        if run.stop.detached:
            run.insist_on_end()
        self._answered.clear()
        run.loop.call_soon_threadsafe(self._receive, begin, refuse)
        self._answered.wait()
        if self._gone:
            run.insist_on_end()
        value, error = self._value, self._error
        self._value = self._error = None
        if error is not None:
            raise error
        return value


async def in_thread(run: RunDriver, function: Callable[[], Any], submit: Submit) -> Any:
    """Run a function of the workflow in a thread, which may wait for calls with `.result()`."""
    return await PlainCode(run, function, submit).drive()


async def in_branch_thread(run: RunDriver, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in a thread of its own, in the branch of the current task. A call that it returns is awaited.

    Not in the pool of workflows: they wait for their branches, so that the branches might never get a thread of it.
    """
    value = await PlainCode(run, partial(function, *args), in_own_thread).drive()
    return await value if isinstance(value, Coroutine) else value


def bare(function: Any) -> Any:
    """Return the function inside of `functools.partial`."""
    while isinstance(function, partial):
        function = function.func
    return function


def runs_in_thread(run: RunDriver, function: Any) -> bool:
    """Whether a function given to `ks.map` or `ks.gather` is plain code of a plain def workflow, which may be called.

    The thread of the caller tells whether plain code of an async workflow's run asks.
    """
    inner = bare(function)
    is_async = run.workflow.is_async and run.thread.here() is None
    if is_async or not callable(inner) or isinstance(inner, Step | Workflow | Awaitable):
        return False
    return not (inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__))


def begun_later(run: RunDriver, parts: Iterable[Any]) -> list[Any]:
    """Return the parts of a group; each plain function among them gets a thread and a branch when it is begun."""
    found: list[Any] = []
    for part in parts:
        if runs_in_thread(run, part):
            found.append(partial(in_branch_thread, run, part))
        elif isinstance(part, Awaitable) or isinstance(bare(part), Step):
            found.append(part)
        else:
            if isinstance(part, list | tuple | set):
                raise DefinitionError("a list of calls is not a call; unpack it with a star, as in ks.gather(*calls)")
            name = getattr(part, "__qualname__", repr(part))
            raise DefinitionError(
                f"{name} is not awaitable; pass a call, such as `{name}()`. A plain function is only for plain def "
                "workflows"
            )
    return found
