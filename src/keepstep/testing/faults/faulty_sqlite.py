"""A disk under SQLite that fails and loses power: a VFS that records what is durable, and fails on request.

While a `FaultyDisk` is mounted, every connection that this process opens uses it, without any change above:

    with FaultyDisk(folder) as disk:
        store = SQLiteStore(folder / "runs.db")
        ...
    for _, moment in disk.moments():
        write_image(image(moment, LOSE), other_folder)  # what a power cut there would have left

The files themselves stand for the system's page cache. The journal of operations determines, for any moment, which
content is durable and which is only pending. A power cut keeps a random part of the pending writes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import apsw

from .faulty import KEEP, LOSE, SECTOR, Chance, Faults, Fixed

__all__ = [
    "EXTREMES",
    "KEEP",
    "LOSE",
    "SECTOR",
    "Chance",
    "Fault",
    "FaultyDisk",
    "Fixed",
    "Moment",
    "image",
    "write_image",
]

#: Fault of one call: an I/O error, or, for a write, no room for all or for part of it.
Fault = Literal["io", "full", "short"]

#: The calls that can fail, and the result code that SQLite receives.
_RESULTS = {
    "read": apsw.SQLITE_IOERR_READ,
    "write": apsw.SQLITE_IOERR_WRITE,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
    "delete": apsw.SQLITE_IOERR_DELETE,
    "size": apsw.SQLITE_IOERR_FSTAT,
    "lock": apsw.SQLITE_IOERR_LOCK,
    "access": apsw.SQLITE_IOERR_ACCESS,
    "open": apsw.SQLITE_CANTOPEN,
}

_JOURNALS = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL

_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Done:
    """One entry of the journal: an operation on a file or a name, or a mark."""

    what: Literal["create", "write", "truncate", "sync", "sync names", "delete", "mark"]
    file: int = 0
    name: str = ""
    offset: int = 0
    data: bytes = b""
    note: Any = None


@dataclass(slots=True)
class _File:
    """A file at one moment: its durable content, and the operations since."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Done] = field(default_factory=list)

    def sync(self) -> None:
        for done in self.pending:
            _apply(self.durable, done)
        self.pending.clear()

    def versions(self) -> list[bytes]:
        """Return the content as last synced, and after each later operation."""
        content = bytearray(self.durable)
        found = [bytes(content)]
        for done in self.pending:
            _apply(content, done)
            found.append(bytes(content))
        return found


def _apply(content: bytearray, done: Done) -> None:
    if done.what == "truncate":
        del content[done.offset :]
        content.extend(bytes(done.offset - len(content)))
        return
    content.extend(bytes(max(done.offset - len(content), 0)))
    content[done.offset : done.offset + len(done.data)] = done.data


class Moment:
    """The content of a disk at one moment: files by number, and the durable and pending names that lead to them."""

    def __init__(self) -> None:
        self.files: dict[int, _File] = {}
        self.names: dict[str, int] = {}
        self.pending_names: list[tuple[str, int | None]] = []

    def play(self, done: Done) -> None:
        """Advance by one entry."""
        if done.what == "create":
            self.files[done.file] = _File()
            self.pending_names.append((done.name, done.file))
        elif done.what == "delete":
            self.pending_names.append((done.name, None))
        elif done.what in ("write", "truncate"):
            self.files[done.file].pending.append(done)
        elif done.what == "sync":
            self.files[done.file].sync()
        elif done.what == "sync names":
            for name, file in self.pending_names:
                _point(self.names, name, file)
            self.pending_names.clear()

    def name_versions(self) -> dict[str, list[int | None]]:
        """Return, for each name, its durable file or None, and its later targets."""
        found: dict[str, list[int | None]] = {name: [file] for name, file in self.names.items()}
        for name, file in self.pending_names:
            found.setdefault(name, [None]).append(file)
        return found

    @property
    def uncertain(self) -> bool:
        """Whether a power cut could have more than one result."""
        return bool(self.pending_names) or any(file.pending for file in self.files.values())


def _point(names: dict[str, int], name: str, file: int | None) -> None:
    if file is None:
        names.pop(name, None)
    else:
        names[name] = file


# -- power cuts --------------------------------------------------------------------------------------------------------


#: All pending writes are lost; all are kept; and combinations of both, file by file.
EXTREMES: Mapping[str, Fixed] = {
    "all lost": LOSE,
    "all kept": KEEP,
    "only names kept": Fixed(names=True),
    "all kept but names": Fixed(kept=("",)),
    "only the database kept": Fixed(kept=(".db",), names=True),
    "only the journals kept": Fixed(kept=("-wal", "-journal"), names=True),
}


def image(moment: Moment, fate: Fixed | Chance) -> dict[str, bytes]:
    """Return the files that remain after a power cut at this moment, by name."""
    left: dict[str, bytes] = {}
    for name, leads in sorted(moment.name_versions().items()):
        file = fate.file(name, leads) if len(leads) > 1 else leads[0]
        if file is not None:
            left[name] = fate.content(name, moment.files[file].versions())
    return left


# -- the disk ----------------------------------------------------------------------------------------------------------


