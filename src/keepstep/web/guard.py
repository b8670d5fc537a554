"""Safety of the door: hosts, origins, tokens with roles, a read-only mode, and headers that browsers obey."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import DefinitionError
from .problems import problem
from .routes import Role, TooLarge

#: Names of this machine, for which a door may be open without a token.
LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]", "::1"})
#: Largest body of a request in bytes: the largest value of a step, and room for its envelope.
MOST_BYTES = 11_000_000
#: Fewest characters of a token, so that it cannot be guessed.
FEWEST_CHARACTERS = 16

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A secret that opens the door, the role that it gives, and the name under which the audit knows its holder."""

    secret: str
    role: Role = Role.ADMIN
    name: str = "token"

    def __post_init__(self) -> None:
        if len(self.secret) < FEWEST_CHARACTERS or not self.secret.isascii() or not self.secret.isprintable():
            raise DefinitionError(
                f"a token must have at least {FEWEST_CHARACTERS} printable ASCII characters; "
                'make one with: python -c "import secrets; print(secrets.token_urlsafe())"'
            )

    @classmethod
    def parse(cls, text: str) -> Token:
        """Return the token of a text: `SECRET`, `ROLE:SECRET` or `NAME:ROLE:SECRET`."""
        *before, secret = text.rsplit(":", 2)
        role = before[-1] if before else "admin"
        roles = [one.name.lower() for one in Role if one is not Role.NONE]
        if role.lower() not in roles:
            known = ", ".join(roles)
            raise DefinitionError(f"a token has the form NAME:ROLE:SECRET, and the roles are {known}; got {role!r}")
        name = before[0] if len(before) > 1 else "token"
        return cls(secret, Role[role.upper()], name)

    def __repr__(self) -> str:
        return f"Token(name={self.name!r}, role={self.role.name})"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: its role, and its name for the audit."""

    role: Role
    name: str


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
        writes = method not in ("GET", "HEAD", "OPTIONS")
        if writes and not _is_same_origin(headers, host):
            return problem(403, "cross-site", "a page of another site may not change anything here")
        scope["keepstep.caller"] = self._caller(headers)
        if writes and self.read_only:
            return problem(403, "read-only", "this server is read-only")
        return None

    def _caller(self, headers: Headers) -> Caller | None:
        if not self.tokens:
            return Caller(Role.ADMIN, self.anonymous)
        given = _given_token(headers)
        if given is None:
            return None
        found = None
        for token in self.tokens:  # all are compared, so that the time tells nothing
            if hmac.compare_digest(digest(token.secret), digest(given)):
                found = Caller(token.role, token.name)
        return found


def digest(secret: str) -> bytes:
    """Return a digest of a secret, for a comparison that takes equally long for all."""
    return hashlib.sha256(secret.encode()).digest()


def _given_token(headers: Mapping[str, str]) -> str | None:
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    return credentials.strip() if scheme.lower() == "bearer" else None


def _name_of(host: str) -> str:
    """Return a host without its port, in lower case."""
    name = host.lower()
    if name.startswith("["):
        return name.partition("]")[0] + "]"
    return name.rpartition(":")[0] if name.count(":") == 1 else name


def _is_same_origin(headers: Mapping[str, str], host: str) -> bool:
    """Whether a change comes from a page of this server, or from a program that is not a browser."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc.lower() == host.lower()


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("cache-control", "no-store")
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
