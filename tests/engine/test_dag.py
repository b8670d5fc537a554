"""A dag under way: when its steps begin, what they are given, what is skipped, and what a failure means."""

import asyncio
import threading
from datetime import timedelta

import pytest

import keepstep as ks
from tests.engine.lives import PollInterval
from tests.engine.world import replay_from_every_prefix, steps_of, told, until, until_recorded, until_status


async def outcome(world, dag, **inputs):
    """The result of a run of the dag, and what its history says of steps and decisions."""
    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r", **inputs)
        return await run.result(60)


# -- order -------------------------------------------------------------------------------------------------------------


async def test_inputs_and_results_come_by_name(world):
    dag = ks.Dag("by-name")

    @dag.step
    async def fetch(url, times: int = 2):
        return f"{url}*{times}"

    @dag.step(needs=[fetch])
    def lint(fetch, *, strict=False):
        return f"lint({fetch}, {strict})"

    @dag.step(needs={"source": "fetch", "checked": lint})
    async def compile(source, checked, url):  # noqa: A001 - what a build calls it
        return [source, checked, url]

    @dag.step(needs=["fetch", "lint"])
    async def count(**needs):
        return sorted(needs)

    assert await outcome(world, dag, url="u", strict=True) == {
        "compile": ["u*2", "lint(u*2, True)", "u"],
        "count": ["fetch", "lint"],
    }


async def test_step_begins_as_soon_as_its_own_needs_are_done(world, effects):
    """There is no barrier: the end of the short branch is what lets the long one end."""
    dag, short_done = ks.Dag("no-barrier"), asyncio.Event()

    @dag.step
    async def long():
        await short_done.wait()
        return 1

    @dag.step
    async def short():
        return 2

    @dag.step(needs=["short"])
    async def after_short(short):
        effects.append("after short")
        short_done.set()
        return short

    @dag.step(needs=["long", "after_short"])
    async def join(long, after_short):
        return long + after_short

    assert await outcome(world, dag) == {"join": 3}
    assert effects == ["after short"]


async def test_keys_and_ordinals_follow_the_definition_not_the_clock(world):
    """Whichever ends first, a step is recorded under its name and its place in the topological order."""
    dag, pace = ks.Dag("ordinals"), PollInterval(a=0.02, b=0.0)

    @dag.step(needs=["a", "b"])
    async def last(a, b):
        return a + b

    @dag.step
    async def a():
        await pace.take("a")
        return 1

    @dag.step
    async def b():
        await pace.take("b")
        return 2

    assert [vertex.name for vertex in dag.plan.order] == ["a", "b", "last"]
    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        assert await run.result(60) == {"last": 3}
        steps = {one.step: one.ordinal for one in await run.checkpoints() if one.kind.value == "step completed"}
    assert steps == {"a#1": 1, "b#1": 2, "last#1": 3}


async def test_join_waits_for_branches_of_unequal_depth(world, effects):
    dag = ks.Dag("unequal")
    before = None
    for number in range(5):

        async def link(**needs):
            effects.append("link")
            return sum(needs.values()) + 1

        before = dag.add(link, f"link{number}", needs=[before] if before is not None else [])

    @dag.step
    async def near():
        return 100

    @dag.step(needs=["near", "link4"])
    async def join(near, link4):
        return near + link4

    assert await outcome(world, dag) == {"join": 105}
    assert effects.count("link") == 5


@pytest.mark.live_only
@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_steps_than_the_limit_are_under_way(world, limit):
    dag, under_way = ks.Dag("limited", concurrency=limit), []
    most = []

    async def work():
        under_way.append(1)
        most.append(len(under_way))
        await asyncio.sleep(0)
        under_way.pop()

    for number in range(12):
        dag.add(work, f"work{number}", needs=[f"work{number - 4}"] if number >= 4 else [])
    async with world.engine() as engine:
        run = await engine.start(dag)
        await run.result(60)
        assert max(most) == limit
        if limit == 1:  # one after the other, in the order of the definition
            assert await steps_of(run) == [f"work{number}#1" for number in range(12)]


