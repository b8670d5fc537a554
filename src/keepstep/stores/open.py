"""Opening a store: by the scheme of a URL, by a path, or by a function that a package or a program registers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TypeGuard

from ..errors import DefinitionError, DuplicateName, UnknownStore
from ..ports import Clock, Store

#: Entry point group in which other packages register `scheme = "module:function"`.
GROUP = "keepstep.stores"

#: Stores that ship with Keepstep. Each module is imported when its scheme is first used.
BUILT_IN = {
    "files": "keepstep.stores.files.store:open_url",
    "memory": "keepstep.stores.memory:open_url",
    "postgres": "keepstep.stores.postgres.store:open_url",
    "postgresql": "keepstep.stores.postgres.store:open_url",
    "sqlite": "keepstep.stores.sqlite.store:open_url",
}

#: Stores that programs registered while they run, by scheme.
_OWN: dict[str, Callable[..., Store]] = {}

#: Packages that only some stores need, with the extra that installs each.
EXTRAS = {"psycopg": "postgres"}

#: A scheme has at least two letters, so that a Windows drive counts as a path.
_SCHEME = re.compile(r"([a-z][a-z0-9+.\-]+):", re.IGNORECASE)


#: Names of the Store methods. Since Python 3.12, `isinstance` ignores methods that `__getattr__` provides.
_VERBS = tuple(name for name in vars(Store) if not name.startswith("_"))


def open_store(url: str | os.PathLike[str] | Store, *, clock: Clock | None = None, **options: Any) -> Store:
    """Return the store for a URL or a path; a store is returned unchanged.

    `sqlite:///runs.db` and a plain path mean SQLite; `memory:` means a store that ends with the process. `options` are
    the store's own.
    """
    if not isinstance(url, (str, os.PathLike)):
        return _pass_through(url, options)
    found = _SCHEME.match(url) if isinstance(url, str) else None
    if found is None:
        return _opened("sqlite", f"sqlite:///{os.fspath(url)}", clock, options)
    scheme = found[1].lower()
    return _opened(scheme, f"{scheme}:{str(url)[found.end() :]}", clock, options)


def register_store(scheme: str, open: Callable[..., Store]) -> None:  # noqa: A002 - the word users know
    """Open URLs of this scheme with a function: `ks.register_store("redis", open_redis)`, for this process.

    The function takes the URL, `clock=` and the options that `ks.open` does not know. Registering the same function
    again changes nothing; a scheme that already has another is refused.
    """
    if not isinstance(scheme, str) or _SCHEME.fullmatch(f"{scheme}:") is None:
        raise DefinitionError(f"scheme must be two or more letters, digits and + - . as in 'redis', got {scheme!r}")
    if not callable(open):
        raise DefinitionError(f"open must be a function (url, *, clock=None, **options), got {open!r}")
    name = scheme.lower()
    if name in BUILT_IN or _OWN.get(name, open) is not open:
        raise DuplicateName(f"a store is registered for {name + ':'!r} already; choose another scheme")
    _OWN[name] = open


def has_option(url: str, option: str) -> bool:
    """Whether the store of another package for a URL takes an option with this name."""
    found = _SCHEME.match(url)
    if found is None or found[1].lower() in BUILT_IN:
        return False
    from inspect import signature  # noqa: PLC0415 - slow to import and rarely needed

    try:
        return option in signature(_find(found[1].lower())[0]).parameters
    except (TypeError, ValueError):  # a callable that is not written in Python
        return False


def schemes() -> list[str]:
    """Return every scheme that can be opened here."""
    return sorted({*BUILT_IN, *_OWN, *(point.name for point in _registered())})


def is_store(value: Any) -> TypeGuard[Store]:
    """Whether `value` has every Store method, including by delegation."""
    return all(hasattr(value, verb) for verb in _VERBS)


def _pass_through(store: Any, options: dict[str, Any]) -> Store:
    if not is_store(store):
        raise DefinitionError(f"a store is opened from a URL or a path, not from {type(store).__name__}")
    if options:
        raise DefinitionError(f"options ({', '.join(options)}) belong to opening a store; this one is open already")
    return store


def _opened(scheme: str, url: str, clock: Clock | None, options: dict[str, Any]) -> Store:
    opener, whose = _find(scheme)
    try:
        store = opener(url, clock=clock, **options)
    except TypeError as error:
        unknown = _UNKNOWN_OPTION.search(str(error))
        if unknown is None or unknown[1] not in options:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise
            raise DefinitionError(  # the function was not entered, so the arguments are wrong
                f"the store for {scheme + ':'!r}{whose} cannot be opened: its function must take "
                f"(url, *, clock=None, **options): {error}"
            ) from None
        raise TypeError(f"neither ks.open nor the store for {scheme + ':'!r} has an option {unknown[1]!r}") from None
    if not is_store(store):
        missing = [verb for verb in _VERBS if not hasattr(store, verb)]
        raise DefinitionError(
            f"the store for {scheme + ':'!r}{whose} returned {type(store).__name__}, which is not a store: "
            f"it lacks {', '.join(missing)}"
        )
    return store


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")


def _find(scheme: str) -> tuple[Callable[..., Store], str]:
    """Return the function that opens a scheme, and the name of its package for messages."""
    if scheme in BUILT_IN:
        module, _, name = BUILT_IN[scheme].partition(":")
        try:
            return getattr(import_module(module), name), ""
        except ImportError as error:
            raise _cannot_import(scheme, error) from None
    if scheme in _OWN:
        return _OWN[scheme], ""
    points = {point.value: point for point in _registered() if point.name.lower() == scheme}
    if not points:
        from difflib import get_close_matches  # noqa: PLC0415 - only for a wrong scheme

        known = schemes()
        near = get_close_matches(scheme, known, n=1)
        raise UnknownStore(
            f"no store is registered for {scheme + ':'!r}{f'; did you mean {near[0]}:?' if near else ''}; "
            f"known here: {', '.join(f'{name}:' for name in known)} "
            "(a path that holds a colon is written sqlite:///path, or given as a Path)"
        )
    if len(points) > 1:
        named = " and ".join(f"{_package(point)} ({value})" for value, point in sorted(points.items()))
        raise DuplicateName(f"{scheme + ':'!r} is registered twice, by {named}; uninstall one of them")
    (point,) = points.values()
    whose = f", of the package {_package(point)} ({point.value}),"
    try:
        opener: Any = point.load()
    except Exception as error:
        raise DefinitionError(
            f"the store for {scheme + ':'!r}{whose} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    if not callable(opener):
        kind = type(opener).__name__
        raise DefinitionError(f"the entry point for {scheme + ':'!r}{whose} must be a callable, not {kind}")
    return opener, whose


def _cannot_import(scheme: str, error: ImportError) -> ImportError | DefinitionError:
    """Return an error that names the package to install: it is missing, or broken, such as psycopg without libpq."""
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
        package, why = error.name, "which is not installed here"
    else:
        trace, found = error.__traceback__, set()
        while trace is not None:
            found.add(str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0])
            trace = trace.tb_next
        package = next((name for name in EXTRAS if name in found), "")
        why = f"which cannot be imported here ({' '.join(str(error).split())})"
    if not package:
        return error
    return DefinitionError(f'{scheme}: needs {package}, {why}: pip install "keepstep[{EXTRAS[package]}]"')


def _package(point: Any) -> str:
    found = getattr(point, "dist", None)
    return repr(found.name) if found is not None else "unknown"


def _registered() -> Iterable[Any]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import and rarely needed

    return entry_points(group=GROUP)
