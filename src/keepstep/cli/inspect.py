"""The commands that inspect runs: `list`, `show` and `history`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .filters import filters, is_filtered, query_of
from .settings import RUN, Settings, command, find_run, handle_on, shown_url

if TYPE_CHECKING:
    from datetime import datetime

    from ..engine.engine import Engine
    from ..kernel.ledger import Spending
    from ..model import Checkpoint, Run, Signal
    from ..policies.budget import Amount
    from ..views.facts import Facts
    from ..views.overview import Locked, Overview
    from ..views.requests import Cancellation, Request
    from ..views.undo import UndoView
    from ..views.waits import Action

#: Steps, agents and models whose spending `show` names, so that a line stays readable; JSON has them all.
MOST_PARTS = 5


# -- list --------------------------------------------------------------------------------------------------------------


@command("list")
@filters
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True)
@click.option("--after", metavar="CURSOR", help="Continue after the previous page.")
def list_(settings: Settings, *, limit: int, after: str | None, **given: Any) -> int:
    """List runs, newest first. Exit code 6 if some rows are damaged; they are named."""
    from dataclasses import replace

    from ..views import plain
    from . import formatting

    query = replace(query_of(**given), limit=limit, after=after)

    with settings.reading(looking=True) as store:
        page, url = store.list_runs(query), shown_url(store)
        driven = not settings.json and any(run.worker is not None for run in page.runs)
        dead = {worker.id for worker in store.list_workers() if not worker.alive} if driven else set()
    found = [plain.run_data(run) for run in page.runs]
    value = {"runs": found, "next": page.next, "unreadable": list(page.unreadable)}

    def text() -> str:
        if not page.runs and not page.unreadable:
            chosen = is_filtered(given) or after
            return f"no runs {'that match ' if chosen else ''}in {url}"
        rows = [_row(run, dead=run.worker in dead) for run in page.runs]
        shown = formatting.table(("RUN", "WORKFLOW", "STATUS", "CREATED", "WAITS FOR"), rows)
        return shown + (f"\nmore: {errors.line('list', '--after', page.next)}" if page.next else "")

    settings.answer(value, text)
    if not page.unreadable:
        return errors.OK
    if not settings.json:
        click.echo(errors.unreadable(map(formatting.one_line, page.unreadable)), err=True)
    return errors.STORE


def _row(run: Run, *, dead: bool) -> tuple[str, ...]:
    from . import formatting

    return (
        formatting.one_line(run.id),
        formatting.one_line(run.workflow),
        formatting.coloured(run.status),
        formatting.ago(run.created_at),
        "a worker: its own is dead" if dead else formatting.one_line(formatting.waits_for(run)),
    )


# -- show --------------------------------------------------------------------------------------------------------------


@command("show")
@RUN
@click.option("--traceback", is_flag=True, help="Include the whole traceback of its error.")
def show(settings: Settings, *, run_id: str, traceback: bool) -> None:
    """Show one run: its status, its input and its result."""
    from ..views.facts import facts_data, facts_of

    async def look(engine: Engine) -> Facts:
        return await facts_of(engine, await find_run(engine, run_id))

    facts = settings.look(look)
    settings.answer(facts_data(facts), lambda: _shown(facts, traceback=traceback))


def _shown(facts: Facts, *, traceback: bool) -> str:
    from ..model import FINISHED
    from ..records.progress import maps_in, report_in
    from ..views import plain
    from ..views.commands import commands_about
    from . import formatting
    from .hints import hint, hint_of

    view, run, newest = facts.view, facts.view.run, facts.view.newest
    given = plain.arguments(run)
    width = formatting.SHORT if sys.stdout.isatty() else 0  # in a pipe nothing is cut
    arguments = [formatting.brief(value, width) for value in given["args"]]
    arguments += [f"{name}={formatting.brief(value, width)}" for name, value in given["kwargs"].items()]
    report = report_in(run.progress)
    ended = run.status in FINISHED
    took = formatting.duration(((run.updated_at or run.created_at) - run.created_at).total_seconds())
    error = formatting.error_line(run.error) if run.error is not None else ""
    frames = formatting.frame_lines(run.error)
    has_result = run.output is not None and run.continued_as is None  # a series has the result of its newest run
    result = formatting.brief(plain.value_of(run.output), width and 2000) if has_result else ""
    pairs = [
        ("run", formatting.one_line(run.id)),
        ("workflow", f"{formatting.one_line(run.workflow)} (version {formatting.one_line(run.version)})"),
        ("status", formatting.coloured(run.status) + (f" after {took}" if ended else "")),
        ("cancelled", formatting.one_line(_who_cancelled(view.cancellation)) if view.cancellation is not None else ""),
        ("asked", formatting.one_line(_who_asked(view.request)) if view.request is not None else ""),
        ("waits for", formatting.one_line(formatting.waits_in_words(view.waits))),
        ("queue", formatting.one_line(_which_queue(run))),
        *(("unread", _what_is_unread(signal)) for signal in view.refused),
        *(("child", _how_it_stands(child)) for _, child in view.children),
        ("created", f"{formatting.local(run.created_at)} ({formatting.ago(run.created_at)})"),
        ("updated", f"{formatting.local(run.updated_at)} ({formatting.ago(run.updated_at)})"),
        (
            "deadline",
            f"{formatting.local(run.deadline_at)} ({formatting.ago(run.deadline_at)})" if run.deadline_at else "",
        ),
        ("worker", formatting.one_line(_who_drives(view))),
        ("records", f"{run.seq} ({errors.line('history', run.id)})"),
        ("stages", _counted(facts.stages)),
        ("agents", _counted(facts.agents)),
        ("spent", _what_was_spent(facts.spent) if facts.spent is not None else ""),
        *(
            (f"by {part}", _by_name(getattr(facts.spent, f"by_{part}")))
            for part in ("model", "agent", "step")
            if facts.spent is not None
        ),
        ("recoveries", str(run.recoveries) if run.recoveries else ""),
        ("parent", formatting.one_line(run.parent or "")),
        ("fork of", formatting.one_line(run.origin or "")),
        ("continued as", formatting.one_line(run.continued_as or "")),
        (
            "newest",
            f"{formatting.one_line(newest.id)}, {formatting.coloured(newest.status)}" if newest is not None else "",
        ),
        ("tags", formatting.one_line(", ".join(f"{name}={value}" for name, value in run.tags.items()))),
        ("encrypted", _key_of(run, view.locked)),
        ("input", ", ".join(arguments)),
        ("step inputs", _where_inputs_are(run, facts.inputs)),
        ("undo", formatting.one_line(_what_is_undone(facts.undo)) if facts.undo is not None else ""),
        ("progress", formatting.brief(plain.value_of(report), width) if report is not None else ""),
        *(("under way", formatting.one_line(one.text)) for one in maps_in(run.progress) if run.status.active),
        *((f"shows {name}", formatting.brief(shown, width)) for name, shown in facts.published.items()),
        ("result", result),
        ("error", formatting.printable(error)),
        ("", formatting.printable(run.error.traceback if traceback and run.error is not None else frames)),
    ]
    queued = [wait for wait in view.waits if wait.queue and wait.why]
    hints = [hint_of(command) for wait in queued for command in commands_about(wait)]
    hints += [
        hint(action)
        for action in view.actions
        if not _is_refused(run, facts.undo, action) and not (queued and action.act == "worker")
    ]
    hints += [errors.line("show", child.id) for _, child in view.children]
    hints += [errors.line("explain", run.id)] if run.error is not None else []
    hints += [hint_of(one) for wait in view.waits if wait.kind == "service" for one in commands_about(wait)]
    return formatting.facts(pairs) + ("\n\n" + "\n".join(hints) if hints else "")


def _which_queue(run: Run) -> str:
    """Return the queue of a run and its key, unless it is the one of runs that name none."""
    name = "" if run.queue == "default" and run.key is None else run.queue
    return f"{name} (key {run.key})" if run.key is not None else name


def _what_is_unread(signal: Signal) -> str:
    from . import formatting

    name, sender = formatting.one_line(signal.name), formatting.one_line(signal.sender or "someone")
    return f"signal {name} {signal.seq} from {sender} does not fit the type of the wait; send one that fits"


def _how_it_stands(child: Run) -> str:
    """Return a child that its parent waits for: its id, its status, and what it waits for or failed with."""
    from . import formatting

    waits = formatting.one_line(formatting.waits_for(child))
    error = formatting.one_line(formatting.error_line(child.error), formatting.BRIEF) if child.error is not None else ""
    more = f": {error}" if error else f"; it waits for {waits}" if waits else ""
    name = f"{formatting.one_line(child.id)} ({formatting.one_line(child.workflow)})"
    return f"{name}, {formatting.coloured(child.status)}{more}"


def _counted(counts: dict[str, int]) -> str:
    from . import formatting

    return ", ".join(f"{formatting.one_line(name)} ({formatting.count(n, 'record')})" for name, n in counts.items())


def _where_inputs_are(run: Run, inputs: tuple[int, int] | None) -> str:
    from . import formatting

    steps, recorded = inputs or (0, 0)
    if recorded:
        return f"stored of {formatting.count(recorded, 'step')} ({errors.line('history', run.id, '--full')})"
    return "not stored; record_input=True of a step or workflow stores them" if steps else ""


def _what_is_undone(undo: UndoView) -> str:
    """Return the state of a run's undo in words."""
    from . import formatting

    parts = [
        f"{text} {', '.join(map(formatting.step_name, keys))}"
        for text, keys in (
            ("undone:", undo.undone),
            ("failed:", undo.failed),
            ("accepted as it is:", undo.skipped),
            ("not undone:", undo.left),
        )
        if keys
    ]
    return "; ".join(parts)


