"""Random programs as plain data, and the workflow that follows one.

A statement is a list: its word, its number, then its arguments. Every step is called with a hash of everything that the
code has seen until then, in that order, so another interleaving on replay is another digest, which the engine refuses.
To add a statement, write a method of `Program` named after its word and put the word into `WORDS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
from collections import Counter, defaultdict
from random import Random

import keepstep as ks
from keepstep.ports import CURRENT

#: How deep statements hold statements.
DEPTH = 4
#: Seconds that a body or a sleep takes; most end at once, which gives the most orders.
SECONDS = (0.0, 0.0, 0.0, 0.001, 0.002, 0.003, 0.01, 0.05)


class Seen:
    """What happened in one way of running a program: the judge compares it, so it lies outside every store."""

    def __init__(self):
        self.logs = defaultdict(list)  # for each run, what each incarnation of its code has seen
        self.begun = Counter()  # bodies, by run, step and attempt
        self.done = set()  # steps whose outcome is durable
        self.wrong = []

    def durable(self, run, step):
        self.done.add((run, step))

    def body(self):
        scope = CURRENT.get()
        place = (scope.run.id, scope.key)
        if place in self.done:
            self.wrong.append(f"the body of {scope.key} of {scope.run.id} began after its outcome was durable")
        self.begun[(*place, scope.number)] += 1


#: What happens now; there is one way at a time.
SEEN = [Seen()]


async def passes(seconds):
    if seconds:
        await asyncio.sleep(seconds)


@ks.step
async def work(number, seen, seconds):
    SEEN[0].body()
    await passes(seconds)
    return number


@ks.step
def thread(number, seen, seconds):
    SEEN[0].body()
    return number


@ks.step
async def fails(number, seen, seconds):
    SEEN[0].body()
    await passes(seconds)
    raise ks.Permanent(f"step {number} cannot work")


@ks.step(retry=ks.Retry(attempts=3, base_seconds=0.001, jitter=0))
async def flaky(number, seen, seconds):
    SEEN[0].body()
    if CURRENT.get().number < 3:
        raise ConnectionError(f"try {number} again")
    return number


class Program:
    """Follows statements, and keeps what the code has seen."""

    def __init__(self):
        self.run = CURRENT.get().run
        self.log = []
        self.sum = ""
        self.over = False
        self.locks = defaultdict(asyncio.Lock)
        self.semaphore = asyncio.Semaphore(2)
        SEEN[0].logs[self.run.id].append(self.log)

    def see(self, number, what):
        """The code has seen something. What it sees when it is put away, or after its end, does not count."""
        if not self.run.stop.detached and not self.over:
            self.log.append(f"{number} {what}")
            self.sum = hashlib.sha256(f"{self.sum}|{number} {what}".encode()).hexdigest()[:12]

    async def follow(self, statement):
        """Do what a statement says, and see what comes of it."""
        word, number, *arguments = statement
        try:
            value = await getattr(self, word)(number, *arguments)
        except asyncio.CancelledError:
            self.see(number, "cancelled")
            raise
        except Exception as error:
            self.see(number, type(error).__name__)
            raise
        self.see(number, value)
        return value

    # -- one call

    async def work(self, number, seconds):
        return await work(number, self.sum, seconds)

    async def thread(self, number):
        return await thread(number, self.sum, 0)

    async def fails(self, number, seconds):
        return await fails(number, self.sum, seconds)

    async def flaky(self, number):
        return await flaky(number, self.sum, 0)

    async def sleep(self, number, seconds):
        await ks.sleep(seconds)

    async def heard(self, number, name, moment):
        return await ks.wait_for(name)

    async def maybe(self, number, name, moment, seconds):
        return await ks.wait_for(name, timeout=seconds, default="late")

    async def ping(self, number, name):
        await ks.signal(ks.run_id(), name, number)
        self.see(number, "sent")
        return await ks.wait_for(name)

    async def child(self, number, statement):
        run = await ks.start(child, statement)
        self.see(number, "started")
        return await run.result()

    async def drawn(self, number):
        return f"{ks.random()} {ks.uuid()}"

    async def now(self, number):
        return ks.now().isoformat()

    async def checkpoint(self, number):
        await ks.checkpoint()

    async def idle(self, number, seconds):
        """Wait for something that is not recorded."""
        await asyncio.sleep(seconds)

    async def turns(self, number, count):
        for _ in range(count):
            await asyncio.sleep(0)

    # -- several after each other

    async def seq(self, number, statements):
        return [await self.follow(one) for one in statements]

    async def attempt(self, number, statement):
        try:
            return await self.follow(statement)
        except Exception as error:
            return f"caught {type(error).__name__}"

    async def cleanup(self, number, statement, after):
        try:
            return await self.follow(statement)
        finally:
            await self.follow(after)

    async def swallow(self, number, statement, after):
        try:
            return await self.follow(statement)
        except asyncio.CancelledError:
            return await self.follow(after)

    async def generator(self, number, statements, most):
        async def values():
            try:
                for one in statements:
                    yield await self.follow(one)
            finally:
                self.see(number, "closed")

        found = []
        async with contextlib.aclosing(values()) as given:
            async for one in given:
                found.append(one)
                if len(found) == most:
                    break
        return found

    # -- several at once

    async def gather(self, number, statements):
        return await asyncio.gather(*map(self.follow, statements))

    async def settled(self, number, statements):
        found = await asyncio.gather(*map(self.follow, statements), return_exceptions=True)
        return [type(one).__name__ if isinstance(one, BaseException) else one for one in found]

    async def together(self, number, statements):
        return await ks.gather(*map(self.follow, statements))

    async def calls(self, number, count, seconds):
        return await ks.gather(*(work(n, self.sum, seconds if n % 2 else 0.0) for n in range(count)))

    async def group(self, number, statements):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.follow(one)) for one in statements]
        return [task.result() for task in tasks]

    async def map(self, number, concurrency, statements):
        return await ks.map(self.follow, statements, concurrency=concurrency)

    async def race(self, number, statements):
        return await ks.race(*map(self.follow, statements))

    async def each(self, number, statements):
        found = []
        async for one in ks.as_completed([self.follow(one) for one in statements]):
            self.see(number, one)
            found.append(one)
        return found

    async def completed(self, number, statements):
        found = []
        tasks = [asyncio.ensure_future(self.follow(one)) for one in statements]
        try:
            for one in asyncio.as_completed(tasks):
                found.append(await one)
                self.see(number, found[-1])
        finally:
            for task in tasks:
                task.cancel()
        return found

    async def wait(self, number, when, statements):
        tasks = {asyncio.ensure_future(self.follow(one)): one[1] for one in statements}
        done, pending = await asyncio.wait(list(tasks), return_when=when)
        self.see(number, [tasks[task] for task in done])
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        return [tasks[task] for task in pending]

    async def timeout(self, number, seconds, statement):
        async with ks.timeout(seconds):
            return await self.follow(statement)

    async def cancel(self, number, statement, meanwhile):
        task = asyncio.create_task(self.follow(statement))
        try:
            return await self.follow(meanwhile)
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.see(number, "cancelled" if task.cancelled() else type(task.exception()).__name__)

    async def shield(self, number, statement, meanwhile):
        inner = asyncio.create_task(self.follow(statement))

        async def outer():
            return await asyncio.shield(inner)

        task = asyncio.create_task(outer())
        try:
            await self.follow(meanwhile)
        finally:
            task.cancel()
            await asyncio.wait([task, inner])
        return type(inner.exception()).__name__ if not inner.cancelled() else "cancelled"

    async def told(self, number, statements):
        tasks = [asyncio.create_task(self.follow(one)) for one in statements]
        for task, one in zip(tasks, statements, strict=True):
            task.add_done_callback(lambda _, one=one: self.see(number, f"told of {one[1]}"))
        await asyncio.wait(tasks)

    async def limit(self, number, statement):
        """A plain timeout that never rings: its clock is not recorded."""
        async with asyncio.timeout(1e6):
            return await asyncio.wait_for(self.follow(statement), None)

    async def nested(self, number, depth, statement):
        if depth == 0:
            return await self.follow(statement)
        inner = self.nested(number, depth - 1, statement)
        if depth % 3 == 0:
            return (await asyncio.gather(inner))[0]
        if depth % 3 == 1:
            return (await ks.gather(inner))[0]
        return await asyncio.create_task(inner)

    async def nothing(self, number, count):
        """Tasks that ask for nothing, or are cancelled before they begin."""
        tasks = [asyncio.create_task(self.turns(number, turn)) for turn in range(count)]
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- several that meet

    async def future(self, number, statement):
        """A future of the code's own, which one branch sets and another awaits."""
        told = asyncio.get_running_loop().create_future()

        async def tell():
            try:
                told.set_result(await self.follow(statement))
            except BaseException as error:
                if not told.done():
                    told.set_result(type(error).__name__)
                raise

        async def hear():
            self.see(number, await told)
            return await work(number, self.sum, 0.0)

        return await asyncio.gather(tell(), hear(), return_exceptions=True) and "told"

    async def loose(self, number, statements):
        """An async generator that is left open: the loop closes it."""

        async def values():
            try:
                for one in statements:
                    yield await self.follow(one)
            finally:
                self.see(number, "closed")

        given = values()
        return await anext(given)

    async def lock(self, number, name, statement):
        async with self.locks[name]:
            self.see(number, "locked")
            return await self.follow(statement)

    async def limited(self, number, statement):
        async with self.semaphore:
            self.see(number, "admitted")
            return await self.follow(statement)

    async def event(self, number, before, after):
        event = asyncio.Event()

        async def first():
            try:
                await self.follow(before)
            finally:
                event.set()

        async def second():
            await event.wait()
            return await self.follow(after)

        return (await asyncio.gather(first(), second()))[1]

    async def queue(self, number, size, statements):
        queue = asyncio.Queue(size)
        found = []

        async def produce(one):
            try:
                await queue.put(await self.follow(one))
            except Exception as error:
                await queue.put(type(error).__name__)

        async def consume():
            for _ in statements:
                found.append(await queue.get())
                await work(number, self.sum, 0.0)

        await asyncio.gather(consume(), *map(produce, statements))
        return found

    async def barrier(self, number, statements):
        barrier = asyncio.Barrier(len(statements))

        async def part(one):
            try:
                await self.follow(one)
            except Exception as error:
                self.see(number, type(error).__name__)
            self.see(number, await barrier.wait())

        await asyncio.gather(*map(part, statements))

    async def condition(self, number, statements):
        condition = asyncio.Condition()
        ended = []

        async def part(one):
            try:
                await self.follow(one)
            finally:
                async with condition:
                    ended.append(one[1])
                    condition.notify_all()

        async def watch():
            async with condition:
                await condition.wait_for(lambda: len(ended) * 2 >= len(statements))
                self.see(number, ended)

        await asyncio.gather(watch(), *map(part, statements), return_exceptions=True)


