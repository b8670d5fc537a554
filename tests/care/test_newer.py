"""Runs that a newer Keepstep has gone on with: refused with what to do, never cut, never taken for damage."""

from __future__ import annotations

import contextlib
from functools import partial
from hashlib import sha256

import msgspec
import pytest

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.care.repair import accept_loss, assess
from keepstep.care.verify import verify
from keepstep.engine import worker
from keepstep.errors import SchemaMismatch
from keepstep.model import RunQuery, Signal, Status
from keepstep.ports import Row, Send
from keepstep.records import record
from keepstep.records.record import FORMAT, NEWEST_FORMAT
from keepstep.stores.files import entry as files_entry
from keepstep.stores.files.store import FilesStore
from tests.care.stored import contents, driven, everything, filled, tampered
from tests.care.test_verify import edited

NEWER = f"has format {NEWEST_FORMAT + 1}, newer than {NEWEST_FORMAT}; upgrade Keepstep"


def newer(rows, kept, **fields):
    """The rows as a newer Keepstep would have written those after the first few, and the checksum of the last."""
    done, checksum = list(rows[:kept]), sha256(rows[kept - 1].record + (rows[kept - 1].body or b"")).hexdigest()
    for row in rows[kept:]:
        record = {**msgspec.json.decode(row.record), **fields, "format": NEWEST_FORMAT + 1, "previous": checksum}
        text = msgspec.json.encode(record)
        checksum = sha256(text + (row.body or b"")).hexdigest()
        done.append(Row(row.seq, row.kind, text, row.body))
    return done, checksum


def gone_on_with(store, run_id, kept=2, **fields):
    rows, checksum = newer(list(store.list_checkpoints(run_id)), kept, **fields)
    tampered(store, run_id, rows=lambda _: rows, checksum=checksum)


async def put_back(engine, run_id):
    """The moment when a worker has met a run that it cannot read, and has left it to others."""
    handle = await engine.get(run_id)
    while (run := await handle.run()).status != "queued" or run.due_at.timestamp() <= engine.clock.now():
        await engine.changed(0.02)
    return run


# A newer format may also say things that this one cannot even decode.
@pytest.mark.parametrize("fields", [{}, {"attempt": "first"}], ids=["readable", "strange"])
def test_a_record_of_a_newer_format_is_refused_with_what_to_do(store, fields):
    gone_on_with(store, "done", **fields)
    gone_on_with(store, "waits", **fields)
    before = everything(store)
    found = verify(store)
    assert {name: NEWER in problems[0] for name, problems in found.damaged.items()} == {"done": True, "waits": True}

    async def ask(engine):
        with pytest.raises(SchemaMismatch, match="upgrade Keepstep"):
            await (await engine.get("done")).result()
        handle = await engine.get("waits")
        await handle.signal("last", "end")
        await put_back(engine, "waits")
        return await (await engine.start("care total", 1, run_id="beside")).result()

    assert driven(store, ask) == 1, "the neighbours go on"
    assert everything(store)["done"] == before["done"]
    assert everything(store)["waits"][1] == before["waits"][1], "nothing is added to what the newer one wrote"


def test_old_workers_leave_runs_of_newer_ones_to_them(store, monkeypatch, caplog):
    monkeypatch.setattr(worker, "NEWER_SECONDS", 0.4)
    for name in ("waits", "large"):
        gone_on_with(store, name)

    async def old_worker(engine):
        for name in ("waits", "large"):
            await (await engine.get(name)).signal("last", "end")
            run = await put_back(engine, name)
            assert (run.recoveries, run.worker, run.error) == (0, None, None)
        found = (await examine(engine)).findings
        assert {run for one in found if one.code == "newer" for run in one.runs} == {"waits", "large"}

    driven(store, old_worker)
    told = [one.getMessage() for one in caplog.records if "left to other workers" in one.getMessage()]
    assert len(told) == 1
    monkeypatch.setattr(record, "NEWEST_FORMAT", NEWEST_FORMAT + 1)

    async def new_worker(engine):
        return [await (await engine.get(name)).result(60) for name in ("waits", "large")]

    assert len(driven(store, new_worker)) == 2


def test_a_run_with_a_damaged_number_is_set_aside(store):
    tampered(store, "waits", rows=edited(2, f'"format":{FORMAT}'.encode(), f'"format":{NEWEST_FORMAT + 1}'.encode()))

    async def ask(engine):
        handle = await engine.get("waits")
        await handle.signal("last", "end")
        with pytest.raises(ks.RunSetAside):
            await handle.result(60)

    driven(store, ask)


def test_record_of_a_newer_version_is_never_accepted_as_lost(store, tmp_path):
    gone_on_with(store, "done", kept=len(store.list_checkpoints("done")) - 1)
    gone_on_with(store, "waits")
    before = everything(store)
    for run_id in ("done", "waits"):
        with pytest.raises(SchemaMismatch, match="newer"):
            assess(store, run_id)
        with pytest.raises(SchemaMismatch, match="newer"):
            accept_loss(store, run_id, str(tmp_path / "aside.jsonl"), actor="ann")
    assert everything(store) == before
    assert not (tmp_path / "aside.jsonl").exists()


def test_a_damaged_number_is_no_newer_format(store):
    tampered(store, "done", rows=edited(2, f'"format":{FORMAT}'.encode(), f'"format":{NEWEST_FORMAT + 1}'.encode()))
    assert assess(store, "done").kept == 2


def test_doctor_distinguishes_newer_records_from_damage(store):
    gone_on_with(store, "waits")
    tampered(store, "large", status=Status.WAITING, wakes=(), due_at=None)

    async def look(engine):
        with contextlib.suppress(ks.RunError):
            return (await examine(engine, deep=True)).findings

    findings = driven(store, look, worker=False)
    told = {(one.code, *one.runs) for one in findings}
    assert ("newer", "waits") in told
    assert ("stalled", "large") in told
    assert not [one for one in findings if one.code in ("corrupt", "store")]
    assert all("upgrade Keepstep" in one.advice for one in findings if one.code == "newer")


def test_entry_of_a_newer_version_affects_its_run_alone(tmp_path, monkeypatch):
    path = tmp_path / "runs"
    store = filled(FilesStore(path, power_loss="may_lose_last"))
    with monkeypatch.context() as newer_one:
        newer_one.setattr(files_entry, "LAYOUT", files_entry.LAYOUT + 1)
        store.commit([Send(Signal("waits", "last"))])
    store.close()
    store = FilesStore(path, power_loss="may_lose_last")
    folder = next(path.glob("runs/*/waits"))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    page = store.list_runs(RunQuery(limit=100))
    assert (page.unreadable, len(page.runs)) == (("waits",), len(contents()) - 1)

    async def beside(engine):
        assert [one.code for one in (await examine(engine)).findings if "waits" in one.runs] == ["newer"]
        return await (await engine.start("care total", 1, run_id="beside")).result()

    assert driven(store, beside) == 1
    store.check(mend=True)
    for look in (store.get_run, partial(assess, store), partial(accept_loss, store, aside="x", actor="ann")):
        with pytest.raises(SchemaMismatch, match="newer than 1; upgrade Keepstep"):
            look("waits")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    store.close()
