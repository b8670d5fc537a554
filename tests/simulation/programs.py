"""Programs that a seed makes up: a tree of statements, the workflow that follows it, and what must come of it.

A statement is a list: its word, then its arguments. Whatever depends on timing (who wins a race, what a timeout cuts
off) is left out of its value, so that the value of every program is known beforehand. To add a statement, add a word to
`STATEMENTS` with how it is drawn, done and judged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random
from typing import Any

import keepstep as ks

from .bodies import CODE, STEPS, here, risky, seen

Statement = list[Any]


# -- the workflow ------------------------------------------------------------------------------------------------------


async def told(call: Any) -> Any:
    """Await a call, and tell the world that the code was told its outcome."""
    try:
        value = await call
    except asyncio.CancelledError:
        raise
    except Exception:
        here().code_is_told(call)
        raise
    here().code_is_told(call)
    return value


async def follow(statement: Statement) -> Any:
    """Do what a statement says."""
    return await STATEMENTS[statement[0]].do(*statement[1:])


@ks.workflow(name="sim:program")
async def program(parts: list[Any], values: list[Any]) -> list[Any]:
    """Follow the statements of the first part; go on as a new run with the next."""
    values += [await follow(statement) for statement in parts[0]]
    if len(parts) > 1:
        ks.continue_as(parts[1:], values)
    return values


@ks.workflow(name="sim:child")
async def child(statement: Any) -> Any:
    """Follow one statement, in a run of its own."""
    return await follow(statement)


@ks.workflow(name="sim:called")
async def called(statement: Any) -> Any:
    """Follow one statement, as a branch of the run that calls it."""
    return await follow(statement)


@ks.workflow(name="sim:every", durability="every=3")
async def buffered(parts: list[Any], values: list[Any]) -> list[Any]:
    """The same, under weaker durability."""
    return await program.fn(parts, values)  # type: ignore[no-any-return]


WORKFLOWS: dict[str, Any] = {"program": program, "child": child, "buffered": buffered}


# -- statements --------------------------------------------------------------------------------------------------------


class Fails(Exception):
    """A statement whose outcome is a failure."""


class Statements:
    """What one word means: how it is drawn, how a workflow does it, and what comes of it."""

    def __init__(
        self,
        draw: Callable[[Maker], list[Any]],
        do: Callable[..., Awaitable[Any]],
        expect: Callable[..., Any],
        weight: int = 2,
        *,
        nests: bool = False,
        outside: bool = False,
    ) -> None:
        self.draw, self.do, self.expect, self.weight = draw, do, expect, weight
        self.nests = nests  # it holds other statements
        self.outside = outside  # it waits for the client, who does not know the ids of children


class Maker:
    """Draws programs: small ones often, deep ones sometimes."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.depth = 0
        self.in_child = False
        self.racing = False
        self._number = 0

    def number(self) -> int:
        self._number += 1
        return self._number

    def seconds(self) -> float:
        return self.random.choice((0.0, 0.0, 0.0, 0.01, 0.05, 0.2, 0.6, 3.0))

    def statement(self) -> Statement:
        choices = [
            word
            for word, one in STATEMENTS.items()
            if not (one.nests and self.depth >= 3)
            and not (one.outside and self.in_child)
            and not (word == "idle" and self.racing)  # whose order with others nothing records
        ]
        word = self.random.choices(choices, [STATEMENTS[choice].weight for choice in choices])[0]
        self.depth += 1
        racing, self.racing = self.racing, self.racing or word in RACING
        try:
            return [word, *STATEMENTS[word].draw(self)]
        finally:
            self.depth -= 1
            self.racing = racing

    def several(self, least: int = 1, most: int = 3) -> list[Statement]:
        return [self.statement() for _ in range(self.random.randint(least, most))]


def expected(statement: Statement) -> Any:
    """The value of a statement, or `Fails`."""
    return STATEMENTS[statement[0]].expect(*statement[1:])


def _all_expected(statements: list[Statement]) -> list[Any]:
    values, failed = [], False
    for one in statements:
        try:
            values.append(expected(one))
        except Fails:
            failed = True
    if failed:
        raise Fails
    return values


