"""Workflows that the tests of the pages serve, start and drive."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import keepstep as ks
from keepstep.agents.calls import CallSteps


@ks.step
async def double(number: int) -> int:
    return number * 2


@ks.workflow(name="approving")
async def approving(number: int = 1, note: str = "") -> int | str:
    ks.publish("question", f"Double {number}? {note}")
    if not await ks.wait_for("approved"):
        return "denied"
    return await double(number)


@ks.step
async def explode(text: str) -> str:
    raise ks.Permanent(text)


@ks.workflow(name="failing_page")
async def failing(text: str = "no such account") -> str:
    await double(1)
    return await explode(text)


@ks.workflow(name="counting_page")
async def counting(steps: int = 5) -> int:
    total = 0
    for number in range(steps):
        total += await double(number)
    return total


@ks.step(at_most_once=True)
async def charge(amount: int) -> str:
    if "KEEPSTEP_TEST_KILL" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"paid {amount}"


@ks.workflow(name="charging_page")
async def charging(amount: int = 5) -> str:
    return await charge(amount)


@ks.workflow(name="refunding")
async def refunding(note: str = "") -> str:
    ks.publish("approve:c1", {"tool": "refund", "arguments": {"eur": 5}, "note": note})
    answer = await ks.wait_for("approve:c1", timeout=3600, default=None)
    return f"answered {answer}"


#: Whether the code of `changing` is another one than before, so that its runs are set aside.
CHANGED: list[bool] = []


@ks.workflow(name="changing")
async def changing() -> int:
    first = await (charge(1) if CHANGED else double(1))
    await ks.wait_for("approved")
    return first


@ks.step
def linger(path: str) -> None:
    """Return when a file exists; the first attempt says that it has begun."""
    Path(f"{path}.began").touch()
    while not Path(path).exists():
        time.sleep(0.02)


@ks.workflow(name="lingering_pages")
async def lingering(path: str) -> int:
    total = await double(1)
    await linger(path)
    return total + await double(2)


@ks.step
async def tell(count: int) -> None:
    ks.spend(cost=0.25, tokens=100, model="small")
    for number in range(count):
        ks.emit(f"word{number} ")


@ks.workflow(name="telling_pages")
async def telling(path: str = "") -> None:
    await tell(3)
    if path:
        await linger(path)
        await tell(2)


async def said(message: Any) -> Any:
    ks.spend(cost=0.5, tokens=50, model="large")
    return message


@ks.workflow(name="chatting_pages")
async def chatting() -> None:
    calls = CallSteps("helper")
    asked = {"role": "assistant", "content": [{"type": "text", "text": "I look it up."}]}
    await calls.model("How warm is it?", lambda: said(asked))
    await calls.tool("weather", "call-1", lambda: said({"celsius": 21}), arguments={"city": "Bern"})
    await ks.wait_for("may_send")
    await calls.model("So?", lambda: said({"role": "assistant", "content": "It is warm."}))


@ks.workflow(name="mother_of_pages")
async def mother() -> int | str:
    child: int | str = await (await ks.start(approving, 5, run_id="child-1"))
    return child


@ks.step(at_most_once=True, timeout=0.05)
async def pay(amount: int) -> int:
    await asyncio.sleep(60)
    return amount


@ks.workflow(name="paying_pages")
async def paying(amount: int) -> int:
    return await pay(amount)


review: Any = ks.Graph("review_of_pages")


@review.step
async def draft(state: Any) -> dict[str, Any]:
    return {"text": f"draft {state['number']}"}


@review.step
async def publish(state: Any) -> dict[str, Any]:
    return {"published": state["text"]}


review.edge("draft", "publish")
review.entry("draft")
review.exit("publish")


reviewing: Any = ks.Graph("reviewing")
reviewing.add(lambda state: {"rounds": state.get("rounds", 0) + 1}, name="write")
reviewing.add(lambda state: {"score": state["rounds"] / 2}, name="check")
reviewing.edge("write", "check")
reviewing.edge("check", "write", when=lambda state: state["score"] < 1)
reviewing.entry("write")
reviewing.exit("check")


#: The workflows that the engine of a test drives.
WORKFLOWS = [approving, failing, counting, charging, refunding, changing, telling, mother, paying, review, reviewing]
WORKFLOWS += [chatting]
