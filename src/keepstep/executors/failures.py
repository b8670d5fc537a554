"""Exceptions across processes: described where they are raised, and made again from what this process has imported."""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from collections.abc import Iterable
from typing import Any

from ..errors import KeepstepError
from ..model.frames import FAR_TRACEBACK
from ..values import VALUES
from .task import FarError

#: The name that the worker's main module has in another process. `multiprocessing` sets "__mp_main__" for itself.
MAIN = "__keepstep_main__"
#: Causes of an exception that cross with it.
MOST_CAUSES = 10
#: Exceptions of a group that cross with it.
MOST_PARTS = 10
#: Characters of a message that cross, and of a traceback.
MOST_TEXT = 20_000


def described(error: BaseException, values: Any = VALUES, depth: int = 0) -> FarError:
    """Return an exception as it crosses."""
    kind = type(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return FarError(
        "__main__" if kind.__module__ == MAIN else kind.__module__,
        kind.__qualname__,
        next(one.__name__ for one in kind.__mro__ if one.__module__ == "builtins"),
        _text(error)[:MOST_TEXT],
        _encoded(_args(error), values),
        {name: data for name, value in _fields(error) if (data := _encoded(value, values)) is not None},
        _cut("".join(traceback.format_exception(error))) if depth == 0 else "",
        None if cause is None or depth >= MOST_CAUSES else described(cause, values, depth + 1),
        error.__cause__ is not None,
        _answer(error, values),
        _parts(error, values, depth),
    )


def _args(error: BaseException) -> list[Any]:
    """Return the arguments that make an exception again."""
    if isinstance(error, BaseExceptionGroup):
        return [error.message]
    if isinstance(error, OSError):  # with the name of its file
        found = OSError.__reduce__(error)[1]
        return [os.fspath(one) if isinstance(one, os.PathLike) else one for one in found]
    return list(error.args)


def _parts(error: BaseException, values: Any, depth: int) -> list[FarError]:
    if not isinstance(error, BaseExceptionGroup) or depth >= MOST_CAUSES:
        return []
    return [described(one, values, depth + MOST_CAUSES // 3) for one in error.exceptions[:MOST_PARTS]]


def _text(error: BaseException) -> str:
    try:
        return str(error).encode(errors="replace").decode()
    except Exception as broken:  # noqa: BLE001 - an exception without a readable message is still a failure
        return f"<the message cannot be shown: str() raised {type(broken).__name__}>"


def _cut(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT // 2] + "\n  …\n" + text[-MOST_TEXT // 2 :]


def _fields(error: BaseException) -> Iterable[tuple[str, Any]]:
    """Return the attributes of an exception, and those that classify an error even if a class computes them."""
    try:
        own = {name: value for name, value in vars(error).items() if not name.startswith("__")}
    except Exception:  # noqa: BLE001 - a class may forbid it
        own = {}
    for name in ("status_code", "status", "code", "errno", "seconds"):
        if name not in own:
            try:
                own[name] = getattr(error, name)
            except Exception:  # noqa: BLE001, S112 - a property of a foreign class may raise anything
                continue
    return own.items()


def _answer(error: BaseException, values: Any) -> bytes | None:
    """Return the status and the headers of a service's answer, which say when to try again."""
    try:
        response = error.response  # type: ignore[attr-defined]
        if isinstance(response, dict):
            return _encoded(response, values)
        headers = {str(key): str(value) for key, value in dict(response.headers).items()}
        return _encoded({"status_code": int(response.status_code), "headers": headers}, values)
    except Exception:  # noqa: BLE001 - most errors have no answer
        return None


def _encoded(value: Any, values: Any) -> bytes | None:
    if isinstance(value, BaseException) or callable(value):
        return None
    try:
        data: bytes = values.encode(value)
    except (KeepstepError, RecursionError):
        return None
    return data if len(data) <= MOST_TEXT else None


class _Answer:
    """The answer of a service, as far as it crossed."""

    def __init__(self, status_code: Any, headers: Any) -> None:
        self.status_code, self.headers = status_code, headers


def made_again(far: FarError, values: Any = VALUES) -> BaseException:
    """Return the exception that another process has raised.

    Its class is that of this process if it is imported here, and a namesake otherwise. None of its code runs.
    """
    kind = _class_of(far)
    args = _decoded(far.args, values)
    given = args if isinstance(args, list) else [far.text]
    if issubclass(kind, BaseExceptionGroup):
        parts = [made_again(one, values) for one in far.parts]
        given = [*given[:1], parts or [Exception("an exception that has not crossed")]]
    error = _new(kind, given)
    for name, data in far.fields.items():
        try:
            error.__dict__.setdefault(name, values.decode(data))
        except KeepstepError:
            continue
    answer = _decoded(far.answer, values)
    if isinstance(answer, dict):
        found = _Answer(answer["status_code"], answer.get("headers")) if "status_code" in answer else answer
        error.__dict__["response"] = found
    if _text(error) != far.text:
        error = _renamed(error, kind, given, far.text)
    if far.cause is not None:
        cause = made_again(far.cause, values)
        if far.is_given:
            error.__cause__ = cause
        else:
            error.__context__ = cause
    if far.traceback:
        error.__dict__[FAR_TRACEBACK] = far.traceback
    return error


def _new(kind: type[BaseException], args: list[Any]) -> BaseException:
    """Return an exception of a class, without a call of the class's own code."""
    base: Any = next(one for one in kind.__mro__ if one.__module__ == "builtins")
    try:
        made: BaseException = base.__new__(kind, *args)
    except (TypeError, ValueError):
        made = base.__new__(kind)
    return made


def _decoded(data: bytes | None, values: Any) -> Any:
    try:
        return None if data is None else values.decode(data)
    except KeepstepError:
        return None


def _class_of(far: FarError) -> type[BaseException]:
    found: Any = sys.modules.get(far.module) or _main_named(far.module)
    for name in far.name.split("."):
        found = vars(found).get(name) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and issubclass(found, BaseException):
        return found
    base = getattr(builtins, far.builtin, Exception)
    if not (isinstance(base, type) and issubclass(base, BaseException)):
        base = Exception
    return _named(far.name, far.module, base)


def _main_named(module: str) -> Any:
    """Return the main module if `python -m` runs it under this name."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    return main if spec is not None and spec.name == module else None


def _named(name: str, module: str, base: type[BaseException], **more: Any) -> type[BaseException]:
    own = {"__module__": module, "__qualname__": name, **more}
    return type(name.rpartition(".")[2], (base,), own)


def _renamed(error: BaseException, kind: type[BaseException], args: list[Any], text: str) -> BaseException:
    """Return the exception with a message that its own class cannot make here."""
    named = _named(kind.__qualname__, kind.__module__, kind, __str__=lambda _: text)
    made = _new(named, args)
    made.__dict__.update(error.__dict__)
    return made
