"""Flaws of a SQLite file and its tables, and their repair: rows that cannot be derived are put aside, not destroyed."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import apsw

from ...model import Flaw, RunPage, RunQuery, Status
from ...ports import Row, instant
from ..mending import MOST_FLAWS, REPEATED, Finding, findings, mended, new_head
from ..migrations import scripts
from .connection import Cursor, connect, translated
from .rows import read_run

#: Rounds of checking and repairing at most. A repaired index can reveal more flaws.
ROUNDS = 5

_REPEATED = ", ".join(REPEATED)
#: Ids are read as bytes, so that one that is not UTF-8 does not hide the others.
_WITHOUT_RUN = (
    "SELECT DISTINCT CAST(run AS BLOB) FROM {table} WHERE NOT EXISTS"
    " (SELECT 1 FROM keepstep_run WHERE id = {table}.run) LIMIT ?"
)
_WITHOUT_HEAD = (
    "SELECT CAST(id AS BLOB) FROM keepstep_run WHERE NOT EXISTS"
    " (SELECT 1 FROM keepstep_head WHERE run = keepstep_run.id) LIMIT ?"
)
_DIFFERING = (
    "SELECT CAST(r.id AS BLOB) FROM keepstep_run r JOIN keepstep_head h ON h.run = r.id WHERE "
    + " OR ".join(f"h.{name} IS NOT r.{name}" for name in REPEATED)
    + " LIMIT ?"
)
_MISCOUNTED = (
    "SELECT CAST(h.run AS BLOB), h.signals, count(*) FROM keepstep_head h JOIN keepstep_signal s ON s.run = h.run"
    " GROUP BY h.run HAVING count(*) > h.signals AND count(*) = max(s.seq) LIMIT ?"
)
_REPEAT = (
    f"UPDATE keepstep_head SET ({_REPEATED}) = (SELECT {_REPEATED} FROM keepstep_run WHERE id = keepstep_head.run)"
    " WHERE run = CAST(? AS TEXT)"
)
#: If the record after the first one is a whole state, those between were removed on purpose; so were earlier signals.
_PUT_HEAD = (
    f"INSERT INTO keepstep_head (run, {_REPEATED}, status, seq, checksum, epoch, wakes, signals, recoveries,"
    f" updated_at, signals_read, kept_from, signals_from) SELECT id, {_REPEATED}, ?, ?, ?, ?, '',"
    " coalesce(s.last, 0), 0, ?, coalesce(s.last, 0),"
    " coalesce((SELECT iif(seq > 2 AND kind IN ('consolidated state', 'kept state'), seq, 0)"
    " FROM keepstep_checkpoint WHERE run = ?6 AND seq > 1 ORDER BY seq LIMIT 1), 0),"
    " iif(s.first > 1, s.first, 0) FROM keepstep_run,"
    " (SELECT min(seq) AS first, max(seq) AS last FROM keepstep_signal WHERE run = ?6) s WHERE id = ?6"
)


_READABLE_TAGS = "json_each(iif(json_valid(r.tags), r.tags, '{}')) t"
#: Whether a run has a tag that the table of tags lacks, or the other way round.
_OTHER_TAGS = (
    f"SELECT 1 FROM keepstep_run r, {_READABLE_TAGS} WHERE r.tags <> '' AND t.type = 'text' AND NOT EXISTS"
    " (SELECT 1 FROM keepstep_tag g WHERE g.name = t.key AND g.value = t.value AND g.number = r.number)"
    " UNION ALL SELECT 1 FROM keepstep_tag g WHERE NOT EXISTS"
    f" (SELECT 1 FROM keepstep_run r, {_READABLE_TAGS} WHERE r.number = g.number AND t.key = g.name"
    " AND t.value = g.value) LIMIT 1"
)
_PUT_TAGS = (
    f"INSERT OR IGNORE INTO keepstep_tag SELECT t.key, t.value, r.number FROM keepstep_run r, {_READABLE_TAGS}"
    " WHERE r.tags <> ''"
)


def look_into(path: str, busy_seconds: float) -> list[Finding]:
    """Return every inconsistency. Uses its own connection, because it may take long."""
    connection = connect(path, synchronous="FULL", busy_seconds=busy_seconds)
    try:
        return _findings(connection)
    except (apsw.Error, UnicodeDecodeError) as error:
        raise translated(error, path) from error
    finally:
        connection.close()


def mend_all(
    path: str,
    busy_seconds: float,
    list_runs: Callable[[RunQuery], RunPage],
    mend: Callable[[list[Finding]], list[Flaw]],
) -> list[Flaw]:
    """Repair the store and check it again: an index that has lost entries hides flaws until it is rebuilt."""
    reported: dict[tuple[str, str], Flaw] = {}
    for _ in range(ROUNDS):
        found = look_into(path, busy_seconds)
        named = {one.flaw.about for one in found}
        found += [_unreadable_head(name) for name in _unreadable(list_runs) if name not in named]
        fresh = [one for one in found if (one.flaw.kind, one.flaw.about) not in reported]
        if not fresh:
            break
        reported |= {(flaw.kind, flaw.about): flaw for flaw in mend(fresh)}
    return list(reported.values())


def _unreadable(list_runs: Callable[[RunQuery], RunPage]) -> list[str]:
    """Return the runs that have a head but cannot be read."""
    found: list[str] = []
    query = RunQuery(status=frozenset(Status), limit=200, system=True)
    while True:
        page = list_runs(query)
        found += page.unreadable
        if page.next is None:
            return found
        query = replace(query, after=page.next)


def _findings(connection: apsw.Connection) -> list[Finding]:
    found = [*_missing_parts(connection)]
    if any(one.flaw.kind == "integrity" for one in found):
        return found
    cursor: Cursor = connection.cursor()
    return [*found, *_integrity(cursor), *_tags(cursor), *findings(Tables(cursor, 0.0))]


def _missing_parts(connection: apsw.Connection) -> Iterable[Finding]:
    """Yield missing tables, indexes and triggers."""
    model = apsw.Connection(":memory:")
    for script in scripts("sqlite"):
        model.execute(script.sql).fetchall()
    wanted = model.execute("SELECT name, type, sql FROM sqlite_schema WHERE name LIKE 'keepstep_%'").fetchall()
    model.close()
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    for name, kind, sql in ((str(one[0]), one[1], one[2]) for one in wanted):
        if name in there:
            continue
        if kind in ("index", "trigger"):
            yield Finding(Flaw("index", name, f"the {kind} {name} is gone"), partial(_make_again, str(sql)))
        else:
            yield Finding(Flaw("integrity", name, f"the table {name} is missing"))


def _integrity(cursor: Cursor) -> Iterable[Finding]:
    problems = [text for (text,) in cursor.execute(f"PRAGMA integrity_check({MOST_FLAWS})").fetchall() if text != "ok"]
    for text in problems:
        about = str(text).rpartition(" ")[2]
        if "index keepstep_" in text:
            yield Finding(Flaw("index", about, f"an index does not fit its table: {text}"), _reindex)
        else:
            yield Finding(Flaw("integrity", about, f"the file is damaged: {text}"))


def _tags(cursor: Cursor) -> Iterable[Finding]:
    if cursor.execute(_OTHER_TAGS).fetchall():
        what = "the table keepstep_tag does not fit the tags of the runs"
        yield Finding(Flaw("index", "keepstep_tag", what), _tag_again)


def _tag_again(tables: Tables) -> str:
    tables.cursor.execute("DELETE FROM keepstep_tag")
    tables.cursor.execute(_PUT_TAGS)
    return "it was filled again"


def _make_again(sql: str, tables: Tables) -> str:
    tables.cursor.execute(sql)
    return "it was rebuilt"


def _reindex(tables: Tables) -> str:
    tables.reindex()
    return "all indexes were made again"


def _unreadable_head(run: str) -> Finding:
    """A run whose head may be what cannot be read of it."""
    return Finding(Flaw("dangling", run, f"run {run!r} cannot be read"), partial(new_head, run.encode(), keep=True))


def raw_rows(cursor: Cursor, run: str) -> list[dict[str, Any]]:
    """Return everything of a run except its checkpoints, whatever its form, to keep it before it is given up."""
    found: list[dict[str, Any]] = []
    for table, column in (("keepstep_run", "id"), ("keepstep_head", "run"), ("keepstep_signal", "run")):
        names = [name for (name,) in cursor.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()]
        both = ", ".join(f"typeof({name}), CAST({name} AS BLOB)" for name in names)
        for row in cursor.execute(f"SELECT {both} FROM {table} WHERE {column} = ?", (run,)).fetchall():
            values = {name: _shown(*row[2 * n : 2 * n + 2]) for n, name in enumerate(names)}
            found.append({"table": table, **values})
    return found


def _shown(kind: str, value: bytes | None) -> Any:
    """Return a value of any type: text as text, other values with their type."""
    if value is None:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {kind: b64encode(value).decode()}
    return text if kind == "text" else {kind: text}


# -- tables ------------------------------------------------------------------------------------------------------------


class Tables:
    """The tables as the mender asks and writes them, inside one transaction."""

    def __init__(self, cursor: Cursor, now: float, alive: Container[Any] = ()) -> None:
        self.cursor, self.now, self.alive = cursor, instant(now), alive
        self._reindexed = False

    def mend(self, found: Iterable[Finding]) -> list[Flaw]:
        """Mend one thing after the other."""
        return [mended(one, self) for one in found]

    def tolerates(self, error: Exception) -> bool:
        return isinstance(error, apsw.Error | UnicodeDecodeError)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        self.cursor.execute("SAVEPOINT keepstep_mend")
        try:
            yield
        except BaseException:
            self.cursor.execute("ROLLBACK TO keepstep_mend")
            raise
        finally:
            self.cursor.execute("RELEASE keepstep_mend")

    def _names(self, sql: str) -> list[bytes]:
        return [name for (name,) in self.cursor.execute(sql, (MOST_FLAWS,)).fetchall()]

    def without_run(self, table: str) -> list[bytes]:
        return self._names(_WITHOUT_RUN.format(table=f"keepstep_{table}"))

    def without_head(self) -> list[bytes]:
        return self._names(_WITHOUT_HEAD)

    def differing(self) -> list[bytes]:
        return self._names(_DIFFERING)

    def miscounted(self) -> list[tuple[bytes, int, int]]:
        found: list[tuple[bytes, int, int]] = self.cursor.execute(_MISCOUNTED, (MOST_FLAWS,)).fetchall()
        return found

    def _columns(self, table: str) -> list[str]:
        return [name for (name,) in self.cursor.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()]

    def put_aside(self, table: str, run: bytes) -> int:
        cursor, table, aside = self.cursor, f"keepstep_{table}", f"keepstep_aside_{table}"
        names, kept = self._columns(table), self._columns(aside)
        if not kept:
            cursor.execute(f"CREATE TABLE {aside} (put_aside_at, {', '.join(names)})")
        for name in names if kept else ():
            if name not in kept:
                cursor.execute(f"ALTER TABLE {aside} ADD COLUMN {name}")
        columns, where = ", ".join(names), "WHERE run = CAST(? AS TEXT)"
        cursor.execute(
            f"INSERT INTO {aside} (put_aside_at, {columns}) SELECT ?, {columns} FROM {table} {where}",
            (self.now.timestamp(), run),
        )
        (count,) = cursor.execute("SELECT changes()").fetchall()[0]
        cursor.execute(f"DELETE FROM {table} {where}", (run,))
        return int(count)

    def reindex(self) -> None:
        """Make all indexes again, once."""
        if not self._reindexed:
            self.cursor.execute("REINDEX")
            self._reindexed = True

    def repeat(self, run: bytes) -> None:
        self.cursor.execute(_REPEAT, (run,))

    def count(self, run: bytes, signals: int) -> None:
        self.cursor.execute("UPDATE keepstep_head SET signals = ? WHERE run = CAST(? AS TEXT)", (signals, run))

    def is_held(self, run: bytes) -> bool:
        owner = self.cursor.execute("SELECT worker FROM keepstep_head WHERE run = CAST(? AS TEXT)", (run,)).fetchall()
        return bool(owner) and owner[0][0] in self.alive

    def newest(self, run: bytes) -> Row | None:
        found = self.cursor.execute(
            "SELECT seq, CAST(kind AS BLOB), CAST(record AS BLOB), CAST(body AS BLOB) FROM keepstep_checkpoint"
            " WHERE run = ? ORDER BY seq DESC LIMIT 1",
            (run.decode(),),
        ).fetchall()
        for seq, kind, record, body in found:
            return Row(seq, kind.decode("utf-8", "replace"), record, body)
        return None

    def add(self, run: bytes, row: Row) -> None:
        self.cursor.execute(
            "INSERT INTO keepstep_checkpoint (run, seq, kind, record) VALUES (?, ?, ?, CAST(? AS TEXT))",
            (run.decode(), row.seq, row.kind, row.record),
        )

    def records(self, run: bytes) -> list[bytes]:
        sql = "SELECT CAST(record AS BLOB) FROM keepstep_checkpoint WHERE run = ?"
        return [text for (text,) in self.cursor.execute(sql, (run.decode(),)).fetchall()]

    def epochs(self, run: bytes) -> list[int]:
        tables = ["keepstep_head", *(["keepstep_aside_head"] if self._columns("keepstep_aside_head") else [])]
        stored = [
            epoch
            for table in tables
            for (epoch,) in self.cursor.execute(f"SELECT epoch FROM {table} WHERE run = ?", (run.decode(),)).fetchall()
        ]
        return [epoch for epoch in stored if isinstance(epoch, int) and 0 <= epoch < 2**61]

    def put_head(self, run: bytes, status: Status, seq: int, checksum: str, epoch: int) -> None:
        values = (status, seq, checksum, epoch, self.now.timestamp(), run.decode())
        self.cursor.execute(_PUT_HEAD, values)
        read_run(self.cursor, run.decode())  # raises if it is the row of the run itself that is damaged
