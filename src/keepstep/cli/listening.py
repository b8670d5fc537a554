"""The parts that commands with a server share: who may reach it, the workflows it knows, and the port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from . import errors

if TYPE_CHECKING:
    import socket

    from ..web.tokens import Token
    from ..workflows.definition import Workflow

F = TypeVar("F", bound=Callable[..., Any])

#: Environment variable that holds a token, so that it does not appear in the list of processes.
TOKEN = "KEEPSTEP_TOKEN"  # noqa: S105 - the name of the variable
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared only


def listening(*, port: int) -> Callable[[F], F]:
    """Add the options of a command that listens."""
    options = (
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on."),
        click.option(
            "--port", type=click.IntRange(0, 65535), default=port, show_default=True, help="0 takes a free one."
        ),
        click.option(
            "--token", multiple=True, metavar="[NAME:ROLE:]SECRET", help=f"Also by {TOKEN}. May be given repeatedly."
        ),
        click.option(
            "--name", "names", multiple=True, metavar="HOST", help="Another name under which this server is reached."
        ),
    )

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def guarded(host: str, token: Sequence[str], names: Sequence[str]) -> tuple[list[Token], list[str]]:
    """Return the tokens and the names of a server; refuse one that others reach without a token."""
    from ..web.guard import LOOPBACK
    from ..web.tokens import Token

    tokens = [Token.parse(one) for one in (*token, *os.environ.get(TOKEN, "").split())]
    if host not in LOOPBACK and not tokens:
        raise errors.Refused(
            f"--host {host} lets other machines reach the server, which needs a token",
            f"set {TOKEN} to a secret of at least 16 characters, or give --token",
        )
    if host in _EVERYWHERE and not names:
        raise errors.Refused(f"--host {host} needs --name HOST", "give the name that people type into their browsers")
    return tokens, [*names, *([] if host in LOOPBACK or host in _EVERYWHERE else [host])]


def known_workflows(targets: Sequence[str], module: tuple[str, ...], *, debug: bool) -> list[Workflow[..., Any]] | None:
    """Return the workflows that a server knows: none, or all that the files define and import."""
    from .target import is_workflow_file, load_module, load_workflow, split

    for target in targets:
        if is_workflow_file(target):
            load_workflow(target, modules=module, debug=debug)
        else:
            load_module(split(target)[0], debug=debug)
    return None if targets else []


async def listen(app: Any, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve an application until the process is stopped; `say` is called with its address when it listens."""
    import uvicorn

    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        ws="none",
    )
    server = uvicorn.Server(config)
    # uvicorn would raise the signal again after its end, and the process would end before the engine is closed.
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
    socket = _bound(host, port)
    socket.listen(config.backlog)  # a reader of the line below may connect at once
    shown = f"[{host}]" if ":" in host else host
    say(f"http://{shown}:{socket.getsockname()[1]}")
    await server.serve(sockets=[socket])


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket at an address; refuse one that another process has."""
    import socket  # slow to import

    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        why = os.strerror(error.errno) if error.errno else str(error)
        raise errors.Refused(
            f"cannot listen on {host}:{port}: {why}", "give another --port; 0 takes a free one"
        ) from None
    return found
