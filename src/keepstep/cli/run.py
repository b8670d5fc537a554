"""The commands that make runs: `run` drives one to its end here, `start` leaves it to a worker."""

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

from . import exits
from .frame import MODULE, Settings, command, shown_url, unattended
from .look import tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..engine.engine import Engine
    from ..engine.handle import RunHandle
    from ..model import Event
    from ..workflows.definition import Workflow
    from .progress import Lines

#: How long a step that is under way may go on after Ctrl-C before it is handed back.
STOP_SECONDS = 5.0
#: And how long handing back may take, until the process ends without: what it leaves is recovered as after a crash.
CLOSE_SECONDS = 8.0


def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments that both commands take."""
    for option in reversed(
        [
            click.argument("target", metavar="FILE.py:WORKFLOW|FILE.yaml"),
            click.argument("words", nargs=-1, metavar="[ARGUMENT...]"),
            click.option("--input", "text", metavar="JSON", help="The input as JSON, @file, or - for standard input."),
            MODULE,
            click.option("--id", "run_id", metavar="ID", help="The run's id; a run that is there already goes on."),
            click.option("--tag", type=tag_of, multiple=True, metavar="NAME=VALUE", help="A tag to find it by."),
            click.option(
                "--deadline",
                type=click.FloatRange(0, min_open=True),
                metavar="SECONDS",
                help="Fail it if it takes longer.",
            ),
        ]
    ):
        function = option(function)
    return function


def _named(modules: tuple[str, ...]) -> list[str]:
    """The options that name modules, as they were written."""
    return [word for module in modules for word in ("--module", module)]


_EPILOG = (
    "An ARGUMENT is a JSON value or plain text, or name=value. With --input an object holds arguments by name, any "
    "other JSON is the one argument. FILE.py may also be a module: package.module:workflow. A "
    "workflow in a YAML or JSON file finds its functions in what --module names."
)


# -- run ---------------------------------------------------------------------------------------------------------------


@command("run", epilog=_EPILOG)
@_shared
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
) -> int:
    """Run a workflow to its end, showing what it does; its result is printed as JSON.

    After a crash or Ctrl-C, the same command with the run's --id goes on where it was.
    """
    from .target import load_workflow

    workflow = load_workflow(target, modules=module, debug=settings.debug)
    logging.getLogger("keepstep").addFilter(not_twice)
    options = {"run_id": run_id, "tags": dict(tag), "deadline": deadline}
    driven = _Driven(settings, workflow, (target, *_named(module)), options, words=words, text=text)
    with redirect_stdout(sys.stderr):  # what the workflow prints is no part of its result
        code = asyncio.run(driven.drive())
    return driven.conclude() if driven.ended is not None else code


def not_twice(record: logging.LogRecord) -> bool:
    """What is told as a line of progress, or as the end of the run, is not logged beside it."""
    return " is set aside: " not in str(record.msg) % (record.args or ())


class _Driven:
    """One run, driven in this process until it ends or someone stops it."""

    def __init__(
        self,
        settings: Settings,
        workflow: Workflow[..., Any],
        target: tuple[str, ...],
        options: dict[str, Any],
        *,
        words: tuple[str, ...],
        text: str | None,
    ) -> None:
        self.settings = settings
        self.workflow = workflow
        self.target = target
        self.words = words
        self.text = text
        self.options = options
        self.named = options["run_id"] is not None
        self.handle: RunHandle[Any] | None = None
        self.lines: Lines | None = None
        self.notes: set[asyncio.Task[None]] = set()
        self.ended: asyncio.Future[Any] | None = None

    async def drive(self) -> int:
        from ..model.ids import new_run_id
        from .progress import Lines

        self.options["run_id"] = run_id = self.options["run_id"] or new_run_id(time.time())
        with Lines(run_id) as self.lines, Stop() as stop:
            engine = self.settings.engine(create=True, worker=True, observers=self._observe)
            async with engine:
                handle = self.handle = await self._begin(engine)
                self._introduce(engine)
                ended = asyncio.ensure_future(handle.result())
                await stop.or_(ended)
                if not ended.done():
                    ended.cancel()
                    await self._stop(engine)
                    return exits.INTERRUPTED
                with suppress(BaseException):  # what went wrong is told once everything is closed
                    ended.result()
            self.lines.stop()
            self.ended = ended
            return exits.OK

    async def _begin(self, engine: Engine) -> RunHandle[Any]:
        from ..errors import RunConflict, RunNotFound
        from .target import read_input

        run_id = self.options["run_id"]
        if self.named and self.text is None and not self.words:
            with suppress(RunNotFound):  # then it is a new one, without arguments
                handle = await engine.get(run_id)
                there = (await handle.run()).workflow
                if there != self.workflow.name:
                    raise RunConflict(
                        f"run {run_id!r} is a run of workflow {there!r}, not {self.workflow.name!r}", run_id
                    )
                return handle
        args, kwargs = read_input(self.workflow, self.text, self.words)
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

    async def _tell_wait(self) -> None:
        if self.handle is not None and self.lines is not None:
            run = await self.handle.run()
            if run.status == "waiting":
                self.lines.waiting(run)

    async def _stop(self, engine: Engine) -> None:
        handle, lines = self.handle, self.lines
        if handle is None or lines is None:
            return
        lines.plain(f"stopping: a step that is under way has {STOP_SECONDS:g} s to finish (Ctrl-C again: at once)")
        with no_later_than(STOP_SECONDS + CLOSE_SECONDS, exits.INTERRUPTED):
            await engine.close(STOP_SECONDS)
        lines.stop()
        again = exits.line("run", *self.target, "--id", handle.id)
        if self.settings.json:
            click.echo(json.dumps({"run": handle.id, "status": "interrupted", "again": again}), file=sys.__stdout__)
        lines.plain(f"run {handle.id} is not finished; nothing that it finished is lost. It goes on with\n  {again}")

    def conclude(self) -> int:
        """Print the result, or raise what the run ended with."""
        from . import words

        run_id, ended = self.options["run_id"], self.ended
        if ended is None:
            return exits.INTERRUPTED
        error = ended.exception()
        if error is not None:
            if self.settings.json:
                return _told_as_json(run_id, error)
            raise error
        result = words.plain(self.workflow.values.encode(ended.result(), "result"))
        if self.settings.json:
            click.echo(json.dumps({"run": run_id, "status": "completed", "result": result}, ensure_ascii=False))
        else:
            click.echo(json.dumps(result, ensure_ascii=False, indent=2))
        return exits.OK


def _told_as_json(run_id: str, error: BaseException) -> int:
    from ..errors import RunError
    from . import words

    if not isinstance(error, RunError):
        raise error
    code = exits.code_of(error)
    status = {exits.FAILED: "failed", exits.CANCELLED: "cancelled", exits.SET_ASIDE: "set aside"}.get(code, "unknown")
    info = words.error_as_json(getattr(error, "error", None))
    click.echo(json.dumps({"run": run_id, "status": status, "error": info}, ensure_ascii=False))
    return code


@contextmanager
def no_later_than(seconds: float, code: int) -> Iterator[None]:
    """End the process if what is inside takes longer: a store that does not answer must not keep it alive."""
    timer = threading.Timer(seconds, _leave_at_once, [seconds, code])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave_at_once(seconds: float, code: int) -> None:
    told = f"the store has not answered for {seconds:g} s, so what was under way is left to the next worker to recover"
    click.echo(told, err=True)
    os._exit(code)


class Stop:
    """Hears Ctrl-C and SIGTERM: the first asks to stop, the second ends the process at once, which loses nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _heard(self) -> None:
        if self.asked.is_set():
            click.echo("stopped at once; what was under way is recovered by the next worker", err=True)
            os._exit(exits.INTERRUPTED)
        self.asked.set()

    async def or_(self, *others: asyncio.Future[Any]) -> None:
        """Wait until someone asks to stop, or one of the others is done."""
        asked = asyncio.ensure_future(self.asked.wait())
        await asyncio.wait([asked, *others], return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()


# -- start -------------------------------------------------------------------------------------------------------------


@command("start", epilog=_EPILOG)
@_shared
@click.option("--queue", default="default", metavar="NAME")
@click.option("--priority", default=0, metavar="N", help="Higher comes first.")
@click.option("--delay", default=0.0, type=click.FloatRange(0), metavar="SECONDS", help="Not before.")
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
) -> None:
    """Create a run for a worker to drive, and print its id.

    The run is durable when the id is printed.
    """
    from .target import load_workflow, read_input

    workflow = load_workflow(target, modules=module, debug=settings.debug)
    args, kwargs = read_input(workflow, text, words)

    async def begin() -> tuple[str, str, bool]:
        async with settings.engine(create=True) as engine:
            handle = await engine.start(
                workflow.bind(*args, **kwargs),
                run_id=run_id,
                tags=dict(tag),
                deadline=deadline,
                queue=queue,
                priority=priority,
                delay=delay,
            )
            known = not await unattended(engine, workflow.name)
            return handle.id, (await handle.status()).value, known

    started, status, known = asyncio.run(begin())
    settings.answer({"run": started, "workflow": workflow.name, "status": status}, started)
    if not known and not settings.json and status == "queued":
        where = target.rpartition(":")[0] or target
        line = exits.line("worker", where, *_named(module))
        click.echo(f"no worker drives {workflow.name!r} yet: {line}", err=True)
