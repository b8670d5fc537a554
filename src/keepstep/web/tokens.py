"""Tokens: secrets that open the door, each with a role and with the name by which the audit knows its holder."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import DefinitionError
from .routes import Role

#: Fewest characters of a token, so that it cannot be guessed.
FEWEST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Token:
    """A secret that opens the door, the role that it gives, and the name under which the audit knows its holder."""

    secret: str
    role: Role = Role.ADMIN
    name: str = "token"

    def __post_init__(self) -> None:
        if len(self.secret) < FEWEST_CHARACTERS or not self.secret.isascii() or not self.secret.isprintable():
            raise DefinitionError(
                f"a token must have at least {FEWEST_CHARACTERS} printable ASCII characters; "
                'make one with: python -c "import secrets; print(secrets.token_urlsafe())"'
            )

    @classmethod
    def parse(cls, text: str) -> Token:
        """Return the token of a text: `SECRET`, `ROLE:SECRET` or `NAME:ROLE:SECRET`."""
        *before, secret = text.rsplit(":", 2)
        role = before[-1] if before else "admin"
        roles = [one.name.lower() for one in Role if one is not Role.NONE]
        if role.lower() not in roles:
            known = ", ".join(roles)
            raise DefinitionError(f"a token has the form NAME:ROLE:SECRET, and the roles are {known}; got {role!r}")
        name = before[0] if len(before) > 1 else "token"
        return cls(secret, Role[role.upper()], name)

    def __repr__(self) -> str:
        return f"Token(name={self.name!r}, role={self.role.name})"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: its role, and its name for the audit."""

    role: Role
    name: str


def matching(tokens: Iterable[Token], secret: str) -> Token | None:
    """Return the token that has a secret."""
    found = None
    for token in tokens:  # all are compared, so that the time tells nothing
        if hmac.compare_digest(digest(token.secret), digest(secret)):
            found = token
    return found


def digest(secret: str) -> bytes:
    """Return a digest of a secret, for a comparison that takes equally long for all."""
    return hashlib.sha256(secret.encode()).digest()
