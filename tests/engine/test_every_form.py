"""Budgets and readiness hold for every form of workflow (C14, C17)."""

from collections import Counter
from itertools import pairwise

import pytest

import keepstep as ks
from tests.engine.world import steps_of

ASKED = []


def asked_twice(*args, **kwargs):
    """A `ready=` function that says no once for each step."""
    about = sorted([*map(str, args), *map(str, kwargs.items())])
    ASKED.append(about)
    return ASKED.count(about) > 1


OPTIONS = {"ready": asked_twice, "ready_every": 0.005}


@ks.step(**OPTIONS)
async def work(number):
    return number


@ks.step(**OPTIONS)
async def count(state):
    return {"done": state.get("done", 0) + 1}


@ks.step(ready=lambda done: asked_twice(done), ready_every=0.005)  # noqa: PLW0108 - it takes the step's parameter
async def add(done):
    return done + 1


@ks.step(**OPTIONS)
async def need(one=0):
    return one + 1


def async_function(budget):
    @ks.workflow(budget=budget)
    async def form():
        return [await work(number) for number in range(3)]

    return form


def plain_function(budget):
    @ks.workflow(budget=budget)
    def form():
        return [work(number).result() for number in range(3)]

    return form


def mapped(budget):
    @ks.workflow(budget=budget)
    async def form():
        return await ks.map(work, range(3), concurrency=1)

    return form


def called(inner):
    def make(budget):
        workflow = inner(budget)

        @ks.workflow
        async def calling():
            return await workflow()

        return calling

    return make


def chain(graph, *names):
    for before, after in pairwise(names):
        graph.edge(before, after)
    graph.entry(names[0])
    graph.exit(names[-1])
    return graph


def graph(budget):
    graph = ks.Graph("form", budget=budget)
    for name in ("a", "b", "c"):
        graph.add(count, name)
    return chain(graph, "a", "b", "c")


def waiting_step(budget):
    graph = ks.Graph("form", budget=budget)

    @graph.step(waits=True)
    async def a(state):
        return {"out": [await work(number) for number in range(3)]}

    return chain(graph, "a")


def agent_stage(budget):
    graph = ks.Graph("form", budget=budget)

    async def reviewed(state, agent):
        return ks.Changes(state={"done": state.get("done", 0) + 1}, agent={"seen": agent.get("seen", 0) + 1})

    for name in ("a", "b", "c"):
        graph.add(ks.step(name=name, **OPTIONS)(reviewed), agent="critic", stage="review")
    return chain(graph, "a", "b", "c")


def graph_map(budget):
    graph = ks.Graph("form", budget=budget)
    graph.map("a", work, over="items", into="out", concurrency=1)
    return chain(graph, "a")


def dag(budget):
    dag = ks.Dag("form", budget=budget, concurrency=1)
    dag.add(need, "a")
    dag.add(need, "b", needs={"one": "a"})
    dag.add(need, "c", needs={"one": "b"})
    return dag


def from_file(steps):
    def make(budget, path):
        limit = "" if budget is None else f"resources: {{budget: {{steps: {budget.steps}}}, concurrency: 1}}"
        path.write_text(f"keepstep: 1\nmetadata: {{name: form}}\nspec: {{{limit}}}\nsteps:\n{steps}", encoding="utf-8")
        return ks.load(path, functions={"count": count, "add": add, "need": need, "work": work}, agents={"add": add})

    return make


GRAPH_FILE = """
  a: {function: count, next: b}
  b: {function: count, next: c}
  c: {function: count}
"""
KEYS_FILE = """
  a: {function: add, with: {done: done}, into: done, next: b}
  b: {kind: agent, agent: add, with: {done: done}, into: done, next: c}
  c: {function: add, with: {done: done}, into: done}
"""
MAP_FILE = """
  a: {kind: map, function: work, over: items, into: out, next: b}
  b: {function: count}
"""
DAG_FILE = """
  a: {function: need}
  b: {function: need, needs: [a], with: {one: a}}
  c: {function: need, needs: [b], with: {one: b}}
"""

FORMS = {
    "async function": async_function,
    "plain function": plain_function,
    "map": mapped,
    "called": called(async_function),
    "called plain": called(plain_function),
    "called map": called(mapped),
    "graph": graph,
    "waiting graph step": waiting_step,
    "agent stage": agent_stage,
    "graph map": graph_map,
    "dag": dag,
    "graph file": from_file(GRAPH_FILE),
    "file with keys": from_file(KEYS_FILE),
    "map in a file": from_file(MAP_FILE),
    "dag file": from_file(DAG_FILE),
}
STATES = {"graph map": {"items": [1, 2, 3]}, "map in a file": {"items": [1, 2, 3]}, "file with keys": {"done": 0}}


@pytest.fixture
def made(tmp_path):
    ASKED.clear()

    def make(form, budget):
        more = [tmp_path / "form.yaml"] if "file" in form else []
        return FORMS[form](budget, *more)

    return make


@pytest.mark.parametrize("form", FORMS)
async def test_budget_holds_for_every_form(world, made, form):
    async with world.engine() as engine:
        run = await engine.start(made(form, ks.Budget(steps=2)), **STATES.get(form, {}))
        with pytest.raises(ks.KeepstepError, match=r"was not started.*2 of 2 steps"):
            await run.result(30)
        assert (await run.spent()).steps == 2


@pytest.mark.parametrize("form", FORMS)
async def test_readiness_holds_for_every_form(world, made, form):
    async with world.engine() as engine:
        run = await engine.start(made(form, None), **STATES.get(form, {}))
        await run.result(30)
        performed = len([key for key in await steps_of(run) if key != "form#1"])
    assert performed >= 3
    asked = Counter(tuple(one) for one in ASKED)
    # A run that is forgotten while a step is not ready asks again when it goes on.
    at_most = 2 if world.mode == "live" else 4
    assert all(2 <= count <= at_most for count in asked.values()), "each step is asked until it is ready"
    assert len(ASKED) >= 6


@pytest.mark.one_store
async def test_readiness_in_a_file_is_asked_with_the_keys_of_the_state(world, made):
    async with world.engine() as engine:
        await (await engine.start(made("file with keys", None), done=0)).result(30)
    assert [int(one) for (one,) in ASKED] == [0, 0, 1, 1, 2, 2]


@pytest.mark.one_store
async def test_missing_key_fails_the_step_of_a_file_instead_of_blocking_it(world, made):
    async with world.engine() as engine:
        run = await engine.start(made("file with keys", None), other=0)
        with pytest.raises(ks.KeepstepError, match="the state has no key 'done'"):
            await run.result(30)
