"""`keepstep state`, `edit` and `consolidate`: what a graph's run carries, and what a person makes of it."""

from __future__ import annotations

import json

import pytest

PROGRAM = """
from datetime import UTC, datetime

import keepstep as ks

order = ks.Graph("order", interrupt_before=["pay"])


@order.step(stage="shop")
async def choose(state, stage):
    return ks.Changes({"price": 100, "coupon": "x"}, stage={"seen": 1, "at": datetime(2026, 1, 1, tzinfo=UTC)})


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


def test_state_is_shown_and_edited_and_the_run_goes_on(keepstep, waiting):
    assert json.loads(keepstep("state", "r").out) == {"price": 100, "coupon": "x"}
    assert json.loads(keepstep("state", "r", "--at", "1", "--json").out) == {}
    assert json.loads(keepstep("state", "r", "--stage", "shop").out) == {"seen": 1, "at": "2026-01-01T00:00:00+00:00"}
    done = keepstep("edit", "r", "--set", "price=60", "--remove", "coupon", "--reason", "a discount")
    assert done.code == 0
    assert done.out.startswith("the state of r is changed; it goes on when a worker claims it")
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


def test_resume_after_an_edit_passes_the_breakpoint_when_a_worker_comes(keepstep, waiting):
    assert keepstep("edit", "r", "--set", "price=60").code == 0
    assert keepstep("resume", "r").code == 0
    assert keepstep("worker", "shop_order.py", "--until-idle").code == 0
    assert json.loads(keepstep("state", "r").out)["paid"] == 60


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["edit", "r"], "nothing to change"),
        (["edit", "r", "--set", "price"], "must be written KEY=JSON, got 'price'"),
        (["edit", "r", "--set", "price={"], "is not JSON"),
        (["edit", "r", "--next", "payy"], "graph 'order' has no step 'payy' in version '1'"),
        (["fork", "r", "--next", "ch"], "graph 'order' has no step 'ch' in version '1'"),
        (["state", "r", "--at", "99"], "got 99"),
        (["state", "r", "--stage", "a", "--agent", "b"], "not both"),
        (["state", "nobody"], "no run 'nobody'"),
    ],
)
def test_mistake_is_reported_in_a_sentence(keepstep, waiting, arguments, told):
    done = keepstep(*arguments)
    assert done.code != 0
    assert told in done.err
    assert "Traceback" not in done.err


def test_edit_lets_a_run_without_a_matching_edge_go_on(keepstep, folder):
    program = PROGRAM.replace('"choose", "pay"', '"choose", "pay", lambda state: state["price"] < 50')
    (folder / "shop_order.py").write_text(program.replace('["pay"]', "[]"), encoding="utf-8")
    done = keepstep("run", "shop_order.py:order", "{}", "--id", "r")
    assert done.code == 1
    assert "keepstep edit r --set KEY=JSON lets it go on with another state" in done.err
    assert "keepstep edit r --set KEY=JSON" in keepstep("show", "r").out
    assert keepstep("edit", "r", "--set", "price=40").code == 0
    assert "1 record superseded" in keepstep("audit", "r").out
    assert keepstep("run", "shop_order.py:order", "{}", "--id", "r").code == 0


def test_edit_and_fork_choose_the_next_step(keepstep, waiting):
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
        assert "Name it with --workflow FILE.py:NAME" in refused.err
        refused = keepstep(*arguments, "--workflow", "strict_order.py:strict")
        assert refused.code != 0
        assert told in refused.err
    assert keepstep("edit", "r", "--set", 'id="7"', "--workflow", "strict_order.py:strict").code == 0
    assert json.loads(keepstep("state", "r").out) == {"id": 7, "speed": "slow"}


NAMED = """
from dataclasses import dataclass
from enum import Enum
import keepstep as ks


class Speed(Enum):
    FAST = "f"
    SLOW = "s"


@dataclass
class Trip:
    speed: Speed
    plan: list[Speed]


trip = ks.Graph("trip", schema=Trip)


@trip.step
async def choose(state):
    return None


trip.wait("decide", into="speed")
trip.edge("choose", "decide")
trip.entry("choose")
trip.exit("decide")


@ks.workflow
async def drive(speed: Speed, trip: Trip | None = None) -> list[Speed]:
    return [speed, await ks.wait_for("then", type=Speed), *(trip.plan if trip else [])]
"""


def test_enum_is_taken_by_name_or_by_value(keepstep, folder):
    (folder / "named_trip.py").write_text(NAMED, encoding="utf-8")
    first = '{"speed": "SLOW", "trip": {"speed": "s", "plan": ["FAST", "s"]}}'
    assert keepstep("start", "named_trip.py:drive", "--input", first, "--id", "d").code == 0
    assert keepstep("start", "named_trip.py:drive", "f", "--id", "e").code == 0
    assert keepstep("start", "named_trip.py:trip", "speed=s", "plan=[]", "--id", "t").code == 0
    assert keepstep("signal", "d", "then", '"FAST"').code == 0
    assert keepstep("signal", "e", "then", '"s"').code == 0
    assert keepstep("worker", "named_trip.py", "--until-idle").code == 0
    assert "SLOW" in keepstep("show", "d").out
    assert json.loads(keepstep("show", "d", "--json").out)["result"] == ["SLOW", "FAST", "FAST", "SLOW"]
    assert json.loads(keepstep("show", "e", "--json").out)["result"] == ["FAST", "SLOW"]
    named = ("--workflow", "named_trip.py:trip")
    assert keepstep("edit", "t", "--set", 'plan=["FAST"]', *named).code == 0
    assert json.loads(keepstep("state", "t").out)["plan"] == ["FAST"]
    assert keepstep("fork", "t", "--state", '{"speed": "FAST"}', "--id", "u", *named).code == 0
    assert json.loads(keepstep("state", "u").out)["speed"] == "FAST"
    refused = keepstep("edit", "t", "--set", 'speed="WARP"', *named)
    assert refused.code != 0
    assert "Invalid enum value 'WARP'" in refused.err
    refused = keepstep("start", "named_trip.py:drive", "WARP")
    assert refused.code != 0
    assert "argument 'speed' of workflow 'drive' does not fit Speed: Invalid enum value 'WARP'" in refused.err
    assert keepstep("signal", "t", "decide", '"SLOW"').code == 0
    assert keepstep("worker", "named_trip.py", "--until-idle").code == 0
    assert json.loads(keepstep("show", "t", "--json").out)["result"]["speed"] == "SLOW"
