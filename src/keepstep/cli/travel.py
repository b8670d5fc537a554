"""The commands that use a run's history: rewind, fork, diff, replay."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import MODULE, REASON, RUN, WORKFLOW, Settings, command, find

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..history.diff import Difference
    from ..history.dry_replay import Replayed
    from ..history.rewind import Rewound
    from ..workflows.definition import Workflow

STEP = click.option("--step", metavar="STEP", help="Go back to before this step (name or key), so that it runs again.")

#: Characters of a value that are shown at most.
_SHOWN = 60


@command("rewind")
@RUN
@click.option("--to", type=int, metavar="SEQ", help="The last record that counts, as `keepstep history` numbers them.")
@STEP
@click.option("--dry-run", is_flag=True, help="Only show what would be done again.")
@REASON
@click.option("--force", is_flag=True, help="Also a run that was handed over to another store and is lost there.")
def rewind(
    settings: Settings, *, run_id: str, to: int | None, step: str | None, dry_run: bool, reason: str, force: bool
) -> None:
    """Let a run go on from an earlier checkpoint; later records stay stored, but no longer count.

    The run must not be driven: pause it first.
    """
    from .control import alone

    if (to is None) == (step is None):
        raise click.UsageError("use one of --to SEQ and --step STEP")

    async def act(engine: Engine) -> tuple[Rewound, str]:
        handle = await find(engine, run_id)
        done = await handle.rewind(to, step=step, reason=reason, dry_run=dry_run, force=force)
        return done, "" if dry_run else await alone(engine, run_id)

    done, prospect = settings.talk(act)
    value = {"run": run_id, "to": done.to, "again": list(done.again), "children": list(done.children)}
    settings.answer({**value, "dry_run": dry_run}, lambda: _rewound(done, prospect, dry_run=dry_run))


def _rewound(done: Rewound, prospect: str, *, dry_run: bool) -> str:
    from . import formatting

    would = "would go" if dry_run else "goes"
    lines = [f"{done.run} {would} on after record {done.to}{prospect}"]
    if done.again:
        lines.append(f"  done again: {', '.join(map(formatting.one_line, done.again))}")
    if done.children:
        lines.append(f"  cancelled: {', '.join(map(formatting.one_line, done.children))}")
    return "\n".join(lines)


@command("fork")
@RUN
@click.option("--at", type=int, metavar="SEQ", help="The last record to copy; by default all up to the run's end.")
@STEP
@click.option("--id", "new_id", metavar="ID", help="The id of the new run.")
@click.option("--input", "text", metavar="JSON", help="A different input; an object holds arguments by name.")
@WORKFLOW
@click.option("--result", "results", multiple=True, metavar="STEP=JSON", help="A different result of a recorded step.")
@click.option("--state", metavar="JSON", help="Different values in the state of a graph.")
@click.option("--next", "next_step", metavar="STEP", help="The next step of a graph.")
@click.option("--no-signals", is_flag=True, help="Do not copy signals that the copied records have not read.")
@REASON
def fork(
    settings: Settings,
    *,
    run_id: str,
    at: int | None,
    step: str | None,
    new_id: str | None,
    text: str | None,
    target: str | None,
    results: tuple[str, ...],
    state: str | None,
    next_step: str | None,
    no_signals: bool,
    reason: str,
) -> None:
    """Start a new run with a copy of another's records, and optionally a different input, result or state.

    The original run is only read, whatever its status.
    """
    from .control import alone
    from .target import load_workflow, read_json, with_names

    workflow = None if target is None else load_workflow(target, debug=settings.debug)
    edits: dict[str, Any] = {"state": None if state is None else read_json(state, "--state"), "next": next_step}
    if workflow is not None and isinstance(edits["state"], dict):
        edits["state"] = with_names(workflow, edits["state"])
    edits |= {"input": _input(text, workflow), "results": _results(results) or None}
    if edits["state"] is not None and not isinstance(edits["state"], dict):
        raise click.UsageError("--state must be a JSON object with the keys of the state and their new values")

    async def act(engine: Engine) -> tuple[str, str]:
        await find(engine, run_id)
        made = await engine.fork(run_id, at, step=step, run_id=new_id, signals=not no_signals, reason=reason, **edits)
        return made.id, await alone(engine, made.id)

    name, prospect = settings.talk(act)
    settings.answer({"run": name, "origin": run_id}, f"{name} is a fork of {run_id}{prospect}")


def _input(text: str | None, workflow: Workflow[..., Any] | None) -> Any:
    """Return the input of a fork, converted to the types of the signature if a workflow is named."""
    from .target import read_input, read_json

    if text is None:
        return None
    if workflow is not None:
        args, kwargs = read_input(workflow, text, ())
        return workflow.bind(*args, **kwargs)
    value = read_json(text, "--input")
    return value if isinstance(value, dict) else [value]


def _results(given: tuple[str, ...]) -> dict[str, Any]:
    from .target import read_json

    found: dict[str, Any] = {}
    for one in given:
        step, sign, text = one.partition("=")
        if not step or not sign:
            raise click.UsageError(f"--result must be STEP=JSON, got {one!r}")
        found[step] = read_json(text, f"--result {step}")
    return found


@command("diff")
@RUN
@click.argument("a", type=int, required=False)
@click.argument("b", type=int, required=False)
@click.option("--with", "other", metavar="RUN", help="Compare with another run instead.")
def diff(settings: Settings, *, run_id: str, a: int | None, b: int | None, other: str | None) -> None:
    """Show what changed from record A of a run to record B, or to record B of another run.

    Without numbers: from the beginning to now, or from this run to the other as they are now.
    """
    from ..views.plain import difference_data

    async def look(engine: Engine) -> Difference:
        handle = await find(engine, run_id)
        if other is not None:
            await find(engine, other)
        return await handle.diff(a, b, other=other)

    found = settings.look(look)
    settings.answer(difference_data(found), lambda: _difference(found))


def _difference(found: Difference) -> str:
    from . import formatting

    left, right = (f"{run} at record {seq}" for run, seq in (found.left, found.right))
    lines = [f"{left} → {right}"]
    if found.statuses is not None and found.statuses[0] != found.statuses[1]:
        lines.append(f"  status {found.statuses[0]} → {found.statuses[1]}")
    lines += [f"- {formatting.one_line(key)}" for key in found.removed]
    lines += [f"+ {formatting.one_line(key)}" for key in found.added]
    for name, pairs in (("", found.changed), ("state ", found.state), ("published ", found.published)):
        lines += [
            f"~ {name}{formatting.one_line(key)}: {_brief(old)} → {_brief(new)}" for key, (old, new) in pairs.items()
        ]
    if not found:
        lines.append("nothing changed")
    return "\n".join(lines)


def _brief(value: Any) -> str:
    from . import formatting

    text = formatting.one_line(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


@command("replay")
@RUN
@click.argument("target", metavar="TARGET")
@MODULE
def replay(settings: Settings, *, run_id: str, target: str, module: tuple[str, ...]) -> int:
    """Replay a run's records with this code, without effects, and show the next calls or the mismatch.

    No step runs and nothing is written. Exit code 1 if a worker would set the run aside.
    """
    from .target import load_workflow

    workflow = load_workflow(target, modules=module, debug=settings.debug)

    async def look(engine: Engine) -> Replayed:
        return await (await find(engine, run_id)).replay(workflow)

    result = settings.talk(look)
    value = {
        "run": run_id,
        "fits": result.fits,
        "ended": result.ended,
        "next": list(result.asks),
        "records": result.records,
    }
    settings.answer({**value, "problem": result.problem or None}, lambda: _replayed(result))
    return errors.OK if result.fits else errors.FAILED


def _replayed(result: Replayed) -> str:
    from . import formatting

    if result.problem:
        return f"{click.style('does not fit', fg='red', bold=True)}: {formatting.printable(result.problem)}"
    goes = "the run ends as before" if result.ended else "the run goes on from there"
    next_ = f"; next: {', '.join(map(formatting.one_line, result.asks))}" if result.asks else ""
    return f"{click.style('fits', fg='green', bold=True)}: {result.records} records are replayed, and {goes}{next_}"
