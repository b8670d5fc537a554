"""Nothing on the event loop grows with a value or with a history: others have their turn meanwhile."""

import asyncio
import base64
import random
import threading

import msgspec
import pytest

import keepstep as ks
from keepstep.engine import journal
from keepstep.kernel import redaction
from keepstep.records import record
from keepstep.values import codec
from keepstep.values import large as largeness
from tests.engine.world import until_status

#: A history of so many records is read.
RECORDS = 1_500
#: So many records may be read before others have the loop: twice what a reader allows itself, for the page's ends.
AT_ONCE = 250


class Turns:
    """How much of some work the loop's thread does between two turns of others."""

    def __init__(self):
        self.most = self.since = 0
        self._thread = threading.get_ident()
        self._loop = asyncio.get_running_loop()
        self._over = False
        self._turn()

    def _turn(self):
        self.since = 0
        if not self._over:
            self._loop.call_soon(self._turn)

    def work(self, function):
        def counted(*args, **kwargs):
            if threading.get_ident() == self._thread and not self._over:
                self.since += 1
                self.most = max(self.most, self.since)
            return function(*args, **kwargs)

        return counted

    def end(self):
        self._over = True
        return self.most


@pytest.mark.live_only
@pytest.mark.parametrize("reading", ["checkpoints", "audit", "info", "spent", "published", "state"])
async def test_a_long_history_is_read_in_pieces(world, monkeypatch, reading):
    graph = ks.Graph("long", max_iterations=2 * RECORDS, durability="every=50")

    @graph.step
    async def turn(state):
        return {"n": state["n"] + 1}

    graph.edge("turn", "turn", when=lambda state: state["n"] < RECORDS)
    graph.wait("word")
    graph.edge("turn", "word")
    graph.entry("turn")
    graph.exit("word")
    async with world.engine() as engine:
        run = await engine.start(graph, {"n": 0}, run_id="r")
        await until_status(run, "waiting")
        turns = Turns()
        monkeypatch.setattr(record, "_decode", turns.work(record._decode))
        await getattr(run, reading)()
        assert turns.end() <= AT_ONCE


def chatter(size):
    return "".join(random.Random(size).choices("abc ", k=size))


