"""The async generators of a run's code, which are closed within the run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import AsyncGeneratorType
from typing import Any

from ..ports import CURRENT

#: Exceptions with a special meaning: the first one ends the loop, the second one the coroutine that awaits the task.
_ORDERS = (SystemExit, GeneratorExit)


#: Seconds that cancelled code may take to clean up.
UNWIND_SECONDS = 30.0


class FollowedGenerators:
    """Reports the async generators that code begins to its run.

    The hook belongs to the current thread, which must be the loop's. It lasts until the loop stops.
    """

    def __init__(self) -> None:
        self._before, finalizer = sys.get_asyncgen_hooks()
        self._hook = self._begun  # one bound method, for comparison by identity
        sys.set_asyncgen_hooks(self._hook, finalizer)

    def _begun(self, generator: Any) -> None:
        scope = CURRENT.get()
        if scope is not None and not scope.in_step:
            scope.run.follow_generator(generator)
        if self._before is not None:
            self._before(generator)

    def close(self) -> None:
        """Restore the thread's hook."""
        if sys.get_asyncgen_hooks().firstiter is self._hook:
            sys.set_asyncgen_hooks(firstiter=self._before)


async def close_generator(generator: AsyncGeneratorType[Any, Any], tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Close a generator of a parked run after its tasks have ended; errors are discarded."""
    with suppress(asyncio.CancelledError):  # the engine is closing
        if tasks:
            await asyncio.wait(tasks, timeout=UNWIND_SECONDS)
    with suppress(Exception, asyncio.CancelledError, *_ORDERS):
        await generator.aclose()
