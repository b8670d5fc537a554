"""Agents and teams: a task goes to an agent that can perform it, and to the next one if that fails (F1, F2, F7)."""

import asyncio
import time
from dataclasses import dataclass

import pytest

import keepstep as ks
from keepstep.engine.agents import Agents
from keepstep.engine.process import Process
from keepstep.kernel.perform import Search, TaskLost
from tests.engine.world import until, until_recorded, until_status

pytestmark = pytest.mark.on_postgres


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch):
    """Heartbeats of hosts are looked at 20 times a second."""
    monkeypatch.setattr(Process, "look_seconds", 0.05)


@ks.step
async def shout(text):
    return text.upper()


def writer(name="writer", **options):
    async def perform(task):
        return f"{name}: {await shout(task)}"

    return ks.Agent(name, perform=perform, capabilities=["write"], **options)


def doing(name, function, **options):
    return ks.Agent(name, perform=function, capabilities=["write"], **options)


@ks.workflow
async def asks(need, task, options):
    return await ks.perform(need, task, **options)


async def choices(run):
    return [(one.agent, one.value) for one in await run.checkpoints() if one.kind == "agent started"]


async def test_task_is_performed_by_an_agent_of_another_process(world):
    async with world.engine(agents=[writer()], workflows=[]), world.engine(workflows=[asks]) as engine:
        run = await engine.start(asks, "write", "hello", {}, run_id="r")
        assert await run.result(30) == "writer: HELLO"
        [child] = (await engine.list(parent="r")).runs
        assert child.workflow == "agent:writer"
        records = [(one.kind.value, one.agent) for one in await run.checkpoints()]
        assert records[1:4] == [("agent started", "writer"), ("child", "writer"), ("agent completed", "writer")]
        task = await engine.get(child.id)
        assert {one.agent for one in await task.checkpoints()} == {"writer"}


async def test_agent_can_be_named_instead_of_a_capability(world):
    async with world.engine(agents=[writer("one"), writer("two")]) as engine:
        run = await engine.start(asks, "two", "hello", {})
        assert await run.result(30) == "two: HELLO"


async def test_choice_is_recorded_with_the_scores_of_all(world):
    async with world.engine(agents=[writer("one"), ks.Agent("other", perform=len, capabilities=["count"])]) as engine:
        run = await engine.start(asks, "write", "hello", {})
        await run.result(30)
        records = [one for one in await run.checkpoints() if one.kind == "agent started"]
        assert [one.agent for one in records] == ["one"]
        if not world.encrypted:
            assert b'"score":1.0' in records[0].value
            assert b'"other"' not in records[0].value


async def test_plain_function_and_step_and_object_are_agents(world):
    class Counter:
        name = "counter"
        capabilities = ("count",)

        async def perform(self, task):
            return len(task)

    @ks.agent(capabilities=["reverse"])
    def reverse(task):
        return task[::-1]

    stepping = ks.Agent("stepping", perform=shout)
    async with world.engine(agents=[Counter(), reverse, stepping]) as engine:
        answers = [
            await (await engine.start(asks, need, "abc", {})).result(30) for need in ("count", "reverse", "stepping")
        ]
        assert answers == [3, "cba", "ABC"]


async def test_task_of_a_dead_host_goes_to_the_next_agent(world):
    begun = asyncio.Event()

    async def hangs(task):
        begun.set()
        await asyncio.sleep(60)

    async with world.engine(workflows=[asks]) as engine:
        host = await world.started(agents=[doing("a", hangs)], workflows=[])
        run = await engine.start(asks, "write", "hello", {}, run_id="r")
        await begun.wait()
        async with world.engine(agents=[writer("b")], workflows=[]):
            await world.crash(host)
            assert await run.result(30) == "b: HELLO"
        ends = {one.workflow: one.status.value for one in (await engine.list(parent="r")).runs}
        assert ends == {"agent:a": "cancelled", "agent:b": "completed"}


