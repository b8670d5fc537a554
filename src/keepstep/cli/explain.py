"""The command `explain`: why a run stands where it does, and what a retry, a recovery or a rewind would do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .settings import RUN, Settings, command, find_run

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..views.explain import Explanation, Failure


@command("explain")
@RUN
@click.option("--rewind-to", type=click.IntRange(0), metavar="SEQ", help="Also tell what a rewind to this would do.")
@click.option("--rewind-step", metavar="STEP", help="Also tell what a rewind to before this step would do.")
def explain(settings: Settings, *, run_id: str, rewind_to: int | None, rewind_step: str | None) -> None:
    """Explain one run: why it failed or waits, what holds it up, and what would run again.

    Nothing is changed.
    """
    from ..views.explain import explain as explained
    from ..views.explain import explanation_data

    if rewind_to is not None and rewind_step is not None:
        raise click.UsageError("give either --rewind-to or --rewind-step")

    async def look(engine: Engine) -> Explanation:
        return await explained(engine, await find_run(engine, run_id), to=rewind_to, step=rewind_step)

    found = settings.look(look)
    settings.answer(explanation_data(found), lambda: _text(found))


def _text(found: Explanation) -> str:
    from . import formatting
    from .hints import hint_of

    run = found.view.run
    lines = [
        f"{formatting.one_line(run.id)} is {formatting.coloured(run.status)}",
        *formatting.wrapped(found.summary),
    ]
    if found.failure is not None:
        lines += ["", *_failed(found.failure)]
    texts = [*(one.text for one in found.obstacles), *(one.text for one in found.waits)]
    lines += [
        line for text in dict.fromkeys(texts) if text != found.summary for line in ("", *formatting.wrapped(text))
    ]
    for title, plan in (("retry", found.retry), ("recovery", found.recovery), ("rewind", found.rewind)):
        if plan is not None:
            lines += ["", click.style(f"What a {title} would do", bold=True), *formatting.wrapped(plan.text)]
            lines.append(f"  {hint_of(plan.command)}")
    if found.commands:
        lines += ["", click.style("What you can do", bold=True), *(f"  {hint_of(one)}" for one in found.commands)]
    return "\n".join(lines)


def _failed(failure: Failure) -> list[str]:
    from . import formatting

    lines = []
    if failure.error is not None:
        lines.append(formatting.printable(formatting.error_line(failure.error)))
        lines += [f"  {line}" for line in formatting.printable(formatting.frame_lines(failure.error)).splitlines()]
    if failure.failures > 1:
        shown = [
            f"  attempt {one.attempt}, {formatting.ago(one.at)}: "
            + (formatting.one_line(formatting.error_line(one.error), formatting.BRIEF) if one.error else "no error")
            for one in failure.attempts
        ]
        hidden = failure.failures - len(failure.attempts)
        lines += [f"  {hidden} earlier attempts"] if hidden else []
        lines += shown
    return lines
