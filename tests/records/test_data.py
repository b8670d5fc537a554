"""Every key of a record's data is listed, with what encryption leaves readable of it."""

import ast
from pathlib import Path
from typing import get_args

import pytest

import keepstep
from keepstep.model.checkpoint import CARRIES_SIGNAL
from keepstep.records.data import (
    CHECKED,
    KEYS,
    OPEN,
    SHAPES,
    STEERING,
    ChildData,
    Data,
    kinds_of,
    new_data,
    type_of,
    unlisted,
)

SRC = Path(keepstep.__file__).parent


def texts_in(part):
    """Every text constant in the modules of a part, and every name of an argument that is given."""
    for path in sorted((SRC / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.keyword) and node.arg is not None:
                yield node.arg


def test_every_listed_key_is_written_by_some_code():
    written = {text for part in ("kernel", "history", "care") for text in texts_in(part)}
    assert set(KEYS) - written == set()


def test_every_key_belongs_to_some_kind():
    assert [name for name in KEYS if not kinds_of(name)] == []


def test_classes_of_kinds_have_only_listed_keys_with_their_types():
    listed = {name: get_args(hint)[0] for name, hint in Data.__annotations__.items()}
    for shape in SHAPES.values():
        own = {name: get_args(hint)[0] if name == "from" else hint for name, hint in shape.__annotations__.items()}
        assert own.items() <= listed.items()


def test_key_of_another_kind_is_refused_when_data_is_made():
    assert new_data(ChildData, child="c", renew=True) == {"child": "c", "renew": True}
    with pytest.raises(TypeError, match=r"ChildData has no \['beyond'\]"):
        new_data(ChildData, beyond=1)


def test_types_are_checked_without_the_types_of_their_parts():
    assert [type_of(name) for name in ("signal", "seqs", "renames")] == [int, list, dict]
    assert isinstance(None, type_of("due_at"))


def test_keys_that_steer_are_readable_and_checked():
    """Repairs go by them without the run's key, and a record of another type must not reach the engine."""
    assert STEERING <= OPEN
    assert set(CHECKED) >= STEERING


def test_signals_are_carried_by_the_kinds_that_say_so():
    assert kinds_of("signal") == CARRIES_SIGNAL


def test_what_users_write_is_encrypted():
    assert OPEN.isdisjoint({"reason", "definition", "spent", "given", "path"})


@pytest.mark.parametrize(
    "kind, data, problem",
    [
        ("timer", {"colour": 1}, "'colour' is not listed"),
        ("timer", {"child": "c"}, "'child' is not a key of 'timer'"),
        ("child", {"child": 1}, "'child' is a int"),
    ],
)
def test_an_unlisted_key_is_found(kind, data, problem):
    assert unlisted(kind, data) == [problem]
    assert unlisted("child", {"child": "c", "renew": True}) == []


# -- the code reads and writes data by its kind ------------------------------------------------------------------------

CODE = {
    path.relative_to(SRC).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for part in ("stores", "kernel", "history", "care", "drawing", "engine", "views")
    for path in sorted((SRC / part).rglob("*.py"))
}


def untyped_reads(tree):
    """Lines with `….data or {}`, which forget the kind of the record."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) and isinstance(node.values[0], ast.Attribute):
            first = node.values[0]
            if first.attr == "data" and not (isinstance(first.value, ast.Name) and first.value.id == "self"):
                yield node.lineno


def untyped_writes(tree):
    """Lines that give a record a plain dictionary, whose keys mypy and `new_data` do not see."""
    for node in ast.walk(tree):
        makes = isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("Record", "record")
        if makes and any(word.arg == "data" and isinstance(word.value, ast.Dict) for word in node.keywords):
            yield node.lineno


def wrong_keys(tree):
    """Keys that are asked of data whose kind does not have them: mypy takes `get` and `in` of any text."""
    shapes = {one.__name__: set(one.__annotations__) for one in (Data, *SHAPES.values())}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        known = {
            ast.unparse(node.targets[0]): shape
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and (shape := shape_of(node.value, {}))
        }
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "get"
                and node.args
            ):
                asked, of = node.args[0], shape_of(node.func.value, known)
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
                asked, of = node.left, shape_of(node.comparators[0], known)
            else:
                continue
            if of and isinstance(asked, ast.Constant) and asked.value not in shapes[of]:
                yield f"{node.lineno}: {of} has no {asked.value!r}"


def shape_of(node, known):
    """The name of the class by which an expression reads the data of a record, or None."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "data_of":
        return ast.unparse(node.args[1])
    return known.get(ast.unparse(node))


@pytest.mark.parametrize("rule", [untyped_reads, untyped_writes, wrong_keys])
def test_data_is_read_and_written_by_its_kind(rule):
    assert {name: found for name, tree in CODE.items() if (found := list(rule(tree)))} == {}


@pytest.mark.parametrize(
    "rule, text",
    [
        (untyped_reads, "a = (record.data or {}).get('child')"),
        (untyped_writes, "Record('r', 'child', data={'child': 'c'})"),
        (untyped_writes, "self.record('child', data={'child': 'c'})"),
        (wrong_keys, "def f(record):\n    return data_of(record, ChildData).get('choice')"),
        (wrong_keys, "def f(record):\n    data = data_of(record, ChildData)\n    return 'choice' in data"),
    ],
)
def test_each_rule_finds_its_fault(rule, text):
    assert len(list(rule(ast.parse(text)))) == 1