def _is_refused(run: Run, undo: UndoView | None, action: Action) -> bool:
    """Whether an action cannot be taken, because the run has undone its steps."""
    from ..views.waits import Act

    return run.status.finished and undo is not None and undo.at_end and action.act in (Act.RETRY, Act.EDIT)


def _what_was_spent(spent: Spending) -> str:
    """Return what its steps reported with `ks.spend`, or ""."""
    from . import formatting

    text = _amount(spent)
    return text and f"{text}, in {formatting.count(spent.steps, 'step')}"


def _amount(spent: Spending | Amount) -> str:
    parts = [f"cost {spent.cost:,.6g}" if spent.cost else "", f"{spent.tokens:,} tokens" if spent.tokens else ""]
    return ", ".join(filter(None, parts))


def _by_name(parts: dict[str, Amount]) -> str:
    """Return the amounts of the most expensive parts by name; nothing more to tell of a single step."""
    from . import formatting

    shown = [f"{formatting.one_line(name)} {_amount(one)}" for name, one in list(parts.items())[:MOST_PARTS]]
    left = len(parts) - len(shown)
    return "; ".join(shown) + (f"; and {left} more" if left else "")


def _who_drives(view: Overview) -> str:
    from . import formatting

    if view.worker is None:
        return view.run.worker or ""
    return formatting.worker_name(view.worker) + ("" if view.worker.alive else ", which is dead")


