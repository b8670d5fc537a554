"""A run as it was at one of its records: what counted then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt
from ..stores.records import Record, check_origin, unseal
from ..stores.rules import extends
from .history import History, check_end, check_not_removed

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row
    from .engine import Engine


class Past:
    """The beginning of a run: its rows and records, and in `history` what counted at its end."""

    def __init__(self, run: Run, rows: Sequence[Row]) -> None:
        self.run = run
        self.rows = rows
        self.history = History(run)
        self.history.add(rows)
        self.checksum = self.history.checksum
        self.history.arrange(replace(run, seq=len(rows), checksum=self.checksum))

    @property
    def seq(self) -> int:
        """The last record that is part of it."""
        return len(self.rows)

    @cached_property
    def records(self) -> list[Record]:
        """All of its records, whether they counted or not."""
        return [record for record, _ in unseal(self.rows, self.run.id)]

    def until(self, last: int) -> Past:
        """What was there when this record had been written."""
        return self if last >= self.seq else Past(self.run, self.rows[:last])

    def counted(self) -> list[Record]:
        """The records that counted, in order."""
        gone = self.history.superseded
        return [record for record in self.records if record.seq not in gone]


async def rows_up_to(engine: Engine, run: Run, last: int) -> list[Row]:
    """The rows of a run up to one of them."""
    rows: list[Row] = []
    while len(rows) < last:
        page = await engine.read(engine.store.list_checkpoints, run.id, len(rows))
        if not extends(page, len(rows)) or not page:  # else what follows a gap would be read again and again
            await check_not_removed(engine, run)
            raise CheckpointCorrupt(f"run {run.id!r}: chain broken at seq {len(rows) + 1}: it is not there")
        rows += page
        await asyncio.sleep(0)
    return rows[:last]


async def past(engine: Engine, run: Run, last: int | None = None) -> Past:
    """A run as it was at a record, or is now."""
    check_origin(run)
    wanted = run.seq if last is None else min(last, run.seq)
    rows = await rows_up_to(engine, run, min(wanted + 1, run.seq))  # the next one tells whether the last is as it was
    return await engine.call(_whole, run, rows, wanted)


def _whole(run: Run, rows: Sequence[Row], last: int) -> Past:
    found = Past(run, rows)
    if found.seq == run.seq:
        check_end(run, found.seq, found.checksum)
    return found.until(last)
