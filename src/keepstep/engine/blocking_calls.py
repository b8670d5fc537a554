"""Turns async methods into blocking ones that keep their names, parameters, types and docstrings."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from ..errors import DefinitionError

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")


class Blocking(Generic[A]):
    """Wraps an object of the async API, and runs its coroutines on their loop."""

    _target: A

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its outcome."""
        raise NotImplementedError


class BlockingPart(Blocking[A]):
    """An object that belongs to a blocking engine and runs its coroutines there."""

    def __init__(self, engine: Blocking[Any], target: A) -> None:
        self._engine = engine
        self._target = target

    def _do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._engine._do(coroutine)  # noqa: SLF001 - its own kind


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Blocking[A], P], T]:
    """Return a method that calls a coroutine method of the async object and waits for its outcome."""

    @wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._do(method(self._target, *args, **kwargs))

    return call


def iterating(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[Blocking[A], P], Iterator[T]]:
    """Return a method that goes through an async iterator of the async object, and waits for each of its values."""

    @wraps(method)
    def call(self: Blocking[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        values: Any = method(self._target, *args, **kwargs)
        try:
            while (value := self._do(_next(values))) is not _NO_MORE:
                yield value
        finally:
            with contextlib.suppress(DefinitionError):  # the engine may be closed
                self._do(values.aclose())

    shown = signature(method).replace(return_annotation=Iterator)
    vars(call)["__signature__"] = shown  # for `help`, which would show the signature of `method`
    return call


_NO_MORE: Any = object()


async def _next(values: AsyncIterator[T]) -> T:
    return await anext(values, _NO_MORE)
