"""A dag: steps with dependencies; each starts as soon as its needs are done."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from ..checks import check_name
from ..errors import DefinitionError, DuplicateName
from ..model.problem import Problem
from ..policies import All, Budget, Durability, Retain, Tolerate, WaitPolicy
from ..policies.classify import Classify
from ..policies.when import Predicate, described
from ..ports import CURRENT
from ..values import VALUES, Values
from .definition import START_OPTIONS, Step, Workflow, remember
from .fingerprint import short_hash
from .hooks import Hooks
from .migration import MigrationInfo
from .plan import DagStep, Each, Plan, hints_in, inputs_of, looked_at, planned, problems_of
from .reachability import Net, ordered
from .shape import Arrow, Node, Shape
from .source import Place, place_here
from .validate import Validated, problems

if TYPE_CHECKING:
    from ..policies import Recovery, Schedule

Needs = Iterable[str | Step[..., Any]] | Mapping[str, str | Step[..., Any]]


class Dag(Workflow[..., dict[str, Any]]):
    """A workflow of steps with dependencies. Each step starts as soon as its needs are done; there is no barrier.

    Its inputs, taken by name, are the parameters of its steps that are not needs; `inputs` adds those that only a
    `when` function reads. Its result maps the names of its last steps, those that no other step needs, to their
    results. `concurrency` limits the steps in progress, and `place` is the place of the definition for messages. The
    other options are those of `ks.workflow`: `name`, `version`, `on_change`, `migrate`, `durability`, `budget`,
    `retain`, `schedule`, `hooks`, `step_hooks`, `record_input`, `classify`, `undo`, `recovery` and `executor`.
    """

    def __init__(
        self,
        name: str,
        *,
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
        recovery: Recovery | str | Callable[..., Any] | None = None,
        executor: Any = None,
        concurrency: int | None = None,
        inputs: Iterable[str] = (),
        place: Place | None = None,
    ) -> None:
        place = place or place_here(str(name))

        async def walk(**inputs: Any) -> Any:
            return await CURRENT.get().walk_dag(self, inputs)

        try:
            super().__init__(
                walk,
                name=name,
                version=version,
                on_change=on_change,
                migrate=migrate,
                durability=durability,
                budget=budget,
                retain=retain,
                schedule=schedule,
                hooks=hooks,
                step_hooks=step_hooks,
                record_input=record_input,
                classify=classify,
                undo=undo,
                recovery=recovery,
                executor=executor,
            )
        except DefinitionError as error:
            raise DefinitionError(f"{place}: {error}") from None
        if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
            raise DefinitionError(
                f"{place}: dag {name!r} needs a concurrency of at least 1, or None, not {concurrency!r}"
            )
        self.concurrency = concurrency
        self.inputs = _checked_inputs(inputs, place, name)
        self.place = place
        self.__name__ = self.__qualname__ = self.name
        self.__doc__ = type(self).__doc__
        self.__module__ = place.module
        self._steps: dict[str, DagStep] = {}
        self._plan: Plan | None = None
        self._taken: inspect.Signature | None = None
        self._known: Values | None = None
        self._fingerprint = ""
        remember(self)

    # -- building ------------------------------------------------------------------------------------------------------

    def step(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        needs: Needs = (),
        when: Predicate | None = None,
        wait: WaitPolicy | None = None,
        map: str | None = None,  # noqa: A002 - the word users know
        **options: Any,
    ) -> Any:
        """Make a function a step of this dag; `options` are those of `add` and of `ks.step`."""
        place = place_here("step")

        def decorate(function: Any) -> Any:
            return self.add(function, name, needs=needs, when=when, wait=wait, map=map, place=place, **options)

        return decorate if fn is None else decorate(fn)

    def add(
        self,
        thing: Any,
        name: str | None = None,
        *,
        needs: Needs = (),
        when: Predicate | None = None,
        wait: WaitPolicy | None = None,
        map: str | None = None,  # noqa: A002 - the word users know
        concurrency: int | None = None,
        tolerate: Tolerate | None = None,
        agent: str | None = None,
        stage: str | None = None,
        place: Place | None = None,
        **options: Any,
    ) -> Any:
        """Add a function, a step or a workflow, which becomes a child run. Return the step or the workflow.

        The same function may be added several times under different names. `map` names a parameter that takes a list:
        the step runs for each element, `concurrency` at once, and its result is the list of theirs. Failures that it
        may `tolerate` leave None there. `agent` and `stage` are names for the records of the step. `place`
        is the place of the definition, if it is not the caller.
        """
        place = place or place_here("step")
        try:
            each = _each(thing, map, concurrency, tolerate)
            made = _made(thing, name, options)
            called = check_name(name or made.name, "step")
            if called in self._steps:
                raise DuplicateName(
                    f"two steps are named {called!r}, the other at {self._steps[called].place}; "
                    "give one of them another name="
                )
            step = made if isinstance(made, Step) else None
            child = made if isinstance(made, Workflow) else None
            for what, given in (("agent", agent), ("stage", stage)):
                if given is not None:
                    check_name(given, what)
            names = (agent, stage)
            added = DagStep(called, step, child, _named(needs), _condition(when), _policy(wait), place, each, *names)
        except DefinitionError as error:
            raise type(error)(f"{place}: dag {self.name!r}: {error}") from None
        self._steps[called] = added
        self._plan = self._taken = self._known = None
        self._fingerprint = ""
        self.__dict__.pop("types", None)
        return made

    # -- reading -------------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Mapping[str, DagStep]:
        """The steps by name, in the order of their definition."""
        return self._steps

    def named_steps(self) -> list[Step[..., Any]]:
        return [one.step for one in self._steps.values() if one.step is not None]

    def definition(self) -> str:
        """The dag as text, one line per step, in the order of their definition."""
        head = f"dag {self.name} version={self.version}"
        if self.inputs:
            head = f"{head} inputs={', '.join(self.inputs)}"
        lines = [head, *(step.line() for step in self._steps.values())]
        return "\n".join(lines) + "\n"

    @property
    def fingerprint(self) -> str:
        """The identity of the definition: its name, its version and a hash of its text."""
        if not self._fingerprint:
            self._fingerprint = f"dag:{self.name}:{self.version}:{short_hash(self.definition())}"
        return self._fingerprint

    def shape(self) -> Shape:
        """The dag as plain data, for validation and pictures."""
        needed = {need for step in self._steps.values() for need in step.needs.values()}
        nodes = tuple(Node(step.name, _kind(step), _label(step)) for step in self._steps.values())
        arrows = tuple(
            Arrow(need, step.name, kind="needs")
            for step in self._steps.values()
            for need in dict.fromkeys(step.needs.values())
        )
        exits = tuple(name for name in self._steps if name not in needed)
        return Shape(self.name, "dag", nodes, arrows, exits=exits)

    def problems(self) -> list[Problem]:
        """Return every problem of the dag."""
        places = {f"step {name!r}": step.place for name, step in self._steps.items()}
        found = []
        for problem in problems(self.shape()):
            place = places.get(problem.where, self.place)
            found.append(replace(problem, file=place.file, line=place.line))
        return [*found, *problems_of(self._steps, self.inputs)]

    @property
    def plan(self) -> Plan:
        """Return the dag in topological order. Raise `InvalidGraph` with all its problems."""
        if self._plan is None:
            Validated(self, f"dag {self.name!r}", tuple(self.problems())).check()
            net = Net.of(self.shape())
            self._plan = planned(self._steps, net.named(ordered(net.after)))
        return self._plan

    @property
    def signature(self) -> inspect.Signature:
        """The inputs, by name: parameters of the steps that are not needs."""
        if self._taken is not None:
            return self._taken
        taken: dict[str, inspect.Parameter] = {}
        for step in self._steps.values():
            for parameter in inputs_of(step):
                known = taken.get(parameter.name)
                if known is None or (known.default is not known.empty and parameter.default is parameter.empty):
                    taken[parameter.name] = parameter.replace(kind=parameter.KEYWORD_ONLY)
        for name in self.inputs:
            taken.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        for step in self._steps.values():
            for name in looked_at(step):
                if name.isidentifier():
                    taken.setdefault(name, inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
        self._taken = inspect.Signature([*taken.values()])
        return self._taken

    def hints(self) -> dict[str, Any]:
        """The annotations of the inputs; where steps disagree, the first one counts."""
        found: dict[str, Any] = {}
        for step in self._steps.values():
            known = hints_in(step)
            for parameter in inputs_of(step):
                if parameter.name in known:
                    found.setdefault(parameter.name, known[parameter.name])
        return found

    @property
    def values(self) -> Values:
        """The codec with the types of all steps."""
        if self._known is None:
            self._known = Values(parent=VALUES, annotations=self._annotations)
        return self._known

    def _annotations(self) -> list[Any]:
        return [hint for step in self._steps.values() for hint in hints_in(step).values()]

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an invalid dag, and inputs that it does not take, before anything is stored."""
        _ = self.plan
        signature = self.signature
        if args:
            raise DefinitionError(f"dag {self.name!r} takes its inputs by name, as {signature}")
        try:
            signature.bind(**kwargs)
        except TypeError as error:
            unknown = set(kwargs) - set(signature.parameters)
            how = " (what only a when= function looks at is named in inputs= of the dag)" if unknown else ""
            raise DefinitionError(
                f"dag {self.name!r} cannot be started with this input: {error}; it takes {signature}{how}"
            ) from None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if CURRENT.get() is None:
            how = f"`await engine.start({self.name}, ...)`, or `ks.run({self.name}, ...)` in a script"
        else:
            how = f"`await ks.start({self.name}, ...)` in the workflow, which makes it a child run"
        raise DefinitionError(f"dag {self.name!r} is not called like a function; start it with {how}")

    def __repr__(self) -> str:
        return f"<dag {self.name} version {self.version}, {len(self._steps)} steps>"


