"""The checks that every policy makes of its numbers when it is built."""

from __future__ import annotations

import math

from ..errors import DefinitionError


def check_number(value: object, what: str, at_least: float, at_most: float = math.inf) -> float:
    """The number as a float, or a clear error: it must be finite and within its bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DefinitionError(f"{what} must be a number, not {value!r}")
    if not math.isfinite(value) or not at_least <= value <= at_most:
        bounds = f"at least {at_least:g}" if at_most == math.inf else f"from {at_least:g} to {at_most:g}"
        raise DefinitionError(f"{what} must be finite and {bounds}, not {value!r}")
    return float(value)


def check_count(value: object, what: str, at_least: int = 1) -> int:
    """The whole number itself, or a clear error."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DefinitionError(f"{what} must be a whole number, not {value!r}")
    if value < at_least:
        raise DefinitionError(f"{what} must be at least {at_least}, not {value}")
    return value
