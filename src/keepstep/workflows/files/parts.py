"""Parts of a file's steps: times, waits and retries as written there, and the functions that the steps call."""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from ...errors import DefinitionError, Permanent
from ...model.tree import thaw
from ...policies import All, Breaker, Cron, Every, Quorum, Rate, Retry, Schedule, Tolerate, WaitPolicy
from ...policies import Any as AnyOne
from ...policies.queue import COUNTS, Queue
from ..definition import Sends, Step
from ..fingerprint import short_hash
from .check import kind_of
from .http import Request, bare_url
from .read import Value

#: Keys of a step that say whom a task goes to, and what it is.
_ABOUT_TASKS = ("need", "team", "task", "when_nobody", "on_failure", "least", "refine", "durable")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


# -- values ------------------------------------------------------------------------------------------------------------


def data(value: Value, key: str) -> Any:
    """Return the value under a key of a mapping, or None."""
    found = value.data.get(key)
    return None if found is None else found.data


def parts(step: Value, key: str) -> dict[str, Value]:
    """Return the parts of a step's mapping under a key; empty if there is none."""
    found = step.data.get(key)
    return found.data if found is not None else {}


def seconds(value: Value) -> float:
    """Return a time in seconds, from a number or a text like 5m."""
    if not isinstance(value.data, str):
        return float(value.data)
    number = value.data.rstrip("mshd")
    return float(number) * _UNITS[value.data[len(number) :]]


def waits(value: Value | None) -> WaitPolicy:
    """Return the wait policy."""
    if value is None or value.data == "all":
        return All()
    if isinstance(value.data, dict):
        given = parts(value, "tolerate")
        limits = {name: int(given[name].data) for name in ("count", "minimum") if name in given}
        return Tolerate(share=given["share"].data if "share" in given else None, **limits)
    return AnyOne() if value.data == "any" else Quorum(int(value.data))


def queued(value: Value) -> str:
    """Return the name of the queue; declare one that is written with its limits."""
    if isinstance(value.data, str):
        return value.data
    given = {name: data(value, name) for name in ("when_full", *COUNTS) if name in value.data}
    if "rate" in value.data:
        given["rate"] = rate(value.data["rate"])
    return Queue(data(value, "name"), **given).name


def scheduled(value: Value) -> Schedule:
    """Return the schedule."""
    given: dict[str, Any] = {name: data(value, name) for name in ("tz", "catch_up", "overlap") if name in value.data}
    if "jitter" in value.data:
        given["jitter"] = seconds(value.data["jitter"])
    if "until" in value.data:
        given["until"] = _instant(str(data(value, "until")))
    if ("cron" in value.data) == ("every" in value.data):
        raise DefinitionError("a schedule has either cron or every")
    if "cron" in value.data:
        return Cron(data(value, "cron"), **given)
    if "tz" in given:
        raise DefinitionError("tz is the time zone of cron; every counts in UTC")
    return Every(seconds(value.data["every"]), **given)


