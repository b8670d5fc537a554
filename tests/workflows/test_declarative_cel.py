"""Conditions in CEL: what they see, what they refuse, and how they say what is wrong."""

import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import IntEnum, StrEnum

import pytest

from keepstep.errors import DefinitionError
from keepstep.model.state import State
from keepstep.policies.when import described
from keepstep.workflows.files.conditions import BadCondition, Condition, compiled


class Colour(StrEnum):
    RED = "red"


class Size(IntEnum):
    BIG = 3


STATE = State(
    score=0.5, items=[1, 2, 3], deep={"a": {"b": "c"}}, price=Decimal("1.5"), colour=Colour.RED, size=Size.BIG,
    names={"x"}, nothing=None, took=timedelta(hours=1), huge=2**70, at=datetime(2026, 1, 1, tzinfo=UTC),
)  # fmt: skip


@pytest.mark.parametrize(
    "text, holds",
    [
        ("state.score < 0.9", True),
        ("state.score >= 0.9", False),
        ("has(state.missing)", False),
        ("has(state.deep.a) && state.deep.a.b == 'c'", True),
        ("state['score'] == 0.5", True),
        ("size(state.items) == 3 && state.items.exists(x, x > 2)", True),
        ("state.colour == 'red' && state.size == 3", True),
        ("'x' in state.names", True),
        ("state.nothing == null", True),
        ("timestamp(state.at) > timestamp('2025-01-01T00:00:00Z')", True),
        ("duration(state.took) > duration('1m')", True),
        ("state.missing == 1 || true", True),  # as CEL has it: one side is enough
    ],
)
def test_a_condition_sees_the_state(text, holds):
    assert Condition(text)(STATE) is holds


WRITTEN = "what a condition looks at is written state.…, and a text in quotes"
INSTEAD = "CEL has ==, &&, || and ! for =, and, or and not"
NO_FUNCTION = "CEL has no such function; let a step find it out, and look at what it gives"


def test_condition_is_identified_by_its_text():
    condition = Condition("state.a > 1", place="flow.yaml:3")
    assert str(condition) == described(condition) == "state.a > 1"
    assert condition == Condition("state.a > 1", place="elsewhere.yaml:9")


@pytest.mark.parametrize(
    "text, what, how",
    [
        ("state.a <", "it ends where more must come, at character 10 of it", ""),
        ("(state.a", "')' is missing, at character 9 of it", ""),
        ("state.a = 3", "'=' does not belong here, at character 9 of it", INSTEAD),
        ("state.a and state.b", "'and' does not belong here, at character 9 of it", INSTEAD),
        ("not state.a", "'state' does not belong here, at character 5 of it", INSTEAD),
        ("if state.a", "'if' does not belong here", INSTEAD),
        ("len(state.a) > 1", "undeclared reference to 'len'", "write size(…)"),
        ("state.a == None", "undeclared reference to 'None'", "write null"),
        ("score < 1", "undeclared reference to 'score', at character 1 of it", WRITTEN),
        ("1 + 'a' == 2", "'+' cannot be applied to a whole number and a text, at character 3 of it", ""),
        ("'text'", "it gives string, not true or false", "compare it: … == state.…"),
        ("(" * 60 + "true" + ")" * 60, "recursion limit", "write it in a simpler way"),
        ("__import__('os').system('x')", "", ""),
        ("state.__class__.__mro__()", "", ""),
        ("open('/etc/passwd') == ''", "undeclared reference to 'open'", NO_FUNCTION),
    ],
)  # fmt: skip
def test_condition_that_cannot_be_compiled_is_refused(text, what, how):
    with pytest.raises(BadCondition) as caught:
        Condition(text)
    assert what in caught.value.what
    assert caught.value.how == how or not what


@pytest.mark.parametrize(
    "text, why",
    [
        ("state.scor < 1", 'Key not found in map : "scor"; guard it with has(state.…) && …'),
        ("state.items[7] == 1", "Index error: index=7 size=3"),
        ("state.score < 'a'", "'<' cannot be applied to a number and a text; see what the steps before it give, or"),
        ("state.score && true", "'&&' cannot be applied to these values; see what"),
        ("state.score.b == 1", "a key is looked up in a value that is not a mapping"),
        ("1 / 0 == 1", "divide by zero"),
        ("state.score", "it gives 0.5, not true or false"),
        ("state.price > 1", "state.price is a Decimal, which a condition cannot look at"),
        ("state.huge > 1", "out of range"),
        ("state.score.all(x, true)", ""),
    ],
)
def test_undecidable_condition_is_reported_with_its_place(text, why):
    with pytest.raises(DefinitionError) as caught:
        Condition(text, place="flow.yaml:12: steps.critic.when")(STATE)
    told = str(caught.value)
    assert told.startswith(f"flow.yaml:12: steps.critic.when: the condition `{text}` cannot be decided: ")
    assert why in told


def test_only_the_keys_that_are_named_are_looked_at():
    class Guarded(dict):
        def __getitem__(self, key):
            assert key == "a", key
            return super().__getitem__(key)

    assert Condition("state.a == 1 && state['a'] == 1")(Guarded(a=1, secret=object())) is True
    assert compiled("state.a.b == state['c'] || state.e == 'state.d'", "state").keys == {"a", "c", "d", "e"}


@pytest.mark.parametrize(
    "text",
    [
        "size(state) == 2",
        "state.exists(key, key == 'b')",
        "state.exists // all of it\n (key, key == 'b')",
        "state.size() == 2",
        "state == {'a': 1, 'b': 2}",
        "state.all (key, key in ['a', 'b'])",
        "[state][0].b == 2",
        "state['a' + ''] == 1",
    ],
)
def test_condition_on_the_whole_state_is_given_the_whole(text):
    assert compiled(text, "state").keys is None
    assert Condition(text)({"a": 1, "b": 2}) is True


def test_loops_end_within_their_budget():
    with pytest.raises(DefinitionError, match="Iteration budget exceeded"):
        Condition("state.l.all(a, state.l.all(b, state.l.all(c, true)))")({"l": list(range(100))})


def test_a_value_that_is_nested_too_deep_does_not_end_the_process():
    deep = 1
    for _ in range(20_000):
        deep = {"x": deep}
    with pytest.raises(DefinitionError, match="nested more than 100 deep"):
        Condition("state.deep == 1")({"deep": deep})


def test_missing_library_is_reported_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    compiled.cache_clear()
    with pytest.raises(BadCondition) as caught:
        Condition("state.never_seen == 1")
    assert caught.value.how == "install keepstep[yaml]"
