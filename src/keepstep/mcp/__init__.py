"""The door for assistants: a server of the Model Context Protocol over an open engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import DefinitionError

if TYPE_CHECKING:
    from mcp.server import MCPServer
    from starlette.types import ASGIApp

    from ..engine.engine import Engine


def server(engine: Engine, **options: Any) -> MCPServer[Any]:
    """Return a server for one client, such as one that speaks over standard input and output.

    The options are those of `keepstep.mcp.building.build`.
    """
    try:
        from .building import build  # noqa: PLC0415 - the extra is only needed here
    except ModuleNotFoundError as error:
        raise missing(error) from error
    return build(engine, **options)


def app(engine: Engine, **options: Any) -> ASGIApp:
    """Return an ASGI application that answers at `/mcp`. The options are those of `keepstep.mcp.http.build`."""
    try:
        from .http import build  # noqa: PLC0415 - the extra is only needed here
    except ModuleNotFoundError as error:
        raise missing(error) from error
    return build(engine, **options)


def missing(error: ModuleNotFoundError) -> DefinitionError:
    """Return the error that names the extra."""
    return DefinitionError(f"{error.name} is not installed; install it with pip install 'keepstep[mcp]'")
