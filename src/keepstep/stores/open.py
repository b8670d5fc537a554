"""How a store is found: by the scheme of a URL, by a path, or by what another package registers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any, TypeGuard

from ..errors import DefinitionError, DuplicateName, UnknownStore
from ..ports import Clock, Store

#: The entry point group in which other packages register `scheme = "module:function"`.
GROUP = "keepstep.stores"

#: Stores that ship with Keepstep. Each module is imported when its scheme is first used.
BUILT_IN = {
    "files": "keepstep.stores.files:open_url",
    "memory": "keepstep.stores.memory:open_url",
    "postgres": "keepstep.stores.postgres:open_url",
    "postgresql": "keepstep.stores.postgres:open_url",
    "sqlite": "keepstep.stores.sqlite:open_url",
}

#: Packages that only some of them need, and the extra that installs each.
EXTRAS = {"psycopg": "postgres"}

#: Two letters at least, so that a Windows drive is a path.
_SCHEME = re.compile(r"([a-z][a-z0-9+.\-]+):", re.IGNORECASE)


#: From Python 3.12 on, `isinstance` does not see what `__getattr__` gives.
_VERBS = tuple(name for name in vars(Store) if not name.startswith("_"))


def open_store(url: str | os.PathLike[str] | Store, *, clock: Clock | None = None, **options: Any) -> Store:
    """The store that a URL or a path names; a store is given back as it is.

    `sqlite:///runs.db` and a path alone mean SQLite, `memory:` a store that dies with the process. `options` are the
    store's own.
    """
    if not isinstance(url, (str, os.PathLike)):
        return _pass_through(url, options)
    found = _SCHEME.match(url) if isinstance(url, str) else None
    if found is None:
        return _opened("sqlite", f"sqlite:///{os.fspath(url)}", clock, options)
    scheme = found[1].lower()
    return _opened(scheme, f"{scheme}:{str(url)[found.end() :]}", clock, options)


def has_option(url: str, option: str) -> bool:
    """Whether the store that another package has for a URL takes an option of this name."""
    found = _SCHEME.match(url)
    if found is None or found[1].lower() in BUILT_IN:
        return False
    from inspect import signature  # noqa: PLC0415 - slow to import, and needed by few

    try:
        return option in signature(_find(found[1].lower())[0]).parameters
    except (TypeError, ValueError):  # something that is not written in Python
        return False


def schemes() -> list[str]:
    """Every scheme that can be opened here."""
    return sorted({*BUILT_IN, *(point.name for point in _registered())})


def is_store(value: Any) -> TypeGuard[Store]:
    """Whether something answers to every verb of a store; one that passes them on to another does so too."""
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
            raise DefinitionError(  # nothing in it has run: it cannot be called so
                f"the store for {scheme + ':'!r}{whose} cannot be opened: its function must take "
                f"(url, *, clock=None, **options): {error}"
            ) from None
        raise TypeError(f"neither ks.open nor the store for {scheme + ':'!r} has an option {unknown[1]!r}") from None
    if not is_store(store):
        missing = [verb for verb in _VERBS if not hasattr(store, verb)]
        raise DefinitionError(
            f"the store for {scheme + ':'!r}{whose} gave {type(store).__name__}, which is no store: "
            f"it lacks {', '.join(missing)}"
        )
    return store


_UNKNOWN_OPTION = re.compile(r"unexpected keyword argument '(\w+)'")


def _find(scheme: str) -> tuple[Callable[..., Store], str]:
    """The function that opens a scheme, and for an error whose it is."""
    if scheme in BUILT_IN:
        module, _, name = BUILT_IN[scheme].partition(":")
        try:
            return getattr(import_module(module), name), ""
        except ImportError as error:
            raise _cannot_import(scheme, error) from None
    points = {point.value: point for point in _registered() if point.name.lower() == scheme}
    if not points:
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
        raise DefinitionError(f"the store for {scheme + ':'!r}{whose} cannot be opened: it is no function")
    return opener, whose


def _cannot_import(scheme: str, error: ImportError) -> ImportError | DefinitionError:
    """What to install for a scheme: a package is not there, or cannot be imported, such as psycopg without libpq."""
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
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import, and needed by few

    return entry_points(group=GROUP)
