"""The wake-ups of a parked run, sorted by what they stand for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .signal import AT_SERVICE, BARRIER, BLOCKED, CHILD, GO, MESSAGES, REPLY, RESERVED, RESOLVE, ROOM, stop_at


@dataclass(frozen=True, slots=True)
class Wakes:
    """The wake-ups of a parked run, except times and the signals that control every run.

    `signals` are names of signals, `children` keys of calls that started a child, `in_doubt` and `not_ready` keys of
    steps, and `breakpoints` are as in `before pay#1`. `services` are names of services, each with the reason of the
    wait. `replies` are ids of questions, `messages` and `rooms` names of topics: for the next message, or until there
    is room for one. `barriers` are names of barriers.
    """

    signals: tuple[str, ...] = ()
    children: tuple[str, ...] = ()
    in_doubt: tuple[str, ...] = ()
    not_ready: tuple[str, ...] = ()
    breakpoints: tuple[str, ...] = ()
    services: tuple[tuple[str, str], ...] = ()
    replies: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    rooms: tuple[str, ...] = ()
    barriers: tuple[str, ...] = ()


def sorted_wakes(names: Iterable[str]) -> Wakes:
    """The wake-ups of a run, each kind in the order in which they are stored."""
    names = tuple(names)
    return Wakes(
        signals=tuple(name for name in names if not name.startswith(RESERVED)),
        children=_after(CHILD, names),
        in_doubt=_after(f"{RESOLVE}:", names),
        not_ready=_after(BLOCKED, names),
        breakpoints=tuple(stop_at(name) for name in names if name.startswith(GO)),
        services=tuple((name, why) for why, _, name in (one.partition(":") for one in _after(AT_SERVICE, names))),
        replies=_after(REPLY, names),
        messages=_after(MESSAGES, names),
        rooms=_after(ROOM, names),
        barriers=tuple(name.rpartition("barrier:")[2].partition("#")[0] for name in _after(BARRIER, names)),
    )


#: Prefixes of reserved wake-ups that only a person brings about: a verdict on a step in doubt, and a resume.
_BY_PERSON = (f"{RESOLVE}:", GO)


def asks_person(names: Iterable[str]) -> bool:
    """Whether one of the wake-ups is a user's signal, a verdict, or the resume at a breakpoint."""
    return any(not name.startswith(RESERVED) or name.startswith(_BY_PERSON) for name in names)


def _after(prefix: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
