"""The care of the store of an engine: what the commands for it do, to be awaited while runs go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError
from ..model import FINISHED, Flaw, RunQuery, Status
from ..ports import Store, instant
from . import archive, copying, repair, transfer, upkeep, verify

if TYPE_CHECKING:
    from ..policies import Retain
    from .engine import Engine
    from .repair import Loss
    from .transfer import Transfer
    from .upkeep import Purged
    from .verify import Verification


class Care:
    """Looks after the store of an engine, in threads of its own: runs go on meanwhile. Got with `engine.care`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store: Store = engine.store

    async def verify(self, *run_ids: str) -> Verification:
        """Read everything, or only some runs, and say what is not as it was written."""
        return await asyncio.to_thread(verify.verify, self._store, run_ids)

    async def repair(self) -> list[Flaw]:
        """Mend what can be derived and put aside what fits nowhere; each flaw says what was done."""
        return await asyncio.to_thread(self._store.check, mend=True)

    async def assess(self, run_id: str) -> Loss:
        """What accepting the loss of a damaged run's damaged part would mean."""
        return await asyncio.to_thread(repair.assess, self._store, run_id)

    async def accept_loss(self, run_id: str, aside: str, reason: str = "") -> Loss:
        """Keep the whole damaged run in a file, leave in the store what is certain, and set it aside."""
        engine = self._engine

        def accept() -> Loss:
            told = engine.censor.redact(reason)
            return repair.accept_loss(self._store, run_id, aside, actor=engine.actor, reason=told)

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
        """Remove finished runs; `before` is an instant with a zone, or an age."""
        statuses = frozenset(Status(one) for one in ([status] if isinstance(status, str) else status))
        if isinstance(before, timedelta):
            before = instant(self._engine.clock.now()) - before
        if before is not None and before.tzinfo is None:
            raise DefinitionError("the instant before which runs must have ended needs a time zone")

        def remove() -> Purged:
            return upkeep.purge(
                self._store, workflow=workflow, statuses=statuses, before=before, limit=limit, dry_run=dry_run
            )

        return await asyncio.to_thread(remove)

    async def retain(self, rule: Retain, *, dry_run: bool = False) -> Purged:
        """Remove every finished run that the rule does not keep, at once."""
        return await asyncio.to_thread(upkeep.sweep, self._store, rule, dry_run=dry_run)

    async def erase(self, run_id: str, *, force: bool = False, reason: str = "") -> None:
        """Remove one run so that nothing of it is left in the store's files."""
        await upkeep.erase(self._engine, run_id, force=force, reason=reason)

    async def export(self, path: str, *run_ids: str, **filters: Any) -> Transfer:
        """Write runs into an archive; the filters are the fields of `ks.RunQuery`."""

        def write() -> Transfer:
            with archive.writing(path) as file:
                return transfer.export_runs(self._store, file, run_ids, RunQuery(**filters))

        return await asyncio.to_thread(write)

    async def load(self, path: str, *, queue: bool = False, partial: bool = False) -> Transfer:
        """Take up the runs of an archive; one that had not ended is set aside, or with `queue` goes on here."""

        def read() -> Transfer:
            if not partial:
                with archive.reading(path) as file:
                    transfer.check_archive(file, path)
            with archive.reading(path) as file:
                return transfer.import_runs(
                    self._store, file, path, actor=self._engine.actor, queue=queue, partial=partial
                )

        done = await asyncio.to_thread(read)
        self._engine.poke()
        return done

    async def copy_to(self, target: Store, *run_ids: str, unfinished: bool = False, **filters: Any) -> Transfer:
        """Copy runs into another store; with `unfinished` those that have not ended are handed over."""

        def copy() -> Transfer:
            query = RunQuery(**filters)
            return copying.copy_runs(
                self._store, target, run_ids, query, actor=self._engine.actor, unfinished=unfinished
            )

        return await asyncio.to_thread(copy)
