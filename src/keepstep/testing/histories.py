"""Histories: what a run has recorded, kept as a file, and replayed against the code of today.

A file holds the run in its first lines and then one record per line, so that a change of it reads well.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ..engine.encryption import Encryption
from ..errors import CheckpointCorrupt, DefinitionError, ReplayMismatch, RunNotFound, SchemaMismatch, StoreUnavailable
from ..history.dry_replay import Recorded, Replayed, replayed, sealed
from ..model import Run, Status
from ..model.run import removed_records
from ..ports import Row, Store
from ..records.keys import Keys
from ..records.record import NEWEST_FORMAT, Instant, Record, origin, unseal
from ..stores.encrypted import EncryptedStore
from ..stores.open import is_store, open_store
from ..workflows.definition import Workflow


class _Head(msgspec.Struct, omit_defaults=True):
    """What a file tells of the run itself."""

    id: str
    workflow: str
    version: str
    fingerprint: str
    status: Status
    created_at: Instant
    seed: str
    input: msgspec.Raw
    encrypted: bool = False


class _File(msgspec.Struct):
    format: int
    run: _Head
    records: list[Record]


@dataclass(frozen=True)
class History(Recorded):
    """A run as it was recorded. `save` writes it to a file, `load` reads it from one, `of` takes it from a store."""

    @staticmethod
    def of(source: Any, run_id: str, *, keys: Keys | None = None) -> History:
        """The history of a run in a store, or in what a URL or a path names. Nothing is written there.

        One that is encrypted is decrypted with the `keys`: what `save` writes is plain text.
        """
        if is_store(source):
            return _read(source, run_id, keys)
        _must_exist(source)
        store = open_store(source)
        try:
            return _read(store, run_id, keys)
        finally:
            store.close()

    @staticmethod
    def load(path: str | os.PathLike[str]) -> History:
        """Read a file that `save` wrote."""
        text = Path(path).read_bytes()
        try:
            found = msgspec.json.decode(text, type=_File)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CheckpointCorrupt(f"{path} holds no history: {error}") from None
        if found.format > NEWEST_FORMAT:
            raise SchemaMismatch(f"{path} has format {found.format}, newer than {NEWEST_FORMAT}; upgrade Keepstep")
        fields = msgspec.structs.asdict(found.run)
        encrypted = fields.pop("encrypted")
        run = Run(**{**fields, "input": bytes(found.run.input)})
        made = sealed(run, found.records)
        list(unseal(made.rows, run.id))  # each is one of ours
        return History(replace(made.run, status=found.run.status), tuple(made.rows), encrypted)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, one record per line, for the repository of the code that it belongs to."""
        if self.run.kept_from:
            raise DefinitionError(f"run {self.run.id!r} cannot be saved as a history: {removed_records(self.run)}")
        Path(path).write_bytes(b"\n".join(self._lines()) + b"\n")

    def _lines(self) -> Iterator[bytes]:
        run = self.run
        raw = msgspec.Raw(run.input)
        head = _Head(run.id, run.workflow, run.version, run.fingerprint, run.status, run.created_at, run.seed, raw)
        head.encrypted = self.encrypted
        yield b'{"format": %d,' % NEWEST_FORMAT
        yield b' "run": %s,' % msgspec.json.encode(head)
        yield b' "records": ['
        last = len(self.rows)
        for record, _ in unseal(self.rows, run.id):
            record.previous, record.packed, record.format = "", "", 0
            yield b"  %s%s" % (msgspec.json.encode(record), b"," if record.seq < last else b"")
        yield b"]}"


def _read(store: Store, run_id: str, keys: Keys | None) -> History:
    store = store if keys is None else EncryptedStore(store, keys)
    run = store.get_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {store.url}", run_id)
    rows: list[Row] = []
    while page := store.list_checkpoints(run_id, rows[-1].seq if rows else 0):
        rows += page
    records = [record for record, _ in unseal(rows, run_id, 0, origin(run), run.kept_from)]
    if not run.data_key:
        return History(run, tuple(rows))
    cipher = Encryption(keys).cipher(run) if not isinstance(store, EncryptedStore) else store.cipher(run)
    data = run.input if cipher is None else cipher.reveal_text(run.input, "input")
    plain = sealed(replace(run, input=data, data_key=""), records)
    return History(plain.run, tuple(plain.rows), encrypted=True)


def _must_exist(source: Any) -> None:
    """A store that is not there is not made."""
    text = os.fspath(source)
    scheme, colon, rest = text.partition(":")
    path = rest.removeprefix("///") if scheme.lower() == "sqlite" else text if not colon or os.sep in scheme else ""
    if path and not os.path.lexists(path):
        raise StoreUnavailable(f"there is no store at {text}")


# -- replay ------------------------------------------------------------------------------------------------------------


def replay(workflow: Workflow[..., Any], source: Any, run_id: str | None = None) -> Replayed:
    """Call a workflow's code with what a run of it has recorded, and raise `ReplayMismatch` where the two part.

    `source` is a `History`, the path of a saved one, or with `run_id` a store, its URL or its path. No step's body
    runs, and nothing is written. The error names the call and, where it can be told, the line of the code.
    """
    history = _history(source, run_id)
    if not isinstance(workflow, Workflow):
        raise DefinitionError(f"{workflow!r} is not a workflow; decorate it with @ks.workflow")
    if history.run.workflow != workflow.name:
        raise DefinitionError(f"the history is one of workflow {history.run.workflow!r}, not of {workflow.name!r}")
    if asyncio._get_running_loop() is None:  # noqa: SLF001 - the one that raises would stand in every traceback
        told = replayed(workflow, history)
    else:
        with ThreadPoolExecutor(1) as beside:  # a loop is running here, and another cannot
            told = beside.submit(replayed, workflow, history).result()
    if told.problem:
        raise ReplayMismatch(told.problem)
    return told


def _history(source: Any, run_id: str | None) -> History:
    if isinstance(source, History):
        return source
    if run_id is not None:
        return History.of(source, run_id)
    if isinstance(source, Store) or _is_store(os.fspath(source)):
        raise DefinitionError(f"{source} is a store: say which of its runs, replay(workflow, source, run_id)")
    return History.load(source)


def _is_store(name: str) -> bool:
    """Whether this names a store and not a saved history."""
    if name.startswith(("sqlite:", "memory:")):
        return True
    with Path(name).open("rb") as file:
        return file.read(16) == b"SQLite format 3\0"


__all__ = ["History", "Replayed", "replay"]
