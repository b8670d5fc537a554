"""The steps of a dag in order: their definition, their problems, and the plan that a run follows."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import GenericAlias
from typing import Any, NamedTuple

from ..model.problem import Problem
from ..policies import All, Quorum, WaitPolicy
from ..policies import Any as AnyOne
from ..policies.when import Predicate, described, functions_in, keys_of
from ..values.annotations import hints_of
from .definition import START_OPTIONS, Step, Workflow
from .fingerprint import policies_of
from .source import Place


class Each(NamedTuple):
    """A step that runs for each element of the list in one of its parameters: how many at once, which may fail."""

    parameter: str
    concurrency: int | None = None
    wait: WaitPolicy | None = None

    def __str__(self) -> str:
        wait = "" if self.wait is None else f" wait {self.wait}"
        return f"{self.parameter}{wait}"


class DagStep(NamedTuple):
    """The definition of one step: its function, its needs, and the parameters that take their results."""

    name: str
    step: Step[..., Any] | None
    child: Workflow[..., Any] | None
    needs: dict[str, str]
    when: Predicate | None
    wait: WaitPolicy
    place: Place
    each: Each | None = None
    agent: str | None = None
    stage: str | None = None

    @property
    def parameters(self) -> list[inspect.Parameter]:
        """The parameters of its function, without the transaction, which the store passes."""
        if self.child is not None:
            return list(self.child.signature.parameters.values())
        assert self.step is not None  # noqa: S101 - a step has either a function or a workflow
        return list(self.step.signature.parameters.values())[self.step.transactional :]

    def line(self) -> str:
        """The step as a line of text."""
        parts = [self.name]
        if self.child is not None:
            parts.append(f"child={self.child.name}")
        if self.needs:
            parts.append(f"needs={', '.join(_need(*pair) for pair in self.needs.items())}")
        if self.each is not None:
            parts.append(f"map={self.each}")
        if self.when is not None:
            parts.append(f"when={described(self.when)}")
        if self.wait != All():
            parts.append(f"wait={self.wait}")
        policies = policies_of(self.step) if self.step is not None else ""
        return " ".join([*parts, policies]).rstrip()


def _need(parameter: str, step: str) -> str:
    return step if parameter == step else f"{parameter}:{step}"


class Vertex(NamedTuple):
    """A step in topological order: the steps it needs and the steps that need it, by their numbers in that order.

    `results` are the parameters that take the result of a need. `inputs` are the parameters that take an input of the
    run, each with whether it is required. `defaults` are the values of optional inputs, for the predicate.
    """

    name: str
    step: Step[..., Any] | None
    child: Workflow[..., Any] | None
    each: Each | None
    when: Predicate | None
    wait: WaitPolicy
    needs: tuple[int, ...]
    dependents: tuple[int, ...]
    results: tuple[tuple[str, int, bool], ...]
    inputs: tuple[tuple[str, bool], ...]
    seen: tuple[tuple[str, int], ...]
    defaults: Mapping[str, Any]
    agent: str | None = None
    stage: str | None = None


class Plan(NamedTuple):
    """A dag that is ready to run: its steps in topological order, and those that no other step needs."""

    order: tuple[Vertex, ...]
    last: tuple[int, ...]


def inputs_of(step: DagStep) -> list[inspect.Parameter]:
    """Return the parameters that take inputs of the run."""
    return [
        parameter
        for parameter in step.parameters
        if parameter.name not in step.needs and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]


def defaults_of(step: DagStep) -> dict[str, Any]:
    """Return the defaults of the parameters that take inputs of the run."""
    return {one.name: one.default for one in inputs_of(step) if one.default is not one.empty}


def looked_at(step: DagStep) -> list[str]:
    """Return the inputs of the run that the step's predicate reads, as far as they are known."""
    return sorted((keys_of(step.when) or frozenset()) - set(step.needs))


def hints_in(step: DagStep) -> dict[str, Any]:
    """Return the annotations of the step's function; a parameter whose elements it takes is a list of them."""
    if step.step is not None:
        hints = hints_of(step.step.fn)
        if step.each is not None and step.each.parameter in hints:
            return {**hints, step.each.parameter: GenericAlias(list, (hints[step.each.parameter],))}
        return hints
    return step.child.hints() if step.child is not None else {}


# -- problems ----------------------------------------------------------------------------------------------------------


def problems_of(steps: Mapping[str, DagStep], named: Iterable[str] = ()) -> Iterator[Problem]:
    """Yield the problems of a dag's steps beyond its shape: their waits and their parameters.

    `named` are inputs of the run that no step has to take.
    """
    for step in steps.values():
        yield from _impossible_waits(step)
        yield from _wrong_parameters(step, steps)
        yield from _wrong_map(step)
        for name in looked_at(step):
            if name in steps:
                what = f"its when= looks at {name!r}, which is a step that it does not need"
                yield _problem(step, what, f"add {name!r} to its needs")
        if step.child is not None and f"{step.name}.result" in steps:
            what = f"its result is recorded as {step.name}.result, and there is a step of that name"
            yield _problem(step, what, "rename one of them")
    yield from _wrong_conditions(steps, named)


