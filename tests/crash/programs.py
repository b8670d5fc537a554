"""Example workflows that the crash tests kill, and how a client plays each of them: a client that can be run again.

Every body of a step notes that it began in the effects file, which is the judge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import keepstep as ks
from keepstep.kernel.graph import position
from keepstep.model import Kind
from keepstep.ports import CURRENT, SystemClock
from keepstep.testing.faults.recorder import Recorder

EFFECTS: Recorder | None = None


def record_to(path) -> Recorder:
    """Have every body note its beginning in this file."""
    global EFFECTS  # noqa: PLW0603 - the steps are module-level functions, as users write them
    if EFFECTS is not None:
        EFFECTS.close()
    EFFECTS = Recorder(path)
    return EFFECTS


class FastClock(SystemClock):
    """A wall clock that runs ahead, so that parked runs wake soon; leases count by another one."""

    def __init__(self, speed=100.0) -> None:
        super().__init__()
        self._from = time.time()
        self._speed = speed

    def now(self) -> float:
        return self._from + (time.time() - self._from) * self._speed


def workflow(fn=None, **options):
    """A workflow whose name no other test uses."""
    if fn is None:
        return lambda function: workflow(function, **options)
    return ks.workflow(name=f"crash:{fn.__name__}", **options)(fn)


# -- steps -------------------------------------------------------------------------------------------------------------


@ks.step
async def add(total: int, number: int) -> int:
    EFFECTS.body()
    await asyncio.sleep(0)
    return total + number


@ks.step
def add_in_thread(total: int, number: int) -> int:
    EFFECTS.body()
    return total + number


@ks.step
async def never(seconds: float = 60.0) -> str:
    EFFECTS.body()
    await asyncio.sleep(seconds)
    return "the loser won"


@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.01, factor=1.0))
async def flaky(number: int) -> int:
    if EFFECTS.body() < 3:
        raise ConnectionError("try again")
    return number


@ks.step
async def fails() -> None:
    EFFECTS.body()
    raise ks.Permanent("it cannot work")


def looked_up(number: int):
    """Whether the charge happened is told by the effects, as a payment service would tell."""
    done = EFFECTS.bodies(ks.run_id(), "charge")
    return ks.Done(number) if done else ks.NotDone()


@ks.step(at_most_once=True, verify=looked_up)
async def charge(number: int) -> int:
    EFFECTS.body()
    await asyncio.sleep(0)
    return number


@ks.step(transactional=True)
def book(tx, number: int) -> int:
    EFFECTS.body()
    tx.execute("CREATE TABLE IF NOT EXISTS ledger (run TEXT, number INTEGER)")
    tx.execute("INSERT INTO ledger VALUES (?, ?)", (ks.run_id(), number))
    return number


@ks.step
async def clean_up() -> str:
    EFFECTS.body()
    await asyncio.sleep(0.02)
    return "clean"


# -- workflows and their clients ---------------------------------------------------------------------------------------


#: Set it to try every example on PostgreSQL too: that takes minutes.
EVERYWHERE = bool(os.environ.get("KEEPSTEP_EVERYWHERE"))


@dataclass(frozen=True)
class Example:
    """A scenario: what a client does, any number of times, and what must come of it."""

    name: str
    play: object
    result: object
    children: int = 0
    done: tuple[str, ...] = ()
    stores: tuple[str, ...] = ("memory", "sqlite", "files", *(("postgres",) if EVERYWHERE else ()))

    def __str__(self) -> str:
        return self.name


@contextlib.contextmanager
def unless_finished():
    """What a client says again after a crash may come too late."""
    with contextlib.suppress(ks.AlreadyFinished):
        yield


async def until(handle, *statuses, seconds=60.0):
    """Wait until a run stands so, or has ended."""
    async with asyncio.timeout(seconds):
        while True:
            status = await handle.status()
            if status in statuses or status.finished:
                return status
            await asyncio.sleep(0.002)


@workflow
async def sequence(steps: int) -> int:
    total = 0
    for number in range(1, steps + 1):
        total = await add(total, number)
    return total


async def play_sequence(engine):
    return await (await engine.start(sequence, 4, run_id="main")).result()


@workflow
async def fan() -> list[int]:
    first = await ks.gather(add(1, 1), add_in_thread(2, 2), add(3, 3))
    second = await ks.map(add_in_thread_twice, [1, 2, 3], concurrency=2)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(add(number, 10)) for number in range(2)]
    return [*first, *second, *(task.result() for task in tasks)]


async def add_in_thread_twice(number: int) -> int:
    return await add_in_thread(await add(number, 0), number)


async def play_fan(engine):
    return await (await engine.start(fan, run_id="main")).result()


@workflow
async def racing() -> list:
    first = await ks.race(add(1, 1), never())
    done, late = await asyncio.wait(
        [asyncio.ensure_future(add(2, 2)), asyncio.ensure_future(never(59.0))], return_when=asyncio.FIRST_COMPLETED
    )
    for task in late:
        task.cancel()
    try:
        async with ks.timeout(0.02):
            await ks.wait_for("nothing")
    except ks.TimedOut:
        timed_out = True
    seen = sorted([number async for number in ks.as_completed([add(5, 0), flaky(6)])])
    return [first, next(iter(done)).result(), timed_out, seen, await add(first, 1)]


async def play_racing(engine):
    return await (await engine.start(racing, run_id="main")).result()


@workflow
async def retried() -> list:
    number = await flaky(7)
    try:
        await fails()
    except ks.StepFailed as error:
        caught = error.error.type
    return [number, caught, await add(number, 1)]


async def play_retried(engine):
    return await (await engine.start(retried, run_id="main")).result()


@workflow
async def conversation() -> list:
    heard = [await ks.wait_for("first")]
    heard.append(await add(heard[0], 1))
    heard.append(await ks.wait_for("second", timeout=3600))
    heard.append(await ks.wait_for("second"))
    heard.append(await ks.wait_for("never sent", timeout=0.02, default="nothing"))
    return heard


async def play_conversation(engine):
    handle = await engine.start(conversation, run_id="main")
    with unless_finished():
        await handle.signal("second", 20, id="2")
        await handle.signal("first", 10, id="1")
        await handle.signal("second", 20, id="2")
        await until(handle, ks.Status.WAITING)
        await handle.signal("second", 30, id="3")
    return await handle.result()


@workflow
async def sleeper() -> list:
    one = await add(1, 0)
    await ks.sleep(0.02)
    two = await add(one, 1)
    await ks.sleep(5)  # long enough to be put away; the test's clock is fast
    return [one, two, await add(two, 1)]


async def play_sleeper(engine):
    return await (await engine.start(sleeper, run_id="main")).result()


@workflow
async def child(number: int) -> int:
    if number < 0:
        await fails()
    return await add(number, number)


@workflow
async def parent() -> list:
    one = await ks.start(child, 1)
    two = await ks.start(child, -1)
    mine = await add(0, 5)
    results = [mine, await one]
    try:
        await two
    except ks.StepFailed as error:
        results.append(error.error.type)
    three = await ks.start(child, 3, run_id="named-child")
    results.append(await three.result())
    return results


@workflow
async def parent_of_two() -> list:
    one, two = await ks.start(child, 1), await ks.start(child, 2)
    return [await one, await two]


async def play_parent(engine):
    return await (await engine.start(parent, run_id="main")).result()


async def play_queued(engine):
    """Runs of a queue with one place: two behind one key, one beside them, and one that is started twice."""
    limits = {"concurrency": 1, "per_key": 1, "rate": ks.Rate(10_000, burst=10_000)}
    try:
        await engine.queues.set("narrow", **limits)
    except ks.StoreUnavailable:  # as a person would
        await engine.queues.set("narrow", **limits)
    options = {"queue": "narrow", "key": "a"}
    runs = [await engine.start(child, number, run_id=f"queued-{number}", **options) for number in (1, 2)]
    runs.append(await engine.start(child, 3, run_id="queued-3", queue="narrow", dedupe="d"))
    again = await engine.start(child, 3, run_id="queued-4", queue="narrow", dedupe="d")
    first, second, third = [await run.result() for run in runs]
    return [first, second, third, await again.result()]


@workflow
async def careful() -> list:
    return [await charge(1), await add(1, 1), await charge(2)]


async def play_careful(engine):
    return await (await engine.start(careful, run_id="main")).result()


@workflow
async def booking() -> list:
    return [await book(1), await add(1, 1), *await ks.gather(book(2), book(3))]


async def play_booking(engine):
    return await (await engine.start(booking, run_id="main")).result()


@workflow
async def continuing(round_: int, total: int) -> int:
    total = await add(total, round_)
    if round_ < 3:
        ks.continue_as(round_ + 1, total)
    return total + await ks.wait_for("extra")


@workflow
async def relaying(rounds: int, seen: list) -> list:
    """Each round reads one message and goes on as another run: none may be lost on the way, or read twice."""
    seen = [*seen, await add(await ks.wait_for(f"item{len(seen) + 1}"), 0)]
    if len(seen) < rounds:
        ks.continue_as(rounds, seen)
    return seen


async def play_continuing(engine):
    handle = await engine.start(continuing, 1, 0, run_id="main")
    with unless_finished():
        await handle.signal("extra", 100, id="x")
    return await handle.result()


@workflow
async def cancelled() -> str:
    await add(1, 1)
    helper = await ks.start(patient)
    try:
        return await ks.wait_for("nothing")
    finally:
        await clean_up()
        await add(2, 2)
        await helper.signal("too late")


@workflow
async def patient() -> None:
    await ks.wait_for("nothing")


async def play_cancelled(engine):
    handle = await engine.start(cancelled, run_id="main")
    await until(handle, ks.Status.WAITING)
    with unless_finished():
        await handle.cancel()
    try:
        return await handle.result()
    except ks.RunCancelled:
        page = await engine.list()
        for run in page.runs:  # its child is cancelled with it
            if run.parent:
                assert await until(await engine.get(run.id), ks.Status.CANCELLED) is ks.Status.CANCELLED
        return "cancelled"


@ks.step(retry=ks.Retry(attempts=2, base_seconds=0.01))
async def taken_back(result: int, number: int) -> None:
    assert result == number * 10
    if EFFECTS.body(key=ks.idempotency_key()) == 1 and number == 3:
        raise ConnectionError("try again")


@ks.step(undo=taken_back)
async def reserve(number: int) -> int:
    EFFECTS.body()
    await asyncio.sleep(0)
    return number * 10


@workflow(undo=taken_back)
async def tenfold(number: int) -> int:
    return await add(0, number * 10)


@workflow
async def undoing() -> None:
    await reserve(1)
    await (await ks.start(tenfold, 2))
    async with ks.saga():
        await reserve(2)
        await ks.undo()
    await ks.start(patient)
    await reserve(3)
    await fails()


async def play_undoing(engine):
    """Return the undone steps in their order. All bodies of an undo have the same idempotency key."""
    handle = await engine.start(undoing, run_id="main")
    with contextlib.suppress(ks.RunFailed):
        await handle.result()
    keys = {}
    for body in EFFECTS.bodies("main", None):
        if body.step.startswith("ks:undo"):
            keys.setdefault(body.step, set()).add(body.data["key"])
    assert all(len(of_step) == 1 for of_step in keys.values()), keys
    ends = [one for one in await handle.checkpoints() if one.kind is Kind.STEP_COMPLETED]
    return [str(await handle.status()), *(one.step for one in ends if one.step.startswith("ks:undo"))]


@workflow
async def pausing() -> list:
    return [await add(1, 1), await ks.wait_for("go"), await add(2, 2)]


async def play_pausing(engine):
    handle = await engine.start(pausing, run_id="main")
    with unless_finished():
        await handle.pause()
        await until(handle, ks.Status.PAUSED)
        await handle.signal("go", "gone", id="go")
        await handle.resume()
    return await handle.result()


@workflow
def plain() -> list:
    one = add(1, 1).result()
    two = [add(one, 1).start(), add_in_thread(one, 2).start()]
    both = ks.gather(add(5, 5), flaky(6)).result()
    ks.sleep(0.01).result()
    return [one, *(call.result() for call in two), *both, ks.wait_for("late").result()]


async def play_plain(engine):
    handle = await engine.start(plain, run_id="main")
    with unless_finished():
        await handle.signal("late", 9, id="l")
    return await handle.result()


@ks.step
async def tell_myself(ticks: int) -> str:
    """Send the own run a signal, and end at about the moment at which it is heard."""
    EFFECTS.body()
    telling = asyncio.ensure_future(CURRENT.get().run.host.signal(ks.run_id(), "news", ticks, id=str(ticks)))
    for _ in range(ticks):
        await asyncio.sleep(0)
    telling.add_done_callback(lambda done: done.cancelled() or done.exception())
    return "told"


@workflow
async def contended() -> list:
    """A wait that loses the race at the moment its signal comes: the next wait must hear it."""
    heard = []
    for ticks in range(7):
        first = await ks.race(tell_myself(ticks), ks.wait_for("news"))
        heard.append(await ks.wait_for("news") if first == "told" else first)
    return heard


async def play_contended(engine):
    return await (await engine.start(contended, run_id="main")).result()


@workflow(durability=ks.Durability.every(3))
async def seldom() -> int:
    total = 0
    for number in range(1, 6):
        total = await add(total, number)
    await ks.checkpoint()
    ks.publish("total", total)
    return await add(total, int(ks.random() < 1))


async def play_seldom(engine):
    return await (await engine.start(seldom, run_id="main")).result()


# -- a graph with everything in it -------------------------------------------------------------------------------------


board = ks.Graph("crash:board", reducers={"log": "append"}, max_iterations=40)


@board.step
async def gather_facts(state):
    EFFECTS.body()
    await asyncio.sleep(0)
    notes = {**state.get("notes", {}), "n": 1}
    return {"round": state["round"] + 1, "log": [f"facts {state['round']}"], "notes": notes}


@board.step(retry=ks.Retry(attempts=2, base_seconds=0.01))
def weigh(state):
    if EFFECTS.body() < 2 and state["round"] == 1:
        raise ConnectionError("try again")
    return ks.State(state).set(weight=state["round"] * 10)


@board.step(stage="talk", agent="ann")
async def say(state, stage, agent):
    EFFECTS.body()
    return ks.Changes({"log": ["said"]}, stage={"said": stage.get("said", 0) + 1}, agent={"words": ["hello"]})


@board.step
async def mark(state):
    EFFECTS.body()
    return {"log": ["marked"], "mark": state["round"]}


@board.step
async def mark_again(state):
    EFFECTS.body()
    return {"mark": state["mark"] + 1}


@board.step
async def sum_up(state):
    EFFECTS.body()
    return ks.State(state).without("notes")


@ks.step
async def twice(number: int) -> int:
    EFFECTS.body()
    return number + number


board.map("double", twice, over="xs", into="ys")
board.delay("rest", 0.01)
board.wait("word", into="heard")
board.add(child, name="kid", takes=["number"], gives="kid")
board.edge("gather_facts", "weigh")
board.edge("weigh", "gather_facts", when=lambda state: state["weight"] < 20)
board.edge("weigh", "split")
board.edge("mark", "mark_again")
board.parallel("split", ["say", "mark"], join="double", report="how")
board.edge("double", "rest")
board.edge("rest", "kid")
board.edge("kid", "word")
board.edge("word", "sum_up")
board.entry("gather_facts")
board.exit("sum_up")


async def play_board(engine):
    handle = await engine.start(board, {"round": 0, "xs": [1, 2], "number": 4}, run_id="main")
    with unless_finished():
        await handle.signal("word", "yes", id="w")
    return await handle.result()


BOARD = {
    "round": 2,
    "xs": [1, 2],
    "number": 4,
    "log": ["facts 0", "facts 1", "said", "marked"],
    "weight": 20,
    "mark": 3,
    "how": {"coverage": 1.0, "degraded": False, "failed": {}},
    "ys": [2, 4],
    "kid": 8,
    "heard": "yes",
}


# -- a dag -------------------------------------------------------------------------------------------------------------


building = ks.Dag("crash:building", concurrency=3)


@building.step
async def source(number: int) -> int:
    EFFECTS.body()
    return number


building.add(add_in_thread, "lint", needs={"total": "source"})
building.add(flaky, "tested", needs={"number": "source"})
building.add(charge, needs={"number": "lint"})
building.add(child, "kid", needs={"number": "lint"}, when=lambda given: given["number"] > 5)
building.add(child, "other_kid", needs={"number": "lint"}, when=lambda given: given["number"] > 1000)
building.add(fails, needs=["tested"])
building.add(never, needs=["source"])


@building.step(needs=["fails", "never", "charge"], wait=ks.Any())
async def first(charge, fails=None, never=None) -> list:
    EFFECTS.body()
    return [charge, fails, never]


@building.step(needs=["first", "kid", "other_kid", "tested"])
async def packed(first, kid, other_kid, tested) -> list:
    EFFECTS.body()
    return [first, kid, other_kid, tested]


async def play_building(engine):
    return await (await engine.start(building, number=4, run_id="main")).result()


# -- a graph that keeps only its newest states -------------------------------------------------------------------------


tally = ks.Graph("crash:tally", keep="newest")


@tally.step
async def count_up(state):
    EFFECTS.body()
    ks.publish("count", state["n"])
    return {"n": state["n"] + 1}


tally.wait("hear", signal="word", into="word")
tally.edge("count_up", "count_up", lambda state: state["n"] % 6)
tally.edge("count_up", "hear")
tally.edge("hear", "count_up", lambda state: state["word"] == "more")
tally.entry("count_up")
tally.exit("hear")


async def play_tally(engine):
    often, seldom = (2, 4), (position.ENOUGH_DELTAS, position.MOST_RECORDS)
    position.ENOUGH_DELTAS, position.MOST_RECORDS = often
    try:
        run = await engine.start(tally, {"n": 0}, run_id="main")
        for number, word in enumerate(("more", "done")):
            with unless_finished():
                await run.signal("word", word, id=f"word {number}")
        result = await run.result()
        stored = await run.run()
        return [result["n"], await run.published(), stored.kept_from > 10]
    finally:
        position.ENOUGH_DELTAS, position.MOST_RECORDS = seldom


EXAMPLES = [
    Example(
        "building",
        play_building,
        {"packed": [[8, None, None], 16, None, 4]},
        children=1,
        done=("packed#1",),
    ),
    Example("board", play_board, BOARD, children=1, done=("sum_up#1", "weigh#2", "split#1.mark/mark_again#1")),
    Example("tally", play_tally, [12, {"count": 11}, True]),
    Example("sequence", play_sequence, 10),
    Example("fan", play_fan, [2, 4, 6, 2, 4, 6, 10, 11]),
    Example("racing", play_racing, [2, 4, True, [5, 6], 3]),
    Example("retried", play_retried, [7, "keepstep.errors.Permanent", 8]),
    Example("conversation", play_conversation, [10, 11, 20, 30, "nothing"]),
    Example("sleeper", play_sleeper, [1, 2, 3]),
    Example("parent", play_parent, [5, 2, "keepstep.errors.StepFailed", 6], children=3),
    Example("careful", play_careful, [1, 2, 2]),
    Example(
        "queued",
        play_queued,
        [2, 4, 6, 6],
        stores=("sqlite", "memory", "files", *(("postgres",) if EVERYWHERE else ())),
    ),
    Example("booking", play_booking, [1, 2, 2, 3], stores=("sqlite", "postgres")),
    Example("continuing", play_continuing, 106),
    Example("cancelled", play_cancelled, "cancelled", children=1, done=("clean_up#1", "add#2")),
    Example(
        "undoing",
        play_undoing,
        ["failed", *(f"ks:undo:{one}" for one in ("reserve#2", "reserve#3", "crash:tenfold.result#1", "reserve#1"))],
        children=2,
        stores=("memory", "sqlite", "files", "postgres"),
    ),
    Example("pausing", play_pausing, [2, "gone", 4]),
    Example("plain", play_plain, [2, 3, 4, 10, 6, 9]),
    Example("seldom", play_seldom, 16),
    Example("contended", play_contended, [0, 1, 2, 3, 4, 5, 6]),
]


# -- what child processes run ------------------------------------------------------------------------------------------


@ks.step
async def work(seconds: float, number: int) -> int:
    EFFECTS.body()
    await asyncio.sleep(seconds)
    return number


@ks.step
async def hold(path: str) -> str:
    """Stay in the body until a file is there."""
    EFFECTS.body()
    while not os.path.exists(path):  # noqa: ASYNC110, ASYNC240, PTH110 - the sign comes from another process
        await asyncio.sleep(0.005)
    return path


@ks.step
async def kill_the_process(seconds: float) -> None:
    EFFECTS.body()
    ks.emit("still alive")  # is written, but is no progress
    await asyncio.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


@ks.step(transactional=True)
def stop_inside(tx, number: int) -> int:
    EFFECTS.body()
    # To this thread, which then stops at once: it would go on for a moment if another were to take the signal.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # goes on with SIGCONT
    return number


@ks.step
async def hear(sent_at: float) -> float:
    EFFECTS.body()
    return time.time() - sent_at


assembling = ks.Dag("crash:assembling")
assembling.add(add, "one")
assembling.add(add, "two", needs={"total": "one"}, when=lambda given: given["total"] > 0)
assembling.add(never, "left_out", needs=["one"], when=lambda given: given["one"] < 0)
assembling.add(hold, "held")


@assembling.step(needs=["two", "left_out", "held"])
async def assembled(two, left_out, held) -> list:
    EFFECTS.body()
    return [two, left_out]


@workflow
async def working(steps: int, seconds: float) -> int:
    total = 0
    for number in range(1, steps + 1):
        total += await work(seconds, number)
    return total


@workflow
async def mixed(steps: int, seconds: float) -> int:
    """A bit of everything, so that a kill finds each of it."""
    total = sum(await ks.gather(work(seconds, 1), work(seconds, 2)))
    await ks.sleep(seconds)
    total += await (await ks.start(working, steps, seconds))
    total += await ks.wait_for("bonus")
    total += sum(await ks.map(counted, [(seconds, number) for number in range(steps)], concurrency=2))
    total += await ks.race(work(seconds, 0), never())
    return total


async def counted(item) -> int:
    return await work(*item)


@workflow
async def holding(path: str) -> list:
    return [await add(0, 1), await hold(path), await add(1, 1), await add(2, 1)]


@ks.step
async def bulky(path: str) -> str:
    EFFECTS.body()
    return random.Random(1).randbytes(100_000).hex()  # does not compress well


@workflow
async def heavy(path: str) -> list:
    """Writes little, then much."""
    one = await add(0, 1)
    await hold(path)
    return [one, len(await bulky(path)), await add(one, 1)]


@workflow
async def waits_in_between() -> list:
    return [await add(0, 1), await add(1, 1), await ks.wait_for("go"), await add(2, 1)]


@ks.step(retry=ks.Retry(attempts=2, base_seconds=0.5))
async def fails_once() -> int:
    if EFFECTS.body() < 2:
        raise ConnectionError("try again")
    return 2


@workflow
async def backing_off() -> list:
    """One attempt, and then another without any write between the wait and its beginning."""
    return await ks.gather(*(fails_once() for _ in range(5)))


@workflow
async def culprit(seconds: float) -> None:
    await kill_the_process(seconds)


@workflow
async def stopping() -> int:
    return await stop_inside(1)


@workflow
async def listening(count: int) -> list:
    return [await hear(await ks.wait_for("ping")) for _ in range(count)]


@workflow
async def chat(count: int) -> list:
    """Answers messages from anyone, in the order in which they came."""
    seen = []
    for number in range(count):
        request = await ks.wait_for("message")
        seen.append(await add(request.payload, 0))
        request.reply([number, request.payload])
    return seen


def paid(folder: str) -> object:
    return ks.Done("paid") if Path(folder, str(ks.run_id())).exists() else ks.NotDone()


@ks.step(at_most_once=True, verify=paid)
def pay(folder: str) -> str:
    EFFECTS.body()
    os.close(os.open(Path(folder, str(ks.run_id())), os.O_CREAT | os.O_EXCL))  # a second payment fails
    return "paid"


@workflow
async def paying(folder: str) -> list:
    return [await add(1, 1), await pay(folder), await flaky(3)]


@workflow
async def napping(seconds: float) -> int:
    one = await add(0, 1)
    await ks.sleep(seconds)
    return await add(one, 1)


# -- graphs that several processes know --------------------------------------------------------------------------------


talk = ks.Graph("crash:talk", reducers={"answers": "append"})


@talk.step
async def answer(state):
    EFFECTS.body()
    await asyncio.sleep(0)
    return {"answers": [[len(state.get("answers", [])), state["message"]]]}


talk.wait("message", into="message")
talk.edge("message", "answer")
talk.edge("answer", "message", when=lambda state: len(state["answers"]) < state["count"])
talk.entry("message")
talk.exit("answer")


till = ks.Graph("crash:till", interrupt_before=["charged"], reducers={"log": "append"})


@till.step
async def priced(state):
    EFFECTS.body()
    return {"price": 7, "log": ["priced"]}


@till.step
async def charged(state):
    EFFECTS.body()
    await asyncio.sleep(0.01)
    return {"paid": state["price"], "log": ["charged"]}


@till.step
async def held_open(state):
    EFFECTS.body()
    while not os.path.exists(state["path"]):  # noqa: ASYNC110, ASYNC240, PTH110 - the sign comes from another process
        await asyncio.sleep(0.005)
    return {"log": ["closed"]}


till.edge("priced", "charged")
till.edge("charged", "held_open")
till.entry("priced")
till.exit("held_open")


class Served:
    """A process with an engine that does what it is told, line by line."""

    def __init__(self, engine) -> None:
        self.engine = engine

    async def start(self, workflow, args, run_id):
        by_place, by_name = (args, {}) if isinstance(args, list) else ([], args)
        await self.engine.start(f"crash:{workflow}", *by_place, run_id=run_id, **by_name)

    async def start_many(self, workflow, args, ids, at):
        """Start all of these at the same moment as others do, and wait for their results."""
        await asyncio.sleep(at - time.time())
        handles = await asyncio.gather(*(self.engine.start(f"crash:{workflow}", *args, run_id=one) for one in ids))
        return [await handle.result(timeout=90) for handle in handles]

    async def result(self, run_id, timeout=90):  # noqa: ASYNC109
        return await (await self.engine.get(run_id)).result(timeout=timeout)

    async def signal(self, run_id, name, payload=True, id=""):  # noqa: A002
        await self.engine.signal(run_id, name, payload, id=id)

    async def ping(self, run_id):
        await self.engine.signal(run_id, "ping", time.time())

    async def ask_many(self, run_id, numbers, at):
        """Send these messages to one run at the same moment as others do; the answers."""
        await asyncio.sleep(at - time.time())
        handle = await self.engine.get(run_id)
        return await asyncio.gather(*(handle.ask("message", number) for number in numbers))

    async def signal_many(self, run_id, name, payloads, at):
        """Send these to one run at the same moment as others do."""
        await asyncio.sleep(at - time.time())
        await asyncio.gather(*(self.engine.signal(run_id, name, payload) for payload in payloads))

    async def steer(self, run_id, act, at=0.0):
        await asyncio.sleep(at - time.time())
        with unless_finished():
            await getattr(await self.engine.get(run_id), act)()

    async def worker(self):
        return self.engine.worker.id


def dying_at(step):
    """An observer that kills its process the moment a step's checkpoint is durable."""

    def observe(event):
        if event.name in ("step.completed", "barrier.passed") and event.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return observe


