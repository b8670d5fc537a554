"""Small workflows for crash tests: each has one flaw, but for those at the end, which have none."""

# ruff: noqa: ASYNC240, ASYNC251 - they are flawed on purpose

from __future__ import annotations

import asyncio
import datetime as dt
import os
import random
import smtplib
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from pathlib import Path

import keepstep as ks
from keepstep.testing import effect


@ks.step
async def note(*values):
    return list(values)


# -- effects that are doubled ------------------------------------------------------------------------------------------


@ks.step
async def charge(order):
    effect("charge", order)  # doubled
    await asyncio.sleep(0)
    return f"receipt for {order}"


@ks.workflow
async def double_charge(order: str = "order-1") -> str:
    return await charge(order)


@ks.workflow
async def anything(order):
    return await charge(order)


@ks.step
async def charge_with_new_key(order):
    effect("charge", order, key=str(uuid.uuid4()))


@ks.workflow
async def useless_key() -> None:
    await charge_with_new_key("order-1")


@ks.step
def append():
    with Path("log.txt").open("a") as file:
        file.write("a line\n")


@ks.workflow
async def appends() -> None:
    await append()


@ks.step
def call_program():
    subprocess.run([sys.executable, "-c", "pass"], check=True)


@ks.workflow
async def processes() -> None:
    await call_program()


@ks.step
async def call_program_async():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    return await process.wait()


@ks.workflow
async def async_processes() -> int:
    return await call_program_async()


@ks.step
def post(url, key_in=""):
    keys = {"header": ks.idempotency_key(), "own header": "order-1"}
    headers = {"idempotency-key": keys[key_in]} if key_in in keys else {}
    body = f"key={ks.idempotency_key()}" if key_in == "body" else "amount=5"
    request = urllib.request.Request(url, data=body.encode(), headers=headers, method="POST")
    with urllib.request.urlopen(request) as answer:
        return answer.status


@ks.workflow
async def posts(url: str, key_in: str = "") -> int:
    return await post(url, key_in)


@ks.step
def get(url):
    with urllib.request.urlopen(url) as answer:
        return answer.status


@ks.workflow
async def gets(url: str) -> int:
    return await get(url)


@ks.step
def mail(port):
    with smtplib.SMTP("127.0.0.1", port, timeout=5) as server:
        server.sendmail("a@example.org", ["b@example.org"], "hello")


@ks.workflow
async def mails(port: int) -> None:
    await mail(port)


@ks.step
def charge_in_thread():
    thread = threading.Thread(target=effect, args=("charge", "in a thread"))
    thread.start()
    thread.join()


@ks.workflow
async def threads() -> None:
    await charge_in_thread()


@ks.step
def give_secret():
    subprocess.run([sys.executable, "-c", "pass", "password=hunter2"], check=True)


@ks.workflow
async def careless() -> None:
    await give_secret()


@ks.step
def append_strangely():
    with open(b"log-\xff\x1b", "a") as file:  # noqa: PTH123 - a path of bytes
        file.write("a line\n")


@ks.workflow
async def strange_name() -> None:
    await append_strangely()


@ks.workflow
async def orphan() -> None:
    await ks.sleep(days=1)
    await charge("from a child")


@ks.workflow
async def leaves_child() -> None:
    await ks.start(orphan)


@ks.workflow
async def for_ever() -> None:
    await ks.sleep(days=1)
    ks.continue_as()


@ks.workflow
async def leaves_child_for_ever() -> None:
    await ks.start(for_ever)


# -- what is outside a step --------------------------------------------------------------------------------------------


@ks.workflow
async def effect_outside() -> list:
    effect("mail", "somebody")
    return await note(1)


@ks.workflow
async def file_outside() -> list:
    Path("seen.txt").write_text("seen")
    return await note(1)


# -- what is another on replay -----------------------------------------------------------------------------------------


@ks.workflow
async def chance() -> list:
    await note(random.randint(1, 10**9))  # drawn
    return await note(1)


