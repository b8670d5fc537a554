"""Tests of the HTTP door run in the world of the engine's tests: live and in replay, in memory and on SQLite."""

from tests.engine.conftest import (  # noqa: F401 - pytest finds fixtures and hooks by their names
    _known_workflows_are_forgotten,
    effects,
    logged,
    pytest_configure,
    pytest_generate_tests,
    pytest_pyfunc_call,
    world,
)
