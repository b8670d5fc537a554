"""Pages as HTML: the templates, the words and signs that they share, and the routes that answer with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, urlencode
from zoneinfo import ZoneInfo

import jinja2
import msgspec
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount
from starlette.routing import Route as Way
from starlette.staticfiles import StaticFiles

from ...model import RunQuery
from ...ports import looking
from ...views import plain, wording
from ...views.counts import count
from ..problems import kind_of
from ..routes import Role, query_of
from ..session import signed_in, signed_out
from ..tokens import Caller
from . import (  # noqa: F401 - their pages are in the table
    agents,
    compare,
    home,
    inbox,
    queues,
    run,
    run_tabs,
    runs,
    schedules,
    travel,
    workers,
    workflows,
)
from .table import PAGES, Look, Moved, Page, Shown

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ..tokens import Token

log = logging.getLogger("keepstep")

_HERE = Path(__file__).parent.parent
#: Largest form of the login page in bytes.
MOST_FORM_BYTES = 10_000
#: The runs of the badge beside the inbox, and up to how many are counted.
NEEDS_PERSON, MOST_COUNTED = RunQuery(needs_person=True), 99
#: Characters of a stored text on a page, after which the rest is left out.
MOST_TEXT = 20_000


def page_routes(engine: Engine, tokens: Sequence[Token], *, read_only: bool) -> list[BaseRoute]:
    """Return the routes of all pages, of the login, and of what the pages load."""
    return [
        Mount("/static", _Static(directory=_HERE / "static")),
        Way("/login", _login(engine, tokens), methods=["GET", "POST"]),
        Way("/logout", _logout(tokens), methods=["POST"]),
        *(Way(one.path, _endpoint(engine, one, read_only=read_only, is_guarded=bool(tokens))) for one in PAGES),
    ]


class _Static(StaticFiles):
    """Files that a browser asks for again only if they have changed."""

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


def _endpoint(
    engine: Engine, page: Page, *, read_only: bool, is_guarded: bool
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        caller: Caller | None = request.scope.get("keepstep.caller")
        if caller is None:
            wanted = request.url.path + (f"?{request.url.query}" if request.url.query else "")
            return RedirectResponse(f"{root_of(request)}/login?{urlencode({'next': wanted})}", 303)
        look = Look(engine, request, caller, dict(request.path_params), None, read_only, is_guarded)
        try:
            given = [(name, value) for name, value in request.query_params.multi_items() if value]
            look.query = query_of(page.query, given)
            with looking():
                shown = await page.handler(look)
                look.waiting = await count(engine, NEEDS_PERSON, MOST_COUNTED)
            if isinstance(shown, Moved):
                return RedirectResponse(root_of(request) + shown.path, 303)
            return respond(look, shown)
        except Exception as error:  # noqa: BLE001 - every error becomes a page
            return error_page(look, error)

    return answer


def error_page(look: Look, error: Exception) -> Response:
    """Return the page for an error: what was wrong, and what can be done. It is plain text if its template fails."""
    status, _, detail = kind_of(error, look.engine.redaction.redact)
    try:
        return respond(look, Shown("error.html", {"status": status, "detail": detail}, status))
    except Exception:
        log.exception("the page for errors failed")
        return PlainTextResponse(f"{status}: {detail}\n", status)


def missing_page(engine: Engine, request: Request) -> Response | None:
    """Return the page for a path that leads nowhere, to a browser; None for other clients and for strangers."""
    caller: Caller | None = request.scope.get("keepstep.caller")
    if caller is None or request.method != "GET" or "text/html" not in request.headers.get("accept", ""):
        return None
    look = Look(engine, request, caller, {}, None, read_only=False, is_guarded=False)
    return respond(look, Shown("error.html", {"status": 404, "detail": f"no page {request.url.path[:200]!r}"}, 404))


def respond(look: Look, shown: Shown) -> Response:
    """Return a page as HTML."""
    data = {
        **shown.data,
        "look": look,
        "engine": look.engine,
        "may": look.may,
        "root": root_of(look.request),
        "now": datetime.now(UTC),
        "here": look.request.url.path.removeprefix(root_of(look.request)),
        "version": _version(),
    }
    text = _templates().get_template(shown.template).render(data)
    return Response(text, shown.status, media_type="text/html")


def root_of(request: Request) -> str:
    """Return the prefix under which the application is served, without a slash at its end."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _login(engine: Engine, tokens: Sequence[Token]) -> Callable[[Request], Awaitable[Response]]:
    async def login(request: Request) -> Response:
        root = root_of(request)
        look = Look(engine, request, Caller(Role.NONE, ""), {}, None, read_only=True, is_guarded=True)
        wanted = request.query_params.get("next", "")
        if request.method == "GET":
            return respond(look, Shown("login.html", {"next": wanted}))
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MOST_FORM_BYTES:
                return respond(look, Shown("login.html", {"next": "", "wrong": True}, 413))
        form = {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}
        wanted, secure = form.get("next", ""), request.url.scheme == "https"
        cookie = signed_in(tokens, form.get("token", ""), root, secure=secure)
        if cookie is None:
            return respond(look, Shown("login.html", {"next": wanted, "wrong": True}, 401))
        inside = wanted.startswith(f"{root}/") and not wanted.startswith("//") and "\\" not in wanted
        return RedirectResponse(wanted if inside else f"{root}/", 303, headers={"set-cookie": cookie})

    return login