# -- what is left out --------------------------------------------------------------------------------------------------


def conditional(effects, answer=lambda given: given["wanted"]):
    """A dag with a branch of two steps that may be left out, before a join."""
    dag = ks.Dag("conditional")

    @dag.step
    async def base(wanted):
        return "base"

    @dag.step(needs=["base"], when=answer)
    async def extra(base, wanted):
        effects.append("extra")
        return "extra"

    @dag.step(needs=["extra"])
    async def more(extra):
        effects.append("more")
        return f"more {extra}"

    @dag.step(needs=["base", "more"])
    async def join(base, more, extra_said=None):
        effects.append("join")
        return [base, more]

    @dag.step(needs={"told": "more"})
    async def side(told="nothing"):
        effects.append("side")
        return told

    return dag


async def test_join_goes_on_after_a_skipped_branch(world, effects):
    """All needs of `more` were skipped, so it is; the join goes on with None for it; so does what has a default."""
    result = await outcome(world, conditional(effects), wanted=False)
    assert result == {"join": ["base", None], "side": None}
    assert effects == ["join"]


async def test_branch_that_is_wanted_runs(world, effects):
    result = await outcome(world, conditional(effects), wanted=True)
    assert result == {"join": ["base", "more extra"], "side": "more extra"}


async def test_a_parameter_of_a_skipped_need_keeps_its_default(world):
    dag = ks.Dag("defaults")

    @dag.step
    async def always():
        return 1

    @dag.step(when=ks_never)
    async def never():
        return 2

    @dag.step(needs=["always", "never"])
    async def join(always, never="left out"):
        return [always, never]

    @dag.step(needs=["always", "never"])
    async def rest(always, **others):
        return others

    assert await outcome(world, dag) == {"join": [1, "left out"], "rest": {"never": None}}


def ks_never(given):
    return False


async def test_a_whole_dag_may_be_skipped(world):
    dag = ks.Dag("nothing")
    before = None
    for number in range(999):  # as far as a way through a dag may lead

        async def link(**needs):
            raise AssertionError

        before = dag.add(link, f"link{number}", needs=[before] if before else [], when=None if before else ks_never)
    assert await outcome(world, dag) == {"link998": None}


async def test_a_predicate_sees_the_inputs_and_what_its_needs_gave(world):
    dag, seen = ks.Dag("seen"), []

    @dag.step
    async def one():
        return 1

    @dag.step(when=ks_never)
    async def none():
        return 2

    def look(given):
        seen.append(dict(given))
        return "none" not in given and given["one"] == 1

    @dag.step(needs={"one": "one", "none": "none"}, when=look)
    async def last(one, none, wanted):
        return [one, none, wanted]

    assert await outcome(world, dag, wanted="x") == {"last": [1, None, "x"]}
    assert seen == [{"one": 1, "wanted": "x"}]


@pytest.mark.parametrize("given, done", [({}, "main"), ({"branch": "dev"}, None), ({"branch": "main"}, "main")])
async def test_a_predicate_sees_the_defaults_of_inputs(world, given, done):
    dag = ks.Dag("defaults")

    @dag.step
    async def checkout(branch: str = "main"):
        return branch

    @dag.step(needs=["checkout"], when=ks.when.equals("branch", "main"))
    async def deploy(checkout):
        return checkout

    @dag.step(needs=["checkout"], when=lambda inputs: inputs["branch"] == "main" and inputs["checkout"])
    async def announce(checkout):
        return checkout

    assert await outcome(world, dag, **given) == {"deploy": done, "announce": done}


