"""Policies: pure decisions, returned as values; a policy never sleeps, logs or reads a clock."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .budget import Amount, Budget
from .classify import (
    Classifier,
    ErrorClass,
    Rule,
    by_type,
    checked_rules,
    class_of_status,
    classify,
)
from .durability import Durability
from .queue import Queue
from .rate import Rate
from .recovery import Recover, RecoverAlone, Recovery, RecoveryLimit, SetAside
from .retry import Again, Backoff, ClassRetry, Decision, GiveUp, Retry
from .timeout import Timeout

if _TYPE_CHECKING:
    from . import when
    from .breaker import Breaker
    from .cache import Cache
    from .quorum import All, Any, Quorum, Tolerate, Verdict, WaitPolicy, coverage, degraded
    from .retention import Retain
    from .schedule import Cron, Every, Schedule
    from .service import Service

__all__ = [
    "Again",
    "All",
    "Amount",
    "Any",
    "Backoff",
    "Breaker",
    "Budget",
    "Cache",
    "ClassRetry",
    "Classifier",
    "Cron",
    "Decision",
    "Durability",
    "ErrorClass",
    "Every",
    "GiveUp",
    "Queue",
    "Quorum",
    "Rate",
    "Recover",
    "RecoverAlone",
    "Recovery",
    "RecoveryLimit",
    "Retain",
    "Retry",
    "Rule",
    "Schedule",
    "Service",
    "SetAside",
    "Timeout",
    "Tolerate",
    "Verdict",
    "WaitPolicy",
    "by_type",
    "checked_rules",
    "class_of_status",
    "classify",
    "coverage",
    "degraded",
    "when",
]

#: Modules of names that most programs do not use; each is loaded on first use, so that a store opens fast.
_LATER = {
    "Breaker": "breaker",
    "Cache": "cache",
    "Retain": "retention",
    "Service": "service",
    **dict.fromkeys(("Cron", "Every", "Schedule"), "schedule"),
    **dict.fromkeys(("All", "Any", "Quorum", "Tolerate", "Verdict", "WaitPolicy", "coverage", "degraded"), "quorum"),
}

if not _TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "when":
            return _import_module(f"{__name__}.when")
        if name in _LATER:
            return getattr(_import_module(f"{__name__}.{_LATER[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
