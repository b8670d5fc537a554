"""What the steps of a file are made of: times, waits and retries as written there, and the functions that they call."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import Permanent
from ..policies import All, Quorum, Retry, WaitPolicy
from ..policies import Any as AnyOne
from .declarative_check import kind_of
from .declarative_http import Request, bare_url
from .declarative_read import Value
from .definition import Step
from .described import short_hash

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


# -- values ------------------------------------------------------------------------------------------------------------


def data(value: Value, key: str) -> Any:
    """What a key of a mapping holds; None if it is not there."""
    found = value.data.get(key)
    return None if found is None else found.data


def parts(step: Value, key: str) -> dict[str, Value]:
    """The parts of a mapping that a step has under a key; none if it is not there."""
    found = step.data.get(key)
    return found.data if found is not None else {}


def seconds(value: Value) -> float:
    """A time in seconds, from a number or a text like 5m."""
    if not isinstance(value.data, str):
        return float(value.data)
    number = value.data.rstrip("mshd")
    return float(number) * _UNITS[value.data[len(number) :]]


def waits(value: Value | None) -> WaitPolicy:
    """How many are enough."""
    if value is None or value.data == "all":
        return All()
    return AnyOne() if value.data == "any" else Quorum(int(value.data))


def retried(value: Value) -> Retry:
    """A retry as a file writes it."""
    given: dict[str, Any] = {
        f"{name}_seconds": seconds(value.data[name]) for name in ("base", "cap") if name in value.data
    }
    given |= {name: data(value, name) for name in ("factor", "jitter", "backoff") if name in value.data}
    if data(value, "by_class"):
        return Retry.by_class(**given)
    if "attempts" in value.data:
        given["attempts"] = int(data(value, "attempts"))
    return Retry(**given)


# -- bodies ------------------------------------------------------------------------------------------------------------


def body_of(found: Any) -> Callable[..., Any]:
    """The function of what a name stands for; an object that is called like an async function becomes one."""
    if isinstance(found, Step):
        return found.fn
    if not inspect.isroutine(found) and inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004

        async def called(*args: Any, **kwargs: Any) -> Any:
            return await found(*args, **kwargs)

        called.__signature__ = inspect.signature(found)  # type: ignore[attr-defined]
        return called
    return found  # type: ignore[no-any-return]


def said(made: Step[..., Any], name: str, step: Value) -> Step[..., Any]:
    """The step, with what the file says that it does: a run that began under another file is told the difference.

    What may hold something secret, such as a header, is there as a hash of all of it.
    """
    kind = kind_of(step)
    told = [kind]
    if kind in ("function", "agent", "map"):
        what = "agent" if kind == "agent" else "function"
        told.append(f"{what}={data(step, what) or name}")
    told += [f"with {parameter}={one.data}" for parameter, one in sorted(parts(step, "with").items())]
    if "into" in step.data:
        told.append(f"into={data(step, 'into')}")
    if kind == "http":
        kept = ("url", "method", "headers", "body", "expect", "redirects", "max_bytes")
        asked = {key: step.data[key].plain() for key in kept if key in step.data}
        told.append(f"{bare_url(asked['url'])} {short_hash(json.dumps(asked, sort_keys=True))}")
    made.written = " ".join(told)
    return made


def own_options(step: Step[..., Any]) -> dict[str, Any]:
    """What a step was made with, as far as it says something."""
    bare: Step[..., Any] = Step(step.fn, name=step.name, transactional=step.transactional)
    names = [name for name in inspect.signature(Step).parameters if name not in ("fn", "name")]
    found = {name: getattr(step, name) for name in names if getattr(step, name) != getattr(bare, name)}
    return {**found, "transactional": True} if step.transactional else found


def adapted(fn: Callable[..., Any], keys: dict[str, str] | None, into: str | None, name: str) -> Callable[..., Any]:
    """A function of the state around one of other parameters, whose result goes under a key."""

    def given(state: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if keys is None:
            return (state,), {}
        for parameter, key in keys.items():
            if key not in state:
                raise Permanent(f"step {name!r}: the state has no key {key!r}, which with: gives to {parameter!r}")
        return (), {parameter: state[key] for parameter, key in keys.items()}

    if inspect.iscoroutinefunction(fn):

        @functools.wraps(fn)
        async def body(state: Any) -> Any:
            args, kwargs = given(state)
            result = await fn(*args, **kwargs)
            return result if into is None else {into: result}
    else:

        @functools.wraps(fn)
        def body(state: Any) -> Any:
            args, kwargs = given(state)
            result = fn(*args, **kwargs)
            return result if into is None else {into: result}

    body.__signature__ = _SIGNATURE  # type: ignore[attr-defined]
    return body


_SIGNATURE = inspect.Signature([inspect.Parameter("state", inspect.Parameter.POSITIONAL_OR_KEYWORD)])


async def nothing(state: Any) -> dict[str, Any]:  # noqa: ARG001 - every step is given the state
    """A step of a graph that only leads on."""
    return {}


async def joining(**needs: Any) -> None:
    """Where steps of a dag come together."""


def sending(request: Request, into: str) -> Callable[..., Any]:
    """A function of the state that sends a request and puts the answer under a key."""

    def send(state: Mapping[str, Any]) -> dict[str, Any]:
        return {into: request.send(state)}

    return send


def asking(request: Request) -> Callable[..., Any]:
    """A function with a parameter for each key that the request needs: of a dag's needs, or of its inputs."""

    def ask(**values: Any) -> dict[str, Any]:
        return request.send(values)

    only_by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(key, only_by_name) for key in request.keys]
    ask.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return ask
