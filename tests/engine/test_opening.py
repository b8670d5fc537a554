"""Opening a store: without a block, without a URL, and with a limit on the time of `ks.run`."""

from __future__ import annotations

import pydoc

import pytest

import keepstep as ks


@ks.workflow(name="doubled by a program")
async def double(number: int) -> int:
    return 2 * number


@ks.workflow
async def until_told() -> str:
    return await ks.wait_for("word")


@ks.workflow
async def with_timeout(timeout: float) -> float:  # noqa: ASYNC109 - ks.run has the same word
    return timeout


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KEEPSTEP_STORE", raising=False)
    return tmp_path


# -- without a block ---------------------------------------------------------------------------------------------------


def test_a_blocking_engine_opens_without_a_block_and_closes_when_told():
    engine = ks.open("memory:").blocking()
    assert engine.start(double, 4).result() == 8
    engine.close()
    with pytest.raises(ks.DefinitionError, match="closed"):
        engine.start(double, 4)


def test_a_forgotten_block_is_named_by_the_error():
    with pytest.raises(
        AttributeError, match=r"not open yet, so it has no 'start': write `async with ks.open\("
    ) as seen:
        ks.open("memory:").start(double, 1)
    assert "`with` in blocking code" in str(seen.value)
    assert "ks.open(...).blocking()" in str(seen.value)


# -- without a URL -----------------------------------------------------------------------------------------------------


def test_the_environment_names_the_store_if_the_program_names_none(folder, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_STORE", "mine.db")
    assert ks.run(double, 4, run_id="d") == 8
    with ks.open() as engine:
        assert engine.get("d").result() == 8
    assert [one.name for one in folder.iterdir() if not one.name.startswith("mine.db")] == []


def test_a_url_in_the_program_comes_before_the_environment(folder, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_STORE", "mine.db")
    assert ks.run(double, 4, url="other.db") == 8
    assert not (folder / "mine.db").exists()


@pytest.mark.parametrize("value", [None, ""])
def test_without_either_the_store_is_the_default_one(folder, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("KEEPSTEP_STORE", value)
    assert ks.run(double, 4) == 8
    assert (folder / ".keepstep" / "runs.db").exists()


# -- the time of ks.run ------------------------------------------------------------------------------------------------


def test_a_run_that_takes_too_long_goes_on_later():
    with pytest.raises(ks.TimedOut, match="was not finished within"):
        ks.run(until_told, run_id="w", timeout=0.01)
    with ks.open(worker=False) as engine:
        engine.signal("w", "word", "hello")
    assert ks.run(until_told, run_id="w", timeout=60) == "hello"


def test_a_timeout_that_the_workflow_takes_too_is_refused_until_it_is_bound():
    with pytest.raises(ks.DefinitionError, match=r"ambiguous.*with_timeout"):
        ks.run(with_timeout, timeout=5, url="memory:")
    assert ks.run(with_timeout.bind(timeout=5), timeout=60, url="memory:") == 5
    assert ks.run(with_timeout, 5, url="memory:") == 5


# -- help --------------------------------------------------------------------------------------------------------------


def test_help_of_start_names_its_options():
    shown = pydoc.plain(pydoc.render_doc(ks.start))
    assert {name for name in ("run_id", "queue", "priority", "delay", "tags") if f"`{name}`" not in shown} == set()
