"""Virtual time for tests: the loop that jumps to its next timer, and its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..history.virtual_time import EPOCH, VirtualClock, VirtualLoop

if TYPE_CHECKING:
    from ..engine.engine import Engine

__all__ = ["EPOCH", "VirtualClock", "VirtualLoop", "at_work"]


def at_work(engine: Engine) -> bool:
    """Whether a thread of the engine runs a plain def step, workflow or hook, for `VirtualLoop.wait_while`."""
    busy = engine.step_threads.at_work + engine.hook_threads.at_work + engine.executors.at_work
    return busy > 0 or any(context.thread.busy for context in engine.live.values())
