"""Recovery handlers that a program registers by name, and the information that a handler decides on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..checks import check_name
from ..errors import DefinitionError, DuplicateName, HandlerMissing
from ..model import Status
from ..policies.recovery import HANDLERS, check_handler

if TYPE_CHECKING:
    from .definition import Workflow

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RecoveryInfo:
    """The position of a run, and what a recovery of it would do.

    `recoverable` tells whether the run can be recovered now, and `why` gives the reason. `problems` lists everything
    that the phases would find. `last_success` and `failed` are keys of steps, and `error` is the message of the
    failure. `next` are the calls that a worker would begin, and `handler` is the handler that would be asked; it is
    empty if the handler of the workflow is unknown, because its code is not loaded. `again` are the calls whose bodies
    would run although they ran before, or may have. `skips` is the step that "skip step" would skip, and `value` its
    result. `next`, `again` and `skips` are complete only if `checked`, which means that the code is loaded.
    `taken_from` is the dead worker.
    """

    run: str
    workflow: str
    status: Status
    recoverable: bool
    why: str
    handler: str = HANDLERS[0]
    problems: tuple[str, ...] = ()
    last_success: str = ""
    failed: str = ""
    error: str = ""
    next: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    checked: bool = False
    taken_from: str | None = None
    seq: int = 0
    generation: int = 0
    recoveries: int = 0
    skips: str = ""
    value: Any = None


#: The recovery handlers of this process, by name.
_REGISTERED: dict[str, Callable[..., Any]] = {}


@overload
def recovery_handler(handler: F, /) -> F: ...
@overload
def recovery_handler(name: str, /) -> Callable[[F], F]: ...
def recovery_handler(handler: Any, /) -> Any:
    """Register a function of a `ks.RecoveryInfo` as a recovery handler, by its own name or by a given one."""
    if isinstance(handler, str):
        return lambda function: _register(function, handler)
    return _register(handler, getattr(handler, "__name__", ""))


def _register(function: F, name: str) -> F:
    if not callable(function):
        raise DefinitionError(f"a recovery handler must be a function, not {type(function).__name__}")
    check_name(name, "recovery handler")
    if name in HANDLERS:
        raise DuplicateName(f"recovery handler {name!r} is built in; give yours another name")
    check_handler(function, name)
    other = _REGISTERED.get(name)
    if other is not None and _place(other) != _place(function):
        raise DuplicateName(f"two recovery handlers are named {name!r}; give one of them another name")
    _REGISTERED[name] = function
    return function


def _place(function: Callable[..., Any]) -> tuple[str, str]:
    """Return where a function is defined: the same one may be registered again, for example after a reload."""
    plain = inspect.unwrap(function)
    return getattr(plain, "__module__", ""), getattr(plain, "__qualname__", repr(plain))


def handler_named(name: str) -> Callable[..., Any]:
    """Return the registered handler of this name. Raise `HandlerMissing`, which tells how to register one."""
    try:
        return _REGISTERED[name]
    except KeyError:
        raise HandlerMissing(f"no recovery handler is named {name!r} in this process; {how_to_name(name)}") from None


def is_known(handler: str | Callable[..., Any]) -> bool:
    """Whether a handler is built in, registered in this process, or a function itself."""
    return not isinstance(handler, str) or handler in HANDLERS or handler in _REGISTERED


def how_to_name(name: str) -> str:
    """Return what to do about an unknown name of a handler."""
    from difflib import get_close_matches  # noqa: PLC0415 - only for an unknown name

    known = [*HANDLERS, *sorted(_REGISTERED)]
    near = get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? Otherwise " if near else ""
    others = "" if near else f", or use one of {', '.join(known)}"
    return f"{meant}register a function with @ks.recovery_handler({name!r}){others}"


def unknown_handlers(workflows: Iterable[Workflow[..., Any]]) -> Iterator[str]:
    """Yield a warning for each workflow whose recovery handler has a name that is unknown in this process."""
    for workflow in workflows:
        if workflow.recovery is not None and not is_known(workflow.recovery.handler):
            name = workflow.recovery.name
            yield (
                f"workflow {workflow.name!r}: no recovery handler is named {name!r} in this process, so a run whose "
                f"worker dies would be set aside; {how_to_name(name)}"
            )
