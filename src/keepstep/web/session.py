"""The cookie of a browser: proof that it has shown a token, without the token itself."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from http.cookies import CookieError, SimpleCookie

from .tokens import Caller, Token, matching

#: Seconds for which a browser stays signed in: a working day.
SIGNED_IN_SECONDS = 12 * 3600


def cookie_name(tokens: Sequence[Token]) -> str:
    """Return the name of the cookie. It differs between servers, because a browser shares cookies between ports."""
    digest = hashlib.sha256("\n".join(sorted(_key(one) for one in tokens)).encode()).hexdigest()
    return f"keepstep-{digest[:8]}"


def signed_in(tokens: Sequence[Token], secret: str, path: str, *, secure: bool) -> str | None:
    """Return the `Set-Cookie` for a secret; None if no token has it."""
    token = matching(tokens, secret)
    if token is None:
        return None
    until = str(int(time.time()) + SIGNED_IN_SECONDS)
    return _cookie(cookie_name(tokens), f"{until}.{_seal(token, until)}", path, SIGNED_IN_SECONDS, secure=secure)


def signed_out(tokens: Sequence[Token], path: str, *, secure: bool) -> str:
    """Return the `Set-Cookie` that removes the cookie."""
    return _cookie(cookie_name(tokens), "", path, 0, secure=secure)


def caller_of(tokens: Sequence[Token], headers: Mapping[str, str]) -> Caller | None:
    """Return the caller that a cookie proves."""
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(cookie_name(tokens))
    except CookieError:
        return None
    until, _, seal = morsel.value.partition(".") if morsel is not None else ("", "", "")
    if not until.isascii() or not until.isdecimal() or len(until) > 12 or int(until) < time.time():
        return None
    found = None
    for token in tokens:  # all are compared, so that the time tells nothing
        if hmac.compare_digest(_seal(token, until), seal.encode("ascii", "replace").decode()):
            found = Caller(token.role, token.name)
    return found


def _cookie(name: str, value: str, path: str, seconds: int, *, secure: bool) -> str:
    parts = [f"{name}={value}", f"Path={path or '/'}", f"Max-Age={seconds}", "HttpOnly", "SameSite=Strict"]
    return "; ".join([*parts, *(["Secure"] if secure else [])])


def _key(token: Token) -> str:
    return hashlib.sha256(f"keepstep cookie\0{token.role}\0{token.name}\0{token.secret}".encode()).hexdigest()


def _seal(token: Token, until: str) -> str:
    return hmac.new(_key(token).encode(), until.encode(), hashlib.sha256).hexdigest()
