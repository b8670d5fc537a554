"""Runs whose machine loses its power at every moment, and their recovery from what the disk still holds."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from keepstep.engine.engine import Engine
from keepstep.model import RunQuery
from keepstep.stores.sqlite.store import POWER_LOSS
from keepstep.testing.faults import faulty_files
from keepstep.testing.faults.crash import FilesDisk, SQLiteDisk, live
from keepstep.testing.faults.faulty_sqlite import LOSE, Chance, FaultyDisk, image, write_image
from keepstep.testing.faults.recorder import BODY, DURABLE, Recorder
from tests.nightly import case, cases

from . import programs

pytestmark = pytest.mark.crash

EXAMPLES = [one for one in programs.EXAMPLES if "sqlite" in one.stores]


class Machine(programs.FastClock):
    """A clock whose machine can start anew: what was leased before that has no owner."""

    boots = 0

    def boot(self):
        identity, seconds = super().boot()
        return f"{identity}-{self.boots}", seconds


class MarkingRecorder(Recorder):
    """Notes what happened between what was done to the disk, too."""

    def __init__(self, path, disk):
        super().__init__(path)
        self._disk = disk

    def note(self, what, **fields):
        super().note(what, **fields)
        self._disk.mark((what, fields["run"], fields["step"]))


@pytest.fixture
def place():
    """In memory where there is such a place: that nothing is really synced makes no difference here."""
    memory = Path("/dev/shm")
    place = tempfile.mkdtemp(prefix="keepstep-", dir=memory if os.access(memory, os.W_OK) else None)
    yield Path(place)
    shutil.rmtree(place)


def remember(recorder):
    if programs.EFFECTS is not None:
        programs.EFFECTS.close()
    programs.EFFECTS = recorder
    return recorder


async def first_life(example, place, clock):
    with FaultyDisk(place) as disk:
        recorder = remember(MarkingRecorder(place / "effects", disk))
        ended, result, _ = await live(
            SQLiteDisk(place / "runs.db", clock), example.play, None, recorder, clock=clock, linger_seconds=0.01
        )
    assert (ended, result) == (True, example.result)
    return disk


def cuts(disk):
    """All pending lost, at every moment, and a drawn part of it before every sync; each image once."""
    seen = set()
    for number, moment in disk.moments():
        before_sync = number < len(disk.journal) and disk.journal[number].what == "sync"
        draws = [Chance((number, draw)) for draw in range(1)] if before_sync else []
        for fate in (LOSE, *draws):
            files = image(moment, fate)
            durable = {(run, step) for what, run, step in disk.marks(number) if what == DURABLE}
            key = hash((len(durable), *files.items()))
            if key not in seen:
                seen.add(key)
                yield number, durable, files


async def second_life(example, place, clock, files):
    """Everything that ran after the power came back, once the client has what it wanted."""
    shutil.rmtree(place, ignore_errors=True)
    write_image(files, place)
    clock.boots += 1
    recorder = remember(Recorder(place / "effects"))
    after = SQLiteDisk(place / "runs.db", clock)
    ended, result, _ = await live(after, example.play, None, recorder, clock=clock)
    assert (ended, result) == (True, example.result)
    store = after.open()
    try:
        async with Engine(store, worker=False) as engine:
            for run in store.list_runs(RunQuery(limit=100)).runs:
                assert run.status.finished
                await (await engine.get(run.id)).checkpoints()  # verifies the chain
    finally:
        store.close()
    return [(effect.run, effect.step) for effect in recorder.effects() if effect.what == BODY]


async def cut_everywhere(example, place):
    """Every cut, and the steps that ran again although they had been acknowledged."""
    clock, number, repeated = Machine(), 0, []
    disk = await first_life(example, place, clock)
    for at, durable, files in cuts(disk):
        number += 1
        bodies = await second_life(example, place / "after", clock, files)
        repeated += [(at, body) for body in bodies if body in durable]
    return number, repeated


#: Programs whose records are of kinds that others write, too; their crashes at every write are quick and stay.
SIMILAR = {"board", "building", "contended", "fan", "plain", "racing", "retried", "seldom", "sleeper"}


@pytest.mark.parametrize("example", [case(one, id=one.name, nightly=one.name in SIMILAR) for one in EXAMPLES])
def test_power_cut_at_any_moment_changes_nothing(example, place):
    number, repeated = asyncio.run(cut_everywhere(example, place))
    assert repeated == []
    assert number > 10


def moments_of(disk):
    """What a power cut can leave of a files store, before every sync: all pending lost, and a drawn part of it."""
    seen = set()
    for number, moment in disk.moments():
        if number < len(disk.journal) and disk.journal[number].what != "sync":
            continue
        for fate in (LOSE, Chance(number, sector=97)):
            left = faulty_files.tree(moment, fate)
            if repr(left) not in seen:
                seen.add(repr(left))
                yield {(run, step) for what, run, step in disk.marks(number) if what == DURABLE}, left


async def cut_files_everywhere(example, place):
    clock, repeated, number = Machine(), [], 0
    (place / "first").mkdir()
    disk = faulty_files.FaultyFiles(place / "first")
    recorder = remember(MarkingRecorder(place / "effects", disk))
    first = FilesDisk(place / "first" / "runs", clock, disk=disk)
    ended, result, _ = await live(first, example.play, None, recorder, clock=clock, linger_seconds=0.01)
    assert (ended, result) == (True, example.result)
    for durable, left in moments_of(disk):
        number += 1
        folder = place / str(number)
        faulty_files.write_tree(left, folder)
        clock.boots += 1
        recorder = remember(Recorder(folder / "effects"))
        after = FilesDisk(folder / "runs", clock, power_loss="may_lose_last")
        ended, result, _ = await live(after, example.play, None, recorder, clock=clock)
        assert (ended, result) == (True, example.result)
        repeated += [one for one in recorder.effects() if one.what == BODY and (one.run, one.step) in durable]
        store = after.open()
        async with Engine(store, worker=False) as engine:
            for run in store.list_runs(RunQuery(limit=100)).runs:
                assert run.status.finished
                await (await engine.get(run.id)).checkpoints()  # verifies the chain
        shutil.rmtree(folder)
    return number, repeated


#: A step of `contended` does not wait for its own signal. In files, unlike in one transaction, the power may go after
#: the step is recorded and before the signal is: a loss that no promise rules out.
ON_FILES = [one.name for one in EXAMPLES if "files" in one.stores and one.name != "contended"]


@pytest.mark.parametrize("name", cases(ON_FILES, quick=["sequence", "conversation", "continuing"]))
def test_power_cut_at_any_moment_changes_nothing_in_files(name, place):
    (example,) = (one for one in EXAMPLES if one.name == name)
    number, repeated = asyncio.run(cut_files_everywhere(example, place))
    assert repeated == []
    assert number > 10


def test_without_syncs_a_power_cut_repeats_finished_steps(place, monkeypatch):
    monkeypatch.setitem(POWER_LOSS, "loses_nothing", "OFF")
    (example,) = (one for one in EXAMPLES if one.name == "sequence")
    _, repeated = asyncio.run(cut_everywhere(example, place))
    assert repeated != []
