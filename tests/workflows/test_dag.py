"""How a dag is written: what is known of it, and what is said about one that cannot work, with its file and line."""

import inspect
import re

import pytest

import keepstep as ks
from keepstep.errors import DuplicateName, InvalidGraph
from keepstep.workflows import definition
from keepstep.workflows.plan import DagStep
from keepstep.workflows.shape import Arrow, Node
from tests.nightly import cases


@pytest.fixture(autouse=True)
def _known_workflows_are_forgotten():
    before = dict(definition.KNOWN)
    yield
    definition.KNOWN.clear()
    definition.KNOWN.update(before)


def line():
    return inspect.currentframe().f_back.f_lineno


def built():
    dag = ks.Dag("build", version="7")

    @dag.step(needs=["fetch", "lint"], wait=ks.Any(), when=ks.policies.when.exists("fetch"))
    async def compile(fetch, lint=None):  # noqa: A001 - what a build calls it
        return fetch

    @dag.step(retry=ks.Retry(attempts=5, on=OSError), timeout=30)
    async def fetch(url: str):
        return url

    @dag.step(needs={"source": fetch}, at_most_once=True)
    def lint(source, strict: bool = False):
        return source

    return dag


def test_the_order_is_topological_and_else_as_written():
    assert [vertex.name for vertex in built().plan.order] == ["fetch", "lint", "compile"]
    dag = ks.Dag("wide")
    for name, needs in {"d": [], "c": ["a"], "b": [], "a": [], "e": ["d", "b"]}.items():
        dag.add(lambda **needs: None, name, needs=needs)
    assert [vertex.name for vertex in dag.plan.order] == ["d", "b", "a", "c", "e"]


def test_its_inputs_are_the_parameters_that_no_need_gives():
    assert str(built().signature) == "(*, url: str, strict: bool = False)"
    assert built().hints() == {"url": str, "strict": bool}


def test_an_input_that_one_step_must_have_must_be_given():
    dag = ks.Dag("must")
    dag.add(lambda size=1: size, "one")
    dag.add(lambda size: size, "two")
    assert str(dag.signature) == "(*, size)"


def test_input_that_only_a_predicate_reads_is_part_of_the_signature():
    """A predicate with a name says what it looks at; for a function the dag does."""
    dag, when = ks.Dag("looked-at", inputs=["draft"]), ks.when
    dag.add(lambda: 1, "one", when=when.any_(when.equals("docs", True), when.not_(when.exists("quick"))))
    dag.add(lambda one: 2, "two", needs=["one"], when=when.all_(when.equals("one", 1), when.always))
    dag.add(lambda two: 3, "three", needs=["two"], when=lambda given: given["draft"])
    assert str(dag.signature) == "(*, draft, docs=None, quick=None)"
    dag.bind(draft=True, quick=1)
    with pytest.raises(
        ks.DefinitionError, match=r"argument 'docks'.*\(what only a when= function looks at is named in"
    ):
        dag.bind(draft=True, docks=1)
    with pytest.raises(ks.DefinitionError, match=r"missing a required .*'draft'"):
        dag.bind()
    dag.add(lambda: 4, "four", when=when.exists("three"))
    with pytest.raises(InvalidGraph, match="its when= looks at 'three', which is a step that it does not need"):
        dag.bind(draft=True)


@pytest.mark.parametrize("inputs", ["docs", [1], ["run_id"], ["a b"]])
def test_inputs_that_are_no_names_are_refused(inputs):
    with pytest.raises(ks.DefinitionError, match=r"test_dag.py:\d+: dag 'inputs': inputs= takes a list of names"):
        ks.Dag("inputs", inputs=inputs)


@pytest.mark.parametrize(
    "args, kwargs, said",
    [
        ((), {}, r"dag 'build' cannot be started with this input: missing a required .*'url'; it takes \(\*, url: str"),
        ((), {"url": "u", "flag": 1}, "unexpected keyword argument 'flag'"),
        (("u",), {}, r"dag 'build' takes its inputs by name, as \(\*, url: str"),
    ],
)
def test_unknown_or_missing_inputs_are_refused(args, kwargs, said):
    with pytest.raises(ks.DefinitionError, match=said):
        built().bind(*args, **kwargs)


def test_the_definition_is_text_that_a_person_can_compare():
    assert built().definition() == (
        "dag build version=7\n"
        "compile needs=fetch, lint when=exists('fetch') wait=Any()\n"
        "fetch retry=Retry(attempts=5, on=(OSError)) timeout=Timeout(attempt_seconds=30.0)\n"
        "lint needs=source:fetch at_most_once=True\n"
    )


def test_the_fingerprint_is_that_of_the_definition():
    dag, same = built(), built()
    assert dag.fingerprint == same.fingerprint
    assert re.fullmatch(r"dag:build:7:[0-9a-f]{16}", dag.fingerprint)
    before = dag.fingerprint
    dag.add(lambda: None, "more")
    assert dag.fingerprint != before


