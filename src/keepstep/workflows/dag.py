"""A dag: steps that say which others they need, each of which starts the moment its needs are done."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from ..errors import DefinitionError, DuplicateName
from ..model.ids import check_name
from ..policies import All, Budget, Durability, Quorum, WaitPolicy
from ..policies import Any as AnyOne
from ..policies.when import Predicate, described
from ..ports import CURRENT
from ..values import VALUES, Values
from .definition import START_OPTIONS, Step, Workflow, remember
from .described import short_hash
from .hooks import Hooks
from .migration import MigrationInfo
from .place import Place, place_here
from .plan import DagStep, Plan, hints_in, inputs_of, looked_at, planned, problems_of
from .routes import Net, ordered
from .shape import Arrow, Node, Problem, Shape
from .validate import Validated, problems

Needs = Iterable[str | Step[..., Any]] | Mapping[str, str | Step[..., Any]]


class Dag(Workflow[..., dict[str, Any]]):
    """A workflow of steps with dependencies: each starts the moment its needs are done, there is no barrier.

    Its parameters are those of its steps that no need gives, taken by name. Its result holds the results of its last
    steps, those that nobody needs, by name.
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
        hooks: Hooks | None = None,
        step_hooks: Hooks | None = None,
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
                hooks=hooks,
                step_hooks=step_hooks,
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

    # -- writing it ---------------------------------------------------------------------------------------------------

    def step(
        self,
        fn: Any = None,
        /,
        *,
        name: str | None = None,
        needs: Needs = (),
        when: Predicate | None = None,
        wait: WaitPolicy | None = None,
        **options: Any,
    ) -> Any:
        """Make a function a step of this dag; `options` are those of `ks.step`."""
        place = place_here("step")

        def decorate(function: Any) -> Any:
            return self.add(function, name, needs=needs, when=when, wait=wait, place=place, **options)

        return decorate if fn is None else decorate(fn)

    def add(
        self,
        thing: Any,
        name: str | None = None,
        *,
        needs: Needs = (),
        when: Predicate | None = None,
        wait: WaitPolicy | None = None,
        place: Place | None = None,
        **options: Any,
    ) -> Any:
        """Add a function, a step or a workflow (a child run); the step itself, or the workflow, is given back.

        One thing may be added several times under different names. `place` is where it is written, if not here.
        """
        place = place or place_here("step")
        try:
            made = _made(thing, name, options)
            called = check_name(name or made.name, "step")
            if called in self._steps:
                raise DuplicateName(
                    f"two steps are named {called!r}, the other at {self._steps[called].place}; "
                    "give one of them another name="
                )
            step = made if isinstance(made, Step) else None
            child = made if isinstance(made, Workflow) else None
            added = DagStep(called, step, child, _named(needs), _condition(when), _policy(wait), place)
        except DefinitionError as error:
            raise type(error)(f"{place}: dag {self.name!r}: {error}") from None
        self._steps[called] = added
        self._plan = self._taken = self._known = None
        self._fingerprint = ""
        return made

    # -- what is known of it ------------------------------------------------------------------------------------------

    @property
    def steps(self) -> Mapping[str, DagStep]:
        """Its steps by name, in the order in which they were written."""
        return self._steps

    def definition(self) -> str:
        """The dag as text, a line for each step, in the order in which they were written."""
        head = f"dag {self.name} version={self.version}"
        if self.inputs:
            head = f"{head} inputs={', '.join(self.inputs)}"
        lines = [head, *(step.line() for step in self._steps.values())]
        return "\n".join(lines) + "\n"

    @property
    def fingerprint(self) -> str:
        """What identifies the definition: its name and version, and a hash over its text."""
        if not self._fingerprint:
            self._fingerprint = f"dag:{self.name}:{self.version}:{short_hash(self.definition())}"
        return self._fingerprint

    def shape(self) -> Shape:
        """The dag as plain data, for validation and pictures."""
        needed = {need for step in self._steps.values() for need in step.needs.values()}
        nodes = tuple(
            Node(step.name, "child" if step.child is not None else "step", _label(step))
            for step in self._steps.values()
        )
        arrows = tuple(
            Arrow(need, step.name, kind="needs")
            for step in self._steps.values()
            for need in dict.fromkeys(step.needs.values())
        )
        exits = tuple(name for name in self._steps if name not in needed)
        return Shape(self.name, "dag", nodes, arrows, exits=exits)

    def problems(self) -> list[Problem]:
        """Everything that is wrong with it, at once."""
        places = {f"step {name!r}": step.place for name, step in self._steps.items()}
        found = []
        for problem in problems(self.shape()):
            place = places.get(problem.where, self.place)
            found.append(replace(problem, file=place.file, line=place.line))
        return [*found, *problems_of(self._steps, self.inputs)]

    @property
    def plan(self) -> Plan:
        """The dag in topological order, checked; `InvalidGraph` lists all its problems."""
        if self._plan is None:
            Validated(self, f"dag {self.name!r}", tuple(self.problems())).check()
            net = Net.of(self.shape())
            self._plan = planned(self._steps, net.named(ordered(net.after)))
        return self._plan

    @property
    def signature(self) -> inspect.Signature:
        """Its inputs, by name: the parameters of its steps that no need gives."""
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
        """The annotations of its inputs; where steps disagree, that of the first."""
        found: dict[str, Any] = {}
        for step in self._steps.values():
            known = hints_in(step)
            for parameter in inputs_of(step):
                if parameter.name in known:
                    found.setdefault(parameter.name, known[parameter.name])
        return found

    @property
    def values(self) -> Values:
        """The codec that knows the types of all its steps."""
        if self._known is None:
            self._known = Values(parent=VALUES, annotations=self._annotations)
        return self._known

    def _annotations(self) -> list[Any]:
        return [hint for step in self._steps.values() for hint in hints_in(step).values()]

    def check_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a dag that has problems, and inputs that it does not take, before anything is stored."""
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
                f"dag {self.name!r} cannot be started so: {error}; it takes {signature}{how}"
            ) from None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if CURRENT.get() is None:
            how = f"`await engine.start({self.name}, ...)`, or `ks.run({self.name}, ...)` in a script"
        else:
            how = f"`await ks.start({self.name}, ...)` in the workflow, which makes it a child run"
        raise DefinitionError(f"dag {self.name!r} is not called like a function; start it with {how}")

    def __repr__(self) -> str:
        return f"<dag {self.name} version {self.version}, {len(self._steps)} steps>"


# -- a step, from what was written -------------------------------------------------------------------------------------


def _made(thing: Any, name: str | None, options: dict[str, Any]) -> Step[..., Any] | Workflow[..., Any]:
    """The step or the workflow that is added; a step under another name is a copy of it."""
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
        told = repr(inputs if isinstance(inputs, str) else wrong[0])
        raise DefinitionError(
            f"{place}: dag {name!r}: inputs= takes a list of names that start has no option of, not {told}"
        )
    return found


def _named(needs: Needs) -> dict[str, str]:
    """The needs by the parameter that takes their result."""
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
    if not isinstance(wait, All | AnyOne | Quorum):
        raise DefinitionError(f"wait= takes ks.All(), ks.Any() or ks.Quorum(n), not {wait!r}")
    return wait


def _label(step: DagStep) -> str:
    told = [] if step.when is None else [f"when {described(step.when)}"]
    if step.wait != All():
        told.append(f"wait {step.wait}")
    return ", ".join(told)
