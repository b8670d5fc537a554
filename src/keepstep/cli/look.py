"""The commands that look: `list`, `show` and `history`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from . import exits
from .frame import RUN, Settings, command, find, shown_url

if TYPE_CHECKING:
    from datetime import datetime

    from ..engine.audit import AuditEntry
    from ..engine.engine import Engine
    from ..engine.spending import Spending
    from ..model import Checkpoint, Run, Signal

STATUSES = ("queued", "running", "waiting", "paused", "recovering", "completed", "failed", "cancelled", "set aside")


#: What a run of more records has spent is not added up, so that `show` answers at once.
MANY_RECORDS = 10_000


# -- list --------------------------------------------------------------------------------------------------------------


def status_of(value: str) -> str:
    """A status as a person may write it: set-aside, set_aside or "set aside"."""
    said = value.replace("-", " ").replace("_", " ").strip().lower()
    known = [*STATUSES, "unfinished"]
    if said not in known:
        raise click.BadParameter(
            f"{value!r} is not a status{exits.nearest(said, known)} (there are {', '.join(known)})"
        )
    return said


def tag_of(value: str) -> tuple[str, str]:
    """A tag, written name=value."""
    name, equals, text = value.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{value!r} is not written name=value")
    return name, text


@command("list")
@click.option("--status", type=status_of, multiple=True, help="Only these; 'unfinished' is all that has not ended.")
@click.option("--workflow", metavar="NAME", help="Only runs of this workflow.")
@click.option("--parent", metavar="RUN", help="Only children of this run.")
@click.option("--prefix", metavar="TEXT", help="Only runs whose id begins so.")
@click.option("--tag", type=tag_of, multiple=True, metavar="NAME=VALUE", help="Only runs with this tag.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True)
@click.option("--after", metavar="CURSOR", help="Go on where the page before ended.")
def list_(
    settings: Settings,
    *,
    status: tuple[str, ...],
    workflow: str | None,
    parent: str | None,
    prefix: str | None,
    tag: tuple[tuple[str, str], ...],
    limit: int,
    after: str | None,
) -> int:
    """List runs, newest first. Exit code 6 if the rows of some are damaged; they are named."""
    from ..model import FINISHED, RunQuery, Status
    from . import words

    wanted = {Status(one) for one in status if one != "unfinished"}
    if "unfinished" in status:
        wanted |= set(Status) - FINISHED
    query = RunQuery(
        workflow=workflow,
        status=frozenset(wanted),
        parent=parent,
        id_prefix=prefix,
        tags=dict(tag),
        limit=limit,
        after=after,
    )

    with settings.reading() as store:
        page, url = store.list_runs(query), shown_url(store)
        driven = not settings.json and any(run.worker is not None for run in page.runs)
        dead = {worker.id for worker in store.list_workers() if not worker.alive} if driven else set()
    found = [words.run_as_json(run) for run in page.runs]
    value = {"runs": found, "next": page.next, "unreadable": list(page.unreadable)}

    def text() -> str:
        if not page.runs and not page.unreadable:
            chosen = any((wanted, workflow, parent, prefix, tag, after))
            return f"no runs {'like that ' if chosen else ''}in {url}"
        rows = [_row(run, dead=run.worker in dead) for run in page.runs]
        shown = words.table(("RUN", "WORKFLOW", "STATUS", "CREATED", "WAITS FOR"), rows)
        return shown + (f"\nmore: {exits.line('list', '--after', page.next)}" if page.next else "")

    settings.answer(value, text)
    if not page.unreadable:
        return exits.OK
    if not settings.json:
        named = ", ".join(map(words.one_line, page.unreadable))
        click.echo(f"cannot be read, for their rows are damaged: {named} ({exits.line('doctor')} tells more)", err=True)
    return exits.STORE


def _row(run: Run, *, dead: bool) -> tuple[str, ...]:
    from . import words

    return (
        words.one_line(run.id),
        words.one_line(run.workflow),
        words.coloured(run.status),
        words.ago(run.created_at),
        "a worker: its own is dead" if dead else words.one_line(words.waits_for(run)),
    )


# -- show --------------------------------------------------------------------------------------------------------------


@command("show")
@RUN
@click.option("--traceback", is_flag=True, help="With the whole traceback of its error.")
def show(settings: Settings, *, run_id: str, traceback: bool) -> None:
    """Show one run: where it stands, its input and its result."""
    from . import words

    async def look(
        engine: Engine,
    ) -> tuple[Run, dict[str, Any], Spending | None, str, AuditEntry | None, Signal | None]:
        handle = await find(engine, run_id)
        run = readable(engine, await handle.run())
        workers = {worker.id: worker for worker in await engine.call(engine.store.list_workers)}
        owner = workers.get(run.worker or "")
        name = run.worker or ""
        if owner is not None:
            name = words.worker_name(owner) + ("" if owner.alive else ", which is dead")
        published, spent = {}, None
        if not is_hidden(run):
            spent = await handle.spent() if run.seq <= MANY_RECORDS else None
            published = {key: words.plain(value) for key, value in (await handle.published_raw()).items()}
        return run, published, spent, name, await _cancel(engine, run), await _asked(engine, run)

    run, published, spent, worker, cancel, asked = settings.talk(look)
    value = words.run_as_json(run, whole=True) | {"published": published, "hidden": is_hidden(run)}
    if spent is not None:
        value["spent"] = {"steps": spent.steps, "cost": spent.cost, "tokens": spent.tokens}
    if cancel is not None:
        value["cancelled"] = {"by": cancel.actor, "reason": cancel.reason, "at": words.iso(cancel.at)}
    if asked is not None:
        value["asked"] = {"for": _WISHES[asked.name], "by": asked.sender, "at": words.iso(asked.sent_at)}
    settings.answer(value, lambda: _shown(run, published, worker, cancel, asked, spent=spent, traceback=traceback))


async def _asked(engine: Engine, run: Run) -> Signal | None:
    """What a person has asked of a run that has not come to it yet: to be cancelled, or to pause."""
    from ..model import Status
    from ..model.signal import CANCEL, PAUSE, RESUME

    if run.status.finished:
        return None
    last: Signal | None = None
    after = 0
    while page := await engine.call(engine.store.list_signals, run.id, after):
        after = page[-1].seq
        for signal in page:
            if signal.name == CANCEL:
                return signal
            if signal.name in (PAUSE, RESUME):
                last = signal
    return last if last is not None and last.name == PAUSE and run.status is not Status.PAUSED else None


#: Stands for the input of a run whose key is not here, and of one for which the key that is here is wrong.
NOTHING, WRONG = b"null", b" null"


def readable(engine: Engine, run: Run) -> Run:
    """The run with its input in plain text; without its key, with nothing where its values were."""
    from dataclasses import replace

    from ..errors import EncryptionError

    try:
        return replace(run, input=engine.encryption.input(run)) if run.data_key else run
    except EncryptionError as error:
        return replace(run, input=WRONG if error.wrong else NOTHING, progress=None)


def is_hidden(run: Run) -> bool:
    """Whether `readable` could not read it."""
    return bool(run.data_key) and run.input in (NOTHING, WRONG)


async def _cancel(engine: Engine, run: Run) -> AuditEntry | None:
    """Who cancelled a run, when and why: the entry that ended it."""
    from ..engine.audit import audit, transitions
    from ..model import Status

    if run.status is not Status.CANCELLED:
        return None
    ends = [entry for entry in transitions(await audit(engine, run.id)) if entry.after is Status.CANCELLED]
    return ends[-1] if ends else None


def _shown(
    run: Run,
    published: dict[str, Any],
    worker: str,
    cancel: AuditEntry | None,
    asked: Signal | None,
    *,
    spent: Spending | None,
    traceback: bool,
) -> str:
    from ..engine.copying import handed_over
    from ..model import FINISHED
    from . import words

    given = words.arguments(run)
    arguments = [words.brief(value) for value in given["args"]]
    arguments += [f"{name}={words.brief(value)}" for name, value in given["kwargs"].items()]
    ended = run.status in FINISHED
    took = words.duration(((run.updated_at or run.created_at) - run.created_at).total_seconds())
    error = words.error_line(run.error) if run.error is not None else ""
    result = words.brief(words.plain(run.output), 2000) if run.output is not None else ""
    pairs = [
        ("run", words.one_line(run.id)),
        ("workflow", f"{words.one_line(run.workflow)} (version {words.one_line(run.version)})"),
        ("status", words.coloured(run.status) + (f" after {took}" if ended else "")),
        ("cancelled", words.one_line(_who_cancelled(cancel)) if cancel is not None else ""),
        ("asked", words.one_line(_who_asked(asked)) if asked is not None else ""),
        ("waits for", "" if handed_over(run) else words.one_line(words.waits_for(run))),
        ("created", f"{words.local(run.created_at)} ({words.ago(run.created_at)})"),
        ("updated", f"{words.local(run.updated_at)} ({words.ago(run.updated_at)})"),
        ("deadline", f"{words.local(run.deadline_at)} ({words.ago(run.deadline_at)})" if run.deadline_at else ""),
        ("worker", words.one_line(worker)),
        ("records", f"{run.seq} ({exits.line('history', run.id)})"),
        ("spent", _what_was_spent(spent) if spent is not None else ""),
        ("recoveries", str(run.recoveries) if run.recoveries else ""),
        ("parent", words.one_line(run.parent or "")),
        ("fork of", words.one_line(run.origin or "")),
        ("continued as", words.one_line(run.continued_as or "")),
        ("tags", words.one_line(", ".join(f"{name}={value}" for name, value in run.tags.items()))),
        ("encrypted", _key_of(run)),
        ("input", ", ".join(arguments)),
        ("progress", words.brief(words.plain(run.progress)) if run.progress is not None else ""),
        *((f"shows {name}", words.brief(shown)) for name, shown in published.items()),
        ("result", result),
        ("error", words.printable(error)),
        ("", words.printable(run.error.traceback) if traceback and run.error is not None else ""),
    ]
    hints = _hints(run)
    return words.facts(pairs) + ("\n\n" + "\n".join(hints) if hints else "")


#: What may have been asked of a run that goes on, in words.
_WISHES = {"ks:cancel": "cancel", "ks:pause": "pause"}


def _what_was_spent(spent: Spending) -> str:
    """What its steps told with `ks.spend`; nothing if they told nothing."""
    from . import words

    parts = [f"cost {spent.cost:,.6g}" if spent.cost else "", f"{spent.tokens:,} tokens" if spent.tokens else ""]
    told = ", ".join(filter(None, parts))
    return told and f"{told}, in {words.count(spent.steps, 'step')}"


def _who_asked(signal: Signal) -> str:
    from . import words

    return f"to {_WISHES[signal.name]}, by {signal.sender or 'someone'} ({words.ago(signal.sent_at)}); not done yet"


def _key_of(run: Run) -> str:
    from . import words

    if not run.data_key:
        return ""
    hidden = ""
    if is_hidden(run):
        why = "but the key of that name here is another" if run.input == WRONG else "which is not here"
        hidden = f", {why}: its values are not shown"
    return f"with the key {words.encrypted_with(run)!r}{hidden}"


def _who_cancelled(cancel: AuditEntry) -> str:
    from . import words

    why = f": {cancel.reason}" if cancel.reason else ", without a reason"
    return f"by {cancel.actor} at {words.local(cancel.at)}{why}"


def _hints(run: Run) -> list[str]:
    """What can be done now."""
    from ..engine.copying import handed_over
    from ..model import Status
    from . import words

    line = exits.line
    hints = [line("approve", run.id, name) for name in words.awaited(run) if words.waits_for(run) != "a worker"]
    doubted = [line("resolve", run.id, words.step_name(step)) for step in words.in_doubt(run)]
    hints += [f"{settle} --result JSON | --failed | --again" for settle in doubted]
    if run.status is Status.PAUSED or words.stops(run):
        hints.append(line("resume", run.id))
    if run.status in (Status.FAILED, Status.SET_ASIDE) and not handed_over(run):
        hints.append(line("retry", run.id))
        if run.status is Status.FAILED and run.fingerprint.startswith("graph:"):
            hints.append(line("edit", run.id, "--set", "KEY=JSON"))
    if words.waits_for(run) == "a worker":
        hints.append(f"{line('worker', 'FILE.py')}    (a process that drives it, if none is there)")
    return hints


# -- history -----------------------------------------------------------------------------------------------------------


@command("history")
@RUN
@click.option("--failed", is_flag=True, help="Only attempts that failed, and errors that ended the run.")
@click.option("--full", "--values", "full", is_flag=True, help="With the whole of each result, and tracebacks.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the last N records.")
def history(settings: Settings, *, run_id: str, failed: bool, full: bool, limit: int | None) -> None:
    """Show the timeline of a run: steps, attempts, durations and failures."""
    from . import words

    async def look(engine: Engine) -> tuple[Run, list[Checkpoint], set[int]]:
        handle = await find(engine, run_id)
        run, told = readable(engine, await handle.run()), await handle.checkpoints()
        changed = any(one.kind == "superseded" for one in told)
        counted = {one.seq for one in (await handle.checkpoints(counted=True) if changed else told)}
        return run, [one for one in told if one.outcome == "failure"] if failed else told, counted

    run, found, counted = settings.talk(look)
    shown = found[-limit:] if limit else found
    summary = _summary(run, found, failed=failed)
    settings.answer(
        {
            "run": run.id,
            "status": run.status.value,
            "checkpoints": [{**words.checkpoint_as_json(one), "counts": one.seq in counted} for one in shown],
        },
        lambda: _timeline(run, shown, counted, full=full) + summary,
    )


def _timeline(run: Run, shown: list[Checkpoint], counted: set[int], *, full: bool) -> str:
    from . import words

    rows = [
        (
            str(one.seq) if one.seq in counted else click.style(f"({one.seq})", dim=True),  # it no longer counts
            _offset(run.created_at, one.finished_at),
            _kind(one),
            words.one_line(words.step_name(one.step)),
            _took(one),
            _detail(one, full=full),
        )
        for one in shown
    ]
    return words.table(("SEQ", "AFTER", "WHAT", "STEP", "TOOK", ""), rows, cut=not full) + "\n\n" if rows else ""


def _summary(run: Run, found: list[Checkpoint], *, failed: bool) -> str:
    """The run in a sentence: how it stands, and how much of it there is."""
    from ..engine.copying import handed_over
    from . import words

    steps = sum(1 for one in found if one.kind == "step completed")
    failures = sum(1 for one in found if one.kind == "step failed")
    parts = [words.coloured(run.status)]
    if not found:
        parts.append("nothing has failed" if failed else "nothing is recorded yet")
    elif not failed:
        parts.append(f"{words.count(steps, 'step')} completed")
    if failures:
        parts.append(f"{words.count(failures, 'attempt')} failed")
    waits = "" if handed_over(run) else words.waits_for(run)
    hidden = f"; encrypted {_key_of(run)}" if is_hidden(run) else ""
    return f"{words.one_line(run.id)}: {', '.join(parts)}" + (f"; waits for {waits}" if waits else "") + hidden


def _offset(start: datetime, at: datetime) -> str:
    from . import words

    return f"+{words.duration((at - start).total_seconds())}"


def _kind(one: Checkpoint) -> str:
    colours = {"failure": "red", "cancelled": "yellow"}
    return click.style(one.kind.value, fg=colours.get(one.outcome.value))


def _took(one: Checkpoint) -> str:
    from . import words

    if one.started_at is None or not one.kind.value.startswith("step"):
        return ""
    return words.duration((one.finished_at - one.started_at).total_seconds())


def _said(one: Checkpoint) -> list[str]:
    """What a record says beside its value: what a person did and why, and which way was taken."""
    from . import words

    data = one.data
    told = []
    if one.kind in ("superseded", "consolidated state") and data.get("act"):
        reason = f": {words.one_line(str(data['reason']))}" if data.get("reason") else ""
        told.append(f"{data['act']}{reason}")
    if "next" in data:
        told.append(f"→ {words.one_line(str(data['next']))}" if data["next"] else "→ the end")
    if one.kind == "decision" and "choice" in data:
        told.append(f"chose {data['choice']}")
    return told


def _detail(one: Checkpoint, *, full: bool) -> str:
    """What there is to say about a record beyond its step: its attempt, its error, its value."""
    from . import words

    parts = []
    if one.attempt > 1 or one.kind == "step failed":
        parts.append(f"attempt {one.attempt}")
    if one.error is not None:
        parts.append(words.one_line(words.error_line(one.error), 0 if full else words.BRIEF))
    if one.retry_at is not None:
        parts.append(f"again after {words.duration((one.retry_at - one.finished_at).total_seconds())}")
    if one.trigger.value != "automatic":
        parts.append("by a person" if one.trigger.value == "manual" else "by recovery")
    parts += _said(one)
    text = "; ".join(parts)
    if full and one.error is not None and one.error.traceback:
        text += "\n" + words.printable(one.error.traceback)
    if one.value is not None and one.kind != "run finished":
        shown = words.brief(words.plain(one.value), 0 if full else words.BRIEF)
        text = f"{text}  {shown}" if text else shown
    return text
