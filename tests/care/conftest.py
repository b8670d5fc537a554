"""Every test of care that asks for a store is run on each of them."""

from __future__ import annotations

import pytest

from tests.care.stored import STORES, filled


@pytest.fixture(params=STORES)
def empty(request, tmp_path):
    """A store with nothing in it."""
    store = STORES[request.param](tmp_path)
    yield store
    store.close()


@pytest.fixture
def store(empty):
    """A store with runs of every sort."""
    return filled(empty)
