"""A run as it was at one of its records: what counted then."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..stores.records import Record, check_origin, unseal
from .history import History

if TYPE_CHECKING:
    from ..model import Run
    from ..ports import Row
    from .engine import Engine


class Past:
    """The beginning of a run: its rows and records, and in `history` what counted at its end."""

    def __init__(self, run: Run, rows: list[Row]) -> None:
        self.run = run
        self.rows = rows
        self.records: list[Record] = []
        self.checksum = ""
        self.history = History(run)
        self.cut(len(rows))

    @property
    def seq(self) -> int:
        """The last record that is part of it."""
        return len(self.rows)

    def cut(self, last: int) -> None:
        """Take only the records up to this one."""
        self.rows = self.rows[:last]
        history = History(self.run)
        history.add(self.rows)
        self.checksum = history.checksum
        history.arrange(replace(self.run, seq=len(self.rows), checksum=self.checksum))
        self.history = history
        self.records = [record for record, _ in unseal(self.rows, self.run.id)]

    def counted(self) -> list[Record]:
        """The records that counted, in order."""
        gone = self.history.superseded
        return [record for record in self.records if record.seq not in gone]


async def rows_up_to(engine: Engine, run: Run, last: int) -> list[Row]:
    """The rows of a run up to one of them, as far as they are there."""
    rows: list[Row] = []
    while len(rows) < last:
        page = await engine.read(engine.store.list_checkpoints, run.id, len(rows))
        if not page:
            break
        rows += page
    return rows[:last]


async def past(engine: Engine, run: Run, last: int | None = None) -> Past:
    """A run as it was at a record, or is now."""
    check_origin(run)
    return Past(run, await rows_up_to(engine, run, run.seq if last is None else min(last, run.seq)))
