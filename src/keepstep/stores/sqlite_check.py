"""What is wrong with a SQLite store itself, and its mending: what cannot be derived is put aside, never destroyed."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Any, NamedTuple

import apsw
import msgspec

from ..errors import CheckpointCorrupt
from ..model import Flaw, Kind, RunPage, RunQuery, Status
from ..model.ids import new_id
from ..ports import instant
from .migrations import scripts
from .records import Record, StoredError, seal
from .sqlite_connection import Cursor, connect, translated
from .sqlite_rows import read_run

log = logging.getLogger("keepstep")

#: How often a store is looked at while it is mended.
ROUNDS = 5
#: How many flaws of one sort are told one by one.
TOLD = 1000

#: Names are read as bytes: one that is no UTF-8 must not hide the others.
_ORPHANS = (
    "SELECT DISTINCT CAST(run AS BLOB) FROM {table} WHERE NOT EXISTS"
    " (SELECT 1 FROM keepstep_run WHERE id = {table}.run) LIMIT ?"
)
_HEADLESS = (
    "SELECT CAST(id AS BLOB) FROM keepstep_run WHERE NOT EXISTS"
    " (SELECT 1 FROM keepstep_head WHERE run = keepstep_run.id) LIMIT ?"
)
#: What the head repeats of its run, so that a claim reads one index.
_REPEATED = ("number", "workflow", "version", "queue", "priority")
_DIFFERS = (
    "SELECT CAST(r.id AS BLOB) FROM keepstep_run r JOIN keepstep_head h ON h.run = r.id WHERE "
    + " OR ".join(f"h.{name} IS NOT r.{name}" for name in _REPEATED)
    + " LIMIT ?"
)
_MISCOUNTED = (
    "SELECT CAST(h.run AS BLOB), h.signals, count(*) FROM keepstep_head h JOIN keepstep_signal s ON s.run = h.run"
    " GROUP BY h.run HAVING count(*) > h.signals AND count(*) = max(s.seq) LIMIT ?"
)
_ENDS = {"success": Status.COMPLETED, "failure": Status.FAILED, "cancelled": Status.CANCELLED}


class _End(msgspec.Struct):
    """As much of a record as tells how a run ended."""

    outcome: str = "success"


class Finding(NamedTuple):
    """A flaw, and what mends it; without that nothing can."""

    flaw: Flaw
    mend: Callable[[Mender], str] | None = None


def look_into(path: str, busy_seconds: float) -> list[Finding]:
    """Everything that does not fit; on a connection of its own, since it may take long."""
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
    """Mend what can be, and look again: an index that had lost entries hides what is found in the next round."""
    told: dict[tuple[str, str], Flaw] = {}
    for _ in range(ROUNDS):
        found = look_into(path, busy_seconds)
        named = {one.flaw.about for one in found}
        found += [_unreadable_head(name) for name in _unreadable(list_runs) if name not in named]
        fresh = [one for one in found if (one.flaw.kind, one.flaw.about) not in told]
        if not fresh:
            break
        told |= {(flaw.kind, flaw.about): flaw for flaw in mend(fresh)}
    return list(told.values())


def _unreadable(list_runs: Callable[[RunQuery], RunPage]) -> list[str]:
    """Runs that have a head, and still cannot be read."""
    found: list[str] = []
    query = RunQuery(status=frozenset(Status), limit=200)
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
    found += _integrity(cursor)
    for table, what in (("keepstep_checkpoint", "checkpoints"), ("keepstep_signal", "signals")):
        for run in _names(cursor, _ORPHANS.format(table=table)):
            flaw = Flaw("orphan", _told(run), f"there are {what} of a run {_told(run)!r}, which is not there")
            found.append(Finding(flaw, _aside(table, run)))
    for run in _names(cursor, _ORPHANS.format(table="keepstep_head")):
        flaw = Flaw("dangling", _told(run), f"there is a head of a run {_told(run)!r}, which is not there")
        found.append(Finding(flaw, _aside("keepstep_head", run)))
    for run in _names(cursor, _HEADLESS):
        flaw = Flaw("dangling", _told(run), f"run {_told(run)!r} has no head")
        found.append(Finding(flaw, _new_head(run)))
    for run in _names(cursor, _DIFFERS):
        flaw = Flaw("index", _told(run), f"run {_told(run)!r}: its head does not repeat what its row says")
        found.append(Finding(flaw, _same_again(run)))
    for run, counted, there in cursor.execute(_MISCOUNTED, (TOLD,)).fetchall():
        flaw = Flaw(
            "index", _told(run), f"run {_told(run)!r}: its head counts {counted} signals, and {there} are there"
        )
        found.append(Finding(flaw, _counted(run, there)))
    return found


def _names(cursor: Cursor, sql: str) -> list[bytes]:
    return [name for (name,) in cursor.execute(sql, (TOLD,)).fetchall()]


def _told(name: Any) -> str:
    return name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name)


def _missing_parts(connection: apsw.Connection) -> Iterable[Finding]:
    """Tables and indexes that every store has, and this one has not."""
    model = apsw.Connection(":memory:")
    for script in scripts("sqlite"):
        model.execute(script.sql).fetchall()
    wanted = model.execute("SELECT name, type, sql FROM sqlite_schema WHERE name LIKE 'keepstep_%'").fetchall()
    model.close()
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    for name, kind, sql in ((str(one[0]), one[1], one[2]) for one in wanted):
        if name in there:
            continue
        if kind == "index":
            yield Finding(Flaw("index", name, f"the index {name} is gone"), _made_again(str(sql)))
        else:
            yield Finding(Flaw("integrity", name, f"the table {name} is gone"))


def _integrity(cursor: Cursor) -> Iterable[Finding]:
    said = [text for (text,) in cursor.execute(f"PRAGMA integrity_check({TOLD})").fetchall() if text != "ok"]
    for text in said:
        about = str(text).rpartition(" ")[2]
        if "index keepstep_" in text:
            yield Finding(Flaw("index", about, f"an index does not fit its table: {text}"), _reindexed)
        else:
            yield Finding(Flaw("integrity", about, f"the file is damaged: {text}"))


def raw_rows(cursor: Cursor, run: str) -> list[dict[str, Any]]:
    """Everything that there is of a run beside its checkpoints, whatever it is: to be kept before it is given up."""
    found: list[dict[str, Any]] = []
    for table, column in (("keepstep_run", "id"), ("keepstep_head", "run"), ("keepstep_signal", "run")):
        names = [name for (name,) in cursor.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()]
        both = ", ".join(f"typeof({name}), CAST({name} AS BLOB)" for name in names)
        for row in cursor.execute(f"SELECT {both} FROM {table} WHERE {column} = ?", (run,)).fetchall():
            values = {name: _shown(*row[2 * n : 2 * n + 2]) for n, name in enumerate(names)}
            found.append({"table": table, **values})
    return found


def _shown(kind: str, value: bytes | None) -> Any:
    """A value of any type, as text if it is text, else with its type."""
    if value is None:
        return None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return {kind: b64encode(value).decode()}
    return text if kind == "text" else {kind: text}


# -- mending -----------------------------------------------------------------------------------------------------------


class Mender:
    """Mends one thing after the other, inside one transaction."""

    def __init__(self, cursor: Cursor, now: float, alive: set[str]) -> None:
        self.cursor, self.now, self.alive = cursor, now, alive
        self._reindexed = False

    def put_aside(self, table: str, column: str, run: bytes) -> int:
        """Move rows into a table beside their own, as they are; how many there were."""
        cursor, aside = self.cursor, table.replace("keepstep_", "keepstep_aside_")
        names = [name for (name,) in cursor.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()]
        kept = {name for (name,) in cursor.execute("SELECT name FROM pragma_table_info(?)", (aside,)).fetchall()}
        if not kept:
            cursor.execute(f"CREATE TABLE {aside} (put_aside_at, {', '.join(names)})")
        for name in names if kept else ():
            if name not in kept:
                cursor.execute(f"ALTER TABLE {aside} ADD COLUMN {name}")
        columns, where = ", ".join(names), f"WHERE {column} = CAST(? AS TEXT)"
        cursor.execute(
            f"INSERT INTO {aside} (put_aside_at, {columns}) SELECT ?, {columns} FROM {table} {where}", (self.now, run)
        )
        (count,) = cursor.execute("SELECT changes()").fetchall()[0]
        cursor.execute(f"DELETE FROM {table} {where}", (run,))
        return int(count)

    def reindex(self) -> None:
        if not self._reindexed:
            self.cursor.execute("REINDEX")
            self._reindexed = True


def mended(found: Finding, mender: Mender) -> Flaw:
    """The flaw, with what was done about it."""
    if found.mend is None:
        return found.flaw
    cursor = mender.cursor
    cursor.execute("SAVEPOINT keepstep_mend")
    try:
        done = found.mend(mender)
    except (CheckpointCorrupt, apsw.Error, UnicodeDecodeError) as error:
        cursor.execute("ROLLBACK TO keepstep_mend")
        log.warning("%s, and cannot be mended: %s", found.flaw.what, error)
        done = ""
    cursor.execute("RELEASE keepstep_mend")
    flaw = found.flaw
    return Flaw(flaw.kind, flaw.about, flaw.what, done)


def _aside(table: str, run: bytes) -> Callable[[Mender], str]:
    def mend(mender: Mender) -> str:
        count = mender.put_aside(table, "run", run)
        return f"{count} rows were put aside in {table.replace('keepstep_', 'keepstep_aside_')}"

    return mend


def _made_again(sql: str) -> Callable[[Mender], str]:
    def mend(mender: Mender) -> str:
        mender.cursor.execute(sql)
        return "it was made again"

    return mend


def _reindexed(mender: Mender) -> str:
    mender.reindex()
    return "all indexes were made again"


def _same_again(run: bytes) -> Callable[[Mender], str]:
    def mend(mender: Mender) -> str:
        columns = ", ".join(_REPEATED)
        mender.cursor.execute(
            f"UPDATE keepstep_head SET ({columns}) = (SELECT {columns} FROM keepstep_run WHERE id = keepstep_head.run)"
            " WHERE run = CAST(? AS TEXT)",
            (run,),
        )
        return "its head repeats it again"

    return mend


def _counted(run: bytes, there: int) -> Callable[[Mender], str]:
    def mend(mender: Mender) -> str:
        mender.cursor.execute("UPDATE keepstep_head SET signals = ? WHERE run = CAST(? AS TEXT)", (there, run))
        return f"its head counts {there} now"

    return mend


def _unreadable_head(run: str) -> Finding:
    """A run whose head may be what cannot be read of it."""
    return Finding(Flaw("dangling", run, f"run {run!r} cannot be read"), _new_head(run.encode(), keep=True))


def _new_head(run: bytes, *, keep: bool = False) -> Callable[[Mender], str]:
    """Make a head from the records. Whether later ones were lost with it nobody can tell: a person decides."""

    def mend(mender: Mender) -> str:
        cursor = mender.cursor
        owner = cursor.execute("SELECT worker FROM keepstep_head WHERE run = CAST(? AS TEXT)", (run,)).fetchall()
        if owner and owner[0][0] in mender.alive:
            return ""
        kept = mender.put_aside("keepstep_head", "run", run) if keep else 0
        status = _put_head(mender, run)
        read_run(cursor, run.decode())  # raises if it is the row of the run itself that is damaged
        old = "; the old one was put aside in keepstep_aside_head" if kept else ""
        return f"its head was made again from its records, and it is {status.value}{old}"

    return mend


def _put_head(mender: Mender, run: bytes) -> Status:
    cursor, name = mender.cursor, run.decode()
    newest = cursor.execute(
        "SELECT seq, CAST(kind AS BLOB), CAST(record AS BLOB), CAST(body AS BLOB) FROM keepstep_checkpoint"
        " WHERE run = ? ORDER BY seq DESC LIMIT 1",
        (name,),
    ).fetchall()
    if not newest:
        raise CheckpointCorrupt(f"run {name!r}: it has no records to make a head from")
    seq, kind, text, body = newest[0]
    checksum = sha256(text + (body or b"")).hexdigest()
    status = Status.SET_ASIDE
    if kind == Kind.RUN_FINISHED.value.encode():
        status = _ENDS.get(msgspec.json.decode(text, type=_End).outcome, status)
    if status is Status.SET_ASIDE:
        reason = "its head was lost; what was recorded is whole as far as it goes, but there may have been more"
        error = StoredError("CheckpointCorrupt", reason, error_class="permanent", id=new_id("error"))
        record = Record(name, Kind.ERROR.value, outcome="failure", worker="keepstep repair", error=error)
        record.finished_at = instant(mender.now)
        row, checksum = seal(record, seq + 1, checksum)
        seq = row.seq
        cursor.execute(
            "INSERT INTO keepstep_checkpoint (run, seq, kind, record) VALUES (?, ?, ?, CAST(? AS TEXT))",
            (name, row.seq, row.kind, row.record),
        )
    (signals,) = cursor.execute("SELECT count(*) FROM keepstep_signal WHERE run = ?", (name,)).fetchall()[0]
    epoch = _last_epoch(cursor, name) + 1
    cursor.execute(
        "INSERT INTO keepstep_head SELECT id, number, workflow, version, queue, priority, ?, ?, ?, ?, NULL, NULL, '',"
        " ?, 0, ? FROM keepstep_run WHERE id = ?",
        (status, seq, checksum, epoch, signals, mender.now, name),
    )
    return status


def _last_epoch(cursor: Cursor, run: str) -> int:
    """The newest lease that the records tell of; a head that was put aside may know of a later one."""
    last = 1
    for (text,) in cursor.execute("SELECT CAST(record AS BLOB) FROM keepstep_checkpoint WHERE run = ?", (run,)):
        try:
            last = max(last, msgspec.json.decode(text, type=_Lease).claimed.epoch)
        except (msgspec.MsgspecError, ValueError):
            continue
    known = cursor.execute("SELECT name FROM sqlite_schema WHERE name = 'keepstep_aside_head'").fetchall()
    if known:
        rows = cursor.execute("SELECT epoch FROM keepstep_aside_head WHERE run = ?", (run,)).fetchall()
        last = max([last, *(epoch for (epoch,) in rows if isinstance(epoch, int) and 0 <= epoch < 2**61)])
    return last


class _Claimed(msgspec.Struct):
    epoch: int = 0


class _Lease(msgspec.Struct):
    claimed: _Claimed = msgspec.field(default_factory=_Claimed)
