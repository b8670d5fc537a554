"""Operating system services for stores on local files: a fair write lock, worker locks, detection of local disks."""

from __future__ import annotations

import fcntl
import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..errors import DefinitionError, StoreUnavailable
from ..model.ids import is_id
from ..values.kinds import is_text

# -- holders of locks --------------------------------------------------------------------------------------------------

#: File in which Linux lists the holders of locks.
_LOCKS = Path("/proc/locks")


def lock_holder(*paths: str) -> str:
    """Describe the holder of the first locked file, as far as the system reports it.

    This process is named only if no other is: it may hold one of the locks while it waits for another.
    """
    own = ""
    for path in paths:
        for pid in _lock_holders(path):
            if pid != str(os.getpid()):
                return f"process {pid}{_state(pid)}"
            own = f"process {pid}"
    return own or "another process"


def _lock_holders(path: str) -> list[str]:
    try:
        inode = str(Path(path).stat().st_ino)
        lines = _LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234567 0 EOF
    held = (fields for line in lines if len(fields := line.split()) >= 6 and fields[1] != "->")
    return [fields[4] for fields in held if fields[3] == "WRITE" and fields[5].rpartition(":")[2] == inode]


def _state(pid: str) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return ", which is stopped" if stat.rpartition(")")[2].split()[0] in ("T", "t") else ""


# -- worker locks ------------------------------------------------------------------------------------------------------


class WorkerLocks:
    """One locked file per worker. The system unlocks it when the process dies, so a free lock proves a death."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._held: dict[str, int] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._held

    def take(self, worker: str) -> bool:
        """Lock a new file. Return False if the id was used before: a lock proves nothing about a second owner."""
        try:
            self._directory.mkdir(exist_ok=True)
            fd = os.open(self._path(worker), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            return False
        except OSError as error:
            raise StoreUnavailable(f"worker {worker!r} cannot make its lock file: {error}") from None
        fcntl.flock(fd, fcntl.LOCK_EX)
        self._held[worker] = fd
        return True

    def proves_death(self, worker: str) -> bool:
        """Whether the worker's file exists and is not locked. A missing file proves nothing."""
        if worker in self._held:
            return False
        if not is_id(worker):  # not an id of ours, and it must not lead to other files
            return True
        try:
            fd = os.open(self._path(worker), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(fd)

    def proves_life(self, worker: str) -> bool:
        """Whether the worker's file exists and is locked."""
        if worker in self._held:
            return True
        return is_id(worker) and self._path(worker).exists() and not self.proves_death(worker)

    def remove(self, worker: str) -> None:
        """Remove the file of a worker that has left or is marked dead."""
        if is_id(worker):
            self._path(worker).unlink(missing_ok=True)
        fd = self._held.pop(worker, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Release every lock, so that other processes see these workers as dead. A forked child does the same."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _path(self, worker: str) -> Path:
        return self._directory / f"{worker}.lock"


# -- forked children ---------------------------------------------------------------------------------------------------


class Abandoned(Protocol):
    """An object that must close its files in a forked child."""

    def abandon(self) -> None: ...


_open: weakref.WeakSet[Abandoned] = weakref.WeakSet()
_kept: list[Abandoned] = []


def abandon_in_children(thing: Abandoned) -> None:
    """Call `thing.abandon()` in every child that this process forks."""
    _open.add(thing)


def _abandon_all() -> None:
    for thing in list(_open):
        thing.abandon()
        _kept.append(thing)  # kept alive in the child, because closing a parent's SQLite connection there would harm it


os.register_at_fork(after_in_child=_abandon_all)


# -- local disks -------------------------------------------------------------------------------------------------------

#: File systems whose locks or shared memory do not work between machines.
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|afs|ceph|lustre|glusterfs|beegfs|ncpfs|davfs\d?"
    r"|fuse\.(sshfs|ceph|ceph-fuse|glusterfs|rclone|s3fs|gcsfuse|smbnetfs|davfs2?|mount_nfs|juicefs)"
)


def local_path(path: str | os.PathLike[str], what: str, check: Callable[[Path], None], *, allow_network: bool) -> str:
    """Return the real path of a store on local files; raise unless one can be opened there.

    `what` describes the path in messages. `check` raises if something else is at the path.
    """
    name = os.fspath(path)
    if "\0" in name or not is_text(name):
        raise DefinitionError(f"{name[:60]!r} is not the name of {what}")
    real = os.path.realpath(name)
    folder = Path(real).parent
    try:
        if not folder.is_dir():
            raise StoreUnavailable(f"{real} cannot be opened: the folder {folder} does not exist")
        check(Path(real))
    except OSError as error:
        raise StoreUnavailable(f"{name[:200]} cannot be opened: {error.strerror}") from None
    kind = None if allow_network else network_file_system(str(folder))
    if kind is not None:
        raise StoreUnavailable(
            f"{real} lies on a network file system ({kind}), where locks between machines do not hold: use a local "
            "disk, or PostgreSQL to share runs between machines; allow_network=True if one machine alone opens it"
        )
    return real


def network_file_system(path: str, mountinfo: str | None = None) -> str | None:
    """Return the type of network file system of a path; None for a local one, or if it is unknown."""
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    real = os.path.realpath(path)
    best, kind = "", None
    for line in mountinfo.splitlines():
        # 36 35 98:0 /root /mount/point rw,noatime shared:1 - ext4 /dev/sda1 rw
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
        if len(point) >= len(best) and (real == point or real.startswith(point.rstrip("/") + "/")):
            best, kind = point, _network_type(tail)
    return kind


def _network_type(tail: list[str]) -> str | None:
    kind = tail[0]
    if _NETWORK.fullmatch(kind):
        return kind
    # 9p also carries the disks of sandboxes (trans=fd); over other transports it is a share of another machine.
    shared = kind == "9p" and any(
        option in tail[-1] for option in ("trans=tcp", "trans=virtio", "trans=rdma", "trans=xen")
    )
    return kind if shared else None
