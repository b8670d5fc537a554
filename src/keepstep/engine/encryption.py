"""What an engine does about keys: which runs it can read, how it makes new ones, and when it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import DefinitionError, EncryptionError
from ..ports import Create
from ..stores.keys import Keys, key_id
from ..stores.records import born, origin, seal
from ..stores.rules import seal_signal
from ..stores.sealed import Rekeyed, SealedStore, locked_with

if TYPE_CHECKING:
    from ..model import Run, Signal
    from ..ports import Row, Store
    from ..stores.keys import Cipher
    from ..stores.records import Record
    from .engine import Engine

#: While others still begin runs with an old key, so many looks through the store are enough.
PASSES = 5


class Encryption:
    """The keys of an engine, if it has any, and the store that it reads and writes with them."""

    def __init__(self, keys: Keys | None) -> None:
        if keys is not None and not isinstance(keys, Keys):
            raise DefinitionError(f"keys= takes a ks.Keys, not {type(keys).__name__}")
        self._keys = keys
        #: The store of the engine, if its runs are encrypted.
        self.store: SealedStore | None = None
        #: Without keys: the one that the newest runs are encrypted with.
        self._locked_with = ""
        #: Whether nothing is stored here in plain text.
        self.of_everything = False

    def open(self, store: Store, *, look: bool, worker: bool) -> Store:
        """The store as the engine uses it. Without keys, one that `look` shows to be encrypted gets no worker."""
        self.store, self._locked_with = None, ""
        if self._keys is not None:
            store = self.store = SealedStore(store, self._keys)
        elif isinstance(store, SealedStore):
            self.store = store
        elif look:
            self._locked_with = locked_with(store)
            if worker:
                self.check_writing()
        self.of_everything = self.store is not None and not self.store.keys.plaintext
        return store

    def check_writing(self) -> None:
        """Refuse to write in plain text among encrypted runs."""
        if self._locked_with:
            raise EncryptionError(
                f"the runs of this store are encrypted with the key {self._locked_with!r}, and no keys are given; "
                "open it with keys=ks.Keys(...)",
                self._locked_with,
            )

    async def check_sending(self, engine: Engine, run_id: str) -> None:
        """Refuse to send a message in plain text to an encrypted run, which would not hear it."""
        if self._locked_with:
            run = await engine.read(engine.store.get_run, run_id)
            if run is not None:
                self.cipher(run)

    def cannot_read(self, error: EncryptionError) -> None:
        """A run came up whose key is not here; without any keys, no others are written beside it from now on."""
        if self.store is None:
            self._locked_with = error.key_id

    def cipher(self, run: Run) -> Cipher | None:
        """What a run is encrypted with; `EncryptionError` if its key is not here."""
        if self.store is not None:
            return self.store.cipher(run)
        if run.data_key:
            name = key_id(run.data_key)
            raise EncryptionError(f"run {run.id!r} is encrypted with the key {name!r}, and no keys are given", name)
        return None

    def input(self, run: Run) -> bytes:
        """The stored input of a run, in plain text."""
        cipher = self.cipher(run)
        return run.input if cipher is None else cipher.reveal_text(run.input, "input")

    def born(self, run: Run, first: Record | None = None) -> Create:
        """The creation of a run, encrypted if those of this engine are."""
        if self.store is None:
            return born(run, first)
        run, cipher = self.store.begotten(run)
        return born(run, first, cipher)

    def copied(self, run: Run, records: Iterable[Record], signals: Iterable[Signal]) -> Create:
        """The creation of a run that begins with records and signals of another; encrypted if those of this engine are.

        The records are sealed anew, each after the one before it.
        """
        cipher = None
        if self.store is not None:
            run, cipher = self.store.begotten(run)
        rows: list[Row] = []
        checksum = origin(run)
        for record in records:
            row, checksum = seal(record, len(rows) + 1, checksum, cipher)
            rows.append(row)
        sealed = []
        for signal in signals:
            one = signal
            if cipher is not None:
                one = replace(one, payload=cipher.hide_text(one.payload, "signal", one.name, one.id))
            sealed.append(seal_signal(one, one.seq, run.created_at))
        return Create(replace(run, seq=len(rows), checksum=checksum), rows, sealed)

    async def rekey(self, engine: Engine) -> Rekeyed:
        """Wrap the data keys of all runs with the current key; until a look finds none to wrap."""
        if self.store is None:
            raise EncryptionError("no keys are given, so there is none to change to; open the store with keys=...")
        changed = 0
        for _ in range(PASSES):
            seen = Rekeyed()
            after: str | None = None
            while True:
                page, after = await engine.call(self.store.rekey, after)
                seen = seen.plus(page)
                if after is None:
                    break
            changed += seen.changed
            if not seen.changed:
                break
        return Rekeyed(seen.runs, changed, seen.plain, seen.left, seen.damaged)
