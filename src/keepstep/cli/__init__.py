"""The command line `keepstep`: one file per command or small group, imported when it is used."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from .. import __version__
from . import exits
from .frame import Settings, common_options

#: Every command: where it lives, and what `keepstep --help` says of it without loading it. A new command is one new
#: file, or function, and one line here.
COMMANDS = {
    "demo": ("demo:demo", "See a run be killed half-way and go on."),
    "run": ("run:run", "Run a workflow to its end and print its result."),
    "start": ("run:start", "Create a run for a worker to drive."),
    "worker": ("worker:worker", "Drive runs, and recover what was interrupted."),
    "list": ("look:list_", "List runs, newest first."),
    "show": ("look:show", "Show one run: where it stands, input, result."),
    "history": ("look:history", "Show the timeline of a run."),
    "state": ("state:state", "Print the state that a graph's run carries."),
    "edit": ("state:edit", "Change the state of a graph's run."),
    "consolidate": ("state:consolidate", "Write the whole state of a run down."),
    "graph": ("graph:graph", "Draw a workflow, or what a run of it did."),
    "watch": ("watch:watch", "Print what happens in a run, as it happens."),
    "signal": ("steer:signal", "Send a run a durable message."),
    "approve": ("steer:approve", "Answer a run that waits for a yes or a no."),
    "ask": ("steer:ask", "Send a run a question and print its reply."),
    "pause": ("steer:pause", "Stop a run at its next step boundary."),
    "resume": ("steer:resume", "Let a paused run go on, or one at a breakpoint."),
    "cancel": ("steer:cancel", "Cancel a run, for good."),
    "retry": ("steer:retry", "Let a failed or set-aside run go on."),
    "rewind": ("travel:rewind", "Let a run go on from an earlier checkpoint."),
    "fork": ("travel:fork", "Start a new run with a copy of another's records."),
    "diff": ("travel:diff", "Show what changed between two records, or two runs."),
    "replay": ("travel:replay", "Say what a run would do next, without doing it."),
    "check": ("check:check", "Replay all unfinished runs against new code."),
    "resolve": ("steer:resolve", "Settle an at-most-once step that is in doubt."),
    "validate": ("validate:validate", "Say what is wrong with workflows in files."),
    "audit": ("audit:audit", "Show who did what to a run, and why."),
    "crashtest": ("crashtest:crashtest", "Kill a workflow at every checkpoint, and report."),
    "rekey": ("rekey:rekey", "Encrypt the data keys of all runs with the current key."),
    "verify": ("care:verify", "Say what is not as it was written."),
    "repair": ("care:repair", "Mend what can be mended, and name the rest."),
    "purge": ("care:purge", "Remove finished runs."),
    "retain": ("care:retain", "Remove finished runs that need not stay."),
    "erase": ("care:erase", "Remove one run so that nothing is left of it."),
    "export": ("move:export", "Write runs into one readable archive."),
    "import": ("move:import_", "Take up the runs of an archive."),
    "copy": ("move:copy", "Copy runs from one store to another."),
    "doctor": ("doctor:doctor", "Examine the store, its workers and its runs."),
    "version": ("version:version", "Print the version."),
}


class LazyGroup(click.Group):
    """Imports a command's file when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        found: click.Command = getattr(import_module(f"{__name__}.{module}"), name)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_text) for name, (_, help_text) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command {args[0]!r}{exits.nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    params=common_options(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `keepstep demo`. Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 no such run, 4 cancelled, "
    "5 set aside, 6 store, 7 conflict, 8 timed out, 70 a defect of Keepstep, 130 interrupted.",
)
@click.version_option(__version__, "-V", "--version", prog_name="keepstep", message="%(prog)s %(version)s")
def group() -> None:
    """Durable workflows: every finished step leaves a checkpoint and never runs again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A user's mistake is answered with a sentence, never with a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what cannot be written as it is must not stop an answer
    settings, exits.HERE.store = Settings(), ""
    arguments = list(sys.argv[1:] if argv is None else argv)
    settings.json, settings.debug = "--json" in arguments, "--debug" in arguments  # for errors in the usage itself
    try:
        with group.make_context("keepstep", arguments, obj=settings) as context:
            done: Any = group.invoke(context)
        sys.stdout.flush()  # here, where it can still be told that nobody reads any more
    except BaseException as error:  # noqa: BLE001 - the one place where everything that went wrong is told
        return exits.told(error, settings)
    return done if isinstance(done, int) else exits.OK
