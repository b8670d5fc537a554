"""Fixtures for pytest: a world in virtual time for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .worlds import World


@pytest.fixture
def keepstep_world() -> Iterator[World]:
    """`keepstep.testing.world()`: an engine in virtual time, on a store in memory, gone with the test."""
    from .worlds import world  # noqa: PLC0415 - pytest loads this file in every session

    with world() as here:
        yield here
