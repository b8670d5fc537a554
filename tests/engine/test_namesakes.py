"""A run belongs to the workflow that started it, not to another program's of the same name."""

import asyncio
import logging
import subprocess
import sys

import pytest

import keepstep as ks
from keepstep.kernel import namesakes
from keepstep.model.ids import module_in, new_seed
from keepstep.workflows.definition import Workflow
from keepstep.workflows.source import is_same_module
from tests.engine.world import until

pytestmark = pytest.mark.on_postgres


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """What goes back to its own program is claimed again after a moment."""
    monkeypatch.setattr(namesakes, "FIRST_SECONDS", 0.05)


def pipeline_of(module, **options):
    async def pipeline():
        await ks.wait_for("go")
        return module

    pipeline.__module__ = module
    return Workflow(pipeline, **options)


def parent_of(child):
    async def parent():
        return await (await ks.start(child, run_id="c"))

    return Workflow(parent, name="parent")


async def was_left(engine, run_id):
    """Come back when a worker has claimed the run and given it back."""

    async def is_back():
        run = await (await engine.get(run_id)).run()
        return run.epoch > 1 and run.worker is None

    await until(is_back, f"run {run_id} was never given back")


async def test_a_run_is_left_to_the_program_that_started_it(world, caplog):
    here, there = pipeline_of("a"), pipeline_of("b")
    engine = await world.started(workflows=[here], linger_seconds=60)
    await engine.start(here, run_id="r")
    await world.crash(engine)
    async with world.engine(workflows=[there]) as engine:
        await (await engine.get("r")).signal("go")
        await was_left(engine, "r")
        with pytest.raises(ks.RunConflict, match=r"of module 'a'.*in module 'b'; give each its own name"):
            await engine.start(there, run_id="r")
    assert "@ks.workflow(name=...)" in caplog.text
    async with world.engine(workflows=[here]) as engine:
        assert await (await engine.get("r")).result(30) == "a"


async def test_a_run_that_has_not_begun_is_left_too_and_a_child_as_well(world, caplog):
    caplog.set_level(logging.CRITICAL, "keepstep")
    here, there = pipeline_of("a"), pipeline_of("b")
    async with world.engine(workflows=[parent_of(here)]) as engine:
        await engine.start("parent", run_id="p")
        await until(lambda: children(engine))
    async with world.engine(workflows=[there]) as engine:
        await (await engine.get("c")).signal("go")

        async def is_back():
            run = await (await engine.get("c")).run()
            return run.epoch and run.worker is None

        await until(is_back)
    async with world.engine(workflows=[here, parent_of(here)]) as engine:
        assert await (await engine.get("p")).result(30) == "a"


async def children(engine):
    return (await engine.list(parent="p")).runs


@pytest.mark.parametrize(
    "taker",
    [lambda: pipeline_of("b", name="pipeline"), lambda: pipeline_of("shop.a")],
    ids=["that was given the name", "of the same module in its package"],
)
async def test_a_moved_workflow_takes_its_runs(world, taker):
    here, moved = pipeline_of("a"), taker()
    async with world.engine(workflows=[here], worker=False) as engine:
        run = await engine.start(here, run_id="r")
        await run.signal("go")
    async with world.engine(workflows=[moved]) as engine:
        assert await (await engine.get("r")).result(30) == moved.place.module


async def test_run_without_a_module_may_be_driven_by_any_program(world, monkeypatch):
    here, there = pipeline_of("a"), pipeline_of("b")
    monkeypatch.setattr(here, "module", "")  # as earlier versions stored it
    async with world.engine(workflows=[here], worker=False) as engine:
        await (await engine.start(here, run_id="r")).signal("go")
    async with world.engine(workflows=[there]) as engine:
        assert await (await engine.get("r")).result(30) == "b"


async def test_forks_and_successors_stay_with_the_program(world):
    async def counting(left):
        if left:
            ks.continue_as(left - 1)
        await asyncio.sleep(0)

    counting.__module__ = "a"
    workflow = Workflow(counting)
    async with world.engine(workflows=[workflow]) as engine:
        run = await engine.start(workflow, 2, run_id="r")
        await run.result(30)
        fork = await engine.fork("r~3", 0)
        seeds = [(await one.run()).seed for one in (run, await run.latest(), fork)]
        assert [module_in(seed) for seed in seeds] == ["a", "a", "a"]


# -- which program it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "one, other, same",
    [
        ("a", "a", True),
        ("shop.a", "a", True),
        ("a", "shop.a", True),
        ("", "a", True),
        ("a", "", True),
        ("a", "b", False),
        ("shop.a", "bar.a", False),
        ("shop", "workshop", False),
        ("shop", "shop.__main__", True),
        ("mall.shop.__main__", "shop", True),
        ("shop.__main__", "bar.__main__", False),
    ],
)
def test_module_is_the_same_with_and_without_its_package(one, other, same):
    assert is_same_module(one, other) is same


def test_seed_holds_its_random_part_and_its_module():
    assert module_in(new_seed("shop.a")) == "shop.a"
    assert module_in(new_seed()) == ""
    assert len(new_seed("x").partition("@")[0]) == len(new_seed()) == 16


PROGRAM = """
import keepstep as ks
@ks.workflow
async def pipeline(): ...
@ks.workflow(name="given")
async def other(): ...
print(repr(pipeline.module), repr(other.module))
"""


@pytest.mark.parametrize(
    "how, module",
    [
        (["shop/a.py"], "a"),
        (["-m", "shop.a"], "shop.a"),
        (["-c", "import shop.a"], "shop.a"),
        (["-m", "shop"], "shop"),
        (["shop"], "shop"),
        (["-c", "import shop.__main__"], "shop"),
        (["-c", PROGRAM], ""),
    ],
)
def test_script_has_the_module_of_its_file_and_a_prompt_none(tmp_path, how, module):
    (tmp_path / "shop").mkdir()
    for name in ("a", "__main__"):
        (tmp_path / "shop" / f"{name}.py").write_text(PROGRAM)
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [repr(module), "''"]
