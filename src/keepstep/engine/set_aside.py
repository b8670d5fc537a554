"""Sets a run aside: records the reason, and leaves the run to a person."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CheckpointCorrupt, StoreError
from ..kernel.log import Draft
from ..kernel.progress import cut_short
from ..kernel.stored_errors import clean
from ..model import Kind, Outcome, Status
from ..model.frames import own_frames
from ..model.ids import new_id
from ..model.text import one_line
from ..ports import Advance, Verdict, instant
from ..records.data import Data
from ..records.record import Record, StoredError
from .journal import sealed

if TYPE_CHECKING:
    from ..kernel.driver import RunDriver
    from .process import Process

log = logging.getLogger("keepstep")

#: Prefix of the error code of a set-aside run, before the phase of the recovery that failed.
RECOVERY = "ks:recovery-"


class Reason(NamedTuple):
    """Why a run is set aside: the type and the text of its error, the phase, and everything that the phase found."""

    kind: str
    text: str
    phase: str
    traceback: str = ""
    problems: tuple[str, ...] = ()
    handler: str = ""


def set_aside(host: Process, run: RunDriver, reason: Reason) -> None:
    """Detach the run and set it aside for a person, with the reason."""
    if run.stop.detached:
        return
    run.detach(f"set aside: {reason.text}")
    redact = host.redaction.redact
    error = StoredError(
        type=clean(reason.kind),
        message=clean(redact(reason.text)),
        error_class="permanent",
        code=f"{RECOVERY}{reason.phase}",
        traceback=clean(redact(reason.traceback)),
        id=new_id("error"),
    )
    data: Data = {"handler": reason.handler} if reason.handler else {}
    if len(reason.problems) > 1:  # a single one is the message
        data["problems"] = [clean(redact(one)) for one in reason.problems]
    log.error("run %s is set aside: %s", run.id, one_line(_reason(error)))
    host.background(_write(host, run, error, data or None, cut_short(run)))


def _reason(error: StoredError) -> str:
    """Return the message of an error, with the line of the user's code if it is known."""
    frames = own_frames(error.traceback)
    return f"{error.message} ({frames[-1].brief})" if frames else error.message


async def _write(host: Process, run: RunDriver, error: StoredError, data: Data | None, saved: list[Draft]) -> None:
    def change(*, with_record: bool = True) -> Advance:
        record = Record(run.id, Kind.ERROR.value, outcome=Outcome.FAILURE.value, worker=run.worker, error=error)
        record.data = data
        record.finished_at = instant(host.clock.now())
        rows, checksum = sealed(run, [*saved, Draft(record)])
        text = f"{error.type}: {error.message}"
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
            sends=host.notices("set_aside", run.run, text=text, key=str(run.epoch), at=record.finished_at),
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
