"""A damaged run keeps nobody from the others, whatever stands in any column of its rows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keepstep as ks
from keepstep.care.doctor import examine
from keepstep.errors import CheckpointCorrupt, KeepstepError
from keepstep.stores.files.names import run_folder
from keepstep.stores.files.text import sealed
from keepstep.workflows.definition import Workflow
from tests.postgres import empty_store, session_dsn

EXAMPLES = int(os.environ.get("KEEPSTEP_EXAMPLES", "0")) or 15
PROPERTY = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
SECONDS = 60.0


async def patient() -> object:
    return await ks.wait_for("answer")


PATIENT = Workflow(patient, name="fuzz patient")


@pytest.mark.parametrize(
    "column, value", [("status", "flying"), ("status", b"\xff"), ("status", 1e300), ("wakes", "{"), ("wakes", '["a')]
)
def test_signals_beside_one_to_a_damaged_run_arrive(tmp_path, column, value):
    path = tmp_path / "runs.db"

    async def main() -> None:
        async with ks.open(path, workflows=[PATIENT], worker=False) as engine:
            for name in ("damaged", "well"):
                await engine.start(PATIENT, run_id=name)
            damage = apsw.Connection(str(path))
            damage.execute(f"UPDATE keepstep_head SET {column} = ? WHERE run = 'damaged'", (value,))
            damage.close()
            sent = [engine.signal(name, "answer", 1) for name in ("well", "damaged", "well")]
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
            assert [type(one) for one in outcomes] == [type(None), CheckpointCorrupt, type(None)]
            page = await engine.list(status="queued")
            assert [run.id for run in page.runs] == ["well"]
            assert page.unreadable == ("damaged",)

    asyncio.run(main())


# -- any value in any column -------------------------------------------------------------------------------------------

#: The tables with rows of a run or of a worker, and how the damaged rows are named.
TABLES = {"run": "id", "head": "run", "checkpoint": "run", "signal": "run", "worker": "id"}
DAMAGED = {"run": "victim", "head": "victim", "checkpoint": "victim", "signal": "victim", "worker": "worker-gone"}

TEXTS = st.sampled_from(["", "x", "{", "[]", '["answer"]', "running", "set aside", "null", "1:a:b", "\U0001f600"])
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, 2**63 - 2, -(2**63)]), st.integers(-(2**63), 2**63 - 1)
)
FLOATS = st.sampled_from([0.0, -1.0, 1e300, -1e300, math.inf, -math.inf, 1e12, 2.3e11])
BLOBS = st.one_of(st.sampled_from([b"", b"{}", b"null", b"\xff", b'{"a": 1}']), st.binary(max_size=20))

POSTGRES_VALUES = {
    "text": st.one_of(TEXTS, st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)),
    "bigint": NUMBERS,
    "integer": st.integers(-(2**31), 2**31 - 1),
    "smallint": st.integers(-(2**15), 2**15 - 1),
    "timestamp with time zone": st.sampled_from(
        ["infinity", "-infinity", "4714-11-24 BC", "294276-12-31", "0001-01-01 00:00:00+14", "9999-12-31", "1970-01-01"]
    ),
    "double precision": st.one_of(FLOATS, st.just(math.nan)),
    "bytea": BLOBS,
    "ARRAY": st.sampled_from(["{}", "{NULL}", "{x}", "{{a,b},{c,d}}", '{"[\\"a\\",\\"b\\"]"}', "[5:5]={a}"]),
}
SQLITE_VALUES = st.one_of(
    TEXTS, st.text(st.characters(codec="utf-8"), max_size=20), NUMBERS, FLOATS, BLOBS, st.binary(max_size=8), st.none()
)


class Lab:
    """A store with a run that becomes the victim."""

    def __init__(self, url: str, keys: ks.Keys | None = None) -> None:
        self.url = url
        self.options: dict[str, Any] = {"keys": keys}
        if not url.startswith("postgres"):
            self.options["power_loss"] = "may_lose_last"

    async def fill(self, state: str) -> None:
        async with ks.open(self.url, workflows=[PATIENT], worker=False, **self.options) as engine:
            await engine.start(PATIENT, run_id="victim", tags={"a": "b"})
            await engine.signal("victim", "first")
            if state == "due":
                return
        async with ks.open(self.url, workflows=[PATIENT], **self.options) as engine:
            if state == "finished":
                await engine.signal("victim", "answer", 1)
                await (await engine.get("victim")).result(timeout=SECONDS)
                return
            victim = await engine.get("victim")
            while (await victim.info()).status != "waiting":  # noqa: ASYNC110 - it parks by itself
                await asyncio.sleep(0.01)

    async def live_on(self) -> None:
        """Everything that somebody may want of the others while the victim is there."""
        async with ks.open(self.url, workflows=[PATIENT], **self.options) as engine:
            well = await engine.start(PATIENT, run_id="well")
            other = await engine.start(PATIENT, run_id="other")
            sent = [engine.signal(name, "answer", 1) for name in ("well", "victim", "other")]
            outcomes = await asyncio.gather(*sent, return_exceptions=True)
            assert outcomes[0] is None
            assert outcomes[2] is None
            assert outcomes[1] is None or isinstance(outcomes[1], KeepstepError), outcomes[1]
            assert await well.result(timeout=SECONDS) == 1
            assert await other.result(timeout=SECONDS) == 1
            await self._look(engine)

    async def _look(self, engine: ks.Engine) -> None:
        for status in (None, "completed"):
            listed: set[str] = set()
            after = None
            for _ in range(10):
                page = await engine.list(status=status, limit=1, after=after)
                listed |= {run.id for run in page.runs}
                after = page.next
                if after is None:
                    break
            assert {"well", "other"} <= listed
        await engine.care.verify()
        await examine(engine)
        await engine.call(engine.store.check)
        await engine.call(engine.store.list_workers)
        with contextlib.suppress(KeepstepError):
            await (await engine.get("victim")).info()


STATES = ("due", "waiting", "finished")


@pytest.fixture(scope="module", params=STATES)
def filled_database(request):
    """The path of a SQLite store whose run is in one of the states, to be copied."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.db")
        asyncio.run(Lab(f"sqlite:///{path}").fill(request.param))
        yield path


