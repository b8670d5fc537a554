"""Functions of workflow files whose bodies run in other processes."""

from __future__ import annotations

import os
from typing import Any


def double(number: int) -> int:
    return 2 * number


def whereabouts(state: dict[str, Any]) -> int:
    assert state["n"] == 8
    return os.getpid()


def pid_here(state: dict[str, Any]) -> int:
    return os.getpid()
