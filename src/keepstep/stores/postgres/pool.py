"""Access to a PostgreSQL server: its address, pooled connections, and the meaning of PostgreSQL's errors."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psycopg
from psycopg import conninfo, pq

from ...errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreFull, StoreUnavailable
from ...model.lease import LEASE_SECONDS
from ..migrations import pending
from .rows import register
from .sessions import check_own_session

if TYPE_CHECKING:
    from ..upgrade import OldWorker

T = TypeVar("T")
Connection = psycopg.Connection[Any]

#: Default schema of the tables.
DEFAULT_SCHEMA = "keepstep"
#: Maximum number of attempts of a transaction that PostgreSQL aborted because of a deadlock or a conflict.
TRIES = 5
#: Interval in seconds of polling for a returned connection, when no other can be opened.
_LOOK_SECONDS = 0.005
#: Time in seconds after which an unused connection is closed.
UNUSED_SECONDS = 5.0
#: Maximum length of an identifier in PostgreSQL; longer ones are cut.
_LONGEST_NAME = 63

#: Connection parameters after which a silent connection is closed; the URL may override them.
_PATIENCE = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
}
#: Settings that make the server plan statements once, as index steps: such plans stay good as tables grow, and rows are
#: locked in the requested order. They suit Keepstep's own statements only.
PLANNING = {
    "plan_cache_mode": "force_generic_plan",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "jit": "off",
}
#: Statements that restore the role's own planning for the rest of a transaction: for a step's statements, or for one
#: over whole tables.
PLAN_THEIRS = tuple(f"SET LOCAL {name} TO DEFAULT" for name in PLANNING)
#: An expression that makes commits wait for the disk where a role or database has turned that off. A stronger setting,
#: such as `remote_apply`, stays. Its argument says whether it lasts for the transaction (true) or the session (false).
DURABLE = "set_config('synchronous_commit', replace(current_setting('synchronous_commit'), 'off', 'on'), {transaction})"
#: An expression that lets a transaction end without waiting for the disk: a loss of power may undo it.
NOT_FLUSHED = "set_config('synchronous_commit', 'off', true)"
#: Maximum time in seconds to wait for a row that another client has locked. Keepstep's own commits take milliseconds.
LOCK_SECONDS = 2.0

#: SQLSTATEs that mean that the server or the session cannot continue, or refuses writes for now.
_UNAVAILABLE = re.compile(r"08...|53...|57...|58...|25006|25P03|25P04|40001|40P01|55P03|XX000")
_READ_ONLY = "25006"
_NOT_ALLOWED = "42501"
_CONFLICTS = ("40001", "40P01")
LOCKED = "55P03"
_LACKING = ("42P01", "42703", "3F000")
_DAMAGED = ("XX001", "XX002")


class Address:
    """The address of a store: a server, a database, a schema. Its texts never contain the password."""

    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        default_schema: str = DEFAULT_SCHEMA,
        proxy: bool = False,
        idle_seconds: float = 15.0,
    ) -> None:
        try:
            rest, asked = _take_ours(url)
            known = conninfo.conninfo_to_dict(rest)
        except (psycopg.Error, ValueError):  # libpq repeats its input, which may contain a password
            raise DefinitionError(f"not a valid PostgreSQL URL: {_what_is_wrong(url)}") from None
        self.schema = schema or asked.get("schema") or default_schema
        _check_schema(self.schema)
        self.proxy = _is_true(asked.get("proxy", "no")) or proxy
        self._password = str(known.get("password") or "")
        self._words: dict[str, Any] = {**_PATIENCE, "application_name": f"keepstep {os.getpid()}", **known}
        self._words["client_encoding"] = "UTF8"  # at startup: accepted by proxies, overrides the role's
        ours = {
            **PLANNING,
            "timezone": "UTC",
            "lock_timeout": milliseconds(LOCK_SECONDS),
            "idle_in_transaction_session_timeout": milliseconds(idle_seconds),
        }
        settings = [f"SET {name} = '{value}'" for name, value in ours.items()]
        self._set = "; ".join([*settings, f"SELECT {DURABLE.format(transaction='false')}"]).encode()
        self._own_sessions = False
        self.text = _shown(known, self.schema)

    def __repr__(self) -> str:
        return f"Address({self.text!r})"

    def connect(self) -> Connection:
        """Open a new connection in autocommit mode."""
        try:
            connection = psycopg.connect(**self._words, autocommit=True)
        except psycopg.Error as error:
            raise self._unreachable(error) from None
        try:
            if not self.proxy:
                self._settle(connection)
        except BaseException as error:
            connection.close()
            if isinstance(error, psycopg.Error):
                raise self._unreachable(error) from None
            raise
        connection.prepare_threshold = None if self.proxy else 0
        register(connection)
        return connection

    def _settle(self, connection: Connection) -> None:
        """Apply the settings of a session, after verifying that the session is not shared."""
        if not self._own_sessions:
            check_own_session(connection, lambda: psycopg.connect(**self._words, autocommit=True), self.text)
            self._own_sessions = True
        # They are not sent at startup, because a proxy that pools sessions would refuse them there.
        check_result(connection, connection.pgconn.exec_(self._set))

    def _unreachable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"{self.text} cannot be reached: {self._message(error)}")

    @contextlib.contextmanager
    def patience(self, connection: Connection, seconds: float) -> Iterator[None]:
        """Limit the connection's waits for locks to `seconds` inside this context."""
        if not self.proxy:
            connection.execute(f"SET lock_timeout = '{milliseconds(seconds)}'".encode())
        try:
            yield
        finally:
            if not self.proxy and not connection.closed:
                check_result(connection, connection.pgconn.exec_(self._set))

    def table(self, name: str) -> str:
        """Return the full, quoted name of one of our tables."""
        return f"{quoted(self.schema)}.keepstep_{name}"

    def key(self, *names: str) -> int:
        """Return the number of an advisory lock: equal for equal names in the same schema, in every process."""
        digest = sha256("\0".join(("keepstep", self.schema, *names)).encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)

    def translated(self, error: Exception, *, unknown: bool = False) -> Exception:
        """Return PostgreSQL's error as one of Keepstep's. `unknown`: a write on a lost connection failed."""
        code = getattr(error, "sqlstate", None) or ""
        message = f"{self.text}: {self._message(error)}"
        if code == "53100":
            return StoreFull(message)
        if code in _DAMAGED:
            return CheckpointCorrupt(f"{message}; restore it, or copy out what can be read")
        if code in _LACKING:
            return SchemaMismatch(f"{message}: it is not a complete Keepstep store; restore it from a backup")
        if _UNAVAILABLE.fullmatch(code) or (not code and _is_of_no_answer(error)):
            unavailable = StoreUnavailable(message, unknown=unknown)
            unavailable.denied, unavailable.held = code == _READ_ONLY, code == LOCKED
            return unavailable
        if isinstance(error, psycopg.DataError | UnicodeEncodeError | OverflowError):
            return DefinitionError(f"{self.text} cannot store or find this value: {self._message(error)}")
        failed = StoreError(message)
        failed.denied = code == _NOT_ALLOWED
        return failed

    def _message(self, error: Exception) -> str:
        text = " ".join(str(error).split())
        return text.replace(self._password, "***") if self._password else text


