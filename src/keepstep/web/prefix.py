"""A prefix of all paths, for a server behind a proxy that takes it away, and for one that is reached with it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Prefixed:
    """An ASGI application that answers below a prefix, whether or not a proxy has taken it out of the path."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.prefix and scope["type"] in ("http", "websocket"):
            path = scope["path"]
            below = path if path == self.prefix or path.startswith(f"{self.prefix}/") else self.prefix + path
            scope = {**scope, "root_path": self.prefix, "path": below}
        await self.app(scope, receive, send)
