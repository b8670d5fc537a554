"""The request of an `http` step, sent with the standard library on the step's thread, within limits.

Only http and https are supported. A redirect is followed to the same host and port only, and never from https to http.
Secrets are looked up by name when the request is sent. Every request that may change something carries an
Idempotency-Key, which stays the same over all attempts and recoveries of the step.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib import request as urllib_request
from urllib.error import HTTPError
from urllib.parse import quote, urlsplit

from ...errors import DefinitionError, KeepstepError, Permanent
from ...ports import CURRENT
from ...values import Secret

#: Default limits of a request's time in seconds and of its answer's size in bytes.
DEFAULT_SECONDS = 30.0
MAX_BYTES = 1_000_000
#: Headers of an answer that are stored. Others, such as cookies, may hold secrets.
KEPT_HEADERS = ("content-type", "etag", "last-modified", "link", "location", "retry-after")
#: Headers that are set by the request itself.
RESERVED_HEADERS = frozenset({"connection", "content-length", "host", "te", "transfer-encoding", "upgrade"})

#: Maximum number of characters of an unexpected answer in the error message.
_EXCERPT = 200
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


class UnexpectedStatus(KeepstepError):
    """A service answered with an unexpected status, which determines the error class."""

    def __init__(self, message: str, status: int, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


@dataclass(frozen=True, slots=True)
class Request:
    """A request as described in a file: where the values of keys go, and which statuses are a success."""

    url: str
    method: str = "GET"
    headers: tuple[tuple[str, str | tuple[str, str]], ...] = ()  # a text, or a prefix and the name of a secret
    body: tuple[tuple[str, str], ...] | None = None  # names, and the keys of their values
    expect: frozenset[int] | None = None
    redirects: bool = True
    max_bytes: int = MAX_BYTES
    seconds: float = DEFAULT_SECONDS
    where: str = field(default="", compare=False)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys whose values the request needs."""
        return tuple(dict.fromkeys([*_PLACEHOLDER.findall(self.url), *(key for _, key in self.body or ())]))

    def send(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Send the request. Return its status, some of its headers, and its body, parsed if it is declared as JSON."""
        ends = time.monotonic() + self.seconds
        opener = urllib_request.OpenerDirector()
        for handler in (
            urllib_request.ProxyHandler(),
            urllib_request.HTTPHandler(),
            urllib_request.HTTPSHandler(),
            urllib_request.HTTPDefaultErrorHandler(),
            urllib_request.HTTPErrorProcessor(),
            _SameHost(follow=self.redirects),
        ):
            opener.add_handler(handler)
        try:
            answer = opener.open(self._prepared(values), timeout=self.seconds)
        except HTTPError as error:
            answer = error
        with answer:
            return self._judged(answer, _read(answer, self.max_bytes, ends, self.url))

    # -- request ---------------------------------------------------------------------------------------------------

    def _prepared(self, values: Mapping[str, Any]) -> urllib_request.Request:
        url = _PLACEHOLDER.sub(lambda found: _quoted(found[1], self._value(values, found[1])), self.url)
        headers = {"User-Agent": "keepstep", "Accept": "application/json, */*"}
        data = None
        if self.body is not None:
            data = _encoded({name: self._value(values, key) for name, key in self.body})
            headers["Content-Type"] = "application/json"
        if self.method not in ("GET", "HEAD"):
            headers |= _idempotency_key()
        headers |= {name: _header(value) for name, value in self.headers}
        return urllib_request.Request(url, data, headers, method=self.method)  # noqa: S310 - the schema allows http(s) only

    def _value(self, values: Mapping[str, Any], key: str) -> Any:
        if key not in values:
            raise Permanent(f"{self.where}: no value for {key!r} to send; known keys are {', '.join(sorted(values))}")
        return values[key]

    # -- answer ----------------------------------------------------------------------------------------------------

    def _judged(self, answer: Any, body: bytes) -> dict[str, Any]:
        status = int(answer.status)
        headers = {name: str(answer.headers[name]) for name in KEPT_HEADERS if name in answer.headers}
        expected = 200 <= status <= 299 if self.expect is None else status in self.expect
        if not expected:
            excerpt = _text(body, answer)[:_EXCERPT]
            what = f"{self.method} {bare_url(self.url)} answered {status}" + (f": {excerpt}" if excerpt.strip() else "")
            if status < 400:
                raise Permanent(f"{what}; the step does not expect it")
            raise UnexpectedStatus(what, status, headers)
        return {"status": status, "headers": headers, "body": _content(body, answer)}


class _SameHost(urllib_request.HTTPRedirectHandler):
    """Follows redirects to the host of the request only."""

    def __init__(self, *, follow: bool) -> None:
        self.follow = follow

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: PLR0917 - as the handler is called
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if not self.follow:
            return None
        if (old.scheme, old.netloc) != (new.scheme, new.netloc):
            raise Permanent(
                f"{bare_url(req.full_url)} redirects to {new.scheme}://{new.hostname}, which is not followed"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _quoted(key: str, value: Any) -> str:
    if isinstance(value, bool):
        value = str(value).lower()
    if not isinstance(value, str | int | float):
        raise Permanent(f"{{{key}}} in the url is a {type(value).__name__}; only texts and numbers can be put there")
    text = str(value)
    if text in ("", ".", ".."):
        raise Permanent(f"{{{key}}} in the url is {text!r}, which would lead somewhere else")
    return quote(text, safe="")


def _encoded(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_as_json).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Permanent(f"the body cannot be written as JSON: {error}") from None


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset) or hasattr(value, "__iter__"):
        return list(value)
    raise TypeError(f"a {type(value).__name__} is not a JSON value")


def _header(value: str | tuple[str, str]) -> str:
    if isinstance(value, str):
        return value
    prefix, name = value
    secret = Secret(name).reveal()
    if not secret.isascii() or not secret.isprintable():
        raise DefinitionError(f"the secret {name!r} cannot be sent as a header: it holds more than printable ASCII")
    return prefix + secret


def _idempotency_key() -> dict[str, str]:
    scope = CURRENT.get()
    return {} if scope is None else {"Idempotency-Key": scope.idempotency_key()}


def _read(answer: Any, most: int, ends: float, url: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    while chunk := answer.read1(65_536):
        parts.append(chunk)
        size += len(chunk)
        if size > most:
            raise Permanent(
                f"the answer of {bare_url(url)} is larger than {most:,} bytes; raise max_bytes: if it may be"
            )
        if time.monotonic() > ends:
            raise TimeoutError(f"the answer of {bare_url(url)} takes too long")
    return b"".join(parts)


def _content(body: bytes, answer: Any) -> Any:
    if not body:
        return None
    kind = answer.headers.get_content_type()
    if kind == "application/json" or kind.endswith("+json"):
        try:
            return json.loads(body, parse_constant=_refused)
        except (ValueError, RecursionError):
            pass  # declared as JSON, but it is not: kept as text
    if kind.startswith("text/") or kind.endswith(("json", "xml", "x-www-form-urlencoded")):
        return _text(body, answer)
    return body


def _text(body: bytes, answer: Any) -> str:
    try:
        return body.decode(answer.headers.get_content_charset() or "utf-8", "replace")
    except LookupError:
        return body.decode("utf-8", "replace")


def _refused(name: str) -> Any:
    raise ValueError(name)


def bare_url(url: str) -> str:
    """Return a URL without its parts that may be secret."""
    return url.partition("?")[0].partition("#")[0]
