"""Workflows from files under way: every kind of step, live and after crashes, and what a file says about the whole."""

import asyncio
import os
import sys
import types
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.errors import DefinitionError, InvalidGraph
from keepstep.model import Status
from keepstep.policies.queue import DECLARED
from keepstep.workflows.definition import KNOWN, Step
from keepstep.workflows.files.build import Names
from keepstep.workflows.files.load import check
from tests.engine import far_functions
from tests.engine.world import replay_from_every_prefix, steps_of, until_status

pytestmark = pytest.mark.usefixtures("nothing_known")

FILES = Path(__file__).parents[1] / "workflows" / "files"


@pytest.fixture
def file(tmp_path):
    """Writes a file and gives its path; steps are enough, the rest is put before them."""

    def write(text, name="flow.yaml"):
        path = tmp_path / name
        head = "" if "metadata" in text else f"keepstep: 1\nmetadata: {{name: {path.stem}}}\n"
        path.write_text(head + text, encoding="utf-8")
        return path

    return write


async def done(world, workflow, **inputs):
    async with world.engine() as engine:
        run = await engine.start(workflow, run_id="r", **inputs)
        return await run.result(60)


def nothing(state):
    return {}


# -- graphs ------------------------------------------------------------------------------------------------------------


async def test_ways_are_taken_by_conditions(world, file):
    flow = file("""
steps:
  draft: {with: {topic: subject}, into: text, next: critic}
  critic:
    branches:
      - {when: state.score < 2, next: draft}
      - {next: publish}
  publish: {}
""")

    drafts = []

    async def draft(topic):
        drafts.append(topic)
        return f"about {topic}"

    def critic(state):
        return {"score": state.get("score", 0) + 1}

    def publish(state):
        return {"published": state["text"]}

    graph = ks.load(flow, functions={"draft": draft, "critic": critic, "publish": publish})
    result = await done(world, graph, subject="x")
    assert result == {"subject": "x", "text": "about x", "score": 2, "published": "about x"}
    assert drafts == ["x", "x"]


async def test_delay_map_branch_and_barrier_run(world, file):
    flow = file("""
spec: {reducers: {log: append}}
steps:
  each: {kind: map, function: double, over: numbers, concurrency: 2, next: cool}
  cool: {kind: delay, for: 1ms, next: which}
  which: {kind: branch, branches: [{when: "size(state.each) == 3", next: fan}, {next: end}]}
  fan: {function: nothing, next: [left, right], join: both}
  left: {function: note, next: both}
  right: {kind: agent, agent: noter, next: both}
  both: {kind: barrier, next: end}
  end: {function: nothing}
""")

    async def double(number):
        return number * 2

    class Noter:
        async def __call__(self, state):
            return {"log": "agent"}

    functions = {"double": double, "nothing": nothing, "note": lambda state: {"log": "function"}}
    graph = ks.load(flow, functions=functions, agents={"noter": Noter()})
    result = await done(world, graph, numbers=[1, 2, 3])
    assert result["each"] == [2, 4, 6]
    assert sorted(result["log"]) == ["agent", "function"]


@pytest.mark.parametrize("wait, expected", [("any", 1), ("2", 2)])
async def test_a_barrier_waits_for_as_many_as_it_says(world, file, wait, expected):
    flow = file(f"""
steps:
  fan: {{function: nothing, next: [a, b, c], join: both}}
  a: {{function: quick, into: a, with: {{}}, next: both}}
  b: {{function: quick, into: b, with: {{}}, next: both}}
  c: {{function: never, into: c, with: {{}}, next: both}}
  both: {{kind: barrier, wait: {wait}}}
""")

    async def quick():
        return 1

    async def never():
        await asyncio.Event().wait()

    graph = ks.load(flow, functions={"nothing": nothing, "quick": quick, "never": never})
    result = await done(world, graph)
    assert "c" not in result
    assert len({"a", "b"} & set(result)) >= expected


