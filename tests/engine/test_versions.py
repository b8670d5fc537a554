"""A definition that changes while runs are parked: nothing is skipped without a word, nothing counts as done (C16)."""

import asyncio
from itertools import pairwise

import pytest

import keepstep as ks
from keepstep import errors
from tests.engine.world import told, until, until_status


class Steps:
    """Steps that say what really ran."""

    def __init__(self, effects):
        def made(name):
            @ks.step(name=name)
            async def body(*given):
                effects.append(name)
                return f"{name} done"

            return body

        self.fetch, self.download, self.pack, self.send = map(made, ("fetch", "download", "pack", "send"))


async def parked(world, workflow, *args, **options):
    """A run that waits in the store, with nobody to drive it."""
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow, *args, run_id="r", **options)
        await until_status(run, "waiting")


async def resumed(world, workflow, *, signal="go"):
    """What the new code makes of the run: its result."""
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.get("r")
        if signal:
            await run.signal(signal)
        return await run.result(30)


def shipping(steps, *calls, **options):
    """A workflow of these steps that waits before the last of them."""

    async def code():
        for name in calls[:-1]:
            await getattr(steps, name)()
        await ks.wait_for("go")
        return await getattr(steps, calls[-1])()

    return ks.workflow(name="shipping", **options)(code)


# -- functions ---------------------------------------------------------------------------------------------------------


async def test_a_renamed_step_is_mapped_by_migrate(world, effects):
    steps, seen = Steps(effects), []
    await parked(world, shipping(steps, "fetch", "pack", "send"))

    def migrate(old):
        seen.append((old.version, old.steps))
        return {"fetch#1": "download#1"}

    new = shipping(steps, "download", "pack", "send", version="2", migrate=migrate)
    assert await resumed(world, new) == "send done"
    assert effects == ["fetch", "pack", "send"]
    assert seen[0] == ("1", ("fetch#1", "pack#1"))
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.rewind(step="send")  # after the migration: it is not asked again
        assert await run.result(30) == "send done"
        migrations = len(seen)
        await run.rewind(step="pack")  # before it: it is
        await until_status(run, "completed")
        assert len(seen) == migrations + 1
        kinds = [one.kind.value for one in await run.checkpoints()]
        assert kinds.count("superseded") == 2 + migrations + 1
    assert migrations == 1
    assert effects == ["fetch", "pack", "send", "send", "pack", "send"]


async def test_a_migration_keeps_deadline_and_idempotency_keys(world, effects):
    keys, goes = [], asyncio.Event()

    @ks.step
    async def pay():
        keys.append(ks.idempotency_key())
        await goes.wait()

    @ks.step
    async def look():
        return 1

    def made(**options):
        @ks.workflow(name="paying", **options)
        async def paying():
            await look()
            await pay()

        return paying

    engine = await world.started(workflows=[made()])
    await engine.start(engine.workflows["paying"], run_id="r", deadline=3600)
    await until(lambda: keys)
    engine = await world.crash_and_recover(engine, workflows=[made(version="2", migrate=lambda old: None)])
    await until(lambda: len(keys) > 1)
    assert engine.live["r"].deadline_at is not None
    goes.set()
    await (await engine.get("r")).result(30)
    await engine.close()
    assert len(set(keys)) == 1, "nothing changed outside, so the payment must be the same one"


async def test_each_version_migrates_from_the_one_before(world, effects):
    steps, seen = Steps(effects), []

    def note(version, answer):
        def migrate(old):
            seen.append((version, old.version, old.steps))
            return answer

        return migrate

    await parked(world, shipping(steps, "fetch", "pack", "send"))
    second = shipping(steps, "download", "pack", "send", version="2", migrate=note("2", {"fetch#1": "download#1"}))
    async with world.engine(workflows=[second]) as engine:
        run = await engine.get("r")
        await run.resume()  # wakes it once
        await until(lambda: len(seen) == 1)
        await until_status(run, "waiting")
    third = shipping(steps, "fetch", "pack", "send", version="3", migrate=note("3", {"download#1": "fetch#1"}))
    assert await resumed(world, third) == "send done"
    assert seen == [("2", "1", ("fetch#1", "pack#1")), ("3", "2", ("download#1", "pack#1"))]
    assert effects == ["fetch", "pack", "send"]


