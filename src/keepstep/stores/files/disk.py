"""File system access of a files store, one method per call, so that a test can substitute a faulty disk."""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH116, PTH208 - each method is one call of the system, by its own name

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

from ...errors import StoreError, StoreFull, StoreUnavailable

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Identity(NamedTuple):
    """The identity of a file, which distinguishes it from another one of the same name."""

    inode: int
    written_ns: int


T = TypeVar("T")
#: Work that pauses wherever a file must be synced and resumes after it, so that the syncs of many works can overlap.
Steps = Generator[int, None, T]


class Disk:
    """The machine's own file system. Without `syncs`, a power cut may lose the newest writes."""

    def __init__(self, *, syncs: bool = True) -> None:
        self.syncs = syncs

    def create(self, path: str, data: bytes) -> Steps[Identity]:
        """Write a new file durably; the name must be free. A partly written file is removed."""
        fd = self.open_new(path)
        try:
            try:
                self.write(fd, data)
                found = os.fstat(fd)
                if self.syncs:
                    yield fd
            finally:
                self.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(path)
            raise
        return Identity(found.st_ino, found.st_mtime_ns)

    def sync_folder(self, path: str) -> Steps[None]:
        """Make the names in a folder durable."""
        if self.syncs:
            fd = self.open_folder(path)
            try:
                yield fd
            finally:
                self.close(fd)

    def put(self, path: str, data: bytes, temporary: str) -> None:
        """Replace the content of a file atomically, but not durably."""
        fd = self.open_new(temporary)
        try:
            self.write(fd, data)
        finally:
            self.close(fd)
        self.rename(temporary, path)

    # -- single calls ------------------------------------------------------------------------------------------------

    def open_new(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_log(self, path: str) -> int:
        """Open a file for appending, exclusive to this process."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)

    def open_folder(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def link(self, old: str, new: str) -> None:
        os.link(old, new)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def make_folder(self, path: str) -> bool:
        """Make a folder; return False if it existed."""
        try:
            os.mkdir(path)
        except FileExistsError:
            return False
        return True

    def remove_folder(self, path: str) -> None:
        """Remove a folder with its content; another process may be doing the same."""
        for name in self.names(path):
            inner = f"{path}/{name}"
            with contextlib.suppress(FileNotFoundError):
                try:
                    self.unlink(inner)
                except (IsADirectoryError, PermissionError):
                    self.remove_folder(inner)
        with contextlib.suppress(FileNotFoundError):
            self.remove_empty(path)

    def remove_empty(self, path: str) -> None:
        os.rmdir(path)

    def take_turn(self, path: str) -> int | None:
        """Take the turn at a folder until it is ended or the process ends; None if another process has it."""
        fd = self.open_folder(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close(fd)
            if isinstance(error, BlockingIOError):
                return None
            raise
        return fd

    def end_turn(self, fd: int) -> None:
        """End the turn, even if a forked process also has the descriptor."""
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.close(fd)

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, path: str) -> bytes:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pieces = []
            while piece := os.read(fd, 1 << 20):
                pieces.append(piece)
            return b"".join(pieces)
        finally:
            os.close(fd)

    def identity(self, path: str) -> Identity | None:
        """Return the identity of the file that has this name now."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Identity(found.st_ino, found.st_mtime_ns)

    def is_someones_turn(self, path: str) -> bool:
        """Whether any process has the turn at a folder."""
        try:
            fd = self.open_folder(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without such locks
            return False
        finally:
            self.close(fd)
        return False

    def names(self, path: str) -> list[str]:
        """Return the names in a folder; empty if it does not exist."""
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []


def finish(disk: Disk, work: Steps[T]) -> T:
    """Run a piece of work to its end, syncing where it asks for it."""
    try:
        fd = next(work)
        while True:
            try:
                disk.sync(fd)
            except OSError as error:
                fd = work.throw(error)
            else:
                fd = next(work)
    except StopIteration as end:
        result: T = end.value
        return result


@contextlib.contextmanager
def translating(path: str, *, unknown: bool = False) -> Iterator[None]:
    """Raise the system's errors as Keepstep's; `unknown` means that the write may have happened."""
    try:
        yield
    except OSError as error:
        raise translated(error, path, unknown=unknown) from error


def translated(error: OSError, path: str, *, unknown: bool = False) -> StoreError:
    """Return the system's error as one of Keepstep's."""
    if error.errno in _FULL and not unknown:
        return StoreFull(f"{path}: no room left to write ({error.strerror})")
    return StoreUnavailable(f"{path}: {error.strerror or error}", unknown=unknown)
