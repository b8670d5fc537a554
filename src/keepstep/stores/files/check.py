"""Flaws of a files store itself, and their repair."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from ...errors import CheckpointCorrupt
from ...model import Flaw
from .commit import Commits
from .disk import Disk, finish, translating
from .entry import Entry, Facts
from .index import Index, line_of
from .log import HINT, Logs, State
from .names import entry_name, entry_number

#: Minimum age in seconds of a leftover file. A younger one may be part of work in progress.
SETTLED_SECONDS = 60.0
#: Number of checks of a wrong index line, and the pause in seconds between them: a writer updates the index just after
#: the log.
_LOOKS, _LOOK_SECONDS = 20, 0.05

_OTHERS = frozenset({"runs", "index", "workers", "trash", "aside", "keepstep.json", ".gitignore"})


class Check:
    """One check of the whole store; with `mend`, derived data is rebuilt and stray files are put aside.

    Only files that a crash left half written are removed; stray files are moved to `aside/`. A run's log is never cut:
    a broken log is reported, and a person decides with `repair --accept-loss`.
    """

    def __init__(self, root: str, disk: Disk, logs: Logs, index: Index, commits: Commits, *, mend: bool) -> None:
        self._root, self._disk, self._logs = root, disk, logs
        self._index, self._commits, self._mend = index, commits, mend
        self._states: dict[str, State] = {}
        self._unreadable: set[str] = set()

    def flaws(self) -> list[Flaw]:
        """Yield every flaw, folder by folder, then those of the index."""
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
            yield self._aside(folder, "orphan", "no entry in this folder names its run")
            return
        self._logs.forget(run)
        try:
            state = self._logs.unless_removed(run, lambda: self._state(run))
        except CheckpointCorrupt as error:
            # Nothing is cut here: entries after the damage were acknowledged, so a person decides.
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
        """Report a folder that was created for a run that was never created."""
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
        """Report files in a run's folder that belong to no entry."""
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
                f"it names entry {hinted} as the newest of run {run!r}, but there are {state.number}",
                self._done("removed", self._unlink, f"{self._root}/{folder}/{HINT}"),
            )

    def _attachments(self, run: str, state: State) -> set[str]:
        """Return the files that the entries of a run name, as far as they are readable; `verify` reports the others."""
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
        """Compare the index with the logs; a difference is read from the log once more."""
        for line in self._index.lines():
            known = line.run in self._states or line.run in self._unreadable
            if not known and not self._is_there(line.run) and not self._is_gone_in_index(line.run):
                yield self._unlike(line.run, "the index names it, but it does not exist")
        for run, seen in self._states.items():
            try:
                yield from self._in_the_index(run, seen)
            except CheckpointCorrupt:
                if self._is_there(run, seen.head.born):
                    raise

    def _in_the_index(self, run: str, seen: State) -> Iterator[Flaw]:
        line = self._index.line(run)
        if line is None or line.gone:
            if self._is_there(run):
                yield self._unlike(run, "the index does not name it")
            return
        lost = self._commits.lost(run, line)
        if lost is not None:
            yield Flaw("dangling", self._logs.folder(run).removeprefix(f"{self._root}/"), str(lost))
            return
        wanted = self._line_from_log(run, seen)
        if _essence(line) != _essence(wanted) and line.entry <= seen.number and not self._comes_right(run):
            yield self._unlike(run, f"the index has it as {line.status}, but it is {wanted.status}")

    def _is_there(self, run: str, born: str = "") -> bool:
        """Whether a run exists and has this value of `born`."""
        try:
            state = self._logs.unless_removed(run, lambda: self._logs.state(run))
        except CheckpointCorrupt:
            return True
        return state is not None and born in ("", state.head.born)

    def _is_gone_in_index(self, run: str) -> bool:
        """Whether the index says that a run is gone, after giving its remover time to update the index."""
        for _ in range(_LOOKS):
            self._index.refresh()
            line = self._index.line(run)
            if line is None or line.gone:
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _comes_right(self, run: str) -> bool:
        """Whether the index agrees with a run's log, after giving its writer time to update the index."""
        for _ in range(_LOOKS):
            state = self._logs.state(run)
            self._index.refresh()
            if state is None or _essence(self._index.line(run)) == _essence(self._line_from_log(run, state)):
                return True
            time.sleep(_LOOK_SECONDS)
        return False

    def _line_from_log(self, run: str, state: State) -> Any:
        facts: Facts = self._logs.facts(run, state.head)
        return line_of(run, facts, state)

    def _unlike(self, run: str, what: str) -> Flaw:
        mended = ""
        if self._mend:
            finish(self._disk, self._commits.settle(run))
            mended = "the index was updated"
        return Flaw("index", run, f"run {run!r}: {what}", mended)

    # -- repair ------------------------------------------------------------------------------------------------------

    def _is_young(self, name: str) -> bool:
        found = self._disk.identity(f"{self._root}/{name}")
        return found is None or time.time() - found.written_ns / 1e9 < SETTLED_SECONDS

    def _done(self, what: str, do: Any, *args: Any) -> str:
        """Repair a flaw, if requested; return what was done."""
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
    """Return the fields of a line that claims and lists use."""
    return line.born, line.status, line.worker, line.due, line.number, line.workflow, line.signals