async def test_a_predicate_sees_the_default_of_its_own_step_first(world):
    dag = ks.Dag("own-defaults")

    @dag.step
    async def one(size=1):
        return size

    @dag.step(when=ks.when.equals("size", 2))
    async def two(size=2):
        return size

    @dag.step(when=ks.when.exists("other"))
    async def three():
        return 3

    assert await outcome(world, dag) == {"one": 1, "two": 2, "three": None}


async def test_named_predicates_decide_a_step(world):
    dag = ks.Dag("named-predicates")
    when = ks.policies.when

    @dag.step
    async def one():
        return 1

    @dag.step(needs=["one"], when=when.all_(when.equals("one", 1), when.not_(when.exists("two"))))
    async def last(one):
        return "yes"

    assert await outcome(world, dag) == {"last": "yes"}


@pytest.mark.on_postgres
async def test_decision_stands_though_its_predicate_now_answers_otherwise(world, effects):
    """It is asked once; every recovery takes what it said then, whether that was yes or no."""
    answers, asked, gate = {"yes": True, "no": False}, [], asyncio.Event()
    dag = ks.Dag("decided")

    def says(name):
        def answer(given):
            asked.append(name)
            return answers[name]

        return answer

    @dag.step(when=says("yes"))
    async def yes():
        effects.append("yes")
        return "yes"

    @dag.step(when=says("no"))
    async def no():
        effects.append("no")
        return "no"

    @dag.step(needs=["yes", "no"])
    async def hold(yes, no):
        await gate.wait()
        return [yes, no]

    options = {"replay_always": False, "recovery_limit": 100}
    engine = await world.started(**options)
    run = await engine.start(dag, run_id="r")
    await until_recorded(run, "yes#1")
    await until_recorded(run, "when:no#1")
    answers.update(yes=False, no=True)
    for _ in range(3):
        engine = await world.crash_and_recover(engine, **options)
        run = await engine.get("r")
        await until(lambda live=engine.live: "r" in live and live["r"].history is None)
    gate.set()
    assert await run.result(60) == {"hold": ["yes", None]}
    assert (effects, sorted(asked)) == (["yes"], ["no", "yes"])
    await engine.close()


@pytest.mark.one_store
async def test_no_body_begins_before_its_decision_is_durable(world):
    """Or a crash could let a recovery skip a step that has had its effect."""
    dag, began, early = ks.Dag("first-decide"), threading.Event(), []

    @dag.step(when=lambda given: True)
    async def work():
        began.set()

    async with world.engine() as engine:
        commit, engine.store.quick = engine.store.commit, False  # commits are made in a thread, while the loop goes on

        def slow_commit(changes, **options):
            if any(row.kind == "decision" for change in changes for row in getattr(change, "rows", ())):
                early.append(began.wait(0.1))
            return commit(changes, **options)

        engine.store.commit = slow_commit
        await (await engine.start(dag, run_id="r")).result(60)
        engine.store.commit = commit
    assert began.is_set()
    assert early[0] is False


async def test_a_predicate_that_raises_fails_its_step(world, effects):
    dag, broken = ks.Dag("raising"), [True]

    def answer(given):
        if broken:
            raise KeyError("lint")
        return True

    @dag.step
    async def sibling():
        effects.append("sibling")
        return 1

    @dag.step(needs=["sibling"], when=answer)
    async def work(sibling):
        effects.append("work")
        return sibling + 1

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        with pytest.raises(ks.RunFailed, match=r"step 'work#1' failed .*KeyError: 'lint'"):
            await run.result(60)
        broken.clear()
        await run.retry()
        assert await run.result(60) == {"work": 2}
    assert effects == ["sibling", "work"]


# -- how many needs are enough -----------------------------------------------------------------------------------------


async def test_any_begins_at_the_first_success_without_the_others(world, effects):
    dag, pace = ks.Dag("any"), PollInterval(slow=60.0)

    @dag.step
    async def fast():
        return "fast"

    @dag.step
    async def slow():
        await pace.take("slow")
        effects.append("slow")

    @dag.step
    async def wrong():
        raise ks.Permanent("no")

    @dag.step(needs=["slow", "wrong", "fast"], wait=ks.Any())
    async def first(fast, slow=None, wrong="nothing"):
        return [fast, slow, wrong]

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        assert await run.result(60) == {"first": ["fast", None, "nothing"]}
        cancelled = await steps_of(run, "step cancelled")
    assert cancelled == ["slow#1"]
    assert effects == []


