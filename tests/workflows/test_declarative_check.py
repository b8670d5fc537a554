"""Everything that is wrong with a file, at once and at its line; and a schema that says the same to every tool."""

import json
import os
import re
from pathlib import Path
from textwrap import dedent
from typing import get_args

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.policies import Backoff
from keepstep.workflows.files import check as declarative_check
from keepstep.workflows.files import schema as declarative_schema
from keepstep.workflows.files.build import Builder, Names
from keepstep.workflows.files.check import REMEMBERED, cache_info, examine
from keepstep.workflows.files.load import check, check_all, schema, schema_text
from keepstep.workflows.files.read import read
from keepstep.workflows.files.schema import kinds, misfits

pytestmark = pytest.mark.usefixtures("nothing_known")

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema_rs.validator_for(schema())

NO_TIME = "it must be a time above 0: a number of seconds, or a text like 500ms, 30s, 5m, 2h or 7d"
NO_END = "it ends where more must come"

#: A file that uses every field of the format.
WHOLE = (Path(__file__).parent / "files" / "whole.yaml").read_text(encoding="utf-8")
DAG = (Path(__file__).parent / "files" / "dag.yaml").read_text(encoding="utf-8")


def told(text, *, is_json=False):
    """The problems of a text as lines, without a file's name."""
    found = examine(dedent(text).encode(), is_json=is_json).named("f")
    return [str(one).removeprefix("f:") for one in found]


def graph(steps, more=""):
    return (
        "keepstep: 1\nmetadata: {name: x}\n" + more + "steps:\n" + "".join(f"  {line}\n" for line in steps.split("\n"))
    )


# -- the schema --------------------------------------------------------------------------------------------------------


def test_the_schema_is_a_schema_and_is_shipped():
    jsonschema_rs.meta.validate(schema())
    assert json.loads(schema_text()) == schema()
    assert schema()["$schema"].endswith("2020-12/schema")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'packages = ["src/keepstep"]' in pyproject  # and with it everything inside, schema.json too


def test_every_field_has_a_description():
    def fields(rule, path):
        for name, one in rule.get("properties", {}).items():
            yield f"{path}.{name}", one
            yield from fields(one, f"{path}.{name}")

    places = [("", schema()), *schema()["$defs"].items(), ("branches[]", schema()["$defs"]["branches"]["items"])]
    for path, rule in [pair for place in places for pair in fields(place[1], place[0])]:
        target = schema()["$defs"].get(rule.get("$ref", "").rpartition("/")[2], {})
        assert rule.get("description") or target.get("description") or path.endswith(".kind"), path


def test_the_schema_names_every_backoff():
    assert tuple(schema()["$defs"]["retry"]["properties"]["backoff"]["enum"]) == get_args(Backoff)


@pytest.mark.parametrize("text", [WHOLE, DAG], ids=["graph", "dag"])
def test_a_whole_file_is_valid_for_us_and_for_others(text):
    assert told(text) == []
    value, _ = read(text.encode(), is_json=False)
    assert VALIDATOR.is_valid(value.plain())


def test_the_whole_files_use_every_field_and_kind():
    used = set(re.findall(r"([a-z_]+):", WHOLE + DAG))
    rules = [schema(), *schema()["$defs"].values()]
    for rule in rules:
        for name, one in rule.get("properties", {}).items():
            assert name in used, name
            assert set(one.get("properties", ())) <= used, name
    assert set(re.findall(r"kind: (\w+)", WHOLE + DAG)) | {"function"} == set(kinds())