@pytest.fixture(scope="module", params=STATES)
def filled_schema(request):
    """The URL of a PostgreSQL store whose run is in one of the states, and what puts it there again."""
    with empty_store("_damaged") as url, psycopg.connect(session_dsn(), autocommit=True) as connection:
        schema = url.rpartition("schema=")[2]
        asyncio.run(Lab(url).fill(request.param))
        for table in TABLES:
            connection.execute(f"CREATE TEMPORARY TABLE saved_{table} AS TABLE {schema}.keepstep_{table}")

        def restore() -> None:
            for table in TABLES:
                kept = f"{schema}.keepstep_{table}"
                connection.execute(f"DELETE FROM {kept}; INSERT INTO {kept} SELECT * FROM saved_{table}")

        yield url, restore


@PROPERTY
@given(data=st.data())
def test_any_value_in_a_row_of_postgresql_harms_no_other_run(filled_schema, data):
    url, restore = filled_schema
    schema = url.rpartition("schema=")[2]
    restore()
    with psycopg.connect(session_dsn(), autocommit=True) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns"
            " WHERE table_schema = %s AND table_name LIKE 'keepstep\\_%%' ORDER BY 1, 2",
            (schema,),
        ).fetchall()
        able = [one for one in columns if one[0].removeprefix("keepstep_") in TABLES]
        table, column, kind, nullable = data.draw(st.sampled_from(able))
        name = table.removeprefix("keepstep_")
        values = POSTGRES_VALUES[kind]
        value = data.draw(values | st.none() if nullable == "YES" else values)
        if name == "worker":
            connection.execute(
                f"INSERT INTO {schema}.keepstep_worker VALUES ('worker-gone', 'host', 1, now(), now(), 'server', 0, '',"
                " '{}', NULL, NULL)"
            )
        with contextlib.suppress(psycopg.IntegrityError):  # there is another row with that key
            connection.execute(
                f"UPDATE {schema}.{table} SET {column} = %s::{'text[]' if kind == 'ARRAY' else kind}"
                f" WHERE {TABLES[name]} = %s",
                (value, DAMAGED[name]),
            )
        asyncio.run(Lab(url).live_on())


@PROPERTY
@given(data=st.data())
def test_any_value_in_a_row_of_sqlite_harms_no_other_run(filled_database, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.db")
        shutil.copy(filled_database, path)
        damage = apsw.Connection(str(path))
        table = data.draw(st.sampled_from(sorted(TABLES)))
        columns = [row[1] for row in damage.execute(f"PRAGMA table_info(keepstep_{table})")]
        column = data.draw(st.sampled_from(columns))
        value = data.draw(SQLITE_VALUES)
        as_text = isinstance(value, bytes) and data.draw(st.booleans())  # text that is no UTF-8
        if table == "worker":
            damage.execute(
                "INSERT INTO keepstep_worker (id, host, pid, started_at, renewed_at, boot, boot_seconds, workflows,"
                " progress) VALUES ('worker-gone', 'host', 1, 0.0, 0.0, 'boot', 0.0, '', '{}')"
            )
        with contextlib.suppress(apsw.ConstraintError, apsw.MismatchError):  # the column does not take it
            damage.execute(
                f"UPDATE keepstep_{table} SET {column} = {'CAST(? AS TEXT)' if as_text else '?'}"
                f" WHERE {TABLES[table]} = ?",
                (value, DAMAGED[table]),
            )
        damage.close()
        asyncio.run(Lab(f"sqlite:///{path}").live_on())


# -- any value in any field of a file ----------------------------------------------------------------------------------

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, FLOATS.filter(math.isfinite), TEXTS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["", "a", "run", "kind"]), inner),
    max_leaves=4,
)