async def _step(word: str, number: int, option: Any) -> Any:
    """Call a step with a number that says which code asks; its answer must be the answer to that."""
    asked = number + CODE * here().code()
    answer = await told(STEPS[word](asked, option))
    here().answered(asked, answer)
    return number


def _of_step(word: str, weight: int, draw: Callable[[Maker], Any] = Maker.seconds) -> Statements:
    def expect(number: int, option: Any) -> int:
        if word == "fails":
            raise Fails
        return number

    async def do(number: int, option: Any) -> Any:
        return await _step(word, number, option)

    return Statements(lambda maker: [maker.number(), draw(maker)], do, expect, weight)


async def _limited(number: int, seconds: float) -> str:
    with contextlib.suppress(ks.StepTimedOut):
        await _step("limited", number, seconds)
    return "limited"


async def _sleep(seconds: float) -> str:
    due = ks.now() + timedelta(seconds=seconds)
    await told(ks.sleep(seconds))
    here().slept_until(due, ks.now())
    return "slept"


async def _in_order(statements: list[Statement]) -> list[Any]:
    return [await follow(one) for one in statements]


def _expect_in_order(statements: list[Statement]) -> list[Any]:
    return [expected(one) for one in statements]


async def _gather(statements: list[Statement]) -> Any:
    return await ks.gather(*(follow(one) for one in statements))


async def _gather_plainly(statements: list[Statement]) -> Any:
    found = await asyncio.gather(*(follow(one) for one in statements), return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    if len(errors) > 1 and all(isinstance(one, Exception) for one in errors):
        raise BaseExceptionGroup("parts failed", errors)  # a retry tries again what it is told of
    if errors:
        raise errors[0]
    return found


async def _group(statements: list[Statement]) -> Any:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(one)) for one in statements]
    return [task.result() for task in tasks]


async def _map(concurrency: int, statements: list[Statement]) -> Any:
    return await ks.map(follow, statements, concurrency=concurrency)


async def _race(statements: list[Statement]) -> str:
    try:
        await ks.race(*(follow(one) for one in statements))
    except Exception as error:
        here().caught(error)
    return "raced"


async def _first(statements: list[Statement]) -> str:
    tasks = [asyncio.ensure_future(follow(one)) for one in statements]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return "first"


async def _as_completed(statements: list[Statement]) -> Any:
    return sorted([repr(one) async for one in ks.as_completed([follow(one) for one in statements])])


async def _timeout(seconds: float, statement: Statement) -> str:
    try:
        async with ks.timeout(seconds):
            await follow(statement)
    except Exception as error:
        here().caught(error)
    return "timed"


async def _try(statement: Statement) -> Any:
    try:
        return await follow(statement)
    except Exception as error:
        here().caught(error)
        return "caught"


def _expect_try(statement: Statement) -> Any:
    try:
        return expected(statement)
    except Fails:
        return "caught"


async def _cleanup(statement: Statement, number: int) -> Any:
    try:
        return await follow(statement)
    finally:
        await _step("work", number, 0.0)


async def _child(statement: Statement) -> Any:
    run = await told(ks.start(child, statement))
    here().child_is_told(run.id)
    return await told(run.result())


async def _child_beside(statement: Statement, number: int) -> Any:
    run = await told(ks.start(child, statement))
    here().child_is_told(run.id)
    own = await _step("work", number, 0.0)
    return [own, await told(run.result())]


async def _saga(statements: list[Statement]) -> str:
    """Undo what the statements have done, and go on."""
    async with ks.saga():
        await _in_order(statements)
        await told(ks.undo())
    return "undone"


def _expect_saga(statements: list[Statement]) -> str:
    _expect_in_order(statements)
    return "undone"


async def _keyed(number: int, seconds: float) -> int:
    """Call a step with a key of its own."""
    asked = number + CODE * here().code()
    answer = await told(STEPS["work"].options(key=f"k{number}")(asked, seconds))
    here().answered(asked, answer)
    return number


async def _named(number: int, statement: Statement) -> Any:
    with ks.branch(f"b{number}"):
        return await follow(statement)


async def _called(statement: Statement) -> Any:
    return await called(statement)


async def _wait(name: str, number: int, at: float, twice: bool) -> Any:
    payload = await told(ks.wait_for(name))
    here().heard(name, payload)
    return payload


