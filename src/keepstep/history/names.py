"""The steps that a person means: by key, by name, or by name in a branch."""

from __future__ import annotations

from collections.abc import Callable, Collection

#: Ways to name a step, in order of precedence: by its key, by its name, or by its name in a branch.
_WAYS: tuple[Callable[[str], str], ...] = (
    lambda key: key,
    lambda key: key.partition("#")[0] if "/" not in key else "",
    lambda key: key.rpartition("/")[2].partition("#")[0],
)


def named(keys: Collection[str], wanted: str) -> list[str]:
    """Return the keys that match a key or a name given by a person."""
    return next(filter(None, ([key for key in keys if how(key) == wanted] for how in _WAYS)), [])