async def test_arguments_are_fixed_when_a_step_may_begin(world):
    """Its turn comes at another time in a recovery."""
    dag = ks.Dag("turns", concurrency=1)

    @dag.step
    async def first():
        return "first"

    @dag.step
    async def second():
        return "second"

    @dag.step(needs=["first", "second"], wait=ks.Any())
    async def either(first=None, second=None):
        return [first, second]

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        assert await run.result(60) == {"either": ["first", None]}
        assert await steps_of(run) == ["first#1", "second#1", "either#1"]

        async def same(handle, length):
            assert await handle.result(30) == {"either": ["first", None]}

        await replay_from_every_prefix(run, same)


async def test_step_begins_with_a_quorum_of_its_needs(world):
    dag, gate = ks.Dag("quorum"), asyncio.Event()

    async def vote(answer):
        return answer

    @dag.step
    async def a():
        return "a"

    @dag.step
    async def b():
        raise ks.Permanent("b is ill")

    @dag.step
    async def c():
        return "c"

    @dag.step
    async def d():
        await gate.wait()
        return "d"

    @dag.step(needs=["a", "b", "c", "d"], wait=ks.Quorum(2))
    async def decide(a=None, b=None, c=None, d=None):
        gate.set()
        return [a, b, c, d]

    @dag.step(needs=["decide", "d"])
    async def end(decide, d):
        return [decide, d]

    assert await outcome(world, dag) == {"end": [["a", None, "c", None], "d"]}


async def test_skipped_needs_are_not_counted(world):
    """A quorum of two of which only one is left asks for that one; and for no need at all, the step is skipped."""
    dag = ks.Dag("not-counted")

    @dag.step
    async def a():
        return "a"

    @dag.step(when=ks_never)
    async def b():
        return "b"

    @dag.step(when=ks_never)
    async def c():
        return "c"

    @dag.step(needs=["a", "b", "c"], wait=ks.Quorum(2))
    async def two(a, b, c):
        return [a, b, c]

    @dag.step(needs=["b", "c"], wait=ks.Any())
    async def one(b, c):
        return [b, c]

    assert await outcome(world, dag) == {"two": ["a", None, None], "one": None}


async def test_unmet_need_fails_the_run_and_names_all_that_failed(world, effects):
    dag, broken = ks.Dag("too-few"), ["a", "b"]

    def work(name):
        async def body():
            effects.append(name)
            if name in broken:
                raise ks.Permanent(f"{name} is ill")
            return name

        return body

    for name in ("a", "b", "c"):
        dag.add(work(name), name)

    @dag.step(needs=["a", "b", "c"], wait=ks.Quorum(2))
    async def decide(a=None, b=None, c=None):
        return [a, b, c]

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        with pytest.raises(ks.RunFailed, match=r"step 'decide' cannot begin, because too many .*a is ill.*b is ill"):
            await run.result(60)
        broken.clear()
        await run.retry()
        result = (await run.result(60))["decide"]
    assert [name for name in result if name] in (["a", "b"], ["a", "c"], ["b", "c"], ["a", "b", "c"])
    assert effects.count("a") == effects.count("b") == 2
    assert effects.count("c") <= 1


