"""A prefix of all paths, for a server behind a proxy that takes it away, and for one that is reached with it."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import DefinitionError

_PREFIX = re.compile(r"(/[\w~-][\w.~-]*)*", re.ASCII)


class Prefixed:
    """An ASGI application that answers below a prefix, whether or not a proxy has taken it out of the path."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        if not _PREFIX.fullmatch(prefix):
            raise DefinitionError(f"a prefix has the form /NAME or /NAME/NAME, got {prefix[:100]!r}")
        own = {route.path.partition("/")[2].partition("/")[0] for route in getattr(app, "routes", ())}
        if prefix and prefix.split("/")[1] in own:  # a path that a proxy has shortened could mean both
            raise DefinitionError(
                f"the prefix {prefix} is the path of a page; choose one that begins with another name"
            )
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.prefix and scope["type"] in ("http", "websocket"):
            path = scope["path"]
            below = path if path == self.prefix or path.startswith(f"{self.prefix}/") else self.prefix + path
            scope = {**scope, "root_path": self.prefix, "path": below}
        await self.app(scope, receive, send)
