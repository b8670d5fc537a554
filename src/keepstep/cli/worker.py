"""The command `worker`: a process that claims runs and drives them until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from . import exits
from .frame import MODULE, Settings, command, shown_url

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model import Event
    from ..workflows.definition import Workflow

#: A worker that is told to stop is gone within 30 s: so long for its steps, the rest for handing back.
STOP_SECONDS = 20.0
#: With --until-idle: how long nothing must have been due before the worker leaves.
IDLE_SECONDS = 0.5
#: What may become of a run that a worker has driven for a while.
_PUT_AWAY = frozenset({"completed", "failed", "cancelled", "set aside", "waiting", "paused", "queued"})


@command("worker")
@click.argument("targets", nargs=-1, required=True, metavar="FILE.py|MODULE[:WORKFLOW]|FILE.yaml...")
@MODULE
@click.option("--max-runs", type=click.IntRange(1), default=1000, show_default=True, help="Runs driven at once.")
@click.option(
    "--stop-seconds",
    type=click.FloatRange(0),
    default=STOP_SECONDS,
    show_default=True,
    help="How long steps may go on after SIGTERM or Ctrl-C.",
)
@click.option("--until-idle", is_flag=True, help="Leave when nothing is due.")
@click.option("--retain-days", type=click.FloatRange(0), help="Remove finished runs that are older, ...")
@click.option(
    "--retain-count", type=click.IntRange(0), default=1000, show_default=True, help="... but for so many of a workflow."
)
@click.option("-q", "--quiet", is_flag=True, help="Only tell of trouble.")
@click.option("-v", "--verbose", is_flag=True, help="Tell of every step.")
def worker(
    settings: Settings,
    *,
    targets: tuple[str, ...],
    module: tuple[str, ...],
    max_runs: int,
    stop_seconds: float,
    until_idle: bool,
    retain_days: float | None,
    retain_count: int,
    quiet: bool,
    verbose: bool,
) -> int:
    """Drive runs of the workflows in these files or modules, and recover what was interrupted.

    SIGTERM or Ctrl-C: takes no more work, lets steps finish for a while, hands the rest back. With --json it says when
    it leaves what became of the runs that it drove.
    """
    chosen = _chosen(targets, module, debug=settings.debug)
    options: dict[str, Any] = {"max_runs": max_runs, "workflows": chosen}
    if retain_days is not None:
        from ..policies import Retain

        options["retain"] = Retain(retain_days, retain_count)
    return asyncio.run(_serve(settings, options, stop_seconds, until_idle=until_idle, quiet=quiet, verbose=verbose))


def _chosen(targets: tuple[str, ...], modules: tuple[str, ...], *, debug: bool) -> list[Workflow[..., Any]] | None:
    """The workflows that were named, or None for all that the files define and import."""
    from ..workflows.definition import KNOWN
    from .target import is_workflow_file, load_module, load_workflow, split

    named: list[Workflow[..., Any]] = []
    whole = False
    for target in targets:
        if is_workflow_file(target):
            load_workflow(target, modules=modules, debug=debug)
            whole = True  # the workflows that it runs as children are driven here, too
            continue
        where, name = split(target)
        if name:
            named.append(load_workflow(target, debug=debug))
        else:
            load_module(where, debug=debug)
            whole = True
    if whole and not KNOWN:
        raise exits.Refused(f"{', '.join(targets)} defines no workflow", "decorate a function with @keepstep.workflow")
    return None if whole else named


async def _serve(
    settings: Settings, options: dict[str, Any], stop_seconds: float, *, until_idle: bool, quiet: bool, verbose: bool
) -> int:
    from .progress import Lines
    from .run import CLOSE_SECONDS, Stop, no_later_than, not_twice

    if not quiet:
        logging.getLogger("keepstep").addFilter(not_twice)
    lines = Lines(steps=verbose, live=False)
    drove: Counter[str] = Counter()
    observers = [*([] if quiet else [lines.observe]), *([partial(_count, drove)] if settings.json else [])]
    with Stop() as stop:
        engine = settings.engine(create=True, worker=True, observers=observers or None, **options)
        await engine.open()
        try:
            if not quiet:
                names = ", ".join(sorted(engine.workflows))
                lines.plain(f"worker (pid {os.getpid()}) on {shown_url(engine.store)} drives {names}; Ctrl-C stops it")
            idle = [asyncio.ensure_future(_idle(engine))] if until_idle else []
            await stop.or_(*idle)
            for task in idle:
                if task.done():
                    task.result()  # nothing is due only if the store has said so
                task.cancel()
            if stop.asked.is_set() and not quiet:
                under_way = f", {len(engine.live)} runs are under way" if engine.live else ""
                lines.plain(f"stopping within {stop_seconds:g} s{under_way} (again: at once)")
        finally:
            with no_later_than(stop_seconds + CLOSE_SECONDS, exits.OK):
                await engine.close(stop_seconds)
        if not quiet:
            lines.plain("stopped; what is not finished waits for the next worker")
    if settings.json:
        left = "asked" if stop.asked.is_set() else "idle"
        settings.answer({"pid": os.getpid(), "workflows": sorted(engine.workflows), "drove": dict(drove), "left": left})
    return exits.OK


def _count(drove: Counter[str], event: Event) -> None:
    """Count how often a run ended or was put away here, by what became of it."""
    what = event.name.removeprefix("run.")
    if what in _PUT_AWAY:
        drove[what] += 1


async def _idle(engine: Engine) -> None:
    """Come back when nothing has been driven or due for a moment; a store that does not answer is waited for."""
    from ..errors import StoreUnavailable
    from ..model import FINISHED, RunQuery, Status

    waiting = frozenset(set(Status) - FINISHED - {Status.SET_ASIDE, Status.PAUSED})
    ours: set[str] = set()
    since = time.monotonic()
    while time.monotonic() - since < IDLE_SECONDS:
        await asyncio.sleep(0.05)
        if engine.worker is not None:
            ours.add(engine.worker.id)  # it gets another if the store takes it for dead
        try:
            page = await engine.list(RunQuery(status=waiting, limit=1000))
        except StoreUnavailable as error:
            engine.outage.tell("the store cannot be asked what is due", error)
            since = time.monotonic()
            continue
        now = engine.clock.now()
        due = [
            run
            for run in page.runs
            if run.workflow in engine.workflows and run.due_at is not None and run.due_at.timestamp() <= now
        ]
        due += [run for run in page.runs if run.worker in ours]  # let go, but not given back yet
        if engine.live or due:
            since = time.monotonic()
