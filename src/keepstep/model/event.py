"""An event: something that happened, told to observers after it is durable."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to a run. `name` is like `step.completed`; `seq` is the checkpoint that holds it, if one does."""

    name: str
    run: str
    at: datetime
    workflow: str = ""
    seq: int = 0
    step: str = ""
    attempt: int = 0
    worker: str = ""
    data: dict[str, Any] = field(default_factory=dict)
