"""Resolution of observer names and other forms of `observers=`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from ..errors import DefinitionError
from ..model import Event
from ..ports import Observer
from .log import LogObserver
from .prometheus import METRICS
from .several import FunctionObserver, Observers

#: Entry point group for observers of installed packages; each entry point is a callable that returns an observer.
ENTRY_POINTS = "keepstep.observers"

Factory = Callable[[], Observer]
ObserverSpec = str | Observer | Callable[[Event], Any] | Iterable[Any] | None


def _opentelemetry() -> Observer:
    try:
        from .opentelemetry.observer import shared  # noqa: PLC0415 - an optional dependency
    except ImportError as missing:
        raise DefinitionError(
            f"the observer 'opentelemetry' needs a package that is not installed ({missing}); "
            "install it with: pip install 'keepstep[otel]'"
        ) from missing
    return shared()


_BUILT_IN: Mapping[str, Factory] = {
    "log": LogObserver,
    "none": Observers,
    "prometheus": lambda: METRICS,
    "opentelemetry": _opentelemetry,
}


def resolve(spec: ObserverSpec, names: Mapping[str, Factory] | None = None) -> Observers:
    """Return the observers for a name, an observer, a function, a list of these, or None for none.

    A name is built in (`log`, `none`, `prometheus`, `opentelemetry`), one of `names`, or an entry point of an installed
    package. The error for an unknown name lists the known ones.
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
    factory = names.get(name) or _BUILT_IN.get(name) or _installed().get(name)
    if factory is None:
        known = sorted({*names, *_BUILT_IN, *_installed()})
        raise DefinitionError(f"unknown observer {name!r}; known observers are {', '.join(known)}")
    return factory()


def _installed() -> dict[str, Factory]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import, and rarely needed

    def load(point: Any) -> Factory:
        return lambda: cast("Observer", point.load()())

    return {point.name: load(point) for point in entry_points(group=ENTRY_POINTS)}
