"""The commands that control a run: signal, complete, approve, ask, pause, resume, cancel, retry, skip, resolve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .bulk import Deed, bulk, change_all, is_bulk
from .settings import REASON, RUN, Settings, command, find, find_run, handle_on, newest

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model import Run
    from ..model.wakes import Wakes

#: Seconds to wait for a run to be parked, which happens about a second after it begins to wait.
LOOK_SECONDS = 2.0


_FAIL = click.option("--fail", "error", metavar="MESSAGE", help="Report an error, which the wait raises.")
_TYPE = click.option("--type", "kind", default="", metavar="CLASS", help="The class of the reported error.")
_BEAT = click.option("--beat", is_flag=True, help="Only send a heartbeat: the answer is still to come.")


# -- messages ----------------------------------------------------------------------------------------------------------


@command("signal")
@RUN
@click.argument("name")
@click.argument("payload", required=False, metavar="[JSON]")
@click.option("--id", "signal_id", default="", metavar="ID", help="A signal with the same id is stored only once.")
@_FAIL
@_TYPE
@_BEAT
def signal(
    settings: Settings,
    *,
    run_id: str,
    name: str,
    payload: str | None,
    signal_id: str,
    error: str | None,
    kind: str,
    beat: bool,
) -> None:
    """Send a run a durable message for its `wait_for`.

    The payload is true unless JSON is given. A signal may be sent before the run waits for it.
    """
    value = _answer(payload, error, kind, beat=beat)
    if beat and signal_id:
        raise click.UsageError("--beat takes no --id")

    async def send(engine: Engine) -> tuple[bool | None, str]:
        run = await find_run(engine, run_id)
        before, handle = await newest(engine, run), handle_on(engine, run)
        if beat:
            await handle.beat(name)
            return None, ""
        if error is not None:
            await handle.fail(name, error, type=kind, id=signal_id)
        else:
            await handle.signal(name, value, id=signal_id)
        return await _prospect(engine, before, name)

    awaited, prospect = settings.talk(send)
    text = f"sent {'a heartbeat for ' if beat else ''}{name} to {run_id}{prospect}"
    settings.answer({"run": run_id, "signal": name, "sent": True, "awaited": awaited}, text)


def _answer(payload: str | None, error: str | None, kind: str, *, beat: bool) -> Any:
    """Return the value to send; refuse options that contradict each other."""
    from .target import read_json

    if (payload is not None) + (error is not None) + beat > 1:
        raise click.UsageError("use only one of JSON, --fail and --beat")
    if kind and error is None:
        raise click.UsageError("--type names the class of the error of --fail")
    return True if payload is None else read_json(payload, "the payload")


@command("complete")
@click.argument("token")
@click.argument("payload", required=False, metavar="[JSON]")
@_FAIL
@_TYPE
@_BEAT
def complete(settings: Settings, *, token: str, payload: str | None, error: str | None, kind: str, beat: bool) -> None:
    """End the wait of a callback with its TOKEN.

    The value is true unless JSON is given. The same answer again changes nothing; another one is refused.
    """
    value = _answer(payload, error, kind, beat=beat)

    async def send(engine: Engine) -> None:
        if beat:
            await engine.beat(token)
        elif error is not None:
            await engine.fail(token, error, type=kind)
        else:
            await engine.complete(token, value)

    settings.talk(send)
    run_id = token.split(".", 2)[2]
    done = "sent a heartbeat to" if beat else "completed" if error is None else "failed"
    settings.answer({"run": run_id, "done": done}, f"{done} the callback of {run_id}")


@command("approve")
@RUN
@click.argument("name", required=False)
@click.option("--deny", is_flag=True, help="Send false instead of true.")
def approve(settings: Settings, *, run_id: str, name: str | None, deny: bool) -> None:
    """Answer a run that waits for a yes or a no.

    NAME is the signal that it waits for; it may be omitted if there is only one.
    """

    async def send(engine: Engine) -> tuple[str, bool | None, str]:
        handle = await find(engine, run_id)

        async def look() -> Run:
            return await newest(engine, await find_run(engine, run_id))

        before = await _settled(engine, look, lambda wakes: wakes.signals)
        chosen = name or _the_one(before)
        await handle.signal(chosen, not deny)
        return chosen, *await _prospect(engine, before, chosen)

    sent, awaited, prospect = settings.talk(send)
    text = f"sent {sent}={'false' if deny else 'true'} to {run_id}{prospect}"
    settings.answer({"run": run_id, "signal": sent, "approved": not deny, "awaited": awaited}, text)


async def _prospect(engine: Engine, before: Run, name: str) -> tuple[bool | None, str]:
    """Return whether the run awaited the signal (None: it was being driven), and the rest of the sentence about it."""
    from datetime import UTC, datetime

    from ..views.requests import Obstacle, prospect_of
    from . import formatting

    prospect = await prospect_of(engine, before, name, datetime.now(UTC))
    kept = "; it is kept until the run waits for it"
    match prospect.obstacle:
        case None:
            text = ""
        case Obstacle.NO_WORKER:
            text = NO_WORKER.format(errors.line("worker", "FILE.py"))
        case Obstacle.PAUSED:
            text = f"{kept}. The run is paused: {errors.line('resume', before.id)} lets it go on"
        case Obstacle.HANDED_OVER:
            text = f", but the run was handed over: {formatting.one_line(prospect.elsewhere)}. Send it there"
        case Obstacle.SET_ASIDE:
            text = f"{kept}. The run is set aside: {errors.line('retry', before.id)} lets it go on"
        case Obstacle.NOT_AWAITED:
            text = f"{kept}. Now it waits for {formatting.one_line(formatting.waits_in_words(prospect.waits))}"
    return prospect.awaited, text


#: The rest of a sentence about a run without a worker.
NO_WORKER = "; it goes on when a worker claims it (there is none: {})"


async def alone(engine: Engine, run_id: str) -> str:
    """Return the rest of a sentence if no worker can act on the run at the moment."""
    from ..views.finding import lacks_worker

    return NO_WORKER.format(errors.line("worker", "FILE.py")) if await lacks_worker(engine, run_id) else ""


async def _settled(engine: Engine, look: Callable[[], Awaitable[Run]], wanted: Callable[[Wakes], Any]) -> Run:
    """Return the run when it is parked with wake-ups of the wanted kind, or after a moment."""
    import time

    from ..model.wakes import sorted_wakes

    until = time.monotonic() + LOOK_SECONDS
    while True:
        run = await look()
        if not run.status.active or wanted(sorted_wakes(run.wakes)) or time.monotonic() > until:
            return run
        await engine.changed(0.1)


def _the_one(run: Run) -> str:
    from ..model.wakes import sorted_wakes
    from . import formatting

    names = sorted_wakes(run.wakes).signals
    if len(names) == 1:
        return names[0]
    if names:
        raise errors.Refused(
            f"run {run.id!r} waits for several signals", f"name one: {', '.join(map(formatting.one_line, names))}"
        )
    if run.status.finished:
        raise errors.Refused(f"run {run.id!r} is already {run.status.value}", code=errors.CONFLICT)
    raise errors.Refused(
        f"run {run.id!r} is {run.status.value} and does not wait for a signal now",
        f"a signal may be sent early, by its name: {errors.line('approve', run.id, 'NAME')}",
        errors.CONFLICT,
    )


@command("ask")
@RUN
@click.argument("name")
@click.argument("payload", required=False, metavar="[JSON]")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, metavar="SECONDS")
def ask(settings: Settings, *, run_id: str, name: str, payload: str | None, timeout: float) -> None:
    """Send a run a question and print the reply of its workflow."""
    import json

    from ..views import plain
    from .target import read_json

    value = None if payload is None else read_json(payload, "the question")

    async def converse(engine: Engine) -> bytes:
        return await (await find(engine, run_id)).ask_raw(name, value, timeout=timeout)

    reply = plain.value_of(settings.talk(converse))
    settings.answer({"run": run_id, "reply": reply}, lambda: json.dumps(reply, ensure_ascii=False, indent=2))


# -- stopping and continuing -------------------------------------------------------------------------------------------


@command("pause")
@RUN
@REASON
def pause(settings: Settings, *, run_id: str, reason: str) -> None:
    """Stop a run at its next step boundary; finished steps are kept."""

    async def act(engine: Engine) -> None:
        run = await newest(engine, await find_run(engine, run_id))
        _must_be_driven(run, "paused")
        await handle_on(engine, run).pause(reason)

    settings.talk(act)
    text = f"{run_id} pauses at its next step boundary; {errors.line('resume', run_id)} lets it go on"
    settings.answer({"run": run_id, "asked": "pause"}, text)


@command("resume")
@RUN
@REASON
def resume(settings: Settings, *, run_id: str, reason: str) -> None:
    """Let a paused run, or one at a breakpoint, go on."""

    async def act(engine: Engine) -> str:
        run = await newest(engine, await find_run(engine, run_id))
        _must_be_driven(run, "resumed")
        await handle_on(engine, run).resume(reason)
        return await alone(engine, run_id)

    later = settings.talk(act)
    settings.answer({"run": run_id, "asked": "resume"}, f"{run_id} is resumed{later}")


def _must_be_driven(run: Run, participle: str) -> None:
    from ..model import Status
    from ..model.run import handed_over

    if run.status is Status.SET_ASIDE:
        raise errors.Refused(
            f"run {run.id!r} is set aside and cannot be {participle}",
            handed_over(run)
            or f"{errors.line('retry', run.id)} lets it go on, {errors.line('cancel', run.id)} ends it",
            errors.CONFLICT,
        )


@command("cancel")
@bulk
@REASON
@click.option("--force", is_flag=True, help="If there is no worker, end the run in the store, without its clean-up.")
def cancel(settings: Settings, *, run_id: str, reason: str, force: bool, **given: Any) -> int:
    """Cancel a run, or all that are selected: its steps, waits and children are stopped. This is final.

    The worker that drives the run carries this out, with the workflow's own clean-up. A run that is set aside, or has
    not begun, ends at once. Selected runs are counted first, and cancelled with --yes or after a question. Exit code 7
    if some could not be cancelled.
    """
    from ..model import FINISHED, Status
    from ..views.finding import is_attended

    async def act(engine: Engine, run: Run) -> bool:
        return (await _cancelled(engine, run, reason, force=force))[0]

    async def act_on_one(engine: Engine) -> tuple[bool, bool, list[str]]:
        run = await newest(engine, await find_run(engine, run_id))
        done, left = await _cancelled(engine, run, reason, force=force)
        return done, done or await is_attended(engine, run.workflow, run.version), left

    if is_bulk(run_id, given, "cancel"):
        deed = Deed("cancel", "cancelled", frozenset(Status) - FINISHED)
        return change_all(settings, deed, given, act, "asked to stop; a worker carries this out")
    done, driven, left = settings.talk(act_on_one)
    text = f"{run_id} is cancelled" if done else f"{run_id} is asked to stop"
    text += f"; not undone: {', '.join(left)}" if left else ""
    more = {"not_undone": left} if left else {}
    settings.answer({"run": run_id, "cancelled": done, "asked": "cancel", **more}, text)
    if not driven and not settings.json:
        forced = errors.line("cancel", run_id, "--force")
        click.echo(f"there is no worker to do it: start one, or end the run without its clean-up: {forced}", err=True)
    return errors.OK


async def _cancelled(engine: Engine, run: Run, reason: str, *, force: bool) -> tuple[bool, list[str]]:
    """Cancel a run; return whether it has ended, or a worker has yet to do it, and the steps that are not undone."""
    from ..history.commands import cancel_now
    from ..model import Status

    if force or run.status is Status.SET_ASIDE:
        return True, await cancel_now(engine, run.id, reason, engine.actor)
    handle = handle_on(engine, run)
    await handle.cancel(reason)
    return await handle.status() is Status.CANCELLED, []


@command("retry")
@bulk
@REASON
@click.option("--force", is_flag=True, help="Also a run that was handed over to another store and is lost there.")
def retry(settings: Settings, *, run_id: str, reason: str, force: bool, **given: Any) -> int:
    """Let a failed or set-aside run, or all that are selected, go on from where they failed; finished steps are kept.

    Selected runs are counted first, and retried with --yes or after a question. Exit code 7 if some could not be
    retried.
    """
    from ..model import Status

    async def act(engine: Engine, run: Run) -> bool:
        await handle_on(engine, run).retry(reason, force=force)
        return True

    async def act_on_one(engine: Engine) -> str:
        await act(engine, await find_run(engine, run_id))
        return await alone(engine, run_id)

    if is_bulk(run_id, given, "retry"):
        deed = Deed("retry", "retried", frozenset({Status.FAILED, Status.SET_ASIDE}))
        return change_all(settings, deed, given, act)
    later = settings.talk(act_on_one)
    settings.answer({"run": run_id, "status": "queued"}, f"{run_id} is retried{later}")
    return errors.OK


@command("skip")
@RUN
@click.argument("steps", nargs=-1, metavar="[STEP]...")
@REASON
def skip(settings: Settings, *, run_id: str, steps: tuple[str, ...], reason: str) -> None:
    """Accept failed undo steps of a set-aside run as they are: all, or the undo of the steps that are named.

    When none is left, the run ends as it would have ended. `keepstep retry` tries them again instead.
    """

    async def act(engine: Engine) -> tuple[list[str], str]:
        handle = await find(engine, run_id)
        return await handle.skip(*steps, reason=reason), await alone(engine, run_id)

    keys, later = settings.talk(act)
    settings.answer({"run": run_id, "skipped": keys}, f"{run_id}: {', '.join(keys)} is not undone{later}")


# -- at most once ------------------------------------------------------------------------------------------------------


@command("resolve")
@RUN
@click.argument("step")
@click.option("--result", metavar="JSON", help="The step happened, with this result.")
@click.option("--failed", is_flag=True, help="The step did not happen; record a failure.")
@click.option("--again", is_flag=True, help="The step did not happen; perform it.")
@REASON
def resolve(
    settings: Settings, *, run_id: str, step: str, result: str | None, failed: bool, again: bool, reason: str
) -> None:
    """Settle an at-most-once step that a crash left in doubt.

    STEP is its name, or its key as `keepstep show` prints it.
    """
    from .target import read_json

    if (result is not None) + failed + again != 1:
        raise click.UsageError("use exactly one of --result JSON, --failed and --again")
    verdict = "failed" if failed else "again" if again else "result"
    value = None if result is None else read_json(result, "--result")

    async def act(engine: Engine) -> str:
        handle = await find(engine, run_id)
        key = _doubted(await _settled(engine, handle.run, lambda wakes: wakes.in_doubt), step)
        await handle.resolve(key, verdict, value, reason)
        return key

    key = settings.talk(act)
    settings.answer({"run": run_id, "step": key, "verdict": verdict}, f"{key} of {run_id}: {verdict}")


def _doubted(run: Run, step: str) -> str:
    """Return the key of the step in doubt that was named."""
    from ..model.wakes import sorted_wakes
    from ..views.waits import doubts_called

    doubts, found = sorted_wakes(run.wakes).in_doubt, doubts_called(run, step)
    if len(found) == 1:
        return found[0]
    if run.status.finished:
        raise errors.Refused(f"run {run.id!r} is already {run.status.value}", code=errors.CONFLICT)
    if not doubts:
        raise errors.Refused(
            f"no step of run {run.id!r} is in doubt", f"the run is {run.status.value}", errors.CONFLICT
        )
    raise errors.Refused(f"{step!r} does not name one step in doubt", f"in doubt: {', '.join(doubts)}")