def _instant(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise DefinitionError(f"until is an instant such as 2027-01-01T00:00:00+00:00, not {text!r}") from None


def service_options(value: Value) -> dict[str, Any]:
    """Return the options of `ks.Service`."""
    given: dict[str, Any] = {name: rate(value.data[name]) for name in ("rate", "spend") if name in value.data}
    if "concurrency" in value.data:
        given["concurrency"] = int(data(value, "concurrency"))
    if "when_open" in value.data:
        given["when_open"] = data(value, "when_open")
    if "breaker" in value.data:
        breaker = value.data["breaker"]
        counts = {
            name: int(data(breaker, name)) for name in ("failures", "probes", "successes") if name in breaker.data
        }
        times = {"within": "within", "open": "open_seconds"}
        found = {option: seconds(breaker.data[name]) for name, option in times.items() if name in breaker.data}
        given["breaker"] = Breaker(**counts, **found)  # type: ignore[arg-type]
    return given


def rate(value: Value) -> Rate:
    """Return the rate."""
    per = seconds(value.data["per"]) if "per" in value.data else 1.0
    return Rate(data(value, "count"), per, int(data(value, "burst") or 1))


def retried(value: Value) -> Retry:
    """Return the retry policy."""
    given: dict[str, Any] = {
        f"{name}_seconds": seconds(value.data[name]) for name in ("base", "cap") if name in value.data
    }
    given |= {name: data(value, name) for name in ("factor", "jitter", "backoff") if name in value.data}
    if data(value, "by_class"):
        return Retry.by_class(**given)
    if "attempts" in value.data:
        given["attempts"] = int(data(value, "attempts"))
    return Retry(**given)


def minds(value: Value) -> tuple[str, ...]:
    """Return the capabilities, or the name of an agent, that are asked for."""
    return (value.data,) if isinstance(value.data, str) else tuple(one.data for one in value.data)


def task_options(value: Value) -> dict[str, Any]:
    """Return the options of a task, as a step or a team has them."""
    given: dict[str, Any] = {name: data(value, name) for name in ("on_failure", "least") if name in value.data}
    if "when_nobody" in value.data:
        given["wait"] = data(value, "when_nobody") == "wait"
    if "timeout" in value.data:
        given["seconds"] = seconds(value.data["timeout"])
    return given


def refining(value: Value) -> dict[str, Any]:
    """Return the options of a quality loop."""
    given: dict[str, Any] = {"critic": minds(value.data["critic"]), "escalate": data(value, "ask")}
    if "threshold" in value.data:
        given["threshold"] = float(data(value, "threshold"))
    if "rounds" in value.data:
        given["rounds"] = int(data(value, "rounds"))
    if "timeout" in value.data:
        given["escalate_seconds"] = seconds(value.data["timeout"])
    return given


# -- bodies ------------------------------------------------------------------------------------------------------------


def body_of(found: Any) -> Callable[..., Any]:
    """Return the function that a name refers to; a callable object with an async `__call__` is wrapped."""
    if isinstance(found, Step):
        return found.fn
    if not inspect.isroutine(found) and inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004

        async def called(*args: Any, **kwargs: Any) -> Any:
            return await found(*args, **kwargs)

        called.__signature__ = inspect.signature(found)  # type: ignore[attr-defined]
        return called
    return found  # type: ignore[no-any-return]


def performing(perform: Callable[..., Any], step: Value, into: str) -> Callable[..., Any]:
    """Return a function of the state that gives a task to an agent and stores the answer under a key.

    The score of a quality loop is stored beside it.
    """
    key, loops = data(step, "task"), "refine" in step.data

    async def body(state: Mapping[str, Any]) -> dict[str, Any]:
        if key is not None and key not in state:
            raise Permanent(f"the state has no key {key!r}, which is the task of the agent")
        result = perform(dict(state) if key is None else state[key])
        result = await result if inspect.isawaitable(result) else result
        if not loops:
            return {into: result}
        quality = {"score": result.score, "rounds": result.rounds, "accepted_by": result.accepted_by}
        return {into: result.result, f"{into}_quality": quality}

    return body


def awaiting(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return an async function; what a plain one returns is awaited if it can be."""
    if inspect.iscoroutinefunction(fn):
        return fn

    @functools.wraps(fn)
    async def body(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    return body


def with_description(made: Step[..., Any], name: str, step: Value) -> Step[..., Any]:
    """Return the step with its description in the file, so that a run started under another file shows the difference.

    A part that may hold a secret, such as a header, is described by a hash.
    """
    kind = kind_of(step)
    words = [kind]
    if kind in ("function", "agent", "map"):
        what = "agent" if kind == "agent" else "function"
        if "need" not in step.data:
            words.append(f"{what}={data(step, what) or name}")
    written = {key: step.data[key].plain() for key in _ABOUT_TASKS if key in step.data}
    words += [f"{key}={json.dumps(value, sort_keys=True)}" for key, value in written.items()]
    words += [f"with {parameter}={one.data}" for parameter, one in sorted(parts(step, "with").items())]
    if "into" in step.data:
        words.append(f"into={data(step, 'into')}")
    if kind == "http":
        kept = ("url", "method", "headers", "body", "expect", "redirects", "max_bytes")
        asked = {key: step.data[key].plain() for key in kept if key in step.data}
        words.append(f"{bare_url(asked['url'])} {short_hash(json.dumps(asked, sort_keys=True))}")
    made.written = " ".join(words)
    return made


def own_options(step: Step[..., Any]) -> dict[str, Any]:
    """Return the options of a step that are not None."""
    bare: Step[..., Any] = Step(step.fn, name=step.name, transactional=step.transactional)
    names = [name for name in inspect.signature(Step).parameters if name not in ("fn", "name")]
    found = {name: getattr(step, name) for name in names if getattr(step, name) != getattr(bare, name)}
    return {**found, "transactional": True} if step.transactional else found


def _given(keys: dict[str, str] | None, name: str, state: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a function: the state, or the keys of it that `with:` names."""
    if keys is None:
        return (state,), {}
    for parameter, key in keys.items():
        if key not in state:
            raise Permanent(f"step {name!r}: the state has no key {key!r}, which with: gives to {parameter!r}")
    return (), {parameter: state[key] for parameter, key in keys.items()}


def adapted_undo(undo: Callable[..., Any], keys: dict[str, str] | None, into: str | None, name: str) -> Step[..., Any]:
    """Return the undo of an adapted function: it is given what the function gave, and what it was given."""
    made: Step[..., Any] = copy.copy(undo) if isinstance(undo, Step) else Step(undo)
    fn = made.fn

    def arguments(after: Mapping[str, Any] | None, state: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = _given(keys, name, state)
        return (after if after is None or into is None else after.get(into), *args), kwargs

    async def body(after: Any, state: Any) -> Any:
        args, kwargs = arguments(after, state)
        return await fn(*args, **kwargs)

    def plain_body(after: Any, state: Any) -> Any:
        args, kwargs = arguments(after, state)
        return fn(*args, **kwargs)

    made.set_body(body if made.is_async else plain_body, is_async=made.is_async)
    made.signature = inspect.signature(body)
    return made


def adapted(fn: Callable[..., Any], keys: dict[str, str] | None, into: str | None, name: str) -> Callable[..., Any]:
    """Return a function of the state that calls one with other parameters and stores its result under a key."""
    given = partial(_given, keys, name)
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


def sending_of(fn: Callable[..., Any], keys: dict[str, str] | None, into: str | None, name: str) -> Sends:
    """Return what of an adapted function crosses to another process: the function, and what it takes and gives."""

    def arguments(state: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = _given(keys, name, state)
        return args, {parameter: thaw(one) for parameter, one in kwargs.items()}

    return Sends(fn, arguments, lambda result: result if into is None else {into: result})


def asked_with(fn: Callable[..., Any], keys: dict[str, str], missing: Any) -> Callable[..., Any]:
    """Return a `ready=` or `verify=` function of the state that calls one with the step's own parameters.

    It returns `missing` if the state lacks a key: the body then says which.
    """

    def given(state: Mapping[str, Any]) -> dict[str, Any] | None:
        return {one: state[key] for one, key in keys.items()} if all(key in state for key in keys.values()) else None

    if inspect.iscoroutinefunction(fn):

        async def ask(state: Any) -> Any:
            found = given(state)
            return missing if found is None else await fn(**found)

        return ask

    def ask_plainly(state: Any) -> Any:
        found = given(state)
        return missing if found is None else fn(**found)

    return ask_plainly


_SIGNATURE = inspect.Signature([inspect.Parameter("state", inspect.Parameter.POSITIONAL_OR_KEYWORD)])


async def nothing(state: Any) -> dict[str, Any]:  # noqa: ARG001 - every step is given the state
    """A step of a graph without any work."""
    return {}


async def joining(**needs: Any) -> None:
    """A step of a dag that only joins its needs."""


def sending(request: Request, into: str) -> Callable[..., Any]:
    """Return a function of the state that sends a request and stores the answer under a key."""

    def send(state: Mapping[str, Any]) -> dict[str, Any]:
        return {into: request.send(state)}

    return send


def asking(request: Request) -> Callable[..., Any]:
    """Return a function with a parameter for each key of the request: a need of the dag, or an input."""

    def ask(**values: Any) -> dict[str, Any]:
        return request.send(values)

    only_by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(key, only_by_name) for key in request.keys]
    ask.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return ask