APPROVAL = """
steps:
  first: {function: paid, next: ask}
  ask:
    kind: approval
    timeout: TIMEOUT
    on_timeout: WHAT
    branches: [{when: state.ask, next: yes_}, {next: no_}]
  yes_: {function: paid}
  no_: {function: nothing}
"""


async def test_approval_survives_a_crash_and_repeats_no_payment(world, file):
    bills = []

    def paid(state):
        bills.append(1)
        return {"paid": state.get("paid", 0) + 1}

    flow = file(APPROVAL.replace("TIMEOUT", "1h").replace("WHAT", "fail"))
    graph = ks.load(flow, functions={"paid": paid, "nothing": nothing})
    engine = await world.started()
    await until_status(await engine.start(graph, run_id="r"), "waiting")
    engine = await world.crash_and_recover(engine)
    run = await engine.get("r")
    await run.signal("ask", True)
    assert await run.result(60) == {"paid": 2, "ask": True}
    assert len(bills) == 2
    await engine.close()


@pytest.mark.parametrize("what, answer", [("deny", False), ("approve", True)])
async def test_on_timeout_answers_an_approval_that_nobody_gives(world, file, what, answer):
    flow = file(APPROVAL.replace("TIMEOUT", "10ms").replace("WHAT", what))
    graph = ks.load(flow, functions={"paid": lambda state: {"paid": 1}, "nothing": nothing})
    assert (await done(world, graph))["ask"] is answer


async def test_approval_that_nobody_gives_fails_the_run_by_default(world, file):
    flow = file(APPROVAL.replace("TIMEOUT", "10ms").replace("    on_timeout: WHAT\n", ""))
    graph = ks.load(flow, functions={"paid": lambda state: {"paid": 1}, "nothing": nothing})
    with pytest.raises(ks.RunFailed, match="ask"):
        await done(world, graph)


async def test_a_condition_that_cannot_be_decided_fails_the_run_at_its_line(world, file):
    flow = file(
        "steps:\n  a: {function: nothing, branches: [{when: state.scor > 1, next: b}]}\n  b: {function: nothing}\n"
    )
    graph = ks.load(flow, functions={"nothing": nothing})
    with pytest.raises(ks.RunFailed) as caught:
        await done(world, graph)
    assert "flow.yaml:4: steps.a.branches[0].when: the condition `state.scor > 1` cannot be decided" in str(
        caught.value
    )


async def test_a_loop_ends_at_its_limit(world, file):
    flow = file(
        "policies: {resilience: {max_iterations: 3}}\nsteps:\n  a: {next: b}\n"
        "  b: {branches: [{when: has(state.end), next: c}, {next: a}]}\n  c: {}\n"
    )
    graph = ks.load(flow, functions=dict.fromkeys("abc", nothing))
    with pytest.raises(ks.RunFailed, match="3"):
        await done(world, graph)


async def test_missing_key_is_named(world, file):
    flow = file("steps:\n  a: {with: {topic: subject}, exit: true}\n")
    graph = ks.load(flow, functions={"a": lambda topic: {}})
    with pytest.raises(ks.RunFailed, match="the state has no key 'subject', which with: gives to 'topic'"):
        await done(world, graph, other=1)


# -- children and other files ------------------------------------------------------------------------------------------


async def test_a_subworkflow_is_a_child_run(world, file):
    child = file("steps:\n  measure: {with: {text: text}, into: length, exit: true}\n", "child.yaml")
    flow = file(
        "steps:\n  sub: {kind: subworkflow, workflow: child, takes: [text], into: child, next: other}\n"
        "  other: {kind: subworkflow, workflow: plain, into: count}\n"
    )

    def measure(text):
        return len(text)

    @ks.workflow
    async def plain(text):
        return text.upper()

    graph = ks.load(flow, functions={"measure": measure}, workflows=[child, plain])
    result = await done(world, graph, text="four")
    assert result == {"text": "four", "child": {"text": "four", "length": 4}, "count": "FOUR"}