class LoopWork:
    """What the loop's thread does with large values: nothing, one hopes."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(largeness, "LARGE_BYTES", 20_000)
        monkeypatch.setattr(largeness, "LARGE_BODY_BYTES", 1_000)
        self._loop = threading.get_ident()
        self.here: list[str] = []
        self.elsewhere: set[str] = set()
        self._watch(monkeypatch, codec.Values, "encode", lambda args, data: len(data))
        self._watch(monkeypatch, codec.Values, "decode", lambda args, _: len(args[1]))
        self._watch(monkeypatch, redaction.Redaction, "check", lambda args, _: len(args[1]))
        self._watch(monkeypatch, record, "pack", lambda args, _: len(args[0]), "keepstep.engine.process")
        self._watch(monkeypatch, journal, "seal", lambda args, sealed: _value_bytes(args[0]))
        self._watch(monkeypatch, record, "_take_in", lambda args, _: _value_bytes(args[1]))

    def _watch(self, monkeypatch, place, name, size, *others):
        function = getattr(place, name)

        def watched(*args, **kwargs):
            given = function(*args, **kwargs)
            if size(args, given) > largeness.LARGE_BYTES:
                if threading.get_ident() == self._loop:
                    self.here.append(name)
                else:
                    self.elsewhere.add(name)
            return given

        monkeypatch.setattr(place, name, watched)
        for other in others:
            monkeypatch.setattr(f"{other}.{name}", watched)


def _value_bytes(record):
    return 0 if record.value is msgspec.UNSET else len(record.value)


@pytest.fixture
def loop_work(monkeypatch):
    return LoopWork(monkeypatch)


LONG = 150_000


@ks.step
async def long_text(size):
    return chatter(size)


@ks.workflow
async def returns_a_page(size):
    return await long_text(size)


@ks.workflow
async def asks_a_child(size):
    child = await ks.start(returns_a_page, size)
    return len(await child.result())


@ks.workflow
async def is_given_a_page(page):
    return len(page)


@ks.workflow
async def waits_for_a_page():
    return len(await ks.wait_for("page"))


@pytest.mark.live_only
@pytest.mark.parametrize("keys", [None, ks.Keys("k", {"k": b"k" * 32})], ids=["plain", "encrypted"])
async def test_large_results_are_worked_on_off_the_loop(world, loop_work, keys):
    async with world.engine(keys=keys) as engine:
        run = await engine.start(returns_a_page, LONG)
        assert len(await run.result()) == LONG
        assert await (await engine.start(asks_a_child, LONG)).result() == LONG
        assert loop_work.here == []
        assert {"encode", "decode", "check", "seal"} <= loop_work.elsewhere


@pytest.mark.live_only
async def test_large_inputs_and_signals_are_worked_on_off_the_loop(world, loop_work):
    page = chatter(LONG)
    async with world.engine() as engine:
        assert await (await engine.start(is_given_a_page, page)).result() == LONG
        run = await engine.start(waits_for_a_page)
        await run.signal("page", page)
        assert await run.result() == LONG
    assert loop_work.here == []
    assert {"encode", "decode", "check", "seal"} <= loop_work.elsewhere


@pytest.mark.live_only
async def test_a_large_result_can_be_asked_for_after_the_engine_closed(world, loop_work):
    async with world.engine() as engine:
        run = await engine.start(returns_a_page, LONG)
        await until_status(run, "completed")
    assert len(await run.result()) == LONG


async def test_a_run_begins_although_its_starter_leaves_while_the_input_is_decoded(world, loop_work, monkeypatch):
    async with world.engine() as engine:
        entered = engine.entered

        def leave(context):
            entered(context)
            starting.cancel()

        monkeypatch.setattr(engine, "entered", leave)
        starting = asyncio.create_task(engine.start(is_given_a_page, chatter(LONG), run_id="r"))
        await asyncio.wait([starting])
        assert await (await engine.get("r")).result() == LONG


@pytest.mark.live_only
async def test_large_records_are_replayed_and_read_off_the_loop(world, loop_work):
    """Those of a run that was put away and goes on in another engine."""
    began = []

    @ks.step
    async def fetch(size):
        began.append(size)
        return [{"text": chatter(size)}]

    @ks.workflow
    async def goes_on(size, page):
        pages = await ks.gather(fetch(size), fetch(size + 1))
        await ks.wait_for("on")
        return [len(page), *(len(page[0]["text"]) for page in pages)]

    async with world.engine(workflows=[goes_on]) as engine:
        run = await engine.start(goes_on, LONG, chatter(LONG), run_id="r")
        await until_status(run, "waiting")
    loop_work.elsewhere.clear()
    async with world.engine(workflows=[goes_on]) as engine:
        run = await engine.get("r")
        await run.signal("on")
        assert await run.result() == [LONG, LONG, LONG + 1]
        values = [one.value for one in await run.checkpoints() if one.kind == "step completed"]
        assert sorted(len(value) for value in values) == [LONG + 13, LONG + 14]
    assert sorted(began) == [LONG, LONG + 1]
    assert loop_work.here == []
    assert {"decode", "_take_in"} <= loop_work.elsewhere


@pytest.mark.live_only
async def test_a_graph_with_large_changes_is_worked_on_off_the_loop(world, loop_work):
    graph = ks.Graph("large changes")

    @graph.step
    async def fetch(state):
        return {"page": chatter(LONG)}

    @graph.step
    async def left(state):
        return {"left": state["page"][::-1]}

    @graph.step
    async def right(state):
        return {"right": state["page"][:LONG]}

    @graph.step
    async def done(state):
        return {"size": len(state["left"]) + len(state["right"])}

    graph.edge("fetch", "both")
    graph.parallel("both", ["left", "right"], join="done")
    graph.entry("fetch")
    graph.exit("done")
    async with world.engine(workflows=[graph]) as engine:
        run = await engine.start(graph, {})
        assert (await run.result())["size"] == 2 * LONG
    assert loop_work.here == []
    assert {"check", "seal", "pack"} <= loop_work.elsewhere


async def test_small_values_stay_on_the_loop(world, loop_work, monkeypatch):
    async with world.engine() as engine:
        monkeypatch.setattr(engine, "off_loop", None)
        assert len(await (await engine.start(returns_a_page, 15_000)).result()) == 15_000


@pytest.mark.parametrize(
    "value, large",
    [
        (None, False),
        (12, False),
        ("x" * 250_000, False),
        ("x" * 250_001, True),
        (b"x" * 250_001, True),
        ({"a": {"b": ["x" * 250_001]}}, True),
        ({"a": {"b": [1, 2.5, None, "x"]}}, False),
        (list(range(5_000)), False),
        (list(range(5_001)), True),
        ([{"a": 1, "b": "x"}] * 2_000, True),
        ({n: (n, n) for n in range(2_000)}, True),
        (Turns, False),
    ],
)
def test_a_value_is_large_by_its_bytes_or_its_parts(value, large):
    assert largeness.is_large(value) is large


def test_objects_are_large_by_their_fields():
    class Fields:
        def __init__(self, text):
            self.text = text

    class Struct(msgspec.Struct):
        text: str

    class Slots:
        __slots__ = ("text",)

        def __init__(self, text):
            self.text = text

    for cls in (Fields, Struct, Slots):
        assert largeness.is_large([cls("x" * 250_001)])
        assert not largeness.is_large([cls("x")])
    holds_itself = []
    holds_itself.append(holds_itself)
    assert largeness.is_large(holds_itself)


async def test_a_result_that_other_code_changes_meanwhile_is_stored(world, monkeypatch):
    """A dictionary that grows while it is read off the loop is read once more on the loop, where it cannot grow."""
    monkeypatch.setattr(largeness, "LARGE_BYTES", 1_000)
    here = threading.get_ident()
    shared = {"text": chatter(5_000), "more": [1.5, "x"]}
    write = codec.Writer.plain
    grown = []

    def growing(self, value, depth=0):
        if threading.get_ident() != here and value is shared:
            grown.append(1)
            raise RuntimeError("dictionary changed size during iteration")
        return write(self, value, depth)

    monkeypatch.setattr(codec.Writer, "plain", growing)  # before the codecs are made

    @ks.step
    async def look():
        return shared

    @ks.workflow
    async def looking():
        return len((await look())["text"])

    async with world.engine() as engine:
        assert await (await engine.start(looking)).result() == 5_000
    assert grown


async def test_a_secret_in_a_large_result_is_still_refused(world, monkeypatch):
    monkeypatch.setattr(largeness, "LARGE_BYTES", 1_000)

    @ks.step
    async def leak():
        return chatter(5_000) + " password=hunter2-and-more"

    @ks.workflow
    async def leaking():
        return await leak()

    async with world.engine(on_suspect="refuse") as engine:
        with pytest.raises(ks.RunFailed, match="looks like a secret"):
            await (await engine.start(leaking)).result()


async def test_many_large_results_are_not_one_commit(world, monkeypatch):
    """Between them the others write, and are told."""
    monkeypatch.setattr(largeness, "LARGE_BYTES", 200_000)
    monkeypatch.setattr(journal, "ENOUGH_BYTES", 100_000)
    sizes = []
    answered = journal.Journal._answered

    def counted(self, batch, answers, *rest, **options):
        sizes.append(batch.large_bytes)
        return answered(self, batch, answers, *rest, **options)

    monkeypatch.setattr(journal.Journal, "_answered", counted)
    blob = base64.b64encode(random.Random(1).randbytes(180_000)).decode()
    gate = asyncio.Event()

    @ks.step
    async def fetch(number):
        await gate.wait()
        return blob

    @ks.workflow
    async def page(number):
        return len(await fetch(number))

    async with world.engine() as engine:
        runs = [await engine.start(page, number) for number in range(6)]
        gate.set()
        assert [await run.result() for run in runs] == [240_000] * 6
    assert 0 < max(sizes) < 400_000
