"""The workers of a files store: heartbeat files, locks that prove life, and the detection of dead workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import msgspec

from ...checks import check_id
from ...errors import StoreUnavailable
from ...model import WorkerInfo
from ...model.ids import is_id
from ...ports import Clock, instant
from ...records.record import Instant
from ..os_locks import WorkerLocks
from ..watch import Watch
from .disk import Disk, translating

#: Time to remember the id of a dead worker after its last run was taken over.
_REMEMBER_DEAD = timedelta(days=7)


class Heartbeat(msgspec.Struct, omit_defaults=True):
    """The content of a worker's file."""

    boot: str
    boot_seconds: float
    renewed_at: Instant
    started_at: Instant
    host: str = ""
    pid: int = 0
    workflows: tuple[str, ...] = ()
    progress: dict[str, msgspec.Raw] = msgspec.field(default_factory=dict)
    lease_seconds: float | None = None


_encode = msgspec.json.Encoder(order="sorted").encode
_decode = msgspec.json.Decoder(Heartbeat).decode


class Workers:
    """The workers of a store. A worker marked dead stays so: its mark is a file that is never removed.

    A worker is first marked as dying, then its heartbeat is read once more, and only then it is dead. A renewing worker
    writes its heartbeat first and then checks for its mark, so at least one side sees the other.
    """

    def __init__(self, folder: str, disk: Disk, clock: Clock, lease_seconds: float, unique: Callable[[], str]) -> None:
        self._folder = folder
        self._disk = disk
        self._clock = clock
        self._lease_seconds = lease_seconds
        self._watch = Watch(clock, lease_seconds)
        self._unique = unique
        self._enrolled: dict[str, Any] = {}
        self.locks = WorkerLocks(folder)

    def renew(self, worker: WorkerInfo) -> bool:
        """Write a heartbeat; return False if the worker was marked dead."""
        check_id(worker.id, "worker id")
        try:
            known = self._renew(worker)
        except StoreUnavailable:
            self._watch.failed(worker.id)
            raise
        if known:
            self._watch.renewed(worker.id)
            self._heartbeats()
        return known

    def _renew(self, worker: WorkerInfo) -> bool:
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
                lease_seconds=self._lease_seconds,
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
        """Remove a worker's files; return False if it was marked dead before."""
        with translating(self._folder):
            alive = not self._is_marked(worker) and self._disk.identity(self._path(worker)) is not None
            for kind in ("json", "drain") if alive else ():
                with contextlib.suppress(FileNotFoundError):
                    self._disk.unlink(self._path(worker, kind))
        if worker in self.locks:
            self.locks.remove(worker)
        if alive:
            self._enrolled.pop(worker, None)
        return alive

    def drain(self, worker: str) -> bool:
        """Mark a registered worker as draining; return False if there is none."""
        if not is_id(worker):
            return False
        with translating(self._folder):
            if self._is_marked(worker) or self._disk.identity(self._path(worker)) is None:
                return False
            with contextlib.suppress(FileExistsError):
                self._disk.close(self._disk.open_new(self._path(worker, "drain")))
            return True

    def drain_at(self, worker: str) -> datetime | None:
        """Return when a worker was marked as draining; None if it was not."""
        mark = self._disk.identity(self._path(worker, "drain"))
        return None if mark is None else instant(mark.written_ns / 1e9)

    # -- liveness ----------------------------------------------------------------------------------------------------

    def liveness_of_workers(self, me: str) -> tuple[set[str], list[str]]:
        """Return the living workers, including the caller, and those to be marked dead."""
        alive: set[str] = {me}
        dead: list[str] = []
        with translating(self._folder):
            for worker, beat in self._heartbeats().items():
                if worker != me:
                    (dead.append if self._may_be_given_up(me, worker, beat) else alive.add)(worker)
        return alive, dead

    def _heartbeats(self) -> dict[str, Heartbeat | str | None]:
        """Return the heartbeats of all workers not marked dead, and pass them to the watch."""
        with translating(self._folder):
            beats = {worker: self._beat(worker) for worker in self._named(".json") if not self._is_gone(worker)}
        self._watch.observe({worker: _mark(beat) for worker, beat in beats.items()})
        return beats

    def _may_be_given_up(self, me: str, worker: str, beat: Heartbeat | str | None) -> bool:
        if not isinstance(beat, Heartbeat):  # torn by a power cut, or damaged: the lock decides
            return not self.locks.proves_life(worker)
        return self._watch.is_silent(me, worker, beat.lease_seconds) or self._is_proven_dead(worker, beat)

    def mark_dead(self, me: str, worker: str) -> bool:
        """Mark a worker dead, unless it has just written a heartbeat."""
        dying = self._path(worker, "dying")
        with translating(self._folder):
            with contextlib.suppress(FileExistsError):
                self._disk.close(self._disk.open_new(dying))
            if not self._may_be_given_up(me, worker, self._heartbeats().get(worker)):
                return False
            with contextlib.suppress(FileNotFoundError):  # another process was first
                self._disk.rename(dying, self._path(worker, "gone"))
        self.locks.remove(worker)
        return True

    def is_gone(self, worker: str) -> bool:
        """Whether a worker may no longer claim anything."""
        with translating(self._folder):
            return self._is_marked(worker) or self._disk.identity(self._path(worker)) is None

    def is_given_up(self, worker: str) -> bool:
        """Whether a worker has left or is marked dead; one that is being marked may still prove that it is alive."""
        with translating(self._folder):
            return self._is_gone(worker) or self._disk.identity(self._path(worker)) is None

    def is_alive(self, worker: str) -> bool:
        """Whether a worker is registered and not marked dead."""
        if not is_id(worker):
            return False
        with translating(self._folder):
            enrolled = self._disk.identity(self._path(worker)) is not None
            return enrolled and not self._is_gone(worker) and self._is_shown_alive(worker)

    def _is_proven_dead(self, worker: str, beat: Heartbeat) -> bool:
        """Whether the worker's lock is free, or the machine has restarted since its heartbeat."""
        return beat.boot != self._clock.boot()[0] or self.locks.proves_death(worker)

    def _is_shown_alive(self, worker: str) -> bool:
        """Whether the worker's lease has not expired, for display only; it does not justify claiming a run."""
        beat = self._beat(worker)
        if not isinstance(beat, Heartbeat):
            return self.locks.proves_life(worker)
        is_leased = self._clock.boot()[1] - beat.boot_seconds <= self._watch.lease_of(beat.lease_seconds)
        return is_leased and not self._is_proven_dead(worker, beat)

    def _is_gone(self, worker: str) -> bool:
        return self._disk.identity(self._path(worker, "gone")) is not None

    def _is_marked(self, worker: str) -> bool:
        return self._is_gone(worker) or self._disk.identity(self._path(worker, "dying")) is not None

    def forget_long_dead(self, owners: set[str]) -> None:
        """Remove the remains of workers that died long ago and own nothing."""
        oldest = time.time() - _REMEMBER_DEAD.total_seconds()  # the clock that dates the files
        with translating(self._folder):
            for worker in self._named(".gone"):
                mark = self._disk.identity(self._path(worker, "gone"))
                if worker not in owners and mark is not None and mark.written_ns / 1e9 < oldest:
                    for kind in ("json", "drain", "gone"):
                        with contextlib.suppress(FileNotFoundError):
                            self._disk.unlink(self._path(worker, kind))

    # -- reading -----------------------------------------------------------------------------------------------------

    def listed(self, leases: dict[str, int], *, gone: bool) -> list[WorkerInfo]:
        """Return every worker that is alive or owns a run; with `gone`, also the other ones that are remembered."""
        found = []
        with translating(self._folder):
            for worker in sorted(self._named(".json")):
                is_gone = self._is_gone(worker)
                if is_gone and worker not in leases and not gone:
                    continue
                one = WorkerInfo(
                    worker, alive=not is_gone and self._is_shown_alive(worker), leases=leases.get(worker, 0)
                )
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
                        drain_at=self.drain_at(worker),
                    )
                )
        return found

    def workflows(self, worker: str) -> tuple[str, ...]:
        """Return the workflows that a worker knows; none if its heartbeat cannot be read."""
        beat = self._beat(worker) if is_id(worker) else None
        return beat.workflows if isinstance(beat, Heartbeat) else ()

    def progress(self, worker: str, run: str) -> bytes | None:
        """Return a worker's progress on a run. It is only displayed, so no error is raised."""
        beat = self._beat(worker) if is_id(worker) else None
        value = beat.progress.get(run) if isinstance(beat, Heartbeat) else None
        return None if value is None else _compact(bytes(value))

    def _beat(self, worker: str) -> Heartbeat | str | None:
        """Return a worker's heartbeat, the reason why it is unreadable, or None if there is none."""
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
        """Release every lock, so that other processes see these workers as dead."""
        self.locks.close()


def _mark(beat: Heartbeat | str | None) -> tuple[str, float] | str | None:
    """Return a value that changes with every heartbeat."""
    return (beat.boot, beat.boot_seconds) if isinstance(beat, Heartbeat) else beat


def _compact(value: bytes) -> bytes:
    """Return a value in its original form, without the indentation of the file."""
    return msgspec.json.format(value, indent=-1)
