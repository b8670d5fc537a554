"""The store in a folder of readable files: for people who want to read, compare and keep their checkpoints."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..errors import CheckpointCorrupt, DefinitionError, SchemaMismatch, StoreError, StoreUnavailable
from ..model import (
    LEASE_SECONDS,
    Claim,
    Claims,
    Flaw,
    Lease,
    News,
    Run,
    RunPage,
    RunQuery,
    Signal,
    WorkerInfo,
)
from ..model.ids import draw
from ..ports import Answer, Change, ClaimRequest, Clock, Row, SystemClock, Verdict, WouldBlock, instant
from ..values.kinds import is_text
from . import rules
from .files_check import Check
from .files_commit import Commits
from .files_disk import Disk, Steps, finish, translating
from .files_entry import LAYOUT, Draft, Facts, run_of
from .files_index import Index, Line, line_of, may_match
from .files_log import Logs, State
from .files_workers import Workers
from .liveness import abandon_in_children, network_file_system

#: What a commit survives, by name, and whether it is synced for it.
POWER_LOSS = {"loses_nothing": True, "may_lose_last": False}

#: The file that says what a folder is.
MARKER = "keepstep.json"
#: What need not be kept in git: everything but the runs is made again from them.
_IGNORED = b"/index/\n/workers/\n/trash/\n/aside/\n*.tmp\nlatest\n"
#: A batch of more changes is not made on the thread of an event loop.
_FEW = 4

log = logging.getLogger("keepstep")


class FilesStore:
    """Keeps each run in a folder of its own, each checkpoint in a file of its own, all of it JSON for people.

    `power_loss="may_lose_last"` trades the newest commits in a power cut for speed; a crash of the program loses
    nothing either way.
    """

    quick = True
    transactional = False
    #: Earlier entries hold data keys, too, so that a change of keys concerns every run.
    keeps_earlier_keys = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        power_loss: str = "loses_nothing",
        lease_seconds: float = LEASE_SECONDS,
        allow_network: bool = False,
        disk: Disk | None = None,
    ) -> None:
        if power_loss not in POWER_LOSS:
            raise DefinitionError(f"power_loss={power_loss!r} is not one of {', '.join(map(repr, POWER_LOSS))}")
        self._disk = disk or Disk(syncs=POWER_LOSS[power_loss])
        self._root = _check_path(path, allow_network=allow_network)
        self.url = f"files:{self._root}"
        self.clock = clock or SystemClock()
        self.lease_seconds = lease_seconds
        self._gone = ""
        with translating(self._root):
            _prepare(self._root, self._disk)
        self._identity = self._disk.identity(f"{self._root}/{MARKER}")
        tag = draw(6).hex()
        self._logs = Logs(self._root, self._disk, tag)
        self._index = Index(self._root, self._disk, self.clock, tag, self._scan)
        self._commits = Commits(self._logs, self._index, self._now)
        self._workers = Workers(f"{self._root}/workers", self._disk, self.clock, lease_seconds, self._logs.unique)
        self._broken: dict[str, int] = {}
        abandon_in_children(self)

    # -- writing -----------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        self._must_be_open()
        if not wait and len(changes) > _FEW:
            raise WouldBlock
        return self._commits.apply(changes) if changes else []

    def delete_runs(self, run_ids: Sequence[str], *, finished: bool = False, scrub: bool = False) -> int:
        self._must_be_open()
        named = list(dict.fromkeys(run_ids))
        wanted = [run for run in named if self._is_there(run)]
        # What an earlier call has removed and could not scrub is scrubbed now, and counts.
        begun = [run for run in named if scrub and run not in wanted and self._index.is_marked(run)]
        batch = self._index.will([*wanted, *begun])
        if scrub:
            self._index.mark(wanted)
        removed: list[str] = []

        def remove(run: str) -> Steps[None]:
            try:
                gone = yield from self._logs.steps_unless_removed(
                    run, partial(self._commits.delete, run, finished=finished)
                )
            except CheckpointCorrupt:  # no log is so broken that it could not go
                if finished or self._is_driven(run):
                    raise
                yield from self._commits.delete_broken(run)
                gone = True
            if gone:
                removed.append(run)
            else:
                yield from self._commits.settle(run)

        works = [remove(run) for run in wanted] + [self._commits.finish_removal(run) for run in begun]
        failures = self._commits.at_once(works)
        if failures:
            self._index.failed(batch)
            raise failures[0]
        self._index.did(batch, {None})
        if scrub:
            if removed or begun or not finished:
                self._logs.empty_trash()
                self._catch_up()  # or a file of a dead process would be left to others
                self._index.scrub()
            self._index.unmark(named)
        return len(removed) + len(begun)

    def _is_there(self, run: str) -> bool:
        try:
            return self._logs.unless_removed(run, partial(self._logs.state, run)) is not None
        except CheckpointCorrupt:
            return True

    def _is_driven(self, run: str) -> bool:
        """Whether the newest readable entry of a broken log names a worker that lives."""
        state = self._commits.remains(run)
        return state is not None and state.head.worker is not None and self._workers.is_alive(state.head.worker)

    # -- leases ------------------------------------------------------------------------------------------------------

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        self._must_be_open()
        if leaving:
            return self._workers.leave(worker.id)
        if self._disk.identity(f"{self._root}/{MARKER}") != self._identity:  # it would be written beside the runs
            raise StoreUnavailable(f"{self._root} was moved or removed while it was open")
        known = self._workers.renew(worker)
        self._index.tend()
        return known

    def claim_runs(self, request: ClaimRequest) -> Claims:
        self._must_be_open()
        if request.worker not in self._workers.locks and not self.renew_leases(
            WorkerInfo(request.worker, pid=os.getpid())
        ):
            return Claims()
        if self._workers.is_gone(request.worker):
            return Claims()
        alive, dead = self._workers.roll_call(request.worker)
        alive |= {worker for worker in dead if not self._workers.bury(request.worker, worker)}
        if request.run is not None:
            return Claims(self._take_all([request.run], request, alive))
        self._catch_up()
        if dead:
            self._workers.forget_the_old(set(self._index.leases()))
        now = self._now().timestamp()
        limit = max(request.limit, 0)
        found = [*self._index.orphans(request, alive), *self._index.due(request, now)]
        claims: list[Claim] = []
        for start in range(0, len(found), max(limit, 1)):
            if len(claims) >= limit:
                break
            some = found[start : start + limit - len(claims)]
            claims += self._take_all([line.run for line in some if not self._is_broken(line)], request, alive)
        at = self._index.next_due(request, now)
        return Claims(tuple(claims), None if at is None else instant(at))

    def _catch_up(self) -> None:
        """Read what others have written, and finish what the dead have begun."""
        self._index.refresh()
        self._finish_for_the_dead()
        for batch, owed in self._index.owed().items():
            self._settle(owed)
            self._index.did(batch, {None})
        self._settle(self._index.doubtful())

    def _finish_for_the_dead(self) -> None:
        for name, runs in self._index.left_by_the_dead():
            self._settle(runs)
            self._index.retire(name)

    def _settle(self, runs: Iterable[str]) -> None:
        for run in runs:
            try:
                finish(self._disk, self._commits.settle(run))
            except CheckpointCorrupt as error:
                log.error("run %s cannot be read: %s", run, error)  # noqa: TRY400 - said briefly

    def _is_broken(self, line: Line) -> bool:
        return self._broken.get(line.run) == line.entry

    def _take_all(self, runs: list[str], request: ClaimRequest, alive: set[str]) -> tuple[Claim, ...]:
        taken: list[Claim | None] = [None] * len(runs)
        batch = self._index.will(runs)

        def take(i: int) -> Steps[None]:
            taken[i] = yield from self._take(runs[i], request, alive)

        failures = self._commits.at_once([take(i) for i in range(len(runs))])
        if failures:
            self._index.failed(batch)
            if not any(taken):
                raise failures[0]
        elif runs:
            self._index.did(batch, {request.worker})
        return tuple(claim for claim in taken if claim is not None)

    def _take(self, run: str, request: ClaimRequest, alive: set[str]) -> Steps[Claim | None]:
        """Lease one run, if it is still to be had; one that cannot be read is left, so that it stops no other."""
        before: list[State] = []
        known = self._index.line(run)

        def decide(state: State | None) -> Draft | Answer:
            before[:] = [state] if state else []
            if state is not None and known is not None and state.number < known.entry:
                lost = self._commits.lost(run, known)
                if lost is not None:
                    raise lost
            if state is None or not self._is_to_be_had(state, request, alive):
                return Answer(Verdict.FENCED)
            head, taken = state.head, state.head.worker is not None
            head = msgspec.structs.replace(
                head,
                status=rules.status_when_claimed(head.status, taken=taken),
                worker=request.worker,
                epoch=head.epoch + 1,
                due_at=None,
                wakes=(),
                recoveries=head.recoveries + (taken and head.status.active),
                updated_at=self._now(),
            )
            return Draft("claimed", head, outbox=self._commits.undone(state.outbox))

        def take() -> Steps[tuple[State, Facts] | None]:
            draft, state = yield from self._logs.append(run, decide)
            if state is None:
                yield from self._commits.settle(run)
                return None
            self._commits.note(run, state, request.worker)
            return None if isinstance(draft, Answer) else (state, self._logs.facts(run, state.head))

        try:
            found = yield from self._logs.steps_unless_removed(run, take)
        except CheckpointCorrupt as error:
            log.error("run %s cannot be claimed: %s", run, error)  # noqa: TRY400 - said briefly
            known = self._index.line(run)
            self._broken[run] = known.entry if known else 0
            return None
        if found is None:
            return None
        state, facts = found
        old = before[0].head
        if old.worker is not None:
            self._logs.sweep(run)
        return Claim(
            run_of(run, facts, state.head),
            Lease(run, request.worker, state.head.epoch),
            old.worker,
            old.status,
            old.updated_at,
        )

    def _is_to_be_had(self, state: State, request: ClaimRequest, alive: set[str]) -> bool:
        head = state.head
        # Who has come since the roll was called is alive, too: a worker is enrolled before it takes anything.
        if head.worker is not None and (head.worker in alive or self._workers.is_alive(head.worker)):
            return False
        if request.run is not None:
            return rules.claimable_by_name(head.status, request.statuses)
        if head.worker is not None:
            return True
        return head.due_at is not None and head.due_at <= self._now() and head.status not in rules.ENDED

    def list_workers(self) -> list[WorkerInfo]:
        self._must_be_open()
        self._index.refresh()
        return self._workers.listed(self._index.leases())

    # -- reading -----------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> Run | None:
        self._must_be_open()
        return self._logs.unless_removed(run_id, lambda: self._get_run(run_id))

    def _get_run(self, run_id: str) -> Run | None:
        state = self._logs.state(run_id)
        if state is not None and state.head.status not in rules.ENDED:  # or one would wait for what has been
            state = self._not_behind(run_id)
        if state is None:
            return None
        if state.outbox:  # what this entry begins elsewhere, a successor above all, must be there when it is told of
            finish(self._disk, self._commits.carry_on(state))
        head = state.head
        run = run_of(run_id, self._logs.facts(run_id, head), head)
        kind = rules.outcome_kind(head.status)
        if kind is not None:
            if not state.durable:
                self._logs.make_durable(run_id)
            final = self._final(run_id, head.outcome, kind) if head.outcome else None
            if final is not None:
                run = rules.with_outcome(run, final)
        progress = None if run.worker is None else self._workers.progress(run.worker, run_id)
        return run if progress is None else replace(run, progress=progress)

    def _not_behind(self, run_id: str) -> State | None:
        """How a run stands, if nothing tells that it has gone further."""
        known = self._index.loaded().line(run_id)
        state = self._logs.state(run_id, whole=True)
        if state is not None and known is not None and state.number < known.entry:
            lost = self._commits.lost(run_id, known)
            if lost is not None:
                raise lost
        return state

    def salvaged(self, run_id: str) -> Run | None:
        """A run whose log is broken, as its newest readable entry tells it: for those who repair it.

        Nobody has its lease if the worker that is named there is dead.
        """
        self._must_be_open()
        return self._logs.unless_removed(run_id, lambda: self._salvaged(run_id))

    def _salvaged(self, run_id: str) -> Run | None:
        state = self._commits.remains(run_id)
        if state is None:
            return None
        run = run_of(run_id, self._logs.facts(run_id, state.head), state.head)
        return run if self._is_driven(run_id) else replace(run, worker=None)

    def raw_rows(self, run_id: str) -> list[dict[str, Any]]:
        """The files of a run that cannot be read, as they are: to be kept before they are given up."""
        self._must_be_open()
        return self._logs.unreadable(run_id)

    def _final(self, run_id: str, number: int, kind: str) -> Row | None:
        rows = self._logs.rows_of(run_id, number)
        return next((row for row in reversed(rows) if row.kind == kind), None)

    def list_runs(self, query: RunQuery) -> RunPage:
        self._must_be_open()
        start, limit = rules.page_start(query), max(query.limit, 0)
        self._catch_up_reading()
        runs: list[Run] = []
        unreadable: list[str] = []
        last: int | None = None
        for line in self._index.newest_first(start):
            if not may_match(query, line):
                continue
            try:
                run = self._logs.unless_removed(line.run, partial(self._commits.run, line.run, line))
            except CheckpointCorrupt:
                run = None
                if len(runs) + len(unreadable) < limit:
                    unreadable.append(line.run)
                    last = line.number
                    continue
            if run is None or not rules.matches(query, run):
                continue
            if len(runs) + len(unreadable) >= limit:
                return RunPage(tuple(runs), None if last is None else str(last), tuple(unreadable))
            runs.append(run if query.with_input else replace(run, input=b""))
            last = line.number
        return RunPage(tuple(runs), None, tuple(unreadable))

    def _catch_up_reading(self) -> None:
        """Read what others have written; of what the dead have begun, and of two lives of one run, its folder tells."""
        self._index.refresh()
        with contextlib.suppress(StoreUnavailable):  # it can only be read here, and is seen as far as the index goes
            self._finish_for_the_dead()
        for run in self._index.doubtful():
            try:
                finish(self._disk, self._commits.settle(run))
            except StoreError as error:
                log.warning("run %s cannot be looked at: %s", run, error)

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        self._must_be_open()
        kinds = tuple(kinds)
        return self._logs.unless_removed(run_id, lambda: self._logs.rows(run_id, after, limit, kinds))

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        self._must_be_open()
        return self._logs.unless_removed(run_id, lambda: self._list_signals(run_id, after, limit))

    def _list_signals(self, run_id: str, after: int, limit: int) -> list[Signal]:
        state, _ = self._logs.state_to_read(run_id)  # that a log is broken is found by its checkpoints
        if state is None:
            return []
        found: list[Signal] = []
        if limit > 0:
            for signal, _ in self._logs.signals(run_id, state, after):
                found.append(signal)
                if len(found) >= limit:
                    break
        return found

    def news(self, worker: str, cursor: int) -> News:
        self._must_be_open()
        self._index.refresh()
        return News(*self._index.news(worker, cursor))

    # -- care --------------------------------------------------------------------------------------------------------

    def _scan(self) -> Iterator[Line]:
        """What the index says of every run, read from its log; what a dead writer left undone is done."""
        for run in self._all_runs():
            try:
                line = self._logs.unless_removed(run, partial(self._line, run))
            except CheckpointCorrupt as error:
                log.error("run %s cannot be read: %s", run, error)  # noqa: TRY400 - said briefly
                continue
            if line is not None:
                yield line

    def _line(self, run: str) -> Line | None:
        state = self._logs.state(run, whole=True)
        if state is None:
            return None
        if state.outbox:
            finish(self._disk, self._commits.settle(run))
        return line_of(run, self._logs.facts(run, state.head), state)

    def _all_runs(self) -> Iterator[str]:
        """The id of every run whose log has a first entry, by folder."""
        for shard in sorted(self._disk.names(f"{self._root}/runs")):
            for name in sorted(self._disk.names(f"{self._root}/runs/{shard}")):
                run = self._logs.run_in(f"runs/{shard}/{name}")
                if run is not None:
                    yield run

    def check(self, *, mend: bool = False) -> list[Flaw]:
        self._must_be_open()
        self._catch_up_reading()
        return Check(self._root, self._disk, self._logs, self._index, self._commits, mend=mend).flaws()

    # -- ends --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if not self._gone:
            self._gone = f"the store {self._root} is closed"
            self._commits.close()
            self._index.close()
            self._workers.close()

    def abandon(self) -> None:
        """Become unusable in a forked child, which must not keep its parent's locks alive."""
        if not self._gone:
            self._gone = (
                f"the store {self._root} was opened by the process that forked this one (pid {os.getppid()}): "
                "open it again"
            )
            self._index.abandon()
            self._workers.close()

    def _must_be_open(self) -> None:
        if self._gone:
            raise StoreError(self._gone)

    def _now(self) -> datetime:
        return instant(self.clock.now())