PIECES = """
import keepstep as ks

def first(state):
    return {"a": 1}

def _hidden(state):
    return {}

class Mind:
    def __call__(self, state):
        return {"b": 2}

mind = Mind()

@ks.workflow
async def small(a):
    return a + 1
"""


async def test_a_module_gives_functions_agents_and_workflows(world, file):
    module = types.ModuleType("pieces")
    exec(PIECES, module.__dict__)
    flow = file(
        "steps:\n  first: {next: mind}\n  mind: {kind: agent, next: small}\n  small: {kind: subworkflow, into: c}\n"
    )
    assert await done(world, ks.load(flow, modules=[module])) == {"a": 1, "b": 2, "c": 2}
    assert Names(modules=(module,)).all_functions().keys() == {"first"}
    hidden = file("steps:\n  x: {function: _hidden, exit: true}\n", "hidden.yaml")
    with pytest.raises(InvalidGraph, match="it must be a name"):
        ks.load(hidden, modules=[module])


# -- dags --------------------------------------------------------------------------------------------------------------


async def test_a_dag_gives_results_by_name_and_skips_by_condition(world, file):
    flow = file("""
steps:
  fetch-it: {function: fetch}
  lint: {needs: [fetch-it], with: {source: fetch-it}}
  ship: {needs: [fetch-it, lint], when: inputs.lint == 0, with: {source: fetch-it}}
  moan: {needs: [lint], when: inputs.lint > 0}
  end: {kind: barrier, needs: [ship, moan]}
""")

    async def fetch(url):
        return f"source of {url}"

    def lint(source):
        return 0

    async def ship(source, lint):
        return f"shipped {source}"

    async def moan(lint):
        raise AssertionError("never")

    dag = ks.load(flow, functions={"fetch": fetch, "lint": lint, "ship": ship, "moan": moan})
    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r", url="x")
        assert await run.result(60) == {"end": None}
        assert "ship" in str(await steps_of(run))


async def test_step_of_a_dag_in_a_file_runs_for_each_element(world, file):
    flow = file("""
spec: {form: dag}
steps:
  pages: {}
  read: {needs: [pages], with: {page: pages}, map: page, concurrency: 2}
""")
    dag = ks.load(flow, functions={"pages": lambda count: list(range(count)), "read": lambda page: page * 2})
    async with world.engine() as engine:
        assert await (await engine.start(dag, count=4)).result(60) == {"read": [0, 2, 4, 6]}


async def test_map_of_a_step_belongs_to_a_dag(file):
    with pytest.raises(InvalidGraph, match="'map' belongs to a dag"):
        ks.load(file("steps:\n  a: {map: x, exit: true}\n"), functions={"a": lambda x: x})
    with pytest.raises(InvalidGraph, match="'concurrency' of a function needs map"):
        ks.load(file("steps:\n  a: {concurrency: 2, exit: true}\n"), functions={"a": lambda x: x})


async def test_the_parameters_of_a_dag_are_checked_against_its_needs(file):
    flow = file("steps:\n  a: {}\n  b: {needs: [a], with: {no_such: a}}\n  c: {}\n")
    functions = {"a": lambda: 1, "b": lambda a: a, "c": lambda a: a}
    with pytest.raises(InvalidGraph) as caught:
        ks.load(flow, functions=functions)
    assert {(one.line, one.where) for one in caught.value.problems} == {(5, "steps.b"), (6, "steps.c")}


# -- the whole ---------------------------------------------------------------------------------------------------------


async def test_file_sets_the_options_of_its_runs(world, file):
    flow = file("""
keepstep: 1
metadata: {name: policed, version: "7", description: What it is for., tags: {team: docs, kind: test}}
spec: {timeout: 1h, resources: {queue: slow, priority: 4}}
steps: {only: {function: nothing, exit: true}}
policies: {resilience: {durability: every=3, on_change: compatible}}
""")
    graph = ks.load(flow, functions={"nothing": nothing})
    assert (graph.version, graph.on_change, str(graph.durability)) == ("7", "compatible", "every=3")
    assert graph.__doc__ == "What it is for."
    async with world.engine() as engine:
        run = await (await engine.start(graph, run_id="r", tags={"team": "mine"})).run()
        assert (run.queue, run.priority, run.tags) == ("slow", 4, {"team": "mine", "kind": "test"})
        assert 3500 < (run.deadline_at - run.created_at).total_seconds() <= 3600
        other = await (await engine.start(graph, run_id="s", queue="fast", priority=1, deadline=60)).run()
        assert (other.queue, other.priority) == ("fast", 1)
        assert (other.deadline_at - other.created_at).total_seconds() <= 60


