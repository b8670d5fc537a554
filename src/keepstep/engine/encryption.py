"""The keys of an engine: which runs it can read, how it encrypts new ones, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import DefinitionError, EncryptionError
from ..ports import Create, OptionalStore, optional
from ..records.keys import Keys, key_id
from ..records.record import born, numbers, origin, seal
from ..stores.encrypted import EncryptedStore, Rekeyed, below, locked_with
from ..stores.rules import seal_signal

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..model import Run, Signal
    from ..ports import Row, Store
    from ..records.keys import Cipher
    from ..records.record import Record

#: Passes over the store at most, while other processes still start runs with an old key.
PASSES = 5


class Encryption:
    """The keys of an engine, if it has any, and the store that it reads and writes with them."""

    def __init__(self, keys: Keys | None) -> None:
        if keys is not None and not isinstance(keys, Keys):
            raise DefinitionError(f"keys= must be a ks.Keys, got {type(keys).__name__}")
        self._keys = keys
        #: The store of the engine, if its runs are encrypted.
        self.store: EncryptedStore | None = None
        #: Without keys: the id of the key that encrypts the newest runs.
        self._locked_with = ""
        #: Whether nothing is stored in plain text here.
        self.of_everything = False

    def open(self, store: Store, *, look: bool, worker: bool) -> Store:
        """Return the store as the engine uses it. Without keys, a store that `look` finds encrypted gets no worker."""
        self.store, self._locked_with = None, ""
        if self._keys is not None:
            store = self.store = EncryptedStore(store, self._keys)
        elif isinstance(store, EncryptedStore):
            self.store = store
        elif look:
            self._locked_with = locked_with(store)
            if worker:
                self.check_writing()
        self.of_everything = self.store is not None and not self.store.keys.plaintext
        return store

    def looking(self, store: Store) -> Store | None:
        """Return the store for those who only look, with the same keys; None if that is the same store."""
        look = optional(below(store), OptionalStore.looking)
        found = None if look is None else look()
        return EncryptedStore(found, store.keys) if found and isinstance(store, EncryptedStore) else found

    @property
    def locked_with(self) -> str:
        """The id of the key that encrypts the newest runs, if there are no keys here."""
        return self._locked_with

    def check_writing(self) -> None:
        """Refuse to write in plain text among encrypted runs."""
        if self._locked_with:
            raise EncryptionError(
                f"the runs of this store are encrypted with the key {self._locked_with!r}, but keys= is not set; "
                "open it with keys=ks.Keys(...)",
                self._locked_with,
            )

    async def check_sending(self, host: CommandHost, run_id: str) -> None:
        """Refuse to send a plain-text message to an encrypted run, which could not read it."""
        if self._locked_with:
            run = await host.stored_run(run_id)
            if run is not None:
                self.cipher(run)

    def cannot_read(self, error: EncryptionError) -> None:
        """Note a run whose key is missing. Without any keys, no plain-text runs are written beside it from now on."""
        if self.store is None:
            self._locked_with = error.key_id

    def cipher(self, run: Run) -> Cipher | None:
        """Return the cipher of a run; raise `EncryptionError` if its key is missing."""
        if self.store is not None:
            return self.store.cipher(run)
        if run.data_key:
            name = key_id(run.data_key)
            raise EncryptionError(f"run {run.id!r} is encrypted with the key {name!r}, but keys= is not set", name)
        return None

    def input(self, run: Run) -> bytes:
        """Return the stored input of a run in plain text."""
        cipher = self.cipher(run)
        return run.input if cipher is None else cipher.reveal_text(run.input, "input")

    def born(self, run: Run, first: Record | None = None) -> Create:
        """Return the creation of a run, encrypted if the engine has keys."""
        if self.store is None:
            return born(run, first)
        run, cipher = self.store.encrypted_new_run(run)
        return born(run, first, cipher)

    def copied(self, run: Run, records: Iterable[Record], signals: Iterable[Signal]) -> Create:
        """Return the creation of a run with records and signals of another, encrypted if the engine has keys.

        The records are sealed again, each after the previous one.
        """
        cipher = None
        if self.store is not None:
            run, cipher = self.store.encrypted_new_run(run)
        rows: list[Row] = []
        checksum = origin(run)
        for seq, record in zip(numbers(run), records, strict=False):
            row, checksum = seal(record, seq, checksum, cipher)
            rows.append(row)
        sealed = []
        for signal in signals:
            one = signal
            if cipher is not None:
                one = replace(one, payload=cipher.hide_text(one.payload, "signal", one.name, one.id))
            sealed.append(seal_signal(one, one.seq, run.created_at))
        return Create(replace(run, seq=rows[-1].seq if rows else 0, checksum=checksum), rows, sealed)

    async def rekey(self, host: CommandHost) -> Rekeyed:
        """Encrypt the data keys of all runs with the current key, until a pass finds none to change."""
        if self.store is None:
            raise EncryptionError("rekey needs a current key; open the store with keys=...")
        changed = 0
        for _ in range(PASSES):
            seen = Rekeyed()
            after: str | None = None
            while True:
                page, after = await host.call(self.store.rekey, after)
                seen = seen.plus(page)
                if after is None:
                    break
            changed += seen.changed
            if not seen.changed:
                break
        return Rekeyed(seen.runs, changed, seen.plain, seen.left, seen.damaged)
