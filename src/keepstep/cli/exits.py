"""How a command ends: the exit codes, and what a person is told when something went wrong."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ..errors import (
    AlreadyFinished,
    DefinitionError,
    EncryptionError,
    ExecutionError,
    KeepstepError,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunSetAside,
    StoreError,
    TimedOut,
)

if TYPE_CHECKING:
    from .frame import Settings

OK = 0
FAILED = 1  # the run failed; doctor or crashtest found an error; the demo's proof does not hold
USAGE = 2  # the command, its input or the user's code is wrong
NOT_FOUND = 3  # no such run
CANCELLED = 4
SET_ASIDE = 5  # the run waits for a person
STORE = 6  # the store is missing, busy, damaged, full, or not a Keepstep store
CONFLICT = 7  # the run has ended already, its id is taken, or someone else was faster
TIMED_OUT = 8  # no answer within the time given
INTERNAL = 70  # a defect of Keepstep
INTERRUPTED = 130

#: What a program reads with --json: one word for each exit code, which stays as it is when a sentence is improved.
NAMES = {
    FAILED: "failed",
    USAGE: "usage",
    NOT_FOUND: "not-found",
    CANCELLED: "cancelled",
    SET_ASIDE: "set-aside",
    STORE: "store",
    CONFLICT: "conflict",
    TIMED_OUT: "timed-out",
    INTERNAL: "internal",
    INTERRUPTED: "interrupted",
}

_CODES: tuple[tuple[type[KeepstepError], int], ...] = (
    (RunNotFound, NOT_FOUND),
    (RunCancelled, CANCELLED),
    (RunSetAside, SET_ASIDE),
    (RunConflict, CONFLICT),
    (AlreadyFinished, CONFLICT),
    (TimedOut, TIMED_OUT),
    (RunFailed, FAILED),
    (StoreError, STORE),
    (DefinitionError, USAGE),
)


class Refused(click.ClickException):
    """A user's mistake, said in a sentence; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "", code: int = USAGE) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def code_of(error: BaseException) -> int:
    """The exit code that an error stands for."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, click.ClickException):
        return USAGE
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    return next((code for kind, code in _CODES if isinstance(error, kind)), INTERNAL)


def told(error: BaseException, settings: Settings) -> int:
    """Tell of an error on standard error; the exit code."""
    if isinstance(error, (SystemExit, click.exceptions.Exit)):
        code = error.code if isinstance(error, SystemExit) else error.exit_code
        return code if isinstance(code, int) else OK if code is None else FAILED
    if isinstance(error, BrokenPipeError):  # whoever read has gone, as `head` does: nobody is left to be told
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    code = code_of(error)
    no_arguments = getattr(click.exceptions, "NoArgsIsHelpError", None)  # which click has since 8.2
    if no_arguments is not None and isinstance(error, no_arguments) and not settings.json:
        click.echo(error.format_message(), err=True)
        return code
    if settings.debug and not isinstance(error, (click.ClickException, click.Abort, KeyboardInterrupt)):
        import traceback

        traceback.print_exception(error)
    message, hint = _words(error, code)
    if settings.json:
        body = {"error": NAMES[code], "message": message, "hint": hint, "exit": code}
        click.echo(json.dumps(body, ensure_ascii=False), err=True)
        return code
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        click.echo(context.get_usage(), err=True)
        hint = hint or f"{context.command_path} --help tells more"
    from .words import printable

    click.echo(f"{click.style('keepstep:', fg='red', bold=True)} {printable(message)}", err=True)
    for line in hint.splitlines():
        click.echo(f"  {line}", err=True)
    return code


def _words(error: BaseException, code: int) -> tuple[str, str]:
    if isinstance(error, Refused):
        return error.message, error.hint
    if isinstance(error, click.ClickException):
        return error.format_message(), ""
    if code == INTERRUPTED:
        return "interrupted", ""
    if code == INTERNAL:
        about = f"{type(error).__name__}: {error}"
        return f"something unexpected happened: {about}", "run it again with --debug for the whole traceback"
    hint = ""
    if isinstance(error, (RunFailed, RunSetAside)):
        hint = f"{line('history', error.run_id)} shows what happened"
        if error.error is None or error.error.type != "Copy":  # one that was handed over goes on elsewhere
            if isinstance(error, ExecutionError) and error.state:  # of a graph; a dag has none
                hint += f"\n{line('edit', error.run_id, '--set', 'KEY=JSON')} lets it go on with another state"
            hint += f"\n{line('retry', error.run_id)} lets it go on"
    if isinstance(error, EncryptionError) and error.key_id:
        hint = f"set KEEPSTEP_KEYS to {error.key_id}=BASE64, the key itself, or to @FILE"
    if isinstance(error, RunConflict) and error.existing is not None:
        again = line("run", "WORKFLOW", "--id", error.run_id)
        hint = f"{line('show', error.run_id)} shows it\n{again} goes on with it"
    return str(error).replace("keepstep.errors.", ""), hint


class _Here:
    """Where this command works: the store that was named for it, which commands in hints must name too."""

    store = ""


#: Set before a command begins; one process runs one command.
HERE = _Here()


def line(*words: str) -> str:
    """A command that can be pasted: what a shell would read in its own way is quoted, and the store is this one."""
    return shlex.join(("keepstep", *words, *_store()))


def advice(text: str) -> str:
    """A sentence with commands in it, in which they name this store."""
    store = shlex.join(("keepstep", *_store()))
    return re.sub(r"\bkeepstep(?= [a-z])", lambda _: store, text)


def _store() -> tuple[str, ...]:
    return ("--store", _PASSWORD.sub(r"\1\2***", HERE.store)) if HERE.store else ()


#: In a URL: what comes between a user's name and the host, and an option of that name.
_PASSWORD = re.compile(r"((?<=:)//[^/@:]*:)[^/]*(?=@)|([?&]password=)[^&]*")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence that suggests what may have been meant."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""