def milliseconds(seconds: float) -> str:
    """Return a time as a PostgreSQL setting, never 0, which would mean no limit."""
    return str(max(1, int(seconds * 1000)))


def _is_of_no_answer(error: Exception) -> bool:
    """Whether the error is libpq's own, about its connection; libpq has no better name for it."""
    return isinstance(error, psycopg.OperationalError) or type(error) is psycopg.DatabaseError


def _take_ours(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL for PostgreSQL, and Keepstep's own options in it."""
    parts = urlsplit(url)
    if not _is_clear(url):
        raise ValueError
    asked = parse_qsl(parts.query, keep_blank_values=True)
    ours = {name: value for name, value in asked if name in _OURS}
    rest = urlencode([pair for pair in asked if pair[0] not in ours], quote_via=quote)
    return f"postgresql://{parts.netloc}{parts.path or '/'}?{rest}", ours


_OURS = ("schema", "proxy")


def _is_clear(url: str) -> bool:
    """Whether it is clear where the password ends. A raw `@`, `/`, `?` or `#` in it would expose part of it."""
    parts = urlsplit(url)
    return parts.netloc.count("@") <= 1 and "@" not in parts.path + parts.fragment


def _what_is_wrong(url: str) -> str:
    """Return the problem of a URL without repeating a possible password."""
    known = [*_OURS, *(option.keyword.decode() for option in pq.Conninfo.get_defaults())]
    try:
        query = urlsplit(url).query if _is_clear(url) else ""
    except ValueError:
        query = ""
    names = [name for name, _ in parse_qsl(query, keep_blank_values=True)] if "@" not in query else []
    unknown = [name for name in names if name not in known and re.fullmatch(r"[a-z_]{1,30}", name)]
    if not unknown or any("password" in name or "secret" in name for name in names):
        return "write postgresql://user@host:5432/database, with special characters of the password as %XX"
    near = get_close_matches(unknown[0], known, n=1)
    return f"it has no parameter {unknown[0]!r}{f'; did you mean {near[0]}?' if near else ''}"


def _is_true(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise DefinitionError(f"proxy must be true or false, got {text[:30]!r}")


def _check_schema(name: str) -> None:
    """Raise for a name that PostgreSQL shortens or reserves, or that cannot be used in our statements."""
    if len(name.encode()) > _LONGEST_NAME:
        raise DefinitionError(f"schema must have at most {_LONGEST_NAME} bytes, got {name[:80]!r}")
    if name.startswith("pg_"):
        raise DefinitionError(f"schema must not begin with pg_, which PostgreSQL reserves, got {name!r}")
    if unfit := set(name) & set("%'\0"):
        raise DefinitionError(f"schema must not contain {min(unfit)!r}, got {name!r}")


def _shown(known: dict[str, Any], schema: str) -> str:
    user = f"{quote(str(known['user']))}@" if known.get("user") else ""
    hosts = str(known.get("host") or known.get("hostaddr") or "").split(",")
    ports = str(known.get("port") or "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    name = f"/{quote(str(known.get('dbname') or ''))}?schema={quote(schema)}"
    if hosts[0].startswith("/"):  # the directory of a socket
        return f"postgresql://{user}{name}&host={quote(','.join(hosts))}" + (f"&port={ports[0]}" if ports[0] else "")
    places = ",".join(f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False))
    return f"postgresql://{user}{places}{name}"


def quoted(name: str) -> str:
    """Return a name quoted for a statement."""
    return '"' + name.replace('"', '""') + '"'


# -- pooled connections ------------------------------------------------------------------------------------------------


class Connections:
    """A few connections to one server, opened on demand and kept. Threads may share them.

    The thread that needs a connection opens it, so that it sees a failure at once, with the server's own message.
    """

    def __init__(self, address: Address, most: int, wait_seconds: float, spare: Connections | None = None) -> None:
        """`spare` is used when no connection is available here, because a role may be limited to few connections."""
        self._address = address
        self._spare = spare
        self._since: dict[Connection, float] = {}  # connections in use, with their start time
        self._wait_seconds = wait_seconds
        self._most = most
        self._free = threading.Semaphore(most)
        self._idle: deque[Connection] = deque()  # the last one is taken first
        self._used_at: weakref.WeakKeyDictionary[Connection, float] = weakref.WeakKeyDictionary()
        self._all: set[Connection] = set()
        self._mutex = threading.Lock()
        self._gone = ""

    def run(self, work: Callable[[Connection], T], *, again: bool = False, patience_seconds: float = 0.0) -> T:
        """Run `work` with a pooled connection. `again=True` marks it read-only, so it is retried on a lost connection.

        It may take `patience_seconds` longer than the longest silence of a statement.
        """
        tries = 0
        while True:
            tries += 1
            try:
                connection, used = self._take()
            except StoreUnavailable:
                if self._spare is None:
                    raise
                return self._spare.run(work, again=again, patience_seconds=patience_seconds)
            self._since[connection] = time.monotonic() + patience_seconds
            try:
                return work(connection)
            except (psycopg.Error, UnicodeEncodeError, OverflowError) as error:
                lost, unknown = connection.closed, not again and is_unknown(connection, error)
                if getattr(error, "sqlstate", None) == _READ_ONLY:
                    connection.close()  # it leads to a former primary server; another may be primary now
                conflict = getattr(error, "sqlstate", None) in _CONFLICTS and not lost
                if (conflict and tries < TRIES) or (lost and again and used):
                    continue
                raise self._address.translated(error, unknown=unknown) from error
            finally:
                self.give(connection)

    def take_idle(self) -> Connection | None:
        """Take a connection that is usable at this moment; None if there is none. The caller gives it back."""
        self.check_usable()
        if not self._free.acquire(blocking=False):
            return None
        try:
            connection = self._idle.pop()
        except IndexError:
            self._free.release()
            return None
        if not _has_ended(connection):
            self._since[connection] = time.monotonic()
            return connection
        self._drop(connection)
        self._free.release()
        return None

    def give_up_silent(self, seconds: float) -> int:
        """End connections in use for longer than `seconds`, from any thread; waiting threads get an error."""
        now = time.monotonic()
        silent = [connection for connection, since in list(self._since.items()) if now - since > seconds]
        for connection in silent:
            shut_socket(connection)
        return len(silent)

    def check_usable(self) -> None:
        """Raise if the store is closed, or belongs to the parent of this forked process."""
        if self._gone:
            raise StoreError(self._gone)

    def _take(self) -> tuple[Connection, bool]:
        self.check_usable()
        if not self._free.acquire(timeout=self._wait_seconds):
            raise StoreUnavailable(
                f"{self._address.text}: all {self._most} connections of this process have been busy for "
                f"{self._wait_seconds:g} s"
            )
        try:
            while self._idle:
                connection = self._idle.pop()
                if not _has_ended(connection):
                    return connection, True
                self._drop(connection)
            return self._made_or_freed()
        except BaseException:
            self._free.release()
            raise

    def _made_or_freed(self) -> tuple[Connection, bool]:
        """Open a new connection; if none can be opened, take the next one that this process gives back."""
        ends = time.monotonic() + self._wait_seconds
        try:
            connection = self._address.connect()
        except StoreUnavailable:
            while self._all and time.monotonic() < ends:
                with contextlib.suppress(IndexError):
                    connection = self._idle.pop()
                    if not _has_ended(connection):
                        return connection, True
                    self._drop(connection)
                time.sleep(_LOOK_SECONDS)
            raise
        with self._mutex:
            self._all.add(connection)
        return connection, False

    def give(self, connection: Connection) -> None:
        """Give a connection back, in any state."""
        self._since.pop(connection, None)
        try:
            if not connection.closed and connection.info.transaction_status != pq.TransactionStatus.IDLE:
                _rolled_back(connection)
            if connection.closed or self._gone:
                self._drop(connection)
            else:
                self._used_at[connection] = time.monotonic()
                self._idle.append(connection)
        finally:
            self._free.release()

    def close_unused(self) -> None:
        """Close connections that nobody has used for a while."""
        before = time.monotonic() - UNUSED_SECONDS
        while self._idle:
            try:
                connection = self._idle.popleft()
            except IndexError:  # another thread has just taken it
                return
            if self._used_at.get(connection, 0.0) > before:
                self._idle.appendleft(connection)
                return
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        with self._mutex:
            self._all.discard(connection)
        connection.close()

    def close(self, why: str) -> None:
        """Close idle connections now, and the others as soon as they are given back."""
        if not self._gone:
            self._gone = why
        while self._idle:
            self._drop(self._idle.pop())

    def cut_off(self, why: str) -> None:
        """Close, and interrupt every thread that waits for an answer."""
        self.close(why)
        with self._mutex:
            left = list(self._all)
        for connection in left:
            shut_socket(connection)

    def abandon(self, why: str) -> None:
        """Become unusable in a forked child: its copies of the sockets would keep the parent's sessions alive."""
        self._gone = why
        for connection in self._all:
            close_socket(connection)


def execute_binary(
    connection: Connection, sql: bytes, values: Sequence[bytes | None], oids: tuple[int, ...], *, prepare: bool
) -> None:
    """Run a statement with values in PostgreSQL's binary format, with less overhead than psycopg."""
    pgconn = connection.pgconn
    formats = _BINARY[: len(values)]
    if not prepare:
        check_result(connection, pgconn.exec_params(sql, values, oids, formats))
        return
    name = prepared_name(connection, sql) or _prepare(connection, sql, oids)
    result = pgconn.exec_prepared(name, values, formats)  # type: ignore[arg-type]  # None is NULL
    if result.error_field(pq.DiagnosticField.SQLSTATE) == _NOT_PREPARED:
        _prepared.pop(connection, None)  # psycopg deallocates all names when it rolls back
        name = _prepare(connection, sql, oids)
        result = pgconn.exec_prepared(name, values, formats)  # type: ignore[arg-type]
    check_result(connection, result)


def _prepare(connection: Connection, sql: bytes, oids: tuple[int, ...]) -> bytes:
    name = b"keepstep_%d" % next(_numbers)
    check_result(connection, connection.pgconn.prepare(name, sql, oids))
    _prepared.setdefault(connection, {})[sql] = name
    return name


def prepared_name(connection: Connection, sql: bytes) -> bytes | None:
    """Return the name of a statement prepared on this connection, or None."""
    return _prepared.get(connection, {}).get(sql)


_BINARY = [pq.Format.BINARY] * 100
_NOT_PREPARED = b"26000"
_numbers = itertools.count()
_prepared: weakref.WeakKeyDictionary[Connection, dict[bytes, bytes]] = weakref.WeakKeyDictionary()


def check_result(connection: Connection, result: pq.abc.PGresult) -> None:
    """Raise the error of the server, if there is one."""
    if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
        raise psycopg.errors.error_from_result(result, connection.info.encoding)


@cache
def numbered(sql: str) -> bytes:
    """Return the statement with PostgreSQL's placeholders."""
    first, *rest = sql.split("%s")
    return (first + "".join(f"${place}{part}" for place, part in enumerate(rest, 1))).encode()


def is_unknown(connection: Connection, error: Exception) -> bool:
    """Whether a statement before an error may have been executed: the server refused nothing, or was stopping."""
    code = getattr(error, "sqlstate", None)
    return connection.closed or not code or code.startswith(("08", "57P"))


def close_socket(connection: Connection) -> None:
    """Close the socket of another process's connection without any message to the server."""
    try:
        os.close(connection.fileno())
    except (OSError, psycopg.Error):
        return


def shut_socket(connection: Connection) -> None:
    """End a connection from any thread, so that its user sees the end of the stream."""
    with contextlib.suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _has_ended(connection: Connection) -> bool:
    """Whether an idle connection has unread input, which usually means that the server ended the session."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLHUP)
    return bool(poll.poll(0))


def _rolled_back(connection: Connection) -> None:
    try:
        connection.rollback()
    except psycopg.Error:
        connection.close()


# -- the schema --------------------------------------------------------------------------------------------------------


def migrate(connection: Connection, address: Address, *, create: bool) -> None:
    """Create the schema or upgrade it: one process at a time, and only if necessary."""
    there = _version(connection, address)
    if not there and not create:
        raise SchemaMismatch(f"no store at {address.text}; a worker, `keepstep run` or `start` creates one")
    if not pending("postgres", there, address.text):
        return
    if there:
        from ..upgrade import wait_for_old_workers  # noqa: PLC0415 - only for a store of an older version

        def is_pending() -> bool:
            return bool(pending("postgres", _version(connection, address), address.text))

        wait_for_old_workers(address.text, is_pending, lambda: _living(connection, address))
    try:
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = 0")  # another process may need a while
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (address.key("migrate"),))
            version = _version(connection, address)  # another process may have been first
            if not version and not _has_schema(connection, address):  # the statement needs CREATE on the database
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(address.schema)}")
            connection.execute(f"SET LOCAL search_path TO {quoted(address.schema)}")
            for script in pending("postgres", version, address.text):
                connection.execute(script.sql.encode(), prepare=False)
                connection.execute(
                    "INSERT INTO keepstep_meta VALUES ('schema', %s)"
                    " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    (str(script.number),),
                )
    except psycopg.errors.InsufficientPrivilege as error:
        raise StoreError(
            f"{address.text}: this role may not create or change the tables ({' '.join(str(error).split())}); open the "
            "store once as their owner"
        ) from None


def _living(connection: Connection, address: Address) -> list[OldWorker]:
    """Return the workers whose lease has not ended, by the server's clock. The first schema has no `lease_seconds`."""
    from ..upgrade import OldWorker  # noqa: PLC0415 - only for a store of an older version

    rows = connection.execute(
        f"SELECT id, host, pid, extract(epoch FROM started_at)::float8 FROM {address.table('worker')} w"
        " WHERE gone_at IS NULL AND renewed_at > clock_timestamp()"
        " - coalesce((to_jsonb(w) ->> 'lease_seconds')::float8, %s) * interval '1 second' ORDER BY id",
        (LEASE_SECONDS,),
    )
    return [OldWorker(*row) for row in rows.fetchall()]


def _has_schema(connection: Connection, address: Address) -> bool:
    return bool(connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", (address.schema,)).fetchall())


def _version(connection: Connection, address: Address) -> int:
    """Return the version of the schema; 0 if there is none."""
    # Ask the catalogue itself, because a session may cache the absence of names.
    tables = {
        name
        for (name,) in connection.execute(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            " WHERE n.nspname = %s AND c.relname IN ('keepstep_meta', 'keepstep_run')",
            (address.schema,),
        )
    }
    if "keepstep_meta" not in tables:
        if tables:
            raise SchemaMismatch(f"{address.text} is not a complete Keepstep store: keepstep_meta is missing")
        return 0
    rows = connection.execute(f"SELECT value FROM {address.table('meta')} WHERE name = 'schema'").fetchall()
    version = str(rows[0][0]) if rows else "0"
    if not version.isdecimal() or len(version) > 9:
        raise SchemaMismatch(f"{address.text}: its schema is {version[:60]!r}, which Keepstep never writes")
    return int(version)


# -- the server's time -------------------------------------------------------------------------------------------------

_since_boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ServerClock:
    """The server's clock, derived from this machine's clock and their difference, so that all workers agree.

    The difference is measured when the store is opened and with every heartbeat, to half a round trip.
    """

    def __init__(self) -> None:
        self._apart = time.time() - time.clock_gettime(_since_boot)

    def now(self) -> float:
        return time.clock_gettime(_since_boot) + self._apart

    def boot(self) -> tuple[str, float]:
        # Durations are measured by this machine, because the server's clock may be set.
        return "server", time.clock_gettime(_since_boot)

    def measure(self, connection: Connection) -> None:
        """Ask the server for its time."""
        began = self.boot()[1]
        ((server_seconds,),) = connection.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchall()
        self.learn(server_seconds, began)

    def learn(self, server_seconds: float, began: float) -> None:
        """Note the server's time from an answer to a question that began then. Ignore what the round trip explains."""
        ended = time.clock_gettime(_since_boot)
        apart = server_seconds - (began + ended) / 2
        if abs(apart - self._apart) > (ended - began) / 2:
            self._apart = apart
