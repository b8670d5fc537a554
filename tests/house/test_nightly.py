"""What `make test` leaves to `make nightly` weakens no promise."""

import re
from pathlib import Path

import pytest

from tests.nightly import cases

ROOT = Path(__file__).parents[2]
PROMISES = (ROOT / "docs" / "explanation" / "guarantees.md").read_text(encoding="utf-8")
NAMED = sorted({ROOT / path for path in re.findall(r"`(tests/[\w/]+\.py)`", PROMISES)})


def test_no_test_of_a_promise_is_wholly_nightly():
    """Single cases may be, by `tests.nightly`; a mark on a function or a module takes all of its cases."""
    assert len(NAMED) > 30
    assert [path for path in NAMED if "mark.nightly" in path.read_text(encoding="utf-8")] == []


def test_a_choice_of_cases_keeps_one_of_them():
    with pytest.raises(AssertionError, match="make test needs one"):
        cases(["memory", "sqlite"], quick=[])
    with pytest.raises(AssertionError, match="no case 'disk'"):
        cases(["memory", "sqlite"], quick=["disk"])
    kept, left = cases(["memory", "sqlite"], quick=["memory"])
    assert (kept.id, kept.marks) == ("memory", ())
    assert (left.id, [mark.name for mark in left.marks]) == ("sqlite", ["nightly"])