@ks.workflow
async def clock() -> list:
    await note(dt.datetime.now(dt.UTC).isoformat())  # looked at
    return await note(1)


@ks.workflow
async def identity() -> list:
    await note(str(uuid.uuid4()))  # made up
    return await note(1)


@ks.workflow
async def harmless_clock() -> list:
    began = time.time()
    await note(1)
    return await note(time.time() - began > 10**9)


@ks.workflow
async def random_result() -> int:
    await note(1)
    return random.randint(1, 10**9)


remembered: dict[str, int] = {}


@ks.step
async def remember():
    remembered["x"] = 42


@ks.workflow
async def memory() -> int:
    await remember()
    await note(1)
    return remembered.get("x", -1)


@ks.workflow
async def memory_and_time() -> dict:
    await remember()
    await charge_once("order-1")
    return {"x": remembered.get("x", -1), "at": ks.now().isoformat()}


@ks.workflow
async def only_time() -> list:
    await write("quickly")
    return [await charge_once("order-1"), ks.now().isoformat()]


@ks.step
def take():
    """Takes the first line away, so a second time it gets the second."""
    first, *rest = Path("lines.txt").read_text().split()
    Path("lines.txt").write_text("\n".join(rest))
    return first


@ks.workflow
async def takes() -> str:
    return await take()


@ks.step
async def half_written():
    Path("state.tmp").write_text("half")
    await asyncio.sleep(0)
    Path("state.tmp").rename(f"state-{uuid.uuid4().hex}")


@ks.workflow
async def leaves_half() -> None:
    await half_written()


# -- what does not end -----------------------------------------------------------------------------------------------


@ks.workflow
async def never_told() -> str:
    return await ks.wait_for("go")


@ks.step
def sleep_for_ever():
    threading.Event().wait()


@ks.workflow
async def hangs() -> None:
    await sleep_for_ever()


@ks.step
async def await_for_ever():
    await asyncio.Event().wait()


@ks.workflow
async def awaits_for_ever() -> None:
    await await_for_ever()


@ks.workflow
async def leaves() -> None:
    await note(1)
    sys.exit(3)


@ks.step
def end_process():
    os._exit(3)


@ks.workflow
async def dies() -> None:
    await end_process()


@ks.workflow
async def fails(text: str = "no") -> None:
    await note(1)
    raise ValueError(text)


@ks.workflow
async def hangs_after_crash() -> None:
    await remember()
    await note(1)
    while "x" not in remembered:
        time.sleep(0.1)


# -- without a flaw --------------------------------------------------------------------------------------------------


@ks.step(retry=ks.Retry(attempts=3, base_seconds=60))
async def sometimes(number):
    marks = Path(f"tries-{number}")
    tries = int(marks.read_text()) if marks.exists() else 0
    marks.write_text(str(tries + 1) if tries < 1 else "1")
    if tries < 1:
        raise ConnectionError("not yet")
    return number


@ks.step
async def charge_once(order):
    effect("charge", order, key=ks.idempotency_key())
    await asyncio.sleep(0.5)
    return str(ks.run_id())


@ks.step
def write(text):
    Path("result.txt").write_text(text)
    return len(text)


@ks.workflow
async def child(number: int) -> int:
    await ks.sleep(hours=1)
    return sum(await note(number, 1))


@ks.workflow
async def good(order: str = "order-1") -> list:
    """A bit of everything: parallel steps, months of sleep, a signal, a child, chance and time in the right way."""
    drawn = [ks.random(), str(ks.uuid()), ks.now().isoformat()]
    numbers = await ks.map(sometimes, [1, 2, 3])
    await ks.sleep(days=60)
    approved = await ks.wait_for("approve", timeout=86_400 * 30, default=False)
    receipt = await charge_once(order)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(write("hello"))
        second = group.create_task((await ks.start(child, 5)).result())
    return [numbers, approved, receipt, first.result(), second.result(), len(drawn), drawn[:2]]


