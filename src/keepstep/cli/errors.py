"""Exit codes of commands, and error messages for people and programs."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

import click

from ..errors import (
    AlreadyFinished,
    DefinitionError,
    DocumentConflict,
    EncryptionError,
    EraseUnfinished,
    ExecutionError,
    KeepstepError,
    RecoveryError,
    RunCancelled,
    RunConflict,
    RunFailed,
    RunNotFound,
    RunSetAside,
    SignalsFull,
    StoreError,
    TimedOut,
)


class Manner(Protocol):
    """The output options that an error message depends on."""

    json: bool
    debug: bool


OK = 0
FAILED = 1  # the run failed; doctor or crashtest found an error; the demo's proof failed
USAGE = 2  # the command, its input or the user's code is wrong
NOT_FOUND = 3  # no such run, schedule, channel or worker
CANCELLED = 4
SET_ASIDE = 5  # the run waits for a person
STORE = 6  # the store is missing, busy, damaged, full, or not a Keepstep store
CONFLICT = 7  # the run has already ended, its id is taken, or another process was faster
TIMED_OUT = 8  # no answer, or no end of the run, within the given time
UNFINISHED = 9  # erase has removed the run, but its data is still in the store's files
INTERNAL = 70  # a bug in Keepstep
INTERRUPTED = 130

#: Characters of a path that are shown at most, because a path that is too long for the system is too long for a line.
MAX_PATH_SHOWN = 200

#: Names of the exit codes for --json. They are stable when a message is reworded.
NAMES = {
    FAILED: "failed",
    USAGE: "usage",
    NOT_FOUND: "not-found",
    CANCELLED: "cancelled",
    SET_ASIDE: "set-aside",
    STORE: "store",
    CONFLICT: "conflict",
    TIMED_OUT: "timed-out",
    UNFINISHED: "unfinished",
    INTERNAL: "internal",
    INTERRUPTED: "interrupted",
}

_CODES: tuple[tuple[type[KeepstepError], int], ...] = (
    (RunNotFound, NOT_FOUND),
    (RunCancelled, CANCELLED),
    (RunSetAside, SET_ASIDE),
    (RunConflict, CONFLICT),
    (AlreadyFinished, CONFLICT),
    (SignalsFull, CONFLICT),
    (TimedOut, TIMED_OUT),
    (RunFailed, FAILED),
    (RecoveryError, FAILED),
    (EraseUnfinished, UNFINISHED),
    (DocumentConflict, CONFLICT),
    (StoreError, STORE),
    (DefinitionError, USAGE),
)


class Refused(click.ClickException):
    """A user's mistake, described in a sentence; `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "", code: int = USAGE) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def code_of(error: BaseException) -> int:
    """Return the exit code of an error."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, click.ClickException):
        return USAGE
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    return next((code for kind, code in _CODES if isinstance(error, kind)), INTERNAL)


def report(error: BaseException, settings: Manner) -> int:
    """Report an error on standard error and return its exit code."""
    if isinstance(error, (SystemExit, click.exceptions.Exit)):
        code = error.code if isinstance(error, SystemExit) else error.exit_code
        return code if isinstance(code, int) else OK if code is None else FAILED
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, has closed the pipe: nobody reads a message
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    if isinstance(error, OSError) and error.filename is not None:  # for example, a name that is too long
        error = Refused(f"the path {str(error.filename)[:MAX_PATH_SHOWN]!r} cannot be used: {error.strerror}")
    code = code_of(error)
    no_arguments = getattr(click.exceptions, "NoArgsIsHelpError", None)  # since click 8.2
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
        hint = hint or f"{context.command_path} --help has details"
    from .formatting import frame_lines, printable

    click.echo(f"{click.style('keepstep:', fg='red', bold=True)} {printable(message)}", err=True)
    frames = frame_lines(error.error) if isinstance(error, (RunFailed, RunSetAside)) else ""
    for line in [*printable(frames).splitlines(), *hint.splitlines()]:
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
        return f"unexpected error: {about}", "run the command again with --debug for the traceback"
    hint = ""
    if isinstance(error, (RunFailed, RunSetAside)):
        hint = _how_to_go_on(error)
    if isinstance(error, EncryptionError) and error.key_id:
        hint = f"set KEEPSTEP_KEYS to {error.key_id}=BASE64, the key itself, or to @FILE"
    if isinstance(error, RunConflict) and error.existing is not None:
        again = line("run", "WORKFLOW", "--id", error.run_id)
        hint = f"{line('show', error.run_id)} shows it\n{again} goes on with it"
    return str(error).replace("keepstep.errors.", ""), hint


def _how_to_go_on(error: RunFailed | RunSetAside) -> str:
    """Return advice for a run that ended badly, one command per line."""
    from ..care.doctor import CODE_PROBLEMS

    lines = [f"{line('history', error.run_id)} shows what happened"]
    kind = error.error.type if error.error is not None else ""
    if kind == "Copy":  # the run was handed over, and goes on elsewhere
        return lines[0]
    if isinstance(error, RunFailed) and error.undone:  # its code cannot go on
        return lines[0]
    if isinstance(error, ExecutionError) and error.state:  # only graphs have a state
        lines.append(f"{line('edit', error.run_id, '--set', 'KEY=JSON')} lets it go on with another state")
    if kind in CODE_PROBLEMS:
        lines.append(f"{line('check', 'FILE.py')} checks whether the code fits the run; fix the code first")
    return "\n".join([*lines, f"{line('retry', error.run_id)} lets it go on"])


class _Here:
    """The store of this command, which commands in hints must name too."""

    store = ""


#: Set before a command begins. One process runs one command.
HERE = _Here()


def line(*words: str) -> str:
    """Return a command that can be pasted into a shell: quoted, and with the option for this store."""
    return shlex.join(("keepstep", *words, *_store()))


def unreadable(names: Iterable[str]) -> str:
    """Return a sentence about runs whose rows are damaged."""
    return f"unreadable, because their rows are damaged: {', '.join(names)} ({line('doctor')} has details)"


def advice(text: str) -> str:
    """Return a sentence in which commands name this store."""
    store = shlex.join(("keepstep", *_store()))
    return re.sub(r"\bkeepstep(?= [a-z])", lambda _: store, text)


def _store() -> tuple[str, ...]:
    return ("--store", _PASSWORD.sub(r"\1\2***", HERE.store)) if HERE.store else ()


#: The password in a URL: between the user's name and the host, or as the option `password`.
_PASSWORD = re.compile(r"((?<=:)//[^/@:]*:)[^/]*(?=@)|([?&]password=)[^&]*")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that suggests similar words."""
    found = difflib.get_close_matches(word, list(known), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(found)}?" if found else ""
