"""A step stays as short to read as it is: the number of its hops may only fall."""

import asyncio

import pytest

from tests.house import hops

#: Hops of one step on SQLite today. Lower it when a change makes a step shorter; never raise it.
HOPS = 25
#: Modules that one step passes through today. Lower it as well.
MODULES = 13


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    return asyncio.run(hops.measure(tmp_path_factory.mktemp("hops")))


def test_a_step_makes_no_more_hops_than_before(walk):
    assert walk.hops <= HOPS, f"{walk}; see python -m tests.house.hops --trace"
    assert walk.modules <= MODULES, f"{walk}; see python -m tests.house.hops --trace"


def test_the_trace_spans_the_whole_step(walk):
    assert walk.calls[0] == ("workflows/definition", "Step.__call__")
    assert any(module == "stores/sqlite/store" for module, _ in walk.calls)
    assert walk.calls[-1][1] == "DurableCall.outcome"


def test_hops_count_changes_of_module():
    walk = hops.Walk((("a", "f"), ("a", "g"), ("b", "h"), ("a", "f")))
    assert (len(walk.calls), walk.hops, walk.modules, walk.functions) == (4, 3, 2, 3)