# -- building a step ---------------------------------------------------------------------------------------------------


def _made(thing: Any, name: str | None, options: dict[str, Any]) -> Step[..., Any] | Workflow[..., Any]:
    """Return the step or workflow to add; a step under another name is copied."""
    if isinstance(thing, Workflow):
        if options:
            raise DefinitionError(f"a workflow is added without the options of a step ({', '.join(options)})")
        return thing
    if not isinstance(thing, Step):
        try:
            return Step(thing, name=name, **options)
        except TypeError as error:
            raise DefinitionError(f"{getattr(thing, '__name__', thing)!r} cannot be a step so: {error}") from None
    if options:
        raise DefinitionError(f"step {thing.name!r} has its options already; give {', '.join(options)} to its ks.step")
    if name is None or name == thing.name:
        return thing
    renamed = copy.copy(thing)
    renamed.name = name
    return renamed


def _checked_inputs(inputs: Any, place: Place, name: str) -> tuple[str, ...]:
    found = () if isinstance(inputs, str) else tuple(inputs)
    wrong = [one for one in found if not isinstance(one, str) or not one.isidentifier() or one in START_OPTIONS]
    if isinstance(inputs, str) or wrong:
        wrong_input = repr(inputs if isinstance(inputs, str) else wrong[0])
        raise DefinitionError(
            f"{place}: dag {name!r}: inputs= takes a list of names that start has no option of, not {wrong_input}"
        )
    return found


