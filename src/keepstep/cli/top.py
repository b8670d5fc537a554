"""The command `top`: rates, queues, services, workers and slow steps of a store, live in the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from .settings import Settings, command, shown_url

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Group
    from rich.table import Table

    from ..views.top import Sample, WorkerSample

#: Pause after a sample, in times of what it took, so that looking at a store with very many runs does not load it.
SHARE = 5.0
#: Characters of a line in a pipe, where nothing is cut.
_UNBOUNDED = 10_000
#: Keys that end the view.
_QUIT = ("q", "Q", "\x03", "\x04", "\x1b")


@command("top")
@click.option("--once", is_flag=True, help="Print one sample and end; so it is in a pipe and with --json.")
@click.option(
    "--every",
    type=click.FloatRange(0.2),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Interval.",
)
def top(settings: Settings, *, once: bool, every: float) -> None:
    """Watch rates, queues, services, workers and slow steps; q ends it.

    Rates come with the heartbeats of workers, every 5 seconds. Nothing of a run is read, so no keys are needed.
    """
    from ..views import plain
    from ..views.top import sample

    with settings.reading() as store:
        if once or settings.json or not (sys.stdout.isatty() and sys.stdin.isatty()):
            taken = sample(store)
            settings.answer(plain.sample_data(taken), lambda: _printed(taken, shown_url(store)))
            return
        _watch(lambda: _screen(sample(store), shown_url(store)), every)


def _watch(make: Any, every: float) -> None:
    """Show a new screen every few seconds until a key ends it."""
    import select

    from rich.live import Live
    from rich.text import Text

    from ..errors import StoreError

    with _keys() as keys, Live(make(), screen=True, auto_refresh=False) as live:
        pause = every
        while True:
            ready, _, _ = select.select([keys], [], [], pause)
            if ready and keys.read(1) in (*_QUIT, ""):
                return
            began = time.monotonic()
            try:
                live.update(make(), refresh=True)
            except StoreError as error:  # it may be back in a moment
                live.update(Text(f"the store does not answer: {error}"), refresh=True)
            pause = max(every, SHARE * (time.monotonic() - began))


@contextmanager
def _keys() -> Iterator[Any]:
    """Give single keys as they are pressed, and restore the terminal."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield sys.stdin
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


# -- the screen --------------------------------------------------------------------------------------------------------


def _printed(sample: Sample, url: str) -> str:
    """Return one sample as text."""
    from rich.console import Console

    is_bounded = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if is_bounded else _UNBOUNDED)
    with console.capture() as taken:
        console.print(_screen(sample, url))
    return "\n".join(line.rstrip() for line in taken.get().splitlines())


def _screen(sample: Sample, url: str) -> Group:
    from rich.console import Group
    from rich.text import Text

    rates = sample.rates
    head = Text.assemble(
        (f"{url}", "bold"),
        f"   {sample.at.astimezone():%H:%M:%S}   ",
        (f"{rates.runs:.1f}", "green"),
        " runs/s  ",
        (f"{rates.steps:.1f}", "green"),
        " steps/s  ",
        (f"{rates.failures:.1f}", "red" if rates.failures else "green"),
        " failures/s",
    )
    troubles = [
        (sample.set_aside, "set aside (keepstep list --status set-aside)"),
        (sample.halted, "halted, because the store could not save"),
        (sample.save_failures, "failed saves"),
    ]
    shown = "   ".join(f"{count} {what}" for count, what in troubles if count)
    parts: list[Any] = [head, *([Text(shown, "yellow")] if shown else []), Text("")]
    for table in _tables(sample):
        parts += [table, Text("")]
    return Group(*parts)


def _tables(sample: Sample) -> Iterator[Table]:
    from . import formatting

    queues = [
        (one.name, _or_dash(one.driven), one.counts.waiting, _since(one.counts.oldest_at, sample), _limits(one.limits))
        for one in sample.queues
    ]
    yield _table("QUEUE", "DRIVEN", "WAITING", "OLDEST", "LIMITS", rows=queues)
    if sample.services:
        services = [
            (one.name, one.running, one.waiting, one.parked, one.breaker, one.limits) for one in sample.services
        ]
        yield _table("SERVICE", "RUNNING", "WAITING", "PARKED", "BREAKER", "LIMITS", rows=services)
    workers = [_worker(one, formatting) for one in sample.workers]
    yield _table("WORKER", "PID", "STATE", "RUNS", "RUNS/S", "STEPS/S", "FAILURES/S", "BEAT", rows=workers)
    if sample.slow:
        slow = [
            (name, one.count, formatting.duration(one.seconds / one.count), formatting.duration(one.longest_seconds))
            for name, one in sample.slow
        ]
        yield _table("SLOW STEP", "TIMES", "MEAN", "LONGEST", rows=slow)


def _worker(one: WorkerSample, formatting: Any) -> tuple[object, ...]:
    worker, rates = one.worker, one.counts.rates
    state = "dead" if not worker.alive else "claims" if worker.claims else "drains"
    return (
        worker.id,
        f"{worker.pid} on {worker.host}",
        state,
        worker.leases,
        f"{rates.runs:.1f}",
        f"{rates.steps:.1f}",
        f"{rates.failures:.1f}",
        formatting.ago(worker.renewed_at),
    )


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)


def _since(at: datetime | None, sample: Sample) -> str:
    from . import formatting

    return formatting.ago(at, sample.at)


def _limits(limits: dict[str, Any]) -> str:
    from ..policies.queue import Limits

    return str(Limits.of(limits))


def _table(*heads: str, rows: Sequence[tuple[object, ...]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from . import formatting

    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    cells = [[formatting.one_line(str(cell)) for cell in row] for row in rows]
    for number, column in enumerate(zip(heads, *cells, strict=True)):
        is_last = number == len(heads) - 1  # only the last one is cut in a narrow terminal
        widest = max(map(len, column))
        table.add_column(heads[number], no_wrap=True, overflow="ellipsis", min_width=None if is_last else widest)
    for row in cells:
        table.add_row(*map(Text, row))
    return table


# -- for programs ------------------------------------------------------------------------------------------------------
