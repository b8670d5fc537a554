"""The order of the tests, where their files are, and the PostgreSQL server that those share who need one.

Tests that fork a process for each life come first, while there is little to copy.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

from keepstep.engine.events import Events
from keepstep.policies import queue as queues
from keepstep.policies import service as services
from keepstep.values import Secret
from keepstep.workflows.definition import KNOWN, SERVICES
from tests import memory_files, postgres, run_states

# How long an example takes says nothing on a busy machine. `make test` draws the same examples each time, so that its
# result depends on the code alone; `make nightly` draws new ones.
settings.register_profile("keepstep", deadline=None, derandomize=not os.environ.get("KEEPSTEP_NIGHTLY"))
settings.load_profile("keepstep")
run_states.watch()
Events.checked = True  # an event that no list has is refused


@pytest.fixture(autouse=True)
def _what_was_revealed_is_forgotten():
    """A secret that one test reveals must not be looked for in the values of another."""
    before = Secret.revealed
    yield
    Secret.revealed = before


@pytest.fixture(autouse=True)
def _every_state_of_a_run_is_in_the_table():
    run_states.WRONG.clear()
    yield
    assert run_states.WRONG == []


@pytest.fixture(autouse=True)
def nothing_declared():
    """Gates and schedules that a test declares hold for that test: every engine of this process would serve them."""
    names, before, known = set(SERVICES), [dict(queues.DECLARED), dict(services.DECLARED)], set(KNOWN)
    yield
    for declared, earlier in zip((queues.DECLARED, services.DECLARED), before, strict=True):
        declared.clear()
        declared.update(earlier)
    SERVICES.intersection_update(names)
    for name in [name for name, one in KNOWN.items() if one.schedule is not None and name not in known]:
        del KNOWN[name]


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
        memory_files.begin_session()
        postgres.begin_session()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        postgres.end_session()
        memory_files.end_session()


def pytest_collection_finish() -> None:
    """The collector need not look through ten thousand tests again and again, whenever it runs."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "tests/testing/" not in item.nodeid)
