"""Definitions as text: what two versions of one are told apart by, and what a person reads of their difference."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import Any

from ..policies import Retry, Timeout
from .definition import Step


def policies_of(step: Step[..., Any]) -> str:
    """The policies of a step that are not the usual ones, as they could be written in its decorator."""
    told = []
    if step.retry != Retry.none():
        told.append(f"retry={_text(step.retry)}")
    if step.timeout != Timeout():
        told.append(f"timeout={_text(step.timeout)}")
    if step.at_most_once:
        told.append("at_most_once=True")
    if step.transactional:
        told.append("transactional=True")
    if step.ignore:
        told.append(f"ignore={', '.join(sorted(step.ignore))}")
    if step.written:
        told.append(step.written)
    return " ".join(told)


def short_hash(text: str) -> str:
    """A few digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(policy: Any) -> str:
    """A policy with what is not its default; a class by its name, since no text may hold an address in memory."""
    given = [(field.name, getattr(policy, field.name)) for field in fields(policy)]
    told = [
        f"{name}={_value(value)}"
        for (name, value), field in zip(given, fields(policy), strict=True)
        if value != field.default
    ]
    return f"{type(policy).__name__}({', '.join(told)})"


def _value(value: Any) -> str:
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    return repr(value)
