"""The command `mcp`: lets an assistant look at runs and, if allowed, steer them, by the Model Context Protocol."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .listening import guarded, known_workflows, listen, listening
from .settings import MODULE, Settings, command, shown_url

if TYPE_CHECKING:
    from ..workflows.definition import Workflow


@command("mcp")
@click.argument("targets", nargs=-1, metavar="[FILE.py|MODULE|FILE.yaml...]")
@MODULE
@click.option("--write", is_flag=True, help="Also approve, signal, retry, pause, resume and fork.")
@click.option("--destructive", is_flag=True, help="Also cancel, rewind, resolve and edit; includes --write.")
@click.option("--pages-url", default="", metavar="URL", help="Let people answer on these pages, and hand out links.")
@click.option("--http", "over_http", is_flag=True, help="Serve over HTTP at /mcp instead of standard input and output.")
@listening(port=8766)
def mcp(
    settings: Settings,
    *,
    targets: tuple[str, ...],
    module: tuple[str, ...],
    write: bool,
    destructive: bool,
    pages_url: str,
    over_http: bool,
    host: str,
    port: int,
    token: tuple[str, ...],
    names: tuple[str, ...],
) -> int:
    """Serve the runs of a store to an assistant. It needs the extra: pip install 'keepstep[mcp]'.

    An assistant starts the command itself, and speaks to it over standard input and output. Without --write it only
    reads. With --http, only this machine can reach it, unless --host is given, which needs a token; a token of the role
    read or act has fewer tools. With files or modules, the code of their workflows is checked, too.
    """
    if pages_url and not pages_url.startswith(("http://", "https://")):
        raise click.UsageError(f"--pages-url begins with http:// or https://, got {pages_url!r}")
    if not over_http and (token or names):
        raise click.UsageError("--token and --name are for --http")
    options: dict[str, Any] = {"write": write, "destructive": destructive, "pages_url": pages_url}
    with contextlib.redirect_stdout(sys.stderr):  # a module that prints would end the conversation with the client
        chosen = known_workflows(targets, module, debug=settings.debug)
    if not over_http:
        return asyncio.run(_over_stdio(settings, chosen, options))
    tokens, hosts = guarded(host, token, names)
    return asyncio.run(_over_http(settings, chosen, {**options, "tokens": tokens, "hosts": hosts}, host, port))


async def _over_stdio(settings: Settings, workflows: list[Workflow[..., Any]] | None, options: dict[str, Any]) -> int:
    from ..mcp import server

    async with settings.engine(worker=False, workflows=workflows) as engine:
        await server(engine, **options).run_stdio_async()
    return errors.OK


async def _over_http(
    settings: Settings, workflows: list[Workflow[..., Any]] | None, options: dict[str, Any], host: str, port: int
) -> int:
    from ..mcp import app

    async with settings.engine(worker=False, workflows=workflows) as engine:
        store = shown_url(engine.store)
        await listen(
            app(engine, **options),
            host,
            port,
            lambda address: click.echo(f"{store} is served to assistants at {address}/mcp; stop it with Ctrl-C"),
        )
    return errors.OK
