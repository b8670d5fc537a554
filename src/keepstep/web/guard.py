"""Safety of the door: hosts, origins, tokens with roles, a read-only mode, and headers that browsers obey."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .problems import problem
from .routes import Role, TooLarge
from .session import caller_of
from .tokens import Caller, Token, matching

#: Names of this machine, for which a door may be open without a token.
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
#: Largest body of a request in bytes: the largest value of a step, and room for its envelope.
MOST_BYTES = 11_000_000
#: Methods that change nothing.
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
#: Paths that sign a browser in and out, which changes no run.
_SESSION = frozenset({"/login", "/logout"})

_HOST = re.compile(r"(?P<name>\[[^\]]*\]|[^:\[\]]*)(?::[0-9]*)?")

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """An ASGI middleware that refuses requests which must not reach the application.

    Without tokens everybody who reaches the door is an administrator, so only names of this machine are served.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Iterable[Token] = (),
        hosts: Iterable[str] = (),
        read_only: bool = False,
        anonymous: str = "web",
    ) -> None:
        self.app = app
        self.tokens = tuple(tokens)
        self.hosts = LOOPBACK | {host.lower() for host in hosts}
        self.read_only = read_only
        self.anonymous = anonymous

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        await self.app(scope, _limited(receive), _with_headers(send))

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers, method = Headers(scope=scope), scope["method"]
        host = headers.get("host", "")
        if _name_of(host) not in self.hosts:
            return problem(421, "misdirected", f"this server does not answer for the host {host[:100]!r}")
        writes = method not in _READS
        if writes and not _is_same_origin(headers, host):
            return problem(403, "cross-site", "a page of another site may not change anything here")
        scope["keepstep.caller"] = self._caller(headers, method)
        if writes and self.read_only and _path_of(scope) not in _SESSION:
            return problem(403, "read-only", "this server is read-only")
        return None

    def _caller(self, headers: Headers, method: str) -> Caller | None:
        if not self.tokens:
            return Caller(Role.ADMIN, self.anonymous)
        given = _given_token(headers)
        if given is None:
            return caller_of(self.tokens, headers) if _is_from_browser(headers, method) else None
        token = matching(self.tokens, given)
        return None if token is None else Caller(token.role, token.name)


def _given_token(headers: Mapping[str, str]) -> str | None:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _name_of(host: str) -> str:
    """Return a host without its port, in lower case; the whole text if it is not a host and a port."""
    found = _HOST.fullmatch(host.lower())
    return host.lower() if found is None else found["name"]


def _path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _is_from_browser(headers: Mapping[str, str], method: str) -> bool:
    """Whether a cookie may count: a change must tell where it comes from, as every browser of today does."""
    return method in _READS or "sec-fetch-site" in headers or "origin" in headers


def _is_same_origin(headers: Mapping[str, str], host: str) -> bool:
    """Whether a change comes from a page of this server, or from a program that is not a browser."""
    site = headers.get("sec-fetch-site", "none")
    if site != "none":
        return site == "same-origin"
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # not an address
        return False


def protect(headers: MutableHeaders) -> None:
    """Add the headers that browsers obey to those of an answer, if it does not have its own."""
    for name, value in _HEADERS.items():
        headers.setdefault(name, value)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            protect(MutableHeaders(scope=message))
        await send(message)

    return sending


def _limited(receive: Receive) -> Receive:
    """Return a `receive` that refuses a body which grows beyond the limit, whatever its length was said to be."""
    received = 0

    async def receiving() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > MOST_BYTES:
            raise TooLarge(f"a body has at most {MOST_BYTES:,} bytes")
        return message

    return receiving
