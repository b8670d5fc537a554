"""When: pure decisions, returned as values; a policy never sleeps, never logs and never looks at a clock."""

from . import when
from .budget import Budget
from .classify import Classifier, ErrorClass, Rule, by_type, class_of_status, classify
from .durability import Durability
from .quorum import All, Any, Quorum, Verdict, WaitPolicy, coverage, degraded
from .recovery import Recover, RecoverAlone, RecoveryLimit, SetAside
from .retention import Retain
from .retry import Again, Backoff, ClassRetry, Decision, GiveUp, Retry
from .timeout import Timeout

__all__ = [
    "Again",
    "All",
    "Any",
    "Backoff",
    "Budget",
    "ClassRetry",
    "Classifier",
    "Decision",
    "Durability",
    "ErrorClass",
    "GiveUp",
    "Quorum",
    "Recover",
    "RecoverAlone",
    "RecoveryLimit",
    "Retain",
    "Retry",
    "Rule",
    "SetAside",
    "Timeout",
    "Verdict",
    "WaitPolicy",
    "by_type",
    "class_of_status",
    "classify",
    "coverage",
    "degraded",
    "when",
]
