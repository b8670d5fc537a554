"""The command `worker`: a process that claims runs and drives them until it is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click

from . import errors
from .settings import EXECUTOR, MODULE, Settings, command, shown_url

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model import Event, Run
    from ..policies import Retain
    from ..workflows.definition import Workflow

#: Seconds that steps may take after a request to stop. With handing back, the worker ends within 30 s.
STOP_SECONDS = 20.0
#: Seconds without due runs after which a worker with --until-idle ends.
IDLE_SECONDS = 0.5


@command("worker")
@click.argument("targets", nargs=-1, metavar="FILE.py|MODULE[:WORKFLOW]|FILE.yaml...")
@MODULE
@click.option(
    "--agents",
    multiple=True,
    metavar="FILE.py|MODULE[:NAME]",
    help="Host this agent or team, or all in the file; may be given repeatedly.",
)
@click.option("--queue", multiple=True, metavar="NAME", help="Drive runs of this queue only; may be given repeatedly.")
@EXECUTOR
@click.option("--max-runs", type=click.IntRange(1), default=1000, show_default=True, help="Runs driven at once.")
@click.option(
    "--stop-seconds",
    type=click.FloatRange(0),
    default=STOP_SECONDS,
    show_default=True,
    help="Time for steps to finish after SIGTERM or Ctrl-C.",
)
@click.option("--until-idle", is_flag=True, help="Stop when nothing is due.")
@click.option(
    "--retain-days",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Remove finished runs of its workflows that are older than this, ...",
)
@click.option(
    "--retain-count",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="... except for this many of each workflow.",
)
@click.option("--keep-all", is_flag=True, help="Remove nothing, whatever the workflows say.")
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), metavar="PORT", help="Answer /metrics, /healthz, /readyz."
)
@click.option("--metrics-host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address of that port.")
@click.option("-q", "--quiet", is_flag=True, help="Only report problems.")
@click.option("-v", "--verbose", is_flag=True, help="Report every step.")
def worker(
    settings: Settings,
    *,
    targets: tuple[str, ...],
    module: tuple[str, ...],
    agents: tuple[str, ...],
    queue: tuple[str, ...],
    executor: str | None,
    max_runs: int,
    stop_seconds: float,
    until_idle: bool,
    retain_days: float,
    retain_count: int,
    keep_all: bool,
    metrics_port: int | None,
    metrics_host: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """Drive runs of the workflows in these files or modules, and recover interrupted ones.

    On SIGTERM, Ctrl-C or `keepstep drain` the worker claims no more runs, lets steps finish for a while, hands the rest
    back, and ends. With --json it prints at its end what became of the runs that it drove.

    It removes finished runs of its workflows that no rule keeps, and says at its start what it keeps. A rule that a
    workflow has in its code or file comes first.
    """
    from ..policies import Retain
    from .target import load_agents

    if not targets and not agents:
        raise click.UsageError("name the workflows to drive: keepstep worker FILE.py; or agents: --agents FILE.py")
    hosted = [one for target in agents for one in load_agents(target, debug=settings.debug)]
    chosen = _chosen(targets, module, debug=settings.debug)
    options: dict[str, Any] = {"max_runs": max_runs, "workflows": chosen, "queues": queue or None}
    options["executor"] = executor
    options |= {"stop_seconds": stop_seconds, "agents": hosted or None}
    options["retain"] = False if keep_all else Retain(retain_days, retain_count)
    port = None if metrics_port is None else (metrics_host, metrics_port)
    return asyncio.run(
        _serve(settings, options, stop_seconds, until_idle=until_idle, quiet=quiet, verbose=verbose, port=port)
    )


def _chosen(targets: tuple[str, ...], modules: tuple[str, ...], *, debug: bool) -> list[Workflow[..., Any]] | None:
    """Return the named workflows, or None for all that the files define and import."""
    from ..workflows.definition import KNOWN
    from .target import is_workflow_file, load_module, load_workflow, split

    named: list[Workflow[..., Any]] = []
    whole = False
    for target in targets:
        if is_workflow_file(target):
            load_workflow(target, modules=modules, debug=debug)
            whole = True  # its child workflows are driven here, too
            continue
        where, name = split(target)
        if name:
            named.append(load_workflow(target, debug=debug))
        else:
            load_module(where, debug=debug)
            whole = True
    if whole and not KNOWN:
        raise errors.Refused(f"{', '.join(targets)} defines no workflow", "decorate a function with @keepstep.workflow")
    return None if whole else named


async def _serve(
    settings: Settings,
    options: dict[str, Any],
    stop_seconds: float,
    *,
    until_idle: bool,
    quiet: bool,
    verbose: bool,
    port: tuple[str, int] | None,
) -> int:
    from .progress import Lines
    from .run import CLOSE_SECONDS, Stop, no_later_than, not_twice

    if not quiet:
        logging.getLogger("keepstep").addFilter(partial(not_twice, steps=verbose))
    lines = Lines(steps=verbose, live=False)
    drove: Counter[str] = Counter()
    observers: list[Any] = [*([] if quiet else [lines.observe]), *([partial(_count, drove)] if settings.json else [])]
    if port is not None:
        observers.append("prometheus")
    with Stop() as stop:
        engine = settings.engine(create=True, worker=True, observers=observers or None, **options)
        await engine.open()
        try:
            where = "" if port is None else await _open_port(engine, *port)
            for line in () if quiet else _first_lines(engine, options, where):
                lines.plain(line)
            drained = asyncio.ensure_future(engine.told_to_drain.wait())
            idle = [asyncio.ensure_future(_idle(engine))] if until_idle else []
            await stop.or_(drained, *idle)
            for task in idle:
                if task.done():
                    task.result()  # the worker is idle only if the store has confirmed it
                task.cancel()
            is_drained = not drained.cancel()
            if (stop.asked.is_set() or is_drained) and not quiet:
                under_way = f", {len(engine.live)} runs in progress" if engine.live else ""
                why = "told to drain; " if is_drained else ""
                lines.plain(f"{why}stopping within {stop_seconds:g} s{under_way} (again: at once)")
            if stop.asked.is_set() and engine.live:
                engine.background(_show_draining(engine))
        finally:
            with no_later_than(stop_seconds + CLOSE_SECONDS, errors.OK):
                await engine.close(stop_seconds)
        if not quiet:
            lines.plain("stopped; unfinished runs wait for the next worker")
    if settings.json:
        left = "asked" if stop.asked.is_set() else "drained" if is_drained else "idle"
        settings.answer({"pid": os.getpid(), "workflows": sorted(engine.workflows), "drove": dict(drove), "left": left})
    return errors.OK


def _first_lines(engine: Engine, options: dict[str, Any], metrics: str) -> Iterator[str]:
    """Yield the lines that a worker prints at its start."""
    names = ", ".join(sorted(engine.workflows)) + _only(options["queues"])
    yield f"worker (pid {os.getpid()}) on {shown_url(engine.store)} drives {names}; stop it with Ctrl-C"
    yield from _kept(engine, options["retain"])
    if metrics:
        yield f"metrics and health at {metrics}"


async def _open_port(engine: Engine, host: str, port: int) -> str:
    """Answer scrapes and checks of health until the process ends, and return the address."""
    from ..engine.health_port import open_port
    from ..observers.prometheus import METRICS

    try:
        server = await open_port(engine, host, port, METRICS.text)
    except OSError as error:
        raise errors.Refused(f"--metrics-port {port} cannot be opened: {error.strerror or error}") from None
    return f"http://{host}:{server.sockets[0].getsockname()[1]}/metrics"


def _only(queues: tuple[str, ...] | None) -> str:
    """Return the queues that a worker serves, in words; nothing for all."""
    return f" in queue{'' if len(queues) == 1 else 's'} {', '.join(queues)} only" if queues else ""


async def _show_draining(engine: Engine) -> None:
    """Mark the own row, so that others see that this worker claims no more runs."""
    from ..errors import StoreError

    with contextlib.suppress(StoreError):
        if engine.worker is not None:
            await engine.drain(engine.worker.id)


def _kept(engine: Engine, retain: Retain | Literal[False]) -> Iterator[str]:
    """Yield which finished runs the worker keeps, in words."""
    from ..care.retention import Rules

    if retain is False:
        yield "finished runs are all kept (--keep-all)"
        return
    yield f"of finished runs it keeps {retain} of each workflow; --keep-all keeps all"
    for name, rule in Rules(retain, engine.workflows).own().items():
        yield f"  of {name}: {rule}"


def _count(drove: Counter[str], event: Event) -> None:
    """Count the runs that ended or were parked here, by outcome."""
    from ..model.event import STATUS_EVENTS

    drove.update(status.value for status, name in STATUS_EVENTS.items() if name == event.name and not status.active)


async def _idle(engine: Engine) -> None:
    """Return when nothing has been driven or due for a moment; wait while the store does not answer."""
    from ..errors import StoreUnavailable
    from ..model import FINISHED, RunQuery, Status

    waiting = frozenset(set(Status) - FINISHED - {Status.SET_ASIDE, Status.PAUSED})
    ours: set[str] = set()
    left: set[tuple[str, str]] = set()  # workflows and versions of which the log has said that they stay
    since = time.monotonic()
    while time.monotonic() - since < IDLE_SECONDS:
        await asyncio.sleep(0.05)
        if engine.worker is not None:
            ours.add(engine.worker.id)  # the worker gets a new id if the store has marked it dead
        try:
            page = await engine.list(RunQuery(status=waiting, limit=1000))
        except StoreUnavailable as error:
            engine.outage.log("cannot ask the store for due runs", error)
            since = time.monotonic()
            continue
        now = engine.clock.now()
        due = [
            run
            for run in page.runs
            if run.workflow in engine.workflows
            and (engine.worker is None or engine.worker.serves(run.queue))
            and run.due_at is not None
            and run.due_at.timestamp() <= now
        ]
        pinned = [run for run in due if engine.worker is not None and engine.worker.is_pinned_elsewhere(run)]
        _report_pinned(engine, pinned, left)
        due = [run for run in due if run not in pinned]
        due += [run for run in page.runs if run.worker in ours]  # detached, but not yet handed back
        if engine.live or due:
            since = time.monotonic()


def _report_pinned(engine: Engine, runs: list[Run], reported: set[tuple[str, str]]) -> None:
    """Log once for each version that due runs of it are left to other workers."""
    for workflow, version in sorted({(run.workflow, run.version) for run in runs} - reported):
        reported.add((workflow, version))
        count = sum((run.workflow, run.version) == (workflow, version) for run in runs)
        logging.getLogger("keepstep").warning(
            "%d due run%s of workflow %r %s left to workers that have version %r; this one has version %r",
            count,
            "" if count == 1 else "s",
            workflow,
            "is" if count == 1 else "are",
            version,
            engine.workflows[workflow].version,
        )