def parts(value, path=()):
    """Every place in a tree."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inside:
        yield from parts(part, (*path, key))


def changed(tree, path, new):
    if not path:
        return new
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = changed(tree[path[0]], path[1:], new)
    return copy


TREE = read(WHOLE.encode(), is_json=False)[0].plain()
PLACES = [path for path in parts(TREE) if path]
ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.floats(-1, 2), st.just(1e11), st.sampled_from(kinds()),
    st.sampled_from(["", "a", "5m", "-1s", "all", "any", "GET", "x y", "1a", "a.b", "http://x/{a}", "a" * 101]),
    st.lists(st.sampled_from(["a", "b", 1, None]), max_size=3),
    st.dictionaries(st.sampled_from(["kind", "next", "secret", "x"]), st.sampled_from(["a", "http", []]), max_size=2),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD), min_size=1, max_size=3))
def test_the_walk_and_the_schema_agree(changes):
    """What any other validator of JSON Schema says of a file, our walk says too: yes or no."""
    tree = TREE
    for path, new in changes:
        try:
            tree = changed(tree, path, new)
        except (KeyError, IndexError, TypeError):
            continue
    value, wrong = read(json.dumps(tree).encode(), is_json=True)
    assert not wrong
    assert (not list(misfits(value))) == VALIDATOR.is_valid(tree)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PLACES), st.sampled_from(["x", "nxt", "kind", "into"]))
def test_the_walk_and_the_schema_agree_on_fields_that_are_added_or_missing(path, name):
    *above, last = path
    parent = TREE
    for key in above:
        parent = parent[key]
    without = {key: one for key, one in parent.items() if key != last} if isinstance(parent, dict) else parent[1:]
    extended = {**parent, name: 1} if isinstance(parent, dict) else [*parent, 1]
    for new in (without, extended):
        tree = changed(TREE, tuple(above), new)
        value, _ = read(json.dumps(tree).encode(), is_json=True)
        assert (not list(misfits(value))) == VALIDATOR.is_valid(tree)


WORDS = sorted({name for rule in [schema(), *schema()["$defs"].values()] for name in rule.get("properties", ())})
SHAPELESS = st.recursive(
    ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(["keepstep", "metadata", "spec", "policies", "steps"]), SHAPELESS))
def test_any_tree_has_the_same_problems_as_yaml_and_as_json(tree):
    text = json.dumps(tree, indent=1).encode()
    as_json, as_yaml = examine(text, is_json=True), examine(text, is_json=False)
    assert [str(one) for one in as_json.named("f")] == [str(one) for one in as_yaml.named("f")]
    assert as_json.form == as_yaml.form


# -- problems ----------------------------------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once_in_line_order():
    assert told("""\
        keepstep: 2
        metdata: {name: x}
        spec: {timeout: -3, entrypoint: drft}
        steps:
          draft: {functoin: write, next: critc}
          critic:
            branches:
              - {when: state.score <, next: draft}
              - {next: publish}
          draft: {}
          publish: {kind: htpp}
          1st: {timeout: 0}
    """) == [
        "1:1: error: metadata: 'metadata' is missing; add metadata: …",
        "1:11: error: keepstep: it must be 1, not 2",
        "2:1: error: metdata: there is no 'metdata' here; did you mean 'metadata'?",
        f"3:17: error: spec.timeout: {NO_TIME}, not -3",
        "3:33: error: spec.entrypoint: there is no step 'drft'; did you mean 'draft'?",
        "5:11: error: steps.draft.functoin: there is no 'functoin' here; did you mean 'function'?",
        "5:34: error: steps.draft.next: there is no step 'critc'; did you mean 'critic'?",
        f"8:16: error: steps.critic.branches[0].when: the condition cannot be read: {NO_END}, at character 14 of it",
        "10:3: error: file: 'draft' is given twice, first in line 5; keep one of them",
        "11:19: error: steps.publish.kind: there is no kind 'htpp'; did you mean 'http'?",
        "12:3: error: steps.1st: it must be a step id: a letter first, then letters, digits, _ and -, not '1st'",
        f"12:18: error: steps.1st.timeout: {NO_TIME}, not 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "steps, expected",
    [
        ("a: {next: b, branches: [{next: b}]}\nb: {}", "steps.a: it has next and branches; make next the last"),
        ("a: {next: [b, c]}\nb: {}\nc: {}", "steps.a.next: it is not said where these steps come together"),
        ("a: {next: [b], join: c}\nb: {next: c}\nc: {}", "steps.a.join: 'c' is of kind function, and"),
        ("a: {next: [b, b], join: c}\nb: {next: c}\nc: {kind: barrier}", "steps.a.next[1]: 'b' is listed twice"),
        ("a: {next: b, join: c}\nb: {next: c}\nc: {kind: barrier}", "steps.a.join: only steps that run at"),
        ("a: {next: b, needs: [b]}\nb: {}", "steps.a.needs: 'needs' belongs to a dag, and this is a graph"),
        ("a: {next: b, when: 'true'}\nb: {}", "steps.a.when: 'when' belongs to a dag, and this is a graph"),
        ("a: {next: b, wait: any}\nb: {}", "steps.a.wait: 'wait' belongs to a dag, or to the barrier"),
        ("a: {needs: [b], into: x}\nb: {}", "steps.a.into: 'into' belongs to a graph, and this is a dag"),
        ("a: {needs: [b]}\nb: {kind: delay, for: 1}", "steps.b.kind: a dag has no steps of kind delay; a dag's"),
        ("a: {needs: [b]}\nb: {kind: approval}", "steps.b.kind: a dag has no steps of kind approval"),
        ("a: {needs: [b]}\nb: {needs: [a]}", "need each other in a circle: a → b → a"),
        ("a: {needs: [b], wait: 2}\nb: {}", "4:25: error: steps.a.wait: it waits for 2 of its needs, and has 1"),
        ("a: {wait: any}", "steps.a.wait: it waits for 1 of its needs, and has none; wait for fewer, or"),
        ("a: {next: [b, c], join: j}\nb: {next: j}\nc: {next: j}\nj: {kind: barrier, wait: 3}",
         "7:28: error: steps.j.wait: it waits for 3 steps, and 'a' leads to 2; wait for fewer, or add to that next:"),
        ("a: {needs: [c]}\nb: {}", "steps.a.needs[0]: there is no step 'c'"),
        ("a: {needs: [b], when: state.x}\nb: {}", "undeclared reference to 'state.x', at character 6 of it; what"),
        ("a: {needs: [b], when: inputs.b > 1, with: {x: b}}\nb: {}", "steps.a.when: its when: looks at inputs.b"),
        ("a: {needs: [b], with: {x: c}}\nb: {}\nc: {}", "steps.a.with.x: 'c' is not one of the step's needs"),
        ("a: {with: {x: b-c}, exit: true}", "steps.a.with.x: 'b-c' is not a key of the state; a key has no -"),
        ("a: {exit: true, at_most_once: false, in_doubt: fail}", "steps.a.in_doubt: only an at_most_once step"),
        ("a: {exit: true, retry: {by_class: true, base: 1}}", "steps.a.retry.base: 'base' does not go with by_class"),
        ("a: {kind: http, url: 'http://x/{a b}'}", "steps.a.url: it must be a URL"),
        ("a: {kind: http, url: 'http://x/{a-b}'}", "steps.a.url: {a-b} is not a key of the state; write {key}"),
        ("a: {kind: http, url: 'http://x/{a'}", "steps.a.url: a brace is not closed"),
        ("a: {kind: http, url: 'http://x:y/'}", "steps.a.url: it is not a URL: Port could not be cast"),
        ("a: {kind: http, url: 'file:///etc/passwd'}", "steps.a.url: it must be a URL that begins with"),
        ("a: {kind: http, url: 'http://{host}/'}", "steps.a.url: it must be a URL that begins with"),
        ("a: {kind: http, url: 'http://me:pw@x/'}", "steps.a.url: it must be a URL that begins with"),
        ("a: {kind: http, url: 'http://x/', method: GET, body: [k]}", "steps.a.body: a GET request has no body"),
        ("a: {kind: http, url: 'http://x/', headers: {Host: y}}", "steps.a.headers.Host: the request itself decides"),
        ("a: {exit: true, url: x}", "steps.a.url: there is no 'url' here; 'url' belongs to steps of kind http"),
    ],
)  # fmt: skip
def test_mistake_is_reported_with_its_path(steps, expected):
    assert any(expected in line for line in told(graph(steps))), told(graph(steps))


@pytest.mark.parametrize(
    "steps",
    [
        "a: {needs: [b, c], wait: 2}\nb: {}\nc: {}",
        "a: {needs: [b], wait: any}\nb: {}",
        "a: {next: [b, c], join: j}\nb: {next: j}\nc: {next: j}\nj: {kind: barrier, wait: 2}",
    ],
)
def test_a_wait_for_as_many_as_there_are_is_fine(steps):
    assert told(graph(steps)) == []


@pytest.mark.parametrize(
    "wrong", ["next: {b: 1}", "next: [[b]], join: j", "next: 3", "branches: {next: b}", "branches: [{when: 'true'}]"]
)
def test_invalid_edge_is_reported_without_its_consequences(wrong):
    found = told(graph(f"a: {{{wrong}}}\nb: {{next: c}}\nc: {{}}\nd: {{next: c}}\nj: {{kind: barrier, next: c}}"))
    assert len(found) == 1, found
    assert "error: steps.a." in found[0]


def test_policies_are_checked_too():
    security, others = (
        "{redact: ['('], hosts: [b.example]}",
        "{interrupt_after: [b]}, resilience: {durability: 'steps=c'}",
    )
    more = f"policies: {{security: {security}, observability: {others}}}\n"
    found = "\n".join(told(graph("a: {kind: http, url: 'https://a.example/', exit: true}", more)))
    assert "policies.security.redact[0]: it is not a regular expression: missing )" in found
    assert "steps.a.url: the host 'a.example' is not in policies.security.hosts" in found
    assert "policies.observability.interrupt_after[0]: there is no step 'b'" in found
    assert "policies.resilience.durability: there is no step 'c'" in found


def test_options_of_a_graph_are_refused_in_a_dag():
    more = "spec: {form: dag, entrypoint: a, reducers: {x: add}}\n"
    more += "policies: {observability: {interrupt_before: [a]}, resilience: {max_iterations: 3}}\n"
    found = told(graph("a: {}", more))
    assert len([line for line in found if "it belongs to a graph, and this is a dag" in line]) == 4


def test_warnings_do_not_make_a_file_invalid():
    text = graph("a: {next: b}\nb: {kind: approval, on_timeout: deny}\nlost: {next: b}")
    found = examine(text.encode(), is_json=False)
    assert found.ok
    assert [(one.severity, one.line, one.where) for one in found.problems] == [
        ("warning", 5, "steps.b.on_timeout"),
        ("warning", 6, "steps.lost"),
    ]


def test_problems_of_json_files_have_lines_too():
    text = '{"keepstep": 1,\n "metadata": {"name": "x"},\n "steps": {\n  "a": {"next": "b"}}}'
    assert told(text, is_json=True) == ["4:17: error: steps.a.next: there is no step 'b'; there are: a"]


@pytest.mark.parametrize(
    "text", ["[]", "x", "1", "null", "steps: 3", "steps: [a]", "steps: {a: 1}", "spec: 1\nsteps: {a: {}}"]
)
def test_wrong_type_at_any_place_is_reported(text):
    assert told(text)


def test_ten_thousand_steps_are_looked_at():
    steps = {f"s{n}": {"next": f"s{n + 1}"} for n in range(900)} | {"s900": {}}
    text = json.dumps({"keepstep": 1, "metadata": {"name": "x"}, "steps": steps})
    assert examine(text.encode(), is_json=True).ok
    wide = {f"s{n}": {"needs": ["s0"]} if n else {} for n in range(10_000)}
    text = json.dumps({"keepstep": 1, "metadata": {"name": "x"}, "steps": wide})
    assert examine(text.encode(), is_json=True).ok


def test_thousands_of_unknown_names_are_reported_quickly(monkeypatch):
    compared = []
    monkeypatch.setattr(
        declarative_schema.difflib, "get_close_matches", lambda *given, **_: compared.append(given) or []
    )
    steps = {f"step-{n}": {"next": f"stop-{n}"} for n in range(5_000)}
    text = json.dumps({"keepstep": 1, "metadata": {"name": "x"}, "steps": steps})
    assert len(examine(text.encode(), is_json=True).problems) >= 5_000
    assert len(compared) <= declarative_schema.SUGGESTIONS
    assert max(len(known) for _, known in compared) <= 500


# -- many, and the same again ------------------------------------------------------------------------------------------


def test_same_content_is_examined_once_and_reported_by_each_name(tmp_path, monkeypatch):
    monkeypatch.setattr(declarative_check, "_MEMORY", declarative_check._Memory())
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(graph("only: {next: nowhere}"), encoding="utf-8")
    (tmp_path / "c.yaml").write_text(graph("only: {}"), encoding="utf-8")
    before = cache_info()
    a, b, c = check_all([tmp_path / "a.yaml", tmp_path / "b.yaml", tmp_path / "c.yaml"])
    after = cache_info()
    assert (after.hits - before.hits, after.misses - before.misses) in {(1, 2), (2, 1), (3, 0)}
    assert [str(one) for one in b.problems] == [str(one).replace("a.yaml", "b.yaml") for one in a.problems]
    assert (a.ok, c.ok) == (False, True)
    (tmp_path / "a.yaml").write_text(graph("only: {}\n#"), encoding="utf-8")
    assert check(tmp_path / "a.yaml").ok  # another content under the same name


def test_memory_of_examined_files_is_bounded():
    for number in range(REMEMBERED + 10):
        examine(f"x: {number}".encode(), is_json=False)
    assert cache_info().size <= REMEMBERED


def test_unreadable_file_does_not_hide_the_others(tmp_path):
    (tmp_path / "good.yaml").write_text(graph("only: {}"), encoding="utf-8")
    (tmp_path / "folder.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    names = [
        tmp_path / "good.yaml",
        "nosuch.yaml",
        tmp_path / "folder.yaml",
        "x.txt",
        tmp_path / "pipe.yaml",
        "a\0.yaml",
    ]
    good, missing, folder, other, pipe, null = check_all(names)
    assert "it is not a file" in str(pipe.problems[0])
    assert "null" in str(null.problems[0])
    assert good.ok
    assert str(missing.problems[0]) == "nosuch.yaml: error: file: it cannot be read: No such file or directory"
    assert "Is a directory" in str(folder.problems[0])
    assert "a workflow's file ends in .yaml, .yml or .json" in str(other.problems[0])


def test_names_that_a_file_uses_are_looked_up_if_given(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_text(
        graph("a: {function: wrte, next: b}\nb: {kind: agent}\nc: {kind: subworkflow, workflow: sub}"), encoding="utf-8"
    )
    assert check(path).ok
    found = check(path, Names(functions={"write": print}))
    assert [(one.where, one.what, one.how) for one in found.problems if one.severity == "error"] == [
        ("steps.a.function", "there is no function 'wrte'", "did you mean 'write'?"),
        ("steps.b", "there is no agent 'b'", "give it with agents= or modules="),
        ("steps.c.workflow", "there is no workflow 'sub'", "give it with workflows= or modules="),
    ]


def test_tolerated_failures_of_a_file_are_checked():
    problems = told("""
