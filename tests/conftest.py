"""The order of the tests, and the PostgreSQL server that those share who need one.

Tests that fork a process for each life come first, while there is little to copy.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from keepstep.values import Secret
from keepstep.workflows.definition import KNOWN
from tests import postgres

settings.register_profile("keepstep", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("keepstep")


@pytest.fixture(autouse=True)
def _what_was_revealed_is_forgotten():
    """A secret that one test reveals must not be looked for in the values of another."""
    before = Secret.revealed
    yield
    Secret.revealed = before


@pytest.fixture
def nothing_known():
    """No workflow is known by name but those that the test itself defines."""
    before = dict(KNOWN)
    KNOWN.clear()
    yield
    KNOWN.clear()
    KNOWN.update(before)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        postgres.begin_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        postgres.end_session()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "tests/testing/" not in item.nodeid)
