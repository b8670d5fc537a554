"""The workers of a files store: a heartbeat file each, a lock that proves life, and how one is given up for dead."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec

from ..errors import StoreUnavailable
from ..model import WorkerInfo
from ..model.ids import check_id, is_id
from ..ports import Clock, instant
from .files_disk import Disk, translating
from .liveness import WorkerLocks
from .records import Instant

#: How long the id of a dead worker is remembered once it owns nothing.
_REMEMBER_DEAD = timedelta(days=7)


class Heartbeat(msgspec.Struct, omit_defaults=True):
    """What a worker's file says."""

    boot: str
    boot_seconds: float
    renewed_at: Instant
    started_at: Instant
    host: str = ""
    pid: int = 0
    workflows: tuple[str, ...] = ()
    progress: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Heartbeat).decode


class Workers:
    """Who works on this store. A worker that is given up stays so: it is named by a file that nobody takes away.

    It is named as dying first, then its heartbeat is read once more, and only then it is dead. A worker that renews
    its leases writes its heartbeat first and looks for its name among the dying after it, so one of the two sees.
    """

    def __init__(self, folder: str, disk: Disk, clock: Clock, lease_seconds: float, unique: Callable[[], str]) -> None:
        self._folder = folder
        self._disk = disk
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._unique = unique
        self._enrolled: dict[str, Any] = {}
        self.locks = WorkerLocks(folder)

    def renew(self, worker: WorkerInfo) -> bool:
        """Write a heartbeat; False if the worker was given up."""
        check_id(worker.id, "worker id")
        with translating(self._folder):
            self._disk.make_folder(self._folder)
            if worker.id not in self.locks and (self._was_used(worker.id) or not self.locks.take(worker.id)):
                return False
            now = instant(self._clock.now())
            before = self._enrolled.get(worker.id)
            if before is not None and self._disk.identity(self._path(worker.id)) is None:
                return False
            boot, seconds = self._clock.boot()
            beat = Heartbeat(
                boot=boot,
                boot_seconds=seconds,
                renewed_at=now,
                started_at=worker.started_at or before or now,
                host=worker.host,
                pid=worker.pid,
                workflows=worker.workflows,
                progress={run: msgspec.Raw(value) for run, value in worker.progress.items()},
            )
            text = msgspec.json.format(_encode(beat), indent=2) + b"\n"
            self._disk.put(self._path(worker.id), text, f"{self._folder}/.{worker.id}-{self._unique()}.tmp")
            if self._is_marked(worker.id):
                return False
        self._enrolled[worker.id] = beat.started_at
        return True

    def _was_used(self, worker: str) -> bool:
        return worker in self._enrolled or self._is_marked(worker)

    def leave(self, worker: str) -> bool:
        """Take a worker's files away; False if it was given up before."""
        with translating(self._folder):
            alive = not self._is_marked(worker) and self._disk.identity(self._path(worker)) is not None
            if alive:
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(self._path(worker))
        if worker in self.locks:
            self.locks.remove(worker)
        if alive:
            self._enrolled.pop(worker, None)
        return alive

    # -- who lives ---------------------------------------------------------------------------------------------------

    def roll_call(self, me: str) -> tuple[set[str], list[str]]:
        """Who is alive, the asker included, and who must be given up for dead."""
        alive: set[str] = {me}
        dead: list[str] = []
        with translating(self._folder):
            for worker in self._named(".json"):
                if worker != me and not self._is_gone(worker):
                    (alive.add if self._lives(worker) else dead.append)(worker)
        return alive, dead

    def bury(self, worker: str) -> bool:
        """Give a worker up, unless its heartbeat came just now."""
        dying = self._path(worker, "dying")
        with translating(self._folder):
            with contextlib.suppress(FileExistsError):
                self._disk.close(self._disk.open_new(dying))
            if self._lives(worker):
                return False
            with contextlib.suppress(FileNotFoundError):  # someone else was first
                self._disk.rename(dying, self._path(worker, "gone"))
        self.locks.remove(worker)
        return True

    def is_gone(self, worker: str) -> bool:
        """Whether a worker may take nothing any more."""
        with translating(self._folder):
            return self._is_marked(worker) or self._disk.identity(self._path(worker)) is None

    def is_alive(self, worker: str) -> bool:
        """Whether a worker is enrolled and was not given up."""
        if not is_id(worker):
            return False
        with translating(self._folder):
            enrolled = self._disk.identity(self._path(worker)) is not None
            return enrolled and not self._is_gone(worker) and self._lives(worker)

    def _lives(self, worker: str) -> bool:
        beat = self._beat(worker)
        if not isinstance(beat, Heartbeat):  # torn by a power cut, or damaged: the lock tells
            return self.locks.proves_life(worker)
        boot, now = self._clock.boot()
        fresh = beat.boot == boot and now - beat.boot_seconds <= self._lease_seconds
        return fresh and not self.locks.proves_death(worker)

    def _is_gone(self, worker: str) -> bool:
        return self._disk.identity(self._path(worker, "gone")) is not None

    def _is_marked(self, worker: str) -> bool:
        return self._is_gone(worker) or self._disk.identity(self._path(worker, "dying")) is not None

    def forget_the_old(self, owners: set[str]) -> None:
        """Remove what is left of workers that died long ago and own nothing."""
        oldest = time.time() - _REMEMBER_DEAD.total_seconds()  # by the clock that dates the files
        with translating(self._folder):
            for worker in self._named(".gone"):
                mark = self._disk.identity(self._path(worker, "gone"))
                if worker not in owners and mark is not None and mark.written_ns / 1e9 < oldest:
                    for kind in ("json", "gone"):
                        with contextlib.suppress(FileNotFoundError):
                            self._disk.unlink(self._path(worker, kind))

    # -- looking -----------------------------------------------------------------------------------------------------

    def listed(self, leases: dict[str, int]) -> list[WorkerInfo]:
        """Every worker that is alive or owns something."""
        found = []
        with translating(self._folder):
            for worker in sorted(self._named(".json")):
                gone = self._is_gone(worker)
                if gone and worker not in leases:
                    continue
                one = WorkerInfo(worker, alive=not gone and self._lives(worker), leases=leases.get(worker, 0))
                beat = self._beat(worker)
                if beat is None:
                    continue
                if isinstance(beat, str):
                    found.append(replace(one, damage=f"its file cannot be read: {beat}"))
                    continue
                found.append(
                    replace(
                        one,
                        host=beat.host,
                        pid=beat.pid,
                        started_at=beat.started_at,
                        renewed_at=beat.renewed_at,
                        workflows=beat.workflows,
                        progress={run: bytes(value) for run, value in beat.progress.items()},
                    )
                )
        return found

    def progress(self, worker: str, run: str) -> bytes | None:
        """How far a worker says it is with a run; worth showing, never worth failing for."""
        beat = self._beat(worker) if is_id(worker) else None
        value = beat.progress.get(run) if isinstance(beat, Heartbeat) else None
        return None if value is None else _compact(bytes(value))

    def _beat(self, worker: str) -> Heartbeat | str | None:
        """What a worker's file says; why it cannot be read; or None if there is none."""
        try:
            return _decode(self._disk.read(self._path(worker)))
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, ValueError, OSError) as error:
            return str(error)

    def _named(self, ending: str) -> list[str]:
        names = [name.removesuffix(ending) for name in self._disk.names(self._folder) if name.endswith(ending)]
        return [name for name in names if is_id(name)]

    def _path(self, worker: str, kind: str = "json") -> str:
        if not is_id(worker):
            raise StoreUnavailable(f"{worker[:60]!r} is not the id of a worker")
        return f"{self._folder}/{worker}.{kind}"

    def close(self) -> None:
        """Let go of every lock: from now on others see these workers as dead."""
        self.locks.close()


def _compact(value: bytes) -> bytes:
    """A value as it was given, before it was indented with the rest of the file."""
    return msgspec.json.format(value, indent=-1)