def _who_asked(request: Request) -> str:
    from . import formatting

    return f"to {request.act}, by {request.by or 'someone'} ({formatting.ago(request.at)}); not done yet"


def _key_of(run: Run, locked: Locked | None) -> str:
    from ..views import plain
    from ..views.overview import Locked

    if not run.data_key:
        return ""
    hidden = ""
    if locked is not None:
        why = "but the local key of that name is different" if locked is Locked.OTHER_KEY else "which is missing here"
        hidden = f", {why}: its values are not shown"
    return f"with the key {plain.encrypted_with(run)!r}{hidden}"


def _who_cancelled(cancelled: Cancellation) -> str:
    from . import formatting

    why = f": {cancelled.reason}" if cancelled.reason else ", without a reason"
    return f"by {cancelled.by} at {formatting.local(cancelled.at)}{why}"


# -- history -----------------------------------------------------------------------------------------------------------


@command("history")
@RUN
@click.option("--failed", is_flag=True, help="Only failed attempts and errors that ended the run.")
@click.option("--full", "--values", "full", is_flag=True, help="Include whole results and tracebacks.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the last N records.")
def history(settings: Settings, *, run_id: str, failed: bool, full: bool, limit: int | None) -> None:
    """Show the timeline of a run: steps, attempts, durations and failures."""
    from ..views import plain
    from ..views.overview import readable

    async def look(engine: Engine) -> tuple[Run, Locked | None, list[Checkpoint], set[int]]:
        stored = await find_run(engine, run_id)
        handle = handle_on(engine, stored)
        checkpoints = await handle.checkpoints()
        run, locked = readable(engine.encryption, stored)
        changed = any(one.kind == "superseded" for one in checkpoints)
        counted = {one.seq for one in (await handle.checkpoints(counted=True) if changed else checkpoints)}
        return run, locked, [one for one in checkpoints if one.outcome == "failure"] if failed else checkpoints, counted

    run, locked, found, counted = settings.look(look)
    shown = found[-limit:] if limit else found
    summary = _summary(run, locked, found, failed=failed)
    settings.answer(
        {
            "run": run.id,
            "status": run.status.value,
            "checkpoints": [{**plain.record_data(one), "counts": one.seq in counted} for one in shown],
        },
        lambda: _timeline(run, shown, counted, full=full) + summary,
    )


