"""Graphs in real processes: many who talk to one conversation or resume one run, and kills after any checkpoint."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

import keepstep as ks
from keepstep.model import Status
from tests.postgres import empty_store

from . import programs
from .test_processes import World, _until, send_unless_finished

pytestmark = pytest.mark.crash


@pytest.fixture(params=["sqlite", "files"])
def world(request, tmp_path):
    with World(tmp_path) as made:
        if request.param == "files":
            made.path = f"files:{tmp_path}/runs"
        yield made


@pytest.fixture
def world_on_postgres(tmp_path):
    with World(tmp_path) as made, empty_store() as made.path:
        yield made


def talk_at_once(world):
    """Five processes send three messages each to one conversation, all at the same moment."""
    processes = world.processes(5)
    processes[0].ask("start", workflow="talk", args=[{"count": 15}], run_id="r")
    at = time.time() + 0.3
    said = {number: [10 * number + one for one in range(3)] for number in range(5)}
    for number, process in enumerate(processes):
        process.tell("signal_many", run_id="r", name="message", payloads=said[number], at=at)
    for process in processes:
        process.answer()
    answers = processes[3].ask("result", run_id="r")["answers"]
    assert [place for place, _ in answers] == list(range(15))
    assert sorted(message for _, message in answers) == sorted(one for some in said.values() for one in some)
    assert set(world.effects.counts().values()) == {1}
    world.judge()


def test_conversation_answers_five_processes_at_once(world):
    talk_at_once(world)


def test_conversation_on_postgres_answers_five_processes_at_once(world_on_postgres):
    talk_at_once(world_on_postgres)


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
def test_three_processes_that_resume_one_breakpoint_charge_once(world):
    processes = world.processes(3)
    world.touch("go")
    processes[0].ask("start", workflow="till", args=[{"path": str(world.folder / "go")}], run_id="r")
    world.look(lambda engine: _until(engine, "r", Status.WAITING))
    at = time.time() + 0.3
    for process in processes:
        process.tell("steer", run_id="r", act="resume", at=at)
    for process in processes:
        process.answer()
    for process in processes:
        assert process.ask("result", run_id="r")["log"] == ["priced", "charged", "closed"]
    assert {effect.step: effect.attempt for effect in world.effects.bodies("r")} == {
        "priced#1": 1,
        "charged#1": 1,
        "held_open#1": 1,
    }
    assert len(world.effects.bodies("r")) == 3
    world.judge()


@pytest.mark.parametrize("world", ["sqlite"], indirect=True)
def test_three_processes_that_recover_one_run_charge_once(world):
    owner, *heirs = world.processes(4)
    owner.ask("start", workflow="till", args=[{"path": str(world.folder / "go")}], run_id="r")
    world.look(lambda engine: _until(engine, "r", Status.WAITING))
    owner.ask("steer", run_id="r", act="resume")
    world.wait_for_body("r", "held_open")
    driver = world.run("r").worker
    [holder] = [one for one in (owner, *heirs) if one.ask("worker") == driver]
    holder.send(signal.SIGKILL)
    world.wait_for_body("r", "held_open", 2)
    for process in (owner, *heirs):
        if process is not holder:
            process.ask("steer", run_id="r", act="resume")
    world.touch("go")
    [left, *_] = [one for one in (owner, *heirs) if one is not holder]
    assert left.ask("result", run_id="r")["paid"] == 7
    began = [effect.step for effect in world.effects.bodies("r")]
    assert began == ["priced#1", "charged#1", "held_open#1", "held_open#1"]
    world.judge()


#: In a branch of a parallel part, at its join, in a map, and at the exit.
MOMENTS = ["split#1.mark/mark#1", "split#1", "double#1.1/twice#1", "sum_up#1"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_process_killed_right_after_a_checkpoint_repeats_nothing(tmp_path, moment):
    with World(tmp_path) as world:
        victim = world.process(die_at=moment).ready()
        given = {"round": 0, "xs": [1, 2], "number": 4}
        victim.tell("start", workflow="board", args=[given], run_id="main")
        victim.tell("signal", run_id="main", name="word", payload="yes", id="word")
        victim.tell("result", run_id="main")
        assert victim.popen.wait(60) == -signal.SIGKILL
        assert not world.run("main").status.finished
        heir = world.process().ready()
        send_unless_finished(heir, "main", "word", "yes")
        assert heir.ask("result", run_id="main") == programs.BOARD
        assert len(world.effects.bodies("main", moment)) == (0 if moment == "split#1" else 1)
        world.judge()


@pytest.mark.parametrize("content, most", [("dull", 0.43), ("noise", 0.63)])
def test_two_hundred_steps_that_append_a_kilobyte_each_store_it_once(tmp_path, content, most):
    """Twice in all: in the records of the steps, and in the result. What repeats itself is compressed there."""
    graph = ks.Graph("chat", reducers={"messages": "append"})

    @graph.step
    async def speak(state):
        number = len(state["messages"])
        return {"messages": ["x" * 1024 if content == "dull" else random.Random(number).randbytes(512).hex()]}

    graph.edge("speak", "speak", when=lambda state: len(state["messages"]) < 200)
    graph.entry("speak")
    graph.exit("speak")

    async def main(*states):
        async with ks.open(tmp_path / "runs.db", workflows=[graph]) as engine:
            return [await (await engine.start(graph, state)).result() for state in states]

    def size():
        return sum(one.stat().st_size for one in tmp_path.iterdir() if one.name.startswith("runs.db")) / 1e6

    asyncio.run(main())
    empty = size()  # the tables and indexes of a store without runs
    [state] = asyncio.run(main({"messages": []}))
    messages = state["messages"]
    assert (len(messages), sum(map(len, messages))) == (200, 200 * 1024)
    stored = size() - empty
    print(f"200 messages of 1 KB ({content}) are stored in {stored:.2f} MB")
    assert stored <= most
