"""The commands about the state of a graph's run: `state`, `edit` and `consolidate`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import REASON, RUN, WORKFLOW, Settings, command, find

if TYPE_CHECKING:
    from ..engine.engine import Engine

STAGE = click.option("--stage", metavar="NAME", help="The state of this stage.")
AGENT = click.option("--agent", metavar="NAME", help="The state of this agent.")


@command("state")
@RUN
@click.option("--at", type=click.IntRange(0), metavar="SEQ", help="The state after this record; by default the newest.")
@STAGE
@AGENT
def state(settings: Settings, *, run_id: str, at: int | None, stage: str | None, agent: str | None) -> None:
    """Print the state that a graph's run carries, now or after any of its records."""
    from ..views import plain

    async def look(engine: Engine) -> dict[str, Any]:
        from ..model.tree import thaw

        found = await (await find(engine, run_id)).state(at, stage=stage, agent=agent)
        return {key: plain.untagged(thaw(tree)) for key, tree in found.kept().items()}

    values = settings.look(look)
    settings.answer(values, lambda: json.dumps(values, indent=2, ensure_ascii=False))


@command("edit")
@RUN
@click.option("--set", "values", multiple=True, metavar="KEY=JSON", help="Set a key of the state.")
@click.option("--remove", multiple=True, metavar="KEY", help="Remove a key from the state.")
@click.option("--next", "next_step", metavar="STEP", help="Make this step the next one.")
@STAGE
@AGENT
@WORKFLOW
@REASON
def edit(
    settings: Settings,
    *,
    run_id: str,
    values: tuple[str, ...],
    remove: tuple[str, ...],
    next_step: str | None,
    stage: str | None,
    agent: str | None,
    target: str | None,
    reason: str,
) -> None:
    """Change the state of a graph's run that no worker drives, and let it go on.

    The history keeps the old state, the actor and the reason. A graph with a schema must be named: --workflow.
    """
    change = dict(map(value_of, values))
    if target is not None:
        from .target import load_workflow, with_names

        workflow = load_workflow(target, debug=settings.debug)  # the engine knows the workflow from now on
        if stage is None and agent is None:
            change = with_names(workflow, change)
    if not change and not remove and next_step is None:
        raise errors.Refused("nothing to change", "use --set KEY=JSON, --remove KEY or --next STEP")

    async def act(engine: Engine) -> str:
        handle = await find(engine, run_id)
        await handle.edit(change, remove=remove, stage=stage, agent=agent, next=next_step, reason=reason)

        from .control import alone

        run = await handle.run()
        paused = f"; the run is paused: {errors.line('resume', run_id)} lets it go on"
        return paused if run.status == "paused" else await alone(engine, run_id) or "; the run goes on with it"

    later = settings.talk(act)
    value = {"run": run_id, "set": sorted(change), "removed": list(remove), "next": next_step}
    settings.answer(value, f"the state of {run_id} is changed{later}")


def value_of(text: str) -> tuple[str, Any]:
    """Return the key and the value of a change written KEY=JSON."""
    from .target import read_json

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise errors.Refused(f"must be written KEY=JSON, got {text!r}")
    return key, read_json(value, f"the value of {key!r}")


@command("consolidate")
@RUN
@REASON
def consolidate(settings: Settings, *, run_id: str, reason: str) -> None:
    """Record the whole state of a waiting graph's run, so that a recovery need not read earlier records."""

    async def act(engine: Engine) -> None:
        await (await find(engine, run_id)).consolidate(reason)

    settings.talk(act)
    settings.answer({"run": run_id, "consolidated": True}, f"the state of {run_id} is recorded")
