"""For pytest, which finds it by its entry point: the fixture `crashtest`, and options for crash tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of crash tests, for the fixture and for `@crashproof`."""
    group = parser.getgroup("keepstep", "crash tests of workflows")
    group.addoption("--crashtest-at-most", type=int, metavar="N", help="crash each workflow at most so many times")
    group.addoption("--crashtest-html", metavar="FOLDER", help="write the report of each crash test as a page")


@pytest.fixture
def crashtest() -> Callable[..., Report]:
    """`keepstep.testing.crashtest`: run a workflow, kill it everywhere, recover it; gives the report."""
    from .crashtests import crashtest as test  # noqa: PLC0415 - pytest loads this file in every session

    return test


@pytest.fixture(autouse=True, scope="session")
def _crashtest_options(request: pytest.FixtureRequest) -> Iterator[None]:
    given: dict[str, Any] = {
        "at_most": request.config.getoption("--crashtest-at-most"),
        "html": request.config.getoption("--crashtest-html"),
    }
    if not any(given.values()):
        yield
        return
    from .crashtests import DEFAULTS  # noqa: PLC0415 - as above

    before = dict(DEFAULTS)
    DEFAULTS.update(given)
    yield
    DEFAULTS.update(before)
