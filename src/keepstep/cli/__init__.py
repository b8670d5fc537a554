"""The command line `keepstep`: one file per command or small group, imported on first use."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from .. import __version__
from . import errors
from .settings import Settings, common_options

#: Every command: its place, and its line in `keepstep --help`, which is printed without importing it. A new command is
#: one new file or function, and one line here.
COMMANDS = {
    "demo": ("demo:demo", "Watch a run survive a SIGKILL."),
    "run": ("run:run", "Run a workflow to its end and print its result."),
    "start": ("run:start", "Create a run for a worker to drive."),
    "worker": ("worker:worker", "Drive runs, and recover interrupted ones."),
    "workers": ("workers:workers", "List the workers of the store."),
    "drain": ("workers:drain", "Tell workers to claim no more runs, and to end."),
    "schedules": ("schedules:schedules", "List and change what workers start by themselves."),
    "top": ("top:top", "Watch rates, queues, services, workers and slow steps."),
    "topics": ("topics:topics", "List topics, show one, publish a message."),
    "channels": ("channels:channels", "List and test the channels for notices."),
    "agents": ("agents:agents", "List agents and their health; drain or probe one."),
    "list": ("inspect:list_", "List runs, newest first."),
    "show": ("inspect:show", "Show one run: status, input, result."),
    "explain": ("explain:explain", "Explain why a run failed or waits, and what would help."),
    "history": ("inspect:history", "Show the timeline of a run."),
    "state": ("state:state", "Print the state that a graph's run carries."),
    "edit": ("state:edit", "Change the state of a graph's run."),
    "consolidate": ("state:consolidate", "Record the whole state of a run."),
    "graph": ("graph:graph", "Draw a workflow, or what a run of it did."),
    "watch": ("watch:watch", "Print the events of a run as they happen."),
    "signal": ("control:signal", "Send a run a durable message."),
    "complete": ("control:complete", "End the wait of a callback with its token."),
    "approve": ("control:approve", "Answer a run that waits for a yes or a no."),
    "ask": ("control:ask", "Send a run a question and print its reply."),
    "pause": ("control:pause", "Stop a run at its next step boundary."),
    "resume": ("control:resume", "Let a run go on from a pause or a breakpoint."),
    "cancel": ("control:cancel", "Cancel a run, for good."),
    "retry": ("control:retry", "Let a failed or set-aside run go on."),
    "recover": ("recover:recover", "Let a worker recover a run, or show what that would do."),
    "aside": ("aside:aside", "List runs that are set aside; retry, edit or drop them."),
    "rewind": ("travel:rewind", "Let a run go on from an earlier checkpoint."),
    "fork": ("travel:fork", "Start a new run with a copy of another's records."),
    "diff": ("travel:diff", "Show what changed between two records, or two runs."),
    "replay": ("travel:replay", "Show what a run would do next, without doing it."),
    "check": ("check:check", "Replay all unfinished runs against new code."),
    "skip": ("control:skip", "Accept failed undo steps of a run that is set aside."),
    "resolve": ("control:resolve", "Settle an at-most-once step that is in doubt."),
    "validate": ("validate:validate", "Check workflows in YAML or JSON files."),
    "audit": ("audit:audit", "Show who did what to a run, and why."),
    "crashtest": ("crashtest:crashtest", "Kill a workflow at every checkpoint, and report."),
    "rekey": ("rekey:rekey", "Encrypt the data keys of all runs with the current key."),
    "verify": ("care:verify", "Check stored runs for corruption."),
    "repair": ("care:repair", "Repair derivable damage, and report the rest."),
    "purge": ("care:purge", "Remove finished runs."),
    "retain": ("care:retain", "Apply a retention rule now."),
    "divide": ("care:divide", "Divide the history, so that old parts are dropped."),
    "erase": ("care:erase", "Erase one run from the store's files."),
    "export": ("move:export", "Write runs into one readable archive."),
    "import": ("move:import_", "Import the runs of an archive."),
    "copy": ("move:copy", "Copy runs from one store to another."),
    "queues": ("queues:queues", "List queues, and change their limits."),
    "services": ("services:services", "List services, change limits, open or close breakers."),
    "artifacts": ("artifacts:artifacts", "List, fetch and verify large results beside the store."),
    "memory": ("memory:memory", "List, read and change the values of a memory."),
    "doctor": ("doctor:doctor", "Examine the store, its workers and its runs."),
    "serve": ("serve:serve", "Serve the HTTP API of the store."),
    "mcp": ("mcp:mcp", "Let an assistant look at runs, and steer them if allowed."),
    "version": ("version:version", "Print the version."),
}


class LazyGroup(click.Group):
    """Imports a command's file when the command is used."""

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
            raise click.UsageError(f"no command {args[0]!r}{errors.nearest(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    params=common_options(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `keepstep demo`. Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 no such run, 4 cancelled, "
    "5 set aside, 6 store, 7 conflict, 8 timed out, 9 not yet erased, 70 a bug in Keepstep, 130 interrupted.",
)
@click.version_option(__version__, "-V", "--version", prog_name="keepstep", message="%(prog)s %(version)s")
def group() -> None:
    """Durable workflows: every finished step leaves a checkpoint and never runs again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A mistake of the user gets a sentence, never a traceback."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show must not prevent an answer.
            stream.reconfigure(errors="backslashreplace")
    settings, errors.HERE.store = Settings(), ""
    arguments = list(sys.argv[1:] if argv is None else argv)
    settings.json, settings.debug = "--json" in arguments, "--debug" in arguments  # for errors in the usage itself
    try:
        with group.make_context("keepstep", arguments, obj=settings) as context:
            done: Any = group.invoke(context)
        sys.stdout.flush()  # flush here, where a closed pipe can still be handled
    except BaseException as error:  # noqa: BLE001 - the one place that reports every error
        return errors.report(error, settings)
    return done if isinstance(done, int) else errors.OK


def _open_closed_streams() -> None:
    """Open the null device for standard streams that the process was started without.

    Otherwise a file of the store would get the free descriptor, and printing would damage it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open while the process lives
            setattr(sys, name, stream)
