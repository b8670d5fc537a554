"""Parts of the pages about the fleet: acts, limits as rows, and changes as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...views import wording


def act(label: str, url: str, *, role: str = "act", **rest: Any) -> dict[str, Any]:
    """Return the description of an act's button, as `ui.act` takes it; `url` begins after `/api/v1`."""
    return {"label": label, "url": f"/api/v1{url}", "role": role, "danger": False, "main": False, **rest}


def limits_rows(names: Sequence[str], now: Any, declared: Any) -> list[tuple[str, str, str]]:
    """Return the limits of a gate: the name, what holds now, and what code declares."""
    return [
        (name, _limit(getattr(now, name)), "–" if declared is None else _limit(getattr(declared, name)))
        for name in names
    ]


def _limit(value: Any) -> str:
    return "no limit" if value is None else str(value)


def with_words(log: list[dict[str, Any]], limits: Any) -> list[dict[str, Any]]:
    """Return the changes of a gate, each with its limits in words."""
    return [{**one, "limits_text": "" if one["limits"] is None else str(limits.of(one["limits"]))} for one in log]


def gate_words(info: Any) -> dict[str, Any]:
    """Return what a page tells of a gate in words: its limits, and who has set them."""
    return {"text": str(info.limits), "by": wording.changed_by(info)}