async def test_step_with_enough_needs_tolerates_a_failure(world):
    """The step behind it is blocked, which counts as failed; the one that waits for any of two goes on."""
    dag = ks.Dag("tolerant")

    @dag.step
    async def wrong():
        raise ks.Permanent("no")

    @dag.step(needs=["wrong"])
    async def behind(wrong):
        raise AssertionError

    @dag.step
    async def other():
        return "other"

    @dag.step(needs=["behind", "other"], wait=ks.Any())
    async def either(behind=None, other=None):
        return [behind, other]

    assert await outcome(world, dag) == {"either": [None, "other"]}


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.on_postgres
async def test_failure_cancels_open_steps_and_a_retry_keeps_finished_ones(world, effects):
    dag, broken, pace = ks.Dag("fail-fast"), [True], PollInterval(slow=60.0)

    @dag.step
    async def done():
        effects.append("done")
        return 1

    @dag.step
    async def slow():
        effects.append("slow")
        await pace.take("slow")
        return 2

    @dag.step(needs=["done"])
    async def wrong(done):
        effects.append("wrong")
        await until(lambda: "slow" in effects)
        if broken:
            raise ks.Permanent("broken")
        return 3

    @dag.step(needs=["done", "slow", "wrong"])
    async def end(done, slow, wrong):
        return [done, slow, wrong]

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        with pytest.raises(ks.ExecutionError, match=r"step 'wrong#1' failed .*broken \(after done\)") as caught:
            await run.result(60)
        assert (caught.value.step, tuple(caught.value.path)) == ("wrong", ("done",))
        assert isinstance(caught.value.__cause__, ks.StepFailed)
        assert await steps_of(run, "step cancelled") == ["slow#1"]
        broken.clear()
        pace.seconds.clear()
        await run.retry()
        assert await run.result(60) == {"end": [1, 2, 3]}
    assert sorted(effects) == ["done", "slow", "slow", "wrong", "wrong"]


async def test_a_failure_ends_the_run_though_others_would_go_on(world):
    dag = ks.Dag("at-once")

    @dag.step
    async def slow():
        await asyncio.sleep(60)

    @dag.step
    async def wrong():
        raise ks.Permanent("broken")

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        with pytest.raises(ks.ExecutionError, match="broken"):
            await run.result(60)
        assert await steps_of(run, "step cancelled") == ["slow#1"]


async def test_retry_repeats_no_step_that_finished_after_the_failure(world, effects):
    """The failure was tolerated at first; what was done meanwhile is no reaction to it."""
    dag, broken = ks.Dag("later-siblings"), [True]

    @dag.step
    async def first():
        effects.append("first")
        if broken:
            raise ks.Permanent("first")
        return 1

    async def link(**needs):
        effects.append("link")
        return 1

    before = dag.add(link, "link0")
    for number in range(1, 4):
        before = dag.add(link, f"link{number}", needs=[before])

    @dag.step(needs=[before])
    async def second(link3):
        effects.append("second")
        if broken:
            raise ks.Permanent("second")
        return 2

    @dag.step(needs=["first", "second"], wait=ks.Any())
    async def end(first=None, second=None):
        return [first, second]

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        with pytest.raises(ks.RunFailed, match="too many of its needs"):
            await run.result(60)
        broken.clear()
        await run.retry()
        assert (await run.result(60))["end"] in ([1, None], [None, 2])
    assert effects.count("link") == 4


async def test_cancel_ends_a_dag(world):
    dag = ks.Dag("cancelled")

    @dag.step
    async def slow():
        await asyncio.sleep(60)

    @dag.step(needs=["slow"])
    async def end(slow):
        raise AssertionError

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        await until(lambda: engine.live["r"].bodies)
        await run.cancel()
        with pytest.raises(ks.RunCancelled):
            await run.result(60)


# -- the options of a step ---------------------------------------------------------------------------------------------


async def test_the_policies_of_a_step_are_those_of_any_step(world, effects):
    dag = ks.Dag("policies")

    @dag.step(retry=ks.Retry(attempts=3, base_seconds=0.001))
    async def flaky():
        effects.append("flaky")
        if effects.count("flaky") < 3:
            raise ConnectionError("again")
        return 1

    @dag.step(at_most_once=True)
    async def once(amount):
        effects.append("once")
        return amount

    @dag.step(timeout=0.01)
    async def late():
        await asyncio.sleep(60)

    @dag.step(needs=["flaky", "once", "late"], wait=ks.Quorum(2))
    def end(flaky, once, late=None):
        return [flaky, once, late]

    assert await outcome(world, dag, amount=5) == {"end": [1, 5, None]}
    assert effects.count("once") == 1


