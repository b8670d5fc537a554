"""Any damage to any stored thing is found or does no harm: no wrong result, no crash loop, and the neighbours go on.

Bits flip, texts are cut, rows and files vanish or change places. `KEEPSTEP_EXAMPLES` sets how many are tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import tempfile
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path

import apsw
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.care.verify import verify
from keepstep.errors import StoreError
from keepstep.model import FINISHED, Status, WorkerInfo
from keepstep.stores.open import open_store
from tests.care.stored import STORES, TOTAL, WORKFLOWS, contents, everything, filled
from tests.postgres import session_dsn, store_url

EXAMPLES = int(os.environ.get("KEEPSTEP_EXAMPLES", "30"))
#: What each run gives in the end.
RESULTS = {
    "done": 6,
    "neighbour": 4,
    "waits": [10, {"yes": True}, "end"],
    "large": [150_000, {"yes": True}, "end"],
    "later": 9,
    "parent": 3,
    "graph": {"words": [0, 1, 2, 3], "last": "end", "told": [0, 1, 2, 3, "end"]},
}
#: What of a head is in no chain, because it changes too often: damage to it delays or hastens, and changes no result.
UNSEALED = {
    "due_at": None,
    "wakes": (),
    "recoveries": 0,
    "updated_at": None,
    "epoch": 0,
    "worker": None,
    "progress": None,
    "priority": 0,
}


# -- damage ------------------------------------------------------------------------------------------------------------

TABLES = {
    "keepstep_run": "id",
    "keepstep_head": "run",
    "keepstep_checkpoint": "rowid",
    "keepstep_signal": "position",
    "keepstep_worker": "id",
}


def flipped(value, place):
    """The value with one bit turned, and its type."""
    if isinstance(value, int):
        return value ^ (1 << place % 62)
    if isinstance(value, float):
        data = flipped(struct.pack(">d", value), place)
        return struct.unpack(">d", data)[0]
    data = bytearray(value.encode() if isinstance(value, str) else value)
    data[place // 8 % len(data)] ^= 1 << place % 8
    return bytes(data)


def damage_sqlite(folder, draw):
    """Change one cell, or remove or exchange rows, as a bad disk or a careless hand would; what was done."""
    database = apsw.Connection(str(folder / "runs.db"))
    table = draw(st.sampled_from(sorted(TABLES)))
    key = TABLES[table]
    names = [name for (name,) in database.execute("SELECT name FROM pragma_table_info(?)", (table,)) if name != key]
    keys = [found for (found,) in database.execute(f"SELECT {key} FROM {table} ORDER BY 1")]
    row = draw(st.sampled_from(keys))
    column = draw(st.sampled_from(names))
    act = draw(st.sampled_from(["flip", "flip", "flip", "cut", "remove", "exchange"]))
    place = draw(st.integers(0, 5000))
    [(value,)] = database.execute(f"SELECT {column} FROM {table} WHERE {key} = ?", (row,)).fetchall()
    update = f"UPDATE {table} SET {column} = ? WHERE {key} = ?"
    told = f"{act} {table}.{column} of {row} at {place}: {value!r:.60}"
    with contextlib.suppress(apsw.ConstraintError):
        if act == "remove":
            database.execute(f"DELETE FROM {table} WHERE {key} = ?", (row,))
        elif act == "exchange":
            other = draw(st.sampled_from(keys))
            [(theirs,)] = database.execute(f"SELECT {column} FROM {table} WHERE {key} = ?", (other,)).fetchall()
            database.execute(update, (theirs, row))
            database.execute(update, (value, other))
        elif isinstance(value, (str, bytes)) and act == "cut":
            database.execute(update, (value[: place % (len(value) + 1)], row))
        elif value not in (None, "", b""):
            turned = flipped(value, place)
            database.execute(update.replace("?", "CAST(? AS TEXT)", isinstance(value, str)), (turned, row))
    database.close()
    return told


def damage_files(folder, draw):
    """Change one file, or remove it, or exchange two."""
    files = sorted(one for one in (folder / "runs").rglob("*") if one.is_file() and one.stat().st_size)
    one = draw(st.sampled_from(files))
    act = draw(st.sampled_from(["flip", "flip", "cut", "remove", "exchange"]))
    place = draw(st.integers(0, 20_000))
    data = one.read_bytes()
    if act == "flip":
        one.write_bytes(flipped(data, place))
    elif act == "cut":
        one.write_bytes(data[: place % len(data)])
    elif act == "remove":
        one.unlink()
    else:
        other = draw(st.sampled_from([each for each in files if each.parent == one.parent]))
        one.write_bytes(other.read_bytes())
        other.write_bytes(data)
    return f"{act} {one.relative_to(folder)} at {place}"


#: The rows of each table in PostgreSQL, in the same order each time.
ROWS = {
    "keepstep_run": "id",
    "keepstep_head": "run",
    "keepstep_checkpoint": "run, seq",
    "keepstep_signal": "run, seq",
    "keepstep_worker": "id",
}
_REFUSED = (psycopg.errors.IntegrityError, psycopg.errors.DataError, psycopg.errors.ProgrammingError)


def damage_postgres(schema, draw):
    """As in SQLite, as far as the server lets a hand do it; keys are no exception, and a value may become nothing."""
    with psycopg.connect(session_dsn()) as database:
        database.execute(f"SET search_path TO {schema}")
        table = draw(st.sampled_from(sorted(ROWS)))
        cursor = database.execute(f"SELECT ctid, t.* FROM {table} t ORDER BY {ROWS[table]}")
        column = draw(st.integers(1, len(cursor.description) - 1))
        rows = cursor.fetchall()
        row, other = draw(st.sampled_from(rows)), draw(st.sampled_from(rows))
        act = draw(st.sampled_from(["flip", "flip", "flip", "cut", "remove", "exchange", "exchange rows", "nothing"]))
        place = draw(st.integers(0, 5000))
        names, value = [one.name for one in cursor.description], row[column]
        told = f"{act} {table}.{names[column]} of {row[1:3]} at {place}: {value!r:.60}"

        def put(ctid, changes):
            sets = ", ".join(f"{name} = %s" for name in changes)
            database.execute(f"UPDATE {table} SET {sets} WHERE ctid = %s", (*changes.values(), ctid))

        with contextlib.suppress(*_REFUSED), database.transaction():
            if act == "remove":
                database.execute(f"DELETE FROM {table} WHERE ctid = %s", (row[0],))
            elif act.startswith("exchange"):
                keys = ROWS[table].split(", ")
                some = [names[column]] if act == "exchange" else [one for one in names[1:] if one not in keys]
                put(row[0], {name: other[names.index(name)] for name in some})
                put(other[0], {name: row[names.index(name)] for name in some})
            elif act == "nothing":
                put(row[0], {names[column]: None})
            elif isinstance(value, (str, bytes)) and act == "cut":
                put(row[0], {names[column]: value[: place % (len(value) + 1)]})
            elif value not in (None, "", b"", []):
                put(row[0], {names[column]: otherwise(value, place)})
    return told


def otherwise(value, place):
    """A value of the same sort that the server may take for it."""
    if isinstance(value, datetime):
        return value + timedelta(microseconds=flipped(0, place % 50))
    if isinstance(value, list):
        return [*value[:-1], otherwise(value[-1], place)]
    turned = flipped(value, place)
    return turned.decode(errors="replace").replace("\0", "?") if isinstance(value, str) else turned


DAMAGE = {"sqlite": damage_sqlite, "files": damage_files, "postgres": damage_postgres}


# -- what must hold ----------------------------------------------------------------------------------------------------


@cache
def whole(kind):
    """A folder with a sound store, made once."""
    folder = Path(tempfile.mkdtemp(prefix="keepstep-care-"))
    with_ghosts(STORES[kind](folder)).close()
    return folder


def with_ghosts(store):
    """The store with runs of every sort, and workers that died without a word."""
    filled(store)
    for name in ("ghost", "other-ghost"):
        store.renew_leases(WorkerInfo(name, host="here", pid=1, workflows=("care total",), progress={"done": b"1"}))
    assert verify(store).sound
    return store


@contextlib.contextmanager
def damaged(kind, draw):
    """A store that something was done to, and what; no store, if that is found when it is opened."""
    with tempfile.TemporaryDirectory(prefix="keepstep-care-") as name:
        folder = Path(name) / "store"
        if kind == "postgres":
            with_ghosts(STORES[kind](folder)).close()
            told = damage_postgres(postgres_schema(), draw)
        else:
            shutil.copytree(whole(kind), folder)
            told = DAMAGE[kind](folder, draw)
        try:
            store = open_store(store_url(postgres_schema())) if kind == "postgres" else STORES[kind](folder)
        except StoreError:
            store = None
        with contextlib.closing(store) if store else contextlib.nullcontext():
            yield store, told


def postgres_schema():
    return f"keepstep_test_{os.getpid()}_care"


def sealed(store):
    """What a store holds, without what no chain holds."""
    return {name: (replace(run, **UNSEALED), rows, signals) for name, (run, rows, signals) in everything(store).items()}


@cache
def right(kind):
    with contextlib.closing(STORES[kind](Path("care")) if kind == "postgres" else STORES[kind](whole(kind))) as store:
        return sealed(with_ghosts(store) if kind == "postgres" else store)


async def drive(store):
    """Let a worker live with the damage: new runs come to their end, and no run is taken up again and again."""
    async with ks.Engine(store, workflows=WORKFLOWS, linger_seconds=0.01) as engine:
        before = {run.id: run.epoch for run in (await engine.list(limit=1000)).runs}
        for name, signal in (("waits", "last"), ("large", "last"), ("graph", "last"), ("parent", "go")):
            with contextlib.suppress(ks.KeepstepError):
                await engine.signal(name, signal, "end")
        for number in range(3):
            assert await (await engine.start(TOTAL, number)).result(60) == number
        await settled(engine)
        page = await engine.list(limit=1000)
        results = {name: await end_of(engine, name) for name in RESULTS}
    assert all(run.epoch - before.get(run.id, run.epoch) <= 4 for run in page.runs), "a run is taken up again and again"
    return results


async def settled(engine):
    """Come back when nothing is driven or due any more."""
    unfinished, before, still = frozenset(Status) - FINISHED, None, 0
    while still < 15:  # what is due and not taken for longer than a worker looks is damaged
        now = engine.clock.now()
        runs = (await engine.list(status=unfinished, limit=1000)).runs
        if not [run for run in runs if run.worker or (run.due_at is not None and run.due_at.timestamp() <= now)]:
            return
        still = still + 1 if runs == before and not any(run.worker for run in runs) else 0
        before = runs
        await engine.changed(0.02)


async def end_of(engine, name):
    try:
        handle = await engine.get(name)
        if await handle.status() not in FINISHED | {Status.SET_ASIDE}:
            return None
        return await handle.result(60)
    except ks.KeepstepError:
        return None


def found_or_harmless(kind, data):
    right(kind)
    with damaged(kind, data.draw) as (store, told):
        if store is None:
            return  # found at the door
        if verify(store).sound:
            assert sealed(store) == right(kind), f"not found: {told}"
        for run_id, result in asyncio.run(drive(store)).items():
            assert result in (None, RESULTS[run_id]), f"a wrong result of {run_id}: {told}"


@pytest.mark.parametrize("kind", ["sqlite", "files"])
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=EXAMPLES < 100)
@given(data=st.data())
def test_damage_is_found_or_does_no_harm(kind, data):
    found_or_harmless(kind, data)


@settings(max_examples=(EXAMPLES + 1) // 2, deadline=None, derandomize=EXAMPLES < 100)
@given(data=st.data())
def test_damage_in_postgres_is_found_or_does_no_harm(data):
    found_or_harmless("postgres", data)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE keepstep_head SET signals = 0 WHERE run = 'waits'",
        "UPDATE keepstep_checkpoint SET run = 'waits', seq = 4 WHERE run = 'large' AND seq = 3",
    ],
    ids=["too few signals", "a record beyond its head"],
)
def test_rows_beyond_a_head_in_postgres_hold_up_no_other_run(damage):
    with_ghosts(STORES["postgres"](Path("care"))).close()
    with psycopg.connect(session_dsn(), autocommit=True) as database:
        database.execute(f"SET search_path TO {postgres_schema()}")
        database.execute(damage)
    with contextlib.closing(open_store(store_url(postgres_schema()))) as store:
        assert not verify(store).sound
        results = asyncio.run(drive(store))
        assert results["waits"] in (None, RESULTS["waits"])
        assert {name: results[name] for name in ("graph", "parent")} == {
            name: RESULTS[name] for name in ("graph", "parent")
        }


def test_undamaged_runs_give_their_results():
    """Or the test above would hold for want of anything to damage."""
    assert {run.id for run, _, _ in contents()} >= set(RESULTS)
    assert asyncio.run(drive(filled(STORES["memory"](None)))) == {**RESULTS, "later": None}


#: Damage that chance meets rarely, and that once kept neighbours from being written, or a run from being set aside.
RARE = {
    "a head that is behind its records": "UPDATE keepstep_head SET seq = 2 WHERE run = 'waits'",
    "a head that counts too few signals": "UPDATE keepstep_head SET signals = 0 WHERE run = 'waits'",
    "a run of another workflow than its head": "UPDATE keepstep_run SET workflow = 'other' WHERE id = 'waits'",
    "a head of another workflow than its run": "UPDATE keepstep_head SET workflow = 'care total' WHERE run = 'waits'",
    "records of a run that is gone": "DELETE FROM keepstep_run WHERE id = 'waits'",
    "records of a run that is gone, and its head": "DELETE FROM keepstep_run WHERE id = 'waits';"
    " DELETE FROM keepstep_head WHERE run = 'waits'",
}


@pytest.mark.parametrize("what", RARE)
def test_rare_damage_holds_up_no_other_run(what, tmp_path):
    folder = tmp_path / "store"
    shutil.copytree(whole("sqlite"), folder)
    database = apsw.Connection(str(folder / "runs.db"))
    database.execute(RARE[what])
    database.execute("UPDATE keepstep_head SET due_at = 1.0 WHERE run = 'waits'")
    database.close()
    store = STORES["sqlite"](folder)
    assert not verify(store).sound

    async def start_it_again():
        async with ks.Engine(store, workflows=WORKFLOWS, linger_seconds=0.01) as engine:
            started = [engine.start(TOTAL, 1), engine.start("care patient", 10, run_id="waits"), engine.start(TOTAL, 2)]
            return await asyncio.gather(*started, return_exceptions=True)

    first, again, second = asyncio.run(start_it_again())
    assert isinstance(again, (StoreError, ks.RunConflict, ks.RunHandle)), again
    assert isinstance(first, ks.RunHandle)
    assert isinstance(second, ks.RunHandle)
    results = asyncio.run(drive(store))
    assert results["waits"] in (None, RESULTS["waits"])
    assert {name: results[name] for name in ("done", "neighbour", "large", "parent")} == {
        name: RESULTS[name] for name in ("done", "neighbour", "large", "parent")
    }
    store.close()