@pytest.mark.parametrize(
    "answer, words",
    [
        ({"nobody#1": "x#1"}, "has not recorded 'nobody#1'; it has"),
        ({"fetch#1": "pack#1"}, "which is recorded too"),
        ({"fetch#1": "download"}, "a name and a count"),
        (["fetch#1"], "it must return {old key: new key} or None"),
        ({"fetch#1": "x#1", "pack#1": "x#1"}, "the same key"),
    ],
)
@pytest.mark.one_store
@pytest.mark.live_only
async def test_invalid_migration_sets_the_run_aside(world, effects, answer, words):
    steps = Steps(effects)
    await parked(world, shipping(steps, "fetch", "pack", "send"))
    before = list(effects)
    new = shipping(steps, "download", "pack", "send", version="2", migrate=lambda old: answer)
    with pytest.raises(ks.RunSetAside, match="MigrationFailed: migrate= of workflow 'shipping' failed") as refused:
        await resumed(world, new)
    assert words in str(refused.value)
    assert isinstance(refused.value.__cause__, errors.RebuildFailed)
    assert effects == before


async def test_a_migration_that_fails_is_mended_and_retried(world, effects):
    steps, mended = Steps(effects), []
    await parked(world, shipping(steps, "fetch", "pack", "send"))

    def migrate(old):
        if not mended:
            raise RuntimeError("not yet")
        return {"fetch#1": "download#1"}

    new = shipping(steps, "download", "pack", "send", version="2", migrate=migrate)
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        with pytest.raises(ks.RunSetAside, match="RuntimeError: not yet"):
            await run.result(30)
        mended.append(True)
        await run.retry()
        assert await run.result(30) == "send done"
    assert effects == ["fetch", "pack", "send"]


async def test_migration_that_renames_a_child_is_refused(world, effects):
    @ks.workflow
    async def child():
        await ks.wait_for("go")

    @ks.workflow(name="parent")
    async def old():
        await (await ks.start(child))

    @ks.workflow(name="parent", version="2", migrate=lambda _: {"child#1": "other#1"})
    async def new():
        return "new"

    async with world.engine(workflows=[old, child]) as engine:
        await until_status(await engine.start(old, run_id="r"), "waiting")
    async with world.engine(workflows=[new, child]) as engine:
        run = await engine.get("r")
        await run.resume()
        with pytest.raises(ks.RunSetAside, match="'child#1' belongs to a child run"):
            await run.result(30)


@pytest.mark.one_store
@pytest.mark.live_only
def test_migrate_must_be_a_function():
    with pytest.raises(ks.DefinitionError, match="migrate= is a function"):
        ks.workflow(name="x", migrate="x")(lambda: None)


# -- phases ------------------------------------------------------------------------------------------------------------


@pytest.mark.one_store
@pytest.mark.live_only
async def test_each_phase_of_a_recovery_has_its_own_error(world, effects):
    steps = Steps(effects)
    await parked(world, shipping(steps, "fetch", "pack", "send"))
    with pytest.raises(ks.RunSetAside) as refused:
        await resumed(world, shipping(steps, "fetch", "pack", "send", version="2"))
    assert isinstance(refused.value.__cause__, errors.ValidationFailed)
    async with world.engine(workflows=[shipping(steps, "download", "pack", "send")]) as engine:
        run = await engine.get("r")
        await run.retry()
        with pytest.raises(ks.RunSetAside) as refused:
            await run.result(30)
        assert isinstance(refused.value.__cause__, errors.ResumeFailed)
        assert refused.value.__cause__.problems
    phases = ["load", "validate", "rebuild", "handler", "resume"]
    assert list(errors.RECOVERY_PHASES) == phases
    assert [one.phase for one in errors.RECOVERY_PHASES.values()] == phases


# -- graphs and dags ---------------------------------------------------------------------------------------------------


def review(effects, *names, **options):
    """A graph of these steps in a row, which waits before the last of them."""
    graph = ks.Graph("review", **options)

    def body(name):
        async def step(state):
            effects.append(name)
            return {name: True}

        return step

    *before, last = names
    for name in names:
        graph.add(body(name), name=name)
    graph.wait("gate", signal="go")
    row = [*before, "gate", last]
    for one, other in pairwise(row):
        graph.edge(one, other)
    graph.entry(row[0])
    graph.exit(last)
    return graph


def build(effects, *names, **options):
    """A dag of these steps in a row; the last but one waits for a child that waits."""
    dag = ks.Dag("build", **options)

    @ks.workflow(name="gate")
    async def gate():
        return await ks.wait_for("go")

    previous = []
    *before, last = names

    def body(name):
        async def step():
            effects.append(name)
            return name

        return step

    for name in before:
        dag.add(body(name), name, needs=previous)
        previous = [name]
    dag.add(gate, "gate", needs=previous)
    dag.add(body(last), last, needs=["gate"])
    return dag, gate


