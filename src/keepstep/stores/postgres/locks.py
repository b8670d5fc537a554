"""Runs that another client has locked in PostgreSQL: detected, so that they do not block other runs.

A person, a migration or a hanging process may lock the head of a run. That would block every commit that writes it, and
every other run of that commit. Therefore a commit waits only briefly for a lock. Then it checks its heads without
waiting, and leaves out the locked ones until they are free.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ...errors import StoreUnavailable
from ...ports import Answer, Change, Verdict
from .commit import heads_of
from .pool import Address, Connection
from .rows import texts

#: Time in seconds after which a lock counts as held. Ordinary commits hold a lock for a shorter time.
_MOMENT_SECONDS = 0.05


class Locks:
    """The runs of a store that are known to be locked by other clients."""

    def __init__(self, address: Address) -> None:
        head = address.table("head")
        self._address = address
        self._suspects: set[str] = set()
        self._held: dict[str, str] = {}  # run: holder of the lock
        self._sql = f"""
            WITH free AS (SELECT run FROM {head} WHERE run = ANY(%s) ORDER BY run FOR UPDATE SKIP LOCKED)
            SELECT h.run, coalesce((
                SELECT 'session ' || l.pid || coalesce(' (' || nullif(a.application_name, '') || ')', '')
                FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
                WHERE l.locktype = 'transactionid' AND l.granted AND l.transactionid = h.xmax LIMIT 1),
                'another session')
            FROM {head} h WHERE h.run = ANY(%s) AND h.run NOT IN (SELECT run FROM free)"""

    def suspects(self, changes: Iterable[Change]) -> bool:
        """Whether some of the changes must be checked for locks before they are written."""
        suspects = self._suspects
        return bool(suspects) and any(not suspects.isdisjoint(heads_of(change)) for change in changes)

    def suspect(self, changes: Iterable[Change]) -> None:
        """Record that one of these changes met a lock; which one is unknown."""
        self._suspects.update(*map(heads_of, changes))

    def look(self, connection: Connection, changes: Sequence[Change]) -> None:
        """Find which runs of the changes are locked for more than a moment, without waiting for any."""
        asked = set().union(*map(heads_of, changes))
        found = self._locked(connection, asked)
        if found.keys() - self._held.keys():
            time.sleep(_MOMENT_SECONDS)
            still = self._locked(connection, asked)
            found = {run: who for run, who in found.items() if run in still}
        self._held = {run: who for run, who in self._held.items() if run not in asked} | found
        self._suspects = self._suspects - asked | found.keys()

    def answer(self, change: Change) -> Answer | None:
        """Return the answer to a change of a run that was locked at the last check; None for any other."""
        run = next((run for run in sorted(heads_of(change)) if run in self._held), None)
        if run is None:
            return None
        error = StoreUnavailable(
            f"{self._address.text}: {self._held[run]} has locked the head of run {run!r}, so it cannot be written"
        )
        error.held = True
        return Answer(Verdict.HELD, about=run, error=error)

    def _locked(self, connection: Connection, runs: set[str]) -> dict[str, str]:
        names = texts(sorted(runs))
        return dict(connection.execute(self._sql, (names, names), binary=True).fetchall())
