"""The checkpoint saver for LangGraph: the official conformance suite, and what that suite does not ask."""

import asyncio
import dataclasses
import json
import operator
import os
import pickle
import signal
import threading
import time
import traceback
from contextlib import contextmanager
from typing import Annotated, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import ProgressCallbacks
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt

import keepstep as ks
from keepstep.agents.langgraph import KeepstepSaver, ThreadMoved, in_turn
from keepstep.agents.langgraph.serde import StrictSerializer
from tests.agents.lives import noted
from tests.postgres import empty_store

STORES = ["memory", "sqlite", "files", "postgres"]


@contextmanager
def store_url(kind, folder):
    if kind == "postgres":
        with empty_store() as url:
            yield url
    else:
        yield {"memory": "memory:", "sqlite": f"sqlite:///{folder}/runs.db", "files": f"files:{folder}/runs"}[kind]


class Blocking(KeepstepSaver):
    """The same suite for the blocking methods: each async method calls its twin."""

    async def aget_tuple(self, config):
        return self.get_tuple(config)

    async def alist(self, config, **options):
        for one in self.list(config, **options):
            yield one

    async def aput(self, *args):
        return self.put(*args)

    async def aput_writes(self, *args, **options):
        self.put_writes(*args, **options)

    async def adelete_thread(self, thread_id):
        self.delete_thread(thread_id)

    async def adelete_for_runs(self, run_ids):
        self.delete_for_runs(run_ids)

    async def acopy_thread(self, *args):
        self.copy_thread(*args)

    async def aprune(self, *args, **options):
        self.prune(*args, **options)


@pytest.mark.parametrize("made", [KeepstepSaver, Blocking])
@pytest.mark.parametrize("kind", STORES)
async def test_conformance_suite_passes_in_full(kind, made, tmp_path):
    @checkpointer_test(name="KeepstepSaver")
    async def saver():
        with store_url(kind, tmp_path) as url, made(url) as one:
            yield one

    results = []
    progress = ProgressCallbacks(on_test_result=lambda *result: results.append(result))
    report = await validate(saver, progress=progress)
    assert [(name, error) for _, name, passed, error in results if not passed] == []
    assert len(results) >= 81
    assert report.passed_all()


# -- five callers at once ----------------------------------------------------------------------------------------------


class Log(TypedDict, total=False):
    log: Annotated[list[str], operator.add]
    paid: bool


def log_graph(saver, noted=None):
    """A graph with a node that appends, and one that pays, but only once per thread."""

    def note(state: Log):
        return {}

    def pay(state: Log):
        if not state.get("paid"):
            noted("pay")
            time.sleep(0.05)  # others would pay meanwhile
        return {"paid": True}

    return StateGraph(Log).add_sequence([note, pay]).add_edge(START, "note").compile(checkpointer=saver)


def play_update(url, number, folder):
    """Update the thread; read it again if another caller was first."""
    with KeepstepSaver(url) as saver:
        graph = log_graph(saver)
        wait_for_all(folder)
        for turn in range(TURNS_EACH):
            while True:
                try:
                    graph.update_state(THREAD, {"log": [f"{number}.{turn}"]})
                    break
                except ThreadMoved:
                    note(folder, "moved")


def play_in_turn(url, number, folder):
    """Update the thread and run its graph, when it is this caller's turn."""
    with KeepstepSaver(url) as saver:
        graph = in_turn(log_graph(saver, lambda effect: note(folder, effect)))
        wait_for_all(folder)
        for turn in range(TURNS_EACH):
            if turn % 2:
                graph.update_state(THREAD, {"log": [f"{number}.{turn}"]})
            else:
                graph.invoke({"log": [f"{number}.{turn}"]}, THREAD, durability="exit" if turn % 4 else "async")


