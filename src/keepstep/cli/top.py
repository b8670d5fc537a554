"""The command `top`: rates, runs that need a person, queues, services, agents and workers, live in the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from shutil import get_terminal_size
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
#: Characters between two columns, and those to which the last column may be cut.
_GAP, _CUT = 2, 12
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
    """Watch rates, runs that need a person, queues, services, agents, workers and slow steps; q ends it.

    Rates come with the heartbeats of workers, every 5 seconds. Nothing of a run is read, so no keys are needed.
    """
    from ..views import plain
    from ..views.top import sample

    with settings.reading(looking=True) as store:
        if once or settings.json or not (sys.stdout.isatty() and sys.stdin.isatty()):
            taken = sample(store)
            settings.answer(plain.sample_data(taken), lambda: _printed(taken, shown_url(store)))
            return
        _watch(lambda: _screen(sample(store), shown_url(store), get_terminal_size().columns), every)


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
        console.print(_screen(sample, url, console.width))
    return "\n".join(line.rstrip() for line in taken.get().splitlines())


def _screen(sample: Sample, url: str, width: int) -> Group:
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
    parts: list[Any] = [head, *(Text(line, "yellow") for line in _troubles(sample)), Text("")]
    for table in _tables(sample, width):
        parts += [table, Text("")]
    return Group(*parts)


def _troubles(sample: Sample) -> Iterator[str]:
    """Yield what a person should look at, each with the command that shows it."""
    from ..views.top import MOST_COUNTED

    found = [
        (sample.needs_person, "waiting for a person", "keepstep list --needs-person"),
        (sample.open_failures, "failed and still open", "keepstep list --open-failures"),
        (sample.set_aside, "set aside", "keepstep aside list"),
        (sample.halted, "halted, because the store could not save", "keepstep doctor"),
        (sample.save_failures, "failed saves", "keepstep doctor"),
    ]
    for count, what, shown_by in found:
        if count:
            yield f"{count:,}{'+' if count >= MOST_COUNTED else ''} {what} ({shown_by})"
    if sample.oldest_at is not None:
        yield f"the oldest run that waits to begin: {_since(sample.oldest_at, sample)}"


def _tables(sample: Sample, width: int) -> Iterator[Table]:
    from . import formatting

    queues = [
        (one.name, _or_dash(one.driven), one.counts.waiting, _since(one.counts.oldest_at, sample), _limits(one.limits))
        for one in sample.queues
    ]
    yield _table("QUEUE", "DRIVEN", "WAITING", "OLDEST", "LIMITS", rows=queues, width=width)
    if sample.services:
        services = [
            (one.name, one.running, one.waiting, one.parked, one.breaker, one.limits) for one in sample.services
        ]
        yield _table("SERVICE", "RUNNING", "WAITING", "PARKED", "BREAKER", "LIMITS", rows=services, width=width)
    if sample.agents:
        agents = [
            (one.name, one.hosts, f"{one.tasks} of {one.places or 'any'}", one.completed, one.failed)
            for one in sample.agents
        ]
        yield _table("AGENT", "HOSTS", "TASKS", "COMPLETED", "FAILED", rows=agents, width=width)
    workers = [_worker(one, formatting) for one in sample.workers]
    heads = ("WORKER", "STATE", "RUNS", "STEPS/S", "FAILS/S", "BEAT", "CPU", "MEMORY", "LAG", "RUNS/S", "PROCESS")
    yield _table(*heads, rows=workers, width=width)
    if sample.slow:
        slow = [
            (name, one.count, formatting.duration(one.seconds / one.count), formatting.duration(one.longest_seconds))
            for name, one in sample.slow
        ]
        yield _table("SLOW STEP", "TIMES", "MEAN", "LONGEST", rows=slow, width=width)


def _worker(one: WorkerSample, formatting: Any) -> tuple[object, ...]:
    worker, rates, used = one.worker, one.counts.rates, one.counts.resources
    state = "dead" if not worker.alive else "claims" if worker.claims else "drains"
    return (
        worker.id,
        state,
        worker.leases,
        f"{rates.steps:.1f}",
        f"{rates.failures:.1f}",
        formatting.ago(worker.renewed_at),
        f"{100 * rates.processors:.0f} %",
        f"{used.resident_bytes / 1e6:.0f} MB" if used.resident_bytes else "-",
        formatting.duration(max(0.0, used.lag_seconds)),
        f"{rates.runs:.1f}",
        f"{worker.pid} on {worker.host}",
    )


def _or_dash(count: int | None) -> str:
    return "-" if count is None else str(count)


def _since(at: datetime | None, sample: Sample) -> str:
    from . import formatting

    return formatting.ago(at, sample.at)


def _limits(limits: dict[str, Any]) -> str:
    from ..policies.queue import Limits

    return str(Limits.of(limits))


def _table(*heads: str, rows: Sequence[tuple[object, ...]], width: int) -> Table:
    """Return a table. The last columns are left out where the terminal is too narrow, and the last shown one is cut."""
    from rich.table import Table
    from rich.text import Text

    from . import formatting

    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    cells = [[formatting.one_line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    shown = next((count for count in range(len(heads), 1, -1) if _needed(widths[:count]) <= width), 2)
    for number in range(shown):
        is_last = number == shown - 1
        table.add_column(
            heads[number], no_wrap=True, overflow="ellipsis", min_width=None if is_last else widths[number]
        )
    for row in cells:
        table.add_row(*map(Text, row[:shown]))
    return table


def _needed(widths: Sequence[int]) -> int:
    """Return the width of columns beside each other, of which the last may be cut to a few characters."""
    return sum(widths[:-1]) + _GAP * (len(widths) - 1) + min(widths[-1], _CUT)
