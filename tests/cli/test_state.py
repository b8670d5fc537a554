"""`keepstep state`, `edit` and `consolidate`: what a graph's run carries, and what a person makes of it."""

from __future__ import annotations

import json

import pytest

PROGRAM = """
import keepstep as ks

order = ks.Graph("order", interrupt_before=["pay"])


@order.step(stage="shop")
async def choose(state, stage):
    return ks.Changes({"price": 100, "coupon": "x"}, stage={"seen": 1})


@order.step
async def pay(state):
    return {"paid": state["price"]}


order.edge("choose", "pay")
order.entry("choose")
order.exit("pay")
"""


@pytest.fixture
def waiting(keepstep, folder):
    """A run that waits at its breakpoint, in a store that the commands find."""
    (folder / "shop_order.py").write_text(PROGRAM, encoding="utf-8")
    assert keepstep("start", "shop_order.py:order", "{}", "--id", "r").code == 0
    assert keepstep("worker", "shop_order.py", "--until-idle").code == 0


def test_the_state_is_shown_changed_and_gone_on_with(keepstep, waiting):
    assert json.loads(keepstep("state", "r").out) == {"price": 100, "coupon": "x"}
    assert json.loads(keepstep("state", "r", "--at", "1", "--json").out) == {}
    assert json.loads(keepstep("state", "r", "--stage", "shop").out) == {"seen": 1}
    done = keepstep("edit", "r", "--set", "price=60", "--remove", "coupon", "--reason", "a discount")
    assert done.code == 0
    assert done.out.startswith("the state of r is changed; it goes on when a worker takes it")
    told = keepstep("history", "r").out
    assert "→ pay" in told
    assert "edit: a discount" in told
    assert keepstep("worker", "shop_order.py", "--until-idle").code == 0
    assert keepstep("consolidate", "r").code == 0
    assert keepstep("worker", "shop_order.py", "--until-idle").code == 0
    assert keepstep("resume", "r").code == 0
    assert keepstep("worker", "shop_order.py", "--until-idle").code == 0
    assert json.loads(keepstep("state", "r").out) == {"price": 60, "paid": 60}
    assert "a discount" in keepstep("audit", "r").out


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["edit", "r"], "there is nothing to change"),
        (["edit", "r", "--set", "price"], "'price' is not written KEY=JSON"),
        (["edit", "r", "--set", "price={"], "is not JSON"),
        (["edit", "r", "--next", "payy"], "graph 'order' has no step 'payy' in version '1'"),
        (["fork", "r", "--next", "ch"], "graph 'order' has no step 'ch' in version '1'"),
        (["state", "r", "--at", "99"], "none with the number 99"),
        (["state", "r", "--stage", "a", "--agent", "b"], "not both"),
        (["state", "nobody"], "no run 'nobody'"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(keepstep, waiting, arguments, told):
    done = keepstep(*arguments)
    assert done.code != 0
    assert told in done.err
    assert "Traceback" not in done.err


def test_where_no_edge_holds_an_edit_helps(keepstep, folder):
    program = PROGRAM.replace('"choose", "pay"', '"choose", "pay", lambda state: state["price"] < 50')
    (folder / "shop_order.py").write_text(program.replace('["pay"]', "[]"), encoding="utf-8")
    done = keepstep("run", "shop_order.py:order", "{}", "--id", "r")
    assert done.code == 1
    assert "keepstep edit r --set KEY=JSON lets it go on with another state" in done.err
    assert "keepstep edit r --set KEY=JSON" in keepstep("show", "r").out
    assert keepstep("edit", "r", "--set", "price=40").code == 0
    assert "1 record superseded" in keepstep("audit", "r").out
    assert keepstep("run", "shop_order.py:order", "{}", "--id", "r").code == 0


def test_another_step_comes_next(keepstep, waiting):
    assert keepstep("edit", "r", "--next", "choose").code == 0
    assert keepstep("fork", "r", "--id", "f", "--next", "choose").code == 0
    assert keepstep("worker", "shop_order.py", "--until-idle").code == 0
    assert "choose#2" in keepstep("history", "r").out
    assert "choose#2" in keepstep("history", "f").out


STRICT = """
from typing import Literal
from pydantic import BaseModel
import keepstep as ks


class Order(BaseModel):
    id: int
    speed: Literal["fast", "slow"] = "slow"


strict = ks.Graph("strict", schema=Order, interrupt_before=["ship"])


@strict.step
async def pick(state):
    return {"speed": "slow"}


@strict.step
async def ship(state):
    return None


strict.edge("pick", "ship")
strict.entry("pick")
strict.exit("ship")
"""


def test_edits_and_forks_are_held_to_the_schema(keepstep, folder):
    (folder / "strict_order.py").write_text(STRICT, encoding="utf-8")
    assert keepstep("start", "strict_order.py:strict", "id=1", "--id", "r").code == 0
    assert keepstep("worker", "strict_order.py", "--until-idle").code == 0
    acts = [
        (["edit", "r", "--set", 'speed="warp"'], "['speed'] does not fit Order"),
        (["fork", "r", "--state", '{"id": "nine"}'], "['id'] does not fit Order"),
        (["fork", "r", "--result", 'pick={"nokey": 1}'], "Order has no key 'nokey'"),
    ]
    for arguments, told in acts:
        refused = keepstep(*arguments)
        assert refused.code != 0
        assert "name it with --workflow FILE.py:NAME" in refused.err
        refused = keepstep(*arguments, "--workflow", "strict_order.py:strict")
        assert refused.code != 0
        assert told in refused.err
    assert keepstep("edit", "r", "--set", 'id="7"', "--workflow", "strict_order.py:strict").code == 0
    assert json.loads(keepstep("state", "r").out) == {"id": 7, "speed": "slow"}
