"""Sets a run aside: records the reason, and leaves the run to a person."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt, StoreError
from ..kernel.log import Draft
from ..kernel.progress import cut_short
from ..kernel.stored_errors import clean
from ..model import Kind, Outcome, Status
from ..model.frames import own_frames
from ..model.ids import new_id
from ..ports import Advance, Verdict, instant
from ..records.record import Record, StoredError
from .journal import sealed

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from .process import Process

log = logging.getLogger("keepstep")

#: Prefix of the error code of a set-aside run, before the phase of the recovery that failed.
RECOVERY = "ks:recovery-"


def set_aside(host: Process, run: RunDriver, kind: str, reason: str, *, phase: str, traceback: str = "") -> None:
    """Detach the run and set it aside for a person, with the reason."""
    if run.stop.detached:
        return
    run.detach(f"set aside: {reason}")
    redact = host.redaction.redact
    error = StoredError(
        type=clean(kind),
        message=clean(redact(reason)),
        error_class="permanent",
        code=f"{RECOVERY}{phase}",
        traceback=clean(redact(traceback)),
        id=new_id("error"),
    )
    log.error("run %s is set aside: %s", run.id, _reason(error))
    host.background(_write(host, run, error, cut_short(run)))


def _reason(error: StoredError) -> str:
    """Return the message of an error, with the line of the user's code if it is known."""
    frames = own_frames(error.traceback)
    return f"{error.message} ({frames[-1].brief})" if frames else error.message


async def _write(host: Process, run: RunDriver, error: StoredError, saved: list[Draft]) -> None:
    def change(*, with_record: bool = True) -> Advance:
        record = Record(run.id, Kind.ERROR.value, outcome=Outcome.FAILURE.value, worker=run.worker, error=error)
        record.finished_at = instant(host.clock.now())
        rows, checksum = sealed(run, [*saved, Draft(record)])
        return Advance(
            run.id,
            run.worker,
            run.epoch,
            run.seq,
            rows=rows if with_record else [],
            checksum=checksum if with_record else "",
            status=Status.SET_ASIDE,
            release=True,
            progress=False,
        )

    try:
        try:
            answer = await host.journal.write(change)
        except CheckpointCorrupt:  # no record can follow a damaged head
            answer = await host.journal.write(partial(change, with_record=False))
    except StoreError:
        host.give_back_later(run)
        return
    if answer.verdict is Verdict.DONE:
        host.events.observe("run.set_aside", run, reason=_reason(error))
        host.notify_waiters()