#: Fields that an entry may have, and those of a short run have not.
ABSENT = {("parts",), ("body",), ("outbox",), ("kind",), ("checkpoint_text",), ("head", "outcome"), ("head", "deleted")}


@pytest.fixture(scope="module", params=STATES)
def filled_folder(request):
    """The path of a files store whose run is in one of the states, to be copied."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs")
        asyncio.run(Lab(f"files:{path}").fill(request.param))
        yield path


def fields_in(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a JSON value has a field, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*place, key)
        yield from fields_in(inner, (*place, key))


def with_field(value: Any, place: tuple[str | int, ...], new: object) -> Any:
    """The JSON value with another one at a place; without what is there if that is `...`."""
    key, *rest = place
    if rest:
        value[key] = with_field(value[key], tuple(rest), new)
    elif new is ...:
        value.pop(key, None) if isinstance(value, dict) else value.pop(key)
    else:
        value[key] = new
    return value


@PROPERTY
@given(data=st.data())
def test_any_value_in_an_entry_of_a_files_store_harms_no_other_run(filled_folder, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs")
        shutil.copytree(filled_folder, path)
        if data.draw(st.booleans(), label="without an index"):
            shutil.rmtree(path / "index")
        entry = data.draw(st.sampled_from(sorted((path / run_folder("victim")).glob("*.json"))))
        fields = json.loads(entry.read_bytes())
        seal = fields.pop("seal")
        places = {*fields_in(fields), *(one for one in ABSENT if len(one) == 1 or one[0] in fields)}
        place = data.draw(st.sampled_from(sorted(places, key=repr)))
        fields = with_field(fields, place, data.draw(JSON | st.just(...)))
        is_sealed = data.draw(st.booleans(), label="sealed anew")
        entry.write_bytes(sealed(fields) if is_sealed else json.dumps({**fields, "seal": seal}).encode())
        asyncio.run(Lab(f"files:{path}").live_on())


# -- encrypted stores --------------------------------------------------------------------------------------------------

KEYS = ks.Keys("fuzz", {"fuzz": b"k" * 32})
#: Where an encrypted store keeps data keys and ciphertexts, by table.
HIDDEN = {"run": ("data_key", "input"), "checkpoint": ("record", "body"), "signal": ("payload",)}


@pytest.fixture(scope="module", params=STATES)
def filled_encrypted(request):
    """The path of an encrypted SQLite store whose run is in one of the states, to be copied."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.db")
        asyncio.run(Lab(f"sqlite:///{path}", KEYS).fill(request.param))
        yield path


def altered(data: st.DataObject, stored: Any) -> Any:
    """Another value in place of a stored one: any, or the same with one character changed or its end cut off."""
    if not stored or data.draw(st.booleans()):
        wrapped = st.sampled_from(["1:fuzz:", "1:other:AAAA", "1:fuzz:" + "A" * 80, "2:fuzz:AAAA", ":::"])
        return data.draw(wrapped | SQLITE_VALUES)
    at = data.draw(st.integers(0, len(stored) - 1))
    if data.draw(st.booleans()):
        return stored[:at]
    other = "A" if isinstance(stored, str) else b"A"
    return stored[:at] + other + stored[at + 1 :]


@PROPERTY
@given(data=st.data())
def test_damaged_data_key_or_ciphertext_harms_no_other_run(filled_encrypted, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.db")
        shutil.copy(filled_encrypted, path)
        damage = apsw.Connection(str(path))
        table = data.draw(st.sampled_from(sorted(HIDDEN)))
        column = data.draw(st.sampled_from(HIDDEN[table]))
        where = f"keepstep_{table} WHERE {TABLES[table]} = 'victim'"
        for rowid, stored in damage.execute(f"SELECT rowid, {column} FROM {where}").fetchall():
            with contextlib.suppress(apsw.ConstraintError):
                damage.execute(
                    f"UPDATE keepstep_{table} SET {column} = ? WHERE rowid = ?", (altered(data, stored), rowid)
                )
        damage.close()
        asyncio.run(Lab(f"sqlite:///{path}", KEYS).live_on())
