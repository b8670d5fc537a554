"""Agents, teams and quality loops written in a file."""

import types

import pytest

import keepstep as ks
from keepstep.engine.process import Process
from keepstep.workflows.definition import KNOWN

pytestmark = [pytest.mark.one_store]

FLOW = """
keepstep: 1
metadata: {name: press, version: "1"}
spec:
  form: graph
  teams:
    desk: {agents: [ann, bob], when_nobody: wait, timeout: 1m}
steps:
  write:
    kind: agent
    need: write
    team: desk
    task: topic
    into: draft
    next: polish
  polish:
    kind: agent
    need: [write, polish]
    task: draft
    into: text
    refine: {critic: judge, threshold: 0.9, rounds: 3, ask: editor, timeout: 10m}
"""


@pytest.fixture(autouse=True)
def forget():
    yield
    for name in ("press", "own"):
        KNOWN.pop(name, None)


async def write(task):
    return f"about {task}" if isinstance(task, str) else f"{task['task']}, draft {task['round']}"


AGENTS = [
    ks.Agent("zoe", perform=len, capabilities=["write"]),
    ks.Agent("bob", perform=write, capabilities=["write"]),
    ks.Agent("eve", perform=write, capabilities=["write", "polish"]),
    ks.Agent("judge", perform=lambda ask: ask["round"] / 2),
]


async def test_file_gives_tasks_to_a_team_and_refines(world, tmp_path, monkeypatch):
    monkeypatch.setattr(Process, "look_seconds", 0.05)
    (tmp_path / "press.yaml").write_text(FLOW)
    flow = ks.load(tmp_path / "press.yaml")
    async with world.engine(agents=AGENTS) as engine:
        run = await engine.start(flow, {"topic": "bees"})
        state = await run.result(30)
        assert state["draft"] == "about bees"
        assert state["text"] == "about bees, draft 2"
        assert state["text_quality"] == {"score": 1.0, "rounds": 2, "accepted_by": "critic"}
        agents = [one.agent for one in await run.checkpoints() if one.kind == "agent started"]
        assert agents == ["bob", "eve", "judge", "eve", "judge"]


async def test_file_names_agents_of_a_module(world, tmp_path):
    calls = []

    @ks.step
    async def ask_model(prompt):
        calls.append(prompt)
        return prompt.upper()

    module = types.ModuleType("minds")

    async def reviewer(text):
        return await ask_model(await ask_model(text))

    module.reviewer = reviewer
    module.writer = ks.Agent("ann", perform=reviewer)
    module.count = ks.Agent("counter", perform=len)
    (tmp_path / "own.yaml").write_text(
        """
keepstep: 1
metadata: {name: own}
spec: {entrypoint: first}
steps:
  first: {kind: agent, agent: reviewer, durable: true, with: {text: topic}, into: draft, next: second}
  second: {kind: agent, agent: writer, with: {text: draft}, into: text, next: third}
  third: {kind: agent, agent: count, with: {obj: text}, into: size}
"""
    )
    flow = ks.load(tmp_path / "own.yaml", modules=[module])
    async with world.engine() as engine:
        run = await engine.start(flow, {"topic": "bees"})
        with pytest.raises(ks.RunFailed, match="takes no keyword arguments"):
            await run.result(30)
        done = [(one.step, one.agent) for one in await run.checkpoints() if one.kind == "step completed"]
        assert ("first#1/ask_model#2", "reviewer") in done
        assert ("second#1/ask_model#1", "writer") in done
        assert len(calls) == 4


def problems_of(text, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ks.DefinitionError) as refused:
        ks.load(path)
    return str(refused.value)


def test_mistakes_are_named_with_their_place(tmp_path):
    text = """
keepstep: 1
metadata: {name: press}
spec: {form: graph}
steps:
  a: {kind: agent, need: write, team: nobody, retry: {attempts: 2}, next: b}
  b: {kind: agent, agent: x, refine: {critic: c}, durable: true, at_most_once: true}
"""
    told = problems_of(text, tmp_path)
    assert "steps.a.team: there is no team 'nobody'" in told
    assert "steps.a.retry: 'retry' belongs to an agent that the caller names" in told
    assert "steps.b.refine: 'refine' belongs to an agent that a worker hosts" in told
    assert "steps.b.at_most_once: 'at_most_once' is for one attempt" in told
    dag = "keepstep: 1\nmetadata: {name: press}\nspec: {form: dag}\nsteps:\n  a: {kind: agent, need: write}\n"
    assert "'need' belongs to a graph, and this is a dag" in problems_of(dag, tmp_path)


def test_another_need_is_another_definition(tmp_path):
    prints = set()
    for need in ("write", "paint"):
        path = tmp_path / "press.yaml"
        path.write_text(FLOW.replace("need: write", f"need: {need}"))
        prints.add(ks.load(path).fingerprint)
    assert len(prints) == 2
