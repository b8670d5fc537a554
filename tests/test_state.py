"""The state of a graph: nobody can change it, and the fold of its deltas is what the steps returned."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepstep as ks
from keepstep.model.tree import FrozenDict, FrozenList, diff, frozen, patch, same, thaw
from keepstep.values import VALUES
from keepstep.values.trees import Trees

TREES = Trees(VALUES)

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5)
typed = st.decimals(allow_nan=False) | st.dates() | st.binary(max_size=3) | st.sets(st.integers(), max_size=2)
values = st.recursive(
    scalars | typed,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcd$"), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=8,
)
states = st.dictionaries(st.sampled_from("abcde"), values, max_size=4)


def edits(state):
    """What a step might make of one state."""
    return st.one_of(
        st.tuples(st.just("set"), st.sampled_from("abcdef"), values),
        st.tuples(st.just("append"), st.sampled_from("abcdef"), values),
        st.tuples(st.just("within"), st.sampled_from("abcdef"), values),
        st.tuples(st.just("remove"), st.sampled_from("abcdef"), st.none()),
    )


def edited(state, edit):
    kind, key, value = edit
    old = state.get(key)
    if kind == "set":
        return state.set(key, value)
    if kind == "append" and isinstance(old, list):
        return state.set(key, [*old, value])
    if kind == "within" and isinstance(old, dict) and all(isinstance(one, str) for one in old):
        return state.set(key, {**old, "x": value})
    return state.without(key)


def typed_equal(a, b):
    """Equal as the codec sees it: types, NaN and the sign of zero included."""
    return VALUES.digest(a) == VALUES.digest(b)


@given(states, st.lists(edits(None), max_size=8))
def test_the_fold_of_the_deltas_is_the_state(first, changes):
    trees = TREES.lift(first, {}, "the first")
    folded, state = trees, ks.State.of(trees, TREES.read)
    for change in changes:
        state = edited(state, change)
        lifted = TREES.lift(state.kept(), trees, "a step")
        stored = TREES.encode(diff(trees, lifted)) if _encodes(lifted) else None
        if stored is None:
            return  # a lone surrogate, which the careful way takes
        folded = patch(folded, msgspec.json.decode(stored))
        assert same(FrozenDict(folded), FrozenDict(lifted))
        trees, state = folded, ks.State.of(folded, TREES.read)
        assert typed_equal(dict(state), {key: TREES.read(tree, key) for key, tree in lifted.items()})


def _encodes(trees):
    try:
        msgspec.json.encode(trees)
    except (ValueError, UnicodeEncodeError):
        return False
    return True


@given(states)
def test_a_state_gives_back_what_it_was_given(first):
    state = ks.State(first)
    assert typed_equal(dict(state), first)
    assert typed_equal(dict(ks.State.of(TREES.lift(first, {}, "it"), TREES.read)), first)


@given(values, values)
def test_equal_values_of_other_types_are_not_the_same(a, b):
    one, other = (TREES.lift({"x": value}, {}, "it")["x"] for value in (a, b))
    assert same(one, other) == (json.dumps(thaw(one)) == json.dumps(thaw(other)))


def test_nothing_in_a_state_can_be_changed():
    mine = {"list": [1, {"a": 1}], "dict": {"x": [1]}, "set": {1}}
    state = ks.State(mine)
    mine["list"].append(2)
    mine["set"].add(2)
    assert dict(state) == {"list": [1, {"a": 1}], "dict": {"x": [1]}, "set": {1}}
    for change in (
        lambda: state["list"].append(1),
        state["list"].sort,
        lambda: state["list"][1].update(b=1),
        lambda: state["dict"].pop("x"),
        lambda: state["dict"]["x"].__iadd__([1]),
        lambda: state["dict"].__ior__({"y": 1}),
        lambda: state["list"].__setitem__(0, 1),
        lambda: state["list"].__delitem__(0),
    ):
        with pytest.raises(TypeError, match="a state cannot be changed"):
            change()
    state["set"].add(5)  # of a copy
    assert state["set"] == {1}
    with pytest.raises(TypeError):
        state["new"] = 1


def test_copy_of_a_part_of_a_state_can_be_changed():
    state = ks.State(items=[1, [2]])
    mine = copy.deepcopy(state["items"])
    mine[1].append(3)
    assert (mine, type(mine)) == ([1, [2, 3]], list)
    assert type(pickle.loads(pickle.dumps(state["items"]))) is list
    assert copy.deepcopy(state) is state
    assert [*state["items"], 3] == [1, [2], 3]


def test_provenance_stays_and_the_left_one_wins():
    at = datetime(2026, 1, 1, tzinfo=UTC)
    left = ks.State.of({"a": 1}, TREES.read, ("run", "step#1", at))
    right = ks.State.of({"b": 2}, TREES.read, ("other", "step#2", at))
    for state in (left.set("c", 3), left.set(c=3), left.merge(right), left.without("a"), ks.State(left)):
        assert state.provenance == ("run", "step#1", at)
    assert dict(left.merge(right)) == {"a": 1, "b": 2}
    assert dict(left) == {"a": 1}


def test_a_change_costs_what_it_changes():
    big = {"history": [{"text": "x" * 100, "n": n} for n in range(1000)], "profile": {"a": {"b": 1, "c": "x" * 1000}}}
    trees = TREES.lift(big, {}, "it")
    state = ks.State.of(trees, TREES.read)
    after = state.set("history", [*state["history"], {"n": 1000}]).set(
        "profile", {**state["profile"], "a": {**state["profile"]["a"], "b": 2}}
    )
    lifted = TREES.lift(after.kept(), trees, "it")
    delta = diff(trees, lifted)
    assert delta == {
        "appended": {"history": [{"n": 1000}]},
        "within": {"profile": {"within": {"a": {"set": {"b": 2}}}}},
    }
    assert lifted["history"][0] is trees["history"][0]


@pytest.mark.parametrize(
    "after, delta",
    [
        ([0, 1, 9, 3], {"items": {"k": {"2": 9}}}),
        ([0, [1], 2, 3, 4, 5], {"items": {"k": {"1": [1]}}, "appended": {"k": [4, 5]}}),
        ([True, 1, 2, 3], {"items": {"k": {"0": True}}}),
        ([9, 9, 9, 3], {"set": {"k": [9, 9, 9, 3]}}),
        ([0, 1, 2], {"set": {"k": [0, 1, 2]}}),
    ],
)
def test_few_changed_items_of_a_list_are_stored_by_index(after, delta):
    before = TREES.lift({"k": [0, 1, 2, 3], "other": 1}, {}, "it")
    lifted = TREES.lift({"k": after, "other": 1}, before, "it")
    assert diff(before, lifted) == delta
    folded = patch(before, msgspec.json.decode(TREES.encode(delta)))
    assert same(folded["k"], lifted["k"])
    tagged = TREES.lift({"k": [(1, 2), 1, 2, 3]}, {}, "it")
    told = msgspec.json.decode(TREES.encode(diff({"k": before["k"]}, tagged)))
    assert ks.State.of(patch({"k": before["k"]}, told), TREES.read)["k"] == [(1, 2), 1, 2, 3]


@pytest.mark.parametrize(
    "delta",
    [
        {"appended": {"a": [1]}},
        {"within": {"a": {"set": {}}}},
        {"removed": ["z"]},
        {"set": 3},
        {"items": {"a": {"0": 1}}},
        {"items": {"list": {"1": 1}}},
    ],
)
def test_a_delta_that_does_not_fit_is_refused(delta):
    with pytest.raises(ValueError, match="does not fit"):
        patch({"a": 1, "list": frozen([0])}, delta)


def test_a_key_that_is_no_text_is_refused():
    with pytest.raises(ks.NotSerializable, match="a key of a state is text"):
        TREES.lift({1: 2}, {}, "step 'a#1'")
    with pytest.raises(ks.NotSerializable, match=r"step 'a#1': \['x'\]"):
        TREES.lift({"x": object()}, {}, "step 'a#1'")


def test_a_part_of_a_state_is_stored_as_what_it_was():
    state = ks.State(a=[1, {"b": 2}], price=Decimal(1))
    assert VALUES.encode({"x": state["a"]}) == b'{"x":[1,{"b":2}]}'
    assert isinstance(state["a"], FrozenList)
    assert frozen(state["a"]) is state["a"]
