"""Stubs: a step does what the test says, everything round it stays as it is."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

import keepstep as ks
from keepstep.testing import stub, world
from keepstep.workflows.definition import Workflow

bodies: list[str] = []


@dataclass
class Receipt:
    number: int


@ks.step(retry=ks.Retry(attempts=3, base_seconds=60))
async def pay(amount: int, *, currency: str = "EUR") -> Receipt:
    bodies.append("pay")
    return Receipt(amount)


@ks.step(timeout=5)
def measure(text: str) -> int:
    bodies.append("measure")
    return len(text)


@ks.step(transactional=True)
def store(tx, name: str) -> str:
    bodies.append("store")
    return name


async def shop(amount: int) -> list[Receipt | int]:
    return [await pay(amount, currency="USD"), await measure("abc")]


async def keep(name: str) -> str:
    return await store(name)


SHOP, KEEP = Workflow(shop), Workflow(keep)


@pytest.fixture(autouse=True)
def _no_bodies():
    bodies.clear()
    before = {one: (one.fn, one.is_async, one.simple) for one in (pay, measure, store)}
    yield
    assert before == {one: (one.fn, one.is_async, one.simple) for one in (pay, measure, store)}


def shopped(**options):
    with world(workflows=[SHOP, KEEP], **options) as here:
        return here.start(SHOP, 5).result()


def test_a_stub_returns_and_shows_its_calls():
    with stub(pay, returns=Receipt(7)) as paid, stub(measure, returns=9):
        assert shopped() == [Receipt(7), 9]
    assert paid.calls == [((5,), {"currency": "USD"})]
    assert paid.calls[0].kwargs == {"currency": "USD"}
    assert not bodies


def test_the_real_body_is_back_afterwards_and_beside():
    with stub(pay, returns=Receipt(7)):
        assert shopped() == [Receipt(7), 3]
    assert bodies == ["measure"]
    assert shopped() == [Receipt(5), 3]


def test_a_stub_is_gone_even_after_an_error():
    with pytest.raises(ZeroDivisionError), stub(pay, returns=Receipt(7)):
        raise ZeroDivisionError
    assert pay.fn.__name__ == "pay"


def test_it_fails_twice_then_returns():
    with stub(pay, raises=[ConnectionError("down"), TimeoutError], returns=Receipt(1)) as paid:
        assert shopped()[0] == Receipt(1)
    assert len(paid.calls) == 3


def test_one_failure_comes_once_if_there_is_something_after_it():
    with stub(pay, raises=ConnectionError("down"), calls=lambda amount, *, currency="": Receipt(amount * 10)) as paid:
        assert shopped()[0] == Receipt(50)
    assert len(paid.calls) == 2


def test_without_anything_after_it_the_last_failure_stays():
    with (
        stub(pay, raises=[ConnectionError("down"), OSError("gone")]) as paid,
        pytest.raises(ks.RunFailed, match="OSError: gone"),
    ):
        shopped()
    assert len(paid.calls) == 3


def test_what_it_calls_may_be_async_and_slow():
    async def slowly(text: str) -> int:
        await asyncio.sleep(60)
        return 0

    with stub(measure, calls=slowly), pytest.raises(ks.RunFailed, match="StepTimedOut"):
        shopped()


def test_results_are_still_checked_and_restored():
    with stub(pay, returns=object()), pytest.raises(ks.RunFailed, match="NotSerializable"):
        shopped()
    with stub(pay, returns=Receipt(3)):
        assert shopped(replay_always=True) == [Receipt(3), 3]


def test_stubs_may_be_nested():
    with stub(pay, returns=Receipt(1)):
        with stub(pay, returns=Receipt(2)):
            assert shopped()[0] == Receipt(2)
        assert shopped()[0] == Receipt(1)


def test_stub_works_outside_a_run():
    with stub(measure, returns=9) as measured:
        assert measure("abc").result() == 9
    assert len(measured.calls) == 1


def test_a_transactional_step_keeps_its_transaction(tmp_path):
    seen = []

    def within(tx, name: str) -> str:
        tx.execute("CREATE TABLE things (name TEXT)")
        seen.append(tx)
        return name.upper()

    with world(tmp_path / "runs.db", workflows=[KEEP]) as here, stub(store, calls=within):
        assert here.start(KEEP, "thing").result() == "THING"
    assert seen
    assert not bodies


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "say what the stub does"),
        ({"returns": 1, "calls": len}, "not both"),
    ],
)
def test_a_stub_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ks.DefinitionError, match=message):
        stub(pay, **options)


def test_only_steps_have_stubs():
    with pytest.raises(ks.DefinitionError, match="stands in for a step"):
        stub(shop, returns=1)
