"""A problem of a definition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """A defect of a definition: where it is, what it is, and how to fix it."""

    severity: Literal["error", "warning"]
    where: str
    what: str
    how: str = ""
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part) if self.file else ""
        place = f"{place}: " if place else ""
        advice = f"; {self.how}" if self.how else ""
        return f"{place}{self.severity}: {self.where}: {self.what}{advice}"
