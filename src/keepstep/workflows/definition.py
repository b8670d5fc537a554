"""The definitions that a user writes with decorators: steps and workflows, and what is known of them by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, overload

from ..errors import DefinitionError, DuplicateName
from ..model.ids import check_name
from ..policies import Budget, Durability, Retry, Timeout
from ..policies.check import check_number
from ..ports import CURRENT
from ..values import VALUES, Values
from ..values.annotations import hints_of
from .hooks import Hooks, checked_hooks
from .migration import MigrationInfo
from .place import Place, place_of

P = ParamSpec("P")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)

#: How often a step that is not ready is asked again, unless it says so itself.
READY_EVERY = 5.0
#: Options of `start`, which a workflow's own parameters must leave free.
START_OPTIONS = frozenset({"run_id", "queue", "priority", "delay", "key", "deadline", "tags"})


class Call(Coroutine[Any, Any, T_co]):
    """What calling a step gives: await it in an async workflow, ask for `.result()` in a plain one.

    It starts when it is first awaited, and awaited twice it gives the same outcome.
    """

    __slots__ = ("_iterator",)

    def __await__(self) -> Generator[Any, Any, T_co]:
        raise NotImplementedError

    def result(self) -> T_co:
        """The outcome, for code that blocks."""
        raise NotImplementedError

    def start(self) -> Call[T_co]:
        """Begin now, in code that blocks; `result()` waits for it."""
        raise NotImplementedError

    # asyncio drives a call that was made into a task through these three.

    def send(self, value: Any) -> Any:
        iterator = self._begin()
        return iterator.send(value)

    def throw(self, *error: Any) -> Any:
        iterator = self._begin()
        return iterator.throw(error[0] if len(error) == 1 else error[1] or error[0])

    def close(self) -> None:
        iterator = getattr(self, "_iterator", None)
        if iterator is not None:
            iterator.close()

    def _begin(self) -> Generator[Any, Any, T_co]:
        try:
            return self._iterator
        except AttributeError:
            self._iterator: Generator[Any, Any, T_co] = self.__await__()
            return self._iterator


class PlainCall(Call[T_co]):
    """A step called outside a run: it runs the body and stores nothing."""

    __slots__ = ("_args", "_error", "_function", "_kwargs", "_value")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._error: Exception | None = None

    def __await__(self) -> Generator[Any, Any, T_co]:
        if self._is_new():
            try:
                value = self._function(*self._args, **self._kwargs)
                if inspect.isawaitable(value):
                    value = yield from value.__await__()
                self._value = value
            except Exception as error:  # noqa: BLE001 - kept, so that a second await gives the same
                self._error = error
        return self._outcome()

    def start(self) -> PlainCall[T_co]:
        return self

    def result(self) -> T_co:
        if self._is_new():
            try:
                value = self._function(*self._args, **self._kwargs)
                self._value = _run_to_end(value) if inspect.isawaitable(value) else value
            except Exception as error:  # noqa: BLE001 - kept, so that a second time gives the same
                self._error = error
        return self._outcome()

    def _is_new(self) -> bool:
        return self._error is None and not hasattr(self, "_value")

    def _outcome(self) -> T_co:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]


def _run_to_end(awaitable: Awaitable[Any]) -> Any:
    import asyncio  # noqa: PLC0415 - only a blocking caller of an async step needs a loop of its own

    async def body() -> Any:
        return await awaitable

    return asyncio.run(body())


class Step(Generic[P, R]):
    """A named unit whose completion is recorded. `fn` is the bare function."""

    #: What a workflow's file says that the step does: part of what two definitions are told apart by.
    written = ""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: Timeout | float | None = None,
        at_most_once: bool = False,
        verify: Callable[..., Any] | None = None,
        transactional: bool = False,
        ignore: Iterable[str] = (),
        service: str | None = None,
        ready: Callable[..., Any] | None = None,
        ready_every: float = READY_EVERY,
        hooks: Hooks | None = None,
    ) -> None:
        if not callable(fn):
            raise DefinitionError(f"a step must be a function, not {type(fn).__name__}")
        self.fn = fn
        self.name = check_name(name or fn.__name__.strip("<>"), "step")
        if retry is not None and not isinstance(retry, Retry):
            raise DefinitionError(f"step {fn.__name__!r}: retry= takes a ks.Retry(...), not {retry!r}")
        self.retry = retry or Retry.none()
        self.timeout = Timeout.of(timeout)
        self.at_most_once = at_most_once
        self.verify = verify
        self.transactional = transactional
        self.service = service
        self.ready = ready
        self.ready_every = check_number(ready_every, f"step {self.name!r}: ready_every", 0.001)
        self.hooks = checked_hooks(hooks, f"step {self.name!r}: hooks=")
        self.is_async = inspect.iscoroutinefunction(fn)
        self.simple = self.is_async and self.timeout == Timeout()
        self.ignore = frozenset([ignore] if isinstance(ignore, str) else ignore)
        self.signature = inspect.signature(fn)
        self.parameters = tuple(self.signature.parameters)
        self._check()
        functools.update_wrapper(self, fn)

    def _check(self) -> None:
        if inspect.isgeneratorfunction(self.fn) or inspect.isasyncgenfunction(self.fn):
            raise DefinitionError(f"step {self.name!r} is a generator; return a list, or use ks.emit for a stream")
        if self.transactional and self.is_async:
            raise DefinitionError(f"step {self.name!r} is transactional, so it must be a plain def fn(tx, ...)")
        if self.at_most_once and self.retry.attempts > 1:
            raise DefinitionError(
                f"step {self.name!r} is at_most_once, so it cannot have {self.retry.attempts} attempts"
            )
        if self.verify is not None and not self.at_most_once:
            raise DefinitionError(f"step {self.name!r} has verify=, which only an at_most_once step needs")
        if self.ready is not None and not callable(self.ready):
            raise DefinitionError(f"step {self.name!r}: ready= is a function of its arguments, not {self.ready!r}")
        named = [
            p.name for p in self.signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        unknown = self.ignore - set(named)
        if unknown:
            raise DefinitionError(f"step {self.name!r} ignores {sorted(unknown)}, which are no named parameters of it")
        if self.ignore and len(named) < len(self.parameters):
            raise DefinitionError(f"step {self.name!r} uses ignore=, so all its parameters must be named ones")

    @functools.cached_property
    def values(self) -> Values:
        """The codec that knows the types of the step's signature."""
        return VALUES.for_callable(self.fn)

    def without_ignored(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """The arguments by name that count for the digest, and those that do not, which are passed on as they are."""
        bound = self.signature.bind(*args, **kwargs).arguments
        ignored = {name: value for name, value in bound.items() if name in self.ignore}
        return (), {name: value for name, value in bound.items() if name not in self.ignore}, ignored

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        scope = CURRENT.get()
        if scope is None:
            _warn_if_context_was_lost(self.name)
            return PlainCall(self.fn, args, kwargs)
        return scope.call_step(self, args, kwargs)  # type: ignore[no-any-return]

    def __get__(self, instance: Any, owner: type | None = None) -> Step[..., R]:
        if instance is None:
            return self
        raise DefinitionError(f"step {self.name!r} is a method; make it a function, so that its input can be stored")

    def __repr__(self) -> str:
        return f"<step {self.name}>"


#: Called with a step's name when it is called outside a run; an open engine sets it.
on_plain_call: Callable[[str], None] | None = None


def _warn_if_context_was_lost(name: str) -> None:
    if on_plain_call is not None:
        on_plain_call(name)


class Workflow(Generic[P, R]):
    """A definition, named and versioned. Called plainly it runs its function; `Engine.start` makes it a run."""

    #: Whether its run carries a state, from which it goes on after a crash.
    carries_state = False

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        version: str = "1",
        on_change: Literal["fail", "compatible", "pin"] = "fail",
        migrate: Callable[[MigrationInfo], Any] | None = None,
        durability: Durability | str | None = None,
        budget: Budget | None = None,
        hooks: Hooks | None = None,
        step_hooks: Hooks | None = None,
    ) -> None:
        if not callable(fn):
            raise DefinitionError(f"a workflow must be a function, not {type(fn).__name__}")
        self.fn = fn
        self.name = check_name(name or fn.__name__.strip("<>"), "workflow")
        self.version = str(version)
        if on_change not in ("fail", "compatible", "pin"):
            raise DefinitionError(
                f"workflow {self.name!r}: on_change is 'fail', 'compatible' or 'pin', not {on_change!r}"
            )
        self.on_change = on_change
        if migrate is not None and not callable(migrate):
            raise DefinitionError(f"workflow {self.name!r}: migrate= is a function of a run's past, not {migrate!r}")
        self.migrate = migrate
        self.durability = Durability.named(durability)
        if budget is not None and not isinstance(budget, Budget):
            raise DefinitionError(f"workflow {self.name!r}: budget= takes a ks.Budget(...), not {budget!r}")
        self.budget = budget
        self.hooks = checked_hooks(hooks, f"workflow {self.name!r}: hooks=")
        self.step_hooks = checked_hooks(step_hooks, f"workflow {self.name!r}: step_hooks=")
        self.is_async = inspect.iscoroutinefunction(fn)
        self._signature = inspect.signature(fn)
        taken = START_OPTIONS & set(self._signature.parameters)
        if taken:
            raise DefinitionError(
                f"workflow {self.name!r}: the parameter name {min(taken)!r} is an option of start; rename it"
            )
        functools.update_wrapper(self, fn)
        self.place: Place = place_of(fn, self.name)
        #: The module that tells it from others of its name; empty if the name was given, which is enough.
        self.module = "" if name is not None else self.place.program
        self._counts = _plain_counts(self._signature)

    #: What its runs get unless their start says otherwise: a queue, a priority, a deadline in seconds, tags.
    starting: Mapping[str, Any] = MappingProxyType({})
    #: Patterns of what must not be stored or told, beyond those that the engine looks for anyway.
    redacting: tuple[str, ...] = ()

    @property
    def signature(self) -> inspect.Signature:
        """What the workflow is started with."""
        return self._signature

    @property
    def source(self) -> tuple[str, str]:
        """The file that it is written in and its qualified name there, which tell two of one name apart."""
        return self.place.file, self.place.name

    @property
    def fingerprint(self) -> str:
        """What identifies the definition: for a function, its name and version."""
        return f"function:{self.name}:{self.version}"

    def definition(self) -> str:
        """The definition as lines of text, by which two versions are compared; a function has none."""
        return ""

    @functools.cached_property
    def values(self) -> Values:
        """The codec that knows the types of the workflow's signature."""
        return VALUES.for_callable(self.fn)

    def hints(self) -> dict[str, Any]:
        """The annotations of its parameters, as far as their names can be resolved."""
        return hints_of(self.fn)

    def bind(self, /, *args: P.args, **kwargs: P.kwargs) -> Bound[R]:
        """The workflow with its arguments, checked by the type checker and by the signature."""
        self.check_arguments(args, kwargs)
        return Bound(self, args, kwargs)

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments that the function would not take, before anything is stored."""
        if not kwargs and len(args) in self._counts:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(f"workflow {self.name!r} cannot be started so: {error}") from None

    def stored_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Checked arguments as the values that are stored as the input of a run."""
        return [[*args], dict(kwargs)]

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<workflow {self.name} version {self.version}>"


