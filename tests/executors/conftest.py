"""Tests of executors are coroutines, which run on a loop of their own."""

from __future__ import annotations

import asyncio
import inspect

import pytest

#: Seconds after which a test has lost a moment; most take a second, and an overloaded machine a few.
PATIENCE_SECONDS = 120.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    given = {name: pyfuncitem.funcargs[name] for name in names}

    async def within() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await pyfuncitem.function(**given)

    asyncio.run(within())
    return True