def test_shape_holds_nodes_and_arrows():
    shape = built().shape()
    assert (shape.name, shape.form, shape.exits) == ("build", "dag", ("compile",))
    assert shape.nodes == (Node("compile", "step", "when exists('fetch'), wait Any()"), Node("fetch"), Node("lint"))
    assert shape.arrows == (
        Arrow("fetch", "compile", kind="needs"),
        Arrow("lint", "compile", kind="needs"),
        Arrow("fetch", "lint", kind="needs"),
    )
    parent = ks.Dag("parent")
    parent.add(built(), "inside")
    assert parent.shape().nodes == (Node("inside", "child"),)


def test_step_of_a_dag_can_be_called_outside():
    dag = ks.Dag("outside")

    @dag.step
    def double(number):
        return 2 * number

    assert double(4).result() == 8
    assert dag.add(double, "again") is not double
    assert [*dag.steps] == ["double", "again"]


def test_call_of_a_dag_is_refused():
    with pytest.raises(ks.DefinitionError, match=r"dag 'build' is not called .* `await engine.start\(build, \.\.\.\)`"):
        built()(url="x")


def test_call_of_a_dag_in_a_workflow_names_start():
    dag = built()

    @ks.workflow
    async def around():
        return await dag(url="x")

    with pytest.raises(ks.RunFailed, match=r"`await ks.start\(build, \.\.\.\)` in the workflow"):
        ks.run(around, url="memory:")


# -- what cannot work --------------------------------------------------------------------------------------------------


def test_a_cycle_is_printed():
    dag = ks.Dag("round")
    dag.add(lambda: None, "start")
    dag.add(lambda **needs: None, "a", needs=["start", "c"])
    at = line() - 1
    dag.add(lambda **needs: None, "b", needs=["a"])
    dag.add(lambda **needs: None, "c", needs=["b"])
    dag.add(lambda **needs: None, "behind", needs=["c"])
    with pytest.raises(InvalidGraph) as refused:
        _ = dag.plan
    assert "need each other in a circle: a → b → c → a" in str(refused.value)
    assert f"{__file__}:{at}: error: step 'a': " in str(refused.value)


def test_step_that_needs_itself_is_refused():
    dag = ks.Dag("itself")
    dag.add(lambda **needs: None, "a", needs=["a"])
    with pytest.raises(InvalidGraph, match="it needs itself: a → a"):
        dag.bind()


def test_all_problems_are_reported_at_once_with_their_lines():
    dag = ks.Dag("wrong")
    first = line()

    @dag.step(needs=["fetsh"])
    async def compile(fetch):  # noqa: A001
        pass

    @dag.step
    async def fetch(run_id):
        pass

    @dag.step(needs=["fetch"], wait=ks.Quorum(2))
    async def both(fetch, /):
        pass

    @dag.step(wait=ks.Any())
    async def lonely():
        pass

    @dag.step(needs={"source": "fetch"})
    async def renamed(sourse):
        pass

    said = [
        (2, "step 'compile': it needs 'fetsh', and there is no such step; did you mean 'fetch'?"),
        (
            2,
            "step 'compile': its parameter 'fetch' is the name of a step that it does not need; add 'fetch' to its n",
        ),
        (6, "step 'fetch': its parameter 'run_id' has the name of an option of start"),
        (10, "step 'both': it waits for 2 of its needs, and has 1"),
        (10, "step 'both': its parameter 'fetch' cannot be given by name"),
        (14, "step 'lonely': it waits for one of its needs, and has none"),
        (18, "step 'renamed': it should take the result of 'fetch' as 'source', which is not one of its parameters"),
    ]
    with pytest.raises(InvalidGraph, match="dag 'wrong' cannot run; 7 errors:") as refused:
        dag.bind()
    for after, what in said:
        assert f"{__file__}:{first + after}: error: {what}" in str(refused.value)


@pytest.mark.parametrize(
    "add, said",
    [
        (lambda dag: dag.add(len, needs="one"), r"needs= takes a list of names, not 'one': write needs=\['one'\]"),
        (lambda dag: dag.add(len, needs=[1]), "needs= takes names of steps, not 1"),
        (lambda dag: dag.add(len, when=True), "when= takes a function"),
        (lambda dag: dag.add(len, when=_later), "_later is async: let a step find it out"),
        (lambda dag: dag.add(len, wait=ks.Any), r"wait= takes ks.All\(\), ks.Any\(\), ks.Quorum\(n\)"),
        (lambda dag: dag.add(7), "a step must be a function, not int"),
        (lambda dag: dag.add(_plain, retries=3), "'_plain' cannot be a step so: .*'retries'"),
        (lambda dag: dag.add(ks.step(_plain), retry=ks.Retry()), "has its options already; give retry to its ks.step"),
        (lambda dag: dag.add(built(), timeout=3), r"a workflow is added without the options of a step \(timeout\)"),
        (lambda dag: dag.add(_plain, "1st"), "step name '1st' is refused"),
        (lambda dag: dag.add(_plain, in_doubt="fail"), "in_doubt=, which only an at_most_once step needs"),
    ],
)
def test_wrong_option_is_refused_where_it_is_written(add, said):
    dag = ks.Dag("refused")
    with pytest.raises(ks.DefinitionError, match=said) as refused:
        add(dag)
    assert re.match(rf"{re.escape(__file__)}:\d+: dag 'refused': ", str(refused.value))


