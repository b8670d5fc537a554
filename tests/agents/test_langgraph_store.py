"""Long-term memory of LangGraph on every store, from blocking and from async code."""

import asyncio
import functools
import inspect
from datetime import UTC, datetime, timedelta
from typing import TypedDict

import pytest
from langgraph.graph import START, StateGraph
from langgraph.runtime import Runtime

import keepstep as ks
from keepstep.agents.langgraph import KeepstepStore
from tests.agents.test_langgraph_saver import STORES, store_url


class Awaited:
    """The async methods of a store under the names of the blocking ones."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return functools.partial(self._run, getattr(self._store, f"a{name}"))

    @staticmethod
    def _run(method, *args, **options):
        async def call():
            return await method(*args, **options)

        return asyncio.run(call())


@pytest.fixture(params=[f"{kind} {how}" for kind in STORES for how in ("blocking", "async")])
def store(request, tmp_path):
    kind, how = request.param.split()
    with store_url(kind, tmp_path) as url, KeepstepStore(url) as made:
        yield made if how == "blocking" else Awaited(made)


def keys(items):
    return [item.key for item in items]


def test_item_is_put_changed_and_deleted(store):
    assert store.get(("users", "anna"), "prefs") is None
    store.put(("users", "anna"), "prefs", {"theme": "dark"})
    first = store.get(("users", "anna"), "prefs")
    assert (first.namespace, first.key, first.value) == (("users", "anna"), "prefs", {"theme": "dark"})
    store.put(("users", "anna"), "prefs", {"theme": "light", "n": [1, {"a": None}]})
    second = store.get(("users", "anna"), "prefs")
    assert second.value == {"theme": "light", "n": [1, {"a": None}]}
    assert second.created_at == first.created_at < second.updated_at
    store.delete(("users", "anna"), "prefs")
    assert store.get(("users", "anna"), "prefs") is None


def test_search_filters_and_pages(store):
    for number in range(5):
        store.put(("docs", "a" if number % 2 else "b"), f"k{number}", {"n": number, "in": {"odd": number % 2 == 1}})
    store.put(("docsy",), "other", {"n": 9})
    assert keys(store.search(("docs",))) == ["k4", "k3", "k2", "k1", "k0"], "the last changed are the first"
    assert keys(store.search(("docs",), limit=2, offset=1)) == ["k3", "k2"]
    assert keys(store.search(("docs", "a"))) == ["k3", "k1"]
    assert keys(store.search(("docs",), filter={"n": {"$gte": 1, "$lt": 3}})) == ["k2", "k1"]
    assert keys(store.search(("docs",), filter={"n": 3})) == ["k3"]
    assert keys(store.search(("docs",), filter={"n": {"$ne": 3}, "in": {"odd": True}})) == ["k1"]
    assert keys(store.search(("docs",), filter={"in.odd": True})) == ["k3", "k1"]
    assert keys(store.search(("docs",), filter={"n": {"$gt": "text"}})) == []
    assert len(store.search(())) == 6
    with pytest.raises(ks.DefinitionError, match=r"filter= has the operators \['\$in'\]"):
        store.search(("docs",), filter={"n": {"$in": [1]}})


def test_namespaces_are_listed(store):
    for namespace in [("a", "b", "c"), ("a", "b", "d", "e"), ("a", "x"), ("z/=", "b"), ("long", "n" * 300)]:
        store.put(namespace, "k", {})
    assert store.list_namespaces() == sorted(
        [("a", "b", "c"), ("a", "b", "d", "e"), ("a", "x"), ("long", "n" * 300), ("z/=", "b")]
    )
    assert store.list_namespaces(prefix=("a", "b")) == [("a", "b", "c"), ("a", "b", "d", "e")]
    assert store.list_namespaces(prefix=("a", "*", "c")) == [("a", "b", "c")]
    assert store.list_namespaces(suffix=("b",)) == [("z/=", "b")]
    assert store.list_namespaces(prefix=("a",), max_depth=2) == [("a", "b"), ("a", "x")]
    assert store.list_namespaces(limit=1, offset=1) == [("a", "b", "d", "e")]


def test_odd_keys_are_kept_apart(store):
    for key in ("", "/", "=", "a/b", "ä\n", "k" * 700, "k" * 701):
        store.put(("n",), key, {"key": key})
    assert {item.value["key"] for item in store.search(("n",), limit=99)} == {item.key for item in store.search(("n",))}
    assert store.get(("n",), "k" * 701).value == {"key": "k" * 701}


def left_seconds(store, key):
    """The seconds that an item has left to live."""
    (document,) = store._documents.blocking.list("langgraph:items", keys=(f"n/={key}",))
    return (document.expires_at - datetime.now(UTC)).total_seconds()


def age(store, key, seconds):
    """Let an item have so many seconds left, as if the others had passed."""
    documents = store._documents.blocking
    (document,) = documents.list("langgraph:items", keys=(f"n/={key}",))
    until = datetime.now(UTC) + timedelta(seconds=seconds)
    documents.put("langgraph:items", document.key, document.value, expires_at=until)


def test_item_expires_and_reading_renews_it():
    with KeepstepStore("memory:", ttl={"default_ttl": 10}) as store:
        store.put(("n",), "default", {})
        store.put(("n",), "never", {}, ttl=None)
        assert 500 < left_seconds(store, "default") <= 600
        age(store, "default", 300)
        store.get(("n",), "default", refresh_ttl=False)
        assert left_seconds(store, "default") <= 300
        item = store.get(("n",), "default")
        assert left_seconds(store, "default") > 500
        assert item.updated_at == item.created_at, "reading is not a change"
        age(store, "default", 300)
        store.search(("n",))
        assert left_seconds(store, "default") > 500
        age(store, "default", -1)
        assert store.get(("n",), "default") is None
        assert keys(store.search(("n",))) == ["never"]


def test_batch_reads_before_it_writes_and_writes_all_or_nothing(store):
    from langgraph.store.base import GetOp, PutOp

    got, put, again = store.batch([GetOp(("n",), "k"), PutOp(("n",), "k", {"n": 1}), PutOp(("n",), "k", {"n": 2})])
    assert (got, put, again) == (None, None, None)
    assert store.get(("n",), "k").value == {"n": 2}
    with pytest.raises(ks.NotSerializable, match="item 'bad' of"):
        store.batch([PutOp(("n",), "good", {}), PutOp(("n",), "bad", {"f": print})])
    assert store.get(("n",), "good") is None


def letters(texts):
    """An embedding in which texts with the same letters are alike."""
    return [[float(text.lower().count(letter)) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]


@pytest.mark.parametrize("is_async", [False, True])
def test_search_by_meaning(is_async):
    with KeepstepStore("memory:", index={"dims": 26, "embed": letters, "fields": ["text"]}) as made:
        store = Awaited(made) if is_async else made
        store.put(("n",), "bees", {"text": "bees buzz", "n": 1})
        store.put(("n",), "cats", {"text": "cats chase", "n": 2})
        store.put(("n",), "none", {"text": "buzz"}, index=False)
        found = store.search(("n",), query="a buzz of bees")
        assert keys(found) == ["bees", "cats", "none"]
        assert found[0].score > 0.7 > found[1].score
        assert found[2].score is None
        assert keys(store.search(("n",), query="buzz", filter={"n": 2})) == ["cats"]


class State(TypedDict, total=False):
    greeting: str


async def test_nodes_of_a_graph_use_it_beside_an_engine(tmp_path):
    async with ks.open(f"sqlite:///{tmp_path}/runs.db") as engine:

        async def greet(state: State, runtime: Runtime):
            await runtime.store.aput(("users",), "anna", {"seen": True})
            return {"greeting": str((await runtime.store.aget(("users",), "anna")).value)}

        graph = StateGraph(State).add_node("greet", greet).add_edge(START, "greet").compile(store=KeepstepStore(engine))
        assert (await graph.ainvoke({}))["greeting"] == "{'seen': True}"
        assert len(await engine.documents.list("langgraph:items")) == 1


def test_twins_have_the_same_methods():
    for name in ("get", "search", "put", "delete", "list_namespaces", "batch"):
        assert inspect.iscoroutinefunction(getattr(KeepstepStore, f"a{name}"))
