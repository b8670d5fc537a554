"""What can be wrong with a files store itself, and what can be done about it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import CheckpointCorrupt
from ..model import Flaw
from .files_commit import Commits
from .files_disk import Disk, finish, translating
from .files_entry import Entry, Facts
from .files_index import Index, line_of
from .files_log import HINT, Logs, State
from .files_names import entry_name, entry_number

#: What is younger may be someone's work of this moment.
SETTLED_SECONDS = 60.0
#: What the index says wrong is looked at so often, and so long apart: its writer tells it just after the log.
_LOOKS, _LOOK_SECONDS = 20, 0.05

_OTHERS = frozenset({"runs", "index", "workers", "trash", "aside", "keepstep.json", ".gitignore"})


class Check:
    """One look at everything; with `mend`, what is derivable is made again, and what is no run's is put aside.

    Nothing is destroyed but what a crash left half written: what a flaw puts aside lies under `aside/` afterwards.
    A run's log is never cut: that it is broken is told, and `repair --accept-loss` is for a person to say.
    """

    def __init__(self, root: str, disk: Disk, logs: Logs, index: Index, commits: Commits, *, mend: bool) -> None:
        self._root, self._disk, self._logs = root, disk, logs
        self._index, self._commits, self._mend = index, commits, mend
        self._states: dict[str, State] = {}
        self._unreadable: set[str] = set()

    def flaws(self) -> list[Flaw]:
        """Everything that is wrong, folder by folder, then the index."""
        with translating(self._root):
            return [*self._trash(), *self._shards(), *self._entries_of_the_index()]

    # -- folders -----------------------------------------------------------------------------------------------------

    def _trash(self) -> Iterator[Flaw]:
        for name in sorted(self._disk.names(f"{self._root}/trash")):
            if self._is_young(f"trash/{name}"):
                continue
            yield Flaw(
                "leftover",
                f"trash/{name}",
                "the rest of a run that was deleted",
                self._done("removed", self._disk.remove_folder, f"{self._root}/trash/{name}"),
            )
        for name in sorted(self._disk.names(self._root)):
            if name not in _OTHERS and name.endswith(".tmp") and not self._is_young(name):
                yield self._leftover(name)

    def _shards(self) -> Iterator[Flaw]:
        for shard in sorted(self._disk.names(f"{self._root}/runs")):
            for name in sorted(self._disk.names(f"{self._root}/runs/{shard}")):
                yield from self._folder(f"runs/{shard}/{name}")

    def _folder(self, folder: str) -> Iterator[Flaw]:
        names = set(self._disk.names(f"{self._root}/{folder}"))
        numbers = sorted(number for name in names if (number := entry_number(name)) is not None)
        if not numbers:
            yield from self._empty(folder, names)
            return
        run = self._logs.run_in(folder)
        if run is None:
            if self._disk.identity(f"{self._root}/{folder}") is None:  # another process removes the run
                return
            yield self._aside(folder, "orphan", "no entry in this folder says whose it is")
            return
        self._logs.forget(run)
        try:
            state = self._logs.unless_removed(run, lambda: self._state(run))
        except CheckpointCorrupt as error:
            # Nothing of it is cut here: what comes after the damage was acknowledged, so a person decides.
            self._unreadable.add(run)
            yield Flaw("dangling", folder, str(error))
            return
        if state is None:
            return
        if state.head.deleted:
            mended = ""
            if self._mend:
                finish(self._disk, self._logs.remove(run))
                mended = "removed"
            yield Flaw("leftover", folder, f"run {run!r} was deleted, and its folder is still there", mended)
            return
        self._states[run] = state
        yield from self._strangers(run, folder, names, state)

    def _state(self, run: str) -> State | None:
        state = self._logs.last_state(run, whole=True)
        if state is not None and not state.head.deleted:
            self._logs.facts(run, state.head)
        return state

    def _empty(self, folder: str, names: set[str]) -> Iterator[Flaw]:
        """A folder that was made for a run that never came to be."""
        if self._is_young(folder):
            return
        if all(name.startswith(".") or "-" in name for name in names):
            what = "a folder of a run that was never created"
            yield Flaw(
                "leftover", folder, what, self._done("removed", self._disk.remove_folder, f"{self._root}/{folder}")
            )
        else:
            yield self._aside(folder, "orphan", "a folder that holds no entry of a run")

    def _strangers(self, run: str, folder: str, names: set[str], state: State) -> Iterator[Flaw]:
        """What lies in a run's folder and belongs to no entry."""
        others = {name for name in names if entry_number(name) is None and name != HINT}
        if others:
            others -= self._attachments(run, state)
        for name in sorted(others):
            if self._is_young(f"{folder}/{name}"):
                continue
            if name.startswith(".") and name.endswith(".tmp"):
                yield self._leftover(f"{folder}/{name}")
            else:
                yield self._aside(f"{folder}/{name}", "orphan", f"no entry of run {run!r} names this file")
        hinted = self._logs.hint(f"{self._root}/{folder}") if HINT in names else 0
        if hinted > state.number and not self._logs.noted(f"{self._root}/{folder}", state.number):
            yield Flaw(
                "index",
                f"{folder}/{HINT}",
                f"it names entry {hinted} as the newest of run {run!r}, and there are {state.number}",
                self._done("removed", self._unlink, f"{self._root}/{folder}/{HINT}"),
            )

    def _attachments(self, run: str, state: State) -> set[str]:
        """The files that the entries of a run name, as far as they can be read: what cannot be is told by `verify`."""
        found: set[str] = set()
        for number in range(1, state.number + 1):
            try:
                entry = self._logs.entry(run, number)
                found |= set(entry.fields.get("parts", ()))
                found |= self._bodies(run, entry)
            except (CheckpointCorrupt, TypeError):
                prefix = entry_name(number).removesuffix(".json")
                found |= {name for name in self._disk.names(self._logs.folder(run)) if name.startswith(prefix)}
        return found

    def _bodies(self, run: str, entry: Entry) -> set[str]:
        bodies = {entry.fields.get("body")}
        for name in entry.fields.get("parts", ()):
            try:
                part = msgspec.json.decode(self._disk.read(f"{self._logs.folder(run)}/{name}"), type=dict[str, Any])
            except (msgspec.MsgspecError, ValueError, OSError) as error:
                raise CheckpointCorrupt(f"run {run!r}: {name} cannot be read: {error}") from None
            bodies.add(part.get("body"))
        return {name for name in bodies if isinstance(name, str)}

    # -- the index ---------------------------------------------------------------------------------------------------

    def _entries_of_the_index(self) -> Iterator[Flaw]:
        """What the index says against what the logs say; a difference is read from the log once more."""
        for line in self._index.lines():
            known = line.run in self._states or line.run in self._unreadable
            if not known and not self._is_there(line.run) and not self._is_told_gone(line.run):
                yield self._unlike(line.run, "the index names it, and it is not there")
        for run, seen in self._states.items():
            try:
                yield from self._in_the_index(run, seen)
            except CheckpointCorrupt:
                if self._is_there(run, seen.head.born):
                    raise

    def _in_the_index(self, run: str, seen: State) -> Iterator[Flaw]:
        said = self._index.line(run)
        if said is None or said.gone:
            if self._is_there(run):
                yield self._unlike(run, "the index does not name it")
            return
        lost = self._commits.lost(run, said)
        if lost is not None:
            yield Flaw("dangling", self._logs.folder(run).removeprefix(f"{self._root}/"), str(lost))
            return
        wanted = self._said(run, seen)
        if _essence(said) != _essence(wanted) and said.entry <= seen.number and not self._comes_right(run):
            yield self._unlike(run, f"the index has it as {said.status}, and it is {wanted.status}")

    def _is_there(self, run: str, born: str = "") -> bool:
        """Whether a run is there, and still the one that was `born` so."""
        try:
            state = self._logs.unless_removed(run, lambda: self._logs.state(run))
        except CheckpointCorrupt:
            return True
        return state is not None and born in ("", state.head.born)

    def _is_told_gone(self, run: str) -> bool:
        """Whether the index says that a run is gone, as soon as whoever removes it has told the index."""
        for _ in range(_LOOKS):
            self._index.refresh()
            line = self._index.line(run)
            if line is None or line.gone:
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _comes_right(self, run: str) -> bool:
        """Whether the index says of a run what its log does, as soon as whoever writes to it has told the index."""
        for _ in range(_LOOKS):
            state = self._logs.state(run)
            self._index.refresh()
            if state is None or _essence(self._index.line(run)) == _essence(self._said(run, state)):
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _said(self, run: str, state: State) -> Any:
        facts: Facts = self._logs.facts(run, state.head)
        return line_of(run, facts, state)

    def _unlike(self, run: str, what: str) -> Flaw:
        mended = ""
        if self._mend:
            finish(self._disk, self._commits.settle(run))
            mended = "the index was told"
        return Flaw("index", run, f"run {run!r}: {what}", mended)

    # -- mending -----------------------------------------------------------------------------------------------------

    def _is_young(self, name: str) -> bool:
        found = self._disk.identity(f"{self._root}/{name}")
        return found is None or time.time() - found.written_ns / 1e9 < SETTLED_SECONDS

    def _done(self, what: str, do: Any, *args: Any) -> str:
        """Do something about a flaw, if that is wanted; what was done."""
        if not self._mend:
            return ""
        do(*args)
        return what

    def _unlink(self, path: str) -> None:
        if self._disk.identity(path) is not None:
            self._disk.unlink(path)

    def _leftover(self, name: str) -> Flaw:
        return Flaw(
            "leftover",
            name,
            "a file that was never finished",
            self._done("removed", self._unlink, f"{self._root}/{name}"),
        )

    def _aside(self, name: str, kind: str, what: str) -> Flaw:
        return Flaw(kind, name, what, f"put aside as {self._put_aside(name)}" if self._mend else "")

    def _put_aside(self, name: str) -> str:
        self._disk.make_folder(f"{self._root}/aside")
        kept = f"aside/{self._logs.unique()}-{name.replace('/', '.')}"[:200]
        self._disk.rename(f"{self._root}/{name}", f"{self._root}/{kept}")
        return kept


def _essence(line: Any) -> tuple[Any, ...]:
    """What claims and lists go by."""
    return line.born, line.status, line.worker, line.due, line.number, line.workflow, line.signals
