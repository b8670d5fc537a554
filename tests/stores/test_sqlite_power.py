"""A SQLite store whose power is cut at every moment, and whose disk fails at every call."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import apsw
import pytest

from keepstep.errors import StoreError, StoreFull, StoreUnavailable
from keepstep.model import Kind, Signal, Status, WorkerInfo
from keepstep.ports import ClaimRequest, Create, Send, Verdict
from keepstep.records.record import unseal
from keepstep.stores.sqlite.store import POWER_LOSS, SQLiteStore
from keepstep.testing.faults.faulty_sqlite import EXTREMES, LOSE, SECTOR, Chance, FaultyDisk, image, write_image
from keepstep.testing.store_contract import Holder, SteppedClock, commit, everything, get, queued, record, started

pytestmark = pytest.mark.crash


@pytest.fixture(scope="module")
def folder():
    """In memory where there is such a place: that nothing is really synced makes no difference here."""
    memory = Path("/dev/shm")
    place = tempfile.mkdtemp(prefix="keepstep-", dir=memory if os.access(memory, os.W_OK) else None)
    yield Path(place)
    shutil.rmtree(place)


@pytest.fixture
def place(folder):
    """A new folder for one test."""
    return Path(tempfile.mkdtemp(dir=folder))


# -- what is done to the store -----------------------------------------------------------------------------------------


def holder(store, run):
    """Whoever holds the run, as it stands in the store."""
    return Holder(store, get(store, run))


def step(run, size=10, **fields):
    """Write a step's checkpoint, with whatever else belongs to that commit."""
    return lambda store: holder(store, run).write(record(run, value=b'"' + b"x" * size + b'"'), **fields)


def write_together(store):
    changes = [holder(store, run).change(record(run, value=b'"both"')) for run in ("a", "b")]
    assert [answer.verdict for answer in store.commit(changes)] == [Verdict.DONE] * 2


def send(run, name, identity=""):
    return lambda store: commit(store, Send(Signal(run, name, b"1", id=identity)))


def finish(run):
    def op(store):
        end = record(run, Kind.RUN_FINISHED, value=b'"done"')
        return holder(store, run).write(end, status=Status.COMPLETED, release=True)

    return op


def enrol(worker, **fields):
    return lambda store: store.renew_leases(WorkerInfo(worker, **fields))


def claim(worker):
    return lambda store: store.claim_runs(ClaimRequest(worker, frozenset(["digest"]), 1))


#: Each is one transaction.
SHORT = [
    enrol("w1"),
    lambda store: started(store, "a"),
    lambda store: started(store, "b"),
    step("a"),
    write_together,
    step("a", creates=[Create(queued("child"))], sends=[Send(Signal("b", "hello", b"1", id="1"))]),
    send("b", "go", "2"),
    step("b", status=Status.WAITING, release=True, wakes=("more",)),
    send("b", "more"),
    enrol("w2"),
    claim("w2"),
    step("a", size=20_000),
    finish("a"),
    lambda store: store.delete_runs(["a"]),
]
LONG = [
    *SHORT,
    enrol("w3"),
    lambda store: started(store, "c", "w3"),
    *[step("c", size=size) for size in (1, 5_000, 100, 40_000, 1, 1)],
    claim("w3"),
    send("c", "x", "3"),
    send("c", "x", "3"),
    finish("c"),
    enrol("w3", progress={"b": b"1"}),
]


class Life:
    """A store on a faulty disk, to which things are done one after the other."""

    def __init__(self, folder, disk, *, power_loss="loses_nothing"):
        self.path, self.disk, self.power_loss = folder / "runs.db", disk, power_loss
        self.clock = SteppedClock()
        self.store = None

    def open(self, *, checkpoint_pages=10):
        self.store = SQLiteStore(self.path, clock=self.clock, power_loss=self.power_loss)
        # Often enough to meet a power cut; the WAL starts again from its beginning in between.
        self.store._writer.connection.wal_autocheckpoint(checkpoint_pages)

    def close(self):
        if self.store is not None:
            self.store.close()
            self.store = None

    def checkpoint(self):
        """What SQLite does by itself after a commit, told nothing of its errors; ours would surface if it did."""
        with contextlib.suppress(apsw.Error):
            self.store._writer.connection.wal_checkpoint()

    def reopen(self):
        self.close()
        self.open()

    def contents(self):
        return contents(self.store)


