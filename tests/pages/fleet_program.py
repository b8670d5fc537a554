"""A fleet for the tests of the pages: queues, a service, a schedule, an agent, a topic, a channel, and a worker.

`python -m tests.pages.fleet_program URL [lonely]` is a worker; `lonely` knows one workflow, which no other one knows.
"""

from __future__ import annotations

import asyncio
import enum
import sys
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, Field

import keepstep as ks

HOSTILE = "<img src=x onerror=alert(1)>"

mail = ks.Queue("mail", concurrency=1, rate=ks.Rate(100, 1.0, 5))
bank = ks.Service("bank", concurrency=2, breaker=ks.Breaker(failures=2, open_seconds=3600))


@ks.step
async def hold() -> None:
    await asyncio.sleep(3600)


@ks.workflow(name="mailing", queue=mail)
async def mailing() -> None:
    """Hold a place until its worker ends."""
    await hold()


@ks.step(service="bank", retry=ks.Retry(attempts=1))
async def pay(number: int) -> int:
    raise ConnectionError(f"the bank does not answer {number}")


@ks.workflow(name="paying")
async def paying(number: int = 1) -> int:
    return await pay(number)


@ks.step
async def refuse(text: str) -> None:
    raise ks.Permanent(text)


@ks.workflow(name="refusing")
async def refusing(text: str = HOSTILE) -> None:
    await refuse(text)


@ks.workflow(name="nightly", schedule=ks.Cron("0 3 * * *", tz="Europe/Berlin"))
async def nightly() -> str:
    return "done"


@ks.agent(capabilities=["write"])
async def writer(task: str) -> str:
    return task.upper()


@ks.workflow(name="asking")
async def asking(task: str = "a poem") -> str:
    return str(await ks.perform("write", task))


@ks.workflow(name="listening")
async def listening() -> None:
    async with ks.Topic("news").subscribe() as messages:
        async for _ in messages:
            pass


@ks.workflow(name="lonely")
async def lonely() -> None:
    await hold()


ks.Channel("ops", webhook="http://127.0.0.1:9/none")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Address:
    city: str
    street: str = "Main Street"


class Order(BaseModel):
    item: str = Field(description=f"What is ordered {HOSTILE}")
    count: int = 1


@ks.step
async def echo(values: dict[str, Any]) -> dict[str, Any]:
    return values


@ks.workflow(name="every")
async def every(  # noqa: PLR0917 - one of every kind
    text: str,
    number: int,
    share: float = 0.5,
    yes: bool = False,
    mode: Literal["fast", "slow"] = "fast",
    colour: Colour = Colour.BLUE,
    day: date | None = None,
    address: Annotated[Address, msgspec.Meta(description="Where it goes")] = Address("Bonn"),  # noqa: B008
    order: Order | None = None,
    note: str = HOSTILE,
) -> dict[str, Any]:
    """Take one argument of every kind."""
    found = {"text": text, "number": number, "share": share, "yes": yes, "mode": mode, "colour": colour.name}
    found |= {"day": str(day), "city": address.city, "order": None if order is None else order.model_dump()}
    return await echo({**found, "note": note})


review = ks.Graph("review")


@review.step
async def draft(state: Any) -> dict[str, Any]:
    return {"round": state.get("round", 0) + 1}


@review.step
async def critic(state: Any) -> dict[str, Any]:
    return {"good": state["round"] > 1}


review.entry("draft")
review.edge("draft", "critic")
review.edge("critic", "draft", when=lambda state: not state["good"])
review.exit("critic")

WORKFLOWS = [mailing, paying, refusing, nightly, asking, listening, every, review]


async def work(url: str, kind: str) -> None:
    """Drive runs until the process is killed."""
    alone = kind == "lonely"
    given: dict[str, Any] = {"workflows": [lonely]} if alone else {"workflows": WORKFLOWS, "agents": [writer]}
    async with ks.open(url, lease_seconds=1.5 if alone else 10, **given) as engine:
        if alone:
            await engine.start(lonely, run_id="lonely-1")
            await (await engine.get("lonely-1")).reached("running")
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""))
