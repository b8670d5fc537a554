"""A store whose runs are encrypted, over any other store: what goes in is hidden, what comes out is opened.

The records themselves are encrypted when they are sealed, because their checksums cover the ciphertext; here everything
else is: inputs, signals, progress. Nothing below this needs to know of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ..errors import CheckpointCorrupt, EncryptionError, StoreError
from ..model import Run, RunQuery, Signal, WorkerInfo
from ..model.signal import RESERVED
from ..ports import Advance, Answer, Change, Create, Rekey, Row, Send, Store, Underway, Verdict, commit_all
from . import rules
from .keys import Cipher, Keys, is_encrypted, is_wrapped, key_id
from .records import opened

#: Ciphers kept in memory, so that a run's data key is unwrapped once and not for every page of its history.
KEPT_CIPHERS = 10_000
#: Data keys that are wrapped anew in one commit.
REKEY_BATCH = 200
#: So many of the newest runs say whether a store is encrypted.
NEWEST = 10
#: A run that ended and was taken up again while it was read is read again this often.
_READS = 5

#: A signal that came without encryption to a run that has it is told under this name, for which nothing waits.
REFUSED = f"{RESERVED}refused:"


class SealedStore:
    """Any store, with the values of its runs encrypted. What it does not do itself, the store below does."""

    def __init__(self, store: Store, keys: Keys) -> None:
        keys.check()
        self.inner = store
        self.keys = keys
        self._ciphers: dict[str, tuple[str, Cipher | None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __repr__(self) -> str:
        return f"<sealed {self.inner!r}>"

    # -- ciphers ------------------------------------------------------------------------------------------------------

    def cipher(self, run: Run) -> Cipher | None:
        """What the run is encrypted with; None for one in plain text, where those are let pass."""
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

    def begotten(self, run: Run) -> tuple[Run, Cipher]:
        """A run that is to be created, with a data key of its own and its input encrypted."""
        data_key, cipher = self.keys.new_cipher(run.id)
        return replace(run, data_key=data_key, input=cipher.hide_text(run.input, "input")), cipher

    def _cipher_of(self, run_id: str) -> Cipher | None:
        """The cipher of a run that is only known by its id."""
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
        """Begin a commit of what is encrypted already; signals and children take a look into the store first."""
        begin = getattr(self.inner, "begin_commit", None)
        if begin is None or not all(isinstance(one, Advance) and not (one.sends or one.creates) for one in changes):
            return None
        underway: Underway | None = begin(changes)
        return underway

    def _sealed(self, change: Change, born: dict[str, Run]) -> Change | Answer:
        """The change as the store below is to write it, or the answer if that is clear."""
        if isinstance(change, Send):
            return self._hidden(change, born)
        if isinstance(change, Advance) and change.sends:
            sends = []
            for send in change.sends:
                hidden = self._hidden(send, born)
                if isinstance(hidden, Answer):
                    return hidden
                sends.append(hidden)
            return msgspec.structs.replace(change, sends=sends)
        return change

    def _hidden(self, send: Send, born: dict[str, Run]) -> Send | Answer:
        signal = send.signal
        try:
            # Read each time: an id may have been erased and given to another run, with another key.
            run = self.inner.get_run(signal.run) or born.get(signal.run)
            if run is None:
                return Answer(Verdict.NOT_FOUND, about=signal.run)
            cipher = self.cipher(run)
        except (EncryptionError, CheckpointCorrupt) as error:  # only who sends this is concerned
            return Answer(Verdict.FAILED, about=signal.run, error=error)
        if cipher is None:
            return send
        return Send(replace(signal, payload=cipher.hide_text(signal.payload, "signal", signal.name, signal.id)))

    def _reconciled(self, change: Advance, answer: Answer) -> Answer:
        """A child that is there already: two ciphertexts of one input differ, so its plain text decides."""
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
        return rules.same_child(self._plain(existing), self._plain(wanted))

    def _plain(self, run: Run) -> Run:
        cipher = self.cipher(run)
        return run if cipher is None else replace(run, input=cipher.reveal_text(run.input, "input"))

    def renew_leases(self, worker: WorkerInfo, *, leaving: bool = False) -> bool:
        progress = {}
        for run, told in worker.progress.items():
            cipher = self._cipher_of(run)
            progress[run] = told if cipher is None else cipher.hide_text(told, "progress")
        return self.inner.renew_leases(replace(worker, progress=progress), leaving=leaving)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get_run(self, run_id: str) -> Run | None:
        """As the store below gives it, with the output, the error and the progress in plain text; the input is not.

        Without the run's key they stay hidden.
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
        """The run with how it ended; None if it was taken up again meanwhile."""
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
            return rows  # whoever wants a value of them is told
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
            return [_heard(signal, cipher) for signal in signals]
        except CheckpointCorrupt:
            if (renewed := self._renewed(run_id)) is cipher or renewed is None:
                raise
            return [_heard(signal, renewed) for signal in signals]

    def _renewed(self, run_id: str) -> Cipher | None:
        """The cipher of a run whose id may have been given to another one since it was last read."""
        run = self.inner.get_run(run_id)
        return None if run is None else self.cipher(run)

    # -- rotation -----------------------------------------------------------------------------------------------------

    def rekey(self, after: str | None = None) -> tuple[Rekeyed, str | None]:
        """Wrap the data keys of one page of runs with the current key; with where the next page begins.

        A run that someone drives meanwhile does not notice: its data key stays what it is.
        """
        page = self.inner.list_runs(RunQuery(limit=REKEY_BATCH, after=after))
        changes, left = [], Counter[str]()
        for run in page.runs:
            try:
                new = run.data_key
                if new and key_id(new) != self.keys.current:
                    new = self.keys.rewrap(run.id, new)
            except EncryptionError as error:  # it stays as it is, and is told
                left[error.key_id] += 1
            else:
                if new != run.data_key or getattr(self.inner, "keeps_earlier_keys", False):
                    changes.append(Rekey(run.id, run.data_key, new))
        answers = commit_all(self.inner, changes) if changes else []
        done = [change for change, answer in zip(changes, answers, strict=True) if answer.verdict is Verdict.DONE]
        changed = sum(change.old != change.new for change in done)
        plain = sum(not run.data_key for run in page.runs)
        damaged = len(page.unreadable) + sum(answer.verdict is Verdict.FAILED for answer in answers)
        return Rekeyed(len(page.runs), changed, plain, dict(left), damaged), page.next


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """How far a change of keys has come.

    Runs seen, data keys wrapped anew, runs in plain text, by the id of their key those whose key is not here, and how
    many are damaged, so that their data keys could not be read.
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


def below(store: Store) -> Store:
    """The store as it is, ciphertext and all: for those who move runs about and need not read them."""
    return store.inner if isinstance(store, SealedStore) else store


def locked_with(store: Store) -> str:
    """The id of the key that a store's newest runs are encrypted with, if they are: then the store counts as encrypted.

    That is read from the runs themselves, so that no store has to keep a mark, and no mark can be wrong.
    """
    page = store.list_runs(RunQuery(limit=NEWEST))
    return next((key_id(run.data_key) for run in page.runs if is_wrapped(run.data_key)), "")


def _creates(change: Change) -> Sequence[Create]:
    return (change,) if isinstance(change, Create) else change.creates if isinstance(change, Advance) else ()


def _heard(signal: Signal, cipher: Cipher) -> Signal:
    if not is_encrypted(signal.payload):  # from someone without keys: not a damage, and nothing that is ever heard
        return _resealed(replace(signal, name=f"{REFUSED}{signal.name}", payload=b"null"))
    return _resealed(replace(signal, payload=cipher.reveal_text(signal.payload, "signal", signal.name, signal.id)))


def _resealed(signal: Signal) -> Signal:
    """The signal with a checksum that fits what it says now; the store has checked the one that it had."""
    if not signal.checksum or signal.sent_at is None:
        return signal
    return rules.seal_signal(signal, signal.seq, signal.sent_at)


def _progress(told: bytes, cipher: Cipher) -> bytes | None:
    try:
        return cipher.reveal_text(told, "progress")
    except CheckpointCorrupt:  # it is only shown, and the next heartbeat brings another
        return None
