"""The command `audit`: who did what to a run, when and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ..model.undo import is_command
from .settings import RUN, Settings, command, find

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..history.audit import AuditEntry


@command("audit")
@RUN
@click.option("--moves", is_flag=True, help="Only changes of the status.")
def audit(settings: Settings, *, run_id: str, moves: bool) -> None:
    """Show who did what to a run: every step, transition, recovery and command, with its reason."""
    from ..history.audit import audit as derive
    from ..history.audit import incarnations, transitions
    from ..views import plain
    from . import formatting

    async def look(engine: Engine) -> list[AuditEntry]:
        await find(engine, run_id)
        return await derive(engine, run_id)

    entries = settings.look(look)
    shown = list(transitions(entries)) if moves else entries
    settings.answer(
        {
            "run": run_id,
            "entries": [plain.audit_data(entry) for entry in shown],
            "incarnations": [plain.incarnation_data(one) for one in incarnations(entries)],
        },
        lambda: formatting.table(("WHEN", "WHAT", "WHY", "WHO"), list(_rows(shown))),
    )


def _rows(entries: list[AuditEntry]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each entry and for each day."""
    from . import formatting

    day = ""
    for entry in entries:
        date, _, clock = formatting.local(entry.at).partition(" ")
        if date != day:
            day = date
            yield date, "", "", ""
        why = formatting.one_line(entry.reason.removeprefix("keepstep.errors."))
        yield clock, formatting.one_line(_what(entry)), why, formatting.one_line(entry.actor)


def _what(entry: AuditEntry) -> str:
    from . import formatting

    step = f": {formatting.step_name(entry.step)}" if entry.step and not is_command(entry.step) else ""
    has_taken = entry.seconds is not None and entry.step and entry.what != "wait started"
    took = f" in {formatting.duration(entry.seconds or 0.0)}" if has_taken else ""
    if named := formatting.names(entry.agent, entry.stage):
        took += f" [{named}]"
    if entry.before is entry.after:
        return entry.what + step + took
    before = f"{entry.before.value} → " if entry.before is not None else ""
    return f"{entry.what}{step}{took} ({before}{entry.after.value})"
