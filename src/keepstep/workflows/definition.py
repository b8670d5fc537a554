"""Definitions of steps and workflows, and the registry of their names."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType, MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, get_args, overload
from weakref import WeakValueDictionary

from ..checks import MOST_SPENT, check_executor, check_key, check_name, check_number, check_seconds
from ..errors import DefinitionError, DuplicateName
from ..model.agent import agent_of
from ..model.keepers import is_reserved
from ..policies import Budget, Durability, Recovery, Retry, Timeout, checked_rules
from ..policies.budget import Amount
from ..policies.queue import Queue, queue_name
from ..policies.service import Service, service_name
from ..ports import CURRENT
from ..values import VALUES, Values
from ..values.annotations import enclosed, hints_of
from .call import Call, PlainCall
from .call_types import CallTypes
from .hooks import Hooks, checked_hooks
from .schema import as_written
from .source import Place, place_of
from .streaming import streaming_body

if TYPE_CHECKING:
    from ..policies import Cache, Schedule
    from ..policies.classify import Classify
    from ..policies.retention import Retain
    from .migration import MigrationInfo

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

#: Policies for an at-most-once step whose body may or may not have run: a person decides, it fails, it is repeated.
InDoubt = Literal["ask", "fail", "repeat"]

#: Default time in seconds between two calls of a step's `ready=` function while the step is not ready.
READY_EVERY = 5.0
#: The spend that a step expects: an amount, a number in the units of its service, or a function of the arguments.
Expected = Amount | float | Callable[..., "Amount | float"]
#: Options of `start`; a parameter of a workflow may not use these names.
START_OPTIONS = frozenset({"run_id", "queue", "priority", "delay", "key", "deadline", "tags", "dedupe"})


#: The names of the services that steps of this process call. A worker asks for places at all of them.
SERVICES: set[str] = set()


def _named_service(service: Any, step: str) -> str:
    """Return the name of a service, and note it."""
    name = service_name(service)
    if not isinstance(name, str):
        raise DefinitionError(f"step {step!r}: service= takes a ks.Service(...) or a name, not {service!r}")
    SERVICES.add(check_name(name, "service"))
    return name


def checked_retry(retry: Any, step: str) -> Retry:
    """Return the policy; refuse anything else."""
    if not isinstance(retry, Retry):
        raise DefinitionError(f"step {step!r}: retry= takes a ks.Retry(...), not {retry!r}")
    return retry


@dataclass(frozen=True, slots=True)
class Sends:
    """The part that crosses to another process, for a step whose function only adapts another one."""

    #: The other function.
    fn: Callable[..., Any]
    #: Returns its arguments, of those of the step.
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    #: Returns the result of the step, of that of the other function.
    result: Callable[[Any], Any]


class Step(Generic[P, R]):
    """A named unit whose completion is recorded. `fn` is the bare function."""

    #: Description of the step in a workflow's file; part of the definition's fingerprint.
    written = ""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str | None = None,
        retry: Retry | None = None,
        timeout: Timeout | float | timedelta | None = None,
        at_most_once: bool = False,
        verify: Callable[..., Any] | None = None,
        in_doubt: InDoubt | None = None,
        transactional: bool = False,
        ignore: Iterable[str] = (),
        service: Service | str | None = None,
        cost: Expected | None = None,
        ready: Callable[..., Any] | None = None,
        ready_every: float | timedelta = READY_EVERY,
        hooks: Hooks | None = None,
        collect: Callable[[list[Any]], Any] | None = None,
        record_input: bool | None = None,
        classify: Classify | None = None,
        undo: Callable[..., Any] | None = None,
        undo_unfinished: bool = False,
        cache: Cache | None = None,
        executor: Any = None,
    ) -> None:
        if not callable(fn):
            raise DefinitionError(f"a step must be a function, not {type(fn).__name__}")
        self.name = check_name(name or fn.__name__.strip("<>"), "step")
        self.retry = Retry.none() if retry is None else checked_retry(retry, self.name)
        #: Rules for the classes of its errors, tried before those of the workflow and the engine.
        self.classify = checked_rules(classify, f"step {self.name!r}: classify=")
        self.timeout = Timeout.of(timeout)
        self.at_most_once = at_most_once
        self.verify = verify
        self.in_doubt: InDoubt = in_doubt or "ask"
        self.transactional = transactional
        #: The name of the outside service that its attempts call; None if they need no place at one.
        self.service = None if service is None else _named_service(service, self.name)
        #: The spend expected of an attempt: an amount, a number, or a function of the arguments; None for the mean.
        self.cost = cost
        self.ready = ready
        self.ready_every = check_seconds(ready_every, f"step {self.name!r}: ready_every", 0.001)
        self.hooks = checked_hooks(hooks, f"step {self.name!r}: hooks=")
        self.collect = collect
        #: Whether the arguments are stored with the outcome; None leaves it to the workflow.
        self.record_input = record_input
        #: The step that undoes this one if the run fails or is cancelled.
        self.undo = None if undo is None else undo_step(undo, f"step {self.name!r}")
        #: Whether it is also undone if it has failed or was cancelled, because it may have done a part of its work.
        self.undo_unfinished = undo_unfinished
        #: How its results serve equal calls of other runs; None if they do not.
        self.cache = cache
        #: The key that the caller gave to this call with `options(key=...)`; empty for a key by position.
        self.call_key = ""
        #: Where its bodies run, if that is said: a name, or an object that opens an executor.
        self.where = None if executor is None else check_executor(executor, f"step {self.name!r}: executor=")
        #: The part that crosses to another process instead of the function, if that only adapts another one.
        self.sends: Sends | None = None
        self._given = fn
        self.streams = inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn)
        self.set_body(fn, is_async=inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn))
        self.ignore = frozenset([ignore] if isinstance(ignore, str) else ignore)
        self.signature = inspect.signature(fn)
        self.parameters = tuple(self.signature.parameters)
        self._check()
        functools.update_wrapper(self, fn)
        if self.undo is not None:
            _note_undoable(self)

    def set_body(self, fn: Callable[..., Any], *, is_async: bool) -> None:
        """Set the function that an attempt calls; a stub of a test sets another one for a while."""
        self.fn = fn
        #: The function that an attempt calls: `fn` or, if that yields its result in parts, one that collects them.
        self.body = streaming_body(fn, self.collect)
        self.is_async = is_async
        #: Whether the body may be sent to another process: it is the function that the step was made of.
        self.is_sent = fn is self._given
        self.simple = self.is_simple()

    def is_simple(self) -> bool:
        """Whether an attempt may await the function directly, because no option of the step concerns its body."""
        return self.executor == "inline" and self.timeout == Timeout() and self.undo is None

    def _check(self) -> None:
        self._check_cost()
        self.check_executor()
        if self.transactional and (self.is_async or self.streams):
            raise DefinitionError(f"step {self.name!r} is transactional, so it must be a plain def fn(tx, ...)")
        if self.collect is not None and not (self.streams and callable(self.collect)):
            raise DefinitionError(
                f"step {self.name!r}: collect= is a function of the list of yielded items, for a step that yields"
            )
        self._check_doubt()
        self._check_undo()
        self._check_cache()
        if self.ready is not None and not callable(self.ready):
            raise DefinitionError(f"step {self.name!r}: ready= is a function of its arguments, not {self.ready!r}")
        named = [
            p.name for p in self.signature.parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        unknown = self.ignore - set(named)
        if unknown:
            raise DefinitionError(f"step {self.name!r} ignores {sorted(unknown)}, which are not its named parameters")
        if self.ignore and len(named) < len(self.parameters):
            raise DefinitionError(f"step {self.name!r} uses ignore=, so all its parameters must be named ones")

    def check_executor(self) -> None:
        """Refuse an executor that cannot run the body."""
        if self.where is None:
            return
        own = "inline" if self.is_async else "thread"
        if self.where in ("inline", "thread") and self.where != own:
            kind = "an async function" if self.is_async else "a plain function"
            raise DefinitionError(f"step {self.name!r} is {kind}, which runs in executor={own!r}, not {self.where!r}")
        if self.where != own and (self.transactional or self.ignore):
            option = "transactional=" if self.transactional else "ignore="
            raise DefinitionError(
                f"step {self.name!r} has executor= and {option}, which needs the worker's own process; remove one"
            )

    def _check_cache(self) -> None:
        if self.cache is None:
            return
        from ..policies.cache import Cache  # noqa: PLC0415 - only with a cache

        if not isinstance(self.cache, Cache):
            raise DefinitionError(f"step {self.name!r}: cache= takes a ks.Cache(...), not {self.cache!r}")
        for option in ("at_most_once", "transactional", "undo"):
            if getattr(self, option):
                raise DefinitionError(
                    f"step {self.name!r} has cache= and {option}=: a cached result would skip its effects; remove one"
                )

    def _check_doubt(self) -> None:
        if self.in_doubt not in get_args(InDoubt):
            raise DefinitionError(f"step {self.name!r}: in_doubt= is 'ask', 'fail' or 'repeat', not {self.in_doubt!r}")
        if not self.at_most_once:
            for option in ("verify", "in_doubt"):
                if getattr(self, option) not in (None, "ask"):
                    raise DefinitionError(f"step {self.name!r} has {option}=, which only an at_most_once step needs")

    def _check_cost(self) -> None:
        if self.cost is None or isinstance(self.cost, Amount):
            return
        if self.service is None and not callable(self.cost):
            raise DefinitionError(
                f"step {self.name!r} has a number as cost=, which only a step with service= needs; "
                "for a budget, give a ks.Amount(cost=..., tokens=...)"
            )
        if not callable(self.cost):
            check_number(self.cost, f"step {self.name!r}: cost=", 0.0, MOST_SPENT)

    def _check_undo(self) -> None:
        if self.undo is None:
            if self.undo_unfinished:
                raise DefinitionError(f"step {self.name!r} has undo_unfinished=, which only a step with undo= needs")
            return
        given = list(self.signature.parameters.values())[1 if self.transactional else 0 :]
        if self.ignore or any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in given):
            return
        try:
            self.undo.signature.bind(None, *given)
        except TypeError as error:
            takes = ", ".join(["result", *(one.name for one in given)])
            raise DefinitionError(f"undo= of step {self.name!r} is called with ({takes}): {error}") from None

    @property
    def leaves_doubt(self) -> bool:
        """Whether a body that may have run leaves doubt. If a doubt only repeats it, `retry=` limits how often."""
        return self.at_most_once and (self.verify is not None or self.in_doubt != "repeat")

    @property
    def executor(self) -> Any:
        """The executor of its bodies: its name, or an object that opens it."""
        if self.where is not None and self.is_sent:
            return self.where
        return "inline" if self.is_async else "thread"

    @functools.cached_property
    def values(self) -> Values:
        """The codec with the types of the step's signature."""
        return VALUES.for_callable(self.fn)

    def hints(self) -> list[Any]:
        """Return the annotations of the step, as far as their names can be resolved."""
        return list(hints_of(self.fn).values())

    def without_ignored(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Split the arguments, by name, into those that count for the digest and the ignored ones."""
        bound = self.signature.bind(*args, **kwargs).arguments
        ignored = {name: value for name, value in bound.items() if name in self.ignore}
        return (), {name: value for name, value in bound.items() if name not in self.ignore}, ignored

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Call[R]:
        scope = CURRENT.get()
        if scope is None:
            _warn_if_context_was_lost(self.name)
            return PlainCall(self.body, args, kwargs)
        return scope.call_step(self, args, kwargs)  # type: ignore[no-any-return]

    def options(
        self,
        *,
        name: str | None = None,
        key: str | None = None,
        retry: Retry | None = None,
        timeout: Timeout | float | timedelta | None = None,
        executor: Any = None,
    ) -> Step[P, R]:
        """Return the step with other options, for one call: `await fetch.options(timeout=5)(url)`.

        `key` identifies the call in its run, in place of its position in the code: it must be unique in the run, or
        within the nearest named branch.
        """
        self.values  # noqa: B018 - computed before the copy, which shares it
        other = copy.copy(self)
        if name is not None:
            other.name = check_name(name, "step")
            if self.undo is not None:
                _note_undoable(other)
        if key is not None:
            other.call_key = check_key(key, f"step {self.name!r}: key")
        if retry is not None:
            other.retry = checked_retry(retry, self.name)
        if timeout is not None:
            other.timeout = Timeout.of(timeout)
        if executor is not None:
            other.where = check_executor(executor, f"step {self.name!r}: executor=")
            other.check_executor()
        other.simple = other.is_simple()
        return other

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Step[P, R]: ...
    @overload
    def __get__(self: Step[Concatenate[Any, Q], R], instance: object, owner: type | None = None) -> Step[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the step as a method of an object. The object is not part of the step's input."""
        if instance is None:
            return self
        self.values  # noqa: B018 - computed before the copy, which shares it
        bound = copy.copy(self)
        bound.fn = MethodType(self.fn, instance)
        bound.body = MethodType(self.body, instance)
        bound.parameters = self.parameters[1:]
        bound.signature = self._method_signature
        return bound

    @functools.cached_property
    def _method_signature(self) -> inspect.Signature:
        """The signature without the object, for a step that is a method."""
        return self.signature.replace(parameters=list(self.signature.parameters.values())[1:])

    def __repr__(self) -> str:
        return f"<step {self.name}>"


#: The steps of this process that can be undone, by name and in the order in which they were made.
_UNDOABLE: dict[str, WeakValueDictionary[int, Step[..., Any]]] = {}
_NUMBERS = itertools.count()


def _note_undoable(step: Step[..., Any]) -> None:
    _UNDOABLE.setdefault(step.name, WeakValueDictionary())[next(_NUMBERS)] = step


def undoable_step(name: str) -> Step[..., Any] | None:
    """Return the newest step with an undo that has this name; None if functions in several places have it."""
    found = sorted(_UNDOABLE.get(name, {}).items())
    places = {(getattr(one.fn, "__module__", ""), getattr(one.fn, "__qualname__", "")) for _, one in found}
    return found[-1][1] if len(places) == 1 else None


def undo_step(undo: Any, owner: str) -> Step[..., Any]:
    """Return the step that undoes a step or a child; a plain function is tried once."""
    if not callable(undo) or isinstance(undo, Workflow):
        raise DefinitionError(f"{owner}: undo= is a function or a step, not {undo!r}")
    step: Step[..., Any] = undo if isinstance(undo, Step) else Step(undo)
    if step.undo is not None:
        raise DefinitionError(f"{owner}: its undo= {step.name!r} has an undo= itself, which is never called")
    return step


#: Called with the name of a step that is called outside a run; an open engine sets it.
on_plain_call: Callable[[str], None] | None = None


def _warn_if_context_was_lost(name: str) -> None:
    if on_plain_call is not None:
        on_plain_call(name)


class Workflow(Generic[P, R]):
    """A named and versioned definition. A plain call runs its function; `Engine.start` makes it a run."""

    #: Whether its runs carry a state from which they continue after a crash.
    carries_state = False
    #: Whether it is part of Keepstep, so that its name may be a reserved one.
    is_built_in = False
    #: The agent whose tasks its runs are; every record of such a run carries the name.
    agent: str | None = None

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
    ) -> None:
        if not callable(fn):
            raise DefinitionError(f"a workflow must be a function, not {type(fn).__name__}")
        self.fn = fn
        self.name = check_name(name or fn.__name__.strip("<>"), "workflow")
        if (is_reserved(self.name) or agent_of(self.name) is not None) and not self.is_built_in:
            raise DefinitionError(f"workflow name {self.name!r} is refused: names that begin so are Keepstep's own")
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
        #: The rule by which workers remove its finished runs; None leaves it to their general rule.
        self.retain = _checked_retain(retain, self.name)
        self.hooks = checked_hooks(hooks, f"workflow {self.name!r}: hooks=")
        self.step_hooks = checked_hooks(step_hooks, f"workflow {self.name!r}: step_hooks=")
        #: Whether the arguments of its steps are stored with their outcomes, unless a step says otherwise.
        self.record_input = record_input
        #: Rules for the classes of errors of its steps, tried after those of a step.
        self.rules = checked_rules(classify, f"workflow {self.name!r}: classify=")
        #: The step with which a parent undoes a finished run of this workflow.
        self.undo = None if undo is None else undo_step(undo, f"workflow {self.name!r}")
        #: Where plain functions run that are its steps and name no executor; None leaves it to the worker.
        self.executor = None if executor is None else check_executor(executor, f"workflow {self.name!r}: executor=")
        #: How its runs go on after their worker has died; None lets them continue.
        self.recovery = Recovery.of(recovery, f"workflow {self.name!r}")
        if queue is not None:
            self.starting = {"queue": check_name(queue_name(queue), "queue")}
        self.is_async = inspect.iscoroutinefunction(fn)
        self._signature = inspect.signature(fn)
        taken = START_OPTIONS & set(self._signature.parameters)
        if taken:
            raise DefinitionError(
                f"workflow {self.name!r}: the parameter name {min(taken)!r} is an option of start; rename it"
            )
        functools.update_wrapper(self, fn)
        self.place: Place = place_of(fn, self.name)
        #: Module that distinguishes the workflow from others with the same name; empty if the name is explicit.
        self.module = "" if name is not None else self.place.program
        self._counts = _plain_counts(self._signature)
        #: When a worker starts it by itself; None for a workflow that others start.
        self.schedule = schedule
        if schedule is not None:
            _check_schedule(self.name, schedule)

    #: Defaults for options of `start`: a queue, a priority, a deadline in seconds, tags.
    starting: Mapping[str, Any] = MappingProxyType({})
    #: Patterns of secrets that must not be stored or logged, in addition to those of the engine.
    redacting: tuple[str, ...] = ()

    @property
    def has_undo(self) -> bool:
        """Whether a step of the definition can be undone, as far as it tells without a call."""
        return False

    @property
    def signature(self) -> inspect.Signature:
        """The parameters of the workflow."""
        return self._signature

    @property
    def source(self) -> tuple[str, str]:
        """The file of the definition and its qualified name there, which distinguish two of the same name."""
        return self.place.file, self.place.name

    @property
    def fingerprint(self) -> str:
        """The identity of the definition: for a function, its name and version."""
        return f"function:{self.name}:{self.version}"

    def definition(self) -> str:
        """The definition as lines of text, for comparing two versions; empty for a function."""
        return ""

    @functools.cached_property
    def values(self) -> Values:
        """The codec with the types of the workflow's signature and, for other values, those of its steps."""
        return VALUES.for_callable(self.fn, fallback=lambda: self.reach)

    def named_steps(self) -> list[Step[..., Any]]:
        """Return the steps that the code of the workflow can name: those of its module and its enclosing functions."""
        fn = inspect.unwrap(self.fn)
        around = [*getattr(fn, "__globals__", {}).values(), *enclosed(fn).values()]
        return [one for one in around if isinstance(one, Step)]

    def signal_type(self, signal: str) -> Any:
        """Return the type of a signal that the workflow waits for, or None if its definition does not tell."""
        return None

    @functools.cached_property
    def reach(self) -> Values:
        """The codec with the types of the workflow and of its steps, for signals and for published values."""
        return Values(
            parent=self.values, annotations=lambda: [hint for one in self.named_steps() for hint in one.hints()]
        )

    def hints(self) -> dict[str, Any]:
        """The annotations of the parameters, as far as their names can be resolved."""
        return hints_of(self.fn)

    @functools.cached_property
    def types(self) -> CallTypes:
        """The types of the arguments and of the result."""
        return CallTypes(self.name, self.signature, self.hints())

    def check_result(self, key: str, value: Any, where: str) -> None:
        """Refuse a result of a step that does not fit its annotation, if the workflow can name the step."""
        name = key.rpartition("/")[2].partition("#")[0]
        steps = [] if self.carries_state else self.named_steps()
        found = {id(step): step for step in steps if step.name == name}
        if len(found) == 1:
            [step] = found.values()
            as_written(value, hints_of(step.fn).get("return"), where)

    def bind(self, /, *args: P.args, **kwargs: P.kwargs) -> Bound[R]:
        """Return the workflow with its arguments, checked by the type checker and by the signature."""
        self.check_arguments(args, kwargs)
        return Bound(self, args, kwargs)

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments that do not match the signature, before anything is stored."""
        if not kwargs and len(args) in self._counts:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise DefinitionError(f"workflow {self.name!r} cannot be started with this input: {error}") from None

    def stored_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return checked arguments in the form that is stored as the input of a run, or refuse one of a wrong type."""
        return [*self.types.arguments(args, kwargs)]

    #: The key that the caller gave to this call with `options(key=...)`; empty for a key by position.
    call_key = ""

    def options(self, *, key: str) -> Self:
        """Return the workflow with a key for one call inside another workflow, unique in that run or named branch."""
        self.values  # noqa: B018 - computed before the copy, which shares it
        other = copy.copy(self)
        other.call_key = check_key(key, f"workflow {self.name!r}: key")
        return other

    def same_arguments(self, stored: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the stored input of a run, decoded, is that of these arguments."""
        return self.types.are_same(stored, args, kwargs, self.values.digest)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the function: inside another workflow as a branch of that run, elsewhere as an ordinary function."""
        scope = CURRENT.get()
        if scope is None or scope.in_step:
            return self.fn(*args, **kwargs)
        return scope.call_workflow(self, args, kwargs)

    def __repr__(self) -> str:
        return f"<workflow {self.name} version {self.version}>"


def _check_schedule(name: str, schedule: Any) -> None:
    from ..policies.schedule import Schedule  # noqa: PLC0415 - only with a schedule

    if not isinstance(schedule, Schedule):
        raise DefinitionError(f"workflow {name!r}: schedule= takes a ks.Cron(...) or a ks.Every(...), not {schedule!r}")


def check_scheduled(workflow: Workflow[..., Any]) -> None:
    """Refuse a schedule of a workflow that cannot be started without arguments."""
    try:
        workflow.check_arguments((), {})
    except DefinitionError as error:
        raise DefinitionError(
            f"workflow {workflow.name!r} has schedule=, which starts it without arguments; give its parameters "
            f"defaults, or use engine.schedule: {error}"
        ) from None


def _checked_retain(retain: Retain | str | None, name: str) -> Retain | None:
    if retain is None:
        return None
    from ..policies.retention import Retain  # noqa: PLC0415 - only with a retention rule

    try:
        rule = Retain.named(retain)
    except DefinitionError as error:
        raise DefinitionError(f"workflow {name!r}: {error}") from None
    if rule.workflows:
        raise DefinitionError(f"workflow {name!r}: retain= is its own rule, so it takes no workflows=")
    return rule


def _plain_counts(signature: inspect.Signature) -> range:
    """Return the numbers of positional arguments that always match the signature."""
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
    """Register a workflow in this process. The same function may be registered again, for example after a reload."""
    other = KNOWN.get(workflow.name)
    if other is not None and other.source != workflow.source and not _may_replace(workflow.place, other.place):
        raise DuplicateName(
            f"two workflows are named {workflow.name!r}, {' in '.join(reversed(other.source))} and "
            f"{' in '.join(reversed(workflow.source))}; give one of them another name="
        )
    KNOWN[workflow.name] = workflow


def _may_replace(new: Place, old: Place) -> bool:
    """Whether both definitions of a name can be the same one, made again by a function or by a changed cell."""
    return new.is_local or old.is_local or (new.is_typed and old.is_typed)
