"""Runs that someone else has locked in PostgreSQL: found, so that they are left out and hold up nobody.

A lock that a person, a migration or a process that hangs holds on the head of a run would hold up every commit that
writes it, and with it every other run of that commit. So a commit waits for a lock only for a moment; then the heads
that it concerns are looked at without waiting, and those that are locked are left out until they are free.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ..errors import StoreUnavailable
from ..ports import Answer, Change, Verdict
from .postgres_commit import heads_of
from .postgres_connection import Address, Connection
from .postgres_rows import texts

#: A lock that is still there after so long is not one of those that every commit takes for a moment.
_MOMENT_SECONDS = 0.05


class Locks:
    """Which runs of a store someone else has locked, as far as is known."""

    def __init__(self, address: Address) -> None:
        head = address.table("head")
        self._address = address
        self._suspects: set[str] = set()
        self._held: dict[str, str] = {}  # run: who has locked it
        self._sql = f"""
            WITH free AS (SELECT run FROM {head} WHERE run = ANY(%s) ORDER BY run FOR UPDATE SKIP LOCKED)
            SELECT h.run, coalesce((
                SELECT 'session ' || l.pid || coalesce(' (' || nullif(a.application_name, '') || ')', '')
                FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
                WHERE l.locktype = 'transactionid' AND l.granted AND l.transactionid = h.xmax LIMIT 1),
                'another session')
            FROM {head} h WHERE h.run = ANY(%s) AND h.run NOT IN (SELECT run FROM free)"""

    def suspects(self, changes: Iterable[Change]) -> bool:
        """Whether some of the changes must be looked at before they are written."""
        suspects = self._suspects
        return bool(suspects) and any(not suspects.isdisjoint(heads_of(change)) for change in changes)

    def suspect(self, changes: Iterable[Change]) -> None:
        """One of these changes was held up by a lock; which one is not known."""
        self._suspects.update(*map(heads_of, changes))

    def look(self, connection: Connection, changes: Sequence[Change]) -> None:
        """Find out which of the runs that the changes concern are locked for more than a moment; wait for none."""
        asked = set().union(*map(heads_of, changes))
        found = self._locked(connection, asked)
        if found.keys() - self._held.keys():
            time.sleep(_MOMENT_SECONDS)
            still = self._locked(connection, asked)
            found = {run: who for run, who in found.items() if run in still}
        self._held = {run: who for run, who in self._held.items() if run not in asked} | found
        self._suspects = self._suspects - asked | found.keys()

    def answer(self, change: Change) -> Answer | None:
        """The answer to a change of a run that was locked at the last look; None for any other."""
        run = next((run for run in sorted(heads_of(change)) if run in self._held), None)
        if run is None:
            return None
        error = StoreUnavailable(
            f"{self._address.text}: {self._held[run]} has locked the head of run {run!r}, so that it cannot be written"
        )
        error.held = True
        return Answer(Verdict.HELD, about=run, error=error)

    def _locked(self, connection: Connection, runs: set[str]) -> dict[str, str]:
        names = texts(sorted(runs))
        return dict(connection.execute(self._sql, (names, names), binary=True).fetchall())
