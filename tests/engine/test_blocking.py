"""The blocking engine: its methods are those of the async one, without `await`."""

import asyncio
import inspect
import pydoc
import re
import threading
from pathlib import Path

import pytest

import keepstep as ks
from keepstep.care.facade import Care
from keepstep.engine.blocking import BlockingEngine, BlockingHandle
from keepstep.engine.blocking_care import BlockingCare
from keepstep.engine.engine import Engine
from keepstep.engine.handle import RunHandle
from keepstep.testing.worlds import World, WorldHandle

API = Path(__file__).parents[2] / "docs" / "reference" / "api.md"


def public(cls):
    found = {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}
    return {name for name, value in found.items() if inspect.isroutine(value)}


def described(heading):
    """The methods that the reference promises under a heading."""
    section = API.read_text(encoding="utf-8").partition(f"\n### `{heading}`\n")[2].partition("\n### ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"(\w+)\(", cell)}


def parameters(cls, name):
    found = inspect.signature(getattr(cls, name)).parameters.values()
    return [(one.name, one.kind, one.default) for one in found if one.name != "self"]


@ks.workflow
async def nothing() -> None:
    return None


PAIRS = [(RunHandle, BlockingHandle), (Care, BlockingCare)]


@pytest.mark.parametrize("waiting, blocking", PAIRS)
def test_each_method_has_a_blocking_one(waiting, blocking):
    assert public(blocking) == public(waiting)


def test_each_method_of_the_engine_has_a_blocking_one():
    promised = described("ks.Engine")
    assert {"start", "rekey", "close"} <= promised
    assert public(BlockingEngine) == promised
    assert isinstance(inspect.getattr_static(BlockingEngine, "care"), property)


def test_the_two_handles_have_the_same_attributes():
    async def names() -> set[str]:
        async with ks.open("memory:") as engine:
            return {name for name in dir(await engine.start(nothing)) if not name.startswith("_")}

    with ks.open("memory:") as engine:
        handle = engine.start(nothing)
        assert {name for name in dir(handle) if not name.startswith("_")} == asyncio.run(names())


def test_properties_of_the_engine_that_the_reference_names_are_there():
    section = API.read_text(encoding="utf-8").partition("\n### `ks.Engine`\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"`engine\.(\w+)`", section))
    assert "care" in named
    with ks.open("memory:") as engine:
        assert {name for name in named if not hasattr(engine, name)} == set()


@pytest.mark.parametrize("waiting, blocking", [*PAIRS, (Engine, BlockingEngine), (Engine, World)])
def test_parameters_are_the_same(waiting, blocking):
    shared = public(blocking) & public(waiting)
    assert {name: parameters(blocking, name) for name in shared} == {name: parameters(waiting, name) for name in shared}


@pytest.mark.parametrize("waiting, blocking", [*PAIRS, (Engine, BlockingEngine)])
def test_no_method_has_to_be_awaited(waiting, blocking):
    for name in public(blocking):
        method = getattr(blocking, name)
        assert not inspect.iscoroutinefunction(method), name
        assert not inspect.isasyncgenfunction(method), name
        assert inspect.getdoc(method), name


def test_help_shows_the_parameters_and_the_promise():
    shown = pydoc.plain(pydoc.render_doc(BlockingHandle))
    assert "resolve(self, step: 'str', verdict: 'str', value: 'Any' = None, reason: 'str' = '')" in shown
    assert "Settle an at-most-once step in doubt" in shown


def test_help_names_the_blocking_handle():
    given = inspect.signature(BlockingEngine.get).return_annotation
    assert given is BlockingHandle


# -- what they do ------------------------------------------------------------------------------------------------------


@ks.step
async def pay(amount: int) -> str:
    return f"paid {amount}"


@ks.workflow
async def shop(amount: int) -> str:
    ks.publish("amount", amount)
    return await pay(amount)


@ks.workflow
async def counted(number: int) -> int:
    if number < 3:
        ks.continue_as(number + 1)
    return number


@ks.workflow
async def broken() -> None:
    raise ks.Permanent("no")


@pytest.fixture
def engine():
    with ks.open("memory:", workflows=[shop, counted, broken]) as engine:
        yield engine


def test_a_run_is_looked_at_from_blocking_code(engine):
    run = engine.start(shop, 7, run_id="shop-1")
    assert run.result(timeout=30) == "paid 7"
    assert run.input() == [[7], {}]
    assert run.spent().steps == 1
    assert run.published_raw() == {"amount": b"7"}
    assert run.progress() is None
    assert run.diff(other=engine.get("shop-1")).added == ()
    assert engine.care.verify("shop-1").runs.valid == 1


def test_a_series_is_followed_from_blocking_code(engine):
    first = engine.start(counted, 1, run_id="series")
    assert first.result(timeout=30) == 3
    newest = first.latest()
    assert isinstance(newest, BlockingHandle)
    assert (newest.id, newest.input()) == ("series~3", [[3], {}])


def test_a_run_is_steered_by_its_id_from_blocking_code(engine):
    run = engine.start(broken, run_id="broken-1")
    with pytest.raises(ks.RunFailed):
        run.result(timeout=30)
    assert engine.rewind("broken-1", to=1, dry_run=True).to == 1
    engine.retry("broken-1", "again")
    with pytest.raises(ks.RunFailed):
        run.result(timeout=30)
    assert "again" in [entry.reason for entry in run.audit()]


def test_an_in_doubt_step_is_resolved_from_blocking_code(tmp_path):
    paying = threading.Event()

    @ks.step(at_most_once=True)
    async def pay() -> str:
        paying.set()
        await asyncio.Event().wait()

    @ks.workflow
    async def shop() -> str:
        return await pay()

    with ks.open(tmp_path / "runs.db", workflows=[shop]) as engine:
        engine.start(shop, run_id="shop-1")
        assert paying.wait(30)
        engine.close(stop_seconds=0)
    with ks.open(tmp_path / "runs.db", workflows=[shop]) as engine:
        run = engine.get("shop-1")
        run.resolve("pay#1", "result", "paid by hand", "the bank says so")
        assert run.result(timeout=30) == "paid by hand"


def test_a_fork_in_virtual_time_lets_time_pass():
    from keepstep.testing import world

    @ks.workflow
    async def long() -> str:
        await ks.sleep(days=30)
        return "rested"

    with world(workflows=[long]) as here:
        assert here.start(long, run_id="long").result() == "rested"
        forked = here.fork("long", at=1)
        assert isinstance(forked, WorldHandle)
        assert forked.result() == "rested"


def test_a_watch_that_is_left_reads_no_more():
    with ks.open("memory:", workflows=[nothing]) as engine:
        run = engine.start(nothing)
        for event in run.watch(children=True):
            assert event.run == run.id
            break
        assert not engine._target.waiting.readers
