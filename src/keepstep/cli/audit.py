"""The command `audit`: who did what to a run, when and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .frame import RUN, Settings, command, find

if TYPE_CHECKING:
    from ..engine.audit import AuditEntry
    from ..engine.engine import Engine


@command("audit")
@RUN
@click.option("--moves", is_flag=True, help="Only what moved the run from one status to another.")
def audit(settings: Settings, *, run_id: str, moves: bool) -> None:
    """Show who did what to a run: every step, transition, recovery and command, with its reason."""
    from ..engine.audit import audit as derive
    from ..engine.audit import transitions
    from . import words

    async def look(engine: Engine) -> list[AuditEntry]:
        await find(engine, run_id)
        return await derive(engine, run_id)

    entries = settings.talk(look)
    shown = list(transitions(entries)) if moves else entries
    rows = [
        (
            words.local(entry.at),
            _moved(entry),
            words.one_line(entry.what + (f": {words.step_name(entry.step)}" if _names_step(entry) else "")),
            words.one_line(entry.actor),
            words.one_line(entry.reason),
        )
        for entry in shown
    ]
    settings.answer(
        {"run": run_id, "entries": [_as_json(entry) for entry in shown]},
        lambda: words.table(("WHEN", "STATUS", "WHAT", "WHO", "WHY"), rows),
    )


def _names_step(entry: AuditEntry) -> bool:
    return bool(entry.step) and not entry.step.startswith("ks:")


def _moved(entry: AuditEntry) -> str:
    from . import words

    if entry.before is entry.after:
        return ""
    before = f"{entry.before.value} → " if entry.before is not None else ""
    return before + words.coloured(entry.after)


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
    }