async def _maybe(name: str, number: int, at: float, seconds: float) -> str:
    payload = await told(ks.wait_for(name, timeout=seconds, default=None))
    if payload is not None:
        here().heard(name, payload)
    return "maybe"


async def _pair(name: str, number: int, other: int, at: float, seconds: float) -> list[Any]:
    """Two waits for signals of one name: each is heard once."""
    first = await told(ks.wait_for(name))
    await _step("work", number, seconds)
    return sorted([first, await told(ks.wait_for(name))])


async def _contend(name: str, number: int) -> Any:
    """A wait that may lose a race at the moment its signal comes: then the next wait hears it."""
    heard = await ks.race(_send_to_itself(name, number), _hear(name))
    return await _hear(name) if heard is None else heard


async def _send_to_itself(name: str, number: int) -> None:
    await told(ks.signal(ks.run_id() or "", name, number))


async def _hear(name: str) -> Any:
    return await told(ks.wait_for(name))


async def _swallow(statement: Statement, number: int) -> str:
    """Code that does not want to be cancelled, and goes on."""
    try:
        await follow(statement)
    except asyncio.CancelledError:
        await _step("work", number, 0.0)
    return "swallowed"


def _expect_swallow(statement: Statement, number: int) -> str:
    expected(statement)
    return "swallowed"


async def _ping(name: str, number: int) -> Any:
    await told(ks.signal(ks.run_id() or "", name, number))
    return await told(ks.wait_for(name))


async def _idle(seconds: float) -> str:
    """Wait for something that Keepstep does not know: the run must stay in memory, and does it again on replay."""
    world = here()
    mark = world.body_begins_unrecorded(ks.run_id() or "")
    try:
        await asyncio.sleep(seconds)
    finally:
        world.body_ends(mark)
    return "idled"


async def _timeout_plainly(seconds: float, statement: Statement) -> str:
    try:
        async with asyncio.timeout(seconds):
            await follow(statement)
    except TimeoutError:
        pass
    except Exception as error:
        here().caught(error)
    return "timed"


async def _reply(name: str, number: int, at: float) -> str:
    request = await told(ks.wait_for(name))
    here().asked(name, request.payload)
    request.reply(request.payload + 1)
    return "replied"


async def _risky(number: int, seconds: float) -> int:
    await told(risky(number, seconds))
    return number


async def _drawn(number: int) -> int:
    what = f"{ks.random()} {ks.uuid()} {ks.now().isoformat()}"
    return await told(seen(number, what))  # type: ignore[no-any-return]


async def _publish(number: int) -> str:
    ks.publish("value", number)
    ks.emit(number)
    return "published"


async def _checkpoint() -> str:
    await told(ks.checkpoint())
    return "sealed"


def _in_child(maker: Maker) -> Statement:
    before, maker.in_child = maker.in_child, True
    try:
        return maker.statement()
    finally:
        maker.in_child = before


def _name(maker: Maker) -> str:
    return f"s{maker.number()}"


def _moment(maker: Maker) -> float:
    return round(maker.random.choice((0.0, 1.0, 4.0)) + maker.random.random(), 3)


#: Statements in which it matters who comes first.
RACING = frozenset({"race", "first", "each", "timeout", "limit"})