def _impossible_waits(step: DagStep) -> Iterator[Problem]:
    needed = len(set(step.needs.values()))
    if isinstance(step.wait, Quorum) and step.wait.n > needed:
        how = "lower the quorum, or add needs"
        yield _problem(step, f"it waits for {step.wait.n} of its needs, and has {needed or 'none'}", how)
    if isinstance(step.wait, AnyOne) and not needed:
        yield _problem(step, "it waits for one of its needs, and has none", "add needs, or remove wait=")


def _wrong_parameters(step: DagStep, steps: Mapping[str, DagStep]) -> Iterator[Problem]:
    parameters = {parameter.name: parameter for parameter in step.parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name, need in step.needs.items():
        if name != need and name not in parameters and not takes_any:
            what = f"it should take the result of {need!r} as {name!r}, which is not one of its parameters"
            yield _problem(step, what, f"its parameters are {', '.join(parameters) or 'none'}")
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            what = f"its parameter {parameter.name!r} cannot be given by name"
            yield _problem(step, what, "remove the / from its signature")
    for parameter in inputs_of(step):
        if parameter.name == step.name:
            what = f"its parameter {parameter.name!r} has the name of the step itself"
            yield _problem(step, what, "rename one of them")
        elif parameter.name in steps:
            what = f"its parameter {parameter.name!r} is the name of a step that it does not need"
            yield _problem(step, what, f"add {parameter.name!r} to its needs, or rename the parameter")
        elif parameter.name in START_OPTIONS:
            what = f"its parameter {parameter.name!r} has the name of an option of start"
            yield _problem(step, what, "rename the parameter")


def _wrong_map(step: DagStep) -> Iterator[Problem]:
    names = [parameter.name for parameter in step.parameters]
    if step.each is not None and step.each.parameter not in names:
        what = f"its map= names {step.each.parameter!r}, which is not one of its parameters"
        yield _problem(step, what, f"name the parameter that takes an element: {', '.join(names) or 'it has none'}")


def _wrong_conditions(steps: Mapping[str, DagStep], named: Iterable[str]) -> Iterator[Problem]:
    """Yield conditions that take inputs by name, as a step does: they would compare a mapping with a value."""
    written = [(step, function) for step in steps.values() for function in functions_in(step.when)]
    known = {one.name for step in steps.values() for one in inputs_of(step)}.union(named, steps) if written else set()
    for step, function in written:
        signature = inspect.signature(function)
        names = list(signature.parameters)
        wrong = [name for name in names if name in known or name in step.needs]
        if not _takes_one(signature) or names[0] in wrong:
            one = wrong[0] if wrong else "name"
            what = f"its when= takes {', '.join(names) or 'nothing'}, and is given one thing: all inputs in a mapping"
            yield _problem(step, what, f"write when=lambda inputs: inputs[{one!r}] …, or ks.when.equals({one!r}, …)")


def _takes_one(signature: inspect.Signature) -> bool:
    try:
        signature.bind({})
    except TypeError:
        return False
    return True


def _problem(step: DagStep, what: str, how: str) -> Problem:
    return Problem("error", f"step {step.name!r}", what, how, step.place.file, step.place.line)


# -- order -------------------------------------------------------------------------------------------------------------


def planned(steps: Mapping[str, DagStep], order: list[str]) -> Plan:
    """Return the plan of steps without problems, numbered in this order."""
    number = {name: index for index, name in enumerate(order)}
    dependents: list[list[int]] = [[] for _ in order]
    for name in order:
        for need in dict.fromkeys(steps[name].needs.values()):
            dependents[number[need]].append(number[name])
    defaults: dict[str, Any] = {}
    for step in steps.values():  # where steps disagree, the first one counts, as in the dag's signature
        defaults = defaults_of(step) | defaults
    vertices = tuple(_vertex(steps[name], number, tuple(sorted(dependents[number[name]])), defaults) for name in order)
    return Plan(vertices, tuple(index for index, vertex in enumerate(vertices) if not vertex.dependents))


def _vertex(
    step: DagStep, number: Mapping[str, int], dependents: tuple[int, ...], defaults: Mapping[str, Any]
) -> Vertex:
    parameters = {parameter.name: parameter for parameter in step.parameters}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    results = tuple(
        (name, number[need], name not in parameters or parameters[name].default is inspect.Parameter.empty)
        for name, need in step.needs.items()
        if name in parameters or takes_any
    )
    inputs = tuple((parameter.name, parameter.default is parameter.empty) for parameter in inputs_of(step))
    needs = tuple(dict.fromkeys(number[need] for need in step.needs.values()))
    seen = tuple((name, number[need]) for name, need in step.needs.items())
    seen_defaults = {**defaults, **defaults_of(step)} if step.when is not None else {}
    return Vertex(
        name=step.name,
        step=step.step,
        child=step.child,
        each=step.each,
        when=step.when,
        wait=step.wait,
        needs=needs,
        dependents=dependents,
        results=results,
        inputs=inputs,
        seen=seen,
        defaults=seen_defaults,
        agent=step.agent,
        stage=step.stage,
    )
