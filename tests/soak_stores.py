"""The durable stores that a soak drives, and what can befall the storage of each: one more is one class, one line."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import apsw
import psycopg

from keepstep.errors import StoreError
from keepstep.model import Status
from keepstep.stores.files.store import FilesStore
from tests.crash import programs
from tests.postgres import Server

#: The small disk: more than a soak writes.
DISK = "1g"
#: Commits that a cut may lose, in pages of the log.
MOST_PAGES = 40


class SmallDisk:
    """A file system of its own that can be full: real, but it takes the right to mount."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._mount("-t", "tmpfs", "-o", f"size={DISK}", "none")

    def _mount(self, *words: str) -> None:
        subprocess.run(["mount", *words, str(self.folder)], check=True, capture_output=True, timeout=10)

    def fill(self) -> None:
        state = os.statvfs(self.folder)
        used = (state.f_blocks - state.f_bfree) * state.f_frsize
        with contextlib.suppress(subprocess.CalledProcessError):  # someone wrote meanwhile: less than is in use
            self._mount("-o", f"remount,size={used + 8192}")

    def free(self) -> None:
        self._mount("-o", f"remount,size={DISK}")

    def close(self) -> None:
        subprocess.run(["umount", "-l", str(self.folder)], check=True, timeout=10)


class FewPages:
    """Where nothing can be mounted: SQLite is told that the database may not grow, and refuses as on a full disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.flag = folder / "full"

    def fill(self) -> None:
        self.flag.touch()

    def free(self) -> None:
        self.flag.unlink(missing_ok=True)

    def close(self) -> None:
        pass


class SQLite:
    """One file, shared by all processes."""

    options: dict = {}  # noqa: RUF012 - none
    cuts = ("torn log", "cut log")
    tells_time = False
    transactional = True

    def __init__(self, folder: Path) -> None:
        try:
            self.disk = SmallDisk(folder / "disk")
        except (OSError, subprocess.SubprocessError):
            self.disk = FewPages(folder / "pages")
        self.path = self.disk.folder / "runs.db"
        self.url = f"sqlite:///{self.path}"
        self.fill, self.free, self.close = self.disk.fill, self.disk.free, self.disk.close

    @staticmethod
    async def attend(engine) -> None:
        """What a worker does beside its work: it obeys the flag of a disk that only pretends to be full."""
        flag = Path(engine.store.url.removeprefix("sqlite:///")).parent / "full"
        full = False
        while True:
            await asyncio.sleep(0.05)
            if flag.exists() is not full:
                full = not full
                most = 1 if full else 4_294_967_294
                writer = engine.store._writer
                with contextlib.suppress(StoreError):
                    await engine.call(writer.run, lambda: writer.cursor.execute(f"PRAGMA max_page_count={most}"))  # noqa: B023

    def cut(self, kind: str, draw) -> bool:
        """What a power cut does to the log; whether it did."""
        try:
            return self._cut(kind, draw)
        except OSError:  # the disk is full, too
            return False

    def _cut(self, kind: str, draw) -> bool:
        """Leave the log as a power cut may leave it: with half a page more, or without its newest pages.

        Only pages that were never copied into the database can be lost: the log is synced before they are.
        """
        log, index = Path(f"{self.path}-wal"), Path(f"{self.path}-shm")
        if not log.exists() or log.stat().st_size < 32:
            return False
        with log.open("r+b") as file:
            head = file.read(32)
            (page,) = struct.unpack(">I", head[8:12])
            pages, kept = 0, copied_pages(index)
            while True:
                file.seek(32 + pages * (24 + page))
                frame = file.read(24)
                if len(frame) < 24 or frame[8:16] != head[16:24]:
                    break
                pages += 1
            if kind == "torn log":
                file.seek(32 + pages * (24 + page))
                torn = draw.randrange(1, 24 + page)
                file.write((struct.pack(">II", 1, 1) + head[16:24] + draw.randbytes(8 + page))[:torn])
                file.flush()
                return True
            most = min(MOST_PAGES, pages - kept - 1)
            if most < 1:
                return False
            lost = draw.randint(1, most)
            file.truncate(32 + (pages - lost) * (24 + page) + draw.randrange(24 + page))
            return True

    def judge(self, runs) -> list[str]:
        """What transactional steps wrote is there exactly once."""
        wrong = []
        db = apsw.Connection(str(self.path))
        if list(db.execute("SELECT 1 FROM sqlite_schema WHERE name = 'ledger'")):
            booked = Counter(run for (run,) in db.execute("SELECT run FROM ledger"))
            done = [run.id for run in runs if run.workflow == programs.booking.name and run.status is Status.COMPLETED]
            wrong += [f"{run} booked {booked[run]} times, not 3" for run in done if booked[run] != 3]
        wrong += [f"integrity: {line}" for (line,) in db.execute("PRAGMA integrity_check") if line != "ok"]
        db.close()
        return wrong

    def copy(self, folder: Path) -> None:
        for path in self.path.parent.glob("runs.db*"):
            if path.is_file():
                shutil.copy2(path, folder / path.name)


class Files:
    """One folder, shared by all processes."""

    options: dict = {}  # noqa: RUF012 - none
    cuts = ("torn log", "cut log")
    tells_time = False
    transactional = False

    def __init__(self, folder: Path) -> None:
        try:
            self.disk = SmallDisk(folder / "disk")
        except (OSError, subprocess.SubprocessError):
            self.disk = FewPages(folder / "pages")
        self.path = self.disk.folder / "runs"
        self.url = f"files:{self.path}"
        self.fill, self.free, self.close = self.disk.fill, self.disk.free, self.disk.close

    @staticmethod
    async def attend(engine) -> None:
        """What a worker does beside its work: it obeys the flag of a disk that only pretends to be full."""
        flag = Path(engine.store.url.removeprefix("files:")).parent / "full"
        disk = engine.store._disk
        real = disk.write

        def write(fd, data):
            if flag.exists():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(fd, data)

        disk.write = write
        await asyncio.Event().wait()

    def cut(self, kind: str, draw) -> bool:
        """Leave what a power cut may leave: files half written, the index torn; every other time no index at all."""
        try:
            if kind == "cut log":
                shutil.rmtree(self.path / "index")
                return True
            for folder in draw.sample(sorted(self.path.glob("runs/*/*")), 5):
                (folder / f".000007.json-{draw.randrange(99)}.tmp").write_bytes(draw.randbytes(draw.randrange(900)))
                (folder / f"000007-001-{draw.randrange(99)}.json").write_bytes(draw.randbytes(draw.randrange(900)))
            for file in (self.path / "index").glob("*.jsonl"):
                os.truncate(file, draw.randrange(file.stat().st_size + 1))
                with file.open("ab") as end:
                    end.write(b'{"run":"half' + draw.randbytes(9) + b"\n")
        except (OSError, ValueError):  # the disk is full, too, or there is too little to cut
            return False
        return True

    def judge(self, _runs) -> list[str]:
        """The store itself is whole, but for what was left half written."""
        store = FilesStore(self.path)
        try:
            flaws = [flaw for flaw in store.check() if flaw.kind in ("dangling", "index")]
            return [f"{flaw.kind} {flaw.about}: {flaw.what}" for flaw in flaws]
        finally:
            store.close()

    def copy(self, folder: Path) -> None:
        shutil.copytree(self.path, folder / "runs", dirs_exist_ok=True)


def copied_pages(index: Path) -> int:
    """How many pages of the log SQLite has tried to copy into the database; it keeps count in the log's index."""
    data = index.read_bytes()
    return struct.unpack("=I", data[128:132])[0] if len(data) >= 132 else 0