def open_url(url: str, *, clock: Clock | None = None, **options: Any) -> FilesStore:
    """The store for `files:path`, `files:///relative/path` or `files:////absolute/path`."""
    path = url.partition(":")[2]
    path = path.removeprefix("///") if path.startswith("///") else path
    if not path or path.startswith("//"):
        raise DefinitionError(f"{url!r} names no folder: write files:runs or files:/var/lib/runs")
    return FilesStore(path, clock=clock, **options)


def _check_path(path: str | os.PathLike[str], *, allow_network: bool) -> str:
    name = os.fspath(path)
    if "\0" in name or not is_text(name):
        raise DefinitionError(f"{name[:60]!r} is not the name of a folder")
    try:
        real = os.path.realpath(name)
        folder = Path(real).parent
        if not folder.is_dir():
            raise StoreUnavailable(f"{real} cannot be opened: the folder {folder} does not exist")
        if Path(real).exists() and not Path(real).is_dir():
            raise StoreUnavailable(f"{real} cannot be opened: it is a file, and a files store is a folder")
    except OSError as error:
        raise StoreUnavailable(f"{name[:200]} cannot be opened: {error.strerror}") from None
    kind = None if allow_network else network_file_system(str(folder))
    if kind is not None:
        raise StoreUnavailable(
            f"{real} lies on a network file system ({kind}), where locks between machines do not hold: use a local "
            "disk, or PostgreSQL to share runs between machines; allow_network=True if one machine alone opens it"
        )
    return real


