"""Readers of a run are woken: by each commit of their own process, and by the news of what others wrote.

The interval of the safety net is an hour here, so that a reader who is not woken never reads again.
"""

from __future__ import annotations

import asyncio

import pytest

import keepstep as ks
from keepstep.engine import waiting
from keepstep.workflows.definition import Workflow
from tests.engine.test_waiting_costs import every_store, opened

SECONDS = 60.0


async def speak(count: int) -> str:
    """Emit the next token only when a reader has seen the one before."""
    for number in range(count):
        ks.emit(number)
        await SEEN.get()
    return "done"


SEEN: asyncio.Queue[int] = asyncio.Queue()
SPEAK = ks.step(name="readers: speak")(speak)


async def speech(count: int) -> str:
    ks.publish("phase", "speaking")
    return await SPEAK(count)


async def echo() -> None:
    while True:
        request = await ks.wait_for("question")
        request.reply(request.payload)


async def parent() -> str:
    return await (await ks.start(SPEECH, 3))


async def grandparent() -> str:
    return await (await ks.start(PARENT))


SPEECH = Workflow(speech, name="readers: speech")
ECHO = Workflow(echo, name="readers: echo")
PARENT = Workflow(parent, name="readers: parent")
GRANDPARENT = Workflow(grandparent, name="readers: grandparent")
ALL = [SPEECH, ECHO, PARENT, GRANDPARENT]


@pytest.fixture(autouse=True)
def _nobody_looks_by_himself(monkeypatch):
    global SEEN  # noqa: PLW0603 - a queue belongs to one loop
    SEEN = asyncio.Queue()
    monkeypatch.setattr(waiting, "LOOK_SECONDS", 3600.0)


async def tokens_of(events):
    """Read tokens, and let the next one be emitted after each."""
    found = []
    async for event in events:
        if event.name == "token.emitted":
            found.append((event.run, event.data["value"]))
            SEEN.put_nowait(event.data["value"])
    return found


def play(kind, folder, main):
    with opened(kind, folder) as store:
        asyncio.run(asyncio.wait_for(main(store), SECONDS))


@every_store
def test_a_watcher_is_woken_by_each_commit_of_its_own_process(kind, tmp_path):
    async def main(store) -> None:
        store.is_deaf = True
        async with ks.open(store, workflows=ALL) as engine:
            run = await engine.start(SPEECH, 5)
            assert await tokens_of(run.watch()) == [(run.id, number) for number in range(5)]

    play(kind, tmp_path, main)


@every_store
def test_an_asker_is_woken_by_the_reply_in_its_own_process(kind, tmp_path):
    async def main(store) -> None:
        store.is_deaf = True
        async with ks.open(store, workflows=ALL) as engine:
            run = await engine.start(ECHO)
            for number in range(3):
                assert await run.ask("question", number, timeout=SECONDS) == number
            await run.cancel()

    play(kind, tmp_path, main)


@every_store
def test_a_status_and_a_published_value_are_seen_as_soon_as_they_are_durable(kind, tmp_path):
    async def main(store) -> None:
        store.is_deaf = True
        async with ks.open(store, workflows=ALL, linger_seconds=0.0) as engine:
            run = await engine.start(ECHO)
            assert await run.reached("waiting", timeout=SECONDS) == "waiting"
            speaker = await engine.start(SPEECH, 1)
            async for event in speaker.watch():
                if event.name == "value.published":
                    break
            assert await speaker.published() == {"phase": "speaking"}
            SEEN.put_nowait(0)
            assert await speaker.result(timeout=SECONDS) == "done"

    play(kind, tmp_path, main)


@every_store
def test_a_reader_is_woken_by_what_another_process_wrote(kind, tmp_path):
    async def main(store) -> None:
        async with (
            ks.open(store, workflows=ALL, worker=False) as reader,
            ks.open(store.inner, workflows=ALL),
        ):
            run = await reader.start(SPEECH, 3)
            assert await tokens_of(run.watch()) == [(run.id, number) for number in range(3)]
            asked = await reader.start(ECHO)
            assert await asked.ask("question", 7, timeout=SECONDS) == 7
            await asked.cancel()

    play(kind, tmp_path, main)


def test_a_store_that_notifies_wakes_its_readers_without_a_poll(tmp_path):
    async def main(store) -> None:
        async with (
            ks.open(store, workflows=ALL, worker=False) as reader,
            ks.open(store.url, workflows=ALL),
        ):
            run = await reader.start(SPEECH, 3)
            store.is_deaf = True
            assert await tokens_of(run.watch()) == [(run.id, number) for number in range(3)]

    play("postgres", tmp_path, main)


@every_store
def test_tokens_of_children_are_watched_through_the_parent(kind, tmp_path):
    async def main(store) -> None:
        store.is_deaf = True
        async with ks.open(store, workflows=ALL) as engine:
            run = await engine.start(GRANDPARENT)
            found = await tokens_of(run.watch(children=True))
            assert [value for _, value in found] == [0, 1, 2]
            assert {child for child, _ in found} != {run.id}

    play(kind, tmp_path, main)


@every_store
def test_a_watch_with_children_goes_on_from_what_was_seen_of_each_run(kind, tmp_path):
    async def main(store) -> None:
        async with ks.open(store, workflows=ALL) as engine:
            run = await engine.start(GRANDPARENT)
            for number in range(3):
                SEEN.put_nowait(number)
            await run.result(timeout=SECONDS)
            events = [event async for event in run.watch(children=True)]
            assert len({event.run for event in events}) == 3
            ends = [event.run for event in events if event.name == "run.finished"]
            assert ends[-1] == run.id, "nothing of a child comes after its parent's end"
            for split in range(len(events)):
                if split and (events[split].run, events[split].seq) == (events[split - 1].run, events[split - 1].seq):
                    continue  # tokens of one record are read together
                seen = {event.run: event.seq for event in events[:split]}
                rest = [event async for event in run.watch(seen, children=True)]
                assert sorted((event.run, event.seq) for event in rest) == sorted(
                    (event.run, event.seq) for event in events[split:]
                )

    play(kind, tmp_path, main)


def test_a_write_between_a_read_and_the_wait_is_not_missed(tmp_path):
    async def main(store) -> None:
        async with ks.open(store, workflows=ALL) as engine:
            with engine.waiting.reader("some run") as reader:
                engine.waiting.notify("some run")
                assert await reader.changed()
                engine.waiting.notify("another run")
                assert not await reader.changed(0.01)
            assert not engine.waiting.readers

    play("memory", tmp_path, main)


def test_readers_are_raised_out_of_their_wait_when_the_engine_closes(tmp_path):
    async def main(store) -> None:
        async with ks.open(store, workflows=ALL) as engine:
            run = await engine.start(ECHO)
            task = asyncio.create_task(anext(aiter(run.watch(after=(await run.run()).seq + 1))))
            while not engine.waiting.readers:  # noqa: ASYNC110 - the task has to begin
                await asyncio.sleep(0)
        with pytest.raises(ks.DefinitionError, match="the engine is closed"):
            await task

    play("memory", tmp_path, main)
