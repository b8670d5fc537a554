"""The commands that look after a store: `verify`, `repair`, `purge`, `retain` and `erase`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click

from . import exits
from .frame import REASON, RUN, Settings, command, shown_url

if TYPE_CHECKING:
    from datetime import datetime

    from ..engine.engine import Engine
    from ..engine.repair import Loss
    from ..engine.upkeep import Purged
    from ..engine.verify import Count, Verification
    from ..model import Flaw

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
FINISHED = ("completed", "failed", "cancelled")
#: What is left to do about flaws that no repair knows how to mend.
_CURE = "no repair knows what to do about what is named above; remove it by hand, or restore the store from a copy"


def instant_of(value: str) -> datetime:
    """An instant: an age such as 30d, 12h or 90m, or a date such as 2026-11-01, by this machine's time zone."""
    from datetime import UTC, datetime, timedelta

    age = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", value.strip().lower())
    try:
        if age is not None:
            return datetime.now(UTC) - timedelta(seconds=float(age[1]) * _UNITS[age[2]])
        return datetime.fromisoformat(value.strip()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is no age such as 30d, 12h or 90m, and no date such as 2026-11-01"
        ) from None


# -- verify ------------------------------------------------------------------------------------------------------------


@command("verify")
@click.argument("run_ids", nargs=-1, metavar="[RUN]...")
def verify(settings: Settings, *, run_ids: tuple[str, ...]) -> int:
    """Read everything in the store, or only some runs, and say what is not as it was written.

    Nothing is changed: it also works where nothing can be written. Exit code 1 if anything is damaged.
    """
    from ..engine.verify import verify as look
    from . import words

    def tell(_run: str, problems: list[str]) -> None:
        if not settings.json:
            for problem in problems:
                click.echo(f"{click.style('damaged', fg='red', bold=True)}: {words.printable(problem)}")

    with settings.reading() as store:
        found, url = look(store, run_ids, tell=tell), shown_url(store)
    settings.answer(verification_as_json(found), lambda: _verified(found, url))
    return exits.OK if found.sound else exits.FAILED


def verification_as_json(found: Verification) -> dict[str, Any]:
    """What was found, for a program."""

    def counts(count: Count) -> dict[str, int]:
        return {name: getattr(count, name) for name in ("total", "valid", "invalid", "legacy")}

    return {
        "sound": found.sound,
        "runs": counts(found.runs),
        "records": counts(found.records),
        "signals": counts(found.signals),
        "damaged": [{"run": run, "problems": problems} for run, problems in found.damaged.items()],
        "flaws": [_flaw_as_json(flaw) for flaw in found.flaws],
    }


def _flaw_as_json(flaw: Flaw) -> dict[str, Any]:
    return {"kind": flaw.kind, "about": flaw.about, "what": flaw.what, "mended": flaw.mended or None}


def _verified(found: Verification, url: str) -> str:
    from . import words

    lines = [f"{click.style('flaw', fg='red', bold=True)}: {words.printable(flaw.what)}" for flaw in found.flaws]
    rows = [
        (name, *(f"{getattr(count, column):,}" for column in ("total", "valid", "invalid", "legacy")))
        for name, count in (("runs", found.runs), ("records", found.records), ("signals", found.signals))
    ]
    lines.append(words.table((words.one_line(url, 40), "TOTAL", "VALID", "INVALID", "LEGACY"), rows))
    if found.sound:
        lines.append(click.style("everything is as it was written", fg="green"))
    else:
        lines.append(
            exits.advice("keepstep repair mends what can be derived; keepstep repair --accept-loss RUN is for the rest")
        )
    return "\n".join(lines)


# -- repair ------------------------------------------------------------------------------------------------------------


@command("repair")
@click.option("--accept-loss", "run_id", metavar="RUN", help="Give up the damaged part of one run; shown first.")
@click.option("--yes", is_flag=True, help="With --accept-loss: do it.")
@click.option(
    "--aside", metavar="FILE", help="With --accept-loss: where the whole run is kept.  [default: RUN-aside-TIME.jsonl]"
)
@click.option("--dry-run", is_flag=True, help="Only say what would be mended.")
@REASON
def repair(settings: Settings, *, run_id: str | None, yes: bool, aside: str | None, dry_run: bool, reason: str) -> int:
    """Mend what can be derived, put aside what fits nowhere, and name the runs that are damaged beyond that.

    Such a run is never cut by itself, for its done steps would be done again. `--accept-loss RUN` shows which, and with
    `--yes` keeps the whole run in a file, leaves what is certain in the store, and sets it aside for `keepstep retry`.
    Exit code 1 if damage is left.
    """
    if run_id is not None:
        return _accept_loss(settings, run_id, aside, reason, yes=yes and not dry_run)
    if yes or aside is not None:
        raise click.UsageError("--yes and --aside belong to --accept-loss RUN")
    from ..engine.verify import verify as look
    from . import words

    with settings.reading() as store:
        flaws = store.check(mend=not dry_run)
        found, url = look(store), shown_url(store)

    def text() -> str:
        lines = [f"{words.printable(flaw.what)}: {flaw.mended or 'not mended'}" for flaw in flaws]
        told = {flaw.what for flaw in flaws}
        left = [flaw for flaw in found.flaws if flaw.what not in told]
        lines += [f"{click.style('flaw', fg='red', bold=True)}: {words.printable(flaw.what)}" for flaw in left]
        for problems in found.damaged.values():
            lines += [f"{click.style('damaged', fg='red', bold=True)}: {words.printable(one)}" for one in problems]
        if found.damaged:
            first = exits.line("repair", "--accept-loss", next(iter(found.damaged)))
            lines.append(f"{words.count(found.runs.invalid, 'run')} cannot be mended without loss: see {first}")
        elif found.sound:
            lines.append(click.style(f"{url} is sound", fg="green"))
        if not any(flaw.mended for flaw in flaws) and not found.sound:
            lines.append(f"{click.style('nothing was mended', bold=True)}{'' if found.damaged else f': {_CURE}'}")
        return "\n".join(lines)

    settings.answer({"mended": [_flaw_as_json(flaw) for flaw in flaws], **verification_as_json(found)}, text)
    return exits.OK if found.sound else exits.FAILED