@ks.workflow
def plain(order: str = "order-1") -> str:
    """A plain def workflow, whose code is in a thread."""
    write("plain").result()
    ks.sleep(days=1).result()
    return charge_once(order).result()


@ks.step
def double(number: int) -> int:
    return 2 * number


@ks.workflow
async def blocking_side_by_side() -> list:
    """Plain def steps at once, each in a thread of its own."""
    return await ks.map(double, range(6), concurrency=6)


@ks.step(at_most_once=True)
async def charge_at_most_once(order):
    effect("charge", order)


@ks.workflow
async def at_most_once() -> None:
    await charge_at_most_once("order-1")


def was_charged(order):
    return ks.Done() if Path(order).exists() else ks.NotDone()


@ks.step(at_most_once=True, verify=was_charged)
async def charge_verified(order):
    Path(order).touch(exist_ok=False)


@ks.workflow
async def verified() -> None:
    await charge_verified("order-1")


@ks.step(transactional=True)
def book(tx):
    tx.execute("CREATE TABLE IF NOT EXISTS ledger (number)")
    tx.execute("INSERT INTO ledger VALUES (1)")
    return 1


@ks.workflow
async def books() -> int:
    return await book() + await book()


@ks.step
async def after(seconds, value):
    await asyncio.sleep(seconds)
    return value


@ks.step(timeout=1, retry=ks.Retry(attempts=2, base_seconds=60))
async def too_slow():
    await asyncio.sleep(3600)


@ks.workflow
async def races() -> list:
    """What ends first, what is cancelled, and what comes too late."""
    first = await ks.race(after(5, "a"), after(1, "b"))
    loser = asyncio.create_task(after(3600, "c"))
    both = await asyncio.gather(after(2, "d"), write("e"))
    loser.cancel()
    try:
        async with ks.timeout(10):
            await ks.gather(after(3600, "f"), loser)
    except asyncio.CancelledError:
        first += " cancelled"
    try:
        await too_slow()
    except ks.StepTimedOut:
        first += " too late"
    return [first, *both]


@ks.workflow
async def many(rounds: int = 100) -> int:
    for number in range(rounds):
        await note(number)
    return rounds


@ks.workflow
async def counts_down(left: int = 3) -> list:
    drawn = await note(str(ks.uuid()))
    return drawn if left == 0 else ks.continue_as(left - 1)


@ks.workflow
async def relays(left: int = 2, heard: tuple = ()) -> list:
    heard = [*heard, await ks.wait_for("word")]
    return ks.continue_as(left - 1, heard) if left else heard


@ks.workflow
async def talks() -> str:
    request = await ks.wait_for("say")
    request.reply("yes")
    return request.payload


# -- waits for people --------------------------------------------------------------------------------------------------


@ks.step
async def ask_bank(token: str) -> None:
    pass


@ks.workflow
async def pays_by_hook(name: str = "payment") -> str:
    payment = await ks.callback(name)
    await ask_bank(payment.token)
    return await payment.wait(timeout=3600)


@ks.workflow
async def gives_up() -> list:
    payment = await ks.callback("payment")
    await ask_bank(payment.token)
    try:
        return [await payment.wait(timeout=3600), repr(payment)]
    except ks.TimedOut as error:
        return [str(error), repr(payment)]


@ks.workflow
async def waits_for_ever() -> str:
    payment = await ks.callback("payment")
    return await payment.wait()


stops = ks.Graph("flawed_stops", interrupt_before=["count_up"], interrupt_after=["count_up"])


@stops.step
async def count_up(state):
    return {"count": state.get("count", 0) + 1}


stops.entry("count_up")
stops.edge("count_up", "count_up", when=lambda state: state["count"] < 2)
stops.exit("count_up")


@ks.workflow
async def stops_in_a_child() -> int:
    return (await (await ks.start(stops)))["count"]
