"""Observers: they receive events after these are durable, and can never affect a run."""

from .log import LogObserver
from .named import ObserverSpec, resolve
from .several import FunctionObserver, Observers

__all__ = ["FunctionObserver", "LogObserver", "ObserverSpec", "Observers", "resolve"]
