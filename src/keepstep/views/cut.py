"""Values that are shown to people: cut to a size, and without secrets that were stored before a pattern found them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

#: Bytes of a value as JSON up to which it is shown whole.
MOST_BYTES = 20_000
#: Characters up to which the texts of an answer are searched on the event loop: that takes less than a millisecond.
MOST_ON_LOOP = 10_000


def cut(value: Any, most: int = MOST_BYTES) -> tuple[Any, int]:
    """Return a value, and how many bytes of its JSON text are missing; a large one is the beginning of its text."""
    data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    if len(data) <= most:
        return value, 0
    return data[:most].decode(errors="ignore"), len(data) - most


def cut_fields(data: dict[str, Any], names: Iterable[str], most: int = MOST_BYTES) -> dict[str, Any]:
    """Cut some fields of an answer; `missing` tells the bytes that each of them lacks."""
    missing = {}
    for name in names:
        if name in data:
            data[name], lacks = cut(data[name], most)
            if lacks:
                missing[name] = lacks
    if missing:
        data["missing"] = missing
    return data


def clean(data: Any, redact: Callable[[str], str]) -> Any:
    """Return plain data without secrets. Each text is searched alone: its JSON text has other characters."""
    texts: set[str] = set()
    _gather(data, texts)
    blotted = {text: shown for text in texts if (shown := redact(text)) != text}
    return _replaced(data, blotted) if blotted else data


async def cleaned(host: Any, data: Any) -> Any:
    """Return plain data as `clean` does. Much text is searched beside the loop, so that other requests go on."""
    texts: set[str] = set()
    _gather(data, texts)
    if sum(map(len, texts)) <= MOST_ON_LOOP:
        return clean(data, host.redaction.redact)
    return await host.off_loop(clean, data, host.redaction.redact)


def _gather(data: Any, texts: set[str]) -> None:
    if isinstance(data, str):
        texts.add(data)
    elif isinstance(data, list | tuple):
        for item in data:
            _gather(item, texts)
    elif isinstance(data, dict):
        for key, item in data.items():
            _gather(key, texts)
            _gather(item, texts)


def _replaced(data: Any, blotted: dict[str, str]) -> Any:
    if isinstance(data, str):
        return blotted.get(data, data)
    if isinstance(data, list | tuple):
        return [_replaced(item, blotted) for item in data]
    if isinstance(data, dict):
        return {_replaced(key, blotted): _replaced(item, blotted) for key, item in data.items()}
    return data
