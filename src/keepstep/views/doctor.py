"""The doctor for pages: the last examination with its age, and the command lines that its advice names."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ..care.doctor import Finding, Report, examine

if TYPE_CHECKING:
    from ..engine.engine import Engine

#: Seconds for which a reader waits for an examination that is under way.
WAIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Examined:
    """The newest report, when it was made and how long that took; `began_at` if another examination is under way."""

    report: Report | None
    at: datetime | None
    seconds: float
    began_at: datetime | None


class _Kept:
    """The examinations of one engine: the last one, and the one under way."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self.at: datetime | None = None
        self.seconds = 0.0
        self.began_at: datetime | None = None
        self.task: asyncio.Task[None] | None = None

    async def examine(self, engine: Engine) -> None:
        began = time.monotonic()
        try:
            self.report = await examine(engine)
            self.at, self.seconds = datetime.now(UTC), time.monotonic() - began
        finally:
            self.task = self.began_at = None


_KEPT: WeakKeyDictionary[Engine, _Kept] = WeakKeyDictionary()


async def examined(engine: Engine, *, again: bool = False) -> Examined:
    """Return the newest examination of a store; the first call, and one with `again`, makes one.

    Callers share one examination. One that takes longer than `WAIT_SECONDS` goes on after the answer.
    """
    kept = _KEPT.setdefault(engine, _Kept())
    if kept.task is None and (again or kept.report is None):
        kept.began_at = datetime.now(UTC)
        kept.task = asyncio.get_running_loop().create_task(kept.examine(engine))
    if kept.task is not None and (again or kept.report is None):
        task = kept.task
        await asyncio.wait({task}, timeout=WAIT_SECONDS)
        if task.done():
            task.result()
    return Examined(kept.report, kept.at, kept.seconds, kept.began_at)


#: Words after a command that take a name.
_ACTS = ("show", "set", "reset", "open", "close", "remove", "resume", "pause", "trigger", "retry")
_COMMAND = re.compile(
    r"keepstep [a-z]+"
    rf"(?: (?:list|(?:{'|'.join(_ACTS)}) (?:'[^']*'|[\w.:@-]+)))?"
    r"(?: --[a-z-]+)*(?: (?:'[^']*'|[^\s,;()]+))?(?: --[a-z-]+(?: (?:'[^']*'|[^\s,;()]+))?)*"
)


def commands_in(finding: Finding) -> list[str]:
    """Return the command lines that the advice of a finding names, without the words around them."""
    things = {quote(run) for run in finding.runs} | {"FILE.py", "list"}
    found: list[str] = []
    for match in _COMMAND.finditer(finding.advice):
        words = match[0].split(" ")
        if words[1] == "resolve":  # incomplete without the verdict, which only a person knows; the advice shows it
            continue
        end = 2
        while end < len(words) and _belongs(words[end], words[end - 1], things, is_first=end == 2):
            end += 1
        line = " ".join(words[:end])
        if line not in found and (end > 2 or line == "keepstep repair"):
            found.append(line)
    return found


def _belongs(word: str, before: str, things: set[str], *, is_first: bool) -> bool:
    """Whether a word is part of a command: an option, an act with its name, a run of the finding or a file."""
    is_named = before in _ACTS or before == "--queue"
    return word.startswith("--") or word in things or is_named or (is_first and word in _ACTS)