@pytest.mark.one_store
@pytest.mark.live_only
async def test_parked_run_wakes_to_look_after_its_task(world, monkeypatch):
    monkeypatch.setattr(Process, "look_seconds", 2.5)
    begun = asyncio.Event()

    async def hangs(task):
        begun.set()
        await asyncio.sleep(60)

    async with world.engine(workflows=[asks]) as engine:
        host = await world.started(agents=[doing("a", hangs)], workflows=[])
        run = await engine.start(asks, "write", "hello", {}, run_id="r")
        await begun.wait()
        await until_status(run, "waiting")
        async with world.engine(agents=[writer("b")], workflows=[]):
            await world.crash(host)
            assert await run.result(30) == "b: HELLO"


async def test_refusal_and_failure_go_to_the_next_agent(world):
    async def refuses(task):
        raise ks.AgentRefused("not mine")

    async def fails(task):
        raise OSError("broken")

    agents = [doing("a", refuses), doing("b", fails), writer("c")]
    async with world.engine(agents=agents) as engine:
        run = await engine.start(asks, "write", "hello", {})
        assert await run.result(30) == "c: HELLO"
        assert [agent for agent, _ in await choices(run)] == ["a", "b", "c"]


async def test_failure_of_the_last_agent_is_raised(world):
    async def fails(task):
        raise OSError("broken")

    @ks.workflow
    async def catches(on_failure):
        try:
            await ks.perform("write", "x", on_failure=on_failure)
        except ks.StepFailed as error:
            return error.error.message

    async with world.engine(agents=[doing("a", fails), doing("b", fails)]) as engine:
        run = await engine.start(catches, "next")
        assert await run.result(30) == "broken"
        assert len(await choices(run)) == 2
        run = await engine.start(catches, "raise")
        assert await run.result(30) == "broken"
        assert len(await choices(run)) == 1


async def test_permanent_failure_is_not_given_to_others(world):
    async def fails(task):
        raise ks.Permanent("a bad task")

    async with world.engine(agents=[doing("a", fails), writer("b")]) as engine:
        run = await engine.start(asks, "write", "hello", {})
        with pytest.raises(ks.RunFailed, match="a bad task"):
            await run.result(30)
        assert (await engine.agents.get("a")).failed == 0


async def test_without_an_agent_the_task_is_unavailable(world):
    @ks.workflow
    async def catches():
        try:
            await ks.perform("fly", "x")
        except ks.AgentUnavailable as error:
            return str(error)

    async with world.engine(agents=[writer()]) as engine:
        assert "no worker hosts an agent" in await (await engine.start(catches)).result(30)


async def test_task_waits_for_an_agent_and_survives_a_crash(world):
    engine = await world.started(workflows=[asks])
    await engine.start(asks, "write", "hello", {"wait": True}, run_id="r")
    engine = await world.crash_and_recover(engine, workflows=[asks])
    run = await engine.get("r")
    async with world.engine(agents=[writer()], workflows=[]):
        assert await run.result(30) == "writer: HELLO"
    await engine.close()


async def test_waiting_task_that_every_agent_has_failed_is_not_held(world):
    async def fails(task):
        raise OSError("broken")

    async with world.engine(agents=[doing("a", fails), doing("b", fails)]) as engine:
        run = await engine.start(asks, "write", "x", {"wait": True})
        with pytest.raises(ks.RunFailed, match="broken"):
            await run.result(30)


async def test_failed_task_waits_for_an_agent_whose_host_is_gone(world):
    async def fails(task):
        raise OSError("broken")

    host = await world.started(agents=[writer("b")], workflows=[])
    async with world.engine(agents=[doing("a", fails)]) as engine:
        await world.crash(host)
        run = await engine.start(asks, "write", "x", {"wait": True})
        await until_recorded(run, "agent:a.result#1")
        async with world.engine(agents=[writer("b")], workflows=[]):
            assert await run.result(30) == "b: X"


