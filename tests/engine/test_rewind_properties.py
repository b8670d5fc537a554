"""Any program, gone back to any of its records: it ends as it did, and nothing that was kept is done again."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.model import Kind
from keepstep.ports import CURRENT
from keepstep.stores.memory import MemoryStore
from keepstep.workflows.definition import Step, Workflow
from tests.nightly import examples

#: Bodies that began, by run, key and generation.
began: Counter[tuple[str, str, int]] = Counter()


def _note():
    scope = CURRENT.get()
    began[scope.run.id, scope.key, scope.run.generation] += 1


def _step(name, **options):
    async def body(number):
        _note()
        if name == "slow":
            await asyncio.sleep(0.001)
        return number + len(name)

    return Step(body, name=name, **options)


QUICK, SLOW = _step("quick"), _step("slow")


async def _not_done(number):
    return ks.NotDone


ONCE = _step("once", at_most_once=True, verify=_not_done)


async def _child(number):
    return await QUICK(number)


CHILD = Workflow(_child, name="property child")

statements = st.recursive(
    st.sampled_from(["quick", "slow", "once", "sleep", "hear", "child", "publish", "race", "caught"]),
    lambda inner: st.lists(st.lists(inner, min_size=1, max_size=2), min_size=2, max_size=3),
    max_leaves=6,
)
programs = st.lists(statements, min_size=1, max_size=5)


async def _fails(number):
    _note()
    raise ValueError("always")


FAILS = Step(_fails, name="fails")


async def _perform(statement, number):
    if isinstance(statement, list):
        return sum(await ks.gather(*(_all(branch, number) for branch in statement)))
    if statement in ("quick", "slow", "once"):
        return await {"quick": QUICK, "slow": SLOW, "once": ONCE}[statement](number)
    if statement == "sleep":
        await ks.sleep(0.001)
    elif statement == "hear":
        return number + await ks.wait_for("number")
    elif statement == "child":
        return await (await ks.start(CHILD, number))
    elif statement == "publish":
        ks.publish("number", number)
    elif statement == "race":
        return await ks.race(QUICK(number), ks.sleep(3600))
    else:
        try:
            await FAILS(number)
        except ks.StepFailed:
            return number + 1
    return number


async def _all(program, number):
    for statement in program:
        number = await _perform(statement, number)
    return number


def _count(program):
    return sum(_count(part) if isinstance(part, list) else part == "hear" for part in program)


async def _run(program, cuts):
    async def code():
        return await _all(program, 1)

    workflow = Workflow(code, name="property")
    async with ks.Engine(MemoryStore(), workflows=[workflow, CHILD], linger_seconds=0.01) as engine:
        run = await engine.start(workflow, run_id="r")
        for number in range(_count(program)):
            await run.signal("number", 100, id=str(number))
        result = await run.result(30)
        shown = await run.published()
        for generation, cut in enumerate(cuts, 1):
            history = await run.checkpoints()
            at = int(cut * (history[-1].seq - 1))
            rewound = await run.rewind(at)
            assert await run.result(30) == result, (program, at)
            assert await run.published() == shown
            _judge(program, history, at, rewound, generation)
        fork = await engine.fork("r", int(cuts[0] * history[-1].seq), run_id="f")
        assert await fork.result(30) == result
        assert (await fork.published()) == shown


def _judge(program, history, at, rewound, generation):
    again = {key: count for (run, key, gen), count in began.items() if (run, gen) == ("r", generation)}
    assert set(again.values()) <= {1}, f"{program} at {at}: {again}"
    assert set(again) <= set(rewound.again), f"{program} at {at}: what was kept ran again"
    ended = {Kind.STEP_COMPLETED, Kind.STEP_FAILED}
    steps = {one.step for one in history if one.kind in ended and ":" not in one.step}
    missing = (steps & set(rewound.again)) - set(again)
    assert not missing, f"{program} at {at}: {missing} did not run again"


@settings(max_examples=examples(10, nightly=30), deadline=None)
@given(programs, st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_a_run_that_goes_back_ends_as_it_did(program, cuts):
    began.clear()
    asyncio.run(_run(program, cuts))
