"""What the client does to runs: each act takes a handle, and comes back when it is done or too late for it.

To have the client do something new, write a function and put it into `ACTS`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from keepstep.errors import AlreadyFinished, DefinitionError, RunConflict
from keepstep.model import Status
from keepstep.stores.rules import ENDED

from .graphs import BY_HAND, PREFIX

if TYPE_CHECKING:
    from keepstep.engine.handle import RunHandle
    from keepstep.model import Run

    from .world import World

#: What the name of a fork ends with.
FORK = "-fork"
#: How often the client looks whether a run that it wants to change has come to rest, and after how long.
TRIES, PAUSE_SECONDS = 20, 0.3
#: The same for a run that may go on for long before it fails.
LONG_TRIES = 400

Act = Callable[..., Awaitable[None]]


async def signal(world: World, handle: RunHandle[Any], name: str, number: int) -> None:
    """Send a signal; sending it again changes nothing."""
    await handle.signal(name, number, id=f"client:{name}:{number}")


async def cancel(world: World, handle: RunHandle[Any]) -> None:
    """Cancel a run."""
    await handle.cancel()
    world.cancelled.add(handle.id)


async def pause(world: World, handle: RunHandle[Any], seconds: float) -> None:
    """Pause a run, and resume it later, whatever befalls the client meanwhile."""
    await handle.pause()
    await asyncio.sleep(seconds)
    await world.client.insist(lambda _: handle.resume())


async def ask(world: World, handle: RunHandle[Any], name: str, number: int) -> None:
    """Ask a run something, which has one right answer."""
    from .world import PATIENCE_SECONDS

    answer = await handle.ask(name, number, timeout=PATIENCE_SECONDS)
    if answer != number + 1:
        world.breaks("a question gets its own answer", f"{number} was answered with {answer}")


async def resolve(world: World, handle: RunHandle[Any], step: str) -> None:
    """Say of a step in doubt what the world knows."""
    begun = world.bodies.get((handle.id, step))
    await handle.resolve(step, *(("result", begun[-1].number) if begun else ("again",)))


async def resume(world: World, handle: RunHandle[Any]) -> None:
    """Let a run go on that waits at a breakpoint."""
    await handle.resume()


async def rewind(world: World, handle: RunHandle[Any], part: float) -> None:
    """Let a run go on from this part of its history."""

    async def back(run: Run) -> None:
        await handle.rewind(to=min(int(part * run.seq), run.seq - 1), reason="to see what comes of it")
        world.client.sends(handle.id)  # what the run had ended before it could hear

    await _at_rest(world, handle, back)


async def edit(world: World, handle: RunHandle[Any], value: int) -> None:
    """Change the state of a graph, under a key that no step writes."""
    run = await handle.run()
    if run.workflow.startswith(PREFIX):
        await _at_rest(world, handle, lambda _: handle.edit({BY_HAND: value}, reason="by hand"))
        world.client.sends(handle.id)


async def fork(world: World, handle: RunHandle[Any], part: float) -> None:
    """Start another run with a copy of this part of the history; it must come to the same.

    A program that signals itself has its own name in what it asks, which is another in a fork.
    """
    run = await handle.run()
    if any(word in str(world.specs[handle.id]) for word in ("'ping'", "'contend'")):
        return
    at = world.forks.setdefault(f"{run.id}{FORK}", int(part * run.seq))
    try:
        await world.client.process.engine.fork(run.id, at, run_id=f"{run.id}{FORK}", reason="to see what comes of it")
    except (DefinitionError, RunConflict):  # beyond its cancel or its deadline, or inside an undo
        return
    world.client.has_forked(run.id)


async def retry(world: World, handle: RunHandle[Any]) -> None:
    """Wait until a run has failed, mend what made it fail, and let it go on from there."""
    first = handle.id
    retried_at = 0
    for _ in range(LONG_TRIES):
        run = await handle.run()
        while run.continued_as:
            handle = await world.client.process.engine.get(run.continued_as)
            run = await handle.run()
        if run.status is Status.FAILED:
            if retried_at and not _was_held(str(world.specs[first]["parts"]), run, retried_at):
                return
            world.mended.add(first)
            with contextlib.suppress(RunConflict):  # a client that is held up for too long is taken for dead
                try:
                    await handle.retry("mended")
                finally:  # the store may have made it, and its answer may be lost
                    world.client.sends(first)  # what the run had ended before it could hear
                retried_at = run.seq + 1
        elif run.status in ENDED:
            world.mended.add(first)  # an edit or a rewind may let it go on, and no one retries it then
            return
        await asyncio.sleep(PAUSE_SECONDS)


def _was_held(parts: str, run: Run, retried_at: int) -> bool:
    """Whether `asyncio.gather` held what failed a run when it was retried: its code had not seen that failure yet.

    A child that held one fails once more, which is news to its parent.
    """
    named = run.error.caused_by if run.error is not None else ()
    return "'agather'" in parts and bool(named) and ("'child'" in parts or max(named) < retried_at)


async def _at_rest(world: World, handle: RunHandle[Any], act: Callable[[Run], Awaitable[None]]) -> None:
    """Do something to a run that nobody drives; one that is driven is paused first, and resumed in any case."""
    paused = False
    try:
        for _ in range(TRIES):
            run = await handle.run()
            if run.seq and not run.status.active:
                try:
                    await act(run)
                except RunConflict:
                    if run.continued_as:
                        return
                else:
                    return
            elif run.seq and not paused:
                await handle.pause()
                paused = True
            await asyncio.sleep(PAUSE_SECONDS)
    finally:
        if paused:
            await world.client.insist(lambda _: _resumed(handle))


async def _resumed(handle: RunHandle[Any]) -> None:
    with contextlib.suppress(AlreadyFinished, RunConflict):
        await handle.resume()


ACTS: dict[str, Act] = {
    "signal": signal,
    "cancel": cancel,
    "pause": pause,
    "ask": ask,
    "resolve": resolve,
    "resume": resume,
    "rewind": rewind,
    "edit": edit,
    "fork": fork,
    "retry": retry,
}
#: Acts that the world waits for before it ends, though every run has ended.
AWAITED = frozenset({"rewind", "edit", "fork", "retry"})
