"""Observers by name, and what else may be written where observers are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from ..errors import DefinitionError
from ..model import Event
from ..ports import Observer
from .log import LogObserver
from .several import FunctionObserver, Observers

#: Packages add observers by name as entry points of this group, each a callable that makes one.
ENTRY_POINTS = "keepstep.observers"

Factory = Callable[[], Observer]
ObserverSpec = str | Observer | Callable[[Event], Any] | Iterable[Any] | None

_SHELF: Mapping[str, Factory] = {"log": LogObserver, "none": Observers}


def resolve(spec: ObserverSpec, names: Mapping[str, Factory] | None = None) -> Observers:
    """The observers that are meant: by a name, an observer, a function, several of these in a list, or None for none.

    A name is one of the shelf (`log`, `none`), one of `names`, or one that an installed package has registered as an
    entry point. An unknown name is an error that lists the known ones.
    """
    return Observers(_members(spec, names or {}))


def _members(spec: ObserverSpec, names: Mapping[str, Factory]) -> Iterable[Observer]:
    if spec is None:
        return
    if isinstance(spec, str):
        yield from _flat(_named(spec, names))
    elif isinstance(spec, Observer):
        yield from _flat(spec)
    elif callable(spec):
        yield FunctionObserver(spec)
    elif isinstance(spec, Iterable):
        for one in spec:
            yield from _members(one, names)
    else:
        raise DefinitionError(f"an observer must be a name, an object with observe(event) or a function, not {spec!r}")


def _flat(observer: Observer) -> Iterable[Observer]:
    return observer if isinstance(observer, Observers) else (observer,)


def _named(name: str, names: Mapping[str, Factory]) -> Observer:
    factory = names.get(name) or _SHELF.get(name) or _installed().get(name)
    if factory is None:
        known = sorted({*names, *_SHELF, *_installed()})
        raise DefinitionError(f"there is no observer named {name!r}; there are {', '.join(known)}")
    return factory()


def _installed() -> dict[str, Factory]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import, and rarely needed

    def load(point: Any) -> Factory:
        return lambda: cast("Observer", point.load()())

    return {point.name: load(point) for point in entry_points(group=ENTRY_POINTS)}
