"""The command `serve`: the HTTP API of a store, on this machine unless a host and a token are given."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .settings import MODULE, Settings, command, shown_url

if TYPE_CHECKING:
    from ..workflows.definition import Workflow

#: Environment variable that holds a token, so that it does not appear in the list of processes.
TOKEN = "KEEPSTEP_TOKEN"  # noqa: S105 - the name of the variable


@command("serve")
@click.argument("targets", nargs=-1, metavar="[FILE.py|MODULE|FILE.yaml...]")
@MODULE
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0 takes a free one.")
@click.option("--token", multiple=True, metavar="[NAME:ROLE:]SECRET", help=f"Also by {TOKEN}. May be given repeatedly.")
@click.option("--name", "names", multiple=True, metavar="HOST", help="Another name under which this server is reached.")
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--prefix", default="", metavar="/PATH", help="Path under which a proxy serves it.")
def serve(
    settings: Settings,
    *,
    targets: tuple[str, ...],
    module: tuple[str, ...],
    host: str,
    port: int,
    token: tuple[str, ...],
    names: tuple[str, ...],
    read_only: bool,
    prefix: str,
) -> int:
    """Serve the HTTP API of a store. It needs the extra: pip install 'keepstep[web]'.

    Only this machine can reach it, unless --host is given, which needs a token. The roles are read, act and admin.
    With files or modules, their workflows can be started.
    """
    from ..web.guard import LOOPBACK, Token

    given = [*token, *os.environ.get(TOKEN, "").split()]
    tokens = [Token.parse(one) for one in given]
    if host not in LOOPBACK and not tokens:
        raise errors.Refused(
            f"--host {host} lets other machines reach the server, which needs a token",
            f"set {TOKEN} to a secret of at least 16 characters, or give --token",
        )
    if prefix and not prefix.startswith("/"):
        raise click.UsageError(f"--prefix begins with /, got {prefix!r}")
    hosts = [*names, *([] if host in LOOPBACK or host in ("0.0.0.0", "::") else [host])]  # noqa: S104 - compared only
    if host in ("0.0.0.0", "::") and not names:  # noqa: S104 - compared only
        raise errors.Refused(f"--host {host} needs --name HOST", "give the name that people type into their browsers")
    chosen = _workflows(targets, module, debug=settings.debug)
    options: dict[str, Any] = {"tokens": tokens, "hosts": hosts, "read_only": read_only}
    return asyncio.run(_serve(settings, chosen, options, host, port, prefix.rstrip("/")))


def _workflows(targets: tuple[str, ...], module: tuple[str, ...], *, debug: bool) -> list[Workflow[..., Any]] | None:
    """Return the workflows that can be started: none, or all that the files define and import."""
    from .target import is_workflow_file, load_module, load_workflow, split

    for target in targets:
        if is_workflow_file(target):
            load_workflow(target, modules=module, debug=debug)
        else:
            load_module(split(target)[0], debug=debug)
    return None if targets else []


async def _serve(  # noqa: PLR0917 - each is needed once
    settings: Settings,
    workflows: list[Workflow[..., Any]] | None,
    options: dict[str, Any],
    host: str,
    port: int,
    prefix: str,
) -> int:
    import uvicorn

    from ..web import app

    engine = settings.engine(create=False, worker=False, workflows=workflows)
    await engine.open()
    try:
        config = uvicorn.Config(
            app(engine, **options),
            host=host,
            port=port,
            root_path=prefix,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=3,
        )
        server = uvicorn.Server(config)
        listening = config.bind_socket()
        listening.listen(config.backlog)  # a reader of the line below may connect at once
        where = listening.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"{shown_url(engine.store)} is served at http://{shown}:{where}{prefix}/; stop it with Ctrl-C")
        await server.serve(sockets=[listening])
    finally:
        await engine.close()
    return errors.OK
