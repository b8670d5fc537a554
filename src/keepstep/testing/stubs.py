"""Stubs: for the time of a test, a step does what the test says instead of its body."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, ParamSpec, Self, TypeVar

from ..errors import DefinitionError
from ..workflows.definition import Step

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING: Any = object()

#: What a step may be made to raise: a class or an exception.
Failure = BaseException | type[BaseException]


class Called(NamedTuple):
    """One call of a stub, which is one attempt of its step."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stub(Generic[P, R]):
    """What `stub` gives: `calls` are the attempts made so far, in order."""

    def __init__(self, step: Step[P, R], failures: list[Failure], answer: Callable[..., Any] | None) -> None:
        self.step = step
        self.calls: list[Called] = []
        self._failures = failures
        self._answer = answer
        self._before: list[tuple[Callable[..., Any], bool]] = []

    async def _body(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(Called(args, kwargs))
        number = len(self.calls)
        if number <= len(self._failures) or self._answer is None:
            raise self._failures[min(number, len(self._failures)) - 1]
        value = self._answer(*args, **kwargs)
        return await value if inspect.isawaitable(value) else value

    def _body_in_transaction(self, *args: Any, **kwargs: Any) -> Any:
        """A transactional step is a plain function, whose first argument is the transaction."""
        coroutine = self._body(*args, **kwargs)
        try:
            coroutine.send(None)
        except StopIteration as end:
            return end.value
        coroutine.close()
        raise DefinitionError(f"step {self.step.name!r} is transactional, so its stub cannot await")

    def __enter__(self) -> Self:
        step = self.step
        step.values  # noqa: B018 - learnt from the real function, before it is out of sight
        self._before.append((step.fn, step.is_async))
        if step.transactional:
            step.set_body(self._body_in_transaction, is_async=False)
        else:
            step.set_body(self._body, is_async=True)
        return self

    def __exit__(self, *_: object) -> None:
        fn, is_async = self._before.pop()
        self.step.set_body(fn, is_async=is_async)


def stub(
    step: Step[P, R],
    *,
    returns: R = _NOTHING,
    raises: Failure | Sequence[Failure] = (),
    calls: Callable[P, R | Awaitable[R]] | None = None,
) -> Stub[P, R]:
    """Replace a step's body inside a `with` block; retries, timeouts, records and replay stay as they are.

    It `returns` a value or `calls` a function. What it `raises`, one or several, comes first, each for one attempt;
    with neither of the others, the last of them is raised for ever.
    """
    if not isinstance(step, Step):
        raise DefinitionError(f"a stub stands in for a step, not for {step!r}")
    failures = [*raises] if isinstance(raises, Sequence) else [raises]
    if returns is not _NOTHING and calls is not None:
        raise DefinitionError("a stub either returns a value or calls a function, not both")
    if returns is _NOTHING and calls is None and not failures:
        raise DefinitionError("say what the stub does: returns=, raises= or calls=")
    answer = calls if returns is _NOTHING else lambda *_, **__: returns
    return Stub(step, failures, answer)