async def test_tags_of_a_file_may_be_a_list(world, file):
    flow = file(
        "keepstep: 1\nmetadata: {name: listed, tags: [urgent, docs]}\nsteps: {only: {function: nothing, exit: true}}\n"
    )
    graph = ks.load(flow, functions={"nothing": nothing})
    async with world.engine() as engine:
        run = await (await engine.start(graph, tags={"docs": "mine"})).run()
        assert run.tags == {"urgent": "true", "docs": "mine"}
        assert [one.id for one in (await engine.list(tags={"urgent": "true"})).runs] == [run.id]


@pytest.mark.parametrize(
    "tags, problem",
    [
        ("[urgent, urgent]", "urgent"),
        ("[1]", "metadata.tags"),
        ("urgent", "a mapping of names to texts, or a list of names"),
    ],
)
def test_wrong_tags_of_a_file_are_reported_with_their_place(file, tags, problem):
    flow = file(
        f"keepstep: 1\nmetadata: {{name: listed, tags: {tags}}}\nsteps: {{only: {{function: nothing, exit: true}}}}\n"
    )
    with pytest.raises(ks.DefinitionError, match=problem):
        ks.load(flow, functions={"nothing": nothing})


async def test_queue_of_a_file_has_its_limits(world, file):
    """Also if the file is loaded after the store was opened."""
    most, now = 0, 0

    async def busy(state):
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return {}

    flow = file("""
keepstep: 1
metadata: {name: limited}
spec: {resources: {queue: {name: narrow, concurrency: 1, per_key: 1, rate: {count: 1000, per: 1m, burst: 50}}}}
steps: {only: {function: busy, exit: true}}
""")
    try:
        async with world.engine() as engine:
            graph = ks.load(flow, functions={"busy": busy})
            runs = [await engine.start(graph, key="k") for _ in range(3)]
            for run in runs:
                await run.result(60)
            limits = (await engine.queues.get("narrow")).limits
    finally:
        DECLARED.pop("narrow", None)
    assert most == 1
    assert (limits.concurrency, limits.per_key, limits.rate) == (1, 1, ks.Rate(1000, per=60.0, burst=50))


# -- bodies in other processes -----------------------------------------------------------------------------------------


@pytest.mark.one_store
async def test_functions_of_a_file_run_where_it_says(world, file):
    """An adapted function crosses by itself: the worker takes its arguments from the state, and puts its result in."""
    flow = file("""
spec: {executor: process}
steps:
  twice: {function: double, with: {number: n}, into: n, next: each}
  each: {kind: map, function: double, over: all, executor: process, next: where}
  where: {function: whereabouts, into: pid, executor: process, next: here}
  here: {function: pid_here, into: here, executor: thread}
""")
    graph = ks.load(flow, modules=[far_functions])
    result = await done(world, graph, n=4, all=[1, 2])
    pids = result.pop("pid"), result.pop("here")
    assert result == {"n": 8, "all": [1, 2], "each": [2, 4]}
    assert pids[1] == os.getpid() != pids[0]


