"""Which cases of a test `make test` runs, and which only `make nightly` does."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest


def case(*values: object, id: str | None = None, nightly: bool):  # noqa: A002 - pytest's own name for it
    """One set of parameters; with `nightly`, `make test` leaves it out."""
    return pytest.param(*values, id=id, marks=(pytest.mark.nightly,) if nightly else ())


def examples(quick: int, nightly: int) -> int:
    """How many examples of a property are drawn; `KEEPSTEP_EXAMPLES` sets another number."""
    return int(os.environ.get("KEEPSTEP_EXAMPLES", nightly if os.environ.get("KEEPSTEP_NIGHTLY") else quick))


def cases(values: Iterable, quick: Iterable) -> list:
    """Every value as a case of its own; those that are not in `quick` are run nightly only."""
    assert quick, "make test needs one of the cases"
    for value in quick:
        assert value in values, f"there is no case {value!r}"
    return [case(value, id=str(value), nightly=value not in quick) for value in values]
