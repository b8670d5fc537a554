"""A disk under a files store that fails and loses power: it records what is durable, and fails on request.

    disk = FaultyFiles(folder)
    store = FilesStore(folder / "runs", disk=disk)
    ...
    for _, moment in disk.moments():
        write_tree(tree(moment, LOSE), other_folder)  # what a power cut there would have left

The files themselves stand for the system's page cache. A file's content is durable once it is synced, a name once its
folder is. A power cut keeps a random part of the pending writes; a killed process leaves all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...stores.files.disk import Disk
from .faulty import KEEP, LOSE, Chance, Faults, Fixed

__all__ = ["KEEP", "LOSE", "Chance", "FaultyFiles", "Fixed", "Moment", "Node", "tree", "write_tree"]

#: A tree of folders and files, by name.
Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """One entry of the journal: an operation on a file or a name, or a mark."""

    what: Literal["make", "name", "write", "sync", "mark"]
    node: int = 0
    name: str = ""
    target: int | None = None
    data: bytes = b""
    note: Any = None


@dataclass(slots=True)
class Node:
    """A file or a folder at one moment: its durable content, and the operations since."""

    folder: bool
    content: bytearray = field(default_factory=bytearray)
    writes: list[bytes] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    renames: list[tuple[str, int | None]] = field(default_factory=list)

    def sync(self) -> None:
        for data in self.writes:
            self.content += data
        self.writes.clear()
        for name, target in self.renames:
            _point(self.names, name, target)
        self.renames.clear()

    def versions(self) -> list[bytes]:
        """Return the content as last synced, and after each later write."""
        found = [bytes(self.content)]
        for data in self.writes:
            found.append(found[-1] + data)
        return found

    def leads(self) -> dict[str, list[int | None]]:
        """Return, for each name, its durable target or None, and its later targets."""
        found: dict[str, list[int | None]] = {name: [target] for name, target in self.names.items()}
        for name, target in self.renames:
            found.setdefault(name, [None]).append(target)
        return found

    def current(self) -> dict[str, int]:
        names = dict(self.names)
        for name, target in self.renames:
            _point(names, name, target)
        return names


def _point(names: dict[str, int], name: str, target: int | None) -> None:
    if target is None:
        names.pop(name, None)
    else:
        names[name] = target


class Moment:
    """The content of a disk at one moment: nodes by number; the root is 0."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {0: Node(folder=True)}

    def play(self, done: Done) -> None:
        """Advance by one entry."""
        if done.what == "make":
            self.nodes[done.node] = Node(folder=bool(done.target))
        elif done.what == "name":
            self.nodes[done.node].renames.append((done.name, done.target))
        elif done.what == "write":
            self.nodes[done.node].writes.append(done.data)
        elif done.what == "sync":
            self.nodes[done.node].sync()

    @property
    def uncertain(self) -> bool:
        """Whether a power cut could have more than one result."""
        return any(node.writes or node.renames for node in self.nodes.values())


def tree(moment: Moment, fate: Fixed | Chance, node: int = 0) -> Tree:
    """Return what remains after a power cut at this moment."""
    left: Tree = {}
    for name, leads in sorted(moment.nodes[node].leads().items()):
        target = fate.file(name, leads) if len(leads) > 1 else leads[0]
        if target is None:
            continue
        found = moment.nodes[target]
        left[name] = tree(moment, fate, target) if found.folder else fate.content(name, found.versions())
    return left


def write_tree(left: Tree, folder: str | os.PathLike[str]) -> None:
    """Write the remains of a power cut into a folder."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for name, content in left.items():
        if isinstance(content, dict):
            write_tree(content, place / name)
        else:
            (place / name).write_bytes(content)


class FaultyFiles(Faults[int], Disk):
    """The disk. `journal` holds every operation, in order; `mark` adds notes of a test in between.

    `fail` sets which calls fail and with which `errno`, counted from 1 over all calls; `calls` lists the kind of each.
    Nothing is really synced, to save time.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        Disk.__init__(self, syncs=True)
        Faults.__init__(self)
        self.folder = os.path.realpath(folder)
        self.journal: list[Done] = []
        self._moment = Moment()
        self._open: dict[int, int] = {}

    def mark(self, note: Any) -> None:
        """Add a note to the journal."""
        self.journal.append(Done("mark", note=note))

    def marks(self, before: int) -> list[Any]:
        """Return the notes before a moment."""
        return [done.note for done in self.journal[:before] if done.what == "mark"]

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

    # -- failing -----------------------------------------------------------------------------------------------------

    def _begin(self, call: str) -> None:
        error = self.fault_of(call)
        if error is not None:
            raise OSError(error, os.strerror(error))

    # -- keeping the journal -----------------------------------------------------------------------------------------

    def _note(self, done: Done) -> None:
        self.journal.append(done)
        self._moment.play(done)

    def _find(self, path: str) -> tuple[int, str]:
        """Return the folder of a path, and the name there."""
        *folders, name = os.path.relpath(path, self.folder).split("/")
        node = 0
        for one in folders:
            node = self._moment.nodes[node].current()[one]
        return node, name

    def _node(self, path: str) -> int:
        if os.path.realpath(path) == self.folder:
            return 0
        folder, name = self._find(path)
        return self._moment.nodes[folder].current()[name]

    def _make(self, path: str, *, folder: bool) -> int:
        number = len(self._moment.nodes)
        self._note(Done("make", number, target=int(folder)))
        self._name(path, number)
        return number

    def _name(self, path: str, target: int | None) -> None:
        folder, name = self._find(path)
        self._note(Done("name", folder, name, target))

    # -- the calls ---------------------------------------------------------------------------------------------------

    def open_new(self, path: str) -> int:
        self._begin("open")
        fd = super().open_new(path)
        self._open[fd] = self._make(path, folder=False)
        return fd

    def open_log(self, path: str) -> int:
        self._begin("open")
        there = os.path.exists(path)  # noqa: PTH110 - as in the neighbouring calls
        fd = super().open_log(path)
        self._open[fd] = self._node(path) if there else self._make(path, folder=False)
        return fd

    def write(self, fd: int, data: bytes) -> None:
        """Write in two halves, between which a power cut can come."""
        half = len(data) // 2
        for piece in (data[:half], data[half:]) if half else (data,):
            self._begin("write")
            super().write(fd, piece)
            self._note(Done("write", self._open[fd], data=piece))

    def sync(self, fd: int) -> None:
        self._begin("sync")
        self._note(Done("sync", self._open[fd]))

    def open_folder(self, path: str) -> int:
        fd = super().open_folder(path)
        self._open[fd] = self._node(path)
        return fd

    def link(self, old: str, new: str) -> None:
        self._begin("link")
        super().link(old, new)
        self._name(new, self._node(old))

    def rename(self, old: str, new: str) -> None:
        self._begin("rename")
        target = self._node(old)
        super().rename(old, new)
        self._name(new, target)
        self._name(old, None)

    def unlink(self, path: str) -> None:
        self._begin("unlink")
        super().unlink(path)
        self._name(path, None)

    def make_folder(self, path: str) -> bool:
        self._begin("mkdir")
        made = super().make_folder(path)
        if made:
            self._make(path, folder=True)
        return made

    def remove_empty(self, path: str) -> None:
        self._begin("rmdir")
        super().remove_empty(path)
        self._name(path, None)
