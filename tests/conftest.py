"""The order of the tests: those that fork a process for each life come first, while there is little to copy."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "tests/testing/" not in item.nodeid)
