"""The table of the API: each route with its inputs, its answer and the role that it needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from ..errors import KeepstepError
from ..views.cut import clean, cut_fields
from ..views.seen import check_seen, turn

if TYPE_CHECKING:
    from ..engine.engine import Engine
    from ..engine.handle import RunHandle


class Role(IntEnum):
    """The rights of a caller; a higher role includes all lower ones."""

    NONE = 0
    READ = 1
    ACT = 2
    ADMIN = 3


class NotJson(KeepstepError):
    """The body of a request is not JSON, or a parameter does not fit its description."""


class NotAllowed(KeepstepError):
    """The caller lacks the role for what was asked for."""


class TooLarge(KeepstepError):
    """The body of a request is larger than the largest value."""


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


@dataclass(frozen=True, slots=True)
class Content:
    """An answer that is not JSON for a program: a file to save, or a picture."""

    data: bytes
    media_type: str
    #: The name under which a browser saves it; empty for what it shows.
    name: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers that keep a browser from showing a stored value as a page."""
        return {"content-disposition": f'attachment; filename="{self.name}"'} if self.name else {}


@dataclass(slots=True)
class Ask:
    """A request to the API: the engine, the caller, and the inputs of the route."""

    engine: Engine
    actor: str
    role: Role
    path: dict[str, str]
    query: Any
    body: Any

    async def handle(self) -> RunHandle[Any]:
        """Return a handle on the run that the path names, which acts in the name of the caller.

        If the body tells the number of the record that the caller has seen last, a newer one is a conflict. So is a
        newer signal, if the body tells how many the caller has seen.
        """
        handle = (await self.engine.get(self.path["run"])).by(self.actor)
        await check_seen(handle, getattr(self.body, "seq", None), getattr(self.body, "signals", None))
        return handle

    async def answered(self, handler: Handler) -> Any:
        """Return what the handler of the route answers. Acts on the same run take turns.

        A store that was moved or removed takes no acts, although the open file could still be written.
        """
        if self.body is not None:
            await self.engine.call(self.engine.store.list_workers)
        if "run" not in self.path or not hasattr(self.body, "seq"):
            return await handler(self)
        async with turn(self.engine, self.path["run"]):
            return await handler(self)

    async def shown(self, data: Any, *cut: str) -> Any:
        """Return an answer for people: without secrets, and with the named fields cut to a size."""
        return await self.engine.call(_shown, data, cut, self.engine.redaction.redact)


def _shown(data: Any, names: tuple[str, ...], redact: Callable[[str], str]) -> Any:
    found = clean(msgspec.to_builtins(data), redact)
    return cut_fields(found, names) if names else found


Handler = Callable[[Ask], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table. `answer` is the type of the JSON that it answers with."""

    method: str
    path: str
    role: Role
    handler: Handler
    query: type[msgspec.Struct]
    body: type[msgspec.Struct] | None
    answer: Any
    status: int
    #: The media type of the answer; that of JSON has a schema, too.
    media_type: str = "application/json"

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return (self.handler.__doc__ or "").strip().partition("\n")[0]

    @property
    def name(self) -> str:
        """The name of the operation."""
        return self.handler.__name__


#: Every route of the API, in the order of its description.
ROUTES: list[Route] = []

H = TypeVar("H", bound=Handler)


def get(
    path: str,
    answer: Any,
    *,
    query: type[msgspec.Struct] = Nothing,
    role: Role = Role.READ,
    media_type: str = "application/json",
) -> Callable[[H], H]:
    """Add a route that only reads."""
    return _added(lambda handler: Route("GET", path, role, handler, query, None, answer, 200, media_type))


def post(
    path: str, answer: Any, *, body: type[msgspec.Struct], role: Role = Role.ACT, status: int = 200
) -> Callable[[H], H]:
    """Add a route that changes something."""
    return _added(lambda handler: Route("POST", path, role, handler, Nothing, body, answer, status))


def _added(row: Callable[[Handler], Route]) -> Callable[[H], H]:
    def add(handler: H) -> H:
        ROUTES.append(row(handler))
        return handler

    return add


def query_of(kind: type[msgspec.Struct], pairs: list[tuple[str, str]]) -> Any:
    """Return the parameters of a query; refuse unknown ones, and those that do not fit."""
    given: dict[str, Any] = {}
    hints = get_type_hints(kind)
    for name, value in pairs:
        if name not in hints:
            known = ", ".join(sorted(hints)) or "none"
            raise NotJson(f"unknown parameter {name!r}; the parameters are {known}")
        if _is_list(hints[name]):
            given.setdefault(name, []).append(value)
        elif name in given:
            raise NotJson(f"parameter {name!r} is given twice")
        else:
            given[name] = value
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise NotJson(f"a parameter does not fit: {error}") from None


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is list or any(get_origin(one) is list for one in get_args(hint))


#: Digits of the largest number of a record. Python refuses to read a number of thousands of digits.
_MOST_DIGITS = 16


def is_number(text: str) -> bool:
    """Whether a text is the number of a record, or 0."""
    return len(text) <= _MOST_DIGITS and text.isascii() and text.isdecimal() and int(text) < 2**53


def body_of(kind: type[msgspec.Struct], data: bytes) -> Any:
    """Return the body of a request; refuse what is not JSON or does not fit."""
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(f"the body does not fit: {error}") from None