@pytest.mark.one_store
@pytest.mark.live_only
async def test_an_executor_of_a_file_that_cannot_take_the_function_is_refused(world, file):
    with pytest.raises(InvalidGraph) as caught:
        ks.load(file("steps:\n  only: {exit: true, executor: inline}"), functions={"only": nothing})
    [problem] = caught.value.problems
    assert (problem.line, problem.column) == (4, 32)
    assert "runs in executor='thread', not 'inline'" in problem.what
    with pytest.raises(InvalidGraph, match=r"flow\.yaml:4:32: error: steps\.only\.executor: it must be a name"):
        ks.load(file("steps:\n  only: {exit: true, executor: 3}"), functions={"only": nothing})
    unknown = ks.load(file("steps: {only: {exit: true, with: {a: b}, executor: proces}}"), functions={"only": nothing})
    with pytest.raises(ks.RunFailed, match="did you mean 'process'"):
        await done(world, unknown, b=1)


def test_checking_a_file_declares_no_queue(file):
    flow = file("spec: {resources: {queue: {name: checked}}}\nsteps: {only: {function: nothing, exit: true}}\n")
    assert not check(flow, Names(functions={"nothing": nothing})).problems
    assert "checked" not in DECLARED


@pytest.mark.plaintext
async def test_redact_policy_of_a_file_refuses_secrets(world, file):
    flow = file("steps: {only: {function: leak, exit: true}}\npolicies: {security: {redact: ['hush-[0-9]+']}}\n")
    graph = ks.load(flow, functions={"leak": lambda state: {"x": "hush-123"}})
    async with world.engine(on_suspect="refuse") as engine:
        with pytest.raises(ks.NotSerializable, match="looks like a secret"):
            await engine.start(graph, told="hush-1")
        run = await engine.start(graph, run_id="r", told="nothing")
        with pytest.raises(ks.RunFailed, match="looks like a secret"):
            await run.result(60)


async def test_retries_and_timeouts_come_from_the_step_or_from_the_file(file):
    flow = file("""
spec: {retry: {attempts: 4, base: 2ms, backoff: linear}}
policies: {resilience: {timeout: 7s}}
steps:
  a: {next: b}
  b: {retry: {attempts: 2, cap: 1m}, timeout: 1m, next: c}
  c: {at_most_once: true, next: d}
  d: {next: e}
  e: {retry: {by_class: true, jitter: 0.5}, next: f}
  f: {retry: {attempts: 2}}
""")
    step = ks.step(retry=ks.Retry(attempts=9), timeout=3)(lambda state: {})
    served = Step(nothing, ready_every=9)
    graph = ks.load(flow, functions={**dict.fromkeys("abce", nothing), "d": step, "f": served})
    steps = {name: node.step for name, node in graph.nodes.items()}
    assert steps["a"].retry == ks.Retry(attempts=4, base_seconds=0.002, backoff="linear")
    assert steps["a"].timeout == ks.Timeout(7.0)
    assert (steps["b"].retry, steps["b"].timeout) == (ks.Retry(attempts=2, cap_seconds=60), ks.Timeout(60.0))
    assert (steps["c"].at_most_once, steps["c"].retry.attempts) == (True, 1)
    assert (steps["d"].retry.attempts, steps["d"].timeout) == (9, ks.Timeout(3.0))
    assert (steps["f"].retry.attempts, steps["f"].timeout, steps["f"].ready_every) == (2, ks.Timeout(7.0), 9)
    assert steps["e"].retry == ks.Retry.by_class(jitter=0.5)


def test_a_changed_condition_or_way_is_a_changed_definition(file):
    text = "steps:\n  a: {branches: [{when: state.x > 1, next: b}, {next: c}]}\n  b: {}\n  c: {}\n"
    functions = dict.fromkeys("abc", nothing)
    first = ks.load(file(text), functions=functions).fingerprint
    assert ks.load(file(text), functions=functions).fingerprint == first
    assert ks.load(file(text.replace("> 1", "> 2")), functions=functions).fingerprint != first
    assert ks.load(file(text.replace("{next: c}", "{next: b}")), functions=functions).fingerprint != first
    assert ks.load(file(text.replace("b: {}", "b: {function: c}")), functions=functions).fingerprint != first
    assert ks.load(file(text.replace("b: {}", "b: {into: x}")), functions=functions).fingerprint != first
    assert ks.load(file(text.replace("b: {}", "b: {description: x}")), functions=functions).fingerprint == first


