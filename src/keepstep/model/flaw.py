"""Defects of a store itself, and what hinders its care."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flaw:
    """A defect of a store, beyond the chain of one run. `mended` describes the repair, if there was one.

    `kind` is one word for programs (`orphan`, `dangling`, `index`, `leftover`, `integrity`), `about` names the run,
    file or table, and `what` is a sentence for a person.
    """

    kind: str
    about: str
    what: str
    mended: str = ""


@dataclass(frozen=True, slots=True)
class Hindrance:
    """Something outside a store that keeps it from removing what is no longer needed, and how a person ends it."""

    what: str
    how: str
