"""How a store is found: by the scheme of a URL, by a path, or by what another package registers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, TypeGuard

from ..errors import DefinitionError, UnknownStore
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
    if isinstance(url, os.PathLike):
        return _find("sqlite")(f"sqlite:///{os.fspath(url)}", clock=clock, **options)
    if not isinstance(url, str):
        return _pass_through(url, options)
    scheme = _SCHEME.match(url)
    if scheme is None:
        return _find("sqlite")(f"sqlite:///{url}", clock=clock, **options)
    return _find(scheme[1].lower())(url, clock=clock, **options)


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


def _find(scheme: str) -> Callable[..., Store]:
    found: Callable[..., Store]
    if scheme in BUILT_IN:
        module, _, name = BUILT_IN[scheme].partition(":")
        try:
            found = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get(error.name or "")
            if extra is None:
                raise
            raise DefinitionError(
                f'{scheme}: needs {error.name}, which is not installed here: pip install "keepstep[{extra}]"'
            ) from None
        return found
    for point in _registered():
        if point.name == scheme:
            found = point.load()
            return found
    raise UnknownStore(
        f"no store is registered for {scheme + ':'!r}; known here: {', '.join(f'{name}:' for name in schemes())} "
        f"(a path that holds a colon is written sqlite:///path, or given as a Path)"
    )


def _registered() -> Iterable[Any]:
    from importlib.metadata import entry_points  # noqa: PLC0415 - slow to import, and needed by few

    return entry_points(group=GROUP)
