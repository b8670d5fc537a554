"""A world for engine tests: a store that outlives its engines, engines that crash, and a record of what really ran.

Every test that asks for `world` runs in memory and on SQLite, some on PostgreSQL and some on files too, and in two
modes: `live`, and `replay`, where the engine forgets a run after every new outcome and goes on from its history. What
passes live and fails in replay is a bug in replay. A replay needs of a store only that it keeps records in order, so
`make test` replays on SQLite only where runs meet, wait, crash and are steered.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections import Counter
from functools import partial

import pytest
import uvloop

from keepstep.workflows.definition import KNOWN
from tests.engine.world import ALL_ENCRYPTED, World
from tests.nightly import case
from tests.postgres import empty_store

#: Set it to run every test that asks for `world` on PostgreSQL too, in both modes: that takes minutes.
EVERYWHERE = bool(os.environ.get("KEEPSTEP_EVERYWHERE"))
#: Tests that run on files, too: those in which runs meet each other, wait, crash and are steered.
ON_FILES = {
    *("test_at_most_once", "test_children", "test_control", "test_parking", "test_signals", "test_starting"),
    *("test_rewind", "test_fork", "test_series", "test_saved_progress", "test_resume", "test_recovery"),
}
#: Loops on which what is delivered in order is tested beside asyncio's own.
OTHER_LOOPS = ["uvloop", *(["eager"] if sys.version_info >= (3, 12) else [])]
#: Seconds after which a test has lost a wake-up; most take a tenth of a second, and an overloaded machine a few.
PATIENCE_SECONDS = 120.0


def pytest_configure(config):
    config.addinivalue_line("markers", "live_only: says nothing under replay, because it looks at memory itself")
    config.addinivalue_line("markers", "plaintext: is about values that are not encrypted")
    config.addinivalue_line("markers", "one_store: the store makes no difference, so memory will do")
    config.addinivalue_line("markers", "every_loop: runs in memory on uvloop and with eager tasks, too")
    config.addinivalue_line("markers", "on_postgres: runs on PostgreSQL too, live")
    config.addinivalue_line("markers", "quick_store: counts on a store that is opened, read and written at once")


def pytest_generate_tests(metafunc):
    if "world" in metafunc.fixturenames:
        stores = ["memory"] if metafunc.definition.get_closest_marker("one_store") else ["memory", "sqlite"]
        modes = ["live"] if metafunc.definition.get_closest_marker("live_only") else ["live", "replay"]
        cases = [(store, mode) for store in stores for mode in modes]
        marked = metafunc.definition.get_closest_marker
        if len(stores) > 1 and (EVERYWHERE or marked("on_postgres")) and not marked("quick_store"):
            cases += [("postgres", mode) for mode in modes if mode == "live" or EVERYWHERE]
        is_shared = metafunc.module.__name__.rpartition(".")[2] in ON_FILES
        if "sqlite" in stores and is_shared:
            cases += [("files", mode) for mode in modes if mode == "live" or EVERYWHERE]
        if marked("every_loop"):
            cases += [("memory", mode, loop) for mode in modes for loop in OTHER_LOOPS]
        nightly = set() if is_shared else {("sqlite", "replay")}
        given = [case(one, id="-".join(one), nightly=one in nightly) for one in cases]
        metafunc.parametrize("world", given, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run an async test to its end on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def test():
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await pyfuncitem.obj(**wanted)
        finally:
            if "world" in pyfuncitem.funcargs:
                await pyfuncitem.funcargs["world"].end()

    given = pyfuncitem.funcargs.get("world")
    with asyncio.Runner(loop_factory=partial(_new_loop, getattr(given, "loop_kind", ""))) as runner:
        runner.run(test())
    return True


def _new_loop(kind):
    loop = uvloop.new_event_loop() if kind == "uvloop" else asyncio.new_event_loop()
    if kind == "eager":
        loop.set_task_factory(asyncio.eager_task_factory)
    return loop


@pytest.fixture(autouse=True)
def _known_workflows_are_forgotten():
    before = dict(KNOWN)
    yield
    KNOWN.clear()
    KNOWN.update(before)


class Effects(list):
    """What bodies really did, in order: it lies outside every store, so it is the judge."""

    def count_of(self):
        return Counter(self)


@pytest.fixture
def effects():
    return Effects()


@pytest.fixture
def world(request, tmp_path):
    kind, mode, loop_kind = (*request.param, "")[:3]
    encrypted = ALL_ENCRYPTED and not request.node.get_closest_marker("plaintext")
    if kind != "postgres":
        made = World(kind, mode, tmp_path / "runs.db", encrypted=encrypted)
        made.loop_kind = loop_kind
        yield made
        assert made.unlisted_data() == [], "list the key in keepstep.records.data"
        return
    with empty_store() as url:
        yield World(kind, mode, url, encrypted=encrypted)


@pytest.fixture
def logged(caplog):
    """What Keepstep logged, as lines."""
    caplog.set_level(logging.INFO, logger="keepstep")
    return lambda: [record.getMessage() for record in caplog.records]
