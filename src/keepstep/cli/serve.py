"""The command `serve`: pages and the HTTP API of a store, on this machine unless a host and a token are given."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from . import errors
from .listening import guarded, known_workflows, listen, listening
from .settings import MODULE, Settings, command, shown_url

if TYPE_CHECKING:
    from ..workflows.definition import Workflow


@command("serve")
@click.argument("targets", nargs=-1, metavar="[FILE.py|MODULE|FILE.yaml...]")
@MODULE
@listening(port=8765)
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
    """Serve pages and the HTTP API of a store. It needs the extra: pip install 'keepstep[web]'.

    Only this machine can reach it, unless --host is given, which needs a token. The roles are read, act and admin.
    With files or modules, their workflows can be started.
    """
    tokens, hosts = guarded(host, token, names)
    chosen = known_workflows(targets, module, debug=settings.debug)
    options: dict[str, Any] = {"tokens": tokens, "hosts": hosts, "read_only": read_only}
    return asyncio.run(_serve(settings, chosen, options, host, port, prefix.rstrip("/")))


async def _serve(  # noqa: PLR0917 - each is needed once
    settings: Settings,
    workflows: list[Workflow[..., Any]] | None,
    options: dict[str, Any],
    host: str,
    port: int,
    prefix: str,
) -> int:
    from ..web import app
    from ..web.prefix import Prefixed

    engine = settings.engine(create=False, worker=False, workflows=workflows)
    await engine.open()
    try:
        store = shown_url(engine.store)
        await listen(
            Prefixed(app(engine, **options), prefix),
            host,
            port,
            lambda address: click.echo(f"{store} is served at {address}{prefix}/; stop it with Ctrl-C"),
        )
    finally:
        await engine.close()
    return errors.OK