@pytest.mark.on_postgres
async def test_a_workflow_in_a_dag_is_a_child_run(world, effects):
    @ks.step
    async def double(number):
        effects.append(number)
        return 2 * number

    @ks.workflow
    async def doubled(number):
        await ks.sleep(0.001)
        return await double(number)

    @ks.workflow
    async def failing():
        raise ks.Permanent("the child cannot")

    dag = ks.Dag("parent")

    @dag.step
    async def number(start):
        return start

    dag.add(doubled, "twice", needs=["number"])
    dag.add(doubled, "four_times", needs={"number": "twice"})
    dag.add(failing)

    @dag.step(needs=["twice", "four_times", "failing"], wait=ks.Quorum(2))
    async def end(twice, four_times, failing=None):
        return [twice, four_times, failing]

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r", start=5)
        assert await run.result(60) == {"end": [10, 20, None]}
        children = (await engine.list(parent="r")).runs
    assert sorted(child.workflow for child in children) == ["doubled", "doubled", "failing"]
    assert effects == [5, 10]


async def test_dag_runs_inside_a_dag_and_a_workflow(world):
    inner = ks.Dag("inner")

    @inner.step
    async def one(number):
        return number + 1

    outer = ks.Dag("outer")
    outer.add(inner, "inside")

    @outer.step(needs=["inside"])
    async def end(inside):
        return inside

    @ks.workflow
    async def around(number):
        return await (await ks.start(outer, number=number)).result()

    async with world.engine() as engine:
        run = await engine.start(around, 1)
        assert await run.result(60) == {"end": {"one": 2}}


async def test_a_child_that_nobody_waits_for_is_cancelled_with_the_end(world):
    @ks.workflow
    async def forever():
        await ks.wait_for("never")

    dag = ks.Dag("children")
    dag.add(forever, "slow")

    @dag.step
    async def fast():
        return 1

    @dag.step(needs=["slow", "fast"], wait=ks.Any())
    async def end(fast, slow=None):
        return [fast, slow]

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        assert await run.result(60) == {"end": [1, None]}
        [child] = (await engine.list(parent="r")).runs
        await until_status(await engine.get(child.id), "cancelled")


async def test_types_of_inputs_and_results_are_kept(world):
    dag = ks.Dag("types")

    @dag.step
    async def later(by: timedelta) -> tuple[timedelta, set[int]]:
        return by * 2, {1, 2}

    @dag.step(needs=["later"])
    async def end(later: tuple[timedelta, set[int]]) -> timedelta:
        assert type(later) is tuple
        assert later[1] == {1, 2}
        return later[0]

    assert await outcome(world, dag, by=timedelta(hours=1)) == {"end": timedelta(hours=2)}


async def test_a_budget_holds_for_a_dag(world, effects):
    dag = ks.Dag("budget", budget=ks.Budget(steps=2), concurrency=1)
    for number in range(4):

        async def work():
            effects.append("work")

        dag.add(work, f"work{number}")

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        with pytest.raises(ks.RunFailed, match="budget"):
            await run.result(60)
    assert len(effects) == 2


async def test_dag_runs_with_weaker_durability(world, effects):
    dag = ks.Dag("weaker", durability="at_exit")

    @dag.step
    async def one():
        return 1

    @dag.step(needs=["one"], when=lambda given: given["one"] == 1)
    async def two(one):
        return 2

    @dag.step(needs=["two"], when=ks_never)
    async def three(two):
        return 3

    assert await outcome(world, dag) == {"three": None}