@pytest.mark.parametrize(
    "when, taken, one",
    [
        (lambda branch: branch == "main", "branch", "branch"),
        (lambda a: a > 0, "a", "a"),
        (lambda size: size > 0, "size", "size"),
        (lambda docs, other: docs, "docs, other", "docs"),
        (lambda: True, "nothing", "name"),
        (ks.when.all_(ks.when.always, ks.when.not_(lambda branch: branch == "main")), "branch", "branch"),
    ],
)
def test_a_condition_that_takes_inputs_by_name_is_refused(when, taken, one):
    """It would be given the mapping, compare it with a value, and never hold."""
    dag = ks.Dag("by-name", inputs=["branch"])
    dag.add(lambda docs: 1, "a")
    dag.add(lambda size: 2, "ship", needs={"size": "a"}, when=when)
    (told,) = dag.problems()
    assert told.what == f"its when= takes {taken}, and is given one thing: all inputs in a mapping"
    assert told.how == f"write when=lambda inputs: inputs[{one!r}] …, or ks.when.equals({one!r}, …)"
    with pytest.raises(InvalidGraph, match="all inputs in a mapping"):
        dag.bind(docs=True, branch="main")


def test_a_parameter_that_is_called_as_its_step_is_no_need():
    dag = ks.Dag("own")
    dag.add(lambda b: 1, "b")
    assert [(one.what, one.how) for one in dag.problems()] == [
        ("its parameter 'b' has the name of the step itself", "rename one of them")
    ]


def test_a_condition_may_call_the_mapping_as_it_likes():
    for when in (lambda inputs: inputs["branch"], lambda given, branch="main": given, lambda *all_: all_):
        dag = ks.Dag("by-mapping", inputs=["branch"])
        dag.add(lambda: 1, "a", when=when)
        assert dag.problems() == []


async def _later(given):
    return True


def _plain():
    return 1


def test_two_steps_of_one_name_are_refused():
    dag = ks.Dag("twice")
    dag.add(_plain)
    at = line() - 1
    with pytest.raises(DuplicateName, match=f"two steps are named '_plain', the other at .*:{at}; give"):
        dag.add(_plain)


def test_step_named_like_the_result_of_a_child_is_refused():
    dag = ks.Dag("results")
    dag.add(built(), "inside")
    dag.add(_plain, "inside.result")
    with pytest.raises(InvalidGraph, match=r"its result is recorded as inside\.result"):
        _ = dag.plan


@pytest.mark.parametrize("concurrency", [0, -1, 1.5, True])
def test_invalid_concurrency_is_refused(concurrency):
    with pytest.raises(ks.DefinitionError, match="needs a concurrency of at least 1"):
        ks.Dag("limit", concurrency=concurrency)


def test_dag_without_steps_is_refused():
    with pytest.raises(InvalidGraph, match=f"{re.escape(__file__)}:{line() + 1}: error: dag 'empty': it has no steps"):
        ks.Dag("empty").bind()


def test_invalid_name_is_refused():
    with pytest.raises(ks.DefinitionError, match=rf"{re.escape(__file__)}:\d+: workflow name '/' is refused"):
        ks.Dag("/")


def test_dags_of_one_name_in_two_files_are_refused(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text("import keepstep as ks\n\ndag = ks.Dag('same')\n")
    first, second = (
        compile((tmp_path / f"{name}.py").read_text(), str(tmp_path / f"{name}.py"), "exec") for name in ("one", "two")
    )
    exec(first, {"__name__": "one"})
    exec(first, {"__name__": "one"})  # as a reload does
    with pytest.raises(DuplicateName, match=r"two workflows are named 'same', same in .*one\.py and same in .*two\.py"):
        exec(second, {"__name__": "two"})


@pytest.mark.parametrize("size", cases([10_000, 100_000], quick=[10_000]))
def test_a_great_many_steps_need_no_recursion(size):
    shared, dag, lines = ks.step(_plain), ks.Dag("many"), size // 500
    for n in range(size):
        needs = {f"s{n - lines}": f"s{n - lines}"} if n >= lines else {}
        dag._steps[f"s{n}"] = DagStep(f"s{n}", shared, None, needs, None, ks.All(), dag.place)
    assert (len(dag.plan.order), len(dag.plan.last)) == (size, lines)
