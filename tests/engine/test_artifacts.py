"""Artifacts: large results as files beside the store, durable before their checkpoint, and gone with their runs."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import subprocess
import sys
from contextlib import nullcontext

import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.care.verify import verify
from keepstep.engine import documents as documents_module
from keepstep.errors import CheckpointCorrupt
from keepstep.stores import artifacts as artifacts_module
from keepstep.stores.artifact_files import CHUNK, SEALED
from keepstep.stores.memory import MemoryStore
from keepstep.stores.sqlite.store import SQLiteStore
from keepstep.testing.faults.crash import SQLiteDisk, crash_everywhere
from tests.nightly import cases
from tests.postgres import empty_store

DATA = os.urandom(1000) * (CHUNK // 400)


def files_in(folder):
    return sorted(one.name for one in folder.rglob("*") if one.is_file())


@ks.step
async def produce(data: bytes, name: str = "") -> ks.Artifact:
    return await ks.Artifact.write(data, name=name, media_type="application/octet-stream")


@ks.step
async def measure(artifact: ks.Artifact) -> int:
    return len(await artifact.read())


@ks.workflow(name="making")
async def making(size: int) -> ks.Artifact:
    artifact = await produce(b"x" * size, "result.bin")
    assert await measure(artifact) == size
    return artifact


@pytest.mark.parametrize("kind", ["memory", "sqlite", "files", "postgres"])
async def test_large_result_is_a_file_beside_the_store(kind, tmp_path):
    local = {"sqlite": str(tmp_path / "runs.db"), "files": f"files:{tmp_path}/runs"}.get(kind, "memory:")
    with empty_store("artifacts") if kind == "postgres" else nullcontext(local) as url:
        options = {"artifacts": tmp_path / "files"} if kind == "postgres" else {}
        async with ks.open(url, **options) as engine:
            run = await engine.start(making, 12_000_000)
            artifact = await run.result()
            assert (artifact.size, artifact.name) == (12_000_000, "result.bin")
            assert await artifact.read(engine=engine) == b"x" * 12_000_000
            path = await artifact.path(engine=engine)
            folders = {"sqlite": "runs.db-artifacts", "files": "runs/artifacts", "postgres": "files"}
            assert kind == "memory" or path == tmp_path / folders[kind] / artifact.digest[:2] / artifact.digest
            (info,) = await engine.artifacts.list()
            assert (info.digest, info.names, info.runs) == (artifact.digest, ("result.bin",), (run.id,))
            assert await engine.artifacts.verify() == []
            await engine.care.erase(run.id)
            assert (path.exists(), await engine.artifacts.list()) == (False, [])


async def test_server_without_a_folder_is_refused(monkeypatch, tmp_path):
    with empty_store("artifacts") as url:
        async with ks.open(url) as engine:
            with pytest.raises(ks.RunFailed, match="KEEPSTEP_ARTIFACTS"):
                await (await engine.start(making, 5)).result()
        monkeypatch.setenv("KEEPSTEP_ARTIFACTS", str(tmp_path / "there"))
        async with ks.open(url) as engine:
            await (await engine.start(making, 5)).result()
        assert len(files_in(tmp_path / "there")) == 1


async def chunks_of(data):
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["bytes", "path", "file", "chunks", "async chunks", "empty"])
async def test_artifact_is_made_of_any_source(kind, tmp_path):
    (tmp_path / "source").write_bytes(DATA[:50_000])
    sources = {
        "bytes": DATA[:50_000],
        "path": tmp_path / "source",
        "file": io.BytesIO(DATA[:50_000]),
        "chunks": [DATA[:1000], b"", DATA[1000:50_000]],
        "async chunks": chunks_of(DATA[:50_000]),
        "empty": b"",
    }
    async with ks.open(tmp_path / "runs.db") as engine:
        artifact = await ks.Artifact.write(sources[kind], engine=engine)
        with await artifact.open(engine=engine) as file:
            assert file.read() == (b"" if kind == "empty" else DATA[:50_000])


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
async def test_encrypted_store_encrypts_its_artifacts(size, tmp_path):
    data = (b"a private text " * (size // 10 + 1))[:size]
    async with ks.open(tmp_path / "runs.db", keys=ks.Keys("k", {"k": bytes(32)})) as engine:
        artifact = await ks.Artifact.write(data, engine=engine)
        assert await artifact.read(engine=engine) == data
        with await artifact.open(engine=engine) as file:
            assert file.read() == data
        with pytest.raises(ks.DefinitionError, match="encrypted"):
            await artifact.path(engine=engine)
        path = engine.artifacts.files.path(artifact.digest)
        stored = path.read_bytes()
        assert b"private" not in stored
        for place in (0, len(stored) // 2, len(stored) - 1):
            path.write_bytes(stored[:place] + bytes([stored[place] ^ 1]) + stored[place + 1 :])
            with pytest.raises(ks.StoreError):
                await artifact.read(engine=engine)
        path.write_bytes(stored[:-20])
        with pytest.raises(ks.StoreError):
            await artifact.read(engine=engine)
        path.write_bytes(stored)
        assert await engine.artifacts.verify() == []
    async with ks.open(tmp_path / "runs.db", worker=False) as engine:
        with pytest.raises(ks.StoreError, match="keys"):
            await artifact.read(engine=engine)


@pytest.mark.parametrize("keys", [None, ks.Keys("first", {"first": b"k" * 32})])
async def test_contents_may_look_like_an_encrypted_file(keys, tmp_path):
    async with ks.open(tmp_path / "runs.db", keys=keys) as engine:
        for data in (SEALED, SEALED + b"first 0011\n" + bytes(50)):
            artifact = await ks.Artifact.write(data, engine=engine)
            assert await artifact.read(engine=engine) == data
            with await artifact.open(engine=engine) as file:
                assert file.read() == data
        assert await engine.artifacts.verify() == []


async def test_damaged_and_missing_artifacts_are_reported(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:
        first = await ks.Artifact.write(b"first", engine=engine)
        second = await ks.Artifact.write(b"second", engine=engine)
        (await first.path(engine=engine)).write_bytes(b"FIRST")
        (await second.path(engine=engine)).unlink()
        for artifact, said in ((first, "not those that were written"), (second, "is missing")):
            for act in (artifact.read, artifact.open, artifact.path):
                with pytest.raises(CheckpointCorrupt, match=said):
                    await act(engine=engine)
        assert len(await engine.artifacts.verify()) == 2
        found = verify(engine.store)
        assert {(flaw.kind, flaw.about) for flaw in found.flaws} == {
            ("artifact", first.digest),
            ("artifact", second.digest),
        }
        report = await examine(engine, deep=True)
        assert [one.code for one in report.findings] == ["artifact", "artifact"]
        again = await ks.Artifact.write(b"first", engine=engine)  # mends it
        assert await again.read(engine=engine) == b"first"


@pytest.mark.parametrize("keys", [None, ks.Keys("k", {"k": bytes(32)})], ids=["plain", "encrypted"])
async def test_reference_that_a_crash_left_pending_is_no_damage_and_goes_in_time(keys, tmp_path, monkeypatch):
    async with ks.open(tmp_path / "runs.db", keys=keys) as engine:
        await ks.Artifact.write(b"there", engine=engine)
        lost = ks.Artifact("0" * 64, 5)
        await engine.artifacts.refer(lost, pending=True)
        assert await engine.artifacts.verify() == []
        assert verify(engine.store).sound
        await engine.artifacts.sweep()
        assert len(await engine.artifacts.list()) == 2
        monkeypatch.setattr(artifacts_module, "UNFINISHED_SECONDS", -1.0)
        assert await engine.artifacts.sweep() == 0
        assert len(await engine.artifacts.list()) == 1


async def test_equal_artifacts_share_a_file_until_the_last_run_is_gone(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:
        for run in ("a", "b"):
            artifact = await (await engine.start(making, 100, run_id=run)).result()
        (path,) = (tmp_path / "runs.db-artifacts").rglob(artifact.digest)
        await engine.care.erase("a")
        assert path.exists()
        await engine.care.erase("b")
        assert not path.exists()


async def test_run_keeps_the_artifact_of_another(tmp_path):
    @ks.step
    async def adopt(artifact: ks.Artifact) -> None:
        await artifact.keep()

    @ks.workflow
    async def adopting(artifact: ks.Artifact) -> None:
        await adopt(artifact)

    async with ks.open(tmp_path / "runs.db") as engine:
        artifact = await (await engine.start(making, 100, run_id="a")).result()
        await (await engine.start(adopting, artifact, run_id="b")).result()
        await engine.care.erase("a")
        assert await artifact.read(engine=engine) == b"x" * 100


async def test_artifact_of_no_run_stays_until_it_is_removed(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:
        artifact = await ks.Artifact.write(b"mine", engine=engine)
        assert await engine.artifacts.sweep() == 0
        assert await engine.artifacts.remove(artifact.digest) == 1
        assert await engine.artifacts.list() == []


async def test_worker_sweeps_artifacts_of_removed_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "SWEEP_SECONDS", 0.01)
    async with ks.open(tmp_path / "runs.db") as engine:
        await (await engine.start(making, 100, run_id="a")).result()
        await engine.care.purge()
        for _ in range(1000):
            if not files_in(tmp_path / "runs.db-artifacts"):
                break
            await asyncio.sleep(0.01)
        assert files_in(tmp_path / "runs.db-artifacts") == []


async def test_file_that_gets_a_reference_during_a_sweep_is_put_back(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:
        artifact = await ks.Artifact.write(b"mine", engine=engine)
        answers = iter([False, True])
        assert engine.artifacts.files.sweep(lambda _: next(answers)) == 0
        assert await artifact.read(engine=engine) == b"mine"
        engine.artifacts.files.path(artifact.digest).replace(
            engine.artifacts.files.folder / f".trash-{artifact.digest}"
        )
        assert await engine.artifacts.sweep() == 0
        assert await artifact.read(engine=engine) == b"mine"


def test_plain_code_uses_artifacts(tmp_path):
    @ks.step
    def produce_plainly() -> ks.Artifact:
        return ks.Artifact.write(b"plain").result()

    @ks.workflow
    def plain() -> ks.Artifact:
        return produce_plainly().result()

    with ks.open(tmp_path / "runs.db") as engine:
        artifact = engine.start(plain).result()
        assert artifact.read(engine=engine).result() == b"plain"
        assert len(engine.artifacts.list()) == 1


async def test_wrong_use_is_refused(tmp_path):
    @ks.workflow
    async def writing_in_the_workflow():
        await ks.Artifact.write(b"x")

    with pytest.raises(ks.DefinitionError, match="engine=engine"):
        await ks.Artifact.write(b"x")
    async with ks.open(tmp_path / "runs.db") as engine:
        with pytest.raises(ks.RunFailed, match="in a step"):
            await (await engine.start(writing_in_the_workflow)).result()
        for source, match in (
            (5, "source must be"),
            (tmp_path / "none", "cannot be read"),
            (io.StringIO("x"), "binary"),
        ):
            with pytest.raises(ks.DefinitionError, match=match):
                await ks.Artifact.write(source, engine=engine)
        with pytest.raises(ks.DefinitionError, match="name="):
            await ks.Artifact.write(b"x", name="a\nb", engine=engine)
        with pytest.raises(ks.DefinitionError, match="64 hexadecimal"):
            await ks.Artifact("../../etc/passwd", 5).read(engine=engine)
        with pytest.raises(ks.DefinitionError, match="64 hexadecimal"):
            await ks.Artifact("../../etc/passwd", 5).keep(engine=engine)
        with pytest.raises(ks.DefinitionError, match="media_type="):
            await ks.Artifact.write(b"x", media_type="\ud800", engine=engine)
        assert files_in(tmp_path / "runs.db-artifacts") == []


async def test_store_without_documents_erases_runs():
    class Bare:
        """A store of another package, which has no documents."""

        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            if "documents" in name or "artifacts" in name or name == "list_collections":
                raise AttributeError(name)
            return getattr(self.inner, name)

    store = MemoryStore()
    async with ks.open(Bare(store)) as engine:
        run = await engine.start(making, 5, run_id="r")
        with pytest.raises(ks.RunFailed, match="keeps no documents"):
            await run.result()
        await engine.care.erase("r")
        assert (await engine.care.verify()).sound
    assert store._artifacts == ""


async def test_store_in_memory_removes_its_folder():
    store = MemoryStore()
    async with ks.open(store) as engine:
        await ks.Artifact.write(b"x", engine=engine)
        folder = engine.artifacts.files.folder
    assert folder.exists()
    del store, engine
    gc.collect()
    assert not folder.exists()


async def test_copy_takes_files_along(tmp_path):
    async with ks.open(tmp_path / "runs.db") as engine:
        artifact = await (await engine.start(making, 100, run_id="a")).result()
        target = SQLiteStore(tmp_path / "copy.db")
        assert (await engine.care.copy_to(target)).whole
        assert verify(target).sound
        (path,) = (tmp_path / "copy.db-artifacts").rglob(artifact.digest)
        assert path.read_bytes() == b"x" * 100
        target.close()


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.mark.crash
async def test_artifact_of_a_finished_step_is_there_after_a_crash_at_every_write(tmp_path):
    disks = []

    def disk():
        disks.append(SQLiteDisk(tmp_path / f"{len(disks)}.db", power_loss="may_lose_last"))
        return disks[-1]

    async def play(engine):
        artifact = await (await engine.start(making, 10, run_id="r")).result()
        return await artifact.read(engine=engine)

    async def judge(disk, lives):
        assert lives.result == b"x" * 10
        store = disk.open()
        assert verify(store).flaws == [], str(lives.point)
        store.close()

    await crash_everywhere(disk, play, judge)


PROGRAM = """
import asyncio, os, signal, sys
import keepstep as ks
from keepstep.stores import artifact_files
path, left = sys.argv[1], int(sys.argv[2])

def mortal(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        done = function(*args, **kwargs)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done
    return call

os.fsync = mortal(os.fsync)
artifact_files.ArtifactFiles.finish = mortal(artifact_files.ArtifactFiles.finish)

@ks.step
async def produce(data: bytes) -> ks.Artifact:
    return await ks.Artifact.write(data, name="x")

@ks.workflow
async def making() -> ks.Artifact:
    return await produce(b"x" * 1000)

async def main():
    async with ks.open(path) as engine:
        artifact = await (await engine.start(making, run_id="r")).result()
        assert await artifact.read(engine=engine) == b"x" * 1000
        assert await engine.artifacts.verify() == []

asyncio.run(main())
"""


@pytest.mark.crash
@pytest.mark.parametrize("place", cases(range(1, 11), quick=[2, 5, 8]))
def test_artifact_survives_a_kill_while_it_is_written(place, tmp_path):
    path = str(tmp_path / "runs.db")
    command = [sys.executable, "-c", PROGRAM, path]
    assert subprocess.run([*command, str(place)], check=False).returncode == -signal.SIGKILL
    assert subprocess.run([*command, "0"], check=False).returncode == 0
