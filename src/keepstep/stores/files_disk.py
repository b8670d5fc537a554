"""What a files store asks of the file system, one method per call, so that a test can put a faulty disk under it."""

# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH116, PTH208 - each method is one call of the system, by its own name

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator, Iterator
from typing import NamedTuple, TypeVar

from ..errors import StoreError, StoreFull, StoreUnavailable

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Identity(NamedTuple):
    """Which file it is: another one of the same name differs."""

    inode: int
    written_ns: int


T = TypeVar("T")
#: Work that stops wherever something must be synced, and is told when it is: so the syncs of many can overlap.
Steps = Generator[int, None, T]


class Disk:
    """The machine's own file system. Without `syncs` a power cut may lose what was written last."""

    def __init__(self, *, syncs: bool = True) -> None:
        self.syncs = syncs

    def create(self, path: str, data: bytes) -> Steps[Identity]:
        """Write a new file, durably; it must not be there. What could not be written whole is removed."""
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
        """Have a file hold this, whole, in place of what it held; not durable, and never torn for a reader."""
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
        """A file of one's own to append to."""
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
        """Whether the folder had to be made."""
        try:
            os.mkdir(path)
        except FileExistsError:
            return False
        return True

    def remove_folder(self, path: str) -> None:
        """Remove a folder with all that is in it; someone else may be doing the same."""
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
        """Have the turn at a folder until it is ended, or the process is gone; None if another has it."""
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
        """Give the turn up, also if a forked process has the descriptor, too."""
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        self.close(fd)

    # -- looking -----------------------------------------------------------------------------------------------------

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
        """Which file has this name just now."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Identity(found.st_ino, found.st_mtime_ns)

    def is_someones_turn(self, path: str) -> bool:
        """Whether somebody has the turn at a folder."""
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
        """What a folder holds; nothing if it is not there."""
        try:
            return os.listdir(path)
        except (FileNotFoundError, NotADirectoryError):
            return []


def finish(disk: Disk, work: Steps[T]) -> T:
    """Do a piece of work to its end, syncing as it goes."""
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
    """Tell the system's errors as Keepstep's; `unknown` says that the write may have happened."""
    try:
        yield
    except OSError as error:
        raise translated(error, path, unknown=unknown) from error


def translated(error: OSError, path: str, *, unknown: bool = False) -> StoreError:
    """The system's error as one of Keepstep's."""
    if error.errno in _FULL and not unknown:
        return StoreFull(f"{path}: no room left to write ({error.strerror})")
    return StoreUnavailable(f"{path}: {error.strerror or error}", unknown=unknown)