def contents(store):
    """Every row of every table."""

    def read(cursor):
        tables = [name for (name,) in cursor.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()]
        return {name: sorted(cursor.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in sorted(tables)}

    return store._reader.read(read)


def recorded(folder, ops, **options):
    """A life in which nothing befalls; the disk with a mark after each thing done, and what the store held then."""
    with FaultyDisk(folder) as disk:
        life = Life(folder, disk, **options)
        life.open()
        states = [life.contents()]
        disk.mark(0)
        for number, op in enumerate(ops, 1):
            op(life.store)
            states.append(life.contents())
            disk.mark(number)
            if number in (len(SHORT) // 2, len(SHORT)):
                life.reopen()
        life.close()
    assert all(one != other for one, other in itertools.pairwise(states) if ops is SHORT)
    return disk, states


# -- what is left of it ------------------------------------------------------------------------------------------------


def look(files, folder):
    """What a store holds that is opened on what was left, or why it cannot be opened."""
    shutil.rmtree(folder, ignore_errors=True)
    write_image(files, folder)
    clock = SteppedClock()
    clock.boot_id = "after the cut"
    store = SQLiteStore(folder / "runs.db", clock=clock)
    try:
        assert store._reader.read(lambda cursor: cursor.execute("PRAGMA integrity_check").fetchall()) == [("ok",)]
        for run, rows, signals in everything(store).values():
            chain = list(unseal(rows, run.id, previous=""))
            assert (len(chain), chain[-1][1] if chain else "") == (run.seq, run.checksum)
            assert [signal.seq for signal in signals] == list(range(1, len(signals) + 1))
        return contents(store)
    finally:
        store.close()


def cuts(disk, draws):
    """Everything that a power cut can leave: the extremes at every moment, and as many drawn ones; each image once."""
    seen = set()
    for number, moment in disk.moments():
        fates = dict(EXTREMES)
        # Just before a sync most is uncertain.
        last = number == len(disk.journal) or disk.journal[number].what == "sync"
        for draw in range(draws * 4 if last else draws):
            fates[f"draw {draw}"] = Chance((number, draw), sector=(SECTOR, 4096)[draw % 2])
        for name, fate in fates.items():
            if not moment.uncertain and fate is not LOSE:
                continue
            files = image(moment, fate)
            key = (tuple(disk.marks(number)[-1:]), *files.items())
            if hash(key) not in seen:
                seen.add(hash(key))
                yield number, name, files


class Findings:
    """What the power cuts left: how many were looked at, where acknowledged work was missing, where more was wrong."""

    def __init__(self, disk, states, folder, *, draws):
        self.number, self.lost, self.broken = 0, [], []
        for place, fate, files in cuts(disk, draws):
            self.number += 1
            acknowledged = max(disk.marks(place), default=0)
            where = f"cut at {place}, {fate}, after {acknowledged} were acknowledged"
            try:
                found = look(files, folder)
            except (StoreError, AssertionError, apsw.Error) as error:
                self.broken.append(f"{where}: {type(error).__name__}: {error}")
            else:
                if found not in states[: acknowledged + 2]:
                    self.broken.append(f"{where}: nothing that ever was")
                elif found not in states[acknowledged : acknowledged + 2]:
                    self.lost.append(f"{where}: only {states.index(found)}")


@pytest.mark.parametrize("ops, draws", [pytest.param(SHORT, 2, id="short"), pytest.param(LONG, 0, id="long")])
def test_a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged(place, ops, draws):
    findings = Findings(*recorded(place, ops), place / "after", draws=draws)
    assert (findings.lost, findings.broken) == ([], [])
    assert findings.number > 250


def test_a_power_cut_loses_at_most_the_newest_where_that_was_chosen(place):
    findings = Findings(*recorded(place, SHORT, power_loss="may_lose_last"), place / "after", draws=2)
    assert findings.broken == []
    assert findings.lost, "or the weaker choice would not be weaker"


def test_without_syncs_power_cuts_lose_and_break_runs(place, monkeypatch):
    monkeypatch.setitem(POWER_LOSS, "loses_nothing", "OFF")
    findings = Findings(*recorded(place, SHORT), place / "after", draws=1)
    assert findings.lost
    assert findings.broken


# -- a disk that fails -------------------------------------------------------------------------------------------------


def endure(folder, ops, states, prepare):
    """Do everything in spite of one fault; what was not done is done again. How often something was refused."""
    refused = []
    with FaultyDisk(folder) as disk:
        life = Life(folder, disk)
        prepare(disk)
        for number, op in enumerate([None, *ops]):
            refused += attempt(life, number, op, states)
        disk.repair()
        assert life.contents() == states[-1]
        *_, (_, moment) = disk.moments()
        left = [image(moment, fate) for fate in (LOSE, Chance(0))]
        life.close()
    assert [look(files, folder / "after") for files in left] == [states[-1]] * 2
    return refused


def attempt(life, number, op, states):
    """Do one thing until it is done; how it was refused before."""
    refused = []
    for error in iter(lambda: refusal(life, op), None):
        refused.append(error)
        life.disk.repair()
        if op is not None and settled(life, number, states):
            assert error.unknown, f"{error}, it said, and yet it was done"
            break
    life.checkpoint()
    if refused:
        assert life.contents() == states[number]
    return refused


def refusal(life, op):
    """Do one thing, which is opening the store if it is None; the error, or None if there was none."""
    try:
        life.open(checkpoint_pages=0) if op is None else op(life.store)
    except (StoreFull, StoreUnavailable) as error:
        return error
    except apsw.Error as error:
        if op is None:  # closing what could not be opened tells more than a disk written in C could have told
            return error
        raise
    return None


def settled(life, number, states):
    """Whether a refused thing was done after all: wholly, or not at all."""
    found = life.contents()
    assert found in (states[number - 1], states[number]), "half-done"
    return found == states[number] and found != states[number - 1]


@pytest.fixture(scope="module")
def undisturbed(folder):
    with FaultyDisk(folder) as disk:
        life = Life(folder, disk)
        life.open(checkpoint_pages=0)
        states = [life.contents()]
        for op in SHORT:
            op(life.store)
            life.checkpoint()
            states.append(life.contents())
        calls = list(disk.calls)
        life.close()
    return states, calls


#: Of the many calls of one kind, every so manieth.
EVERY = {"read": 11, "write": 7, "sync": 1}

FAULTS = [
    pytest.param(fault, times, id=f"{fault}-{'once' if times == 1 else 'until repaired'}")
    for fault, times in (("io", 1), ("io", 1000), ("full", 1000), ("short", 1))
]


def test_a_first_heartbeat_that_could_not_be_written_is_made_again(place):
    with FaultyDisk(place) as disk:
        life = Life(place, disk)
        life.open()
        disk.fail_when(lambda _, call: "io" if call == "sync" else None)
        with pytest.raises(StoreUnavailable):
            life.store.renew_leases(WorkerInfo("w1"))
        disk.repair()
        assert life.store.renew_leases(WorkerInfo("w1")) is True
        life.close()


@pytest.mark.parametrize("fault, times", FAULTS)
def test_a_call_that_fails_is_refused_whole_and_can_be_made_again(place, undisturbed, fault, times):
    states, calls = undisturbed
    refusals = 0
    for number, call in enumerate(calls, 1):
        if (fault != "io" and call != "write") or number % (EVERY.get(call, 1) * (3 if times > 1 else 1)):
            continue
        new = place / str(number)
        new.mkdir()
        refused = endure(new, SHORT, states, lambda disk, n=number: disk.fail(n, fault, times))
        refusals += len(refused)
        if fault != "io":
            assert all(isinstance(error, (StoreFull, apsw.FullError)) for error in refused)
        shutil.rmtree(new)
    assert refusals > 10
