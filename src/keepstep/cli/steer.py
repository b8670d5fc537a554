"""The commands that steer a run: signal, approve, ask, pause, resume, cancel, retry, resolve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from . import exits
from .frame import REASON, RUN, Settings, command, find, unattended

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..model import Run

#: A run that has just come to a wait is parked after a second; so long is looked for what it waits for.
LOOK_SECONDS = 2.0


# -- messages ----------------------------------------------------------------------------------------------------------


@command("signal")
@RUN
@click.argument("name")
@click.argument("payload", required=False, metavar="[JSON]")
@click.option(
    "--id", "signal_id", default="", metavar="ID", help="Sent again with the same id, it is not stored twice."
)
def signal(settings: Settings, *, run_id: str, name: str, payload: str | None, signal_id: str) -> None:
    """Send a run a durable message, which `wait_for` in it receives.

    Without JSON its payload is true. It may be sent before the run waits for it.
    """
    from .target import read_json

    value = True if payload is None else read_json(payload, "the payload")

    async def send(engine: Engine) -> tuple[bool | None, str]:
        handle = await find(engine, run_id)
        before = await handle.run()
        await handle.signal(name, value, id=signal_id)
        return await _prospect(engine, before, name)

    awaited, prospect = settings.talk(send)
    told = f"sent {name} to {run_id}{prospect}"
    settings.answer({"run": run_id, "signal": name, "sent": True, "awaited": awaited}, told)


@command("approve")
@RUN
@click.argument("name", required=False)
@click.option("--deny", is_flag=True, help="Send false instead of true.")
def approve(settings: Settings, *, run_id: str, name: str | None, deny: bool) -> None:
    """Answer a run that waits for a yes or a no.

    NAME is the signal that it waits for; it may be left out if there is only one.
    """

    async def send(engine: Engine) -> tuple[str, bool | None, str]:
        handle = await find(engine, run_id)
        before = await _settled(engine, run_id)
        chosen = name or _the_one(before)
        await handle.signal(chosen, not deny)
        return chosen, *await _prospect(engine, before, chosen)

    sent, awaited, prospect = settings.talk(send)
    told = f"sent {sent}={'false' if deny else 'true'} to {run_id}{prospect}"
    settings.answer({"run": run_id, "signal": sent, "approved": not deny, "awaited": awaited}, told)


async def _prospect(engine: Engine, before: Run, name: str) -> tuple[bool | None, str]:
    """Whether the run waited for a signal when it was sent (None: it was driven), and the end of the sentence on it."""
    from ..engine.copying import handed_over
    from ..model import Status
    from . import words

    if before.status.active:
        return None, ""
    if name in words.awaited(before):
        return True, await alone(engine, before.id)
    kept = "; it is kept until the run asks for it"
    if before.status is Status.PAUSED:
        return False, f"{kept}. The run is paused: {exits.line('resume', before.id)} lets it go on"
    elsewhere = handed_over(before)
    if elsewhere:
        return False, f"; but the run was handed over: {words.one_line(elsewhere)}. Send it there"
    if before.status is Status.SET_ASIDE:
        return False, f"{kept}. The run is set aside: {exits.line('retry', before.id)} lets it go on"
    return False, f"{kept}. Now it waits for {words.one_line(words.waits_for(before))}"


async def alone(engine: Engine, run_id: str) -> str:
    """The end of a sentence, when nobody is there to act on it just now."""
    run = await (await engine.get(run_id)).run()
    if run.worker is not None or run.status.finished or not await unattended(engine, run.workflow):
        return ""
    return f"; it goes on when a worker takes it (none is there: {exits.line('worker', 'FILE.py')})"


async def _settled(engine: Engine, run_id: str) -> Run:
    """The run, once it is put away with what it waits for, or after a moment."""
    import time

    from . import words

    until = time.monotonic() + LOOK_SECONDS
    while True:
        run = await (await engine.get(run_id)).run()
        if not run.status.active or words.awaited(run) or time.monotonic() > until:
            return run
        await engine.changed(0.1)


def _the_one(run: Run) -> str:
    from . import words

    names = words.awaited(run)
    if len(names) == 1:
        return names[0]
    if names:
        raise exits.Refused(
            f"run {run.id!r} waits for several signals", f"name one: {', '.join(map(words.one_line, names))}"
        )
    if run.status.finished:
        raise exits.Refused(f"run {run.id!r} is already {run.status.value}", code=exits.CONFLICT)
    raise exits.Refused(
        f"run {run.id!r} is {run.status.value} and waits for no signal just now",
        f"a signal may also be sent early, by its name: {exits.line('approve', run.id, 'NAME')}",
        exits.CONFLICT,
    )


@command("ask")
@RUN
@click.argument("name")
@click.argument("payload", required=False, metavar="[JSON]")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, metavar="SECONDS")
def ask(settings: Settings, *, run_id: str, name: str, payload: str | None, timeout: float) -> None:
    """Send a run a question and print the reply that its workflow gives."""
    import json

    from . import words
    from .target import read_json

    value = None if payload is None else read_json(payload, "the question")

    async def converse(engine: Engine) -> bytes:
        return await (await find(engine, run_id)).ask_raw(name, value, timeout=timeout)

    reply = words.plain(settings.talk(converse))
    settings.answer({"run": run_id, "reply": reply}, lambda: json.dumps(reply, ensure_ascii=False, indent=2))


# -- stopping and going on ---------------------------------------------------------------------------------------------


@command("pause")
@RUN
@REASON
def pause(settings: Settings, *, run_id: str, reason: str) -> None:
    """Stop a run at its next step boundary; it keeps what it has done."""

    async def act(engine: Engine) -> None:
        handle = await find(engine, run_id)
        _must_be_driven(await handle.run(), "paused")
        await handle.pause(reason)

    settings.talk(act)
    told = f"{run_id} pauses at its next step boundary; {exits.line('resume', run_id)} lets it go on"
    settings.answer({"run": run_id, "asked": "pause"}, told)


@command("resume")
@RUN
@REASON
def resume(settings: Settings, *, run_id: str, reason: str) -> None:
    """Let a run go on that is paused, or that waits at a breakpoint."""

    async def act(engine: Engine) -> str:
        handle = await find(engine, run_id)
        _must_be_driven(await handle.run(), "resumed")
        await handle.resume(reason)
        return await alone(engine, run_id)

    later = settings.talk(act)
    settings.answer({"run": run_id, "asked": "resume"}, f"{run_id} is resumed{later}")


def _must_be_driven(run: Run, participle: str) -> None:
    from ..engine.copying import handed_over
    from ..model import Status

    if run.status is Status.SET_ASIDE:
        raise exits.Refused(
            f"run {run.id!r} is set aside and cannot be {participle}",
            handed_over(run) or f"{exits.line('retry', run.id)} lets it go on, {exits.line('cancel', run.id)} ends it",
            exits.CONFLICT,
        )


@command("cancel")
@RUN
@REASON
@click.option(
    "--force", is_flag=True, help="End it in the store, without its clean-up, if no worker is there to do it."
)
def cancel(settings: Settings, *, run_id: str, reason: str, force: bool) -> None:
    """Cancel a run: its steps, waits and children are stopped. This is final.

    A worker that drives the run carries it out, with the workflow's own clean-up. A run that is set aside, or has not
    begun, ends at once.
    """
    from ..engine.control import cancel_now
    from ..model import Status

    async def act(engine: Engine) -> tuple[bool, bool]:
        handle = await find(engine, run_id)
        run = await handle.run()
        if force or run.status is Status.SET_ASIDE:
            await cancel_now(engine, run_id, reason, engine.actor)
            return True, True
        await handle.cancel(reason)
        if await handle.status() is Status.CANCELLED:
            return True, True
        return False, not await unattended(engine, run.workflow)

    done, driven = settings.talk(act)
    told = f"{run_id} is cancelled" if done else f"{run_id} is asked to stop"
    settings.answer({"run": run_id, "cancelled": done, "asked": "cancel"}, told)
    if not driven and not settings.json:
        forced = exits.line("cancel", run_id, "--force")
        click.echo(f"no worker is there to do it: start one, or end it without its clean-up: {forced}", err=True)


@command("retry")
@RUN
@REASON
@click.option("--force", is_flag=True, help="Also one that was handed over to another store, where it is lost.")
def retry(settings: Settings, *, run_id: str, reason: str, force: bool) -> None:
    """Let a failed or set-aside run go on from where it failed; what it finished is kept."""

    async def act(engine: Engine) -> str:
        await (await find(engine, run_id)).retry(reason, force=force)
        return await alone(engine, run_id)

    later = settings.talk(act)
    settings.answer({"run": run_id, "status": "queued"}, f"{run_id} is retried{later}")


# -- at most once ------------------------------------------------------------------------------------------------------


@command("resolve")
@RUN
@click.argument("step")
@click.option("--result", metavar="JSON", help="It happened, with this result.")
@click.option("--failed", is_flag=True, help="It did not happen and shall count as failed.")
@click.option("--again", is_flag=True, help="It did not happen and shall be performed.")
@REASON
def resolve(
    settings: Settings, *, run_id: str, step: str, result: str | None, failed: bool, again: bool, reason: str
) -> None:
    """Say what became of an at-most-once step that a crash left in doubt.

    STEP is its name, or its key as `keepstep show` prints it.
    """
    from .target import read_json

    if (result is not None) + failed + again != 1:
        raise click.UsageError("say one of --result JSON, --failed and --again")
    verdict = "failed" if failed else "again" if again else "result"
    value = None if result is None else read_json(result, "--result")

    async def act(engine: Engine) -> str:
        handle = await find(engine, run_id)
        key = _doubted(await _settled_doubt(engine, run_id), step)
        await handle.resolve(key, verdict, value, reason)
        return key

    key = settings.talk(act)
    settings.answer({"run": run_id, "step": key, "verdict": verdict}, f"{key} of {run_id}: {verdict}")


async def _settled_doubt(engine: Engine, run_id: str) -> Run:
    import time

    from . import words

    until = time.monotonic() + LOOK_SECONDS
    while True:
        run = await (await engine.get(run_id)).run()
        if not run.status.active or words.in_doubt(run) or time.monotonic() > until:
            return run
        await engine.changed(0.1)


def _doubted(run: Run, step: str) -> str:
    """The key of the step in doubt that was meant."""
    from . import words

    doubts = words.in_doubt(run)
    found = [key for key in doubts if step in (key, words.step_name(key), key.rpartition("/")[2].partition("#")[0])]
    if len(found) == 1:
        return found[0]
    if run.status.finished:
        raise exits.Refused(f"run {run.id!r} is already {run.status.value}", code=exits.CONFLICT)
    if not doubts:
        raise exits.Refused(
            f"no step of run {run.id!r} is in doubt just now", f"the run is {run.status.value}", exits.CONFLICT
        )
    raise exits.Refused(f"{step!r} is not one step in doubt", f"in doubt: {', '.join(doubts)}")
