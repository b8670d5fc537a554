"""The command `recover`: asks a worker to recover a run, or shows what a recovery would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from . import errors
from .settings import MODULE, REASON, RUN, Settings, command, find

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..workflows.recovery import RecoveryInfo


@command("recover")
@RUN
@click.argument("target", required=False, metavar="[TARGET]")
@MODULE
@click.option("--handler", default="", metavar="NAME", help="Handler to ask instead of that of the workflow.")
@click.option("--step", default="", metavar="STEP", help='Step that "skip step" is about; needed if there are several.')
@click.option("--value", metavar="JSON", help='Result that "skip step" gives to the step; null by default.')
@click.option("--skip-validation", is_flag=True, help="Go on although the definition of the workflow has changed.")
@click.option("--dry-run", is_flag=True, help="Only show what a recovery would do.")
@REASON
def recover(
    settings: Settings,
    *,
    run_id: str,
    target: str | None,
    module: tuple[str, ...],
    handler: str,
    step: str,
    value: str | None,
    skip_validation: bool,
    dry_run: bool,
    reason: str,
) -> int:
    """Let a worker recover a run that was interrupted, has failed or is set aside.

    Handlers: continue, retry step, skip step, restart, undo, set aside, or one that the worker's code registers. TARGET
    is the workflow's code; with it, the answer tells the next calls and what would run again. Exit code 7 if the run
    cannot be recovered: it is complete, a living worker drives it, or it is being recovered. With --dry-run, 1 if a
    worker would set the run aside.
    """
    from ..views import plain
    from .target import load_workflow, read_json

    if value is not None and handler != "skip step":
        raise click.UsageError('--value is for --handler "skip step"')
    given = None if value is None else read_json(value, "--value")
    code = None  # with TARGET, the engine knows the workflow
    if target is not None:
        code = load_workflow(target, modules=module, debug=settings.debug)

    async def act(engine: Engine) -> tuple[RecoveryInfo, str]:
        from .control import alone

        handle = await find(engine, run_id)
        run = await handle.run()
        if code is not None and run.workflow != code.name and run.continued_as is None:
            hint = f"name the code of {run.workflow!r}, as FILE.py:NAME"
            raise errors.Refused(f"run {run_id!r} belongs to workflow {run.workflow!r}, not to {code.name!r}", hint)
        info = await handle.recover(
            handler, step=step, value=given, skip_validation=skip_validation, reason=reason, dry_run=dry_run
        )
        return info, "" if dry_run else await alone(engine, run_id)

    info, later = settings.talk(act)
    answer = plain.recovery_data(info)
    if not dry_run:
        whose = f"the handler {_handler(info)!r}" if info.handler else "the handler of its workflow"
        asked = f"asked a worker to recover {run_id} with {whose}{later}"
        settings.answer({**answer, "asked": "recover"}, asked)
        return errors.OK
    settings.answer(answer, lambda: _text(info))
    if info.recoverable:
        return errors.OK
    return errors.FAILED if info.problems else errors.CONFLICT


def _handler(info: RecoveryInfo) -> str:
    from . import formatting

    return formatting.one_line(info.handler)


def _decider(info: RecoveryInfo) -> str:
    """Return the handler, and whether it decides only when a worker asks it."""
    from ..policies.recovery import HANDLERS

    if not info.handler:
        return "that of the workflow, which is unknown here"
    decides = info.recoverable and info.handler not in HANDLERS
    return f"{info.handler}, which decides when a worker asks it" if decides else info.handler


def _skipped(info: RecoveryInfo) -> str:
    """Return the step that would be skipped, and the result that it would get."""
    from ..views import plain
    from . import formatting

    if info.handler != "skip step":
        return ""
    if info.checked and not info.skips:
        return "nothing, because no step was under way"
    result = formatting.brief(plain.given_value(info.value))
    return f"{info.skips or 'the step that was under way'}, with the result {result}"


def _text(info: RecoveryInfo) -> str:
    from . import formatting

    can = click.style("can be recovered", fg="green", bold=True)
    cannot = click.style("cannot be recovered", fg="red", bold=True)
    lines = [f"{info.run} {can if info.recoverable else cannot}: {formatting.one_line(info.why)}"]
    lines += [f"- {formatting.printable(one)}" for one in info.problems[1:]]
    pairs = [
        ("last success", info.last_success),
        ("failed step", f"{info.failed}: {info.error}" if info.failed and info.error else info.failed),
        ("next", ", ".join(info.next)),
        ("handler", _decider(info)),
        ("skips", _skipped(info) if info.recoverable else ""),
        ("runs again", ", ".join(info.again)),
    ]
    lines += [f"  {name + ':':<14}{formatting.one_line(text)}" for name, text in pairs if text]
    if not info.checked:
        lines.append("  name the workflow (FILE.py:NAME) to see the next calls, and whether its code fits")
    return "\n".join(lines)
