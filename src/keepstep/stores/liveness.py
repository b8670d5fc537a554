"""What a store on local files asks of the operating system: a fair turn to write, proof of life, and a local disk."""

from __future__ import annotations

import fcntl
import os
import re
import time
import weakref
from pathlib import Path
from typing import Protocol

from ..errors import StoreUnavailable
from ..model.ids import is_id

# -- a fair turn to write ----------------------------------------------------------------------------------------------

#: So long is waited for who comes next and does not: a process that is stopped while it waits must not stop the others.
COURTESY_SECONDS = 0.1
#: And so long it is not waited for again.
_DISCOURTESY_SECONDS = 1.0
#: How often who waits looks whether the turn has come, at first and when it has waited for long.
_LOOK_SECONDS = 0.0001
_LOOK_SELDOM_SECONDS = 0.002


class Turnstile:
    """Lets one writer in at a time, of all processes, and the one that has waited before the one that has just left.

    SQLite's own busy handler sleeps and tries again, and a busy neighbour always wins against a sleeper. So it is with
    a lock alone: whoever gives it up and takes it again is faster than the one that has to be woken for it. Therefore
    who waits holds a second lock, and while that is held nobody else takes the first. Locks are looked at, not waited
    for in the kernel: such a wait cannot end with the time that there is.
    """

    def __init__(self, path: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fd = os.open(path, flags, 0o666)
        try:
            self._next = os.open(f"{path}-next", flags, 0o666)
        except OSError:
            os.close(self._fd)
            raise
        self._impolite_until = 0.0
        self._closed = False

    def enter(self, seconds: float) -> bool:
        """Take the turn, within so many seconds; False if it did not come. Called by one thread at a time."""
        begun = now = time.monotonic()
        polite_until = begun if begun < self._impolite_until else begun + COURTESY_SECONDS
        is_next = False
        try:
            while True:
                is_next = is_next or _locked(self._next)
                if _locked(self._fd):
                    if is_next:
                        return True
                    if now >= polite_until:
                        if begun >= self._impolite_until:  # or it would never end
                            self._impolite_until = now + _DISCOURTESY_SECONDS
                        return True
                    fcntl.flock(self._fd, fcntl.LOCK_UN)  # it is the next one's, who may be about to come
                elif begun >= self._impolite_until:
                    polite_until = now + COURTESY_SECONDS  # nobody is late while someone has the turn
                if now - begun >= seconds:
                    return False
                time.sleep(_LOOK_SECONDS if now - begun < COURTESY_SECONDS else _LOOK_SELDOM_SECONDS)
                now = time.monotonic()
        finally:
            if is_next:
                fcntl.flock(self._next, fcntl.LOCK_UN)

    def leave(self) -> None:
        """Give the turn to the next."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of both; also in a forked child, whose copies would keep the parent's locks alive."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)
            os.close(self._next)


def _locked(fd: int) -> bool:
    """Whether the lock was free, and is ours now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_holder(*paths: str) -> str:
    """Who holds a lock on one of these files, in words, as far as the system tells."""
    inodes = set()
    for path in paths:
        try:
            inodes.add(str(Path(path).stat().st_ino))
        except OSError:
            continue
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return "another process"
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:00:1234567 0 EOF
        fields = line.split()
        if len(fields) >= 6 and fields[1] != "->" and fields[3] == "WRITE" and fields[5].rpartition(":")[2] in inodes:
            return f"process {fields[4]}{_state(fields[4])}"
    return "another process"


def _state(pid: str) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return ", which is stopped" if stat.rpartition(")")[2].split()[0] in ("T", "t") else ""


# -- proof of life -----------------------------------------------------------------------------------------------------


class WorkerLocks:
    """One locked file per worker. The system unlocks it when the process dies, so a free lock proves a death."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._held: dict[str, int] = {}

    def __contains__(self, worker: str) -> bool:
        return worker in self._held

    def take(self, worker: str) -> bool:
        """Lock a new file; False if this id was ever used, because a lock proves nothing about a second owner."""
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
        """Whether the worker's file is there and nobody holds it. A missing file proves nothing."""
        if worker in self._held:
            return False
        if not is_id(worker):  # no worker of ours has such an id, and it must not lead to other files
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
        """Whether the worker's file is there and someone holds it."""
        if worker in self._held:
            return True
        return is_id(worker) and self._path(worker).exists() and not self.proves_death(worker)

    def remove(self, worker: str) -> None:
        """Remove the file of a worker that has left or is given up for dead."""
        if is_id(worker):
            self._path(worker).unlink(missing_ok=True)
        fd = self._held.pop(worker, None)
        if fd is not None:
            os.close(fd)

    def close(self) -> None:
        """Let go of every lock: from now on others see these workers as dead. Also what a forked child does."""
        while self._held:
            os.close(self._held.popitem()[1])

    def _path(self, worker: str) -> Path:
        return self._directory / f"{worker}.lock"


# -- forked children ---------------------------------------------------------------------------------------------------


class Abandoned(Protocol):
    """What must let go of its files in a forked child."""

    def abandon(self) -> None: ...


_open: weakref.WeakSet[Abandoned] = weakref.WeakSet()
_kept: list[Abandoned] = []


def abandon_in_children(thing: Abandoned) -> None:
    """Have `thing.abandon()` called in every child that this process forks."""
    _open.add(thing)


def _abandon_all() -> None:
    for thing in list(_open):
        thing.abandon()
        _kept.append(thing)  # never collected in the child: closing a parent's SQLite connection there would harm it


os.register_at_fork(after_in_child=_abandon_all)


# -- a local disk ------------------------------------------------------------------------------------------------------

#: File systems whose locks or shared memory do not hold between machines.
_NETWORK = re.compile(
    r"nfs\d?|cifs|smb\d?|smbfs|afs|ceph|lustre|glusterfs|beegfs|ncpfs|davfs\d?"
    r"|fuse\.(sshfs|ceph|ceph-fuse|glusterfs|rclone|s3fs|gcsfuse|smbnetfs|davfs2?|mount_nfs|juicefs)"
)


def network_file_system(path: str, mountinfo: str | None = None) -> str | None:
    """The type of network file system that a path lies on, or None for a local one, or where it cannot be told."""
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
    # 9p carries sandboxes' own disks too (trans=fd); over the other transports it is a share of another machine.
    shared = kind == "9p" and any(
        option in tail[-1] for option in ("trans=tcp", "trans=virtio", "trans=rdma", "trans=xen")
    )
    return kind if shared else None
