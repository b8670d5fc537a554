"""A flaw: something that is wrong with a store itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flaw:
    """What does not fit in a store, beyond the chain of one run. `mended` says what was done about it, if anything.

    `kind` is one word for programs (`orphan`, `dangling`, `index`, `leftover`, `integrity`), `about` names the run,
    file or table, and `what` is a sentence for a person.
    """

    kind: str
    about: str
    what: str
    mended: str = ""