def _logout(tokens: Sequence[Token]) -> Callable[[Request], Awaitable[Response]]:
    async def logout(request: Request) -> Response:
        root = root_of(request)
        cookie = signed_out(tokens, root, secure=request.url.scheme == "https")
        return RedirectResponse(f"{root}/login", 303, headers={"set-cookie": cookie})

    return logout


# -- templates ---------------------------------------------------------------------------------------------------------


@cache
def _templates() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "ago": wording.ago,
        "clock": lambda at: at.astimezone().strftime("%H:%M"),
        "iso": plain.iso,
        "duration": wording.duration,
        "step_name": wording.step_name,
        "segment": lambda text: quote(str(text), safe=""),
        "query": _query,
        "pretty": pretty,
        "tojson_line": line,
        "pair": lambda name, data: (name, data[name]),
        "attribute": _attribute,
        "shown": shown,
        "instant": lambda text: None if text is None else datetime.fromisoformat(text),
        "local": _local,
        "exact": _exact,
    }
    made.globals |= {"waits_in_words": wording.waits_in_words}
    return made


@cache
def _version() -> str:
    from ... import __version__  # noqa: PLC0415 - the package itself loads this module

    return __version__


def _query(parameters: dict[str, Any]) -> str:
    """Return parameters as the query of a URL, without those that are empty."""
    return urlencode({name: value for name, value in parameters.items() if value not in (None, "", [], ())}, doseq=True)


def pretty(value: Any) -> str:
    """Return a plain value as indented JSON, cut at `MOST_TEXT` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, indent=2)
    except (TypeError, ValueError):
        text = str(value)
    return shown(text, lines=True)


def line(value: Any) -> str:
    """Return a plain value as JSON on one line."""
    try:
        return shown(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return shown(value)


def shown(text: Any, lines: bool = False) -> str:
    """Return stored text for a page: without control characters and marks that turn the direction of what follows."""
    flat = str(text)
    if len(flat) > MOST_TEXT:
        flat = f"{flat[:MOST_TEXT]}… {len(flat) - MOST_TEXT:,} characters more"
    return flat if flat.isprintable() else wording.printable(flat, lines=lines)


def _local(at: datetime, zone: str) -> str:
    """Return an instant as people of a time zone write it."""
    return at.astimezone(ZoneInfo(zone)).strftime("%a %d %b %Y, %H:%M:%S")


def _exact(text: str) -> str:
    """Return an instant to the millisecond, in UTC."""
    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def _attribute(value: Any) -> Markup:
    """Return data as JSON for an attribute in double quotes."""
    return Markup.escape(msgspec.json.encode(value).decode())
