"""Secrets: a value stores only the name of a secret, which is looked up where it is used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import msgspec

from ..errors import DefinitionError

#: Minimum length of a secret to search for. A shorter one would occur in ordinary texts.
SHORTEST = 6
#: Number of revealed secrets to search for, the newest ones. Bounds the cost of redaction.
MOST_REVEALED = 100

_REVEALING = threading.Lock()


def _from_environment(name: str) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise DefinitionError(f"the secret {name!r} is not set: no environment variable has this name") from None


class Secret:
    """A reference to a secret. Only its name is stored, printed and compared; `reveal()` returns the secret."""

    __slots__ = ("name",)
    name: str
    resolver: ClassVar[Callable[[str], str]] = staticmethod(_from_environment)
    #: Secrets revealed in this process, with their JSON form, to be kept out of records, events and logs.
    revealed: ClassVar[dict[str, bytes]] = {}

    def __init__(self, name: str) -> None:
        if type(name) is not str or not name:
            raise DefinitionError(f"the name of a secret must be text, not {name!r}")
        object.__setattr__(self, "name", name)

    def reveal(self) -> str:
        """Return the secret, looked up now; by default from the environment variable of this name.

        From then on, this process refuses the text in values and redacts it in errors, events and logs.
        """
        text = type(self).resolver(self.name)
        if text not in Secret.revealed and len(text) >= SHORTEST:
            with _REVEALING:
                newest = list(Secret.revealed.items())[1 - MOST_REVEALED :]
                Secret.revealed = dict([*newest, (text, msgspec.json.encode(text)[1:-1])])
        return text

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __delattr__(self, attribute: str) -> NoReturn:
        raise AttributeError("a Secret cannot be changed")

    def __repr__(self) -> str:
        return f"Secret({self.name!r})"

    def __eq__(self, other: object) -> bool:
        return self.name == other.name if type(other) is Secret else NotImplemented

    def __hash__(self) -> int:
        return hash((Secret, self.name))

    def __reduce__(self) -> tuple[type[Secret], tuple[str]]:
        return Secret, (self.name,)

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self


def set_secret_resolver(resolver: Callable[[str], str] | None) -> Callable[[str], str]:
    """Look up secrets with `resolver(name)` from now on, or in the environment with None. Return the old resolver."""
    old = Secret.resolver
    Secret.resolver = staticmethod(resolver or _from_environment)
    return old
