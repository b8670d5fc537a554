"""The runs that are set aside: why each waits for a person, its last error, and how often it was tried."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from ..errors import StoreError
from ..model import Kind, Run, RunQuery, Status
from ..records.data import ErrorData, data_of
from ..records.record import unseal_some

if TYPE_CHECKING:
    from ..history.host import CommandHost
    from ..records.record import Record

#: First characters of the error code of a run that was set aside, before the phase of its recovery.
_CODE = "ks:recovery-"


@dataclass(frozen=True, slots=True)
class AsideRun:
    """A run that waits for a person.

    `kind` and `reason` are those of the error with which it was set aside, in the `phase` of a recovery, and `problems`
    lists everything that was found there. `failed` is the step that failed last, with the message `last_error`.
    `attempts` is the number of times that the run was set aside, and `recoveries` that of crashes in a row before.
    """

    run: Run
    since: datetime | None
    kind: str
    reason: str
    phase: str
    problems: tuple[str, ...]
    failed: str
    last_error: str
    attempts: int

    @property
    def recoveries(self) -> int:
        """The number of crashes in a row before the run was set aside."""
        return self.run.recoveries


@dataclass(frozen=True, slots=True)
class AsidePage:
    """One page of runs that are set aside, the newest first, and the ids of runs whose rows cannot be read."""

    runs: tuple[AsideRun, ...]
    next: str | None
    unreadable: tuple[str, ...]


async def asides(host: CommandHost, query: RunQuery) -> AsidePage:
    """Return one page of the runs that are set aside and match a query."""
    page = await host.call(host.store.list_runs, query)
    found = [await aside(host, run.id) for run in page.runs]
    return AsidePage(tuple(one for one in found if one is not None), page.next, tuple(page.unreadable))


async def aside(host: CommandHost, run_id: str) -> AsideRun | None:
    """Return why a run is set aside; None if it is not, or no longer exists."""
    run = await host.stored_run(run_id)
    if run is None or run.status is not Status.SET_ASIDE:
        return None
    errors = await _records(host, run, Kind.ERROR)
    failures = await _records(host, run, Kind.STEP_FAILED)
    last = failures[-1] if failures else None
    stored = None if last is None else last.error
    code = run.error.code if run.error is not None and run.error.code else ""
    return AsideRun(
        run,
        run.updated_at,
        run.error.type if run.error is not None else "",
        run.error.message if run.error is not None else "no reason is recorded",
        code.removeprefix(_CODE) if code.startswith(_CODE) else "",
        tuple(data_of(errors[-1], ErrorData).get("problems", ())) if errors else (),
        "" if last is None else last.step,
        "" if stored is None else f"{stored.type}: {stored.message}",
        len(errors),
    )


async def _records(host: CommandHost, run: Run, kind: Kind) -> list[Record]:
    """Return the records of one kind; none if they cannot be read, which may be why the run is set aside."""
    found: list[Record] = []
    after = 0
    try:
        while rows := await host.records(run.id, after, kinds=(kind.value,)):
            found += [record for record, _ in unseal_some(rows, run.id)]
            after = rows[-1].seq
    except StoreError:
        return found
    return found
