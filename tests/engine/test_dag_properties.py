"""Random dags against a simple model: order, skips, joins and results, live and after a crash at every write.

`KEEPSTEP_EXAMPLES` sets how many are tried.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.engine.engine import Engine
from keepstep.kernel.replay import read_records
from keepstep.model import Kind, Status
from keepstep.testing.faults.crash import MemoryDisk, SQLiteDisk, crash_everywhere
from tests.engine.world import replay_from_every_prefix

EXAMPLES = int(os.environ.get("KEEPSTEP_EXAMPLES", "0"))


def tried(examples):
    phases = list(Phase) if EXAMPLES else [phase for phase in Phase if phase is not Phase.shrink]
    return settings(
        max_examples=EXAMPLES or examples,
        phases=phases,
        derandomize=not EXAMPLES,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


# -- what is drawn -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """A step: the numbers of those it needs, how many must succeed, and what becomes of it."""

    needs: tuple[int, ...]
    enough: int  # 0: all of them
    when: bool | None
    fails: bool
    passes: int  # of the loop, that its body takes
    plain: bool

    @property
    def wait(self):
        if not self.enough:
            return ks.All()
        return ks.Any() if self.enough == 1 else ks.Quorum(self.enough)


@st.composite
def dags(draw, most=8):
    size = draw(st.integers(1, most))
    steps = []
    for number in range(size):
        needs = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=3)))) if number else ()
        enough = draw(st.integers(0, len(needs))) if needs else 0
        when = draw(st.sampled_from([None, None, None, True, False]))
        fails = draw(st.integers(0, 5)) == 0
        steps.append(Drawn(needs, enough, when, fails, draw(st.integers(0, 3)), draw(st.integers(0, 7)) == 0))
    return tuple(steps), draw(st.sampled_from([None, None, 1, 2]))


def name(number):
    return f"s{number}"


def value(number, given):
    """What a step gives: it tells exactly what it was given."""
    text = ",".join(f"{key}={given[key]}" for key in sorted(given))
    return f"{name(number)}:{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass
class Program:
    """A dag made from what was drawn, and what its bodies and predicates really did."""

    drawn: tuple[Drawn, ...]
    concurrency: int | None
    fickle: bool = False  # each time a predicate is asked, it answers otherwise than the time before
    mended: bool = False
    began: list[int] = field(default_factory=list)
    asked: Counter = field(default_factory=Counter)

    def dag(self):
        made = ks.Dag("drawn", concurrency=self.concurrency)
        for number, one in enumerate(self.drawn):
            made.add(
                self.body(number, one),
                name(number),
                needs=[name(need) for need in one.needs],
                wait=one.wait,
                when=None if one.when is None else self.predicate(number, one),
            )
        return made

    def body(self, number, one):
        def begin(given):
            self.began.append(number)
            if one.fails and not self.mended:
                raise ks.Permanent(f"{name(number)} fails")
            return value(number, given)

        def plain(**given):
            return begin(given)

        async def body(**given):
            result = None
            try:
                result = begin(given)
            finally:
                for _ in range(one.passes):
                    await asyncio.sleep(0)
            return result

        return plain if one.plain else body

    def predicate(self, number, one):
        def answer(given):
            self.asked[number] += 1
            return one.when ^ (self.fickle and self.asked[number] % 2 == 0)

        return answer


# -- the model ---------------------------------------------------------------------------------------------------------


class Model:
    """What must come of a dag, told naively from the order in which outcomes were recorded."""

    def __init__(self, drawn):
        self.drawn = drawn
        self.state = ["waiting"] * len(drawn)
        self.given = [None] * len(drawn)
        self.result = [None] * len(drawn)
        self.answer = [one.when is not False for one in drawn]
        needed = {need for one in drawn for need in one.needs}
        self.last = [number for number in range(len(drawn)) if number not in needed]

    def settle(self):
        changed = True
        while changed:
            changed = False
            for number, one in enumerate(self.drawn):
                if self.state[number] == "waiting":
                    self.state[number] = self.judged(number, one)
                    changed = changed or self.state[number] != "waiting"

    def judged(self, number, one):
        states = [self.state[need] for need in one.needs]
        counted = [state for state in states if state != "skipped"]
        if states and not counted:
            return "skipped"
        enough = min(one.enough or len(counted), len(counted))
        if counted.count("ok") >= enough:
            self.given[number] = {
                name(need): self.result[need] if self.state[need] == "ok" else None for need in one.needs
            }
            return "begun" if self.answer[number] else "skipped"
        return "failed" if len(counted) - counted.count("failed") < enough else "waiting"

    @property
    def failed(self):
        return any(self.state[number] == "failed" for number in self.last)

    @property
    def over(self):
        return self.failed or all(self.state[number] in ("ok", "skipped") for number in self.last)

    def results(self):
        return {name(number): self.result[number] for number in self.last}


def numbered(key):
    return int(key.removeprefix("when:").removeprefix("s").partition("#")[0])


def follow(drawn, history):
    """Go through a history in its order, and hold every record against the model."""
    model = Model(drawn)
    for one in history:
        if one.kind is Kind.DECISION:
            model.answer[numbered(one.step)] = bool(one.choice)
    model.settle()
    decided = set()
    for one in history:
        number = numbered(one.step) if one.step.startswith(("s", "when:s")) else None
        if one.kind is Kind.DECISION:
            assert model.given[number] is not None, f"{one.step} was decided before its needs were met"
            decided.add(number)
        elif one.kind in (Kind.STEP_COMPLETED, Kind.STEP_FAILED) and not model.over:
            assert model.state[number] == "begun", f"{one.step} ended when it was {model.state[number]}"
            assert drawn[number].when is None or number in decided, f"{one.step} ended before it was decided"
            assert one.ordinal == number + 1
            if one.kind is Kind.STEP_COMPLETED:
                model.state[number], model.result[number] = "ok", value(number, model.given[number])
                assert one.value == f'"{model.result[number]}"'.encode()
            else:
                model.state[number] = "failed"
            model.settle()
    assert model.over, f"the run ended when its steps were {model.state}"
    return model


# -- held against each other -------------------------------------------------------------------------------------------


class Noted:
    """A checkpoint with what it decided, which readers are not shown."""

    def __init__(self, checkpoint, choice):
        self._checkpoint, self.choice = checkpoint, choice

    def __getattr__(self, attribute):
        return getattr(self._checkpoint, attribute)


async def noted(handle):
    run = await handle.run()
    choices = {record.seq: (record.data or {}).get("choice") async for record, _ in read_records(handle._engine, run)}
    return [Noted(one, choices.get(one.seq)) for one in await handle.checkpoints()]


async def judged(handle, program, *, crashes=0):
    """Hold what came of a run against the model; the model."""
    history = await noted(handle)
    model = follow(program.drawn, history)
    if model.failed:
        with pytest.raises(ks.RunFailed, match="fails"):
            await handle.result(60)
    else:
        assert await handle.result(60) == model.results()
    began = Counter(program.began)
    completed = Counter(numbered(one.step) for one in history if one.kind is Kind.STEP_COMPLETED)
    for number, one in enumerate(program.drawn):
        assert completed[number] <= 1
        assert began[number] <= 1 + crashes
        if one.when is not None and not model.answer[number]:
            assert not began[number], f"{name(number)} was not to be performed, and began"
        if model.given[number] is None:
            assert not began[number], f"{name(number)} began though its needs were not met"
    return model


async def ended(handle):
    try:
        return await handle.result(60)
    except ks.RunFailed:
        return "failed"


@given(dags())
@tried(60)
def test_a_dag_does_what_the_model_says(drawn):
    async def main(**options):
        program = Program(*drawn)
        dag = program.dag()
        async with Engine("memory:", workflows=[dag], **options) as engine:
            run = await engine.start(dag, run_id="r")
            await ended(run)
            await judged(run, program)

    asyncio.run(main())
    asyncio.run(main(replay_always=True, linger_seconds=0.05))


@given(dags(6))
@tried(12)
def test_a_dag_is_taken_up_after_any_record(drawn):
    """Nothing that was recorded may be asked for otherwise, whatever the recovery finds under way."""

    async def main():
        program = Program(*drawn)
        dag = program.dag()
        async with Engine("memory:", workflows=[dag]) as engine:
            run = await engine.start(dag, run_id="r")
            await ended(run)
            before = [one.step for one in await run.checkpoints()]

            async def check(handle, length):
                assert await ended(handle) is not None
                assert await handle.status() in (Status.COMPLETED, Status.FAILED)
                assert [one.step for one in await handle.checkpoints()][:length] == before[:length]
                follow(program.drawn, await noted(handle))

            await replay_from_every_prefix(run, check, engine_options={"workflows": [dag]})

    asyncio.run(main())


@given(dags())
@tried(20)
def test_a_retry_repeats_nothing_that_finished(drawn):
    async def main():
        program = Program(*drawn)
        dag = program.dag()
        async with Engine("memory:", workflows=[dag]) as engine:
            run = await engine.start(dag, run_id="r")
            if await ended(run) != "failed":
                return
            done = {numbered(one.step) for one in await run.checkpoints() if one.kind is Kind.STEP_COMPLETED}
            cancelled = {numbered(one.step) for one in await run.checkpoints() if one.kind is Kind.STEP_CANCELLED}
            began = Counter(program.began)
            program.mended = True
            await run.retry()
            assert await ended(run) != "failed"
            again = Counter(program.began) - began
            assert not set(again) & (done - cancelled), "a step that had finished was performed again"

    asyncio.run(main())


@pytest.mark.parametrize("store", ["memory", "thread", "sqlite"] if EXAMPLES else ["thread", "sqlite"])
def test_a_crash_at_any_write_changes_nothing(store, tmp_path):
    """Even if predicates answer otherwise each time: what was decided once stays decided, and no other body begins."""
    places = itertools.count()

    @given(dags(5))
    @tried(3 if store == "sqlite" else 6)
    def test(drawn):
        programs = []

        def disk():
            programs.append(Program(*drawn, fickle=True))
            programs[-1].dag()  # known to the process from now on
            if store != "sqlite":
                return MemoryDisk()
            return SQLiteDisk(tmp_path / f"{next(places)}.db", power_loss="may_lose_last")

        async def play(engine):
            engine.store.quick = store != "thread"  # else commits are made while the loop goes on
            return await ended(await engine.start("drawn", run_id="r"))

        async def judge(disk, lives):
            opened = disk.open()
            try:
                async with Engine(opened, worker=False) as engine:
                    await judged(await engine.get("r"), programs[-1], crashes=lives.crashes)
            finally:
                opened.close()

        asyncio.run(crash_everywhere(disk, play, judge))

    test()
