"""Validation of arguments: each function returns the value or raises `DefinitionError`."""

from __future__ import annotations

import math
import re
import sys
from datetime import timedelta
from typing import Any

from .errors import DefinitionError
from .model.ids import MAX_ID, problem_of
from .model.keepers import KEEPER_ID, is_keeper

#: Largest limit that is a whole number. Stores keep counts in 32 bits.
MOST = 2**31 - 1
#: Largest amount of one `ks.spend` or `cost=`, so that sums stay finite.
MOST_SPENT = 1e15
_NAME = re.compile(r"[^\W\d][\w .:\-]*\Z")


def check_id(value: str, what: str = "run id") -> str:
    """Return the id; refuse one that is empty, too long, or looks like a path."""
    if not isinstance(value, str):
        raise DefinitionError(f"a {what} must be a str, not {type(value).__name__}")
    problem = problem_of(value)
    if problem:
        raise DefinitionError(f"{what} {value[:60]!r} is refused: it {problem}")
    return value


def check_run_id(value: str) -> str:
    """Return the id that a user gives to a run; refuse one that belongs to Keepstep's own runs."""
    check_id(value)
    if is_keeper(value):
        raise DefinitionError(f"run id {value[:60]!r} is refused: ids that begin with {KEEPER_ID!r} are Keepstep's own")
    return value


def check_name(value: str, what: str) -> str:
    """Return the name of a workflow, step or signal; refuse an invalid one."""
    if not isinstance(value, str) or not _NAME.match(value) or len(value.encode()) > MAX_ID:
        raise DefinitionError(
            f"{what} name {shown(value)} is refused: it must begin with a letter and hold only letters, digits, "
            f"spaces and _ . : - (at most {MAX_ID} bytes)"
        )
    return value


def check_key(value: str, what: str) -> str:
    """Return a key that a caller gives to a call or a branch, with the characters escaped that separate keys."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value.encode()) > MAX_ID:
        raise DefinitionError(f"{what} {shown(value)} is refused: it must be printable text of 1 to {MAX_ID} bytes")
    return value.replace("%", "%25").replace("/", "%2F").replace("#", "%23").replace("@", "%40")


def check_text(value: str, what: str) -> str:
    """Return the text; refuse lone surrogates, which stand for command-line bytes that could not be decoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DefinitionError(f"{what} {shown(value)} is refused: it is not Unicode text") from None
    return value


def shown(value: object) -> str:
    """Return a value as a message shows it: in full, or its beginning."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return "an integer of thousands of digits"
    return text if len(text) <= MAX_ID else f"{text[:MAX_ID]}..."


def check_number(value: object, what: str, at_least: float, at_most: float = math.inf) -> float:
    """Return the number as a float; refuse one that is not finite or is out of bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DefinitionError(f"{what} must be a number, not {shown(value)}")
    if not at_least <= value <= min(at_most, sys.float_info.max):
        bounds = f"at least {at_least:g}" if at_most == math.inf else f"from {at_least:g} to {at_most:g}"
        raise DefinitionError(f"{what} must be finite and {bounds}, not {shown(value)}")
    return float(value)


def seconds_of(value: Any) -> Any:
    """Return a timedelta as seconds; anything else as it is, to be checked."""
    return value.total_seconds() if isinstance(value, timedelta) else value


def check_seconds(value: object, what: str, at_least: float) -> float:
    """Return a number of seconds, or a timedelta, as seconds; refuse one that is not finite or too small."""
    return check_number(seconds_of(value), what, at_least)


def check_count(value: object, what: str, at_least: int = 1) -> int:
    """Return the whole number; refuse one below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise DefinitionError(f"{what} must be a whole number, not {shown(value)}")
    if value < at_least:
        raise DefinitionError(f"{what} must be at least {at_least}, not {shown(value)}")
    return value


def check_limit(value: object, what: str, at_least: int = 0) -> int:
    """Return a limit that is a whole number; refuse one that a store cannot keep."""
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= MOST:
        raise DefinitionError(f"{what} must be a whole number from {at_least} to {MOST}, got {shown(value)}")
    return value


def check_executor(value: Any, what: str) -> Any:
    """Return what `executor=` takes: a name, or an object that opens an executor."""
    if isinstance(value, str):
        return check_name(value, "executor")
    if isinstance(value, type) or not callable(getattr(value, "open", None)):
        made = f"{value.__name__}(...)" if isinstance(value, type) else "a ks.executors.Process(...)"
        raise DefinitionError(f"{what} takes a name such as 'process', or {made}, not {value!r}")
    try:
        hash(value)
    except TypeError:
        raise DefinitionError(f"{what}: {value!r} must be hashable, so that steps can share it") from None
    return value
