"""The table of pages: each with its path, its parameters and the template that shows it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ...views.cut import clean, cleaned
from ..routes import Nothing, Role

if TYPE_CHECKING:
    from starlette.requests import Request

    from ...engine.engine import Engine
    from ...views.counts import Count
    from ..tokens import Caller


T = TypeVar("T")


@dataclass(slots=True)
class Look:
    """A request for a page: the engine, the caller, and the inputs of the page."""

    engine: Engine
    request: Request
    caller: Caller
    path: dict[str, str]
    query: Any
    read_only: bool
    #: Whether callers need tokens, so that a browser can sign out.
    is_guarded: bool
    #: Runs that wait for a person, for the badge beside the inbox; None if they were not counted.
    waiting: Count | None = None

    def may(self, role: str) -> bool:
        """Whether the caller may act in a role here."""
        return self.caller.role >= Role[role.upper()] and (not self.read_only or role == "read")

    def clean(self, data: Any) -> Any:
        """Return plain data as `redacted` does, in a thread that may take its time."""
        return clean(data, self.engine.redaction.redact)

    async def redacted(self, data: T) -> T:
        """Return plain data without secrets that a redaction pattern finds now, although they were stored before."""
        found: T = await cleaned(self.engine, data)
        return found


@dataclass(frozen=True, slots=True)
class Shown:
    """The template of a page and the data that it shows."""

    template: str
    data: dict[str, Any] = field(default_factory=dict)
    status: int = 200


@dataclass(frozen=True, slots=True)
class Moved:
    """Another page, which the browser opens instead; `path` is without the prefix."""

    path: str


Handler = Callable[[Look], Awaitable[Shown | Moved]]
H = TypeVar("H", bound=Handler)


@dataclass(frozen=True, slots=True)
class Page:
    """One row of the table."""

    path: str
    handler: Handler
    query: type[msgspec.Struct]


#: Every page, in the order in which paths are compared.
PAGES: list[Page] = []


def page(path: str, *, query: type[msgspec.Struct] = Nothing) -> Callable[[H], H]:
    """Add a page. Pages only read; every act goes through the API."""

    def add(handler: H) -> H:
        PAGES.append(Page(path, handler, query))
        return handler

    return add