async def test_lost_task_says_whether_it_had_begun(world):
    """Tasks that wait for an agent which dies again and again are not the cause of that."""
    begun = asyncio.Event()

    async def hangs(task):
        begun.set()
        await asyncio.sleep(60)

    async with world.engine(workflows=[asks]) as engine:
        host = await world.started(agents=[doing("a", hangs, max_tasks=1)], workflows=[])
        first = await engine.start(asks, "write", "first", {"wait": True})
        await begun.wait()
        second = await engine.start(asks, "write", "second", {"wait": True})
        await until_recorded(second, "agent:a#1")
        async with world.engine(agents=[writer("b")], workflows=[]):
            await world.crash(host)
            assert [await one.result(30) for one in (first, second)] == ["b: FIRST", "b: SECOND"]
        for run, expected in ((first, b'"begun":true'), (second, b'"begun":false')):
            lost = next(one for one in await run.checkpoints() if one.kind == "agent completed")
            assert world.encrypted or expected in lost.value


@pytest.mark.one_store
@pytest.mark.live_only
async def test_agent_that_dies_with_a_task_gets_it_three_times(world):
    search = Search(("write",), None, 1.0, True, "next", None, None)
    lost, waiting = TaskLost("lost"), TaskLost("lost")
    waiting.begun = False
    for _ in range(9):
        assert search.take("a", waiting)
    for _ in range(3):
        assert search.tried == []
        assert search.take("a", lost)
    assert search.tried == ["a"]
    patient = Search(("write",), None, 1.0, False, "next", None, None)
    assert patient.take("a", waiting)
    assert patient.tried == ["a"], "a task that does not wait tries each agent once"


async def test_late_task_is_cancelled(world):
    ended = asyncio.Event()

    async def hangs(task):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    @ks.workflow
    async def catches():
        try:
            await ks.perform("write", "x", timeout=0.2)
        except ks.TimedOut:
            return "late"

    async with world.engine(agents=[doing("a", hangs)]) as engine:
        run = await engine.start(catches, run_id="r")
        assert await run.result(30) == "late"
        await ended.wait()
        [child] = (await engine.list(parent="r")).runs
        assert child.status == "cancelled"


async def test_parent_that_recovers_waits_for_the_same_task(world):
    go = asyncio.Event()
    begun = []

    async def slow(task):
        begun.append(task)
        await go.wait()
        return "done"

    async with world.engine(agents=[doing("a", slow)], workflows=[]):
        engine = await world.started(workflows=[asks])
        await engine.start(asks, "write", "x", {}, run_id="r")
        await until(lambda: begun)
        engine = await world.crash_and_recover(engine, workflows=[asks])
        go.set()
        assert await (await engine.get("r")).result(30) == "done"
        assert begun == ["x"]
        await engine.close()


async def test_cancelled_parent_cancels_its_task(world):
    async def hangs(task):
        await asyncio.sleep(60)

    async with world.engine(agents=[doing("a", hangs)]) as engine:
        run = await engine.start(asks, "write", "x", {}, run_id="r")
        await until_recorded(run, "agent:a#1")
        await run.cancel()
        await until_status(run, "cancelled")
        [child] = (await engine.list(parent="r")).runs
        await until_status(await engine.get(child.id), "cancelled")


async def test_second_host_of_a_name_is_refused(world):
    async with world.engine(agents=[writer()], workflows=[]):
        with pytest.raises(ks.DefinitionError, match="is hosted by worker"):
            await world.started(agents=[writer()], workflows=[])


async def test_replicas_share_a_name(world):
    one, two = writer(replicas=True), writer(replicas=True)
    async with world.engine(agents=[one], workflows=[]), world.engine(agents=[two]) as engine:
        info = await engine.agents.get("writer")
        assert (len(info.hosts), info.status) == (2, "healthy")
        assert await (await engine.start(asks, "write", "x", {})).result(30) == "writer: X"


async def test_task_of_a_dead_replica_goes_on_in_another(world):
    parts = []

    async def perform(task):
        await shout("first")
        parts.append("first")
        if len(parts) == 1:
            await asyncio.sleep(60)
        return "done"

    def agent():
        return doing("a", perform, replicas=True)

    async with world.engine(workflows=[asks]) as engine:
        host = await world.started(agents=[agent()], workflows=[])
        run = await engine.start(asks, "a", "x", {}, run_id="r")
        await until(lambda: parts)
        async with world.engine(agents=[agent()], workflows=[]):
            await world.crash(host)
            assert await run.result(30) == "done"
        [child] = (await engine.list(parent="r")).runs
        assert child.status == "completed"


