"""An encrypting store over any other store: values are encrypted on write and decrypted on read.

Records are encrypted when they are sealed, because their checksums cover the ciphertext. This store encrypts everything
else: inputs, signals, progress. The store below is not aware of it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ..errors import CheckpointCorrupt, EncryptionError, StoreError
from ..model import Run, RunQuery, Signal, WorkerInfo
from ..model.ids import draw
from ..model.signal import RESERVED
from ..ports import (
    Advance,
    Answer,
    Change,
    Create,
    Document,
    DocumentQuery,
    OptionalStore,
    Put,
    Rekey,
    Row,
    Send,
    Store,
    Underway,
    Verdict,
    Written,
    commit_all,
    keeps_earlier_keys,
    optional,
)
from ..records.counts import COUNTS
from ..records.keys import Cipher, Keys, is_encrypted, is_wrapped, key_id
from ..records.record import opened
from . import rules
from .documents import SEALED_WITH, check_puts
from .transition import same_child

#: Number of ciphers to cache, so that a run's data key is unwrapped once and not for every page of its history.
KEPT_CIPHERS = 10_000
#: Number of data keys to rewrap in one commit.
REKEY_BATCH = 200
#: Number of newest runs that decide whether a store counts as encrypted.
NEWEST = 10
#: Maximum number of reads of a finished run that is claimed again while it is read.
_READS = 5

#: Collection of the data keys of documents, each wrapped by a master key. It is the only one that is not encrypted.
KEYS_COLLECTION = "keepstep.keys"
_SEALED = re.compile(re.escape(SEALED_WITH) + rb"([a-z0-9\-]{1,60}):")

#: Prefix for the name of a signal that arrived unencrypted at an encrypted run. No wait uses this name.
REFUSED = f"{RESERVED}refused:"


class EncryptedStore:
    """Any store, with the values of its runs encrypted. Other operations are passed to the store below."""

    def __init__(self, store: Store, keys: Keys) -> None:
        keys.check()
        self.inner = store
        self.keys = keys
        self._ciphers: dict[str, tuple[str, Cipher | None]] = {}
        self._newest_key: tuple[bytes, Cipher] | None = None
        self._document_ciphers: dict[str, Cipher] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"<sealed {self.inner!r}>"

    # -- ciphers ------------------------------------------------------------------------------------------------------

    def cipher(self, run: Run) -> Cipher | None:
        """Return the cipher of a run; None for a run in plain text, where these are allowed."""
        known = self._ciphers.get(run.id)
        if known is not None and known[0] == run.data_key:
            return known[1]
        if run.data_key:
            return self._keep(run, self.keys.cipher(run.id, run.data_key))
        if not self.keys.plaintext:
            raise EncryptionError(
                f"run {run.id!r} is not encrypted, and only encrypted runs are taken here; "
                "give the keys plaintext=True for runs from before"
            )
        return self._keep(run, None)

    def _keep(self, run: Run, cipher: Cipher | None) -> Cipher | None:
        if len(self._ciphers) >= KEPT_CIPHERS:
            self._ciphers.clear()
        self._ciphers[run.id] = (run.data_key, cipher)
        return cipher

    def encrypted_new_run(self, run: Run) -> tuple[Run, Cipher]:
        """Return a run to be created, with its own data key and its input encrypted."""
        data_key, cipher = self.keys.new_cipher(run.id)
        return replace(run, data_key=data_key, input=cipher.hide_text(run.input, "input")), cipher

    def _cipher_of(self, run_id: str) -> Cipher | None:
        """Return the cipher of a run that is known only by its id."""
        known = self._ciphers.get(run_id)
        if known is not None:
            return known[1]
        run = self.inner.get_run(run_id)
        return None if run is None else self.cipher(run)

    # -- writing ------------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change], *, wait: bool = True) -> list[Answer]:
        born = {create.run.id: create.run for change in changes for create in _creates(change)}
        sealed = [self._sealed(change, born) for change in changes]
        written = iter(self.inner.commit([one for one in sealed if not isinstance(one, Answer)], wait=wait))
        answers = [one if isinstance(one, Answer) else next(written) for one in sealed]
        return [
            self._reconciled(change, answer)
            if answer.verdict is Verdict.CONFLICT and isinstance(change, Advance)
            else answer
            for change, answer in zip(sealed, answers, strict=True)
        ]

    def begin_commit(self, changes: Sequence[Change]) -> Underway | None:
        """Begin a commit of encrypted records only; signals and children need a read of the store first."""
        begin = optional(self.inner, OptionalStore.begin_commit)
        if begin is None or not all(isinstance(one, Advance) and not (one.sends or one.creates) for one in changes):
            return None
        return begin(changes)

    def _sealed(self, change: Change, born: dict[str, Run]) -> Change | Answer:
        """Return the change for the store below, or the answer if it is already known."""
        if isinstance(change, Send):
            return self._hidden(change, born)
        if isinstance(change, Advance) and change.sends:
            sends = []
            for send in change.sends:
                hidden = self._hidden(send, born)
                if isinstance(hidden, Answer):
                    if send.optional and hidden.verdict is Verdict.NOT_FOUND:
                        continue
                    return hidden
                sends.append(hidden)
            return msgspec.structs.replace(change, sends=sends)
        return change

    def _hidden(self, send: Send, born: dict[str, Run]) -> Send | Answer:
        signal = send.signal
        try:
            # Read every time: an id may have been erased and reused by another run with another key.
            run = self.inner.get_run(signal.run) or born.get(signal.run)
            if run is None:
                return Answer(Verdict.NOT_FOUND, about=signal.run)
            cipher = self.cipher(run)
        except (EncryptionError, CheckpointCorrupt) as error:  # affects only the sender of this signal
            return Answer(Verdict.FAILED, about=signal.run, error=error)
        if cipher is None:
            return send
        hidden = replace(signal, payload=cipher.hide_text(signal.payload, "signal", signal.name, signal.id))
        return msgspec.structs.replace(send, signal=hidden)

    def _reconciled(self, change: Advance, answer: Answer) -> Answer:
        """Compare an existing child by its decrypted input, because two ciphertexts of one input differ."""
        while answer.verdict is Verdict.CONFLICT:
            wanted = next((create.run for create in change.creates if create.run.id == answer.about), None)
            existing = None if wanted is None else self.inner.get_run(answer.about)
            if wanted is None or existing is None or not self._same(existing, wanted):
                break
            others = [create for create in change.creates if create.run.id != answer.about]
            change = msgspec.structs.replace(change, creates=others)
            answer = self.inner.commit([change])[0]
        return answer

    def _same(self, existing: Run, wanted: Run) -> bool:
        return same_child(self._plain(existing), self._plain(wanted))

    def _plain(self, run: Run) -> Run:
        cipher = self.cipher(run)
        return run if cipher is None else replace(run, input=cipher.reveal_text(run.input, "input"))

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        progress = {}
        for run, text in worker.progress.items():
            cipher = None if run == COUNTS else self._cipher_of(run)
            progress[run] = text if cipher is None else cipher.hide_text(text, "progress")
        return self.inner.renew_leases(replace(worker, progress=progress), leaving=leaving)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> Run | None:
        """Return the run of the store below with output, error and progress decrypted, but not the input.

        Without the run's key, they stay encrypted.
        """
        for _ in range(_READS):
            run = self.inner.get_run(run_id)
            if run is None or not run.data_key:
                if run is not None:
                    self.cipher(run)
                return run
            try:
                cipher = self.cipher(run)
            except EncryptionError:
                return replace(run, progress=None)
            if cipher is None:
                return run
            kind = rules.outcome_kind(run.status)
            found = run if kind is None else self._with_outcome(run, kind, cipher)
            if found is not None:
                return found if run.progress is None else replace(found, progress=_progress(run.progress, cipher))
        raise StoreError(f"run {run_id!r} changes faster than it can be read")

    def _with_outcome(self, run: Run, kind: str, cipher: Cipher) -> Run | None:
        """Return the run with its outcome; None if it was claimed again in the meantime."""
        rows = self.inner.list_checkpoints(run.id, run.seq - 1, 2)
        if len(rows) != 1 or rows[0].kind != kind:
            after = self.inner.get_run(run.id)
            if after is None or (after.seq, after.checksum) != (run.seq, run.checksum):
                return None
            raise CheckpointCorrupt(f"run {run.id!r}: its last record does not say how it ended")
        return rules.with_outcome(run, opened(rows[0], cipher))

    def list_checkpoints(self, run_id: str, after: int = 0, limit: int = 1000, kinds: Iterable[str] = ()) -> list[Row]:
        rows = self.inner.list_checkpoints(run_id, after, limit, kinds)
        if not rows:
            return rows
        try:
            cipher = self._cipher_of(run_id)
        except EncryptionError:
            return rows  # reading a value of them raises the error
        if cipher is None:
            return rows
        try:
            return [opened(row, cipher) for row in rows]
        except CheckpointCorrupt:
            if (renewed := self._renewed(run_id)) is cipher or renewed is None:
                raise
            return [opened(row, renewed) for row in rows]

    def list_signals(self, run_id: str, after: int = 0, limit: int = 1000) -> list[Signal]:
        signals = self.inner.list_signals(run_id, after, limit)
        if not signals:
            return signals
        try:
            cipher = self._cipher_of(run_id)
        except EncryptionError:
            return signals
        if cipher is None:
            return signals
        try:
            return [_decrypted_signal(signal, cipher) for signal in signals]
        except CheckpointCorrupt:
            if (renewed := self._renewed(run_id)) is cipher or renewed is None:
                raise
            return [_decrypted_signal(signal, renewed) for signal in signals]

    def _renewed(self, run_id: str) -> Cipher | None:
        """Return the cipher of a run whose id may have been reused by another run since the last read."""
        run = self.inner.get_run(run_id)
        return None if run is None else self.cipher(run)

    # -- documents ----------------------------------------------------------------------------------------------------

    def write_documents(self, batches: Sequence[Sequence[Put]]) -> list[Written]:
        """Write documents with their values encrypted. Their collections and keys stay readable."""
        check_puts(batches)
        name, cipher = self.document_cipher()
        sealed = [[_sealed_put(put, name, cipher) for put in batch] for batch in batches]
        written: list[Written] = self._documents.write_documents(sealed)
        return written

    def list_documents(self, query: DocumentQuery) -> list[Document]:
        """Return documents with their values decrypted."""
        found: list[Document] = self._documents.list_documents(query)
        if not query.values or query.collection == KEYS_COLLECTION:
            return found
        return [self._opened_document(one) for one in found]

    @property
    def _documents(self) -> Any:
        return self.inner

    def document_cipher(self) -> tuple[bytes, Cipher]:
        """Return the name of the data key for new documents, and its cipher; the first call may create the key."""
        if self._newest_key is None:
            query = DocumentQuery(KEYS_COLLECTION)
            for one in reversed(self._documents.list_documents(query)):
                try:
                    self._newest_key = one.key.encode(), self.keys.cipher(one.key, one.value.decode())
                except EncryptionError:  # of a key that is missing here: another one encrypts
                    continue
                break
            else:
                name = f"documents-{draw(8).hex()}"
                wrapped, cipher = self.keys.new_cipher(name)
                self._documents.write_documents([[Put(KEYS_COLLECTION, name, wrapped.encode(), expect=0)]])
                self._newest_key = name.encode(), cipher
        return self._newest_key

    def cipher_named(self, name: str) -> Cipher:
        """Return the cipher of a data key for documents."""
        cipher = self._document_ciphers.get(name)
        if cipher is None:
            rows = self._documents.list_documents(DocumentQuery(KEYS_COLLECTION, keys=(name,)))
            if not rows:
                raise CheckpointCorrupt(f"the data key {name!r} of documents is not in this store")
            cipher = self._document_ciphers[name] = self.keys.cipher(name, rows[0].value.decode())
        return cipher

    def _opened_document(self, one: Document) -> Document:
        found = _SEALED.match(one.value)
        if found is None:
            if self.keys.plaintext:
                return one
            raise EncryptionError(
                f"document {one.key!r} of collection {one.collection!r} is not encrypted, and only encrypted ones are "
                "taken here; give the keys plaintext=True for documents from before"
            )
        cipher = self.cipher_named(found[1].decode())
        value = cipher.reveal(one.value[found.end() :], "document", one.collection, one.key)
        return msgspec.structs.replace(one, value=value)

    # -- rotation -----------------------------------------------------------------------------------------------------

    def _rekey_documents(self) -> Rekeyed:
        """Rewrap the data keys of documents with the current key."""
        if optional(self.inner, OptionalStore.list_documents) is None:
            return Rekeyed()
        changed, left = 0, Counter[str]()
        for one in self._documents.list_documents(DocumentQuery(KEYS_COLLECTION)):
            wrapped = one.value.decode()
            try:
                if key_id(wrapped) == self.keys.current:
                    continue
                new = self.keys.rewrap(one.key, wrapped)
            except EncryptionError as error:
                left[error.key_id] += 1
                continue
            put = Put(KEYS_COLLECTION, one.key, new.encode(), expect=one.version)
            (answer,) = self._documents.write_documents([[put]])
            changed += answer.verdict is Verdict.DONE
        return Rekeyed(changed=changed, left=dict(left))

    def rekey(self, after: str | None = None) -> tuple[Rekeyed, str | None]:
        """Rewrap the data keys of one page of runs with the current key. Also return where the next page begins.

        A run may be driven at the same time, because its data key itself does not change.
        """
        page = self.inner.list_runs(RunQuery(limit=REKEY_BATCH, after=after, system=True))
        changes, left = [], Counter[str]()
        for run in page.runs:
            try:
                new = run.data_key
                if new and key_id(new) != self.keys.current:
                    new = self.keys.rewrap(run.id, new)
            except EncryptionError as error:  # the run stays unchanged and is reported
                left[error.key_id] += 1
            else:
                if new != run.data_key or keeps_earlier_keys(self.inner):
                    changes.append(Rekey(run.id, run.data_key, new))
        answers = commit_all(self.inner, changes) if changes else []
        done = [change for change, answer in zip(changes, answers, strict=True) if answer.verdict is Verdict.DONE]
        changed = sum(change.old != change.new for change in done)
        plain = sum(not run.data_key for run in page.runs)
        damaged = len(page.unreadable) + sum(answer.verdict is Verdict.FAILED for answer in answers)
        done_here = Rekeyed(len(page.runs), changed, plain, dict(left), damaged)
        return done_here if after is not None else done_here.plus(self._rekey_documents()), page.next


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """The progress of a change of keys.

    It counts the runs seen, the rewrapped data keys, the runs in plain text, the runs of each missing key by its id,
    and the damaged runs whose data keys could not be read.
    """

    runs: int = 0
    changed: int = 0
    plain: int = 0
    left: dict[str, int] = field(default_factory=dict)
    damaged: int = 0

    def plus(self, other: Rekeyed) -> Rekeyed:
        left = dict(Counter(self.left) + Counter(other.left))
        runs, changed, plain = self.runs + other.runs, self.changed + other.changed, self.plain + other.plain
        return Rekeyed(runs, changed, plain, left, self.damaged + other.damaged)


def is_sealed_document(value: bytes) -> bool:
    """Whether the value of a document is a Keepstep ciphertext."""
    return _SEALED.match(value) is not None


def _sealed_put(put: Put, name: bytes, cipher: Cipher) -> Put:
    if put.value is None:
        return put
    hidden = cipher.hide(put.value, "document", put.collection, put.key)
    return msgspec.structs.replace(put, value=b"%b%b:%b" % (SEALED_WITH, name, hidden))


def below(store: Store) -> Store:
    """Return the store below, with ciphertext, for code that moves runs without reading them."""
    return store.inner if isinstance(store, EncryptedStore) else store


def locked_with(store: Store) -> str:
    """Return the id of the key that encrypts a store's newest runs, or an empty text for a store in plain text.

    The runs themselves decide, so no store needs a mark that could be wrong.
    """
    page = store.list_runs(RunQuery(limit=NEWEST, system=True))
    return next((key_id(run.data_key) for run in page.runs if is_wrapped(run.data_key)), "")


def documents_locked_with(store: Store) -> str:
    """Return the id of the key that encrypts a store's runs or documents, or an empty text."""
    documents = optional(store, OptionalStore.list_documents)
    keys = [] if documents is None else documents(DocumentQuery(KEYS_COLLECTION))
    wrapped = [text for one in reversed(keys) if is_wrapped(text := one.value.decode("utf-8", "replace"))]
    return locked_with(store) or next(map(key_id, wrapped), "")


def _creates(change: Change) -> Sequence[Create]:
    return (change,) if isinstance(change, Create) else change.creates if isinstance(change, Advance) else ()


def _decrypted_signal(signal: Signal, cipher: Cipher) -> Signal:
    if not is_encrypted(signal.payload):  # sent without keys: not damaged, but never delivered
        return _resealed(replace(signal, name=f"{REFUSED}{signal.name}", payload=b"null"))
    return _resealed(replace(signal, payload=cipher.reveal_text(signal.payload, "signal", signal.name, signal.id)))


def _resealed(signal: Signal) -> Signal:
    """Return the signal with a checksum of its decrypted payload; the store has verified the original one."""
    if not signal.checksum or signal.sent_at is None:
        return signal
    return rules.seal_signal(signal, signal.seq, signal.sent_at)


def _progress(text: bytes, cipher: Cipher) -> bytes | None:
    try:
        return cipher.reveal_text(text, "progress")
    except CheckpointCorrupt:  # progress is only displayed, and the next heartbeat replaces it
        return None
