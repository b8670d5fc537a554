"""The commands that create runs: `run` drives one to its end here, `start` leaves it to a worker."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, Self

import click

from ..ports import STARTER
from . import errors
from .filters import tag_of
from .settings import EXECUTOR, MODULE, Settings, command, shown_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..engine.engine import Engine
    from ..engine.handle import RunHandle
    from ..model import Event
    from ..workflows.definition import Workflow
    from .progress import Lines

#: Seconds that a step in progress may take after Ctrl-C before its run is handed back.
STOP_SECONDS = 5.0
#: Seconds that handing back may take before the process ends without it. The run is then recovered as after a crash.
CLOSE_SECONDS = 8.0


def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments of both commands."""
    for option in reversed(
        [
            click.argument("target", metavar="FILE.py:WORKFLOW|FILE.yaml"),
            click.argument("words", nargs=-1, metavar="[ARGUMENT...]"),
            click.option("--input", "text", metavar="JSON", help="The input as JSON, @file, or - for standard input."),
            MODULE,
            click.option("--id", "run_id", metavar="ID", help="The run's id; an existing run goes on."),
            click.option("--tag", type=tag_of, multiple=True, metavar="NAME=VALUE", help="A tag to find the run by."),
            click.option(
                "--deadline",
                type=click.FloatRange(0, min_open=True),
                metavar="SECONDS",
                help="Fail the run if it takes longer.",
            ),
        ]
    ):
        function = option(function)
    return function


def _named(modules: tuple[str, ...]) -> list[str]:
    """Return the options that name modules, as they were written."""
    return [word for module in modules for word in ("--module", module)]


_EPILOG = (
    "An ARGUMENT is a JSON value or plain text, or name=value. With --input an object holds arguments by name, any "
    "other JSON is the one argument. FILE.py may also be a module: package.module:workflow. A "
    "workflow in a YAML or JSON file finds its functions in the modules that --module names."
)


# -- run ---------------------------------------------------------------------------------------------------------------


@command("run", epilog=_EPILOG)
@_shared
@EXECUTOR
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Hand the run back unfinished after this time, with exit code 8; it goes on later.",
)
def run(
    settings: Settings,
    *,
    target: str,
    words: tuple[str, ...],
    text: str | None,
    module: tuple[str, ...],
    run_id: str | None,
    tag: tuple[tuple[str, str], ...],
    deadline: float | None,
    executor: str | None,
    timeout: float | None,
) -> int:
    """Run a workflow to its end, showing its progress; its result is printed as JSON.

    After a crash, Ctrl-C or --timeout, the same command with the run's --id continues the run.
    """
    from .target import load_workflow

    workflow = load_workflow(target, modules=module, debug=settings.debug)
    logging.getLogger("keepstep").addFilter(not_twice)
    options = {"run_id": run_id, "tags": dict(tag), "deadline": deadline}
    driven = _Driven(settings, workflow, (target, *_named(module)), options, words=words, text=text, executor=executor)
    with redirect_stdout(sys.stderr):  # the workflow's prints are not part of its result
        code = asyncio.run(driven.drive(timeout))
    if driven.left is not None:
        settings.answer(driven.left)
    return driven.conclude() if driven.ended is not None else code


def not_twice(record: logging.LogRecord, *, steps: bool = True) -> bool:
    """Whether a log record should be shown; progress lines and the end of the run already report the others."""
    from ..kernel.step import FAILED_ATTEMPT

    if steps and record.msg == FAILED_ATTEMPT:
        return False
    return " is set aside: " not in str(record.msg) % (record.args or ())


