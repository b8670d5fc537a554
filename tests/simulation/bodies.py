"""The steps of made-up programs: each tells the world when its body begins and ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import keepstep as ks
from keepstep.ports import CURRENT

if TYPE_CHECKING:
    from .world import World

#: The place of the client among the processes.
CLIENT = -1

#: What a change of the code adds to the numbers that steps are called with.
CODE = 1000

#: What the failure of a step says that somebody can mend; programs do not catch it.
BROKEN = "is broken until somebody mends it"

#: The world in which the present history takes place; there is one at a time.
HERE: list[World] = []


def here() -> World:
    """The world of the present history."""
    return HERE[0]


class Body:
    """Tells the world that the body of a step begins and ends."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._world = here()

    def __enter__(self) -> int:
        scope = CURRENT.get()
        self._mark = self._world.body_begins(scope.run.id, scope.key, scope.number, ks.idempotency_key(), self._number)
        if self._world.is_broken(scope.run.id, self._number):
            self._world.body_ends(self._mark)
            raise ks.Permanent(f"step {self._number} {BROKEN}")
        return scope.number  # type: ignore[no-any-return]

    def __exit__(self, *_: object) -> None:
        self._world.body_ends(self._mark)


async def pass_time(seconds: float) -> None:
    """Take a while."""
    if seconds > 0:
        await asyncio.sleep(seconds)


@ks.step
async def work(number: int, seconds: float) -> int:
    """Takes a while."""
    with Body(number):
        await pass_time(seconds)
    return number


@ks.step
async def fails(number: int, seconds: float) -> int:
    """Never works."""
    with Body(number):
        await pass_time(seconds)
        raise ks.Permanent(f"step {number} cannot work")


@ks.step(retry=ks.Retry(attempts=4, base_seconds=0.3, factor=3.0, jitter=0.2))
async def flaky(number: int, tries: int) -> int:
    """Works at this try, if tries are counted."""
    with Body(number) as attempt:
        await pass_time(0.01)
        if attempt < tries:
            raise ConnectionError(f"try {number} again")
    return number


async def _looked_up(number: int, seconds: float) -> Any:
    """Whether it happened is told by the world, as a payment service would tell."""
    scope = CURRENT.get()
    return ks.Done(number) if here().has_begun(scope.run.id, scope.key) else ks.NotDone()


@ks.step(at_most_once=True, verify=_looked_up)
async def once(number: int, seconds: float) -> int:
    """Must not happen twice."""
    with Body(number):
        await pass_time(seconds)
    return number


@ks.step(at_most_once=True)
async def risky(number: int, seconds: float) -> int:
    """Must not happen twice, and only a person can say whether it has happened."""
    with Body(number):
        await pass_time(seconds)
    return number


@ks.step(timeout=0.4)
async def limited(number: int, seconds: float) -> int:
    """May take longer than it has."""
    with Body(number):
        await pass_time(seconds)
    return number


@ks.step
def plain(number: int, seconds: float) -> int:
    """Would run in a thread."""
    with Body(number):
        return number


@ks.step
async def seen(number: int, what: str) -> int:
    """Takes what the run drew or saw: on replay it must be asked with the same again."""
    with Body(number):
        return number


@ks.step
async def token(number: int, seconds: float) -> int:
    """Shows what it does while it does it."""
    with Body(number):
        ks.emit(number)
        ks.publish("step", number)
        await pass_time(seconds)
    return number


@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.3))
async def put_back(result: int, number: int, seconds: float) -> None:
    """Undoes what `undoable` has done, sometimes only at the second try."""
    with Body(-number) as attempt:
        await pass_time(seconds)
        assert result == number
        if attempt == 1 and number % 3 == 0:
            raise ConnectionError(f"try to undo {number} again")


@ks.step(undo=put_back)
async def undoable(number: int, seconds: float) -> int:
    """Is undone if its run fails or is cancelled."""
    with Body(number):
        await pass_time(seconds)
    return number


STEPS: dict[str, Any] = {
    "undoable": undoable,
    "work": work,
    "fails": fails,
    "flaky": flaky,
    "once": once,
    "limited": limited,
    "plain": plain,
    "token": token,
}