async def test_drained_agent_gets_no_tasks(world):
    async with world.engine(agents=[writer("a"), writer("b")]) as engine:
        info = await engine.agents.drain("a", reason="upgrade")
        assert info.status == "draining"
        for _ in range(3):
            assert await (await engine.start(asks, "write", "x", {})).result(30) == "b: X"
        assert (await engine.agents.resume("a")).status == "healthy"
        assert await (await engine.start(asks, "a", "x", {})).result(30) == "a: X"


async def test_agent_drained_on_its_host_gets_no_tasks(world):
    async with world.engine(agents=[writer("a"), writer("b")]) as engine:
        await engine.agents.drain("a", worker=engine.worker.id)
        await until(lambda: engine.hosting.withheld == {"agent:a"})
        run = await engine.start(asks, "a", "x", {})
        with pytest.raises(ks.RunFailed, match="a is draining"):
            await run.result(30)


async def test_unhealthy_agent_gets_no_tasks_until_probes_succeed(world, monkeypatch):
    broken = True
    seen = []

    async def sometimes(task):
        if broken:
            raise OSError("broken")
        return "a"

    async def probe():
        if broken:
            raise OSError("still broken")

    agents = [doing("a", sometimes, probe=probe, probe_every=0.05), writer("b")]
    events = []
    async with world.engine(agents=agents, observers=[events.append]) as engine:
        await until(lambda: engine.hosting._hosted["a"].health.status == "offline")
        seen += [await (await engine.start(asks, "write", "x", {})).result(30) for _ in range(3)]
        assert seen == ["b: X"] * 3
        info = await engine.agents.get("a")
        assert info.hosts[0].agent.record.probe_error == "OSError: still broken"
        broken = False
        await until(lambda: engine.hosting._hosted["a"].health.status == "healthy")
        assert await (await engine.start(asks, "a", "x", {"wait": True})).result(30) == "a"
    health = [(one.agent, one.data["health"]) for one in events if one.name == "agent.health"]
    assert (health[0], health[-1]) == (("a", "offline"), ("a", "healthy"))


async def test_task_of_an_agent_that_becomes_unhealthy_is_redistributed(world):
    begun = asyncio.Event()
    works = True

    async def hangs(task):
        begun.set()
        await asyncio.sleep(60)

    def probe():
        return works

    async with world.engine(
        agents=[doing("a", hangs, probe=probe, probe_every=0.02), writer("b", max_tasks=1)]
    ) as engine:
        run = await engine.start(asks, "write", "x", {}, run_id="r")
        await begun.wait()
        works = False
        assert await run.result(30) == "b: X"
        ends = {one.workflow: one.status.value for one in (await engine.list(parent="r")).runs}
        assert ends == {"agent:a": "cancelled", "agent:b": "completed"}


async def test_tasks_are_spread_over_equal_agents(world):
    @ks.workflow
    async def many():
        return await ks.gather(*[ks.perform("write", str(number)) for number in range(8)])

    async with world.engine(agents=[writer("a", max_tasks=4), writer("b", max_tasks=4)]) as engine:
        results = await (await engine.start(many)).result(30)
        assert {one[0] for one in results} == {"a", "b"}


async def test_max_tasks_holds_on_a_host(world):
    running, most = 0, 0

    async def perform(task):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1

    @ks.workflow
    async def many():
        await ks.gather(*[ks.perform("a", number) for number in range(6)])

    async with world.engine(agents=[doing("a", perform, max_tasks=2)]) as engine:
        await (await engine.start(many)).result(30)
    assert most <= 2


async def test_rate_limits_how_often_an_agent_begins(world):
    begun = []

    async def perform(task):
        begun.append(time.monotonic())

    @ks.workflow
    async def many():
        await ks.gather(*[ks.perform("a", number) for number in range(4)])

    async with world.engine(agents=[doing("a", perform, rate=ks.Rate(10, per=1))]) as engine:
        await (await engine.start(many)).result(30)
    assert max(begun) - min(begun) > 0.25, "four beginnings at ten a second"