class _Driven:
    """One run that this process drives until it ends or is stopped."""

    def __init__(
        self,
        settings: Settings,
        workflow: Workflow[..., Any],
        target: tuple[str, ...],
        options: dict[str, Any],
        *,
        words: tuple[str, ...],
        text: str | None,
        executor: str | None = None,
    ) -> None:
        self.settings = settings
        self.workflow = workflow
        self.target = target
        self.words = words
        self.text = text
        self.executor = executor
        self.options = options
        self.named = options["run_id"] is not None
        self.handle: RunHandle[Any] | None = None
        self.lines: Lines | None = None
        self.notes: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Future[Any] | None = None
        self.left: dict[str, str] | None = None

    async def drive(self, seconds: float | None = None) -> int:
        """Drive the run until it ends, until this process is told to stop, or for some time."""
        from ..model.ids import new_run_id
        from .progress import Lines

        self.options["run_id"] = run_id = self.options["run_id"] or new_run_id(time.time())
        with Lines(run_id) as self.lines, Stop() as stop:
            engine = self.settings.engine(create=True, worker=True, observers=self._observe, executor=self.executor)
            async with engine:
                handle = self.handle = await self._begin(engine)
                self._introduce(engine)
                await self._tell_wait()
                looks = asyncio.ensure_future(self._look_at_maps())
                self.notes.add(looks)
                ended = asyncio.ensure_future(handle.result())
                ended.add_done_callback(lambda _: looks.cancel())
                await stop.or_(ended, seconds=seconds)
                if not ended.done():
                    ended.cancel()
                    late = None if stop.asked.is_set() else seconds
                    await self._stop(engine, late)
                    return errors.INTERRUPTED if late is None else errors.TIMED_OUT
                with suppress(BaseException):  # the error is reported after everything is closed
                    ended.result()
            self.lines.stop()
            self.ended = ended
            return errors.OK

    async def _begin(self, engine: Engine) -> RunHandle[Any]:
        from ..errors import RunConflict, RunNotFound
        from ..kernel.namesakes import is_namesake, problem
        from .target import read_input

        run_id = self.options["run_id"]
        if self.named and self.text is None and not self.words:
            with suppress(RunNotFound):  # no such run: it is a new one, without arguments
                handle = await engine.get(run_id)
                there = await handle.run()
                if there.workflow != self.workflow.name:
                    raise RunConflict(
                        f"run {run_id!r} belongs to workflow {there.workflow!r}, not to {self.workflow.name!r}", run_id
                    )
                if is_namesake(self.workflow, there):
                    raise RunConflict(problem(self.workflow, there), run_id)
                return handle
        args, kwargs = read_input(self.workflow, self.text, self.words)
        STARTER.set(os.environ.get("TRACEPARENT"))
        return await engine.start(self.workflow.bind(*args, **kwargs), **self.options)

    def _introduce(self, engine: Engine) -> None:
        if self.lines is not None and self.handle is not None:
            name = click.style(self.handle.id, bold=True)
            self.lines.plain(f"{name}  {self.workflow.name} in {shown_url(engine.store)}")

    def _observe(self, event: Event) -> None:
        if self.lines is None:
            return
        self.lines.observe(event)
        if event.name == "run.waiting" and self.handle is not None and event.run == self.handle.id:
            task = asyncio.ensure_future(self._tell_wait())
            self.notes.add(task)
            task.add_done_callback(self.notes.discard)

    async def _look_at_maps(self) -> None:
        """Read now and then how many items the maps of the run have."""
        from ..records.progress import maps_in

        while self.handle is not None and self.lines is not None:
            await asyncio.sleep(1.0)
            if self.lines.maps.counts:
                self.lines.maps.totals(maps_in((await self.handle.run()).progress))

    async def _tell_wait(self) -> None:
        if self.handle is not None and self.lines is not None:
            run = await self.handle.run()
            if run.status in ("waiting", "paused"):
                self.lines.waiting(run)

    async def _stop(self, engine: Engine, late: float | None) -> None:
        """Hand the run back, because this process was told to stop, or because the run is `late`."""
        handle, lines = self.handle, self.lines
        if handle is None or lines is None:
            return
        why = "stopping" if late is None else f"{late:g} s are over"
        lines.plain(f"{why}: the current steps have {STOP_SECONDS:g} s to finish (Ctrl-C again: at once)")
        with no_later_than(STOP_SECONDS + CLOSE_SECONDS, errors.INTERRUPTED if late is None else errors.TIMED_OUT):
            await engine.close(STOP_SECONDS)
        lines.stop()
        where = [] if self.executor is None else ["--executor", self.executor]
        again = errors.line("run", *self.target, *where, "--id", handle.id)
        status = "interrupted" if late is None else "timed out"
        self.left = {"run": handle.id, "status": status, "again": again}
        lines.plain(f"run {handle.id} is not finished; its finished steps are kept. Continue it with\n  {again}")

    def conclude(self) -> int:
        """Print the result, or raise the error that the run ended with."""
        from ..views import plain

        run_id, ended = self.options["run_id"], self.ended
        if ended is None:
            return errors.INTERRUPTED
        error = ended.exception()
        if error is not None:
            if self.settings.json:
                return _told_as_json(run_id, error)
            raise error
        result = plain.value_of(self.workflow.values.encode(ended.result(), "result"))
        if self.settings.json:
            click.echo(json.dumps({"run": run_id, "status": "completed", "result": result}, ensure_ascii=False))
        else:
            click.echo(json.dumps(result, ensure_ascii=False, indent=2))
        return errors.OK


