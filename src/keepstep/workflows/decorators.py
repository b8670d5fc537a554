"""The decorators `ks.step` and `ks.workflow`, and their types for type checkers."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from ..errors import DefinitionError
from .definition import READY_EVERY, Expected, InDoubt, Step, Workflow, check_scheduled, remember

if TYPE_CHECKING:
    from ..policies import Budget, Cache, Durability, Recovery, Retry, Schedule, Timeout
    from ..policies.classify import Classify
    from ..policies.queue import Queue
    from ..policies.retention import Retain
    from ..policies.service import Service
    from .hooks import Hooks
    from .migration import MigrationInfo

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


@overload
def step(fn: Callable[P, AsyncIterator[T]], /) -> Step[P, list[T]]: ...
@overload
def step(fn: Callable[P, Awaitable[R]], /) -> Step[P, R]: ...
@overload
def step(fn: Callable[P, R], /) -> Step[P, R]: ...
@overload
def step(
    *,
    transactional: Literal[True],
    name: str | None = None,
    retry: Retry | None = None,
    ignore: Iterable[str] = (),
    service: Service | str | None = None,
    cost: Expected | None = None,
    ready: Callable[..., Any] | None = None,
    ready_every: float | timedelta = READY_EVERY,
    hooks: Hooks | None = None,
    classify: Classify | None = None,
    undo: Callable[..., Any] | None = None,
    undo_unfinished: bool = False,
) -> _TransactionalDecorator: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Timeout | float | timedelta | None = None,
    at_most_once: bool = False,
    verify: Callable[..., Any] | None = None,
    in_doubt: InDoubt | None = None,
    transactional: Literal[False] = False,
    ignore: Iterable[str] = (),
    service: Service | str | None = None,
    cost: Expected | None = None,
    ready: Callable[..., Any] | None = None,
    ready_every: float | timedelta = READY_EVERY,
    hooks: Hooks | None = None,
    record_input: bool | None = None,
    classify: Classify | None = None,
    undo: Callable[..., Any] | None = None,
    undo_unfinished: bool = False,
    cache: Cache | None = None,
) -> _StepDecorator: ...
@overload
def step(
    *,
    collect: Callable[[list[Any]], R],
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Timeout | float | timedelta | None = None,
    ignore: Iterable[str] = (),
    service: Service | str | None = None,
    cost: Expected | None = None,
    ready: Callable[..., Any] | None = None,
    ready_every: float | timedelta = READY_EVERY,
    hooks: Hooks | None = None,
    record_input: bool | None = None,
    classify: Classify | None = None,
    undo: Callable[..., Any] | None = None,
    undo_unfinished: bool = False,
    cache: Cache | None = None,
) -> _CollectingDecorator[R]: ...
def step(fn: Any = None, /, **options: Any) -> Any:
    """Make a function a step. Once completed in a run, it is never executed again in that run.

    | option | means |
    |---|---|
    | `name` | the name in records; the function's name by default |
    | `retry` | a `ks.Retry(...)`: how often and when a failed attempt is repeated; once by default |
    | `timeout` | seconds for one attempt, or a `ks.Timeout(...)` |
    | `at_most_once` | a start mark is stored first; a body that may have run is not repeated |
    | `verify` | for an at-most-once step in doubt: returns `ks.Done(result)`, `ks.NotDone` or None |
    | `in_doubt` | for an at-most-once step in doubt: `"ask"` a person (default), `"fail"` or `"repeat"` |
    | `transactional` | the body gets the store's connection; its writes commit with the checkpoint |
    | `ignore` | names of parameters that are neither stored nor compared on replay |
    | `service` | the outside service that attempts call, with its limits: a `ks.Service(...)` or a name |
    | `cost` | the spend expected of an attempt: a `ks.Amount`, a number for its service, or a function of arguments |
    | `ready`, `ready_every` | a function that must return true before an attempt, and the seconds between two looks |
    | `hooks` | a `ks.Hooks(...)`: functions called before, after, on error and on cancel |
    | `collect` | for a function that yields: makes the result of the list of items, which is the default |
    | `record_input` | store the arguments beside the outcome, for readers and forks |
    | `classify` | a function of an error that returns the name of its class, or None; or a list of such functions |
    | `undo` | a function or step `undo(result, *args)`, called if the run fails or is cancelled later |
    | `undo_unfinished` | also undo the step if it failed or was cancelled; its result is then None |
    | `cache` | a `ks.Cache(...)`: its result serves equal calls of other runs |
    | `executor` | where its body runs: `"process"`, `"ray"`, `"dask"`, a name of the worker, or an executor object |
    """
    known = inspect.signature(Step).parameters
    unknown = [name for name in options if name not in known]
    if unknown:
        named = ", ".join(name for name in known if name != "fn")
        raise DefinitionError(f"ks.step has no option {unknown[0]!r}; its options are {named}")
    if fn is not None:
        return Step(fn, **options)
    return lambda function: Step(function, **options)


class _TransactionalDecorator:
    """The type of `@step(transactional=True)`: the store, not the caller, passes the transaction."""

    def __call__(self, fn: Callable[Concatenate[Any, P], R], /) -> Step[P, R]:
        raise NotImplementedError


class _CollectingDecorator(Generic[R]):
    """The type of `@step(collect=...)`, for a step that yields items."""

    def __call__(self, fn: Callable[P, AsyncIterator[Any] | Iterator[Any]], /) -> Step[P, R]:
        raise NotImplementedError


class _StepDecorator:
    """The type of `@step(...)` with options."""

    @overload
    def __call__(self, fn: Callable[P, AsyncIterator[T]], /) -> Step[P, list[T]]: ...
    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]], /) -> Step[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Step[P, R]: ...
    def __call__(self, fn: Any, /) -> Any: ...


@overload
def workflow(fn: Callable[P, Awaitable[R]], /) -> Workflow[P, R]: ...
@overload
def workflow(fn: Callable[P, R], /) -> Workflow[P, R]: ...
@overload
def workflow(
    *,
    name: str | None = None,
    version: str = "1",
    on_change: Literal["fail", "compatible", "pin"] = "fail",
    migrate: Callable[[MigrationInfo], Any] | None = None,
    durability: Durability | str | None = None,
    budget: Budget | None = None,
    retain: Retain | str | None = None,
    schedule: Schedule | None = None,
    hooks: Hooks | None = None,
    step_hooks: Hooks | None = None,
    record_input: bool = False,
    classify: Classify | None = None,
    undo: Callable[..., Any] | None = None,
    queue: Queue | str | None = None,
    recovery: Recovery | str | Callable[..., Any] | None = None,
    executor: Any = None,
) -> _WorkflowDecorator: ...
def workflow(fn: Any = None, /, **options: Any) -> Any:
    """Make a function a workflow, registered in this process by its name.

    | option | means |
    |---|---|
    | `name` | the name in records and for workers; the function's name by default |
    | `version` | the version of the code, stored with each run; "1" by default |
    | `on_change` | for open runs of another version: `"fail"` (default), `"compatible"` or `"pin"` |
    | `migrate` | a function that makes a run of another definition fit this one |
    | `durability` | a `ks.Durability` or its name: when finished steps become durable; after each step by default |
    | `budget` | a `ks.Budget(...)`: limits for time, steps, cost and tokens of a run |
    | `retain` | a `ks.Retain(...)`, `"delete_on_success"` or `"forever"`: how long a worker keeps its finished runs |
    | `schedule` | a `ks.Cron(...)` or `ks.Every(...)`: when workers start it by themselves, without arguments |
    | `hooks` | a `ks.Hooks(...)`: functions called around the run |
    | `step_hooks` | a `ks.Hooks(...)`: functions called around each attempt of its steps |
    | `record_input` | store the arguments of its steps beside their outcomes |
    | `classify` | rules for the classes of errors, as for a step, for all its steps |
    | `undo` | a function or step `undo(result, *args)`: how a parent that fails undoes a finished child |
    | `queue` | the queue of its runs: a `ks.Queue(...)` or a name; `"default"` by default |
    | `recovery` | a `ks.Recovery(...)`, a name or a function: how a run goes on after its worker has died |
    | `executor` | where its plain functions run that name no executor, as for a step |
    """

    def decorate(function: Callable[..., Any]) -> Workflow[..., Any]:
        if callable(options.get("migrate")) and "version" not in options:
            raise DefinitionError(
                f"workflow {options.get('name') or function.__name__!r} has migrate= but no version=; a run is "
                "migrated when the version differs from that of its start, so write version='2' and count on from there"
            )
        made: Workflow[..., Any] = Workflow(function, **options)
        if made.schedule is not None:
            check_scheduled(made)
        remember(made)
        return made

    return decorate if fn is None else decorate(fn)


class _WorkflowDecorator:
    """The type of `@workflow(...)` with options."""

    @overload
    def __call__(self, fn: Callable[P, Awaitable[R]], /) -> Workflow[P, R]: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Workflow[P, R]: ...
    def __call__(self, fn: Any, /) -> Any: ...