def _prepare(root: str, disk: Disk) -> None:
    """Make the folder a store, if it is empty; raise if it is anything else."""
    try:
        text = disk.read(f"{root}/{MARKER}")
    except FileNotFoundError:
        _make(root, disk)
        text = disk.read(f"{root}/{MARKER}")
    try:
        layout = msgspec.json.decode(text)["layout"]
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
        raise SchemaMismatch(f"{root}/{MARKER} cannot be read: restore it, or write {_marker().decode()!r}") from None
    if not isinstance(layout, int) or layout > LAYOUT:
        raise SchemaMismatch(
            f"{root} has layout {layout}, and this Keepstep knows layouts up to {LAYOUT}: it was written by a newer "
            "Keepstep, so upgrade this one"
        )


def _make(root: str, disk: Disk) -> None:
    disk.make_folder(root)
    strangers = sorted(name for name in disk.names(root) if not name.startswith(".") and name not in _OURS)
    if strangers:
        raise SchemaMismatch(
            f"{root} is a folder of something else ({', '.join(strangers[:3])}, …): choose another; Keepstep writes "
            "only to folders that it made"
        )
    for name in ("runs", "trash"):
        disk.make_folder(f"{root}/{name}")
    word = draw(6).hex()
    try:
        finish(disk, disk.create(f"{root}/.{MARKER}-{word}.tmp", _marker()))
        if disk.identity(f"{root}/.gitignore") is None:
            disk.put(f"{root}/.gitignore", _IGNORED, f"{root}/.gitignore-{word}.tmp")
        _link_or_refuse(root, disk, word)
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(f"{root}/.{MARKER}-{word}.tmp")
    finish(disk, disk.sync_folder(root))
    finish(disk, disk.sync_folder(str(Path(root).parent)))


def _link_or_refuse(root: str, disk: Disk, word: str) -> None:
    try:
        disk.link(f"{root}/.{MARKER}-{word}.tmp", f"{root}/{MARKER}")
    except FileExistsError:  # another process was first
        pass
    except PermissionError as error:
        raise StoreUnavailable(f"{root}: this file system has no hard links, which a files store needs") from error


def _marker() -> bytes:
    return msgspec.json.format(msgspec.json.encode({"keepstep": "files", "layout": LAYOUT}), indent=2) + b"\n"


_OURS = {"runs", "trash", "index", "workers", "aside"}