@pytest.mark.one_store
@pytest.mark.live_only
async def test_slow_probe_is_not_made_twice_at_once(world):
    running, most, count = 0, 0, 0

    async def probe():
        nonlocal running, most, count
        running, count = running + 1, count + 1
        most = max(most, running)
        await asyncio.sleep(0.1)
        running -= 1

    async with world.engine(agents=[writer(probe=probe, probe_every=0.01)]):
        await until(lambda: count >= 3)
    assert most == 1


async def test_team_gives_tasks_to_its_members_only(world):
    team = ks.Team("press", agents=[writer("a"), "b"])
    assert repr(team) == "ks.Team('press', agents=['a', 'b'])"

    @ks.workflow
    async def with_team(need):
        return await team.perform(need, "x")

    async with world.engine(agents=[team, writer("better")]) as engine:
        assert await (await engine.start(with_team, "write")).result(30) == "a: X"
        assert await (await engine.start(with_team, None)).result(30) == "a: X"


async def test_agents_can_be_probed_by_hand(world):
    answers = []
    agent = writer(probe=lambda: answers.append("probed"), probe_every=3600)
    often = {} if world.kind == "memory" else {"lease_seconds": 1.5}  # heartbeats carry a probe and its answer
    async with world.engine(agents=[agent], **often) as engine:
        await until(lambda: answers)
        before = (await engine.agents.get("writer")).hosts[0].agent.record.probed_at
        info = await engine.agents.probe("writer", timeout=20)
        assert info.hosts[0].agent.record.probed_at != before
        assert len(answers) == 2


async def test_retried_run_lets_its_failed_task_go_on(world):
    broken = True
    calls = []

    async def perform(task):
        calls.append(await shout("first"))
        if broken:
            raise OSError("broken")
        return "done"

    async with world.engine(agents=[doing("a", perform)]) as engine:
        run = await engine.start(asks, "write", "x", {}, run_id="r")
        with pytest.raises(ks.RunFailed, match="broken"):
            await run.result(30)
        broken = False
        await run.retry()
        assert await run.result(30) == "done"
        [child] = (await engine.list(parent="r")).runs
        assert child.status == "completed"
        steps = [one.step for one in await (await engine.get(child.id)).checkpoints() if one.kind == "step completed"]
        assert steps == ["shout#1"], "what the agent had done is not repeated"


async def test_rewound_run_chooses_anew(world):
    async with world.engine(agents=[writer("a"), writer("b")]) as engine:
        run = await engine.start(asks, "write", "x", {}, run_id="r")
        assert await run.result(30) == "a: X"
        await engine.agents.drain("a")
        await run.rewind(to=1)
        assert await run.result(30) == "b: X"


async def test_fork_has_its_own_task(world):
    go = asyncio.Event()

    async def slow(task):
        await go.wait()
        return "done"

    async with world.engine(agents=[doing("a", slow)]) as engine:
        run = await engine.start(asks, "write", "x", {}, run_id="r")
        await until_recorded(run, "agent:a#1")
        fork = await engine.fork("r", run_id="f")
        go.set()
        assert [await run.result(30), await fork.result(30)] == ["done", "done"]
        assert len((await engine.list(parent="f")).runs) == 1


@pytest.mark.one_store
async def test_task_that_ends_while_it_is_cancelled_counts(world, monkeypatch):
    """The agent becomes unhealthy, and does the task in the moment in which it is to be stopped."""
    works, go = True, asyncio.Event()

    async def slow(task):
        await go.wait()
        return "done after all"

    cancel = ks.RunHandle.cancel

    async def too_late(handle, reason=""):
        go.set()
        await until_status(handle, "completed")
        await cancel(handle, reason)

    monkeypatch.setattr(ks.RunHandle, "cancel", too_late)
    async with world.engine(agents=[doing("a", slow, probe=lambda: works, probe_every=0.02)]) as engine:
        run = await engine.start(asks, "write", "x", {})
        await until_recorded(run, "agent:a#1")
        works = False
        assert await run.result(30) == "done after all"