def _accept_loss(settings: Settings, run_id: str, aside: str | None, reason: str, *, yes: bool) -> int:
    import time

    from ..engine.handle import this_process
    from ..engine.repair import accept_loss, assess
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
    return exits.OK


def _loss_told(loss: Loss, *, done: bool) -> str:
    from . import words

    lines = [words.printable(problem) for problem in loss.problems]
    lines.append(f"{words.count(loss.kept, 'record')} {'stay' if loss.kept != 1 else 'stays'}")
    if loss.repeats:
        steps = ", ".join(words.one_line(words.step_name(step)) for step in loss.repeats)
        lines.append(f"done again when it is retried: {steps}")
    else:
        lines.append("no step that is known to be done is done again")
    if loss.unreadable:
        lines.append(f"{words.count(loss.unreadable, 'record')} cannot be read: there may be more such steps")
    if loss.signals:
        lines.append(f"signals that are lost: {', '.join(map(str, loss.signals[:20]))}")
    if done:
        lines.append(f"the whole run is kept in {words.one_line(loss.aside)}")
        lines.append(f"{words.one_line(loss.run)} is set aside: {exits.line('retry', loss.run)} lets it go on")
    else:
        lines.append(f"nothing was changed: {exits.line('repair', '--accept-loss', loss.run, '--yes')} does it")
    return "\n".join(lines)


# -- purge and retain --------------------------------------------------------------------------------------------------


@command("purge")
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option("--status", type=click.Choice(FINISHED), multiple=True, help="Only runs that ended so.")
@click.option(
    "--before", type=instant_of, metavar="DATE|AGE", help="Only runs that ended before, as 30d or 2026-11-01."
)
@click.option("--all", "everything", is_flag=True, help="However young they are.")
@click.option("--limit", type=click.IntRange(0), help="At most so many.")
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
    """Remove finished runs. One that has not ended, or is set aside, is never removed so.

    From then on its id is free: `start` with it begins a new run.
    """
    from ..engine.upkeep import purge as remove
    from ..model import Status

    if (before is None) is not everything:
        raise click.UsageError("say how old they must be with --before 30d, or --all")
    wanted = frozenset(Status(one) for one in status or FINISHED)
    with settings.reading() as store:
        done = remove(store, workflow=workflow, statuses=wanted, before=before, limit=limit, dry_run=dry_run)
    _tell_purged(settings, done, dry_run=dry_run)


@command("retain")
@click.option("--days", type=click.FloatRange(0), default=30.0, show_default=True, help="Runs stay so long, ...")
@click.option("--count", type=click.IntRange(0), default=1000, show_default=True, help="... and so many of a workflow.")
@click.option("--failed-days", type=click.FloatRange(0), help="For runs that failed or were cancelled.")
@click.option("--no-preserve", is_flag=True, help="Completed runs need not stay at all.")
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
    """Remove finished runs that need not stay any longer, as a worker with a `retain=` rule does by itself.

    A run stays while it is young enough or among the newest of its workflow, whichever keeps it longer.
    """
    from ..engine.upkeep import sweep
    from ..policies import Retain

    rule = Retain(days, count, failed_days, preserve=not no_preserve)
    if workflow is not None:
        rule = Retain(days=1e6, workflows={workflow: rule})
    with settings.reading() as store:
        done = sweep(store, rule, dry_run=dry_run)
    _tell_purged(settings, done, dry_run=dry_run)


def _tell_purged(settings: Settings, done: Purged, *, dry_run: bool) -> None:
    from . import words

    def text() -> str:
        counts = ", ".join(f"{number} {status.value}" for status, number in sorted(done.statuses.items()))
        verb = "would be removed" if dry_run else "removed"
        lines = [f"{words.count(done.removed, 'run')} {verb}{f' ({counts})' if counts else ''}"]
        lines += [f"  {words.one_line(name)}: {number}" for name, number in sorted(done.workflows.items())]
        return "\n".join(lines)

    value = {
        "removed": done.removed,
        "dry_run": dry_run,
        "statuses": {status.value: number for status, number in done.statuses.items()},
        "workflows": dict(done.workflows),
    }
    settings.answer(value, text)


# -- erase -------------------------------------------------------------------------------------------------------------


@command("erase")
@RUN
@click.option("--force", is_flag=True, help="Also a run that has not ended: it is cancelled first, without clean-up.")
@REASON
def erase(settings: Settings, *, run_id: str, force: bool, reason: str) -> None:
    """Remove one run so that nothing of it is left in the store's files.

    The store's file is written anew for that, which takes time if it is large. What the run told others, such as its
    parent, is theirs and stays, and so do copies and archives. A run that is driven is refused: cancel it first.
    If it is broken off, do it again; --force writes the file anew even if nothing is known of the run.
    """
    from ..engine.upkeep import erase as remove

    async def act(engine: Engine) -> None:
        await remove(engine, run_id, force=force, reason=reason, actor=engine.actor)

    settings.talk(act)
    settings.answer({"run": run_id, "erased": True}, f"{run_id} is erased")
