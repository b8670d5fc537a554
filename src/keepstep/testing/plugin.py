"""For pytest, which finds it by its entry point: the fixtures, and an option for crash tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from .fixtures import keepstep_world  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from .crashtests.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of crash tests, for the fixture and for `@crashproof`."""
    group = parser.getgroup("keepstep", "crash tests of workflows")
    group.addoption("--crashtest-at-most", type=int, metavar="N", help="crash each workflow at most so many times")


def pytest_configure(config: pytest.Config) -> None:
    """Apply the option to tests that do not give their own limit."""
    at_most = config.getoption("--crashtest-at-most")
    if at_most is not None:
        from .crashtests.crashtest import DEFAULTS  # noqa: PLC0415 - pytest loads this file in every session

        if at_most < 1:
            raise pytest.UsageError("--crashtest-at-most must be at least 1")
        DEFAULTS.update(at_most=at_most)


@pytest.fixture
def crashtest() -> Callable[..., Report]:
    """`keepstep.testing.crashtest`: run a workflow, kill it everywhere, recover it; gives the report."""
    from .crashtests.crashtest import crashtest as test  # noqa: PLC0415 - as above

    return test