@pytest.mark.one_store
@pytest.mark.live_only
async def test_look_that_fails_does_not_end_the_wait(world, monkeypatch, caplog):
    go, looks = asyncio.Event(), 0

    async def slow(task):
        await go.wait()
        return "done"

    async def fails(*args, **kwargs):
        nonlocal looks
        looks += 1
        if looks == 2:
            go.set()
        raise RuntimeError("no look today")

    monkeypatch.setattr(Agents, "look_after", fails)
    async with world.engine(agents=[doing("a", slow)]) as engine:
        assert await (await engine.start(asks, "write", "x", {})).result(30) == "done"
    assert "cannot look after its task" in caplog.text


@dataclass
class Order:
    topic: str


@dataclass
class Article:
    text: str


@ks.step
async def size(article: Article) -> int:
    return len(article.text)


async def compose(order: Order) -> Article:
    return Article(order.topic.upper())


@ks.workflow
async def orders(topic):
    return await size(await ks.perform("compose", Order(topic)))


@ks.workflow
def orders_plainly(topic):
    return size(ks.perform("compose", Order(topic)).result()).result()


async def test_types_of_tasks_and_results_hold_across_processes(world):
    """A run goes on where the agent is hosted, and where it is not: its calls are the same."""
    agent = ks.Agent("compose", perform=compose)
    engine = await world.started(agents=[agent])
    run = await engine.start(orders, "bees", run_id="r")
    assert await run.result(30) == 4
    assert await (await engine.start(orders_plainly, "bees")).result(30) == 4
    engine = await world.crash_and_recover(engine, workflows=[orders])
    async with world.engine(agents=[agent], workflows=[]):
        replayed = await (await engine.get("r")).replay()
        assert replayed.problem == ""
        assert await (await engine.start(orders, "wasps")).result(30) == 5
    await engine.close()


@pytest.mark.one_store
@pytest.mark.live_only
async def test_bad_definitions_are_refused(world):
    with pytest.raises(ks.DefinitionError, match="capabilities= must be a list"):
        ks.Agent("a", perform=len, capabilities="write")
    with pytest.raises(ks.DefinitionError, match="perform= must take one task"):
        ks.Agent("a", perform=lambda: None)
    with pytest.raises(ks.DefinitionError, match="is not an agent"):
        await world.started(agents=[object()])
    with pytest.raises(ks.DefinitionError, match="agents= is for a worker"):
        await world.started(agents=[writer()], worker=False)
    with pytest.raises(ks.DefinitionError, match="Keepstep's own"):
        ks.workflow(name="agent:x")(len)
    with pytest.raises(ks.DefinitionError, match="each of them once"):
        ks.Team("t", agents=["a", "a"])
    with pytest.raises(ks.DefinitionError, match="outside a run"):
        ks.perform("a", 1)


@pytest.mark.one_store
@pytest.mark.live_only
async def test_agent_can_be_hosted_later(world):
    async with world.engine() as engine:
        await engine.host(writer())
        assert await (await engine.start(asks, "write", "x", {})).result(30) == "writer: X"


async def test_agent_of_a_dead_host_is_shown_as_offline(world):
    host = await world.started(agents=[writer("a")], workflows=[])
    async with world.engine(agents=[writer("b")], workflows=[]) as engine:
        await world.crash(host)
        await until(lambda: _statuses(engine, {"a": "offline", "b": "healthy"}))
        info = await engine.agents.get("a")
        assert info.last_seen_at is not None
        assert not info.health.works


async def _statuses(engine, expected):
    return {one.name: one.status for one in await engine.agents.list()} == expected


async def test_host_that_comes_back_takes_up_its_tasks(world):
    """A supervisor starts a killed host again before anybody has missed it: the task goes on there."""
    begun = []

    async def perform(task):
        begun.append(await shout(task))
        if len(begun) == 1:
            await asyncio.sleep(60)
        return "done"

    agent = doing("a", perform)
    async with world.engine(workflows=[asks]) as engine:
        host = await world.started(agents=[agent], workflows=[])
        run = await engine.start(asks, "a", "x", {"wait": True}, run_id="r")
        await until(lambda: begun)
        await world.crash(host)
        async with world.engine(agents=[agent], workflows=[]):
            assert await run.result(30) == "done"
