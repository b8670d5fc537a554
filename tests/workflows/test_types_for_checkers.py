"""Type checkers know the class of a graph's state, and the type of a wait."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RIGHT = """
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict, assert_type

import keepstep as ks


@dataclass
class Order:
    score: float = 0.0


class Page(TypedDict):
    views: int


orders = ks.Graph("orders", schema=Order)
pages = ks.Graph("pages", schema=Page)
plain = ks.Graph("plain")
rated = ks.Graph("rated", schema=Order, result=Order)
viewed = ks.Graph("viewed", result=Page)
assert_type(orders, ks.Graph[Order])
assert_type(plain, ks.Graph[ks.State])
assert_type(rated, ks.Graph[Order, Order])
assert_type(viewed, ks.Graph[ks.State, Page])


@orders.step
async def rate(state: Order) -> Order:
    assert_type(state.score, float)
    return state


def known(state: Mapping[str, Any]) -> bool:
    return "score" in state


orders.edge("a", "b", when=lambda state: assert_type(state.score, float) < 1)
orders.edge("a", "b", when=ks.when.equals("score", 1))
orders.edge("a", "b", when=known)
pages.edge("a", "b", when=lambda state: assert_type(state["views"], int) < 1)
plain.edge("a", "b", when=lambda state: state["views"] < 1 or state.views)


@ks.workflow
async def weigh(order: Order) -> Order:
    return order


@ks.workflow
async def parent() -> Order:
    child = await ks.start(weigh, {"score": 1})
    assert_type(await child.result(), Order)
    assert_type(await child, Order)
    assert_type(await (await ks.start(weigh.bind(Order()))).result(), Order)
    assert_type(await (await ks.start(orders)).result(), dict[str, Any])
    return await (await ks.start(rated, Order())).result()


@ks.workflow
def plainly() -> Order:
    return ks.start(rated, Order()).result()


@ks.workflow
async def judge() -> float:
    assert_type(await ks.wait_for("order", type=Order), Order)
    assert_type(await ks.wait_for("order", timeout=1, default=None, type=Order), Order | None)
    assert_type(await ks.wait_for("order"), Any)
    return 1.0


async def main() -> None:
    async with ks.open("memory:") as engine:
        run = await engine.start(orders, Order(1.0))
        assert_type(await run.result(), dict[str, Any])
        assert_type((await (await engine.start(rated, Order(1.0))).result()).score, float)
        assert_type(await (await engine.start(weigh, {"score": 1})).result(), Order)
"""
WRONG = RIGHT.replace("assert_type(state.score, float) < 1)", "state.scor < 1)")


@pytest.mark.parametrize("text, errors", [(RIGHT, []), (WRONG, ['"Order" has no attribute "scor"'])])
def test_a_type_checker_knows_the_state_and_the_wait(tmp_path, text, errors):
    pytest.importorskip("mypy")
    (tmp_path / "app.py").write_text(text)
    command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", tmp_path / "app.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(found) == len(errors), done.stdout + done.stderr
    assert all(error in line for error, line in zip(errors, found, strict=True))
