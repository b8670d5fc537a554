"""The command line `keepstep`: one file per command or small group, imported when it is used."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from .. import __version__
from . import exits
from .frame import Settings, common_options

#: Every command and where it lives. A new command is one new file, or function, and one line here.
COMMANDS = {
    "demo": "demo:demo",
    "run": "run:run",
    "start": "run:start",
    "worker": "worker:worker",
    "list": "look:list_",
    "show": "look:show",
    "history": "look:history",
    "watch": "watch:watch",
    "signal": "steer:signal",
    "approve": "steer:approve",
    "ask": "steer:ask",
    "pause": "steer:pause",
    "resume": "steer:resume",
    "cancel": "steer:cancel",
    "retry": "steer:retry",
    "resolve": "steer:resolve",
    "audit": "audit:audit",
    "doctor": "doctor:doctor",
    "version": "version:version",
}


class LazyGroup(click.Group):
    """Imports a command's file when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(import_module(f"{__name__}.{module}"), name)
        return found

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
    "5 set aside, 6 store, 7 conflict, 8 timed out, 130 interrupted.",
)
@click.version_option(__version__, "-V", "--version", prog_name="keepstep", message="%(prog)s %(version)s")
def group() -> None:
    """Durable workflows: every finished step leaves a checkpoint and never runs again."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code. A user's mistake is answered with a sentence, never with a traceback."""
    settings = Settings()
    arguments = list(sys.argv[1:] if argv is None else argv)
    settings.json, settings.debug = "--json" in arguments, "--debug" in arguments  # for errors in the usage itself
    try:
        with group.make_context("keepstep", arguments, obj=settings) as context:
            done: Any = group.invoke(context)
        sys.stdout.flush()  # here, where it can still be told that nobody reads any more
    except BaseException as error:  # noqa: BLE001 - the one place where everything that went wrong is told
        return exits.told(error, settings)
    return done if isinstance(done, int) else exits.OK
