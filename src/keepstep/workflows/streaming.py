"""Steps that yield: each item is emitted live, and the collected items are the result."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

from ..ports import CURRENT


def streaming_body(fn: Callable[..., Any], collect: Callable[[list[Any]], Any] | None) -> Callable[..., Any]:
    """Return a function that emits each item which `fn` yields, and returns the collected ones; or `fn` itself."""
    finish = collect or list
    if inspect.isasyncgenfunction(fn):

        async def stream(*args: Any, **kwargs: Any) -> Any:
            items: list[Any] = []
            async with aclosing(fn(*args, **kwargs)) as parts:
                async for item in parts:
                    _emit(item)
                    items.append(item)
            return finish(items)

        return stream
    if inspect.isgeneratorfunction(fn):

        def stream_plainly(*args: Any, **kwargs: Any) -> Any:
            items: list[Any] = []
            with closing(fn(*args, **kwargs)) as parts:
                for item in parts:
                    _emit(item)
                    items.append(item)
            return finish(items)

        return stream_plainly
    return fn


def _emit(item: Any) -> None:
    scope = CURRENT.get()
    if scope is not None and scope.in_step:
        scope.emit(item)
