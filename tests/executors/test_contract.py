"""The contract of executors, on those that need nothing but this machine."""

from __future__ import annotations

from typing import ClassVar

from keepstep import executors
from keepstep.testing import executor_contract


class TestHere(executor_contract.ExecutorContract):
    lacks: ClassVar = {
        "kills": "a thread cannot be stopped",
        "crashes": "it would end this process",
        "secrets": "the worker's own process refuses them by its own rules",
        "own process": "it is the worker's",
    }


class TestProcesses(executor_contract.ExecutorContract):
    executor = executors.Process(workers=2, grace_seconds=0.2)
