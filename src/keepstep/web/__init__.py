"""The door for browsers and HTTP clients: an ASGI application over an open engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..engine.engine import Engine


def app(engine: Engine, **options: Any) -> Starlette:
    """Return an ASGI application for an engine, to serve or to mount under any prefix.

    The options are those of `keepstep.web.application.build`.
    """
    from ..errors import DefinitionError  # noqa: PLC0415 - loaded when the door is opened

    try:
        from .application import build  # noqa: PLC0415 - the extra is only needed here
    except ModuleNotFoundError as error:
        raise DefinitionError(f"{error.name} is not installed; install it with pip install 'keepstep[web]'") from error
    return build(engine, **options)
