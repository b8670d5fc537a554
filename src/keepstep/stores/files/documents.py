"""Documents in a files store: a folder for each collection, in it a folder for each key, in it a file for each version.

A file is a line of JSON with the facts of the version, then its value as it was given. One process at a time reads or
writes documents. A transaction that changes several documents is first written as a plan, which is carried out again
if the process ends in between.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from ...errors import CheckpointCorrupt, StoreUnavailable
from ...ports import Document, DocumentQuery, Put, Written
from .. import documents
from ..documents import Change, Kept, Name, Stored, Wanted
from .disk import Disk, finish, translating
from .names import folder_name

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_decode_plan = msgspec.json.Decoder(list[tuple[str, str | None]]).decode

#: Time in seconds that a call waits for another process, and its polling interval.
_WAIT_SECONDS = 5.0
_LOOK_SECONDS = 0.001
#: Bytes of a folder's name at most. A longer text is shortened, and its hash makes it unique.
_LONGEST = 200
_KEPT = 60
_HASHED = 24
_PLAIN = re.compile(r"[^a-z0-9_\-]")
_VERSION = re.compile(r"(\d{6,})\.document")
_PLAN, _EXPIRES = ".plan", ".expires"


class FileDocuments:
    """The documents in one folder. A file of the folder `owners` names a document that goes with a run."""

    def __init__(self, root: str, disk: Disk, unique: Callable[[], str]) -> None:
        self._folder = f"{root}/documents"
        self._disk = disk
        self._unique = unique
        self._mutex = threading.Lock()

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, batches: Sequence[Sequence[Put]], now: float) -> list[Written]:
        """Write batches in one transaction."""
        with self._turn(writes=True):
            kept = {name: self._kept(*name, most) for name, most in documents.wanted(batches).items()}
            answers, changes = documents.decide(batches, kept, now)
            self._mark(changes)
            plan = [step for name, change in changes.items() for step in self._steps(name, change)]
            if len(changes) == 1 and all(len(change.rows) == 1 and not change.removes for change in changes.values()):
                self._carry_out(plan)  # after a crash, older versions may be left: the next write removes them
            elif plan:
                self._carry_out_at_once(plan)
            return answers

    def _kept(self, collection: str, key: str, most: int) -> list[Kept]:
        folder = self._path(collection, key)
        found = []
        for version in self._versions(folder)[::-1][:most]:
            one = self._read(folder, version, values=False)
            found.append(Kept(version, one.writer, one.at, one.expires_at))
        return found

    def _mark(self, changes: dict[Name, Change]) -> None:
        """Write which documents have owners and which collections have documents that expire, before they exist."""
        for (collection, key), change in changes.items():
            for owner in {row.owner for row in change.rows if row.owner}:
                path = f"{self._folder}/.owners/{folder_name(owner)}/{_hash(collection, key)}"
                self._put(path, _encode((collection, key)), unless_there=True)
            if any(row.expires_at is not None for row in change.rows):
                self._put(f"{self._folder}/{encoded(collection)}/{_EXPIRES}", b"", unless_there=True)

    def _steps(self, name: Name, change: Change) -> Iterator[tuple[str, bytes | None]]:
        """Yield the files to write and, with None, those to remove, relative to the folder."""
        path = self._path(*name).removeprefix(f"{self._folder}/")
        fresh = {row.version for row in change.rows}
        for row in change.rows:
            yield f"{path}/{_file(row.version)}", _text(name[0], row)
        for version in self._versions(f"{self._folder}/{path}"):
            if version not in fresh and (change.removes or version <= change.trim):
                yield f"{path}/{_file(version)}", None

    def _carry_out_at_once(self, plan: list[tuple[str, bytes | None]]) -> None:
        """Carry out a plan so that after a crash all of it is done or nothing."""
        text = _encode([(path, None if data is None else b64encode(data).decode()) for path, data in plan])
        self._put(f"{self._folder}/{_PLAN}", sha256(text).hexdigest().encode() + b"\n" + text)
        self._finish_plan()

    def _finish_plan(self) -> None:
        path = f"{self._folder}/{_PLAN}"
        try:
            data = self._disk.read(path)
        except FileNotFoundError:
            return
        checksum, _, text = data.partition(b"\n")
        if sha256(text).hexdigest().encode() != checksum:
            raise CheckpointCorrupt(f"{path} is not as it was written; its documents may be incomplete")
        plan = _decode_plan(text)
        self._carry_out([(name, None if data is None else b64decode(data)) for name, data in plan])
        self._disk.unlink(path)
        finish(self._disk, self._disk.sync_folder(self._folder))

    def _carry_out(self, plan: Iterable[tuple[str, bytes | None]]) -> None:
        for path, data in plan:
            if data is not None:
                self._put(f"{self._folder}/{path}", data)
                continue
            with contextlib.suppress(FileNotFoundError):
                self._disk.unlink(f"{self._folder}/{path}")
            folder = f"{self._folder}/{path.rpartition('/')[0]}"
            if self._disk.names(folder):
                finish(self._disk, self._disk.sync_folder(folder))
            else:
                self._remove_if_empty(folder)
                self._remove_if_empty(folder.rpartition("/")[0])

    def _remove_if_empty(self, folder: str) -> None:
        names = self._disk.names(folder)
        if names in ([], [_EXPIRES]):
            with contextlib.suppress(OSError):
                self._disk.remove_folder(folder)
                finish(self._disk, self._disk.sync_folder(folder.rpartition("/")[0]))

    def _put(self, path: str, data: bytes, *, unless_there: bool = False) -> None:
        """Write a file durably, with the folders that lead to it."""
        disk, folder = self._disk, path.rpartition("/")[0]
        if unless_there and disk.identity(path) is not None:
            return
        self._make_folders(folder)
        temporary = f"{folder}/.{self._unique()}.tmp"
        finish(disk, disk.create(temporary, data))
        disk.rename(temporary, path)
        finish(disk, disk.sync_folder(folder))

    def _make_folders(self, folder: str) -> None:
        disk, parts = self._disk, folder.removeprefix(self._folder).split("/")
        for count in range(1, len(parts) + 1):
            path = self._folder + "/".join(parts[:count])
            if disk.identity(path) is None and disk.make_folder(path):
                finish(disk, disk.sync_folder(path.rpartition("/")[0]))

    # -- removing ----------------------------------------------------------------------------------------------------

    def remove(self, collection: str, wanted: Wanted) -> int:
        """Remove documents. Return the number of keys."""
        with self._turn(writes=True):
            names = [(collection, key) for key in self._keys(collection) if wanted.matches(key)]
            self._remove(names)
            return len(names)

    def remove_owned(self, runs: Iterable[str]) -> None:
        """Remove the documents of runs."""
        if self._disk.identity(f"{self._folder}/.owners") is None:
            return
        with self._turn(writes=True):
            for run in runs:
                folder = f"{self._folder}/.owners/{folder_name(run)}"
                self._remove([name for name in self._marked(folder) if self._owner(*name) == run])
                if self._disk.identity(folder) is not None:
                    self._disk.remove_folder(folder)

    def remove_expired(self, collection: str, wanted: Wanted, now: float, is_run: Callable[[str], bool]) -> int:
        """Remove versions that have expired, documents whose owner is gone, and what dead writers have left."""
        with self._turn(writes=True):
            removed: set[Name] = set()
            for one, _ in self._collections():
                marker = f"{self._folder}/{encoded(one)}/{_EXPIRES}"
                if collection in ("", one) and self._disk.identity(marker) is not None:
                    removed |= set(self._remove_late(one, wanted if collection else None, now))
            for folder in self._disk.names(f"{self._folder}/.owners"):
                path = f"{self._folder}/.owners/{folder}"
                for name in self._marked(path):
                    owner, at = self._owner(*name), self._at(*name)
                    if owner and at < now - documents.OWNER_SECONDS and not is_run(owner):
                        self._remove([name])
                        removed.add(name)
                    if owner is None or name in removed:
                        self._disk.unlink(f"{path}/{_hash(*name)}")
                with contextlib.suppress(OSError):
                    self._disk.remove_empty(path)
            return len(removed)

    def _remove_late(self, collection: str, wanted: Wanted | None, now: float) -> Iterator[Name]:
        for key in self._keys(collection):
            if wanted is not None and not wanted.matches(key):
                continue
            folder = self._path(collection, key)
            late = [
                version
                for version in self._versions(folder)
                if documents.is_expired(self._read(folder, version, values=False).expires_at, now)
            ]
            if late:
                path = folder.removeprefix(f"{self._folder}/")
                self._carry_out([(f"{path}/{_file(version)}", None) for version in late])
                yield collection, key

    def _remove(self, names: Sequence[Name]) -> None:
        plan = [step for name in names for step in self._steps(name, Change(removes=True))]
        if plan:
            self._carry_out_at_once(plan)

    def _marked(self, folder: str) -> list[Name]:
        """Return the documents that the files of a folder of an owner name."""
        found: list[Name] = []
        for name in self._disk.names(folder):
            with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, ValueError):
                found.append(msgspec.json.decode(self._disk.read(f"{folder}/{name}"), type=tuple[str, str]))
        return found

    def _owner(self, collection: str, key: str) -> str | None:
        """Return the owner of the newest version of a document; None without a document."""
        folder = self._path(collection, key)
        versions = self._versions(folder)
        return self._read(folder, versions[-1], values=False).owner or "" if versions else None

    def _at(self, collection: str, key: str) -> float:
        folder = self._path(collection, key)
        versions = self._versions(folder)
        return self._read(folder, versions[-1], values=False).at if versions else 0.0

    # -- reading -----------------------------------------------------------------------------------------------------

    def read(self, query: DocumentQuery, now: float) -> list[Document]:
        """Return one page of documents."""
        if self._disk.identity(self._folder) is None:
            return []
        wanted = documents.wanted_keys(query)

        def rows() -> Iterator[Stored]:
            for key in sorted(
                filter(wanted.matches, query.keys or self._keys(query.collection)), reverse=query.reverse
            ):
                folder = self._path(query.collection, key)
                for version in self._versions(folder)[0 if query.all_versions else -1 :]:
                    row = self._read(folder, version, values=query.values)
                    if not documents.is_expired(row.expires_at, now):
                        yield row

        with self._turn(writes=False):
            return documents.page(query, rows())

    def collections(self) -> dict[str, int]:
        """Return the collections, each with the number of its keys."""
        if self._disk.identity(self._folder) is None:
            return {}
        with self._turn(writes=False):
            return {name: count for name, count in sorted(self._collections()) if count}

    def _collections(self) -> list[tuple[str, int]]:
        found = []
        for name in self._disk.names(self._folder):
            if not name.startswith("."):
                count = len(self._folders(f"{self._folder}/{name}"))
                found.append((decoded(name), count))
        return found

    def _keys(self, collection: str) -> list[str]:
        folder = f"{self._folder}/{encoded(collection)}"
        return [self._key_in(folder, name) for name in self._folders(folder)]

    def _folders(self, folder: str) -> list[str]:
        return [name for name in self._disk.names(folder) if not name.startswith(".")]

    def _key_in(self, folder: str, name: str) -> str:
        """Return the key of a folder: its name, or, of a shortened one, as its file tells it."""
        if "~" not in name:
            return decoded(name)
        versions = self._versions(f"{folder}/{name}")
        return self._read(f"{folder}/{name}", versions[-1], values=False).key if versions else decoded(name)

    def _path(self, collection: str, key: str) -> str:
        return f"{self._folder}/{encoded(collection)}/{encoded(key)}"

    def _versions(self, folder: str) -> list[int]:
        found = (_VERSION.fullmatch(name) for name in self._disk.names(folder))
        return sorted(int(one[1]) for one in found if one is not None)

    def _read(self, folder: str, version: int, *, values: bool) -> Stored:
        path = f"{folder}/{_file(version)}"
        header, _, value = self._disk.read(path).partition(b"\n")
        try:
            facts = _decode(header)
            row = Stored._make([*(facts[name] for name in documents.COLUMNS[:-1]), value if values else b""])
            if not isinstance(row.at, float) or not isinstance(row.expires_at, float | None):
                raise TypeError("its time is not a number")
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error}") from None
        return row

    # -- turns -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self, *, writes: bool) -> Iterator[None]:
        """Hold the lock of the documents. The plan of a process that has ended is carried out first."""
        with self._mutex, translating(self._folder, unknown=writes):
            if writes and self._disk.make_folder(self._folder):
                finish(self._disk, self._disk.sync_folder(self._folder.rpartition("/")[0]))
            deadline = time.monotonic() + _WAIT_SECONDS
            while (turn := self._disk.take_turn(self._folder)) is None:
                if time.monotonic() > deadline:
                    raise StoreUnavailable(f"{self._folder} has been locked by another process for {_WAIT_SECONDS:g} s")
                time.sleep(_LOOK_SECONDS)
            try:
                self._finish_plan()
                yield
            finally:
                self._disk.end_turn(turn)


def encoded(text: str) -> str:
    """Return a text as the name of a folder, on every file system. One that is too long gets its hash."""
    found = _PLAIN.sub(lambda one: "".join(f"%{byte:02x}" for byte in one[0].encode()), text)
    return found if len(found) <= _LONGEST else f"{found[:_KEPT]}~{sha256(text.encode()).hexdigest()[:_HASHED]}"


def decoded(name: str) -> str:
    """Return the text that is encoded in the name of a folder."""
    return re.sub(rb"%([0-9a-f]{2})", lambda one: bytes([int(one[1], 16)]), name.encode()).decode("utf-8", "replace")


def _hash(collection: str, key: str) -> str:
    return sha256(f"{collection}\0{key}".encode()).hexdigest()


def _file(version: int) -> str:
    return f"{version:06}.document"


def _text(collection: str, row: Stored) -> bytes:
    facts = {"collection": collection, **row._asdict()}
    del facts["value"]
    return _encode(facts) + b"\n" + row.value
