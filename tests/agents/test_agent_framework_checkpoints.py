"""Workflows of the Microsoft Agent Framework go on from checkpoints that a store keeps as JSON."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

import pytest
from agent_framework import (
    Agent,
    AgentExecutor,
    Content,
    Message,
    WorkflowBuilder,
    WorkflowCheckpoint,
    WorkflowCheckpointException,
    WorkflowEvent,
    WorkflowMessage,
)
from pydantic import BaseModel

import keepstep as ks
from keepstep.agents.agent_framework import KeepstepCheckpointStorage
from keepstep.engine.documents import Documents
from tests.agents.test_agent_framework import Join, Scripted, Start


class Mood(Enum):
    GLAD = "glad"


class Price(BaseModel):
    eur: int


@dataclass
class Order:
    item: str
    price: Price
    at: datetime
    mood: Mood
    tags: tuple[str, ...] = ()


@dataclass
class Question:
    text: str


TYPES = [Order, Price, Mood, Question]
ORDER = Order("tea", Price(eur=5), datetime(2026, 11, 18, tzinfo=UTC), Mood.GLAD, ("a", "b"))


@pytest.fixture(params=["memory", "sqlite"])
def documents(request, tmp_path):
    with Documents.open("memory:" if request.param == "memory" else f"sqlite:///{tmp_path}/runs.db") as found:
        yield found


def checkpoint(name="shop", at="2026-11-18T10:00:00+00:00", **parts):
    return WorkflowCheckpoint(workflow_name=name, graph_signature_hash="g", timestamp=at, **parts)


async def test_checkpoint_comes_back_as_it_was(documents):
    storage = KeepstepCheckpointStorage(documents, types=TYPES)
    message = Message(role="user", contents=["hi", Content.from_function_call("c1", "look", arguments={"at": "x"})])
    asked = WorkflowEvent.request_info("q1", "join", Question("ok?"), bool)
    saved = checkpoint(
        messages={"a": [WorkflowMessage(ORDER, "a", "b"), WorkflowMessage([message], "a", None)]},
        state={"order": ORDER, "seen": {1, 2}, "by number": {1: "one"}, "$": "dollar", "raw": b"\x00", "none": None},
        pending_request_info_events={"q1": asked},
        iteration_count=3,
    )
    assert await storage.save(saved) == saved.checkpoint_id
    found = await storage.load(saved.checkpoint_id)
    assert (found.state, found.iteration_count) == (saved.state, 3)
    assert found.messages["a"][0] == saved.messages["a"][0]
    assert found.messages["a"][1].data[0].to_dict() == message.to_dict()
    event = found.pending_request_info_events["q1"]
    assert (event.request_id, event.source_executor_id, event.data) == ("q1", "join", Question("ok?"))
    assert event.response_type is bool
    [stored] = await documents.list("agent-framework:checkpoints")
    assert b"test_agent_framework_checkpoints:Order" in stored.value


async def test_checkpoints_are_listed_by_workflow_and_time(documents):
    storage = KeepstepCheckpointStorage(documents)
    times = ["2026-11-18T10:00:01+00:00", "2026-11-18T10:00:00+00:00", "2026-11-18T12:00:00.5+02:00"]
    saved = [checkpoint(at=at, checkpoint_id=f"c{number}") for number, at in enumerate(times)]
    for one in [*saved, checkpoint("shop/2"), checkpoint("sho")]:
        await storage.save(one)
    assert await storage.list_checkpoint_ids(workflow_name="shop") == ["c1", "c2", "c0"]
    assert [one.timestamp for one in await storage.list_checkpoints(workflow_name="shop")] == sorted(times, key=by_time)
    assert (await storage.get_latest(workflow_name="shop")).checkpoint_id == "c0"
    assert await storage.get_latest(workflow_name="none") is None
    assert await storage.delete("c0")
    assert not await storage.delete("c0")
    await storage.save(checkpoint(at="2026-11-18T11:00:00+00:00", checkpoint_id="c1"))
    assert await storage.list_checkpoint_ids(workflow_name="shop") == ["c2", "c1"]
    with pytest.raises(WorkflowCheckpointException, match="No checkpoint found with ID c0"):
        await storage.load("c0")


def by_time(text):
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    "value, where",
    [
        (ORDER, r"checkpoint\['state'\]\['it'\]\[0\] is of .*Order"),
        (OrderedDict(), "OrderedDict"),
        (object(), r"builtins\.object"),
        (lambda: 1, "function"),
    ],
    ids=["class", "subclass", "object", "function"],
)
async def test_value_that_json_cannot_hold_is_refused(documents, value, where):
    storage = KeepstepCheckpointStorage(documents)
    with pytest.raises(WorkflowCheckpointException, match=where + ".*name the class in types="):
        await storage.save(checkpoint(state={"it": [value]}))
    assert await documents.list("agent-framework:checkpoints") == []


async def test_stored_name_of_an_unknown_class_is_not_looked_up(documents):
    storage = KeepstepCheckpointStorage(documents)
    for name in ("os:system", "agent_framework:Agent", "builtin:int"):
        value = {"workflow_name": "x", "graph_signature_hash": "g", "state": {"a": {"$": name, "of": {}}}}
        await documents.put("agent-framework:checkpoints", "bad", json.dumps(value).encode())
        with pytest.raises(WorkflowCheckpointException, match=f"holds a {name}, which this storage does not know"):
            await storage.load("bad")


def test_class_without_a_form_is_refused(documents):
    with pytest.raises(ks.DefinitionError, match="`types` must hold dataclasses"):
        KeepstepCheckpointStorage(documents, types=[object])


class Remembering(Join):
    """A `Join` that keeps its text in checkpoints."""

    async def on_checkpoint_save(self):
        return {"text": getattr(self, "text", "")}

    async def on_checkpoint_restore(self, state):
        self.text = state["text"]


def build(effects, storage):
    start, join = Start(id="start"), Remembering(id="join")
    poets = [AgentExecutor(Agent(client=Scripted(effects, lambda _, w=word: w), name=word), id=word) for word in "ab"]
    graph = WorkflowBuilder(name="poems", start_executor=start, checkpoint_storage=storage)
    return graph.add_fan_out_edges(start, poets).add_fan_in_edges(poets, join).build()


async def test_workflow_goes_on_in_another_process(tmp_path, effects):
    url = f"sqlite:///{tmp_path}/runs.db"
    with Documents.open(url) as documents:
        result = await build(effects, KeepstepCheckpointStorage(documents)).run("rhyme")
        [asked] = result.get_request_info_events()
    with Documents.open(url) as documents:
        storage = KeepstepCheckpointStorage(documents)
        latest = await storage.get_latest(workflow_name="poems")
        graph = build(effects, storage)
        restored = await graph.run(checkpoint_id=latest.checkpoint_id)
        [again] = restored.get_request_info_events()
        assert (again.request_id, again.data) == (asked.request_id, {"publish": "a & b"})
        result = await graph.run(responses={again.request_id: True})
        assert result.get_outputs() == ["a & b: yes"]
    assert sorted(effects) == ["model a", "model b"]


async def test_storage_in_the_code_of_a_workflow_is_refused(documents):
    storage = KeepstepCheckpointStorage(documents)

    @ks.workflow
    async def save():
        await storage.save(checkpoint())

    async with ks.Engine("memory:") as engine:
        with pytest.raises(ks.RunFailed, match="without a checkpoint storage"):
            await (await engine.start(save)).result(30)
