"""Remove the data keys that a change of keys has left in the earlier entries of a run.

Every entry holds the run's whole head, and an entry that creates children holds theirs. So an earlier entry would keep
a data key as the retired master key opens it.
"""

from __future__ import annotations

import contextlib
from typing import Any

from ..errors import CheckpointCorrupt
from .files_disk import Steps, translating
from .files_entry import Entry, Outbox, read_entry
from .files_log import LOST, Logs, State
from .files_names import entry_name
from .files_text import sealed


def has_retired_keys(outbox: Outbox, current: str) -> bool:
    """Whether an outbox holds a data key that another master key opens than the one of `current`."""
    return any(_is_retired(create.run.data_key, current) for create in outbox.creates)


def remove_retired_keys(logs: Logs, run: str, state: State) -> Steps[None]:
    """Rewrite each entry before the newest one that holds a data key of a retired master key.

    The newest entry must not hold one. Each file is replaced whole, so a reader sees the old or the new text, and a
    second call finishes what a first one left. `CheckpointCorrupt` if an entry of the run cannot be read.
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
    """The new text of an entry; None if it can stay."""
    name = entry_name(number)
    data = logs.disk.read(f"{logs.folder(run)}/{name}")
    is_given_up = number < state.head.base  # an accepted loss: nothing before the base is ever read
    try:
        entry = read_entry(data, run, number, name)
    except CheckpointCorrupt:
        if not is_given_up:
            raise
        return None if data == LOST else LOST
    fields = _without_retired_keys(entry, state.head.data_key, "" if is_given_up else state.head.data_key)
    return None if fields is None else sealed(fields)


def _without_retired_keys(entry: Entry, current: str, key: str) -> dict[str, Any] | None:
    """The fields of an entry with `key` as its data key; None if none of its data keys is retired."""
    head, outbox = entry.head, entry.outbox
    fields = dict(entry.fields)
    if _is_retired(head.data_key, current):
        fields["head"] = fields["head"] | {"data_key": key}
    if has_retired_keys(outbox, current):
        del fields["outbox"]  # the next entry has taken over what was not done
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
    """Whether another master key wraps a data key: all but its last part names that one."""
    return bool(data_key) and data_key.rpartition(":")[0] != current.rpartition(":")[0]
