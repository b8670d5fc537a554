"""Removal of retired data keys from the earlier entries of a run.

Every entry holds the run's whole head, and an entry that creates children holds theirs. Without this removal, an
earlier entry would keep a data key that the retired master key can open.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ...errors import CheckpointCorrupt
from .disk import Steps, translating
from .entry import Entry, Outbox, read_entry
from .log import LOST, TRIMMED, Logs, State
from .names import entry_name
from .text import sealed


def has_retired_keys(outbox: Outbox, current: str) -> bool:
    """Whether an outbox holds a data key that is wrapped by another master key than that of `current`."""
    return any(_is_retired(create.run.data_key, current) for create in outbox.creates)


def remove_retired_keys(logs: Logs, run: str, state: State) -> Steps[None]:
    """Rewrite every entry before the newest one that holds a data key of a retired master key.

    The newest entry must not hold one. Each file is replaced as a whole, so a reader sees the old or the new text, and
    a second call completes an interrupted first one. Raise `CheckpointCorrupt` if an entry of the run is unreadable.
    """
    folder = logs.folder(run)
    rewritten = False
    with translating(folder), contextlib.suppress(FileNotFoundError):  # another process removes the run
        for number in range(1, state.number):
            text = _rewritten(logs, run, number, state)
            if text is not None:
                yield from _replace(logs, folder, number, text)
                rewritten = True
        logs.sweep(run)
        if rewritten:
            yield from logs.disk.sync_folder(folder)


def _rewritten(logs: Logs, run: str, number: int, state: State) -> bytes | None:
    """Return the new text of an entry; None if it can stay."""
    name = entry_name(number)
    data = logs.disk.read(f"{logs.folder(run)}/{name}")
    is_given_up = number < state.head.base  # an accepted loss: entries before the base are never read
    try:
        entry = read_entry(data, run, number, name)
    except CheckpointCorrupt:
        if state.head.first_entry < number < state.head.kept_entry:
            return None if data == TRIMMED else TRIMMED
        if not is_given_up:
            raise
        return None if data == LOST else LOST
    fields = _without_retired_keys(entry, state.head.data_key, "" if is_given_up else state.head.data_key)
    return None if fields is None else sealed(fields)


def _without_retired_keys(entry: Entry, current: str, key: str) -> dict[str, Any] | None:
    """Return the fields of an entry with `key` as its data key; None if none of its data keys is retired."""
    head, outbox = entry.head, entry.outbox
    fields = dict(entry.fields)
    if _is_retired(head.data_key, current):
        fields["head"] = fields["head"] | {"data_key": key}
    if has_retired_keys(outbox, current):
        del fields["outbox"]  # the next entry has taken over the unfinished effects
    return None if fields == entry.fields else fields


def _replace(logs: Logs, folder: str, number: int, text: bytes) -> Steps[None]:
    name = entry_name(number)
    temporary = f"{folder}/.{name}-{logs.unique()}.tmp"
    yield from logs.disk.create(temporary, text)
    try:
        logs.disk.rename(temporary, f"{folder}/{name}")
    except BaseException:
        with contextlib.suppress(OSError):
            logs.disk.unlink(temporary)
        raise


def _is_retired(data_key: str, current: str) -> bool:
    """Whether another master key wraps a data key: all but its last part names the master key."""
    return bool(data_key) and data_key.rpartition(":")[0] != current.rpartition(":")[0]