async def followed(statements):
    program = Program()
    await ks.checkpoint()  # the time at which a run began is durable with its first record
    values = [await program.attempt(0, one) for one in statements]
    program.over = True
    return [values, program.sum]


@ks.workflow(name="random program")
async def program(statements):
    return await followed(statements)


@ks.workflow(name="random buffered program", durability="every=3")
async def buffered(statements):
    return await followed(statements)


@ks.workflow(name="random late program", durability="at_exit")
async def late(statements):
    return await followed(statements)


@ks.workflow(name="random child")
async def child(statement):
    return await followed([statement])


# -- making one up -----------------------------------------------------------------------------------------------------


def _several(maker, least=1, most=3):
    return [maker.statement() for _ in range(maker.draw.randint(least, most))]


def _seconds(maker):
    return maker.draw.choice(SECONDS)


def _longer(maker):
    return maker.draw.choice((0.0005, 0.0025, 0.02, 0.5))


def _name(maker):
    return f"signal {next(maker.numbers)}"


def _moment(maker):
    return maker.draw.choice((0.0, 0.0, 0.004, 0.03, 0.2))


#: How often a word is drawn, and its arguments.
WORDS = {
    "work": (14, lambda m: [_seconds(m)]),
    "thread": (1, lambda m: []),
    "fails": (3, lambda m: [_seconds(m)]),
    "flaky": (1, lambda m: []),
    "sleep": (3, lambda m: [_seconds(m)]),
    "heard": (2, lambda m: [_name(m), _moment(m)]),
    "maybe": (2, lambda m: [_name(m), _moment(m), _longer(m)]),
    "ping": (1, lambda m: [_name(m)]),
    "drawn": (1, lambda m: []),
    "now": (1, lambda m: []),
    "checkpoint": (1, lambda m: []),
    "turns": (1, lambda m: [m.draw.randint(1, 12)]),
    "idle": (6, lambda m: [_seconds(m)]),
    "nothing": (1, lambda m: [m.draw.randint(1, 4)]),
    "calls": (1, lambda m: [m.draw.randint(1, 4), _seconds(m)]),
    "child": (1, lambda m: [m.inner()]),
    "seq": (2, lambda m: [_several(m, 2)]),
    "attempt": (2, lambda m: [m.statement()]),
    "cleanup": (2, lambda m: [m.statement(), m.statement()]),
    "swallow": (1, lambda m: [m.statement(), m.statement()]),
    "generator": (1, lambda m: [_several(m, 2), m.draw.randint(1, 3)]),
    "gather": (3, lambda m: [_several(m, 2)]),
    "settled": (1, lambda m: [_several(m, 2)]),
    "together": (2, lambda m: [_several(m, 2)]),
    "group": (3, lambda m: [_several(m, 2)]),
    "map": (2, lambda m: [m.draw.randint(1, 3), _several(m, 2, 4)]),
    "race": (2, lambda m: [_several(m, 2)]),
    "each": (1, lambda m: [_several(m, 2)]),
    "completed": (1, lambda m: [_several(m, 2)]),
    "wait": (
        3,
        lambda m: [m.draw.choice(("FIRST_COMPLETED", "FIRST_EXCEPTION", "ALL_COMPLETED")), _several(m, 2, 4)],
    ),
    "timeout": (2, lambda m: [_longer(m), m.statement()]),
    "cancel": (2, lambda m: [m.statement(), m.statement()]),
    "shield": (1, lambda m: [m.statement(), m.statement()]),
    "told": (1, lambda m: [_several(m, 2)]),
    "limit": (1, lambda m: [m.statement()]),
    "nested": (2, lambda m: [m.draw.randint(1, 9), m.statement()]),
    "future": (1, lambda m: [m.statement()]),
    "loose": (1, lambda m: [_several(m, 2)]),
    "lock": (3, lambda m: [m.draw.randint(1, 2), m.statement()]),
    "limited": (1, lambda m: [m.statement()]),
    "event": (1, lambda m: [m.statement(), m.statement()]),
    "queue": (1, lambda m: [m.draw.randint(0, 2), _several(m, 2)]),
    "barrier": (1, lambda m: [_several(m, 2)]),
    "condition": (1, lambda m: [_several(m, 2)]),
}
#: Words that hold no other statement.
SIMPLE = tuple(itertools.takewhile(lambda word: word != "child", WORDS))
#: What may go on after it was cancelled or has failed. Nothing records the order between that and an idle wait, so a
#: program has either these or idle waits; an idle wait has no other branch beside it either.
RESTLESS = frozenset(
    {"cleanup", "swallow", "gather", "settled", "wait", "told", "completed", "shield", "cancel", "limit", "nested"}
    | {"event", "queue", "barrier", "condition", "future", "nothing", "loose"}
)
#: A signal from outside does not reach a child, whose id nobody knows.
OUTSIDE = frozenset({"heard", "maybe"})


