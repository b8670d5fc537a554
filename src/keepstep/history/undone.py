"""Commands about the undo of a run: decide about a failed one, and refuse what would tear an undo from its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..checks import check_text
from ..errors import AlreadyFinished, DefinitionError, RunConflict, RunNotFound
from ..kernel.replay import Superseded, read_records
from ..kernel.undo_records import Answered, Outline, UndoRecords, counting
from ..model import Kind, Status
from ..model.undo import ANSWER, is_undo, waits_for_answer
from ..records.data import UndoData, new_data
from ..records.record import FORMAT_WITH_UNDO, Record
from .commands import append_and_release, claim_by_name, hand_back_on_error
from .names import named

if TYPE_CHECKING:
    from ..model import Run
    from .host import CommandHost


async def read_undo(host: CommandHost, run: Run) -> UndoRecords:
    """Return what can be undone in a run, and what was; its whole history is verified."""
    return UndoRecords(counting([record async for record, _ in read_records(host, run)]))


async def has_undone(host: CommandHost, run: Run) -> bool:
    """Whether a run has undone its steps at its end, so that its code cannot go on."""
    return any(batch.at_end for batch in (await read_undo(host, run)).batches)


async def answer_undo(
    host: CommandHost, run_id: str, act: str, steps: Sequence[str], *, reason: str, actor: str
) -> list[str]:
    """Try failed undo steps of a run again (`retry`), or accept them as they are (`skip`); return the steps meant.

    Without `steps`, the decision is about all of them.
    """
    check_text(reason, "reason")
    run = await host.stored_run(run_id)
    if run is None:
        raise RunNotFound(f"no run {run_id!r} in {host.url}", run_id)
    if not waits_for_answer(run):
        raise AlreadyFinished(f"run {run_id!r} is {run.status.value}; no undo step of it has failed", run_id)
    host.encryption.cipher(run)  # nothing can be written without the run's key
    _chosen(run, await read_undo(host, run), steps)  # before the claim, so that a refusal leaves the run untouched
    claim = await claim_by_name(host, run, frozenset({Status.SET_ASIDE}))
    async with hand_back_on_error(host, claim):
        past = await read_undo(host, claim.run)
        keys = _chosen(run, past, steps)
        why = host.redaction.redact(reason)
        data = new_data(UndoData, act=act, actor=actor, reason=why, before=run.status.value)
        record = Record(run_id, Kind.UNDO.value, step=f"{ANSWER}{past.answers + 1}", trigger="manual", data=data)
        record.worker, record.format = claim.lease.worker, FORMAT_WITH_UNDO
        record.value = msgspec.Raw(msgspec.json.encode(Answered(act, keys)))
        await append_and_release(host, claim, record, Status.QUEUED)
    return keys


def _chosen(run: Run, past: UndoRecords, steps: Sequence[str]) -> list[str]:
    failed = list(past.failed)
    if not steps:
        return failed
    keys: dict[str, None] = {}
    for step in steps:
        found = named(failed, step)
        if len(found) != 1:
            raise DefinitionError(f"run {run.id!r} has no failed undo of {step!r}; it has {', '.join(failed)}")
        keys[found[0]] = None
    return list(keys)


def check_not_torn(run: Run, records: Sequence[Outline], marks: Sequence[Record], last: int, verb: str) -> None:
    """Refuse to go back to a record from which a step would count that the run has undone.

    The code would go on as if the step were done: charged, refunded, retried, shipped. An undo that a rewind has
    superseded has still happened, so the run is also looked at as it was before each of its superseding `marks`.
    """
    gone = Superseded()
    torn = None
    for mark in (*marks, None):
        if mark is None or mark.seq > last:
            counted = [one for one in records if one.seq not in gone and (mark is None or one.seq < mark.seq)]
            torn = torn or UndoRecords(counted).splits(last)
        if mark is not None:
            gone.add(mark)
    if torn is not None:
        first = min((item.seq for item in torn.items), default=torn.seq)
        raise RunConflict(
            f"run {run.id!r} began to undo its steps at seq {torn.seq}, so it cannot be {verb} to seq {last}; "
            f"go back to seq {first - 1} or before, from where it does them again",
            run.id,
        )


def check_retry(run: Run, records: Sequence[Record], seqs: set[int], *, is_ended: bool) -> None:
    """Refuse a retry of code whose steps were undone at its end, or whose undo the retry would take back."""
    outlines = counting(records)
    batches = UndoRecords(outlines).batches
    is_torn = any(one.seq in seqs and is_undo(one.step) for one in outlines)
    if batches and (is_torn or (is_ended and batches[-1].at_end)):
        first = min((item.seq for batch in batches for item in batch.items), default=batches[0].seq)
        raise RunConflict(
            f"run {run.id!r} has undone its steps, so its code cannot go on from where it failed; start a new run, "
            f"or rewind it to before the first undone step: keepstep rewind {run.id} --to {first - 1}",
            run.id,
        )