def test_changed_request_changes_the_definition_and_hides_headers(file):
    text = "steps:\n  a: {kind: http, url: 'https://x/y?q=1', headers: {X-Key: plain-key}, exit: true}\n"
    first = ks.load(file(text))
    assert "function" not in first.definition()
    assert "https://x/y" in first.definition()
    assert not {"plain-key", "q=1"} & set(first.definition().replace("?", " ").split())
    for old, new in (("plain-key", "other"), ("q=1", "q=2"), ("https", "http")):
        assert ks.load(file(text.replace(old, new, 1))).fingerprint != first.fingerprint


# -- loading -----------------------------------------------------------------------------------------------------------


def test_loading_again_gives_the_callers_own_workflow(file):
    path = file("steps: {only: {function: one, exit: true}}")
    first = ks.load(path, functions={"one": nothing})
    second = ks.load(path, functions={"one": lambda state: {"x": 1}})
    assert first is not second
    assert first.nodes["only"].step.fn is nothing
    assert KNOWN["flow"] is second


def test_two_files_cannot_define_the_same_name(file):
    path = file("keepstep: 1\nmetadata: {name: same}\nsteps: {only: {function: one, exit: true}}", "a.yaml")
    ks.load(path, functions={"one": nothing})
    other = file(path.read_text(encoding="utf-8"), "b.yaml")
    with pytest.raises(
        InvalidGraph, match=r"b\.yaml:2:18: error: metadata\.name: another workflow is named 'same', at "
    ):
        ks.load(other, functions={"one": nothing})


def test_a_file_that_cannot_be_built_leaves_nothing_behind(file):
    def generator(state):
        yield {}

    with pytest.raises(InvalidGraph, match=r"flow\.yaml:3:9: error: steps\.only: step 'only' is a generator"):
        ks.load(file("steps: {only: {function: one, exit: true}}"), functions={"one": generator})
    assert "flow" not in KNOWN


def test_every_missing_name_is_reported_at_once(file):
    flow = file("steps:\n  a: {function: write, next: b}\n  b: {kind: agent, next: c}\n  c: {kind: subworkflow}\n")
    with pytest.raises(InvalidGraph) as caught:
        ks.load(flow, functions={"wrote": nothing})
    assert len(caught.value.problems) == 3
    assert "did you mean 'wrote'?" in str(caught.value)
    assert all(one.file == str(flow) and one.line for one in caught.value.problems)


@pytest.mark.parametrize("given", [{"modules": ["os"]}, {"functions": {"x": 1}}, {"agents": {"x": "y"}}])
def test_what_the_caller_gives_is_checked(file, given):
    with pytest.raises(DefinitionError, match=r"modules= takes|= takes callables by name"):
        ks.load(file("steps: {only: {function: one, exit: true}}"), **given)


def test_a_file_reaches_nothing_that_was_not_given(file):
    """No name in a file is imported, however it is written."""
    before = set(sys.modules)
    for name in ("os.system", "builtins.eval", "this", "antigravity", "subprocess", "__import__", "print", "exec"):
        with pytest.raises(InvalidGraph, match=r"there is no function|it must be a name"):
            ks.load(file(f"steps: {{only: {{function: {name}, exit: true}}}}"), functions={})
    assert not {"this", "antigravity"} & (set(sys.modules) - before)


def test_a_json_file_without_conditions_needs_no_other_package(file, monkeypatch):
    for name in ("ruamel", "ruamel.yaml", "cel_expr_python"):
        monkeypatch.setitem(sys.modules, name, None)
    path = file(
        '{"keepstep": 1, "metadata": {"name": "plain"}, "steps": {"only": {"function": "one", "exit": true}}}',
        "plain.json",
    )
    assert ks.load(path, functions={"one": nothing}).name == "plain"


