"""The result of calling a step: a coroutine that code awaits, or asks for its result in blocking code."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Call(Coroutine[Any, Any, T_co]):
    """The result of calling a step: await it in an async workflow, or call `.result()` in a plain one.

    The step starts at the first await. A second await returns the same outcome.
    """

    __slots__ = ("_iterators",)

    #: The reason for which a codec refuses a call as a value.
    not_a_value = "is a call that has not run; write `await` before it, or call its .result() in plain def code"

    def __await__(self) -> Generator[Any, Any, T_co]:
        raise NotImplementedError

    def result(self) -> T_co:
        """Return the outcome, in blocking code."""
        raise NotImplementedError

    def start(self) -> Call[T_co]:
        """Start now, in blocking code; `result()` waits for the outcome."""
        raise NotImplementedError

    # asyncio uses these three methods to drive a call that was wrapped in a task.

    def send(self, value: Any) -> Any:
        iterator = self._begin()
        return iterator.send(value)

    def throw(self, *error: Any) -> Any:
        iterator = self._begin()
        return iterator.throw(error[0] if len(error) == 1 else error[1] or error[0])

    def close(self) -> None:
        for iterator in getattr(self, "_iterators", {}).values():
            iterator.close()

    def _begin(self) -> Generator[Any, Any, T_co]:
        """Return the await of the current task: several tasks may be given the same call."""
        try:
            iterators = self._iterators
        except AttributeError:
            self._iterators: dict[int, Generator[Any, Any, T_co]] = {}
            iterators = self._iterators
        task = id(asyncio.current_task())
        iterator = iterators.get(task)
        if iterator is None or inspect.getgeneratorstate(iterator) == inspect.GEN_CLOSED:  # of an earlier task
            iterator = iterators[task] = self.__await__()
        return iterator


class PlainCall(Call[T_co]):
    """A step called outside a run: it runs the body and stores nothing."""

    __slots__ = ("_args", "_error", "_function", "_kwargs", "_value")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._error: Exception | None = None

    def __await__(self) -> Generator[Any, Any, T_co]:
        if self._is_new():
            try:
                value = self._function(*self._args, **self._kwargs)
                if inspect.isawaitable(value):
                    value = yield from value.__await__()
                self._value = value
            except Exception as error:  # noqa: BLE001 - kept, so that a second await raises it again
                self._error = error
        return self._outcome()

    def start(self) -> PlainCall[T_co]:
        return self

    def result(self) -> T_co:
        if self._is_new():
            try:
                value = self._function(*self._args, **self._kwargs)
                self._value = _run_to_end(value) if inspect.isawaitable(value) else value
            except Exception as error:  # noqa: BLE001 - kept, so that a second call raises it again
                self._error = error
        return self._outcome()

    def _is_new(self) -> bool:
        return self._error is None and not hasattr(self, "_value")

    def _outcome(self) -> T_co:
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]


def _run_to_end(awaitable: Awaitable[Any]) -> Any:
    async def body() -> Any:
        return await awaitable

    return asyncio.run(body())