# -- steered and changed -----------------------------------------------------------------------------------------------


async def test_a_paused_dag_begins_nothing_until_it_is_resumed(world, effects):
    dag, gate = ks.Dag("paused"), asyncio.Event()

    @dag.step
    async def one():
        await gate.wait()
        return 1

    @dag.step(needs=["one"])
    async def two(one):
        effects.append("two")
        return one + 1

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        await until(lambda: engine.live["r"].bodies)
        await run.pause()
        await until(lambda: engine.live["r"].stop.holding)
        gate.set()
        await until_status(run, "paused")
        assert effects == []
        await run.resume()
        assert await run.result(60) == {"two": 2}


async def test_a_dag_is_rewound_and_forked(world, effects):
    """What comes before the point stays, the decision too; what comes after is done again."""
    dag, answers = ks.Dag("rewound"), [True]

    @dag.step(when=lambda given: answers.pop())
    async def one():
        effects.append("one")
        return 1

    @dag.step(needs=["one"])
    async def two(one):
        effects.append("two")
        return one + 1

    @dag.step(needs=["two"])
    async def three(two):
        effects.append("three")
        return two + 1

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        assert await run.result(60) == {"three": 3}
        del effects[:]
        await run.rewind(step="three#1")
        assert await run.result(60) == {"three": 3}
        assert effects == ["three"]
        fork = await engine.fork("r", step="two#1")
        assert await fork.result(60) == {"three": 3}
        assert effects == ["three", "two", "three"]


async def changed(world, effects, new, **options):
    """A run that waits for a child inside a dag, taken up under another definition: its handle."""
    gate = asyncio.Event()

    def made(step):
        dag = ks.Dag("changing", **options)

        @dag.step
        async def first():
            effects.append("first")
            return 1

        @dag.step(needs=["first"])
        async def held(first):
            effects.append("held")
            await gate.wait()
            return 2

        step(dag)
        return dag

    engine = await world.started(workflows=[made(lambda dag: None)], replay_always=False)
    await engine.start("changing", run_id="r")
    await until(lambda: "held" in effects)
    gate.set()
    return await world.crash_and_recover(engine, workflows=[made(new)], replay_always=False)


def inserted(dag):
    dag.add(lambda first: 100 + first, "added", needs=["first"])


async def test_a_run_is_not_taken_up_under_another_definition(world, effects):
    engine = await changed(world, effects, inserted)
    run = await engine.get("r")
    await until_status(run, "set aside")
    with pytest.raises(ks.RunSetAside, match="added needs=first"):
        await run.result(1)
    assert effects == ["first", "held"]


async def test_a_compatible_dag_goes_on_with_what_was_inserted(world, effects):
    engine = await changed(world, effects, inserted, on_change="compatible")
    run = await engine.get("r")
    assert await run.result(60) == {"held": 2, "added": 101}
    assert effects == ["first", "held", "held"]


# -- every beginning ---------------------------------------------------------------------------------------------------


@pytest.mark.one_store
async def test_a_run_may_be_taken_up_after_any_record(world, effects):
    """From each beginning of its history the run comes to the same end, without a mismatch."""
    dag = ks.Dag("taken-up", concurrency=2)

    async def link(**needs):
        return sum(value or 0 for value in needs.values()) + 1

    for number in range(9):
        needs = [f"s{other}" for other in range(max(0, number - 3), number)]
        wait = ks.Any() if number % 4 == 3 else None
        when = (lambda given: False) if number == 5 else (lambda given: True) if number % 2 else None
        dag.add(link, f"s{number}", needs=needs, wait=wait, when=when)

    async with world.engine() as engine:
        run = await engine.start(dag, run_id="r")
        result = await run.result(60)
        history = await told(run)

        async def same(handle, length):
            assert await handle.result(30) == result
            begun = history[: length - 1]
            assert (await told(handle))[: len(begun)] == begun

        await replay_from_every_prefix(run, same)
