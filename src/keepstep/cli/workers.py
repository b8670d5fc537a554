"""The commands `workers` and `drain`: which workers a store has, and which of them are to claim no more runs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import click

from . import errors
from .settings import Settings, command

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model import WorkerInfo

#: Seconds between two looks whether drained workers have ended.
LOOK_SECONDS = 0.2


@command("workers")
def workers(settings: Settings) -> None:
    """List the workers that are alive or hold runs.

    A worker that drains claims no more runs and is about to end.
    """
    from ..views import plain
    from . import formatting

    async def look(engine: Engine) -> list[WorkerInfo]:
        return await engine.workers()

    found = settings.look(look)

    def shown() -> str:
        if not found:
            return f"no worker is alive; start one with {errors.line('worker')} FILE.py"
        rows = [
            (
                one.id,
                f"{one.pid} on {one.host}",
                _state(one),
                str(one.leases),
                formatting.local(one.started_at) if one.started_at else "",
                "all" if one.queues is None else formatting.one_line(", ".join(one.queues)),
                formatting.one_line(", ".join(one.known)),
            )
            for one in found
        ]
        return formatting.table(("WORKER", "PID", "STATE", "RUNS", "SINCE", "QUEUES", "KNOWS"), rows)

    settings.answer({"workers": [plain.worker_data(one) for one in found]}, shown)


def _state(worker: WorkerInfo) -> str:
    return "dead" if not worker.alive else "claims" if worker.claims else "drains"


@command("drain")
@click.argument("names", nargs=-1, metavar="[WORKER...]")
@click.option("--all", "everyone", is_flag=True, help="Drain every worker that is alive now.")
@click.option(
    "--wait",
    type=click.FloatRange(0),
    metavar="SECONDS",
    help="Wait until they have ended; exit code 8 if one has not.",
)
def drain(settings: Settings, *, names: tuple[str, ...], everyone: bool, wait: float | None) -> int:
    """Tell workers to claim no more runs, to let their steps finish, and to end.

    WORKER is the id of a worker, or the beginning of one. A worker sees it with its next heartbeat, within 5 seconds.
    Other workers go on with its runs.
    """
    if bool(names) == everyone:
        raise click.UsageError("name the workers to drain, or use --all; keepstep workers lists them")

    async def act(engine: Engine) -> tuple[list[str], list[str]]:
        alive = [one.id for one in await engine.workers() if one.alive]
        chosen = alive if everyone else [_named(name, alive) for name in dict.fromkeys(names)]
        marked = [worker for worker in dict.fromkeys(chosen) if await engine.drain(worker)]
        return marked, await _left_after(engine, marked, wait)

    marked, left = settings.talk(act)

    def shown() -> str:
        if not marked:
            return "no worker is alive"
        return "\n".join(
            f"{worker} {'drains' if wait is None else 'has not ended' if worker in left else 'has ended'}"
            for worker in marked
        )

    settings.answer({"drained": marked, "alive": left}, shown)
    return errors.TIMED_OUT if wait is not None and left else errors.OK


def _named(name: str, alive: list[str]) -> str:
    """Return the living worker that a name, or the beginning of one, stands for."""
    found = [worker for worker in alive if worker == name] or [worker for worker in alive if worker.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise errors.Refused(f"{name!r} is the beginning of several workers: {', '.join(found)}")
    hint = f"{errors.line('workers')} lists them"
    raise errors.Refused(f"no living worker {name!r}", hint, errors.NOT_FOUND)


async def _left_after(engine: Engine, marked: list[str], wait: float | None) -> list[str]:
    """Return those of the workers that are alive, after a wait for their end."""
    until = time.monotonic() + (wait or 0.0)
    while True:
        alive = {one.id for one in await engine.workers() if one.alive}
        left = [worker for worker in marked if worker in alive]
        if not left or time.monotonic() >= until:
            return left
        await asyncio.sleep(LOOK_SECONDS)
