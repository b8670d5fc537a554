"""The result of each step in a run, and the sign and colour that every format shows for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The result of a step in a run."""

    COMPLETED = "completed"
    FAILED = "failed"
    RUNNING = "running"
    WAITING = "waiting"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    NOT_REACHED = "not reached"


@dataclass(frozen=True, slots=True)
class Mark:
    """The result of one step, and how often a run reached it."""

    state: State
    visits: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """The look of a state. Each has its own sign, so colours need not be distinguished."""

    sign: str
    plain_sign: str
    ansi: int
    fill: str
    line: str
    dashed: bool = False


LOOKS = {
    State.COMPLETED: Look("✓", "+", 32, "#dcf5e3", "#1a7f37"),
    State.FAILED: Look("✗", "x", 31, "#ffe3e0", "#cf222e"),
    State.RUNNING: Look("●", "*", 36, "#dbeeff", "#0969da"),
    State.WAITING: Look("…", "~", 34, "#ece4fb", "#6e40c9"),
    State.SKIPPED: Look("↷", "/", 33, "#f4f4f4", "#8a6d00", dashed=True),
    State.CANCELLED: Look("−", "-", 33, "#fff3d1", "#9a6700"),
    State.TIMED_OUT: Look("◷", "t", 33, "#fff3d1", "#9a6700"),
    State.NOT_REACHED: Look("·", ".", 90, "#ffffff", "#8c959f", dashed=True),
}

UNMARKED = Mark(State.NOT_REACHED)


def mark_of(name: str, marks: Mapping[str, Mark]) -> Mark:
    """Return the mark of a step; a step without one was not reached."""
    return marks.get(name, UNMARKED)


def visits_of(mark: Mark) -> str:
    """Return how often a step was reached, if more than once."""
    return f"×{mark.visits}" if mark.visits > 1 else ""


def counted(names: list[str], marks: Mapping[str, Mark]) -> dict[State, list[str]]:
    """Return the steps by state, in the order of State, without empty states."""
    found: dict[State, list[str]] = {state: [] for state in State}
    for name in names:
        found[mark_of(name, marks).state].append(name)
    return {state: steps for state, steps in found.items() if steps}