def test_the_file_with_every_field_is_built():
    async def begin(topic): ...
    async def take_back(text, topic): ...
    async def thinker(text): ...
    async def double(number): ...

    @ks.workflow
    async def small(text): ...

    functions = {"begin": begin, "take_back": take_back, "double": double, "nothing": nothing, "note": nothing}
    graph = ks.load(FILES / "whole.yaml", functions=functions, agents={"thinker": thinker}, workflows=[small])
    graph.close()
    queue = DECLARED.pop("whole")
    assert (graph.starting["queue"], queue.limits.rate) == ("whole", ks.Rate(5, per=60.0, burst=2))
    plain = ["start", "mind", "expert", "durably", "ask-them", "choose", "fan", "left", "right", "both", "done", "stop"]
    assert {name: node.kind for name, node in graph.nodes.items() if "fork" not in name} == {
        **dict.fromkeys(plain, "step"),
        "cool": "delay", "each": "map", "child": "child", "approve": "wait",
    }  # fmt: skip
    assert graph.interrupt_before == {"done"}
    assert graph.budget == ks.Budget(seconds=86_400, steps=100, cost=2.5, tokens=5000)
    dag = ks.load(
        FILES / "dag.yaml",
        functions={"fetch": lambda: "", "lint": lambda fetch: 0, "ship": lambda source: ""},
        agents={"thinker": lambda fetch: ""},
    )
    assert dag.concurrency == 3
    assert dag.steps["lint-it"].each == ("fetch", 2, None)
    assert dag.problems() == []


async def test_run_of_a_file_ends_the_same_from_every_prefix(world, file):
    flow = file("""
steps:
  a: {branches: [{when: state.n < 3, next: a}, {next: fan}]}
  fan: {next: [l, r], join: j}
  l: {next: j}
  r: {next: j}
  j: {kind: barrier, next: z}
  z: {}
""")
    functions = {
        "a": lambda state: {"n": state.get("n", 0) + 1},
        "fan": nothing,
        "l": lambda state: {"l": 1},
        "r": lambda state: {"r": 1},
        "z": nothing,
    }
    graph = ks.load(flow, functions=functions)
    async with world.engine() as engine:
        run = await engine.start(graph, run_id="r")
        expected = await run.result(60)
        assert expected == {"n": 3, "l": 1, "r": 1}

        async def same(handle, length):
            assert await handle.result(60) == expected, length

        await replay_from_every_prefix(run, same)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_advice_for_a_changed_file_names_no_function(world, file):
    """What a migration does is written in Python; a file says under policies what may change."""
    given = {"functions": {"a": nothing, "b": nothing, "c": nothing}}
    flow = ks.load(file("steps: {a: {next: ask}, ask: {kind: approval, next: b}, b: {}}"), **given)
    async with world.engine() as engine:
        await until_status(await engine.start(flow, run_id="r"), "waiting")

    async def refused(text):
        async with world.engine(workflows=[ks.load(file(text), **given)]) as engine:
            run = await engine.get("r")
            await run.retry() if (await run.run()).status is Status.SET_ASIDE else await run.signal("ask", True)
            with pytest.raises(ks.RunSetAside) as caught:
                await run.result(60)
        return str(caught.value)

    told = await refused("steps: {a: {next: ask}, ask: {kind: approval, next: c}, c: {}}")
    assert "or write policies.resilience.on_change: compatible" in told
    assert "migrate=" not in told
    told = await refused(
        "policies: {resilience: {on_change: compatible}}\nsteps: {ask: {kind: approval, next: c}, c: {}}"
    )
    assert "no longer has 'a', which the run has recorded; restore it, or rewind the run to before it" in told


async def test_yielded_items_are_collected_under_a_key(world, file):
    flow = file("spec: {form: graph}\nsteps:\n  tell: {with: {count: n}, into: told}\n")

    @ks.step(collect=sum)
    async def tell(count):
        for number in range(count):
            yield number

    graph = ks.load(flow, functions={"tell": tell})
    assert await done(world, graph, n=4) == {"n": 4, "told": 6}


