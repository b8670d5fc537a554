"""The commands that maintain a store: `verify`, `repair`, `purge`, `retain` and `erase`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import errors
from .filters import instant_of
from .settings import REASON, Settings, command, shown_url

if TYPE_CHECKING:
    from datetime import datetime

    from ..care.repair import Loss
    from ..care.retention import Purged
    from ..care.verify import Count, Verification
    from ..engine.engine import Engine
    from ..model import Flaw

FINISHED = ("completed", "failed", "cancelled")
#: Advice for flaws that `repair` cannot fix.
_CURE = "repair cannot fix the flaws above; remove them by hand, or restore the store from a backup"


# -- verify ------------------------------------------------------------------------------------------------------------


@command("verify")
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
def verify(settings: Settings, *, run_ids: tuple[str, ...]) -> int:
    """Read the whole store, or only some runs, and report everything that is damaged.

    Nothing is changed, and read access is enough. Exit code 1 if anything is damaged.
    """
    from ..care.verify import verify as look
    from . import formatting

    def report(_run: str, problems: list[str]) -> None:
        if not settings.json:
            for problem in problems:
                click.echo(f"{click.style('damaged', fg='red', bold=True)}: {formatting.printable(problem)}")

    with settings.reading() as store:
        found, url = look(store, run_ids, report=report), shown_url(store)
    settings.answer(verification_as_json(found), lambda: _verified(found, url))
    return errors.OK if found.sound else errors.FAILED


def verification_as_json(found: Verification) -> dict[str, Any]:
    """Return the result of a verification for a program."""

    def counts(count: Count) -> dict[str, int]:
        return {name: getattr(count, name) for name in ("total", "valid", "invalid", "legacy")}

    return {
        "sound": found.sound,
        "runs": counts(found.runs),
        "records": counts(found.records),
        "signals": counts(found.signals),
        "documents": counts(found.documents),
        "damaged": [{"run": run, "problems": problems} for run, problems in found.damaged.items()],
        "flaws": [_flaw_as_json(flaw) for flaw in found.flaws],
    }


def _flaw_as_json(flaw: Flaw) -> dict[str, Any]:
    return {"kind": flaw.kind, "about": flaw.about, "what": flaw.what, "mended": flaw.mended or None}


def _verified(found: Verification, url: str) -> str:
    from . import formatting

    lines = [f"{click.style('flaw', fg='red', bold=True)}: {formatting.printable(flaw.what)}" for flaw in found.flaws]
    rows = [
        (name, *(f"{getattr(count, column):,}" for column in ("total", "valid", "invalid", "legacy")))
        for name, count in (
            ("runs", found.runs),
            ("records", found.records),
            ("signals", found.signals),
            ("documents", found.documents),
        )
    ]
    lines.append(formatting.table((formatting.one_line(url, 40), "TOTAL", "VALID", "INVALID", "LEGACY"), rows))
    if found.sound:
        lines.append(click.style("nothing is damaged", fg="green"))
    else:
        lines.append(
            errors.advice(
                "keepstep repair fixes what can be derived; keepstep repair --accept-loss RUN is for the rest"
            )
        )
    return "\n".join(lines)


# -- repair ------------------------------------------------------------------------------------------------------------


@command("repair")
@click.option(
    "--accept-loss", "run_id", metavar="RUN", help="Give up the damaged part of one run; without --yes, only show it."
)
@click.option("--yes", is_flag=True, help="With --accept-loss: do it.")
@click.option(
    "--aside",
    metavar="FILE",
    help="With --accept-loss: file that keeps the whole run.  [default: RUN-aside-TIME.jsonl]",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be repaired.")
@REASON
def repair(settings: Settings, *, run_id: str | None, yes: bool, aside: str | None, dry_run: bool, reason: str) -> int:
    """Repair derivable damage, put aside what fits nowhere, and report the runs with other damage.

    Such a run is never cut automatically, because its finished steps would run again. `--accept-loss RUN` shows which
    ones. With `--yes` it keeps the whole run in a file, leaves the intact part in the store, and sets the run aside for
    `keepstep retry`. Exit code 1 if damage remains.
    """
    if run_id is not None:
        return _accept_loss(settings, run_id, aside, reason, yes=yes and not dry_run)
    if yes or aside is not None:
        raise click.UsageError("--yes and --aside belong to --accept-loss RUN")
    from ..care.verify import verify as look
    from . import formatting

    with settings.reading() as store:
        flaws = store.check(mend=not dry_run)
        found, url = look(store), shown_url(store)

    def text() -> str:
        lines = [f"{formatting.printable(flaw.what)}: {flaw.mended or 'not repaired'}" for flaw in flaws]
        reported = {flaw.what for flaw in flaws}
        left = [flaw for flaw in found.flaws if flaw.what not in reported]
        lines += [f"{click.style('flaw', fg='red', bold=True)}: {formatting.printable(flaw.what)}" for flaw in left]
        for problems in found.damaged.values():
            lines += [f"{click.style('damaged', fg='red', bold=True)}: {formatting.printable(one)}" for one in problems]
        if found.damaged:
            first = errors.line("repair", "--accept-loss", next(iter(found.damaged)))
            lines.append(f"{formatting.count(found.runs.invalid, 'run')} cannot be repaired without loss: see {first}")
        elif found.sound:
            lines.append(click.style(f"{url} is sound", fg="green"))
        if not any(flaw.mended for flaw in flaws) and not found.sound:
            lines.append(f"{click.style('nothing was repaired', bold=True)}{'' if found.damaged else f': {_CURE}'}")
        return "\n".join(lines)

    settings.answer({"mended": [_flaw_as_json(flaw) for flaw in flaws], **verification_as_json(found)}, text)
    return errors.OK if found.sound else errors.FAILED


def _accept_loss(settings: Settings, run_id: str, aside: str | None, reason: str, *, yes: bool) -> int:
    import time

    from ..care.repair import accept_loss, assess
    from ..engine.handle import this_process
    from ..values import Redactor

    with settings.reading() as store:
        if yes:
            path = aside or f"{run_id}-aside-{time.strftime('%Y%m%dT%H%M%S')}.jsonl"
            loss = accept_loss(store, run_id, path, actor=this_process(), reason=Redactor().text(reason))
        else:
            loss = assess(store, run_id)
    value = {
        "run": loss.run,
        "problems": loss.problems,
        "kept": loss.kept,
        "repeats": loss.repeats,
        "unreadable": loss.unreadable,
        "signals": loss.signals,
        "aside": loss.aside or None,
        "done": yes,
    }
    settings.answer(value, lambda: _loss_told(loss, done=yes))
    return errors.OK


def _loss_told(loss: Loss, *, done: bool) -> str:
    from . import formatting

    lines = [formatting.printable(problem) for problem in loss.problems]
    lines.append(f"{formatting.count(loss.kept, 'record')} {'stay' if loss.kept != 1 else 'stays'}")
    if loss.repeats:
        steps = ", ".join(formatting.one_line(formatting.step_name(step)) for step in loss.repeats)
        lines.append(f"steps that a retry repeats: {steps}")
    else:
        lines.append("no step that is known to be finished runs again")
    if loss.unreadable:
        lines.append(f"{formatting.count(loss.unreadable, 'record')} cannot be read, so there may be more such steps")
    if loss.signals:
        lines.append(f"lost signals: {', '.join(map(str, loss.signals[:20]))}")
    if done:
        lines.append(f"the whole run is kept in {formatting.one_line(loss.aside)}")
        lines.append(f"{formatting.one_line(loss.run)} is set aside; {errors.line('retry', loss.run)} lets it go on")
    else:
        lines.append(f"nothing was changed: {errors.line('repair', '--accept-loss', loss.run, '--yes')} does it")
    return "\n".join(lines)


# -- purge and retain --------------------------------------------------------------------------------------------------


@command("purge")
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option("--status", type=click.Choice(FINISHED), multiple=True, help="Only runs with this final status.")
@click.option(
    "--before", type=instant_of, metavar="DATE|AGE", help="Only runs that ended before this, as 30d or 2026-11-01."
)
@click.option("--all", "everything", is_flag=True, help="Regardless of age.")
@click.option("--limit", type=click.IntRange(0), help="Maximum number of runs.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
def purge(
    settings: Settings,
    *,
    workflow: str | None,
    status: tuple[str, ...],
    before: datetime | None,
    everything: bool,
    limit: int | None,
    dry_run: bool,
) -> None:
    """Remove finished runs. Unfinished and set-aside runs are never removed.

    The id of a removed run is free: `start` with it begins a new run.
    """
    from ..care.retention import purge as remove
    from ..model import Status

    if (before is None) is not everything:
        raise click.UsageError("give a minimum age with --before 30d, or --all")
    wanted = frozenset(Status(one) for one in status or FINISHED)
    with settings.reading() as store:
        done = remove(store, workflow=workflow, statuses=wanted, before=before, limit=limit, dry_run=dry_run)
    _tell_purged(settings, done, dry_run=dry_run)


@command("retain")
@click.option("--days", type=click.FloatRange(0), default=30.0, show_default=True, help="Days to keep a run, ...")
@click.option(
    "--count",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="... and newest runs to keep of each workflow.",
)
@click.option("--failed-days", type=click.FloatRange(0), help="Days to keep failed and cancelled runs.")
@click.option("--no-preserve", is_flag=True, help="Remove all completed runs.")
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option("--dry-run", is_flag=True, help="Only count them.")
def retain(
    settings: Settings,
    *,
    days: float,
    count: int,
    failed_days: float | None,
    no_preserve: bool,
    workflow: str | None,
    dry_run: bool,
) -> None:
    """Remove finished runs that the rule does not keep, as a worker with a `retain=` rule does.

    A run is kept while it is young enough or among the newest of its workflow.
    """
    from ..care.retention import sweep
    from ..policies import Retain

    rule = Retain(days, count, failed_days, preserve=not no_preserve)
    if workflow is not None:
        rule = Retain(days=1e6, workflows={workflow: rule})
    with settings.reading() as store:
        done = sweep(store, rule, dry_run=dry_run)
    _tell_purged(settings, done, dry_run=dry_run)


def _tell_purged(settings: Settings, done: Purged, *, dry_run: bool) -> None:
    from . import formatting

    def text() -> str:
        counts = ", ".join(f"{number} {status.value}" for status, number in sorted(done.statuses.items()))
        verb = "would be removed" if dry_run else "removed"
        lines = [f"{formatting.count(done.removed, 'run')} {verb}{f' ({counts})' if counts else ''}"]
        lines += [f"  {formatting.one_line(name)}: {number}" for name, number in sorted(done.workflows.items())]
        lines += [f"{formatting.count(done.parts, 'part')} of the history dropped"] if done.parts else []
        return "\n".join(lines)

    value = {
        "removed": done.removed,
        "parts": done.parts,
        "dry_run": dry_run,
        "statuses": {status.value: number for status, number in done.statuses.items()},
        "workflows": dict(done.workflows),
    }
    settings.answer(value, text)


@command("divide")
@click.option("--days", type=click.FloatRange(0, min_open=True), default=7.0, show_default=True, help="Days of a part.")
def divide(settings: Settings, *, days: float) -> None:
    """Divide the history of a PostgreSQL store, so that retention drops tables instead of deleting records.

    From now on, the runs of each period of --days have a table for their records. It is dropped when all these runs
    were removed; a few that remain are moved. Runs go on meanwhile. A second call only changes the days of a part.
    """
    from ..care.retention import divide_history

    with settings.reading() as store:
        is_new = divide_history(store, days)
    done = "is divided from now on" if is_new else "was divided before"
    settings.answer({"divided": True, "new": is_new, "days": days}, f"the history {done}, into parts of {days:g} days")


# -- erase -------------------------------------------------------------------------------------------------------------


@command("erase")
@click.argument("run_id", metavar="[RUN]", default="")
@click.option("--force", is_flag=True, help="Also an unfinished run; it is cancelled first, without clean-up.")
@click.option("--rewrite", is_flag=True, help="Rewrite a large store now, although every run waits meanwhile.")
@REASON
def erase(settings: Settings, *, run_id: str, force: bool, rewrite: bool, reason: str) -> None:
    """Remove one run so that no file of the store holds any part of it.

    SQLite and PostgreSQL rewrite their files for this. A store of more than 16 MB only removes the run and leaves the
    rewriting to you (exit code 9), because every run waits meanwhile: --rewrite, with or without a RUN, finishes every
    erasure. Data that the run sent to others, such as its parent, stays, and so do copies and archives. A run that is
    being driven is refused: cancel it first. If the command is interrupted, run it again.
    """
    from ..care.retention import erase as remove
    from ..care.retention import finish_erasures
    from . import formatting

    if not run_id and not rewrite:
        raise errors.Refused("name the run to erase", "without one, --rewrite finishes earlier erasures")

    async def act(engine: Engine) -> int:
        if not run_id:
            return await finish_erasures(engine)
        await remove(engine, run_id, force=force, rewrite=rewrite, reason=reason, actor=engine.actor)
        return 1

    finished = settings.talk(act)
    if run_id:
        settings.answer({"run": run_id, "erased": True}, f"{run_id} is erased")
    else:
        settings.answer({"erased": finished}, f"{formatting.count(finished, 'removed run')} erased")
