"""For pytest, which finds it by its entry point: the fixtures, and options for crash tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from .fixtures import keepstep_world  # noqa: F401 - a fixture

if TYPE_CHECKING:
    from .report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of crash tests, for the fixture and for `@crashproof`."""
    group = parser.getgroup("keepstep", "crash tests of workflows")
    group.addoption("--crashtest-at-most", type=int, metavar="N", help="crash each workflow at most so many times")
    group.addoption("--crashtest-html", metavar="FOLDER", help="write the report of each crash test as a page")


def pytest_configure(config: pytest.Config) -> None:
    """Have the options apply where a test does not say otherwise."""
    at_most, html = config.getoption("--crashtest-at-most"), config.getoption("--crashtest-html")
    if at_most is not None or html is not None:
        from .crashtests import DEFAULTS  # noqa: PLC0415 - pytest loads this file in every session

        if at_most is not None and at_most < 1:
            raise pytest.UsageError("--crashtest-at-most must be at least 1")
        DEFAULTS.update(at_most=at_most, html=html)


@pytest.fixture
def crashtest() -> Callable[..., Report]:
    """`keepstep.testing.crashtest`: run a workflow, kill it everywhere, recover it; gives the report."""
    from .crashtests import crashtest as test  # noqa: PLC0415 - as above

    return test
