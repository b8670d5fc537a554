"""A record of effects outside every store, which shows whether finished work was repeated."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...model import Checkpoint, Kind
from ...ports import CURRENT

#: Kinds of effects: a step's body has begun, or a store has acknowledged a step's success as durable.
BODY = "body"
DURABLE = "durable"


@dataclass(frozen=True, slots=True)
class Effect:
    """One line of the file, in the order of writing, from any process."""

    what: str
    run: str = ""
    step: str = ""
    attempt: int = 0
    worker: str = ""
    pid: int = 0
    at: float = 0.0
    data: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Appends effects to a file that many processes share. A line is one write, so a kill leaves it whole or absent."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def note(self, what: str, **fields: Any) -> None:
        """Append one line."""
        line = json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **fields}, separators=(",", ":"))
        os.write(self._fd, line.encode() + b"\n")

    def body(self, **data: Any) -> int:
        """Record, inside a step's body, that it has begun; return the number of this attempt."""
        scope = CURRENT.get()
        if scope is None or not scope.in_step:
            raise AssertionError("a body is recorded inside a step")
        run = scope.run
        self.note(BODY, run=run.id, step=scope.key, attempt=scope.number, worker=run.worker, data=data)
        return int(scope.number)

    def durable(self, run: str, step: str) -> None:
        """Record that a store has acknowledged the success of a step as durable."""
        self.note(DURABLE, run=run, step=step)

    def effects(self) -> list[Effect]:
        """Return all effects so far, of all processes."""
        lines = self.path.read_bytes().split(b"\n")
        return [Effect(**json.loads(line)) for line in lines[:-1]]

    def bodies(self, run: str | None = None, step: str | None = None) -> list[Effect]:
        """Return the bodies that have begun, optionally of one run or step; a step may be named without its number."""
        return [
            effect
            for effect in self.effects()
            if effect.what == BODY
            and run in (None, effect.run)
            and (step is None or step in (effect.step, effect.step.rpartition("/")[2].partition("#")[0]))
        ]

    def counts(self) -> dict[tuple[str, str, int], int]:
        """Return how often the body of each attempt of each step has begun."""
        counts: dict[tuple[str, str, int], int] = {}
        for effect in self.bodies():
            key = (effect.run, effect.step, effect.attempt)
            counts[key] = counts.get(key, 0) + 1
        return counts


def repeated(effects: Iterable[Effect]) -> list[Effect]:
    """Return bodies that began after a store had acknowledged the success of their step: there must be none."""
    durable: set[tuple[str, str]] = set()
    found = []
    for effect in effects:
        place = (effect.run, effect.step)
        if effect.what == DURABLE:
            durable.add(place)
        elif effect.what == BODY and place in durable:
            found.append(effect)
    return found


def repeated_in_store(effects: Iterable[Effect], histories: Mapping[str, Iterable[Checkpoint]]) -> list[Effect]:
    """Return bodies that began after the one whose success a store holds, by another worker: there must be none.

    Without recorded acknowledgements, the store's histories decide: the worker named by a step's checkpoint must be the
    last that began the body of that step.
    """
    winners = {
        (run, one.step): one.worker
        for run, history in histories.items()
        for one in history
        if one.kind is Kind.STEP_COMPLETED
    }
    last: dict[tuple[str, str], int] = {}
    bodies = [effect for effect in effects if effect.what == BODY]
    for place, effect in enumerate(bodies):
        if winners.get((effect.run, effect.step)) == effect.worker:
            last[effect.run, effect.step] = place
    return [effect for place, effect in enumerate(bodies) if place > last.get((effect.run, effect.step), len(bodies))]