def play_in_turn_async(url, number, folder):
    async def play():
        with KeepstepSaver(url) as saver:
            graph = in_turn(log_graph(saver, lambda effect: note(folder, effect)))
            wait_for_all(folder)
            for turn in range(TURNS_EACH):
                if turn % 2:
                    await graph.aupdate_state(THREAD, {"log": [f"{number}.{turn}"]})
                else:
                    await graph.ainvoke({"log": [f"{number}.{turn}"]}, THREAD)

    asyncio.run(play())


THREAD = {"configurable": {"thread_id": "one"}}
CALLERS, TURNS_EACH = 5, 4


def note(folder, effect):
    with (folder / "effects").open("a") as file:
        file.write(f"{effect}\n")


def wait_for_all(folder):
    """Begin at the same moment as the other callers."""
    (folder / f"ready {os.getpid()}").touch()
    deadline = time.monotonic() + 60
    while len(list(folder.glob("ready *"))) < CALLERS:
        assert time.monotonic() < deadline, "the other callers never began"
        time.sleep(0.001)


def in_processes(play, url, folder):
    """Let all callers play, each in a forked process; a fork has no connection yet."""
    children = []
    for number in range(CALLERS):
        if not (child := os.fork()):
            code = 1
            try:
                play(url, number, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * CALLERS


@pytest.mark.parametrize("play", [play_update, play_in_turn, play_in_turn_async])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_five_processes_lose_no_update_of_a_thread(kind, play, tmp_path):
    with store_url(kind, tmp_path) as url:
        KeepstepSaver(url).close()
        in_processes(play, url, tmp_path)
        with KeepstepSaver(url) as saver:
            log = log_graph(saver).get_state(THREAD).values["log"]
    assert sorted(log) == [f"{number}.{turn}" for number in range(CALLERS) for turn in range(TURNS_EACH)]
    effects = noted(tmp_path)
    if play is not play_update:
        assert effects == ["pay"], "callers ran the same node"


def asking_graph(saver, noted=None):
    """A graph that asks, and then pays."""

    def pay(state: Log):
        if interrupt("pay?"):
            noted("pay")
            time.sleep(0.05)  # others would pay meanwhile
        return {"paid": True}

    return StateGraph(Log).add_node("pay", pay).add_edge(START, "pay").compile(checkpointer=saver)


def play_resume(url, number, folder):
    with KeepstepSaver(url) as saver:
        graph = in_turn(asking_graph(saver, lambda effect: note(folder, effect)))
        wait_for_all(folder)
        graph.invoke(Command(resume=True), THREAD)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_five_processes_that_resume_a_thread_pay_once(kind, tmp_path):
    with store_url(kind, tmp_path) as url:
        with KeepstepSaver(url) as saver:
            asking_graph(saver).invoke({"log": ["a"]}, THREAD)
        in_processes(play_resume, url, tmp_path)
        with KeepstepSaver(url) as saver:
            assert asking_graph(saver).get_state(THREAD).values == {"log": ["a"], "paid": True}
    assert noted(tmp_path) == ["pay"]


async def test_five_tasks_of_one_process_lose_no_update(tmp_path):
    saver = KeepstepSaver(f"sqlite:///{tmp_path}/runs.db")
    graph = log_graph(saver, lambda _: None)

    async def update(number):
        while True:
            try:
                return await graph.aupdate_state(THREAD, {"log": [str(number)]}, as_node="note")
            except ThreadMoved:
                await asyncio.sleep(0)

    await asyncio.gather(*map(update, range(5)))
    assert sorted(graph.get_state(THREAD).values["log"]) == list("01234")
    saver.close()


@pytest.mark.parametrize("kind", STORES)
def test_update_of_an_older_state_is_refused(kind, tmp_path):
    with store_url(kind, tmp_path) as url, KeepstepSaver(url) as saver:
        graph = log_graph(saver, lambda _: None)
        first = graph.invoke({"log": ["a"]}, THREAD)
        assert first["log"] == ["a"]
        read = saver.get_tuple(THREAD)
        graph.update_state(THREAD, {"log": ["b"]})
        with pytest.raises(ThreadMoved, match="thread 'one' has a newer checkpoint"):
            saver.put(read.config, {**read.checkpoint, "id": "1f000000"}, {"step": 9}, {})
        assert graph.get_state(THREAD).values["log"] == ["a", "b"]


def test_going_back_in_time_is_not_refused(tmp_path):
    """A caller that names a checkpoint makes a branch, which is the newest of the thread."""
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db") as saver:
        graph = log_graph(saver, lambda _: None)
        graph.invoke({"log": ["a"]}, THREAD)
        before = graph.get_state(THREAD).config
        graph.update_state(THREAD, {"log": ["b"]})
        branch = graph.update_state(before, {"log": ["c"]})
        assert graph.get_state(THREAD).values["log"] == ["a", "c"]
        assert graph.get_state(branch).values["log"] == ["a", "c"]
        oldest = [*graph.get_state_history(THREAD)][-1]
        assert graph.invoke(None, oldest.config)["log"] == ["a"]


def test_newest_is_the_last_written_if_the_clock_goes_back(tmp_path):
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db") as saver:
        checkpoint = {**empty_checkpoint(), "id": "2f"}
        first = saver.put(THREAD, checkpoint, {"step": 0}, {})
        saver.put(first, {**checkpoint, "id": "1f"}, {"step": 1}, {})
        assert saver.get_tuple(THREAD).checkpoint["id"] == "1f"


def test_turn_of_a_dead_caller_ends(tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    KeepstepSaver(url).close()
    if not (child := os.fork()):
        stream = in_turn(log_graph(KeepstepSaver(url), print), lease_seconds=3).stream({"log": ["a"]}, THREAD)
        next(stream)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with KeepstepSaver(url) as saver:
        impatient = in_turn(log_graph(saver, print), wait_seconds=0.05)
        with pytest.raises(ks.TimedOut, match=r"thread 'one' had no turn for this caller within 0\.05 s"):
            impatient.update_state(THREAD, {"log": ["b"]})
        in_turn(log_graph(saver, print)).update_state(THREAD, {"log": ["b"]})
        assert graph_log(saver)[-1] == "b"


def graph_log(saver):
    return log_graph(saver).get_state(THREAD).values["log"]


def test_stream_that_is_left_early_ends_its_turn(tmp_path):
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db") as saver:
        graph = in_turn(log_graph(saver, lambda _: None), wait_seconds=5)
        stream = graph.stream({"log": ["a"]}, THREAD)
        next(stream)
        stream.close()

        async def leave():
            async for _ in graph.astream({"log": ["b"]}, THREAD):
                break

        asyncio.run(leave())
        graph.update_state(THREAD, {"log": ["c"]}, as_node="pay")
        assert graph_log(saver)[-1] == "c"


def test_turn_is_renewed_and_its_node_may_update_the_thread(tmp_path):
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db") as saver:
        began = threading.Event()

        def slow(state: Log):
            began.set()
            time.sleep(2.5)  # longer than the lease
            graph.get_state(THREAD)
            return {"log": ["slow"]}

        graph = StateGraph(Log).add_node("slow", slow).add_edge(START, "slow").compile(checkpointer=saver)
        graph = in_turn(graph, lease_seconds=1.5)
        first = threading.Thread(target=graph.invoke, args=({"log": ["a"]}, THREAD))
        first.start()
        assert began.wait(30)
        graph.update_state(THREAD, {"log": ["b"]})
        first.join()
        assert graph_log(saver) == ["a", "slow", "b"]


# -- what the conformance suite does not ask ---------------------------------------------------------------------------


def joined(state, writes):
    return [*(state or []), *(item for write in writes for item in write)]


class Deltas(TypedDict, total=False):
    n: int
    log: Annotated[list, DeltaChannel(joined, snapshot_frequency=4)]


def delta_graph(saver):
    """Six steps one after the other, then four side by side whose writes have an order."""

    def step(state: Deltas):
        return {"n": state.get("n", 0) + 1, "log": [state.get("n", 0)]}

    def side(state: dict):
        return {"log": [state["x"]]}

    def following(state: Deltas):
        return "step" if state["n"] < 6 else [Send("side", {"x": x}) for x in "dcba"]

    graph = StateGraph(Deltas).add_node("step", step).add_node("side", side).add_edge(START, "step")
    return graph.add_conditional_edges("step", following, ["step", "side"]).compile(checkpointer=saver)


@pytest.mark.parametrize("kind", STORES)
def test_delta_channels_survive_copy_and_prune(kind, tmp_path):
    with store_url(kind, tmp_path) as url, KeepstepSaver(url) as saver:
        graph = delta_graph(saver)
        live = graph.invoke({"n": 0}, THREAD, durability="sync")["log"]
        assert live == [0, 1, 2, 3, 4, 5, "d", "c", "b", "a"]
        assert graph.get_state(THREAD).values["log"] == live, "the order of writes is not that of the run"
        saver.copy_thread("one", "two")
        saver.prune(["one"])
        two = {"configurable": {"thread_id": "two"}}
        assert graph.get_state(THREAD).values["log"] == graph.get_state(two).values["log"] == live
        assert 1 < len([*saver.list(THREAD)]) < len([*saver.list(two)])
        assert graph.invoke({"n": 5}, THREAD, durability="sync")["log"] == [*live, 5, *"dcba"]
        saver.delete_thread("one")
        assert saver.documents.blocking.list("langgraph:threads", prefix="one/") == []


def test_large_values_are_stored_once_and_pruned(tmp_path):
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db") as saver:

        class Large(TypedDict, total=False):
            text: str
            n: int

        def step(state: Large):
            return {"n": state.get("n", 0) + 1}

        def following(state: Large):
            return "step" if state["n"] < 10 else END

        graph = StateGraph(Large).add_node("step", step).add_edge(START, "step")
        graph = graph.add_conditional_edges("step", following).compile(checkpointer=saver)
        graph.invoke({"text": "x" * 100_000}, THREAD)
        stored = saver.documents.blocking.list("langgraph:threads")
        assert sum(len(one.value) for one in stored) < 4 * 100_000, "it is in the input, a write and a channel"
        graph.invoke({"text": "y" * 100_000, "n": 9}, THREAD)
        saver.prune(["one"])
        assert len(saver.documents.blocking.list("langgraph:threads", prefix="one/v/")) == 1
        assert graph.get_state(THREAD).values == {"text": "y" * 100_000, "n": 10}


def test_prune_beside_a_writer_loses_nothing(tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    with KeepstepSaver(url) as saver, KeepstepSaver(url) as other:
        graph = log_graph(saver, lambda _: None)
        over = threading.Event()

        def prune():
            while not over.is_set():
                other.prune(["one"])

        pruning = threading.Thread(target=prune)
        pruning.start()
        for number in range(30):
            graph.update_state(THREAD, {"log": [str(number)]})
        over.set()
        pruning.join()
        assert graph_log(saver) == [str(number) for number in range(30)]


@dataclasses.dataclass
class Order:
    number: int


class Shop(TypedDict, total=False):
    order: Order


def shop_graph(saver):
    def buy(state: Shop):
        return {"order": Order(7)}

    return StateGraph(Shop).add_node("buy", buy).add_edge(START, "buy").compile(checkpointer=saver)


@pytest.mark.parametrize("types", [[Order], [Shop]])
def test_listed_types_come_back(types, tmp_path):
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db", types=types) as saver:
        shop_graph(saver).invoke({}, THREAD)
        assert shop_graph(saver).get_state(THREAD).values["order"] == Order(7)


def test_other_types_are_not_imported(tmp_path):
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db") as saver:
        shop_graph(saver).invoke({}, THREAD)
        with pytest.raises(ks.NotSerializable, match=r"Order, which is not listed; add it to types="):
            shop_graph(saver).get_state(THREAD)


def test_pickle_is_refused(tmp_path):
    with pytest.raises(ks.DefinitionError, match="never unpickles"):
        KeepstepSaver("memory:", serde=JsonPlusSerializer(pickle_fallback=True))
    with pytest.raises(ks.NotSerializable, match="of kind 'pickle'"):
        StrictSerializer().loads_typed(("pickle", pickle.dumps(1)))


def test_stored_json_revives_no_object():
    """LangGraph reads values of the kind `json`, which it no longer writes, and builds the classes that they name."""
    prompt = {"lc": 1, "type": "constructor", "id": ["langchain", "prompts", "prompt", "PromptTemplate"]}
    for stored in ({**prompt, "kwargs": {"template": "x", "input_variables": []}}, {"a": 1}):
        with pytest.raises(ks.NotSerializable, match="of kind 'json'"):
            StrictSerializer().loads_typed(("json", json.dumps(stored).encode()))


def test_serializer_of_the_caller_is_kept(tmp_path):
    class Cipher:
        def encrypt(self, plaintext):
            return "turned", plaintext[::-1]

        def decrypt(self, name, ciphertext):
            return ciphertext[::-1]

    listed = JsonPlusSerializer(allowed_msgpack_modules=[Order])
    with KeepstepSaver("memory:", serde=EncryptedSerializer(Cipher(), listed)) as saver:
        shop_graph(saver).invoke({}, THREAD)
        assert shop_graph(saver).get_state(THREAD).values["order"] == Order(7)
        assert saver.serde.dumps_typed({"a": 1})[0] == "msgpack+turned"


def test_store_may_be_encrypted(tmp_path):
    url = f"sqlite:///{tmp_path}/runs.db"
    keys = ks.Keys("first", {"first": b"k" * 32})
    with KeepstepSaver(url, keys=keys) as saver:
        log_graph(saver, lambda _: None).invoke({"log": ["in clear"]}, THREAD)
        assert graph_log(saver) == ["in clear"]
    assert b"in clear" not in b"".join(path.read_bytes() for path in tmp_path.glob("runs.db*"))


async def test_saver_of_an_engine_is_beside_its_runs(tmp_path):
    async with ks.open(f"sqlite:///{tmp_path}/runs.db") as engine:
        saver = KeepstepSaver(engine)
        graph = log_graph(saver, lambda _: None)
        await graph.ainvoke({"log": ["a"]}, THREAD)
        assert (await graph.aget_state(THREAD)).values["log"] == ["a"]
        saver.close()
        assert len(await engine.documents.list("langgraph:threads")) > 3
        with pytest.raises(ks.DefinitionError, match="keys= and options of a store need its URL"):
            KeepstepSaver(engine, keys=ks.Keys("first", {"first": b"k" * 32}))


def test_odd_names_of_threads_are_kept_apart(tmp_path):
    names = ["a", "a/", "a/c", "%", "ä b\n", "x" * 600, "x" * 601, "1", 1]
    with KeepstepSaver(f"sqlite:///{tmp_path}/runs.db") as saver:
        graph = log_graph(saver, lambda _: None)
        for name in names[:-1]:
            graph.update_state({"configurable": {"thread_id": name}}, {"log": [name]})
        for name in names:
            assert graph.get_state({"configurable": {"thread_id": name}}).values["log"] == [str(name)]
        saver.delete_thread("a")
        assert {one.config["configurable"]["thread_id"] for one in saver.list(None)} == set(names[1:-1])


def test_config_without_a_thread_is_refused():
    with pytest.raises(ks.DefinitionError, match="config= has no thread_id"):
        KeepstepSaver("memory:").get_tuple({"configurable": {}})
    with pytest.raises(ks.DefinitionError, match="strategy= must be 'keep_latest' or 'delete'"):
        KeepstepSaver("memory:").prune(["one"], strategy="all")
    with pytest.raises(ks.DefinitionError, match="whose checkpointer is a KeepstepSaver"):
        in_turn(log_graph(None))