async def test_map_of_a_file_tolerates_failures(world, file):
    flow = file("""
steps:
  read: {kind: map, over: numbers, into: found, wait: {tolerate: {count: 1, minimum: 2}}, next: count}
  count: {with: {found: found}, into: counted}
""")

    async def read(number):
        if number < 0:
            raise ValueError("negative")
        return number

    def count(found):
        return len(found)

    graph = ks.load(flow, functions={"read": read, "count": count})
    async with world.engine() as engine:
        result = await (await engine.start(graph, numbers=[1, -2, 3])).result(30)
        assert result["counted"] == 3
        with pytest.raises(ks.ExecutionError):
            await (await engine.start(graph, numbers=[1, -2, -3, 4])).result(30)


async def test_dag_step_of_a_file_tolerates_failed_needs(world, file):
    flow = file("""
steps:
  a: {function: good}
  b: {function: bad}
  end: {function: total, needs: [a, b], wait: {tolerate: {share: 0.5}}}
""")

    def good():
        return 1

    def bad():
        raise ValueError("no")

    def total(a=None, b=None):
        return [a, b]

    dag = ks.load(flow, functions={"good": good, "bad": bad, "total": total})
    assert await done(world, dag) == {"end": [1, None]}


async def test_silent_approval_of_a_file_is_over(world, file):
    flow = file("""
steps:
  ask: {kind: approval, heartbeat: 50ms, on_timeout: deny, next: end}
  end: {}
""")
    graph = ks.load(flow, functions={"end": nothing})
    assert (await done(world, graph))["ask"] is False


@pytest.mark.parametrize(
    "written, handler, seconds",
    [("restart", "restart", 300.0), ("{handler: ask ops, timeout: 2m}", "ask ops", 120.0)],
)
def test_recovery_of_a_file_is_that_of_its_workflow(file, written, handler, seconds):
    for steps in ("a: {function: nothing, exit: true}", "a: {function: nothing}, b: {function: nothing, needs: [a]}"):
        flow = file(f"""
keepstep: 1
metadata: {{name: recovering}}
steps: {{{steps}}}
policies: {{resilience: {{recovery: {written}}}}}
""")
        made = ks.load(flow, functions={"nothing": nothing})
        assert (made.recovery.handler, made.recovery.timeout_seconds) == (handler, seconds)


async def test_step_of_a_file_is_skipped_after_a_crash(world, file):
    begun = asyncio.Event()

    async def fetch(state):
        begun.set()
        await asyncio.Event().wait()

    flow = file("""
keepstep: 1
metadata: {name: fetching}
steps: {fetch: {function: fetch, next: use}, use: {function: nothing, exit: true}}
policies: {resilience: {recovery: {handler: skip step, value: {text: none}}}}
""")
    graph = ks.load(flow, functions={"fetch": fetch, "nothing": nothing})
    engine = await world.started()
    await engine.start(graph, run_id="r")
    await begun.wait()
    engine = await world.crash_and_recover(engine)
    assert (await (await engine.get("r")).result(30))["text"] == "none"
    await engine.close()


async def test_a_file_declares_services_and_its_steps_call_them(world, file):
    flow = file("""
spec:
  services:
    api: {concurrency: 1, rate: {count: 100, per: 1s, burst: 100}, breaker: {failures: 2, open: 1s}, when_open: fail}
steps:
  first: {function: call, service: api, cost: 2, next: second}
  second: {function: nothing}
""")
    now, most = [], []

    async def call(state):
        now.append(1)
        most.append(len(now))
        await asyncio.sleep(0.01)
        now.pop()
        return {}

    graph = ks.load(flow, functions={"call": call, "nothing": nothing})
    async with world.engine() as engine:
        handles = [await engine.start(graph) for _ in range(4)]
        for handle in handles:
            await handle.result(60)
        limits = (await engine.services.get("api")).limits
    assert (len(most), max(most)) == (4, 1)
    assert (limits.breaker, limits.when_open) == (ks.Breaker(failures=2, open_seconds=1.0), "fail")
    assert limits.rate == ks.Rate(100, per=1.0, burst=100)