keepstep: 1
metadata: {name: limits}
steps:
  a: {}
  b: {needs: [a], wait: {tolerate: {minimum: 2}}}
  c: {needs: [a], wait: {tolerate: {}}}
  d: {needs: [a], wait: {tolerate: {share: 2}}}
""")
    assert [one for one in map(str, problems) if "waits for 2 of its needs, and has 1" in one]
    assert [one for one in map(str, problems) if "steps.c.wait" in one]
    assert [one for one in map(str, problems) if "steps.d.wait" in one]


# -- the page ----------------------------------------------------------------------------------------------------------


def sections():
    """The tables of the reference by their headings: (field, what is said of it)."""
    found, heading = {}, ""
    for line in (ROOT / "docs/reference/files.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            name, _, says = (cell.strip() for cell in line.strip("|").split(" | "))
            found.setdefault(heading, []).append((name.strip("`"), says))
    return found


def test_the_reference_is_the_schema():
    defs = schema()["$defs"]
    policies = defs["policies"]["properties"]
    rules = {
        "The file": schema(),
        "metadata": defs["metadata"],
        "spec": defs["spec"],
        "retry": defs["retry"],
        "budget": defs["budget"],
        "tolerate": defs["tolerate"],
        "schedule": defs["schedule"],
        "queue": defs["queue"],
        "rate": defs["rate"],
        "recovery": defs["recovery"],
        **{name: defs[name] for name in ("service", "breaker", "team", "refine")},
    }
    rules |= {"resources": defs["spec"]["properties"]["resources"], "branches": defs["branches"]["items"]}
    rules |= {kind: defs[kind] for kind in kinds()} | {"policies": defs["policies"]} | policies
    rules["retention"] = defs["retention"]  # of a mapping; a name has no fields
    page = sections()
    assert set(page) == set(rules)
    for heading, rule in rules.items():
        expected = []
        for name, one in rule["properties"].items():
            says = one.get("description") or defs.get(one.get("$ref", "").rpartition("/")[2], {}).get("description")
            says = says or "What the step is."
            expected.append((name, f"{says} (required)" if name in rule.get("required", ()) else says))
        assert page[heading] == expected, heading


# -- any JSON, anywhere ------------------------------------------------------------------------------------------------

LEAVES = ["a", "graph", "dag", "barrier", "http", "GET", "any", "10s", "state.x > 1", None, True, -1, 0, 2.5, 10**30]
ANY_JSON = st.recursive(
    st.sampled_from(LEAVES) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "next", "when"]), inner),
    max_leaves=5,
)


def as_data(value):
    if isinstance(value.data, dict):
        return {key: as_data(one) for key, one in value.data.items()}
    return [as_data(one) for one in value.data] if isinstance(value.data, tuple) else value.data


def places(data, path=()):
    yield path
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


FILES = [as_data(read(text.encode(), is_json=False)[0]) for text in (WHOLE, DAG)]
PLACES = [(number, path) for number, file in enumerate(FILES) for path in places(file) if path]


@settings(max_examples=int(os.environ.get("KEEPSTEP_EXAMPLES", "200")))
@given(st.sampled_from(PLACES), ANY_JSON)
def test_any_value_at_any_place_gives_messages_and_no_traceback(place, value):
    number, path = place
    file = at = json.loads(json.dumps(FILES[number]))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    examined = examine(json.dumps(file).encode(), is_json=True)
    assert all(map(str, examined.problems))
    if examined.ok:
        assert all(map(str, Builder(examined, Names([], {}, {}, {}), "f").check()))
    elif isinstance(file.get("steps"), dict) and any(isinstance(step, dict) for step in file["steps"].values()):
        declarative_check.shape_of(examined.value, examined.form)


@pytest.mark.parametrize("wrong", [{"a": 1}, ["a"], 1, None, True, [[]]])
@pytest.mark.parametrize("place", ["entrypoint", "needs", "next", "join", "with", "kind", "max_iterations"])
def test_value_of_another_type_is_reported(place, wrong):
    step = {"needs": [wrong] if place == "needs" else [], "with": {"x": wrong}} if place in ("needs", "with") else {}
    if place in ("next", "join", "kind"):
        step = {place: wrong}
    spec = {"entrypoint": wrong} if place == "entrypoint" else {}
    file = {"keepstep": 1, "metadata": {"name": "x"}, "spec": spec, "steps": {"a": step, "b": {}}}
    if place == "max_iterations":
        file["policies"] = {"resilience": {"max_iterations": wrong}}
    assert told(json.dumps(file), is_json=True)