def _plain_counts(signature: inspect.Signature) -> range:
    """How many positional arguments alone are surely right."""
    parameters = signature.parameters.values()
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return range(0)
    needed = sum(parameter.default is parameter.empty for parameter in parameters)
    return range(needed, len(parameters) + 1)


class Bound(Generic[R]):
    """A workflow with its arguments, ready to start."""

    def __init__(self, workflow: Workflow[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.workflow, self.args, self.kwargs = workflow, args, kwargs


#: Every decorated workflow of this process, by name.
KNOWN: dict[str, Workflow[..., Any]] = {}


def remember(workflow: Workflow[..., Any]) -> None:
    """Make a workflow known to this process; the same function may be defined again, as a reload does."""
    other = KNOWN.get(workflow.name)
    local = workflow.place.is_local or (other is not None and other.place.is_local)
    if other is not None and other.source != workflow.source and not local:
        raise DuplicateName(
            f"two workflows are named {workflow.name!r}, {' in '.join(reversed(other.source))} and "
            f"{' in '.join(reversed(workflow.source))}; give one of them another name="
        )
    KNOWN[workflow.name] = workflow


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
    ready: Callable[..., Any] | None = None,
    ready_every: float = READY_EVERY,
    hooks: Hooks | None = None,
) -> _TransactionalDecorator: ...
@overload
def step(
    *,
    name: str | None = None,
    retry: Retry | None = None,
    timeout: Timeout | float | None = None,
    at_most_once: bool = False,
    verify: Callable[..., Any] | None = None,
    transactional: Literal[False] = False,
    ignore: Iterable[str] = (),
    ready: Callable[..., Any] | None = None,
    ready_every: float = READY_EVERY,
    hooks: Hooks | None = None,
) -> _StepDecorator: ...
def step(fn: Any = None, /, **options: Any) -> Any:
    """Make a function a step: once it has completed in a run, it never runs again there."""
    if fn is not None:
        return Step(fn, **options)
    return lambda function: Step(function, **options)


class _TransactionalDecorator:
    """The type of `@step(transactional=True)`: the caller does not give the transaction, the store does."""

    def __call__(self, fn: Callable[Concatenate[Any, P], R], /) -> Step[P, R]:
        raise NotImplementedError


class _StepDecorator:
    """The type of `@step(...)` with options."""

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
    hooks: Hooks | None = None,
    step_hooks: Hooks | None = None,
) -> _WorkflowDecorator: ...
def workflow(fn: Any = None, /, **options: Any) -> Any:
    """Make a function a workflow, known to this process by its name."""

    def decorate(function: Callable[..., Any]) -> Workflow[..., Any]:
        made: Workflow[..., Any] = Workflow(function, **options)
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
