"""The command `audit`: who did what to a run, when and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .frame import RUN, Settings, command, find

if TYPE_CHECKING:
    from ..engine.audit import AuditEntry, Incarnation
    from ..engine.engine import Engine


@command("audit")
@RUN
@click.option("--moves", is_flag=True, help="Only what moved the run from one status to another.")
def audit(settings: Settings, *, run_id: str, moves: bool) -> None:
    """Show who did what to a run: every step, transition, recovery and command, with its reason."""
    from ..engine.audit import audit as derive
    from ..engine.audit import incarnations, transitions
    from . import words

    async def look(engine: Engine) -> list[AuditEntry]:
        await find(engine, run_id)
        return await derive(engine, run_id)

    entries = settings.talk(look)
    shown = list(transitions(entries)) if moves else entries
    settings.answer(
        {
            "run": run_id,
            "entries": [_as_json(entry) for entry in shown],
            "incarnations": [_lease_as_json(one) for one in incarnations(entries)],
        },
        lambda: words.table(("WHEN", "WHAT", "WHY", "WHO"), list(_rows(shown))),
    )


def _rows(entries: list[AuditEntry]) -> Iterator[tuple[str, ...]]:
    """A line for each entry, and one for each day."""
    from . import words

    day = ""
    for entry in entries:
        date, _, clock = words.local(entry.at).partition(" ")
        if date != day:
            day = date
            yield date, "", "", ""
        why = words.one_line(entry.reason.removeprefix("keepstep.errors."))
        yield clock, words.one_line(_what(entry)), why, words.one_line(entry.actor)


def _what(entry: AuditEntry) -> str:
    from . import words

    step = f": {words.step_name(entry.step)}" if entry.step and not entry.step.startswith("ks:") else ""
    took = f" in {words.duration(entry.seconds)}" if entry.seconds is not None and entry.step else ""
    if entry.before is entry.after:
        return entry.what + step + took
    before = f"{entry.before.value} → " if entry.before is not None else ""
    return f"{entry.what}{step}{took} ({before}{entry.after.value})"


def _as_json(entry: AuditEntry) -> dict[str, Any]:
    from . import words

    return {
        "at": words.iso(entry.at),
        "seq": entry.seq,
        "what": entry.what,
        "actor": entry.actor,
        "before": entry.before.value if entry.before is not None else None,
        "after": entry.after.value,
        "outcome": entry.outcome.value,
        "step": entry.step,
        "attempt": entry.attempt,
        "reason": entry.reason,
        "epoch": entry.epoch,
        "seconds": entry.seconds,
        "data": entry.data,
    }


def _lease_as_json(one: Incarnation) -> dict[str, Any]:
    from . import words

    return {
        "epoch": one.epoch,
        "worker": one.worker,
        "since": words.iso(one.since),
        "until": words.iso(one.until) if one.until is not None else None,
        "ended": one.ended,
    }
