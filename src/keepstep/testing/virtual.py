"""Virtual time for tests: the loop that jumps to its next timer, and its clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..history.virtual_time import EPOCH, VirtualClock, VirtualLoop

if TYPE_CHECKING:
    from ..engine.engine import Engine

__all__ = ["EPOCH", "VirtualClock", "VirtualLoop", "at_work", "attend"]


def attend(loop: VirtualLoop, engine: Engine) -> None:
    """Let a loop wait in real time while the engine has work outside it: in threads and in processes of bodies."""
    loop.wait_while(lambda: at_work(engine))
    loop.disregard(lambda: engine.executors.lines)  # a process without a body says nothing


def at_work(engine: Engine) -> bool:
    """Whether a thread or another process works for the engine: at a body, a workflow or a hook."""
    busy = engine.step_threads.at_work + engine.hook_threads.at_work + engine.executors.at_work
    return busy > 0 or any(context.thread.busy for context in engine.live.values())