def _told_as_json(run_id: str, error: BaseException) -> int:
    from ..errors import RunError
    from ..views import plain

    if not isinstance(error, RunError):
        raise error
    code = errors.code_of(error)
    status = {errors.FAILED: "failed", errors.CANCELLED: "cancelled", errors.SET_ASIDE: "set aside"}.get(
        code, "unknown"
    )
    info = plain.error_data(getattr(error, "error", None))
    click.echo(json.dumps({"run": run_id, "status": status, "error": info}, ensure_ascii=False))
    return code


@contextmanager
def no_later_than(seconds: float, code: int) -> Iterator[None]:
    """End the process if the block takes longer, so that an unresponsive store cannot keep it alive."""
    timer = threading.Timer(seconds, _leave_at_once, [seconds, code])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave_at_once(seconds: float, code: int) -> None:
    message = f"the store has not answered for {seconds:g} s; the next worker recovers the unfinished work"
    click.echo(message, err=True)
    os._exit(code)


class Stop:
    """Handles Ctrl-C and SIGTERM: the first asks to stop, the second ends the process at once, without any loss."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _received(self) -> None:
        if self.asked.is_set():
            click.echo("stopped at once; the next worker recovers the unfinished work", err=True)
            os._exit(errors.INTERRUPTED)
        self.asked.set()

    async def or_(self, *others: asyncio.Future[Any], seconds: float | None = None) -> None:
        """Wait for a request to stop, for one of the tasks, or for the end of the time in seconds."""
        asked = asyncio.ensure_future(self.asked.wait())
        await asyncio.wait([asked, *others], return_when=asyncio.FIRST_COMPLETED, timeout=seconds)
        asked.cancel()


# -- start -------------------------------------------------------------------------------------------------------------


@command("start", epilog=_EPILOG)
@_shared
@click.option("--queue", default="default", metavar="NAME")
@click.option("--priority", default=0, metavar="N", help="Runs with a higher priority are claimed first.")
@click.option("--delay", default=0.0, type=click.FloatRange(0), metavar="SECONDS", help="Not before.")
@click.option("--key", metavar="KEY", help="Whom the run is for: keys of a queue take turns.")
@click.option(
    "--dedupe", metavar="TEXT", help="Unique among unfinished runs of the queue; a second start finds the first."
)
def start(
    settings: Settings,
    *,
    target: str,
    words: tuple[str, ...],
    text: str | None,
    module: tuple[str, ...],
    run_id: str | None,
    tag: tuple[tuple[str, str], ...],
    deadline: float | None,
    queue: str,
    priority: int,
    delay: float,
    key: str | None,
    dedupe: str | None,
) -> None:
    """Create a run for a worker to drive, and print its id.

    The run is durable when its id is printed.
    """
    from ..views.finding import is_attended
    from .target import load_workflow, read_input

    workflow = load_workflow(target, modules=module, debug=settings.debug)
    args, kwargs = read_input(workflow, text, words)

    async def begin() -> tuple[str, str, bool]:
        STARTER.set(os.environ.get("TRACEPARENT"))
        async with settings.engine(create=True) as engine:
            handle = await engine.start(
                workflow.bind(*args, **kwargs),
                run_id=run_id,
                tags=dict(tag),
                deadline=deadline,
                queue=queue,
                priority=priority,
                delay=delay,
                key=key,
                dedupe=dedupe,
            )
            known = await is_attended(engine, workflow.name)
            return handle.id, (await handle.status()).value, known

    started, status, known = asyncio.run(begin())
    settings.answer({"run": started, "workflow": workflow.name, "status": status}, started)
    if not known and not settings.json and status == "queued":
        where = target.rpartition(":")[0] or target
        line = errors.line("worker", where, *_named(module))
        click.echo(f"no worker drives {workflow.name!r} yet: {line}", err=True)