async def serve(path, effects, options) -> None:
    record_to(effects)
    loop = asyncio.get_running_loop()
    if "die_at" in options:
        options["observers"] = dying_at(options.pop("die_at"))
    async with ks.open(path, **options) as engine:
        served = Served(engine)
        print(json.dumps({"ok": "ready"}), flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            what, arguments = json.loads(line)
            try:
                answer = {"ok": await getattr(served, what)(**arguments)}
            except ks.KeepstepError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(answer), flush=True)


class Process:
    """The handle on such a process, for a test."""

    def __init__(self, path, effects, **options) -> None:
        source = str(Path(ks.__file__).parents[1])
        root = Path(__file__).parents[2]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.programs", str(path), str(effects), json.dumps(options)],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([source, str(root)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.popen.pid

    def ready(self):
        assert self.answer() == "ready"
        return self

    def tell(self, what, **arguments) -> None:
        """Say what to do, and do not wait."""
        self.popen.stdin.write(json.dumps([what, arguments]) + "\n")
        self.popen.stdin.flush()

    def answer(self):
        line = self.popen.stdout.readline()
        if not line:
            raise Died(f"the process ended with {self.popen.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(f"{answer['error']}: {answer['message']}")
        return answer["ok"]

    def ask(self, what, **arguments):
        self.tell(what, **arguments)
        return self.answer()

    def send(self, number) -> None:
        """Send the process a signal of the system."""
        self.popen.send_signal(number)

    def wait_until_stopped(self) -> None:
        """Come back when the system has stopped the process."""
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        with contextlib.suppress(BrokenPipeError):
            self.popen.stdin.close()
        self.popen.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


class Died(Exception):
    """The process is gone."""


class Refused(Exception):
    """What was asked raised an error there."""


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])))