async def test_a_changed_graph_is_set_aside_with_the_difference(world, effects):
    await parked(world, review(effects, "draft", "critic", "publish"))
    ran = list(effects)
    with pytest.raises(ks.RunSetAside) as refused:
        await resumed(world, review(effects, "draft", "critique", "publish"))
    words = str(refused.value)
    assert "DefinitionChanged" in words
    assert "- step critic\n" in words
    assert "+ step critique\n" in words
    assert "- edge draft -> critic" in words
    assert effects == ran


async def test_dag_that_does_not_fit_raises_nothing_into_the_loop(world, effects):
    """The mismatch comes to light while outcomes are told, where other runs wait for theirs."""

    def checked(**options):
        dag = ks.Dag("checked", on_change="compatible")

        @dag.step
        async def fetch():
            return 1

        @dag.step(needs=["fetch"], **options)
        async def check(fetch):
            effects.append("check")

        @ks.workflow(name="gate")
        async def gate():
            await ks.wait_for("go")

        dag.add(gate, needs=["check"])
        return dag, gate

    old, gate = checked()
    async with world.engine(workflows=[old, gate]) as engine:
        run = await engine.start(old, run_id="r")
        await until_status(run, "waiting")
    thrown = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, told: thrown.append(told))
    new, gate = checked(when=lambda known: False)
    async with world.engine(workflows=[new, gate]) as engine:
        run = await engine.get("r")
        await run.resume()
        with pytest.raises(ks.RunSetAside, match="check#1 was recorded with another input"):
            await run.result(30)
    assert thrown == []
    assert effects == ["check"]


async def test_skipped_step_of_a_dag_stays_so_without_its_predicate(world, effects):
    def checked(**options):
        dag = ks.Dag("checked", on_change="compatible")

        @dag.step(**options)
        async def check():
            effects.append("check")

        @ks.workflow(name="gate")
        async def gate():
            return await ks.wait_for("go")

        dag.add(gate)
        return dag, gate

    old, gate = checked(when=lambda known: False)
    async with world.engine(workflows=[old, gate]) as engine:
        run = await engine.start(old, run_id="r")
        await until_status(run, "waiting")
        [child] = (await engine.list(parent="r")).runs
    new, gate = checked()
    async with world.engine(workflows=[new, gate]) as engine:
        run = await engine.get("r")
        await engine.signal(child.id, "go", 1)
        assert await run.result(30) == {"check": None, "gate": 1}
    assert effects == []


async def test_a_fork_from_the_beginning_keeps_the_definition(world, effects):
    graph = review(effects, "draft", "critic", "publish")
    await parked(world, graph)
    async with world.engine(workflows=[graph]) as engine:
        fork = await engine.fork("r", input={"topic": "tea"}, run_id="f")
        await until_status(fork, "waiting")
    async with world.engine(workflows=[review(effects, "draft", "critique", "publish")]) as engine:
        fork = await engine.get("f")
        await fork.signal("go")
        with pytest.raises(ks.RunSetAside, match="- step critic"):
            await fork.result(30)


async def test_a_compatible_graph_may_gain_steps_and_lose_none_that_were_passed(world, effects):
    await parked(world, review(effects, "draft", "critic", "publish"))
    with pytest.raises(ks.RunSetAside, match="no longer has 'critic', which the run has recorded"):
        await resumed(world, review(effects, "draft", "critique", "publish", on_change="compatible"))
    assert effects == ["draft", "critic"]
    longer = review(effects, "draft", "critic", "publish", "announce", on_change="compatible")
    async with world.engine(workflows=[longer]) as engine:
        run = await engine.get("r")
        await run.retry()
        state = await run.result(30)
    assert effects[:2] == ["draft", "critic"]
    assert state["announce"] is True


def publishing(effects, *steps, mapped="fetch", **options):
    """A graph that fetches pages, then goes through the steps in one branch while another one waits."""
    graph = ks.Graph("publishing", reducers={"log": "append"}, **options)

    def noted(name):
        async def body(state):
            effects.append(name)
            return {"log": [name]}

        return body

    @ks.step(name=mapped)
    async def fetch(page):
        effects.append(f"{mapped} {page}")
        return page

    for name in (*steps, "done"):
        graph.add(noted(name), name=name)
    graph.wait("hold", signal="go")
    graph.map("pages", fetch, over="urls", into="urls")
    graph.parallel("send", ["hold", steps[0]], join="done")
    graph.edge("pages", "send")
    for one, other in pairwise([*steps, "done"]):
        graph.edge(one, other)
    graph.entry("pages")
    graph.exit("done")
    return graph


