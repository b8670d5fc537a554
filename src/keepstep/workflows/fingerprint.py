"""Definitions as text, for comparing two versions and for showing their difference."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

from ..policies import Retry, Timeout
from .definition import Step


def policies_of(step: Step[..., Any]) -> str:
    """Return a step's policies that differ from the defaults, as text."""
    parts = []
    if step.retry != Retry.none():
        parts.append(f"retry={_text(step.retry)}")
    if step.timeout != Timeout():
        parts.append(f"timeout={_text(step.timeout)}")
    if step.at_most_once:
        parts.append("at_most_once=True")
    if step.transactional:
        parts.append("transactional=True")
    if step.ignore:
        parts.append(f"ignore={', '.join(sorted(step.ignore))}")
    if step.written:
        parts.append(step.written)
    return " ".join(parts)


def short_hash(text: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(policy: Any) -> str:
    """Return a policy with its non-default fields. Show a class by name, since no text may hold an address."""
    given = [(field.name, getattr(policy, field.name)) for field in fields(policy)]
    parts = [
        f"{name}={_value(value)}"
        for (name, value), field in zip(given, fields(policy), strict=True)
        if value != field.default
    ]
    return f"{type(policy).__name__}({', '.join(parts)})"


def _value(value: Any) -> str:
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    return repr(value)
