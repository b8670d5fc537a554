"""Performs a body that a worker has sent: finds its function, calls it in its scope, and encodes its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextvars import Context, copy_context
from pathlib import Path
from typing import Any

import msgspec

from ..errors import DefinitionError
from ..executors.failures import MAIN, described
from ..executors.task import Done, Failed, FarError, Function, Logged, Task
from ..model import State
from ..model.tree import thaw
from ..ports import CURRENT
from ..values import VALUES, Redactor, Values
from ..workflows.definition import Step
from ..workflows.graph import Changes, Goto
from .scope import FarAttempt, FarRedaction, Tell

log = logging.getLogger("keepstep")


class Stopped(BaseException):
    """The worker no longer wants the outcome of the body. Raised in the body, so that it can clean up."""


# -- the function ------------------------------------------------------------------------------------------------------

#: The steps that bodies have asked for in this process. A crash test replaces them.
FOUND: dict[Function, Step[..., Any]] = {}


def step_of(function: Function) -> Step[..., Any]:
    """Return the step whose function has this name here. Its module is imported if it is not yet."""
    known = FOUND.get(function)
    if known is None:
        found: Any = _unpickled(function.pickled) if function.pickled else _named(function)
        known = FOUND[function] = found if isinstance(found, Step) else Step(found)
    return known


def _unpickled(data: bytes) -> Any:
    """Return a function as the cluster's own pickling has written it. Its user has chosen that for this cluster."""
    import cloudpickle  # noqa: PLC0415 - only on a cluster that has it

    return cloudpickle.loads(data)


def _named(function: Function) -> Any:
    found: Any = _module_of(function)
    for name in function.name.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            where = getattr(found, "__file__", None) or found
            raise DefinitionError(
                f"{function} is not found in the process of the body: {where} has no {name!r}"
            ) from None
    return found


def _module_of(function: Function) -> Any:
    """Import a module by its name or, if that names another file or none, by its file."""
    name, file = function.module, function.file
    alias = MAIN if name == "__main__" else name  # a program under its other name does not run itself
    known = sys.modules.get(alias)
    if known is not None and _is_of(known, file):
        return known
    if name != "__main__":
        spec = importlib.util.find_spec(name) if known is None else None
        if spec is not None and (
            not file or spec.origin is None or not Path(file).exists() or _same(spec.origin, file)
        ):
            return importlib.import_module(name)
    if not file or not Path(file).is_file():
        path = ", ".join(sys.path)
        raise DefinitionError(f"module {name!r} is not found in the process of the body; it looked in {path}")
    spec = importlib.util.spec_from_file_location(alias, file)
    if spec is None or spec.loader is None:
        raise DefinitionError(f"file {file} of module {name!r} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


def _is_of(module: Any, file: str) -> bool:
    there = getattr(module, "__file__", None)
    return not file or there is None or not Path(file).exists() or _same(there, file)


def _same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


# -- the body ----------------------------------------------------------------------------------------------------------


def perform(
    task: Task,
    tell: Tell,
    begin: Callable[[], None] = lambda: None,
    run: Callable[..., Any] | None = None,
    running: Callable[[Callable[[], None] | None], None] | None = None,
) -> Done | Failed:
    """Call the body of a task in this thread, and return its outcome. `begin` is called when its function is found.

    `run` runs a coroutine in a context, for a body of async code. `running` gets a function that stops it from
    elsewhere, and None at its end.
    """
    return copy_context().run(_performed, task, tell, begin, run or _run_once, running)


def _run_once(coroutine: Coroutine[Any, Any, Any], *, context: Context) -> Any:
    with asyncio.Runner() as runner:
        return runner.run(coroutine, context=context)


def _performed(task: Task, tell: Tell, begin: Callable[[], None], run: Any, running: Any) -> Done | Failed:
    values: Values = VALUES
    try:
        step = step_of(task.function)
        values = step.values
        scope = FarAttempt(task, tell)
        CURRENT.set(scope)
        args, kwargs = _arguments(task, values)
        begin()
        with _traced(task.traceparent):
            if step.is_async:
                value = run(_awaited(step, args, kwargs, running), context=copy_context())
            else:
                value = step.body(*args, **kwargs)
        form, value = _form(value)
        data = values.encode(value, task.step)
        scope.run.host.redaction.check(data, task.step)
        return Done(0, data, form)
    except Stopped:
        raise
    except BaseException as error:  # noqa: BLE001 - a body may raise anything, `SystemExit` too
        return Failed(0, without_secrets(described(error, values)))


def _arguments(task: Task, values: Values) -> tuple[list[Any], dict[str, Any]]:
    args, kwargs = values.decode(task.input, task.step)
    for place in task.states:
        values_, run, step, timestamp = args[place]
        state = State(values_)
        state.run_id, state.checkpoint_step, state.timestamp = run, step, timestamp
        args[place] = state
    return args, kwargs


async def _awaited(step: Step[..., Any], args: list[Any], kwargs: dict[str, Any], running: Any) -> Any:
    if running is None:
        return await step.body(*args, **kwargs)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    running(lambda: loop.call_soon_threadsafe(task.cancel))  # type: ignore[union-attr]
    try:
        return await step.body(*args, **kwargs)
    finally:
        running(None)


def _form(value: Any) -> tuple[str, Any]:
    """Return how the worker reads a result that no codec writes: those of a graph's steps."""
    if isinstance(value, State):
        return "state", _plain(value)
    if isinstance(value, Goto):
        return "goto", (value.target, _plain(value.change))
    if isinstance(value, Changes):
        return "changes", tuple(map(_plain, (value.state, value.stage, value.agent)))
    return "", value


def _plain(value: Any) -> Any:
    return {key: thaw(one) for key, one in value.items()} if isinstance(value, State) else value


@contextlib.contextmanager
def _traced(traceparent: str | None) -> Iterator[None]:
    """Make the trace context of the attempt current, if the body's module has loaded OpenTelemetry."""
    if traceparent is None or "opentelemetry.trace" not in sys.modules:
        yield
        return
    from opentelemetry import context, propagate  # noqa: PLC0415 - only if it is loaded

    token = context.attach(propagate.extract({"traceparent": traceparent}))
    try:
        yield
    finally:
        context.detach(token)


# -- secrets and logs --------------------------------------------------------------------------------------------------


def without_secrets(error: FarError) -> FarError:
    """Return a described exception without the secrets that this process has revealed."""
    redact = Redactor().text
    hidden = FarRedaction()

    def kept(data: bytes | None) -> bytes | None:
        try:
            hidden.check(data or b"", "")
        except Exception:  # noqa: BLE001 - a field with a secret is left out
            return None
        return data

    return msgspec.structs.replace(
        error,
        text=redact(error.text),
        args=kept(error.args),
        fields={name: data for name, data in error.fields.items() if kept(data) is not None},
        traceback=redact(error.traceback),
        cause=None if error.cause is None else without_secrets(error.cause),
        answer=kept(error.answer),
        parts=[without_secrets(one) for one in error.parts],
    )


class FarLog(logging.Handler):
    """Sends log records to the worker, which logs them with the run and the step."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell
        self._redact = FarRedaction().redact

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info:
                text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
            place = (record.pathname, record.lineno, record.funcName or "")
            text = self._redact(text).encode(errors="replace").decode()
            self._tell(Logged(0, record.name, record.levelno, text, *place))
        except Exception:  # noqa: BLE001 - a log message must not fail a body
            self.handleError(record)