@pytest.mark.parametrize(
    "steps, mapped, gone",
    [
        (["mail", "audit"], "fetch", "'post'"),  # a step inside a branch
        (["post", "mail"], "fetch", "branch 'mail' of 'send'"),  # both are there, and another one begins the branch
        (["mail", "post"], "load", "step 'fetch' in map 'pages'"),
    ],
)
async def test_a_compatible_graph_loses_nothing_that_was_passed_inside_a_part(world, effects, steps, mapped, gone):
    await parked(world, publishing(effects, "mail", "post"), {"urls": ["a"]})
    ran = ["fetch a", "mail", "post"]
    assert effects == ran
    with pytest.raises(ks.RunSetAside, match=f"no longer has {gone}, which the run has recorded"):
        await resumed(world, publishing(effects, *steps, mapped=mapped, on_change="compatible"))
    assert effects == ran


async def test_a_compatible_graph_may_gain_steps_inside_a_part(world, effects):
    old = publishing(effects, "mail", "post", interrupt_before=["mail"])
    await parked(world, old, {"urls": ["a"]})
    new = publishing(effects, "mail", "post", "audit", on_change="compatible", interrupt_before=["mail"])
    async with world.engine(workflows=[new]) as engine:
        run = await engine.get("r")
        await run.resume()
        await run.signal("go")
        assert (await run.result(30))["log"] == ["mail", "post", "audit", "done"]
    assert effects == ["fetch a", "mail", "post", "audit", "done"]


async def test_compatible_graph_without_its_next_step_is_set_aside(world, effects):
    """The edge was taken and recorded; that its end is gone is no end of the run."""
    row = ["draft", "critic", "publish"]
    await parked(world, review(effects, *row, interrupt_before=["critic"]))
    shorter = review(effects, "draft", "publish", on_change="compatible")
    async with world.engine(workflows=[shorter]) as engine:
        run = await engine.get("r")
        await run.resume()
        with pytest.raises(ks.RunSetAside, match="the next step is 'critic', which graph 'review' does not") as refused:
            await run.result(30)
    assert isinstance(refused.value.__cause__, errors.HandlerMissing)
    assert effects == ["draft"]
    async with world.engine(workflows=[review(effects, *row, on_change="compatible")]) as engine:
        run = await engine.get("r")
        await run.signal("go")
        await run.retry()
        assert set(await run.result(30)) == set(row)
    assert effects == row


async def test_a_changed_dag_is_set_aside_with_the_difference(world, effects):
    old, gate = build(effects, "fetch", "compile", "link")
    async with world.engine(workflows=[old, gate]) as engine:
        run = await engine.start(old, run_id="r")
        await until_status(run, "waiting")
    new, gate = build(effects, "fetch", "translate", "link")
    async with world.engine(workflows=[new, gate]) as engine:
        run = await engine.get("r")
        await run.resume()
        with pytest.raises(ks.RunSetAside) as refused:
            await run.result(30)
    words = str(refused.value)
    assert "- " in words
    assert "compile" in words
    assert "+ " in words
    assert "translate" in words
    new, gate = build(effects, "fetch", "translate", "link", on_change="compatible")
    async with world.engine(workflows=[new, gate]) as engine:
        run = await engine.get("r")
        await run.retry()
        with pytest.raises(ks.RunSetAside, match="no longer has 'compile'"):
            await run.result(30)
        assert effects == ["fetch", "compile"]
    new, gate = build(
        effects, "fetch", "translate", "link", version="2", migrate=lambda _: {"compile#1": "translate#1"}
    )
    async with world.engine(workflows=[new, gate]) as engine:
        run = await engine.get("r")
        await run.retry()
        [child] = (await engine.list(parent="r")).runs
        await engine.signal(child.id, "go")
        assert await run.result(30) == {"link": "link"}
    assert effects == ["fetch", "compile", "link"]


async def test_a_definition_that_is_too_long_is_not_kept(world, effects):
    graph = review(effects, *(f"step_{number}_{'x' * 80}" for number in range(80)))
    assert len(graph.definition()) > 16_000
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, run_id="r")
        await run.signal("go")
        await run.result(30)
        assert len((await told(run))[0]) == 7
        rows = await engine.read(engine.store.list_checkpoints, "r", 0, 1)
        assert len(rows[0].record) < 1000
