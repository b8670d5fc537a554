"""The gates of a files store: a folder for each, with its limits and its state.

The folder is also the lock of a claim. It is never waited for: another claim serves the queue then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import StoreUnavailable
from ...model import GateChange, GateInfo, Share
from ...model.gate import SERVICE
from .. import gates, services
from .disk import Disk, finish, translating
from .names import folder_name

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode

_LIMITS, _STATE = "limits.json", "state.json"
#: Time in seconds that a change of limits, or a start with `dedupe`, waits for others, and its polling interval.
_WAIT_SECONDS = 5.0
_LOOK_SECONDS = 0.002


class Gates:
    """The gates in one folder."""

    def __init__(self, root: str, disk: Disk, unique: str) -> None:
        self._folder = f"{root}/gates"
        self._disk = disk
        self._unique = unique
        self._written = 0

    def list(self, kind: str) -> list[GateInfo]:
        """Return the gates of one kind, by name."""
        with translating(self._folder):
            found = [self._read(f"{self._folder}/{name}") for name in self._disk.names(self._folder)]
        mine = [gate for gate in found if gate is not None and gate.kind == kind]
        return sorted(mine, key=lambda gate: gate.name)

    def get(self, kind: str, name: str) -> GateInfo | None:
        """Return one gate."""
        return self._read(self._path(kind, name))

    def change(self, kind: str, name: str, change: GateChange) -> GateInfo:
        """Change the limits of a gate. Return it as it was before."""
        folder = self._path(kind, name)
        with translating(self._folder):
            self._disk.make_folder(self._folder)
            self._disk.make_folder(folder)
        with self._turn_at(folder):
            before = self._read(folder) or GateInfo(kind, name)
            after = gates.changed(before, change)
            if after is not before:
                fields = {"kind": kind, "name": name, "declared": after.declared, "changed": after.changed}
                self._put(f"{folder}/{_LIMITS}", {**fields, "log": msgspec.to_builtins(after.log)}, durably=True)
                if kind == SERVICE:
                    self.move(after)
        return before

    def move(self, gate: GateInfo) -> None:
        """Write where the rate and the turns of a gate stand, and the shares; a restart of the machine may lose it."""
        state: dict[str, Any] = {"used_until": gate.used_until, "turn": gate.turn, "line_next": gate.line_next}
        if gate.kind == SERVICE:
            shares = [(one.worker, one.held, one.need, one.since) for one in gate.shares]
            state |= {"spent_until": gate.spent_until, "breaker": gate.breaker, "shares": shares}
        self._put(f"{self._path(gate.kind, gate.name)}/{_STATE}", state)

    def service(self, name: str) -> tuple[GateInfo, bool]:
        """Return a service with the shares of all workers, and whether it has limits."""
        folder = self._path(SERVICE, name)
        gate = self._read(folder)
        return gate or self._with_state(folder, GateInfo(SERVICE, name)), gate is not None

    @contextlib.contextmanager
    def passing(self, name: str) -> Iterator[None]:
        """Hold the lock of a service, for a moment, to change its state."""
        folder = self._path(SERVICE, name)
        with translating(self._folder):
            self._disk.make_folder(self._folder)
            self._disk.make_folder(folder)
        with self._turn_at(folder):
            yield

    @contextlib.contextmanager
    def claiming(self, gate: GateInfo) -> Iterator[bool]:
        """Hold the lock of a gate. Give False at once if another process has it."""
        turn = self._disk.take_turn(self._path(gate.kind, gate.name))
        try:
            yield turn is not None
        finally:
            if turn is not None:
                self._disk.end_turn(turn)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Hold the lock under which runs with `dedupe` are created, one process at a time."""
        with translating(self._folder):
            self._disk.make_folder(self._folder)
        with self._turn_at(self._folder):
            yield

    @contextlib.contextmanager
    def _turn_at(self, folder: str) -> Iterator[None]:
        deadline = time.monotonic() + _WAIT_SECONDS
        with translating(folder):
            while (turn := self._disk.take_turn(folder)) is None:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"{folder} is locked by another process")
                time.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            self._disk.end_turn(turn)

    def _path(self, kind: str, name: str) -> str:
        return f"{self._folder}/{kind}-{folder_name(name)}"

    def _put(self, path: str, fields: dict[str, Any], *, durably: bool = False) -> None:
        self._written += 1
        with translating(path):
            temporary = f"{path}.{self._unique}-{self._written}.tmp"
            if durably:
                finish(self._disk, self._disk.create(temporary, _encode(fields)))
                self._disk.rename(temporary, path)
                finish(self._disk, self._disk.sync_folder(path.rpartition("/")[0]))
            else:
                self._disk.put(path, _encode(fields), temporary)

    def _read(self, folder: str) -> GateInfo | None:
        limits = self._fields(f"{folder}/{_LIMITS}")
        if limits is None:
            return None
        texts = (
            _encode(limits[name]) if limits.get(name) is not None else "" for name in ("declared", "changed", "log")
        )
        gate = gates.gate_of((limits.get("kind"), limits.get("name"), *texts, 0.0, "", False, ""))
        return self._with_state(folder, gate)

    def _with_state(self, folder: str, gate: GateInfo) -> GateInfo:
        state = self._fields(f"{folder}/{_STATE}") or {}
        turn, breaker, shares = state.get("turn"), state.get("breaker"), state.get("shares")
        return replace(
            gate,
            used_until=_seconds(state.get("used_until")),
            turn=turn if isinstance(turn, str) else "",
            line_next=bool(state.get("line_next")),
            spent_until=_seconds(state.get("spent_until")),
            breaker=breaker if isinstance(breaker, dict) else None,
            shares=tuple(map(_share, shares)) if isinstance(shares, list) else (),
        )

    def _fields(self, path: str) -> dict[str, Any] | None:
        try:
            return _decode(self._disk.read(path))
        except (OSError, msgspec.MsgspecError, ValueError):
            return None


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, float | int) else 0.0


def _share(row: Any) -> Share:
    try:
        return services.share_of(row)
    except (TypeError, ValueError):  # damage gives nobody a share
        return Share("")