class FaultyDisk(Faults[Fault]):
    """A folder whose SQLite files are watched and may fail; `with` mounts it for all connections of this process.

    `journal` holds every operation, in order; `mark` adds notes of a test in between. `fail` sets which calls fail,
    counted from 1 over all calls; `calls` lists the kind of each.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = os.path.realpath(os.fspath(folder))
        self.journal: list[Done] = []
        self._files: dict[str, int] = {}
        self._vfs: _VFS | None = None

    def __enter__(self) -> Self:
        self._vfs = _VFS(f"keepstep-faulty-{next(_numbers)}", self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._vfs is not None:
            self._vfs.unregister()
            self._vfs = None

    def mark(self, note: Any) -> None:
        """Add a note to the journal."""
        self.journal.append(Done("mark", note=note))

    def marks(self, before: int) -> list[Any]:
        """Return the notes before a moment."""
        return [done.note for done in self.journal[:before] if done.what == "mark"]

    # -- failing -----------------------------------------------------------------------------------------------------

    def begin(self, call: str) -> bool:
        """Count a call; raise if it fails at once, return True if it fails after a part of it."""
        fault = self.fault_of(call)
        if fault == "io":
            raise _failed(call)
        if fault == "full" and call == "write":
            raise apsw.FullError("the disk is full")
        return fault == "short" and call == "write"

    # -- keeping the journal -----------------------------------------------------------------------------------------

    def opened(self, name: str, *, existed: bool) -> int | None:
        """Return the number of an opened file, or None if it is not watched."""
        if os.path.dirname(name) != self.folder or name.endswith("-shm"):  # noqa: PTH120 - SQLite's own spelling
            return None
        short = os.path.basename(name)  # noqa: PTH119
        if not existed or short not in self._files:
            self._files[short] = next(_numbers)
            self.journal.append(Done("create", self._files[short], short))
            if existed:  # it existed before the disk was mounted, so it is durable
                number = self._files[short]
                self.journal.append(Done("write", number, short, 0, Path(name).read_bytes()))
                self.journal += [Done("sync", number, short), Done("sync names")]
        return self._files[short]

    def deleted(self, name: str, *, synced: bool) -> None:
        if os.path.dirname(name) != self.folder:  # noqa: PTH120
            return
        short = os.path.basename(name)  # noqa: PTH119
        self._files.pop(short, None)
        self.journal.append(Done("delete", name=short))
        if synced:
            self.journal.append(Done("sync names"))

    # -- power cuts --------------------------------------------------------------------------------------------------

    def moments(self) -> Iterator[tuple[int, Moment]]:
        """Yield every moment of a possible power cut: before each journal entry that is not a mark, and at the end.

        The moment is one object that advances, so its content must be read at once.
        """
        moment = Moment()
        for number, done in enumerate(self.journal):
            if done.what != "mark":
                yield number, moment
                moment.play(done)
        yield len(self.journal), moment


def _failed(call: str) -> Exception:
    kind: Any = apsw.CantOpenError if call == "open" else apsw.IOError
    error: Exception = kind(f"the disk failed ({call})")
    error.extendedresult = _RESULTS[call]  # type: ignore[attr-defined]
    return error


def write_image(files: Mapping[str, bytes], folder: str | os.PathLike[str]) -> None:
    """Write the remains of a power cut into a folder."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (place / name).write_bytes(content)


# -- VFS ---------------------------------------------------------------------------------------------------------------


class _VFS(apsw.VFS):
    """Forwards everything to the system's own VFS, and reports it to the disk."""

    def __init__(self, name: str, disk: FaultyDisk) -> None:
        self._disk = disk
        super().__init__(name, "unix", makedefault=True)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - SQLite's names
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._disk.begin("open")
        existed = path is None or Path(path).exists()
        return _VFSFile(self._disk, name, path, flags, existed=existed)

    def xDelete(self, name: str, syncdir: bool) -> None:  # noqa: N802
        self._disk.begin("delete")
        super().xDelete(name, False)
        self._disk.deleted(name, synced=syncdir)

    def xAccess(self, name: str, flags: int) -> bool:  # noqa: N802
        self._disk.begin("access")
        return super().xAccess(name, flags)


class _VFSFile(apsw.VFSFile):
    """One open file. Nothing is really synced, to save time."""

    def __init__(self, disk: FaultyDisk, name: Any, path: str | None, flags: list[int], *, existed: bool) -> None:
        self._disk = disk
        # SQLite syncs the folder with the first sync of a journal that it may have created, and with nothing else.
        self._syncs_names = bool(flags[0] & _JOURNALS and flags[0] & apsw.SQLITE_OPEN_CREATE)
        super().__init__("unix", name, flags)
        self._file = None if path is None else disk.opened(path, existed=existed)

    def _note(self, done: Done) -> None:
        if self._file is not None:
            self._disk.journal.append(done)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        self._disk.begin("read")
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        whole = bytes(data)
        short = self._disk.begin("write")
        written = whole[: len(whole) // 2] if short else whole
        super().xWrite(written, offset)
        self._note(Done("write", self._file or 0, offset=offset, data=written))
        if short:
            raise apsw.FullError("the disk is full, and was not quite")

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        self._disk.begin("truncate")
        super().xTruncate(newsize)
        self._note(Done("truncate", self._file or 0, offset=newsize))

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.begin("sync")
        self._note(Done("sync", self._file or 0))
        if self._syncs_names:
            self._note(Done("sync names"))
            self._syncs_names = False

    def xFileSize(self) -> int:  # noqa: N802
        self._disk.begin("size")
        return super().xFileSize()

    def xLock(self, level: int) -> None:  # noqa: N802
        self._disk.begin("lock")
        super().xLock(level)