def _named(needs: Needs) -> dict[str, str]:
    """Return the needs by the parameter that takes their result."""
    if isinstance(needs, str | Step):
        raise DefinitionError(f"needs= takes a list of names, not {needs!r}: write needs=[{needs!r}]")
    pairs = needs.items() if isinstance(needs, Mapping) else ((_name(one), one) for one in needs)
    return {str(parameter): _name(need) for parameter, need in pairs}


def _name(need: Any) -> str:
    if isinstance(need, Step | Workflow):
        return need.name
    if not isinstance(need, str):
        raise DefinitionError(f"needs= takes names of steps, not {need!r}")
    return need


def _condition(when: Any) -> Predicate | None:
    if when is not None and not callable(when):
        raise DefinitionError(f"when= takes a function of the step's inputs, or a predicate of ks.when, not {when!r}")
    if inspect.iscoroutinefunction(when):
        raise DefinitionError(f"when= takes a plain function, and {described(when)} is async: let a step find it out")
    return when  # type: ignore[no-any-return]


def _policy(wait: Any) -> WaitPolicy:
    if wait is None:
        return All()
    if not isinstance(wait, WaitPolicy):
        raise DefinitionError(f"wait= takes ks.All(), ks.Any(), ks.Quorum(n) or ks.Tolerate(...), not {wait!r}")
    return wait


def _each(thing: Any, parameter: Any, concurrency: Any, tolerate: Any) -> Each | None:
    if parameter is None:
        if concurrency is not None or tolerate is not None:
            raise DefinitionError("concurrency= and tolerate= of a step need map=, the parameter that takes a list")
        return None
    if not isinstance(parameter, str):
        raise DefinitionError(f"map= takes the name of a parameter, not {parameter!r}")
    if isinstance(thing, Workflow):
        raise DefinitionError(f"map= is for steps, and {thing.name!r} is a workflow; let it take the whole list")
    if concurrency is not None and (type(concurrency) is not int or concurrency < 1):
        raise DefinitionError(f"concurrency= must be a whole number from 1, not {concurrency!r}")
    if tolerate is not None and not isinstance(tolerate, Tolerate):
        raise DefinitionError(f"tolerate= takes a ks.Tolerate(...), not {tolerate!r}")
    return Each(parameter, concurrency, tolerate)


def _kind(step: DagStep) -> str:
    if step.child is not None:
        return "child"
    return "step" if step.each is None else "map"


def _label(step: DagStep) -> str:
    parts = [] if step.each is None else [f"over {step.each.parameter}"]
    parts += [] if step.when is None else [f"when {described(step.when)}"]
    if step.wait != All():
        parts.append(f"wait {step.wait}")
    return ", ".join(parts)