class Maker:
    """Draws programs from a seed, without the words that are switched off."""

    def __init__(self, seed, without=()):
        self.draw = Random(seed)
        self.numbers = itertools.count(1)
        self.without = frozenset(without) | (RESTLESS if seed % 4 == 0 else {"idle"})
        self.depth = 0
        self.in_child = False
        self.locked = False

    def program(self):
        return _several(self, 1, 4)

    def statement(self):
        words = [
            word
            for word in (SIMPLE if self.depth >= DEPTH else WORDS)
            if word not in self.without
            and not (self.in_child and word in OUTSIDE)
            and not (self.depth and word == "idle")
        ]
        if self.locked:  # two locks in two orders, or the same twice, would never end
            words = [word for word in words if word not in ("lock", "limited")]
        word = self.draw.choices(words, [WORDS[one][0] for one in words])[0]
        number = next(self.numbers)
        before = self.depth, self.locked
        self.depth += 1
        self.locked = self.locked or word in ("lock", "limited")
        try:
            return [word, number, *WORDS[word][1](self)]
        finally:
            self.depth, self.locked = before

    def inner(self):
        before, self.in_child = self.in_child, True
        before_locked, self.locked = self.locked, False
        try:
            return self.statement()
        finally:
            self.in_child, self.locked = before, before_locked


def is_statement(part):
    return isinstance(part, list) and len(part) > 1 and isinstance(part[0], str) and part[0] in WORDS


def parts_of(statement):
    """A statement and all that it holds."""
    yield statement
    for part in statement[2:]:
        if is_statement(part):
            yield from parts_of(part)
        elif isinstance(part, list):
            for one in part:
                yield from parts_of(one)


def signals_of(statements):
    """What the world outside sends: name, payload, and when."""
    return [(one[2], one[1], one[3]) for statement in statements for one in parts_of(statement) if one[0] in OUTSIDE]


def smaller(statements):
    """Programs with one thing less, the larger cuts first."""
    for index, statement in enumerate(statements):
        if len(statements) > 1:
            yield statements[:index] + statements[index + 1 :]
        for one in _smaller_statement(statement):
            yield [*statements[:index], one, *statements[index + 1 :]]


def _smaller_statement(statement):
    for index, part in enumerate(statement):
        if is_statement(part):
            yield part
            for one in _smaller_statement(part):
                yield [*statement[:index], one, *statement[index + 1 :]]
        elif isinstance(part, list):
            yield from part
            for several in smaller(part):
                yield [*statement[:index], several, *statement[index + 1 :]]