#: Every word that a program may hold.
STATEMENTS: dict[str, Statements] = {
    "work": _of_step("work", 12),
    "fails": _of_step("fails", 1),
    "flaky": _of_step("flaky", 2, lambda maker: maker.random.randint(1, 4)),
    "once": _of_step("once", 2),
    "undoable": _of_step("undoable", 4),
    "saga": Statements(lambda maker: [maker.several()], _saga, _expect_saga, 2, nests=True),
    "plain": _of_step("plain", 1, lambda _: 0.0),
    "token": _of_step("token", 1),
    "limited": Statements(
        lambda maker: [maker.number(), maker.random.choice((0.0, 0.1, 2.0))], _limited, lambda *_: "limited", 1
    ),
    "sleep": Statements(
        lambda maker: [maker.random.choice((0.0, 0.1, 0.5, 1.0, 2.5, 4.0, 9.0))], _sleep, lambda _: "slept", 3
    ),
    "idle": Statements(lambda maker: [maker.random.choice((0.0, 0.3, 3.0))], _idle, lambda _: "idled", 1),
    "risky": Statements(lambda maker: [maker.number(), maker.seconds()], _risky, lambda number, _: number, 1),
    "drawn": Statements(lambda maker: [maker.number()], _drawn, lambda number: number, 1),
    "publish": Statements(lambda maker: [maker.number()], _publish, lambda _: "published", 1),
    "checkpoint": Statements(lambda _: [], _checkpoint, lambda: "sealed", 1),
    "seq": Statements(lambda maker: [maker.several()], _in_order, _expect_in_order, 2, nests=True),
    "gather": Statements(lambda maker: [maker.several(2)], _gather, _all_expected, 2, nests=True),
    "agather": Statements(lambda maker: [maker.several(2)], _gather_plainly, _all_expected, 1, nests=True),
    "group": Statements(lambda maker: [maker.several(2)], _group, _all_expected, 1, nests=True),
    "map": Statements(
        lambda maker: [maker.random.randint(1, 3), maker.several(2, 4)],
        _map,
        lambda _, statements: _all_expected(statements),
        1,
        nests=True,
    ),
    "race": Statements(lambda maker: [maker.several(2)], _race, lambda _: "raced", 2, nests=True),
    "first": Statements(lambda maker: [maker.several(2)], _first, lambda _: "first", 1, nests=True),
    "each": Statements(
        lambda maker: [maker.several(2)],
        _as_completed,
        lambda statements: sorted(map(repr, _all_expected(statements))),
        1,
        nests=True,
    ),
    "timeout": Statements(
        lambda maker: [maker.random.choice((0.05, 0.3, 1.0, 3.0)), maker.statement()],
        _timeout,
        lambda *_: "timed",
        2,
        nests=True,
    ),
    "limit": Statements(
        lambda maker: [maker.random.choice((0.05, 0.3, 1.0, 3.0)), maker.statement()],
        _timeout_plainly,
        lambda *_: "timed",
        1,
        nests=True,
    ),
    "try": Statements(lambda maker: [maker.statement()], _try, _expect_try, 2, nests=True),
    "cleanup": Statements(
        lambda maker: [maker.statement(), maker.number()],
        _cleanup,
        lambda statement, _: expected(statement),
        1,
        nests=True,
    ),
    "keyed": Statements(lambda maker: [maker.number(), maker.seconds()], _keyed, lambda number, _: number, 2),
    "named": Statements(
        lambda maker: [maker.number(), maker.statement()],
        _named,
        lambda _, statement: expected(statement),
        1,
        nests=True,
    ),
    "called": Statements(lambda maker: [maker.statement()], _called, expected, 2, nests=True),
    "child": Statements(lambda maker: [_in_child(maker)], _child, expected, 2, nests=True),
    "beside": Statements(
        lambda maker: [_in_child(maker), maker.number()],
        _child_beside,
        lambda statement, number: [number, expected(statement)],
        1,
        nests=True,
    ),
    "wait": Statements(
        lambda maker: [_name(maker), maker.number(), _moment(maker), maker.random.random() < 0.3],
        _wait,
        lambda name, number, *_: number,
        2,
        outside=True,
    ),
    "maybe": Statements(
        lambda maker: [_name(maker), maker.number(), _moment(maker), maker.random.choice((0.2, 1.5, 3.0))],
        _maybe,
        lambda *_: "maybe",
        1,
        outside=True,
    ),
    "pair": Statements(
        lambda maker: [_name(maker), maker.number(), maker.number(), _moment(maker), maker.seconds()],
        _pair,
        lambda name, number, other, *_: [number, other],
        1,
        outside=True,
    ),
    "contend": Statements(lambda maker: [_name(maker), maker.number()], _contend, lambda name, number: number, 1),
    "swallow": Statements(lambda maker: [maker.statement(), maker.number()], _swallow, _expect_swallow, 1, nests=True),
    "reply": Statements(
        lambda maker: [_name(maker), maker.number(), _moment(maker)], _reply, lambda *_: "replied", 1, outside=True
    ),
    "ping": Statements(lambda maker: [_name(maker), maker.number()], _ping, lambda name, number: number, 1),
}
