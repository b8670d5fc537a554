"""The event loop of one simulated process: its time is the world's, and it moves only when the world lets it."""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from keepstep.ports import CURRENT

if TYPE_CHECKING:
    from .process import Process

#: Timers that are nearer to each other than this ring together.
RESOLUTION = 1e-6


class SimulatedTask(asyncio.Task[Any]):
    """A task whose hash is its number, not its place in memory: asyncio keeps tasks in sets."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class ProcessLoop(asyncio.BaseEventLoop):
    """An asyncio loop without a selector, without threads and without a clock of its own.

    Callbacks are called in the order that asyncio promises. Between any two of them the world may stop the process for
    a while, or for ever.
    """

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._clock_resolution = RESOLUTION
        self._tasks_made = 0
        self.abandoned = False
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    # -- what the world does with it -----------------------------------------------------------------------------------

    def next_at(self) -> float | None:
        """When there is something to do next: at once, at a time, or never."""
        if self._ready:  # type: ignore[attr-defined]
            return 0.0
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        return timers[0]._when if timers else None

    def one_pass(self, may_go_on: Callable[[], bool]) -> None:
        """Ring the timers that are due, and call what is ready, as long as the process may go on."""
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        due = self.time() + RESOLUTION
        while timers and timers[0]._when < due:
            handle = heapq.heappop(timers)
            handle._scheduled = False
            if not handle._cancelled:
                ready.append(handle)
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(self._asyncgen_firstiter_hook, self._asyncgen_finalizer_hook)  # type: ignore[attr-defined]
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
                    if not may_go_on():
                        return
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def abandon(self) -> None:
        """Take the loop away: what is still in it ends here, and nothing it asks for is done."""
        self.abandoned = True
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            coroutine = task.get_coro()
            try:
                if coroutine is not None:
                    coroutine.close()
            except BaseException:
                pass
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]
        self.close()

    # -- what asyncio asks of a loop -----------------------------------------------------------------------------------

    def time(self) -> float:
        return self._process.world.now

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
        if self.abandoned:
            return asyncio.Handle(callback, args, self, context)
        return self._call_soon(callback, args, context)  # type: ignore[attr-defined]

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        if self.abandoned:
            return asyncio.TimerHandle(when, callback, args, self, context)
        return super().call_at(when, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """What a thread would do is done a moment later, and its answer arrives a moment after that."""
        answer: asyncio.Future[Any] = self.create_future()

        def do() -> None:
            value, error = None, None
            try:
                value = func(*args)
            except BaseException as raised:
                error = raised
            self.call_later(self._process.latency(), tell, value, error)

        def tell(value: Any, error: BaseException | None) -> None:
            if answer.done():
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        self.call_later(self._process.latency(), do)
        return answer

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.abandoned and "callback" in context.get("message", ""):
            self._process.world.note_failure(context["message"], context.get("exception"))

    def _make_task(self, loop: Any, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        self._tasks_made += 1
        context = options.get("context")
        scope = None if context is None else context.get(CURRENT)
        number = self._tasks_made
        if scope is not None and not scope.in_step:
            number = scope.order  # that of its branch, which is the same in every process
        return SimulatedTask(number, coroutine, loop=loop, **options)

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps here."""