class PostgreSQL:
    """A server of its own, whose sessions are ended and which is killed while everybody works."""

    options: dict = {}  # noqa: RUF012 - none
    cuts = ("cut server",)
    tells_time = True
    transactional = True

    def __init__(self, folder: Path) -> None:
        self.server = Server.make()
        self.url = self.server.dsn
        self._up = True
        self._faults = itertools.cycle(["ended sessions", "killed server"])
        with psycopg.connect(self.url, autocommit=True) as admin:  # two who make it at once would be one too many
            admin.execute("CREATE TABLE ledger (run TEXT, number INTEGER)")

    def fill(self) -> str:
        """Let the store fail: every session is ended, or the server is gone until `free`. Which of the two."""
        kind = next(self._faults)
        if kind == "killed server":
            self._up = False
            self.server.kill()
        else:
            with psycopg.connect(self.url, autocommit=True) as admin:
                admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'keepstep%'"
                )
        return kind

    def free(self) -> None:
        if not self._up:
            self.server.start_again()
            self._up = True

    def close(self) -> None:
        self.server.remove()

    @staticmethod
    async def attend(engine) -> None:
        """What a worker does beside its work: nothing, for ever."""
        await asyncio.Event().wait()

    def cut(self, kind: str, draw) -> bool:
        """Everybody is dead; so is the server, which comes back."""
        if not self._up:
            return False
        self.server.kill()
        self.server.start_again()
        return True

    def judge(self, runs) -> list[str]:
        """What transactional steps wrote is there exactly once, and the store has no flaw."""
        with psycopg.connect(self.url, autocommit=True) as admin:
            booked = Counter(run for (run,) in admin.execute("SELECT run FROM ledger"))
        done = [run.id for run in runs if run.workflow == programs.booking.name and run.status is Status.COMPLETED]
        return [f"{run} booked {booked[run]} times, not 3" for run in done if booked[run] != 3]

    def copy(self, folder: Path) -> None:
        shutil.copy2(self.server.folder / "log", folder / "server.log")


STORES = {"sqlite": SQLite, "files": Files, "postgresql": PostgreSQL}