def _timeline(run: Run, shown: list[Checkpoint], counted: set[int], *, full: bool) -> str:
    from . import formatting

    rows = [
        (
            # the record no longer counts
            str(one.seq) if one.seq in counted else click.style(f"({one.seq})", dim=True),
            _offset(run.created_at, one.finished_at),
            _kind(one),
            formatting.one_line(formatting.step_name(one.step)),
            _took(one),
            _detail(one, full=full),
        )
        for one in shown
    ]
    return formatting.table(("SEQ", "AFTER", "WHAT", "STEP", "TOOK", ""), rows, cut=not full) + "\n\n" if rows else ""


def _summary(run: Run, locked: Locked | None, found: list[Checkpoint], *, failed: bool) -> str:
    """Return the run in a sentence: its status and the number of its steps."""
    from ..model.run import handed_over
    from . import formatting

    steps = sum(1 for one in found if one.kind == "step completed")
    failures = sum(1 for one in found if one.kind == "step failed")
    parts = [formatting.coloured(run.status)]
    if not found:
        parts.append("nothing has failed" if failed else "nothing is recorded yet")
    elif not failed:
        parts.append(f"{formatting.count(steps, 'step')} completed")
    if failures:
        parts.append(f"{formatting.count(failures, 'attempt')} failed")
    waits = "" if handed_over(run) else formatting.waits_for(run)
    hidden = f"; encrypted {_key_of(run, locked)}" if locked is not None else ""
    return f"{formatting.one_line(run.id)}: {', '.join(parts)}" + (f"; waits for {waits}" if waits else "") + hidden


def _offset(start: datetime, at: datetime) -> str:
    from . import formatting

    return f"+{formatting.duration((at - start).total_seconds())}"


def _kind(one: Checkpoint) -> str:
    colours = {"failure": "red", "cancelled": "yellow"}
    return click.style(one.kind.value, fg=colours.get(one.outcome.value))


def _took(one: Checkpoint) -> str:
    from . import formatting

    if one.started_at is None or not one.kind.value.startswith("step"):
        return ""
    return formatting.duration((one.finished_at - one.started_at).total_seconds())


def _details_of(one: Checkpoint) -> list[str]:
    """Return the details of a record beside its value: a person's command with its reason, and the path taken."""
    from . import formatting

    data = one.data
    details = []
    if one.kind in ("superseded", "consolidated state", "undo") and data.get("act"):
        reason = f": {formatting.one_line(str(data['reason']))}" if data.get("reason") else ""
        details.append(f"{data['act']}{reason}")
    if one.kind == "child" and data.get("child"):
        details.append(formatting.one_line(str(data["child"])))
    if data.get("cached"):
        details.append(f"cached, from run {formatting.one_line(str(data['cached']))}")
    if "next" in data:
        details.append(f"→ {formatting.one_line(str(data['next']))}" if data["next"] else "→ the end")
    if one.kind == "decision" and "choice" in data:
        details.append(f"chose {data['choice']}")
    if one.kind == "patch":
        details.append("the old path" if data.get("choice") == 0 else "the new path")
    return details


def _input_of(one: Checkpoint) -> list[str]:
    """Return the recorded arguments of a step, or their size."""
    from ..views import plain
    from . import formatting

    given = plain.step_input(one)
    if isinstance(given, dict):
        return [f"input {', '.join(f'{name}={formatting.brief(value, 0)}' for name, value in given.items()) or 'none'}"]
    size = one.data.get("input_bytes")
    return [f"input of {size:,} bytes, too large to be stored"] if isinstance(size, int) else []


def _detail(one: Checkpoint, *, full: bool) -> str:
    """Return the details of a record beyond its step: its attempt, its error, its value."""
    from ..views import plain
    from . import formatting

    parts = []
    if named := formatting.names(one.agent, one.stage):
        parts.append(named)
    if one.attempt > 1 or one.kind == "step failed":
        parts.append(f"attempt {one.attempt}")
    if one.error is not None:
        parts.append(formatting.one_line(formatting.error_line(one.error), 0 if full else formatting.BRIEF))
        if one.kind == "step failed" and one.error.frames:
            parts.append(formatting.one_line(one.error.frames[-1].brief))
    if one.retry_at is not None:
        parts.append(f"again after {formatting.duration((one.retry_at - one.finished_at).total_seconds())}")
    if one.trigger.value != "automatic":
        parts.append("by a person" if one.trigger.value == "manual" else "by recovery")
    parts += _details_of(one)
    if full:
        parts += _input_of(one)
    text = "; ".join(parts)
    if full and one.error is not None and one.error.traceback:
        text += "\n" + formatting.printable(one.error.traceback)
    if one.value is not None and one.kind != "run finished" and one.outcome != "failure":
        shown = formatting.brief(plain.value_of(one.value), 0 if full else formatting.BRIEF)
        text = f"{text}  {shown}" if text else shown
    return text
