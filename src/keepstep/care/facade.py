"""The care interface of an engine: the maintenance commands as coroutines, while runs go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..model import FINISHED, Flaw, RunQuery, Status
from ..ports import Store, instant
from . import archive, copying, repair, retention, transfer, verify

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..policies import Retain
    from .repair import Loss
    from .retention import Purged
    from .transfer import Transfer
    from .verify import Verification


class Care:
    """Maintains the store of an engine in its own threads, while runs go on. Returned by `engine.care`."""

    def __init__(self, host: CommandHost) -> None:
        self._host = host
        self._store: Store = host.store

    async def verify(self, *run_ids: str) -> Verification:
        """Read all runs, or only some, and report everything that differs from what was written."""
        return await asyncio.to_thread(verify.verify, self._store, run_ids)

    async def repair(self) -> list[Flaw]:
        """Derive again what can be derived, and put aside what fits nowhere. Each flaw says what was done about it."""
        return await asyncio.to_thread(self._store.check, mend=True)

    async def assess(self, run_id: str) -> Loss:
        """Return what would be lost if the loss of a run's damaged part were accepted."""
        return await asyncio.to_thread(repair.assess, self._store, run_id)

    async def accept_loss(self, run_id: str, aside: str, reason: str = "") -> Loss:
        """Keep the whole damaged run in a file, keep the certain part in the store, and set the run aside."""
        host = self._host

        def accept() -> Loss:
            redacted = host.redaction.redact(reason)
            return repair.accept_loss(self._store, run_id, aside, actor=host.actor, reason=redacted)

        return await asyncio.to_thread(accept)

    async def purge(
        self,
        *,
        workflow: str | None = None,
        status: Status | str | Iterable[Status | str] = FINISHED,
        before: datetime | timedelta | None = None,
        limit: int | None = None,
        dry_run: bool = False,
    ) -> Purged:
        """Remove finished runs; `before` is an instant with a time zone, or an age."""
        statuses = frozenset(Status(one) for one in ([status] if isinstance(status, str) else status))
        if isinstance(before, timedelta):
            before = instant(self._host.clock.now()) - before
        if before is not None and before.tzinfo is None:
            raise DefinitionError("before= must be an instant with a time zone")

        def remove() -> Purged:
            return retention.purge(
                self._store, workflow=workflow, statuses=statuses, before=before, limit=limit, dry_run=dry_run
            )

        return await asyncio.to_thread(remove)

    async def retain(self, rule: Retain, *, dry_run: bool = False) -> Purged:
        """Remove at once every finished run that the rule does not keep."""
        return await asyncio.to_thread(retention.sweep, self._store, rule, dry_run=dry_run)

    async def divide_history(self, days: float = 7.0) -> bool:
        """Keep the records of runs in tables, one for each period of `days`, which retention drops as a whole.

        For a PostgreSQL store. Return False if its history was divided before, and only the days may have changed.
        """
        return await asyncio.to_thread(retention.divide_history, self._store, days)

    async def erase(self, run_id: str, *, force: bool = False, rewrite: bool = False, reason: str = "") -> None:
        """Remove one run so that no file of the store holds any part of it.

        For a large store this raises `EraseUnfinished` after the run is removed; with `rewrite` it rewrites the store
        and all runs wait.
        """
        await retention.erase(self._host, run_id, force=force, rewrite=rewrite, reason=reason)

    async def rewrite(self) -> int:
        """Rewrite the store's files to finish erasures, while all runs wait. Return the number of runs erased."""
        return await retention.finish_erasures(self._host)

    async def export(self, /, path: str, *run_ids: str, **filters: Any) -> Transfer:
        """Write runs into an archive; the filters are the fields of `ks.RunQuery`."""

        def write() -> Transfer:
            with archive.writing(path) as file:
                return transfer.export_runs(self._store, file, run_ids, RunQuery(**{"system": True, **filters}))

        return await asyncio.to_thread(write)

    async def load(self, path: str, *, queue: bool = False, partial: bool = False) -> Transfer:
        """Import the runs of an archive. Unfinished runs are set aside, or go on here with `queue`."""

        def read() -> Transfer:
            if not partial:
                with archive.reading(path) as file:
                    transfer.check_archive(file, path)
            with archive.reading(path) as file:
                return transfer.import_runs(
                    self._store, file, path, actor=self._host.actor, queue=queue, partial=partial
                )

        done = await asyncio.to_thread(read)
        self._host.claim_soon()
        return done

    async def copy_to(self, /, target: Store, *run_ids: str, unfinished: bool = False, **filters: Any) -> Transfer:
        """Copy runs into another store; `unfinished` hands over those that have not ended."""

        def copy() -> Transfer:
            query = RunQuery(**{"system": True, **filters})
            return copying.copy_runs(self._store, target, run_ids, query, actor=self._host.actor, unfinished=unfinished)

        return await asyncio.to_thread(copy)
