"""A run as it was at one of its records: the records that counted then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt
from ..kernel.replay import History, check_end, check_kept, check_not_removed
from ..records.record import Record, check_origin, unseal
from ..stores.rules import follows

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row
    from .host import CommandHost


class Prefix:
    """The first records of a run; `history` holds what counted at their end."""

    def __init__(self, run: Run, rows: Sequence[Row]) -> None:
        self.run = run
        self.rows = rows
        self.history = History(run)
        self.history.add(rows)
        self.checksum = self.history.checksum
        self.history.arrange(replace(run, seq=self.seq, checksum=self.checksum))

    @property
    def seq(self) -> int:
        """The number of its last record."""
        return self.rows[-1].seq if self.rows else 0

    @cached_property
    def records(self) -> list[Record]:
        """All its records, including those that no longer counted."""
        return [record for record, _ in unseal(self.rows, self.run.id, kept_from=self.run.kept_from)]

    def until(self, last: int) -> Prefix:
        """Return the prefix that ends with record `last`."""
        check_kept(self.run, last)
        return self if last >= self.seq else Prefix(self.run, [row for row in self.rows if row.seq <= last])

    def counted(self) -> list[Record]:
        """Return the records that counted, in order."""
        gone = self.history.superseded
        return [record for record in self.records if record.seq not in gone]


async def rows_up_to(host: CommandHost, run: Run, last: int) -> list[Row]:
    """Return the rows of a run up to number `last`; rows that were removed on purpose are missing."""
    rows: list[Row] = []
    end = 0
    while end < last:
        page = await host.records(run.id, end)
        if not follows(page, end, run.kept_from) or not page:  # without this check, rows after a gap are read forever
            await check_not_removed(host, run)
            raise CheckpointCorrupt(f"run {run.id!r}: chain broken at seq {end + 1}: the record is missing")
        rows += page
        end = page[-1].seq
        await asyncio.sleep(0)
    return [row for row in rows if row.seq <= last]


async def read_prefix(host: CommandHost, run: Run, last: int | None = None) -> Prefix:
    """Return a run as it was at record `last`, or as it is now."""
    check_origin(run)
    wanted = run.seq if last is None else min(last, run.seq)
    check_kept(run, wanted)
    try:
        # The next row holds the checksum of the last one.
        rows = await rows_up_to(host, run, min(wanted + 1, run.seq))
    except CheckpointCorrupt:
        fresh = await host.stored_run(run.id)
        if fresh is None or fresh.kept_from == run.kept_from:
            raise
        return await read_prefix(host, fresh, last)  # older records were removed meanwhile
    return await host.call(_whole, run, rows, wanted)


def _whole(run: Run, rows: Sequence[Row], last: int) -> Prefix:
    found = Prefix(run, rows)
    if found.seq == run.seq:
        check_end(run, found.seq, found.checksum)
    return found.until(last)
