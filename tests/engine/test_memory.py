"""Memory: values with their history, in workflows, in steps and outside; once each, whatever crashes."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
from datetime import timedelta

import pytest

import keepstep as ks
from keepstep.engine.documents import Documents
from keepstep.errors import DocumentConflict
from keepstep.testing.faults.crash import MemoryDisk, SQLiteDisk, crash_everywhere
from tests.nightly import cases


@dataclasses.dataclass
class Profile:
    name: str
    visits: int = 0


async def done(world, workflow):
    """The result of a run, live or replayed after each record."""
    async with world.engine() as engine:
        run = await engine.start(workflow)
        return await run.result(timeout=20)


notes = ks.Memory("notes", keep=5)
people = ks.Memory("people", type=Profile)


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_memory_is_read_and_written_in_a_workflow(world, kind):
    @ks.workflow
    async def asynchronous():
        assert await notes.get("a", "none") == "none"
        assert await notes.put("a", {"n": (1, 2)}) == 1
        assert await notes.get("a") == {"n": (1, 2)}
        assert await notes.delete("a")
        assert not await notes.delete("a")
        return [(one.version, one.value, one.deleted) for one in await notes.history("a")], await notes.get("a")

    @ks.workflow
    def plain():
        assert notes.get("a", "none").result() == "none"
        assert notes.put("a", {"n": (1, 2)}).result() == 1
        assert notes.get("a").result() == {"n": (1, 2)}
        assert notes.delete("a").result()
        assert not notes.delete("a").result()
        found = notes.history("a").result()
        return [(one.version, one.value, one.deleted) for one in found], notes.get("a").result()

    found = await done(world, asynchronous if kind == "async" else plain)
    assert found == ([(1, {"n": (1, 2)}, False), (2, None, True)], None)


async def test_values_of_a_type_come_back_as_that_type(world):
    @ks.workflow
    async def visit() -> list[Profile]:
        await people.put("bob", Profile("Bob"))
        await people.update("bob", lambda one: dataclasses.replace(one, visits=one.visits + 1))
        await people.update("ann", lambda one: one, Profile("Ann"))
        return [one.value for one in await people.list()]

    assert await done(world, visit) == [Profile("Ann"), Profile("Bob", 1)]


async def test_plain_data_becomes_the_type_or_is_refused(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:
        untyped = ks.Memory("people", engine=engine)
        typed = ks.Memory("people", type=Profile, engine=engine)
        await untyped.put("ann", {"name": "Ann", "visits": 2})
        assert await typed.get("ann") == Profile("Ann", 2)
        with pytest.raises(ks.KeepstepError, match="'people'"):
            await typed.put("bob", {"name": 5})
        await untyped.put("bob", [1])
        with pytest.raises(ks.KeepstepError, match="'people'"):
            await typed.get("bob")


def test_replay_sees_what_was_seen(tmp_path):
    """The second life reads the record, not the memory, which has changed meanwhile."""
    seen = []

    @ks.workflow
    async def reading():
        first = await notes.get("shared")
        seen.append(first)
        await ks.wait_for("go")
        return first, await notes.get("shared")

    with ks.open(tmp_path / "runs.db", linger_seconds=0.01) as engine:
        memory = ks.Memory("notes", engine=engine)
        memory.put("shared", "old").result()
        run = engine.start(reading, run_id="r")
        while run.status() != "waiting":
            pass
        memory.put("shared", "new").result()
    with ks.open(tmp_path / "runs.db") as engine:
        run = engine.get("r")
        run.signal("go")
        assert tuple(run.result(timeout=10)) == ("old", "new")
        assert seen == ["old", "old"]
        record = next(one for one in run.checkpoints() if one.step == "memory get#1")
        assert b'"version":1' in record.value


async def test_body_of_a_step_uses_the_memory_directly(world):
    @ks.step
    async def note(text):
        await notes.put("a", text)
        return await notes.get("a")

    @ks.step
    def note_plainly(text):
        notes.put("b", text).result()
        return notes.get("b").result()

    @ks.workflow
    async def noting():
        return await note("x"), await note_plainly("y")

    assert tuple(await done(world, noting)) == ("x", "y")


async def test_memory_needs_an_engine_outside_a_run():
    with pytest.raises(ks.DefinitionError, match="engine=engine"):
        await notes.get("a")
    with pytest.raises(ks.DefinitionError, match="engine= must be"):
        await ks.Memory("notes", engine=5).get("a")


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: ks.Memory("a/b"), "memory name"),
        (lambda: ks.Memory("a", keep=0), "keep="),
        (lambda: notes.get(""), "document key"),
        (lambda: notes.put("a\0", 1), "document key"),
        (lambda: notes.put("a", 1, ttl=0), "ttl="),
        (lambda: notes.list(limit=0), "limit="),
        (lambda: notes.update("a", 5), "change must be a function"),
        (lambda: notes.put("a", object()), "'notes'"),
    ],
)
def test_wrong_use_is_refused(make, match):
    with pytest.raises(ks.DefinitionError, match=match):
        make()


async def test_expected_versions_and_times_to_live(tmp_path):
    with Documents.open(tmp_path / "runs.db") as documents:
        memory = ks.Memory("notes", keep=3, engine=documents)
        assert await memory.put("a", 1, expect=0) == 1
        with pytest.raises(DocumentConflict):
            await memory.put("a", 2, expect=0)
        await memory.delete("a")
        assert await memory.put("a", 3, expect=0) == 3
        for number in range(4, 7):
            await memory.put("a", number)
        assert [one.version for one in await memory.history("a")] == [4, 5, 6]
        await memory.put("short", 1, ttl=timedelta(milliseconds=1))
        await asyncio.sleep(0.01)
        assert await memory.get("short", "gone") == "gone"
        with pytest.raises(ks.DefinitionError, match="year 9999"):
            await memory.put("long", 1, ttl=timedelta.max)
        await memory.put("b/1", 1)
        await memory.put("b/2", 2)
        await memory.delete("b/1")
        assert [(one.key, one.value) for one in await memory.list("b/")] == [("b/2", 2)]
        assert [one.key for one in await memory.list(limit=1)] == ["a"]
        assert await memory.erase("b/") == 2
        assert await memory.history("b/1") == []


async def test_concurrent_updates_lose_nothing(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:

        @ks.workflow
        async def count():
            for _ in range(5):
                await notes.update("counter", lambda number: (number or 0) + 1)

        runs = [await engine.start(count) for _ in range(8)]
        for run in runs:
            await run.result()
        assert await ks.Memory("notes", engine=engine).get("counter") == 40


async def test_revealed_secret_is_not_stored(world, monkeypatch):
    monkeypatch.setenv("TOKEN", "sk-very-secret-value-of-mine")

    @ks.workflow
    async def leaking():
        await notes.put("a", ks.Secret("TOKEN").reveal())

    with pytest.raises(ks.RunFailed, match="revealed secret"):
        await done(world, leaking)


# -- crashes -----------------------------------------------------------------------------------------------------------


@ks.workflow(name="remembering")
async def remembering():
    await notes.put("a", 1)
    await notes.update("a", lambda number: number + 1)
    await notes.put("b", "x")
    await notes.delete("b")
    await notes.put("a", 10)
    return await notes.get("a")


def _versions(store):
    with Documents.open(store) as documents:
        found = documents.blocking.list(notes.collection, all_versions=True)
        return [(one.key, one.version, one.value) for one in found]


WRITTEN = [("a", 1, b"1"), ("a", 2, b"2"), ("a", 3, b"10"), ("b", 1, b'"x"'), ("b", 2, b"")]


@pytest.mark.crash
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_every_write_makes_one_version_after_a_crash_at_every_write(kind, tmp_path):
    disks = []

    def disk():
        name = tmp_path / f"{len(disks)}.db"
        disks.append(MemoryDisk() if kind == "memory" else SQLiteDisk(name, power_loss="may_lose_last"))
        return disks[-1]

    async def play(engine):
        run = await engine.start(remembering, run_id="r")
        return await run.result()

    async def judge(disk, lives):
        assert lives.result == 10
        store = disk.open()
        assert _versions(store) == WRITTEN, str(lives.point)
        if kind == "sqlite":
            store.close()

    await crash_everywhere(disk, play, judge, faults=("before", "after", "failed", "lost"))
    assert len(disks) > 20


PROGRAM = """
import asyncio, os, signal, sys
import keepstep as ks
from keepstep.stores.sqlite.store import SQLiteStore
path, left = sys.argv[1], int(sys.argv[2])
notes = ks.Memory("notes", keep=5)

class Mortal(SQLiteStore):
    def write_documents(self, batches):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        done = super().write_documents(batches)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

@ks.workflow(name="remembering")
async def remembering():
    await notes.put("a", 1)
    await notes.update("a", lambda number: number + 1)
    await notes.put("b", "x")
    await notes.delete("b")
    await notes.put("a", 10)
    return await notes.get("a")

async def main():
    store = Mortal(path)
    async with ks.open(store) as engine:
        assert await (await engine.start(remembering, run_id="r")).result() == 10
    store.close()

asyncio.run(main())
"""


@pytest.mark.crash
@pytest.mark.parametrize("place", cases(range(1, 11), quick=[2, 3, 8]))
def test_every_write_makes_one_version_after_a_kill_around_it(place, tmp_path):
    path = str(tmp_path / "runs.db")
    killed = subprocess.run([sys.executable, "-c", PROGRAM, path, str(place)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert subprocess.run([sys.executable, "-c", PROGRAM, path, "0"], check=False).returncode == 0
    assert _versions(path) == WRITTEN
